"""What an iteration is to do."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxllm.errors import ConfigError, called, shown
from jaxllm.sched.policies import (
    ActionPolicy,
    Decision,
    LeastRecentlyUsed,
    LengthPolicy,
    NoOffload,
    OffloadPolicy,
    PoolState,
    PreemptionAction,
    ResumeDecision,
    RetentionPolicy,
    SchedulingPolicy,
)
from jaxllm.sched.policies.actions import num_copied
from jaxllm.sched.state import SchedulerState
from jaxllm.system.scalars import real
from jaxllm.types import MULTI_STEP_SEQS, Request


@dataclasses.dataclass(slots=True)
class Plan:
    """An iteration: who decodes, who computes how many prompt tokens, who gives up blocks, who takes some.

    Attributes:
        decodes: whether the running requests compute their next tokens.
        chunks: requests under way, and how many of their prompt tokens are computed.
        victims: who is preempted, and what becomes of it, in this order.
        scores: the victims' ids and scores, and those of the holder that would have been next.
        resuming: swapped requests that take blocks, how they come back, and how many tokens they compute.
        starting: waiting requests that take blocks, and how many tokens they compute; 0 if these must wait
            for what is copied from the host first.
        fetching: those of them that copy what they find in host memory, and how.
        reserved: the request that is the only one to take blocks, since it was passed over so often.
        drafts: running requests whose next tokens are verified as drafts, and these.
        num_lookups: how many tokens of each the device drafts by itself instead, if any.
        num_lookup_steps: in how many iterations.
        is_repeatable: whether the next iteration would be the same, if nothing happens, while blocks suffice.
    """

    decodes: bool = True
    chunks: list[tuple[Request, int]] = dataclasses.field(default_factory=list)
    victims: list[tuple[Request, Decision]] = dataclasses.field(default_factory=list)
    scores: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    resuming: list[tuple[Request, ResumeDecision, int]] = dataclasses.field(default_factory=list)
    starting: list[tuple[Request, int]] = dataclasses.field(default_factory=list)
    fetching: dict[Request, ResumeDecision] = dataclasses.field(default_factory=dict)
    reserved: Request | None = None
    drafts: list[tuple[Request, Sequence[int]]] = dataclasses.field(default_factory=list)
    num_lookups: int = 0
    num_lookup_steps: int = 0
    is_repeatable: bool = True

    def is_calm(self, state: SchedulerState) -> bool:
        """Whether several iterations like this one may go by without a decision, while blocks suffice."""
        others = state.is_queued or state.prompts or state.loading or len(state.running) > MULTI_STEP_SEQS
        return self.is_only_decode and self.is_repeatable and not others

    @property
    def is_only_decode(self) -> bool:
        """Whether nothing happens but that the running requests decode."""
        others = self.chunks or self.victims or self.resuming or self.starting or self.drafts
        return self.decodes and not others


class Planner(Protocol):
    """Decides iterations. It may raise: nothing has changed then."""

    @property
    def lets_sit_out(self) -> bool:
        """Whether it plans without those who sit out (`SchedulerState.sitting_out`)."""
        return False

    def plan(self, now: float) -> Plan | None:
        """The next iteration; None if somebody whose copy is on its way must join first."""
        ...


@runtime_checkable
class PlanningPolicy(SchedulingPolicy, Protocol):
    """A policy that plans in its own way, as baselines do; derive from it what differs from these answers.

    Nothing is predicted, swapped or shared, and its planner may look at `priority` and `deadline`.
    """

    @property
    def offload(self) -> OffloadPolicy:
        """Nothing."""
        return NoOffload()

    @property
    def retention(self) -> RetentionPolicy:
        """What was used last."""
        return LeastRecentlyUsed()

    @property
    def length(self) -> LengthPolicy | None:
        """Nobody."""
        return None

    @property
    def may_swap(self) -> bool:
        """It cannot."""
        return False

    @property
    def needs_host_pool(self) -> bool:
        """It does not."""
        return False

    @property
    def reads(self) -> tuple[str, ...]:
        """All of it."""
        return "priority", "deadline"

    @property
    def shares_prefixes(self) -> bool:
        """It does not."""
        return False

    def planner(self, state: SchedulerState) -> Planner:
        """What decides the iterations of a scheduler, reading its state."""
        ...


def ask_action(policy: ActionPolicy, victim: Request, pools: PoolState, room: int, now: float) -> Decision:
    """What becomes of a victim: as the policy says, or recomputed where its KV cannot be swapped.

    That is where there is none, or where more blocks are to be copied than the `room` in host memory.

    Raises:
        ConfigError: the policy's answer is no decision, or its predictions are no seconds.
    """
    decision = policy.choose(victim, pools, now)
    if not isinstance(decision, Decision) or not isinstance(decision.action, PreemptionAction):
        raise ConfigError(
            f"{called(policy)} answered {shown(decision)}, which is not a Decision of "
            f"{_names(PreemptionAction)}, for request {victim.request_id!r}"
        )
    check_seconds(policy, decision.swap_seconds, decision.recompute_seconds, decision.copy_seconds)
    if not victim.num_computed_tokens or num_copied(victim, pools) > room:
        return decision._replace(action=PreemptionAction.RECOMPUTE)
    return decision


def _names(actions: type[enum.Enum]) -> str:
    return " or ".join(map(str, actions))


def check_plan(plan: object, state: SchedulerState, who: str) -> None:
    """Verify that a planner from outside the package gives each request at most one thing to do, and its own.

    Args:
        plan: what it answered.
        state: what it read.
        who: whom messages name.

    Raises:
        ConfigError: it is no `Plan`, or names a request twice, or one that it was not offered for that.
    """
    if not isinstance(plan, Plan):
        raise ConfigError(f"{who} planned {shown(plan)}, which is not a Plan")
    prompts, holders = {*state.prompts}, {*state.running, *state.aside}
    offers: tuple[tuple[str, Sequence[tuple[Any, ...]], Callable[[Request], bool], str], ...] = (
        ("victims", plan.victims, lambda one: one in prompts or one in holders, "holds blocks"),
        ("chunks", plan.chunks, lambda one: one in prompts, "has its prompt under way"),
        ("resuming", plan.resuming, lambda one: state.queue_of(one) is state.swapped, "is swapped out"),
        ("starting", plan.starting, lambda one: state.queue_of(one) is state.waiting, "waits"),
    )
    seen: dict[str, str] = {}
    for name, entries, is_offered, which in offers:
        for request, *_ in entries:
            if not isinstance(request, Request) or state.live.get(request.request_id) is not request:
                raise ConfigError(
                    f"{who} names {shown(request)} in {name}, which is no request of this scheduler"
                )
            if request.request_id in seen:
                raise ConfigError(
                    f"{who} names request {request.request_id!r} in {seen[request.request_id]} and again in "
                    f"{name}: a plan names a request once"
                )
            seen[request.request_id] = name
            if not is_offered(request):
                raise ConfigError(
                    f"{who} names request {request.request_id!r} in {name}, which takes who {which}: it is "
                    f"{request.status.value}"
                )


def check_seconds(policy: object, *predicted: float | None) -> None:
    """Refuse predictions that are no seconds.

    Raises:
        ConfigError: one is neither None nor a finite number of at least 0.
    """
    for seconds in predicted:
        if seconds is None or (type(seconds) is float and 0.0 <= seconds < math.inf):
            continue
        if (known := real(seconds)) is None or not 0.0 <= known < math.inf:
            raise ConfigError(
                f"{called(policy)} predicted {shown(seconds)} s; predict seconds of at least 0, or None"
            )
