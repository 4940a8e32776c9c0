"""Files of lines that survive a crash: each line is there as a whole, or not at all, and never twice."""

from __future__ import annotations

import abc
import fcntl
import os
import secrets
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Generic, NoReturn, Self, TypeVar

from jaxllm.errors import ConfigError

Key = TypeVar("Key")


class LineFile(abc.ABC, Generic[Key]):
    """An output file, a line for each of some keys; a context manager.

    Lines are only ever appended, each batch with one write followed by fsync, so that a killed process
    leaves at most one incomplete line, the last. The file is locked while open.

    Args:
        path: the file; created if absent, in a folder that exists.
        resume: continue an existing file: drop an incomplete last line and lines that are to be written
            anew, and check that every other line belongs here. Without it a file that holds anything is
            refused.
        line_start: how each line begins.

    Raises:
        ConfigError: the file cannot be opened, is in use by another process, holds something already,
            or (resuming) belongs to other inputs. It is left unchanged then.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume: bool, line_start: bytes) -> None:
        self._path = os.fspath(path)
        self._done: set[Key] = set()
        self._line_start, self._size = line_start, 0
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"cannot open the output file {self._path!r} ({error.strerror}).") from error
        try:
            self._lock()
            if resume:
                self._resume()
            else:
                self._require_empty()
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def done(self) -> frozenset[Key]:
        """Keys that have a line."""
        return frozenset(self._done)

    @abc.abstractmethod
    def _check_line(self, number: int, line: bytes) -> Key | None:
        """The key of a line that is in the file already, or None if it is to be written anew.

        Raises:
            ConfigError: it does not belong here; `_refuse` says so.
        """

    def close(self) -> None:
        """Closes the file and gives the lock back. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _append(self, data: bytes) -> None:
        """Write whole lines; on return they have reached the disk.

        Raises:
            ConfigError: the disk is full or failed. Lines of earlier calls are kept.
        """
        try:
            rest = memoryview(data)
            while rest:  # one write, unless the disk runs full or a signal comes between
                rest = rest[os.write(self._fd, rest) :]
            os.fsync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, self._size)
            self._fail(error)
        self._size += len(data)

    def _lock(self) -> None:
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise ConfigError(f"the output {self._path!r} is no regular file: choose another --output.")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._fd), os.stat(self._path)):
                raise BlockingIOError  # by whom it was replaced meanwhile
        except (BlockingIOError, FileNotFoundError) as error:
            raise ConfigError(
                f"another process is writing to {self._path!r}: wait for it, or choose another --output."
            ) from error

    def _require_empty(self) -> None:
        size = os.fstat(self._fd).st_size
        if size:
            raise ConfigError(
                f"the output file {self._path!r} exists and holds {size} bytes, and is never overwritten. "
                "Pass --resume to continue it, or choose another --output."
            )

    def _resume(self) -> None:
        start = self._line_start
        dropped: set[int] = set()
        with os.fdopen(os.dup(self._fd), "rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    key = self._check_line(number, line)
                    if key is None:
                        dropped.add(number)
                        continue
                    if key in self._done:
                        self._refuse(number, f"it is a second line for {self._describe(key)}")
                    self._done.add(key)
                    self._size += len(line)
                elif line[: len(start)] != start[: len(line)]:
                    self._refuse(number, "it is no line of jaxllm's")
        if dropped:
            self._drop(dropped)
        os.ftruncate(self._fd, self._size)

    def _drop(self, numbers: Collection[int]) -> None:
        """Put a file without these lines in the place of this one.

        Raises:
            ConfigError: the disk is full or failed. All is as before then.
        """
        path = Path(self._path).resolve()
        beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            fd = os.open(beside, flags, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.fchmod(fd, stat.S_IMODE(os.fstat(self._fd).st_mode))
                with os.fdopen(os.dup(self._fd), "rb") as file, os.fdopen(os.dup(fd), "wb") as kept:
                    file.seek(0)
                    kept.writelines(line for number, line in enumerate(file, 1) if number not in numbers)
                os.fsync(fd)
                os.replace(beside, path)
                sync_folder(path.parent)
            except BaseException:
                os.close(fd)
                beside.unlink(missing_ok=True)
                raise
        except OSError as error:
            self._fail(error)
        os.close(self._fd)
        self._fd = fd

    def _fail(self, error: OSError) -> NoReturn:
        raise ConfigError(
            f"cannot write to the output file {self._path!r} ({error.strerror}). Make room and run again "
            "with --resume; what was written before is kept."
        ) from error

    def _describe(self, key: Key) -> str:
        return repr(key)

    def _refuse(self, number: int, why: str) -> NoReturn:
        raise ConfigError(
            f"cannot resume {self._path!r}, line {number}: {why}. The output file belongs to other inputs "
            "or parameters; choose another --output or delete it."
        )


def sync_folder(path: Path) -> None:
    """Make a rename in a folder outlive a failure of power."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
