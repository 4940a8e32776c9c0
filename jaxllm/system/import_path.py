"""What users name by an import path: policies, predictors, logits processors, attention."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from jaxllm.errors import ConfigError, did_you_mean


def imported(path: str, what: str) -> Any:
    """The object that "module:attribute" names, which is to be `what`.

    Raises:
        ConfigError: there is no such attribute, or importing it fails.
    """
    name, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(name), attribute)
    except Exception as error:
        hint = ""
        if not attribute:
            hint = "; name it as 'module:attribute'"
        elif isinstance(error, ModuleNotFoundError):
            hint = "; a module of your own must be in the current folder, on PYTHONPATH, or installed"
        elif isinstance(error, AttributeError) and (module := sys.modules.get(name)) is not None:
            public = [one for one in dir(module) if not one.startswith("_")]
            hint = f"; {did_you_mean(attribute, public)}".rstrip("; ")
        raise ConfigError(f"cannot import {what} {path!r}: {type(error).__name__}: {error}{hint}") from error
