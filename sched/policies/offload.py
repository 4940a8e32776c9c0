"""Which blocks of the prefix cache are copied to host memory, and when, and which are read from files?

A block that nobody holds stays on the device until its room is needed. With a copy on the host it is found
there after that, and its room is to be had without waiting for the copy. Where there are files, each block is
written to one as soon as it is full, whatever the policy copies besides.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import CostModel
from jaxllm.sched.pool_state import PoolState
from jaxllm.types import MAX_STAGED_BLOCKS

_RIDING_TOKENS = 64


class OffloadPolicy(Protocol):
    """What of the prefix cache is copied to the host."""

    def keeps(self, state: PoolState) -> bool:
        """Whether blocks are copied at the latest when their room is taken."""
        ...

    @property
    def is_eager(self) -> bool:
        """Whether a block is copied as soon as it is full."""
        ...

    def num_ahead(self, state: PoolState) -> int:
        """How many of the free blocks, of those that are handed out next, should have copies already."""
        ...

    def reads(self, num_blocks: int, seconds: float, state: PoolState) -> bool:
        """Whether a request waits for blocks in files, so long by what reads took, and computes none."""
        ...


@dataclasses.dataclass(frozen=True)
class NoOffload:
    """What the device has no room for is gone (vLLM V1 without a connector)."""

    is_eager = False

    def keeps(self, state: PoolState) -> bool:
        """No."""
        return False

    def num_ahead(self, state: PoolState) -> int:
        """None."""
        return 0

    def reads(self, num_blocks: int, seconds: float, state: PoolState) -> bool:
        """Yes."""
        return True


@dataclasses.dataclass(frozen=True)
class WriteBack:
    """Copies a block when its room is taken (SGLang HiCache, "write_back")."""

    is_eager = False

    def keeps(self, state: PoolState) -> bool:
        """Yes."""
        return True

    def num_ahead(self, state: PoolState) -> int:
        """None."""
        return 0

    def reads(self, num_blocks: int, seconds: float, state: PoolState) -> bool:
        """Yes."""
        return True


@dataclasses.dataclass(frozen=True)
class WriteThrough:
    """Copies a block as soon as it is full (SGLang HiCache, "write_through"; FlashGen's eager copy-out)."""

    is_eager = True

    def keeps(self, state: PoolState) -> bool:
        """Yes, those that were not copied when they were full: the link was busy."""
        return True

    def num_ahead(self, state: PoolState) -> int:
        """None: they were copied before."""
        return 0

    def reads(self, num_blocks: int, seconds: float, state: PoolState) -> bool:
        """Yes."""
        return True


@dataclasses.dataclass(frozen=True)
class AheadOfTime:
    """Copies what would be handed out next while there is time (Pensieve, Section 4.3.2).

    Args:
        watermark: share of the pool that is to be empty or to have copies, in (0, 1]; Pensieve takes 0.25.

    Raises:
        ConfigError: it is out of range.
    """

    watermark: float = 0.25
    is_eager = False

    def __post_init__(self) -> None:
        if not 0.0 < self.watermark <= 1.0:
            raise ConfigError(f"watermark={self.watermark!r} must lie in (0, 1]: a share of the pool")

    def keeps(self, state: PoolState) -> bool:
        """Yes."""
        return True

    def num_ahead(self, state: PoolState) -> int:
        """The watermark's share of the pool."""
        return int(self.watermark * state.num_blocks)

    def reads(self, num_blocks: int, seconds: float, state: PoolState) -> bool:
        """Yes."""
        return True


@dataclasses.dataclass(frozen=True)
class OffloadIfCheaper:
    """Copies and reads blocks where that costs less than computing them again.

    Args:
        costs: predicts seconds.
        watermark: share of the pool, in [0, 1], of which blocks that are handed out next have copies already:
            as many as are copied beside a step may be too few when their room is taken.

    Raises:
        ConfigError: the watermark is out of range.
    """

    costs: CostModel
    watermark: float = 0.25
    is_eager = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.watermark <= 1.0:
            raise ConfigError(f"watermark={self.watermark!r} must lie in [0, 1]: a share of the pool")

    def keeps(self, state: PoolState) -> bool:
        """Whether copying out and back takes less, of as many blocks as are copied at once."""
        costs, num_blocks = self.costs, MAX_STAGED_BLOCKS
        copies = costs.swap_out_seconds(num_blocks) + costs.swap_in_seconds(num_blocks)
        return copies < costs.step_seconds(0, 0, num_blocks * state.block_size, 1)

    def num_ahead(self, state: PoolState) -> int:
        """The watermark's share of the pool, if copies are kept."""
        return int(self.watermark * state.num_blocks) if self.keeps(state) else 0

    def reads(self, num_blocks: int, seconds: float, state: PoolState) -> bool:
        """Whether that takes less than computing them, and than what it adds to the steps of all that run.

        Prompts ride beside decodes a few tokens at a time, for next to nothing as long as these read weights.
        """
        costs, num_tokens = self.costs, num_blocks * state.block_size
        recompute = costs.step_seconds(0, 0, num_tokens, 1)
        if state.num_running:
            load = state.num_running, state.num_context_tokens
            added = costs.step_seconds(*load, _RIDING_TOKENS, 1) - costs.step_seconds(*load)
            recompute += max(0.0, added) * num_tokens / _RIDING_TOKENS * state.num_running
        return seconds + costs.swap_in_seconds(num_blocks) < recompute
