"""What the Mosaic GPU kernels compute of a tile of queries and one of KV."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm.pallas_kernels.tiles import is_interpreted

TILE = 64  # KV tokens of a step, and rows of a wgmma
MASKED = -1e30
IS_NEWER_JAX = hasattr(plgpu, "InterpretGPUParams")  # than 0.10


def widen(tile_smem: Any, wide_smem: Any, num_seen: jax.Array | None = None) -> None:
    """Store a tile of 8 bits as what wgmma multiplies, with zeros in rows from `num_seen` on if given."""
    for start in range(0, tile_smem.shape[1], TILE):
        part = pl.ds(start, TILE)
        codes = _load(tile_smem.at[:, part], plgpu.Layout.WGMMA)
        numbers = (codes if codes.dtype == jnp.int8 else codes.astype(jnp.float32)).astype(wide_smem.dtype)
        if num_seen is not None:
            is_seen = iota(numbers.shape, 0) < num_seen
            numbers = jnp.where(is_seen, numbers, jnp.zeros((), numbers.dtype))
        wide_smem[:, part] = numbers
    plgpu.commit_smem()


def load_scales(smem: Any, num_seen: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
    """Scales of a tile's tokens, which are `axis` of a `shape`, as such; zeros from `num_seen` on."""
    scales = _load(smem, plgpu.Layout.WGMMA.reduce(1 - axis))
    plgpu.commit_smem()  # the next copy comes after these reads
    return jnp.where(
        iota(shape, axis) < num_seen, lax.broadcast_in_dim(scales, shape, [axis]), jnp.zeros((), jnp.float32)
    )


def _load(ref: Any, layout: Any, **options: Any) -> jax.Array:
    """`ref` in the registers of a warpgroup."""
    if is_interpreted():
        return ref[...]
    index = () if IS_NEWER_JAX else (...,)
    return plgpu.load(ref, *index, layout=layout, **options)


def load_rows(ref: Any, start: jax.Array, head: jax.Array) -> jax.Array:
    """64 rows of a head of `ref` [rows, heads, head_dim] from any row on, without shared memory."""
    return _load(ref.at[pl.ds(start, TILE), head], plgpu.Layout.WGMMA, optimized=False)


def products(left_smem: Any, right_smem: Any) -> jax.Array:
    """Float32 `[left rows, right rows]`: products of queries and keys, either of which may be left."""
    if is_interpreted() and not IS_NEWER_JAX:  # JAX 0.10 interprets no transposes
        scores = jnp.dot(left_smem[...], right_smem[...].T, preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # unlike wgmma's, these reads are not ordered before the next copy into the slot
        return scores

    def multiply(acc_ref: Any) -> jax.Array:
        plgpu.wgmma(acc_ref, left_smem, _transposed(right_smem))
        return acc_ref[...]

    return pl.run_scoped(multiply, plgpu.ACC((left_smem.shape[0], right_smem.shape[0]), jnp.float32))


def _transposed(smem: Any) -> Any:
    if hasattr(smem, "transpose"):  # JAX 0.11 and newer
        return smem.transpose((1, 0))
    return plgpu.transpose_ref(smem, (1, 0))


def accumulate(
    state: tuple[jax.Array, ...], scores: jax.Array, v_smem: Any, scales: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    """One step of the online softmax over a tile of KV; `scores` count in powers of two.

    `scales`, like scores, are what numbers of V stand for.
    """
    acc, old_peak, total = state
    peak = jnp.maximum(old_peak, scores.max(axis=1))
    decay = jnp.exp2(old_peak - peak)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(peak, scores.shape, [0]))
    total = total * decay + weights.sum(axis=1)
    weights = (weights if scales is None else weights * scales).astype(v_smem.dtype)

    def multiply(acc_ref: Any) -> jax.Array:
        plgpu.wgmma(acc_ref, weights, v_smem)
        return acc_ref[...]

    if is_interpreted():  # the interpreter multiplies shared memory only
        product = jnp.dot(weights, v_smem[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # as in `products`
    else:
        product = pl.run_scoped(multiply, plgpu.ACC((TILE, acc.shape[1]), jnp.float32))
    return acc * lax.broadcast_in_dim(decay, acc.shape, [0]) + product, peak, total


def accumulate_columns(
    state: tuple[jax.Array, ...], scores: jax.Array, p_smem: Any, v_smem: Any, scales: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    """`accumulate` for scores `[64 keys, queries]`, and an accumulator `[head_dim, queries]`.

    The weights go through `p_smem` [queries, 64]: wgmma takes its right side from shared memory only.
    """
    acc, old_peak, total = state
    peak = jnp.maximum(old_peak, scores.max(axis=0))
    decay = jnp.exp2(old_peak - peak)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(peak, scores.shape, [1]))
    total = total * decay + weights.sum(axis=0)
    weights = weights if scales is None else weights * scales
    store_transposed(p_smem, weights.astype(p_smem.dtype))
    plgpu.commit_smem()

    def multiply(acc_ref: Any) -> jax.Array:
        plgpu.wgmma(acc_ref, _transposed(v_smem), _transposed(p_smem))
        return acc_ref[...]

    if is_interpreted():
        product = jnp.dot(v_smem[...].T, p_smem[...].T, preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # as in `products`
    else:
        product = pl.run_scoped(multiply, plgpu.ACC((v_smem.shape[1], p_smem.shape[0]), jnp.float32))
    return acc * lax.broadcast_in_dim(decay, acc.shape, [1]) + product, peak, total


def store_transposed(smem: Any, x: jax.Array) -> None:
    """Store `x` [64 or more rows, columns] as [columns, rows]."""
    if is_interpreted():
        smem[...] = x.T
    else:
        _transposed(smem)[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)


def empty_state(shape: tuple[int, int], axis: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Accumulator with queries along `axis`, running maximum and running sum of a softmax, in registers."""
    layout, queries = plgpu.Layout.WGMMA.reduce(1 - axis), shape[axis : axis + 1]
    acc = _in_layout(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    peak = _in_layout(jnp.full(queries, MASKED, jnp.float32), layout)
    return acc, peak, _in_layout(jnp.zeros(queries, jnp.float32), layout)


def zero_rows_from(smem: Any, first: jax.Array) -> None:
    """Zero the rows of a tile from `first` on."""
    kept = iota(smem.shape, 0) < first
    smem[...] = jnp.where(kept, smem[...], jnp.zeros((), smem.dtype))
    plgpu.commit_smem()


def iota(shape: tuple[int, ...], dimension: int) -> jax.Array:
    """Int32 indices along a dimension, in the registers of a warpgroup."""
    return _in_layout(lax.broadcasted_iota(jnp.int32, shape, dimension), plgpu.Layout.WGMMA)


def _in_layout(x: jax.Array, layout: Any) -> jax.Array:
    return x if is_interpreted() else plgpu.layout_cast(x, layout)  # the interpreter has no registers
