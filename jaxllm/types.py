"""Values that cross package borders. Imports no accelerator library."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from jaxllm.sampling.params import SamplingParams

if TYPE_CHECKING:
    from jaxllm.sampling.token_masks import TokenMask

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_DECODE_STEPS = 8
"""Decode iterations that are computed in one device program, unless the user says how many."""
MULTI_STEP_SEQS = 16
"""Most requests that several decode iterations are computed for in one device program."""
NO_TOKEN, WRONG_DRAFT = -2, -3
"""What stands for a token where none was sampled, and where a draft was not kept."""
MAX_STAGED_BLOCKS = 32
"""Blocks of device memory beside the pool that copies under way may take, in each direction."""
STAGED_ROWS = 512
"""Least rows of a micro-batch. One of fewer than half takes about as long, since it reads as many weights: an
A100 or H100 multiplies 156 or 295 rows of 16 bits while it does (by their data sheets)."""
MAX_PIECE_BLOCKS = 16
"""Most blocks that one program gathers for a copy, or scatters."""


def num_micro_batches(num_rows: int, num_stages: int) -> int:
    """In how many parts a step with prompts goes through stages, so that these work at the same time.

    A power of two, at most twice as many as stages: of M parts through P stages each stage idles for P - 1,
    and more parts have less work for a device at a time. Parts have `STAGED_ROWS` at least.
    """
    count = 1
    while 1 < num_stages >= count and num_rows % (2 * count) == 0 and num_rows >= 2 * count * STAGED_ROWS:
        count *= 2
    return count


def piece_sizes(num_blocks: int) -> list[int]:
    """The pieces that so many blocks are copied in: powers of two, the largest first.

    On their way to the host the last piece goes first. Then all but `MAX_STAGED_BLOCKS` of a long copy have
    left as soon as they can, for what is beyond a multiple of `MAX_PIECE_BLOCKS` is not behind large pieces.
    """
    num_largest, rest = divmod(num_blocks, MAX_PIECE_BLOCKS)
    small = [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]
    return [MAX_PIECE_BLOCKS] * num_largest + small


class BlockName(NamedTuple):
    """Of a full block: a digest of it and all before it, its tokens, int32 one after another, and its place.

    `number` blocks come before it.
    """

    digest: bytes
    tokens: bytes
    number: int = 0


class HostPiece(NamedTuple):
    """Blocks that are one array in host memory: the `number`-th of the `piece_sizes` of the copy `handle`."""

    handle: int
    number: int


class HostBlock(NamedTuple):
    """A block in host memory: the `row`-th of a piece."""

    handle: int
    number: int
    row: int

    @property
    def piece(self) -> HostPiece:
        """The piece it is of."""
        return HostPiece(self.handle, self.number)


def host_blocks_of(handle: int, num_blocks: int) -> list[HostBlock]:
    """Where so many blocks go that are copied to the host together, in their order."""
    sizes = enumerate(piece_sizes(num_blocks))
    return [HostBlock(handle, number, row) for number, size in sizes for row in range(size)]


class RequestStatus(enum.Enum):
    """Where a request stands. A finished request never leaves `FINISHED`."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """Timestamps of one request, in seconds of the engine's clock (`time.monotonic`).

    `first_scheduled_time` is when its first prefill was scheduled, `first_token_time` when
    the host saw its first token, `last_token_time` when it saw its latest one, `finished_time` when it ended;
    `None` until then. `time_in_queue` are the seconds until it was first scheduled. `num_preemptions`
    counts how often it lost its blocks, `num_swaps` how many of those times to host memory; a copy given up
    for a prefill counts as none.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_swaps: int = 0
    last_token_time: float | None = None

    @property
    def time_in_queue(self) -> float | None:
        """See the class."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


class DecodeClock:
    """Counts decode iterations; the requests that decode together count their tokens by it."""

    __slots__ = ("ticks",)

    def __init__(self) -> None:
        self.ticks = 0


class Request:
    """Host-side state of one request. The scheduler and the engine own it; executors only read.

    Lengths, in tokens:

        prompt_token_ids             output_token_ids      in flight
        |--------------------------|---------------------|--|
        |<------------------- num_tokens ------------------>|
        |<------ num_computed_tokens ----->|

    `num_tokens` counts prompt, committed outputs and tokens whose step has been scheduled but not
    read back yet. `num_computed_tokens` counts tokens whose KV is written or scheduled to be written;
    a preemption that drops it resets it to 0. While the request decodes both grow with a `DecodeClock`,
    so that an iteration costs nothing per request. `block_ids` is the block table, `slot` the row of the
    device-side per-request state, held while the request is running; `is_slot_new` until its first tokens in
    it are scheduled. `host_blocks` are those of a swapped request in host memory, of its first tokens each.
    `num_lost_tokens` is how many tokens' KV preemptions threw away that is not computed again yet, and
    `kept_ranges` are those from `start` to `stop` after the computed ones whose KV is in its blocks already.

    `priority` is vLLM's: lower is more urgent; `deadline` is when it should end, on the engine's clock, or
    None. `predicted_tokens` is how many output tokens are expected, None where nobody predicts, and
    `is_protected` says that it is not preempted while others can be (`SchedulerPolicy.patience`), which
    `num_passed` leads to: how many others took room while it was the first to have arrived of those without,
    and how often it was preempted, since its newest token.

    `block_names` are those of its full blocks as far as its tokens are known and anybody has asked; the first
    `num_named_blocks` of its blocks are called so in the pool. `num_cached_tokens` is how many tokens' KV it
    found when it first started, None until then; `num_host_cached_tokens` of these were in host memory, and
    `num_disk_cached_tokens` in files; `num_findable_tokens` would have been found when it was queued, if the
    policy asks. Blocks of requests of another `cache_salt` are never found.

    `program_arrival_time` is when the first request of its conversation arrived, where somebody follows
    conversations (`jaxllm.sched.holding`), else its own.

    `group_index` is the `arrival_index` of the first of its prompt's samples, its own if it has no others.

    `token_mask` says which tokens it may sample; None allows all.

    `dropped_token_ids` are what was cut from the front of its conversation: its prompt begins after them, and
    its first token's position is how many they are. All else that is said of its tokens is of the others. Its
    `block_names` are those of cut conversations then, but of blocks that it found by their `uncut_names`.
    """

    __slots__ = (
        "_clock",
        "_num_computed_tokens",
        "_num_tokens",
        "arrival_index",
        "arrival_time",
        "block_ids",
        "block_names",
        "cache_salt",
        "deadline",
        "dropped_token_ids",
        "eos_token_ids",
        "finish_reason",
        "group_index",
        "host_blocks",
        "is_protected",
        "is_slot_new",
        "kept_ranges",
        "max_total_tokens",
        "metrics",
        "num_cached_tokens",
        "num_disk_cached_tokens",
        "num_findable_tokens",
        "num_host_cached_tokens",
        "num_lost_tokens",
        "num_named_blocks",
        "num_passed",
        "output_token_ids",
        "predicted_tokens",
        "priority",
        "program_arrival_time",
        "prompt_token_ids",
        "request_id",
        "sampling_params",
        "slot",
        "status",
        "stop_reason",
        "token_mask",
        "uncut_names",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        arrival_time: float,
        arrival_index: int,
        max_total_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
        dropped_token_ids: Sequence[int] = (),
        group_index: int | None = None,
        token_mask: TokenMask | None = None,
    ) -> None:
        """`max_total_tokens` is the length (prompt + output) at which the request ends."""
        self.request_id = request_id
        self.prompt_token_ids = list(prompt_token_ids)
        self.sampling_params = sampling_params
        self.arrival_time = arrival_time
        self.program_arrival_time = arrival_time
        self.arrival_index = arrival_index
        self.group_index = arrival_index if group_index is None else group_index
        self.token_mask = token_mask
        self.max_total_tokens = max_total_tokens
        self.eos_token_ids = eos_token_ids
        self.priority = priority
        self.deadline = deadline
        self.cache_salt = cache_salt
        self.dropped_token_ids = list(dropped_token_ids)
        self.output_token_ids: list[int] = []
        self._clock: DecodeClock | None = None
        self._num_tokens = len(self.prompt_token_ids)
        self._num_computed_tokens = 0
        self.num_lost_tokens = 0
        self.kept_ranges: list[tuple[int, int]] = []
        self.num_passed = 0
        self.block_ids: list[int] = []
        self.block_names: list[BlockName] = []
        self.uncut_names: list[BlockName] = []
        self.num_named_blocks = 0
        self.num_cached_tokens: int | None = None
        self.num_host_cached_tokens = self.num_disk_cached_tokens = self.num_findable_tokens = 0
        self.slot: int | None = None
        self.is_slot_new = False
        self.is_protected = False
        self.host_blocks: list[HostBlock] = []
        self.predicted_tokens: float | None = None
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.metrics = RequestMetrics(arrival_time)

    @property
    def num_tokens(self) -> int:
        """See the class."""
        clock = self._clock
        return self._num_tokens if clock is None else self._num_tokens + clock.ticks

    @num_tokens.setter
    def num_tokens(self, num_tokens: int) -> None:
        assert self._clock is None, "the lengths of a request that decodes follow its clock"
        self._num_tokens = num_tokens

    @property
    def num_computed_tokens(self) -> int:
        """See the class."""
        clock = self._clock
        return self._num_computed_tokens if clock is None else self._num_tokens + clock.ticks - 1

    @num_computed_tokens.setter
    def num_computed_tokens(self, num_tokens: int) -> None:
        assert self._clock is None, "the lengths of a request that decodes follow its clock"
        self._num_computed_tokens = num_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether it gains a token in each decode iteration."""
        return self._clock is not None

    def follow(self, clock: DecodeClock) -> int:
        """Gain a token with each tick from now on; returns the length less the ticks so far."""
        assert self._clock is None
        self._num_tokens -= clock.ticks
        self._clock = clock
        return self._num_tokens

    def leave_clock(self) -> None:
        """Stay as long as it is."""
        num_tokens = self.num_tokens
        self._clock = None
        self._num_tokens, self._num_computed_tokens = num_tokens, num_tokens - 1

    @property
    def num_to_compute(self) -> int:
        """Tokens until the next whose KV is there, or the last one."""
        kept = self.kept_ranges
        return (kept[0][0] if kept else self.num_tokens) - self.num_computed_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def has_started(self) -> bool:
        """Whether an iteration has ever taken it in."""
        return self.metrics.first_scheduled_time is not None

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose value the host knows."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_in_flight(self) -> int:
        """Tokens scheduled on the device whose value the host has not read yet."""
        return self.num_tokens - self.num_known_tokens

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end it when they are sampled."""
        params = self.sampling_params
        return frozenset(params.stop_token_ids or ()) | (
            frozenset() if params.ignore_eos else self.eos_token_ids
        )

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self.status is RequestStatus.FINISHED

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Known token ids at positions `[start, stop)` of prompt followed by outputs."""
        prompt = self.prompt_token_ids
        split = len(prompt)
        if stop <= split:
            return prompt[start:stop]
        return prompt[start:split] + self.output_token_ids[max(start - split, 0) : stop - split]

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, prompt={self.num_prompt_tokens}, "
            f"tokens={self.num_tokens}/{self.max_total_tokens}, blocks={len(self.block_ids)})"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens `[start, start + length)` of a request, to be computed in one step.

    `is_last` marks the chunk that ends at the request's current length: its last row is sampled.
    `is_first` marks the one with which the request takes its slot; the KV of tokens before it, if there are
    any, is in the request's blocks. `num_recomputed` of its tokens repeat what a preemption threw away.

    A verification is a last chunk of the newest token and its `drafts`, which nobody has sampled yet: all of
    its rows are sampled, and what follows the first that differs from its draft means nothing.
    """

    request: Request
    start: int
    length: int
    is_last: bool
    is_first: bool = True
    num_recomputed: int = 0
    drafts: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Swap:
    """A copy of KV blocks between the device and host memory.

    `handle` names this copy among those of its direction, and is never used twice. Each of the device's
    `block_ids` is copied to one of `host_blocks`, which are `host_blocks_of` the handle, or filled from it.
    They belong to `request`, or are free ones that the prefix cache keeps. `names` are what blocks on their
    way out hold, None for those that nobody else can use.
    """

    request: Request | None
    handle: int
    block_ids: tuple[int, ...]
    host_blocks: tuple[HostBlock, ...]
    names: tuple[BlockName | None, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """Blocks to be read from files into host memory, to `host_blocks_of` the handle."""

    handle: int
    names: tuple[BlockName, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One iteration's decision: the tokens that each request computes.

    `decode` holds running requests that feed their newest token (at position `request.num_tokens - 2` once
    scheduled, i.e. the last known or in-flight token) and sample one more; `prefill` holds chunks of prompts.
    Either may be empty. `preempted` lists requests that lost their blocks in this iteration, `num_swapped` of
    them to the host. `discarded` names loads that nobody waits for any more, `dropped` pieces of host memory
    that nobody will read. `ending` are those of its requests that get their last token by length.
    `num_context_tokens` is how many tokens those of `decode` attend to, together, and `num_drafts` how many
    drafts those of `prefill` verify.

    With `lookups` the device drafts by itself, in each of `num_decode_steps` iterations, for each request of
    `decode`: at most the first number of tokens at first and where the drafts before were all right, else the
    second. A request gets one token more than are right, and no more than it is long once scheduled. Then
    `num_drafts` is how many drafts there may be.

    Executors first let go of what is `discarded` and `dropped`; then finish the copies of `joined`, which a
    `load` of an earlier iteration started, into blocks nobody else has touched since; then read the blocks
    of `swap_out`, which others may write in the same iteration; then fill those of `swap_in` and start the
    copies of `load`, which may end whenever they like; then compute.

    With `num_decode_steps` of more than one this is that many decode iterations in a row, with blocks for
    all their tokens. A request that samples one of its `end_token_ids` needs nothing of those after it.
    """

    step_id: int
    decode: tuple[Request, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    preempted: tuple[Request, ...] = ()
    num_swapped: int = 0
    swap_out: tuple[Swap, ...] = ()
    swap_in: tuple[Swap, ...] = ()
    load: tuple[Swap, ...] = ()
    joined: tuple[Swap, ...] = ()
    discarded: tuple[int, ...] = ()
    dropped: tuple[HostPiece, ...] = ()
    ending: tuple[Request, ...] = ()
    num_decode_steps: int = 1
    num_context_tokens: int = 0
    num_drafts: int = 0
    lookups: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.decode and not self.prefill

    @property
    def has_copies(self) -> bool:
        """Whether copies of KV start or end with it."""
        return bool(self.swap_out or self.swap_in or self.load or self.joined)

    @property
    def reads_host(self) -> bool:
        """Whether it ends copies from host memory."""
        return bool(self.swap_in or self.joined)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of all chunks together."""
        return sum([chunk.length for chunk in self.prefill])

    @property
    def sampled(self) -> list[Request]:
        """The requests that get a token, in the order executors report them; of several steps, in each.

        Those that verify drafts are there once more for each.
        """
        last = [chunk for chunk in self.prefill if chunk.is_last]
        if self.num_drafts:
            last = [chunk for chunk in last for _ in range(len(chunk.drafts) + 1)]
        return [*self.decode, *(chunk.request for chunk in last)]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the chosen token's, and the top ones, most likely first."""

    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a step produced, on the host.

    `token_ids[i]` belongs to `SchedulerOutput.sampled[i]`. Of several decode iterations the tokens come one
    iteration after another. Tokens of a request that had ended before mean nothing. With lookups each request
    has as many places in each iteration as its program drafts, and one: `WRONG_DRAFT` and `NO_TOKEN` are no
    tokens. `logprobs[i]` is None
    unless asked for. `prompt_logprobs[request_id]` lists positions `chunk.start + 1 ...` scored by a prefill
    chunk.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None] | None = None
    prompt_logprobs: dict[str, list[TokenLogprobs]] | None = None


class CopyTime(NamedTuple):
    """The duration of a copy of `num_blocks` blocks to the host (`is_out`) or back, without waiting in line.

    It took between `shortest` and `longest` seconds.
    """

    is_out: bool
    num_blocks: int
    shortest: float
    longest: float


@dataclasses.dataclass(frozen=True, slots=True)
class CopyProgress:
    """How far an executor's copies are.

    `arrived` are handles of copies started by `load` that have reached the device, and were not `joined`.
    `num_leaving` blocks of device memory beside the pool are taken by copies out that are under way. `timed`
    are those whose durations have become known since the last time, and `read` handles of reads that have
    ended since then, with whether each block was there. `write_room` is how many blocks may be
    copied out to be written to files, where there are some.
    """

    arrived: Collection[int] = ()
    num_leaving: int = 0
    timed: Sequence[CopyTime] = ()
    read: Sequence[tuple[int, Sequence[bool]]] = ()
    write_room: int | None = None


NO_COPIES = CopyProgress()


class StepResult(Protocol):
    """A step that has been dispatched; `fetch` blocks until the device has finished it."""

    def is_ready(self) -> bool:
        """Whether the device has finished it."""
        ...

    def fetch(self) -> SampledTokens:
        """Wait for the device and return the tokens."""
        ...


class Executor(Protocol):
    """The one boundary between scheduling and computing."""

    @property
    def num_gpu_blocks(self) -> int:
        """Blocks in the KV pool."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    @property
    def max_decode_steps(self) -> int:
        """Most decode iterations of one `execute`."""
        ...

    @property
    def is_undisturbed(self) -> bool:
        """Whether the last step runs as it always will: no program was being compiled when it was sent."""
        ...

    def beyond_steps(self, params: SamplingParams) -> int:
        """Flags of what a request asks of sampling that not every step does; 0 for nothing."""
        ...

    def steps_together(self, flags: Collection[int], num_rows: int) -> bool:
        """Whether several iterations of so many requests, which ask for such flags, may be one `execute`."""
        ...

    def looks_up(self, num_rows: int) -> bool:
        """Whether several iterations of so many requests without such flags may draft by themselves."""
        ...

    def is_ready_for(self, request: Request) -> bool:
        """Whether no step waits for a program because of what a request asks of sampling.

        If one would, it is compiled from now on, beside the steps; raises what came of it if it cannot be.
        """
        ...

    def wait_for_programs(self, seconds: float) -> None:
        """Wait until a program is compiled that a request may need, at most so long."""
        ...

    def execute(self, scheduled: SchedulerOutput) -> StepResult:
        """Dispatch one step; reads the requests' block tables before it returns."""
        ...

    def copies(self) -> CopyProgress:
        """How far the copies between device and host are."""
        ...

    def transfer(self, scheduled: SchedulerOutput) -> None:
        """Do what an iteration that computes nothing has to copy and to let go of, and give up all reads."""
        ...

    def read(self, reads: Sequence[Read]) -> None:
        """Start to read blocks from files; `copies` tells when they are in host memory."""
        ...

    @property
    def write_room(self) -> int | None:
        """Blocks that may be copied out to be written to files, as `copies` says; None without files."""
        ...

    def wait_for_files(self, seconds: float) -> None:
        """Wait until a read has ended, or if there is none something is written; at most so long."""
        ...

    def drop(self, pieces: Collection[HostPiece]) -> None:
        """Let go of host memory that nobody will read, and that no step is told of."""
        ...

    def release(self) -> None:
        """Let go of the device: nothing will be executed any more."""
        ...
