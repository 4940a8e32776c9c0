"""Scheduling policies, one by one and plugged into a scheduler."""

import dataclasses

import pytest
from scheduler_helpers import (
    NO_WATERMARK,
    LinearCosts,
    describe,
    holder,
    make_request,
    make_scheduler,
    pools,
)

from jaxllm.errors import ConfigError
from jaxllm.sched.policies import (
    AdaptiveAction,
    AlwaysRecompute,
    Decision,
    FairPriority,
    FCFSPriority,
    GrowthReserve,
    HostBoundAdmission,
    LatestArrivalVictim,
    LeastUrgentVictim,
    MoreUrgentFirst,
    OutputReserve,
    PaddedBatching,
    PreemptionAction,
    PrefillFirst,
    RaggedBatching,
    ResumeFirst,
    SchedulerPolicy,
    SwapIfItFits,
    WatermarkAdmission,
)
from jaxllm.sched.pressure import RecentPressure

RECOMPUTE, SWAP = PreemptionAction.RECOMPUTE, PreemptionAction.SWAP


def test_defaults_are_those_of_vllm():
    assert SchedulerPolicy() == SchedulerPolicy(
        priority=FCFSPriority(),
        admission=WatermarkAdmission(0.01),
        batching=RaggedBatching(),
        victim=LatestArrivalVictim(),
        action=AlwaysRecompute(),
        restore=PrefillFirst(),
        decode_needs_free_block=False,
        lazy_eviction=False,
    )


def test_policies_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        WatermarkAdmission().watermark = 0.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        SchedulerPolicy().victim = LatestArrivalVictim()


def test_fcfs_scores_all_the_same():
    requests = [make_request(0, 3), make_request(1, 2)]
    assert {FCFSPriority().score(request, 5.0) for request in requests} == {0.0}
    assert len({FCFSPriority().group(request) for request in requests}) == 1


def test_fair_priority_is_waiting_time_over_length():
    request = make_request(2, 4)  # arrived at 2.0
    assert FairPriority().score(request, 10.0) == 2.0
    request.num_tokens = 16
    assert FairPriority().score(request, 10.0) == 0.5


def test_latest_arrival_is_the_victim():
    candidates = [make_request(0, 3), make_request(1, 2)]
    assert LatestArrivalVictim().choose(candidates, 5.0) is candidates[1]


def test_the_least_urgent_is_the_victim_and_of_equals_the_latest():
    long, short, same = make_request(0, 40), make_request(1, 2), make_request(1, 2)
    assert LeastUrgentVictim().choose([long, short], 5.0) is long
    assert LeastUrgentVictim().choose([short, same], 5.0) is same
    assert LeastUrgentVictim(FCFSPriority()).choose([short, long], 5.0) is long


# Actions


def test_always_recompute():
    assert AlwaysRecompute().choose(holder(0, 8, 2), pools(num_host_free=9), 0.0) == Decision(RECOMPUTE)


@pytest.mark.parametrize(("num_host_free", "action"), [(1, RECOMPUTE), (2, SWAP), (3, SWAP)])
def test_swap_if_it_fits(num_host_free, action):
    state = pools(num_host_free=num_host_free)
    assert SwapIfItFits().choose(holder(0, 8, 2), state, 0.0) == Decision(action)
    decision = SwapIfItFits(LinearCosts(swap=3.0)).choose(holder(0, 8, 2), state, 0.0)
    assert decision == Decision(action, copy_seconds=6.0)


@pytest.mark.parametrize(
    ("swap", "num_host_free", "action"),
    [
        (1.9, 2, SWAP),  # 2 blocks x 2 directions x 1.9 s < 8 tokens x 1 s
        (1.9, 1, RECOMPUTE),
        (2.0, 2, RECOMPUTE),  # a tie
        (2.1, 2, RECOMPUTE),
    ],
)
def test_adaptive_takes_the_cheaper_action_that_fits(swap, num_host_free, action):
    policy = AdaptiveAction(LinearCosts(prefill=1.0, swap=swap))
    decision = policy.choose(holder(0, 8, 2), pools(num_host_free=num_host_free), 0.0)
    assert decision == Decision(action, 4 * swap, 8.0, 2 * swap)


# Batching, restoring


@pytest.mark.parametrize(
    ("lengths", "ragged", "padded"),
    [
        ([8], True, True),
        ([9], False, False),
        ([4, 4], True, True),
        ([5, 3], True, False),  # 2 x 5 tokens
        ([1, 1, 2], True, True),  # 2 paddings
        ([1, 1, 1, 2], True, False),  # 3 paddings
    ],
)
def test_batching(lengths, ragged, padded):
    assert RaggedBatching().fits(lengths, 8) is ragged
    assert PaddedBatching(max_paddings=2).fits(lengths, 8) is padded


def test_the_more_urgent_set_goes_first():
    urgent, middling, patient = make_request(0, 1), make_request(0, 2), make_request(0, 3)
    swaps_in = MoreUrgentFirst().swaps_in
    assert swaps_in([patient], [urgent], 6.0)
    assert not swaps_in([urgent], [patient], 6.0)
    assert swaps_in([middling], [middling], 6.0)  # a tie
    assert swaps_in([middling], [patient, urgent], 6.0)  # their mean is 4, its score 3
    assert swaps_in([], [patient], 6.0)
    assert not swaps_in([patient], [], 6.0)


def test_resume_first():
    assert ResumeFirst().swaps_in([make_request(0, 3)], [make_request(1, 3)], 0.0)
    assert not ResumeFirst().swaps_in([make_request(0, 3)], [], 0.0)


# Admission


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
    assert policy.admits(make_request(0, 3), needed, pools(free, total)) is admitted


@pytest.mark.parametrize("watermark", [-0.01, 1.0, float("nan")])
def test_watermark_is_checked_on_both_sides(watermark):
    with pytest.raises(ConfigError, match=r"watermark must lie in \[0, 1\)"):
        WatermarkAdmission(watermark)


def test_the_host_bound_counts_everybody_at_its_greatest_length():
    started = [make_request(0, 4, max_new_tokens=5), make_request(1, 4, max_new_tokens=6)]  # 2 and 3 blocks
    request = make_request(2, 1, max_new_tokens=4)  # 1 block: its last token needs none
    policy = HostBoundAdmission(0.0)
    assert policy.admits(request, 1, pools(5, num_host_blocks=6, started=started))
    assert not policy.admits(request, 1, pools(5, num_host_blocks=5, started=started))
    both = HostBoundAdmission(0.0, count_device_pool=True)
    assert both.admits(request, 1, pools(1, 8, num_host_blocks=1, started=started))  # 8 + 1 - 3 = 6
    assert not both.admits(request, 1, pools(1, 8, num_host_blocks=0, started=started))


def test_the_host_bound_keeps_the_watermark_too():
    policy = HostBoundAdmission(0.1)
    assert policy.admits(make_request(0, 4), 4, pools(5, 10, num_host_blocks=99))
    assert not policy.admits(make_request(0, 4), 5, pools(5, 10, num_host_blocks=99))
    with pytest.raises(ConfigError, match="watermark"):
        HostBoundAdmission(1.0)


def test_the_growth_reserve_counts_who_started():
    started = [make_request(index, 4) for index in range(4)]
    policy = GrowthReserve(0.5)
    assert policy.admits(make_request(9, 4), 3, pools(5, started=started))
    assert not policy.admits(make_request(9, 4), 4, pools(5, started=started))
    assert policy.admits(make_request(9, 4), 5, pools(5))
    for bad in (-0.1, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="blocks_per_request"):
            GrowthReserve(bad)


def test_the_output_reserve_grows_with_the_outputs_seen():
    started = [make_request(index, 4) for index in range(4)]
    # Of 14 free blocks the others need room for a fifth of the mean output each.
    for block_size, mean, num_needed in ((4, 50.0, 4), (4, 20.0, 10), (1, 10.0, 6), (16, 160.0, 6)):
        state = dataclasses.replace(pools(14, 20, started=started), block_size=block_size)
        state = dataclasses.replace(state, recent=RecentPressure(output_tokens=mean))
        policy = OutputReserve(0.2)
        assert policy.admits(make_request(9, 4), num_needed, state)
        assert not policy.admits(make_request(9, 4), num_needed + 1, state)
    assert OutputReserve(0.2).admits(make_request(9, 4), 14, pools(14, 20))
    for bad in (-0.1, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="share must be at least 0 and finite"):
            OutputReserve(bad)


def test_the_mean_output_starts_with_a_guess_and_follows_those_seen():
    recent = RecentPressure()
    assert recent.output_tokens == 50.0
    recent.finished(10)
    assert recent.output_tokens == (50 + 10) / 2
    recent.finished(30)
    assert recent.output_tokens == pytest.approx((50 + 10 + 30) / 3)
    for _ in range(200):
        recent.finished(8)
    assert recent.output_tokens == pytest.approx(8, rel=0.1)
    recent.finished(108)
    assert recent.output_tokens == pytest.approx(10, rel=0.1)  # a fiftieth of the difference


class ShortestFirst:
    def score(self, request, now):
        return -request.num_tokens

    def group(self, request):
        return request.num_tokens


class OldestVictim:
    def choose(self, candidates, now):
        return candidates[0]


class Answer:
    def __init__(self, answer):
        self.answer = answer

    def choose(self, *question):
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


@pytest.mark.parametrize("answer", ["swap", SWAP, Decision("swap"), None])
def test_an_unknown_action_is_refused(answer):
    scheduler = make_scheduler(dataclasses.replace(NO_WATERMARK, action=Answer(answer)), num_gpu_blocks=3)
    scheduler.add(make_request(0, 4))
    scheduler.add(make_request(1, 8, max_new_tokens=2))
    scheduler.schedule(0.0)
    with pytest.raises(ConfigError, match="is not a Decision"):
        scheduler.schedule(0.0)


def test_a_swap_beyond_the_host_pool_is_refused():
    policy = dataclasses.replace(NO_WATERMARK, action=Answer(Decision(SWAP)))
    scheduler = make_scheduler(policy, num_gpu_blocks=3, num_host_blocks=1)
    scheduler.add(make_request(0, 4))
    scheduler.add(make_request(1, 8, max_new_tokens=2))
    scheduler.schedule(0.0)
    with pytest.raises(ConfigError, match="swaps 2 blocks; 1 of 1 host blocks are free"):
        scheduler.schedule(0.0)


class FailsSecond:
    def __init__(self):
        self.calls = 0

    def choose(self, victim, state, now):
        self.calls += 1
        return Decision(SWAP) if self.calls == 1 else None


def test_swaps_decided_before_a_policy_failed_become_drops():
    policy = dataclasses.replace(NO_WATERMARK, action=FailsSecond())
    scheduler = make_scheduler(policy, num_gpu_blocks=3, num_host_blocks=3)
    requests = [make_request(index, 4) for index in range(3)]
    for request in requests:
        scheduler.add(request)
    scheduler.schedule(0.0)
    with pytest.raises(ConfigError, match="is not a Decision"):
        scheduler.schedule(0.0)
    scheduler.check()
    assert (scheduler.num_swapped, scheduler.num_waiting, scheduler.num_free_host_blocks) == (0, 1, 3)
    assert (requests[2].metrics.num_preemptions, requests[2].metrics.num_swaps) == (1, 0)


class OneLength:
    def fits(self, lengths, budget):
        return len(set(lengths)) == 1


def test_what_a_batching_policy_refuses_does_not_hold_back_longer_prompts():
    policy = dataclasses.replace(NO_WATERMARK, batching=OneLength(), restore=MoreUrgentFirst())
    scheduler = make_scheduler(policy)
    for index, length in enumerate([6, 3, 6]):
        scheduler.add(make_request(index, length))
    assert describe(scheduler.schedule(0.0)) == "P r0[0:6]! r2[0:6]!"


class AnyBatch:
    def fits(self, lengths, budget):
        return True


def test_no_batching_policy_exceeds_the_budget():
    scheduler = make_scheduler(SchedulerPolicy(batching=AnyBatch()), max_num_batched_tokens=4)
    scheduler.add(make_request(0, 6))
    scheduler.add(make_request(1, 6))
    trace = [describe(scheduler.schedule(0.0)) for _ in range(4)]
    assert trace == ["P r0[0:4]", "P r0[4:6]!", "P r1[0:4]", "P r1[4:6]!"]
    scheduler.check()


def test_a_margin_lets_swapped_requests_go_first_until_others_are_so_much_more_urgent():
    waiting, swapped = make_request(0, 10, arrival_time=0.0), make_request(1, 25, arrival_time=0.0)
    order = {margin: MoreUrgentFirst(margin=margin) for margin in (1.0, 2.0, 3.0)}
    # Urgency is waiting time over length: the short one is 2.5 times as urgent.
    assert not order[1.0].swaps_in([waiting], [swapped], 5.0)
    assert not order[2.0].swaps_in([waiting], [swapped], 5.0)
    assert order[3.0].swaps_in([waiting], [swapped], 5.0)
    assert order[3.0].swaps_in([], [swapped], 5.0)
    assert not order[3.0].swaps_in([waiting], [], 5.0)


@pytest.mark.parametrize("margin", [0.5, -1.0, float("nan"), float("inf")])
def test_margins_are_checked(margin):
    with pytest.raises(ConfigError, match="margin must be at least 1 and finite"):
        MoreUrgentFirst(margin=margin)
