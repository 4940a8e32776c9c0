"""Four devices of the CPU, where JAX has not started yet; engines of tests made for one device are on two."""

import os

import engine_helpers
import pytest
from test_forced_preemption import PARAMS, PROMPTS

from jaxllm import SamplingParams
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.sampling.structured_outputs import StructuredOutputsParams

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
engine_helpers.SMALL["tensor_parallel_size"] = 2


@pytest.fixture(scope="module")
def asked():
    """Prompts and parameters of all kinds: seeds, filters, penalties, scores, grammars, samples."""
    params = [
        *PARAMS,
        SamplingParams(temperature=0.9, seed=3, max_tokens=12, n=3, logprobs=-1),
        SamplingParams(
            temperature=0, max_tokens=24, structured_outputs=StructuredOutputsParams(regex="[a-c]{4,9}")
        ),
        SamplingParams(temperature=0.7, seed=5, max_tokens=12, top_k=5, min_p=0.05, bad_words=["self"]),
    ]
    return [PROMPTS[place % len(PROMPTS)] for place in range(len(params))], params


@pytest.fixture(scope="module")
def on_one(asked):
    options = {"warm_up": "background", "skip_tokenizer_init": False, "num_host_blocks": 16}
    with engine_helpers.make_llm(demo_model_path(), tensor_parallel_size=1, **options) as made:
        return made.generate(*asked, use_tqdm=False)
