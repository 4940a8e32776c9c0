"""JAX's settings that change what code means: ours is written for the defaults, whatever the user has set."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import jax

_P = ParamSpec("_P")
_R = TypeVar("_R")

_DEFAULTS: dict[str, tuple[Any, Callable[[Any], AbstractContextManager[object]]]] = {
    "jax_enable_x64": (False, jax.enable_x64),
    "jax_numpy_rank_promotion": ("allow", jax.numpy_rank_promotion),
    "jax_numpy_dtype_promotion": ("standard", jax.numpy_dtype_promotion),
}
_GUARDS = ("host_to_device", "device_to_device", "device_to_host")


def under_jax_defaults(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that runs, and is traced, under JAX's default types, promotions and transfer guards.

    The caller's settings are as they were when it returns. It takes 32-bit numbers, or converts what it is
    given before it computes with it.
    """

    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        changed = [
            make(value) for name, (value, make) in _DEFAULTS.items() if getattr(jax.config, name) != value
        ]
        guards = (getattr(jax.config, f"jax_transfer_guard_{name}") for name in _GUARDS)
        if any(guard not in (None, "allow") for guard in guards):
            changed.append(jax.transfer_guard("allow"))
        if not changed:
            return function(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for setting in changed:
                stack.enter_context(setting)
            return function(*args, **kwargs)

    return wrapped
