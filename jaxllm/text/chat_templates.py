"""Chat templates bounded in time and memory: they come with checkpoints, or from whoever sends requests.

jinja2's sandbox keeps a template away from Python's internals and bounds ranges; loops in loops, strings that
double, `9**9**9` and `"a" * 10**10` it lets run. Here every turn of a loop and every call looks at the clock,
and what would be large is refused before it is made. Nothing is evaluated while a template is compiled.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import re
import time
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2.nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

MAX_SECONDS = 2.0
MAX_SIZE = 2**23
"""Most characters or entries of anything that a template makes."""
_MAX_NUMBER = 10**6  # of an argument, which may be a width or a count
_MAX_BITS = 4096  # of a product or a power
_GROWING = ("replace", "join", "format", "format_map", "expandtabs", "translate", "indent")

_deadline: contextvars.ContextVar[float | None] = contextvars.ContextVar("deadline", default=None)


class TemplateLimitError(Exception):
    """A template takes too long, or makes something too large."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Let templates be compiled and rendered within the limits, in this thread."""
    token = _deadline.set(time.monotonic() + MAX_SECONDS)
    try:
        yield
    finally:
        _deadline.reset(token)


def compile_template(text: str) -> jinja2.Template:
    """A template that is bounded where `bounded` is, with what transformers gives templates."""
    return _compile(text) if len(text) <= MAX_SIZE else _refuse(f"a text of {len(text)} characters")


@functools.lru_cache(maxsize=64)
def _compile(text: str) -> jinja2.Template:
    return _environment().from_string(text)


@functools.cache
def _environment() -> _Environment:
    environment = chat_template_utils._compile_jinja_template("").environment.overlay()
    environment.__class__ = _Environment
    environment.globals = {key: value for key, value in environment.globals.items() if key != "lipsum"}
    environment.filters = {name: _checked(name, one) for name, one in environment.filters.items()}
    environment.filters["turns"] = _turns
    environment.optimized = False
    return environment


def _tick() -> None:
    deadline = _deadline.get()
    if deadline is not None and time.monotonic() > deadline:
        raise TemplateLimitError(f"it takes longer than {MAX_SECONDS:g} seconds")


def _refuse(what: str) -> Any:
    raise TemplateLimitError(f"it makes {what}; at most {MAX_SIZE} are allowed")


def _size(value: Any) -> int:
    """Characters or entries, or what a number may stand for."""
    if isinstance(value, str | bytes | list | tuple | dict | set):
        return len(value)
    return abs(value) if isinstance(value, int) else 0


def _of_size(value: Any) -> Any:
    if not isinstance(value, int) and _size(value) > MAX_SIZE:
        _refuse(f"something of {_size(value)} characters or entries")
    return value


def _check_arguments(name: str, subject: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Refuse widths and counts that are large, and methods whose result would be."""
    _tick()
    given = [*arguments, *named.values()]
    for value in given:
        if isinstance(value, int) and abs(value) > _MAX_NUMBER:
            raise TemplateLimitError(f"it calls {name} with a number above {_MAX_NUMBER}")
    if name in _GROWING:
        made = given[1:] if name == "replace" else given
        largest = max((_size(one) for value in made for one in _parts(value)), default=0)
        count = sum(len(value) for value in given if isinstance(value, list | tuple))
        if (_size(subject) + count) * (largest + 1) > 2**10 * MAX_SIZE:
            raise TemplateLimitError(f"what it calls {name} for would be too large")


def _parts(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose arguments and result are bounded."""

    @functools.wraps(function)  # with what jinja2 marks it with
    def call(*arguments: Any, **named: Any) -> Any:
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0
        subject = arguments[skipped] if len(arguments) > skipped else None
        _check_arguments(name, subject, arguments[skipped + 1 :], named)
        return _of_size(function(*arguments, **named))

    return call


class _Counted:
    """A collection that looks at the clock while it is gone over; its length is known."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            _tick()
            yield value


def _turns(values: Any) -> Iterable[Any]:
    """What a loop goes over, each after a look at the clock."""
    return _Counted(values) if hasattr(values, "__len__") else iter(_Counted(values))


class _Generator(CodeGenerator):
    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:
        self.write("environment.of_size(")
        super().visit_Concat(node, frame)
        self.write(")")


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    of_size = staticmethod(_of_size)

    def _generate(self, source: jinja2.nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in source.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(
                loop.iter, "turns", [], [], None, None, lineno=loop.lineno, environment=self
            )
        return super()._generate(source, *args, **kwargs)

    def concat(self, parts: Iterable[str]) -> str:
        """All parts in one text."""
        kept, size = [], 0
        for part in parts:
            kept.append(part)
            size += len(part)
            if size > MAX_SIZE:
                _refuse("a longer text")
            if not len(kept) % 1024:
                _tick()
        return "".join(kept)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """As the sandbox, of what is not too large."""
        name = getattr(__obj, "__name__", type(__obj).__name__)
        _check_arguments(name, getattr(__obj, "__self__", None), args, kwargs)
        return _of_size(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """As the sandbox, of what is not too large."""
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            num_bits = left.bit_length() * abs(right) if operator == "**" else (left * right).bit_length()
            if num_bits > _MAX_BITS:
                raise TemplateLimitError(
                    f"it makes a number of {num_bits} bits; at most {_MAX_BITS} are allowed"
                )
        elif operator == "*" and _size(left) * _size(right) > MAX_SIZE:
            _refuse(f"a product of {_size(left)} and {_size(right)}")
        elif operator == "%" and isinstance(left, str) and re.search(r"\d{7}|\*", left):
            raise TemplateLimitError("it formats with a width that is too large")
        return _of_size(super().call_binop(context, operator, left, right))


_render = chat_template_utils.render_jinja_template
render_jinja_template = types.FunctionType(
    _render.__code__,
    {**vars(chat_template_utils), "_compile_jinja_template": compile_template},
    argdefs=_render.__defaults__,
)
"""transformers' function, with templates of ours; its own is left as it is."""
