"""Prompts on several devices, each with some of a step's rows (context parallelism).

Every device has all weights and the whole pool, or the same part of both. Of the rows of a step with prompts
each takes its share, one after another, through all layers; in each layer it gives the others the keys and
values of its rows, which all of them store. So a device computes 1 / N of a prompt, and the pools stay alike:
decoding needs no other device, and all compute the same of it. Exact: each row attends to the same keys as on
one device. SGLang and vLLM gather keys and values in this way, too (prefill context parallelism); Ring
Attention (Liu et al. 2023) passes them on instead, for devices none of which could hold them all.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm import pallas_kernels
from jaxllm.executor.placement import CONTEXT
from jaxllm.executor.step_rows import DecodeInputs, PrefillInputs
from jaxllm.models.layers import Attend, whole
from jaxllm.pallas_kernels.heads import RopeTable, rotated_heads
from jaxllm.pallas_kernels.kv_layout import layout_of


class OwnRows:
    """A device's rows of a step, along `CONTEXT`: of those in use as many for each of N devices.

    Each has arrays of R / N rows, of which the last ones may be padding: rows of its neighbour.

    Args:
        num_rows: R, those of the program.
        num_contexts: N, which divides R.
        in_use: the rows of the step, from the first on, an int32 scalar.
    """

    def __init__(self, num_rows: int, num_contexts: int, in_use: jax.Array) -> None:
        self.num_rows, self.size = num_rows, num_rows // num_contexts
        self._share = (in_use + num_contexts - 1) // num_contexts
        self.first = lax.axis_index(CONTEXT) * self._share
        self.in_use = jnp.clip(in_use - self.first, 0, self._share)

    def of(self, rows: jax.Array) -> jax.Array:
        """This device's of all rows [R, ...]."""
        return lax.dynamic_slice_in_dim(rows, self.first, self.size)

    def gathered(self, rows: jax.Array) -> jax.Array:
        """[R, ...], those of all devices [R / N, ...] one after another, with the padding of each."""
        return lax.all_gather(rows, CONTEXT, tiled=True)

    def in_order(self, gathered: jax.Array) -> jax.Array:
        """All rows [R, ...] of what was gathered; what is behind those in use means nothing."""
        owner, place = jnp.divmod(jnp.arange(self.num_rows), jnp.maximum(self._share, 1))
        return gathered[jnp.minimum(owner * self.size + place, self.num_rows - 1)]

    def slot_mapping(self, slot_mapping: jax.Array) -> jax.Array:
        """Slots [R] int32 in the order of what is gathered: -1 in padding."""
        owner, place = jnp.divmod(jnp.arange(self.num_rows), self.size)
        return jnp.where(place < self._share, slot_mapping[owner * self._share + place], -1)

    def places(self, rows: jax.Array) -> jax.Array:
        """Where rows of the step are in this device's: before them 0, behind them `in_use`."""
        return jnp.clip(rows - self.first, 0, self.in_use)

    def decode(self, decode: DecodeInputs) -> DecodeInputs:
        """What is decoded in its first rows."""
        count = decode.lengths.shape[0]
        size = min(count, self.size)
        # Behind those that are decoded there are rows of none: length 0.
        padded = (jnp.pad(part, [(0, self.size), *[(0, 0)] * (part.ndim - 1)]) for part in decode)
        first = jnp.minimum(self.first, count)
        own = DecodeInputs(*(lax.dynamic_slice_in_dim(part, first, size) for part in padded))
        return own._replace(lengths=jnp.where(jnp.arange(size) < self.in_use, own.lengths, 0))

    def prefill(self, prefill: PrefillInputs) -> PrefillInputs:
        """The parts of chunks in its rows: each ends where they end, and may be of no tokens."""
        ends = prefill.query_starts[1:]
        behind = jnp.maximum(ends - (self.first + self.in_use), 0)
        lengths = jnp.maximum(prefill.lengths - behind, 0)
        return prefill._replace(query_starts=self.places(prefill.query_starts), lengths=lengths)


class SharedPrompts(Attend):
    """Attention of a device's rows, after all devices' keys and values are in the pool; it carries the pool.

    Args:
        pool: of this device.
        slot_mapping: [R] int32, of all rows.
        decode, prefill: of all rows.
        own: this device's.
        implementation: of attention.
    """

    def __init__(
        self,
        pool: jax.Array,
        slot_mapping: jax.Array,
        decode: DecodeInputs | None,
        prefill: PrefillInputs,
        own: OwnRows,
        implementation: str | None,
    ) -> None:
        self.pool, self._slot_mapping, self._own = pool, own.slot_mapping(slot_mapping), own
        self._decode = None if decode is None else own.decode(decode)
        self._prefill = own.prefill(prefill)
        self._implementation = implementation
        self.num_rows = own.in_use

    def __call__(
        self,
        layer: int,
        qkv: jax.Array,
        rope: RopeTable | None,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        dtype: jnp.dtype | None = None,
    ) -> jax.Array:
        """See `Attend`."""
        num_kv_heads = self.pool.shape[3]
        named: dict[str, Any] = {"layer": layer, "implementation": self._implementation}
        head_dim = layout_of(self.pool).head_dim
        q, k, v = rotated_heads(whole(qkv, dtype), rope, num_kv_heads, head_dim)
        both = self._own.gathered(jnp.concatenate([k, v], axis=1))
        k, v = both[:, :num_kv_heads], both[:, num_kv_heads:]
        self.pool = pallas_kernels.write_kv(self.pool, k, v, self._slot_mapping, **named)
        options = {**named, "scale": scale, "window": window, "soft_cap": soft_cap}
        prompts = self._prefill
        chunks = prompts.block_tables, prompts.query_starts, prompts.lengths, prompts.num_seqs[0]
        out = pallas_kernels.prefill_attention(q, self.pool, *chunks, **options)
        if self._decode is None:
            return out
        rows, lengths = self._decode.block_tables, self._decode.lengths
        decoded = pallas_kernels.decode_attention(q[: len(lengths)], self.pool, rows, lengths, **options)
        return out.at[: len(lengths)].add(decoded)  # either is 0 in the other's rows
