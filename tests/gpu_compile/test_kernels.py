"""Single kernels, compiled for an H100 that is not there."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxllm import pallas_kernels
from jaxllm.gpu.target import Compiler, get_target

NUM_BLOCKS, NUM_LAYERS, NUM_ROWS, MAX_BLOCKS = 512, 2, 16, 64
SHAPES = [
    (40, 40, 128, 16, "bfloat16"),  # Llama-13B, OPT-13B
    (32, 8, 128, 16, "bfloat16"),  # Llama-3-8B
    (8, 8, 80, 32, "float16"),
    (8, 1, 64, 128, "float16"),
]


@pytest.mark.parametrize("implementation", ["triton", "mosaic"])
@pytest.mark.parametrize(("num_q", "num_kv", "dim", "block_size", "dtype"), SHAPES)
def test_attention_compiles(implementation, num_q, num_kv, dim, block_size, dtype):
    struct = jax.ShapeDtypeStruct
    pool = struct((NUM_BLOCKS, NUM_LAYERS, 2, num_kv, block_size, dim), dtype)
    tables, lengths = struct((NUM_ROWS, MAX_BLOCKS), jnp.int32), struct((NUM_ROWS,), jnp.int32)
    starts, scalar = struct((NUM_ROWS + 1,), jnp.int32), struct((), jnp.int32)
    options = {"layer": 1, "scale": dim**-0.5, "implementation": implementation}
    decode = (struct((NUM_ROWS, num_q, dim), dtype), pool, tables, lengths)
    prefill = (struct((512, num_q, dim), dtype), pool, tables, starts, lengths, scalar)
    with Compiler(get_target("h100")) as compiler:
        for op, arguments in (
            (pallas_kernels.decode_attention, decode),
            (pallas_kernels.prefill_attention, prefill),
        ):
            jitted = jax.jit(functools.partial(op, **options))
            compiled = compiler.compile(jitted, *compiler.struct(arguments))
            called = {"triton": "__gpu$xla.gpu.triton", "mosaic": "mosaic_gpu"}[implementation]
            assert called in compiled.as_text()
            pool_bytes = pool.size * pool.dtype.itemsize
            assert compiled.memory_analysis().temp_size_in_bytes < pool_bytes, "the pool is copied"
