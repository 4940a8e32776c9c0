"""Decides what an iteration is to do as a `SchedulerPolicy` answers, without changing anything."""

from __future__ import annotations

import dataclasses
import heapq
import math
import numbers
from collections.abc import Sequence

from jaxllm.errors import ConfigError
from jaxllm.sched.cache.names import BlockName, NameIndex
from jaxllm.sched.cache.preview import NO_HIT, Hit, PoolPreview
from jaxllm.sched.plan import Plan, Planner, ask_action, check_seconds
from jaxllm.sched.policies import (
    IterationState,
    PoolState,
    PreemptionAction,
    ResumeAction,
    ResumeDecision,
    SchedulerPolicy,
)
from jaxllm.sched.policies.actions import num_copied
from jaxllm.sched.policies.victims import Outranks
from jaxllm.sched.queues import Verdict
from jaxllm.sched.state import SchedulerState
from jaxllm.types import HostBlock, Request, RequestStatus

_MAX_LOOKED_UP = 2**15
"""Blocks that are looked up, after which nobody else starts or resumes in an iteration."""
_FULL = 0.9
"""Share of a program's rows from which on it is not worth cutting prompts for a smaller one."""


@dataclasses.dataclass(slots=True)
class _Room:
    """What is left for those who return or start."""

    num_blocks: int
    num_tokens: int
    num_slots: int
    num_chunks: int


_Resuming = Sequence[tuple[Request, ResumeDecision, int]]
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
        self._state, self._policy = state, policy
        self._mixes = policy.iterations.mixes
        self._max_chunks = state.config.max_prefill_seqs or state.config.max_num_seqs
        skips = policy.restore.skips
        # What the visit of a request leads to that is too large, and of one that does not suit now.
        self._too_large = Verdict.SKIP if skips else Verdict.STOP
        self._unsuited = Verdict.SKIP_ONE if skips else Verdict.STOP

    def plan(self, now: float) -> Plan | None:
        """The next iteration."""
        state = self._state
        plan, num_tokens = Plan(), 0
        if state.prompts or state.is_queued or state.loading:
            num_tokens = self._num_prompt_tokens()
            self._go_on(plan, num_tokens)
        num_free = state.pool.num_free - self._num_needed(plan)
        if num_free < 0:
            if state.num_holders == 1 and state.loading:
                return None  # so that there is somebody to preempt
            if not self._preempt(plan, num_tokens, now) and state.loading:
                return None
        elif state.is_queued:
            self._take_in(plan, num_tokens, num_free, now)
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
            raise ConfigError(f"{policy} lets {answer!r} prompt tokens ride; it must be an integer from 0 up")
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
        num_needed = len(self._state.running.growing) if plan.decodes else 0
        return num_needed + sum([self._num_missing(*chunk) for chunk in plan.chunks])

    def _num_missing(self, request: Request, length: int) -> int:
        return self._state.num_missing(request, request.num_computed_tokens + length)

    def _preempt(self, plan: Plan, num_tokens: int, now: float) -> bool:
        """Add victims until the others have the blocks they need (True), or one holder is left."""
        state = self._state
        order = self._victim_order(now)
        pools, preview = state.pools(state.pool.num_free), PoolPreview(state.pool)
        growing = state.running.growing
        num_spared = 0  # blocks that victims among the running ones do not need
        num_needed = self._num_needed(plan)
        for victim in state.aside:
            if num_needed > pools.num_free:
                score = self._policy.victim.score(victim, now)
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

    def _victim_order(self, now: float) -> list[_Rank]:
        """A heap of all holders, the first to lose its blocks first; protected ones last, by arrival."""
        policy, state = self._policy.victim, self._state
        holders = [*state.running, *state.prompts]
        scores = [policy.score(request, now) for request in holders]
        order = [
            (math.inf if request.is_protected else score, -request.arrival_index, request)
            for request, score in zip(holders, scores, strict=True)
        ]
        for score in scores:
            if (type(score) is not float and not isinstance(score, numbers.Real)) or score != score:
                raise ConfigError(f"{policy} scored a request with {score!r}, which is not a number")
        heapq.heapify(order)
        return order

    def _give_up(
        self,
        plan: Plan,
        victim: Request,
        score: float,
        pools: PoolState,
        preview: PoolPreview,
        now: float,
    ) -> PoolState:
        """Add a victim to `plan`; returns the pools without it."""
        is_running = victim.is_decoding
        num_running = pools.num_running - is_running
        num_tokens = pools.num_context_tokens - is_running * victim.num_tokens
        pools = pools._replace(num_running=num_running, num_context_tokens=num_tokens)
        policy, state = self._policy.action, self._state
        num_shared = state.pool.num_shared(victim.block_ids)
        on_host = state.held_on_host(victim)
        num_host_free = state.host.num_available_beside(preview.kept.union(on_host)) - preview.num_stored
        pools = pools._replace(num_host_free=max(0, num_host_free))
        asked = pools._replace(num_shared=num_shared, num_on_host=len(on_host))
        # What was not promised to earlier victims; and whoever is half computed cannot come back to decode.
        room = num_host_free if self._mixes or is_running else -1
        decision = ask_action(policy, victim, asked, room, now)
        if decision.action is PreemptionAction.SWAP:
            preview.kept.update(on_host)
            preview.num_stored += num_copied(victim, asked)
        plan.victims.append((victim, decision))
        plan.scores.append((victim.request_id, score))
        return pools._replace(num_free=pools.num_free + preview.release(victim.block_ids))

    # Those who want some

    def _take_in(self, plan: Plan, num_tokens: int, num_free: int, now: float) -> None:
        """Add to `plan` who resumes or starts within so many tokens and blocks."""
        state, restore = self._state, self._policy.restore
        for request in (*state.prompts, *state.loaders):  # what they still need is theirs
            num_free -= state.pool.blocks_for(request.num_tokens) - len(request.block_ids)
        if not plan.decodes:
            num_free -= len(state.running.growing)  # they go on next
        for request, length in plan.chunks:
            num_free += self._num_missing(request, length)  # which was taken off before
            num_tokens -= length
        num_chunks = self._max_chunks - len(plan.chunks)
        room = _Room(num_free, num_tokens, len(state.free_slots), num_chunks)
        first = state.first_queued()
        assert first is not None  # somebody is queued
        num_passing = math.inf
        if self._policy.patience is not None and not state.sits_out(first):
            num_passing = self._policy.patience - first.num_passed
        if num_passing <= 0:
            plan.reserved = first
            self._take_only(plan, first, room, now)
            return
        alone = dataclasses.replace(room)
        # Where a copy is all there is to wait for, no other is put before it.
        is_free = state.num_holders > 0 or not state.loading
        resuming = self._resumable(room, now) if is_free and (self._mixes or not plan.chunks) else []
        starting = self._startable(plan, alone, now)
        if resuming and starting:
            waiting, swapped = [one[0] for one in starting], [one[0] for one in resuming]
            if restore.swaps_in(waiting, swapped, now):
                starting = self._startable(plan, room, now, resuming) if self._mixes else []
            else:
                resuming = self._resumable(alone, now) if self._mixes else []
        elif not (resuming or starting or state.num_holders or state.loading):
            # Nothing will ever change: whoever was put off goes.
            resuming = self._resumable(room, now, put_off=False)
        taking = [one[0] for one in (*resuming, *starting)]
        if len(taking) > num_passing and first not in taking:
            resuming = resuming[: int(num_passing)]
            starting = starting[: int(num_passing) - len(resuming)]
        is_idle = not (state.running or plan.chunks or any(length for _, length in starting))
        if is_idle and resuming:  # nothing else to do than to wait
            request, decision, length = resuming[0]
            num_left = num_tokens - sum([one[2] for one in resuming[1:]])
            length = max(1, min(length or request.num_tokens - request.num_computed_tokens, num_left))
            resuming[0] = request, decision._replace(action=ResumeAction.AT_ONCE), length
        plan.resuming, plan.starting = resuming, starting
        plan.decodes = plan.decodes and (self._mixes or not any(length for _, length in starting))
        if not (resuming or starting) and self._policy.victim.outranks is not None:
            self._outrank(plan, room, now, self._policy.victim.outranks)

    def _take_only(self, plan: Plan, request: Request, room: _Room, now: float) -> None:
        """Let this one take blocks, if there are enough, and nobody else."""
        state = self._state
        hit, decision = NO_HIT, ResumeDecision(ResumeAction.AT_ONCE)
        if state.config.enable_prefix_caching:
            preview = self._preview(plan)
            is_waiting = request.status is RequestStatus.WAITING
            hit = self._find(preview, request) if is_waiting else self._find_copies(preview, request)
            if hit.copied and is_waiting:
                pools = state.pools(room.num_blocks)
                hit, decision = self._ask_to_copy(request, hit, preview, pools, now, now)
        num_needed = state.pool.blocks_for(request.num_tokens) - hit.num_on_device + len(hit.free)
        has_room = num_needed <= room.num_blocks
        is_free = min(room.num_slots, room.num_tokens, room.num_chunks) > 0
        if not (has_room and is_free) or request.num_in_flight or state.is_coming(hit.copied):
            return
        if state.has_to_wait(request):
            return
        length = min(self._num_in_first_run(request, hit), room.num_tokens)
        decision = decision._replace(action=ResumeAction.AT_ONCE)
        if request.status is RequestStatus.SWAPPED and (self._mixes or not plan.chunks):
            plan.resuming = [(request, decision, length)]
        elif request.status is RequestStatus.WAITING:
            plan.starting = [(request, length)]
            if hit.copied:
                plan.fetching[request] = decision
            plan.decodes = self._mixes

    def _num_left(self, request: Request, hit: Hit) -> int:
        """Tokens that a queued request has to compute beside what it finds."""
        if request.status is RequestStatus.SWAPPED:
            return request.num_tokens - request.num_computed_tokens
        return request.num_tokens - hit.num_blocks * self._state.pool.block_size

    def _num_in_first_run(self, request: Request, hit: Hit) -> int:
        """Those of them until the next one that it finds."""
        if request.status is RequestStatus.WAITING and hit.num_missing:
            return hit.num_missing * self._state.pool.block_size
        return self._num_left(request, hit)

    def _preview(self, plan: Plan, resuming: _Resuming = (), *, is_certain: bool = True) -> PoolPreview:
        """The pool when those who go on, and those who resume, have taken what they need.

        What they compute is found only if they are certain to go on.
        """
        state = self._state
        preview = PoolPreview(state.pool, is_exact=is_certain and not resuming)
        preview.take(sum([state.pool.blocks_for(request.num_tokens) for request, _, _ in resuming]))
        size = state.pool.block_size
        if plan.decodes and self._mixes:  # else those who start stop them
            preview.take(len(state.running.growing))
            for request in state.running.filling if is_certain else ():
                stop = (request.num_computed_tokens + 1) // size
                preview.compute(state.learn_names(request, stop * size)[stop - 1 : stop])
        for request, length in plan.chunks:
            preview.take(self._num_missing(request, length))
            stop = request.num_computed_tokens + length
            if is_certain:
                preview.compute(state.learn_names(request, stop)[request.num_named_blocks : stop // size])
        return preview

    def _find(self, preview: PoolPreview, request: Request) -> Hit:
        """What a waiting request finds; all its blocks are looked for only if the first is there.

        Where others may be without it, if that or one in the middle or the last is.
        """
        state = self._state
        names = state.findable(request)
        probes = [*names[:1], *(_probes(names) if state.looks_past_gaps else ())]
        if any(preview.is_there(name, state.host.names) for name in probes):
            return self._find_all(preview, request, names, state.host.names)
        return NO_HIT

    def _find_copies(self, preview: PoolPreview, request: Request) -> Hit:
        """Where the blocks are that a swapped request has on the host."""
        names, is_chain = request.block_names, not request.uncut_names
        return preview.find_each(names, request.host_blocks, is_chain=is_chain)

    def _find_all(
        self,
        preview: PoolPreview,
        request: Request,
        names: Sequence[BlockName],
        on_host: NameIndex[HostBlock] | None = None,
    ) -> Hit:
        """What a waiting request finds of `names`."""
        looks_past_gaps, is_chain = self._state.looks_past_gaps, not request.uncut_names
        return preview.find(names, on_host, looks_past_gaps=looks_past_gaps, is_chain=is_chain)

    def _ask_to_copy(
        self,
        request: Request,
        hit: Hit,
        preview: PoolPreview,
        pools: PoolState,
        copied_out_at: float,
        now: float,
    ) -> tuple[Hit, ResumeDecision]:
        """How a queued request copies what it finds on the host, and what it finds if it copies nothing."""
        policy, on_device = self._policy.resume, hit
        num_more = 0
        if request.status is RequestStatus.WAITING:
            on_device = self._find_all(preview, request, self._state.findable(request))
            num_more = (hit.num_blocks - on_device.num_blocks) * pools.block_size
        pools = pools._replace(num_to_copy=self._state.host.num_moved(hit.copied), num_to_recompute=num_more)
        decision = policy.choose(request, copied_out_at, pools, now)
        if not isinstance(decision, ResumeDecision) or not isinstance(decision.action, ResumeAction):
            raise ConfigError(f"{policy} answered {decision!r}, which is not a ResumeDecision")
        check_seconds(policy, decision.swap_seconds, decision.copy_seconds)
        if decision.action is ResumeAction.RECOMPUTE:
            if num_more:
                return on_device, decision
            decision = decision._replace(action=ResumeAction.LATER)
        return hit, decision

    def _startable(
        self, plan: Plan, room: _Room, now: float, resuming: _Resuming = ()
    ) -> list[tuple[Request, int]]:
        """Waiting requests that fit into `room`, and how many tokens they compute; takes that off."""
        state, admission = self._state, self._policy.admission
        pool, waiting = state.pool, state.waiting
        if not waiting or min(room.num_slots, room.num_chunks, room.num_tokens) < 1:
            return []
        preview = self._preview(plan, resuming) if state.may_find else None
        if preview is None and pool.blocks_for(waiting.min_num_tokens) > room.num_blocks:
            return []
        starting: list[tuple[Request, int]] = []
        pools: PoolState | None = None
        # Who finds blocks may be short, however long it is.
        too_large = self._too_large if preview is None else self._unsuited
        is_busy = bool(state.running or plan.chunks or resuming)

        def judge(request: Request) -> Verdict:
            nonlocal pools, is_busy
            if min(room.num_slots, room.num_chunks, room.num_tokens) < 1:
                return Verdict.STOP
            if state.sits_out(request):
                return Verdict.SKIP_ONE
            if state.has_to_wait(request):
                return self._unsuited
            num_needed, hit = pool.blocks_for(request.num_tokens), NO_HIT
            decision = ResumeDecision(ResumeAction.AT_ONCE)
            if pools is None:
                pools = state.pools(room.num_blocks)
            if preview is not None:
                if preview.num_looked_up > _MAX_LOOKED_UP:
                    return Verdict.STOP
                hit = self._find(preview, request)
                num_needed += len(hit.free) - hit.num_on_device
                if state.is_coming(hit.copied):
                    return self._unsuited
            if num_needed > room.num_blocks:
                return too_large
            if hit.copied and preview is not None:
                hit, decision = self._ask_to_copy(request, hit, preview, pools, now, now)
                if not is_busy:  # nothing else to do than to wait
                    decision = decision._replace(action=ResumeAction.AT_ONCE)
                elif decision.action is ResumeAction.LATER:
                    return self._unsuited
            num_tokens = self._num_left(request, hit)
            if num_tokens > room.num_tokens and not self._mixes and (starting or plan.chunks):
                return too_large  # only the first prompt of a prefill is split
            if request.num_in_flight:
                return self._unsuited  # just preempted: its newest token is not known yet
            # Whoever has the pool to itself starts, whatever the policy says: nothing would ever free more.
            if (room.num_blocks < pool.num_blocks or state.swapped) and not admission.admits(
                request, num_needed, pools
            ):
                return too_large
            is_later = bool(hit.copied) and decision.action is ResumeAction.IN_BACKGROUND
            length = 0 if is_later else min(self._num_in_first_run(request, hit), room.num_tokens)
            is_busy = is_busy or not is_later
            room.num_blocks -= num_needed
            room.num_tokens -= length
            room.num_slots -= 1
            room.num_chunks -= not is_later
            pools = pools._replace(num_free=room.num_blocks)
            if preview is not None:
                self._plan_to_find(preview, request, hit, length)
            plan.fetching.pop(request, None)
            if hit.copied:
                plan.fetching[request] = decision
                until = max(now, pools.copy_in_until) + (decision.copy_seconds or 0.0)
                pools = pools._replace(copy_in_until=until)
            starting.append((request, length))
            return Verdict.TAKE

        waiting.visit(now, judge, self._least_too_long(room) if preview is None else math.inf)
        return starting

    def _plan_to_find(self, preview: PoolPreview, request: Request, hit: Hit, length: int) -> None:
        """Let a request hold what it finds, and compute so many tokens more."""
        pool = self._state.pool
        preview.hold(hit)
        stop = hit.num_first * pool.block_size + length
        preview.take(pool.blocks_for(stop) - hit.num_first + len(hit.copied))
        if length or not hit.copied:
            names = self._state.learn_names(request, stop)
            first = 0 if hit.copied else hit.num_first  # those are there already
            preview.compute(names[first : stop // pool.block_size])

    def _resumable(
        self, room: _Room, now: float, *, put_off: bool = True
    ) -> list[tuple[Request, ResumeDecision, int]]:
        """Swapped requests that fit into `room` with their next token, and how they come back, as above.

        Without `put_off` the policy is not asked, and the first that fits resumes at once, alone.
        """
        state, pool = self._state, self._state.pool
        if not state.swapped or min(room.num_slots, room.num_blocks, room.num_tokens) < 1:
            return []
        resuming: list[tuple[Request, ResumeDecision, int]] = []
        pools = state.pools(room.num_blocks)
        preview = PoolPreview(pool)
        finds = state.config.enable_prefix_caching  # then who is long may need few blocks

        def judge(request: Request) -> Verdict:
            nonlocal pools
            if min(room.num_slots, room.num_tokens) < 1 or (resuming and not put_off):
                return Verdict.STOP
            if preview.num_looked_up > _MAX_LOOKED_UP:
                return Verdict.STOP
            names, is_chain = request.block_names[: len(request.host_blocks)], not request.uncut_names
            hit = preview.find(names, looks_past_gaps=True, is_chain=is_chain)
            num_needed = pool.blocks_for(request.num_tokens) - hit.num_blocks + len(hit.free)
            if num_needed > room.num_blocks:
                return self._unsuited if finds else self._too_large
            hit = self._find_copies(preview, request)
            num_left = request.num_tokens - request.num_computed_tokens
            if request.num_in_flight or (num_left > 1 and room.num_chunks < 1) or state.has_to_wait(request):
                return self._unsuited
            if state.is_coming(hit.copied):
                return self._unsuited
            decision = ResumeDecision(ResumeAction.AT_ONCE)
            if put_off:
                copied_out_at = state.copied_out_at.get(request.request_id, now)
                hit, decision = self._ask_to_copy(request, hit, preview, pools, copied_out_at, now)
            if decision.action is ResumeAction.LATER:
                return Verdict.STOP
            length = 0
            if decision.action is ResumeAction.AT_ONCE:
                length = min(num_left, room.num_tokens)
            room.num_blocks -= num_needed
            room.num_tokens -= length
            room.num_slots -= 1
            room.num_chunks -= num_left > 1
            until = max(now, pools.copy_in_until) + (decision.copy_seconds or 0.0)
            pools = pools._replace(num_free=room.num_blocks, copy_in_until=until)
            preview.hold(hit)
            preview.take(pool.blocks_for(request.num_tokens) - hit.num_on_device)
            resuming.append((request, decision, length))
            return Verdict.TAKE

        state.swapped.visit(now, judge, math.inf if finds else self._least_too_long(room))
        return resuming

    def _least_too_long(self, room: _Room) -> float:
        """Tokens that the blocks do not hold, if requests of so many may be passed over."""
        return room.num_blocks * self._state.pool.block_size + 1 if self._policy.restore.skips else math.inf

    def _outrank(self, plan: Plan, room: _Room, now: float, outranks: Outranks) -> None:
        """Let the most urgent queued request take the room of holders, if the policy says so."""
        state, policy = self._state, self._policy
        heads: list[Request] = []

        def look(request: Request) -> Verdict:
            heads.append(request)
            return Verdict.STOP

        for queue in (state.waiting, state.swapped):
            queue.visit(now, look)
        _, _, queued = min((-policy.priority.score(one, now), one.arrival_index, one) for one in heads)
        is_waiting = queued.status is RequestStatus.WAITING
        if state.has_to_wait(queued):
            return
        if not plan.decodes or queued.num_in_flight or min(room.num_tokens, room.num_chunks) < 1:
            return
        hit, num_total = NO_HIT, state.pool.blocks_for(queued.num_tokens)
        if (
            is_waiting and state.may_find
        ):  # what is on the host is computed again: victims' copies may take its room
            preview = self._preview(plan, is_certain=False)
            hit = self._find_all(preview, queued, state.findable(queued))
        elif not is_waiting:
            hit = self._find_copies(self._preview(plan, is_certain=False), queued)
        num_needed = num_total - hit.num_on_device + len(hit.free)
        order = self._victim_order(now)
        pools, preview = state.pools(room.num_blocks), PoolPreview(state.pool)
        found = Plan()
        while order and not (pools.num_free >= num_needed and (found.victims or room.num_slots > 0)):
            score, _, victim = heapq.heappop(order)
            if victim.is_protected or not outranks(queued, victim, now):
                return
            pools = self._give_up(found, victim, score, pools, preview, now)
            num_needed = num_total - hit.num_on_device + len(hit.free) + preview.num_released(hit)
        if pools.num_free < num_needed or not found.victims:
            return
        if is_waiting and not policy.admission.admits(queued, num_needed, pools):
            return
        gone = {request for request, _ in found.victims}
        plan.chunks = [(request, length) for request, length in plan.chunks if request not in gone]
        plan.victims, plan.scores = found.victims, found.scores
        if order:
            plan.scores.append(_next_score(order))
        length = min(self._num_in_first_run(queued, hit), room.num_tokens)
        if is_waiting:
            plan.starting, plan.decodes = [(queued, length)], self._mixes
        else:
            plan.resuming = [(queued, ResumeDecision(ResumeAction.AT_ONCE), length)]

    def _fit_program(self, plan: Plan) -> None:
        """Cut prompts so that they fill a program of the executor's, where that computes less in vain."""
        state, sizes = self._state, self._state.config.program_sizes
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


def _probes(names: Sequence[BlockName]) -> Sequence[BlockName]:
    """Some of a sequence's blocks that tell whether any are left of it."""
    return [names[len(names) // 2], names[-1]] if names else []


def _next_score(order: list[_Rank]) -> tuple[str, float]:
    """Id and score of the holder that would be preempted next."""
    score, _, request = order[0]
    return request.request_id, score
