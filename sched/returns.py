"""Returns: which waiting requests are prefilled and which swapped ones come back, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxllm.errors import ConfigError
from jaxllm.sched.actions import ResumeAction, ResumeDecision, check_seconds
from jaxllm.sched.candidates import Candidates
from jaxllm.sched.pressure import PoolState
from jaxllm.sched.state import SchedulerState
from jaxllm.types import Request, Swap


class Returns:
    """Chooses who starts or resumes, as the restore, admission and resume policies say."""

    def __init__(self, state: SchedulerState) -> None:
        """Acts on `state`."""
        self._state = state
        self._candidates = Candidates(state)

    def choose(self, now: float) -> tuple[list[Request], list[tuple[Request, ResumeDecision]]]:
        """The waiting requests to prefill or the swapped ones to bring back; one of the two is empty.

        The blocks that the running requests need next stay free.
        """
        state = self._state
        restore = state.policy.restore
        num_free = state.pool.num_free - state.num_growing()
        if not state.copies.is_loading:  # whatever was predicted, the link is idle
            state.recent.copy_in_until = min(state.recent.copy_in_until, now)
        busy_until = state.recent.copy_in_until
        # Where a copy is all there is to wait for, no other is put before it.
        swapped = self._resumable(now, num_free) if state.running or not state.copies.is_loading else []
        # With `prefill_first` they were tried before, or must wait until nothing is swapped.
        waiting = [] if restore.prefill_first else self.startable(now, num_free)
        if not swapped and not waiting and not state.running and not state.copies.is_loading:
            # Nothing will ever change: whoever was put off goes, be it to the prefills it was sent to.
            swapped = self._resumable(now, num_free, put_off=False)
            waiting = [] if swapped else self.startable(now, num_free)
        # The policy chooses between two sets; it cannot leave the only one alone.
        resuming = [request for request, _ in swapped]
        if swapped and (not waiting or restore.swaps_in(waiting, resuming, now)):
            return [], swapped
        state.recent.copy_in_until = busy_until
        return waiting, []

    def startable(self, now: float, num_free: int) -> list[Request]:
        """Waiting requests that fit an iteration together with `num_free` blocks, the most urgent first."""
        return self._candidates.startable(now, num_free)

    def _resumable(
        self, now: float, num_free: int, *, put_off: bool = True
    ) -> list[tuple[Request, ResumeDecision]]:
        """Swapped requests that fit into `num_free` blocks with their next token, the most urgent first.

        Those whose copy the policy gives up go to the waiting ones. Without `put_off` it is not asked, and
        the first that fits resumes at once.
        """
        pools: PoolState | None = None

        def decide(request: Request, num_free: int) -> ResumeDecision:
            nonlocal pools
            if pools is None:
                pools = self._state.pressure(num_free)
            elif pools.num_free != num_free:
                pools = dataclasses.replace(pools, num_free=num_free)
            return self._how_to_resume(request, pools, now)

        taken, given_up = self._candidates.resumable(now, num_free, decide if put_off else None)
        for request, decision in given_up:
            self._recompute_instead(request, decision)
        return taken

    def _how_to_resume(self, request: Request, pools: PoolState, now: float) -> ResumeDecision:
        """What the policy says of a swapped request; a copy that starts is one the next ones wait for."""
        state = self._state
        evicted = state.evicted.get(request.request_id)
        num_lost = state.pool.blocks_for(request.num_computed_tokens)
        num_lost -= 0 if evicted is None else state.pool.num_intact(evicted)
        copied_out_at = state.copied_out_at.get(request.request_id, now)
        decision = state.policy.resume.choose(request, num_lost, copied_out_at, pools, now)
        if not isinstance(decision, ResumeDecision) or not isinstance(decision.action, ResumeAction):
            raise ConfigError(f"{state.policy.resume} answered {decision!r}, which is not a ResumeDecision")
        check_seconds(state.policy.resume, decision)
        if decision.action in (ResumeAction.AT_ONCE, ResumeAction.IN_BACKGROUND) and decision.copy_seconds:
            state.recent.copying_in(now, decision.copy_seconds)
        return decision

    def _recompute_instead(self, request: Request, decision: ResumeDecision) -> None:
        """Let a swapped request be prefilled again."""
        state = self._state
        state.swapped.remove(request)
        state.copies.give_up(request)
        if state.ledger is not None:
            state.ledger.returns(request.request_id, decision)
        state.queue_again(request)

    def swap_in(
        self, resuming: Sequence[tuple[Request, ResumeDecision]], step_id: int, now: float
    ) -> tuple[tuple[Swap, ...], tuple[Swap, ...]]:
        """Bring requests back; returns the copies that this iteration waits for, and those it only starts."""
        state = self._state
        for request, _ in resuming:
            state.swapped.remove(request)
            state.take_back(request)
        swap_in, load = [], []
        for request, decision in resuming:
            swap = self._copy_back(request, decision, step_id, now)
            if decision.action is ResumeAction.AT_ONCE:
                state.resume(swap)
                swap_in.append(swap)
            else:
                state.copies.load(swap)
                load.append(swap)
        if swap_in:
            state.recent.swapped_in(len(swap_in))
        return tuple(swap_in), tuple(load)

    def _copy_back(self, request: Request, decision: ResumeDecision, step_id: int, now: float) -> Swap:
        """The copy that fills the blocks a swapped request gets."""
        state = self._state
        handle = request.host_handle
        assert handle is not None  # whatever is swapped has one
        num_intact = len(request.block_ids)
        state.hold(request, state.pool.blocks_for(request.num_computed_tokens))
        if state.ledger is not None:
            state.ledger.returns(request.request_id, decision)
            state.ledger.resumed(request, step_id, now)
        return Swap(request, handle, tuple(request.block_ids), num_intact)

    def swap_in_head(self, request: Request, num_intact: int) -> list[Swap]:
        """The copy that fills the first blocks of a request to be prefilled, if any has to be filled."""
        state = self._state
        num_blocks, handle = state.copies.num_blocks(request), request.host_handle
        if handle is None:
            return []
        if num_intact >= num_blocks:
            state.copies.give_up(request)
            return []
        swap = Swap(request, handle, tuple(request.block_ids[:num_blocks]), num_intact)
        state.copies.read(swap)
        return [swap]
