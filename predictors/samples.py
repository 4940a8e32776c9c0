"""Measurements on disk: what predictors were fitted to, for whoever wants to fit others."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import COST_KINDS, CostKind
from jaxllm.predictors.regression import FEATURE_NAMES, Sample

_FORMAT = "jaxllm-samples"


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
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the samples {os.fspath(path)!r}: {error.strerror}") from error


def load_samples(path: str | os.PathLike[str]) -> dict[CostKind, list[Sample]]:
    """Read what `save_samples` wrote.

    Raises:
        ConfigError: the file is missing or malformed.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ConfigError(f"{path} is not a file of samples: its format is {content['format']!r}")
        return {
            kind: [Sample(kind, tuple(row[:-1]), row[-1]) for row in content["samples"][kind]]
            for kind in COST_KINDS
            if kind in content["samples"]
        }
    except OSError as error:
        raise ConfigError(f"cannot read the samples {os.fspath(path)!r}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not a file of samples: {type(error).__name__}: {error}") from error
