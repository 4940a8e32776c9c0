"""What a row's largest number is, where numbers that are not finite must not be lost."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def largest(x: jax.Array, axis: int, *, keepdims: bool = False) -> jax.Array:
    """Largest absolute number along an axis; NaN where one is not finite.

    XLA's reductions on CPUs drop NaNs of large arrays.
    """
    sizes = jnp.abs(x)
    are_finite = jnp.all(sizes < jnp.inf, axis=axis, keepdims=keepdims)
    return jnp.where(are_finite, jnp.max(sizes, axis=axis, keepdims=keepdims), jnp.nan)
