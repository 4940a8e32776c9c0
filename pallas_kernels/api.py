"""The public paged-attention ops: validate the arguments, choose a back-end, call it."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.errors import ConfigError

IMPLEMENTATIONS = ("xla", "triton", "mosaic")
"""Names `implementation` takes; None stands for the best one on the default device.

"triton" may be followed by how it cuts its work, such as in "triton:k64,q64,w4,s2" (`triton.Tiling`).
"""

_DTYPES = ("float32", "bfloat16", "float16")


def decode_attention(
    q: jax.Array,
    pool: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    layer: int,
    scale: float,
    implementation: str | None = None,
) -> jax.Array:
    """Attention of one new token per sequence over its paged KV.

    Args:
      q: `[num_rows, num_q_heads, head_dim]`, float32, bfloat16 or float16.
      pool: KV pool `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, K at index 0 and
        V at index 1 of the third axis.
      block_tables: int32 `[num_rows, max_blocks]`, the pool blocks of each row in order of position.
        Entries past a row's last used block may hold anything.
      lengths: int32 `[num_rows]`, KV tokens of each row, the new one included; 0 marks an inactive row.
      layer: index of the layer in the pool.
      scale: factor of the scores, usually `head_dim ** -0.5`.
      implementation: "xla", "triton", "mosaic" or None for the best on the default device.

    Returns:
      `[num_rows, num_q_heads, head_dim]` in the dtype of `q`; zeros in inactive rows.

    Raises:
      ConfigError: a shape, a dtype or the implementation is unsupported.
    """
    _check_attention(q, pool, layer)
    num_rows = q.shape[0]
    _check_ints("block_tables", block_tables, (num_rows, None))
    _check_ints("lengths", lengths, (num_rows,))
    backend, options = _backend(implementation)
    return backend.decode_attention(q, pool, block_tables, lengths, layer=layer, scale=scale, **options)


def prefill_attention(
    q: jax.Array,
    pool: jax.Array,
    block_tables: jax.Array,
    query_starts: jax.Array,
    lengths: jax.Array,
    num_seqs: jax.Array | int,
    *,
    layer: int,
    scale: float,
    implementation: str | None = None,
) -> jax.Array:
    """Causal attention of the prompt chunks of several sequences over their paged KV.

    The chunks lie one after another in `q`, and their KV is already in the pool:

        q rows      |-- sequence 0 --|-- sequence 1 --|...|   padding   |
        query_starts 0               4                9  ...

    Row `i` of sequence `s`, which has `n` rows, sits at position `lengths[s] - n + i` and sees the KV of
    that position and all before it.

    Args:
      q: `[num_tokens, num_q_heads, head_dim]`, float32, bfloat16 or float16.
      pool: as in `decode_attention`.
      block_tables: int32 `[max_seqs, max_blocks]`.
      query_starts: int32 `[max_seqs + 1]`, not decreasing; entries past `num_seqs` repeat the last.
      lengths: int32 `[max_seqs]`, KV tokens of each sequence, this chunk included.
      num_seqs: int32 scalar, how many sequences there are.
      layer: index of the layer in the pool.
      scale: factor of the scores.
      implementation: "xla", "triton", "mosaic" or None for the best on the default device.

    Returns:
      `[num_tokens, num_q_heads, head_dim]` in the dtype of `q`; zeros in rows of no sequence.

    Raises:
      ConfigError: a shape, a dtype or the implementation is unsupported.
    """
    _check_attention(q, pool, layer)
    _check_ints("block_tables", block_tables, (None, None))
    max_seqs = block_tables.shape[0]
    _check_ints("query_starts", query_starts, (max_seqs + 1,))
    _check_ints("lengths", lengths, (max_seqs,))
    num_seqs = jnp.asarray(num_seqs, jnp.int32)
    _check_ints("num_seqs", num_seqs, ())
    backend, options = _backend(implementation)
    return backend.prefill_attention(
        q, pool, block_tables, query_starts, lengths, num_seqs, layer=layer, scale=scale, **options
    )


def write_kv(
    pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    layer: int,
    implementation: str | None = None,
) -> jax.Array:
    """Store the K and V of new tokens in the pool; in place if the caller donates the pool.

    Inside one program, a write stays in place only if it depends on every earlier read of the pool, as a
    layer's K and V do on the layer before it. XLA may copy the pool for a read it could do later.

    Args:
      pool: as in `decode_attention`.
      k: `[num_tokens, num_kv_heads, head_dim]`, cast to the pool's dtype.
      v: like `k`.
      slot_mapping: int32 `[num_tokens]`, `block * block_size + offset` of each token; -1 drops the token.
        No slot may occur twice.
      layer: index of the layer in the pool.
      implementation: "xla", "triton", "mosaic" or None for the best on the default device.

    Returns:
      The updated pool.

    Raises:
      ConfigError: a shape, a dtype or the implementation is unsupported.
    """
    _check_pool(pool, layer)
    num_tokens = k.shape[0]
    expected = (num_tokens, pool.shape[3], pool.shape[5])
    for name, array in (("k", k), ("v", v)):
        if array.shape != expected:
            raise ConfigError(f"{name} has shape {array.shape}, but this pool takes {expected}: reshape it")
        _check_dtype(name, array)
    _check_ints("slot_mapping", slot_mapping, (num_tokens,))
    backend, _ = _backend(implementation)
    return backend.write_kv(pool, k, v, slot_mapping, layer=layer)


def default_implementation() -> str:
    """The implementation that None stands for on the default device.

    Triton's on NVIDIA GPUs of compute capability 8.0 and newer, else XLA's. Mosaic's, for 9.0 and 16 bits
    only, is to be asked for by name: it has been compiled for such a GPU, and not been measured on one yet.
    """
    device = jax.devices()[0]
    return _best_for(device.platform, str(getattr(device, "compute_capability", "0")))


def _best_for(platform: str, compute_capability: str) -> str:
    if platform == "gpu" and compute_capability.split(".")[0].isdigit():
        return "triton" if int(compute_capability.split(".")[0]) >= 8 else "xla"
    return "xla"


def _backend(implementation: str | None) -> tuple[ModuleType, dict[str, Any]]:
    """The back-end of a name, and the options the name holds."""
    name = default_implementation() if implementation is None else implementation
    name, colon, tiling = name.partition(":")
    if name not in IMPLEMENTATIONS or (colon and name != "triton"):
        raise ConfigError(
            f"unknown attention implementation {implementation!r}: use one of {', '.join(IMPLEMENTATIONS)}, "
            "or None"
        )
    backend = _load_backend(name)
    return backend, {"tiling": backend.Tiling.parse(tiling)} if colon else {}


@functools.cache
def _load_backend(name: str) -> ModuleType:
    return importlib.import_module(f"jaxllm.pallas_kernels.{name}")


def _check_pool(pool: jax.Array, layer: int) -> None:
    if pool.ndim != 6 or pool.shape[2] != 2:
        raise ConfigError(
            f"pool has shape {pool.shape}: expected [num_blocks, num_layers, 2, num_kv_heads, block_size, "
            "head_dim]"
        )
    if 0 in pool.shape:
        raise ConfigError(f"pool has shape {pool.shape}: every axis must be at least 1")
    _check_dtype("pool", pool)
    if not 0 <= layer < pool.shape[1]:
        raise ConfigError(f"layer is {layer}: expected 0 <= layer < {pool.shape[1]}, the layers of the pool")


def _check_attention(q: jax.Array, pool: jax.Array, layer: int) -> None:
    _check_pool(pool, layer)
    _check_dtype("q", q)
    if q.ndim != 3 or q.shape[0] == 0 or q.shape[2] != pool.shape[5]:
        raise ConfigError(f"q has shape {q.shape}: expected [at least 1, num_q_heads, {pool.shape[5]}]")
    if q.shape[1] == 0 or q.shape[1] % pool.shape[3]:
        raise ConfigError(
            f"q has {q.shape[1]} heads: expected a multiple of the pool's {pool.shape[3]} KV heads"
        )


def _check_dtype(name: str, array: jax.Array) -> None:
    if array.dtype.name not in _DTYPES:
        raise ConfigError(f"{name} is {array.dtype.name}: cast it to one of {', '.join(_DTYPES)}")


def _check_ints(name: str, array: jax.Array, shape: tuple[int | None, ...]) -> None:
    if array.dtype != jnp.int32:
        raise ConfigError(f"{name} is {array.dtype.name}: cast it to int32")
    matches = len(array.shape) == len(shape) and all(
        actual > 0 if want is None else actual == want
        for actual, want in zip(array.shape, shape, strict=True)
    )
    if not matches:
        wanted = ", ".join("at least 1" if want is None else str(want) for want in shape)
        raise ConfigError(f"{name} has shape {tuple(array.shape)}: expected [{wanted}]")
