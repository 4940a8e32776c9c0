"""A trace on the real engine gives the figures a simulation gives."""

import dataclasses
import time

import numpy as np
import pytest
from engine_helpers import make_llm
from variants import golden_checkpoint

from jaxllm import SamplingParams
from jaxllm.bench.replay import Replay, Stopwatch, replay, replay_side_by_side
from jaxllm.errors import ConfigError
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.sched.ledger import Ledger
from jaxllm.sched.presets import PRESETS, make_preset
from jaxllm.workloads import Poisson, UniformLengths, make_trace


@pytest.fixture(scope="module")
def llm():
    return make_llm(golden_checkpoint("llama_gqa"), scheduler_policy="adaptive", num_host_blocks=40)


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
    assert result.num_steps == result.num_prefill_steps + len([s for s in ledger.steps if s.num_decoded])
    assert result.num_prefill_tokens == sum(s.num_prefill_tokens for s in ledger.steps)
    assert sum(dataclasses.astuple(result.spent)) >= result.seconds * 0.99
    assert 0 < result.scheduling_seconds < result.seconds
    assert 0 < result.prediction_seconds < result.seconds
    if preset != "vllm_swap":
        assert result.num_preemptions == len(ledger.preemptions) > 0
        assert any(record.measured_seconds is not None for record in ledger.preemptions)
    if preset in ("vllm_swap", "vllm_swap_both"):
        assert result.num_swaps == result.num_preemptions
    assert costs.report()["decode"].count > 20


def test_a_stopwatch_goes_only_while_it_is_entered():
    watch = Stopwatch()
    assert watch() == 0.0
    with watch:
        time.sleep(0.01)
        seen = watch()
    assert seen >= 0.01
    stopped = watch()
    time.sleep(0.01)
    assert watch() == stopped >= seen
    with watch:
        pass
    assert stopped <= watch() < stopped + 0.01


def test_runs_side_by_side_are_timed_apart(llm, trace):
    other = make_llm(golden_checkpoint("llama_gqa"), scheduler_policy="adaptive", num_host_blocks=40)
    config = dataclasses.replace(llm.engine.scheduler.config, num_gpu_blocks=20)
    runs, tables = [], []
    for engine in (llm, other):
        watch, costs, ledger = Stopwatch(), OnlineCalibration(llm.costs.model), Ledger()
        engine.executor.limit_host_bandwidth(1e6, watch)
        policy = make_preset("vllm_swap_both", costs)
        run = Replay(
            engine, trace, config, policy, costs=costs, ledger=ledger, async_scheduling=False, clock=watch
        )
        runs.append((run, watch))
        tables.append(ledger)
    started = time.perf_counter()
    results = replay_side_by_side(runs, slice_seconds=0.005)
    elapsed = time.perf_counter() - started
    assert sum(result.seconds for result in results) <= elapsed
    for result, (run, watch), ledger in zip(results, runs, tables, strict=True):
        assert run.is_over
        assert result.num_output_tokens == 12 * 24
        assert result.num_swaps == result.num_preemptions == len(ledger.preemptions) > 0
        assert result.finish_times.max() <= watch()
        # The link's time is the run's own, too: it cannot have brought blocks faster than it carries them.
        copied = sum(record.num_blocks for record in ledger.preemptions)
        assert result.seconds >= copied * llm.executor.pool_bytes / llm.executor.num_gpu_blocks / 1e6
    for engine in (llm, other):
        assert not engine.executor._swapper.handles
        engine.executor.limit_host_bandwidth(None)


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
    llm.engine.add_request("busy", [1, 2], SamplingParams(max_tokens=1))
    with pytest.raises(ConfigError, match="while requests are running"):
        replay(llm, trace, config, make_preset("vllm"))
    llm.engine.abort("busy")
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
