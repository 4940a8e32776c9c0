"""In which order do requests start, resume and go on?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from jaxllm.sched.policies.priority import FairPriority, PriorityPolicy
from jaxllm.types import Request


class RestorePolicy(Protocol):
    """Who takes room first, swapped requests or waiting ones.

    `skips` goes past a request that does not fit to those after it. A swapped request resumes once it fits
    with its next token.
    """

    @property
    def skips(self) -> bool:
        """See the class."""
        ...

    def swaps_in(self, waiting: Sequence[Request], swapped: Sequence[Request], now: float) -> bool:
        """Whether the swapped requests that could resume go before the waiting ones that could start.

        The scheduler asks only where there are some of both. In separate iterations (`IterationPolicy`) the
        others stay; in mixed ones they take what is left.
        """
        ...


@dataclasses.dataclass(frozen=True)
class MoreUrgentFirst:
    """AdaptiveLLM's Algorithm 2: of the two sets that fit, the one with the larger mean priority.

    Args:
        priority: says how urgent a request is.
    """

    priority: PriorityPolicy = dataclasses.field(default_factory=FairPriority)
    skips: bool = True

    def swaps_in(self, waiting: Sequence[Request], swapped: Sequence[Request], now: float) -> bool:
        """Whether the waiting set is not more urgent."""
        return self._mean(waiting, now) <= self._mean(swapped, now)

    def _mean(self, requests: Sequence[Request], now: float) -> float:
        return sum(self.priority.score(request, now) for request in requests) / len(requests)


@dataclasses.dataclass(frozen=True)
class ResumeFirst:
    """Swapped requests before new ones: they are under way, and the host memory they hold is wanted."""

    skips: bool = True

    def swaps_in(self, waiting: Sequence[Request], swapped: Sequence[Request], now: float) -> bool:
        """Always."""
        return True
