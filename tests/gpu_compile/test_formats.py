"""Whole steps with weights held as codes and KV of 8 bits, compiled for GPUs that are not there."""

import math
import re

import jax
import pytest
from published import LLAMA_3_8B

from jaxllm.executor.programs import ProgramKey, step_program
from jaxllm.executor.slot_params import Sampling
from jaxllm.models.config import config_from_dict
from jaxllm.models.linear_formats import QUANTIZATIONS, LinearFormat, LinearFormats
from jaxllm.models.linear_weights import product
from jaxllm.models.registry import abstract_params, linear_weights
from jaxllm.research.plan.plan import count_pool_copies
from jaxllm.research.plan.target import Compiler, get_target

HOPPER = ("h100", "h200")
CONFIG = config_from_dict({**LLAMA_3_8B, "num_hidden_layers": 2})
FORMATS = QUANTIZATIONS | {
    "gptq": LinearFormat("int4", group=128, has_offsets=True, is_ordered=True),
    "nvfp4": LinearFormat("fp4", group=16),
    "float8 by blocks": LinearFormat("e4m3", group=128, rounds="fp8_128"),
}


def numbers_of_weights(text, shapes):
    """Arrays of 16 and 32 bits that a program makes, which have as many numbers as a weight, or more."""
    made = re.findall(r"%\S+ = (?:bf16|f16|f32|s32|u32)\[([\d,]+)\]\S* (?!parameter|bitcast)(\S+)\(", text)
    least = min(math.prod(shape) for shape in shapes)
    sizes = [(math.prod(map(int, dims.split(","))), operation) for dims, operation in made if dims]
    return [(size, operation) for size, operation in sizes if size >= least]


@pytest.mark.parametrize(
    ("device", "name"),
    [
        *((device, name) for device in HOPPER for name in FORMATS),
        *(("a100-80gb", name) for name in ("int8", "int4_weight", "fp8")),
    ],
)
def test_a_decode_makes_no_numbers_of_weights(device, name):
    """But for 16-bit ones, which are read, none are in memory; and the pool stays where it is."""
    formats = LinearFormats(FORMATS[name])
    jitted, arguments = step_program(
        CONFIG,
        ProgramKey(64, sampling=Sampling.GREEDY),
        dtype="bfloat16",
        num_gpu_blocks=2048,
        block_size=16,
        max_model_len=2048,
        max_num_seqs=64,
        implementation="triton",
        formats=formats,
        kv_dtype="int8",
    )
    with Compiler(get_target(device)) as compiler:
        compiled = compiler.compile(jitted, *map(compiler.struct, arguments))
    text = compiled.as_text()
    entry = text[text.index("\nENTRY") :]
    shapes = [abstract_params(CONFIG, "bfloat16")[weight].shape for weight in linear_weights(CONFIG)]
    assert numbers_of_weights(entry, shapes) == []
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * CONFIG.vocab_size * 4 + 32 * 2**20
    assert count_pool_copies(text, arguments[1].pool.shape) == 0
    assert "coded_product" in text
    if name == "int8":
        assert not re.search(r"s32\[\d+,\d+\]\S* dot\(", text)


@pytest.mark.parametrize("rows", [64, 512])
@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("device", HOPPER)
def test_codes_are_multiplied_with_codes(device, name, rows):
    """Few rows of e4m3 by Triton's kernel, which reads the weight at once; many by XLA's library."""
    weight = jax.eval_shape(QUANTIZATIONS[name].make, jax.ShapeDtypeStruct((14336, 4096), "bfloat16"))
    x = jax.ShapeDtypeStruct((rows, 4096), "bfloat16")
    with Compiler(get_target(device)) as compiler:
        text = compiler.compile(jax.jit(product), *map(compiler.struct, (x, weight))).as_text()
    assert ("coded_product" in text) == (name == "int8" or rows == 64)
    assert numbers_of_weights(text[text.index("\nENTRY") :], [(14336, 4096)]) == []
    if "coded_product" not in text:
        assert re.search(r"f8e4m3fn\[14336,4096\]", text)
        assert re.search(r"cublas\$lt\$matmul\$f8|gemm", text)


def test_numbers_of_weights_would_be_found():
    text = "%a = bf16[64,32]{1,0} fusion(%b)\n%c = bf16[64,32]{1,0} parameter(0)\n%d = s8[64,32] fusion(%e)"
    assert numbers_of_weights(text, [(64, 32), (128, 32)]) == [(2048, "fusion")]
