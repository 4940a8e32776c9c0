"""Prompts of `jaxllm generate`: rows of arguments and of files, checked."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, TypeVar

from jaxllm.errors import ConfigError, JaxllmError, RequestError, SamplingParamsError, nearest
from jaxllm.sampling.params import PARAMETER_NAMES, SamplingParams
from jaxllm.system.json_text import parse
from jaxllm.text.chat import check_messages

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
"""What a row has one of."""
ROW_KEYS = (*PROMPT_KEYS, "id", "num_dropped_tokens", "sampling_params")
"""What a row may hold."""
OUTPUT_KEYS = ("index", "id", "fingerprint")
"""What every line of an output begins with."""
ANSWER_KEYS = frozenset(OUTPUT_KEYS) | {
    *("prompt", "error", "text", "token_ids", "finish_reason", "stop_reason", "num_prompt_tokens"),
    *("num_dropped_tokens", "prompt_logprobs", "cumulative_logprob", "logprobs", "outputs"),
}
"""What a line of an output may hold beside the columns of its row."""
_MAX_TOKEN_ID = 2**31 - 1
_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt of the input: exactly one of `prompt`, `prompt_token_ids`, `messages` and `error` is set.

    `index` is its position in the input, from 0. `source` says where it stands, for messages. The first
    `num_dropped_tokens` of its tokens are cut. `error` is what is wrong with a row that is bad, and `extras`
    are columns that go with it to the output.
    """

    index: int
    source: str
    sampling_params: SamplingParams
    id: str | int | None = None
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    num_dropped_tokens: int = 0
    error: JaxllmError | None = None
    extras: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def fingerprint(self, context: str = "") -> str:
        """Hash of what the completion depends on, or of what is wrong with the row, 32 hexadecimal digits.

        Args:
            context: anything beside prompt and parameters that changes completions, such as the model.
        """
        content = {
            "context": context,
            "id": self.id,
            "prompt": self.prompt,
            "prompt_token_ids": self.prompt_token_ids,
            "messages": self.messages,
            "sampling_params": _as_dict(self.sampling_params),
        }
        if self.num_dropped_tokens:  # files of earlier versions go on
            content["num_dropped_tokens"] = self.num_dropped_tokens
        if self.error is not None:
            content["error"] = str(self.error)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def prompts_from_arguments(prompts: Sequence[str], sampling_params: SamplingParams) -> list[PromptRow]:
    """Rows for prompts given on the command line.

    Raises:
        RequestError: there is none, or one is empty.
    """
    rows: list[PromptRow] = []
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise RequestError(f"prompt argument {index + 1} is empty: give it a text or remove it.")
        rows.append(PromptRow(index, f"prompt argument {index + 1}", sampling_params, prompt=prompt))
    if not rows:
        raise RequestError("no prompts: give at least one.")
    return rows


def read_text_file(
    path: str | os.PathLike[str], sampling_params: SamplingParams, *, keep_bad: bool = False
) -> list[PromptRow]:
    r"""Rows for a UTF-8 file with one prompt a line. Lines end in `\n` or `\r\n`; spaces are kept.

    Args:
        path: the file; one that ends in .gz is unpacked.
        sampling_params: of all rows.
        keep_bad: make what is wrong with a line its row's `error`.

    Raises:
        ConfigError: the file cannot be read.
        RequestError: a line is empty or no UTF-8, or there is no line; names file and line.
    """

    def row(index: int, source: str, line: bytes) -> PromptRow:
        return PromptRow(index, source, sampling_params, prompt=_text_of(source, line))

    with opened(path) as file:
        return rows_of(os.fspath(path), _lines(os.fspath(path), file), row, sampling_params, keep_bad)


def read_jsonl_file(
    path: str | os.PathLike[str],
    sampling_params: SamplingParams,
    *,
    column: str | None = None,
    id_column: str | None = None,
    where: Mapping[str, str] | None = None,
    keep_bad: bool = False,
) -> list[PromptRow]:
    """Rows for a JSON Lines file.

    Each line is an object with exactly one of `prompt` (a string), `prompt_token_ids` (a list of
    token ids) and `messages` (a conversation); optionally `id` (a string or an integer, unique),
    `num_dropped_tokens` (how many tokens at its front are cut) and `sampling_params`, an object of parameters
    that override `sampling_params` for this line.

    Args:
        path: the file; one that ends in .gz is unpacked.
        sampling_params: of rows that have none of their own.
        column: what `prompt` is called; other keys go with the row to the output then.
        id_column: what `id` is called; likewise.
        where: values of keys, as JSON or text, of the rows that are wanted; likewise. A line without such a
            key is bad, unless it has another value of another one.
        keep_bad: make what is wrong with a line its row's `error`.

    Raises:
        ConfigError: the file cannot be read.
        RequestError: a line is malformed; names file and line.
        SamplingParamsError: a line's parameters are invalid; names file and line.
    """

    unseen = set(where or ())

    def row(index: int, source: str, line: bytes) -> PromptRow | None:
        text = _text_of(source, line)
        if column is None and id_column is None and not where:
            return parse_row(index, source, text, sampling_params)
        values = _parsed(source, text)
        unseen.difference_update(values)
        if not is_wanted(values, {name: value for name, value in (where or {}).items() if name in values}):
            return None
        named = {"--column": [column], "--id-column": [id_column], "--where": [*(where or ())]}
        for option, names in named.items():
            for name in names:
                if name is not None and name not in values:
                    near = nearest(name, values)
                    hint = f" Did you mean {near!r}?" if near else ""
                    raise RequestError(f"{source}: there is no {name!r}, as {option} says.{hint}")
        return row_of(index, source, values, sampling_params, column or "prompt", id_column=id_column)

    with opened(path) as file:
        name = os.fspath(path)
        rows = rows_of(name, _lines(name, file), row, sampling_params, keep_bad, id_column)
    if unseen:
        raise RequestError(f"{os.fspath(path)}: no line has {min(unseen)!r}, which --where names.")
    return rows


def rows_of(
    name: str,
    items: Iterable[tuple[str, _Item]],
    make: Callable[[int, str, _Item], PromptRow | None],
    sampling_params: SamplingParams,
    keep_bad: bool,
    id_column: str | None = None,
) -> list[PromptRow]:
    """The rows of a file, whose ids differ; those that are bad are kept as such, or raise.

    Args:
        name: of the file, for messages.
        items: where each row stands, and what it holds.
        make: makes a row of its index, place and content; None of one that is not wanted.
        sampling_params: of rows that are bad.
        keep_bad: whether to keep them.
        id_column: which holds the ids, "id" if None.
    """
    rows: list[PromptRow] = []
    source_of_id: dict[str | int, str] = {}
    index = -1
    for index, (source, item) in enumerate(items):
        try:
            row = make(index, source, item)
            if row is None:
                continue
            if row.error is not None and not keep_bad:
                raise row.error
            if row.id is not None:
                earlier = source_of_id.setdefault(row.id, source)
                if earlier is not source:
                    raise RequestError(
                        f'{source}: "id" {row.id!r} is taken by {earlier}: ids must be unique.'
                    )
        except JaxllmError as error:
            if not keep_bad:
                raise
            row = PromptRow(index, source, sampling_params, id=_id_of(item, id_column), error=error)
        rows.append(row)
    if index < 0:
        raise RequestError(f"{name}: the file is empty. Give at least one prompt.")
    if not rows:
        raise RequestError(f"{name}: none of its {index + 1} rows is what --where asks for.")
    return rows


def is_wanted(values: Mapping[str, Any], where: Mapping[str, str] | None) -> bool:
    """Whether a row has all the values that are asked for, which are JSON or text."""
    return all(
        name in values and (values[name] == wanted or _as_text(values[name]) == wanted)
        for name, wanted in (where or {}).items()
    )


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _id_of(item: object, id_column: str | None) -> str | int | None:
    """The id that a bad row has all the same, a JSON line or its values."""
    if isinstance(item, str | bytes):
        try:
            item = json.loads(item)
        except (ValueError, RecursionError):
            return None
    found = item.get(id_column or "id") if isinstance(item, Mapping) else None
    return found if isinstance(found, str | int) and not isinstance(found, bool) else None


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to read, unpacked if its name ends in .gz.

    Raises:
        ConfigError: it cannot be read.
    """
    name = os.fspath(path)
    try:
        with contextlib.ExitStack() as stack:
            file: BinaryIO = stack.enter_context(open(path, "rb"))
            if name.lower().endswith(".gz"):
                file = stack.enter_context(gzip.open(file))  # type: ignore[assignment]
            yield file
    except OSError as error:
        raise ConfigError(f"cannot read the prompts file {name!r} ({error.strerror or error}).") from error
    except (EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read the prompts file {name!r} (broken gzip: {error}).") from error


def _lines(name: str, file: BinaryIO) -> Iterator[tuple[str, bytes]]:
    """Where each line stands, and the line."""
    for number, line in enumerate(file, 1):
        yield f"{name}, line {number}", line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def _text_of(source: str, data: bytes) -> str:
    """A line's text; refuses empty ones."""
    try:
        line = data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{source}: byte {error.start} is no UTF-8. Convert the file to UTF-8.") from error
    line = line.removesuffix("\n").removesuffix("\r")
    if not line.strip():
        raise RequestError(f"{source}: the line is empty. Remove it or give it a prompt.")
    return line


def _parsed(source: str, line: str) -> dict[str, Any]:
    """The object that a line is."""
    try:
        row = parse(line)
    except ValueError as error:
        raise RequestError(f"{source}: no valid JSON ({error}). Write one object per line.") from error
    if not isinstance(row, dict):
        raise RequestError(f"{source}: must be a JSON object, not {type(row).__name__}.")
    return row


def row_of(
    index: int,
    source: str,
    values: Mapping[str, Any],
    defaults: SamplingParams,
    column: str,
    keys: Collection[str] = ROW_KEYS,
    id_column: str | None = None,
) -> PromptRow:
    """A row whose prompt is in a column; what is of no known key goes with it to the output.

    What is wrong with it is its `error`.
    """
    if id_column is not None and id_column != "id":
        others = {name: value for name, value in values.items() if name not in ("id", id_column)}
        values = {"id": values[id_column], **others}
    extras = {name: value for name, value in values.items() if name not in keys and name != column}
    try:
        if taken := sorted(ANSWER_KEYS & extras.keys()):
            extras = {name: value for name, value in extras.items() if name not in taken}
            raise RequestError(f"{source}: answers have a {', '.join(taken)}, too: rename or drop it.")
        for name, value in extras.items():
            if isinstance(value, Mapping) and nearest(name, ["sampling_params"]):
                raise RequestError(f'{source}: unknown key "{name}". Did you mean "sampling_params"?')
        known = {name: value for name, value in values.items() if name in keys and value is not None}
        if column in values and (column != "prompt" or not known.keys() & set(PROMPT_KEYS)):
            if known.keys() & set(PROMPT_KEYS) - {column}:
                raise RequestError(f"{source}: has a prompt beside that in {column!r}: drop one.")
            known.pop(column, None)
            known["prompt"] = values[column]
        return dataclasses.replace(_row(index, source, known, defaults), extras=extras)
    except JaxllmError as error:
        return PromptRow(index, source, defaults, id=_id_of(values, None), error=error, extras=extras)


def parse_row(index: int, source: str, line: str, defaults: SamplingParams) -> PromptRow:
    """A line of a JSON Lines file; see `read_jsonl_file`.

    Raises:
        RequestError, SamplingParamsError: it is malformed; names its source.
    """
    return _row(index, source, _parsed(source, line), defaults)


def _row(index: int, source: str, row: Mapping[str, Any], defaults: SamplingParams) -> PromptRow:
    for key in row:
        if key not in ROW_KEYS:
            near = nearest(key, ROW_KEYS)
            hint = f'Did you mean "{near}"?' if near else f"Choose from {', '.join(ROW_KEYS)}."
            raise RequestError(f'{source}: unknown key "{key}". {hint}')
    given = [key for key in PROMPT_KEYS if key in row]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise RequestError(f"{source}: needs exactly one of {', '.join(PROMPT_KEYS)}; it has {found}.")
    row_id = row.get("id")
    if row_id is not None and (isinstance(row_id, bool) or not isinstance(row_id, str | int)):
        raise RequestError(f'{source}: "id" must be a string or an integer, not {row_id!r}.')
    try:
        return PromptRow(
            index,
            source,
            _override(defaults, row.get("sampling_params", {})),
            id=row_id,
            prompt=_prompt_text(row.get("prompt")) if "prompt" in row else None,
            prompt_token_ids=_token_ids(row["prompt_token_ids"]) if "prompt_token_ids" in row else None,
            messages=_messages(row["messages"]) if "messages" in row else None,
            num_dropped_tokens=_count("num_dropped_tokens", row.get("num_dropped_tokens", 0)),
        )
    except JaxllmError as error:
        raise type(error)(f"{source}: {error}") from error


def _override(defaults: SamplingParams, overrides: object) -> SamplingParams:
    if not isinstance(overrides, dict):
        raise SamplingParamsError(f'"sampling_params" must be an object, not {type(overrides).__name__}.')
    return SamplingParams.from_dict(_as_dict(defaults) | overrides) if overrides else defaults


def _as_dict(params: SamplingParams) -> dict[str, Any]:
    """JSON values of which `SamplingParams.from_dict` makes the same parameters."""
    values = {name: getattr(params, name) for name in PARAMETER_NAMES}  # asdict copies deeply: 10x slower
    values["output_kind"] = params.output_kind.name
    values["allowed_token_ids"] = params.allowed_token_ids or None
    if params.structured_outputs is not None:
        values["structured_outputs"] = dataclasses.asdict(params.structured_outputs)
    return values


def _prompt_text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(f'"prompt" must be a non-empty string, not {value!r}.')
    return value


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise RequestError('"prompt_token_ids" must be a non-empty list of token ids.')
    for token_id in value:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id <= _MAX_TOKEN_ID:
            raise RequestError(
                f'"prompt_token_ids" holds {token_id!r}: token ids are integers in 0..{_MAX_TOKEN_ID}.'
            )
    return tuple(value)


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise RequestError(f'"{name}" must be an integer of at least 0, not {value!r}.')
    return value


def _messages(value: object) -> tuple[dict[str, Any], ...]:
    messages = check_messages(value)
    return tuple(dict(message) for message in messages)
