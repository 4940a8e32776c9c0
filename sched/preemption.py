"""Preemption: who gives up blocks when there are too few for the next tokens, and what becomes of them."""

from __future__ import annotations

from jaxllm.errors import ConfigError
from jaxllm.sched.actions import PreemptionAction, num_copied_blocks
from jaxllm.sched.state import SchedulerState
from jaxllm.types import Request, RequestStatus, Swap


class Preemption:
    """Takes blocks from running requests, as the victim and the action policy say."""

    def __init__(self, state: SchedulerState) -> None:
        """Acts on `state`."""
        self._state = state

    def make_room(self, step_id: int, now: float) -> tuple[list[Request], list[Swap]]:
        """Preempt running requests until the next tokens of the others fit; returns them, and the swaps.

        At least one request stays: `add` made sure that one alone fits. If a policy fails, the swaps decided
        so far become drops, for nobody will copy them.
        """
        state = self._state
        preempted: list[Request] = []
        swaps: list[Swap] = []
        while state.num_growing() > state.pool.num_free:
            if len(state.running) == 1 and state.copies.is_loading:
                state.join(state.copies.first_loading())  # so that somebody is left
            try:
                victim = state.policy.victim.choose(tuple(state.running.requests), now)
                swap = self.preempt(victim, step_id, now)
            except BaseException:
                for swap in swaps:
                    self._drop_swapped(swap.request)
                raise
            if swap is not None:
                swaps.append(swap)
            preempted.append(victim)
        return preempted, swaps

    def preempt(self, victim: Request, step_id: int, now: float) -> Swap | None:
        """Take a running request's blocks and slot, and queue it to be prefilled again or swapped in."""
        state = self._state
        if not isinstance(victim, Request) or victim not in state.running:
            raise ConfigError(f"{state.policy.victim} chose {victim!r}, which is not one of the candidates")
        decision = state.policy.action.choose(victim, state.pressure(state.pool.num_free), now)
        num_copied = num_copied_blocks(state.policy.action, decision, len(victim.block_ids))
        num_host_free = state.host.num_free
        if decision.action is PreemptionAction.SWAP:
            num_host_free += state.copies.num_head_blocks
        if num_copied > num_host_free:
            raise ConfigError(
                f"{state.policy.action} swaps {num_copied} blocks; {num_host_free} of "
                f"{state.host.num_blocks} host blocks are free: drop the victim or raise num_host_blocks"
            )
        if state.ledger is not None:
            scores = [(one.request_id, state.policy.priority.score(one, now)) for one in state.running]
            state.ledger.preempted(victim, step_id, now, scores, decision)
        state.running.leave(victim)
        block_ids = tuple(victim.block_ids)
        state.release(victim, keep=state.policy.lazy_eviction)
        victim.metrics.num_preemptions += 1
        swap = None
        if num_copied:
            for loser in state.copies.make_room(num_copied):
                if state.ledger is not None:
                    state.ledger.head_given_up(loser.request_id)
            is_head = decision.action is PreemptionAction.MIXED
            swap = state.copies.make(victim, block_ids[:num_copied], is_head=is_head)
            if decision.copy_seconds is not None:
                ends_at = state.recent.copying_out(now, decision.copy_seconds)
                state.copied_out_at[victim.request_id] = ends_at
            state.num_leaving += num_copied
        if decision.action is PreemptionAction.SWAP:
            victim.metrics.num_swaps += 1
            victim.status = RequestStatus.SWAPPED
            state.swapped.add(victim)
        else:
            state.queue_again(victim)
        return swap

    def _drop_swapped(self, victim: Request) -> None:
        """Give up a copy that was decided but never started."""
        state = self._state
        state.copies.unmake(victim)
        if victim.status is RequestStatus.SWAPPED:
            state.swapped.remove(victim)
            state.queue_again(victim)
