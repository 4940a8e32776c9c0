"""Reads and writes files of KV blocks in threads, so that steps wait for neither."""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import threading
from collections.abc import Sequence

import jax
import numpy as np

from jaxllm.executor.disk import BlockFiles
from jaxllm.sched.cache.names import BlockName
from jaxllm.types import Read, piece_sizes


class FileTransfers:
    """Blocks on their way between host memory and files.

    Writing takes one thread, reading another: those who wait for blocks do not wait for what is only kept.
    """

    def __init__(self, files: BlockFiles, most_writing: int) -> None:
        """At most `most_writing` blocks wait to be written; of more than that some never are."""
        self._files, self._most_writing = files, most_writing
        self._is_closed = threading.Event()
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "kv-writer")
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "kv-reader")
        self._num_writing = 0
        self._lock = threading.Lock()
        self._reads: collections.deque[
            tuple[Read, concurrent.futures.Future[tuple[list[np.ndarray], list[bool]]]]
        ]
        self._reads = collections.deque()

    def write(self, pieces: Sequence[jax.Array], names: Sequence[BlockName | None]) -> None:
        """Write blocks that have names, in pieces one after another, when they have reached the host."""
        rest = iter(names)
        for piece in pieces:
            inside = list(itertools.islice(rest, piece.shape[0]))
            with self._lock:
                if self._num_writing + piece.shape[0] > self._most_writing:
                    return
                self._num_writing += piece.shape[0]
            self._writer.submit(self._write, piece, inside)

    def read(self, read: Read) -> None:
        """Start to read blocks."""
        self._reads.append((read, self._reader.submit(self._read, read.names)))

    def ended(self) -> list[tuple[Read, list[np.ndarray], list[bool]]]:
        """Reads that have ended, their pieces, and whether each block was there."""
        found = []
        while self._reads and self._reads[0][1].done():
            read, future = self._reads.popleft()
            found.append((read, *future.result()))
        return found

    def wait(self, seconds: float) -> None:
        """Wait until the next read has ended, at most so long."""
        if self._reads:
            concurrent.futures.wait([self._reads[0][1]], seconds)

    def flush(self) -> None:
        """Wait until everything is written."""
        if not self._is_closed.is_set():
            self._writer.submit(int).result()

    def cancel_reads(self) -> None:
        """Forget what is being read."""
        for _, future in self._reads:
            future.cancel()
        self._reads.clear()

    def close(self) -> None:
        """Write what is under way, and let go of the threads."""
        self._is_closed.set()
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=False)

    def _read(self, names: Sequence[BlockName]) -> tuple[list[np.ndarray], list[bool]]:
        """Blocks in pieces as a copy to the host has them, zeros where one is missing."""
        files = self._files
        pieces, was_there, rest = [], list[bool](), iter(names)
        for size in piece_sizes(len(names)):
            piece = np.zeros((size, *files.shape), files.dtype)
            for row, name in enumerate(itertools.islice(rest, size)):
                is_over = self._is_closed.is_set() or not threading.main_thread().is_alive()
                block = None if is_over else files.read(name)
                was_there.append(block is not None)
                if block is not None:
                    piece[row] = block
            pieces.append(piece)
        return pieces, was_there

    def _write(self, piece: jax.Array, names: list[BlockName | None]) -> None:
        try:
            for block, name in zip(np.asarray(piece), names, strict=False):  # the rest of a piece is padding
                if name is not None:
                    self._files.write(name, block)
        finally:
            with self._lock:
                self._num_writing -= piece.shape[0]
