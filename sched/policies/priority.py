"""Who is most urgent?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from typing import Protocol, runtime_checkable

from jaxllm.types import Request


class PriorityPolicy(Protocol):
    """Who is most urgent.

    It may also be a `SelectivePriority`, a `CachePriority` or a `ProgramPriority`.
    """

    def score(self, request: Request, now: float) -> float:
        """Urgency of a request; larger starts sooner, ties go by arrival."""
        ...

    def group(self, request: Request) -> Hashable:
        """A value such that of two requests with the same one it never changes which is the more urgent.

        A constant if scores do not depend on `now`, `request.arrival_index` if nothing of the kind holds:
        only the most urgent of each group is compared in every iteration.
        """
        ...


@runtime_checkable
class SelectivePriority(Protocol):
    """A priority that says what it looks at; any other is taken to look at all of it."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Of "priority" and "deadline" those it looks at: requests that come with another are refused."""
        ...


@runtime_checkable
class CachePriority(Protocol):
    """A priority that may look at `Request.num_findable_tokens`, which nobody counts for any other."""

    @property
    def reads_cache(self) -> bool:
        """Whether these are counted when a request is queued."""
        ...


@runtime_checkable
class ProgramPriority(Protocol):
    """A priority that may look at `Request.program_arrival_time`, which is the request's own for any other.

    Conversations are known by what the prefix cache calls their blocks, so they are not without one.
    """

    @property
    def follows_programs(self) -> bool:
        """Whether conversations are followed."""
        ...


@dataclasses.dataclass(frozen=True)
class FCFSPriority:
    """First come, first served. A preempted request keeps its arrival, so it goes to the front."""

    reads = ()

    def score(self, request: Request, now: float) -> float:
        """The same for all: arrival decides."""
        return 0.0

    def group(self, request: Request) -> Hashable:
        """One for all."""
        return None


@dataclasses.dataclass(frozen=True)
class ProgramFCFS:
    """First come, first served, by the first turn of each conversation (Continuum, arXiv 2511.02230)."""

    reads = ()
    follows_programs = True

    def score(self, request: Request, now: float) -> float:
        """The earlier the first turn came."""
        return -request.program_arrival_time

    def group(self, request: Request) -> Hashable:
        """One for all."""
        return None


@dataclasses.dataclass(frozen=True)
class FairPriority:
    """AdaptiveLLM's fairness: waiting time over length, so that short requests overtake long ones."""

    reads = ()

    def score(self, request: Request, now: float) -> float:
        """(now - first arrival) / (prompt and generated tokens), in seconds per token."""
        return (now - request.arrival_time) / request.num_tokens

    def group(self, request: Request) -> Hashable:
        """The length: at equal length the earlier arrival is always the more urgent."""
        return request.num_tokens


@dataclasses.dataclass(frozen=True)
class FairTurns:
    """`FairPriority`, but a conversation's next turn is the shorter the more it finds of what went before.

    It counts as the geometric mean of its length and of what there is to compute of it. By the latter alone
    turns whose KV is lost would wait for too long, by the length alone others would lose theirs meanwhile.
    What it finds is counted when it is queued. Any other request counts whole, whatever it finds.
    """

    reads = ()
    reads_cache = follows_programs = True

    def score(self, request: Request, now: float) -> float:
        """(now - first arrival) / (tokens that it counts as), in seconds per token."""
        return (now - request.arrival_time) / self.group(request)

    def group(self, request: Request) -> int:
        """The tokens: of as many the earlier arrival is always the more urgent."""
        length = request.num_tokens
        if not request.goes_on:
            return length
        return max(1, math.isqrt(length * max(1, length - request.num_findable_tokens)))
