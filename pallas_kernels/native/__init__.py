"""Paged attention on CPUs, by kernels that numba compiles and XLA calls.

`attend` stores a step's keys and values and attends over its decodes and prompts in one call for each layer;
the other three ops are parts of it. Rows that are not in use cost nothing.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.pallas_kernels.heads import RopeTable, rotated_heads
from jaxllm.pallas_kernels.kv_layout import layout_of
from jaxllm.pallas_kernels.native.pages import use_huge_pages as use_huge_pages
from jaxllm.pallas_kernels.native.shape import PANEL, AttentionShape, RowsShape, Shape
from jaxllm.pallas_kernels.native.targets import register, why_not_callable
from jaxllm.pallas_kernels.varying import varying_as

LANES = 16
"""Numbers of a vector, of which heads and blocks must be multiples."""
_MAX_HEAD_DIM, _MAX_GROUP = 256, 32

Prompts = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def why_not(num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> str | None:
    """What keeps these kernels from computing a shape here; None if they can."""
    if jax.default_backend() != "cpu":
        return f"the device is a {jax.default_backend()}"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    if head_dim % LANES or head_dim > _MAX_HEAD_DIM:
        return f"head_dim is {head_dim}, not a multiple of {LANES} up to {_MAX_HEAD_DIM}"
    if block_size % LANES:
        return f"block_size is {block_size}, not a multiple of {LANES}"
    if num_q_heads // num_kv_heads > _MAX_GROUP:
        return f"{num_q_heads // num_kv_heads} query heads share a KV head, more than {_MAX_GROUP}"
    return why_not_callable()


def attend(
    qkv: jax.Array,
    rope: RopeTable | None,
    pool: jax.Array,
    slot_mapping: jax.Array,
    decode: tuple[jax.Array, jax.Array] | None,
    prompts: Prompts | None,
    *,
    layer: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """A layer's rotation, writes and attention; see `pallas_kernels.attend`."""
    num_kv_heads, head_dim = pool.shape[3], layout_of(pool).head_dim
    if rope is not None and (qkv.dtype != jnp.float32 or head_dim % (2 * LANES)):
        heads = rotated_heads(qkv, rope, num_kv_heads, head_dim)
        qkv, rope = jnp.concatenate(heads, axis=1).reshape(qkv.shape), None
    num_q_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    out = jax.ShapeDtypeStruct((qkv.shape[0], num_q_heads, head_dim), jnp.float32)
    stored = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    call, rest = _call((stored, out), pool, decode, prompts, layer, scale, window, soft_cap, {3: 0})
    none = jnp.zeros((1, 1), jnp.float32)
    pool, attended = call(qkv.astype(jnp.float32), *(rope or (none, none)), pool, slot_mapping, *rest)
    return pool, attended.astype(qkv.dtype)


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
    decode = block_tables, lengths
    return _attention(q, pool, decode, None, layer, scale, window, soft_cap)


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
    prompts = block_tables, query_starts, lengths, num_seqs
    return _attention(q, pool, None, prompts, layer, scale, window, soft_cap)


def write_kv(
    pool: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array, *, layer: int
) -> jax.Array:
    """Store each token's K and V at its slot; see `pallas_kernels.write_kv`."""
    qkv = jnp.concatenate((k, k, v), axis=1).reshape(len(k), -1).astype(jnp.float32)
    return attend(qkv, None, pool, slot_mapping, None, None, layer=layer, scale=1.0)[0]


def packs(weight: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether `linear` takes a weight `[out, in]` here, packed."""
    return weight.ndim == 2 and weight.dtype == jnp.float32 and why_not(1, 1, LANES, LANES) is None


def packed_shape(out_features: int, in_features: int) -> tuple[int, int, int]:
    """Of a packed weight."""
    return -(-out_features // PANEL), in_features, PANEL


@jax.jit
def pack(weight: jax.Array) -> jax.Array:
    """`[out, in]` of any dtype to panels `[ceil(out / 32), in, 32]`, with zeros at the end."""
    weight = jnp.pad(weight, ((0, -weight.shape[0] % PANEL), (0, 0)))
    return weight.reshape(-1, PANEL, weight.shape[1]).swapaxes(1, 2)


def unpacked_rows(panels: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows `[n, in]` of a packed weight, as those of an embedding."""
    return panels[rows // PANEL, :, rows % PANEL]


def linear(
    x: jax.Array,
    panels: jax.Array,
    out_features: int,
    num_rows: jax.Array | None = None,
    *,
    bias: jax.Array | None = None,
    relu: bool = False,
) -> jax.Array:
    """`x` [rows, in] float32 times a packed weight, plus `bias` -> [rows, out_features] float32.

    Panels of bfloat16 and float16 become float32 on the way: results are as of those, bit for bit. Only the
    first `num_rows`, an int32 scalar, are computed if it is given; the others may hold anything. With `relu`
    what is below 0 becomes 0.
    """
    return _product(panels.dtype.name, x, panels, out_features, num_rows, bias, relu)


def packs_codes(in_features: int) -> bool:
    """Whether `linear_int8` takes weights of so many inputs here."""
    return in_features % LANES == 0 and why_not(1, 1, LANES, LANES) is None


@jax.jit
def pack_codes(codes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`[out, in]` int8 to panels `[ceil(out / 32), in / 4, 32, 4]`, and 128 times each row's sum, int32.

    The sums are `[32 * ceil(out / 32)]`; what is added at the end is 0.
    """
    codes = jnp.pad(codes, ((0, -codes.shape[0] % PANEL), (0, 0)))
    panels = codes.reshape(-1, PANEL, codes.shape[1] // 4, 4).swapaxes(1, 2)
    return panels, 128 * codes.sum(axis=1, dtype=jnp.int32)


def unpacked_codes(panels: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows `[n, in]` of packed codes."""
    return panels[rows // PANEL, :, rows % PANEL].reshape(*rows.shape, -1)


def linear_int8(
    x: jax.Array,
    panels: jax.Array,
    scales: jax.Array,
    sums: jax.Array,
    out_features: int,
    num_rows: jax.Array | None = None,
    *,
    bias: jax.Array | None = None,
    relu: bool = False,
) -> jax.Array:
    """As `linear`, of codes and sums from `pack_codes` and `scales` [32 * ceil(out / 32)] float32.

    Each row of `x` is rounded to int8 by 1 / 127 of its largest number; the products are summed exactly.
    """
    return _product("int8", x, panels, out_features, num_rows, bias, relu, scales, sums)


def linear_codes(
    x: jax.Array,
    panels: jax.Array,
    scales: jax.Array,
    offsets: jax.Array | None,
    out_features: int,
    num_rows: jax.Array | None = None,
    *,
    kind: str,
    bias: jax.Array | None = None,
    relu: bool = False,
) -> jax.Array:
    """As `linear`, of weights `code * scale + offset` that are codes of eight or four bits.

    Args:
        x: [rows, in] float32.
        panels: `pack` of codes [out, in], or of bytes [out, in / 2] that hold two of them, the first below.
        scales: `pack` of [out, groups] float32, each for as many inputs one after another.
        offsets: like them; None for 0.
        out_features: of the weight.
        num_rows: as for `linear`.
        kind: of the codes, one of `shape.CODES`; what floats stand for is said by `vectors.Builder.decoded`.
        bias: as for `linear`.
        relu: as for `linear`.
    """
    offsets = jnp.zeros((0, 1, PANEL), jnp.float32) if offsets is None else offsets
    return _product(kind, x, panels, out_features, num_rows, bias, relu, scales, offsets)


def _product(
    numbers: str,
    x: jax.Array,
    panels: jax.Array,
    out_features: int,
    num_rows: jax.Array | None,
    bias: jax.Array | None,
    relu: bool,
    *scales: jax.Array,
) -> jax.Array:
    from jaxllm.pallas_kernels.native import machine_code  # imports llvmlite

    out = jax.ShapeDtypeStruct((x.shape[0], out_features), jnp.float32)
    bias = jnp.zeros(0, jnp.float32) if bias is None else bias
    flags = np.array([relu], np.int32)
    target = _target(machine_code.linear_shape(numbers))
    return _ffi_call(target, out)(x, panels, _count(x, num_rows), bias, flags, *scales)


def gated(x: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
    """`silu(x[:, :features]) * x[:, features:]` of `x` [rows, 2 * features] float32 -> [rows, features].

    Only the first `num_rows` rows are computed if it is given; the others may hold anything. The features
    are a multiple of `LANES`.
    """
    out = jax.ShapeDtypeStruct((x.shape[0], x.shape[1] // 2), jnp.float32)
    return _ffi_call(_target(RowsShape("gate")), out)(_count(x, num_rows), x)


def normalizes(x: jax.Array) -> bool:
    """Whether `norm` takes rows like these of `x` [rows, features]."""
    return x.dtype == jnp.float32 and x.shape[1] % LANES == 0


def norm(
    x: jax.Array,
    delta: jax.Array | None,
    weight: jax.Array,
    bias: jax.Array | None,
    *,
    eps: float,
    num_rows: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`x + delta` of `x` and `delta` [rows, features] float32, and its norm.

    Layer normalisation if there is a `bias`, RMS normalisation if there is none. `num_rows` and the features
    are as for `gated`.
    """
    shape = RowsShape("rms_norm" if bias is None else "layer_norm")
    factors = np.array([1 / x.shape[1], eps], np.float32)
    bias = jnp.zeros(0, jnp.float32) if bias is None else bias
    like, arguments = jax.ShapeDtypeStruct(x.shape, x.dtype), (_count(x, num_rows), x, weight, bias, factors)
    if delta is None:
        return x, _ffi_call(_target(shape), like)(*arguments)
    total, normed = _ffi_call(_target(shape), (like, like))(*arguments, delta)
    return total, normed


def argmax(x: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
    """Where the largest of each row of `x` [rows, features] float32 is, the first of equals -> [rows] int32.

    -1 where it is no finite number; a NaN is larger than all.
    `num_rows` as for `gated`.
    """
    out = jax.ShapeDtypeStruct((x.shape[0],), jnp.int32)
    return _ffi_call(_target(RowsShape("argmax")), out)(_count(x, num_rows), x)


def _count(x: jax.Array, num_rows: jax.Array | None) -> jax.Array:
    """Rows in use, [1]."""
    return jnp.asarray(x.shape[0] if num_rows is None else num_rows, jnp.int32).reshape(1)


def _target(shape: Shape) -> str:
    """Name of the handler of a shape, known to XLA from now on."""
    from jaxllm.pallas_kernels.native import machine_code  # imports llvmlite

    with _loading:
        if shape not in _known:
            register(shape.name, machine_code.load(shape))
            _known.add(shape)
    return shape.name


def prepare(group: int, head_dim: int, dtype: str, *, is_gated: bool, products: Sequence[str]) -> None:
    """Start to compile a model's kernels that are not on disk, beside whatever comes before they are needed.

    Args:
        group: query heads of a KV head.
        head_dim: size of a head.
        dtype: of the pool.
        is_gated: whether the MLP has a gate, and norms have no bias.
        products: numbers of packed products (`LinearShape`); with any, gates and norms are native, too.
    """
    from jaxllm.pallas_kernels.native import machine_code  # imports llvmlite

    attention = AttentionShape(group, head_dim, dtype)
    rest: list[Shape] = []
    if products:
        rest = [RowsShape("rms_norm" if is_gated else "layer_norm"), RowsShape("argmax")]
        rest += [RowsShape("gate")] if is_gated else []
        rest += [machine_code.linear_shape(numbers) for numbers in products]
    if _loading.acquire(blocking=False):  # else a thread loads kernels already, and nobody is to wait for it
        try:
            machine_code.prepare(rest)
            machine_code.prepare([attention])  # which takes longer than all others
        finally:
            _loading.release()


def _ffi_call(target: str, results: Any, **options: Any) -> Callable[..., Any]:
    """What calls a handler. Results vary over devices where arguments do: `jax.shard_map` is told."""
    call = jax.ffi.ffi_call(target, results, vmap_method="sequential", **options)

    def called(*arguments: Any) -> Any:
        found = call(*arguments)
        if not jax.sharding.get_abstract_mesh().manual_axes:
            return found
        arrays = [one for one in arguments if isinstance(one, jax.Array)]
        return jax.tree.map(lambda x: varying_as(x, *arrays), found)

    return called


_loading = threading.Lock()  # compiling a shape twice would take seconds
_known: set[Shape] = set()


def _attention(
    q: jax.Array,
    pool: jax.Array,
    decode: tuple[jax.Array, jax.Array] | None,
    prompts: Prompts | None,
    layer: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """Attention alone; the pool is only read."""
    out = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    call, rest = _call(out, pool, decode, prompts, layer, scale, window, soft_cap, {})
    none = jnp.zeros((1, 1), jnp.float32)
    return call(q.astype(jnp.float32), none, none, pool, jnp.zeros(1, jnp.int32), *rest).astype(q.dtype)


def _call(
    results: Any,
    pool: jax.Array,
    decode: tuple[jax.Array, jax.Array] | None,
    prompts: Prompts | None,
    layer: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    aliases: dict[int, int],
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The call of a handler, and its arguments from the tables of decodes on."""
    num_kv_heads, block_size, _ = pool.shape[3:]
    head_dim = layout_of(pool).head_dim
    num_q_heads = jax.tree.leaves(results)[-1].shape[1]
    reason = why_not(num_q_heads, num_kv_heads, head_dim, block_size)
    if reason is not None:
        raise ConfigError(f"attention implementation 'native': {reason}; use 'xla'")
    table, none = jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)
    tables, starts, lengths, num_seqs = prompts or (table, jnp.zeros(2, jnp.int32), none, none)
    numbers = np.array([layer, window or 0], np.int32)
    factors = np.array([scale, soft_cap or 0.0], np.float32)
    name = _target(AttentionShape(num_q_heads // num_kv_heads, head_dim, pool.dtype.name))
    rest = (*(decode or (table, none)), tables, starts, lengths, num_seqs.reshape(1), numbers, factors)
    return _ffi_call(name, results, input_output_aliases=aliases), rest
