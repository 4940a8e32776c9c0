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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxllm.errors import ConfigError
from jaxllm.pallas_kernels import triton_pool, triton_writes
from jaxllm.pallas_kernels.kv_layout import KVLayout, layout_of
from jaxllm.pallas_kernels.tiles import chunk_tokens, current_device, query_tiles
from jaxllm.pallas_kernels.triton_pool import launch, layer_operand, num_views, readable
from jaxllm.pallas_kernels.triton_tiles import (
    LEAST_PEAK,
    State,
    Tile,
    accumulate,
    empty_state,
    load_query,
    load_tile,
    quotients,
    seen_from,
    store_parts,
    widest,
)

# JAX 0.11 deprecates this lowering and says so each time a program that holds a kernel is lowered, which
# happens in the caller's jit. Triton is still the choice for Ampere, where Mosaic GPU does not run.
warnings.filterwarnings(
    "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
)

_MIN_DOT = 16
_COMBINED_AT_ONCE = 16
_HOPPER = re.compile(r"\b(H100|H200|H800|H20|GH200)\b")
_SMALL_CORES = re.compile(r"\b(A10G?|A16|A2|A40|A[2456]000|L2|L4|L20|L40[SG]?|GB10|RTX|GeForce)\b")
"""Names of NVIDIA devices of compute capability 8.6, 8.9 and 12.0: 100 KiB of shared memory a core."""
_STATIC = ("scale", "window", "soft_cap", "tiling", "in_place")
_TILING = re.compile(r"k(\d+),q(\d+),w(\d+),s(\d+)")

rotate_and_write, write_kv = triton_writes.rotate_and_write, triton_writes.write_kv
why_not = triton_pool.why_not


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


def step_attention(
    q: jax.Array,
    pool: jax.Array,
    decode: tuple[jax.Array, jax.Array] | None,
    prompts: tuple[jax.Array, jax.Array, jax.Array, jax.Array] | None,
    **options: Any,
) -> jax.Array:
    """Attention of a step's decodes and prompts in the place of their queries; other rows keep theirs.

    So neither fills the other's rows, nor are the two added up.
    """
    if prompts is not None:
        q = prefill_attention(q, pool, *prompts, **options, in_place=True)
    return q if decode is None else decode_attention(q, pool, *decode, **options, in_place=True)


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
    in_place: bool = False,
) -> jax.Array:
    """Flash-decoding: each program reads a chunk of a row's KV; where rows may have several, these combine.

    A row's chunks, and so its bits, do not depend on the lengths of the others. `in_place` is `q` with the
    results of its first rows, and with what it had in those of length 0.
    """
    layout = layout_of(pool)
    read_as, kind = widest(q.dtype, layout), current_device().device_kind
    tiling = tiling or default_tiling("decode", kind, read_as, q.shape[2], pool.dtype.itemsize)
    (num_rows, table_size), (_, num_q_heads, head_dim) = block_tables.shape, q.shape
    num_kv_heads, block_size = pool.shape[3], pool.shape[4]
    max_tokens = table_size * block_size
    chunk = chunk_tokens(num_rows * num_kv_heads, max_tokens, tiling.kv_tile)
    num_chunks = pl.cdiv(max_tokens, chunk)
    group = num_q_heads // num_kv_heads
    stats = jax.ShapeDtypeStruct((num_rows, num_chunks, num_kv_heads, group), jnp.float32)
    partial = jax.ShapeDtypeStruct((*stats.shape, head_dim), jnp.float32), stats, stats
    out = launch(
        functools.partial(
            _decode_kernel,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            chunk=chunk,
            kv_tile=tiling.kv_tile,
            layout=layout,
            in_place=in_place,
        ),
        tiling.num_warps,
        tiling.num_stages,
        grid=(num_rows, num_kv_heads, num_chunks),
        out_shape=(jax.ShapeDtypeStruct(q.shape, q.dtype),) if num_chunks == 1 else partial,
        input_output_aliases={1: 0} if in_place and num_chunks == 1 else {},
        name="paged_decode_attention",
    )(layer_operand(layer), q, block_tables, lengths, *readable(pool))
    if num_chunks == 1:
        return out[0]
    acc, peak, total = out
    return combine_chunks(acc, peak, total, lengths, q, chunk, window=window, in_place=in_place)


@functools.partial(jax.jit, static_argnames=("chunk", "window", "in_place"))
def combine_chunks(
    acc: jax.Array,
    peak: jax.Array,
    total: jax.Array,
    lengths: jax.Array,
    q: jax.Array,
    chunk: int,
    window: int | None = None,
    *,
    in_place: bool = False,
) -> jax.Array:
    """The attention of rows from that over their chunks, of which only those in use are read.

    Args:
        acc: float32 `[num_rows, num_chunks, num_kv_heads, group, head_dim]`, weighted sums of V; the
            fourth axis may be longer.
        peak: float32 `[num_rows, num_chunks, num_kv_heads, group]`, the largest scores, of base 2; likewise.
        total: like `peak`, sums of the weights.
        lengths: int32 `[num_rows]`, tokens of each row.
        q: the queries `[num_rows or more, num_q_heads, head_dim]`, which are not read.
        chunk: tokens of a chunk.
        window: how many of the latest tokens rows see; chunks without any of them are not read.
        in_place: rows take the place of theirs in `q`.

    Returns:
        An array like `q`; zeros in rows of length 0, or what was there if it is `in_place`.
    """
    num_q_heads = q.shape[1]
    group = num_q_heads // acc.shape[2]
    return launch(
        functools.partial(_combine_kernel, chunk=chunk, group=group, window=window, in_place=in_place),
        grid=(acc.shape[0], num_q_heads),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases={4: 0} if in_place else {},
        name="paged_combine_chunks",
    )(acc, peak, total, lengths, *([q] if in_place else []))


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
    in_place: bool = False,
) -> jax.Array:
    """Flash attention over tiles of query rows: all heads that share a KV head, of tokens of one sequence.

    Rows of no sequence are 0, or what they were in `q` if it is `in_place`.
    """
    layout = layout_of(pool)
    read_as, kind = widest(q.dtype, layout), current_device().device_kind
    tiling = tiling or default_tiling("prefill", kind, read_as, q.shape[2], pool.dtype.itemsize)
    num_tokens, num_q_heads, _ = q.shape
    num_kv_heads = pool.shape[3]
    members = pl.next_power_of_2(num_q_heads // num_kv_heads)
    fewest = pl.cdiv(_MIN_DOT, members)
    tile_tokens = max(fewest, min(tiling.query_tile // members, pl.next_power_of_2(num_tokens)))
    tiles = query_tiles(query_starts, lengths, num_seqs, num_tokens, tile_tokens)
    out = launch(
        functools.partial(
            _prefill_kernel,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            tile_tokens=tile_tokens,
            kv_tile=tiling.kv_tile,
            layout=layout,
        ),
        tiling.num_warps,
        tiling.num_stages,
        grid=(tiles.shape[0], num_kv_heads),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases={1: 0} if in_place else {},
        name="paged_prefill_attention",
    )(layer_operand(layer), q, block_tables, tiles, *readable(pool))
    if in_place:
        return out
    rows = jnp.arange(num_tokens)
    is_owned = (rows >= query_starts[0]) & (rows < query_starts[num_seqs])
    return jnp.where(is_owned[:, None, None], out, jnp.zeros((), q.dtype))


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
    in_place: bool,
) -> None:
    pool_refs, out_refs = refs[: num_views(layout)], refs[num_views(layout) :]
    row, kv_head, index = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    layer, group = layer_ref[0], q_ref.shape[1] // pool_refs[0].shape[3]
    length = lengths_ref[row]
    first_seen = seen_from(length - 1, window)
    first = index * chunk
    last = jnp.minimum(first + chunk, length)
    first = jnp.maximum(first, first_seen // kv_tile * kv_tile)
    is_whole = len(out_refs) == 1 and not in_place  # a row is stored even if it has no token
    is_used = (first < last) | is_whole
    heads = jnp.arange(max(_MIN_DOT, pl.next_power_of_2(group)))
    is_head = (heads < group) & is_used
    heads_at = (kv_head * group + heads)[:, None]
    query = load_query(q_ref, (row, heads_at), is_head, layout)

    def body(tile: jax.Array, state: State) -> State:
        tokens = first + tile * kv_tile + jnp.arange(kv_tile)
        loaded = load_tile(pool_refs, tables_ref, row, kv_head, tokens, last, layer, layout, q_ref.dtype)
        seen = (tokens >= first_seen) & (tokens < last)
        return accumulate(state, query, loaded, seen[None, :], scale, soft_cap)

    num_tiles = pl.cdiv(jnp.maximum(last - first, 0), kv_tile)
    accs, peak, total = lax.fori_loop(0, num_tiles, body, empty_state(heads.shape[0], layout))
    if len(out_refs) == 1:
        store_parts(out_refs[0], (row, heads_at), quotients(accs, total), is_head, layout)
    else:
        acc_ref, peak_ref, total_ref = out_refs
        store_parts(acc_ref, (row, index, kv_head, heads[:, None]), accs, is_head, layout)
        plgpu.store(peak_ref.at[row, index, kv_head, heads], peak, mask=is_head)
        plgpu.store(total_ref.at[row, index, kv_head, heads], total, mask=is_head)


def _combine_kernel(
    acc_ref: Any,
    peak_ref: Any,
    total_ref: Any,
    lengths_ref: Any,
    *refs: Any,
    chunk: int,
    group: int,
    window: int | None,
    in_place: bool,
) -> None:
    out_ref, row, head = refs[-1], pl.program_id(0), pl.program_id(1)
    kv_head, member = head // group, head % group
    num_chunks, head_dim = acc_ref.shape[1], out_ref.shape[2]
    num_used = pl.cdiv(lengths_ref[row], chunk)
    first_used = seen_from(lengths_ref[row] - 1, window) // chunk
    at_once = min(_COMBINED_AT_ONCE, pl.next_power_of_2(num_chunks))
    dims = jnp.arange(pl.next_power_of_2(head_dim))

    def body(step: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        acc, old_peak, total = state
        chunks = step * at_once + jnp.arange(at_once)
        is_used = (chunks >= first_used) & (chunks < num_used)
        peaks = plgpu.load(peak_ref.at[row, chunks, kv_head, member], mask=is_used, other=LEAST_PEAK)
        totals = plgpu.load(total_ref.at[row, chunks, kv_head, member], mask=is_used, other=0.0)
        mask = is_used[:, None] & (dims < head_dim)[None, :]
        at = acc_ref.at[row, chunks[:, None], kv_head, member, dims[None, :]]
        parts = plgpu.load(at, mask=mask, other=0.0)
        peak = jnp.maximum(old_peak, peaks.max())
        decay, weights = jnp.exp2(old_peak - peak), jnp.exp2(peaks - peak)
        acc = acc * decay + (parts * weights[:, None]).sum(axis=0)
        return acc, peak, total * decay + (totals * weights).sum()

    start = jnp.zeros(dims.shape, jnp.float32), jnp.float32(LEAST_PEAK), jnp.float32(0)
    acc, _, total = lax.fori_loop(first_used // at_once, pl.cdiv(num_used, at_once), body, start)
    out = (acc / jnp.where(total > 0, total, 1.0)).astype(out_ref.dtype)
    mask = dims < head_dim
    if in_place:
        mask &= lengths_ref[row] > 0
    plgpu.store(out_ref.at[row, head, dims], out, mask=mask)


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
    query = load_query(q_ref, rows_at, is_row, layout)
    kv_limit = jnp.where(num_rows > 0, position + num_rows, 0)

    def load(step: jax.Array, limit: jax.Array | None) -> tuple[jax.Array, Tile]:
        tokens = step * kv_tile + jnp.arange(kv_tile)
        at = seq, kv_head, tokens, limit, layer, layout
        return tokens, load_tile(pool_refs, tables_ref, *at, q_ref.dtype)

    def whole(step: jax.Array, state: State) -> State:
        return accumulate(state, query, load(step, None)[1], None, scale, soft_cap)

    def partly(step: jax.Array, state: State) -> State:
        tokens, loaded = load(step, kv_limit)
        positions = (position + rows)[:, None]
        seen = (tokens[None, :] <= positions) & (tokens < kv_limit)[None, :]
        if window is not None:
            seen &= tokens[None, :] > positions - window
        return accumulate(state, query, loaded, seen, scale, soft_cap)

    state = empty_state(places.shape[0], layout)
    first, end = seen_from(position, window) // kv_tile, pl.cdiv(kv_limit, kv_tile)
    if window is None:  # all rows see all tokens of the tiles before the one with the first row's own
        num_whole = jnp.minimum((position + 1) // kv_tile, end)
        state, first = lax.fori_loop(0, num_whole, whole, state), num_whole
    accs, _, total = lax.fori_loop(first, end, partly, state)
    store_parts(out_ref, rows_at, quotients(accs, total), is_row, layout)
