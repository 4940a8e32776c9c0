"""What a step needs beside the pool, from the compiler's own account."""

import itertools
import types

import jax
import pytest
from published import LLAMA_3_8B

from jaxllm import LLM
from jaxllm.errors import CapacityError, ConfigError
from jaxllm.executor import memory
from jaxllm.executor.buckets import decode_ladder, prefill_ladder
from jaxllm.executor.decode_steps import Lookup
from jaxllm.executor.programs import ProgramKey, step_program
from jaxllm.models.config import config_from_dict
from jaxllm.models.registry import weight_bytes

GIB = 2**30
CONFIG = config_from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8192,
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "intermediate_size": 1024,
        "max_position_embeddings": 2048,
    }
)

PROGRAMS = [ProgramKey(64), ProgramKey(16, 0, 8), ProgramKey(512, 64), ProgramKey(16, 0, 8, num_lookups=8)]


@pytest.mark.parametrize("key", PROGRAMS, ids=lambda key: key.name)
def test_a_one_gib_pool_is_aliased_and_temporaries_are_under_a_tenth(key):
    block_bytes = memory.block_bytes(CONFIG, 16, "float32")
    jitted, arguments = step_program(
        CONFIG,
        key,
        dtype="float32",
        num_gpu_blocks=GIB // block_bytes,
        block_size=16,
        max_model_len=512,
        max_num_seqs=64,
        implementation="xla",
        lookup=Lookup(key.num_lookups, 2, 4) if key.num_lookups else None,
    )
    analysis = jitted.lower(*arguments).compile().memory_analysis()
    assert analysis.alias_size_in_bytes >= GIB
    assert analysis.temp_size_in_bytes < GIB // 10


def test_block_bytes_is_equation_3_of_the_paper():
    # Llama-13B in 16 bits: 2 * 40 layers * 5120 * 16 tokens * 2 bytes.
    llama_13b = config_from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 32000,
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "intermediate_size": 13824,
        }
    )
    assert memory.block_bytes(llama_13b, 16, "float16") == 13_107_200


def size(**settings):
    known = {
        "device": jax.devices("cpu")[0],
        "weight_bytes": 0,
        "bytes_per_block": 1000,
        "temporaries": 0,
        "needed_blocks": 10**9,
        "num_gpu_blocks_override": None,
        "kv_cache_memory": None,
        "gpu_memory_utilization": None,
    }
    return memory.num_blocks_that_fit(**{**known, **settings})


def test_pool_sizes():
    assert size(num_gpu_blocks_override=7) == 7
    assert size(kv_cache_memory=5999) == 5
    assert size(kv_cache_memory=5999, needed_blocks=3) == 3
    assert size() <= 4 * GIB // 1000
    assert size(gpu_memory_utilization=0.99) > 0
    with pytest.raises(CapacityError, match="no KV block"):
        size(gpu_memory_utilization=0.9, temporaries=2**50)
    with pytest.raises(CapacityError, match="no KV block"):
        size(gpu_memory_utilization=0.9, weight_bytes=2**50)
    for bad in (0, 1.5, -1, True):
        with pytest.raises(ConfigError, match="gpu_memory_utilization"):
            size(gpu_memory_utilization=bad)
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        size(kv_cache_memory=10)
    with pytest.raises(ConfigError, match="num_gpu_blocks_override"):
        size(num_gpu_blocks_override=0)


def test_the_device_with_the_least_memory_left_decides():
    def device(limit, used):
        stats = {"bytes_limit": limit, "bytes_in_use": used}
        return types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)

    devices = [device(80 * GIB, 0), device(80 * GIB, 10 * GIB), device(72 * GIB, 0)]
    assert memory.tightest(devices) is devices[1]
    assert size(device=devices[1], gpu_memory_utilization=0.5) == 30 * GIB // 1000


@pytest.mark.parametrize(
    ("gib", "limits"),
    [(142, (1024, 8192)), (76, (512, 8192)), (42, (256, 2048)), (22, (256, 2048))],
    ids=["h200", "h100", "l40", "l4"],
)
def test_limits_grow_with_the_memory(gib, limits):
    """Of Llama-3-8B: 16 GB of weights, 128 KiB of KV a token."""
    config = config_from_dict(LLAMA_3_8B)
    assert memory.default_limits(config, "bfloat16", weight_bytes(config, "bfloat16"), gib * GIB) == limits


def test_small_models_get_the_largest_limits_and_large_ones_the_smallest(tmp_path):
    tiny = config_from_dict({**LLAMA_3_8B, "num_hidden_layers": 2, "vocab_size": 1024})
    assert memory.default_limits(tiny, "bfloat16", weight_bytes(tiny, "bfloat16"), 76 * GIB) == (1024, 8192)
    assert memory.default_limits(tiny, "bfloat16", 90 * GIB, 76 * GIB) == (256, 2048)
    assert memory.device_limits(jax.devices("cpu")[0], tiny, "bfloat16", 90 * GIB) == (64, 512)


def test_steps_with_prompts_are_padded_by_less_than_a_quarter_where_they_are_large():
    sizes = prefill_ladder(8192)
    assert sizes[:8] == (32, 64, 96, 128, 192, 256, 384, 512)
    assert sizes[-5:] == (4096, 5120, 6144, 7168, 8192)
    assert max(large / small for small, large in itertools.pairwise(sizes) if small >= 64) == 1.5
    assert max(large / small for small, large in itertools.pairwise(sizes) if small >= 2048) == 1.25
    assert prefill_ladder(512, is_padding_cheap=True) == (32, 128, 512)
    assert decode_ladder(64, is_padding_cheap=True) == (1, 8, 16, 32, 64)


def test_what_no_device_holds_is_refused_before_it_is_made():
    with pytest.raises(CapacityError, match=r"weights of 1048576.0 GiB and a KV pool of 0.0 GiB"):
        memory.check_fits(jax.devices()[0], 2**50, 0)
    with pytest.raises(CapacityError, match="smaller pool"):
        LLM(load_format="dummy", skip_tokenizer_init=True, num_gpu_blocks_override=2**31 - 1)
    with pytest.raises(CapacityError, match="smaller model"):
        LLM(load_format="dummy", skip_tokenizer_init=True, hf_overrides={"vocab_size": 2**31 - 1})
