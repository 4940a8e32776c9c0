"""Types under `jax.shard_map`: what a loop carries must vary over the devices from the start."""

from __future__ import annotations

import jax
from jax import lax


def varying_as(x: jax.Array, *others: jax.Array) -> jax.Array:
    """The same array, of a type that varies over the devices wherever one of `others` does.

    All have at least one dimension. Nothing of them is written into it, and compiled programs have no trace
    of this. The functions that JAX has for it changed between its versions.
    """
    for other in others:
        nothing = other[:0].astype(x.dtype).reshape(0, *x.shape[1:])
        x = lax.dynamic_update_slice(x, nothing, (0,) * x.ndim)
    return x
