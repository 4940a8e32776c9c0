"""How keys and values lie in a pool: what the heads of a block's tokens become, and back.

A pool is one array, so that a block's copies, swaps and files move all that belongs to it, bit for bit:

    pool[block, layer, 0 for K or 1 for V, KV head, token, width]

Of floats `width` is the size of heads. Of int8 there are four bytes more, 1 / 127 of a head's largest number
as float32. They lie behind the codes of all tokens of the block, so that codes can be read 16 bytes at once:

    a KV head of a block of int8    [tokens, head_dim] codes, then [tokens] float32
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.errors import ConfigError
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
        """Heads [..., tokens, head_dim] of floats as the pool has them, [..., tokens, width]."""
        if self.dtype == "int8":
            codes, units = self._coded(heads)
            shape = (*codes.shape[:-2], -1)
            parts = codes.reshape(shape), lax.bitcast_convert_type(units, jnp.int8).reshape(shape)
            return jnp.concatenate(parts, axis=-1).reshape(*heads.shape[:-1], self.width)
        return self._as_floats(heads)

    def loaded(self, rows: jax.Array) -> jax.Array:
        """What the pool has, [..., tokens, width], as float32 [..., tokens, head_dim]."""
        if self.dtype == "int8":
            num_tokens = rows.shape[-2]
            flat = rows.reshape(*rows.shape[:-2], -1)
            codes, units = jnp.split(flat, [num_tokens * self.head_dim], axis=-1)
            units = lax.bitcast_convert_type(units.reshape(*units.shape[:-1], num_tokens, 4), jnp.float32)
            codes = codes.reshape(*rows.shape[:-1], self.head_dim)
            return codes.astype(jnp.float32) * units[..., None]
        return rows.astype(jnp.float32)

    def pieces(
        self, heads: jax.Array, offset: jax.Array, block_size: int
    ) -> Iterator[tuple[jax.Array, jax.Array]]:
        """What writing heads [..., head_dim] puts where, in arrays of the pool's dtype.

        Each piece is [..., n], and its place in the `block_size * width` numbers of a head of a block where
        the token has this `offset`.
        """
        if self.dtype == "int8":
            codes, units = self._coded(heads)
            yield codes, offset * self.head_dim
            yield lax.bitcast_convert_type(units, jnp.int8), block_size * self.head_dim + 4 * offset
        else:
            yield self._as_floats(heads), offset * self.head_dim

    def _as_floats(self, heads: jax.Array) -> jax.Array:
        if self.dtype.startswith("fp8"):
            most = float(jnp.finfo(self.array_dtype).max)
            exact = heads.astype(jnp.float32)
            heads = jnp.where(jnp.abs(exact) < jnp.inf, jnp.clip(exact, -most, most), jnp.nan)
        return heads.astype(self.array_dtype)

    def _coded(self, heads: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Codes [..., head_dim], and what a code of 1 stands for, [...] float32."""
        exact = heads.astype(jnp.float32)
        units = jnp.maximum(largest(exact, -1), LEAST) * (1 / 127)
        return jnp.round(exact / units[..., None]).astype(jnp.int8), units


def layout_of(pool: jax.Array | jax.ShapeDtypeStruct) -> KVLayout:
    """A pool's layout.

    Raises:
        ConfigError: it is of no dtype that pools have.
    """
    names = {jnp.dtype(kind): name for name, kind in KV_DTYPES.items()}
    name = names.get(jnp.dtype(pool.dtype))
    if name is None:
        raise ConfigError(
            f"a pool of {pool.dtype} cannot hold KV: make it of {', '.join(KV_DTYPES)}, as init_pool does"
        )
    width = pool.shape[5]
    return KVLayout(name, width - 4 if name == "int8" else width)
