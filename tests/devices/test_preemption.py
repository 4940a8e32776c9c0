"""The engine on two devices under random schedules, swaps, aborts, drafts and faults: no token changes."""

import pytest
from engine_helpers import make_llm
from test_forced_preemption import (  # noqa: F401
    MOST_DRAFTS,
    NUM_HOST_BLOCKS,
    alone,
    draft_model,
    test_after_a_fault_all_requests_have_ended,
    test_no_token_depends_on_the_schedule_or_on_drafts,
    test_the_script_does_preempt,
    test_who_is_preempted_drafts_again,
)

from jaxllm.loading import iter_params
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.models.registry import in_format


@pytest.fixture(scope="module")
def llm():
    return make_llm(
        demo_model_path(),
        skip_tokenizer_init=False,
        num_gpu_blocks_override=128,
        num_host_blocks=NUM_HOST_BLOCKS,
        prefill_buckets=[16, 48],
        num_scheduler_steps=4,
        speculative_config={"num_speculative_tokens": MOST_DRAFTS},
        tensor_parallel_size=2,
    )


@pytest.fixture(scope="module")
def weights(llm):
    """Whole, of what drafts on the first device."""
    config, formats = llm.model_config, llm.executor.config.formats
    whole = iter_params(demo_model_path(), config, "float32")
    return {name: in_format(config, formats, name, one) for name, one in whole}
