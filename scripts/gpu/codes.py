"""Weights of 8 and 4 bits, and KV of 8, against oracles in float64 and beside bfloat16.

Products are timed as kernels are (`scripts/gpu/kernels.py`): a loop on the device of a layer's MLP with its
norm, each of what the one before it gave. Its weights do not fit in caches.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from gpu.inputs import Sizes
from gpu.kernels import BLOCK_SIZE, LAYER, NUM_LAYERS, Loop, compile_together
from gpu.report import Row, attempt
from jaxllm import pallas_kernels
from jaxllm.models.coded_weights import Coded, Int8
from jaxllm.models.linear_formats import QUANTIZATIONS, LinearFormat
from jaxllm.models.linear_weights import product
from jaxllm.pallas_kernels.kv_layout import KVLayout
from jaxllm.pallas_kernels.products import KINDS, coded_product

_LIMITS = {"float32": 1e-5, "bfloat16": 4e-3}
"""Of products: inputs are multiplied as they are, but numbers of small groups are rounded once."""
_OF_ROUNDED_INPUTS = {"int8": 1e-3, "fp8": 1e-2}
"""Of products of codes with codes: inputs between two codes may become another one."""
_OF_BITS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "fp4": ml_dtypes.float4_e2m1fn}
FORMATS = ("auto", "int8", "fp8", "int8_weight", "int4_weight")


def check_products(sizes: Sizes, seed: int) -> Iterator[Row]:
    """Every kind of codes by groups of several sizes, and the formats whose inputs are rounded, too."""
    rng = np.random.default_rng(seed)
    checks = []
    for kind in KINDS:
        for dtype, rows, groups, has_offsets in (
            ("bfloat16", 5, 1, False),
            ("bfloat16", 70, 8, True),
            ("float32", 3, 1, False),
            ("bfloat16", 33, 64, False),
        ):
            width, out = 1024, 200
            x = jnp.asarray(rng.standard_normal((rows, width)), dtype)
            codes, numbers = _random_codes(rng, out, width, kind)
            scales = rng.uniform(0.5, 2, (out, groups)).astype(np.float32)
            offsets = rng.standard_normal((out, groups)).astype(np.float32) if has_offsets else None
            call = jax.jit(functools.partial(coded_product, kind=kind, out_dtype=jnp.float32))
            arguments = (x, codes, jnp.asarray(scales), *([jnp.asarray(offsets)] if has_offsets else []))
            matrix = numbers.reshape(out, groups, -1) * scales[:, :, None].astype(np.float64)
            matrix = matrix if offsets is None else matrix + offsets[:, :, None]
            oracle = np.asarray(x, np.float64) @ matrix.reshape(out, width).T
            row = {"op": "product", "kind": kind, "dtype": dtype, "rows": rows, "groups": groups}
            limit = _LIMITS[dtype if groups == 64 or kind == "e4m3" else "float32"]
            checks.append((row, call.lower(*arguments), arguments, oracle, limit))
    for name in ("int8", "fp8"):
        x = jnp.asarray(rng.standard_normal((20, 512)), jnp.bfloat16)
        weight: Any = QUANTIZATIONS[name].make(jnp.asarray(rng.standard_normal((160, 512)), jnp.bfloat16))
        call = jax.jit(functools.partial(_multiply, out_dtype=jnp.float32))
        row = {"op": "product", "kind": f"{name} by {name}", "dtype": "bfloat16", "rows": 20, "groups": 1}
        oracle = _of_codes(x, weight)
        checks.append((row, call.lower(x, weight), (x, weight), oracle, _OF_ROUNDED_INPUTS[name]))
    programs = compile_together([lowered for _, lowered, *_ in checks], "coded")
    for (row, _, arguments, oracle, limit), program in zip(checks, programs, strict=True):

        def run(
            program: Any = program, arguments: Any = arguments, oracle: Any = oracle, limit: float = limit
        ) -> Row:
            found, again = (np.asarray(program.result()(*arguments), np.float64) for _ in range(2))
            error = float(np.linalg.norm(found - oracle) / np.linalg.norm(oracle))
            same = bool(np.array_equal(found, again))
            return {
                "relative_error": error, "limit": limit, "passed": error < limit, "same_bits_again": same,
            }  # fmt: skip

        yield attempt(row, run)


def _random_codes(rng: np.random.Generator, out: int, width: int, kind: str) -> tuple[jax.Array, np.ndarray]:
    """Codes as `coded_product` takes them, and the numbers they stand for."""
    if kind == "int8":
        found = rng.integers(-128, 128, (out, width)).astype(np.int8)
        return jnp.asarray(found), found.astype(np.float64)
    if kind in ("int4", "fp4"):
        bits = rng.integers(0, 16, (out, width)).astype(np.uint8)
        packed = bits[:, ::2] | bits[:, 1::2] << 4
        numbers = bits.astype(np.float64) - 8 if kind == "int4" else bits.view(_OF_BITS[kind])
        return jnp.asarray(packed), np.asarray(numbers, np.float64)
    of_bits = np.arange(256, dtype=np.uint8).view(_OF_BITS[kind])
    finite = of_bits[np.isfinite(of_bits.astype(np.float32))]
    found = rng.choice(finite, (out, width))
    return jnp.asarray(found), found.astype(np.float64)


def _multiply(x: jax.Array, weight: Any, out_dtype: Any = None) -> jax.Array:
    return product(x, weight, out_dtype=out_dtype)


def _of_codes(x: jax.Array, weight: Int8 | Coded) -> np.ndarray:
    """Rows rounded to codes by their largest number, times the weight's, in float64."""
    exact = np.asarray(x, np.float32)
    largest = np.abs(exact).max(axis=1, keepdims=True)
    scales = np.asarray(weight.scales, np.float64).reshape(-1)
    if isinstance(weight, Int8):
        units = largest * np.float32(1 / 127)
        codes = np.rint(exact / units)
    else:
        units = largest / np.float32(448)
        codes = np.asarray((exact / units).astype(ml_dtypes.float8_e4m3fn), np.float64)
    return codes @ (np.asarray(weight.codes, np.float64) * scales[:, None]).T * units


def check_writes(sizes: Sizes, seed: int) -> Iterator[Row]:
    """What Triton's kernel stores in pools of 8 bits, against XLA's: where it ties codes may differ."""
    rng = np.random.default_rng(seed)
    _, heads, dim = sizes.heads[-1]
    for name in ("int8", "fp8_e4m3", "fp8_e5m2"):
        layout = KVLayout(name, dim)
        pool = jnp.zeros((8, NUM_LAYERS, 2, heads, BLOCK_SIZE, layout.width), layout.array_dtype)
        k, v = (jnp.asarray(rng.standard_normal((40, heads, dim)), jnp.bfloat16) for _ in range(2))
        slots = jnp.asarray(rng.permutation(8 * BLOCK_SIZE)[:40], jnp.int32)

        def run(pool: Any = pool, k: Any = k, v: Any = v, slots: Any = slots, layout: Any = layout) -> Row:
            found, other = (
                np.asarray(layout.loaded(written))
                for written in (
                    pallas_kernels.write_kv(pool, k, v, slots, layer=LAYER, implementation=one)
                    for one in ("triton", "xla")
                )
            )
            error = float(np.linalg.norm(found - other) / np.linalg.norm(other))
            return {"relative_error": error, "limit": 1e-3, "passed": error < 1e-3, "same_bits_again": True}

        yield attempt({"op": "write", "kind": name, "dtype": "bfloat16"}, run)


def product_speeds(found: dict[str, float], sizes: Sizes) -> Iterator[Row]:
    """An MLP of the model's shape, norm included, in bfloat16 and in each format, by rows.

    `share` is of the time that reading the weights once takes at the copy ceiling, or multiplying at the
    ceiling of bfloat16, whichever is longer.
    """
    hidden, inner = sizes.products
    for name in FORMATS:
        held = QUANTIZATIONS.get(name, LinearFormat())
        keys = jax.random.split(jax.random.key(0))
        up, down = (
            jax.jit(functools.partial(_random_weight, held=held, shape=shape))(key)
            for key, shape in zip(keys, ((2 * inner, hidden), (hidden, inner)), strict=True)
        )
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves((up, down)))
        leasts = [
            max(
                num_bytes / found["copy_bytes_per_second"],
                6 * rows * hidden * inner / found["matmul_bf16_flops_per_second"],
            )
            for rows in sizes.product_rows
        ]
        loops = [
            Loop.of(_mlp, least, sizes, jax.random.normal(keys[0], (rows, hidden), jnp.bfloat16), up, [down])
            for rows, least in zip(sizes.product_rows, leasts, strict=True)
        ]
        at_once = {"at_once": 1} if name in ("auto", "fp8") else {}
        programs = compile_together([loop.lower() for loop in loops], "coded", **at_once)
        concurrent.futures.wait(programs)
        for rows, least, loop, program in zip(sizes.product_rows, leasts, loops, programs, strict=True):

            def measure(loop: Loop = loop, program: Any = program, least: float = least) -> Row:
                seconds = loop.seconds(program.result())
                return {"seconds": seconds, "share": least / seconds}

            yield attempt({"format": name, "rows": rows}, measure)


def _random_weight(key: jax.Array, held: LinearFormat, shape: tuple[int, int]) -> Any:
    return held.make(jax.random.normal(key, shape, jnp.bfloat16) * shape[1] ** -0.5)


def _mlp(x: jax.Array, gate_and_up: Any, down: Any) -> jax.Array:
    gate, up = jnp.split(product(x, gate_and_up), 2, axis=1)
    y = product(jax.nn.silu(gate) * up, down).astype(jnp.float32)
    return (y * lax.rsqrt(jnp.mean(y * y, axis=1, keepdims=True) + 1e-5)).astype(x.dtype)
