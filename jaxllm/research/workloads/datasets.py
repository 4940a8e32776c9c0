"""Prompts of real data sets, from JSON, JSON Lines and Parquet files."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from jaxllm.errors import ConfigError, JaxllmError, RequestError
from jaxllm.research.workloads.checks import (
    MAX_LEN,
    MAX_REQUESTS,
    BadRows,
    check_choice,
    check_integer,
    check_tokenizer,
)
from jaxllm.research.workloads.columns import as_lengths, as_texts, as_token_ids
from jaxllm.system.options import checked_path
from jaxllm.text.tokenizer import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SUFFIXES = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_Row = Mapping[str, Any] | RequestError  # an error: why there is no row


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PromptDataset:
    """Prompts to draw from, see `make_trace`.

    Args:
        name: what traces drawn from it are called.
        source: file and column it is from, for people.
        prompt_lens: int64 `[num_prompts]`, tokens of each prompt.
        prompt_token_ids: the prompts, where a tokenizer made them.
        prompt_texts: the prompts, where their lengths were given instead.
        num_skipped: rows of the file that were left out.
        skipped: where and why, for the first ten of them.

    Raises:
        ConfigError: there is no prompt, or too many.
        RequestError: a prompt is malformed, or their number is not that of `prompt_lens`.
    """

    name: str
    source: str
    prompt_lens: npt.NDArray[np.int64]
    prompt_token_ids: tuple[tuple[int, ...], ...] | None = None
    prompt_texts: tuple[str, ...] | None = None
    num_skipped: int = 0
    skipped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        prompt_lens = as_lengths("prompt_lens", self.prompt_lens)
        object.__setattr__(self, "prompt_lens", prompt_lens)
        object.__setattr__(self, "prompt_token_ids", as_token_ids(self.prompt_token_ids, prompt_lens))
        object.__setattr__(self, "prompt_texts", as_texts(self.prompt_texts, prompt_lens))

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.prompt_lens)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out, for people; empty where nothing was."""
        return (f"skipped {self.num_skipped} rows", *self.skipped) if self.num_skipped else ()


def load_dataset_file(
    path: str | os.PathLike[str],
    column: str | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    length_column: str | None = None,
    file_format: Literal["json", "jsonl", "parquet"] | None = None,
    max_prompt_len: int = MAX_LEN,
    limit: int | None = None,
    on_bad: Literal["raise", "skip"] = "raise",
    name: str | None = None,
) -> PromptDataset:
    """The prompts in one column of a file.

    Lengths are the tokenizer's, special tokens included, and its token ids are kept; or they are read from
    `length_column`, and the texts are kept where `column` names them.

    Args:
        path: a JSON array of objects, JSON Lines, or a Parquet file (needs pyarrow).
        column: the prompts' text; None to read lengths alone.
        tokenizer: counts the tokens of the texts; see `jaxllm.text.tokenizer.load_tokenizer`.
        length_column: number of tokens of each prompt; instead of a tokenizer.
        file_format: by default told by the suffix: .json, .jsonl or .ndjson, .parquet.
        max_prompt_len: a row with a longer prompt, in tokens, is a bad row.
        limit: stop after this many usable rows.
        on_bad: what to do with a row that has no prompt, an empty one, one of the wrong type, too long...:
            `"raise"`, or `"skip"`: count them in `num_skipped` and keep the first reasons.
        name: of the data set; by default the file's, without its suffix.

    Raises:
        ConfigError: the file cannot be read or has no such column, or arguments are at odds.
        RequestError: a bad row, with file, line and column; or no row is usable.
    """
    if (tokenizer is None) == (length_column is None):
        raise ConfigError("give a tokenizer or a length_column, and not both: one says how long prompts are")
    if tokenizer is not None:
        check_tokenizer(tokenizer)
    if tokenizer is not None and column is None:
        raise ConfigError("column must name the text that the tokenizer is to read, got None")
    max_prompt_len = check_integer("max_prompt_len", max_prompt_len, 1, MAX_LEN)
    limit = MAX_REQUESTS if limit is None else check_integer("limit", limit, 1, MAX_REQUESTS)
    file = Path(checked_path("path", path))
    columns = [name for name in (column, length_column) if name is not None]
    rows, bad = read_rows(file, file_format, columns), BadRows(on_bad)

    prompt_lens: list[int] = []
    texts: list[str] = []
    token_ids: list[tuple[int, ...]] = []
    for where, row in rows:
        try:
            if isinstance(row, RequestError):
                raise row
            text = None if column is None else _text(row, column)
            if tokenizer is None:
                assert length_column is not None
                length = check_integer(f"column {length_column!r}", _cell(row, length_column), 1, MAX_LEN)
            else:
                assert text is not None
                token_ids.append(ids := tuple(encode(tokenizer, text)))
                length = len(ids)
            if not 1 <= length <= max_prompt_len:
                raise RequestError(
                    f"the prompt has {length} tokens, not 1 to max_prompt_len={max_prompt_len}"
                )
        except JaxllmError as error:
            del token_ids[len(prompt_lens) :]
            bad.add(where, error)
            continue
        prompt_lens.append(length)
        if tokenizer is None and text is not None:
            texts.append(text)
        if len(prompt_lens) == limit:
            break
    if not prompt_lens:
        bad.refuse_empty(str(file))
    return PromptDataset(
        name=file.stem if name is None else name,
        source=f"{file.name}, column {column if column is not None else length_column!r}",
        prompt_lens=np.array(prompt_lens),
        prompt_token_ids=tuple(token_ids) if token_ids else None,
        prompt_texts=tuple(texts) if texts else None,
        num_skipped=bad.count,
        skipped=tuple(bad.reasons),
    )


def read_rows(file: Path, file_format: str | None, columns: Sequence[str]) -> Iterator[tuple[str, _Row]]:
    """`(where, row)` of each row of a file; a row that cannot be parsed comes as an error to report.

    Raises:
        ConfigError: the file cannot be read.
    """
    if file_format is None:
        file_format = _SUFFIXES.get(file.suffix.lower())
        if file_format is None:
            raise ConfigError(
                f"{str(file)!r}: the suffix {file.suffix!r} does not tell the format: call it .json, .jsonl "
                "or .parquet"
            ).or_else(file_format=", or pass file_format='json', 'jsonl' or 'parquet'")
    check_choice("file_format", file_format, ("json", "jsonl", "parquet"))
    if file_format == "parquet":
        return _read_parquet(file, columns)
    return _read_json(file) if file_format == "json" else _read_jsonl(file)


def _read_json(file: Path) -> Iterator[tuple[str, _Row]]:
    try:
        rows = json.loads(file.read_bytes(), parse_constant=_refuse_constant)
    except OSError as error:
        raise _unreadable(file, error) from error
    except (ValueError, RecursionError) as error:
        found = ConfigError(f"{file}: no valid JSON ({error}).")
        if "Extra data" in str(error):
            found = ConfigError(f"{found} If it has one object per line, call it .jsonl")
            found.or_else(file_format=", or pass file_format='jsonl'")
        raise found from error
    if not isinstance(rows, list):
        raise ConfigError(f"{file}: must be a JSON array of objects, not {type(rows).__name__}.")
    for number, row in enumerate(rows, 1):
        yield f"{file}, row {number}", _as_row(row)


def _read_jsonl(file: Path) -> Iterator[tuple[str, _Row]]:
    try:
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                yield f"{file}, line {number}", _parse_line(line, first=number == 1)
    except OSError as error:
        raise _unreadable(file, error) from error


def _parse_line(line: bytes, first: bool) -> _Row:
    try:
        text = line.decode("utf-8-sig" if first else "utf-8")
        return _as_row(json.loads(text, parse_constant=_refuse_constant))
    except UnicodeDecodeError as error:
        return RequestError(f"byte {error.start} is no UTF-8")
    except (ValueError, RecursionError) as error:
        return RequestError(f"no valid JSON ({error})" if line.strip() else "the line is empty")


def _read_parquet(file: Path, columns: Sequence[str]) -> Iterator[tuple[str, _Row]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"{file}: Parquet files need pyarrow; run: pip install pyarrow") from error
    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            for column in columns:
                if names.count(column) != 1:
                    raise ConfigError(f"{file}: {_no_column(column, names, names.count(column))}.")
            number = 0
            for batch in table.iter_batches(columns=list(columns) or None):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}, row {number}", row
    except OSError as error:
        raise _unreadable(file, error) from error
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{file}: no valid Parquet file ({error}).") from error


def _as_row(row: object) -> _Row:
    if isinstance(row, dict):
        return row
    return RequestError(f"must be a JSON object, not {type(row).__name__}")


def _text(row: Mapping[str, Any], column: str) -> str:
    text = _cell(row, column)
    if not isinstance(text, str):
        raise RequestError(f"column {column!r} must hold text, got {_shown(text)}")
    if not text.strip():
        raise RequestError(f"column {column!r} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"column {column!r} holds a lone surrogate at character {error.start}, which is no character"
        ) from error
    return text


def _cell(row: Mapping[str, Any], column: str) -> object:
    if column not in row:
        raise RequestError(_no_column(column, list(row), 0))
    return row[column]


def _no_column(column: str, names: Sequence[str], count: int) -> str:
    found = f"there are {count} columns" if count else "there is no column"
    return f"{found} {column!r}; the columns are {', '.join(map(repr, names)) or 'none'}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _unreadable(file: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot read {str(file)!r} ({error.strerror or error}).")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
