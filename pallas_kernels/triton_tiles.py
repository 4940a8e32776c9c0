"""What attention by Triton computes of queries and a tile of KV.

Softmax is of base 2 and computed in float32. Axes that Triton wants as powers of two (head_dim, the query
heads of a KV head) are padded and masked.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxllm.pallas_kernels.kv_layout import KVLayout
from jaxllm.pallas_kernels.ptx import exp2_of, words_as_halves
from jaxllm.pallas_kernels.triton_pool import block_size_of, per_word

LEAST_PEAK = -1e30
_LOG2_E = 1.4426950408889634

State = tuple[tuple[jax.Array, ...], jax.Array, jax.Array]
"""Of an online softmax, of base 2: accumulators of the parts of heads, running maximum, running sum."""


class Query(NamedTuple):
    """Queries `[rows, padded head_dim / parts]`, and what a number of 1 stands for, `[rows]` float32.

    Heads are in parts where an element of the pool holds several numbers: the first of each, the second.
    """

    parts: list[jax.Array]
    units: jax.Array | None = None


class Tile(NamedTuple):
    """K and V `[tokens, padded head_dim / parts]`, and of int8 what a code of 1 stands for, `[tokens]`."""

    key: list[jax.Array]
    value: list[jax.Array]
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None


def dims_of(layout: KVLayout) -> list[jax.Array]:
    """The dimensions of each part of heads, and of their padding."""
    step = per_word(layout)
    words = jnp.arange(pl.next_power_of_2(layout.head_dim) // step)
    return [words * step + place for place in range(step)]


def load_query(q_ref: Any, at: tuple[Any, ...], is_row: jax.Array, layout: KVLayout) -> Query:
    """Queries by their indices but the last.

    Those of bfloat16 become float16 where keys are that, divided by a power of two, so that all of them fit.
    """
    parts = [
        plgpu.load(
            q_ref.at[*at, dims[None, :]],
            mask=is_row[:, None] & (dims < layout.head_dim)[None, :],
            other=0.0,
        )
        for dims in dims_of(layout)
    ]
    has_halves = len(parts) > 1 or widest(q_ref.dtype, layout) == jnp.float16
    if q_ref.dtype != jnp.bfloat16 or not has_halves:
        return Query(parts)
    exact = [part.astype(jnp.float32) for part in parts]
    most = functools.reduce(jnp.maximum, [jnp.abs(part).max(axis=1) for part in exact])
    power = lax.bitcast_convert_type(lax.bitcast_convert_type(most, jnp.int32) & 0x7F800000, jnp.float32)
    units = jnp.where(power > 0, power, 1.0)
    return Query([(part / units[:, None]).astype(jnp.float16) for part in exact], units)


def load_tile(
    pool_refs: Sequence[Any],
    tables_ref: Any,
    row: jax.Array,
    kv_head: jax.Array,
    tokens: jax.Array,
    limit: jax.Array | None,
    layer: jax.Array,
    layout: KVLayout,
    query_dtype: Any,
) -> Tile:
    """What a row's tokens below `limit`, or all, have in the pool; zeros elsewhere."""
    pool_ref, *scale_refs = pool_refs
    block_size, step = block_size_of(pool_ref, layout), per_word(layout)
    valid = jnp.full(tokens.shape, True) if limit is None else tokens < limit
    block = plgpu.load(tables_ref.at[row, tokens // block_size], mask=valid, other=0)
    offset = tokens % block_size
    words = jnp.arange(pl.next_power_of_2(layout.head_dim) // step)[None, :]
    mask = valid[:, None] & (words < layout.head_dim // step)
    places = (offset * (layout.head_dim // step))[:, None] + words
    found: list[list[jax.Array]] = []
    scales: list[jax.Array] = []
    for index in range(2):
        tile = plgpu.load(pool_ref.at[block[:, None], layer, index, kv_head, places], mask=mask, other=0)
        found.append(_numbers(tile, layout, query_dtype))
        for ref in scale_refs:
            place = block_size * layout.head_dim // 4 + offset
            scales.append(plgpu.load(ref.at[block, layer, index, kv_head, place], mask=valid, other=0.0))
    return Tile(found[0], found[1], *scales)


def _numbers(tile: jax.Array, layout: KVLayout, query_dtype: Any) -> list[jax.Array]:
    """The numbers of elements of the pool, part by part: of 8 bits float16, or float32 like queries."""
    if per_word(layout) == 1:
        return [tile.astype(widest(query_dtype, layout))]
    numbers = words_as_halves(tile, layout.dtype)
    return [part.astype(jnp.float32) if query_dtype == jnp.float32 else part for part in numbers]


def widest(query_dtype: Any, layout: KVLayout) -> jnp.dtype:
    """What keys and values of no 8 bits are computed with: the wider of queries' and theirs, or float16."""
    if layout.dtype == "float16" and query_dtype == jnp.bfloat16:
        return layout.array_dtype
    return max(jnp.dtype(query_dtype), layout.array_dtype, key=lambda dtype: dtype.itemsize)


def empty_state(rows: int, layout: KVLayout) -> State:
    """Of rows that have seen nothing."""
    stats = jnp.zeros(rows, jnp.float32)
    accs = tuple(jnp.zeros((rows, dims.shape[0]), jnp.float32) for dims in dims_of(layout))
    return accs, stats + LEAST_PEAK, stats


def quotients(accs: Sequence[jax.Array], total: jax.Array) -> list[jax.Array]:
    """Weighted sums over the sums of their weights; zeros where no token was seen."""
    return [acc / jnp.where(total > 0, total, 1.0)[:, None] for acc in accs]


def store_parts(
    ref: Any, at: tuple[Any, ...], parts: Sequence[jax.Array], is_row: jax.Array, layout: KVLayout
) -> None:
    """Store heads whose parts these are, by their indices but the last."""
    for part, dims in zip(parts, dims_of(layout), strict=True):
        mask = is_row[:, None] & (dims < layout.head_dim)[None, :]
        plgpu.store(ref.at[*at, dims[None, :]], part.astype(ref.dtype), mask=mask)


def accumulate(
    state: State,
    query: Query,
    tile: Tile,
    seen: jax.Array | None,
    scale: float,
    soft_cap: float | None,
) -> State:
    """One step of the online softmax over a tile of KV, of which all or what is `seen` counts."""
    accs, old_peak, total = state
    scores = _sum(
        [_dot(q.astype(k.dtype), k, trans_b=True) for q, k in zip(query.parts, tile.key, strict=True)]
    )
    scores = scores if tile.key_scale is None else scores * tile.key_scale[None, :]
    scores = scores if query.units is None else scores * query.units[:, None]
    unit = _LOG2_E * scale
    if soft_cap is not None:
        scores, unit = jnp.tanh(scores * (scale / soft_cap)), _LOG2_E * soft_cap
    elif scale <= 0:
        scores, unit = scores * scale, _LOG2_E
    # The weight of what is not seen is 0 where a row sees nothing of a tile, too: the least peak is finite.
    scores = scores if seen is None else jnp.where(seen, scores, -jnp.inf)
    peak = jnp.maximum(old_peak, scores.max(axis=1) * unit)
    decay = exp2_of(old_peak, 1.0, peak)
    weights = exp2_of(scores, unit, peak[:, None])
    total = total * decay + weights.sum(axis=1)
    added = weights
    if tile.value_scale is not None:  # at most 2**15, so that float16 has what counts
        most = tile.value_scale.max() * 2.0**-15
        most = jnp.where(most > 0, most, 1.0)
        added = weights * (tile.value_scale / most)[None, :]
    products = [_dot(added.astype(value.dtype), value) for value in tile.value]
    if tile.value_scale is not None:
        products = [product * most for product in products]
    accs = tuple(acc * decay[:, None] + product for acc, product in zip(accs, products, strict=True))
    return accs, peak, total


def _sum(parts: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, parts)


def _dot(left: jax.Array, right: jax.Array, trans_b: bool = False) -> jax.Array:
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return plgpu.dot(left, right, trans_b=trans_b, precision=precision)


def seen_from(position: jax.Array, window: int | None) -> jax.Array:
    """The first token that the query at a position sees."""
    return jnp.int32(0) if window is None else jnp.maximum(position + 1 - window, 0)
