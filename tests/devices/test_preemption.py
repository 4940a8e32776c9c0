"""The engine on two devices under random schedules, swaps, aborts, drafts and faults: no token changes."""

import pytest
from test_forced_preemption import (  # noqa: F401
    alone,
    draft_model,
    llm,
    test_after_a_fault_all_requests_have_ended,
    test_no_token_depends_on_the_schedule_or_on_drafts,
    test_the_script_does_preempt,
    test_who_is_preempted_drafts_again,
)

from jaxllm.loading import iter_params
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.models.registry import in_format


@pytest.fixture(scope="module")
def weights(llm):  # noqa: F811
    """Whole, of what drafts on the first device."""
    config, formats = llm.model_config, llm.executor.config.formats
    whole = iter_params(demo_model_path(), config, "float32")
    return {name: in_format(config, formats, name, one) for name, one in whole}
