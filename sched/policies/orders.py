"""Orderings of the literature, and the user's own: classes, deadlines, shortest first, feedback queues."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import CostModel
from jaxllm.types import Request

_UNKNOWN_TOKENS = 1e9  # of a request whose output nobody predicted: after all others


@dataclasses.dataclass(frozen=True)
class PriorityClasses:
    """The user's classes, the lowest `priority` first, as in vLLM; first come first served within one."""

    reads = ("priority",)

    def score(self, request: Request, now: float) -> float:
        """The class, lower ones higher."""
        return float(-request.priority)

    def group(self, request: Request) -> Hashable:
        """One for all: classes do not change."""
        return None


@dataclasses.dataclass(frozen=True)
class EarliestDeadline:
    """The request that must end first goes first (Liu and Layland, 1973); without a deadline, last."""

    reads = ("deadline",)

    def score(self, request: Request, now: float) -> float:
        """The deadline, earlier ones higher."""
        return float("-inf") if request.deadline is None else -request.deadline

    def group(self, request: Request) -> Hashable:
        """One for all: deadlines do not change."""
        return None


@dataclasses.dataclass(frozen=True)
class LongestCachedPrefix:
    """The request of which the most tokens are in the prefix cache goes first (SGLang's "lpm").

    They are counted when it is queued. Without others going by for ever: `SchedulerPolicy.patience`.
    """

    reads = ()
    reads_cache = True

    def score(self, request: Request, now: float) -> float:
        """The tokens found, more of them higher."""
        return float(request.num_findable_tokens)

    def group(self, request: Request) -> Hashable:
        """One for all: while a request waits it is not counted anew."""
        return None


@dataclasses.dataclass(frozen=True)
class ShortestJob:
    """The request with the shortest predicted output goes first.

    As S3 (Jin et al., 2023) and learning to rank (Fu et al., 2024) order by predictions; which of the two is
    a matter of `SchedulerPolicy.length`. Requests that nobody predicted come last, first come first served.
    """

    reads = ()

    def score(self, request: Request, now: float) -> float:
        """The predicted tokens, fewer ones higher."""
        predicted = request.predicted_tokens
        return -(_UNKNOWN_TOKENS if predicted is None else predicted)

    def group(self, request: Request) -> Hashable:
        """One for all: a request is predicted once."""
        return None


@dataclasses.dataclass(frozen=True)
class LeastWorkLeft:
    """The request with the least predicted output left goes first (shortest remaining processing time).

    One that has outlived its prediction is taken to have as much before it as behind it.
    """

    reads = ()

    def score(self, request: Request, now: float) -> float:
        """The predicted tokens left, fewer ones higher."""
        if request.predicted_tokens is None:
            return -_UNKNOWN_TOKENS
        num_generated = request.num_tokens - request.num_prompt_tokens
        left = request.predicted_tokens - num_generated
        return -left if left > 0 else -float(num_generated)

    def group(self, request: Request) -> Hashable:
        """One for all: queued requests generate nothing."""
        return None


@dataclasses.dataclass(frozen=True)
class MultiLevelFeedback:
    """FastServe's skip-join multi-level feedback queue (Wu et al., 2023).

    Level i has a quantum of `quantum * ratio**i` iterations. A request joins the first level whose quantum
    covers its first iteration, the prefill, which counts as many decode iterations as it takes as long as. It
    goes down a level when it has used up its quantum, and no further than the last one. What the paper does
    against starvation, promotion to the first level after a time limit, `SchedulerPolicy.patience` does here.

    Args:
        costs: predicts seconds.
        quantum: iterations of the first level.
        ratio: of the quanta of neighbouring levels.
        num_levels: the limit on demotion.

    Raises:
        ConfigError: a number is out of range.
    """

    costs: CostModel
    quantum: int = 16
    ratio: int = 2
    num_levels: int = 6

    reads = ()

    def __post_init__(self) -> None:
        for name, low, high in (("quantum", 1, 2**20), ("ratio", 2, 64), ("num_levels", 1, 64)):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"{name}={getattr(self, name)!r} must lie in [{low}, {high}]")

    def level(self, request: Request) -> int:
        """Where a request stands; 0 is served first."""
        num_prompt = request.num_prompt_tokens
        alone = self.costs.step_seconds(1, num_prompt)
        first = self.costs.step_seconds(0, 0, num_prompt, 1) / alone if alone else 1.0
        used = first + request.num_tokens - num_prompt
        level, quantum = 0, float(self.quantum)
        while level < self.num_levels - 1 and first > quantum:
            level, quantum = level + 1, quantum * self.ratio
        while level < self.num_levels - 1 and used > quantum:
            used -= quantum
            level, quantum = level + 1, quantum * self.ratio
        return level

    def score(self, request: Request, now: float) -> float:
        """The level, lower ones higher."""
        return float(-self.level(request))

    def group(self, request: Request) -> Hashable:
        """One for all: queued requests use nothing up."""
        return None
