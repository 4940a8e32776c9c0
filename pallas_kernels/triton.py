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
_MASKED = -1e30
_LOG2_E = 1.4426950408889634
_COMBINED_AT_ONCE = 16
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


def default_tiling(op: str, kind: str, dtype: Any, head_dim: int) -> Tiling:
    """What `op` ("decode" or "prefill") takes on a device of this kind for KV of this dtype.

    Chosen from what the compiled kernels need at head_dim 128 (`scripts/inspect_tilings.py`): no register is
    spilled, and in 16 bits at least two programs fit a core, so that one computes while the other waits for
    its KV. Cores with 100 KiB of shared memory get smaller tiles for it; so does float32, whose products take
    no tensor cores.
    """
    if jnp.dtype(dtype).itemsize == 4:
        kv_tile = 32 if head_dim <= 128 else 16
        return Tiling(kv_tile) if op == "decode" else Tiling(kv_tile, 32, 8)
    return Tiling(32) if _SMALL_CORES.search(kind) else Tiling()


def alternative_tilings(op: str, dtype: Any) -> tuple[Tiling, ...]:
    """Tilings that may be faster than the default one at some shapes of 16-bit `op`; none of float32."""
    if jnp.dtype(dtype).itemsize == 4:
        return ()
    if op == "decode":
        return Tiling(), Tiling(32), Tiling(32, num_stages=5), Tiling(128, num_warps=8)
    return Tiling(), Tiling(32), Tiling(64, 32), Tiling(32, 64, 4, 5), Tiling(32, 128, 8, 5)


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
    tiling = tiling or default_tiling("decode", kind, read_as, q.shape[2])
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = pool.shape[3], pool.shape[4]
    max_tokens = block_tables.shape[1] * block_size
    chunk = chunk_tokens(num_rows * num_kv_heads, max_tokens, tiling.kv_tile)
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
    )(layer_operand(layer), q, _words(pool), block_tables, lengths)
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
    tiling = tiling or default_tiling("prefill", kind, read_as, q.shape[2])
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
    )(layer_operand(layer), q, _words(pool), block_tables, tiles)
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
    layout, words = layout_of(pool), _words(pool)
    num_kv_heads, head_dim = pool.shape[3], layout.head_dim
    q = jax.ShapeDtypeStruct((num_rows, columns // head_dim - 2 * num_kv_heads, head_dim), qkv.dtype)
    arguments = (*(rope or ()), layer_operand(layer), qkv, slot_mapping, words)
    words, q = _call(
        functools.partial(_rotate_kernel, layout=layout),
        Tiling(),
        grid=(num_rows,),
        out_shape=(jax.ShapeDtypeStruct(words.shape, words.dtype), q),
        input_output_aliases={len(arguments) - 1: 0},
        name="paged_rotate_and_write",
    )(*arguments)
    return _as_pool(words, pool), q


@jax.jit
def write_kv(
    pool: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array, *, layer: int | jax.Array
) -> jax.Array:
    """One program per token, storing into the aliased pool."""
    words = _words(pool)
    words = _call(
        functools.partial(_write_kernel, layout=layout_of(pool)),
        Tiling(),
        grid=(k.shape[0],),
        out_shape=jax.ShapeDtypeStruct(words.shape, words.dtype),
        input_output_aliases={4: 0},
        name="paged_write_kv",
    )(layer_operand(layer), k, v, slot_mapping, words)
    return _as_pool(words, pool)


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
    pool_ref: Any,
    tables_ref: Any,
    lengths_ref: Any,
    *out_refs: Any,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    chunk: int,
    kv_tile: int,
    layout: KVLayout,
) -> None:
    row, kv_head, index = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    layer = layer_ref[0]
    head_dim = q_ref.shape[2]
    group = q_ref.shape[1] // pool_ref.shape[3]
    length = lengths_ref[row]
    seen_from = _seen_from(length - 1, window)
    first = index * chunk
    last = jnp.minimum(first + chunk, length)
    first = jnp.maximum(first, seen_from // kv_tile * kv_tile)
    is_used = (first < last) | (len(out_refs) == 1)  # a whole row is stored even if it has no token
    heads = jnp.arange(max(_MIN_DOT, pl.next_power_of_2(group)))
    dims = jnp.arange(pl.next_power_of_2(head_dim))
    is_head = (heads < group) & is_used
    mask = is_head[:, None] & (dims < head_dim)[None, :]
    heads_at = kv_head * group + heads
    query = plgpu.load(q_ref.at[row, heads_at[:, None], dims[None, :]], mask=mask, other=0.0)

    def body(tile: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        tokens = first + tile * kv_tile + jnp.arange(kv_tile)
        at = row, kv_head, tokens, last, layer, layout
        loaded = _load_tile(pool_ref, tables_ref, *at, query.dtype)
        seen = (tokens >= seen_from) & (tokens < last)
        return _accumulate(state, query, loaded, seen[None, :], scale, soft_cap)

    start = _empty_state(heads.shape[0], dims.shape[0])
    num_tiles = pl.cdiv(jnp.maximum(last - first, 0), kv_tile)
    acc, peak, total = lax.fori_loop(0, num_tiles, body, start)
    if len(out_refs) == 1:
        out = _quotient(acc, total).astype(out_refs[0].dtype)
        plgpu.store(out_refs[0].at[row, heads_at[:, None], dims[None, :]], out, mask=mask)
    else:
        acc_ref, peak_ref, total_ref = out_refs
        plgpu.store(acc_ref.at[row, index, kv_head, heads[:, None], dims[None, :]], acc, mask=mask)
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
        peaks = plgpu.load(peak_ref.at[row, chunks, kv_head, member], mask=is_used, other=_MASKED)
        totals = plgpu.load(total_ref.at[row, chunks, kv_head, member], mask=is_used, other=0.0)
        mask = is_used[:, None] & (dims < head_dim)[None, :]
        at = acc_ref.at[row, chunks[:, None], kv_head, member, dims[None, :]]
        parts = plgpu.load(at, mask=mask, other=0.0)
        peak = jnp.maximum(old_peak, peaks.max())
        decay, weights = jnp.exp2(old_peak - peak), jnp.exp2(peaks - peak)
        acc = acc * decay + (parts * weights[:, None]).sum(axis=0)
        return acc, peak, total * decay + (totals * weights).sum()

    start = jnp.zeros(dims.shape, jnp.float32), jnp.float32(_MASKED), jnp.float32(0)
    acc, _, total = lax.fori_loop(first_used // at_once, pl.cdiv(num_used, at_once), body, start)
    out = _quotient(acc, total).astype(out_ref.dtype)
    plgpu.store(out_ref.at[row, head, dims], out, mask=dims < head_dim)


def _prefill_kernel(
    layer_ref: Any,
    q_ref: Any,
    pool_ref: Any,
    tables_ref: Any,
    tiles_ref: Any,
    out_ref: Any,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    tile_tokens: int,
    kv_tile: int,
    layout: KVLayout,
) -> None:
    tile = pl.num_programs(0) - 1 - pl.program_id(0)  # those with most to do begin
    kv_head, layer, head_dim = pl.program_id(1), layer_ref[0], q_ref.shape[2]
    group = q_ref.shape[1] // pool_ref.shape[3]
    members = pl.next_power_of_2(group)
    seq, first_row, num_rows, position = (tiles_ref[tile, i] for i in range(4))
    places = jnp.arange(tile_tokens * members)
    rows, member = places // members, places % members
    dims = jnp.arange(pl.next_power_of_2(head_dim))
    mask = ((rows < num_rows) & (member < group))[:, None] & (dims < head_dim)[None, :]
    at = (first_row + rows)[:, None], (kv_head * group + member)[:, None], dims[None, :]
    query = plgpu.load(q_ref.at[*at], mask=mask, other=0.0)
    kv_limit = jnp.where(num_rows > 0, position + num_rows, 0)

    def load(step: jax.Array, limit: jax.Array | None) -> tuple[jax.Array, _Tile]:
        tokens = step * kv_tile + jnp.arange(kv_tile)
        return tokens, _load_tile(
            pool_ref, tables_ref, seq, kv_head, tokens, limit, layer, layout, query.dtype
        )

    def whole(step: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return _accumulate(state, query, load(step, None)[1], None, scale, soft_cap)

    def partly(step: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        tokens, loaded = load(step, kv_limit)
        positions = (position + rows)[:, None]
        seen = (tokens[None, :] <= positions) & (tokens < kv_limit)[None, :]
        if window is not None:
            seen &= tokens[None, :] > positions - window
        return _accumulate(state, query, loaded, seen, scale, soft_cap)

    state = _empty_state(places.shape[0], dims.shape[0])
    first, end = _seen_from(position, window) // kv_tile, pl.cdiv(kv_limit, kv_tile)
    if window is None:  # all rows see all tokens of the tiles before the one with the first row's own
        num_whole = jnp.minimum((position + 1) // kv_tile, end)
        state, first = lax.fori_loop(0, num_whole, whole, state), num_whole
    acc, _, total = lax.fori_loop(first, end, partly, state)
    out = _quotient(acc, total).astype(out_ref.dtype)
    plgpu.store(out_ref.at[*at], out, mask=mask)


def _rotate_kernel(*refs: Any, layout: KVLayout) -> None:
    *table_refs, layer_ref, qkv_ref, slots_ref, _, pool_ref, q_ref = refs
    row, layer = pl.program_id(0), layer_ref[0]
    num_kv_heads, head_dim = pool_ref.shape[3], layout.head_dim
    num_q_heads = q_ref.shape[1]
    is_valid, block, offset = _place(slots_ref[row], pool_ref)
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
            heads_at = block, layer, index - 1, heads, offset
            places = [start // step + words for start in starts]
            _store_heads(pool_ref, heads_at, layout, places, parts, mask, is_valid)
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
    is_valid, block, offset = _place(slots_ref[token], pool_ref)
    heads = jnp.arange(pl.next_power_of_2(num_kv_heads))[:, None]
    words = jnp.arange(pl.next_power_of_2(head_dim) // step)[None, :]
    mask = (heads < num_kv_heads) & (words < head_dim // step)
    for index, ref in enumerate((k_ref, v_ref)):
        dims = [words * step + place for place in range(step)]
        parts = [[plgpu.load(ref.at[token, heads, one], mask=mask, other=0.0)] for one in dims]
        at = block, layer, index, heads, offset
        _store_heads(pool_ref, at, layout, [words], parts, mask, is_valid)


def _per_word(layout: KVLayout) -> int:
    """Numbers in an element of the pool as kernels see it."""
    return 2 if layout.array_dtype.itemsize == 1 else 1


def _words(pool: jax.Array) -> jax.Array:
    """The pool as kernels see it: one of 8 bits as words of 16 bits, two numbers each; it is not copied.

    For Pallas takes offsets of 32 bits, with a sign, in arrays of up to 4 GiB.

    Raises:
        ConfigError: heads of 8 bits have no halves of whole words.
    """
    layout = layout_of(pool)
    if _per_word(layout) == 1:
        return pool
    if layout.head_dim % 4:
        raise ConfigError(
            f"attention implementation 'triton': KV of {layout.dtype} needs heads of a multiple of 4, and "
            f"these have {layout.head_dim}; use 'xla', or KV of 16 bits"
        )
    return lax.bitcast_convert_type(pool.reshape(*pool.shape[:-1], -1, 2), jnp.int16)


def _as_pool(words: jax.Array, pool: jax.Array) -> jax.Array:
    """What `_words` makes of a pool like this one, as it was."""
    if words.dtype == pool.dtype:
        return words
    return lax.bitcast_convert_type(words, pool.dtype).reshape(pool.shape)


def _store_heads(
    pool_ref: Any,
    at: tuple[Any, ...],
    layout: KVLayout,
    places: Sequence[jax.Array],
    parts: Sequence[Sequence[jax.Array]],
    mask: jax.Array,
    is_valid: jax.Array,
) -> None:
    """Store heads where a token's are, in their layout.

    Args:
        pool_ref: the pool as kernels see it.
        at: indices of the heads there.
        layout: of the pool.
        places: of parts of them, in elements of the pool.
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
            plgpu.store(pool_ref.at[*at, layout.head_dim // 2 + word], part, mask=is_head & is_valid)
    elif layout.dtype.startswith("fp8"):
        stored = [[layout.stored(part) for part in one] for one in parts]
        parts = [[lax.bitcast_convert_type(part, jnp.int8) for part in one] for one in stored]
    for place, first, *others in zip(places, *parts, strict=True):
        for other in others:
            first = (first.astype(jnp.int32) & 255 | other.astype(jnp.int32) << 8).astype(jnp.int16)
        plgpu.store(pool_ref.at[*at, place], first.astype(pool_ref.dtype), mask=mask & is_valid)


def _nearest(x: jax.Array) -> jax.Array:
    """Numbers of at most 127 rounded to the nearest integer, halves to even, as int8."""
    shifted = x + 1.5 * 2.0**23  # a float whose last bits are the integer
    return lax.bitcast_convert_type(shifted, jnp.int32).astype(jnp.int8)


def _place(slot: jax.Array, pool_ref: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether a slot is one of the pool's, and its block and offset."""
    num_blocks, block_size = pool_ref.shape[0], pool_ref.shape[4]
    is_valid = (slot >= 0) & (slot < num_blocks * block_size)
    slot = jnp.where(is_valid, slot, 0)
    return is_valid, slot // block_size, slot % block_size


def _seen_from(position: jax.Array, window: int | None) -> jax.Array:
    """The first token that the query at a position sees."""
    return jnp.int32(0) if window is None else jnp.maximum(position + 1 - window, 0)


class _Tile(NamedTuple):
    """K and V `[tokens, padded head_dim]`, and of int8 what a code of 1 stands for, `[tokens]` float32."""

    key: jax.Array
    value: jax.Array
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None


def _load_tile(
    pool_ref: Any,
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
    block_size, step = pool_ref.shape[4], _per_word(layout)
    valid = jnp.full(tokens.shape, True) if limit is None else tokens < limit
    block = plgpu.load(tables_ref.at[row, tokens // block_size], mask=valid, other=0)
    words = jnp.arange(pl.next_power_of_2(layout.head_dim) // step)[None, :]
    mask = valid[:, None] & (words < layout.head_dim // step)
    found, scales = [], []
    for index in range(2):
        heads = block[:, None], layer, index, kv_head, (tokens % block_size)[:, None]
        tile = plgpu.load(pool_ref.at[*heads, words], mask=mask, other=0)
        if step == 2:
            halves = [(tile << 8 >> 8).astype(jnp.int8), (tile >> 8).astype(jnp.int8)]
            tile = jnp.stack(halves, axis=-1).reshape(tile.shape[0], -1)
        if layout.dtype == "int8":
            parts = [
                plgpu.load(pool_ref.at[*heads, layout.head_dim // 2 + word], mask=valid[:, None], other=0)
                for word in range(2)
            ]
            bits = parts[0].astype(jnp.int32) & 0xFFFF | parts[1].astype(jnp.int32) << 16
            scales.append(lax.bitcast_convert_type(bits, jnp.float32).sum(axis=1))
        elif step == 2:
            tile = lax.bitcast_convert_type(tile, layout.array_dtype)
        found.append(tile.astype(_widest(query_dtype, layout)))
    return _Tile(*found, *scales)


def _widest(query_dtype: Any, layout: KVLayout) -> jnp.dtype:
    """What keys and values are computed with: what they are stored as, but for those of 8 bits."""
    return max(jnp.dtype(query_dtype), layout.array_dtype, key=lambda dtype: dtype.itemsize)


def _empty_state(rows: int, dims: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Accumulator, running maximum and running sum of an online softmax."""
    stats = jnp.zeros(rows, jnp.float32)
    return jnp.zeros((rows, dims), jnp.float32), stats + _MASKED, stats


def _quotient(acc: jax.Array, total: jax.Array) -> jax.Array:
    """Weighted sums over the sums of their weights; zeros where no token was seen."""
    return acc / jnp.where(total > 0, total, 1.0)[..., None]


def _accumulate(
    state: tuple[jax.Array, ...],
    query: jax.Array,
    tile: _Tile,
    seen: jax.Array | None,
    scale: float,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One step of the online softmax, of base 2, over a tile of KV, of which all or what is `seen` counts."""
    acc, old_peak, total = state
    key, value, key_scale, value_scale = tile
    scores = _dot(query.astype(key.dtype), key, trans_b=True)
    scores = scores if key_scale is None else scores * key_scale[None, :]
    unit = _LOG2_E * scale
    if soft_cap is not None:
        scores, unit = jnp.tanh(scores * (scale / soft_cap)), _LOG2_E * soft_cap
    scores = scores if seen is None else jnp.where(seen, scores, _MASKED)
    peak = jnp.maximum(old_peak, scores.max(axis=1) * unit)
    decay = jnp.exp2(old_peak - peak)
    weights = jnp.exp2(scores * unit - peak[:, None])  # one multiplication and addition
    scaled = weights if value_scale is None else weights * value_scale[None, :]
    acc = acc * decay[:, None] + _dot(scaled.astype(value.dtype), value)
    return acc, peak, total * decay + weights.sum(axis=1)


def _dot(left: jax.Array, right: jax.Array, trans_b: bool = False) -> jax.Array:
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return plgpu.dot(left, right, trans_b=trans_b, precision=precision)
