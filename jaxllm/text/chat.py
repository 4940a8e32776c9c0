"""Conversations: checked, brought into the form a chat template reads, and rendered by it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ConfigError, RequestError, did_you_mean, shown
from jaxllm.text.tokenizer import encode, quiet_transformers, summary

if TYPE_CHECKING:
    from jinja2.nodes import Node, Template, Test
    from transformers import PreTrainedTokenizerBase

CONTENT_FORMATS = ("auto", "string", "openai")
_ARGUMENTS = ("chat_template", "add_generation_prompt", "continue_final_message", "tools")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Parts of messages that are text, and the keys it is under."""
_HEARD = ("user", "system", "developer")
"""Roles whose messages say something."""
_RESERVED = (*_ARGUMENTS, "conversation", "messages", "tokenize")


def apply_chat_template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **options: Any
) -> list[int]:
    """Token ids of a conversation. The special tokens are those the template writes; none are added.

    Args and errors: as `render`.
    """
    return encode(tokenizer, render(tokenizer, messages, **options), add_special_tokens=False)


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    content_format: str = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_variables: Mapping[str, Any] | None = None,
    optional_variables: Mapping[str, Any] | None = None,
) -> str:
    """The text that a chat template makes of a conversation.

    The template runs in jinja2's immutable sandbox: it can neither reach Python's internals nor change
    the messages. It is stopped after two seconds, and where it makes something of millions of characters.

    Args:
        tokenizer: the checkpoint's, with its template.
        messages: as for `check_messages`, oldest first.
        chat_template: a template's text, or the name of one of the checkpoint's; its default one if None.
        content_format: what templates get as content: "string" (parts joined by line breaks), "openai" (a
            list of parts), or "auto": a list where the template goes over one, unless it takes strings too
            and content is one. Content that is absent or null is what the template tests it for: None, or
            absent; "" where it tests neither.
        add_generation_prompt: open the assistant's turn at the end.
        continue_final_message: leave the last message open instead, for the model to continue.
        tools: JSON schemas of functions, which the template shows to the model.
        template_variables: others that the template reads, e.g. `{"enable_thinking": False}`.
        optional_variables: others for templates that read them; the rest does without. `tools` may be one.

    Raises:
        RequestError: malformed messages, ones that the template refuses, or options that contradict each
            other or that the template does not read.
        ConfigError: the tokenizer has no chat template, or it is broken or hostile.
    """
    check_messages(messages)
    _check_options(content_format, add_generation_prompt, continue_final_message, tools)
    optional = dict(optional_variables or {})
    optional_tools = optional.pop("tools", None)
    template = _template(tokenizer, chat_template, tools or optional_tools)
    variables = dict(template_variables or {})
    for name in _RESERVED:
        if name in variables:
            raise RequestError(
                f"chat_template_kwargs has {name!r}: give it to chat as an argument, if it is one"
            )
    with quiet_transformers():
        from jinja2.exceptions import TemplateError

        from jaxllm.text.chat_templates import bounded, render_jinja_template

        try:
            parsed = _parse(template)
            known = _variables(parsed)
            variables |= {name: one for name, one in optional.items() if name in known}
            if "tools" in known:
                tools = tools or optional_tools
            _check_variables([*variables, *(["tools"] if tools else [])], known)
            reading = _Reading.of(parsed)
            if content_format != "auto":
                is_openai = content_format == "openai"
                reading = dataclasses.replace(reading, takes_parts=is_openai, takes_strings=not is_openai)
            conversation = [_as_read(message, reading) for message in messages]
            if continue_final_message:
                conversation[-1] = _as_read(messages[-1], reading, is_continued=True)
            with bounded():
                # apply_chat_template would drop what is None.
                rendered: Any = render_jinja_template(
                    conversations=[conversation],
                    tools=[dict(tool) for tool in tools] if tools else None,
                    chat_template=template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    **{**tokenizer.special_tokens_map, **variables},
                )
                return str(rendered[0][0])
        except RequestError:
            raise
        except Exception as error:  # a template can raise anything Python can
            if type(error) is TemplateError:  # from the template's own raise_exception(...)
                raise RequestError(f"the chat template refuses these messages: {error}.") from error
            raise ConfigError(
                f"the chat template failed ({summary(error)}). Correct it, or render the prompt yourself and "
                "send it as text."
            ) from error


def _check_options(
    content_format: object, add_generation_prompt: object, continue_final_message: object, tools: object
) -> None:
    """Verify options of `render`."""
    if content_format not in CONTENT_FORMATS:
        raise RequestError(
            f"chat_template_content_format={content_format!r} must be one of {', '.join(CONTENT_FORMATS)}"
        )
    for name, flag in (
        ("add_generation_prompt", add_generation_prompt),
        ("continue_final_message", continue_final_message),
    ):
        if not isinstance(flag, bool):
            raise RequestError(f"{name}={flag!r} must be True or False")
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message=True goes on with the last message and add_generation_prompt=True opens "
            "a new one: set one of them to False"
        )
    given = [*tools] if isinstance(tools, Sequence) else [tools]
    if tools is not None and (isinstance(tools, str) or not all(isinstance(tool, Mapping) for tool in given)):
        raise RequestError(f"tools={tools!r} must be a list of functions' JSON schemas, each a dictionary")


def check_messages(messages: object) -> Sequence[Mapping[str, Any]]:
    """Returns messages that are a conversation: a non-empty list of objects with a role and a content.

    A role is a string. Content is a string or a list of `{"type": "text", "text": ...}`; other names of text
    parts are `input_text`, `output_text` and `refusal`. Of what a model said, and beside `tool_calls`, it may
    be None or absent.

    Raises:
        RequestError: they are not; the message names the entry.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            'messages must be a list of {"role": ..., "content": ...} objects, '
            f"not {type(messages).__name__}."
        )
    if not messages:
        raise RequestError("messages is empty: give at least one message.")
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(
                f'{place} must be an object {{"role": ..., "content": ...}}, not {type(message).__name__}.'
            )
        content, calls = message.get("content"), message.get("tool_calls")
        needs_content = message.get("role") in _HEARD and not calls
        for key in ("role", "content"):
            if key not in message and (key == "role" or needs_content):
                raise RequestError(f'{place} has no "{key}": it needs "role" and "content".')
        if not isinstance(message["role"], str):
            raise RequestError(f'{place}["role"] must be a string, not {type(message["role"]).__name__}.')
        if not isinstance(content, str) and (content is not None or needs_content):
            _check_parts(f'{place}["content"]', content)
        if calls is not None:
            _check_calls(f'{place}["tool_calls"]', calls)
    return messages


def _check_parts(place: str, parts: object) -> None:
    if not isinstance(parts, Sequence):
        raise RequestError(f"{place} must be a string or a list of parts, not {type(parts).__name__}.")
    for index, part in enumerate(parts):
        if isinstance(part, str):
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind is None:
            raise RequestError(f'{place}[{index}] must be an object {{"type": "text", "text": ...}}.')
        key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if key is None:
            raise RequestError(
                f"{place}[{index}] is of type {shown(kind, 80)}: models of text only are supported; send text"
            )
        if not isinstance(part.get(key), str):
            raise RequestError(f'{place}[{index}]["{key}"] must be a string, not {shown(part.get(key), 80)}.')


def text_of_part(part: str | Mapping[str, Any]) -> str:
    """What a part of a message says."""
    return part if isinstance(part, str) else str(part[_TEXT_PARTS[part["type"]]])


def _check_calls(place: str, calls: object) -> None:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"{place} must be a list, not {type(calls).__name__}.")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(_arguments(function), Mapping | list | str):
            raise RequestError(
                f'{place}[{index}] must be an object {{"function": {{"name": ..., "arguments": ...}}}} whose '
                "arguments are an object, or text."
            )


def _arguments(function: Mapping[str, Any]) -> Any:
    """A call's arguments, from an object's JSON as others have it; else the text that a model wrote."""
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _as_read(message: Mapping[str, Any], reading: _Reading, *, is_continued: bool = False) -> dict[str, Any]:
    """A message as templates read it: one form of content, arguments of calls as objects (as in vLLM)."""
    # What is null, as in a message that a client sends back as it came, is not there.
    read = {name: value for name, value in message.items() if value is not None}
    if "content" in read or is_continued or not (reading.tests_none or reading.tests_defined):
        read["content"] = _content(message, reading, is_continued)
    elif reading.tests_none:
        read["content"] = None
    if calls := read.pop("tool_calls", None):
        read["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}}
            for call in calls
        ]
    return read


def _content(message: Mapping[str, Any], reading: _Reading, is_continued: bool) -> str | list[dict[str, Any]]:
    """What a message says, as text or in parts; of nothing there is no part, unless it is to be continued."""
    content = message.get("content")
    is_text = content is None or isinstance(content, str)
    parts: Any = ([content or ""] if content or is_continued else []) if is_text else content
    if not reading.takes_parts or (is_text and reading.takes_strings) or message["role"] == "tool":
        return "\n".join(map(text_of_part, parts))
    return [
        dict(one)
        if isinstance(one, Mapping) and one["type"] == "text"
        else {"type": "text", "text": text_of_part(one)}
        for one in parts
    ]


def _template(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None, tools: Sequence[Any] | None
) -> str:
    """The text of the template to use."""
    own: Any = getattr(tokenizer, "chat_template", None)
    if chat_template is None:
        if not own:
            raise ConfigError(
                "the tokenizer has no chat template: the checkpoint is probably a base model. Send a plain "
                "prompt, give chat_template, or add the family's chat_template.jinja to its folder."
            )
    elif not isinstance(chat_template, str):
        raise RequestError(f"chat_template={shown(chat_template)} must be a template's text")
    elif "{" not in chat_template and not (isinstance(own, Mapping) and chat_template in own):
        raise RequestError(
            f"chat_template={shown(chat_template)} has no jinja in it and would say the same of all "
            "messages: give a template's text; of a file, Path(...).read_text()"
        )
    try:
        return str(tokenizer.get_chat_template(chat_template, [*tools] if tools else None))
    except ValueError as error:  # several templates, none of which is the default
        raise ConfigError(f"the tokenizer has no default chat template ({summary(error)})") from error


def _parse(template: str) -> Template:
    """The template as transformers reads it, with its extensions."""
    from jaxllm.text.chat_templates import compile_template

    return compile_template(template).environment.parse(template)


def _variables(parsed: Template) -> set[str]:
    """What a template reads that it does not make itself."""
    from jinja2.meta import find_undeclared_variables

    assert parsed.environment is not None
    return find_undeclared_variables(parsed) - parsed.environment.globals.keys()


def _check_variables(given: Sequence[str], known: set[str]) -> None:
    """Verify that a template reads all variables that it is given.

    Raises:
        RequestError: it does not; names the nearest one that it reads.
    """
    for name in given:
        if name not in known:
            others = sorted(known - {"messages", *_ARGUMENTS})
            meant = did_you_mean(name, others) or "leave it out. "
            names = ", ".join(others) or "no variables of its own"
            raise RequestError(f"the chat template does not read {name!r}; {meant}It reads {names}")


@dataclasses.dataclass(frozen=True)
class _Reading:
    """How a template reads the content of messages.

    Attributes:
        takes_parts: it goes over a list of parts somewhere.
        takes_strings: wherever it does, it has asked whether content is a string.
        tests_none: it asks whether there is content by comparing it with none.
        tests_defined: it asks whether content is defined, or in the message.
    """

    takes_parts: bool
    takes_strings: bool
    tests_none: bool
    tests_defined: bool

    @classmethod
    def of(cls, parsed: Template) -> _Reading:
        """How one reads it."""
        from jinja2 import nodes

        names = _names_of_content(parsed)
        loops = list(_loops(parsed, names, False))
        tested = {test.name for test in parsed.find_all(nodes.Test) if _is_content(test.node, names)}
        compared = list(parsed.find_all(nodes.Compare))
        is_compared = any(
            _is_content(one.expr, names) and _is_constant(one.ops[0].expr, None) for one in compared
        )
        is_sought = any(
            _is_constant(one.expr, "content") and one.ops[0].op in ("in", "notin") for one in compared
        )
        return cls(
            takes_parts=bool(loops),
            takes_strings=all(loops),
            tests_none="none" in tested or is_compared,
            tests_defined=is_sought or not tested.isdisjoint(("defined", "undefined")),
        )


def _is_constant(node: Node, value: object) -> bool:
    from jinja2 import nodes

    return isinstance(node, nodes.Const) and node.value == value


def _is_content(node: Node | None, names: Set[str]) -> bool:
    """Whether an expression is a message's content, filtered or not."""
    from jinja2 import nodes

    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Getitem):
        return _is_constant(node.arg, "content")
    if isinstance(node, nodes.Call):
        is_get = isinstance(node.node, nodes.Getattr) and node.node.attr == "get"
        return is_get and bool(node.args) and _is_constant(node.args[0], "content")
    if isinstance(node, nodes.CondExpr):
        return _is_content(node.expr1, names) or _is_content(node.expr2, names)
    return (isinstance(node, nodes.Getattr) and node.attr == "content") or (
        isinstance(node, nodes.Name) and node.name in names
    )


def _names_of_content(parsed: Template) -> Set[str]:
    """Variables and macros' arguments that hold content or are called so, but are no single parts."""
    from jinja2 import nodes

    given: list[tuple[str, Node]] = []
    for one in parsed.find_all(nodes.Assign):
        given += [(one.target.name, one.node)] if isinstance(one.target, nodes.Name) else []
    arguments = {one.name: [argument.name for argument in one.args] for one in parsed.find_all(nodes.Macro)}
    for call in parsed.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name):
            given += zip(arguments.get(call.node.name, ()), call.args, strict=False)
    parts = {one.target.name for one in parsed.find_all(nodes.For) if isinstance(one.target, nodes.Name)}
    names: set[str] = set()
    found = {"content"}
    while found > names:
        names = found
        found = names | {name for name, node in given if _is_content(node, names)}
    return names - parts


def _loops(node: Node, names: Set[str], is_asked: bool) -> Iterator[bool]:
    """Each loop over content: whether it is where the template has asked if that is a string."""
    from jinja2 import nodes

    if isinstance(node, nodes.If):
        tests = [test for one in (node, *node.elif_) for test in _tests(one.test)]
        is_asked |= any(test.name == "string" and _is_content(test.node, names) for test in tests)
    if isinstance(node, nodes.For) and _is_content(node.iter, names):
        yield is_asked
    for child in node.iter_child_nodes():
        yield from _loops(child, names, is_asked)


def _tests(node: Node) -> Iterator[Test]:
    """The tests in an expression, itself included."""
    from jinja2 import nodes

    if isinstance(node, nodes.Test):
        yield node
    yield from node.find_all(nodes.Test)
