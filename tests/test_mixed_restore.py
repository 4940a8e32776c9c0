"""Victims whose first blocks alone go to host memory: a copy and a prefill bring them back."""

import dataclasses

import pytest
from scheduler_helpers import NO_WATERMARK, LinearCosts, make_request, make_scheduler, step

from jaxllm.engine.observer import StepObserver
from jaxllm.errors import ConfigError
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.sched.ledger import Ledger
from jaxllm.sched.policies import Decision, PreemptionAction
from jaxllm.types import PrefillChunk, RequestStatus, SchedulerOutput, Swap

SWAP = PreemptionAction.SWAP


class Answer:
    def __init__(self, *decisions):
        self.decisions = list(decisions)

    def choose(self, victim, state, now):
        return self.decisions.pop(0) if len(self.decisions) > 1 else self.decisions[0]


def mixed_scheduler(num_blocks, **changes):
    policy = dataclasses.replace(
        NO_WATERMARK, action=Answer(Decision(PreemptionAction.MIXED, num_blocks=num_blocks)), **changes
    )
    scheduler = make_scheduler(policy, num_gpu_blocks=5, num_host_blocks=2)
    requests = make_request(0, 4, max_new_tokens=8), make_request(1, 9, max_new_tokens=5)
    for request in requests:
        scheduler.add(request)
    return scheduler, *requests


@pytest.mark.parametrize("lazy_eviction", [False, True])
def test_a_head_comes_back_with_the_prefill_of_the_rest(lazy_eviction):
    scheduler, first, second = mixed_scheduler(2, lazy_eviction=lazy_eviction)
    assert [step(scheduler) for _ in range(5)] == [
        "P r0[0:4]! r1[0:9]!",
        "D r0 r1",
        "D r0 r1",
        "D r0 r1",
        "D r0 <r1",
    ]
    assert (second.status, second.num_computed_tokens) == (RequestStatus.WAITING, 0)
    assert second.host_handle is not None
    assert scheduler.num_free_host_blocks == 0
    assert (second.metrics.num_preemptions, second.metrics.num_swaps) == (1, 0)
    for _ in range(3):
        assert step(scheduler) == "D r0"
    output = scheduler.schedule(9.0)
    scheduler.check()
    (chunk,) = output.prefill
    if lazy_eviction:  # nobody took the head's blocks
        assert (chunk.start, output.swap_in, len(output.discarded)) == (8, (), 1)
    else:
        (swap,) = output.swap_in
        assert (chunk.start, chunk.length, chunk.is_first, chunk.is_recompute) == (8, 5, True, True)
        assert (swap.request, swap.block_ids, swap.num_intact) == (second, tuple(second.block_ids[:2]), 0)
    assert second.host_handle is None
    scheduler.complete(output.step_id)
    assert scheduler.num_free_host_blocks == 2
    scheduler.finish(second, "abort")
    scheduler.finish(first, "abort") if not first.is_finished else None
    scheduler.check()


def test_a_head_is_given_up_for_a_swap_and_with_its_request():
    decisions = iter([Decision(PreemptionAction.MIXED, num_blocks=2), Decision(SWAP)])

    class Next:
        def choose(self, victim, state, now):
            assert state.num_host_free == 3
            return next(decisions)

    policy = dataclasses.replace(NO_WATERMARK, action=Next())
    ledger = Ledger()
    scheduler = make_scheduler(policy, ledger, num_gpu_blocks=6, num_host_blocks=3)
    requests = make_request(0, 4, 20), make_request(1, 4, 20), make_request(2, 9, 14)
    for request in requests:
        scheduler.add(request)
    assert [step(scheduler) for _ in range(2)] == ["P r0[0:4]! r1[0:4]! r2[0:9]!", "D r0 r1 <r2"]
    assert requests[2].host_handle is not None
    assert scheduler.num_free_host_blocks == 1
    while requests[1].host_handle is None:
        shown = step(scheduler)
    assert shown == "D r0 <r1"
    assert requests[2].host_handle is None
    assert requests[2].status is RequestStatus.WAITING
    for request in reversed(requests):
        scheduler.finish(request, "abort")
        scheduler.check()
    assert scheduler.num_free_host_blocks == 3
    assert [(r.action, r.resume_action) for r in ledger.preemptions] == [
        ("mixed", "recompute"),
        ("swap", None),
    ]


def test_a_head_is_not_given_up_for_another():
    scheduler, first, second = mixed_scheduler(2)
    for _ in range(5):
        step(scheduler)
    assert (second.host_handle is not None, len(first.block_ids)) == (True, 2)
    assert scheduler._state.pools(0, []).num_host_free == 2
    scheduler.policy.action.decisions = [Decision(PreemptionAction.MIXED, num_blocks=1)]
    with pytest.raises(ConfigError, match="swaps 1 blocks; 0 of 2 host blocks are free"):
        scheduler._preemption.preempt(first, 99, 0.0)
    scheduler.check()


@pytest.mark.parametrize("wrong", [None, 0, 3, 4, -1, "2", 1.0, True])
def test_a_head_is_some_of_the_blocks(wrong):
    scheduler, *_ = mixed_scheduler(wrong)
    for _ in range(4):
        step(scheduler)
    with pytest.raises(ConfigError, match="of 3 blocks; MIXED copies some of them"):
        step(scheduler)


@pytest.mark.parametrize(("predicts", "expected"), [(True, [1.5, 0.25]), (False, [1.2, 0.4])])
def test_the_observer_charges_a_copy_and_a_prefill_once(predicts, expected):
    """Two recomputes of 3 and 1 tokens, the first of which waits for the copy of its head."""
    ledger = Ledger()
    requests = make_request(0, 11), make_request(1, 1)
    decision = Decision(PreemptionAction.MIXED, num_blocks=2)
    for request in requests:
        ledger.preempted(request, 0, 0.0, [], decision)
    chunks = [
        PrefillChunk(request, start, length, True, True, True)
        for request, start, length in zip(requests, (8, 0), (3, 1), strict=True)
    ]
    costs = OnlineCalibration(LinearCosts(prefill=0.25)) if predicts else None
    swap = Swap(requests[0], 0, (0, 1))
    output = SchedulerOutput(1, prefill=tuple(chunks), swap_in=(swap,))
    seconds = 1.75 if predicts else 1.6  # 1 s of it predicted, for 4 tokens
    StepObserver(costs, ledger).observe(output, seconds)
    ledger.close()
    measured = [record.measured_seconds for record in ledger.preemptions]
    assert measured == pytest.approx(expected)
    assert sum(measured) == pytest.approx(seconds)
