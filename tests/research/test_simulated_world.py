"""What lies between clients and scheduler in simulation: ingress, clients, and steps planned ahead."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.research.simulator.run import simulate
from jaxllm.research.workloads import ClosedLoop, Poisson, Trace, UniformLengths, make_trace
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.presets import make_preset

CONFIG = SchedulerConfig(
    num_gpu_blocks=512, block_size=16, max_model_len=2048, max_num_seqs=16, max_num_batched_tokens=512
)


class OneSecondSteps:
    """Costs by which each step takes a second."""

    def step_seconds(self, batch, context_tokens, prompt_tokens=0, num_prompts=0, prompt_context=0):
        return 1.0 if batch or prompt_tokens else 0.0

    def swap_out_seconds(self, num_blocks):
        return 0.0

    swap_in_seconds = swap_out_seconds


def run(trace, **world):
    return simulate(trace, CONFIG, make_preset("vllm_v1"), OneSecondSteps(), overlap_swaps=True, **world)


def open_trace(times, outputs):
    prompts = [8] * len(times)
    return Trace(name="t", seed=0, arrival_times=np.array(times), prompt_lens=prompts, output_lens=outputs)


def test_requests_are_under_way_for_as_long_as_ingress_takes():
    result = run(open_trace([0.0, 10.0], [2, 3]), ingress_seconds=0.25)
    assert result.arrival_times.tolist() == [0.0, 10.0]
    assert result.first_token_times.tolist() == [1.25, 11.25]
    assert result.finish_times.tolist() == [2.25, 13.25]


def test_who_comes_during_a_step_waits_for_the_next_one_that_was_planned_already():
    trace = open_trace([0.0, 2.5, 3.5], [10, 2, 1])
    assert run(trace).first_token_times.tolist() == [1.0, 4.0, 5.0]
    # The steps from 3 and from 4 were planned at 2 and at 3.
    assert run(trace, async_scheduling=True).first_token_times.tolist() == [1.0, 5.0, 6.0]


def test_nothing_is_planned_ahead_where_nobody_goes_on():
    trace = open_trace([0.0, 0.5, 3.0], [1, 1, 1])
    for ahead in (False, True):
        assert run(trace, async_scheduling=ahead).first_token_times.tolist() == [1.0, 2.0, 4.0]


def test_clients_take_their_time_after_answers_but_not_before_the_first_request():
    trace = make_trace(UniformLengths(shortest=5, longest=9), 4, 3, arrivals=ClosedLoop(2))
    result = run(trace, client_seconds=0.5)
    # Half to one and a half of it, no two alike: the fractions of multiples of 0.618.
    assert result.arrival_times.tolist() == pytest.approx([0.0, 0.0, 3.0 + 0.368034, 3.0 + 0.559017])
    both = run(trace, client_seconds=0.5, ingress_seconds=0.25)
    sent = [3.25 + 0.5 * (0.5 + part) for part in (0.236068, 0.618034)]
    assert both.arrival_times.tolist() == pytest.approx([0.0, 0.0, *sent])
    # The second comes while the first is computed.
    assert both.first_token_times.tolist() == pytest.approx([1.25, 1.25, sent[0] + 1.25, sent[0] + 2.25])


def test_clients_of_conversations_take_their_time_too():
    trace = Trace(
        name="t",
        seed=0,
        arrival_times=np.zeros(2),
        prompt_lens=[8, 20],
        output_lens=[2, 1],
        follows=[-1, 0],
        think_times=np.array([0.0, 1.0]),
    )
    assert run(trace, client_seconds=0.5).arrival_times.tolist() == pytest.approx(
        [0.0, 3.25 + 0.5 * 0.618034]
    )


@pytest.mark.parametrize("arrivals", [Poisson(0.4), ClosedLoop(5, 0.3)])
def test_all_are_served_in_a_world_that_takes_its_time(arrivals):
    trace = make_trace("chatbot", 60, 12, outputs="uniform", arrivals=arrivals, seed=3)
    plain = run(trace)
    slow = run(trace, ingress_seconds=0.1, client_seconds=0.2, async_scheduling=True)
    assert slow.num_output_tokens == plain.num_output_tokens
    # A request takes a step for each token at least, and the way there.
    waits = slow.finish_times - slow.arrival_times
    assert np.all(waits >= trace.output_lens + 0.1 - 1e-9)
    assert slow.seconds > plain.seconds


@pytest.mark.parametrize("name", ["ingress_seconds", "client_seconds"])
@pytest.mark.parametrize("seconds", [-0.1, float("nan"), True])
def test_seconds_that_cannot_be_are_refused(name, seconds):
    with pytest.raises(ConfigError, match=name):
        run(open_trace([0.0], [1]), **{name: seconds})
