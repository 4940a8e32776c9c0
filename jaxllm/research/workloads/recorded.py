"""`load_trace`: the traces that people have, each recognised by what its file holds.

| form            | file                                                                                     |
|-----------------|------------------------------------------------------------------------------------------|
| `jaxllm`        | what `Trace.save` wrote                                                                  |
| `csv`           | Azure's and BurstGPT's, see `load_trace_csv`                                             |
| `mooncake`      | JSON Lines of `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (512 tokens) |
| `jsonl`         | such without `hash_ids`: `timestamp` in seconds; `prompt` may stand for `input_length`   |
| `vllm`          | `vllm bench serve --save-result --save-detailed`, and `jaxllm bench serve`               |
| `guidellm`      | guidellm's `benchmarks.json`                                                             |
| `conversations` | ShareGPT's and others' messages, see `load_conversations`; needs a tokenizer             |

Mooncake's are at github.com/kvcache-ai/Mooncake; Dynamo and AIPerf write the same. A name in `hash_ids`
stands for a block of tokens and all before it, so prompts whose lists begin alike have these tokens alike.
Rows without input or output tokens, which stand for failures, are left out, and counted in the notes.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxllm.errors import ConfigError, JaxllmError, RequestError, shown
from jaxllm.research.workloads.checks import (
    MAX_LEN,
    MAX_REQUESTS,
    BadRows,
    check_choice,
    check_integer,
    check_number,
    check_tokenizer,
)
from jaxllm.research.workloads.columns import check_token_ids
from jaxllm.research.workloads.conversations import load_conversations
from jaxllm.research.workloads.datasets import read_rows
from jaxllm.research.workloads.fitting import TooLong, fit_trace
from jaxllm.research.workloads.trace import Trace
from jaxllm.research.workloads.trace_csv import load_trace_csv
from jaxllm.system.options import checked_path
from jaxllm.text.tokenizer import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Form = Literal["jaxllm", "csv", "mooncake", "jsonl", "vllm", "guidellm", "conversations"]
FORMS: tuple[Form, ...] = ("jaxllm", "csv", "mooncake", "jsonl", "vllm", "guidellm", "conversations")
_MESSAGES = ("conversations", "conversation", "messages")
_UNITS = {"s": 1.0, "ms": 1e-3}
_MAX_CLOCK = 1e15  # of a timestamp, whatever its clock's zero
_MAX_SECONDS = 1e11  # likewise: the year 5138
_HASH_BLOCK_LEN = 512
_FORMS_OF = {"benchmark": ("guidellm",), "time_unit": ("mooncake", "jsonl"), "hash_block_len": ("mooncake",)}
_LINES, _ARRAYS = (".jsonl", ".ndjson"), (".json",)
_Row = dict[str, Any]


def load_trace(
    path: str | os.PathLike[str],
    *,
    form: Form | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    time_unit: Literal["s", "ms"] | None = None,
    hash_block_len: int = _HASH_BLOCK_LEN,
    benchmark: int | None = None,
    max_len: int | None = None,
    too_long: TooLong = "raise",
    on_bad: Literal["raise", "skip"] = "raise",
    limit: int | None = None,
    seed: int | None = None,
    name: str | None = None,
) -> Trace:
    """A trace from a file: sorted by arrival, the earliest request at time 0.

    Args:
        path: the file, in one of the module's forms.
        form: which; None sees it by what the file holds.
        tokenizer: counts the tokens of `prompt` and of conversations; see
            `jaxllm.text.tokenizer.load_tokenizer`.
        time_unit: of `timestamp`; None is "ms" beside `hash_ids`, else "s".
        hash_block_len: tokens that a name in `hash_ids` stands for.
        benchmark: which of guidellm's, from 0; None if there is one.
        max_len: most tokens of a request, prompt and output together.
        too_long: what becomes of longer ones: see `fit_trace`.
        on_bad: a row that cannot be read: `"raise"`, or `"skip"`, which notes how many.
        limit: stop after this many usable rows, in the order of the file.
        seed: of tokens that are made up; None is a saved trace's own, or 0.
        name: of the trace; None is a saved trace's own, or the file's, without its suffix.

    Raises:
        ConfigError: the file cannot be read or has none of the forms, or an argument is at odds with it.
        RequestError: a bad row, with file and line; or no row is usable.
        RequestTooLargeError: a request has more than `max_len` tokens.
    """
    file = Path(checked_path("path", path))
    if file.suffix.lower() == ".gz":
        raise ConfigError(f"{file} is packed by gzip, which is not read here: unpack it first (gunzip -k)")
    if tokenizer is not None:
        check_tokenizer(tokenizer)
    if form is not None:
        check_choice("form", form, FORMS)
    content = None if form == "csv" or file.suffix.lower() in (".csv", ".parquet", *_LINES) else _whole(file)
    form = form or _form_of(file, content)
    _check_form(file, form, benchmark=benchmark, time_unit=time_unit, hash_block_len=hash_block_len)
    called = file.stem if name is None else name
    common: dict[str, Any] = {"on_bad": on_bad, "limit": limit, "seed": seed or 0, "name": called}
    if form == "jaxllm":
        trace = _saved(file, limit, seed, name)
    elif form == "csv":
        trace = load_trace_csv(file, on_zero="skip", **common)
    elif form == "conversations":
        if tokenizer is None:
            raise ConfigError(
                f"{file}: messages are text: pass tokenizer= (--tokenizer), which counts tokens"
            )
        sizes: dict[str, Any] = {} if max_len is None else {"max_len": max_len}
        trace = load_conversations(file, tokenizer, **sizes, **common)
    else:
        if form in ("vllm", "guidellm"):
            rows = (_vllm_rows if form == "vllm" else _guidellm_rows)(file, content, benchmark)
        else:
            rows = read_rows(file, "json" if isinstance(content, list) else "jsonl", ())
        reader = _Reader(form, tokenizer, time_unit, hash_block_len)
        trace = _trace_of(file, rows, reader, **common)
    return trace if max_len is None else fit_trace(trace, max_len, too_long)


def _whole(file: Path) -> Any:
    """The JSON value that a file holds; None if it holds one a line."""
    try:
        return json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the trace {str(file)!r} ({error.strerror}).") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: no valid JSON ({error}).") from error
    except ValueError as error:
        if "Extra data" in str(error):
            return None
        raise ConfigError(f"{file}: no valid JSON ({error}).") from error


def _form_of(file: Path, content: Any) -> Form:
    """What a file holds, by its suffix and its first row or its keys."""
    if file.suffix.lower() == ".csv":
        return "csv"
    if file.suffix.lower() == ".parquet":
        return "conversations"
    if isinstance(content, Mapping) and not content.keys() & {"output_length", *_MESSAGES}:
        if content.get("format") == "jaxllm-trace":
            return "jaxllm"
        if "benchmarks" in content:
            return "guidellm"
        if "input_lens" in content or "request_throughput" in content or "runs" in content:
            return "vllm"
        raise ConfigError(_unknown(file, f"an object with {', '.join(map(repr, list(content)[:8]))}"))
    if content is not None and not isinstance(content, list | Mapping):
        raise ConfigError(_unknown(file, type(content).__name__))
    row, found = None, "no row"
    for _, row in read_rows(file, "json" if isinstance(content, list) else "jsonl", ()):
        if not isinstance(row, RequestError):
            break
        found = f"no row that can be read ({row})"
    if row is None or isinstance(row, RequestError):
        raise ConfigError(_unknown(file, found))
    if any(column in row for column in _MESSAGES):
        return "conversations"
    if "hash_ids" in row:
        return "mooncake"
    if "output_length" in row:
        return "jsonl"
    raise ConfigError(_unknown(file, f"rows of {', '.join(map(repr, list(row)[:8]))}"))


def _check_form(file: Path, form: Form, **options: Any) -> None:
    """Refuse options that say nothing of a file of this form."""
    for name, value in options.items():
        forms = _FORMS_OF[name]
        if form not in forms and value not in (None, _HASH_BLOCK_LEN):
            raise ConfigError(
                f"{name}={value!r} is for a trace of form {' or '.join(forms)}, and {file} is of form "
                f"{form}: leave it out, or name another trace"
            )


def _unknown(file: Path, found: str) -> str:
    return (
        f"{file} holds {found}, which is no trace: these are Trace.save's JSON, CSV of Azure or BurstGPT, "
        "JSON Lines with input_length (or prompt), output_length and perhaps timestamp and hash_ids, vLLM's "
        "or guidellm's results, or conversations"
    )


def _saved(file: Path, limit: int | None, seed: int | None, name: str | None) -> Trace:
    trace = Trace.load(file)
    if limit is not None and limit < len(trace):
        trace = trace.head(limit)
    changes: dict[str, Any] = {
        key: value for key, value in (("seed", seed), ("name", name)) if value is not None
    }
    if seed is not None and (trace.prompt_token_ids is not None or trace.prompt_texts is not None):
        raise ConfigError(f"seed={seed} changes nothing of {file}, which has prompts of its own: drop it")
    return dataclasses.replace(trace, **changes) if changes else trace


class _Reader:
    """Reads a row: seconds of arrival, tokens of prompt and output, and the prompt or its blocks' names."""

    def __init__(
        self,
        form: Form,
        tokenizer: PreTrainedTokenizerBase | None,
        time_unit: str | None,
        hash_block_len: int,
    ) -> None:
        if time_unit is not None:
            check_choice("time_unit", time_unit, tuple(_UNITS))
        self.hash_block_len = check_integer("hash_block_len", hash_block_len, 1, MAX_LEN)
        self.unit = time_unit or ("ms" if form == "mooncake" else "s")
        self._is_named, self._tokenizer = form == "mooncake", tokenizer
        self._names: dict[Any, int] = {}
        self._kind: frozenset[str] | None = None

    def read(self, row: Mapping[str, Any]) -> _Row:
        """What a trace takes of a row.

        Raises:
            JaxllmError: a value is missing, or of the wrong kind.
        """
        found: _Row = {"arrival": self._arrival(row), "output": _count(row, "output_length", least=0)}
        prompt = None if self._is_named else row.get("prompt")
        if isinstance(prompt, list):
            check_token_ids("prompt", prompt)
            found["ids"] = prompt
        elif isinstance(prompt, str) and self._tokenizer is not None:
            found["ids"] = encode(self._tokenizer, prompt)
        elif isinstance(prompt, str) and "input_length" in row:
            found["text"] = prompt
        elif isinstance(prompt, str):
            raise RequestError("has a prompt and no input_length: pass tokenizer= (--tokenizer)")
        found["input"] = len(found["ids"]) if "ids" in found else _count(row, "input_length", least=0)
        if self._is_named and found["input"] and found["output"]:
            found["names"] = self._named(row, found["input"])
        if found["input"] and found["output"]:
            kind = frozenset(found) - {"arrival"} | {"timestamp", "hash_ids"} & row.keys()
            if self._kind not in (None, kind):
                raise RequestError(
                    f"has {', '.join(sorted(kind))}, and rows before it {', '.join(sorted(self._kind or ()))}"
                )
            self._kind = kind
        return found

    def _arrival(self, row: Mapping[str, Any]) -> float:
        time = row.get("timestamp", 0.0)
        seconds = check_number("timestamp", time, -_MAX_CLOCK, _MAX_CLOCK) * _UNITS[self.unit]
        if abs(seconds) > _MAX_SECONDS:
            raise RequestError(f"timestamp={time} is of no date in {self.unit}").or_else(
                time_unit=": pass time_unit= (--time-unit), s or ms"
            )
        return seconds

    def _named(self, row: Mapping[str, Any], length: int) -> tuple[int, ...]:
        names, needed = row.get("hash_ids"), -(-length // self.hash_block_len)
        if not isinstance(names, list):
            raise RequestError(f"hash_ids must be a list, got {shown(names, 60)}")
        if len(names) != needed:
            raise RequestError(
                f"has {len(names)} hash_ids, and input_length={length} is {needed} blocks of "
                f"{self.hash_block_len} tokens"
            ).or_else(hash_block_len=": pass hash_block_len= (--hash-block-len)")
        for name in names:
            if isinstance(name, bool) or not isinstance(name, int | str):
                raise RequestError(f"hash_ids holds {shown(name, 60)}: names are integers or strings")
        return tuple(self._names.setdefault(name, len(self._names)) for name in names)


def _count(row: Mapping[str, Any], column: str, *, least: int) -> int:
    if column not in row:
        raise RequestError(
            f"there is no {column!r}; the row has {', '.join(map(repr, list(row)[:8])) or 'none'}"
        )
    return check_integer(column, row[column], least, MAX_LEN)


def _trace_of(
    file: Path,
    rows: Iterator[tuple[str, Any]],
    reader: _Reader,
    *,
    on_bad: str,
    limit: int | None,
    seed: int,
    name: str,
) -> Trace:
    limit = MAX_REQUESTS if limit is None else check_integer("limit", limit, 1, MAX_REQUESTS)
    bad, found, num_empty = BadRows(on_bad), [], 0
    for where, row in rows:
        try:
            if isinstance(row, RequestError):
                raise row
            one = reader.read(row)
        except JaxllmError as error:
            bad.add(where, error)
            continue
        if not (one["input"] and one["output"]):
            num_empty += 1
            continue
        found.append(one)
        if len(found) == limit:
            break
    if not found:
        bad.refuse_empty(f"{file} ({num_empty} rows without tokens were skipped)" if num_empty else str(file))
    arrivals = np.array([one["arrival"] for one in found])
    order = np.argsort(arrivals, kind="stable").tolist()
    notes = [f"from {file.name}"]
    if bad.count:
        notes += [f"skipped {bad.count} bad rows", *bad.reasons]
    if num_empty:
        notes.append(f"skipped {num_empty} rows without input or output tokens")
    num_moved = sum(index != place for place, index in enumerate(order))
    if num_moved:
        notes.append(f"sorted by arrival: {num_moved} rows changed place")
    columns = {key: tuple(found[index][key] for index in order) for key in found[0]}
    return Trace(
        name=name,
        seed=seed,
        arrival_times=arrivals[order] - arrivals.min(),
        prompt_lens=np.array(columns["input"]),
        output_lens=np.array(columns["output"]),
        prompt_token_ids=columns.get("ids"),
        prompt_texts=columns.get("text"),
        hash_ids=columns.get("names"),
        hash_block_len=reader.hash_block_len,
        notes=tuple(notes),
    )


def _vllm_rows(file: Path, content: Any, _: int | None) -> Iterator[tuple[str, Any]]:
    """Of `vllm bench serve`'s result: what was sent and answered; a failed request has no output."""
    if not isinstance(content, Mapping) or "runs" in content:
        raise ConfigError(
            f"{file}: must be the result of one run of a benchmark, with input_lens and output_lens"
        )
    inputs, outputs = content.get("input_lens"), content.get("output_lens")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ConfigError(
            f"{file}: has no input_lens and output_lens of one length: run the benchmark with --save-detailed"
        )
    times = content.get("start_times") or [0.0] * len(inputs)
    if not isinstance(times, list) or len(times) != len(inputs):
        raise ConfigError(f"{file}: start_times must be one a request, {len(inputs)}")
    for number, (time, given, made) in enumerate(zip(times, inputs, outputs, strict=True)):
        row = {"timestamp": time, "input_length": given, "output_length": made}
        yield f"{file}, request {number}", row


def _guidellm_rows(file: Path, content: Any, which: int | None) -> Iterator[tuple[str, Any]]:
    """Of one of guidellm's benchmarks: the requests that succeeded."""
    benchmarks = content.get("benchmarks") if isinstance(content, Mapping) else None
    if not isinstance(benchmarks, list) or not benchmarks:
        raise ConfigError(f"{file}: must have a list of benchmarks")
    if which is None and len(benchmarks) > 1:
        raise ConfigError(
            f"{file}: has {len(benchmarks)} benchmarks, and one is a trace: pass benchmark= (--benchmark), "
            "from 0"
        )
    which = check_integer("benchmark", which or 0, 0, MAX_REQUESTS)
    if which >= len(benchmarks):
        last = len(benchmarks) - 1
        raise ConfigError(f"benchmark={which}: {file} has {last + 1} of them; name one from 0 to {last}")
    requests = benchmarks[which].get("requests") if isinstance(benchmarks[which], Mapping) else None
    rows = requests.get("successful") if isinstance(requests, Mapping) else None
    if not isinstance(rows, list):
        raise ConfigError(f"{file}: benchmark {which} has no list of requests.successful")
    for number, row in enumerate(rows):
        where = f"{file}, benchmark {which}, request {number}"
        if not isinstance(row, Mapping):
            yield where, RequestError(f"must be a JSON object, not {type(row).__name__}")
            continue
        yield (
            where,
            {
                "timestamp": row.get("request_start_time", row.get("start_time")),
                "input_length": row.get("prompt_tokens"),
                "output_length": row.get("output_tokens"),
            },
        )
