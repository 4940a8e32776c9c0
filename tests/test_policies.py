"""Scheduling policies, one by one and plugged into a scheduler."""

import dataclasses

import pytest
from scheduler_helpers import NO_WATERMARK, describe, make_request, make_scheduler

from jaxllm.errors import ConfigError
from jaxllm.sched.policies import (
    AlwaysRecompute,
    FCFSPriority,
    LatestArrivalVictim,
    PreemptionAction,
    SchedulerPolicy,
    WatermarkAdmission,
)


def test_defaults_are_those_of_vllm():
    assert SchedulerPolicy() == SchedulerPolicy(
        priority=FCFSPriority(),
        admission=WatermarkAdmission(0.01),
        victim=LatestArrivalVictim(),
        action=AlwaysRecompute(),
    )


def test_policies_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        WatermarkAdmission().watermark = 0.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        SchedulerPolicy().victim = LatestArrivalVictim()


def test_fcfs_keeps_arrival_order_without_a_copy():
    waiting = [make_request(0, 3), make_request(1, 2)]
    assert FCFSPriority().order(waiting, 5.0) is waiting


def test_latest_arrival_is_the_victim():
    candidates = [make_request(0, 3), make_request(1, 2)]
    assert LatestArrivalVictim().choose(candidates, 5.0) is candidates[1]
    assert AlwaysRecompute().choose(candidates[1], 5.0) is PreemptionAction.RECOMPUTE


@pytest.mark.parametrize(
    ("watermark", "needed", "free", "total", "admitted"),
    [
        (0.01, 3, 4, 128, True),  # int(1.28) = 1 block left
        (0.01, 4, 4, 128, False),
        (0.01, 4, 4, 99, True),  # int(0.99) = 0
        (0.0, 4, 4, 128, True),
        (0.5, 14, 20, 12, True),
        (0.5, 15, 20, 12, False),
    ],
)
def test_watermark(watermark, needed, free, total, admitted):
    policy = WatermarkAdmission(watermark)
    assert policy.admits(make_request(0, 3), needed, free, total) is admitted


@pytest.mark.parametrize("watermark", [-0.01, 1.0, float("nan")])
def test_watermark_is_checked_on_both_sides(watermark):
    with pytest.raises(ConfigError, match=r"watermark must lie in \[0, 1\)"):
        WatermarkAdmission(watermark)


class ShortestFirst:
    def order(self, waiting, now):
        return sorted(waiting, key=lambda request: request.num_tokens)


class OldestVictim:
    def choose(self, candidates, now):
        return candidates[0]


class Answer:
    def __init__(self, answer):
        self.answer = answer

    def choose(self, subject, now):
        return self.answer


def test_a_priority_policy_orders_prefills_and_a_victim_policy_picks_any_running_request():
    policy = dataclasses.replace(NO_WATERMARK, priority=ShortestFirst(), victim=OldestVictim())
    scheduler = make_scheduler(policy, num_gpu_blocks=3, max_num_batched_tokens=8)
    for index, length in enumerate([6, 4, 3]):
        scheduler.add(make_request(index, length, max_new_tokens=5))
    trace = []
    for _ in range(3):
        trace.append(describe(scheduler.schedule(0.0)))
        scheduler.check()
    assert trace == [
        "P r2[0:3]! r1[0:4]!",
        "D r1 r2",  # r1 takes the last block; decodes go by arrival
        "D r2 -r1",  # r2 needs a second block, and r1 is the older one
    ]


def test_a_victim_that_is_not_running_is_refused():
    waiting = make_request(7, 4)
    scheduler = make_scheduler(dataclasses.replace(NO_WATERMARK, victim=Answer(waiting)), num_gpu_blocks=3)
    scheduler.add(make_request(0, 4))
    scheduler.add(make_request(1, 8, max_new_tokens=2))
    scheduler.schedule(0.0)
    with pytest.raises(ConfigError, match="not one of the candidates"):
        scheduler.schedule(0.0)


def test_an_unknown_action_is_refused():
    scheduler = make_scheduler(dataclasses.replace(NO_WATERMARK, action=Answer("swap")), num_gpu_blocks=3)
    scheduler.add(make_request(0, 4))
    scheduler.add(make_request(1, 8, max_new_tokens=2))
    scheduler.schedule(0.0)
    with pytest.raises(ConfigError, match="'swap'"):
        scheduler.schedule(0.0)
