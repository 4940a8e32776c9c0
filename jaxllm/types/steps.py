"""What a step computes and copies, and what comes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import NamedTuple

from jaxllm.types.kv import BlockName, HostBlock, HostPiece
from jaxllm.types.request import Request

MAX_DECODE_STEPS = 8
"""Decode iterations that are computed in one device program, unless the user says how many."""


MULTI_STEP_SEQS = 16
"""Most requests that several decode iterations are computed for in one device program."""


NO_TOKEN, WRONG_DRAFT = -2, -3
"""What stands for a token where none was sampled, and where a draft was not kept."""


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
    drafts: Sequence[int] = ()


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

    With `num_lookups` the device drafts by itself, in each of `num_decode_steps` iterations at most so many
    tokens for each request of `decode`. A request gets one token more than are right, and no more than it is
    long once scheduled. Then `num_drafts` is how many drafts there may be.

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
    num_lookups: int = 0

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
