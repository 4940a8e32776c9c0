"""Weights that the caller has, onto the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import WeightsError, shown
from jaxllm.models.architecture import ModelConfig
from jaxllm.models.linear_weights import Weight
from jaxllm.models.registry import abstract_params


def check_given(config: ModelConfig, params: Any) -> None:
    """Verify that these are weights of a model, by name.

    Raises:
        WeightsError: they are not; the message names what is missing, unknown or misshapen.
    """
    if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
        raise WeightsError(
            "params must be weights by name, as jaxllm.loading.load_params returns, not "
            f"{shown(list(params)[:3]) if isinstance(params, Mapping) else type(params).__name__}"
        )
    expected = abstract_params(config, "float32")
    wrong = []
    for name in expected.keys() & params.keys():
        value, shape = params[name], expected[name].shape
        if isinstance(value, Weight):
            wrong.append(f"{name} is of codes: pass numbers, as load_params(folder, config) returns")
        elif getattr(value, "shape", None) != shape:
            wrong.append(f"{name} is {list(getattr(value, 'shape', ()))}, expected {list(shape)}")
        elif not isinstance(value, jax.Array | np.ndarray):
            wrong.append(f"{name} is a {type(value).__qualname__}, expected an array of JAX or NumPy")
        elif isinstance(value, jax.Array) and value.is_deleted():
            wrong.append(f"{name} is deleted: it was donated, or its memory given back")
        elif not jnp.issubdtype(value.dtype, jnp.floating):
            wrong.append(f"{name} is {value.dtype}, expected floating-point numbers")
    problems = {
        "missing": expected.keys() - params.keys(),
        "unexpected": params.keys() - expected.keys(),
        "unfit": wrong,
    }
    if any(problems.values()):
        listed = "; ".join(f"{kind}: {', '.join(sorted(items))}" for kind, items in problems.items() if items)
        raise WeightsError(f"params do not match the {config.architecture} configuration: {listed}")


def iter_given(
    params: Mapping[str, Any], dtype: str, placement: jax.Device | jax.sharding.Sharding
) -> Iterator[tuple[str, jax.Array]]:
    """Weights on a device, one after another, as arrays of their own: the caller may donate or change theirs.

    Args:
        params: arrays by name, of JAX or NumPy, wherever they are.
        dtype: of the result.
        placement: where the weights go.
    """
    for name, value in params.items():
        placed = jax.device_put(value, placement)  # which may share the caller's memory
        yield name, jnp.copy(placed) if placed.dtype == dtype else placed.astype(dtype)
