"""Input files cut into shards: runs of rows that are answered, written and, if need be, repeated as one."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError, RequestError, shown
from jaxllm.jobs.prompt_files import kind_of_file
from jaxllm.system.json_text import parse

_SUFFIXES = ".jsonl, .ndjson or .parquet"
ROW_KEYS = ("prompt", "prompt_token_ids", "messages", "id", "num_dropped_tokens", "sampling_params")


@dataclasses.dataclass(frozen=True)
class InputFile:
    """An input file as it was found.

    Args:
        path: of it, absolute.
        num_rows: in it.
        digest: of its content; of Parquet, of its footer, which has the sizes and statistics of its columns.
        starts: where every `rows_per_shard`-th line begins, in bytes; empty for Parquet, which finds rows
            itself.
    """

    path: str
    num_rows: int
    digest: str
    starts: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Shard:
    """Consecutive rows of one file.

    Args:
        path: of the file.
        first_index: of the first row, among all rows of all files.
        num_rows: how many.
        first_row: of them, in the file.
        start: of them, in bytes; 0 for Parquet.
    """

    path: str
    first_index: int
    num_rows: int
    first_row: int
    start: int = 0


@dataclasses.dataclass(frozen=True)
class RawRow:
    """A row as text, or why there is none.

    `line` is a JSON object as `jaxllm generate` reads it.
    """

    index: int
    source: str
    line: str
    error: RequestError | None = None


def input_files(data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The files that are named, and those in folders that are, by name.

    Raises:
        ConfigError: one is not there or of another kind, or there is none.
    """
    named = [data] if isinstance(data, str | os.PathLike) else list(data)
    found: list[Path] = []
    for name in named:
        path = Path(name).absolute()
        if path.is_dir():
            found += sorted(one for one in path.iterdir() if _kind(one) is not None and one.is_file())
        elif not path.is_file():
            raise ConfigError(f"there is no input file {os.fspath(name)!r}")
        else:
            found.append(path)
    for path in found:
        if _kind(path) is None:
            way_out = "unpack" if kind_of_file(path)[2] else "convert"
            raise ConfigError(
                f"input {path.name!r} must end in {_SUFFIXES}, of which a cluster reads parts: {way_out} it, "
                "run without --ray, or give jaxllm.cluster.generate a ray.data.Dataset"
            )
    if not found:
        raise ConfigError(f"the input holds no {_SUFFIXES} file")
    return found


def _kind(path: str | os.PathLike[str]) -> str | None:
    """What a file holds that is read in parts: jsonl, parquet or None of both."""
    kind, _, is_packed = kind_of_file(path)
    return kind if kind in ("jsonl", "parquet") and not is_packed else None


def scan(path: str, rows_per_shard: int) -> InputFile:
    """Count a file's rows, and find where its shards begin.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return (_scan_parquet if _kind(path) == "parquet" else _scan_jsonl)(path, rows_per_shard)
    except OSError as error:
        raise ConfigError(f"cannot read the input file {path!r} ({error.strerror or error})") from error


def shards_of(files: Iterable[InputFile], rows_per_shard: int) -> Iterator[Shard]:
    """The shards of all files, in order."""
    first_index = 0
    for file in files:
        for first_row in range(0, file.num_rows, rows_per_shard):
            num_rows = min(rows_per_shard, file.num_rows - first_row)
            start = file.starts[first_row // rows_per_shard] if file.starts else 0
            yield Shard(file.path, first_index + first_row, num_rows, first_row, start)
        first_index += file.num_rows


def read_shard(shard: Shard, columns: Mapping[str, str] | None = None) -> list[RawRow]:
    """Its rows.

    Args:
        shard: which.
        columns: what the keys of a row are called in the file; others are ignored then. Without, lines of
            JSON hold nothing else, and of Parquet the columns are read that are called like keys.

    Raises:
        ConfigError: the file cannot be read, or lacks a column.
    """
    try:
        read = _read_parquet if _kind(shard.path) == "parquet" else _read_jsonl
        return read(shard, columns)
    except OSError as error:
        raise ConfigError(f"cannot read the input file {shard.path!r} ({error.strerror or error})") from error


def check_columns(columns: Mapping[str, str] | None) -> None:
    """Verify that columns are named for keys that there are.

    Raises:
        ConfigError: one is not.
    """
    unknown = sorted(set(columns or ()) - set(ROW_KEYS))
    if unknown:
        raise ConfigError(f"columns names {', '.join(unknown)}; the keys of a row are {', '.join(ROW_KEYS)}")


# JSON Lines


def _scan_jsonl(path: str, rows_per_shard: int) -> InputFile:
    digest, starts = hashlib.sha256(), []
    num_rows = start = 0
    with open(path, "rb") as file:
        for line in file:
            if num_rows % rows_per_shard == 0:
                starts.append(start)
            digest.update(line)
            start += len(line)
            num_rows += 1
    return InputFile(path, num_rows, digest.hexdigest(), tuple(starts))


def _read_jsonl(shard: Shard, columns: Mapping[str, str] | None) -> list[RawRow]:
    rows = []
    with open(shard.path, "rb") as file:
        file.seek(shard.start)
        for place in range(shard.num_rows):
            index, number = shard.first_index + place, shard.first_row + place + 1
            rows.append(_row_of_line(file.readline(), index, f"{shard.path}, line {number}", number, columns))
    return rows


def _row_of_line(
    data: bytes, index: int, source: str, number: int, columns: Mapping[str, str] | None
) -> RawRow:
    try:
        line = data.decode("utf-8-sig" if number == 1 else "utf-8").strip()
    except UnicodeDecodeError as error:
        return RawRow(index, source, "", RequestError(f"{source}: byte {error.start} is no UTF-8"))
    if columns is None:
        return RawRow(index, source, line)
    try:
        values = parse(line)
    except ValueError:
        return RawRow(index, source, line)  # whoever parses it says what is wrong
    return RawRow(index, source, json.dumps(_renamed(values, columns)) if isinstance(values, dict) else line)


# Parquet


def _scan_parquet(path: str, rows_per_shard: int) -> InputFile:
    file = _parquet(path)
    metadata = file.metadata
    digest = hashlib.sha256(f"{os.path.getsize(path)} {metadata.to_dict()}".encode())
    return InputFile(path, metadata.num_rows, digest.hexdigest())


def _read_parquet(shard: Shard, columns: Mapping[str, str] | None) -> list[RawRow]:
    file = _parquet(shard.path)
    names = tuple(_names_of(file.schema_arrow.names, columns, shard.path).values())
    rows: list[RawRow] = []
    start, last_row = 0, shard.first_row + shard.num_rows
    for group in range(file.metadata.num_row_groups):
        stop = start + file.metadata.row_group(group).num_rows
        begin, end = max(start, shard.first_row), min(stop, last_row)
        if begin < end:
            table = _row_group(shard.path, group, names).slice(begin - start, end - begin)
            for place, values in enumerate(
                rows_of_table(table, columns, shard.path), begin - shard.first_row
            ):
                number = shard.first_row + place + 1
                rows.append(row_of_values(values, shard.first_index + place, f"{shard.path}, row {number}"))
        start = stop
    return rows


def rows_of_table(table: Any, columns: Mapping[str, str] | None, source: str) -> list[dict[str, Any]]:
    """The rows of a pyarrow table, with the keys that `jaxllm generate` knows.

    Raises:
        ConfigError: it lacks a column.
    """
    names = _names_of(table.column_names, columns, source)
    rows = table.select(list(names.values())).to_pylist()
    return [_without_nulls(_renamed(values, names)) for values in rows]


def row_of_values(values: Mapping[str, Any], index: int, source: str) -> RawRow:
    """A row of Python's values, of which only the id may be anything."""
    row = dict(values)
    if isinstance(row.get("id"), bytes):
        row["id"] = row["id"].decode("utf-8", "backslashreplace")
    elif "id" in row and not isinstance(row["id"], str | int | float | list | dict):
        row["id"] = str(row["id"])
    try:
        return RawRow(index, source, json.dumps(row, default=_text))
    except (TypeError, ValueError) as error:
        return RawRow(index, source, "", RequestError(f"{source}: {error}"))


def _text(value: object) -> str:
    """What JSON has no form of."""
    if not isinstance(value, bytes):
        raise TypeError(f"{shown(value, 80)} of type {type(value).__name__} is neither text nor a number")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{shown(value, 80)} is no UTF-8 (byte {error.start})") from error


def _names_of(there: Sequence[str], columns: Mapping[str, str] | None, source: str) -> dict[str, str]:
    names = {key: key for key in ROW_KEYS if key in there} if columns is None else dict(columns)
    missing = sorted(set(names.values()).difference(there))
    if missing or not names:
        raise ConfigError(
            f"{source} has no column {', '.join(missing) or 'prompt'}; it has {', '.join(sorted(there))}: "
            "say with columns which is which"
        )
    return names


@functools.lru_cache(maxsize=2)
def _row_group(path: str, group: int, names: tuple[str, ...]) -> Any:
    """A row group, which is read as a whole; most shards of a worker's follow each other in one."""
    return _parquet(path).read_row_group(group, columns=list(names))


def _parquet(path: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError('Parquet files need pyarrow: pip install "jaxllm[ray]"') from None
    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{path!r} is no Parquet file ({error})") from error


def _without_nulls(value: Any) -> Any:
    """The value without the fields of objects that are null: a column's objects all have the same fields."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A row by our keys; what is null is not there."""
    return {key: values[name] for key, name in names.items() if values.get(name) is not None}
