"""Random weights, for benchmarks and tests of models whose weights are not at hand."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxllm.loading.safetensors_format import Placement
from jaxllm.models.architecture import ModelConfig
from jaxllm.models.registry import abstract_params

_DEVIATION = 0.02


def dummy_params(
    config: ModelConfig, dtype: str, *, seed: int = 0, placement: Placement = None
) -> Iterator[tuple[str, jax.Array]]:
    """Yield every weight, made on the device from `seed`: normal of deviation 0.02, norms 1, biases 0."""
    key = jax.device_put(jax.random.key(seed), placement)
    for index, (name, struct) in enumerate(abstract_params(config, dtype).items()):
        if name.endswith("bias"):
            yield name, jnp.zeros(struct.shape, dtype, device=placement)
        elif "norm" in name:
            yield name, jnp.ones(struct.shape, dtype, device=placement)
        else:
            yield name, _normal(key, index, struct.shape, dtype)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key: jax.Array, index: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    values = jax.random.normal(jax.random.fold_in(key, index), shape, dtype)
    return values * jnp.asarray(_DEVIATION, dtype)
