"""What users name by an import path: policies, logits processors, attention."""

from __future__ import annotations

import importlib
from typing import Any

from jaxllm.errors import ConfigError


def imported(path: str, what: str) -> Any:
    """The object that "module:attribute" names, which is to be `what`.

    Raises:
        ConfigError: there is no such attribute, or importing it fails.
    """
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        hint = ""
        if not attribute:
            hint = "; name it as 'module:attribute'"
        elif isinstance(error, ModuleNotFoundError):
            hint = "; a module of your own must be in the current folder, on PYTHONPATH, or installed"
        raise ConfigError(f"cannot import {what} {path!r}: {type(error).__name__}: {error}{hint}") from error
