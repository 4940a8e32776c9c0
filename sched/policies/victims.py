"""Whom to preempt when blocks run out?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from jaxllm.sched.policies.priority import FairPriority, PriorityPolicy
from jaxllm.types import Request

Outranks = Callable[[Request, Request, float], bool]
"""Whether one request, for which there is no room, may have that of another, the first to lose it."""


class VictimPolicy(Protocol):
    """Whom to preempt."""

    def score(self, request: Request, now: float) -> float:
        """How much a request is to be kept: the one of the least score loses its blocks first.

        Of equals the latest arrival. The scheduler asks about each holder of blocks once an iteration.
        """
        ...

    @property
    def outranks(self) -> Outranks | None:
        """Asked, with the time, where nobody resumes or starts; None is never."""
        ...


@dataclasses.dataclass(frozen=True)
class LatestArrivalVictim:
    """Preempts the request that arrived last, and only where blocks run out."""

    outranks = None

    def score(self, request: Request, now: float) -> float:
        """The same for all: the latest arrival goes."""
        return 0.0


@dataclasses.dataclass(frozen=True)
class LeastUrgentVictim:
    """Preempts the request of lowest priority (AdaptiveLLM, Algorithm 1), only where blocks run out."""

    priority: PriorityPolicy = dataclasses.field(default_factory=FairPriority)
    outranks = None

    def score(self, request: Request, now: float) -> float:
        """Its urgency."""
        return self.priority.score(request, now)


@dataclasses.dataclass(frozen=True)
class OvertakerVictim:
    """Preempts the request that arrived last, also for an earlier one that finds no room.

    Those that went past a long request give it the room back (FlashGen, Section 4.3).
    """

    def score(self, request: Request, now: float) -> float:
        """The same for all: the latest arrival goes."""
        return 0.0

    def outranks(self, queued: Request, holder: Request, now: float) -> bool:
        """Whether it came before."""
        return queued.arrival_index < holder.arrival_index


@dataclasses.dataclass(frozen=True)
class OutrankedVictim:
    """Preempts the request of lowest priority, also for a more urgent one that finds no room.

    Args:
        priority: says how urgent a request is.
        margin: by how much more urgent the queued one must be, so that they do not take turns for nothing.
    """

    priority: PriorityPolicy
    margin: float = 0.0

    def score(self, request: Request, now: float) -> float:
        """Its urgency."""
        return self.priority.score(request, now)

    def outranks(self, queued: Request, holder: Request, now: float) -> bool:
        """Whether it is more urgent by the margin."""
        return self.priority.score(queued, now) > self.priority.score(holder, now) + self.margin
