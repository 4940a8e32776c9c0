"""Requests as scheduler and engine know them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from jaxllm.sampling.params import SamplingParams
from jaxllm.types.kv import BlockName, HostBlock

if TYPE_CHECKING:
    from jaxllm.sampling.token_masks import TokenMask

FinishReason = Literal["stop", "length", "abort", "error"]


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
    def goes_on(self) -> bool:
        """Whether it is a later turn of a conversation that somebody follows."""
        return self.program_arrival_time < self.arrival_time

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
