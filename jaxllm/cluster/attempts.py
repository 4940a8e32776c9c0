"""Rows that kill whoever answers them, found by what the dead have left behind."""

from __future__ import annotations

import collections
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from jaxllm.errors import ConfigError

_FATAL = 2  # workers that a row has killed


class Attempts:
    """What was begun and not ended of one shard, line by line in a file: a worker that dies can say no more.

    Args:
        path: of the file; it is made when it is needed.

    Raises, in what writes:
        ConfigError: the disk is full or failed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self) -> int:
        """Note that the shard is begun once more; returns how often it was before."""
        before = sum(line == "shard" for line in self._lines())
        self._note("shard")
        return before

    def begin_row(self, index: int) -> None:
        """Note that a row is begun, by itself."""
        self._note(f"row {index}")

    def end_row(self, index: int) -> None:
        """Note that it has been answered."""
        self._note(f"end {index}")

    def fatal_rows(self) -> set[int]:
        """Rows that were begun by themselves and not ended by two workers: one may die of something else."""
        begun: collections.Counter[int] = collections.Counter()
        for line in self._lines():
            kind, _, index = line.partition(" ")
            if kind != "shard" and index:
                begun[int(index)] += 1 if kind == "row" else -1
        return {index for index, count in begun.items() if count >= _FATAL}

    def clear(self) -> None:
        """Forget them: the shard is answered."""
        with self._as_ours():
            self._path.unlink(missing_ok=True)

    def _note(self, line: str) -> None:
        with self._as_ours(), open(self._path, "a", encoding="ascii") as file:
            file.write(line + "\n")

    @contextlib.contextmanager
    def _as_ours(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"cannot write {os.fspath(self._path)!r} ({error.strerror or error}). Make room and run "
                "again with resume=True (--resume); answers so far are kept."
            ) from error

    def _lines(self) -> Iterator[str]:
        if self._path.exists():
            yield from self._path.read_text(encoding="ascii").split("\n")


class Turns:
    """Lets threads work together, or one of them alone, so that it is known whose work ends the process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_together = 0

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Beside others that do so."""
        with self._changed:
            self._num_together += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_together -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """When nobody else works, and until the block is left nobody begins."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_together)
            yield
