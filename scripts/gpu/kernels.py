"""Kernels against an oracle in float64, and against the copy and matmul ceilings of the device.

Attention takes microseconds where a launch from Python takes tens of them. So it is timed in one program, a
loop on the device of a fixed number of turns with several kernels a turn, each of which takes its queries
from the one before it; the loop's own counter adds part of a microsecond to each. The kernels of a turn read
different blocks, as those of a model's layers do, until they have read more than caches hold. Copies and
products of the ceilings take milliseconds, and are timed from Python, many launches at a time.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gpu.inputs import Sizes
from gpu.report import Row, attempt
from jaxllm import pallas_kernels
from jaxllm.pallas_kernels import mosaic_pool, reference
from jaxllm.pallas_kernels.kv_layout import KVLayout, layout_of
from jaxllm.system.dtypes import kv_row_bytes

LAYER, NUM_LAYERS = 1, 2
LIMITS = {"float16": 1e-3, "bfloat16": 4e-3, "float32": 1e-5}
_BOUNDS = {
    "float16": {"soft_cap": 5.0},
    "bfloat16": {"window": 40},
    "float32": {"window": 100, "soft_cap": 2.0},
}
"""What queries do not see, and what scores do not exceed: tiles that nobody sees are there, too."""
BLOCK_SIZE = 16
_COMPILE_THREADS = 8
_LOOP_SECONDS = 0.02  # of a timed loop, if the kernel were at its ceiling

Programs = Sequence[concurrent.futures.Future[jax.stages.Compiled]]


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
        kv_dtype: str | None = None,
        block_size: int = BLOCK_SIZE,
    ) -> Problem:
        """Of sequences of these lengths; `rows` query rows, by default one each; KV like queries, or not."""
        num_q, num_kv, dim = heads
        width = -(-int(lengths.max()) // block_size)
        num_blocks = len(lengths) * width
        tables = rng.permutation(num_blocks).reshape(len(lengths), width)
        used = np.zeros((num_blocks, block_size), bool)
        for table, length in zip(tables, lengths, strict=True):
            used[table] = np.arange(width * block_size).reshape(width, block_size) < length
        pool = random_pool(rng, (num_blocks, NUM_LAYERS, 2, num_kv, block_size, dim), dtype)
        pool = jnp.where(jnp.asarray(used)[:, None, None, None, :, None], pool, jnp.nan).astype(dtype)
        pool = pool if kv_dtype is None else KVLayout(kv_dtype, dim).stored(pool)
        q = jnp.asarray(rng.standard_normal((rows or len(lengths), num_q, dim)), dtype)
        return cls(q, pool, jnp.asarray(tables, jnp.int32), jnp.asarray(lengths, jnp.int32))


def random_pool(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str, layout: KVLayout | None = None
) -> jax.Array:
    """A pool of standard normal numbers, made on the device, of this layout, if any."""

    def make(key: jax.Array) -> jax.Array:
        numbers = jax.random.normal(key, shape, dtype)
        return numbers if layout is None else layout.stored(numbers)

    return jax.jit(make)(jax.random.key(int(rng.integers(2**31))))


def compile_together(
    lowered: Sequence[jax.stages.Lowered], implementation: str, at_once: int = _COMPILE_THREADS
) -> Programs:
    """The programs, as they are compiled side by side.

    XLA times products while it compiles them: `at_once` is 1 where there are any. Interpreted kernels skip
    the optimiser, which takes minutes with them.
    """
    is_interpreted = jax.default_backend() == "cpu" and implementation != "xla"
    options = {"xla_backend_optimization_level": 0} if is_interpreted else None
    threads = concurrent.futures.ThreadPoolExecutor(at_once)
    programs = [threads.submit(one.compile, compiler_options=options) for one in lowered]
    threads.shutdown(wait=False)
    return programs


@dataclasses.dataclass(frozen=True)
class Check:
    """An op on fresh random data."""

    op: str
    dtype: str
    heads: tuple[int, int, int]
    arguments: tuple[jax.Array, ...]
    bounds: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the op and of its reference."""
        return {"layer": LAYER, "scale": self.heads[2] ** -0.5, **self.bounds}

    def lower(self, implementation: str) -> jax.stages.Lowered:
        """Its program. float32 is to be multiplied as such, not rounded for tensor cores."""
        op = getattr(pallas_kernels, f"{self.op}_attention")
        call = jax.jit(functools.partial(op, implementation=implementation, **self.options))
        with jax.default_matmul_precision("highest"):
            return call.lower(*self.arguments)

    def run(self, program: jax.stages.Compiled) -> Row:
        """Relative error and its limit, and whether a second run gives the same bits."""
        actual, again = (np.asarray(program(*self.arguments), np.float64) for _ in range(2))
        q, pool, *rest = self.arguments
        known = pool if layout_of(pool).dtype == self.dtype else layout_of(pool).loaded(pool)
        exact = functools.partial(getattr(reference, f"{self.op}_attention"), q, known, *rest, **self.options)
        oracle = exact().astype(np.float64)
        limit = LIMITS[self.dtype]
        if self.dtype != "float32" and layout_of(pool).dtype != "int8":  # Mosaic rounds weights by scales
            limit = min(limit, 1.5 * _relative_error(exact(rounds=True).astype(np.float64), oracle))
        error = _relative_error(actual, oracle)
        return {
            "relative_error": error,
            "limit": limit,
            "passed": bool(error < limit),  # not if it is NaN
            "same_bits_again": bool(np.array_equal(actual, again)),
        }


def _relative_error(actual: np.ndarray, oracle: np.ndarray) -> float:
    return float(np.linalg.norm(actual - oracle) / np.linalg.norm(oracle))


def check(
    implementation: str, sizes: Sizes, seed: int, kv_dtypes: Sequence[str | None] = (None,)
) -> Iterator[Row]:
    """Every op, dtype and head size against the oracle, and again within `_BOUNDS`; each is compiled once."""
    rng = np.random.default_rng(seed)
    checks, of_kv = [], []
    for dtype, kv_dtype in itertools.product(LIMITS, kv_dtypes):
        for heads in sizes.heads:
            layout = KVLayout(kv_dtype or dtype, heads[2])
            block_size = 2 * BLOCK_SIZE if implementation == "mosaic" and kv_dtype else BLOCK_SIZE
            if implementation == "mosaic" and mosaic_pool.why_not(dtype, layout, block_size):
                continue
            stored: Any = {"kv_dtype": kv_dtype, "block_size": block_size}
            lengths = rng.integers(1, 300, 9)
            one = Problem.make(rng, lengths, heads, dtype, **stored)
            checks.append(Check("decode", dtype, heads, (one.q, one.pool, one.tables, one.lengths)))
            chunks = np.minimum(lengths, rng.integers(1, 60, 9))
            one = Problem.make(rng, lengths, heads, dtype, rows=int(chunks.sum()), **stored)
            starts = jnp.asarray(np.concatenate([[0], np.cumsum(chunks)]), jnp.int32)
            arguments = (one.q, one.pool, one.tables, starts, one.lengths, jnp.int32(9))
            checks.append(Check("prefill", dtype, heads, arguments))
            if implementation != "mosaic":  # it sees everything
                bounded = [dataclasses.replace(one, bounds=_BOUNDS[dtype]) for one in checks[-2:]]
                checks += bounded
            of_kv += [kv_dtype or dtype] * (len(checks) - len(of_kv))
    programs = compile_together([one.lower(implementation) for one in checks], implementation)
    for one, kv_dtype, program in zip(checks, of_kv, programs, strict=True):
        row = {"implementation": implementation, "op": one.op, "dtype": one.dtype, "heads": one.heads}
        row |= {"kv_dtype": kv_dtype, **one.bounds}
        yield attempt(row, lambda one=one, program=program: one.run(program.result()))


def seconds_of(call: Callable[[], Any], repetitions: int) -> float:
    """Median seconds of a call that takes a millisecond and more, of `repetitions` launched together."""
    jax.block_until_ready(call())
    samples = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(repetitions):
            result = call()
        jax.block_until_ready(result)
        samples.append((time.perf_counter() - started) / repetitions)
    return statistics.median(samples)


def ceilings(sizes: Sizes) -> dict[str, float]:
    """Bytes a second of a copy in place, read and written, and bf16 flops a second of a large product."""
    bump = jax.jit(lambda x: x + 1, donate_argnums=0)
    box = [jnp.ones(sizes.megabytes * 2**20 // 4, jnp.float32)]

    def copy() -> jax.Array:
        box[0] = bump(box[0])
        return box[0]

    copy_seconds = seconds_of(copy, 10)
    a = jax.random.normal(jax.random.key(0), (sizes.matmul, sizes.matmul), jnp.bfloat16)
    product = jax.jit(lambda x: x @ x)
    return {
        "copy_bytes_per_second": 2 * box[0].nbytes / copy_seconds,
        "matmul_bf16_flops_per_second": 2 * sizes.matmul**3 / seconds_of(lambda: product(a), 10),
    }


@dataclasses.dataclass(frozen=True)
class Loop:
    """`turns` times `chain` calls of `op(q, pool, tables, *rest)` on the device, each of what the last gave.

    The calls of a turn take the `tables` in turn.
    """

    op: Callable[..., jax.Array]
    turns: int
    chain: int
    arguments: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        op: Callable[..., jax.Array],
        least: float,
        sizes: Sizes,
        q: Any,
        pool: Any,
        tables: Any,
        *rest: Any,
    ) -> Loop:
        """Of a kernel that takes at `least` so many seconds; `tables` is a list of them."""
        chain = max(sizes.chain, len(tables))
        kernels = min(sizes.loop_kernels, _LOOP_SECONDS / least)
        return cls(op, max(1, round(kernels / chain)), chain, (q, pool, tuple(tables), *rest))

    def lower(self) -> jax.stages.Lowered:
        """The program."""

        def run(q: jax.Array, pool: jax.Array, tables: tuple[jax.Array, ...], *rest: jax.Array) -> jax.Array:
            def turn(_: Any, q: jax.Array) -> jax.Array:
                for number in range(self.chain):
                    q = self.op(q, pool, tables[number % len(tables)], *rest)
                return q

            return lax.fori_loop(0, self.turns, turn, q)  # a fixed number: the host need not look

        return jax.jit(run).lower(*self.arguments)

    def seconds(self, program: jax.stages.Compiled) -> float:
        """Median seconds of one call."""
        return seconds_of(lambda: program(*self.arguments), 1) / (self.turns * self.chain)


def decode_speeds(
    implementation: str, found: dict[str, float], sizes: Sizes, kv_dtype: str = "bfloat16"
) -> Iterator[Row]:
    """Decode attention in bf16 as a share of the copy bandwidth.

    `turn_bytes` is the KV that a turn of the loop reads; caches help where it is little.
    """
    rng = np.random.default_rng(0)
    num_q, num_kv, dim = sizes.timed_heads
    layout = KVLayout(kv_dtype, dim)
    token_bytes = 2 * num_kv * kv_row_bytes(kv_dtype, dim)
    copy = found["copy_bytes_per_second"]
    widest = max(sizes.batches) * -(-max(sizes.contexts) // BLOCK_SIZE)
    num_blocks = max(widest, sizes.turn_bytes // (BLOCK_SIZE * token_bytes))
    pool = random_pool(rng, (num_blocks, 1, 2, num_kv, BLOCK_SIZE, dim), "bfloat16", layout)
    op = functools.partial(
        pallas_kernels.decode_attention, layer=0, scale=dim**-0.5, implementation=implementation
    )
    shapes, loops = [(batch, context) for batch in sizes.batches for context in sizes.contexts], []
    for batch, context in shapes:
        kv_bytes = batch * context * token_bytes
        width = -(-context // BLOCK_SIZE)
        num_tables = min(32, num_blocks // (batch * width), max(1, math.ceil(sizes.turn_bytes / kv_bytes)))
        ids = rng.permutation(num_blocks)[: num_tables * batch * width]
        tables = list(jnp.asarray(ids.reshape(num_tables, batch, width), jnp.int32))
        q = jnp.asarray(rng.standard_normal((batch, num_q, dim)), "bfloat16")
        lengths = jnp.full(batch, context, jnp.int32)
        loops.append(Loop.of(op, kv_bytes / copy, sizes, q, pool, tables, lengths))
    programs = compile_together([loop.lower() for loop in loops], implementation)
    for (batch, context), loop, program in zip(shapes, loops, programs, strict=True):
        kv_bytes = batch * context * token_bytes

        def measure(loop: Loop = loop, program: Any = program, kv_bytes: int = kv_bytes) -> Row:
            seconds = loop.seconds(program.result())
            return {"seconds": seconds, "share_of_copy": kv_bytes / seconds / copy}

        row = {"implementation": implementation, "kv_dtype": kv_dtype, "batch": batch, "context": context}
        yield attempt(row | {"turn_bytes": kv_bytes * len(loop.arguments[2])}, measure)


def prefill_speeds(
    implementation: str, found: dict[str, float], sizes: Sizes, kv_dtype: str = "bfloat16"
) -> Iterator[Row]:
    """Prefill attention of one prompt in bf16 as a share of the matmul ceiling, counting the causal half."""
    rng = np.random.default_rng(0)
    num_q, num_kv, dim = sizes.timed_heads
    matmul = found["matmul_bf16_flops_per_second"]
    op = functools.partial(
        pallas_kernels.prefill_attention, layer=0, scale=dim**-0.5, implementation=implementation
    )
    loops, flops = [], []
    for tokens in sizes.prefill_tokens:
        flops.append(4 * num_q * dim * tokens * (tokens + 1) / 2)
        width = -(-tokens // BLOCK_SIZE)
        pool = random_pool(rng, (width, 1, 2, num_kv, BLOCK_SIZE, dim), "bfloat16", KVLayout(kv_dtype, dim))
        tables = [jnp.asarray(rng.permutation(width)[None], jnp.int32)]
        q = jnp.asarray(rng.standard_normal((tokens, num_q, dim)), "bfloat16")
        rest = (jnp.asarray([0, tokens], jnp.int32), jnp.asarray([tokens], jnp.int32), jnp.int32(1))
        loops.append(Loop.of(op, flops[-1] / matmul, sizes, q, pool, tables, *rest))
    programs = compile_together([loop.lower() for loop in loops], implementation)
    for tokens, needed, loop, program in zip(sizes.prefill_tokens, flops, loops, programs, strict=True):

        def measure(loop: Loop = loop, program: Any = program, needed: float = needed) -> Row:
            seconds = loop.seconds(program.result())
            return {"seconds": seconds, "share_of_matmul": needed / seconds / matmul}

        yield attempt({"implementation": implementation, "kv_dtype": kv_dtype, "tokens": tokens}, measure)
