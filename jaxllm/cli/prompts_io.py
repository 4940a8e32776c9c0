"""Prompts in, completions out, for `jaxllm generate`.

The output is JSON Lines: one line per prompt, exactly once, in order of completion. Each line starts
with `index` (the prompt's position in the input, from 0), `id` (the prompt's, or null) and
`fingerprint` (a hash of the prompt and its parameters), so that an interrupted run can be resumed:

    {"index": 2, "id": null, "fingerprint": "6f1c...", "text": "..."}
    {"index": 0, "id": "a", "fingerprint": "03be...", "te        <- killed here: dropped on resume
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxllm.chat import check_messages
from jaxllm.errors import ConfigError, JaxllmError, RequestError, SamplingParamsError, nearest
from jaxllm.json_text import parse
from jaxllm.line_file import LineFile
from jaxllm.sampling_params import PARAMETER_NAMES, SamplingParams

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
_ROW_KEYS = (*_PROMPT_KEYS, "id", "num_dropped_tokens", "sampling_params")
_OUTPUT_KEYS = ("index", "id", "fingerprint")
_LINE_START = b'{"index": '
_MAX_TOKEN_ID = 2**31 - 1


@dataclasses.dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt of the input: exactly one of `prompt`, `prompt_token_ids` and `messages` is set.

    `index` is its position in the input, from 0. `source` says where it stands, for messages. The first
    `num_dropped_tokens` of its tokens are cut.
    """

    index: int
    source: str
    sampling_params: SamplingParams
    id: str | int | None = None
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    num_dropped_tokens: int = 0

    def fingerprint(self, context: str = "") -> str:
        """Hash of what the completion depends on, 32 hexadecimal digits.

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


def read_text_file(path: str | os.PathLike[str], sampling_params: SamplingParams) -> list[PromptRow]:
    r"""Rows for a UTF-8 file with one prompt a line. Lines end in `\n` or `\r\n`; spaces are kept.

    Raises:
        ConfigError: the file cannot be read.
        RequestError: a line is empty or no UTF-8, or there is no line; names file and line.
    """
    rows: list[PromptRow] = []
    for source, line in _read_lines(path):
        rows.append(PromptRow(len(rows), source, sampling_params, prompt=line))
    return rows


def read_jsonl_file(path: str | os.PathLike[str], sampling_params: SamplingParams) -> list[PromptRow]:
    """Rows for a JSON Lines file.

    Each line is an object with exactly one of `prompt` (a string), `prompt_token_ids` (a list of
    token ids) and `messages` (a conversation); optionally `id` (a string or an integer, unique),
    `num_dropped_tokens` (how many tokens at its front are cut) and `sampling_params`, an object of parameters
    that override `sampling_params` for this line.

    Raises:
        ConfigError: the file cannot be read.
        RequestError: a line is malformed; names file and line.
        SamplingParamsError: a line's parameters are invalid; names file and line.
    """
    rows: list[PromptRow] = []
    source_of_id: dict[str | int, str] = {}
    for source, line in _read_lines(path):
        row = parse_row(len(rows), source, line, sampling_params)
        if row.id is not None:
            earlier = source_of_id.setdefault(row.id, source)
            if earlier is not source:
                raise RequestError(f'{source}: "id" {row.id!r} is taken by {earlier}: ids must be unique.')
        rows.append(row)
    return rows


class OutputFile(LineFile[int]):
    """A crash-safe JSON Lines file of completions (`LineFile`), by the prompts' indices.

    Args:
        path: the file; created if absent, in a folder that exists.
        rows: the prompts, in input order.
        resume: continue an existing file: drop an incomplete last line and check that every other
            line belongs to these rows. Without it a file that holds anything is refused.
        context: goes into the fingerprints, see `PromptRow.fingerprint`.

    Raises:
        ConfigError: see `LineFile`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rows: Sequence[PromptRow],
        *,
        resume: bool = False,
        context: str = "",
    ) -> None:
        self._ids = [row.id for row in rows]
        self._fingerprints = [row.fingerprint(context) for row in rows]
        super().__init__(path, resume=resume, line_start=_LINE_START)

    def write(self, completions: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """Appends a line for each `(index, content)`; on return they have reached the disk.

        Args:
            completions: row indices, and JSON-ready objects without `index`, `id` and `fingerprint`.

        Raises:
            RequestError: an index is no row's or already has a line, or a content holds a reserved key.
                Nothing of the batch is written.
            ConfigError: the disk is full or failed. Lines of earlier calls are kept.
        """
        lines: dict[int, str] = {}
        for index, content in completions:
            if not 0 <= index < len(self._fingerprints):
                raise RequestError(
                    f"index {index} is no row: it must be in 0..{len(self._fingerprints) - 1}."
                )
            if index in self._done or index in lines:
                raise RequestError(f"index {index} already has a line in {self._path!r}: write it once.")
            for key in _OUTPUT_KEYS:
                if key in content:
                    raise RequestError(f'completion {index} holds "{key}", which the file adds: remove it.')
            line = {"index": index, "id": self._ids[index], "fingerprint": self._fingerprints[index]}
            # ASCII only: U+2028 and its like would split lines for some readers.
            lines[index] = json.dumps(line | dict(content), allow_nan=False) + "\n"
        self._append("".join(lines.values()).encode("ascii"))
        self._done.update(lines)

    def _check_line(self, number: int, line: bytes) -> int:
        """The line's index, once it is known to be one of these rows' lines."""
        try:
            content = json.loads(line)
            index, fingerprint = content["index"], content["fingerprint"]
        except (ValueError, KeyError, TypeError, RecursionError):
            self._refuse(number, "it is no line of jaxllm's")
        if isinstance(index, bool) or not isinstance(index, int):
            self._refuse(number, "it is no line of jaxllm's")
        if not 0 <= index < len(self._fingerprints):
            self._refuse(number, f"it has index {index}, and there are {len(self._fingerprints)} prompts")
        if fingerprint != self._fingerprints[index]:
            self._refuse(number, f"its fingerprint differs from that of prompt {index}")
        return index

    def _describe(self, key: int) -> str:
        return f"index {key}"


def _read_lines(path: str | os.PathLike[str]) -> Iterator[tuple[str, str]]:
    """Yields `(source, text)` per line; refuses empty lines and an empty file."""
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            number = 0
            for number, data in enumerate(file, 1):
                source = f"{name}, line {number}"
                try:
                    line = data.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise RequestError(
                        f"{source}: byte {error.start} is no UTF-8. Convert the file to UTF-8."
                    ) from error
                line = line.removesuffix("\n").removesuffix("\r")
                if not line.strip():
                    raise RequestError(f"{source}: the line is empty. Remove it or give it a prompt.")
                yield source, line
    except OSError as error:
        raise ConfigError(f"cannot read the prompts file {name!r} ({error.strerror}).") from error
    if number == 0:
        raise RequestError(f"{name}: the file is empty. Give at least one prompt.")


def parse_row(index: int, source: str, line: str, defaults: SamplingParams) -> PromptRow:
    """A line of a JSON Lines file; see `read_jsonl_file`.

    Raises:
        RequestError, SamplingParamsError: it is malformed; names its source.
    """
    try:
        row = parse(line)
    except ValueError as error:
        raise RequestError(f"{source}: no valid JSON ({error}). Write one object per line.") from error
    if not isinstance(row, dict):
        raise RequestError(f"{source}: must be a JSON object, not {type(row).__name__}.")
    for key in row:
        if key not in _ROW_KEYS:
            near = nearest(key, _ROW_KEYS)
            hint = f'Did you mean "{near}"?' if near else f"Choose from {', '.join(_ROW_KEYS)}."
            raise RequestError(f'{source}: unknown key "{key}". {hint}')
    given = [key for key in _PROMPT_KEYS if key in row]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise RequestError(f"{source}: needs exactly one of {', '.join(_PROMPT_KEYS)}; it has {found}.")
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
