"""Settings that are declared once.

A field of a dataclass says, as `option`, what it is for and which values it takes. From that come the check
of its value, its flag of the command line, and its entry in the documentation.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from jaxllm.errors import ConfigError, JaxllmError, did_you_mean, shown
from jaxllm.system.json_text import parse as parse_json

_KEY = "option"
_MAX_PATH, _MAX_NAME = 4095, 255  # bytes, as Linux has it
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_Class = TypeVar("_Class", bound=type)
_Is = TypeVar("_Is", covariant=True)
_Given = TypeVar("_Given", contravariant=True)


@dataclasses.dataclass(frozen=True)
class Option:
    """What `option` declares of a field, and the documentation of its class says of it."""

    help: str = ""
    names: Sequence[str] = ()
    within: tuple[float, float] = (-math.inf, math.inf)
    choices: Sequence[str] = ()
    check: Callable[[str, Any], Any] | None = None
    parse: Callable[[str], Any] | None = None
    metavar: str | None = None
    flag: str | None = ""
    short: tuple[str, ...] = ()
    is_repeated: bool = False


class Kept(Protocol[_Is, _Given]):
    """The type of a field that is kept as another than it may be given as; for type checkers only."""

    def __get__(self, owner: Any, kind: Any = None) -> _Is: ...

    def __set__(self, owner: Any, value: _Given) -> None: ...


def option(default: Any, **declared: Any) -> Any:
    """A field of a class `with_options`, which calls `check_options` when it is made.

    Its type says what values are: True or False, an integer, a number, a path (`os.PathLike` is among its
    types), or text.

    Args:
        default: its value unless another is given.
        **declared: numbers are `within` two; text is one of `choices`; `check`, a function of a name and a
            value that returns what to store, or raises, instead of the check by type; `parse`, a function
            that makes a value of the command line's text; `metavar` of that text; `flag`, its name there if
            that is not the field's, or None if it has none, and `short` others; `is_repeated`: each flag adds
            one entry; `names` stand for the option's name in braces in the documentation.
    """
    return dataclasses.field(default=default, metadata={_KEY: Option(**declared)})


def options_of(settings: type) -> Iterator[tuple[str, Any, Option]]:
    """Names, defaults and declarations of a class's options."""
    for field in dataclasses.fields(settings):
        if _KEY in field.metadata:
            yield field.name, field.default, field.metadata[_KEY]


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def with_options(settings: _Class) -> _Class:
    """A decorator that makes a class of options a frozen dataclass.

    Under "Args" its documentation says what each is, in sentences; the command line shows the first.
    """
    dataclasses.dataclass(frozen=True, kw_only=True)(settings)
    for name, _, declared in options_of(settings):
        settings.__doc__ = (settings.__doc__ or "").replace(f"{{{name}}}", ", ".join(declared.names))
    said = _said(settings.__doc__ or "")
    parameters = []
    for field in dataclasses.fields(settings):
        declared = dataclasses.replace(field.metadata[_KEY], help=said.get(field.name, ""))
        field.metadata = types.MappingProxyType({_KEY: declared})
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(field.name, keyword, default=field.default))
    settings.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return settings


def _said(documentation: str) -> dict[str, str]:
    """What a class says of its arguments."""
    said: dict[str, str] = {}
    entries = inspect.cleandoc(documentation).partition("\nArgs:\n")[2].partition("\n\n")[0]
    for entry in re.split(r"\n    (?! )", "\n" + entries)[1:]:
        name, _, text = entry.partition(": ")
        said[name] = " ".join(text.split())
    return said


# Checks


def check_options(settings: Any) -> None:
    """Verify all options of a dataclass's object, and store them as their checks return them.

    Raises:
        ConfigError: a value is not supported, or out of range.
    """
    for name, _, _ in options_of(type(settings)):
        object.__setattr__(settings, name, checked(type(settings), name, getattr(settings, name)))


def checked(settings: type, name: str, value: Any) -> Any:
    """A value of an option, as it is to be stored; NumPy's numbers become Python's.

    Raises:
        ConfigError: it is not supported, or out of range.
    """
    return value_checks(settings)[name](name, value.item() if isinstance(value, np.generic) else value)


@functools.cache
def value_checks(settings: type) -> Mapping[str, Callable[[str, Any], Any]]:
    """Of each option the function of its name and a value that returns what to store, or raises."""
    return {name: functools.partial(_checked, *found) for name, found in declarations(settings).items()}


def _checked(declared: Option, kinds: frozenset[Any], name: str, value: Any) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    if declared.check is not None:
        return declared.check(name, value)
    if declared.choices:
        check_choice(name, value, declared.choices)
    elif bool in kinds and not isinstance(value, bool):
        raise ConfigError(f"{name}={shown(value)} must be True or False")
    elif int in kinds or float in kinds:
        check_range(name, value, *declared.within, is_integer=float not in kinds)
    elif os.PathLike in kinds:
        return checked_path(name, value)
    return value


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Verify that a value is one of several names.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(
            f"{name}={shown(value)} is not supported; {did_you_mean(value, choices)}use one of "
            f"{', '.join(choices)}"
        )


def check_range(name: str, value: object, low: float, high: float, *, is_integer: bool = True) -> None:
    """Verify that a value is a number within limits.

    Raises:
        ConfigError: it is not.
    """
    kinds = (int,) if is_integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        limits = f"an integer from {low} to {high}" if is_integer else f"a number from {low:g} to {high:g}"
        raise ConfigError(f"{name}={shown(value)} must be {limits}")


def is_encodable(text: str) -> bool:
    """Whether the system takes a text as a path or an argument: no null byte, and no lone surrogate."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def checked_path(name: str, value: object) -> str:
    """A path, with the user's home for a tilde at its front.

    Raises:
        ConfigError: it is none.
    """
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{name}={shown(value)} must be a path")
    path = os.path.expanduser(path)
    if not is_encodable(path):
        raise ConfigError(f"{name}={path[:80]!r} holds characters that no path has: name another file")
    if len(os.fsencode(path)) > _MAX_PATH or any(len(os.fsencode(p)) > _MAX_NAME for p in path.split(os.sep)):
        raise ConfigError(
            f"{name} is a path of {len(path)} characters ({path[:40]!r}...); at most {_MAX_PATH} bytes, and "
            f"{_MAX_NAME} between two slashes, can be one"
        )
    return path


def list_of(what: str) -> Callable[[str, Any], Any]:
    """A check for a list of `what`."""

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ConfigError(f"{name}={shown(value)} must be a list of {what}")
        return value

    return check


@functools.cache
def declarations(settings: type) -> Mapping[str, tuple[Option, frozenset[Any]]]:
    """Of each option the declaration, and the types that its values may have."""
    hints = typing.get_type_hints(settings)
    found = {}
    for name, _, declared in options_of(settings):
        one_or_more = (
            typing.get_args(hints[name]) if typing.get_origin(hints[name]) is types.UnionType else ()
        )
        kinds = frozenset(typing.get_origin(kind) or kind for kind in one_or_more or (hints[name],))
        found[name] = declared, kinds
    return found


# The command line


def flag(name: str) -> str:
    """What the command line calls a setting."""
    return "--" + name.replace("_", "-")


def add_flags(
    parser: argparse._ActionsContainer, settings: type, names: Iterable[str] = (), **defaults: Any
) -> None:
    """Add the flags of a class's options, or of those named; what is not given is left to the class.

    But for `defaults`, which stand for the class's.
    """
    wanted = {*names}
    for name, default, declared in options_of(settings):
        if declared.flag is None or (wanted and name not in wanted):
            continue
        _, kinds = declarations(settings)[name]
        text = declared.help.partition(". ")[0].rstrip(".") + _default(defaults.get(name, default), declared)
        keywords: dict[str, Any] = {
            "dest": name,
            "default": defaults.get(name, argparse.SUPPRESS),
            "help": text.replace("%", "%%"),
        }
        if bool in kinds:
            keywords["action"] = argparse.BooleanOptionalAction
        else:
            of_kind, metavar = next(one for kind, one in _OF_KINDS if kind in kinds or kind is str)
            parse = declared.parse or of_kind
            keywords["metavar"] = declared.metavar or _METAVARS.get(parse, metavar)
            if declared.choices:
                keywords["metavar"] = f"{{{','.join(declared.choices)}}}"
            if declared.is_repeated:
                keywords["action"] = "append"
            else:
                keywords["type"] = _converter(settings, name, parse)
        parser.add_argument(flag(declared.flag or name), *declared.short, **keywords)


def given(args: argparse.Namespace, settings: type) -> dict[str, Any]:
    """The options of a class that the command line gave."""
    return {
        name: getattr(args, name)
        for name, _, declared in options_of(settings)
        if declared.flag is not None and hasattr(args, name)
    }


def _converter(settings: type, name: str, parse: Callable[[str], Any]) -> Callable[[str], Any]:
    @functools.wraps(parse)  # argparse takes its name for "invalid ... value"
    def convert(text: str) -> Any:
        value = parse(text)
        try:
            return checked(settings, name, value)
        except JaxllmError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _default(value: Any, declared: Option) -> str:
    if value is None or value == ():
        return ""
    if declared.parse is byte_count:
        unit, factor = next(one for one in _UNITS if value % one[1] == 0)
        value = f"{value // factor}{unit}"
    if isinstance(value, bool):
        value = "on" if value else "off"
    return f" (default: {value:g})" if isinstance(value, float) else f" (default: {value})"


# What the command line's text means


def byte_count(text: str) -> int:
    """A number of bytes, with an optional suffix KiB, MiB or GiB."""
    for suffix, factor in _UNITS:
        if text.endswith(suffix):
            number = float(text.removesuffix(suffix))
            if not 0 < number < math.inf:
                raise ValueError(text)
            return int(number * factor)
    return int(text)


def bound(text: str) -> tuple[str, float]:
    """A name and the most that it may be, with a colon between."""
    name, _, most = text.partition(":")
    if not 0 < float(most) < math.inf:
        raise ValueError(text)
    return name, float(most)


bound.__name__ = "NAME:MILLISECONDS"  # what argparse calls it in "invalid ... value"


def sizes(text: str) -> list[int]:
    """Numbers that commas separate."""
    return [int(size) for size in text.split(",")]


def texts(text: str) -> list[str]:
    """Texts that commas separate."""
    return text.split(",")


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        values = parse_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"invalid JSON object: {error}") from None
    if not isinstance(values, dict):
        raise argparse.ArgumentTypeError(f"invalid JSON object: {text[:80]!r} is of another type")
    return values


# What argparse calls them in "invalid ... value".
byte_count.__name__, sizes.__name__, json_object.__name__ = "byte count", "list of sizes", "JSON object"
_METAVARS: Mapping[Any, str] = {byte_count: "BYTES", sizes: "N,N,...", json_object: "JSON", texts: "NAME,..."}
_OF_KINDS = ((float, (float, "X")), (int, (int, "N")), (os.PathLike, (str, "PATH")), (str, (str, "NAME")))
