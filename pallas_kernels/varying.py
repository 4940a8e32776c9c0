"""Types under `jax.shard_map`: what a loop carries must vary over the devices from the start."""

from __future__ import annotations

import jax
from jax import lax


def varying_as(x: jax.Array, *others: jax.Array) -> jax.Array:
    """The same array, of a type that varies over the devices wherever one of `others` does.

    Nothing of them is written into it, and compiled programs have no trace of this. The functions that JAX
    has for it changed between its versions.
    """
    rows = x.reshape(1) if x.ndim == 0 else x
    for other in others:
        nothing = other.reshape(-1)[:0].astype(x.dtype).reshape(0, *rows.shape[1:])
        rows = lax.dynamic_update_slice(rows, nothing, (0,) * rows.ndim)
    return rows.reshape(x.shape)
