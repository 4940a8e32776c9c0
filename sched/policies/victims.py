"""Whom to preempt when blocks run out?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from jaxllm.predictors.base import CostModel
from jaxllm.predictors.survival import AHEAD, OutputSurvival
from jaxllm.sched.policies.priority import FairPriority, PriorityPolicy
from jaxllm.sched.pool_state import PoolState
from jaxllm.types import Request

Outranks = Callable[[Request, Request, float], bool]
"""Whether one request, for which there is no room, may have that of another, the first to lose it."""


class VictimPolicy(Protocol):
    """Whom to preempt.

    It may also be a `PoolVictim`, a `jaxllm.sched.policies.learning.LearningPolicy`, or both.
    """

    def score(self, request: Request, now: float) -> float:
        """How much a request is to be kept: the one of the least score loses its blocks first.

        Of equals the latest arrival. The scheduler asks about each holder of blocks once an iteration.
        """
        ...

    @property
    def outranks(self) -> Outranks | None:
        """Asked, with the time, where nobody resumes or starts; None is never."""
        ...


@runtime_checkable
class PoolVictim(VictimPolicy, Protocol):
    """A victim policy that looks at the pools."""

    def scorer(self, state: PoolState, now: float) -> Callable[[Request], float]:
        """Asked once when blocks run out, with the pools as they are then: what scores holders instead."""
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


@dataclasses.dataclass(unsafe_hash=True)
class LeastLostVictim:
    """Preempts who will occupy most, of those whose copy to the host fits there and takes about an iteration.

    That is the tokens a request holds, times those it is expected to generate yet, as outputs that have ended
    and that go on show (`OutputSurvival`). Requests within a factor of 1.4 count as equal: of them the latest
    arrival goes. Where the copy of nobody is so cheap, who has computed the fewest tokens goes: the least is
    lost (vLLM's issue 54644).

    Args:
        costs: predicts seconds of iterations and copies.
        num_iterations: that a copy may take.
    """

    costs: CostModel
    num_iterations: float = 2.0
    outranks = None

    def __post_init__(self) -> None:
        self._survival = OutputSurvival()
        self.ended = self._survival.ended

    def score(self, request: Request, now: float) -> float:
        """What it will occupy, coarsely."""
        return self._scores([request])[0]

    def _scores(self, requests: Sequence[Request]) -> list[float]:
        held = np.array([one.num_tokens for one in requests], np.float64)
        prompts = np.array([one.num_prompt_tokens for one in requests], np.float64)
        limits = np.array([one.max_total_tokens for one in requests], np.float64) - prompts
        goes_on = self._survival.going_on(held - prompts, limits)
        left = np.maximum(1.0, np.trapezoid(goes_on, AHEAD, axis=1))
        return (-np.floor(2.0 * np.log2(held * left))).tolist()

    def scorer(self, state: PoolState, now: float) -> Callable[[Request], float]:
        """That of a request whose copy is cheap; else more than that, by the tokens computed."""
        under_way = list(state.under_way)
        self._survival.fit([one.num_tokens - one.num_prompt_tokens for one in under_way])
        scores = dict(zip(map(id, under_way), self._scores(under_way), strict=True))
        most = self.num_iterations * self.costs.step_seconds(
            max(1, state.num_running), state.num_context_tokens
        )

        def score(request: Request) -> float:
            num_blocks = len(request.block_ids)
            is_cheap = num_blocks <= state.num_host_free and self.costs.swap_out_seconds(num_blocks) <= most
            if not is_cheap:
                return float(request.num_computed_tokens)
            known = scores.get(id(request))
            return self.score(request, now) if known is None else known

        return score


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


@dataclasses.dataclass(frozen=True)
class FewestComputedVictim:
    """Preempts the request that has computed the fewest tokens: the least is lost (vLLM's issue 54644)."""

    outranks = None

    def score(self, request: Request, now: float) -> float:
        """Tokens whose KV it has."""
        return float(request.num_computed_tokens)


@dataclasses.dataclass(frozen=True)
class CostAwareVictim:
    """Preempts for the most blocks a token, of those that have most of their output before them.

    That is the score of vLLM's pull request 56897. Blocks that others share count as well.
    """

    outranks = None

    def score(self, request: Request, now: float) -> float:
        """-(blocks / tokens) * (1 - output / longest output)."""
        num_prompt, num_tokens = request.num_prompt_tokens, request.num_tokens
        left = 1.0 - (num_tokens - num_prompt) / (request.max_total_tokens - num_prompt)
        return -len(request.block_ids) / num_tokens * left
