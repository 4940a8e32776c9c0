"""The public paged-attention ops: validate the arguments, choose a back-end, call it."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.errors import ConfigError
from jaxllm.pallas_kernels.heads import RopeTable, rotated_heads
from jaxllm.pallas_kernels.kv_layout import KVLayout, layout_of
from jaxllm.pallas_kernels.settings import under_jax_defaults
from jaxllm.pallas_kernels.tiles import current_device
from jaxllm.system.dtypes import DTYPES, KV_DTYPES
from jaxllm.system.import_path import imported

REFERENCE = "reference"
IMPLEMENTATIONS = ("native", "xla", "triton", "mosaic", REFERENCE)
"""Names `implementation` takes; None stands for the best one on the default device.

"reference" is slow, and JAX can transform it: it alone has gradients.

"triton" may be followed by how it cuts its work, such as in "triton:k64,q64,w4,s2" (`triton.Tiling`). What
any other "module:attribute" names is imported: an object with some of `OPERATIONS`, which are called as those
here are, with `window` and `soft_cap` where a model has them. XLA's stand in for what it has not.
"""
OPERATIONS = ("decode_attention", "prefill_attention", "write_kv")
"""What an implementation of one's own may be made of."""


@under_jax_defaults
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
      window: how many of the latest tokens a query sees, its own included; None for all.
      soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; None leaves them.
      implementation: one of `IMPLEMENTATIONS`, or None for the best on the default device.

    Returns:
      `[num_rows, num_q_heads, head_dim]` in the dtype of `q`; zeros in inactive rows.

    Raises:
      ConfigError: a shape, a dtype or the implementation is unsupported.
    """
    _check_attention(q, pool, layer)
    _check_decodes(q.shape[0], block_tables, lengths)
    backend, options = _backend(implementation, q.shape[1], pool, window, soft_cap)
    arrays = _arrays(q, pool, block_tables, lengths)
    return backend.decode_attention(*arrays, layer=layer, scale=scale, **options)


@under_jax_defaults
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
    window: int | None = None,
    soft_cap: float | None = None,
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
      window: how many of the latest tokens a query sees, its own included; None for all.
      soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; None leaves them.
      implementation: one of `IMPLEMENTATIONS`, or None for the best on the default device.

    Returns:
      `[num_tokens, num_q_heads, head_dim]` in the dtype of `q`; zeros in rows of no sequence.

    Raises:
      ConfigError: a shape, a dtype or the implementation is unsupported.
    """
    _check_attention(q, pool, layer)
    num_seqs = jnp.asarray(num_seqs, jnp.int32)
    _check_prompts(block_tables, query_starts, lengths, num_seqs)
    backend, options = _backend(implementation, q.shape[1], pool, window, soft_cap)
    arrays = _arrays(q, pool, block_tables, query_starts, lengths, num_seqs)
    return backend.prefill_attention(*arrays, layer=layer, scale=scale, **options)


@under_jax_defaults
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
      implementation: one of `IMPLEMENTATIONS`, or None for the best on the default device.

    Returns:
      The updated pool.

    Raises:
      ConfigError: a shape, a dtype or the implementation is unsupported.
    """
    _check_new(pool, k, v, slot_mapping, layer)
    backend, _ = _backend(implementation, k.shape[1], pool)
    return backend.write_kv(*_arrays(pool, k, v, slot_mapping), layer=layer)


@under_jax_defaults
def attend(
    qkv: jax.Array,
    rope: RopeTable | None,
    pool: jax.Array,
    slot_mapping: jax.Array,
    decode: tuple[jax.Array, jax.Array] | None,
    prompts: tuple[jax.Array, jax.Array, jax.Array, jax.Array] | None,
    *,
    layer: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    dtype: jnp.dtype | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """A layer's share of a step: rotation, `write_kv`, `decode_attention` beside `prefill_attention`.

    Args:
      qkv: `[num_rows, (num_q_heads + 2 * num_kv_heads) * head_dim]`, queries, keys and values of each row,
        head by head; decodes first, prompts behind them. Or `[parts, num_rows, ...]`, of which it is the sum.
      rope: cosines and sines of each row's position, float32 `[num_rows, head_dim / 2]` each, by which
        queries and keys are rotated, in float32; None leaves them.
      pool: as in `decode_attention`.
      slot_mapping: int32 `[num_rows]`, as in `write_kv`.
      decode: `(block_tables, lengths)` of the first rows, as in `decode_attention`; None if there are none.
        Rows that prompts use have length 0.
      prompts: `(block_tables, query_starts, lengths, num_seqs)`, as in `prefill_attention`; None likewise.
      layer: index of the layer in the pool.
      scale: factor of the scores.
      window: how many of the latest tokens a query sees, its own included; None for all.
      soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; None leaves them.
      dtype: what the sum of parts, or `qkv` itself, is rounded to; None for the dtype of `qkv`.
      implementation: one of `IMPLEMENTATIONS`, or None for the best on the default device.

    Returns:
      The updated pool, and `[num_rows, num_q_heads, head_dim]` in that dtype; what is in rows that nobody
      uses means nothing.

    Raises:
      ConfigError: a shape, a dtype or the implementation is unsupported, or there is nothing to attend to.
    """
    if decode is None and prompts is None:
        raise ConfigError("attend needs decodes or prompts: give one of them, or use write_kv")
    _check_pool(pool, layer)
    num_q_heads = _check_projection(qkv, rope, pool)
    num_rows = qkv.shape[-2]
    _check_ints("slot_mapping", slot_mapping, (num_rows,))
    if decode is not None:
        _check_decodes(min(decode[0].shape[0], num_rows), *decode)
    if prompts is not None:
        prompts = (*prompts[:3], jnp.asarray(prompts[3], jnp.int32))
        _check_prompts(*prompts)
    backend, options = _backend(implementation, num_q_heads, pool, window, soft_cap)
    options |= {"layer": layer, "scale": scale}
    qkv, rope, pool, slot_mapping, decode, prompts = _arrays(qkv, rope, pool, slot_mapping, decode, prompts)
    dtype = _rounded_to(qkv, dtype)
    if hasattr(backend, "rotate_and_write"):
        pool, q = backend.rotate_and_write(qkv, rope, pool, slot_mapping, layer=layer, dtype=dtype)
    else:
        qkv = (qkv if qkv.ndim == 2 else qkv.sum(axis=0, dtype=jnp.float32)).astype(dtype)
        if hasattr(backend, "attend"):
            return backend.attend(qkv, rope, pool, slot_mapping, decode, prompts, **options)
        q, k, v = rotated_heads(qkv, rope, pool.shape[3], layout_of(pool).head_dim)
        pool = backend.write_kv(pool, k, v, slot_mapping, layer=layer)
    if hasattr(backend, "step_attention"):
        return pool, backend.step_attention(q, pool, decode, prompts, **options)
    decoded = prefilled = None
    if decode is not None:
        decoded = backend.decode_attention(q[: decode[0].shape[0]], pool, *decode, **options)
    if prompts is not None:
        prefilled = backend.prefill_attention(q, pool, *prompts, **options)
    if decoded is None or prefilled is None:
        return pool, prefilled if decoded is None else decoded  # type: ignore[return-value]
    return pool, prefilled.at[: decoded.shape[0]].add(decoded)  # either is 0 in the other's rows


def _arrays(*given: Any) -> tuple[Any, ...]:
    """JAX's of what may be numpy's, once it is known to be of a dtype that JAX has."""
    found: tuple[Any, ...] = jax.tree.map(jnp.asarray, given)
    return found


def default_implementation() -> str:
    """The implementation that None stands for on the device of programs, where it covers the model's shape.

    Native kernels on CPUs; Triton's on NVIDIA GPUs of compute capability 8.0 and newer; else XLA's. Mosaic's,
    for 9.0 and 16 bits only, is to be asked for by name: on an H100 its decode attention was slower, its
    prefill attention of 2,048 tokens 6 % faster.
    """
    device = current_device()
    # One that is only compiled for tells no compute capability: those known have 8.0 at least.
    return _best_for(device.platform, str(getattr(device, "compute_capability", "8.0")))


def settle_implementation(
    num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int, *, kv_dtype: str = "float32"
) -> tuple[str, str | None]:
    """What None stands for with a model of these sizes, and why the device's default is not it if so."""
    name = default_implementation()
    reason = None
    if name == "native":
        reason = _load_backend(name).why_not(num_q_heads, num_kv_heads, head_dim, block_size)
    elif name == "triton":
        reason = _load_backend(name).why_not(KVLayout(kv_dtype, head_dim), block_size)
    return (name, None) if reason is None else ("xla", f"not {name}: {reason}")


def _best_for(platform: str, compute_capability: str) -> str:
    if platform == "gpu" and compute_capability.split(".")[0].isdigit():
        return "triton" if int(compute_capability.split(".")[0]) >= 8 else "xla"
    return "native" if platform == "cpu" else "xla"


def _backend(
    implementation: str | None,
    num_q_heads: int,
    pool: jax.Array,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Any, dict[str, Any]]:
    """The back-end of a name, and the options for it: those that the name holds, and what is not None."""
    if implementation is None:
        layout = layout_of(pool)
        sizes = num_q_heads, pool.shape[3], layout.head_dim, pool.shape[4]
        implementation, _ = settle_implementation(*sizes, kv_dtype=layout.dtype)
    name, colon, tiling = str(implementation).partition(":")
    is_own = colon and name not in IMPLEMENTATIONS
    if not is_own and (name not in IMPLEMENTATIONS or (colon and name != "triton")):
        raise ConfigError(
            f"unknown attention implementation {implementation!r}: use one of {', '.join(IMPLEMENTATIONS)}, "
            "the import path of your own (module:attribute), or None"
        )
    if window is not None and window < 1:
        raise ConfigError(f"window is {window}: it must be at least 1, or None to see all tokens")
    if soft_cap is not None and not soft_cap > 0:
        raise ConfigError(f"soft_cap is {soft_cap}: it must be above 0, or None to leave scores as they are")
    options = {"window": window, "soft_cap": soft_cap}
    options = {option: value for option, value in options.items() if value is not None}
    if options and name == "mosaic":
        raise ConfigError(
            f"attention implementation 'mosaic' has no {' and no '.join(options)}: use 'triton' or 'xla'"
        )
    if is_own:
        return _load_own(implementation), options
    backend = _load_backend(name)
    return backend, options | ({"tiling": backend.Tiling.parse(tiling)} if colon else {})


@functools.cache
def _load_backend(name: str) -> ModuleType:
    return importlib.import_module(f"jaxllm.pallas_kernels.{'dense' if name == REFERENCE else name}")


def _load_own(path: str) -> SimpleNamespace:
    own = imported(path, "the attention implementation")
    found = {name: getattr(own, name) for name in OPERATIONS if callable(getattr(own, name, None))}
    if not found:
        raise ConfigError(
            f"the attention implementation {path!r} has none of {', '.join(OPERATIONS)}: give it one at least"
        )
    return SimpleNamespace(**{name: getattr(_load_backend("xla"), name) for name in OPERATIONS} | found)


def _check_pool(pool: jax.Array, layer: int) -> None:
    if pool.ndim != 6 or pool.shape[2] != 2:
        raise ConfigError(
            f"pool has shape {pool.shape}: expected [num_blocks, num_layers, 2, num_kv_heads, block_size, "
            "head_dim]"
        )
    if 0 in pool.shape:
        raise ConfigError(f"pool has shape {pool.shape}: every axis must be at least 1")
    if pool.dtype.name not in KV_DTYPES.values():
        raise ConfigError(f"pool is {pool.dtype.name}: make it one of {', '.join(KV_DTYPES.values())}")
    if not 0 <= layer < pool.shape[1]:
        raise ConfigError(f"layer is {layer}: expected 0 <= layer < {pool.shape[1]}, the layers of the pool")


def _check_new(pool: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array, layer: int) -> None:
    _check_pool(pool, layer)
    num_tokens = k.shape[0]
    expected = (num_tokens, pool.shape[3], layout_of(pool).head_dim)
    for name, array in (("k", k), ("v", v)):
        if array.shape != expected:
            raise ConfigError(f"{name} has shape {array.shape}, but this pool takes {expected}: reshape it")
        _check_dtype(name, array)
    _check_ints("slot_mapping", slot_mapping, (num_tokens,))


def _check_projection(qkv: jax.Array, rope: RopeTable | None, pool: jax.Array) -> int:
    """How many query heads there are."""
    _check_dtype("qkv", qkv)
    num_kv_heads, head_dim = pool.shape[3], layout_of(pool).head_dim
    num_q_heads = qkv.shape[-1] // head_dim - 2 * num_kv_heads
    columns = (num_q_heads + 2 * num_kv_heads) * head_dim
    if (
        qkv.ndim not in (2, 3)
        or 0 in qkv.shape
        or qkv.shape[-1] != columns
        or num_q_heads <= 0
        or num_q_heads % num_kv_heads
    ):
        raise ConfigError(
            f"qkv has shape {qkv.shape}: expected [at least 1, (num_q_heads + {2 * num_kv_heads}) * "
            f"{head_dim}] or parts of that, num_q_heads a multiple of the pool's {num_kv_heads} KV heads"
        )
    for part in rope or ():
        if part.shape != (qkv.shape[-2], head_dim // 2) or head_dim % 2 or part.dtype != jnp.float32:
            raise ConfigError(
                f"rope holds {part.dtype.name} {part.shape}: expected two of float32 "
                f"{(qkv.shape[-2], head_dim // 2)}, head_dim / 2 numbers a row"
            )
    return num_q_heads


def _rounded_to(qkv: jax.Array, dtype: jnp.dtype | None) -> jnp.dtype:
    """What a projection is rounded to."""
    found = jnp.dtype(qkv.dtype if dtype is None else dtype)
    if found.name not in DTYPES:
        raise ConfigError(f"dtype is {found.name}: make it one of {', '.join(DTYPES)}")
    return found


def _check_decodes(num_rows: int, block_tables: jax.Array, lengths: jax.Array) -> None:
    _check_ints("block_tables", block_tables, (num_rows, None))
    _check_ints("lengths", lengths, (num_rows,))


def _check_prompts(
    block_tables: jax.Array, query_starts: jax.Array, lengths: jax.Array, num_seqs: jax.Array
) -> None:
    _check_ints("block_tables", block_tables, (None, None))
    max_seqs = block_tables.shape[0]
    _check_ints("query_starts", query_starts, (max_seqs + 1,))
    _check_ints("lengths", lengths, (max_seqs,))
    _check_ints("num_seqs", num_seqs, ())


def _check_attention(q: jax.Array, pool: jax.Array, layer: int) -> None:
    _check_pool(pool, layer)
    _check_dtype("q", q)
    head_dim = layout_of(pool).head_dim
    if q.ndim != 3 or q.shape[0] == 0 or q.shape[2] != head_dim:
        raise ConfigError(f"q has shape {q.shape}: expected [at least 1, num_q_heads, {head_dim}]")
    if q.shape[1] == 0 or q.shape[1] % pool.shape[3]:
        raise ConfigError(
            f"q has {q.shape[1]} heads: expected a multiple of the pool's {pool.shape[3]} KV heads"
        )


def _check_dtype(name: str, array: jax.Array) -> None:
    if array.dtype.name not in DTYPES:
        raise ConfigError(f"{name} is {array.dtype.name}: cast it to one of {', '.join(DTYPES)}")


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
