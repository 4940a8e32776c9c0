"""Decides what an iteration is to do as a `SchedulerPolicy` answers, without changing anything."""

from __future__ import annotations

import copy
import dataclasses
import heapq
import math
import numbers
from collections.abc import Iterable, Sequence

from jaxllm.errors import ConfigError, called, shown
from jaxllm.sched.cache.preview import PoolPreview
from jaxllm.sched.plan import Plan, Planner, PlanningPolicy, ask_action
from jaxllm.sched.policies import (
    QUESTIONS,
    IterationState,
    PoolState,
    PreemptionAction,
    ResumeAction,
    SchedulerPolicy,
    SchedulingPolicy,
)
from jaxllm.sched.policies.actions import num_copied
from jaxllm.sched.policies.contract import watched
from jaxllm.sched.policies.victims import Outranks
from jaxllm.sched.queues import RequestQueue, Verdict
from jaxllm.sched.state import SchedulerState
from jaxllm.sched.taking import AT_ONCE, Offer, Room, Taking, preview_of
from jaxllm.types import Request, RequestStatus

_FULL = 0.9
"""Share of a program's rows from which on it is not worth cutting prompts for a smaller one."""

_Rank = tuple[float, int, Request]  # score, infinite of protected ones, and the later arrival first


class PolicyPlanner(Planner):
    """Plans as a `SchedulerPolicy` answers.

    The running requests' next tokens come first, then the prompts under way, in chunks; then those who return
    or start, until the budget or the blocks are used up. Where blocks run out for the first two, holders are
    preempted, and nobody returns or starts.

    Attributes:
        lets_sit_out: it plans without those who sit out; they are the first to be preempted.
    """

    lets_sit_out = True

    def __init__(self, state: SchedulerState, policy: SchedulerPolicy) -> None:
        """Reads `state`."""
        self._state, self._policy = state, _watched(policy)
        self._mixes = policy.iterations.mixes
        self._max_chunks = state.config.max_prefill_seqs or state.config.max_num_seqs

    def plan(self, now: float) -> Plan | None:
        """The next iteration."""
        state, is_queued = self._state, self._state.is_queued
        plan, num_tokens = Plan(), 0
        if state.prompts or is_queued or state.loading:
            num_tokens = self._num_prompt_tokens()
            self._go_on(plan, num_tokens)
        if self._num_needed(plan) > state.pool.num_free:
            if state.num_holders == 1 and state.loading:
                return None  # so that there is somebody to preempt
            if not self._preempt(plan, num_tokens, now) and state.loading:
                return None
        elif is_queued:
            self._take_in(plan, self._room(plan, num_tokens), now)
        if not (state.running or plan.chunks or plan.starting or plan.resuming) and state.loading:
            return None
        if plan.chunks or plan.starting:
            self._fit_program(plan)
        return plan

    def _num_prompt_tokens(self) -> int:
        """Most prompt tokens of the iteration."""
        state, policy = self._state, self._policy.iterations
        under_way = [request.num_tokens - request.num_computed_tokens for request in state.prompts]
        fitting = min(state.waiting.num_tokens, state.pool.num_free * state.pool.block_size)
        backlog = fitting + sum(under_way)
        num_decodes, budget = len(state.running), state.config.max_num_batched_tokens
        asked = IterationState(num_decodes, state.running.num_tokens, backlog, budget)
        answer = policy.num_prompt_tokens(asked)
        if isinstance(answer, bool) or not isinstance(answer, int) or answer < 0:
            raise ConfigError(
                f"{called(policy)} lets {shown(answer)} prompt tokens ride; it must be an integer from 0 up"
            )
        answer = min(answer, budget - num_decodes if self._mixes else budget)
        return answer if num_decodes else max(answer, 1)

    # Those who hold blocks

    def _go_on(self, plan: Plan, num_tokens: int) -> None:
        """Let the running requests go on, and as much of the prompts under way as `num_tokens` allow."""
        gone = {request for request, _ in plan.victims}
        plan.chunks = []
        for request in self._state.prompts[: self._max_chunks + len(gone)]:
            length = min(request.num_to_compute, num_tokens)
            if length <= 0 or len(plan.chunks) == self._max_chunks:
                break
            if request not in gone:
                plan.chunks.append((request, length))
                num_tokens -= length
        plan.decodes = self._mixes or not plan.chunks

    def _num_needed(self, plan: Plan) -> int:
        """Blocks that those who go on need."""
        state, num_needed = self._state, len(self._state.running.growing) * plan.decodes
        for request, length in plan.chunks:
            num_needed += state.num_missing(request, request.num_computed_tokens + length)
        return num_needed

    def _preempt(self, plan: Plan, num_tokens: int, now: float) -> bool:
        """Add victims until the others have the blocks they need (True), or one holder is left."""
        state, preview = self._state, PoolPreview(self._state.pool)
        pools = state.pools(state.pool.num_free)
        aside = list(state.aside)
        holders = [*state.running, *state.prompts, *aside]
        scores = self._scores(holders, pools, now)
        order = _victim_order(scores, holders[: len(holders) - len(aside)])
        growing = state.running.growing
        num_spared = 0  # blocks that victims among the running ones do not need
        num_needed = self._num_needed(plan)
        for score, victim in zip(scores[len(order) :], aside, strict=True):
            if num_needed > pools.num_free:
                pools = self._give_up(plan, victim, score, pools, preview, now)
        while num_needed - num_spared * plan.decodes > pools.num_free and len(order) > 1:
            score, _, victim = heapq.heappop(order)
            num_spared += victim in growing
            pools = self._give_up(plan, victim, score, pools, preview, now)
            if not victim.is_decoding:
                self._go_on(plan, num_tokens)
                num_needed = self._num_needed(plan)
        if not (pools.num_running or plan.chunks):
            self._go_on(plan, 1)
            num_needed = self._num_needed(plan)
        plan.scores.append(_next_score(order))
        return num_needed - num_spared * plan.decodes <= pools.num_free

    def _scores(self, holders: Sequence[Request], pools: PoolState, now: float) -> list[float]:
        """What the victim policy says of holders.

        Raises:
            ConfigError: that is not a number.
        """
        policy = self._policy.victim
        scorer = getattr(policy, "scorer", None)  # of a `PoolVictim`
        if scorer is None:
            scores = [policy.score(request, now) for request in holders]
        else:
            scores = list(map(scorer(pools, now), holders))
        if set(map(type, scores)) != {float} or any(map(math.isnan, scores)):
            for one, request in zip(scores, holders, strict=True):
                if not isinstance(one, numbers.Real) or one != one:
                    raise ConfigError(
                        f"{called(policy)} scored {request!r} with {shown(one)}, which is not a number"
                    )
        return scores

    def _give_up(
        self, plan: Plan, victim: Request, score: float, pools: PoolState, preview: PoolPreview, now: float
    ) -> PoolState:
        """Add a victim to `plan`; returns the pools without it."""
        is_running = victim.is_decoding
        num_running = pools.num_running - is_running
        num_tokens = pools.num_context_tokens - is_running * victim.num_tokens
        policy, state = self._policy.action, self._state
        num_shared = state.pool.num_shared(victim.block_ids)
        on_host = state.lookups.held_on_host(victim)
        num_host_free = state.host.num_available_beside(preview.kept.union(on_host)) - preview.num_stored
        asked = pools._replace(
            num_running=num_running,
            num_context_tokens=num_tokens,
            num_host_free=max(0, num_host_free),
            num_shared=num_shared,
            num_on_host=len(on_host),
        )
        # What was not promised to earlier victims; and whoever is half computed cannot come back to decode.
        room = num_host_free if self._mixes or is_running else -1
        decision = ask_action(policy, victim, asked, room, now)
        if decision.action is PreemptionAction.SWAP:
            preview.kept.update(on_host)
            preview.num_stored += num_copied(victim, asked)
        plan.victims.append((victim, decision))
        plan.scores.append((victim.request_id, score))
        num_free = pools.num_free + preview.release(victim.block_ids)
        return asked._replace(num_free=num_free, num_shared=0, num_on_host=0)

    # Those who want some

    def _room(self, plan: Plan, num_tokens: int) -> Room:
        """What is left of so many tokens, and of the blocks, beside all that others need to go on."""
        state = self._state
        num_free = state.pool.num_free - len(state.running.growing)  # they go on, now or next
        for request in (*state.prompts, *state.loaders):
            num_free -= state.pool.blocks_for(request.num_tokens) - len(request.block_ids)
        num_tokens -= sum([length for _, length in plan.chunks])
        return Room(num_free, num_tokens, len(state.free_slots), self._max_chunks - len(plan.chunks))

    def _take_in(self, plan: Plan, room: Room, now: float) -> None:
        """Add to `plan` who resumes or starts."""
        state, num_tokens, room.latest = self._state, room.num_tokens, self._latest(now)
        first, num_passing = self._most_passing()
        if num_passing <= 0:
            plan.reserved = first
            resuming = self._take(plan, state.swapped, room, now, only=first)
            starting = self._take(plan, state.waiting, room, now, only=first)
        else:
            resuming, starting = self._take_sets(plan, room, now)
            taking = [*resuming, *starting]
            if len(taking) > num_passing and first not in [offer.request for offer in taking]:
                resuming = resuming[: int(num_passing)]
                starting = starting[: int(num_passing) - len(resuming)]
        if not (resuming or starting):
            if plan.reserved is None and (outranks := self._policy.victim.outranks) is not None:
                self._outrank(plan, room, now, outranks)
            return
        computes = any(offer.length for offer in starting)
        if resuming and not (state.running or plan.chunks or computes):  # nothing else to do than to wait
            offer = resuming[0]
            num_left = num_tokens - sum([other.length for other in resuming[1:]])
            offer.length = max(1, min(offer.length or offer.num_left, num_left))
            offer.decision = offer.decision._replace(action=ResumeAction.AT_ONCE)
        plan.resuming = [(offer.request, offer.decision, offer.length) for offer in resuming]
        plan.starting = [(offer.request, offer.length) for offer in starting]
        plan.fetching = {offer.request: offer.decision for offer in starting if offer.copies}
        plan.decodes = plan.decodes and (self._mixes or not computes)

    def _most_passing(self) -> tuple[Request, float]:
        """The first that is queued, and by how many it may be passed over."""
        state, patience = self._state, self._policy.patience
        first = state.first_queued()
        assert first is not None  # somebody is queued
        return first, math.inf if patience is None or state.sits_out(first) else patience - first.num_passed

    def _latest(self, now: float) -> float:
        """When whoever takes room must have come, lest the first that is queued waits for too long."""
        state, share = self._state, self._policy.max_extra_wait
        if share is None or not state.num_holders:
            return math.inf
        first = state.first_queued(is_alone=True)
        if first is None or first.num_in_flight or state.has_to_wait(first) or state.sits_out(first):
            return math.inf
        waited = now - first.arrival_time
        return now - waited / (1.0 + share) if waited > 0.0 else math.inf

    def _take_sets(self, plan: Plan, room: Room, now: float) -> tuple[list[Offer], list[Offer]]:
        """Who resumes, and who starts; one of the two, and the other in what is left, where both may."""
        state, alone = self._state, room
        resuming: list[Offer] = []
        # A copy that is all there is to wait for is alone.
        if state.swapped and (state.num_holders or not state.loading):
            alone = dataclasses.replace(room)
            resuming = self._take(plan, state.swapped, room, now)
        starting = self._take(plan, state.waiting, alone, now)
        if resuming and starting:
            waiting, swapped = [[offer.request for offer in offers] for offers in (starting, resuming)]
            if self._policy.restore.swaps_in(waiting, swapped, now):
                starting = self._take(plan, state.waiting, room, now, resuming) if self._mixes else []
            else:
                resuming = self._take(plan, state.swapped, alone, now) if self._mixes else []
        elif not (resuming or starting or state.num_holders or state.loading):
            # Nothing will ever change: whoever was put off goes.
            resuming = self._take(plan, state.swapped, room, now, is_forced=True)
        return resuming, starting

    def _take(
        self,
        plan: Plan,
        queue: RequestQueue,
        room: Room,
        now: float,
        after: Sequence[Offer] = (),
        *,
        only: Request | None = None,
        is_forced: bool = False,
    ) -> list[Offer]:
        """Requests of a queue that `room` suffices for, when those `after` which they come have theirs."""
        state, is_waiting, preview = self._state, queue is self._state.waiting, None
        if not queue or (only is not None and state.queue_of(only) is not queue):
            return []
        if min(room.num_tokens, room.num_slots) < 1:
            return []
        if room.num_chunks < 1 if is_waiting else room.num_blocks < 1 or (plan.chunks and not self._mixes):
            return []
        if is_waiting and state.may_find:
            preview = preview_of(state, plan, after, mixes=self._mixes)
        elif not is_waiting and state.config.enable_prefix_caching:
            preview = PoolPreview(state.pool)  # their copies are before all else
        elif state.pool.blocks_for(queue.min_num_tokens) > room.num_blocks:
            return []
        is_forced = is_forced or only is not None
        taking = Taking(state, self._policy, plan, preview, room, now, after, is_forced)
        return taking.visit(queue, only)

    def _outrank(self, plan: Plan, room: Room, now: float, outranks: Outranks) -> None:
        """Let the most urgent queued request take the room of holders, if the policy says so."""
        state, mixes, queued = self._state, self._mixes, self._most_urgent(now)
        is_over = not plan.decodes or min(room.num_tokens, room.num_chunks) < 1
        if is_over or state.has_to_wait(queued) or queued.num_in_flight:
            return
        preview, is_waiting = None, queued.status is RequestStatus.WAITING
        if state.may_find if is_waiting else state.config.enable_prefix_caching:
            preview = preview_of(state, plan, mixes=mixes, is_certain=False)
        taking = Taking(state, self._policy, plan, preview, room, now)
        # What is on the host is computed again: victims' copies may take its room.
        offer = taking.offer(queued, on_host=False)
        found = self._make_room(offer, room, now, outranks)
        if found is None:
            return
        gone = {request for request, _ in found.victims}
        plan.chunks = [(request, length) for request, length in plan.chunks if request not in gone]
        plan.victims, plan.scores = found.victims, found.scores
        length = taking.num_at_once(offer)
        if is_waiting:
            plan.starting, plan.decodes = [(queued, length)], mixes
        else:
            plan.resuming = [(queued, AT_ONCE, length)]

    def _most_urgent(self, now: float) -> Request:
        """Of the heads of the queues."""
        heads: list[Request] = []

        def look(request: Request) -> Verdict:
            heads.append(request)
            return Verdict.STOP

        for queue in (self._state.waiting, self._state.swapped):
            queue.visit(now, look)
        return min(heads, key=lambda one: (-self._policy.priority.score(one, now), one.arrival_index))

    def _make_room(self, offer: Offer, room: Room, now: float, outranks: Outranks) -> Plan | None:
        """A plan of the victims that give a queued request what it needs; None if they may not."""
        state, queued, num_needed = self._state, offer.request, offer.num_needed
        holders, found = [*state.running, *state.prompts], Plan()
        order = _victim_order(self._scores(holders, state.pools(state.pool.num_free), now), holders)
        pools, preview = state.pools(room.num_blocks), PoolPreview(state.pool)
        while order and not (pools.num_free >= num_needed and (found.victims or room.num_slots > 0)):
            score, _, victim = heapq.heappop(order)
            if victim.is_protected or not outranks(queued, victim, now):
                return None
            pools = self._give_up(found, victim, score, pools, preview, now)
            num_needed = offer.num_needed + preview.num_released(offer.hit)
        if pools.num_free < num_needed or not found.victims:
            return None
        if not (offer.is_swapped or self._policy.admission.admits(queued, num_needed, pools)):
            return None
        if order:
            found.scores.append(_next_score(order))
        return found

    def _fit_program(self, plan: Plan) -> None:
        """Cut prompts so that they fill a program of the executor's, where that computes less in vain."""
        state, sizes = self._state, self._state.config.program_sizes
        if not sizes:
            return
        num_gone = sum([victim.is_decoding for victim, _ in plan.victims])
        num_decodes = (len(state.running) - num_gone) * plan.decodes
        num_decodes += sum([length for _, _, length in plan.resuming])
        total = num_decodes + sum(length for _, length in (*plan.chunks, *plan.starting))
        size = next((size for size in sizes if size >= total), 0)
        smaller = max((size for size in sizes if size <= total), default=0)
        if total >= _FULL * size or smaller <= num_decodes:
            return
        rest = total - smaller
        if len(state.waiting) == len(plan.starting):  # nobody else will fill the program of the rest
            later = next((size for size in sizes if size >= num_decodes + rest), size)
            if smaller + later - num_decodes >= size:
                return
        for of in (plan.starting, plan.chunks):
            while of and rest:
                request, length = of.pop()
                if length > rest:
                    of.append((request, length - rest))
                rest -= min(rest, length)


def _watched(policy: SchedulerPolicy) -> SchedulerPolicy:
    """The policy, its parts from outside the package watched (`jaxllm.sched.policies.contract`)."""
    answers = {question: getattr(policy, question) for question in QUESTIONS}
    changes = {question: watched(part) for question, part in answers.items()}
    if all(changes[question] is part for question, part in answers.items()):
        return policy
    made = copy.copy(policy)
    for question, part in changes.items():
        object.__setattr__(made, question, part)  # of a frozen dataclass
    return made


def _victim_order(scores: Iterable[float], holders: Iterable[Request]) -> list[_Rank]:
    """A heap of holders, the first to lose its blocks first; protected ones last, by arrival."""
    order = [
        (math.inf if request.is_protected else score, -request.arrival_index, request)
        for score, request in zip(scores, holders, strict=False)
    ]
    heapq.heapify(order)
    return order


def _next_score(order: list[_Rank]) -> tuple[str, float]:
    """Id and score of the holder that would be preempted next."""
    score, _, request = order[0]
    return request.request_id, score


def planner_of(policy: SchedulingPolicy, state: SchedulerState) -> Planner:
    """The policy's own planner, or the one that plans as its parts answer.

    Raises:
        ConfigError: it is neither a `PlanningPolicy` nor a `SchedulerPolicy`.
    """
    if isinstance(policy, PlanningPolicy):
        return policy.planner(state)
    if isinstance(policy, SchedulerPolicy):
        return PolicyPlanner(state, policy)
    raise ConfigError(
        f"{called(policy)} does not say how to plan: pass a SchedulerPolicy, or derive its class from "
        "jaxllm.sched.plan.PlanningPolicy"
    )
