"""Blocks that are held for the next turn of a conversation, and which requests are one."""

from __future__ import annotations

import collections
import dataclasses

from jaxllm.sched.cache.names import BlockName
from jaxllm.sched.policies.holds import HoldPolicy
from jaxllm.sched.state import SchedulerState
from jaxllm.types import Request

_MAX_REMEMBERED = 8192
_NEW_SHARE = 0.1  # of a new wait in the mean


@dataclasses.dataclass(eq=False, slots=True)
class _Turn:
    """A request that has ended; `next_turn` is the one that goes on with it, until it has its own blocks."""

    ended_at: float
    program_arrival_time: float
    block_ids: list[int]
    until: float
    next_turn: Request | None = None
    was_held: bool = False


class Holding:
    """Holds what ended for as long as the policy says, and knows the turns that go on with it.

    A turn goes on with the request whose last full block it begins with, be it still there or not.
    """

    def __init__(self, state: SchedulerState, policy: HoldPolicy) -> None:
        self._state, self._policy = state, policy
        self._turns: collections.OrderedDict[BlockName, _Turn] = collections.OrderedDict()
        self._held: list[_Turn] = []
        self._claimed: list[_Turn] = []
        self._queue_seconds = 0.0

    @property
    def block_ids(self) -> list[int]:
        """All that are held, with repeats."""
        return [block_id for turn in self._held for block_id in turn.block_ids]

    def recognise(self, request: Request) -> None:
        """See whether a new request goes on with one that has ended."""
        for name in reversed(self._state.findable(request)):
            turn = self._turns.get(name)
            if turn is None or turn.next_turn is not None:
                continue
            turn.next_turn, turn.was_held = request, turn in self._held
            request.program_arrival_time = turn.program_arrival_time
            self._policy.came_back(max(0.0, request.arrival_time - turn.ended_at))
            self._claimed.append(turn)
            return

    def keep(self, request: Request, now: float) -> None:
        """Hold the blocks of a request that has ended, if it is worth that."""
        state = self._state
        names = state.learn_names(request, request.num_known_tokens - 1)
        names = names[: max(0, request.num_known_tokens - 1) // state.config.block_size]
        if not names:
            return
        found = state.pool.find(names)
        num_tokens = len(found) * state.config.block_size
        seconds = 0.0
        if found:
            pools = state.pools(state.pool.num_free)
            seconds = self._policy.seconds(num_tokens, self._queue_seconds, pools)
        turn = _Turn(now, request.program_arrival_time, found, now + seconds)
        self._turns[names[-1]] = turn
        self._turns.move_to_end(names[-1])
        if len(self._turns) > _MAX_REMEMBERED:
            self._turns.popitem(last=False)
        if seconds > 0.0:
            state.pool.acquire(found)
            self._held.append(turn)

    def settle(self, now: float) -> None:
        """Let go of what nobody came for in time, of what its next turn holds, and of what others need."""
        for turn in list(self._claimed):
            request = turn.next_turn
            assert request is not None
            first = request.metrics.first_scheduled_time
            if first is None and not request.is_finished:
                continue
            if first is not None and not turn.was_held:
                self._queue_seconds += _NEW_SHARE * (first - request.arrival_time - self._queue_seconds)
            self._claimed.remove(turn)
            if turn in self._held:
                self._let_go(turn)
        for turn in list(self._held):
            if turn.until <= now and turn.next_turn is None:
                self._let_go(turn)
        if self._held:
            self._make_room()

    def forget(self) -> None:
        """Hold nothing, and know nobody who ended."""
        for turn in list(self._held):
            self._let_go(turn)
        self._turns.clear()
        self._claimed.clear()

    def _make_room(self) -> None:
        """Give up those whose time is over first, until all who run can, or else the first that is queued."""
        state = self._state
        size, batch = state.config.block_size, state.config.max_num_batched_tokens
        if state.num_holders:
            prompts = sum(request.num_to_compute for request in state.prompts)
            needed = len(state.running) + len(state.prompts) + -(-min(prompts, batch) // size)
        else:
            first = state.first_queued()
            needed = 0 if first is None else state.pool.blocks_for(first.num_tokens + 1)
        for turn in sorted(self._held, key=lambda turn: turn.until):
            if state.pool.num_free >= needed:
                return
            self._let_go(turn)

    def _let_go(self, turn: _Turn) -> None:
        self._held.remove(turn)
        self._state.pool.release(turn.block_ids)
