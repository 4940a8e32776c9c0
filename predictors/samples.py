"""Measurements on disk: what predictors were fitted to, for whoever wants to fit others."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError, shown
from jaxllm.predictors.base import COST_KINDS, CostKind, ModelShape
from jaxllm.predictors.features import FEATURE_NAMES
from jaxllm.predictors.regression import Sample
from jaxllm.system.options import checked_path

_FORMAT = "jaxllm-samples"
_NO_FEATURES = ("dtype", "kv_dtype", "weights", "head")


def save_samples(
    path: str | os.PathLike[str],
    samples: Mapping[CostKind, Sequence[Sample]],
    facts: Mapping[str, Any],
) -> None:
    """Write samples as JSON, a line each; `facts` say what they were measured on.

    Raises:
        ConfigError: the file cannot be written.
    """
    columns = {kind: [*FEATURE_NAMES[kind], "seconds"] for kind in samples}
    head = {"format": _FORMAT, **facts, "columns": columns}
    kinds = []
    for kind, of_kind in samples.items():
        rows = ",\n".join(json.dumps([*one.features, one.seconds]) for one in of_kind)
        kinds.append(f"{json.dumps(kind)}: [\n{rows}]")
    text = json.dumps(head, indent=1)[:-2] + ',\n"samples": {\n' + ",\n".join(kinds) + "}}\n"
    path = checked_path("path", path)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the samples {os.fspath(path)!r}: {error.strerror}") from error


def load_samples(path: str | os.PathLike[str]) -> dict[CostKind, list[Sample]]:
    """Read what `save_samples` wrote.

    Raises:
        ConfigError: the file is missing or malformed.
    """
    content = _read(path)
    try:
        return {
            kind: [Sample(kind, tuple(row[:-1]), row[-1]) for row in content["samples"][kind]]
            for kind in COST_KINDS
            if kind in content["samples"]
        }
    except (ValueError, KeyError, TypeError, IndexError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _malformed(path, error) from error


def check_formats(path: str | os.PathLike[str], model: ModelShape) -> None:
    """Verify that samples are of weights and KV as a model holds them, which their features do not tell.

    Those of a file that does not say what it was measured on are taken.

    Raises:
        ConfigError: they are of other formats, or the file is missing or malformed.
    """
    found = _read(path).get("model") or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a file of samples: model={shown(found)}")
    pairs = {name: (found.get(name, "auto"), getattr(model, name)) for name in _NO_FEATURES if found}
    others = [f"{name} {shown(was)}, not {now!r}" for name, (was, now) in pairs.items() if was != now]
    if others:
        raise ConfigError(
            f"{os.fspath(path)!r} was measured with {'; '.join(others)}: costs of one are not those of "
            "another. Leave it out, or profile with the same formats"
        )


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    path = checked_path("path", path)
    try:
        content: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ConfigError(f"{path} is not a file of samples: its format is {content['format']!r}")
    except OSError as error:
        raise ConfigError(f"cannot read the samples {os.fspath(path)!r}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _malformed(path, error) from error
    return content


def _malformed(path: str | os.PathLike[str], error: Exception) -> ConfigError:
    return ConfigError(f"{path} is not a file of samples: {type(error).__name__}: {error}")
