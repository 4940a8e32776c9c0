"""What a measurement leaves: where it comes from, and compact JSON. Light to import."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_WIDTH = 100


def command_line(words: Sequence[str]) -> str:
    """The command as it was given, absolute paths shortened to their last part."""
    return shlex.join(re.sub(r"(^|=)/(?:[^/]+/)*", r"\1", word) for word in words)


def about(words: Sequence[str]) -> dict[str, Any]:
    """Where results come from: the command, what it ran on, and versions."""
    from jaxllm.system import hardware

    return {
        "command": command_line(words),
        "hardware": hardware.describe_hardware(),
        "versions": hardware.versions(),
    }


def to_json(value: Any, indent: int = 0) -> str:
    """JSON with a row a line: what is short, and any object in a list, takes one line."""
    line = json.dumps(value)
    short = len(line) + indent <= _WIDTH or not isinstance(value, Mapping | list | tuple) or not value
    if short:
        return line
    pad = " " * (indent + 1)
    if isinstance(value, Mapping):
        parts = [f"{json.dumps(str(key))}: {to_json(item, indent + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(pad + part for part in parts) + "\n" + " " * indent + "}"
    parts = [json.dumps(item) for item in value]
    if not any(isinstance(item, Mapping | list | tuple) for item in value):
        return line  # numbers
    return "[\n" + ",\n".join(pad + part for part in parts) + "\n" + " " * indent + "]"


def write_json(path: Path, values: Any) -> None:
    """Write results to a file, rounded to what a measurement means (six digits)."""
    path.write_text(to_json(_rounded(values)) + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
