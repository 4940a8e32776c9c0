"""The scripts about what requests have in common, and simulations of it."""

import re

import demo_conversation
import numpy as np
import pytest
from scheduler_helpers import LinearCosts

from jaxllm.research.simulator.run import simulate
from jaxllm.research.workloads import Poisson, make_conversations
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.presets import make_preset


def test_the_demo_finds_the_first_turn(capsys):
    demo_conversation.main([])
    lines = capsys.readouterr().out.splitlines()[-4:]
    found = [re.findall(r"\d+ found on the (\w+)", line) for line in lines]
    assert found == [[], ["device"], ["host"], ["disk"]]


@pytest.mark.parametrize("preset", ["vllm_v1", "adaptive"])
@pytest.mark.parametrize("num_blocks", [70, 500])
def test_simulated_turns_find_what_was_said(preset, num_blocks):
    trace = make_conversations(20, common_len=20, max_len=1000, mean_think=5.0, arrivals=Poisson(0.5), seed=4)

    def run(caches):
        config = SchedulerConfig(
            num_gpu_blocks=num_blocks,
            block_size=16,
            max_model_len=1001,
            max_num_seqs=16,
            max_num_batched_tokens=256,
            num_host_blocks=30,
            enable_prefix_caching=caches,
        )
        costs = LinearCosts(prefill=1e-3, decode=1e-3, swap=1e-3)
        return simulate(trace, config, make_preset(preset, costs), costs, overlap_swaps=True)

    without, found = run(False), run(True)
    assert without.num_cached_tokens == 0 < found.num_cached_tokens
    assert found.num_prefill_tokens < without.num_prefill_tokens
    for result in (without, found):
        assert np.all(result.finish_times > result.first_token_times)
        later = trace.follows >= 0
        answered = result.finish_times[trace.follows[later]] + trace.think_times[later]
        np.testing.assert_allclose(result.arrival_times[later], answered)
    if num_blocks == 500:  # everything fits: all but what whole blocks leave over is found
        assert found.num_prefill_tokens + found.num_cached_tokens == trace.prompt_lens.sum()
        begun = trace.prompt_lens[trace.follows[later]] + trace.output_lens[trace.follows[later]] - 1
        assert found.num_cached_tokens >= (begun // 16 * 16).sum()
