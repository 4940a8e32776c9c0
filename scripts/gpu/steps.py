"""A layer's kernels together, as steps run them: rotation of a projection in parts, writes, both attentions.

And the sum and norm of the residual stream. Kernels work in place here, and read what the one before wrote.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu.inputs import Sizes
from gpu.kernels import BLOCK_SIZE, LAYER, LIMITS, Problem, compile_together
from gpu.report import Row, attempt
from jaxllm import pallas_kernels
from jaxllm.pallas_kernels import mosaic_pool, reference
from jaxllm.pallas_kernels.kv_layout import KVLayout
from jaxllm.pallas_kernels.norms import add_rms_norm

_NUM_PARTS, _NUM_UNUSED, _EPS = 4, 3, 1e-5
_LONGEST = 60, 300  # of which the first is one chunk of a decode


def check(implementation: str, sizes: Sizes, seed: int) -> Iterator[Row]:
    """Steps with decodes and prompts of every dtype and head size, and norms, against references in numpy."""
    rng = np.random.default_rng(seed)
    found: list[tuple[Row, Callable[..., Any], tuple[Any, ...], Callable[[], Any]]] = []
    for dtype in LIMITS:
        for heads in sizes.heads:
            if implementation == "mosaic" and mosaic_pool.why_not(
                dtype, KVLayout(dtype, heads[2]), BLOCK_SIZE
            ):
                continue
            options = {"layer": LAYER, "scale": heads[2] ** -0.5}
            chosen = {"dtype": jnp.dtype(dtype), "implementation": implementation}
            call = functools.partial(_attended, **chosen, **options)
            for longest in _LONGEST:
                arguments = _step(rng, heads, dtype, longest)
                row: Row = {"op": "step", "dtype": dtype, "heads": heads, "longest": longest}
                found.append((row, call, arguments, functools.partial(_expected, *arguments, dtype, options)))
        for num_parts in (1, _NUM_PARTS) if implementation != "mosaic" else ():  # norms are Triton's
            given = _residual(rng, dtype, num_parts, sizes.products[0])
            row = {"op": "norm", "dtype": dtype, "parts": num_parts}
            call = functools.partial(add_rms_norm, eps=_EPS)
            found.append((row, call, given, functools.partial(_normed, *given)))
    with jax.default_matmul_precision("highest"):
        lowered = [jax.jit(call).lower(*arguments) for _, call, arguments, _ in found]
    programs = compile_together(lowered, implementation)
    for (row, _, arguments, oracle), program in zip(found, programs, strict=True):
        compared = functools.partial(_compared, program, arguments, oracle, LIMITS[row["dtype"]])
        yield attempt({"implementation": implementation, **row}, compared)


def _compared(program: Any, arguments: tuple[Any, ...], oracle: Callable[[], Any], limit: float) -> Row:
    """The largest relative error of what a program gives, and whether a second run gives the same bits."""
    results, again = ([np.asarray(one, np.float64) for one in program.result()(*arguments)] for _ in range(2))
    error = max(map(_error, results, oracle()))
    is_same = all(np.array_equal(*both, equal_nan=True) for both in zip(results, again, strict=True))
    return {"relative_error": error, "limit": limit, "passed": error < limit, "same_bits_again": is_same}


def _error(actual: np.ndarray, oracle: Any) -> float:
    """Relative; infinite where one is NaN and the other is not, as places in the pool are without tokens."""
    exact = np.asarray(oracle, np.float64)
    if not np.array_equal(np.isnan(actual), np.isnan(exact)):
        return math.inf
    return float(np.linalg.norm(np.nan_to_num(actual - exact)) / np.linalg.norm(np.nan_to_num(exact)))


def _step(rng: np.random.Generator, heads: tuple[int, int, int], dtype: str, longest: int) -> tuple[Any, ...]:
    """Decodes, with two rows for them that prompts have, prompts, and rows of nobody."""
    num_q, num_kv, dim = heads
    chunks = rng.integers(1, 50, 5)
    lengths = np.concatenate(
        [rng.integers(1, longest, 4), np.minimum(chunks + rng.integers(0, 200, 5), longest)]
    )
    chunks = np.minimum(chunks, lengths[4:])
    decodes, prompts = (Problem.make(rng, ends, heads, dtype) for ends in (lengths[:4], lengths[4:]))
    pool = jnp.concatenate([decodes.pool, prompts.pool])
    tables = prompts.tables + len(decodes.pool)
    num_rows = 4 + int(chunks.sum()) + _NUM_UNUSED
    slots = [_slot(decodes.tables[row], length - 1) for row, length in enumerate(lengths[:4])]
    for table, length, chunk in zip(tables, lengths[4:], chunks, strict=True):
        slots += [_slot(table, place) for place in range(length - chunk, length)]
    slots += [-1] * _NUM_UNUSED
    starts = 4 + np.concatenate([[0], np.cumsum(chunks)])
    parts = rng.standard_normal((_NUM_PARTS, num_rows, (num_q + 2 * num_kv) * dim))
    angles = rng.uniform(-np.pi, np.pi, (num_rows, dim // 2))
    rope = tuple(jnp.asarray(part, jnp.float32) for part in (np.cos(angles), np.sin(angles)))
    decode = jnp.pad(decodes.tables, ((0, 2), (0, 0))), jnp.pad(decodes.lengths, (0, 2))
    chunked = tables, jnp.asarray(starts, jnp.int32), prompts.lengths, jnp.int32(5)
    return jnp.asarray(parts, jnp.float32), rope, pool, jnp.asarray(slots, jnp.int32), decode, chunked


def _slot(table: Any, place: int) -> int:
    return int(table[place // BLOCK_SIZE]) * BLOCK_SIZE + place % BLOCK_SIZE


def _attended(*arguments: Any, **options: Any) -> tuple[jax.Array, ...]:
    """What is attended to, in rows of somebody, and the pool's keys and values."""
    pool, out = pallas_kernels.attend(*arguments, **options)
    return out[:-_NUM_UNUSED], pool[:, :, 0], pool[:, :, 1]


def _expected(
    parts: Any, rope: Any, pool: Any, slots: Any, decode: Any, prompts: Any, dtype: str, options: Any
) -> tuple[np.ndarray, ...]:
    qkv = np.asarray(np.asarray(parts, np.float64).sum(axis=0), jnp.dtype(dtype))
    heads = qkv.reshape(len(qkv), -1, pool.shape[-1])
    num_kv = pool.shape[3]
    q, k, v = np.split(heads, (heads.shape[1] - 2 * num_kv, heads.shape[1] - num_kv), axis=1)
    q, k = (reference.rotate(one, *rope) for one in (q, k))
    written = reference.write_kv(pool, k, v, slots, layer=LAYER)
    out = reference.prefill_attention(q, written, *prompts, **options)
    out[: len(decode[0])] += reference.decode_attention(q[: len(decode[0])], written, *decode, **options)
    return out[:-_NUM_UNUSED], written[:, :, 0], written[:, :, 1]


def _residual(
    rng: np.random.Generator, dtype: str, num_parts: int, features: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The residual stream of 64 rows, what is to be added to it, and weights."""
    x = jnp.asarray(rng.standard_normal((64, features)), dtype)
    delta = jnp.asarray(rng.standard_normal((num_parts, *x.shape)), dtype if num_parts == 1 else jnp.float32)
    return x, delta, jnp.asarray(rng.standard_normal(features), dtype)


def _normed(x: jax.Array, delta: jax.Array, weight: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    total = np.asarray(x, np.float64) + np.asarray(delta, np.float64).sum(axis=0)
    rms = np.sqrt((total**2).mean(axis=1, keepdims=True) + _EPS)
    return total, total / rms * np.asarray(weight, np.float64)
