"""JSON as people write it: what Python's parser would let pass, or fail of, is an error in words."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxllm.errors import ConfigError

_MAX_DIGITS = 100
_MAX_DEPTH = 128
_ESCAPES = re.compile(rb"\\.", re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b'[]{}"'))
_STEPS = [1 if byte in b"[{" else -1 for byte in range(256)]


def parse(text: str | bytes) -> Any:
    """A JSON value.

    Raises:
        ValueError: it is none, names a key twice, is nested too deeply, or holds a number that is too large.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    _check_depth(text)
    return json.loads(
        text,
        parse_constant=_refuse_constant,
        parse_int=_integer,
        parse_float=_number,
        object_pairs_hook=_object,
    )


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint.

    Raises:
        ConfigError: the file cannot be read, or holds no such thing.
    """
    try:
        values = parse(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is not valid JSON: {error}; download the file again") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{str(path)!r} must hold a JSON object, not {type(values).__name__}")
    return values


def _check_depth(text: str) -> None:
    """Verify that there is no more nesting than all that goes through a value later can follow."""
    if text.count("[") + text.count("{") <= _MAX_DEPTH:
        return
    data = text.encode("utf-8", "replace")
    if b"\\" in data:
        data = _ESCAPES.sub(b"", data)
    brackets = b"".join(data.translate(None, _NO_BRACKETS).split(b'"')[::2])  # outside of strings
    if max(itertools.accumulate(map(_STEPS.__getitem__, brackets)), default=0) > _MAX_DEPTH:
        raise ValueError(f"it is nested too deeply; at most {_MAX_DEPTH} levels are read")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(
            f"an integer of {len(digits)} digits ({digits[:10]}...); at most {_MAX_DIGITS} are read"
        )
    return int(digits)


def _number(text: str) -> float:
    number = float(text)
    if number in (float("inf"), -float("inf")):
        raise ValueError(f"{text[:20]} is larger than all numbers of 64 bits")
    return number


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} is there twice; keep one")
    return values
