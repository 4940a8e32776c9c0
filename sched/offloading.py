"""Copies blocks of the prefix cache to host memory, as an `OffloadPolicy` says."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable

from jaxllm.sched.cache.names import BlockName
from jaxllm.sched.policies.offload import OffloadPolicy
from jaxllm.sched.state import SchedulerState
from jaxllm.types import MAX_STAGED_BLOCKS, Swap

_Named = tuple[int, BlockName]


class Offloader:
    """Decides with each iteration what is copied beside it."""

    def __init__(self, state: SchedulerState, policy: OffloadPolicy, *, is_eager: bool) -> None:
        """Reads `state`, and stores in its host pool; `is_eager` for policies that are not, too."""
        self._state, self._policy = state, policy
        state.collects_filled = is_eager or policy.is_eager
        self._filled: collections.deque[_Named] = collections.deque()  # by earlier iterations
        self._looks_at = 0  # at how many changes of the pool it looks again for what is to be copied ahead

    def swaps(self, num_leaving: int) -> list[Swap]:
        """Copies of the iteration that is being decided, beside `num_leaving` blocks that are on their way.

        What it computes itself has to wait for the next one.
        """
        state = self._state
        reclaimed, state.pool.reclaimed = state.pool.reclaimed, []
        room = max(0, MAX_STAGED_BLOCKS - num_leaving)
        wanted: dict[BlockName, int] = {}
        pools = state.pools(state.pool.num_free)
        if reclaimed and self._policy.keeps(pools):
            self._add(wanted, reversed(reclaimed), room)  # heads first
        self._add_filled(wanted, room)
        num_ahead = self._policy.num_ahead(pools)
        if num_ahead and state.pool.num_changes >= self._looks_at and len(wanted) < room:
            self._add(wanted, self._next_free(num_ahead), room)
            if len(wanted) < room:  # all of it is copied
                self._looks_at = state.pool.num_changes + min(MAX_STAGED_BLOCKS // 2, 1 + num_ahead // 16)
        self._filled += state.filled
        state.filled = []
        names = list(itertools.islice(wanted, state.host.num_available))
        if not names:
            return []
        places = state.host.store(names)
        state.host.release(places)
        block_ids = tuple([wanted[name] for name in names])
        return [Swap(None, places[0].handle, block_ids, tuple(places), tuple(names))]

    @property
    def is_behind(self) -> bool:
        """Whether blocks are full that were to be copied with the next iterations."""
        return bool(self._filled or self._state.filled)

    def flush(self) -> list[Swap]:
        """Copies of all that is full and was to be copied with the next iterations, when there are none."""
        found: list[Swap] = []
        while self._filled or self._state.filled:
            found += self.swaps(0)
        return found

    def forget(self) -> None:
        """Copy none of the blocks that had names until now."""
        self._state.pool.reclaimed, self._state.filled = [], []
        self._filled.clear()

    def _next_free(self, count: int) -> list[_Named]:
        """The free blocks with names that are handed out next, those first that go last."""
        pool = self._state.pool
        found = [(pool.name_of(one), one) for one in itertools.islice(pool.free_blocks(), count)]
        return [(block_id, name) for name, block_id in found if name is not None]

    def _add_filled(self, wanted: dict[BlockName, int], room: int) -> None:
        """Add blocks that are full, and still hold what they held then."""
        while self._filled and len(wanted) < room:
            block_id, name = self._filled.popleft()
            if self._state.pool.name_of(block_id) == name:
                self._add(wanted, [(block_id, name)], room)

    def _add(self, wanted: dict[BlockName, int], blocks: Iterable[_Named], room: int) -> None:
        """Add blocks that are not on the host; those that are there are as if just used."""
        host = self._state.host
        for block_id, name in blocks:
            place = host.names.first(name)
            if place is not None:
                host.touch(place)
            elif len(wanted) < room:
                wanted[name] = block_id
