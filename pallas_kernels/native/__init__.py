"""Paged attention on CPUs, by kernels that numba compiles and XLA calls.

`attend` stores a step's keys and values and attends over its decodes and prompts in one call for each layer;
the other three ops are parts of it. Rows that are not in use cost nothing.
"""

from __future__ import annotations

import importlib.util
import threading

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.pallas_kernels.native.shape import PANEL, AttentionShape, LinearShape, Shape
from jaxllm.pallas_kernels.native.targets import register, why_not_callable

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
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
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
    """A layer's writes and attention; see `pallas_kernels.attend`."""
    k, v = k.astype(pool.dtype), v.astype(pool.dtype)
    pool, out = _call(q, k, v, pool, slot_mapping, decode, prompts, layer, scale, window, soft_cap)
    return pool, out


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
    return _call(q, None, None, pool, None, decode, None, layer, scale, window, soft_cap)[1]


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
    return _call(q, None, None, pool, None, None, prompts, layer, scale, window, soft_cap)[1]


def write_kv(
    pool: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array, *, layer: int
) -> jax.Array:
    """Store each token's K and V at its slot; see `pallas_kernels.write_kv`."""
    k, v = k.astype(pool.dtype), v.astype(pool.dtype)
    q = jnp.zeros((k.shape[0], pool.shape[3], pool.shape[5]), jnp.float32)
    return _call(q, k, v, pool, slot_mapping, None, None, layer, 1.0, None, None)[0]


def packs(weight: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether `linear` takes a weight `[out, in]` here, packed."""
    return weight.ndim == 2 and weight.dtype == jnp.float32 and why_not(1, 1, LANES, LANES) is None


def packed_shape(out_features: int, in_features: int) -> tuple[int, int, int]:
    """Of a packed weight."""
    return -(-out_features // PANEL), in_features, PANEL


@jax.jit
def pack(weight: jax.Array) -> jax.Array:
    """`[out, in]` float32 to panels `[ceil(out / 32), in, 32]`, with zeros at the end."""
    weight = jnp.pad(weight, ((0, -weight.shape[0] % PANEL), (0, 0)))
    return weight.reshape(-1, PANEL, weight.shape[1]).swapaxes(1, 2)


def unpacked_rows(panels: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows `[n, in]` of a packed weight, as those of an embedding."""
    return panels[rows // PANEL, :, rows % PANEL]


def linear(
    x: jax.Array, panels: jax.Array, out_features: int, num_rows: jax.Array | None = None
) -> jax.Array:
    """`x` [rows, in] float32 times a packed weight -> [rows, out_features] float32.

    Only the first `num_rows`, an int32 scalar, are computed if it is given; the others may hold anything.
    """
    from jaxllm.pallas_kernels.native import machine_code  # imports llvmlite

    shape = LinearShape.for_registers(machine_code.has_wide_registers())
    out = jax.ShapeDtypeStruct((x.shape[0], out_features), jnp.float32)
    return jax.ffi.ffi_call(_target(shape), out)(
        x, panels, jnp.asarray(x.shape[0] if num_rows is None else num_rows, jnp.int32).reshape(1)
    )


def _target(shape: Shape) -> str:
    """Name of the handler of a shape, known to XLA from now on."""
    from jaxllm.pallas_kernels.native import machine_code  # imports llvmlite

    with _loading:
        if shape not in _known:
            register(shape.name, machine_code.load(shape))
            _known.add(shape)
    return shape.name


_loading = threading.Lock()  # compiling a shape twice would take seconds
_known: set[Shape] = set()


def _call(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    pool: jax.Array,
    slot_mapping: jax.Array | None,
    decode: tuple[jax.Array, jax.Array] | None,
    prompts: Prompts | None,
    layer: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array]:
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = pool.shape[3:5]
    reason = why_not(num_q_heads, num_kv_heads, head_dim, block_size)
    if reason is not None:
        raise ConfigError(f"attention implementation 'native': {reason}; use 'xla'")
    table, none = jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)
    tables, starts, lengths, num_seqs = prompts or (table, jnp.zeros(2, jnp.int32), none, none)
    parts = decode or (table, none)
    numbers = np.array([layer, window or 0], np.int32)
    factors = np.array([scale, soft_cap or 0.0], np.float32)
    rest = (*parts, tables, starts, lengths, num_seqs.reshape(1), numbers, factors)
    out = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    name = _target(AttentionShape(num_q_heads // num_kv_heads, head_dim, pool.dtype.name))
    rows = q.astype(jnp.float32)
    if k is None or v is None or slot_mapping is None:
        empty = jnp.zeros(1, pool.dtype)
        call = jax.ffi.ffi_call(name, out)
        return pool, call(rows, empty, empty, pool, none, *rest).astype(q.dtype)
    stored = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    pool, attended = jax.ffi.ffi_call(name, (stored, out), input_output_aliases={3: 0})(
        rows, k, v, pool, slot_mapping, *rest
    )
    return pool, attended.astype(q.dtype)
