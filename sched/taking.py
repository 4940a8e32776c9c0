"""Takes queued requests into an iteration, in the order of their queue, as far as there is room."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxllm.sched.offers import Offer, Offers
from jaxllm.sched.plan import Plan
from jaxllm.sched.policies import ResumeAction, SchedulerPolicy
from jaxllm.sched.queues import RequestQueue, Verdict
from jaxllm.sched.state import SchedulerState
from jaxllm.types import Request, RequestStatus


@dataclasses.dataclass(slots=True)
class Room:
    """What is left for those who return or start: blocks, tokens of the iteration, slots, prompts of it."""

    num_blocks: int
    num_tokens: int
    num_slots: int
    num_chunks: int

    @property
    def is_used_up(self) -> bool:
        """Whether nobody goes on, however few blocks it needs."""
        return self.num_tokens < 1 or self.num_slots < 1


class Taking:
    """One pass over a queue, which uses up its `room`."""

    def __init__(
        self,
        state: SchedulerState,
        policy: SchedulerPolicy,
        offers: Offers,
        plan: Plan,
        after: Sequence[Offer],
        room: Room,
        now: float,
        *,
        is_forced: bool = False,
    ) -> None:
        """Nobody is taken.

        Args:
            state, policy, offers, room, now: as they are named.
            plan: what those who hold blocks do.
            after: who takes blocks before.
            is_forced: whether one is taken alone and at once, whatever the policy says.
        """
        self._state, self._policy, self._offers, self._room, self._now = state, policy, offers, room, now
        self._is_forced, self._mixes, self._has_chunks = is_forced, policy.iterations.mixes, bool(plan.chunks)
        # Whether there is something else to do than to wait for the copies of waiting requests.
        self._is_busy = bool(state.running or plan.chunks or after) and not is_forced
        self._pools = state.pools(room.num_blocks)
        skips = policy.restore.skips
        self._unsuited = Verdict.SKIP_ONE if skips else Verdict.STOP
        # Who finds blocks may be short, however long it is.
        self._too_large = Verdict.SKIP if skips and not offers.finds else self._unsuited
        self._taken: list[Offer] = []

    def visit(self, queue: RequestQueue, only: Request | None = None) -> list[Offer]:
        """The offers of those that are taken: whom there is room for, or `only` this one."""
        room, too_long = self._room, math.inf
        if only is not None:
            self._judge(only)
            return self._taken
        if self._too_large is Verdict.SKIP:
            too_long = room.num_blocks * self._state.pool.block_size + 1
        queue.visit(self._now, self._judge, too_long)
        return self._taken

    def _judge(self, request: Request) -> Verdict:
        """Whether a request is taken now, and if not, who else is visited."""
        state, room = self._state, self._room
        if room.is_used_up or self._offers.is_tired or (self._is_forced and self._taken):
            return Verdict.STOP
        if room.num_chunks < 1 and request.status is RequestStatus.WAITING:
            return Verdict.STOP
        if state.sits_out(request):
            return Verdict.SKIP_ONE
        if request.num_in_flight or state.has_to_wait(request):  # its newest token may not be known yet
            return self._unsuited
        offer = self._offers.make(request)
        if offer.num_needed > room.num_blocks:
            return self._too_large
        if state.is_coming(offer.hit.copied) or (offer.num_left > 1 and room.num_chunks < 1):
            return self._unsuited
        if offer.copies and not (offer.is_swapped and self._is_forced):
            offer = self._offers.ask(offer, self._pools, self._now)
            if not (self._is_busy or offer.is_swapped):
                offer.decision = offer.decision._replace(action=ResumeAction.AT_ONCE)
            elif offer.decision.action is ResumeAction.LATER:
                return Verdict.STOP if offer.is_swapped else self._unsuited
        if not (offer.is_swapped or self._may_start(offer)):
            return self._too_large
        self._take(offer)
        return Verdict.TAKE

    def _may_start(self, offer: Offer) -> bool:
        """Whether a waiting request starts: only the first prompt of a prefill is split.

        Whoever has the pool to itself starts, whatever the policy says: nothing would ever free more.
        """
        state, room, is_first = self._state, self._room, not (self._taken or self._has_chunks)
        if offer.num_needed > room.num_blocks:  # it is to copy nothing
            return False
        if offer.num_left > room.num_tokens and not (self._mixes or self._is_forced or is_first):
            return False
        if self._is_forced or (room.num_blocks == state.pool.num_blocks and not state.swapped):
            return True
        return self._policy.admission.admits(offer.request, offer.num_needed, self._pools)

    def _take(self, offer: Offer) -> None:
        room, pools = self._room, self._pools
        if not offer.is_later:
            offer.length = min(offer.num_in_first_run, room.num_tokens)
        self._is_busy = self._is_busy or not offer.is_later
        room.num_blocks -= offer.num_needed
        room.num_tokens -= offer.length
        room.num_slots -= 1
        room.num_chunks -= offer.num_left > 1 if offer.is_swapped else not offer.is_later
        until = pools.copy_in_until
        if offer.copies:
            until = max(self._now, until) + (offer.decision.copy_seconds or 0.0)
        self._pools = pools._replace(num_free=room.num_blocks, copy_in_until=until)
        self._offers.take(offer)
        self._taken.append(offer)
