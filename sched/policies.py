"""Scheduling policies: one small class per question the scheduler asks.

| question                                    | protocol          | default               |
|---------------------------------------------|-------------------|-----------------------|
| In which order may waiting requests start?  | `PriorityPolicy`  | `FCFSPriority`        |
| May this waiting request start now?         | `AdmissionPolicy` | `WatermarkAdmission`  |
| Whom to preempt when blocks run out?        | `VictimPolicy`    | `LatestArrivalVictim` |
| What becomes of the victim's KV?            | `ActionPolicy`    | `AlwaysRecompute`     |

Policies only read requests and never change them. `now` is seconds of the engine's clock.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Protocol

from jaxllm.errors import ConfigError
from jaxllm.types import Request


class PreemptionAction(enum.Enum):
    """What becomes of a victim's KV: `RECOMPUTE` drops it, to be prefilled again."""

    RECOMPUTE = "recompute"


class PriorityPolicy(Protocol):
    """Which waiting request is next."""

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        """The requests of `waiting`, which is in arrival order, most urgent first; `waiting` is unchanged."""
        ...


class AdmissionPolicy(Protocol):
    """Whether a waiting request may start."""

    def admits(self, request: Request, num_needed: int, num_free: int, num_blocks: int) -> bool:
        """Whether `request` may take `num_needed` of `num_free` free blocks of a pool of `num_blocks`.

        The scheduler asks only while other requests hold blocks and `num_needed <= num_free`: a request
        that has the pool to itself always starts.
        """
        ...


class VictimPolicy(Protocol):
    """Whom to preempt."""

    def choose(self, candidates: Sequence[Request], now: float) -> Request:
        """One of `candidates`: the running requests, in arrival order, never empty."""
        ...


class ActionPolicy(Protocol):
    """What to do with a victim."""

    def choose(self, victim: Request, now: float) -> PreemptionAction:
        """The action for `victim`, which still holds its blocks."""
        ...


@dataclasses.dataclass(frozen=True)
class FCFSPriority:
    """First come, first served. A preempted request keeps its arrival, so it goes to the front."""

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        """`waiting` itself, without a copy."""
        return waiting


@dataclasses.dataclass(frozen=True)
class WatermarkAdmission:
    """vLLM's rule: after the admission `int(watermark * num_blocks)` blocks are still free.

    Args:
        watermark: share of the pool, in [0, 1).

    Raises:
        ConfigError: `watermark` is out of range.
    """

    watermark: float = 0.01

    def __post_init__(self) -> None:
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark must lie in [0, 1), got {self.watermark}")

    def admits(self, request: Request, num_needed: int, num_free: int, num_blocks: int) -> bool:
        """Whether the free blocks left over reach the watermark."""
        return num_free - num_needed >= int(self.watermark * num_blocks)


@dataclasses.dataclass(frozen=True)
class LatestArrivalVictim:
    """Preempts the request that arrived last."""

    def choose(self, candidates: Sequence[Request], now: float) -> Request:
        """The last candidate."""
        return candidates[-1]


@dataclasses.dataclass(frozen=True)
class AlwaysRecompute:
    """Drops every victim's KV."""

    def choose(self, victim: Request, now: float) -> PreemptionAction:
        """`PreemptionAction.RECOMPUTE`."""
        return PreemptionAction.RECOMPUTE


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerPolicy:
    """One policy per question; the defaults are vLLM's for single-sequence requests."""

    priority: PriorityPolicy = FCFSPriority()
    admission: AdmissionPolicy = WatermarkAdmission()
    victim: VictimPolicy = LatestArrivalVictim()
    action: ActionPolicy = AlwaysRecompute()
