"""Copies blocks of the prefix cache to host memory, as an `OffloadPolicy` says."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable

from jaxllm.errors import Faults
from jaxllm.sched.cache.names import BlockName
from jaxllm.sched.policies.contract import watched
from jaxllm.sched.policies.offload import OffloadPolicy
from jaxllm.sched.state import SchedulerState
from jaxllm.types import MAX_STAGED_BLOCKS, Swap

_Named = tuple[int, BlockName]


class Offloader:
    """Decides with each iteration what is copied beside it."""

    def __init__(
        self, state: SchedulerState, policy: OffloadPolicy, *, is_eager: bool, faults: Faults | None = None
    ) -> None:
        """Reads `state`, and stores in its host pool; `is_eager` for policies that are not, too.

        `faults` keeps what the policy raises: nothing is copied that it would have been asked about.
        """
        self._faults = Faults() if faults is None else faults
        self._state, self._policy = state, watched(policy)
        state.lookups.collects_filled = is_eager or policy.is_eager
        # Blocks that earlier iterations filled, and what they held then.
        self._filled: collections.OrderedDict[int, BlockName] = collections.OrderedDict()
        self._looks_at = 0  # at how many changes of the pool it looks again for what is to be copied ahead
        self._looked_at: set[int] = set()  # free blocks that have copies, or no name
        state.host.collect_lost()

    def swaps(self, num_leaving: int, write_room: int | None = None) -> list[Swap]:
        """Copies of the iteration that is being decided, beside `num_leaving` blocks that are on their way.

        What it computes itself has to wait for the next one; and what is to be written to files, until there
        is room for that.
        """
        swaps = self._copies(num_leaving, write_room)
        for swap in swaps:
            self._state.host.release(swap.host_blocks)
        return swaps

    def _copies(self, num_leaving: int, write_room: int | None) -> list[Swap]:
        """Copies whose host blocks are held."""
        state = self._state
        reclaimed, state.pool.reclaimed = state.pool.reclaimed, []
        lost = state.host.take_lost()
        if self._looked_at:
            self._look_again(reclaimed, lost)
        room = max(0, min(MAX_STAGED_BLOCKS - num_leaving, state.host.num_available))
        wanted: dict[BlockName, int] = {}
        pools = state.pools(state.pool.num_free)
        keeps, num_ahead = False, 0
        with self._faults:
            keeps = bool(reclaimed) and self._policy.keeps(pools)
            num_ahead = self._policy.num_ahead(pools)
        if keeps:
            self._add(wanted, reversed(reclaimed), room)  # heads first
        if self._filled:
            self._add_filled(wanted, room if write_room is None else min(room, write_room))
        if num_ahead and state.pool.num_changes >= self._looks_at and len(wanted) < room:
            self._add(wanted, self._next_free(num_ahead), room)
            if len(wanted) < room:  # all of it is copied
                self._looks_at = state.pool.num_changes + min(MAX_STAGED_BLOCKS // 2, 1 + num_ahead // 16)
        self._take_filled()
        if not wanted:
            return []
        places = state.host.store(list(wanted))
        return [Swap(None, places[0].handle, tuple(wanted.values()), tuple(places), tuple(wanted))]

    def _take_filled(self) -> None:
        """Let what the iteration fills that is being decided be copied from the next one on."""
        if self._state.lookups.filled:
            self._filled.update(self._state.lookups.filled)
            self._state.lookups.filled = []
        self._state.pool.unfilled.clear()

    @property
    def is_behind(self) -> bool:
        """Whether blocks are full that were to be copied with the next iterations."""
        return bool(self._filled or self._state.lookups.filled)

    def flush(self, write_room: int | None = None) -> list[Swap]:
        """Copies of what is full and was to be copied with the next iterations, when there are none.

        As many as there is room for beside each other: `is_behind` says whether that was all.
        """
        self._take_filled()  # all that was decided has been sent
        found: list[Swap] = []
        while self._filled and (swaps := self._copies(0, write_room)):
            found += swaps
            if write_room is not None:
                write_room -= sum([len(swap.block_ids) for swap in swaps])
        for swap in found:
            self._state.host.release(swap.host_blocks)
        return found

    def forget(self) -> None:
        """Copy none of the blocks that had names until now."""
        self._state.pool.reclaimed, self._state.lookups.filled = [], []
        self._state.pool.unfilled.clear()
        self._filled.clear()
        self._looked_at.clear()

    def _look_again(self, reclaimed: Iterable[_Named], lost: Iterable[BlockName]) -> None:
        """At blocks that hold something else, and at those whose copies are gone."""
        pool, looked_at = self._state.pool, self._looked_at
        looked_at.difference_update(block_id for block_id, _ in reclaimed)
        looked_at.difference_update(pool.unfilled)
        looked_at.difference_update(pool.names.first(name) for name in lost)

    def _next_free(self, count: int) -> list[_Named]:
        """Those of the free blocks that are handed out next which are not known to have copies."""
        pool, looked_at, on_host = self._state.pool, self._looked_at, self._state.host.names
        found: list[_Named] = []
        for block_id in itertools.islice(pool.free_blocks(), count):
            if block_id not in looked_at:
                name = pool.name_of(block_id)
                if name is None or on_host.first(name) is not None:
                    looked_at.add(block_id)
                if name is not None:
                    found.append((block_id, name))
        return found

    def _add_filled(self, wanted: dict[BlockName, int], room: int) -> None:
        """Add blocks that are full, and still hold what they held then.

        Not those that got the name again in the iteration that is being decided, which is to fill them.
        """
        pool = self._state.pool
        while self._filled and len(wanted) < room:
            block_id, name = self._filled.popitem(last=False)
            if pool.name_of(block_id) == name and block_id not in pool.unfilled:
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
