"""Blocks that are held for the next turn of a conversation, and which requests are one."""

from __future__ import annotations

import collections
import dataclasses

from jaxllm.sched.cache.names import BlockName
from jaxllm.sched.plan import check_seconds
from jaxllm.sched.policies import NoHold, SchedulingPolicy
from jaxllm.sched.policies.contract import watched
from jaxllm.sched.policies.holds import HoldPolicy
from jaxllm.sched.policies.priority import ProgramPriority
from jaxllm.sched.state import SchedulerState
from jaxllm.types import Request

_MAX_REMEMBERED = 8192
_NEW_SHARE = 0.1  # of a new wait in the mean


@dataclasses.dataclass(eq=False, slots=True)
class _Turn:
    """A request that has ended; `next_turn` is the one that goes on with it, until it has its own blocks."""

    ended_at: float
    program_arrival_time: float
    num_tokens: int
    block_ids: list[int]
    until: float
    next_turn: Request | None = None


class Holding:
    """Holds what ended for as long as the policy says, and knows the turns that go on with it.

    A turn goes on with the request whose last full block it begins with, be it still there or not. Of several
    that do, such as samples of one prompt, the first is waited for.

    Attributes:
        turns: what has ended, by the name of its last full block. While there is none nobody is recognised.
        held: in the order in which they ended.
        claimed: those whose next turn is there, and whether they were held then. While there are neither of
            these nothing is to be settled.
    """

    def __init__(self, state: SchedulerState, policy: HoldPolicy) -> None:
        self._state, self._policy = state, watched(policy)
        self.turns: collections.OrderedDict[BlockName, _Turn] = collections.OrderedDict()
        self.held: dict[_Turn, None] = {}
        self.claimed: dict[_Turn, bool] = {}
        self._queue_seconds = self._lost_share = 0.0

    @property
    def block_ids(self) -> list[int]:
        """All that are held, with repeats."""
        return [block_id for turn in self.held for block_id in turn.block_ids]

    def recognise(self, request: Request) -> None:
        """See whether a new request goes on with one that has ended."""
        found = (self.turns.get(name) for name in reversed(self._state.lookups.findable(request)))
        turn = next((turn for turn in found if turn is not None), None)
        if turn is None:
            return
        request.program_arrival_time = turn.program_arrival_time
        if turn.next_turn is None:
            self._policy.came_back(max(0.0, request.arrival_time - turn.ended_at))
            turn.next_turn = request
            self.claimed[turn] = turn in self.held

    def keep(self, request: Request, now: float) -> None:
        """Hold the blocks of a request that has ended with a full one, if it is worth that.

        Raises:
            ConfigError: the policy answers with what is no time.
        """
        state = self._state
        num_known = request.num_known_tokens - 1  # the last token's KV is not computed
        names = state.lookups.learn_names(request, num_known)[: num_known // state.config.block_size]
        found, seconds = state.pool.find(names), 0.0
        if found:
            num_tokens = len(found) * state.config.block_size
            pools = state.pools(state.pool.num_free)._replace(lost_share=self._lost_share)
            answer = self._policy.seconds(num_tokens, self._queue_seconds, pools)
            check_seconds(self._policy, answer)
            seconds = answer or 0.0
        num_tokens = len(names) * state.config.block_size
        held = found if seconds > 0.0 else []
        turn = _Turn(now, request.program_arrival_time, num_tokens, held, now + seconds)
        self.turns[names[-1]] = turn
        self.turns.move_to_end(names[-1])
        if len(self.turns) > _MAX_REMEMBERED:
            self.turns.popitem(last=False)
        if held:
            state.pool.acquire(held)
            self.held[turn] = None

    def settle(self, now: float) -> None:
        """Let go of what nobody came for in time, of what its next turn holds, and of what others need."""
        for turn, was_held in list(self.claimed.items()):
            request = turn.next_turn
            assert request is not None
            began = request.metrics.first_scheduled_time
            if began is None and self._state.live.get(request.request_id) is request:
                continue
            del self.claimed[turn]
            if began is None:  # it was refused or given up, and may be sent again
                turn.next_turn = None
                continue
            if not was_held:
                self._queue_seconds += _NEW_SHARE * (began - request.arrival_time - self._queue_seconds)
                lost = max(0.0, 1.0 - (request.num_cached_tokens or 0) / turn.num_tokens)
                self._lost_share += _NEW_SHARE * (lost - self._lost_share)
            self._let_go(turn)
        for turn in [turn for turn in self.held if turn.until <= now and turn.next_turn is None]:
            self._let_go(turn)
        if self.held and (num_missing := self._num_needed() - self._state.pool.num_free) > 0:
            self._make_room(num_missing)

    def forget(self) -> None:
        """Hold nothing, and know nobody who ended."""
        for turn in list(self.held):
            self._let_go(turn)
        self.turns.clear()
        self.claimed.clear()

    def _num_needed(self) -> int:
        """Free blocks without which not all who run can go on, or else not the first that is queued."""
        state = self._state
        if not state.num_holders:
            first = state.first_queued()
            return 0 if first is None else state.pool.blocks_for(first.num_tokens + 1)
        num_prompt_tokens = sum([request.num_to_compute for request in state.prompts])
        num_computed = min(num_prompt_tokens, state.config.max_num_batched_tokens)
        return len(state.running) + len(state.prompts) + state.pool.blocks_for(num_computed)

    def _make_room(self, num_blocks: int) -> None:
        """Give up those whose time is over first, until so many more blocks are free."""
        enough = self._state.pool.num_free + num_blocks
        for turn in sorted(self.held, key=lambda turn: turn.until):
            if self._state.pool.num_free >= enough:
                return
            self._let_go(turn)

    def _let_go(self, turn: _Turn) -> None:
        """No longer hold it, if it is held."""
        if turn in self.held:
            del self.held[turn]
            self._state.pool.release(turn.block_ids)


def holding_of(policy: SchedulingPolicy, state: SchedulerState) -> Holding | None:
    """What holds blocks for next turns; None where nobody asks for it."""
    hold, priority = getattr(policy, "hold", NoHold()), policy.priority
    follows = isinstance(priority, ProgramPriority) and priority.follows_programs
    if state.config.enable_prefix_caching and (follows or not isinstance(hold, NoHold)):
        return Holding(state, hold)
    return None
