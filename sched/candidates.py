"""Who could start or resume in an iteration, the most urgent first, within what the pools have left."""

from __future__ import annotations

import math
from collections.abc import Callable

from jaxllm.sched.actions import ResumeAction, ResumeDecision
from jaxllm.sched.queues import Verdict
from jaxllm.sched.state import SchedulerState
from jaxllm.types import Request


class Candidates:
    """Reads the queues, the pools and the policies of a scheduler, and changes none of them."""

    def __init__(self, state: SchedulerState) -> None:
        """Reads `state`."""
        config, policy = state.config, state.policy
        self._state = state
        self._max_prefill_seqs = config.max_prefill_seqs or config.max_num_seqs
        skips = policy.restore.skips
        # What the visit of a request leads to that is too large, and of one that does not suit now.
        self._too_large = Verdict.SKIP if skips else Verdict.STOP
        self._unsuited = Verdict.SKIP_ONE if skips else Verdict.STOP

    def startable(self, now: float, num_free: int) -> list[Request]:
        """Waiting requests that fit an iteration together with `num_free` blocks.

        The tokens that the request whose prompt spans iterations has left come first.
        """
        state = self._state
        if not state.free_slots or not state.waiting or num_free < 1:
            return []
        pool, policy, prefilling = state.pool, state.policy, state.prefilling
        too_large, unsuited = self._too_large, self._unsuited
        if pool.blocks_for(state.waiting.min_num_tokens) > num_free:
            return []
        budget = state.config.max_num_batched_tokens
        lengths: list[int] = []
        if prefilling is not None:
            lengths.append(min(prefilling.num_tokens - prefilling.num_computed_tokens, budget))
        num_left = budget - sum(lengths)
        num_slots = min(len(state.free_slots), self._max_prefill_seqs - len(lengths))
        taken: list[Request] = []
        started: list[Request] = []  # filled in for the first who asks

        def judge(request: Request) -> Verdict:
            nonlocal num_free, num_left, started
            if len(taken) == num_slots:
                return Verdict.STOP
            length = request.num_tokens - state.num_intact_tokens(request)
            if lengths:  # only an iteration's first prompt is split
                if length > num_left:
                    return too_large if length == request.num_tokens else unsuited
                if not policy.batching.fits([*lengths, length], budget):
                    return unsuited
            num_needed = pool.blocks_for(request.num_tokens)
            if num_needed > num_free:
                return too_large
            if request.num_in_flight:
                return unsuited  # just preempted: its newest token is not known yet
            # Whoever has the pool to itself starts, whatever the policy says: nothing would ever free more.
            if num_free < pool.num_blocks or state.swapped:
                started = started or [*state.started(), *taken]
                if not policy.admission.admits(request, num_needed, state.pools(num_free, started)):
                    return too_large
                started.append(request)
            num_free -= num_needed
            lengths.append(min(length, budget))
            num_left -= lengths[-1]
            taken.append(request)
            return Verdict.TAKE

        return state.waiting.visit(now, judge, self._least_too_long(num_free))

    def resumable(
        self, now: float, num_free: int, decide: Callable[[Request, int], ResumeDecision] | None
    ) -> tuple[list[tuple[Request, ResumeDecision]], list[tuple[Request, ResumeDecision]]]:
        """Swapped requests that fit into `num_free` blocks with their next token, and how they come back.

        Args:
            now: the engine's clock.
            num_free: blocks.
            decide: says how a request comes back when so many blocks are free; None lets the first that fits
                resume at once, alone.

        Returns:
            Those that resume, and those whose copy is to be given up.
        """
        taken: list[tuple[Request, ResumeDecision]] = []
        given_up: list[tuple[Request, ResumeDecision]] = []
        state = self._state
        if not state.swapped or not state.free_slots or num_free < 1:
            return taken, given_up
        pool = state.pool
        num_slots = len(state.free_slots)
        watermark = state.policy.restore.resume_watermark

        def judge(request: Request) -> Verdict:
            nonlocal num_free, num_slots
            if num_slots == 0:
                return Verdict.STOP
            num_needed = pool.blocks_for(request.num_tokens)
            if num_needed > num_free:
                return self._too_large
            if watermark is not None and num_free < pool.num_blocks:
                num_spare = 1 + int(watermark * pool.num_blocks)
                if pool.blocks_for(request.num_computed_tokens) + num_spare > num_free:
                    return self._too_large
            if request.num_in_flight:
                return self._unsuited
            if decide is not None:
                decision = decide(request, num_free)
                if decision.action is ResumeAction.LATER:
                    return Verdict.STOP
                if decision.action is ResumeAction.RECOMPUTE:
                    given_up.append((request, decision))
                    return Verdict.SKIP_ONE
            elif taken:
                return Verdict.STOP
            else:
                decision = ResumeDecision(ResumeAction.AT_ONCE)
            taken.append((request, decision))
            num_free -= num_needed
            num_slots -= 1
            return Verdict.TAKE

        state.swapped.visit(now, judge, self._least_too_long(num_free))
        return taken, given_up

    def _least_too_long(self, num_free: int) -> float:
        """Tokens that `num_free` blocks do not hold, if requests of so many may be passed over."""
        state = self._state
        return num_free * state.pool.block_size + 1 if state.policy.restore.skips else math.inf
