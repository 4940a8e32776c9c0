"""The heads of a fused projection, rotated: for back-ends that take q, k and v apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp

RopeTable = tuple[jax.Array, jax.Array]
"""Cosines and sines of each row's position: two arrays [T, head_dim / 2] float32."""


def rotated_heads(
    qkv: jax.Array, rope: RopeTable | None, num_kv_heads: int, head_dim: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k and v by head of a projection `[T, (num_heads + 2 * num_kv_heads) * head_dim]`.

    Returns:
        `[T, num_heads, head_dim]`, and twice `[T, num_kv_heads, head_dim]`; q and k are rotated if there is a
        table.
    """
    kv_size = num_kv_heads * head_dim
    parts = jnp.split(qkv, (qkv.shape[1] - 2 * kv_size, qkv.shape[1] - kv_size), axis=-1)
    q, k, v = (part.reshape(part.shape[0], -1, head_dim) for part in parts)
    return (q, k, v) if rope is None else (apply_rope(q, rope), apply_rope(k, rope), v)


def apply_rope(x: jax.Array, table: RopeTable) -> jax.Array:
    """Rotate `x` [T, heads, head_dim]: dimension i is paired with i + head_dim / 2, as in transformers."""
    cos, sin = (part[:, None, :] for part in table)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
