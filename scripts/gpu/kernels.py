"""Kernels against a float32 oracle, and against the copy and matmul ceilings of the device."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import pallas_kernels
from jaxllm.pallas_kernels import reference

LAYER, NUM_LAYERS = 1, 2
LIMITS = {"float16": 1e-3, "bfloat16": 4e-3, "float32": 1e-5}
HEADS = ((8, 8, 64), (8, 2, 128), (10, 10, 80), (32, 4, 128))
"""(query heads, KV heads, head_dim) that kernels are checked for."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Random sequences in a pool whose blocks are permuted and whose unused rows are NaN."""

    q: jax.Array
    pool: jax.Array
    tables: jax.Array
    lengths: jax.Array

    @classmethod
    def make(
        cls,
        rng: np.random.Generator,
        lengths: np.ndarray,
        heads: tuple[int, int, int],
        dtype: str,
        *,
        rows: int | None = None,
        block_size: int = 16,
        num_layers: int = NUM_LAYERS,
        poison: bool = True,
    ) -> Problem:
        """Of sequences of these lengths; `rows` query rows, by default one each."""
        num_q, num_kv, dim = heads
        width = -(-int(lengths.max()) // block_size)
        num_blocks = len(lengths) * width
        tables = rng.permutation(num_blocks).reshape(len(lengths), width)
        shape = (num_blocks, num_layers, 2, num_kv, block_size, dim)
        key = jax.random.key(int(rng.integers(2**31)))
        pool = jax.random.normal(key, shape, dtype)
        if poison:
            used = np.zeros((num_blocks, block_size), bool)
            for table, length in zip(tables, lengths, strict=True):
                full = np.arange(width * block_size).reshape(width, block_size) < length
                used[table] = full
            pool = jnp.where(jnp.asarray(used)[:, None, None, None, :, None], pool, jnp.nan).astype(dtype)
        q = jnp.asarray(rng.standard_normal((rows or len(lengths), num_q, dim)), dtype)
        return cls(q, pool, jnp.asarray(tables, jnp.int32), jnp.asarray(lengths, jnp.int32))


def check(implementation: str, seed: int) -> Iterator[dict[str, Any]]:
    """Relative error of each op on fresh random data, its limit, and whether a second run gives its bits."""
    rng = np.random.default_rng(seed)
    for dtype, limit in LIMITS.items():
        if implementation == "mosaic" and dtype == "float32":
            continue  # tensor cores take 16 bits
        for heads in HEADS:
            scale = heads[2] ** -0.5
            lengths = rng.integers(1, 300, 9)
            problem = Problem.make(rng, lengths, heads, dtype)
            arguments = (problem.q, problem.pool, problem.tables, problem.lengths)
            yield _compare("decode", dtype, heads, limit, implementation, arguments, scale)
            chunks = np.minimum(lengths, rng.integers(1, 60, 9))
            problem = Problem.make(rng, lengths, heads, dtype, rows=int(chunks.sum()))
            starts = jnp.asarray(np.concatenate([[0], np.cumsum(chunks)]), jnp.int32)
            arguments = (problem.q, problem.pool, problem.tables, starts, problem.lengths, jnp.int32(9))
            yield _compare("prefill", dtype, heads, limit, implementation, arguments, scale)


def _compare(
    name: str,
    dtype: str,
    heads: tuple[int, int, int],
    limit: float,
    implementation: str,
    arguments: tuple[jax.Array, ...],
    scale: float,
) -> dict[str, Any]:
    op = getattr(pallas_kernels, f"{name}_attention")
    call = jax.jit(functools.partial(op, layer=LAYER, scale=scale, implementation=implementation))
    with jax.default_matmul_precision("highest"):
        actual = np.asarray(call(*arguments), np.float64)
    again = np.asarray(call(*arguments), np.float64)
    oracle = getattr(reference, f"{name}_attention")(*arguments, layer=LAYER, scale=scale).astype(np.float64)
    error = float(np.linalg.norm(actual - oracle) / np.linalg.norm(oracle))
    if dtype != "float32":
        exact = getattr(reference, f"{name}_attention")
        rounded = exact(*arguments, layer=LAYER, scale=scale, rounds=True).astype(np.float64)
        limit = min(limit, 1.5 * float(np.linalg.norm(rounded - oracle) / np.linalg.norm(oracle)))
    return {
        "implementation": implementation,
        "op": name,
        "dtype": dtype,
        "heads": heads,
        "relative_error": error,
        "limit": limit,
        "passed": bool(error < limit),
        "same_bits_again": bool(np.array_equal(actual, again)),
    }


def seconds_of(call: Callable[[], Any], repetitions: int) -> float:
    """Median seconds of a call, of batches dispatched together so that launching hides behind running."""
    jax.block_until_ready(call())
    samples = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(repetitions):
            result = call()
        jax.block_until_ready(result)
        samples.append((time.perf_counter() - started) / repetitions)
    return statistics.median(samples)


def ceilings(*, megabytes: int, matmul: int) -> dict[str, float]:
    """Bytes a second of a copy in place, and bf16 flops a second of a large product."""
    bump = jax.jit(lambda x: x + 1, donate_argnums=0)
    box = [jnp.ones(megabytes * 2**20 // 4, jnp.float32)]

    def copy() -> jax.Array:
        box[0] = bump(box[0])
        return box[0]

    copy_seconds = seconds_of(copy, 10)
    a = jax.random.normal(jax.random.key(0), (matmul, matmul), jnp.bfloat16)
    product = jax.jit(lambda x: x @ x)
    return {
        "copy_bytes_per_second": 2 * box[0].nbytes / copy_seconds,
        "matmul_bf16_flops_per_second": 2 * matmul**3 / seconds_of(lambda: product(a), 10),
    }


def decode_speeds(
    implementation: str, found: dict[str, float], batches: tuple[int, ...], contexts: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    """Decode attention as a share of the copy bandwidth: 32 query and 8 KV heads of 128, bf16."""
    rng = np.random.default_rng(0)
    heads = (32, 8, 128)
    for batch in batches:
        for context in contexts:
            problem = Problem.make(
                rng, np.full(batch, context), heads, "bfloat16", num_layers=1, poison=False
            )
            op = functools.partial(
                pallas_kernels.decode_attention, layer=0, scale=128**-0.5, implementation=implementation
            )
            call = functools.partial(jax.jit(op), problem.q, problem.pool, problem.tables, problem.lengths)
            seconds = seconds_of(call, 20)
            num_bytes = batch * context * 2 * heads[1] * heads[2] * 2
            yield {
                "implementation": implementation,
                "batch": batch,
                "context": context,
                "seconds": seconds,
                "share_of_copy": num_bytes / seconds / found["copy_bytes_per_second"],
            }


def prefill_speeds(
    implementation: str, found: dict[str, float], token_counts: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    """Prefill attention of one prompt as a share of the matmul ceiling, counting the causal half."""
    rng = np.random.default_rng(0)
    heads = (32, 8, 128)
    for tokens in token_counts:
        problem = Problem.make(
            rng, np.array([tokens]), heads, "bfloat16", rows=tokens, num_layers=1, poison=False
        )
        op = functools.partial(
            pallas_kernels.prefill_attention, layer=0, scale=128**-0.5, implementation=implementation
        )
        starts = jnp.asarray([0, tokens], jnp.int32)
        call = functools.partial(
            jax.jit(op), problem.q, problem.pool, problem.tables, starts, problem.lengths, jnp.int32(1)
        )
        seconds = seconds_of(call, 10)
        flops = 4 * heads[0] * heads[2] * tokens * (tokens + 1) / 2
        yield {
            "implementation": implementation,
            "tokens": tokens,
            "seconds": seconds,
            "share_of_matmul": flops / seconds / found["matmul_bf16_flops_per_second"],
        }
