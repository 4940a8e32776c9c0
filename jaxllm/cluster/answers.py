"""Answers as columns: the same ones in every Parquet file and batch, whatever its answers hold."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

ANSWER_COLUMNS = (
    "text",
    "token_ids",
    "finish_reason",
    "stop_reason",
    "num_prompt_tokens",
    "fingerprint",
    "error",
    "details",
)
"""What an answer adds to its row; `details` is JSON of what else was asked for, such as log-probabilities."""
_ROW_COLUMNS = ("index", "id", "prompt")
_NUMBERS = ("index", "num_prompt_tokens")


def answer_table(answers: Sequence[Mapping[str, Any]]) -> Any:
    """A pyarrow table of answers, as `jaxllm generate` writes them as lines."""
    import pyarrow

    columns: dict[str, Any] = {}
    known = {*_ROW_COLUMNS, *ANSWER_COLUMNS}
    for name in (*_ROW_COLUMNS, *ANSWER_COLUMNS):
        values = [answer.get(name) for answer in answers]
        if name == "token_ids":
            columns[name] = pyarrow.array(values, pyarrow.list_(pyarrow.int32()))
        elif name in _NUMBERS:
            columns[name] = pyarrow.array(values, pyarrow.int64())
        elif name == "details":
            rest = [{key: value for key, value in answer.items() if key not in known} for answer in answers]
            texts = [json.dumps(one, allow_nan=False) if one else None for one in rest]
            columns[name] = pyarrow.array(texts, pyarrow.string())
        else:
            texts = [None if value is None else _storable(str(value)) for value in values]
            columns[name] = pyarrow.array(texts, pyarrow.string())
    return pyarrow.table(columns)


def _storable(text: str) -> str:
    """The text in characters that UTF-8 has; lone surrogates, which JSON may hold, are spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()


def write_parquet(file: Any, answers: Sequence[Mapping[str, Any]]) -> None:
    """Write answers to an open file."""
    import pyarrow.parquet

    pyarrow.parquet.write_table(answer_table(answers), file)
