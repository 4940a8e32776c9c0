"""Paged attention and KV writes in plain XLA: loops over blocks that never gather the cache.

A gather of the blocks of a batch would write a temporary as large as the KV it reads. Each loop here
runs over exact work items, slices a few blocks out of the pool and feeds them to the matrix products,
so that the pool is read once and nothing larger than a few blocks is ever allocated.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import export, lax

from jaxllm.pallas_kernels.kv_layout import layout_of
from jaxllm.pallas_kernels.varying import varying_as

_DECODE_PAIR_BYTES = 64 * 1024
_PREFILL_KV_BLOCKS = 8
_PREFILL_ROWS = 64
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
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = pool.shape[3], pool.shape[4]
    group = num_q_heads // num_kv_heads
    step_blocks = _decode_blocks(num_kv_heads * block_size * head_dim * 4, block_tables.shape[1])
    step_tokens = step_blocks * block_size
    queries = (q.astype(jnp.float32) * scale).reshape(num_rows, num_kv_heads, group, head_dim)
    num_steps = -(-jnp.maximum(lengths, 0) // step_tokens)
    next_row, first_row = _next_busy(num_steps)

    def body(_: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        row, step, peak, total, acc, out = carry
        query = lax.dynamic_index_in_dim(queries, row, keepdims=False)
        blocks = [
            _load_block(pool, block_tables, row, step * step_blocks + i, layer) for i in range(step_blocks)
        ]
        left = lengths[row] - step * step_tokens
        scores, values = [], []
        for i, (key, value) in enumerate(blocks):
            valid = seen = jnp.arange(block_size) < left - i * block_size
            if window is not None:
                seen &= jnp.arange(block_size) >= left - i * block_size - window
            score = _capped(_dot("hgd,htd->hgt", query, key), soft_cap)
            scores.append(jnp.where(seen, score, _MASKED))
            values.append(jnp.where(valid[:, None], value, 0.0))
        is_first = step == 0
        old_peak = jnp.where(is_first, _MASKED, peak)
        peak = old_peak
        for score in scores:
            peak = jnp.maximum(peak, score.max(axis=-1))
        decay = jnp.where(is_first, 0.0, jnp.exp(old_peak - peak))
        total = jnp.where(is_first, 0.0, total) * decay
        acc = jnp.where(is_first, 0.0, acc) * decay[..., None]
        for score, value in zip(scores, values, strict=True):
            weights = jnp.exp(score - peak[..., None])
            total = total + weights.sum(axis=-1)
            acc = acc + _dot("hgt,htd->hgd", weights, value)
        out = lax.dynamic_update_slice(out, (acc / total[..., None])[None], (row, 0, 0, 0))
        is_last = step + 1 >= num_steps[row]
        return (
            jnp.where(is_last, next_row[row], row),
            jnp.where(is_last, 0, step + 1),
            peak,
            total,
            acc,
            out,
        )

    stats = jnp.zeros((num_kv_heads, group), jnp.float32)
    acc = jnp.zeros((num_kv_heads, group, head_dim), jnp.float32)
    sums = (
        varying_as(x, q, pool, block_tables, lengths) for x in (stats, stats, acc, jnp.zeros_like(queries))
    )
    start = (first_row, jnp.zeros_like(first_row), *sums)
    out = lax.fori_loop(0, num_steps.sum(), body, start)[-1]
    return out.reshape(num_rows, num_q_heads, head_dim).astype(q.dtype)


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
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = pool.shape[3], pool.shape[4]
    group = num_q_heads // num_kv_heads
    tile = _PREFILL_ROWS if export.is_symbolic_dim(num_tokens) else min(_PREFILL_ROWS, num_tokens)
    step_blocks = min(_PREFILL_KV_BLOCKS, block_tables.shape[1])
    step_tokens = step_blocks * block_size
    query_lens = query_starts[1:] - query_starts[:-1]
    query_lens = jnp.where(jnp.arange(query_lens.shape[0]) < num_seqs, query_lens, 0)
    num_tiles = -(-query_lens // tile)
    next_seq, first_seq = _next_busy(num_tiles)
    # Tiles start at any row: a tile of padding keeps the last slice from being clamped.
    queries = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))

    def varying(x: jax.Array) -> jax.Array:
        return varying_as(x, q, pool, block_tables, query_starts, lengths)

    def tile_body(_: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        seq, index, out = carry
        row = query_starts[seq] + index * tile
        rows = index * tile + jnp.arange(tile)
        positions = lengths[seq] - query_lens[seq] + rows
        kv_limit = jnp.minimum(lengths[seq], positions[-1] + 1)
        query = lax.dynamic_slice(queries, (row, 0, 0), (tile, num_q_heads, head_dim)).astype(jnp.float32)
        query = (query * scale).reshape(tile, num_kv_heads, group, head_dim)
        query = query.transpose(1, 2, 0, 3).reshape(num_kv_heads, group * tile, head_dim)

        def kv_body(step: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            old_peak, total, acc = state
            blocks = [
                _load_block(pool, block_tables, seq, step * step_blocks + i, layer)
                for i in range(step_blocks)
            ]
            key, value = (jnp.concatenate(parts, axis=1) for parts in zip(*blocks, strict=True))
            kv_positions = step * step_tokens + jnp.arange(step_tokens)
            value = jnp.where((kv_positions < kv_limit)[:, None], value, 0.0)
            seen = kv_positions <= jnp.minimum(positions, kv_limit - 1)[:, None]
            if window is not None:
                seen &= kv_positions > positions[:, None] - window
            seen = jnp.tile(seen, (group, 1))
            scores = jnp.where(seen, _capped(_dot("hqd,htd->hqt", query, key), soft_cap), _MASKED)
            peak = jnp.maximum(old_peak, scores.max(axis=-1))
            decay = jnp.exp(old_peak - peak)
            weights = jnp.exp(scores - peak[..., None])
            total = total * decay + weights.sum(axis=-1)
            acc = acc * decay[..., None] + _dot("hqt,htd->hqd", weights, value)
            return peak, total, acc

        stats = jnp.zeros((num_kv_heads, group * tile), jnp.float32)
        start = (varying(x) for x in (stats + _MASKED, stats, jnp.zeros_like(query)))
        _, total, acc = lax.fori_loop(0, -(-kv_limit // step_tokens), kv_body, tuple(start))
        result = (acc / total[..., None]).reshape(num_kv_heads, group, tile, head_dim)
        result = result.transpose(2, 0, 1, 3).reshape(tile, num_q_heads, head_dim)
        result = jnp.where((rows < query_lens[seq])[:, None, None], result, 0.0)
        # Rows past the sequence's end are zeroed here and filled by the next sequence's tile.
        out = lax.dynamic_update_slice(out, result.astype(q.dtype), (row, 0, 0))
        is_last = index + 1 >= num_tiles[seq]
        return jnp.where(is_last, next_seq[seq], seq), jnp.where(is_last, 0, index + 1), out

    start = (first_seq, jnp.zeros_like(first_seq), varying(jnp.zeros_like(queries)))
    return lax.fori_loop(0, num_tiles.sum(), tile_body, start)[-1][:num_tokens]


def write_kv(
    pool: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array, *, layer: int
) -> jax.Array:
    """Store each token's K and V at its slot; see `pallas_kernels.write_kv`."""
    num_blocks, _, _, _, block_size, _ = pool.shape
    layout = layout_of(pool)
    is_valid = (slot_mapping >= 0) & (slot_mapping < num_blocks * block_size)
    slots = jnp.where(is_valid, slot_mapping, 0)
    pieces = list(layout.pieces(jnp.stack([k, v], axis=1), slots % block_size, block_size))

    def body(token: jax.Array, pool: jax.Array) -> jax.Array:
        for kv, places in pieces:
            start = (slots[token] // block_size, layer, 0, 0, places[token])
            new = lax.dynamic_index_in_dim(kv, token, keepdims=False)[None, None]
            pool = put(pool, new, start, is_valid[token])
        return pool

    def put(pool: jax.Array, new: jax.Array, start: tuple[Any, ...], is_valid: jax.Array) -> jax.Array:
        def select(pool: jax.Array) -> jax.Array:
            old = lax.dynamic_slice(pool, start, new.shape)
            return lax.dynamic_update_slice(pool, jnp.where(is_valid, new, old), start)

        def branch(pool: jax.Array) -> jax.Array:  # what JAX 0.10 selects among short floats copies the pool
            return lax.cond(
                is_valid, lambda pool: lax.dynamic_update_slice(pool, new, start), lambda pool: pool, pool
            )

        return lax.platform_dependent(pool, cpu=branch, default=select)

    areas = pool.reshape(*pool.shape[:4], -1)
    areas = varying_as(areas, k, v, slots)
    return lax.fori_loop(0, k.shape[0], body, areas).reshape(pool.shape)


def _decode_blocks(block_bytes: int, max_blocks: int) -> int:
    """Blocks per decode step. Measured on a CPU: pairs help small blocks, more of them never do."""
    return 2 if block_bytes <= _DECODE_PAIR_BYTES and max_blocks > 1 else 1


def _next_busy(num_items: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each row the next row that has work items (clamped to a real row), and the first such row."""
    size = num_items.shape[0]
    candidates = jnp.where(num_items > 0, jnp.arange(size, dtype=jnp.int32), size - 1)
    suffix_min = lax.cummin(candidates, reverse=True)
    return jnp.append(suffix_min[1:], jnp.int32(size - 1)), suffix_min[0]


def _load_block(
    pool: jax.Array, block_tables: jax.Array, row: jax.Array, index: jax.Array, layer: int
) -> tuple[jax.Array, jax.Array]:
    """K and V `[num_kv_heads, block_size, head_dim]` of a row's `index`-th block, in float32."""
    block = block_tables[row, jnp.minimum(index, block_tables.shape[1] - 1)]
    block = jnp.clip(block, 0, pool.shape[0] - 1)
    kv = lax.dynamic_slice(pool, (block, layer, 0, 0, 0, 0), (1, 1, *pool.shape[2:]))[0, 0]
    kv = layout_of(pool).loaded(kv)
    return kv[0], kv[1]


def _capped(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _dot(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(equation, left, right, precision=lax.Precision.HIGHEST)
