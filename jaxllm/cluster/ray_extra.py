"""The optional dependency: Ray, imported when it is needed."""

from __future__ import annotations

import importlib
from typing import Any

from jaxllm.errors import ConfigError, JaxllmError


def require_ray(*modules: str) -> Any:
    """The package `ray`, with some of its modules imported.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        ray = importlib.import_module("ray")
        for module in modules:
            importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f'this needs Ray, which is not installed ({error}): pip install "jaxllm[ray]"'
        ) from None
    return ray


def own_error(error: BaseException) -> BaseException:
    """The error of ours that made something fail elsewhere, or else the error as it is."""
    ray = require_ray("ray.exceptions")
    cause: Any = error
    while cause is not None:
        if isinstance(cause, JaxllmError) and not isinstance(
            cause, ray.exceptions.RayError
        ):  # not Ray's copy
            return cause
        cause = getattr(cause, "cause", None) or cause.__cause__
    return error
