"""JAX's settings that change what code means: ours is written for the defaults, whatever the user has set."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
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
_GUARDS = tuple(
    f"jax_transfer_guard_{name}" for name in ("host_to_device", "device_to_device", "device_to_host")
)
_FREE = (None, "allow")  # what a guard says that forbids nothing
_settings = operator.attrgetter(*_DEFAULTS, *_GUARDS)
_NEUTRAL = frozenset(
    itertools.product(*([default] for default, _ in _DEFAULTS.values()), *(_FREE for _ in _GUARDS))
)
"""Settings under which nothing is to be changed."""


def under_jax_defaults(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that runs, and is traced, under JAX's default types, promotions and transfer guards.

    The caller's settings are as they were when it returns. It takes 32-bit numbers, or converts what it is
    given before it computes with it.
    """

    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if _settings(jax.config) in _NEUTRAL:
            return function(*args, **kwargs)
        changed = [
            make(value) for name, (value, make) in _DEFAULTS.items() if getattr(jax.config, name) != value
        ]
        if any(getattr(jax.config, name) not in _FREE for name in _GUARDS):
            changed.append(jax.transfer_guard("allow"))
        with contextlib.ExitStack() as stack:
            for setting in changed:
                stack.enter_context(setting)
            return function(*args, **kwargs)

    return wrapped
