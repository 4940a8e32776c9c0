"""Public traces of real services: a CSV row per request with its arrival and its lengths.

| trace                                     | arrival     | input            | output            |
|-------------------------------------------|-------------|------------------|-------------------|
| Azure LLM inference traces, 2023 and 2024 | `TIMESTAMP` | `ContextTokens`  | `GeneratedTokens` |
| BurstGPT                                  | `Timestamp` | `Request tokens` | `Response tokens` |

Azure (github.com/Azure/AzurePublicDataset) writes UTC dates with up to 7 digits of fraction, in 2024
with an offset; BurstGPT (github.com/HPMLL/BurstGPT) writes seconds, with 0 output tokens for failures.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from jaxllm.errors import ConfigError, RequestError
from jaxllm.research.workloads.checks import MAX_LEN, MAX_REQUESTS, BadRows, check_choice, check_integer
from jaxllm.research.workloads.trace import Trace
from jaxllm.system.options import checked_path

KNOWN_COLUMNS: Mapping[str, tuple[str, str, str]] = {
    "Azure LLM inference trace": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "BurstGPT": ("Timestamp", "Request tokens", "Response tokens"),
}
"""Columns of arrival, input and output of the traces that are recognised by their header."""

_ROLES = ("arrival_column", "input_column", "output_column")
_DATE = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?", flags=re.ASCII)
_SECONDS = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", flags=re.ASCII)
_COUNT = re.compile(r"([+-]?\d+)(?:\.0*)?", flags=re.ASCII)  # pandas writes 5 as 5.0 beside missing values
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MAX_NANOSECONDS = 10**21


def load_trace_csv(
    path: str | os.PathLike[str],
    *,
    arrival_column: str | None = None,
    input_column: str | None = None,
    output_column: str | None = None,
    on_zero: Literal["raise", "skip", "one"] = "raise",
    on_bad: Literal["raise", "skip"] = "raise",
    limit: int | None = None,
    seed: int = 0,
    name: str | None = None,
) -> Trace:
    """A trace from a CSV file with a header: sorted by arrival, the earliest request at time 0.

    Arrivals are seconds on any clock, or dates like `2023-11-16 18:15:46.6805900` (UTC unless they say
    otherwise); differences are exact to the nanosecond. What was skipped, changed or reordered is
    counted in the trace's `notes`.

    Args:
        path: the file, UTF-8.
        arrival_column: when each request came; by default that of the known trace the header belongs to,
            see `KNOWN_COLUMNS`.
        input_column: tokens of its prompt; the same.
        output_column: tokens of its output; the same.
        on_zero: a row without input or output tokens (BurstGPT's failures): `"raise"`, `"skip"`, or `"one"`:
            count 0 as 1.
        on_bad: a row that cannot be read: `"raise"` or `"skip"`.
        limit: stop after this many usable rows, in the order of the file.
        seed: of the prompts' token ids.
        name: of the trace; by default the file's, without its suffix.

    Raises:
        ConfigError: the file cannot be read, lacks a column, or an argument is out of range.
        RequestError: a bad row, with file, line and column; or no row is usable.
    """
    check_choice("on_zero", on_zero, ("raise", "skip", "one"))
    limit = MAX_REQUESTS if limit is None else check_integer("limit", limit, 1, MAX_REQUESTS)
    file, bad = Path(checked_path("path", path)), BadRows(on_bad)
    wanted = (arrival_column, input_column, output_column)
    num_zero = 0
    arrivals: list[int] = []
    lengths: list[tuple[int, int]] = []
    has_dates: bool | None = None
    for where, columns, cells in _read_rows(file, wanted):
        try:
            if isinstance(cells, str):
                raise RequestError(cells)
            is_date, arrival = _nanoseconds(columns[0], cells[0])
            counts = (_count(columns[1], cells[1]), _count(columns[2], cells[2]))
            if has_dates not in (None, is_date):
                raise RequestError(f"column {columns[0]!r} mixes dates and seconds: {cells[0]!r}")
        except RequestError as error:
            bad.add(where, error)
            continue
        if 0 in counts:
            num_zero += 1
            if on_zero == "raise":
                raise RequestError(
                    f"{where}: column {columns[1 + counts.index(0)]!r} is 0, and a request has at least "
                    "one token of each. Pass on_zero='skip' to leave such rows out, or 'one' to count 0 as 1."
                )
            if on_zero == "skip":
                continue
            counts = (max(counts[0], 1), max(counts[1], 1))
        has_dates = is_date
        arrivals.append(arrival)
        lengths.append(counts)
        if len(arrivals) == limit:
            break
    if not arrivals:
        bad.refuse_empty(f"{file} ({num_zero} rows without tokens were skipped)" if num_zero else str(file))
    order = sorted(range(len(arrivals)), key=arrivals.__getitem__)  # stable
    start = arrivals[order[0]]
    notes = [f"from {file.name}, columns {', '.join(columns)}"]
    if bad.count:
        notes += [f"skipped {bad.count} bad rows", *bad.reasons]
    if num_zero:
        done = "skipped" if on_zero == "skip" else "counted 0 tokens as 1 in"
        notes.append(f"{done} {num_zero} rows without input or output tokens")
    num_moved = sum(index != place for place, index in enumerate(order))
    if num_moved:
        notes.append(f"sorted by arrival: {num_moved} rows changed place")
    return Trace(
        name=file.stem if name is None else name,
        seed=seed,
        arrival_times=np.array([(arrivals[index] - start) / 10**9 for index in order]),
        prompt_lens=np.array([lengths[index][0] for index in order]),
        output_lens=np.array([lengths[index][1] for index in order]),
        notes=tuple(notes),
    )


def _read_rows(
    file: Path, wanted: Sequence[str | None]
) -> Iterator[tuple[str, tuple[str, ...], tuple[str, str, str] | str]]:
    """`(where, columns, cells)` of each row; a row of the wrong width has a reason for its cells."""
    where = str(file)
    try:
        with open(file, newline="", encoding="utf-8-sig") as lines:
            reader = csv.reader(lines, strict=True)
            header = [cell.strip() for cell in next(reader, [])]
            if not header:
                raise ConfigError(f"{file}: has no header. The first line must name the columns.")
            columns = _choose_columns(file, header, wanted)
            arrival, prompt, output = (header.index(column) for column in columns)
            where = f"{file}, line {reader.line_num + 1}"
            for cells in reader:
                if len(cells) == len(header):
                    yield where, columns, (cells[arrival], cells[prompt], cells[output])
                else:
                    yield where, columns, f"has {len(cells)} cells; the header has {len(header)} columns"
                where = f"{file}, line {reader.line_num + 1}"
    except OSError as error:
        raise ConfigError(f"cannot read {str(file)!r} ({error.strerror}).") from error
    except UnicodeDecodeError as error:  # lines are decoded many at a time: which one it is in is not known
        raise ConfigError(f"{file}: no valid UTF-8 ({error}). Convert the file to UTF-8.") from error
    except csv.Error as error:
        raise ConfigError(f"{where}: no valid CSV ({error}). Repair the file.") from error


def _choose_columns(file: Path, header: Sequence[str], wanted: Sequence[str | None]) -> tuple[str, ...]:
    known = next((names for names in KNOWN_COLUMNS.values() if set(names) <= set(header)), None)
    there = f"the columns are {', '.join(map(repr, header))}"
    columns = []
    for role, (index, column) in zip(_ROLES, enumerate(wanted), strict=True):
        if column is None:
            if known is None:
                names = ", ".join(KNOWN_COLUMNS)
                raise ConfigError(
                    f"{file}: is none of the known traces ({names}): name its columns as theirs, "
                    f"or pass {role}= in Python; {there}."
                )
            column = known[index]
        if header.count(column) != 1:
            found = f"there are {header.count(column)} columns" if column in header else "there is no column"
            raise ConfigError(f"{file}: {found} {column!r} ({role}); {there}.")
        columns.append(column)
    return tuple(columns)


def _nanoseconds(column: str, text: str) -> tuple[bool, int]:
    """Whether `text` is a date, and its nanoseconds since 1970 or since the clock's zero."""
    text = text.strip()
    if date := _DATE.fullmatch(text):
        seconds, fraction, offset = date.groups()
        try:
            moment = datetime.datetime.fromisoformat(seconds + (offset or "Z"))
        except ValueError as error:
            raise RequestError(f"column {column!r} holds {text!r}, which is no date ({error})") from error
        whole = (moment - _EPOCH) // datetime.timedelta(seconds=1)
        return True, whole * 10**9 + int((fraction or "").ljust(9, "0"))
    if len(text) <= 40 and _SECONDS.fullmatch(text):
        value = decimal.Decimal(text).scaleb(9)
        if abs(value) <= _MAX_NANOSECONDS:
            return False, round(value)
    raise RequestError(
        f"column {column!r} holds {text[:60]!r}: must be a date like 2023-11-16 18:15:46.6805900, or seconds "
        "up to 1e12"
    )


def _count(column: str, text: str) -> int:
    match = _COUNT.fullmatch(text.strip())
    if match is None or len(text) > 40 or not 0 <= int(match[1]) <= MAX_LEN:
        raise RequestError(f"column {column!r} holds {text[:60]!r}: must be an integer in 0..{MAX_LEN}")
    return int(match[1])
