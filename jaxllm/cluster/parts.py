"""The output of a data set: a folder with a file for each shard, there as a whole or not at all.

    answers/_job.json                              what the answers are to, and how many shards there are
    answers/part-000000000000-000000000256.jsonl   rows 0 to 255
    answers/part-000000000256-000000000512.jsonl

Readers of Parquet folders pass over names that begin with an underscore. A part is written beside its place
and renamed into it, so that whoever dies leaves no half of one, and a shard that is answered twice replaces a
file by one that says the same. What a restart has to do is what has no part.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from jaxllm.cluster.answers import write_parquet
from jaxllm.cluster.attempts import Attempts
from jaxllm.cluster.shards import Shard
from jaxllm.errors import ConfigError
from jaxllm.system.line_file import sync_folder

PartFormat = Literal["jsonl", "parquet"]
_JOB, _LOCK, _ATTEMPTS = "_job.json", "_lock", ".attempts"
_NAME = re.compile(r"part-(\d{12})-(\d{12})\.(jsonl|parquet)")


class Parts:
    """The parts of one output folder, as workers see them.

    Args:
        folder: where they are; the same one on all nodes.
        part_format: of them.
    """

    def __init__(self, folder: str | os.PathLike[str], part_format: PartFormat) -> None:
        self.folder, self._format = Path(folder), part_format

    def has(self, shard: Shard) -> bool:
        """Whether a shard has been answered."""
        return self._path(shard.first_index, shard.num_rows).exists()

    def attempts(self, shard: Shard) -> Attempts:
        """What was begun of a shard."""
        path = self._path(shard.first_index, shard.num_rows)
        return Attempts(path.with_name(f".{path.stem}{_ATTEMPTS}"))

    def num_errors(self, shard: Shard) -> int:
        """How many of an answered shard's rows were bad."""
        path = self._path(shard.first_index, shard.num_rows)
        return sum(row.get("error") is not None for row in _read(path))

    def write(self, shard: Shard, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep the answers of a shard; on return they are on disk, all of them.

        Args:
            shard: which.
            rows: JSON-ready objects, one for each of its rows in order.

        Raises:
            ConfigError: the disk is full or failed.
        """
        assert [row["index"] for row in rows] == list(_indices(shard))
        path = self._path(shard.first_index, shard.num_rows)
        with _replacing(
            path, "Make room and run again with resume=True (--resume); other parts are kept."
        ) as file:
            if self._format == "parquet":
                write_parquet(file, rows)
            else:
                file.writelines(json.dumps(row, allow_nan=False).encode("ascii") + b"\n" for row in rows)
        self.attempts(shard).clear()

    def done(self) -> set[tuple[int, int]]:
        """First index and number of rows of each shard that has been answered."""
        found = set()
        for name in os.listdir(self.folder):
            match = _NAME.fullmatch(name)
            if match and match[3] == self._format:
                found.add((int(match[1]), int(match[2]) - int(match[1])))
        return found

    def merge(self, shards: Iterable[Shard], target: Path) -> None:
        """Put the parts of JSON Lines together as one file, in order.

        Raises:
            ConfigError: the disk is full or failed.
        """
        advice = (
            "Make room and run again with resume=True (--resume); the answers are in "
            f"{os.fspath(self.folder)!r}."
        )
        with _replacing(target, advice) as file:
            for shard in shards:
                with open(self._path(shard.first_index, shard.num_rows), "rb") as part:
                    shutil.copyfileobj(part, file, 2**20)

    def clear(self) -> None:
        """Remove the parts; that a job was here stays known."""
        for first_index, num_rows in self.done():
            self._path(first_index, num_rows).unlink()

    def _path(self, first_index: int, num_rows: int) -> Path:
        return self.folder / f"part-{first_index:012d}-{first_index + num_rows:012d}.{self._format}"


class OutputFolder:
    """The output folder as the one driver sees it that fills it; a context manager.

    Args:
        folder: made if it is not there.
        job: JSON-ready: what answers depend on. A folder that holds another job's is refused.
        resume: whether it may hold answers already.

    Raises:
        ConfigError: it cannot be used, is in use, or holds something that is not this job's.
    """

    def __init__(self, folder: Path, job: Mapping[str, Any], *, resume: bool) -> None:
        name = os.fspath(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"cannot use the output folder {name!r} ({error.strerror}).") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._check(folder, json.loads(json.dumps(job)), resume)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ConfigError(
                f"another run fills {name!r}: wait for it, or choose another output."
            ) from error
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> OutputFolder:
        """Itself; leaving the block gives it back to others."""
        return self

    def __exit__(self, *error: object) -> None:
        """As said."""
        os.close(self._lock)

    def _check(self, folder: Path, job: Any, resume: bool) -> None:
        path = folder / _JOB
        if path.exists():
            if not resume:
                raise ConfigError(
                    f"the output folder {os.fspath(folder)!r} holds answers, which are never overwritten. "
                    "Pass resume=True (--resume) to continue, or choose another output."
                )
            before = json.loads(path.read_text(encoding="utf-8"))
            changed = [key for key in job if before.get(key) != job[key]]
            if changed:
                raise ConfigError(
                    f"cannot resume {os.fspath(folder)!r}: it holds answers of another job, with other "
                    f"{', '.join(changed)}. Choose another output, or delete it."
                )
            for left in folder.glob(".part-*"):  # of workers that died, also of what they have begun
                left.unlink(missing_ok=True)
            return
        if set(os.listdir(folder)).difference((_LOCK, f".{_JOB}")):
            raise ConfigError(f"the output folder {os.fspath(folder)!r} is not empty: choose another output.")
        beside = folder / f".{_JOB}"
        beside.write_text(json.dumps(job, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, path)


def read_parts(folder: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The rows of an output folder, in order.

    Raises:
        ConfigError: there are none.
    """
    paths = sorted(path for path in Path(folder).glob("part-*") if _NAME.fullmatch(path.name))
    if not paths:
        raise ConfigError(f"{os.fspath(folder)!r} holds no parts")
    for path in paths:
        yield from _read(path)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        yield from pyarrow.parquet.read_table(path).to_pylist()
    else:
        with open(path, encoding="ascii") as file:
            yield from map(json.loads, file)


def _indices(shard: Shard) -> range:
    return range(shard.first_index, shard.first_index + shard.num_rows)


@contextlib.contextmanager
def _replacing(path: Path, advice: str) -> Iterator[BinaryIO]:
    """A file that takes its place at the end of the block, as a whole and on disk.

    Raises:
        ConfigError: the disk is full or failed; `advice` says what to do.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(beside, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        sync_folder(path.parent)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(
            f"cannot write {os.fspath(path)!r} ({error.strerror or error}). {advice}"
        ) from error
