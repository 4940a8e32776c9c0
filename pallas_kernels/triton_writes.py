"""Kernels lowered through Triton that write: rotated keys, and values, in the pool's layout."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxllm.pallas_kernels.heads import RopeTable
from jaxllm.pallas_kernels.kv_layout import LEAST, KVLayout, layout_of
from jaxllm.pallas_kernels.triton_pool import (
    areas_of,
    as_pool,
    block_size_of,
    launch,
    layer_operand,
    per_word,
)


@functools.partial(jax.jit, static_argnames="dtype")
def rotate_and_write(
    qkv: jax.Array,
    rope: RopeTable | None,
    pool: jax.Array,
    slot_mapping: jax.Array,
    *,
    layer: int | jax.Array,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """Rotate a row's queries and keys, and store its keys and values in the aliased pool, all in one kernel.

    Arguments are those of `pallas_kernels.attend`; parts of `qkv` are added up on the way.

    Returns:
        The updated pool, and the queries `[num_rows, num_q_heads, head_dim]`.
    """
    *_, num_rows, columns = qkv.shape
    layout, areas = layout_of(pool), areas_of(pool)
    num_kv_heads, head_dim = pool.shape[3], layout.head_dim
    q = jax.ShapeDtypeStruct((num_rows, columns // head_dim - 2 * num_kv_heads, head_dim), dtype)
    arguments = (*(rope or ()), layer_operand(layer), qkv, slot_mapping, areas)
    areas, q = launch(
        functools.partial(_rotate_kernel, layout=layout),
        grid=(num_rows,),
        out_shape=(jax.ShapeDtypeStruct(areas.shape, areas.dtype), q),
        input_output_aliases={len(arguments) - 1: 0},
        name="paged_rotate_and_write",
    )(*arguments)
    return as_pool(areas, pool), q


@jax.jit
def write_kv(
    pool: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array, *, layer: int | jax.Array
) -> jax.Array:
    """One program per token, storing into the aliased pool."""
    areas = areas_of(pool)
    areas = launch(
        functools.partial(_write_kernel, layout=layout_of(pool)),
        grid=(k.shape[0],),
        out_shape=jax.ShapeDtypeStruct(areas.shape, areas.dtype),
        input_output_aliases={4: 0},
        name="paged_write_kv",
    )(layer_operand(layer), k, v, slot_mapping, areas)
    return as_pool(areas, pool)


def _rotate_kernel(*refs: Any, layout: KVLayout) -> None:
    *table_refs, layer_ref, qkv_ref, slots_ref, _, pool_ref, q_ref = refs
    row, layer = pl.program_id(0), layer_ref[0]
    num_kv_heads, head_dim = pool_ref.shape[3], layout.head_dim
    num_q_heads = q_ref.shape[1]
    is_valid, block, offset = _place(slots_ref[row], pool_ref, layout)
    size = head_dim // max(1, len(table_refs))  # heads are read in two halves, to be rotated, or whole
    starts, step = range(0, head_dim, size), per_word(layout)
    words = jnp.arange(pl.next_power_of_2(size) // step)[None, :]
    dims = [words * step + place for place in range(step)]
    tables = [
        [plgpu.load(ref.at[row, one], mask=one < size, other=0.0) for ref in table_refs] for one in dims
    ]
    first_head = 0
    for index, num_heads in enumerate((num_q_heads, num_kv_heads, num_kv_heads)):
        heads = jnp.arange(pl.next_power_of_2(num_heads))[:, None]
        mask = (heads < num_heads) & (words < size // step)
        parts = []
        for one, table in zip(dims, tables, strict=True):
            at = [(first_head + heads) * head_dim + start + one for start in starts]
            halves = [_summed(qkv_ref, row, columns, mask).astype(q_ref.dtype) for columns in at]
            if table and index < 2:
                (cos, sin), (first, second) = table, (half.astype(jnp.float32) for half in halves)
                halves = [first * cos - second * sin, second * cos + first * sin]
            parts.append([half.astype(q_ref.dtype) for half in halves])
        if index:
            places = [start // step + words for start in starts]
            heads_at = block, layer, index - 1, heads
            _store_heads(pool_ref, heads_at, offset, layout, places, parts, mask, is_valid)
        else:
            for one, halves in zip(dims, parts, strict=True):
                for start, half in zip(starts, halves, strict=True):
                    plgpu.store(q_ref.at[row, heads, start + one], half, mask=mask)
        first_head += num_heads


def _summed(ref: Any, row: jax.Array, columns: jax.Array, mask: jax.Array) -> jax.Array:
    """Numbers of a row, or the sum of those of its parts."""
    if len(ref.shape) == 2:
        return plgpu.load(ref.at[row, columns], mask=mask, other=0.0)
    total = jnp.zeros(mask.shape, jnp.float32)
    for part in range(ref.shape[0]):
        total += plgpu.load(ref.at[part, row, columns], mask=mask, other=0.0).astype(jnp.float32)
    return total


def _write_kernel(
    layer_ref: Any, k_ref: Any, v_ref: Any, slots_ref: Any, _: Any, pool_ref: Any, *, layout: KVLayout
) -> None:
    token, layer, step = pl.program_id(0), layer_ref[0], per_word(layout)
    num_kv_heads, head_dim = pool_ref.shape[3], layout.head_dim
    is_valid, block, offset = _place(slots_ref[token], pool_ref, layout)
    heads = jnp.arange(pl.next_power_of_2(num_kv_heads))[:, None]
    words = jnp.arange(pl.next_power_of_2(head_dim) // step)[None, :]
    mask = (heads < num_kv_heads) & (words < head_dim // step)
    for index, ref in enumerate((k_ref, v_ref)):
        dims = [words * step + place for place in range(step)]
        parts = [[plgpu.load(ref.at[token, heads, one], mask=mask, other=0.0)] for one in dims]
        at = block, layer, index, heads
        _store_heads(pool_ref, at, offset, layout, [words], parts, mask, is_valid)


def _store_heads(
    pool_ref: Any,
    at: tuple[Any, ...],
    offset: jax.Array,
    layout: KVLayout,
    places: Sequence[jax.Array],
    parts: Sequence[Sequence[jax.Array]],
    mask: jax.Array,
    is_valid: jax.Array,
) -> None:
    """Store heads where a token's are, in their layout.

    Args:
        pool_ref: the pool as kernels see it.
        at: indices of the heads' areas there.
        offset: of the token in its block.
        layout: of the pool.
        places: of parts of heads, in elements of the pool.
        parts: `[heads, elements]` of each number of an element, by these places.
        mask: what of them is there.
        is_valid: whether the token has a place.
    """
    if layout.dtype == "int8":
        exact = [[part.astype(jnp.float32) for part in one] for one in parts]
        sizes = [jnp.where(mask, jnp.abs(part), 0.0) for one in exact for part in one]
        most = functools.reduce(jnp.maximum, [size.max(axis=1) for size in sizes])
        num_wrong = sum([jnp.where(size < jnp.inf, 0, 1).sum(axis=1) for size in sizes])
        units = jnp.where(num_wrong > 0, jnp.nan, jnp.maximum(most, LEAST) * (1 / 127))[:, None]
        parts = [[_nearest(part / units) for part in one] for one in exact]
        bits = lax.bitcast_convert_type(units, jnp.int32)
        is_head = (mask.astype(jnp.int32).max(axis=1) > 0)[:, None]
        for word in range(2):
            part = (bits >> (16 * word)).astype(jnp.int16)
            place = block_size_of(pool_ref, layout) * layout.head_dim // 2 + 2 * offset + word
            plgpu.store(pool_ref.at[*at, place], part, mask=is_head & is_valid)
    elif layout.dtype.startswith("fp8"):
        stored = [[layout.stored(part) for part in one] for one in parts]
        parts = [[lax.bitcast_convert_type(part, jnp.int8) for part in one] for one in stored]
    for place, first, *others in zip(places, *parts, strict=True):
        for other in others:
            first = (first.astype(jnp.int32) & 255 | other.astype(jnp.int32) << 8).astype(jnp.int16)
        place = offset * (layout.head_dim // per_word(layout)) + place
        plgpu.store(pool_ref.at[*at, place], first.astype(pool_ref.dtype), mask=mask & is_valid)


def _nearest(x: jax.Array) -> jax.Array:
    """Numbers of at most 127 rounded to the nearest integer, halves to even, as int8."""
    shifted = x + 1.5 * 2.0**23  # a float whose last bits are the integer
    return lax.bitcast_convert_type(shifted, jnp.int32).astype(jnp.int8)


def _place(slot: jax.Array, pool_ref: Any, layout: KVLayout) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether a slot is one of the pool's, and its block and offset."""
    num_blocks, block_size = pool_ref.shape[0], block_size_of(pool_ref, layout)
    is_valid = (slot >= 0) & (slot < num_blocks * block_size)
    slot = jnp.where(is_valid, slot, 0)
    return is_valid, slot // block_size, slot % block_size
