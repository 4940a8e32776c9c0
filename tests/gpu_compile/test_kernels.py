"""Single kernels, compiled for GPUs that are not there."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from jaxllm import pallas_kernels
from jaxllm.errors import ConfigError
from jaxllm.pallas_kernels import mosaic_pool, triton
from jaxllm.pallas_kernels.kv_layout import KVLayout
from jaxllm.research.plan.target import Compiler, get_target

NUM_BLOCKS, NUM_LAYERS, NUM_ROWS, MAX_BLOCKS = 512, 2, 16, 64
LLAMA_3_8B = (32, 8, 128, 16, "bfloat16")
SHAPES = [
    (40, 40, 128, 16, "bfloat16"),  # Llama-13B, OPT-13B
    LLAMA_3_8B,
    (8, 1, 64, 128, "float16"),
]
OPT_2_7B = (32, 32, 80, 32, "float16")


def arguments(num_q, num_kv, dim, block_size, dtype, num_rows=NUM_ROWS, kv_dtype=None):
    """Abstract ones of decode and of prefill attention."""
    struct, layout = jax.ShapeDtypeStruct, KVLayout(kv_dtype or dtype, dim)
    pool = struct((NUM_BLOCKS, NUM_LAYERS, 2, num_kv, block_size, layout.width), layout.array_dtype)
    tables, lengths = struct((num_rows, MAX_BLOCKS), jnp.int32), struct((num_rows,), jnp.int32)
    starts, scalar = struct((num_rows + 1,), jnp.int32), struct((), jnp.int32)
    return {
        "decode": (struct((num_rows, num_q, dim), dtype), pool, tables, lengths),
        "prefill": (struct((512, num_q, dim), dtype), pool, tables, starts, lengths, scalar),
    }


@pytest.mark.parametrize(
    ("device", "kv_dtype"),
    [
        ("h100", "int8"),
        ("h100", "fp8_e4m3"),
        ("a100-80gb", "int8"),
        ("a100-80gb", "fp8_e5m2"),
        ("l40", "int8"),
    ],
)
def test_kv_of_8_bits_compiles_and_is_written_in_place(device, kv_dtype):
    """In a pool of more than 4 GiB, whose offsets have 64 bits."""
    struct, layout = jax.ShapeDtypeStruct, KVLayout(kv_dtype, 128)
    pool = struct((70_000, 2, 2, 8, 16, layout.width), layout.array_dtype)
    tables, lengths = struct((16, 64), jnp.int32), struct((16,), jnp.int32)
    prompts = tables, struct((17,), jnp.int32), lengths, struct((), jnp.int32)
    rope = (struct((512, 64), jnp.float32),) * 2
    arguments = struct((512, 48 * 128), jnp.bfloat16), rope, pool, struct((512,), jnp.int32)

    def attend(qkv, rope, pool, slots, decode, prompts):
        options = {"layer": 1, "scale": 0.1, "implementation": "triton"}
        return pallas_kernels.attend(qkv, rope, pool, slots, decode, prompts, **options)

    with Compiler(get_target(device)) as compiler:
        jitted = jax.jit(attend, donate_argnums=2)
        compiled = compiler.compile(jitted, *compiler.struct((*arguments, (tables, lengths), prompts)))
    assert "paged_rotate_and_write" in compiled.as_text()
    analysis, pool_bytes = compiled.memory_analysis(), pool.size * pool.dtype.itemsize
    assert analysis.alias_size_in_bytes >= pool_bytes > 2**32
    assert analysis.temp_size_in_bytes < 64 * 2**20


@pytest.mark.parametrize(("head_dim", "block_size"), [(40, 16), (64, 2)])
def test_kv_of_int8_that_lies_at_no_multiple_of_16_bytes_is_refused(head_dim, block_size):
    """JAX 0.10's compiler copies 16 bytes at a time from where a head's codes begin, wherever that is."""
    struct, layout = jax.ShapeDtypeStruct, KVLayout("int8", head_dim)
    pool = struct((64, 2, 2, 8, block_size, layout.width), jnp.int8)
    ints = struct((4, 8), jnp.int32), struct((4,), jnp.int32)
    call = functools.partial(pallas_kernels.decode_attention, layer=1, scale=0.1, implementation="triton")
    values = struct((4, 8, head_dim), jnp.bfloat16), pool, *ints
    with (
        Compiler(get_target("h100")) as compiler,
        pytest.raises(ConfigError, match=f"not {head_dim} and {block_size}; use 'xla'"),
    ):
        compiler.compile(jax.jit(call), *compiler.struct(values))


def compile_attention(compiler, op, values, implementation, **bounds):
    q, pool = values[:2]
    call = functools.partial(
        getattr(pallas_kernels, f"{op}_attention"),
        layer=1,
        scale=q.shape[2] ** -0.5,
        implementation=implementation,
        **bounds,
    )
    compiled = compiler.compile(jax.jit(call), *compiler.struct(values))
    called = "mosaic_gpu" if implementation == "mosaic" else "__gpu$xla.gpu.triton"
    assert called in compiled.as_text()
    pool_bytes = pool.size * pool.dtype.itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < pool_bytes, "the pool is copied"


@pytest.mark.parametrize(
    ("implementation", "shape"),
    [*((name, shape) for name in ("triton", "mosaic") for shape in SHAPES), ("triton", OPT_2_7B)],
    ids=str,
)
def test_attention_compiles(implementation, shape):
    with Compiler(get_target("h100")) as compiler:
        for op, values in arguments(*shape).items():
            compile_attention(compiler, op, values, implementation)


@pytest.mark.parametrize("device", ["h100", "l40"])
@pytest.mark.parametrize(
    ("shape", "bounds"),
    [
        ((32, 8, 128, 16, "bfloat16"), {"window": 300}),  # Mistral 7B
        ((16, 8, 256, 16, "bfloat16"), {"window": 300, "soft_cap": 50.0}),  # Gemma 2 9B
    ],
    ids=str,
)
def test_windows_and_caps_compile(device, shape, bounds):
    with Compiler(get_target(device)) as compiler:
        for op, values in arguments(*shape).items():
            compile_attention(compiler, op, values, "triton", **bounds)


@pytest.mark.parametrize("implementation", ["triton", "mosaic"])
def test_prompts_of_any_length_take_no_more_memory(implementation):
    """Queries are read, and results stored, where they are: not in tiles of their own."""
    struct, (num_q, num_kv, dim, block_size, dtype) = jax.ShapeDtypeStruct, LLAMA_3_8B
    q = struct((2048, num_q, dim), dtype)
    pool = struct((NUM_BLOCKS, NUM_LAYERS, 2, num_kv, block_size, dim), dtype)
    ints = (struct(shape, jnp.int32) for shape in ((256, MAX_BLOCKS), (257,), (256,), ()))
    options = {"layer": 1, "scale": dim**-0.5, "implementation": implementation}
    with Compiler(get_target("h200")) as compiler:
        call = jax.jit(functools.partial(pallas_kernels.prefill_attention, **options))
        compiled = compiler.compile(call, *compiler.struct((q, pool, *ints)))
    assert compiled.memory_analysis().temp_size_in_bytes < 1.1 * q.size * q.dtype.itemsize


@pytest.mark.parametrize("device", ["a100-80gb", "l40"])
def test_every_tiling_compiles(device):
    """Also where a core has 100 KiB of shared memory; what is there must suffice for the default ones."""
    with Compiler(get_target(device)) as compiler:
        for op, values in arguments(*LLAMA_3_8B).items():
            for tiling in triton.alternative_tilings(op, "bfloat16"):
                compile_attention(compiler, op, values, f"triton:{tiling}")
        for op, values in arguments(40, 40, 128, 16, "float32").items():
            compile_attention(compiler, op, values, "triton")


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("dim", [64, 128])
def test_what_mosaic_takes_compiles(dim, block_size, kv_dtype):
    """The interpreter is kinder than the compiler: it copies any number of bytes, and has any memory."""
    values = arguments(8, 2, dim, block_size, "bfloat16", kv_dtype=kv_dtype)
    why = mosaic_pool.why_not("bfloat16", KVLayout(kv_dtype, dim), block_size)
    assert (why is not None) == (kv_dtype == "int8" and block_size == 16)
    with Compiler(get_target("h100")) as compiler:
        for op in values if why is None else ():
            compile_attention(compiler, op, values[op], "mosaic")


@pytest.mark.parametrize("op", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("shape", "kv_dtype"),
    [
        *((shape, None) for shape in SHAPES),
        (LLAMA_3_8B, "fp8_e4m3"),
        ((32, 8, 128, 32, "bfloat16"), "int8"),
        ((8, 1, 64, 32, "bfloat16"), "int8"),
        ((8, 1, 64, 128, "float16"), "fp8_e5m2"),
    ],
    ids=str,
)
def test_mosaic_becomes_machine_code_for_tensor_cores(op, shape, kv_dtype, tmp_path, monkeypatch):
    """Copies by TMA, products by wgmma, no register spilled, and what a core has of shared memory suffices.

    Prefill moves registers between warps; two programs of decode fit a core.
    """
    for name in ("PTX", "PTXAS"):
        monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{name}", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    with Compiler(get_target("h100")) as compiler:
        compile_attention(compiler, op, arguments(*shape, num_rows=8, kv_dtype=kv_dtype)[op], "mosaic")
    (ptx,), (assembled,) = tmp_path.glob("*.ptx"), tmp_path.glob("*.ptxas")
    instructions = ptx.read_text()
    for needed in ("cp.async.bulk.tensor", "wgmma.mma_async"):
        assert needed in instructions
    report = assembled.read_text()
    if op == "decode":
        registers = int(re.search(r"Used (\d+) registers", report)[1])
        assert 2 * 256 * registers <= 65536  # two programs of 256 threads
    else:
        assert "setmaxnreg.dec" in instructions
        assert "setmaxnreg.inc" in instructions
    assert "for 'sm_90a'" in report
    assert "0 bytes spill stores, 0 bytes spill loads" in report
