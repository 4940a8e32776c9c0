"""Scheduling policies: one small class per question the scheduler asks.

Who is most urgent?
    `PriorityPolicy`: `FCFSPriority`, `FairPriority`.
May this waiting request start now?
    `AdmissionPolicy`: `WatermarkAdmission`, `GrowthReserve`, `OutputReserve`, `HostBoundAdmission`.
How large may a prompt batch be?
    `BatchingPolicy`: `RaggedBatching`, `PaddedBatching`.
Whom to preempt when blocks run out?
    `VictimPolicy`: `LatestArrivalVictim`, `LeastUrgentVictim`.
What becomes of the victim's KV?
    `ActionPolicy`: `AlwaysRecompute`, `SwapIfItFits`, `AdaptiveAction`, `OverlapAwareAction`.
How does a swapped request come back?
    `ResumePolicy`: `ResumeAtOnce`, `OverlapAwareResume`.
In which order do requests start, resume and go on?
    `RestorePolicy`: `PrefillFirst`, `MoreUrgentFirst`, `ResumeFirst`.

Policies only read requests and never change them. `now` is seconds of the engine's clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from jaxllm.errors import ConfigError
from jaxllm.sched.actions import (
    ActionPolicy,
    AdaptiveAction,
    AlwaysRecompute,
    Decision,
    OverlapAwareAction,
    OverlapAwareResume,
    PreemptionAction,
    ResumeAction,
    ResumeAtOnce,
    ResumeDecision,
    ResumePolicy,
    SwapIfItFits,
)
from jaxllm.sched.pressure import PoolState, RecentPressure
from jaxllm.types import Request

__all__ = [
    "QUESTIONS",
    "ActionPolicy",
    "AdaptiveAction",
    "AdmissionPolicy",
    "AlwaysRecompute",
    "BatchingPolicy",
    "Decision",
    "FCFSPriority",
    "FairPriority",
    "GrowthReserve",
    "HostBoundAdmission",
    "LatestArrivalVictim",
    "LeastUrgentVictim",
    "MoreUrgentFirst",
    "OutputReserve",
    "OverlapAwareAction",
    "OverlapAwareResume",
    "PaddedBatching",
    "PoolState",
    "PreemptionAction",
    "PrefillFirst",
    "PriorityPolicy",
    "RaggedBatching",
    "RecentPressure",
    "RestorePolicy",
    "ResumeAction",
    "ResumeAtOnce",
    "ResumeDecision",
    "ResumeFirst",
    "ResumePolicy",
    "SchedulerPolicy",
    "SwapIfItFits",
    "VictimPolicy",
    "WatermarkAdmission",
    "members_of",
]


class PriorityPolicy(Protocol):
    """Who is most urgent."""

    def score(self, request: Request, now: float) -> float:
        """Urgency of a request; larger starts sooner and is preempted later, ties go by arrival."""
        ...

    def group(self, request: Request) -> Hashable:
        """A value such that of requests with the same one the earlier is always the more urgent.

        A constant if arrival alone decides, `request.arrival_index` if nothing of the kind holds. It must
        not change while a request is queued.
        """
        ...


class AdmissionPolicy(Protocol):
    """Whether a waiting request may start."""

    def admits(self, request: Request, num_needed: int, state: PoolState) -> bool:
        """Whether `request` may take `num_needed` device blocks.

        Where the restore policy skips, a refusal also skips all waiting requests that are at least as long.
        The scheduler asks only while other requests hold blocks and `num_needed <= state.num_free`: a
        request that has the pool to itself always starts.
        """
        ...


class BatchingPolicy(Protocol):
    """How prompts fill the token budget of a prefill iteration."""

    def fits(self, lengths: Sequence[int], budget: int) -> bool:
        """Whether prompts of these lengths may share an iteration of `budget` tokens.

        The scheduler asks only where their sum is within the budget.
        """
        ...


class VictimPolicy(Protocol):
    """Whom to preempt."""

    def choose(self, candidates: Sequence[Request], now: float) -> Request:
        """One of `candidates`: the running requests, in arrival order, never empty."""
        ...


class RestorePolicy(Protocol):
    """The order of prefills, swap-ins and decodes.

    `prefill_first` tries a prefill iteration before anything else, as long as nothing is swapped;
    `skips` goes past a request that does not fit to those after it. A swapped request resumes once it fits
    with its next token; a `resume_watermark` other than None asks for its old blocks, one more, and that
    share of the pool.
    """

    @property
    def prefill_first(self) -> bool:
        """See the class."""
        ...

    @property
    def skips(self) -> bool:
        """See the class."""
        ...

    @property
    def resume_watermark(self) -> float | None:
        """See the class."""
        ...

    def swaps_in(self, waiting: Sequence[Request], swapped: Sequence[Request], now: float) -> bool:
        """Whether the swapped requests that could resume go before the waiting ones that could start.

        The scheduler asks only where there are some of both.
        """
        ...


# Priorities


@dataclasses.dataclass(frozen=True)
class FCFSPriority:
    """First come, first served. A preempted request keeps its arrival, so it goes to the front."""

    def score(self, request: Request, now: float) -> float:
        """The same for all: arrival decides."""
        return 0.0

    def group(self, request: Request) -> Hashable:
        """One for all."""
        return None


@dataclasses.dataclass(frozen=True)
class FairPriority:
    """AdaptiveLLM's fairness: waiting time over length, so that short requests overtake long ones."""

    def score(self, request: Request, now: float) -> float:
        """(now - first arrival) / (prompt and generated tokens), in seconds per token."""
        return (now - request.arrival_time) / request.num_tokens

    def group(self, request: Request) -> Hashable:
        """The length: at equal length the earlier arrival is more urgent."""
        return request.num_tokens


# Admission


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

    def admits(self, request: Request, num_needed: int, state: PoolState) -> bool:
        """Whether the free blocks left over reach the watermark."""
        return state.num_free - num_needed >= int(self.watermark * state.num_blocks)


@dataclasses.dataclass(frozen=True)
class HostBoundAdmission:
    """For engines that always swap: starts a request only if all that started could end in host memory.

    The blocks of every started request and the new one, each at its greatest length, must stay within the
    host pool; with `count_device_pool`, within device and host pool together less the largest request.
    vLLM 0.2.5 has no such rule and fails when the host pool is full; AdaptiveLLM describes its swapping
    baseline as running smaller batches instead.
    """

    watermark: float = 0.01
    count_device_pool: bool = False

    def __post_init__(self) -> None:
        WatermarkAdmission(self.watermark)

    def admits(self, request: Request, num_needed: int, state: PoolState) -> bool:
        """Whether the watermark holds and the worst case fits."""
        size = state.block_size
        worst = [-(-(one.max_total_tokens - 1) // size) for one in (*state.started, request)]
        limit = state.num_host_blocks
        if self.count_device_pool:
            limit += state.num_blocks - max(worst)
        return sum(worst) <= limit and WatermarkAdmission(self.watermark).admits(request, num_needed, state)


@dataclasses.dataclass(frozen=True)
class GrowthReserve:
    """Keeps `blocks_per_request` free for each request that started, so that they can grow for a while.

    Every started request fills a block in at most `block_size` iterations. Without a reserve a new request
    takes the blocks that running ones need next, and somebody is preempted soon after.

    Raises:
        ConfigError: `blocks_per_request` is negative or not a number.
    """

    blocks_per_request: float = 0.25

    def __post_init__(self) -> None:
        if not 0.0 <= self.blocks_per_request < float("inf"):
            raise ConfigError(f"blocks_per_request must be at least 0, got {self.blocks_per_request}")

    def admits(self, request: Request, num_needed: int, state: PoolState) -> bool:
        """Whether the reserve is left."""
        return state.num_free - num_needed >= self.blocks_per_request * len(state.started)


@dataclasses.dataclass(frozen=True)
class OutputReserve:
    """Leaves each request that started room for a share of the mean output.

    As `GrowthReserve`, but by the lengths of the outputs seen so far: the longer they are, the longer it
    takes until somebody finishes and leaves blocks to the others. docs/policies.md says what it is worth.

    Args:
        share: of the mean output of the recently finished requests (`RecentPressure.output_tokens`).

    Raises:
        ConfigError: `share` is negative or not finite.
    """

    share: float = 0.08

    def __post_init__(self) -> None:
        if not 0.0 <= self.share < float("inf"):
            raise ConfigError(f"share must be at least 0 and finite, got {self.share}")

    def admits(self, request: Request, num_needed: int, state: PoolState) -> bool:
        """Whether the room is left."""
        return state.num_free - num_needed >= state.num_to_grow(self.share)


# Prompt batches


@dataclasses.dataclass(frozen=True)
class RaggedBatching:
    """Prompts lie end to end: what counts is the sum of their lengths."""

    def fits(self, lengths: Sequence[int], budget: int) -> bool:
        """Whether the sum is within the budget."""
        return sum(lengths) <= budget


@dataclasses.dataclass(frozen=True)
class PaddedBatching:
    """vLLM 0.2.5's rule: number of prompts times the longest one, with at most `max_paddings` wasted."""

    max_paddings: int = 256

    def fits(self, lengths: Sequence[int], budget: int) -> bool:
        """Whether the padded batch is within the budget, and its padding within `max_paddings`."""
        padded = len(lengths) * max(lengths)
        return padded <= budget and padded - sum(lengths) <= self.max_paddings


# Victims


@dataclasses.dataclass(frozen=True)
class LatestArrivalVictim:
    """Preempts the request that arrived last."""

    def choose(self, candidates: Sequence[Request], now: float) -> Request:
        """The last candidate."""
        return candidates[-1]


@dataclasses.dataclass(frozen=True)
class LeastUrgentVictim:
    """Preempts the request of lowest priority (AdaptiveLLM, Algorithm 1); of equals the latest arrival."""

    priority: PriorityPolicy = FairPriority()

    def choose(self, candidates: Sequence[Request], now: float) -> Request:
        """The candidate with the smallest score."""
        score = self.priority.score
        return min(reversed(candidates), key=lambda request: score(request, now))


# Order of prefills, swap-ins and decodes


@dataclasses.dataclass(frozen=True)
class PrefillFirst:
    """vLLM 0.2.5's order: prefill while nothing is swapped; swap in only where nothing was preempted."""

    prefill_first: bool = True
    skips: bool = False
    resume_watermark: float | None = 0.01

    def swaps_in(self, waiting: Sequence[Request], swapped: Sequence[Request], now: float) -> bool:
        """Always: prefills were tried before."""
        return True


@dataclasses.dataclass(frozen=True)
class MoreUrgentFirst:
    """AdaptiveLLM's Algorithm 2: of the two sets that fit, the one with the larger mean priority.

    Args:
        priority: says how urgent a request is; not negative, unless `margin` is 1.
        margin: how many times more urgent the waiting set must be to go first, at least 1 (the paper's).
            Resuming frees host memory for the next preemptions, and starting takes device memory.

    Raises:
        ConfigError: `margin` is below 1 or not finite.
    """

    priority: PriorityPolicy = FairPriority()
    prefill_first: bool = False
    skips: bool = True
    resume_watermark: float | None = None
    margin: float = 1.0

    def __post_init__(self) -> None:
        if not 1.0 <= self.margin < float("inf"):
            raise ConfigError(f"margin must be at least 1 and finite, got {self.margin}")

    def swaps_in(self, waiting: Sequence[Request], swapped: Sequence[Request], now: float) -> bool:
        """Whether the waiting set is not so much more urgent; an empty set never is."""
        return bool(swapped) and self._mean(waiting, now) <= self.margin * self._mean(swapped, now)

    def _mean(self, requests: Sequence[Request], now: float) -> float:
        if not requests:
            return float("-inf")
        return sum(self.priority.score(request, now) for request in requests) / len(requests)


@dataclasses.dataclass(frozen=True)
class ResumeFirst:
    """Swapped requests before new ones: they are under way, and the host memory they hold is wanted."""

    prefill_first: bool = False
    skips: bool = True
    resume_watermark: float | None = None

    def swaps_in(self, waiting: Sequence[Request], swapped: Sequence[Request], now: float) -> bool:
        """Whether any swapped request can resume."""
        return bool(swapped)


QUESTIONS: Mapping[str, type] = {
    "priority": PriorityPolicy,
    "admission": AdmissionPolicy,
    "batching": BatchingPolicy,
    "victim": VictimPolicy,
    "action": ActionPolicy,
    "resume": ResumePolicy,
    "restore": RestorePolicy,
}
"""What each part of a `SchedulerPolicy` must be."""


def members_of(protocol: type) -> dict[str, Any]:
    """What a policy of this protocol is asked: its methods and properties by name."""
    return {name: member for name, member in vars(protocol).items() if not name.startswith("_")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerPolicy:
    """One policy per question; the defaults are vLLM's for single-sequence requests.

    `decode_needs_free_block` is a quirk of vLLM 0.2.5: a request may decode only while a device block is
    free, even if its last block has room. `lazy_eviction` preempts in part: a victim's blocks are free, but
    whatever nobody has taken by the time it comes back is neither copied nor computed again.

    Raises:
        ConfigError: a part lacks what it is asked, or a switch is neither True nor False.
    """

    priority: PriorityPolicy = FCFSPriority()
    admission: AdmissionPolicy = WatermarkAdmission()
    batching: BatchingPolicy = RaggedBatching()
    victim: VictimPolicy = LatestArrivalVictim()
    action: ActionPolicy = dataclasses.field(default_factory=AlwaysRecompute)
    resume: ResumePolicy = dataclasses.field(default_factory=ResumeAtOnce)
    restore: RestorePolicy = PrefillFirst()
    decode_needs_free_block: bool = False
    lazy_eviction: bool = False

    def __post_init__(self) -> None:
        for question, protocol in QUESTIONS.items():
            policy, asked = getattr(self, question), members_of(protocol)
            if isinstance(policy, type) or not all(hasattr(policy, name) for name in asked):
                raise ConfigError(
                    f"{question}={policy!r} does not answer the question: it must be an object that has "
                    f"{', '.join(asked)} (jaxllm.sched.policies.{protocol.__name__})"
                )
        for switch in ("decode_needs_free_block", "lazy_eviction"):
            if not isinstance(getattr(self, switch), bool):
                raise ConfigError(f"{switch} must be True or False, got {getattr(self, switch)!r}")
