"""Paged attention and KV writes that JAX can transform: implementation "reference".

Gathers and masks, no loops of unknown length and no kernels: `grad`, `jvp`, `vmap`, `remat` and `jax.export`
take it as they take any program. It reads more than it needs: a step costs about as much as if every
sequence were as long as its block table, and a prompt's rows are scored against each sequence in turn.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.pallas_kernels.kv_layout import layout_of
from jaxllm.pallas_kernels.varying import varying_as

_MASKED = -1e30


def decode_attention(
    q: jax.Array,
    pool: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    layer: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """One query row per sequence; see `pallas_kernels.decode_attention`."""
    key, value = _gathered(pool, block_tables, layer, lengths)
    positions = (lengths - 1)[:, None]
    out = dense_attention(q[:, None], key, value, positions, scale=scale, window=window, soft_cap=soft_cap)
    return jnp.where((lengths > 0)[:, None, None], out[:, 0], 0.0)


def prefill_attention(
    q: jax.Array,
    pool: jax.Array,
    block_tables: jax.Array,
    query_starts: jax.Array,
    lengths: jax.Array,
    num_seqs: jax.Array,
    *,
    layer: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """Ragged causal attention of prompt chunks; see `pallas_kernels.prefill_attention`."""
    key, value = _gathered(pool, block_tables, layer, lengths)
    rows = jnp.arange(q.shape[0], dtype=jnp.int32)
    is_used = jnp.arange(lengths.shape[0]) < num_seqs

    def add(out: jax.Array, seq: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        key, value, start, stop, length, is_used = seq
        is_inside = (rows >= start) & (rows < stop) & is_used
        positions = jnp.where(is_inside, length - (stop - rows), 0)
        found = dense_attention(
            q[None], key[None], value[None], positions[None], scale=scale, window=window, soft_cap=soft_cap
        )
        return jnp.where(is_inside[:, None, None], found[0], out), None

    sequences = key, value, query_starts[:-1], query_starts[1:], lengths, is_used
    return lax.scan(add, varying_as(jnp.zeros_like(q), *sequences), sequences)[0]


def write_kv(
    pool: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array, *, layer: int
) -> jax.Array:
    """Store each token's K and V at its slot; see `pallas_kernels.write_kv`."""
    num_blocks, block_size = pool.shape[0], pool.shape[4]
    block = jnp.where(slot_mapping >= 0, slot_mapping // block_size, num_blocks)
    areas = pool.reshape(*pool.shape[:4], -1)
    for piece, places in layout_of(pool).pieces(
        jnp.stack([k, v], axis=1), slot_mapping % block_size, block_size
    ):
        starts = jnp.stack([block, jnp.full_like(block, layer), places], axis=1)
        areas = lax.scatter(areas, starts, piece, _PIECES, mode=lax.GatherScatterMode.FILL_OR_DROP)
    return areas.reshape(pool.shape)


_PIECES = lax.ScatterDimensionNumbers((1, 2, 3), (0, 1), (0, 1, 4))
"""Of [tokens, 2, KV heads, n], by block, layer and place in the area of a head."""


def dense_attention(
    q: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """Causal attention, computed in float32.

    Args:
        q: `[batch, num_rows, num_heads, head_dim]`.
        key: `[batch, num_keys, num_kv_heads, head_dim]`, at positions 0 and on; `num_heads` is a multiple of
            `num_kv_heads`.
        value: like `key`.
        positions: `[batch, num_rows]` int32, of the queries.
        scale: factor of the scores.
        window: how many of the latest tokens a query sees, its own included; None for all.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; None leaves them.

    Returns:
        `[batch, num_rows, num_heads, head_dim]` in the dtype of `q`.
    """
    num_kv_heads, head_dim = key.shape[2:]
    group = q.shape[2] // num_kv_heads
    queries = q.astype(jnp.float32).reshape(*q.shape[:2], num_kv_heads, group, head_dim)
    exact = lax.Precision.HIGHEST
    scores = jnp.einsum("brhgd,bthd->bhgrt", queries, key.astype(jnp.float32), precision=exact) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    places = jnp.arange(key.shape[1], dtype=jnp.int32)
    seen = places <= positions[..., None]
    if window is not None:
        seen &= places > positions[..., None] - window
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, _MASKED), axis=-1)
    out = jnp.einsum("bhgrt,bthd->brhgd", weights, value.astype(jnp.float32), precision=exact)
    return out.reshape(q.shape).astype(q.dtype)


def _gathered(
    pool: jax.Array, block_tables: jax.Array, layer: int, lengths: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """K and V `[num_seqs, max_blocks * block_size, num_kv_heads, head_dim]`, 0 from each length on."""
    num_blocks, _, _, num_kv_heads, block_size, _ = pool.shape
    layout = layout_of(pool)
    kv, head_dim = layout.loaded(pool[jnp.clip(block_tables, 0, num_blocks - 1), layer]), layout.head_dim
    num_seqs, max_blocks = block_tables.shape
    kv = kv.transpose(2, 0, 1, 4, 3, 5).reshape(2, num_seqs, max_blocks * block_size, num_kv_heads, head_dim)
    is_there = jnp.arange(max_blocks * block_size) < lengths[:, None]
    kv = jnp.where(is_there[None, :, :, None, None], kv, 0.0)  # what was never written may hold anything
    return kv[0], kv[1]
