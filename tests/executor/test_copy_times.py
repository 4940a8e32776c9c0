"""How long copies take is seen between steps, and corrects what the next ones are predicted to take."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from engine_helpers import make_llm
from hypothesis import given
from hypothesis import strategies as st
from scheduler_helpers import V1, LinearCosts, make_request
from variants import golden_checkpoint

from jaxllm.engine.observer import StepObserver
from jaxllm.executor.kv.copy_timer import CopyTimer
from jaxllm.executor.kv.swapper import MAX_STAGED_BLOCKS, BlockSwapper
from jaxllm.executor.placement import Placement
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.research.bench.replay import replay
from jaxllm.research.simulator.executor import SimulatedExecutor
from jaxllm.research.simulator.run import simulate
from jaxllm.research.slow_link import SlowLink, slow_down
from jaxllm.research.workloads import UniformLengths, make_trace
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.policies import ResumeAction, ResumeDecision, SwapIfItFits
from jaxllm.types import CopyTime, HostPiece, SchedulerOutput, Swap, host_blocks_of

POOL = (2 * MAX_STAGED_BLOCKS, 2, 2, 2, 4, 8)
MOMENTS = st.floats(0.0, 10.0)


class InBackground:
    """After `delay` seconds in host memory."""

    def __init__(self, delay=0.0):
        self.delay, self.asked_at = delay, {}

    def choose(self, request, copied_out_at, state, now):
        is_late = now >= self.asked_at.setdefault(request.host_blocks[0], now) + self.delay
        return ResumeDecision(ResumeAction.IN_BACKGROUND if is_late else ResumeAction.LATER)


def swapping(delay=0.0):
    return dataclasses.replace(V1, action=SwapIfItFits(), resume=InBackground(delay))


@given(
    copies=st.lists(st.tuples(MOMENTS, MOMENTS, MOMENTS), min_size=1, max_size=6),
    looks=st.lists(MOMENTS, max_size=8),
    begins_when_sent=st.booleans(),
)
def test_durations_lie_within_what_is_known_of_them(copies, looks, begins_when_sent):
    """Copies of (sent at, delay, seconds), one after another; the delay ends before the next look."""
    copies = sorted(copies)
    looks = sorted({*looks, 1000.0})
    free_at, ends, sizes = 0.0, {}, {}
    for handle, (sent_at, delay, seconds) in enumerate(copies):
        ready_at = sent_at if begins_when_sent else min(sent_at + delay, min(x for x in looks if x > sent_at))
        free_at = ends[handle] = max(free_at, ready_at) + seconds
        sizes[handle + 1] = seconds
    timer, found, unsent = CopyTimer(is_out=False, begins_when_sent=begins_when_sent), [], list(copies)
    for now in looks:
        while unsent and unsent[0][0] < now:
            handle = len(copies) - len(unsent)
            timer.send(handle, handle + 1, unsent.pop(0)[0])
        found += timer.look(now, lambda handle, now=now: ends[handle] <= now)
    assert timer.is_idle
    assert [copy.num_blocks for copy in found] == list(sizes)
    for copy in found:
        assert not copy.is_out
        assert copy.shortest - 1e-9 <= sizes[copy.num_blocks] <= copy.longest + 1e-9


def test_looks_tell_how_long_copies_took():
    timer, over = CopyTimer(is_out=True, begins_when_sent=False), set()
    timer.send(1, 3, 10.0)
    timer.send(2, 4, 10.0)
    assert [timer.look(now, over.__contains__) for now in (11.0, 13.0, 14.0)] == [[]] * 3
    over.add(1)
    assert timer.look(16.0, over.__contains__) == [CopyTime(True, 3, 3.0, 6.0)]
    assert timer.look(20.0, over.__contains__) == []
    over.add(2)
    assert timer.look(21.0, over.__contains__) == [CopyTime(True, 4, 4.0, 7.0)]
    assert timer.look(22.0, over.__contains__) == []
    timer.send(3, 0, 23.0)  # nothing to copy
    timer.send(4, 1, 23.0, is_known=False)
    assert timer.look(24.0, {3, 4}.__contains__) == []
    assert timer.is_idle


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("is_late", [True, False])
def test_the_copy_behind_one_that_is_forgotten_is_not_timed(place, is_late):
    timer, over = CopyTimer(is_out=False, begins_when_sent=True), set()
    handles = list(range(4))
    for handle in handles[: place + 1 if is_late else 4]:
        timer.send(handle, 3, 10.0)
    timer.forget(place)
    timer.forget(place)
    timer.forget(7)
    for handle in handles[place + 1 if is_late else 4 :]:
        timer.send(handle, 3, 10.0)
    found = {}
    for handle in handles:
        over.add(handle)
        found[handle] = timer.look(11.0 + handle, over.__contains__)
    assert [handle for handle in handles if not found[handle]] == [place, place + 1]
    assert timer.is_idle


@pytest.mark.parametrize("is_out", [True, False])
def test_a_prediction_within_what_is_known_is_right(is_out):
    costs = OnlineCalibration(LinearCosts(swap=1.0))
    kind = "swap_out" if is_out else "swap_in"
    observer = StepObserver(costs, None)
    observer.observe_copies([CopyTime(is_out, 4, 2.0, 5.0)])
    assert costs.report()[kind].count == 1
    assert costs.factor(kind) == 1.0
    observer.observe_copies([CopyTime(is_out, 4, 5.0, 9.0)])
    slower = costs.factor(kind)
    assert slower > 1.0
    observer.observe_copies([CopyTime(is_out, 4, 0.0, 1.0)])
    assert costs.factor(kind) < slower
    others = {other: report.count for other, report in costs.report().items() if other != kind}
    assert set(others.values()) == {0}
    StepObserver(None, None).observe_copies([CopyTime(is_out, 4, 5.0, 9.0)])  # nothing to correct


class Clock:
    now = 100.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("jaxllm.research.slow_link.time", clock)
    return clock


@pytest.fixture
def pool():
    return jnp.zeros(POOL, jnp.float32)


@pytest.fixture
def swapper(clock, pool):
    """A link that carries one block a second."""
    swapper = BlockSwapper(Placement((jax.devices()[0],)), max_blocks=2 * MAX_STAGED_BLOCKS)
    return SlowLink(swapper, pool[0].nbytes, clock.perf_counter)


def look_at(swapper, clock, *moments):
    """Durations found by looks at those moments."""
    timed = []
    for clock.now in moments:
        swapper.settle()
        timed += swapper.progress().timed
    return timed


def test_copies_of_the_swapper_are_timed(swapper, clock, pool):
    swapper.swap_out(pool, 0, (0, 1, 2))  # until 103
    swapper.swap_out(pool, 1, (3, 4))  # then until 105
    assert look_at(swapper, clock, 100.5, 102.5, 103.5) == [CopyTime(True, 3, 2.0, 3.5)]
    assert look_at(swapper, clock, 104.5, 105.5, 110.0) == [CopyTime(True, 2, 1.0, 3.0)]
    swapper.load(0, (6, 7, 8), host_blocks_of(0, 3))
    swapper.load(1, (9, 10), host_blocks_of(1, 2))
    assert look_at(swapper, clock, 112.5, 113.5) == [CopyTime(False, 3, 2.5, 3.5)]
    assert look_at(swapper, clock, 114.5, 115.5) == [CopyTime(False, 2, 1.0, 3.0)]
    for handle in (0, 1):
        pool = swapper.join(pool, handle)


def is_timed_next(swapper, clock, handle):
    """Whether a copy out and then one back are timed, if no other is under way."""
    pool, start = jnp.zeros(POOL, jnp.float32), clock.now
    swapper.swap_out(pool, handle, (0, 1))
    out = look_at(swapper, clock, start + 1.5, start + 2.5)
    swapper.load(handle, (2, 3), host_blocks_of(handle, 2))
    back = look_at(swapper, clock, start + 4.0, start + 5.0)
    swapper.join(pool, handle)
    return out == [CopyTime(True, 2, 0.0, 2.5)], back == [CopyTime(False, 2, 1.5, 2.5)]


def test_copies_beside_those_that_somebody_waits_for_are_not_timed(swapper, clock, pool):
    assert is_timed_next(swapper, clock, 0) == (True, True)
    swapper.swap_out(pool, 1, (0, 1, 2))
    pool = swapper.swap_in(pool, (0, 1, 2), host_blocks_of(1, 3))  # ends its copy out, too
    swapper.swap_out(pool, 2, (0, 1))
    out = [CopyTime(True, 3, 0.0, 25.0), CopyTime(True, 2, 0.0, 19.0)]
    assert look_at(swapper, clock, 130.0) == out
    swapper.load(2, (0, 1), host_blocks_of(2, 2))
    assert look_at(swapper, clock, 140.0) == []  # the step with the copy back before it may not have ended
    pool = swapper.join(pool, 2)
    assert is_timed_next(swapper, clock, 3) == (True, True)


def test_copies_back_that_wait_for_something_are_not_timed(swapper, clock, pool):
    swapper.swap_out(pool, 0, (0, 1))
    swapper.load(0, (2, 3), host_blocks_of(0, 2))  # before it has left
    assert look_at(swapper, clock, 140.0) == [CopyTime(True, 2, 0.0, 40.0)]
    pool = swapper.join(pool, 0)
    assert is_timed_next(swapper, clock, 1) == (True, True)
    swapper.swap_out(pool, 2, (0, 1, 2))
    look_at(swapper, clock, 170.0)
    swapper.load(2, (0, 1, 2), host_blocks_of(2, 3))
    pool = swapper.join(pool, 2)  # a step waits for it; so does what the step reads of the pool
    assert is_timed_next(swapper, clock, 3) == (False, False)
    assert is_timed_next(swapper, clock, 4) == (True, True)


def test_copies_in_parts_are_not_timed(swapper, clock, pool):
    """Steps send one part after another."""
    large = tuple(range(MAX_STAGED_BLOCKS + 1))
    swapper.swap_out(pool, 0, large)
    swapper.swap_out(pool, 1, large[:-2])
    assert look_at(swapper, clock, 300.0) == [CopyTime(True, MAX_STAGED_BLOCKS - 1, 0.0, 200.0)]
    swapper.load(1, large[:-2], host_blocks_of(1, len(large) - 2))
    swapper.load(0, large, host_blocks_of(0, len(large)))
    for clock.now in (340.0, 400.0):
        while len(swapper.arrived()) < (1 if clock.now == 340.0 else 2):
            swapper.settle()
            pool = jax.block_until_ready(swapper.advance(pool))
        timed = swapper.progress().timed
        assert [copy.num_blocks for copy in timed] == ([MAX_STAGED_BLOCKS - 1] if clock.now == 340.0 else [])
    for handle in (1, 0):
        pool = swapper.join(pool, handle)
    assert is_timed_next(swapper, clock, 2) == (True, True)
    half = large[: MAX_STAGED_BLOCKS // 2 + 1]  # two of them are too many at once
    for handle in (3, 4):
        swapper.swap_out(pool, handle, half)
    look_at(swapper, clock, 600.0)
    for handle in (3, 4):
        swapper.load(handle, half, host_blocks_of(handle, len(half)))
    while len(swapper.arrived()) < 2:
        clock.now += 1.0
        swapper.settle()
        pool = jax.block_until_ready(swapper.advance(pool))
    assert [copy.num_blocks for copy in swapper.progress().timed] == [len(half)]
    for handle in (3, 4):
        pool = swapper.join(pool, handle)


def test_a_copy_that_is_given_up_keeps_the_next_one_from_being_timed(swapper, clock, pool):
    swapper.swap_out(pool, 0, (0, 1, 2))
    swapper.drop_all(0)
    assert is_timed_next(swapper, clock, 1)[0] is False
    swapper.swap_out(pool, 2, (0, 1))
    look_at(swapper, clock, 130.0)
    swapper.load(2, (0, 1), host_blocks_of(2, 2))
    swapper.discard(2)
    assert is_timed_next(swapper, clock, 3) == (True, False)


def test_dropping_what_has_left_disturbs_no_timing(swapper, clock, pool):
    swapper.swap_out(pool, 0, (0, 1, 2))
    swapper.drop(HostPiece(0, 1))  # the copy of the other piece goes on
    assert look_at(swapper, clock, 101.5, 103.5) == [CopyTime(True, 3, 0.0, 3.5)]
    swapper.drop_all(0)
    assert is_timed_next(swapper, clock, 1) == (True, True)
    swapper.drop_all(1)
    assert is_timed_next(swapper, clock, 2) == (True, True)


def test_parts_of_several_copies_are_timed_as_one(swapper, clock, pool):
    """Pieces come as a whole."""
    swapper.swap_out(pool, 0, (0, 1, 2))
    swapper.swap_out(pool, 1, (3, 4, 5, 6))
    look_at(swapper, clock, 108.0)
    swapper.load(7, (10, 11), [host_blocks_of(1, 4)[2], host_blocks_of(0, 3)[2]])  # pieces of 4 and 1
    assert look_at(swapper, clock, 112.5, 113.5) == [CopyTime(False, 5, 4.5, 5.5)]
    pool = swapper.join(pool, 7)


def test_copies_of_the_simulator_are_timed():
    executor = SimulatedExecutor(LinearCosts(swap=1.0), num_gpu_blocks=8, block_size=4, overlap_swaps=True)
    swap = Swap(make_request(0, 15), 0, (0, 1, 2, 3), tuple(host_blocks_of(0, 4)))

    def look_at(*moments):
        timed = []
        for now in moments:
            executor.wait_until(now)
            timed += executor.copies().timed
        return timed

    executor.execute(SchedulerOutput(0, swap_out=(swap,)))
    assert look_at(1.0, 3.5, 4.5) == [CopyTime(True, 4, 2.5, 4.5)]
    executor.execute(SchedulerOutput(1, load=(swap,)))
    assert look_at(8.0, 9.0) == [CopyTime(False, 4, 3.5, 4.5)]


@pytest.mark.parametrize("truth", [0.4, 1.0, 2.5])
def test_a_simulated_link_of_another_speed_is_found_out(truth):
    """As far as looks tell: a prediction that agrees with all of them is not corrected."""
    trace = make_trace(UniformLengths(shortest=8, longest=40), 300, 30, seed=1)
    config = SchedulerConfig(
        num_gpu_blocks=40,
        block_size=4,
        max_model_len=128,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        num_host_blocks=200,
    )
    costs = OnlineCalibration(LinearCosts(prefill=0.001, decode=0.005, swap=0.05))
    simulate(
        trace,
        config,
        swapping(),
        LinearCosts(prefill=0.001, decode=0.005, swap=0.05 * truth),
        overlap_swaps=True,
        calibration=costs,
    )
    report = costs.report()
    for kind in ("prefill", "decode", "mixed"):
        assert report[kind].factor == pytest.approx(1.0)
    for kind in ("swap_out", "swap_in"):
        assert report[kind].count > 10
        if truth == 1.0:
            assert report[kind].factor == pytest.approx(1.0)
            assert report[kind].error_before is None or report[kind].error_before == pytest.approx(0.0)
        else:
            assert 0.25 < math.log(report[kind].factor) / math.log(truth) < 1.05
            assert report[kind].error_after < report[kind].error_before * 0.7


def test_a_slow_link_of_the_engine_is_found_out():
    llm = make_llm(golden_checkpoint("llama_gqa"), scheduler_policy="adaptive", num_host_blocks=40)
    costs = OnlineCalibration(LinearCosts(prefill=1e-4, decode=1e-3, swap=1e-6))
    block_bytes = llm.executor.pool_bytes // llm.executor.num_gpu_blocks
    slow_down(llm.executor, block_bytes / 0.002)
    config = dataclasses.replace(llm.engine.scheduler.config, num_gpu_blocks=24)
    trace = make_trace(UniformLengths(shortest=4, longest=20), 40, 24, seed=3)
    result = replay(llm, trace, config, swapping(delay=0.02), costs=costs)
    slow_down(llm.executor, None)
    assert result.num_swaps > 2
    for kind in ("swap_out", "swap_in"):  # 1 us a block was predicted
        assert costs.report()[kind].count
        assert costs.factor(kind) > 1.0
