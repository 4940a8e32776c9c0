"""What programs of several GPUs that are not there say to one another, and what they keep in place."""

import collections
import re

import jax
import pytest
from published import LLAMA_3_8B

from jaxllm.executor.kv.swapper import BlockSwapper
from jaxllm.executor.placement import ON_EACH
from jaxllm.executor.programs import ProgramKey, state_shapes, step_program
from jaxllm.executor.sampling_programs import RowsKey, rows_program
from jaxllm.executor.slot_params import Sampling
from jaxllm.models.config import config_from_dict
from jaxllm.research.plan.target import Compiler, get_target

MIB = 2**20
NUM_LAYERS = 2
LLAMA_3_70B = {
    **LLAMA_3_8B,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
    "num_hidden_layers": NUM_LAYERS,
}
CONFIG = config_from_dict(LLAMA_3_70B)
SIZES = {"num_gpu_blocks": 2048, "block_size": 16, "max_model_len": 2048, "max_num_seqs": 64}
OPERATION = re.compile(
    r" = (.*) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def said(program):
    """Shapes of what devices say to one another, by operation."""
    found = collections.defaultdict(list)
    for shape, name in OPERATION.findall(program.as_text()):
        found[name].append(re.sub(r"\{.*?\}", "", shape))
    return found


@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.parametrize("key", [ProgramKey(64), ProgramKey(512, 8)], ids=["decode", "prompts"])
def test_devices_sum_twice_a_layer_and_gather_the_best_scores(key, num_devices):
    """And nothing else, no logits; the pool stays where it is, and what is kept for a while is little."""
    with Compiler(get_target("h100"), num_devices) as compiler:
        options = {"dtype": "bfloat16", "implementation": "triton", "placement": compiler.placement}
        program = compiler.compile(*flat(step_program(CONFIG, key, **SIZES, **options)))
        own = compiler.placement.share(CONFIG)
    assert said(program) == {
        "all-reduce": [f"bf16[{key.rows},{CONFIG.hidden_size}]"] * 2 * NUM_LAYERS,
        "all-gather": [f"(s32[1,2,64], s32[{num_devices},2,64])"],
    }
    memory, state = program.memory_analysis(), jax.tree.leaves(state_shapes(own, dtype="bfloat16", **SIZES))
    assert memory.alias_size_in_bytes >= sum(x.size * x.dtype.itemsize for x in state)
    assert memory.temp_size_in_bytes < 64 * MIB


def test_long_prompts_keep_few_arrays_of_the_residual_stream():
    """32 MiB each of 2,048 rows: sums and norms take the places of what they are made of."""
    with Compiler(get_target("h100"), 8) as compiler:
        options = {"dtype": "bfloat16", "implementation": "triton", "placement": compiler.placement}
        program = compiler.compile(*flat(step_program(CONFIG, ProgramKey(2048, 8), **SIZES, **options)))
    assert program.memory_analysis().temp_size_in_bytes < 112 * MIB


@pytest.mark.parametrize(("num_devices", "num_contexts"), [(2, 2), (4, 4), (4, 2)])
def test_groups_that_share_prompts_gather_keys_and_values(num_devices, num_contexts):
    """Once a layer, and what is sampled of the last one; nothing of decodes but what each group sums."""
    width, said_by, needed = num_devices // num_contexts, [], []
    prompts, decode = ProgramKey(1024, 8), ProgramKey(64)
    options = {"dtype": "bfloat16", "implementation": "triton", **SIZES}
    for groups in (num_contexts, 1):
        with Compiler(get_target("h100"), width * groups, groups) as compiler:
            own = compiler.placement.share(CONFIG)
            for key in (prompts, decode) if groups > 1 else (prompts,):
                placed = step_program(CONFIG, key, placement=compiler.placement, **options)
                program = compiler.compile(*flat(placed))
                said_by.append(said(program))
                if key == prompts:
                    needed.append(program.memory_analysis().temp_size_in_bytes)
    assert needed[0] < 0.7 * needed[1], "rows of the other groups take no memory"
    rows, hidden, heads = prompts.rows // num_contexts, CONFIG.hidden_size, 2 * own.num_kv_heads
    best = [f"(s32[1,2,64], s32[{width},2,64])"] * (width > 1)
    sums = [f"bf16[{rows},{hidden}]"] * (2 * NUM_LAYERS if width > 1 else 0)
    gathered = [f"(bf16[{rows},{heads},128], bf16[{prompts.rows},{heads},128])"] * NUM_LAYERS
    gathered += [f"(bf16[{rows},{hidden}], bf16[{prompts.rows},{hidden}])"]
    assert sorted(said_by[0].pop("all-gather")) == sorted(gathered + best)
    assert said_by[0].pop("all-reduce", []) == sums
    assert said_by[1].pop("all-gather", []) == best
    assert len(said_by[1].pop("all-reduce", [])) == len(sums)
    assert not any(said_by[:2])


def test_swaps_say_nothing():
    """Each device moves its heads of a block."""
    with Compiler(get_target("h100"), 4) as compiler:
        pool = state_shapes(compiler.placement.share(CONFIG), dtype="bfloat16", **SIZES).pool
        for one in BlockSwapper.programs(pool, 2, compiler.placement):
            program = compiler.compile(*flat(one[1:]))
            assert not said(program)
            assert program.memory_analysis().temp_size_in_bytes == 0


def test_what_is_sampled_apart_is_sampled_by_each():
    with Compiler(get_target("h100"), 4) as compiler:
        limits = {"vocab_size": CONFIG.vocab_size, "max_num_seqs": 64, "max_model_len": 2048}
        jitted, arguments = rows_program(RowsKey(16, Sampling.COMPLETE), **limits)
        program = compiler.compile(jitted, *compiler.placement.structs(arguments, ON_EACH))
    assert not said(program)


def flat(made):
    jitted, arguments = made
    return jitted, *arguments
