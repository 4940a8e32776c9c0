"""Files of prompts by their kind: text, JSON Lines, CSV and Parquet, each also packed by gzip."""

from __future__ import annotations

import csv
import io
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxllm.errors import ConfigError, RequestError
from jaxllm.jobs.prompts_io import (
    ANSWER_KEYS,
    PROMPT_KEYS,
    ROW_KEYS,
    PromptRow,
    is_wanted,
    opened,
    read_jsonl_file,
    read_text_file,
    row_of,
    rows_of,
)
from jaxllm.sampling.params import SamplingParams

_KINDS = {"": "text", ".txt": "text", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_KINDS |= {".csv": "csv", ".parquet": "parquet"}
_CSV_KEYS = ("prompt", "id")
_ROWS_AT_A_TIME = 1024
_Rows = Iterator[tuple[str, Mapping[str, Any] | RequestError]]


def read_prompts(
    path: str,
    sampling_params: SamplingParams,
    column: str | None = None,
    *,
    id_column: str | None = None,
    where: Mapping[str, str] | None = None,
) -> list[PromptRow]:
    """The rows of a file, bad ones with what is wrong with them.

    Args:
        path: the file. What it holds is told by its name, whatever the case: a prompt per line (.txt, or no
            suffix), JSON Lines (.jsonl, .ndjson), CSV or Parquet, and .gz after any of these.
        sampling_params: of rows that have none of their own.
        column: which holds the prompts, "prompt" if None; columns that no row of JSON Lines has go with the
            rows to the output.
        id_column: which holds the ids, "id" if None.
        where: of columns, the value that wanted rows have, as JSON or text; others are left out.

    Raises:
        ConfigError: the file is of another kind, cannot be read, lacks the column, or has a quote that
            never ends.
        RequestError: there is no row.
    """
    kind, suffix, _ = kind_of_file(path)
    if kind is None:
        way_out = "convert it, or rename it if it is one of these"
        if suffix == ".json":
            way_out = "make an array an object per line: jq -c '.[]' FILE > prompts.jsonl"
        raise ConfigError(
            f"--input {path!r}: files that end in {suffix!r} are not read; .txt (or no suffix) has a prompt "
            f"per line, and there are .jsonl, .ndjson, .csv and .parquet, each also with .gz: {way_out}"
        )
    if kind == "text":
        given = {"--column": column, "--id-column": id_column, "--where": where or None}
        for name, value in given.items():
            if value is not None:
                raise ConfigError(f"{name} is of tables, and {path!r} has a prompt per line: drop it")
        return read_text_file(path, sampling_params, keep_bad=True)
    if kind == "jsonl":
        columns: Any = {"column": column, "id_column": id_column, "where": where}
        return read_jsonl_file(path, sampling_params, **columns, keep_bad=True)
    keys = _CSV_KEYS if kind == "csv" else ROW_KEYS

    def row(index: int, source: str, values: Mapping[str, Any] | RequestError) -> PromptRow | None:
        if isinstance(values, RequestError):
            raise values
        if not is_wanted(values, where):
            return None
        return row_of(index, source, values, sampling_params, column or "prompt", keys, id_column)

    read = _csv_rows if kind == "csv" else _parquet_rows
    named = {"--id-column": [id_column] if id_column else [], "--where": [*(where or ())]}
    found = read(path, column, named)
    return rows_of(path, found, row, sampling_params, id_column=id_column, keep_bad=True)


def kind_of_file(path: str | os.PathLike[str]) -> tuple[str | None, str, bool]:
    """What a file's name says that it holds: text, jsonl, csv, parquet or None of these.

    Also by which suffix, in lower case and without the .gz that may follow it, and whether one does.
    """
    name = pathlib.PurePath(os.fspath(path).lower())
    is_packed = name.suffix == ".gz"
    suffix = pathlib.PurePath(name.stem).suffix if is_packed else name.suffix
    return _KINDS.get(suffix), suffix, is_packed


def _check_columns(
    path: str,
    columns: Sequence[str],
    column: str | None,
    keys: Sequence[str],
    prompts: Sequence[str],
    named: Mapping[str, Sequence[str]],
) -> None:
    """Verify that a table has prompts and the columns that options name, and nothing that answers have."""
    for option, names in named.items():
        if missing := set(names).difference(columns):
            raise ConfigError(
                f"{path}: there is no column {min(missing)!r}, which {option} names: {', '.join(columns)}"
            )
    if len(set(columns)) < len(columns):
        raise ConfigError(f"{path}: two columns have one name, of {', '.join(columns)}: rename one")
    if not set(columns).intersection(prompts if column is None else [column]):
        raise ConfigError(
            f"{path}: there is no column {column or 'prompt'!r}; name the one that holds the prompts with "
            f"--column: {', '.join(columns)}"
        )
    if taken := sorted(ANSWER_KEYS.intersection(columns).difference(keys, [column])):
        raise ConfigError(f"{path}: has columns {', '.join(taken)}, as answers do: rename or drop them")


def _csv_rows(path: str, column: str | None, named: Mapping[str, Sequence[str]]) -> _Rows:
    """Rows of a CSV file: all values are text, and only the prompt and the id are more than that."""
    csv.field_size_limit(2**31 - 1)
    with opened(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        lines = _RowLines(path, text)
        reader = csv.reader(lines, strict=True)
        try:
            columns = next(filter(None, reader), [])  # blank lines are none
        except csv.Error as error:
            lines.check_end()
            raise ConfigError(f"{path}, line {reader.line_num}: no valid CSV ({error})") from error
        (id_column,) = named["--id-column"] or ["id"]
        if columns:
            _check_columns(path, columns, column, _CSV_KEYS, ["prompt"], named)
        while True:
            first = reader.line_num + 1
            lines.of_row.clear()
            source = f"{path}, line {first}"
            try:
                values = next(reader, None)
            except csv.Error as error:
                lines.check_end()
                place = source if reader.line_num <= first else f"{source} to {reader.line_num}"
                yield source, RequestError(f"{place}: no valid CSV ({error}).")
                continue
            if values is None:
                return
            if not values:
                continue
            if len(values) != len(columns):
                problem = f"has {len(values)} values, and there are {len(columns)} columns: quote commas"
                yield source, RequestError(f"{source}: {problem}.")
            elif any("\udc80" <= character <= "\udcff" for value in values for character in value):
                yield source, RequestError(f"{source}: no UTF-8. Convert the file to UTF-8.")
            else:
                row: dict[str, str | None] = dict(zip(columns, values, strict=True))
                if row.get(id_column) == "":  # as a Parquet file's null
                    row[id_column] = None
                yield source, row


class _RowLines:
    """The lines of a CSV file, and those of the row that is being read."""

    def __init__(self, path: str, text: io.TextIOBase) -> None:
        self.of_row: list[str] = []
        self._path, self._text = path, text
        self._num_lines, self._is_at_end = 0, False

    def __iter__(self) -> Iterator[str]:
        for line in self._text:
            self._num_lines += 1
            self.of_row.append(line)
            yield line
        self._is_at_end = True

    def check_end(self) -> None:
        """Verify, once a row cannot be read, that it is not because the file ends within quotes.

        Raises:
            ConfigError: it does.
        """
        if not self._is_at_end:
            return
        [*_, open_value] = next(csv.reader([*self.of_row, '"'], strict=True))
        num_open = sum(1 for _ in io.StringIO(open_value, newline=""))
        raise ConfigError(
            f"{self._path}, line {self._num_lines + 1 - max(1, num_open)}: a quote begins that never ends, "
            "so no row after it can be told: close it; quotes within a quoted value are doubled"
        )


def _parquet_rows(path: str, column: str | None, named: Mapping[str, Sequence[str]]) -> _Rows:
    """Rows of a Parquet file."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"reading {path!r} needs pyarrow: pip install 'jaxllm[parquet]'") from None
    number = 0
    with opened(path) as file:
        # Its end is read first, which a packed file has only as a whole.
        whole = io.BytesIO(file.read()) if path.lower().endswith(".gz") else file
        try:
            table = parquet.ParquetFile(whole)
            _check_columns(path, table.schema_arrow.names, column, ROW_KEYS, PROMPT_KEYS, named)
            for batch in table.iter_batches(_ROWS_AT_A_TIME):
                for values in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", {name: _plain(value) for name, value in values.items()}
        except pyarrow.ArrowException as error:
            raise ConfigError(f"{path}: no valid Parquet ({error})") from error


def _plain(value: Any) -> Any:
    """A value as JSON has it: dates and the like as text, and no number where it is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)
