"""What policies are told of the pools: how full they are, and what happened of late."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

_RATE = 0.1  # weight of the newest value


@dataclasses.dataclass(slots=True)
class RecentPressure:
    """Running means over the recent iterations.

    Attributes:
        prompt_tokens, prompt_seqs: prompt tokens and chunks of an iteration that has any.
        prompt_share: of the iterations, those that have any.
        swap_in_seqs: requests that resume together, in iterations in which any do.
        copy_out_until, copy_in_until: when the copies under way end by prediction, on the engine's clock.
    """

    prompt_tokens: float = 0.0
    prompt_seqs: float = 0.0
    prompt_share: float = 0.0
    swap_in_seqs: float = 1.0
    copy_out_until: float = float("-inf")
    copy_in_until: float = float("-inf")

    def prefilled(self, num_tokens: int, num_seqs: int) -> None:
        """Take an iteration with so many prompt tokens, of so many chunks."""
        self.prompt_share += _RATE * ((num_seqs > 0) - self.prompt_share)
        if num_seqs:
            self.prompt_tokens += _RATE * (num_tokens - self.prompt_tokens)
            self.prompt_seqs += _RATE * (num_seqs - self.prompt_seqs)

    def swapped_in(self, num_seqs: int) -> None:
        """Take an iteration in which requests resume."""
        self.swap_in_seqs += _RATE * (num_seqs - self.swap_in_seqs)

    def copying_out(self, now: float, seconds: float) -> float:
        """Take a copy to the host that is predicted to take `seconds`; returns when it ends."""
        self.copy_out_until = max(now, self.copy_out_until) + seconds
        return self.copy_out_until


class PoolState(NamedTuple):
    """How full the pools are when a policy is asked.

    Attributes:
        num_free, num_blocks: device blocks.
        block_size: tokens per block.
        num_host_free, num_host_blocks: host blocks.
        recent: what happened of late.
        num_running: requests that decode.
        num_context_tokens: their tokens together.
        num_waiting: requests that wait for their first prefill, or for one more.
        num_leaving: blocks of device memory beside the pool that copies out take.
        copy_in_until: when the copies to the device under way end by prediction, on the engine's clock.
        num_batched_tokens: most tokens of an iteration.
        mixes: whether prompts share iterations with decodes.
    """

    num_free: int
    num_blocks: int
    block_size: int
    num_host_free: int
    num_host_blocks: int
    recent: RecentPressure
    num_running: int = 0
    num_context_tokens: int = 0
    num_waiting: int = 0
    num_leaving: int = 0
    copy_in_until: float = float("-inf")
    num_batched_tokens: int = 1
    mixes: bool = True
