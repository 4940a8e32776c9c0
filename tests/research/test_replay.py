"""A trace on the real engine gives the figures a simulation gives."""

import dataclasses
import time

import numpy as np
import pytest
from engine_helpers import make_llm
from variants import golden_checkpoint

from jaxllm import SamplingParams
from jaxllm.errors import ConfigError, RequestTooLargeError
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.research.bench.replay import Replay, Stopwatch, deciding, replay, replay_side_by_side
from jaxllm.research.slow_link import slow_down
from jaxllm.research.workloads import ClosedLoop, Poisson, UniformLengths, make_trace
from jaxllm.sched.ledger import Ledger
from jaxllm.sched.presets import PRESETS, make_preset


@pytest.fixture(scope="module")
def llm():
    # Without run-ahead every step is timed, however short it is.
    return make_llm(
        golden_checkpoint("llama_gqa"),
        scheduler_policy="adaptive",
        num_host_blocks=40,
        async_scheduling=False,
    )


@pytest.fixture(scope="module")
def trace():
    return make_trace(UniformLengths(shortest=4, longest=20), 12, 24, arrivals=Poisson(200.0), seed=3)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_runs_every_request(llm, trace, preset):
    costs, ledger = OnlineCalibration(llm.costs.model), Ledger()
    config = dataclasses.replace(llm.engine.scheduler.config, num_gpu_blocks=20)
    result = replay(llm, trace, config, make_preset(preset, costs), costs=costs, ledger=ledger)
    assert result.num_output_tokens == 12 * 24
    assert np.all(result.arrival_times <= result.first_scheduled_times)
    assert np.all(result.first_scheduled_times < result.finish_times)
    assert (ledger.header.device, ledger.header.limits["num_gpu_blocks"]) == ("cpu", config.num_gpu_blocks)
    assert result.num_steps == len(ledger.steps)
    assert result.num_prefill_steps == len([s for s in ledger.steps if s.num_prefill_tokens])
    assert result.num_prefill_tokens == sum(s.num_prefill_tokens for s in ledger.steps)
    assert sum(dataclasses.astuple(result.spent)) >= result.seconds * 0.99
    assert 0 < result.scheduling_seconds < result.seconds
    assert 0 < result.host_seconds < result.seconds
    assert 0 < result.prediction_seconds < result.seconds
    if preset != "vllm_swap":
        assert result.num_preemptions == len(ledger.preemptions) > 0
        assert any(record.measured_seconds is not None for record in ledger.preemptions)
    if preset in ("vllm_swap", "vllm_swap_both"):
        assert result.num_swaps == result.num_preemptions
    assert sum(report.count for report in costs.report().values()) > 20


class Counting:
    """An action that counts its decisions."""

    def __init__(self, action):
        self.action, self.count = action, 0

    def choose(self, victim, state, now):
        self.count += 1
        return self.action.choose(victim, state, now)


def test_every_decision_is_timed(llm, trace):
    config = dataclasses.replace(llm.engine.scheduler.config, num_gpu_blocks=20)
    for preset in ("paper_strategy", "paper"):
        policy = make_preset(preset, llm.costs.model)
        counting = Counting(policy.action)
        run = Replay(llm, trace, config, dataclasses.replace(policy, action=counting))
        while not run.is_over:
            run.advance()
        timed = run._timed[0]
        assert timed.num_decisions == counting.count >= run.result().num_preemptions > 0
        assert run.result().prediction_seconds >= timed.seconds > 0
    assert set(deciding(make_preset("paper", llm.costs.model))) == {"action", "resume"}
    assert deciding(make_preset("vllm")) == {}


def test_clients_of_a_closed_loop_wait_for_their_answers(llm):
    trace = make_trace(UniformLengths(shortest=4, longest=12), 20, 6, arrivals=ClosedLoop(3, 0.002), seed=2)
    result = replay(llm, trace, llm.engine.scheduler.config, make_preset("vllm_v1"))
    assert result.num_output_tokens == 120
    assert np.all(np.diff(result.arrival_times) >= 0)
    assert np.all(result.arrival_times <= result.first_scheduled_times)
    # Who is sent as the n-th can have waited for no fewer answers than there were no clients for.
    ends = np.sort(result.finish_times)
    assert np.all(result.arrival_times[3:] >= ends[: 20 - 3])


def test_a_stopwatch_goes_only_while_it_is_entered(monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    watch = Stopwatch()
    now += 1.0
    assert watch() == 0.0
    with watch:
        now += 2.0
        assert watch() == 2.0
    now += 4.0
    assert watch() == 2.0
    with watch:
        now += 8.0
    assert watch() == 10.0


@pytest.fixture(scope="module")
def other_llm():
    return make_llm(golden_checkpoint("llama_gqa"), scheduler_policy="adaptive", num_host_blocks=40)


def start(llm, trace, clock, ledger=None, **options):
    """A run in a small pool that swaps every victim."""
    costs = OnlineCalibration(llm.costs.model)
    config = dataclasses.replace(llm.engine.scheduler.config, num_gpu_blocks=20)
    policy = make_preset("vllm_swap_both", costs)
    return Replay(llm, trace, config, policy, costs=costs, ledger=ledger, clock=clock, **options)


def test_runs_side_by_side_are_timed_apart(llm, other_llm, trace):
    runs, ledgers = [], [Ledger(), Ledger()]
    for engine, ledger in zip((llm, other_llm), ledgers, strict=True):
        watch = Stopwatch()
        slow_down(engine.executor, 1e6, watch)
        runs.append(start(engine, trace, watch, ledger, async_scheduling=False))
    started = time.perf_counter()
    results = replay_side_by_side(runs, slice_seconds=0.005)
    elapsed = time.perf_counter() - started
    assert sum(result.seconds for result in results) <= elapsed
    for run, result, ledger in zip(runs, results, ledgers, strict=True):
        assert run.is_over
        assert result.num_output_tokens == 12 * 24
        assert result.num_swaps == result.num_preemptions == len(ledger.preemptions) > 0
        assert result.seconds <= result.finish_times.max() <= run.clock()
        # The link's time is the run's own, too, not that of the wall.
        assert 0 < run.executor.swapper.out_free_at <= run.clock()
        assert 0 < run.executor.swapper.in_free_at <= run.clock()
        slow_down(run.executor, None)


def test_what_runs_side_by_side_need(llm, other_llm, trace):
    watch = Stopwatch()
    alike = [start(one, trace, watch, async_scheduling=False) for one in (llm, other_llm)]
    with pytest.raises(ConfigError, match="a Stopwatch each; two share their clock"):
        replay_side_by_side(alike)
    with pytest.raises(ConfigError, match="an LLM and a Stopwatch each; two share their executor"):
        replay_side_by_side([start(llm, trace, Stopwatch(), async_scheduling=False) for _ in range(2)])
    for run in (
        start(llm, trace, Stopwatch(), async_scheduling=True),
        start(llm, trace, time.perf_counter, async_scheduling=False),
    ):
        with pytest.raises(ConfigError, match=r"clock=Stopwatch\(\) and async_scheduling=False"):
            replay_side_by_side([run])


def test_limits_are_checked(llm, trace):
    config = llm.engine.scheduler.config
    for change in (
        {"num_gpu_blocks": config.num_gpu_blocks + 1},
        {"block_size": 8},
        {"num_host_blocks": 41},
        {"max_prefill_seqs": None, "max_num_seqs": 5},
    ):
        with pytest.raises(ConfigError, match=next(iter(change))):
            replay(llm, trace, dataclasses.replace(config, **change), make_preset("vllm"))
    with pytest.raises(RequestTooLargeError, match=r"request \d+ of trace .* more than max_model_len=20"):
        replay(llm, trace, dataclasses.replace(config, max_model_len=20), make_preset("vllm"))
    with pytest.raises(ConfigError, match=r"trace=\[1, 2\] must be a Trace: load_trace"):
        replay(llm, [1, 2], config, make_preset("vllm"))
    with pytest.raises(ConfigError, match="config='x' must be a SchedulerConfig, such as"):
        replay(llm, trace, "x", make_preset("vllm"))
    llm.sleep()
    with pytest.raises(ConfigError, match="cannot replay a trace on an engine that sleeps: call wake_up"):
        replay(llm, trace, config, make_preset("vllm"))
    llm.wake_up()
    llm.engine.add_request("busy", [1, 2], SamplingParams(max_tokens=1))
    with pytest.raises(ConfigError, match="while requests are running"):
        replay(llm, trace, config, make_preset("vllm"))
    llm.engine.abort("busy")
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
