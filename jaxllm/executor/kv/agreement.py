"""Which blocks are in files, where each process of an engine has files of its part of them.

One process decides: it has the others write, read and let go of what it does itself, and they tell it what
came of that. What they said last may be wrong meanwhile: then a part turns out to be missing when the block
is read, and the block is missing for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jaxllm.errors import EngineError
from jaxllm.executor.kv.file_io import FileTransfers
from jaxllm.executor.others import Others
from jaxllm.sched.cache.names import BlockName
from jaxllm.types import Read

_HERE = 0
_SECONDS_TO_LOOK = 0.1


class Reporter:
    """What a process says of its files to the one that decides."""

    def __init__(self, own: FileTransfers) -> None:
        self._own = own
        self._changes = own.watch()
        self._said = own.num_taken, own.write_room, own.is_settled

    @property
    def is_busy(self) -> bool:
        """Whether there will be news, whatever it is told."""
        return self._own.is_reading or self._own.is_writing

    def kept(self) -> list[Any]:
        """As `news`, of all that was there before."""
        return self._report([])

    def news(self) -> list[Any] | None:
        """What has changed since the last report: numbers, digests and reads; None if nothing has.

        The blocks it was given to write and the room for more, and whether all is written that will be;
        digests of blocks, in hex, and whether they are there now; and of reads that have ended the handles,
        and whether each block was there.
        """
        ended = [[read.handle, was_there] for read, was_there in self._own.ended()]
        state = self._own.num_taken, self._own.write_room, self._own.is_settled
        if not ended and not self._changes and state == self._said:
            return None
        self._said = state
        return self._report(ended)

    def _report(self, ended: list[Any]) -> list[Any]:
        return [*self._said, [self._changes.popleft() for _ in range(len(self._changes))], ended]


@dataclasses.dataclass
class _Other:
    """What another process has said last."""

    digests: set[str] = dataclasses.field(default_factory=set)
    num_taken: int = 0
    write_room: int = 0
    is_settled: bool = True


@dataclasses.dataclass
class _Awaited:
    """A read, and by process whether each block was there."""

    names: Sequence[BlockName]
    answers: dict[int, Sequence[bool]] = dataclasses.field(default_factory=dict)

    @property
    def was_there(self) -> list[bool]:
        """Whether each block was there for all who have answered."""
        return [all(parts) for parts in zip(*self.answers.values(), strict=True)]


class AgreedFiles:
    """What is in the files of all processes of an engine, for the one that decides; one thread uses it.

    Args:
        own: this process's.
        others: the other processes, which say what their `Reporter` does; None if there are none.

    Raises:
        EngineError: one of them is gone.
    """

    def __init__(self, own: FileTransfers, others: Others | None = None) -> None:
        self._own, self._link = own, others
        self._reads: dict[int, _Awaited] = {}
        self._others: dict[int, _Other] = {}
        if others is not None:
            kept = others.ask("kept")
            self._others = {rank: _Other() for rank in kept}
            self._hear(kept.items())

    def __contains__(self, name: BlockName) -> bool:
        """Whether each process seems to have a block; a disk that does not answer at once has none."""
        digest = name.digest.hex()
        return all(digest in other.digests for other in self._others.values()) and name in self._own

    @property
    def write_room(self) -> int:
        """Blocks that may be copied out to be written by all; see `FileTransfers`."""
        num_told = self._own.num_taken
        rooms = [other.write_room - (num_told - other.num_taken) for other in self._others.values()]
        return max(0, min(self._own.write_room, *rooms)) if rooms else self._own.write_room

    def expect(self, read: Read) -> None:
        """Note what all are about to be told to read."""
        self._reads[read.handle] = _Awaited(read.names)

    def ended(self) -> list[tuple[int, list[bool]]]:
        """Handles of reads that have ended everywhere, and whether each block was there for all."""
        for read, was_there in self._own.ended():
            self._answer(_HERE, read.handle, was_there)
        if self._link is not None:
            self._hear(self._link.news())
        ended = [handle for handle, read in self._reads.items() if len(read.answers) > len(self._others)]
        return [(handle, self._reads.pop(handle).was_there) for handle in ended]

    def wait(self, seconds: float) -> None:
        """Wait for what the next read needs, or without any until something is written; at most so long."""
        is_here = self._own.is_reading or (self._own.is_writing and not self._reads)
        if is_here or self._link is None:
            self._own.wait(seconds)
        else:
            self._hear(self._link.news(seconds))

    def flush(self) -> None:
        """Wait until everything is written, or the disk does nothing any more, or a process is gone."""
        self._own.flush()
        try:
            while self._link is not None and not self._is_settled:
                self._hear(self._link.news(_SECONDS_TO_LOOK))
        except EngineError:
            return  # and whoever computes says so

    def forget_reads(self) -> None:
        """Expect nothing that is being read."""
        self._reads.clear()

    def forget(self) -> None:
        """Know nothing of any block; all are about to begin anew."""
        self.forget_reads()
        for other in self._others.values():
            other.digests.clear()

    @property
    def _is_settled(self) -> bool:
        num_told = self._own.num_taken
        return all(other.is_settled and other.num_taken == num_told for other in self._others.values())

    def _hear(self, news: Iterable[tuple[int, Any]]) -> None:
        for rank, (num_taken, write_room, is_settled, changes, ended) in news:
            other = self._others[rank]
            other.num_taken, other.write_room, other.is_settled = num_taken, write_room, is_settled
            for handle, was_there in ended:
                self._answer(rank, handle, was_there)
            for digest, is_there in changes:  # some may have been written after they were missing
                (other.digests.add if is_there else other.digests.discard)(digest)

    def _answer(self, rank: int, handle: int, was_there: Sequence[bool]) -> None:
        """Note how a read has ended, unless it was given up; who lacks a block is not taken to have it."""
        if handle in self._reads:
            read = self._reads[handle]
            read.answers[rank] = was_there
            if rank != _HERE:
                parts = zip(read.names, was_there, strict=True)
                lacking = [name.digest.hex() for name, is_there in parts if not is_there]
                self._others[rank].digests.difference_update(lacking)
