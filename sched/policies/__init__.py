"""Scheduling policies: one small class per question the scheduler asks.

Who is most urgent?
    `PriorityPolicy` (`.priority`, `.orders`): `FCFSPriority`, `FairPriority`, `PriorityClasses`,
    `EarliestDeadline`, `ShortestJob`, `LeastWorkLeft`, `MultiLevelFeedback`,
    `LongestCachedPrefix`, `ProgramFCFS`, `FairTurns`.
May this waiting request start now?
    `AdmissionPolicy` (`.admission`, `.growth`): `WatermarkAdmission`, `FullLengthAdmission`, `PastFuture`,
    `NewTokenRatio`, `FeedbackLimit`, `ExpectedGrowth`.
How many prompt tokens ride in an iteration?
    `IterationPolicy` (`.iterations`): `MixedIterations`, `PacedIterations`, `SeparateIterations`.
Whom to preempt when blocks run out?
    `VictimPolicy` (`.victims`): `LatestArrivalVictim`, `LeastUrgentVictim`, `OvertakerVictim`,
    `OutrankedVictim`, `FewestComputedVictim`, `CostAwareVictim`,
    `LeastLostVictim`.
What becomes of the victim's KV?
    `ActionPolicy` (`.actions`): `AlwaysRecompute`, `SwapIfItFits`, `AdaptiveAction`.
How does KV come back from host memory?
    `ResumePolicy` (`.resume`): `ResumeAtOnce`, `OverlapAwareResume`.
In which order do requests start, resume and go on?
    `RestorePolicy` (`.order`): `MoreUrgentFirst`, `ResumeFirst`.
What of the prefix cache is copied to host memory?
    `OffloadPolicy` (`.offload`): `NoOffload`, `WriteBack`, `WriteThrough`, `AheadOfTime`,
    `OffloadIfCheaper`.
Which of it stays there?
    `RetentionPolicy` (`.retention`): `LeastRecentlyUsed`, `S3FIFO`, `CostOverIdleTime`,
    `Hindsight`.
For how long does a request's KV stay on the device after its end, for the next turn?
    `HoldPolicy` (`.holds`): `NoHold`, `TimeToLive`, `HoldIfLost`.
How long will its output be?
    `LengthPolicy` (`jaxllm.predictors.lengths`): `ValuePredictor`, `RangePredictor`, `RankPredictor`,
    `TrueLength`.

Policies only read requests and never change them. `now` is seconds of the engine's clock.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping
from typing import Any, Protocol, TypeGuard, TypeVar, runtime_checkable

from jaxllm.errors import ConfigError, did_you_mean, nearest, shown
from jaxllm.predictors.lengths import LengthPolicy
from jaxllm.sched.policies.actions import (
    ActionPolicy,
    AdaptiveAction,
    AlwaysRecompute,
    Decision,
    PreemptionAction,
    SwapIfItFits,
)
from jaxllm.sched.policies.admission import (
    AdmissionPolicy,
    ReturnAdmission,
    WatermarkAdmission,
)
from jaxllm.sched.policies.growth import (
    ExpectedGrowth,
    FeedbackLimit,
    FullLengthAdmission,
    NewTokenRatio,
    PastFuture,
)
from jaxllm.sched.policies.holds import HoldIfLost, HoldPolicy, NoHold, TimeToLive
from jaxllm.sched.policies.iterations import (
    IterationPolicy,
    IterationState,
    MixedIterations,
    PacedIterations,
    SeparateIterations,
)
from jaxllm.sched.policies.learning import LearningPolicy
from jaxllm.sched.policies.offload import (
    AheadOfTime,
    NoOffload,
    OffloadIfCheaper,
    OffloadPolicy,
    WriteBack,
    WriteThrough,
)
from jaxllm.sched.policies.order import MoreUrgentFirst, RestorePolicy, ResumeFirst
from jaxllm.sched.policies.orders import (
    EarliestDeadline,
    LeastWorkLeft,
    LongestCachedPrefix,
    MultiLevelFeedback,
    PriorityClasses,
    ShortestJob,
)
from jaxllm.sched.policies.priority import (
    CachePriority,
    FairPriority,
    FairTurns,
    FCFSPriority,
    PriorityPolicy,
    ProgramFCFS,
    SelectivePriority,
)
from jaxllm.sched.policies.resume import (
    OverlapAwareResume,
    ResumeAction,
    ResumeAtOnce,
    ResumeDecision,
    ResumePolicy,
)
from jaxllm.sched.policies.retention import (
    S3FIFO,
    CostOverIdleTime,
    Hindsight,
    LeastRecentlyUsed,
    QueueAwareRetention,
    RetentionPolicy,
)
from jaxllm.sched.policies.victims import (
    CostAwareVictim,
    FewestComputedVictim,
    LatestArrivalVictim,
    LeastLostVictim,
    LeastUrgentVictim,
    OutrankedVictim,
    OvertakerVictim,
    PoolVictim,
    VictimPolicy,
)
from jaxllm.sched.pool_state import PoolState, Progress

__all__ = [
    "QUESTIONS",
    "S3FIFO",
    "ActionPolicy",
    "AdaptiveAction",
    "AdmissionPolicy",
    "AheadOfTime",
    "AlwaysRecompute",
    "CachePriority",
    "CostAwareVictim",
    "CostOverIdleTime",
    "Decision",
    "EarliestDeadline",
    "ExpectedGrowth",
    "FCFSPriority",
    "FairPriority",
    "FairTurns",
    "FeedbackLimit",
    "FewestComputedVictim",
    "FullLengthAdmission",
    "Hindsight",
    "HoldIfLost",
    "HoldPolicy",
    "IterationPolicy",
    "IterationState",
    "LatestArrivalVictim",
    "LearningPolicy",
    "LeastLostVictim",
    "LeastRecentlyUsed",
    "LeastUrgentVictim",
    "LeastWorkLeft",
    "LengthPolicy",
    "LongestCachedPrefix",
    "MixedIterations",
    "MoreUrgentFirst",
    "MultiLevelFeedback",
    "NewTokenRatio",
    "NoHold",
    "NoOffload",
    "OffloadIfCheaper",
    "OffloadPolicy",
    "OutrankedVictim",
    "OverlapAwareResume",
    "OvertakerVictim",
    "PacedIterations",
    "PastFuture",
    "PoolState",
    "PoolVictim",
    "PreemptionAction",
    "PriorityClasses",
    "PriorityPolicy",
    "ProgramFCFS",
    "Progress",
    "QueueAwareRetention",
    "RestorePolicy",
    "ResumeAction",
    "ResumeAtOnce",
    "ResumeDecision",
    "ResumeFirst",
    "ResumePolicy",
    "RetentionPolicy",
    "ReturnAdmission",
    "SchedulerPolicy",
    "SchedulingPolicy",
    "SelectivePriority",
    "SeparateIterations",
    "ShortestJob",
    "SwapIfItFits",
    "TimeToLive",
    "VictimPolicy",
    "WatermarkAdmission",
    "WriteBack",
    "WriteThrough",
    "is_policy",
    "members_of",
    "misspelt",
]

QUESTIONS: Mapping[str, type] = {
    "priority": PriorityPolicy,
    "admission": AdmissionPolicy,
    "iterations": IterationPolicy,
    "victim": VictimPolicy,
    "action": ActionPolicy,
    "resume": ResumePolicy,
    "restore": RestorePolicy,
    "offload": OffloadPolicy,
    "retention": RetentionPolicy,
    "hold": HoldPolicy,
    "length": LengthPolicy,
}
"""What each part of a `SchedulerPolicy` must be."""


_ALL_READS = ("priority", "deadline")


def members_of(protocol: type) -> dict[str, Any]:
    """What a policy of this protocol is asked: its methods and properties by name."""
    return {name: member for name, member in vars(protocol).items() if not name.startswith("_")}


def misspelt(found: object, known: Collection[str]) -> str:
    """Names of an object's own that are nearly `known` ones, for the end of a message; empty if none is."""
    if type(found).__module__ == "builtins":
        return ""
    others = [name for name in dir(found) if not name.startswith("_") and name not in known]
    near = {name: nearest(name, known) for name in others}
    return "".join(f"; it has {name!r}: did you mean {word}?" for name, word in near.items() if word)


@runtime_checkable
class SchedulingPolicy(Protocol):
    """What a scheduler is made with: a `SchedulerPolicy`, or a `jaxllm.sched.plan.PlanningPolicy`."""

    @property
    def priority(self) -> PriorityPolicy:
        """The order of the queues."""
        ...

    @property
    def offload(self) -> OffloadPolicy:
        """What of the prefix cache is copied to host memory."""
        ...

    @property
    def retention(self) -> RetentionPolicy:
        """What of it stays there."""
        ...

    @property
    def length(self) -> LengthPolicy | None:
        """Predicts outputs' lengths, if anything does."""
        ...

    @property
    def may_swap(self) -> bool:
        """Whether it can ask for host memory."""
        ...

    @property
    def needs_host_pool(self) -> bool:
        """Whether it starts only what fits host memory."""
        ...

    @property
    def reads(self) -> tuple[str, ...]:
        """What of a request's `priority` and `deadline` it looks at."""
        ...

    @property
    def shares_prefixes(self) -> bool:
        """Whether it plans with what requests find in the prefix cache."""
        ...


def is_policy(found: object) -> TypeGuard[SchedulingPolicy]:
    """Whether a scheduler can be made with this object; a class is none yet."""
    return isinstance(found, SchedulingPolicy) and not isinstance(found, type)


_Policy = TypeVar("_Policy", bound=type)


def _knows_its_questions(policy: _Policy) -> _Policy:
    """A decorator: a policy that is given an answer to no question says which it may stand for."""
    made = policy.__init__  # type: ignore[misc]
    known = [field.name for field in dataclasses.fields(policy)]

    @functools.wraps(made)
    def make(self: object, *args: object, **answers: object) -> None:
        for name in answers:
            if name not in known:
                raise ConfigError(
                    f"SchedulerPolicy has no {name!r}; {did_you_mean(name, known)}it takes {', '.join(known)}"
                )
        made(self, *args, **answers)

    policy.__init__ = make  # type: ignore[misc]
    return policy


@_knows_its_questions
@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerPolicy:
    """One policy per question; the defaults are today's vLLM's (V1), and not `adaptive`'s.

    To change answers of `adaptive`, give the class alone (`jaxllm.sched.presets.as_policy`), or replace
    fields of `make_preset("adaptive", costs)`.

    Args:
        priority, admission, iterations, victim, action, resume, restore, offload, retention, hold: see the
            module.
        length: predicts outputs' lengths for policies that weigh them (`Request.predicted_tokens`); None
            predicts nothing.
        patience: how many others at most start or resume while the request that arrived first, of those
            without blocks, is passed over. After that nobody does until it has, and then it keeps its blocks
            as long as anybody else can be preempted: so every request ends. None bounds nothing.
        max_extra_wait: while somebody without blocks waits for room, by what share longer than anybody who
            takes some before it it has been here, at most. So of those who come after it only the first pass
            it, and its wait is longer than in order of arrival by about this share. Those who came together
            go in any order, and later turns of conversations neither wait for others nor are waited for. None
            bounds nothing.

    Raises:
        ConfigError: a part lacks what it is asked, there is no such question, `patience` is no positive
            integer, or `max_extra_wait` no positive number.
    """

    priority: PriorityPolicy = dataclasses.field(default_factory=FCFSPriority)
    admission: AdmissionPolicy = dataclasses.field(default_factory=WatermarkAdmission)
    iterations: IterationPolicy = dataclasses.field(default_factory=MixedIterations)
    victim: VictimPolicy = dataclasses.field(default_factory=LatestArrivalVictim)
    action: ActionPolicy = dataclasses.field(default_factory=AlwaysRecompute)
    resume: ResumePolicy = dataclasses.field(default_factory=ResumeAtOnce)
    restore: RestorePolicy = dataclasses.field(default_factory=lambda: ResumeFirst(skips=False))
    offload: OffloadPolicy = dataclasses.field(default_factory=NoOffload)
    retention: RetentionPolicy = dataclasses.field(default_factory=LeastRecentlyUsed)
    hold: HoldPolicy = dataclasses.field(default_factory=NoHold)
    length: LengthPolicy | None = None
    patience: int | None = 1024
    max_extra_wait: float | None = None

    def __post_init__(self) -> None:
        for question, protocol in QUESTIONS.items():
            policy, asked = getattr(self, question), members_of(protocol)
            if policy is None and question == "length":
                continue
            if isinstance(policy, type) or not all(hasattr(policy, name) for name in asked):
                raise ConfigError(
                    f"{question}={shown(policy)} does not answer the question: it must be an object that has "
                    f"{', '.join(asked)} ({protocol.__module__}.{protocol.__name__}){misspelt(policy, asked)}"
                )
        patience = self.patience
        if patience is not None and (
            isinstance(patience, bool) or not isinstance(patience, int) or patience < 1
        ):
            raise ConfigError(f"patience must be None or an integer of at least 1, got {shown(patience)}")
        extra = self.max_extra_wait
        if extra is not None and (
            isinstance(extra, bool) or not isinstance(extra, (int, float)) or not 0.0 < extra < math.inf
        ):
            raise ConfigError(f"max_extra_wait must be None or a positive number, got {shown(extra)}")

    @property
    def may_swap(self) -> bool:
        """Whether it can ask for host memory."""
        return not isinstance(self.action, AlwaysRecompute) or self.may_offload

    @property
    def may_offload(self) -> bool:
        """Whether it copies blocks of the prefix cache to host memory."""
        return not isinstance(self.offload, NoOffload)

    @property
    def needs_host_pool(self) -> bool:
        """Whether it starts only what fits host memory."""
        return False

    @property
    def reads(self) -> tuple[str, ...]:
        """What of `priority` and `deadline` it looks at; all of it if its priority does not say."""
        return tuple(self.priority.reads) if isinstance(self.priority, SelectivePriority) else _ALL_READS

    @property
    def shares_prefixes(self) -> bool:
        """It does."""
        return True
