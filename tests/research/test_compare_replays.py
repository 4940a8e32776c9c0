"""Replays that compare policies: warm, in turns, with intervals and what cannot be seen."""

import dataclasses
import json
import logging
import math
import random

import jax
import numpy as np
import pytest
from engine_helpers import make_llm
from variants import golden_checkpoint

from jaxllm.errors import ConfigError
from jaxllm.research.bench import compare
from jaxllm.research.bench.compare import (
    OthersShare,
    bootstrap_interval,
    compare_replays,
    compared,
    smallest_seen,
    turns,
)
from jaxllm.research.bench.replay import replay
from jaxllm.research.workloads import UniformLengths, make_trace
from jaxllm.sched.policies import SchedulerPolicy
from jaxllm.sched.presets import make_preset

TRACE = make_trace(UniformLengths(shortest=4, longest=20), 8, 12, seed=3)
ARMS = {"v1": "vllm_v1", "mine": SchedulerPolicy(), "paper": "paper"}


@pytest.fixture(scope="module")
def llm():
    llm = make_llm(golden_checkpoint("llama_gqa"), num_host_blocks=40, warm_up="background")
    yield llm
    llm.close()


def test_a_cold_replay_says_that_it_compiled_and_a_warm_one_says_nothing(caplog):
    jax.clear_caches()  # no programs of an engine before it
    llm = make_llm(golden_checkpoint("llama_gqa"), num_host_blocks=40, warm_up="background")
    caplog.clear()
    limits = dataclasses.replace(llm.engine.scheduler.config, num_gpu_blocks=20)
    with caplog.at_level(logging.WARNING, "jaxllm.research.bench.replay"):
        replay(llm, TRACE, limits, make_preset("vllm_v1"))
    (record,) = caplog.records
    assert "programs were compiled during this replay of" in record.getMessage()
    assert "use jaxllm.research.bench.compare.compare_replays" in record.getMessage()
    assert record.args[0] > 0 < record.args[2]
    while llm.compile_progress().num_compiled < llm.compile_progress().num_programs:
        llm.executor.wait_for_programs(1.0)
    replay(llm, TRACE, limits, make_preset("vllm_v1"), warns=False)
    caplog.clear()
    replay(llm, TRACE, limits, make_preset("vllm_v1"))
    llm.close()
    assert caplog.records == []


def test_arms_are_warmed_and_take_turns(llm, monkeypatch, tmp_path):
    played = []

    def record(engine, trace, limits, policy, **others):
        played.append(policy)
        return replay(engine, trace, limits, policy, **others)

    monkeypatch.setattr(compare, "replay", record)
    found = compare_replays(llm, TRACE, ARMS, repetitions=4, seed=5)
    kinds = ["mine" if policy is ARMS["mine"] else type(policy.priority).__name__ for policy in played]
    assert len(kinds) == 3 * (1 + 4)
    rounds = [tuple(kinds[start : start + 3]) for start in range(0, 15, 3)]
    assert {frozenset(one) for one in rounds} == {frozenset(rounds[0])}
    assert len(set(rounds)) > 1
    assert list(found.arms) == list(ARMS)
    first = found.arms["v1"]
    assert (first.ratio, first.interval) == (1.0, (1.0, 1.0))
    for arm in found.arms.values():
        assert len(arm.runs) == len(arm.tokens_per_second) == len(arm.others) == 4
        assert arm.interval[0] <= arm.ratio <= arm.interval[1]
    assert found.smallest_difference > 0
    lines = str(found).splitlines()
    assert lines[0].endswith("tokens/s, median of 4")
    mine = found.arms["mine"]
    is_near = abs(mine.ratio - 1.0) < found.smallest_difference
    assert lines[1].endswith("] of v1: too near to tell" if is_near else "] of v1")
    assert "cannot be seen here; the machine was " in lines[-1]
    assert json.loads(json.dumps(found.to_dict()))["arms"]["paper"]["ratio"] == found.arms["paper"].ratio
    found.plot(tmp_path / "compared.png")
    assert (tmp_path / "compared.png").stat().st_size > 1000
    with pytest.raises(ConfigError, match=r"absent/compared\.png: No such file or directory; name another"):
        found.plot(tmp_path / "absent" / "compared.png")


@pytest.mark.parametrize(("arms", "repetitions"), [({"one": "vllm"}, 3), (ARMS, 2), (ARMS, True)])
def test_what_compares_nothing_is_refused(llm, arms, repetitions):
    with pytest.raises(ConfigError, match="two arms or more, and at least 3 repetitions"):
        compare_replays(llm, TRACE, arms, repetitions)


def test_what_is_no_mapping_or_seed_is_refused(llm):
    with pytest.raises(ConfigError, match=r"arms=\['vllm', 'paper'\] must be policies by name"):
        compare_replays(llm, TRACE, ["vllm", "paper"])
    with pytest.raises(ConfigError, match="seed must be an integer, got 'x'"):
        compare_replays(llm, TRACE, ARMS, seed="x")


class Run:
    num_preemptions = 0

    def __init__(self, rate):
        self.output_tokens_per_second = rate


def test_pairs_are_compared_and_not_means():
    base = [100.0, 50.0, 200.0, 80.0]  # the machine's speed differs, and meets both
    runs = {"a": list(map(Run, base)), "b": [Run(1.1 * rate) for rate in base]}
    found = compared(runs, {"a": [0.0] * 4, "b": [0.0, 0.3, None, 0.0]}, 0)
    assert found.arms["b"].ratio == pytest.approx(1.1)
    assert found.arms["b"].interval == pytest.approx((1.1, 1.1))
    assert found.smallest_difference == pytest.approx(0.0, abs=1e-9)
    assert (found.others_share, found.is_busy) == (0.3, True)
    assert "the machine was busy: others took up to 30% of its processors" in found.caveat
    unknown = compared(runs, {"a": [None] * 4, "b": [None] * 4}, 0)
    assert unknown.is_busy is None
    assert "other processes' share not known" in unknown.caveat


@pytest.mark.parametrize(("count", "least", "most"), [(3, 0.65, 0.85), (6, 0.9, 1.0), (30, 0.9, 0.99)])
def test_an_interval_holds_the_mean_of_most_samples(count, least, most):
    rng = np.random.default_rng(1)
    held = 0
    for seed in range(400):
        low, high = bootstrap_interval(rng.normal(0.05, 0.1, count), seed, 1000)
        held += low <= math.exp(0.05) <= high
    assert least < held / 400 < most


def test_a_difference_as_small_as_said_is_found_in_four_cases_of_five():
    rng, count, spread = np.random.default_rng(2), 10, 0.02
    known = smallest_seen([rng.normal(0.0, spread, count) for _ in range(400)])
    found = 0
    for _ in range(400):
        sample = rng.normal(math.log1p(known), spread, count)
        found += abs(sample.mean()) / (sample.std(ddof=1) / math.sqrt(count)) > 2.262  # t of 9 degrees
    assert 0.7 < found / 400 < 0.9
    twice = smallest_seen([rng.normal(0.0, 2 * spread, count) for _ in range(400)])
    assert twice == pytest.approx(2 * known, rel=0.1)


def test_turns_are_permutations_that_the_seed_decides():
    drawn = list(turns("abc", 50, random.Random(3)))
    assert drawn == list(turns("abc", 50, random.Random(3)))
    orders = ["".join(arm for number, arm in drawn if number == repetition) for repetition in range(50)]
    assert {"".join(sorted(order)) for order in orders} == {"abc"}
    assert len(set(orders)) == 6


def test_what_others_take_is_a_share():
    share = OthersShare()
    sum(range(100_000))
    found = share()
    assert found is None or 0.0 <= found <= 1.0
