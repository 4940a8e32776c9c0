"""Reads blocks of the prefix cache from files into host memory, ahead of those who wait for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from jaxllm.sched.cache.names import FileIndex
from jaxllm.sched.policies.contract import watched
from jaxllm.sched.policies.offload import OffloadPolicy
from jaxllm.sched.queues import Verdict
from jaxllm.sched.state import SchedulerState
from jaxllm.types import HostBlock, Read, Request, RequestStatus

_MAX_READ_BLOCKS = 64
"""Most blocks of one read, so that the first ones are found before the last ones have come."""
_NEW_SHARE = 0.25
"""Of what the last read took in the seconds that a block is predicted to take."""


class ReadAhead:
    """Has the blocks read that the most urgent waiting requests find nowhere else, but in files."""

    def __init__(self, state: SchedulerState, files: FileIndex, policy: OffloadPolicy) -> None:
        """Stores in the host pool of `state`; `policy` says what it is worth to wait for."""
        self._state, self._files, self._policy = state, files, watched(policy)
        self._block_seconds = 0.0  # of a read, by the last ones
        self._began: dict[int, float] = {}  # when a read was alone on the disk, by handle
        self._last_ended = float("-inf")
        self._looked_for: set[Request] = set()
        self._is_stale: set[int] = set()

    @property
    def is_busy(self) -> bool:
        """Whether blocks are being read."""
        return bool(self._state.being_read)

    def settle(self, ended: Iterable[tuple[int, Sequence[bool]]], now: float) -> None:
        """Let what was read be found; what was not there is not asked for again."""
        state, host = self._state, self._state.host
        for handle, was_there in ended:
            places, names, before = state.being_read.pop(handle)
            seconds = now - max(self._began.pop(handle), self._last_ended)
            if any(was_there):  # else it was given up, and says nothing of reads that are not
                self._learn(seconds, len(places))
            for place, name, is_there in zip(places, names, was_there, strict=True):
                if is_there and handle not in self._is_stale:
                    host.name(place, name)
            self._is_stale.discard(handle)
            host.release(places)
            host.release(before)
            num_tokens = sum(was_there) * state.config.block_size
            for request_id in [one for one, handles in state.awaited.items() if handle in handles]:
                state.num_read[request_id] = state.num_read.get(request_id, 0) + num_tokens
            self._last_ended = now
        awaited = state.awaited
        for request_id in list(awaited):
            awaited[request_id] &= state.being_read.keys()
            if not awaited[request_id]:
                del awaited[request_id]

    def cancel(self) -> None:
        """Give up what is being read."""
        state = self._state
        for places, _, before in state.being_read.values():
            state.host.give_up(places)
            state.host.release(before)
        state.being_read.clear()
        state.awaited.clear()
        self._began.clear()
        self._is_stale.clear()

    def forget(self) -> None:
        """Let what is being read not be found."""
        self._is_stale.update(self._state.being_read)

    def add_reads(self, reads: list[Read], now: float) -> None:
        """Add what is to be read now. Should the policy raise, what was added before is still to be read."""
        state = self._state
        self._looked_for = {one for one in self._looked_for if one.status is RequestStatus.WAITING}
        num_left = itertools.count(len(state.free_slots), -1)  # as many as may start

        def look(request: Request) -> Verdict:
            if request not in self._looked_for:
                reads.extend(self._read_for(request, now))
                self._looked_for.add(request)
            return Verdict.SKIP_ONE if next(num_left) else Verdict.STOP

        state.waiting.visit(now, look)

    def _learn(self, seconds: float, num_blocks: int) -> None:
        """Note how long a read took."""
        each = seconds / num_blocks
        before = self._block_seconds or each
        self._block_seconds = before + _NEW_SHARE * (each - before)

    def _read_for(self, request: Request, now: float) -> list[Read]:
        """Reads of the blocks that follow those a request finds, as many as host memory has room for."""
        state, host = self._state, self._state.host
        names = state.lookups.findable(request, files=self._files)
        found = state.lookups.locate(request)
        first = found.index(None) if None in found else len(found)
        wanted = list(itertools.takewhile(self._files.__contains__, names[first:]))
        coming = {name: handle for handle, (_, of, _) in state.being_read.items() for name in of}
        handles = {coming[name] for name in wanted if name in coming}
        before = [place for place in found if isinstance(place, HostBlock)]  # which are not to make room
        num_blocks = host.num_available_beside(before)
        wanted = [name for name in wanted if name not in coming][:num_blocks]
        num_before = sum([len(of) for _, of, _ in state.being_read.values()])
        seconds = (num_before + len(wanted)) * self._block_seconds
        if wanted and not self._policy.reads(len(wanted), seconds, state.pools(state.pool.num_free)):
            wanted = []
        reads = []
        for start in range(0, len(wanted), _MAX_READ_BLOCKS):
            of_read = wanted[start : start + _MAX_READ_BLOCKS]
            host.hold(before)
            places = host.store([None] * len(of_read))
            state.being_read[places[0].handle] = places, of_read, before
            self._began[places[0].handle] = now
            handles.add(places[0].handle)
            reads.append(Read(places[0].handle, tuple(of_read)))
        if handles:
            state.awaited[request.request_id] = handles
        return reads
