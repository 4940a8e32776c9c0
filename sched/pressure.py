"""What policies are told of the pools: how full they are, and what preemptions have led to of late."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxllm.types import Request

_RATE = 0.1  # weight of the newest value
_OUTPUT_RATE = 0.02  # the same, of outputs, which differ more
_UNKNOWN_OUTPUT = 50.0  # tokens


@dataclasses.dataclass(slots=True)
class RecentPressure:
    """Running means over the recent prefills, swap-ins, returns of preempted requests, and outputs.

    Attributes:
        prefill_tokens, prefill_seqs: of a prefill iteration.
        swap_in_seqs: requests that resume together, in iterations in which any do.
        lost_share: of a preempted request's blocks, those that were overwritten by then.
        copy_out_until, copy_in_until: when the copies under way end by prediction, on the engine's clock.
        output_tokens: tokens that a finished request had generated; a guess of 50 counts as the first.
        num_finished: requests that finished by themselves.
    """

    prefill_tokens: float = 0.0
    prefill_seqs: float = 0.0
    swap_in_seqs: float = 1.0
    lost_share: float = 1.0
    copy_out_until: float = float("-inf")
    copy_in_until: float = float("-inf")
    output_tokens: float = _UNKNOWN_OUTPUT
    num_finished: int = 0

    def prefilled(self, num_tokens: int, num_seqs: int) -> None:
        """Take a prefill iteration."""
        self.prefill_tokens += _RATE * (num_tokens - self.prefill_tokens)
        self.prefill_seqs += _RATE * (num_seqs - self.prefill_seqs)

    def swapped_in(self, num_seqs: int) -> None:
        """Take an iteration in which requests resume."""
        self.swap_in_seqs += _RATE * (num_seqs - self.swap_in_seqs)

    def returned(self, lost_share: float) -> None:
        """Take a request that is restored, be it by a copy or by a prefill."""
        self.lost_share += _RATE * (lost_share - self.lost_share)

    def finished(self, num_tokens: int) -> None:
        """Take a request that has generated so many tokens and will generate no more."""
        self.num_finished += 1
        rate = max(1 / (self.num_finished + 1), _OUTPUT_RATE)
        self.output_tokens += rate * (num_tokens - self.output_tokens)

    def copying_out(self, now: float, seconds: float) -> float:
        """Take a copy to the host that is predicted to take `seconds`; returns when it ends."""
        self.copy_out_until = max(now, self.copy_out_until) + seconds
        return self.copy_out_until

    def copying_in(self, now: float, seconds: float) -> None:
        """Take a copy from the host that is predicted to take `seconds`."""
        self.copy_in_until = max(now, self.copy_in_until) + seconds


@dataclasses.dataclass(frozen=True, slots=True)
class PoolState:
    """How full the pools are when a policy is asked.

    `num_free` and `num_blocks` count device blocks, `num_host_free` and `num_host_blocks` host blocks;
    `started` are the requests that hold blocks of either kind, `recent` is what happened of late. Host blocks
    that hold the heads of requests which wait to be prefilled count as free: they are given up for whoever is
    swapped as a whole.

    The rest is filled in for `ActionPolicy` and `ResumePolicy` only: the running requests, their tokens
    together, the waiting requests, the blocks of device memory beside the pool that copies out take, and the
    host blocks that hold heads.
    """

    num_free: int
    num_blocks: int
    block_size: int
    num_host_free: int
    num_host_blocks: int
    started: Sequence[Request]
    recent: RecentPressure = dataclasses.field(default_factory=RecentPressure)
    num_running: int = 0
    num_context_tokens: int = 0
    num_waiting: int = 0
    num_leaving: int = 0
    num_host_heads: int = 0

    def num_to_grow(self, output_share: float) -> float:
        """Blocks that all started requests together fill with such a share of a mean output each."""
        return output_share * self.recent.output_tokens / self.block_size * len(self.started)
