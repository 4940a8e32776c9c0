"""Engines on two and on four devices against what transformers computed, for every model variant."""

import pytest
from engine_helpers import make_llm
from test_engine_golden import (  # noqa: F401
    test_tokens_and_logprobs_equal_those_of_transformers,
    test_tokens_and_logprobs_survive_preemption,
)
from variants import VARIANTS, golden_checkpoint, golden_data

from jaxllm.executor.step_programs import StepPrograms

SIZES = {"llama_gqa": (2, 4), "opt_pre_norm": (2, 4)}
CASES = [
    (name, size) for place, name in enumerate(VARIANTS) for size in SIZES.get(name, (2 + place % 2 * 2,))
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def variant(request):
    name, size = request.param
    with pytest.MonkeyPatch.context() as patch:  # only what is needed is compiled
        patch.setattr(StepPrograms, "begin", lambda self, num_threads=None: None)
        settings = {"warm_up": "background", "num_host_blocks": 16}
        llm = make_llm(golden_checkpoint(name), tensor_parallel_size=size, **settings)
    return llm, golden_data(name)
