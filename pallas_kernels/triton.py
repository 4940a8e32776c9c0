"""Paged attention and KV writes as Pallas kernels lowered through Triton (NVIDIA, Ampere and newer).

Every kernel addresses the whole pool with index arrays, so a tile of KV spans as many blocks as it needs:
tile size and block size are independent. Axes that Triton wants as powers of two (head_dim, the query
heads of a KV head) are padded inside the kernel and masked. Softmax is computed in float32.

On a CPU the kernels run in Pallas' interpret mode, for tests.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxllm.errors import ConfigError
from jaxllm.pallas_kernels.heads import RopeTable
from jaxllm.pallas_kernels.kv_layout import LEAST, KVLayout, layout_of
from jaxllm.pallas_kernels.ptx import exp2_of, words_as_halves
from jaxllm.pallas_kernels.tiles import (
    chunk_tokens,
    current_device,
    is_interpreted,
    query_tiles,
)

# JAX 0.11 deprecates this lowering and says so each time a program that holds a kernel is lowered, which
# happens in the caller's jit. Triton is still the choice for Ampere, where Mosaic GPU does not run.
warnings.filterwarnings(
    "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
)

_MIN_DOT = 16
_LEAST_PEAK = -1e30
_LOG2_E = 1.4426950408889634
_COMBINED_AT_ONCE = 16
_HOPPER = re.compile(r"\b(H100|H200|H800|H20|GH200)\b")
_SMALL_CORES = re.compile(r"\b(A10G?|A16|A2|A40|A[2456]000|L2|L4|L20|L40[SG]?|GB10|RTX|GeForce)\b")
"""Names of NVIDIA devices of compute capability 8.6, 8.9 and 12.0: 100 KiB of shared memory a core."""
_STATIC = ("scale", "window", "soft_cap", "tiling")
_TILING = re.compile(r"k(\d+),q(\d+),w(\d+),s(\d+)")


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How attention is cut, written `k64,q64,w4,s2`.

    Attributes:
        kv_tile: keys a program reads at a time; a power of two from 16 to 256.
        query_tile: rows of a prefill program, one for each query head that shares a KV head, of each token; a
            power of two from 16 to 256. Decoding has none.
        num_warps: of a program: 1, 2, 4, 8 or 16.
        num_stages: depth of the software pipeline, 1 to 8: tiles of KV are asked for one ahead from 2 on, two
            ahead from 5 on and three from 7 on, for what the block table says takes a stage as well.
    """

    kv_tile: int = 64
    query_tile: int = 64
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        for name, allowed in (
            ("kv_tile", (16, 32, 64, 128, 256)),
            ("query_tile", (16, 32, 64, 128, 256)),
            ("num_warps", (1, 2, 4, 8, 16)),
            ("num_stages", tuple(range(1, 9))),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name} is {value}: use one of {', '.join(map(str, allowed))}")

    @classmethod
    def parse(cls, text: str) -> Tiling:
        """The tiling that `str` gives as `text`.

        Raises:
            ConfigError: it is not of that form, or a number is out of bounds.
        """
        match = _TILING.fullmatch(text)
        if match is None:
            raise ConfigError(f"tiling {text!r} is not of the form {str(cls())!r}")
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        return f"k{self.kv_tile},q{self.query_tile},w{self.num_warps},s{self.num_stages}"


def default_tiling(op: str, kind: str, dtype: Any, head_dim: int, kv_bytes: int | None = None) -> Tiling:
    """What `op` ("decode" or "prefill") takes on a device of this kind for KV that is computed in this dtype.

    Chosen from what the compiled kernels need at head_dim 128 (`scripts/inspect_tilings.py`): no register is
    spilled, and decodes in 16 bits have at least two programs on a core, so that one computes while the other
    waits for its KV. Cores with 100 KiB of shared memory get smaller tiles for it; so does float32, whose
    products take no tensor cores. Where 128 rows of a prompt fit, two groups of warps share their KV.

    Args:
        op: the operation.
        kind: of the device, as it names itself.
        dtype: that of queries, or the pool's if that is wider.
        head_dim: size of heads.
        kv_bytes: of a number in the pool; those of `dtype` by default.
    """
    is_hopper, is_small = _HOPPER.search(kind), _SMALL_CORES.search(kind)
    if jnp.dtype(dtype).itemsize == 4:
        kv_tile = 16 if head_dim > 128 or (is_hopper and op == "prefill") else 32
        return Tiling(kv_tile) if op == "decode" else Tiling(kv_tile, 32, 8)
    if op == "prefill" and kv_bytes == 1:  # whose conversion takes registers
        return Tiling() if is_hopper else Tiling(64, 32)
    if op == "prefill" and head_dim <= 128 and not is_small:
        return Tiling(64, 128, 8, 5 if is_hopper else 2)
    return Tiling(32) if is_small else Tiling()


def alternative_tilings(op: str, dtype: Any) -> tuple[Tiling, ...]:
    """Tilings that may be faster than the default one at some shapes of 16-bit `op`; none of float32."""
    if jnp.dtype(dtype).itemsize == 4:
        return ()
    if op == "decode":
        return (
            Tiling(), Tiling(num_stages=3), Tiling(32), Tiling(32, num_stages=5), Tiling(128, num_warps=8)
        )  # fmt: skip
    return Tiling(), Tiling(64, 128, 8, 5), Tiling(128, 128, 8), Tiling(32), Tiling(32, 64, 4, 5)


@functools.partial(jax.jit, static_argnames=_STATIC)
def decode_attention(
    q: jax.Array,
    pool: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    layer: int | jax.Array,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    tiling: Tiling | None = None,
) -> jax.Array:
    """Flash-decoding: each program reads a chunk of a row's KV; where rows may have several, these combine.

    A row's chunks, and so its bits, do not depend on the lengths of the others.
    """
    layout = layout_of(pool)
    read_as, kind = _widest(q.dtype, layout), current_device().device_kind
    is_default, tiling = (
        tiling is None,
        tiling or default_tiling("decode", kind, read_as, q.shape[2], pool.dtype.itemsize),
    )
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = pool.shape[3], pool.shape[4]
    max_tokens = block_tables.shape[1] * block_size
    chunk = chunk_tokens(num_rows * num_kv_heads, max_tokens, tiling.kv_tile)
    if is_default and chunk > 4 * tiling.kv_tile and _HOPPER.search(kind):
        tiling = dataclasses.replace(tiling, num_stages=3)  # 5 % faster on an H200, 256 rows of 1,024 tokens
    num_chunks = pl.cdiv(max_tokens, chunk)
    group = num_q_heads // num_kv_heads
    stats = jax.ShapeDtypeStruct((num_rows, num_chunks, num_kv_heads, group), jnp.float32)
    partial = jax.ShapeDtypeStruct((*stats.shape, head_dim), jnp.float32), stats, stats
    out = _call(
        functools.partial(
            _decode_kernel,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            chunk=chunk,
            kv_tile=tiling.kv_tile,
            layout=layout,
        ),
        tiling,
        grid=(num_rows, num_kv_heads, num_chunks),
        out_shape=(jax.ShapeDtypeStruct(q.shape, q.dtype),) if num_chunks == 1 else partial,
        name="paged_decode_attention",
    )(layer_operand(layer), q, block_tables, lengths, *_readable(pool))
    if num_chunks == 1:
        return out[0]
    acc, peak, total = out
    return combine_chunks(acc, peak, total, lengths, q, chunk, window=window)


@functools.partial(jax.jit, static_argnames=("chunk", "window"))
def combine_chunks(
    acc: jax.Array,
    peak: jax.Array,
    total: jax.Array,
    lengths: jax.Array,
    q: jax.Array,
    chunk: int,
    window: int | None = None,
) -> jax.Array:
    """The attention of rows from that over their chunks, of which only those in use are read.

    Args:
        acc: float32 `[num_rows, num_chunks, num_kv_heads, group, head_dim]`, weighted sums of V; the
            fourth axis may be longer.
        peak: float32 `[num_rows, num_chunks, num_kv_heads, group]`, the largest scores, of base 2; likewise.
        total: like `peak`, sums of the weights.
        lengths: int32 `[num_rows]`, tokens of each row.
        q: the queries `[num_rows, num_q_heads, head_dim]`, which are not read.
        chunk: tokens of a chunk.
        window: how many of the latest tokens rows see; chunks without any of them are not read.

    Returns:
        An array like `q`; zeros in rows of length 0.
    """
    num_rows, num_q_heads, _ = q.shape
    group = num_q_heads // acc.shape[2]
    return _call(
        functools.partial(_combine_kernel, chunk=chunk, group=group, window=window),
        Tiling(),
        grid=(num_rows, num_q_heads),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        name="paged_combine_chunks",
    )(acc, peak, total, lengths)


@functools.partial(jax.jit, static_argnames=_STATIC)
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
    window: int | None = None,
    soft_cap: float | None = None,
    tiling: Tiling | None = None,
) -> jax.Array:
    """Flash attention over tiles of query rows: all heads that share a KV head, of tokens of one sequence."""
    layout = layout_of(pool)
    read_as, kind = _widest(q.dtype, layout), current_device().device_kind
    tiling = tiling or default_tiling("prefill", kind, read_as, q.shape[2], pool.dtype.itemsize)
    num_tokens, num_q_heads, _ = q.shape
    num_kv_heads = pool.shape[3]
    members = pl.next_power_of_2(num_q_heads // num_kv_heads)
    fewest = pl.cdiv(_MIN_DOT, members)
    tile_tokens = max(fewest, min(tiling.query_tile // members, pl.next_power_of_2(num_tokens)))
    tiles = query_tiles(query_starts, lengths, num_seqs, num_tokens, tile_tokens)
    out = _call(
        functools.partial(
            _prefill_kernel,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            tile_tokens=tile_tokens,
            kv_tile=tiling.kv_tile,
            layout=layout,
        ),
        tiling,
        grid=(tiles.shape[0], num_kv_heads),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        name="paged_prefill_attention",
    )(layer_operand(layer), q, block_tables, tiles, *_readable(pool))
    rows = jnp.arange(num_tokens)
    is_owned = (rows >= query_starts[0]) & (rows < query_starts[num_seqs])
    return jnp.where(is_owned[:, None, None], out, jnp.zeros((), q.dtype))


@jax.jit
def rotate_and_write(
    qkv: jax.Array,
    rope: RopeTable | None,
    pool: jax.Array,
    slot_mapping: jax.Array,
    *,
    layer: int | jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Rotate a row's queries and keys, and store its keys and values in the aliased pool, all in one kernel.

    Arguments are those of `pallas_kernels.attend`.

    Returns:
        The updated pool, and the queries `[num_rows, num_q_heads, head_dim]`.
    """
    num_rows, columns = qkv.shape
    layout, areas = layout_of(pool), _areas(pool)
    num_kv_heads, head_dim = pool.shape[3], layout.head_dim
    q = jax.ShapeDtypeStruct((num_rows, columns // head_dim - 2 * num_kv_heads, head_dim), qkv.dtype)
    arguments = (*(rope or ()), layer_operand(layer), qkv, slot_mapping, areas)
    areas, q = _call(
        functools.partial(_rotate_kernel, layout=layout),
        Tiling(),
        grid=(num_rows,),
        out_shape=(jax.ShapeDtypeStruct(areas.shape, areas.dtype), q),
        input_output_aliases={len(arguments) - 1: 0},
        name="paged_rotate_and_write",
    )(*arguments)
    return _as_pool(areas, pool), q


@jax.jit
def write_kv(
    pool: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array, *, layer: int | jax.Array
) -> jax.Array:
    """One program per token, storing into the aliased pool."""
    areas = _areas(pool)
    areas = _call(
        functools.partial(_write_kernel, layout=layout_of(pool)),
        Tiling(),
        grid=(k.shape[0],),
        out_shape=jax.ShapeDtypeStruct(areas.shape, areas.dtype),
        input_output_aliases={4: 0},
        name="paged_write_kv",
    )(layer_operand(layer), k, v, slot_mapping, areas)
    return _as_pool(areas, pool)


def _call(kernel: Any, tiling: Tiling, **options: Any) -> Any:
    return pl.pallas_call(
        kernel,
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=is_interpreted(),
        **options,
    )


def layer_operand(layer: int | jax.Array) -> jax.Array:
    """What tells kernels their layer: as data, so that all layers share one kernel."""
    return jnp.asarray(layer, jnp.int32).reshape(1)


def _decode_kernel(
    layer_ref: Any,
    q_ref: Any,
    tables_ref: Any,
    lengths_ref: Any,
    *refs: Any,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    chunk: int,
    kv_tile: int,
    layout: KVLayout,
) -> None:
    pool_refs, out_refs = refs[: _num_views(layout)], refs[_num_views(layout) :]
    row, kv_head, index = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    layer, group = layer_ref[0], q_ref.shape[1] // pool_refs[0].shape[3]
    length = lengths_ref[row]
    seen_from = _seen_from(length - 1, window)
    first = index * chunk
    last = jnp.minimum(first + chunk, length)
    first = jnp.maximum(first, seen_from // kv_tile * kv_tile)
    is_used = (first < last) | (len(out_refs) == 1)  # a whole row is stored even if it has no token
    heads = jnp.arange(max(_MIN_DOT, pl.next_power_of_2(group)))
    is_head = (heads < group) & is_used
    heads_at = (kv_head * group + heads)[:, None]
    query = _load_query(q_ref, (row, heads_at), is_head, layout)

    def body(tile: jax.Array, state: _State) -> _State:
        tokens = first + tile * kv_tile + jnp.arange(kv_tile)
        loaded = _load_tile(pool_refs, tables_ref, row, kv_head, tokens, last, layer, layout, q_ref.dtype)
        seen = (tokens >= seen_from) & (tokens < last)
        return _accumulate(state, query, loaded, seen[None, :], scale, soft_cap)

    num_tiles = pl.cdiv(jnp.maximum(last - first, 0), kv_tile)
    accs, peak, total = lax.fori_loop(0, num_tiles, body, _empty_state(heads.shape[0], layout))
    if len(out_refs) == 1:
        _store_parts(out_refs[0], (row, heads_at), _quotients(accs, total), is_head, layout)
    else:
        acc_ref, peak_ref, total_ref = out_refs
        _store_parts(acc_ref, (row, index, kv_head, heads[:, None]), accs, is_head, layout)
        plgpu.store(peak_ref.at[row, index, kv_head, heads], peak, mask=is_head)
        plgpu.store(total_ref.at[row, index, kv_head, heads], total, mask=is_head)


def _combine_kernel(
    acc_ref: Any,
    peak_ref: Any,
    total_ref: Any,
    lengths_ref: Any,
    out_ref: Any,
    *,
    chunk: int,
    group: int,
    window: int | None,
) -> None:
    row, head = pl.program_id(0), pl.program_id(1)
    kv_head, member = head // group, head % group
    num_chunks, head_dim = acc_ref.shape[1], out_ref.shape[2]
    num_used = pl.cdiv(lengths_ref[row], chunk)
    first_used = _seen_from(lengths_ref[row] - 1, window) // chunk
    at_once = min(_COMBINED_AT_ONCE, pl.next_power_of_2(num_chunks))
    dims = jnp.arange(pl.next_power_of_2(head_dim))

    def body(step: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        acc, old_peak, total = state
        chunks = step * at_once + jnp.arange(at_once)
        is_used = (chunks >= first_used) & (chunks < num_used)
        peaks = plgpu.load(peak_ref.at[row, chunks, kv_head, member], mask=is_used, other=_LEAST_PEAK)
        totals = plgpu.load(total_ref.at[row, chunks, kv_head, member], mask=is_used, other=0.0)
        mask = is_used[:, None] & (dims < head_dim)[None, :]
        at = acc_ref.at[row, chunks[:, None], kv_head, member, dims[None, :]]
        parts = plgpu.load(at, mask=mask, other=0.0)
        peak = jnp.maximum(old_peak, peaks.max())
        decay, weights = jnp.exp2(old_peak - peak), jnp.exp2(peaks - peak)
        acc = acc * decay + (parts * weights[:, None]).sum(axis=0)
        return acc, peak, total * decay + (totals * weights).sum()

    start = jnp.zeros(dims.shape, jnp.float32), jnp.float32(_LEAST_PEAK), jnp.float32(0)
    acc, _, total = lax.fori_loop(first_used // at_once, pl.cdiv(num_used, at_once), body, start)
    out = (acc / jnp.where(total > 0, total, 1.0)).astype(out_ref.dtype)
    plgpu.store(out_ref.at[row, head, dims], out, mask=dims < head_dim)


def _prefill_kernel(
    layer_ref: Any,
    q_ref: Any,
    tables_ref: Any,
    tiles_ref: Any,
    *refs: Any,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    tile_tokens: int,
    kv_tile: int,
    layout: KVLayout,
) -> None:
    *pool_refs, out_ref = refs
    tile = pl.num_programs(0) - 1 - pl.program_id(0)  # those with most to do begin
    kv_head, layer = pl.program_id(1), layer_ref[0]
    group = q_ref.shape[1] // pool_refs[0].shape[3]
    members = pl.next_power_of_2(group)
    seq, first_row, num_rows, position = (tiles_ref[tile, i] for i in range(4))
    places = jnp.arange(tile_tokens * members)
    rows, member = places // members, places % members
    is_row = (rows < num_rows) & (member < group)
    rows_at = (first_row + rows)[:, None], (kv_head * group + member)[:, None]
    query = _load_query(q_ref, rows_at, is_row, layout)
    kv_limit = jnp.where(num_rows > 0, position + num_rows, 0)

    def load(step: jax.Array, limit: jax.Array | None) -> tuple[jax.Array, _Tile]:
        tokens = step * kv_tile + jnp.arange(kv_tile)
        at = seq, kv_head, tokens, limit, layer, layout
        return tokens, _load_tile(pool_refs, tables_ref, *at, q_ref.dtype)

    def whole(step: jax.Array, state: _State) -> _State:
        return _accumulate(state, query, load(step, None)[1], None, scale, soft_cap)

    def partly(step: jax.Array, state: _State) -> _State:
        tokens, loaded = load(step, kv_limit)
        positions = (position + rows)[:, None]
        seen = (tokens[None, :] <= positions) & (tokens < kv_limit)[None, :]
        if window is not None:
            seen &= tokens[None, :] > positions - window
        return _accumulate(state, query, loaded, seen, scale, soft_cap)

    state = _empty_state(places.shape[0], layout)
    first, end = _seen_from(position, window) // kv_tile, pl.cdiv(kv_limit, kv_tile)
    if window is None:  # all rows see all tokens of the tiles before the one with the first row's own
        num_whole = jnp.minimum((position + 1) // kv_tile, end)
        state, first = lax.fori_loop(0, num_whole, whole, state), num_whole
    accs, _, total = lax.fori_loop(first, end, partly, state)
    _store_parts(out_ref, rows_at, _quotients(accs, total), is_row, layout)


def _rotate_kernel(*refs: Any, layout: KVLayout) -> None:
    *table_refs, layer_ref, qkv_ref, slots_ref, _, pool_ref, q_ref = refs
    row, layer = pl.program_id(0), layer_ref[0]
    num_kv_heads, head_dim = pool_ref.shape[3], layout.head_dim
    num_q_heads = q_ref.shape[1]
    is_valid, block, offset = _place(slots_ref[row], pool_ref, layout)
    size = head_dim // max(1, len(table_refs))  # heads are read in two halves, to be rotated, or whole
    starts, step = range(0, head_dim, size), _per_word(layout)
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
            halves = [plgpu.load(qkv_ref.at[row, columns], mask=mask, other=0.0) for columns in at]
            if table and index < 2:
                (cos, sin), (first, second) = table, (half.astype(jnp.float32) for half in halves)
                halves = [first * cos - second * sin, second * cos + first * sin]
            parts.append([half.astype(qkv_ref.dtype) for half in halves])
        if index:
            places = [start // step + words for start in starts]
            heads_at = block, layer, index - 1, heads
            _store_heads(pool_ref, heads_at, offset, layout, places, parts, mask, is_valid)
        else:
            for one, halves in zip(dims, parts, strict=True):
                for start, half in zip(starts, halves, strict=True):
                    plgpu.store(q_ref.at[row, heads, start + one], half, mask=mask)
        first_head += num_heads


def _write_kernel(
    layer_ref: Any, k_ref: Any, v_ref: Any, slots_ref: Any, _: Any, pool_ref: Any, *, layout: KVLayout
) -> None:
    token, layer, step = pl.program_id(0), layer_ref[0], _per_word(layout)
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


def _per_word(layout: KVLayout) -> int:
    """Numbers in an element of the pool as kernels see it."""
    return 2 if layout.array_dtype.itemsize == 1 else 1


def why_not(layout: KVLayout, block_size: int) -> str | None:
    """Why the kernels do not take KV of a layout in blocks of so many tokens, or None if they do."""
    if _per_word(layout) == 1:
        return None
    if layout.head_dim % 4:
        return f"KV of {layout.dtype} needs heads of a multiple of 4, and these have {layout.head_dim}"
    is_aligned = layout.head_dim % 16 == block_size * layout.width % 16 == 0
    if is_aligned or is_interpreted():  # JAX 0.10 copies 16 bytes at a time all the same
        return None
    return (
        f"on a GPU KV of {layout.dtype} needs heads of a multiple of 16 and blocks of a multiple of 4, not "
        f"{layout.head_dim} and {block_size}"
    )


def _areas(pool: jax.Array) -> jax.Array:
    """The pool as kernels see it, `[blocks, layers, 2, KV heads, elements]`; it is not copied.

    One of 8 bits has words of 16 bits, two numbers each: Pallas takes offsets of 32 bits, with a sign, in
    arrays of up to 4 GiB.

    Raises:
        ConfigError: `why_not` gives a reason.
    """
    layout = layout_of(pool)
    areas = pool.reshape(*pool.shape[:4], -1)
    if _per_word(layout) == 1:
        return areas
    if reason := why_not(layout, pool.shape[4]):
        raise ConfigError(f"attention implementation 'triton': {reason}; use 'xla', or KV of 16 bits")
    return lax.bitcast_convert_type(areas.reshape(*areas.shape[:4], -1, 2), jnp.int16)


def _as_pool(areas: jax.Array, pool: jax.Array) -> jax.Array:
    """What `_areas` makes of a pool like this one, as it was."""
    return (areas if areas.dtype == pool.dtype else lax.bitcast_convert_type(areas, pool.dtype)).reshape(
        pool.shape
    )


def _readable(pool: jax.Array) -> tuple[jax.Array, ...]:
    """The views of a pool that attention reads: its areas, and of int8 the same as float32, for scales."""
    areas = _areas(pool)
    if _num_views(layout_of(pool)) == 1:
        return (areas,)
    return areas, lax.bitcast_convert_type(areas.reshape(*areas.shape[:4], -1, 2), jnp.float32)


def _num_views(layout: KVLayout) -> int:
    return 2 if layout.dtype == "int8" else 1


def _block_size(pool_ref: Any, layout: KVLayout) -> int:
    return int(pool_ref.shape[4] * _per_word(layout) // layout.width)


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
            place = _block_size(pool_ref, layout) * layout.head_dim // 2 + 2 * offset + word
            plgpu.store(pool_ref.at[*at, place], part, mask=is_head & is_valid)
    elif layout.dtype.startswith("fp8"):
        stored = [[layout.stored(part) for part in one] for one in parts]
        parts = [[lax.bitcast_convert_type(part, jnp.int8) for part in one] for one in stored]
    for place, first, *others in zip(places, *parts, strict=True):
        for other in others:
            first = (first.astype(jnp.int32) & 255 | other.astype(jnp.int32) << 8).astype(jnp.int16)
        place = offset * (layout.head_dim // _per_word(layout)) + place
        plgpu.store(pool_ref.at[*at, place], first.astype(pool_ref.dtype), mask=mask & is_valid)


def _nearest(x: jax.Array) -> jax.Array:
    """Numbers of at most 127 rounded to the nearest integer, halves to even, as int8."""
    shifted = x + 1.5 * 2.0**23  # a float whose last bits are the integer
    return lax.bitcast_convert_type(shifted, jnp.int32).astype(jnp.int8)


def _place(slot: jax.Array, pool_ref: Any, layout: KVLayout) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether a slot is one of the pool's, and its block and offset."""
    num_blocks, block_size = pool_ref.shape[0], _block_size(pool_ref, layout)
    is_valid = (slot >= 0) & (slot < num_blocks * block_size)
    slot = jnp.where(is_valid, slot, 0)
    return is_valid, slot // block_size, slot % block_size


def _seen_from(position: jax.Array, window: int | None) -> jax.Array:
    """The first token that the query at a position sees."""
    return jnp.int32(0) if window is None else jnp.maximum(position + 1 - window, 0)


_State = tuple[tuple[jax.Array, ...], jax.Array, jax.Array]
"""Of an online softmax, of base 2: accumulators of the parts of heads, running maximum, running sum."""


class _Query(NamedTuple):
    """Queries `[rows, padded head_dim / parts]`, and what a number of 1 stands for, `[rows]` float32.

    Heads are in parts where an element of the pool holds several numbers: the first of each, the second.
    """

    parts: list[jax.Array]
    units: jax.Array | None = None


class _Tile(NamedTuple):
    """K and V `[tokens, padded head_dim / parts]`, and of int8 what a code of 1 stands for, `[tokens]`."""

    key: list[jax.Array]
    value: list[jax.Array]
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None


def _dims(layout: KVLayout) -> list[jax.Array]:
    """The dimensions of each part of heads, and of their padding."""
    step = _per_word(layout)
    words = jnp.arange(pl.next_power_of_2(layout.head_dim) // step)
    return [words * step + place for place in range(step)]


def _load_query(q_ref: Any, at: tuple[Any, ...], is_row: jax.Array, layout: KVLayout) -> _Query:
    """Queries by their indices but the last.

    Those of bfloat16 become float16 where keys are that, divided by a power of two, so that all of them fit.
    """
    parts = [
        plgpu.load(
            q_ref.at[*at, dims[None, :]],
            mask=is_row[:, None] & (dims < layout.head_dim)[None, :],
            other=0.0,
        )
        for dims in _dims(layout)
    ]
    has_halves = len(parts) > 1 or _widest(q_ref.dtype, layout) == jnp.float16
    if q_ref.dtype != jnp.bfloat16 or not has_halves:
        return _Query(parts)
    exact = [part.astype(jnp.float32) for part in parts]
    most = functools.reduce(jnp.maximum, [jnp.abs(part).max(axis=1) for part in exact])
    power = lax.bitcast_convert_type(lax.bitcast_convert_type(most, jnp.int32) & 0x7F800000, jnp.float32)
    units = jnp.where(power > 0, power, 1.0)
    return _Query([(part / units[:, None]).astype(jnp.float16) for part in exact], units)


def _load_tile(
    pool_refs: Sequence[Any],
    tables_ref: Any,
    row: jax.Array,
    kv_head: jax.Array,
    tokens: jax.Array,
    limit: jax.Array | None,
    layer: jax.Array,
    layout: KVLayout,
    query_dtype: Any,
) -> _Tile:
    """What a row's tokens below `limit`, or all, have in the pool; zeros elsewhere."""
    pool_ref, *scale_refs = pool_refs
    block_size, step = _block_size(pool_ref, layout), _per_word(layout)
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
    return _Tile(found[0], found[1], *scales)


def _numbers(tile: jax.Array, layout: KVLayout, query_dtype: Any) -> list[jax.Array]:
    """The numbers of elements of the pool, part by part: of 8 bits float16, or float32 like queries."""
    if _per_word(layout) == 1:
        return [tile.astype(_widest(query_dtype, layout))]
    numbers = words_as_halves(tile, layout.dtype)
    return [part.astype(jnp.float32) if query_dtype == jnp.float32 else part for part in numbers]


def _widest(query_dtype: Any, layout: KVLayout) -> jnp.dtype:
    """What keys and values of no 8 bits are computed with: the wider of queries' and theirs, or float16."""
    if layout.dtype == "float16" and query_dtype == jnp.bfloat16:
        return layout.array_dtype
    return max(jnp.dtype(query_dtype), layout.array_dtype, key=lambda dtype: dtype.itemsize)


def _empty_state(rows: int, layout: KVLayout) -> _State:
    stats = jnp.zeros(rows, jnp.float32)
    accs = tuple(jnp.zeros((rows, dims.shape[0]), jnp.float32) for dims in _dims(layout))
    return accs, stats + _LEAST_PEAK, stats


def _quotients(accs: Sequence[jax.Array], total: jax.Array) -> list[jax.Array]:
    """Weighted sums over the sums of their weights; zeros where no token was seen."""
    return [acc / jnp.where(total > 0, total, 1.0)[:, None] for acc in accs]


def _store_parts(
    ref: Any, at: tuple[Any, ...], parts: Sequence[jax.Array], is_row: jax.Array, layout: KVLayout
) -> None:
    """Store heads whose parts these are, by their indices but the last."""
    for part, dims in zip(parts, _dims(layout), strict=True):
        mask = is_row[:, None] & (dims < layout.head_dim)[None, :]
        plgpu.store(ref.at[*at, dims[None, :]], part.astype(ref.dtype), mask=mask)


def _accumulate(
    state: _State,
    query: _Query,
    tile: _Tile,
    seen: jax.Array | None,
    scale: float,
    soft_cap: float | None,
) -> _State:
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
