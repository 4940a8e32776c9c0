"""Carries out plans: lengths advance, blocks and slots change hands."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from jaxllm.sched.ledger import Ledger, StepRecord
from jaxllm.sched.offloading import Offloader
from jaxllm.sched.plan import Plan
from jaxllm.sched.policies import Decision, PreemptionAction, ResumeAction, ResumeDecision
from jaxllm.sched.state import SchedulerState
from jaxllm.types import (
    CopyProgress,
    PrefillChunk,
    Request,
    RequestStatus,
    SchedulerOutput,
    Swap,
)


class Iteration:
    """One that is being scheduled, and what executors are to be told of it."""

    _decode: tuple[Request, ...] = ()
    _num_steps, _num_context_tokens, _num_drafts = 1, 0, 0
    _num_lookups: int = 0

    def __init__(self, state: SchedulerState, ledger: Ledger | None, step_id: int, now: float) -> None:
        """Nothing yet."""
        self._state, self._ledger, self._step_id, self._now = state, ledger, step_id, now
        self._prefill: list[PrefillChunk] = []
        self._preempted: list[Request] = []
        self._swap_out: list[Swap] = []
        self._swap_in: list[Swap] = []
        self._load: list[Swap] = []

    def apply(self, plan: Plan, max_decode_steps: int) -> None:
        """Do what the plan says, in the order that it assumes."""
        state = self._state
        if plan.num_lookups and self._look_up(plan):
            return
        self._num_steps = self._num_decode_steps(plan, max_decode_steps)
        state.progress.num_iterations += self._num_steps
        self._note_passed(plan)
        if plan.victims:
            self._preempt(plan)
        for request, _ in plan.drafts:
            state.running.leave(request)
            state.grow(request, request.num_tokens)
        resumed = [
            (request, length)
            for request, decision, length in plan.resuming
            if self._take_in(request, decision) and request in state.prompts
        ]
        if plan.decodes and state.running:
            self._advance()
        self._prefill = [self._compute(*chunk) for chunk in (*plan.chunks, *resumed)]
        for request, length in plan.starting:
            if self._take_in(request, plan.fetching.get(request)) and length:
                self._prefill.append(self._compute(request, length))
        if plan.drafts:
            self._verify(plan.drafts)
        if self._is_empty and state.prompts:  # whoever was to wait for a copy found its blocks
            self._prefill = [self._compute(state.prompts[0], state.config.max_num_batched_tokens)]

    def output(self, offloader: Offloader | None, copies: CopyProgress) -> SchedulerOutput:
        """What executors are to do, with what `offloader` copies beside it."""
        state, out = self._state, self._swap_out
        if self._is_empty:
            assert not [*out, *self._swap_in, *self._load], "copies need an iteration"
            return SchedulerOutput(self._step_id)  # whatever executors are to be told waits
        if offloader is None:
            state.pool.reclaimed.clear()
            state.pool.unfilled.clear()
        else:
            num_leaving = copies.num_leaving + sum([len(swap.block_ids) for swap in out])
            out += offloader.swaps(num_leaving, copies.write_room)
        joined, discarded = state.emit()
        output = SchedulerOutput(
            self._step_id,
            decode=self._decode,
            prefill=tuple(self._prefill),
            preempted=tuple(self._preempted),
            num_swapped=sum([bool(victim.host_blocks) for victim in self._preempted]),
            swap_out=tuple(out),
            swap_in=tuple(self._swap_in),
            load=tuple(self._load),
            joined=joined,
            discarded=discarded,
            dropped=state.host.emit(self._step_id),
            ending=tuple(state.ending),
            num_decode_steps=self._num_steps,
            num_context_tokens=self._num_context_tokens,
            num_drafts=self._num_drafts,
            num_lookups=self._num_lookups,
        )
        if self._ledger is not None:
            self._ledger.step(self._record(output))
        return output

    @property
    def _is_empty(self) -> bool:
        return not (self._decode or self._prefill)

    def _num_decode_steps(self, plan: Plan, limit: int) -> int:
        """How many iterations may go by before the next decision."""
        state, running = self._state, self._state.running
        if limit == 1 or not plan.is_calm(state):
            return 1
        num_steps = running.num_steps_to_last(min(limit, state.pool.block_size))
        while num_steps > 1 and len(running.growing_within(num_steps)) > state.pool.num_free:
            num_steps -= 1
        return num_steps

    def _note_passed(self, plan: Plan) -> None:
        """Count those who take blocks while an earlier request has none; who was counted for is protected."""
        if plan.reserved is not None:
            plan.reserved.is_protected = True
        if plan.resuming or plan.starting:
            first = self._state.first_queued()
            taking = [one[0] for one in (*plan.resuming, *plan.starting)]
            if first is not None and first not in taking and not self._state.sits_out(first):
                first.num_passed += len(taking)

    # Those who hold blocks

    def _preempt(self, plan: Plan) -> None:
        """Preempt the victims; all hold what is in host memory already before copies take its room."""
        state = self._state
        for victim, decision in plan.victims:
            if decision.action is PreemptionAction.SWAP:
                victim.host_blocks = state.lookups.held_on_host(victim)
                state.host.hold(victim.host_blocks)
        for victim, decision in plan.victims:
            self.preempt(victim, decision, plan.scores)

    def preempt(self, victim: Request, decision: Decision, scores: Sequence[tuple[str, float]] = ()) -> None:
        """Take a holder's blocks and slot, and queue it to be prefilled again or copied back."""
        state, now = self._state, self._now
        if self._ledger is not None:
            self._ledger.preempted(victim, self._step_id, now, scores, decision)
        state.leave(victim)
        if decision.action is PreemptionAction.SWAP:
            self._copy_out(victim)
            if decision.copy_seconds is not None:
                state.copy_out_until = max(now, state.copy_out_until) + decision.copy_seconds
                state.copied_out_at[victim.request_id] = state.copy_out_until
            victim.metrics.num_swaps += 1
        state.release(victim)
        state.progress.num_preempted += 1
        if not victim.host_blocks:
            state.progress.num_lost += victim.num_computed_tokens
        victim.metrics.num_preemptions += 1
        victim.num_passed += 1
        state.queue(victim)
        self._preempted.append(victim)

    def _copy_out(self, victim: Request) -> None:
        """Copy a victim's blocks that are not in host memory; it then holds all of them there."""
        state = self._state
        host, before = state.host, victim.host_blocks
        names = state.lookups.names_to_keep(victim)
        places = [None if name is None else host.names.first(name) for name in names]
        missing = [number for number, place in enumerate(places) if place is None]
        host.hold([place for place in places if place is not None])
        host.release(before)
        stored = host.store([names[number] for number in missing]) if missing else []
        for number, place in zip(missing, stored, strict=True):
            places[number] = place
        victim.host_blocks = [place for place in places if place is not None]
        if missing:
            block_ids = tuple([victim.block_ids[number] for number in missing])
            stored_names = tuple([names[number] for number in missing])
            self._swap_out.append(Swap(victim, stored[0].handle, block_ids, tuple(stored), stored_names))

    def _advance(self) -> None:
        """Let the running requests decode."""
        state, num_steps, running = self._state, self._num_steps, self._state.running
        growing, self._num_context_tokens = running.growing, running.num_tokens
        if num_steps > 1:
            growing = running.growing_within(num_steps)
            self._num_context_tokens += len(running) * (num_steps - 1) // 2
        for request, block_id in zip(growing, state.pool.allocate(len(growing)), strict=True):
            request.block_ids.append(block_id)
        filling = list(running.filling) if state.config.enable_prefix_caching else ()
        self._decode, ending = running.advance(num_steps)
        state.ending += ending
        state.progress.num_generated += len(self._decode) * num_steps
        name_blocks = state.lookups.name_blocks
        for request in filling:
            name_blocks(request)

    # Those who take some

    def _take_in(self, request: Request, decision: ResumeDecision | None) -> bool:
        """Let a queued request go on, with what `decision` brings from the host; whether it does at once.

        Not, if it was to find what others were to compute before it, and now compute less of.
        """
        state, ledger, was_swapped = self._state, self._ledger, request.status is RequestStatus.SWAPPED
        started = state.start(request, copies=decision is not None)
        if not started:
            return False
        if ledger is not None and request.metrics.first_scheduled_time is not None:
            if was_swapped and decision is not None:
                ledger.returns(request.request_id, decision)
            ledger.resumed(request, self._step_id, self._now)
        if request.metrics.first_scheduled_time is None:
            request.metrics.first_scheduled_time = self._now
        state.under_way[request.request_id] = request
        if not isinstance(started, Swap) or decision is None:
            state.begin(request)
            return True
        if decision.copy_seconds:
            state.copy_in_until = max(self._now, state.copy_in_until) + decision.copy_seconds
        if decision.action is not ResumeAction.IN_BACKGROUND:
            state.resume(started, as_prompt=not was_swapped)
            self._swap_in.append(started)
            return True
        state.load(started)
        self._load.append(started)
        return False

    def _compute(self, request: Request, length: int) -> PrefillChunk:
        """Schedule `length` tokens of a prompt under way, and a sample if none remain."""
        state = self._state
        start = request.num_computed_tokens
        length = min(length, request.num_to_compute)
        stop = start + length
        state.grow(request, stop)
        if request.kept_ranges and request.kept_ranges[0][0] == stop:
            request.num_computed_tokens = request.kept_ranges.pop(0)[1]
        else:
            request.num_computed_tokens = stop
        state.lookups.name_blocks(request)
        is_first, request.is_slot_new = request.is_slot_new, False
        num_recomputed = max(0, min(stop, request.num_lost_tokens) - start)
        if stop >= request.num_lost_tokens:
            request.num_lost_tokens = 0
        is_last = stop == request.num_tokens
        if is_last:
            state.prompts.remove(request)
            request.num_tokens += 1
            if request.num_tokens == request.max_total_tokens:
                state.ending.append(request)
            else:
                state.activate(request)
        return PrefillChunk(request, start, length, is_last, is_first, num_recomputed)

    def _verify(self, drafted: Sequence[tuple[Request, Sequence[int]]]) -> None:
        """Schedule requests' newest tokens, and as many of their drafts as there are free blocks for."""
        state, alone = self._state, []
        for request, drafts in drafted:
            start = request.num_tokens - 1
            num_held = (len(request.block_ids) + state.pool.num_free) * state.pool.block_size
            some = drafts[: num_held - request.num_tokens]
            if not some:
                alone.append(request)
                continue
            stop = start + len(some) + 1
            state.grow(request, stop)
            request.num_computed_tokens, request.num_tokens = stop, stop + 1
            state.verifying.append(request)
            self._num_drafts += len(some)
            chunk = PrefillChunk(request, start, stop - start, is_last=True, is_first=False, drafts=some)
            self._prefill.append(chunk)
        if alone:
            self._decode_beside(alone)

    def _decode_beside(self, requests: Sequence[Request]) -> None:
        """Let requests decode that were to verify drafts; they have blocks for their newest tokens."""
        state, by_arrival = self._state, operator.attrgetter("arrival_index")
        self._decode = tuple(sorted([*self._decode, *requests], key=by_arrival))
        state.progress.num_generated += len(requests)
        for request in requests:
            self._num_context_tokens += request.num_tokens
            request.num_computed_tokens, request.num_tokens = request.num_tokens, request.num_tokens + 1
            state.lookups.name_blocks(request)
            if request.num_tokens == request.max_total_tokens:
                state.ending.append(request)
            else:
                state.activate(request)

    def _look_up(self, plan: Plan) -> bool:
        """Schedule iterations that draft on the device, as many as there are blocks for; whether any are."""
        state, requests = self._state, self._state.running.requests
        for num_steps in range(plan.num_lookup_steps, 0, -1):
            stops = [
                (one, min(one.max_total_tokens, one.num_tokens + num_steps * (plan.num_lookups + 1)))
                for one in requests
            ]
            if sum([state.num_missing(one, stop - 1) for one, stop in stops]) <= state.pool.num_free:
                break
        else:
            return False
        self._num_steps, self._decode = num_steps, tuple(requests)
        self._num_lookups = plan.num_lookups
        self._num_drafts = num_steps * plan.num_lookups * len(requests)
        self._num_context_tokens = state.running.num_tokens
        state.progress.num_iterations += num_steps
        for request, stop in stops:
            state.running.leave(request)
            state.grow(request, stop - 1)
            request.num_computed_tokens, request.num_tokens = stop - 1, stop
            state.verifying.append(request)
        return True

    def _record(self, output: SchedulerOutput) -> StepRecord:
        state = self._state
        num_verified = sum([bool(chunk.drafts) for chunk in output.prefill])
        return StepRecord(
            step_id=output.step_id,
            time=self._now,
            num_waiting=len(state.waiting),
            num_running=state.config.max_num_seqs - len(state.free_slots),
            num_swapped=len(state.swapped),
            num_used_blocks=state.pool.num_used,
            num_used_host_blocks=state.host.num_blocks - state.host.num_free,
            num_prefill_tokens=sum([chunk.length for chunk in output.prefill if not chunk.drafts]),
            num_decoded=len(output.decode) * output.num_decode_steps + num_verified,
            num_dropped=len(output.preempted) - output.num_swapped,
            num_swapped_out=output.num_swapped,
            num_swapped_in=len(output.swap_in) + len(output.joined),
            num_recomputed_tokens=sum([chunk.num_recomputed for chunk in output.prefill]),
            num_blocks_out=sum([len(swap.block_ids) for swap in output.swap_out]),
            num_blocks_in=sum([len(swap.block_ids) for swap in (*output.swap_in, *output.load)]),
        )
