"""Reads and writes files of KV blocks in threads, so that steps wait for neither."""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Self

import jax
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.executor.kv.disk import BlockFiles
from jaxllm.sched.cache.names import BlockName
from jaxllm.types import Read, piece_sizes

PATIENCE_SECONDS = 5.0
"""How long files may do nothing at all before nobody waits for them any more."""
PATIENCE_AT_START_SECONDS = 30.0
"""The same for a folder that nobody has looked at yet: some are mounted by being looked at."""
_SECONDS_TO_LOOK = 0.05

_logger = logging.getLogger(__name__)


class FileTransfers:
    """Blocks on their way between host memory and files.

    Writing takes one thread, reading another: those who wait for blocks do not wait for what is only kept.
    Looking for files that another process wrote takes a third. A disk that does nothing for `patience`
    seconds (a network mount that hangs) holds up nobody: what is to be read is missing then, and what is to
    be written is not, until it goes on.

    Args:
        files: where the blocks are.
        most_writing: most blocks that wait to be written; of more than that some never are.
        patience: in seconds; `PATIENCE_SECONDS` if None.

    Attributes:
        num_taken: blocks that it was ever given to write.
    """

    def __init__(self, files: BlockFiles, most_writing: int, patience: float | None = None) -> None:
        patience = PATIENCE_SECONDS if patience is None else patience
        self._files, self._most_writing = files, most_writing
        self._writer, self._reader, self._looker = (
            _Worker(name, patience) for name in ("kv-writer", "kv-reader", "kv-looker")
        )
        self.num_taken = self._num_writing = 0
        self._is_passing = False  # whether nobody will know the blocks after this run
        self._lock = threading.Lock()
        self._reads: collections.deque[_Reading] = collections.deque()
        self._pieces: dict[int, list[np.ndarray]] = {}  # of reads that have ended, by handle
        _open.add(self)
        for worker in (self._writer, self._reader, self._looker):
            weakref.finalize(self, worker.stop).atexit = False

    def __contains__(self, name: BlockName) -> bool:
        """Whether a block seems to be there; a disk that does not answer at once has none."""
        if self._reader.is_stuck:
            return False
        if self._files.believes_in(name):
            return True
        if not self._looker.is_idle:  # it is still looking for another
            return False
        found: list[bool] = []
        self._looker.submit(lambda: found.append(name in self._files))
        self._looker.wait(lambda: bool(found), _SECONDS_TO_LOOK)
        return found == [True]

    def open(self, patience: float = PATIENCE_AT_START_SECONDS) -> Self:
        """See what is in the folder, which may take long; a disk that does nothing is given up.

        Raises:
            ConfigError: it does nothing for `patience` seconds; and see `BlockFiles.open`.
        """
        found: concurrent.futures.Future[None] = concurrent.futures.Future()

        def look() -> None:
            try:
                self._files.open(self._writer.note_progress)
            except BaseException as error:
                found.set_exception(error)
            else:
                found.set_result(None)

        self._writer.submit(look)
        while not found.done():
            self._writer.wait(found.done, _SECONDS_TO_LOOK)
            if self._writer.stuck_seconds > patience and not found.done():
                raise ConfigError(
                    f"{str(self._files.folder)!r} is to hold KV blocks and does not answer: nothing came of "
                    f"it for {patience:g} s; see whether its disk or mount hangs, or choose another folder"
                )
        found.result()
        return self

    def watch(self) -> collections.deque[tuple[str, bool]]:
        """Digests of blocks, in hex, and whether they are there: first those that are, then what changes.

        Whoever asks for it has to empty it.
        """
        self._files.changes = collections.deque((digest, True) for digest in self._files.digests)
        return self._files.changes

    @property
    def is_reading(self) -> bool:
        """Whether `ended` has not told of a read yet."""
        return bool(self._reads)

    @property
    def is_writing(self) -> bool:
        """Whether blocks wait to be written, if only for a disk that does nothing."""
        return not self._writer.is_idle

    @property
    def is_settled(self) -> bool:
        """Whether everything is written, or the disk does nothing any more."""
        return self._writer.is_idle or self._writer.is_stuck

    @property
    def write_room(self) -> int:
        """Blocks that may be copied out to be written; half of what may wait is for those of victims."""
        if self._writer.is_stuck:
            return self._most_writing  # so that they are given up, rather than waited for
        return max(0, -(-self._most_writing // 2) - self._num_writing)

    def write(self, pieces: Sequence[jax.Array], names: Sequence[BlockName | None]) -> None:
        """Write blocks that have names, in pieces one after another, when they have reached the host."""
        rest = iter(names)
        self.num_taken += sum(piece.shape[0] for piece in pieces)
        for piece in pieces:
            inside = list(itertools.islice(rest, piece.shape[0]))
            with self._lock:
                if self._writer.is_stuck or self._num_writing + piece.shape[0] > self._most_writing:
                    return
                self._num_writing += piece.shape[0]
            self._writer.submit(functools.partial(self._write, self._files, piece, inside))

    def read(self, read: Read) -> None:
        """Start to read blocks."""
        reading = _Reading(read, *self._nothing(len(read.names)), is_done=self._reader.is_stuck)
        self._reads.append(reading)
        if not reading.is_done:
            self._reader.submit(lambda: self._read(reading))

    def ended(self) -> list[tuple[Read, list[bool]]]:
        """Reads that have ended, and whether each block was there; `take` gives them."""
        found = []
        while self._reads and (self._reads[0].is_done or self._reader.is_stuck):
            reading = self._reads.popleft()
            pieces, was_there = reading.pieces, reading.was_there
            if not reading.is_done:
                reading.is_cancelled = True
                pieces, was_there = self._nothing(len(was_there))
            self._pieces[reading.read.handle] = pieces
            found.append((reading.read, was_there))
        return found

    def take(self, handle: int) -> list[np.ndarray]:
        """The pieces of a read that has ended, once; zeros where a block was not there."""
        return self._pieces.pop(handle)

    def wait(self, seconds: float) -> None:
        """Wait until the next read has ended, or without any until something is written; at most so long."""
        if self._reads:
            first = self._reads[0]
            self._reader.wait(lambda: first.is_done, seconds)
        else:
            before = self._num_writing
            self._writer.wait(lambda: self._num_writing < before or not before, seconds)

    def flush(self) -> None:
        """Wait until everything is written, or the disk does nothing any more."""
        while not self.is_settled:
            self._writer.wait(lambda: self._writer.is_idle, 0.1)

    def cancel_reads(self) -> None:
        """Forget what is being read."""
        for reading in self._reads:
            reading.is_cancelled = True
        self._reads.clear()
        self._pieces.clear()

    def begin_anew(self, fingerprint: str) -> None:
        """Know none of the blocks any more; keep those to come under a fingerprint that ends with this run.

        Waits for no disk that does nothing: the folder is looked at when it goes on.
        """
        self.cancel_reads()
        self.flush()
        if self._is_passing:
            self._writer.submit(self._files.clear)
        old, self._is_passing = self._files, True
        self._files = files = old.anew(fingerprint)
        files.changes, old.changes = old.changes, None
        self._writer.submit(lambda: files.open(self._writer.note_progress))

    def close(self) -> None:
        """Write what is under way, and let go of the threads."""
        self.cancel_reads()
        if self._is_passing:
            self._writer.submit(self._files.clear)
        for worker in (self._writer, self._reader, self._looker):
            worker.stop()

    def _nothing(self, count: int) -> tuple[list[np.ndarray], list[bool]]:
        """What a read gives of which no block is there."""
        shape, dtype = self._files.shape, self._files.dtype
        return [np.zeros((size, *shape), dtype) for size in piece_sizes(count)], [False] * count

    def _read(self, reading: _Reading) -> None:
        """Read blocks in pieces as a copy to the host has them, zeros where one is missing."""
        rows = ((piece, row) for piece in reading.pieces for row in range(len(piece)))
        try:
            for number, (name, (piece, row)) in enumerate(zip(reading.read.names, rows, strict=False)):
                if reading.is_cancelled:
                    return
                block = self._files.read(name)
                self._reader.note_progress()
                if block is not None:
                    piece[row], reading.was_there[number] = block, True
        finally:
            reading.is_done = True

    def _write(self, files: BlockFiles, piece: jax.Array, names: list[BlockName | None]) -> None:
        """Write to the files of when it was told to: after a hang there may be others."""
        try:
            for block, name in zip(np.asarray(piece), names, strict=False):  # the rest of a piece is padding
                if name is not None:
                    files.write(name, block)
                    self._writer.note_progress()
                    if files.changes is not None and files.believes_in(name):
                        files.changes.append((name.digest.hex(), True))
        finally:
            with self._lock:
                self._num_writing -= piece.shape[0]


@dataclasses.dataclass(eq=False)
class _Reading:
    """A read under way, and what has come of it."""

    read: Read
    pieces: list[np.ndarray]
    was_there: list[bool]
    is_done: bool = False
    is_cancelled: bool = False


class _Worker:
    """A thread that does one thing after another, there from the first one on.

    A daemon: a disk that hangs must not keep a process from ending.
    """

    def __init__(self, name: str, patience: float) -> None:
        self._name, self._patience = name, patience
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._num_left = 0
        self._moved_at = 0.0
        self._thread: threading.Thread | None = None
        self._said: set[str] = set()

    @property
    def is_idle(self) -> bool:
        """Whether everything is done."""
        return not self._num_left

    @property
    def is_stuck(self) -> bool:
        """Whether it has something to do, and has got nowhere with it for as long as one waits."""
        return self.stuck_seconds > self._patience

    @property
    def stuck_seconds(self) -> float:
        """How long it has got nowhere with what it has to do; 0 if that is nothing."""
        return time.monotonic() - self._moved_at if self._num_left else 0.0

    def submit(self, task: Callable[[], object]) -> None:
        """Do this after what was submitted before; what it raises is logged, once for each kind of error."""
        with self._changed:
            if not self._num_left:
                self._moved_at = time.monotonic()
            self._num_left += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        self._tasks.put(task)

    def note_progress(self) -> None:
        """Say from within a task that it goes on."""
        self._moved_at = time.monotonic()

    def wait(self, is_done: Callable[[], bool], seconds: float) -> None:
        """Wait until a task makes it so, at most so long."""
        with self._changed:
            self._changed.wait_for(is_done, seconds)

    def stop(self) -> None:
        """End the thread when all is done that was submitted."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:
                if type(error).__name__ not in self._said:
                    self._said.add(type(error).__name__)
                    _logger.exception("%s: KV blocks were left out: %s (said once)", self._name, error)
            finally:
                del task  # which may hold blocks, until the next one comes
                with self._changed:
                    self._num_left -= 1
                    self._moved_at = time.monotonic()
                    self._changed.notify_all()


_open: weakref.WeakSet[FileTransfers] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    """Write what is under way before the interpreter takes its threads away."""
    for transfers in list(_open):
        transfers.flush()
