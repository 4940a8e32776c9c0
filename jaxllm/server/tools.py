"""Calls of tools that a client demands: what the output is bounded to, and what it says as `tool_calls`."""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.errors import JaxllmError, SamplingParamsError, shown
from jaxllm.sampling.params import SamplingParams
from jaxllm.sampling.structured_outputs import StructuredOutputsParams
from jaxllm.server.errors import refused
from jaxllm.server.protocol import ChatCompletionRequest
from jaxllm.text.chat import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NAME = re.compile(r"[^\x00-\x1f\"\\{}]{1,256}")
_PROBE_NAME, _PROBE_ARGUMENTS = "probe_function", {"probe_key": 7}
_SAID = "what was said"
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Of arguments: that of templates, which also keeps a model from writing nothing but spaces."""


@dataclasses.dataclass(frozen=True)
class CallFormat:
    """How a model writes calls.

    Attributes:
        first: what comes before the first call's name.
        middle: between a name and its arguments, which are JSON.
        last: after the last call's arguments.
        between: from one call's arguments to the next one's name; None where there is one call only.
    """

    first: str
    middle: str
    last: str
    between: str | None


PLAIN = CallFormat('{"name": "', '", "arguments": ', "}", '}\n{"name": "')
"""For models whose own way is not known."""


def call_format(tokenizer: PreTrainedTokenizerBase) -> CallFormat:
    """How a checkpoint's template writes calls of the past, and so its model new ones.

    A few conversations are rendered to see it. `PLAIN` where it cannot be seen: the template knows no calls,
    or refuses such conversations, or writes arguments in another way than as one JSON object.
    """
    tool = {"type": "function", "function": {"name": _PROBE_NAME, "parameters": {"type": "object"}}}
    call_id = "call12345"
    call = {"id": call_id, **tool, "function": {"name": _PROBE_NAME, "arguments": _PROBE_ARGUMENTS}}

    def turn(**message: Any) -> str:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", **message}]
        options = {"add_generation_prompt": False, "optional_variables": {"tools": [tool]}}
        return render(tokenizer, messages, **options)  # type: ignore[arg-type]

    try:
        before, _, after = turn(content=_SAID).partition(_SAID)
        one = _within(turn(content=None, tool_calls=[call]), before, after)
    except JaxllmError:
        return PLAIN
    arguments = json.dumps(_PROBE_ARGUMENTS)
    found = re.fullmatch(f"(.*?){_PROBE_NAME}(.*?){re.escape(arguments)}(.*)", one or "", re.DOTALL)
    if found is None or call_id in found.group() or _PROBE_NAME in found[2] + found[3]:
        return PLAIN
    first, middle, last = found.groups()
    end = str(tokenizer.eos_token) if tokenizer.eos_token else None
    if end is not None and end in first + middle:
        return PLAIN
    spelled = re.escape(f"{_PROBE_NAME}{middle}{arguments}")
    between = None
    try:
        two = _within(turn(content=None, tool_calls=[call, call]), before, after)
        pair = re.fullmatch(
            f"{re.escape(first)}{spelled}(.+?){spelled}{re.escape(last)}", two or "", re.DOTALL
        )
        between = None if pair is None or (end is not None and end in pair[1]) else pair[1]
    except JaxllmError:
        pass  # as templates of one call at a time do
    return CallFormat(first, middle, last.partition(end)[0] if end else last, between)


def _within(text: str, before: str, after: str) -> str | None:
    """What is between two ends of a text; None if they are not its ends."""
    is_there = text.startswith(before) and text.endswith(after) and len(text) >= len(before) + len(after)
    return text[len(before) : len(text) - len(after)] if is_there else None


@dataclasses.dataclass(frozen=True)
class DemandedCalls:
    """Calls that the output of a request must be.

    Attributes:
        names: of the tools that may be called.
        schemas: of their arguments.
        has_one: whether there is only one call.
        is_named: whether the client chose the function.
    """

    names: tuple[str, ...]
    schemas: tuple[Mapping[str, Any], ...]
    has_one: bool
    is_named: bool

    @classmethod
    def of(cls, request: ChatCompletionRequest) -> DemandedCalls | None:
        """What a request demands; None if the model may answer as it likes.

        Raises:
            ApiError: it demands what there is not, or bounds the output in another way as well.
        """
        choice = request.tool_choice
        if choice in (None, "auto", "none"):
            return None
        is_named = isinstance(choice, Mapping) and choice.get("type", "function") == "function"
        function = choice.get("function") if is_named else None
        wanted = function.get("name") if isinstance(function, Mapping) else None
        if choice != "required" and not isinstance(wanted, str):
            raise refused(
                f'tool_choice={shown(choice, 80)} must be "auto", "none", "required" or '
                '{"type": "function", "function": {"name": ...}}',
                "tool_choice",
            )
        if request.response_format is not None and request.response_format.type != "text":
            raise refused("tool_choice and response_format both bound the output: send one", "tool_choice")
        if request.structured_outputs is not None:
            raise refused("tool_choice and structured_outputs both bound the output: send one", "tool_choice")
        tools = request.tools if isinstance(request.tools, list) else []
        found = [_function(place, tool) for place, tool in enumerate(tools)]
        if wanted is not None:
            found = [one for one in found if one[0] == wanted][:1]
        if not found:
            about = "tools is empty" if wanted is None else f"none of tools is called {shown(wanted, 80)}"
            raise refused(f"tool_choice={shown(choice, 80)} demands a call, and {about}", "tool_choice")
        names, schemas = zip(*dict(found).items(), strict=True)
        has_one = wanted is not None or request.parallel_tool_calls is False
        return cls(names, schemas, has_one, wanted is not None)

    def bound(
        self, params: SamplingParams, form: CallFormat, tokenizer: PreTrainedTokenizerBase
    ) -> SamplingParams:
        """Parameters with which the output is such calls, written in a model's way.

        Raises:
            SamplingParamsError: they contradict that, or the schemas are too long.
        """
        special = _special_tokens(tokenizer)
        lines = []
        for place, (name, schema) in enumerate(zip(self.names, self.schemas, strict=True)):
            content = json.dumps({"type": "object", **schema, "x-guidance": _SPACING})
            if held := next((text for text in special if text in name), None):
                raise SamplingParamsError(
                    f"the name of tool {name!r} holds the special token {held!r}, which no output shows: "
                    "give it another name"
                )
            lines += [f"call_{place}: {_lark(name + form.middle, special)} arguments_{place}"]
            lines += [f"arguments_{place}: %json {content}"]
        more = "" if self.has_one or form.between is None else f"({_lark(form.between, special)} call)*"
        lines += ["call: " + " | ".join(f"call_{place}" for place in range(len(self.names)))]
        lines += [f"start: {_lark(form.first, special)} call {more} {_lark(form.last, special)}"]
        grammar = StructuredOutputsParams(grammar="\n".join(lines))
        return dataclasses.replace(params, structured_outputs=grammar)

    def reader(
        self, params: SamplingParams, form: CallFormat, tokenizer: PreTrainedTokenizerBase
    ) -> CallReader:
        """What finds the calls in one output's text."""
        middle = form.middle
        if params.skip_special_tokens:
            for text in _special_tokens(tokenizer):
                middle = middle.replace(text, "")
        return CallReader(self.names, middle)


class CallReader:
    """Finds calls in an output as it comes.

    Args:
        names: of tools that may be called.
        middle: what the text has between a name and its arguments.

    Attributes:
        calls: those found so far, as OpenAI has them.
    """

    def __init__(self, names: Sequence[str], middle: str) -> None:
        known = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        self._beginning = re.compile(f"({known}){re.escape(middle)}(?={{)")
        self._ahead = ""
        self._depth = 0
        self._is_string = self._is_escaped = False
        self.calls: list[dict[str, Any]] = []

    def feed(self, text: str) -> list[dict[str, Any]]:
        """What is new of calls in a stream, as its `tool_calls`."""
        self._ahead += text
        news: list[dict[str, Any]] = []
        while self._ahead:
            if not self._depth:
                found = self._beginning.search(self._ahead)
                if found is None:
                    break
                call: dict[str, Any] = {
                    "id": f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {"name": found[1], "arguments": ""},
                }
                news.append({"index": len(self.calls), **call, "function": dict(call["function"])})
                self.calls.append(call)
                self._ahead = self._ahead[found.end() :]
            size = self._size()
            piece, self._ahead = self._ahead[:size], self._ahead[size:]
            self.calls[-1]["function"]["arguments"] += piece
            if news and news[-1]["index"] == len(self.calls) - 1:
                news[-1]["function"]["arguments"] += piece
            else:
                news.append({"index": len(self.calls) - 1, "function": {"arguments": piece}})
        return news

    def _size(self) -> int:
        """How much of what is ahead is of the arguments under way."""
        for place, character in enumerate(self._ahead):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_escaped = character == "\\"
                self._is_string = character != '"'
            elif character == '"':
                self._is_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "]}":
                self._depth -= 1
                if not self._depth:
                    return place + 1
        return len(self._ahead)


def _function(place: int, tool: object) -> tuple[str, Mapping[str, Any]]:
    """Name and schema of a tool.

    Raises:
        ApiError: it is none.
    """
    param = f"tools[{place}]"
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":  # type: ignore[attr-defined]
        raise refused(
            f'{param}={shown(tool, 80)} must be {{"type": "function", "function": {{"name": ...}}}}', "tools"
        )
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise refused(
            f"{param}.function.name={shown(name, 80)} must be 1 to 256 characters without quotes, braces, "
            "backslashes and line breaks",
            "tools",
        )
    if schema is None:
        return name, {"properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise refused(
            f'{param}.function.parameters={shown(schema, 80)} must be a JSON schema of type "object"', "tools"
        )
    return name, schema


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Ids of tokens that no text is, the longest first."""
    added = tokenizer.added_tokens_decoder.items()
    found = {token.content: token_id for token_id, token in added if token.special and token.content}
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def _lark(text: str, special: Mapping[str, int]) -> str:
    """A text as a grammar has it: special tokens are named by their ids."""
    pattern = "|".join(map(re.escape, special))
    pieces = re.split(f"({pattern})", text) if special else [text]
    return " ".join(
        f"<[{special[piece]}]>" if piece in special else json.dumps(piece, ensure_ascii=False)
        for piece in pieces
        if piece
    )
