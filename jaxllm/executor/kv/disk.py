"""KV blocks as files, which outlive the engine that computed them and may be shared by several.

    FOLDER/<digest of the fingerprint>/about.json
    FOLDER/<digest of the fingerprint>/<first byte>/<digest of the name>

Every file is checked as a whole when it is read: one that a crash tore, that a disk damaged or that belongs
elsewhere is a miss, so that nothing has to be flushed when it is written.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import heapq
import json
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.executor.kv.block_format import FORMAT, FORMAT_VERSION, BlockFormat, DamagedError
from jaxllm.executor.kv.whole_files import TEMPORARY_NAME, is_left_over, replace_file
from jaxllm.sched.cache.names import BlockName

_logger = logging.getLogger(__name__)
_ABOUT = "about.json"
_SCANS_PER_LIMIT = 16

_FOLDER_NAME = re.compile("[0-9a-f]{32}")
_FIRST_BYTE = re.compile("[0-9a-f]{2}")
_FILE_NAME = re.compile("(?:[0-9a-f]{2})+")


class _File(NamedTuple):
    """Bytes of a file, and when it was last used, in nanoseconds since the epoch."""

    size: int
    used_ns: int


class BlockFiles:
    """The KV blocks of a prefix cache in a folder, at most `max_bytes` of them, the last used.

    Blocks of all fingerprints count, and the least recently used go first, whosever they are (of those used
    at the same time this fingerprint's). Only files that are named like blocks are counted or removed.
    Several threads may read and write at once, and several processes use one folder: each looks at it anew
    after it has written a sixteenth of `max_bytes`, so that for a while the limit may be exceeded by as much
    for every other process that writes. What is wrong with the disk is logged, once for each kind of problem,
    and never raised.

    Args:
        folder: where the files are; made if it is not there.
        fingerprint: of everything that tells these blocks from others: model, weights, dtype, block layout.
        shape: of a block.
        dtype: of a block.
        max_bytes: most bytes of all blocks in `folder`.

    Attributes:
        changes: digests of names in hex, and whether these blocks of this fingerprint are there: one for each
            that is lost, for whoever puts a queue here and empties it.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(
        self, folder: Path, fingerprint: str, shape: tuple[int, ...], dtype: np.dtype, max_bytes: int
    ) -> None:
        self.folder, self.fingerprint, self.max_bytes = Path(folder), fingerprint, max_bytes
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        if max_bytes < 1:
            raise ConfigError(
                f"max_bytes={max_bytes} must be at least 1; leave the folder out to keep no files"
            )
        self._format = BlockFormat(fingerprint, self.shape, self.dtype)
        self._root = os.path.abspath(self.folder)
        self._own = os.path.join(self._root, self._format.key.hex())
        self._lock, self._scan_lock, self._warn_lock = (threading.Lock() for _ in range(3))
        self._files: dict[str, _File] = {}  # by path, as believed; replaced as a whole by a scan
        self._oldest: list[tuple[int, bool, str]] = []  # heap of times, foreign or not, paths; some outdated
        self._num_bytes = self._num_reserved = self._num_unseen = 0
        self.changes: collections.deque[tuple[str, bool]] | None = None
        self._changed: set[str] | None = None  # paths that a scan which is under way may have missed
        self._warned: set[object] = set()
        self._note_progress: Callable[[], object] = bool

    def open(self, note_progress: Callable[[], object] = bool) -> Self:
        """Make the folder, and see what is in it; before that nothing is believed in.

        Args:
            note_progress: called again and again while that takes.

        Raises:
            ConfigError: the folder cannot be made, or its blocks of this fingerprint are said to be others.
        """
        self._note_progress = note_progress
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"KV blocks cannot be kept in {str(self.folder)!r} ({error}); "
                "choose a folder that can be made"
            ) from error
        self._check_about()
        self._rescan()
        with self._lock:
            self._make_room(0)
        return self

    def anew(self, fingerprint: str) -> BlockFiles:
        """Those of another fingerprint in the same folder, not yet opened."""
        return BlockFiles(self.folder, fingerprint, self.shape, self.dtype, self.max_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks of all fingerprints, as believed."""
        return self._num_bytes

    def __contains__(self, name: BlockName) -> bool:
        """Whether a block seems to be there; `read` may find otherwise. Waits for no other thread."""
        return self.believes_in(name) or os.path.isfile(self._path(name))

    def believes_in(self, name: BlockName) -> bool:
        """Whether a block was there when somebody last looked; asks the disk for nothing."""
        return self._path(name) in self._files

    @property
    def digests(self) -> list[str]:
        """Of the names of this fingerprint's blocks that are believed in, in hex."""
        with self._lock:
            return [os.path.basename(path) for path in self._files if path.startswith(self._own)]

    def write(self, name: BlockName, block: np.ndarray) -> bool:
        """Keep a block, in place of the least recently used ones if there is no room.

        Returns:
            False if it is there already, which counts as a use, or cannot be written.

        Raises:
            ValueError: `block` is of another shape or dtype.
        """
        if block.shape != self.shape or block.dtype != self.dtype:
            raise ValueError(f"block is {block.dtype}{block.shape}, expected {self.dtype}{self.shape}")
        path, size = self._path(name), self._format.size(name)
        if size > self.max_bytes:
            message = "KV blocks of %d bytes are not kept in %s: max_bytes=%d is less, raise it"
            self._warn("size", message, size, self.folder, self.max_bytes)
            return False
        if self._use(path, size):
            return False
        parts = self._format.parts(name, block)
        with self._lock:
            is_scan_due = self._num_unseen > self.max_bytes // _SCANS_PER_LIMIT
            if is_scan_due:
                self._num_unseen = 0
        if is_scan_due:
            self._rescan()
        with self._lock:
            if not self._make_room(size):
                return False
            self._num_reserved += size
        used_ns = None
        try:
            used_ns = replace_file(path, parts)
        except OSError as error:
            self._warn_of(error, "written to")
        finally:
            with self._lock:
                self._num_reserved -= size
                if used_ns is not None:
                    self._num_unseen += size
                    self._note(path, _File(size, used_ns))
        return used_ns is not None

    def read(self, name: BlockName) -> np.ndarray | None:
        """The block in an array of its own, or None if there is none that is whole and of this very name.

        A file that does not hold what its name says is removed.
        """
        path = self._path(name)
        try:
            with open(path, "rb") as file:
                block = self._format.parse(file, name)
        except FileNotFoundError:
            with self._lock:
                if not os.path.exists(path):  # it may have been written meanwhile
                    self._forget(path)
            return None
        except DamagedError as error:
            self._remove_damaged(path, error)
            return None
        except OSError as error:
            self._warn_of(error, "read from")
            return None
        self._use(path, self._format.size(name))
        return block

    def clear(self) -> None:
        """Remove the blocks of this fingerprint."""
        with self._lock:
            believed = {path for path in self._files if path.startswith(self._own)}
        for path in believed.union(path for path, _ in self._blocks_below(self._own)):
            with self._lock:
                self._remove(path)

    def _path(self, name: BlockName) -> str:
        digest = name.digest.hex()
        return f"{self._own}/{digest[:2]}/{digest}"

    def _use(self, path: str, size: int) -> bool:
        """Whether a file of this size is there; if so, it is used now."""
        with self._lock:
            now = time.time_ns()
            try:
                if os.stat(path).st_size != size:
                    return False
            except OSError:
                self._forget(path)
                return False
            try:
                os.utime(path, ns=(now, now))
            except FileNotFoundError:
                self._forget(path)
                return False
            except OSError:
                pass  # another user's, or nothing can be written: only this process knows of the use
            self._note(path, _File(size, now))
            return True

    def _note(self, path: str, file: _File) -> None:
        """Believe that a file is there. The lock is held."""
        known = self._files.get(path)
        self._num_bytes += file.size - (0 if known is None else known.size)
        self._files[path] = file
        if self._changed is not None:
            self._changed.add(path)
        heapq.heappush(self._oldest, self._age(path, file))
        if len(self._oldest) > 2 * len(self._files) + 64:
            self._sort()

    def _forget(self, path: str) -> None:
        """Believe that a file is not there. The lock is held."""
        file = self._files.pop(path, None)
        if file is not None:
            self._num_bytes -= file.size
            self._tell_lost([path])
        if self._changed is not None:
            self._changed.add(path)

    def _tell_lost(self, paths: Iterable[str]) -> None:
        if self.changes is not None:
            self.changes += [(os.path.basename(path), False) for path in paths if path.startswith(self._own)]

    def _age(self, path: str, file: _File) -> tuple[int, bool, str]:
        return file.used_ns, not path.startswith(self._own), path

    def _sort(self) -> None:
        self._oldest = [self._age(path, file) for path, file in self._files.items()]
        heapq.heapify(self._oldest)

    def _make_room(self, size: int) -> bool:
        """Remove the least recently used files until there is room. The lock is held.

        Returns:
            Whether there is: not if files cannot be removed, or others that are being written take it all.
        """
        while self._num_bytes + self._num_reserved + size > self.max_bytes:
            if not self._oldest:
                return False
            self._note_progress()
            used_ns, _, path = heapq.heappop(self._oldest)
            file = self._files.get(path)
            if file is None or file.used_ns != used_ns:
                continue
            with contextlib.suppress(OSError):
                seen = os.stat(path).st_mtime_ns
                if seen > used_ns:  # another process has used it
                    self._note(path, _File(file.size, seen))
                    continue
            self._remove(path)
        return True

    def _remove(self, path: str) -> bool:
        """Whether this call removed a file; it is still believed in if it resists. The lock is held."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            self._forget(path)
            return False
        except OSError as error:
            self._warn_of(error, "removed from")
            return False
        self._forget(path)
        return True

    def _remove_damaged(self, path: str, why: DamagedError) -> None:
        with self._lock:
            is_removed = self._remove(path)
            is_left = not is_removed and os.path.exists(path)
        message = "KV block %s is not used: %s%s"
        if is_removed:
            _logger.warning(message, path, why, "; it was removed")
        elif is_left:  # else whoever removed it has said so
            self._warn(path, message, path, why, "; remove it")

    def _rescan(self) -> None:
        """Believe what the folder shows, and remove the temporary files of processes that have ended.

        Other threads may use, write and remove blocks meanwhile; of these, what they believe is kept.
        """
        with self._scan_lock:
            with self._lock:
                changed: set[str] = set()
                self._changed = changed
            found: dict[str, _File] = {}
            for entry in self._entries(self._root, _FOLDER_NAME):
                found.update(self._blocks_below(entry.path))
            with self._lock:
                for path in changed:
                    found.pop(path, None)
                found |= {path: self._files[path] for path in changed & self._files.keys()}
                self._tell_lost(self._files.keys() - found.keys())
                self._files, self._changed = found, None
                self._num_bytes = sum(file.size for file in found.values())
                self._sort()

    def _blocks_below(self, folder: str) -> Iterator[tuple[str, _File]]:
        """Paths and files of one fingerprint."""
        self._remove_temporary(folder)
        for place in self._entries(folder, _FIRST_BYTE):
            self._remove_temporary(place.path)
            for entry in self._entries(place.path, _FILE_NAME):
                self._note_progress()
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield entry.path, _File(status.st_size, status.st_mtime_ns)

    def _remove_temporary(self, folder: str) -> None:
        for entry in self._entries(folder, TEMPORARY_NAME):
            with contextlib.suppress(OSError):  # its process may just have finished it
                if is_left_over(entry):
                    os.unlink(entry.path)

    def _entries(self, folder: str, pattern: re.Pattern[str]) -> list[os.DirEntry[str]]:
        """What is in a folder under such names; nothing if it is no folder."""
        self._note_progress()
        try:
            with os.scandir(folder) as entries:
                return [entry for entry in entries if pattern.fullmatch(entry.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self._warn_of(error, "counted in")
            return []

    def _check_about(self) -> None:
        """Compare what is said of this fingerprint's blocks, or say it."""
        path = os.path.join(self._own, _ABOUT)
        about = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "fingerprint": self.fingerprint,
            "shape": list(self.shape),
            "dtype": str(self.dtype),
        }
        try:
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                found: Any = None
                with contextlib.suppress(ValueError):  # torn by a crash
                    found = json.loads(file.read())
                if found == about:
                    return
                if found is not None:
                    raise ConfigError(
                        f"{path!r} describes other blocks: it says {found!r} instead of {about!r}; choose "
                        f"another folder, or remove {self._own!r}"
                    )
            replace_file(path, ((json.dumps(about, indent=1) + "\n").encode(),))
        except OSError as error:
            self._warn_of(error, "described in")

    def _warn_of(self, error: OSError, how: str) -> None:
        remedy = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "; free space, or lower max_bytes"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            remedy = "; choose a folder that may be written, or change its permissions"
        message = "KV blocks cannot be %s %s: %s%s (said once)"
        self._warn((how, error.errno), message, how, self.folder, error, remedy)

    def _warn(self, kind: object, message: str, *values: object) -> None:
        """Log a problem unless one of its kind was."""
        with self._warn_lock:
            is_new = kind not in self._warned
            self._warned.add(kind)
        if is_new:
            _logger.warning(message, *values)
