"""Paged attention as Pallas Mosaic GPU kernels for Hopper (compute capability 9.0), in 16 bits.

One warpgroup of a program copies blocks of KV into shared memory by their ids (TMA, several tiles in flight),
the others multiply (wgmma) and keep the online softmax, base 2, in registers. wgmma takes 64 rows and from 8
columns on: the rows are queries in prefill, and keys in decode, which has few queries: the heads that share a
KV head are the columns. KV of 8 bits becomes 16 on its way from shared memory to wgmma, and scales of int8
multiply scores and weights.

K and V past a row's last token may be anything, NaN included: scores there are masked, and V is zeroed in
shared memory before it is multiplied.

On a CPU the kernels run in Pallas' GPU interpreter, for tests.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm.pallas_kernels import triton
from jaxllm.pallas_kernels.mosaic_pool import SLOTS, Buffers, Source, check, drain, readable, swizzled
from jaxllm.pallas_kernels.mosaic_tiles import (
    MASKED,
    TILE,
    accumulate,
    accumulate_columns,
    empty_state,
    iota,
    load_rows,
    products,
    store_transposed,
)
from jaxllm.pallas_kernels.tiles import (
    chunk_tokens,
    is_interpreted,
    kv_chunks,
    query_tiles,
)

_DECODE_PROGRAMS = 264  # two for each core of an H100 or an H200
_QUERY_WARPGROUPS = 2
_LOG2E = math.log2(math.e)

rotate_and_write, write_kv = triton.rotate_and_write, triton.write_kv
"""Triton's kernels: copies need nothing of Hopper."""


def step_attention(
    q: jax.Array,
    pool: jax.Array,
    decode: tuple[jax.Array, jax.Array] | None,
    prompts: tuple[jax.Array, jax.Array, jax.Array, jax.Array] | None,
    **options: Any,
) -> jax.Array:
    """Attention of a step's decodes, in the rows of that of its prompts."""
    out = q if prompts is None else prefill_attention(q, pool, *prompts, **options)
    if decode is None:
        return out
    rows = q[: len(decode[0])]
    return decode_attention(rows, pool, *decode, **options, out=None if prompts is None else out)


@functools.partial(jax.jit, static_argnames="scale")
def decode_attention(
    q: jax.Array,
    pool: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    layer: int | jax.Array,
    scale: float,
    out: jax.Array | None = None,
) -> jax.Array:
    """Flash-decoding: the KV of rows is split into chunks whose partial results are then combined.

    Programs stay, and take one KV head of one chunk after another: the tiles of the next are under way while
    those of the last are computed. Results are put in the first rows of `out`, if it is given, but none for
    rows of length 0.
    """
    check(q, pool)
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = pool.shape[3:5]
    group = num_q_heads // num_kv_heads
    max_tokens = block_tables.shape[1] * block_size
    chunk = chunk_tokens(num_rows * num_kv_heads, max_tokens, TILE)
    num_chunks = pl.cdiv(max_tokens, chunk)
    columns = -(-group // 8) * 8
    queries = q.reshape(num_rows, num_kv_heads, group, head_dim)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, columns - group), (0, 0)))
    chunks, num_in_use = kv_chunks(lengths, chunk, num_chunks)
    stats = jax.ShapeDtypeStruct((num_rows, num_chunks, num_kv_heads, columns), jnp.float32)
    partial = jax.ShapeDtypeStruct((*stats.shape, head_dim), jnp.float32)
    acc, peak, total = _call(
        functools.partial(
            _decode_kernel,
            chunk_tiles=chunk // TILE,
            block_size=block_size,
            num_layers=pool.shape[1],
            factor=scale * _LOG2E,
        ),
        out_type=(partial, stats, stats),
        scratch_types=(
            swizzled((columns, head_dim), q.dtype),
            Buffers.of(pool, q.dtype, num_consumers=1),
            swizzled((columns, TILE), q.dtype),
            plgpu.SMEM((columns, head_dim), jnp.float32),
            plgpu.SMEM((columns,), jnp.float32),
            plgpu.SMEM((columns,), jnp.float32),
            plgpu.Barrier(),
        ),
        grid=(min(_DECODE_PROGRAMS, num_rows * num_chunks * num_kv_heads),),
        grid_names=("program",),
        num_threads=2,
    )(triton.layer_operand(layer), queries, readable(pool), block_tables, lengths, chunks, num_in_use)
    in_place = out is not None
    return triton.combine_chunks(acc, peak, total, lengths, out if in_place else q, chunk, in_place=in_place)


@functools.partial(jax.jit, static_argnames="scale")
def prefill_attention(
    q: jax.Array,
    pool: jax.Array,
    block_tables: jax.Array,
    query_starts: jax.Array,
    lengths: jax.Array,
    num_seqs: jax.Array,
    *,
    layer: int | jax.Array,
    scale: float,
) -> jax.Array:
    """Flash attention over tiles of 128 query rows of one sequence, which two warpgroups share."""
    check(q, pool)
    num_tokens, num_q_heads, head_dim = q.shape
    tile_rows = _QUERY_WARPGROUPS * TILE
    tiles = query_tiles(query_starts, lengths, num_seqs, num_tokens, tile_rows)
    q = jnp.pad(q, ((0, max(0, TILE - num_tokens)), (0, 0), (0, 0)))
    out = _call(
        functools.partial(
            _prefill_kernel,
            group=num_q_heads // pool.shape[3],
            block_size=pool.shape[4],
            num_layers=pool.shape[1],
            factor=scale * _LOG2E,
        ),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=(
            swizzled((_QUERY_WARPGROUPS, TILE, head_dim), q.dtype),
            plgpu.SMEM((_QUERY_WARPGROUPS, TILE, head_dim), q.dtype),
            Buffers.of(pool, q.dtype, num_consumers=_QUERY_WARPGROUPS),
            plgpu.Barrier(num_arrivals=1 if pool.dtype == q.dtype else _QUERY_WARPGROUPS),
        ),
        grid=(num_q_heads, tiles.shape[0]),
        grid_names=("head", "tile"),
        num_threads=_QUERY_WARPGROUPS + 1,
    )(triton.layer_operand(layer), q, readable(pool), block_tables, tiles)[:num_tokens]
    rows = jnp.arange(num_tokens)
    is_owned = (rows >= query_starts[0]) & (rows < query_starts[num_seqs])
    return jnp.where(is_owned[:, None, None], out, jnp.zeros((), q.dtype))


def _decode_kernel(
    layer_ref: Any,
    q_ref: Any,
    views: tuple[Any, ...],
    tables_ref: Any,
    lengths_ref: Any,
    chunks_ref: Any,
    num_chunks_ref: Any,
    acc_ref: Any,
    peak_ref: Any,
    total_ref: Any,
    q_smem: Any,
    buffers: Buffers,
    p_smem: Any,
    acc_smem: Any,
    peak_smem: Any,
    total_smem: Any,
    q_arrived: Any,
    *,
    chunk_tiles: int,
    block_size: int,
    num_layers: int,
    factor: float,
) -> None:
    num_kv_heads = q_ref.shape[1]
    program, num_programs = lax.axis_index("program"), lax.axis_size("program")
    warpgroup = lax.axis_index("warpgroup")

    def for_each(body: Callable[..., None]) -> jax.Array:
        """Call `body` with each unit of this program's work, and the number of tiles before it; their sum."""

        def unit(i: jax.Array, num_before: jax.Array) -> jax.Array:
            number = program + i * num_programs
            at = lax.div(number, jnp.int32(num_kv_heads))
            row, chunk, kv_head = (
                chunks_ref[at, 0],
                chunks_ref[at, 1],
                lax.rem(number, jnp.int32(num_kv_heads)),
            )
            length, first = lengths_ref[row], chunk * chunk_tiles
            num_steps = jnp.minimum(pl.cdiv(length, TILE) - first, chunk_tiles)
            body((row, chunk, kv_head), length, first, num_steps, num_before)
            return num_before + num_steps

        num_units = pl.cdiv(num_chunks_ref[0] * num_kv_heads - program, num_programs)
        return lax.fori_loop(0, num_units, unit, jnp.int32(0))

    def compute(at: Any, length: Any, first: Any, num_steps: Any, num_before: Any) -> None:
        row, _, kv_head = at
        plgpu.copy_gmem_to_smem(q_ref.at[row, kv_head], q_smem, q_arrived)
        plgpu.barrier_wait(q_arrived)

        def step(i: jax.Array, state: Any) -> Any:
            slot = lax.rem(num_before + i, jnp.int32(SLOTS))
            num_seen = length - (first + i) * TILE
            shape = (TILE, q_smem.shape[0])
            buffers.wait(0, slot)
            if buffers.wide:
                buffers.widen(0, slot, num_seen)
            scores = products(buffers.tile(0, slot), q_smem) * factor
            key_scales = buffers.scales_of(0, slot, num_seen, shape, axis=0)
            buffers.release(0, slot)
            scores = scores if key_scales is None else scores * key_scales
            scores = jnp.where(iota(shape, 0) < num_seen, scores, MASKED)
            buffers.wait(1, slot)
            if buffers.wide:
                buffers.widen(1, slot, num_seen)
            else:
                pl.when(num_seen < TILE)(lambda: buffers.zero_from(slot, num_seen))
            value_scales = buffers.scales_of(1, slot, num_seen, shape, axis=0)
            state = accumulate_columns(state, scores, p_smem, buffers.tile(1, slot), value_scales)
            buffers.release(1, slot)
            return state

        start = empty_state((acc_smem.shape[1], acc_smem.shape[0]), axis=1)
        acc, peak, total = lax.fori_loop(0, num_steps, step, start)
        store_transposed(acc_smem, acc)
        peak_smem[...] = peak
        total_smem[...] = total
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(acc_smem, acc_ref.at[at])
        plgpu.copy_smem_to_gmem(peak_smem, peak_ref.at[at])
        plgpu.copy_smem_to_gmem(total_smem, total_ref.at[at])
        plgpu.wait_smem_to_gmem(0)

    def copy(at: Any, length: Any, first: Any, num_steps: Any, num_before: Any) -> None:
        row, _, kv_head = at
        head_of = _head_of(layer_ref[0], num_layers, kv_head, num_kv_heads)
        source = Source(views, tables_ref, row, length, head_of, block_size)
        source.copy(buffers, first, num_steps, num_before)

    # Registers stay shared out evenly: few enough are needed for two programs on a core.
    @pl.when(warpgroup == 0)
    def _compute() -> None:
        for_each(compute)

    @pl.when(warpgroup == 1)
    def _copy() -> None:
        drain(buffers, for_each(copy))


def _prefill_kernel(
    layer_ref: Any,
    q_ref: Any,
    views: tuple[Any, ...],
    tables_ref: Any,
    tiles_ref: Any,
    out_ref: Any,
    q_smem: Any,
    out_smem: Any,
    buffers: Buffers,
    is_ready: Any,
    *,
    group: int,
    block_size: int,
    num_layers: int,
    factor: float,
) -> None:
    head, tile = lax.axis_index("head"), lax.axis_index("tile")
    warpgroup = lax.axis_index("warpgroup")
    seq, first_row, num_rows, position = (tiles_ref[tile, i] for i in range(4))
    length = jnp.where(num_rows > 0, position + num_rows, 0)
    num_steps = pl.cdiv(length, TILE)

    @pl.when((warpgroup < _QUERY_WARPGROUPS) & (num_steps > 0))
    def _compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        queries, results = q_smem.at[warpgroup], out_smem.at[warpgroup]
        # A window of 64 rows that holds this warpgroup's, which may start at any row; what it computes of
        # other rows is not stored. (TMA would take swizzled windows from multiples of 8 rows on only.)
        offset = warpgroup * TILE
        start = jnp.minimum(first_row + offset, q_ref.shape[0] - TILE)
        queries[...] = load_rows(q_ref, start, head)
        plgpu.commit_smem()
        behind_first = position + (start - first_row)

        def step(i: jax.Array, state: Any) -> Any:
            slot = lax.rem(i, jnp.int32(SLOTS))
            num_seen, shape = length - i * TILE, (TILE, TILE)
            _keys_are_ready(buffers, slot, num_seen, is_ready)
            scores = products(queries, buffers.tile(0, slot)) * factor
            key_scales = buffers.scales_of(0, slot, num_seen, shape, axis=1)
            buffers.release(0, slot)
            scores = scores if key_scales is None else scores * key_scales
            behind = iota(shape, 0) + (behind_first - i * TILE) - iota(shape, 1)
            scores = jnp.where((behind >= 0) & (iota(shape, 1) < num_seen), scores, MASKED)
            _values_are_ready(buffers, slot, num_seen, is_ready)
            value_scales = buffers.scales_of(1, slot, num_seen, shape, axis=1)
            state = accumulate(state, scores, buffers.tile(1, slot), value_scales)
            buffers.release(1, slot)
            if buffers.wide:
                _meet(is_ready)  # before the next tile comes where the other still multiplies
            return state

        acc, _, total = lax.fori_loop(0, num_steps, step, empty_state(queries.shape, axis=0))
        acc = acc / lax.broadcast_in_dim(total, acc.shape, [0])
        results[...] = acc.astype(results.dtype)
        plgpu.commit_smem()
        skipped = first_row + offset - start
        num_owned = jnp.clip(num_rows - offset, 0, TILE)
        for bit in range(TILE.bit_length()):  # 64 rows, or what 32, 16, ... rows make together

            @pl.when((num_owned >> bit) & 1 == 1)
            def _(bit: int = bit) -> None:  # TMA takes multiples of 128 bytes, which rows are, anywhere
                at = (num_owned >> (bit + 1)) << (bit + 1)
                piece = results.at[pl.ds(skipped + at, 1 << bit)]
                plgpu.copy_smem_to_gmem(piece, out_ref.at[pl.ds(start + skipped + at, 1 << bit), head])

        plgpu.wait_smem_to_gmem(0)

    @pl.when((warpgroup == _QUERY_WARPGROUPS) & (num_steps > 0))
    def _copy() -> None:
        plgpu.set_max_registers(40, action="decrease")
        kv_head = lax.div(head, jnp.int32(group))
        head_of = _head_of(layer_ref[0], num_layers, kv_head, q_ref.shape[1] // group)
        Source(views, tables_ref, seq, length, head_of, block_size).copy(buffers, jnp.int32(0), num_steps)
        drain(buffers, num_steps)


def _keys_are_ready(buffers: Buffers, slot: jax.Array, num_seen: jax.Array, is_ready: Any) -> None:
    """For both warpgroups of queries; of 8 bits V is ready then, too: each of them brings one."""
    if not buffers.wide:
        buffers.wait(0, slot)
        return
    for index in range(2):
        buffers.wait(index, slot)
        widen = functools.partial(buffers.widen, index, slot, num_seen)
        pl.when(lax.axis_index("warpgroup") == index)(widen)
    _meet(is_ready)


def _values_are_ready(buffers: Buffers, slot: jax.Array, num_seen: jax.Array, is_ready: Any) -> None:
    """For both warpgroups; one of them zeroes what is past the last token."""
    if buffers.wide:
        return
    buffers.wait(1, slot)

    @pl.when(num_seen < TILE)
    def _() -> None:
        @pl.when(lax.axis_index("warpgroup") == 0)
        def _() -> None:
            buffers.zero_from(slot, num_seen)
            plgpu.barrier_arrive(is_ready)

        plgpu.barrier_wait(is_ready)


def _meet(is_ready: Any) -> None:
    plgpu.barrier_arrive(is_ready)
    plgpu.barrier_wait(is_ready)


def _call(kernel: Any, **options: Any) -> Any:
    return plgpu.kernel(
        kernel,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=_interpreter() if is_interpreted() else None,
        **options,
    )


def _interpreter() -> Any:
    if hasattr(plgpu, "InterpretGPUParams"):
        params = plgpu.InterpretGPUParams
    else:  # JAX 0.10
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams as params
    return params(detect_races=True)


def _head_of(layer: Any, num_layers: int, kv_head: Any, num_kv_heads: int) -> Callable[[Any, int], Any]:
    """What says where K (0) or V (1) of a block is, in KV heads of blocks."""
    return lambda block, index: ((block * num_layers + layer) * 2 + index) * num_kv_heads + kv_head
