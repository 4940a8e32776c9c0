"""May this waiting request start now?"""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

from jaxllm.errors import ConfigError
from jaxllm.sched.pool_state import PoolState
from jaxllm.types import Request


class AdmissionPolicy(Protocol):
    """Whether a waiting request may start.

    It may also be a `ReturnAdmission`, a `jaxllm.sched.policies.learning.LearningPolicy`, or both.
    """

    def admits(self, request: Request, num_needed: int, state: PoolState) -> bool:
        """Whether `request` may take `num_needed` device blocks, as many as its tokens so far need.

        Where the restore policy skips, a refusal also skips all waiting requests that are at least as long.
        The scheduler asks only while other requests hold blocks and `num_needed <= state.num_free`: a
        request that has the pool to itself always starts.

        Dropped requests are asked about, too: those have started before (`Request.has_started`).
        """
        ...


@runtime_checkable
class ReturnAdmission(Protocol):
    """An admission policy that is also asked about requests in host memory."""

    def readmits(self, request: Request, num_needed: int, state: PoolState) -> bool:
        """Whether a swapped `request` may take `num_needed` device blocks, with that for its next token.

        A refusal ends the pass over the swapped requests. Not asked where nobody else could run.
        """
        ...


@dataclasses.dataclass(frozen=True)
class WatermarkAdmission:
    """vLLM's rule: after the admission `int(watermark * num_blocks)` blocks are still free.

    Args:
        watermark: share of the pool, in [0, 1).
        num_reserved: blocks beside the pool that count in `num_blocks`, too; vLLM V1 reserves one.

    Raises:
        ConfigError: `watermark` is out of range.
    """

    watermark: float = 0.0
    num_reserved: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark must lie in [0, 1), got {self.watermark}")

    def admits(self, request: Request, num_needed: int, state: PoolState) -> bool:
        """Whether the free blocks left over reach the watermark."""
        return state.num_free - num_needed >= int(self.watermark * (state.num_blocks + self.num_reserved))
