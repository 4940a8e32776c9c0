"""Time the paged-attention ops on the default device and write the result as JSON.

    python scripts/bench_kernels.py --implementation xla --num-kv-heads 8 --out kernels.json

Each op is timed alone, compiled, after warm-up. GB/s counts the bytes an op has to move: the KV of every
sequence for decode, the KV of the chunk for a write, the KV up to each chunk's end, once, for prefill.
With `--kv-dtypes` decodes over KV of each of these follow, in turn, of sequences of all `--context` tokens.
The copy is the same device's: an array of 64 MiB, read and written in place.
"""

from __future__ import annotations

import argparse
import functools
import platform
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import pallas_kernels
from jaxllm.pallas_kernels.kv_layout import KVLayout
from jaxllm.research.bench.results import write_json
from jaxllm.system.dtypes import DTYPES, KV_DTYPES
from jaxllm.system.output_files import OutputParser, new_file

LAYER = 0


def main() -> None:
    """Parse the options, measure, print and write."""
    parser = OutputParser(description=__doc__.splitlines()[0])
    parser.add_argument("--implementation", help="xla, triton (also triton:k64,q64,w4,s2 and so on), mosaic")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--kv-dtypes", nargs="+", default=[], choices=KV_DTYPES, help="of decodes in turn")
    parser.add_argument("--num-q-heads", type=int, default=12)
    parser.add_argument("--num-kv-heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32, help="sequences of a decode step")
    parser.add_argument("--context", type=int, default=512, help="largest KV length, in tokens")
    parser.add_argument("--prefill-tokens", type=int, default=512, help="rows of a prefill or a write")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=new_file, required=True, help="JSON file to write")
    options = parser.parse_args()
    implementation = options.implementation or pallas_kernels.default_implementation()
    results = measure(options, implementation)
    report = {
        "implementation": implementation,
        "device": jax.devices()[0].device_kind,
        "machine": platform.processor() or platform.machine(),
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__},
        "options": {k: v for k, v in vars(options).items() if k not in ("out", "implementation")},
        "results": results,
    }
    write_json(options.out, report)
    for name, result in results.items():
        times = f"{result['median_ms']:9.3f} ms (min {result['min_ms']:.3f})"
        print(f"{name:14} {times} {result['gb_per_s']:8.2f} GB/s")


def measure(options: argparse.Namespace, implementation: str) -> dict[str, dict[str, float]]:
    """Median and spread of the copy, decode, prefill and write."""
    rng = np.random.default_rng(options.seed)
    max_blocks = -(-options.context // options.block_size)
    heads, kv_heads, dim = options.num_q_heads, options.num_kv_heads, options.head_dim
    dims = (options.batch * max_blocks, 1, 2, kv_heads, options.block_size, dim)
    pool = jax.random.normal(jax.random.key(options.seed), dims, options.dtype)
    tables = jnp.asarray(rng.permutation(dims[0]).reshape(options.batch, max_blocks), jnp.int32)
    lengths = jnp.asarray(rng.integers(1, options.context + 1, options.batch), jnp.int32)
    token_bytes = 2 * kv_heads * dim * pool.dtype.itemsize
    common = {"layer": LAYER, "implementation": implementation}
    attend = {**common, "scale": dim**-0.5}
    timed = functools.partial(time_calls, repetitions=options.repetitions)

    copy = jax.jit(lambda x: x + 1, donate_argnums=0)
    buffer = [jnp.ones(2**24, jnp.float32)]

    def copy_once() -> jax.Array:
        buffer[0] = copy(buffer[0])
        return buffer[0]

    results = {"copy": timed(copy_once, 2 * buffer[0].nbytes)}

    q = random_array(rng, (options.batch, heads, dim), options.dtype)
    decode = jax.jit(functools.partial(pallas_kernels.decode_attention, **attend))
    results["decode"] = timed(lambda: decode(q, pool, tables, lengths), int(lengths.sum()) * token_bytes)

    num_tokens = min(options.prefill_tokens, options.context)
    chunk = num_tokens // 2
    rows = random_array(rng, (num_tokens, heads, dim), options.dtype)
    starts = jnp.asarray([0, chunk, num_tokens], jnp.int32)
    ends = jnp.asarray([options.context, num_tokens - chunk], jnp.int32)
    prefill = jax.jit(functools.partial(pallas_kernels.prefill_attention, **attend))
    results["prefill"] = timed(
        lambda: prefill(rows, pool, tables[:2], starts, ends, 2), int(ends.sum()) * token_bytes
    )

    new = random_array(rng, (num_tokens, kv_heads, dim), options.dtype)
    positions = np.arange(num_tokens)
    blocks = np.asarray(tables)[0, positions // options.block_size]
    slots = jnp.asarray(blocks * options.block_size + positions % options.block_size, jnp.int32)
    write = jax.jit(functools.partial(pallas_kernels.write_kv, **common), donate_argnums=0)
    state = [pool]

    def write_once() -> jax.Array:
        state[0] = write(state[0], new, new, slots)
        return state[0]

    results["write"] = timed(write_once, num_tokens * token_bytes)
    return results | decodes_over(options, decode, state[0], q, tables)


def decodes_over(
    options: argparse.Namespace,
    decode: Callable[..., jax.Array],
    pool: jax.Array,
    q: jax.Array,
    tables: jax.Array,
) -> dict[str, dict[str, float]]:
    """Decodes of full sequences over KV of several dtypes, one after another in each repetition."""
    lengths = jnp.full(options.batch, options.context, jnp.int32)
    layouts = [KVLayout(name, options.head_dim) for name in options.kv_dtypes]
    pools = [layout.stored(pool) for layout in layouts]
    seconds: list[list[float]] = [[] for _ in pools]
    for _ in range(2 + options.repetitions):
        for place, stored in enumerate(pools):
            start = time.perf_counter()
            jax.block_until_ready(decode(q, stored, tables, lengths))
            seconds[place].append(time.perf_counter() - start)
    num_heads = 2 * options.num_kv_heads * options.batch * options.context
    return {
        f"over {layout.dtype}": spread(found[2:], num_heads * layout.width * layout.array_dtype.itemsize)
        for layout, found in zip(layouts, seconds, strict=True)
    }


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Standard normal values on the default device."""
    return jnp.asarray(rng.standard_normal(shape), dtype)


def time_calls(call: Callable[[], jax.Array], num_bytes: int, *, repetitions: int) -> dict[str, float]:
    """Time `call` after two warm-up calls, waiting for its result each time."""
    seconds = []
    for _ in range(2 + repetitions):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return spread(seconds[2:], num_bytes)


def spread(seconds: list[float], num_bytes: int) -> dict[str, float]:
    """What is written of a call's times."""
    median = statistics.median(seconds)
    return {
        "median_ms": median * 1e3,
        "min_ms": min(seconds) * 1e3,
        "max_ms": max(seconds) * 1e3,
        "gb_per_s": num_bytes / median / 1e9,
    }


if __name__ == "__main__":
    main()
