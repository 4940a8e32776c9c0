"""Closed loops of clients: `ClosedLoop`, `Feed`, and what they mean to the simulator and the engine."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.errors import ConfigError, RequestError
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.published_shapes import model_shape
from jaxllm.predictors.roofline import RooflineCostModel
from jaxllm.research.simulator.run import simulate
from jaxllm.research.workloads import (
    AllAtOnce,
    ClosedLoop,
    Feed,
    GammaBursts,
    Poisson,
    Trace,
    UniformLengths,
    make_trace,
    parse_arrivals,
)
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.presets import PRESETS, make_preset

COSTS = RooflineCostModel(model_shape("opt-13b"), device_spec("A800-80GB-PCIe"))
CONFIG = SchedulerConfig(
    num_gpu_blocks=64,
    block_size=16,
    max_model_len=2048,
    max_num_seqs=64,
    max_num_batched_tokens=512,
    num_host_blocks=32,
)


def most_under_way(arrivals: np.ndarray, finishes: np.ndarray) -> int:
    """Most requests at one time; who finishes when another is sent makes room for it."""
    events = sorted([(time, 1) for time in arrivals] + [(time, -1) for time in finishes])
    count = most = 0
    for _, change in events:
        count += change
        most = max(most, count)
    return most


@pytest.mark.parametrize("preset", ["adaptive", "paper", "vllm", "vllm_v1"])
@pytest.mark.parametrize("think", [0.0, 0.3])
def test_simulated_clients_wait_for_their_answers(preset, think):
    clients = ClosedLoop(12, think)
    trace = make_trace("chatbot", 100, 48, outputs="uniform", arrivals=clients, seed=1)
    result = simulate(trace, CONFIG, make_preset(preset, COSTS), COSTS, overlap_swaps=False)
    arrivals, finishes = result.arrival_times, result.finish_times
    assert most_under_way(arrivals, finishes) <= 12
    assert np.all(np.diff(arrivals) >= 0)
    assert np.all(arrivals <= result.first_scheduled_times)
    # The n-th request to be waited for is sent its think time after an answer, or after the beginning.
    assert trace.think_times is not None
    earliest = np.concatenate([np.zeros(12), np.sort(finishes)[: 100 - 12]]) + trace.think_times
    assert np.sort(earliest) == pytest.approx(arrivals)
    if not think:
        assert most_under_way(arrivals, finishes) == 12


def test_more_clients_than_requests_are_all_at_once():
    closed = make_trace("alpaca", 30, 16, arrivals=ClosedLoop(50))
    open_ = make_trace("alpaca", 30, 16)
    results = [
        simulate(trace, CONFIG, PRESETS["vllm_v1"](None), COSTS, overlap_swaps=False)
        for trace in (closed, open_)
    ]
    assert results[0].finish_times.tolist() == results[1].finish_times.tolist()


def test_one_client_is_served_alone():
    trace = make_trace(UniformLengths(shortest=5, longest=9), 6, 7, arrivals=ClosedLoop(1))
    result = simulate(trace, CONFIG, PRESETS["vllm_v1"](None), COSTS, overlap_swaps=False)
    assert result.arrival_times[1:].tolist() == result.finish_times[:-1].tolist()
    assert result.mean_decode_batch == 1


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.floats(0.0, 2.0),
    st.lists(st.floats(0.0, 3.0), min_size=40, max_size=40),
)
def test_a_feed_sends_everything_once_and_in_order(count, num_clients, think, service):
    trace = make_trace("chatbot", count, 8, arrivals=ClosedLoop(num_clients, think), seed=3)
    feed, now = Feed(trace, 5.0), 5.0
    under_way: list[float] = []
    sent: list[tuple[int, float]] = []
    while not feed.is_over or under_way:
        due = feed.next_due
        now = max(now, min([*under_way, *([] if due is None else [due])]))
        for end in [end for end in under_way if end <= now]:
            under_way.remove(end)
            feed.answered(now)
        while (one := feed.send(now)) is not None:
            sent.append(one)
            under_way.append(now + service[one[0]])
        assert len(under_way) <= num_clients
    assert [index for index, _ in sent] == list(range(count))
    assert all(5.0 <= time <= now for _, time in sent)
    assert feed.next_due is None


def test_think_times_have_their_mean_and_a_stream_that_grows():
    long = make_trace("chatbot", 4000, 8, arrivals=ClosedLoop(4, 0.5), seed=7)
    short = make_trace("chatbot", 10, 8, arrivals=ClosedLoop(4, 0.5), seed=7)
    assert long.think_times is not None
    assert short.think_times is not None
    assert long.think_times.mean() == pytest.approx(0.5, rel=0.05)
    assert long.think_times[:10].tolist() == short.think_times.tolist()
    assert long.head(10) == dataclasses.replace(short, notes=long.notes)


def test_a_closed_loop_is_stored(tmp_path):
    trace = make_trace("chatbot", 5, 8, arrivals=ClosedLoop(2, 0.5))
    trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == trace
    assert trace.summary()["num_clients"] == 2


def test_traces_of_version_1_are_read(tmp_path):
    trace = make_trace("chatbot", 5, 8)
    trace.save(tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    del content["num_clients"], content["think_times"]
    (tmp_path / "old.json").write_text(json.dumps({**content, "version": 1}))
    assert Trace.load(tmp_path / "old.json") == trace


def test_malformed_loops_are_refused():
    trace = make_trace("chatbot", 5, 8, arrivals=ClosedLoop(2, 0.5))
    with pytest.raises(ConfigError, match="think_times are of a closed loop"):
        dataclasses.replace(trace, num_clients=0)
    with pytest.raises(ConfigError, match="set all arrival_times to 0"):
        dataclasses.replace(trace, arrival_times=[0, 1, 2, 3, 4])
    with pytest.raises(RequestError, match="one entry per request: 5, got 4"):
        dataclasses.replace(trace, think_times=np.zeros(4))
    with pytest.raises(RequestError, match=r"think_times\[1\] must lie in"):
        dataclasses.replace(trace, think_times=np.array([0, -1.0, 0, 0, 0]))
    for arguments in ((0,), (True,), (2, -1.0), (2, float("nan"))):
        with pytest.raises(ConfigError, match="must"):
            ClosedLoop(*arguments)


def test_arrivals_of_a_command_line():
    assert parse_arrivals("all") == AllAtOnce()
    assert parse_arrivals("poisson:2.5") == Poisson(2.5)
    assert parse_arrivals("gamma:2:3") == GammaBursts(2.0, 3.0)
    assert parse_arrivals("closed:64") == ClosedLoop(64)
    assert parse_arrivals("closed:64:1.5") == ClosedLoop(64, 1.5)
    for text in (
        "",
        "all:1",
        "poisson",
        "poisson:x",
        "gamma:1",
        "closed",
        "closed:1.5",
        "closed:1:2:3",
        "open:3",
    ):
        with pytest.raises(ConfigError, match="write all, poisson:RATE"):
            parse_arrivals(text)
    with pytest.raises(ConfigError, match="CLIENTS must lie in"):
        parse_arrivals("closed:0")
