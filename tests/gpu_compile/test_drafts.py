"""What drafting runs on a GPU that is not there."""

import dataclasses

import pytest
from published import LLAMA_3_8B

from jaxllm.executor.buckets import Buckets
from jaxllm.executor.chain import chains_of
from jaxllm.executor.config import ExecutorConfig
from jaxllm.executor.decode_steps import Lookup
from jaxllm.executor.draft_programs import DraftKey, ModelCore, chained_program, draft_program
from jaxllm.executor.eagle3 import Eagle3Core
from jaxllm.executor.programs import state_shapes
from jaxllm.models.config import config_from_dict
from jaxllm.models.eagle3 import Eagle3Config
from jaxllm.research.plan.target import Compiler, get_target

MOST = 4


@pytest.mark.parametrize("is_chained", [False, True])
@pytest.mark.parametrize("kind", ["model", "eagle3"])
def test_drafts_are_one_loop_without_sorts(kind, is_chained):
    """What is new, then one decode step after another; also where the device alone knows what is new."""
    config = ExecutorConfig(
        num_gpu_blocks=2048,
        block_size=16,
        max_model_len=2048,
        max_num_seqs=64,
        buckets=Buckets.make(max_num_seqs=64, max_num_batched_tokens=2048),
        dtype="bfloat16",
        implementation="triton",
        max_drafts=MOST * 64,
        lookup=Lookup(MOST),
        max_decode_steps=8,
    )
    model = config_from_dict({**LLAMA_3_8B, "num_hidden_layers": 2})
    core = ModelCore(model, config)
    if kind == "eagle3":
        layer = dataclasses.replace(model, num_layers=1)
        core = Eagle3Core(Eagle3Config(layer, (2, 16, 29), 4096, 32000, False), config, MOST)
    with Compiler(get_target("h200")) as compiler:
        jitted, arguments = draft_program(core, MOST, 64, DraftKey(core.num_new * 64, 64), 128)
        if is_chained:
            *_, chain = chains_of(config).values()
            engine = state_shapes(
                model,
                dtype="bfloat16",
                num_gpu_blocks=2048,
                block_size=16,
                max_model_len=2048,
                max_num_seqs=64,
                num_kept_layers=3 if kind == "eagle3" else 0,
            )
            jitted, arguments = chained_program(core, MOST, chain, engine._replace(pool=None), 128)
        program = compiler.compile(jitted, *map(compiler.struct, arguments))
    text = program.as_text()
    assert text.count(" while(") == 1
    assert text.count(" sort(") == 0
    assert program.memory_analysis().temp_size_in_bytes < 3 * 64 * model.vocab_size * 4 + 2**27
