"""How keys and values lie in a pool: what a head of a token becomes, and back.

A pool is one array, so that a block's copies, swaps and files move all that belongs to it, bit for bit:

    pool[block, layer, 0 for K or 1 for V, KV head, token, width]

Of floats `width` is the size of heads. Of int8 there are four bytes more, the head's scale: 1 / 127 of its
largest number, as float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.pallas_kernels.numbers import largest
from jaxllm.system.dtypes import KV_DTYPES, kv_row_bytes

LEAST = 1e-10
"""Of what counts as a head's largest number."""


class KVLayout(NamedTuple):
    """Of a pool.

    Attributes:
        dtype: one of `jaxllm.system.dtypes.KV_DTYPES`.
        head_dim: size of heads.
    """

    dtype: str
    head_dim: int

    @property
    def array_dtype(self) -> jnp.dtype:
        """Of the pool."""
        return jnp.dtype(KV_DTYPES[self.dtype])

    @property
    def width(self) -> int:
        """Length of the pool's last axis."""
        return kv_row_bytes(self.dtype, self.head_dim) // self.array_dtype.itemsize

    def stored(self, heads: jax.Array) -> jax.Array:
        """Heads [..., head_dim] of floats as the pool has them, [..., width]."""
        if self.dtype == "int8":
            exact = heads.astype(jnp.float32)
            units = jnp.maximum(largest(exact, -1), LEAST) * (1 / 127)
            codes = jnp.round(exact / units[..., None]).astype(jnp.int8)
            return jnp.concatenate([codes, lax.bitcast_convert_type(units, jnp.int8)], axis=-1)
        if self.dtype.startswith("fp8"):
            most = float(jnp.finfo(self.array_dtype).max)
            exact = heads.astype(jnp.float32)
            heads = jnp.where(jnp.abs(exact) < jnp.inf, jnp.clip(exact, -most, most), jnp.nan)
        return heads.astype(self.array_dtype)

    def loaded(self, rows: jax.Array) -> jax.Array:
        """What the pool has, [..., width], as float32 [..., head_dim]."""
        if self.dtype == "int8":
            codes, scales = rows[..., : self.head_dim], rows[..., self.head_dim :]
            return codes.astype(jnp.float32) * lax.bitcast_convert_type(scales, jnp.float32)[..., None]
        return rows.astype(jnp.float32)


def layout_of(pool: jax.Array | jax.ShapeDtypeStruct) -> KVLayout:
    """A pool's layout."""
    names = {jnp.dtype(kind): name for name, kind in KV_DTYPES.items()}
    name = names[jnp.dtype(pool.dtype)]
    width = pool.shape[5]
    return KVLayout(name, width - 4 if name == "int8" else width)
