"""How long anybody waits: `patience` and `max_extra_wait`."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_helpers import V1, make_request, make_scheduler, step, take

from jaxllm.sched.policies import (
    AlwaysRecompute,
    FairPriority,
    MoreUrgentFirst,
    OutrankedVictim,
    PriorityClasses,
    SchedulerPolicy,
    SwapIfItFits,
)


def flood(policy, count, *, num_gpu_blocks=10, comes_later=False):
    """Ids in the order of their starts: a long request, and more short ones than there is room for.

    They come step by step, and say so with `comes_later`; else they are older than that.
    """
    scheduler = make_scheduler(policy, num_gpu_blocks=num_gpu_blocks)
    scheduler.add(make_request(0, 1, max_new_tokens=10))
    started = []
    for index in range(1, count):
        came = float(index * comes_later)
        if index == 3:
            scheduler.add(make_request(1000, 30, max_new_tokens=9, arrival_time=came, arrival_index=1))
        scheduler.add(make_request(2 * index, 2, max_new_tokens=10, arrival_time=came))
        scheduler.add(make_request(2 * index + 1, 2, max_new_tokens=10, arrival_time=came))
        output = scheduler.schedule(float(index))
        scheduler.check()
        started += [chunk.request.request_id for chunk in output.prefill if chunk.is_first]
        take(scheduler, output)
    return started, scheduler


SHORT_FIRST = SchedulerPolicy(priority=FairPriority(), restore=MoreUrgentFirst())


@pytest.mark.parametrize("patience", [1, 7, 30])
def test_nobody_is_passed_over_more_often_than_the_policy_says(patience):
    started, _ = flood(dataclasses.replace(SHORT_FIRST, patience=patience), 10 * patience + 60)
    before = [name for name in started[: started.index("r1000")] if int(name[1:]) >= 6]  # it came third
    assert len(before) <= patience
    assert started.index("r1000") < len(started) - 9  # and the others go on


def test_only_those_who_pass_the_first_are_bounded():
    scheduler = make_scheduler(dataclasses.replace(SHORT_FIRST, patience=2))
    for index in range(5):
        scheduler.add(make_request(index, 4))
    assert step(scheduler) == "| r0[0:4]! r1[0:4]! r2[0:4]! r3[0:4]! r4[0:4]!"
    scheduler = make_scheduler(dataclasses.replace(SHORT_FIRST, patience=2), num_gpu_blocks=10)
    scheduler.add(make_request(0, 3, max_new_tokens=9))
    step(scheduler)
    scheduler.add(make_request(1, 37, max_new_tokens=3))  # too long for the room
    for index in range(2, 7):
        scheduler.add(make_request(index, 4))
    assert step(scheduler) == "r0 | r2[0:4]! r3[0:4]!"


def test_without_patience_a_long_request_starves_among_short_ones():
    started, _ = flood(dataclasses.replace(SHORT_FIRST, patience=None), 400)
    assert len(started) > 100
    assert "r1000" not in started


def test_whose_room_was_reserved_keeps_it_while_others_can_be_preempted():
    _, scheduler = flood(dataclasses.replace(SHORT_FIRST, patience=1), 15)
    long = scheduler._state.live["r1000"]
    assert long.is_protected
    others = list(scheduler._state.live.values())
    for index in range(50, 100):
        scheduler.add(make_request(index, 2, max_new_tokens=10, arrival_time=0.0))
        step(scheduler, float(index))
    assert long.is_finished
    assert sum(other.is_finished for other in others) > 10
    assert long.metrics.num_preemptions == 0


def test_a_request_preempted_in_mid_prompt_was_passed_over_all_the_same():
    """Without a token gained its count goes on, so that it is not started for nothing for ever."""
    scheduler = make_scheduler(dataclasses.replace(SHORT_FIRST, patience=50))
    request = make_request(0, 8)
    scheduler.add(request)
    request.num_passed = 9
    scheduler.schedule(0.0)
    assert request.num_passed == 0  # its prompt is done, and it has a token
    partial = make_request(1, 200)
    scheduler = make_scheduler(V1, max_num_batched_tokens=8)
    scheduler.add(partial)
    partial.num_passed = 9
    scheduler.schedule(0.0)
    assert partial.num_passed == 9


def test_whoever_is_preempted_again_and_again_gets_its_room():
    """It starts whenever nobody is more urgent, and loses its blocks before its prompt is done."""
    priority = PriorityClasses()
    policy = SchedulerPolicy(priority=priority, victim=OutrankedVictim(priority), patience=5)
    scheduler = make_scheduler(policy, num_gpu_blocks=5, max_num_seqs=2, max_num_batched_tokens=4)
    long = make_request(0, 16, max_new_tokens=2, priority=9)
    scheduler.add(long)
    for index in range(1, 30):
        for _ in range(3):
            step(scheduler)
        scheduler.add(make_request(index, 16, max_new_tokens=1))
        for _ in range(4):
            step(scheduler)
    assert long.is_finished
    assert 0 < long.metrics.num_preemptions <= 5


def test_nobody_waits_much_longer_than_in_order_of_arrival():
    """A long one that short ones would pass for ever."""
    places = []
    for share in (0.05, 0.2):
        policy = dataclasses.replace(SHORT_FIRST, patience=None, max_extra_wait=share)
        places.append(flood(policy, 200, num_gpu_blocks=12, comes_later=True)[0].index("r1000"))
    assert places[0] < places[1]
    policy = dataclasses.replace(policy, max_extra_wait=None)
    started, scheduler = flood(policy, 200, num_gpu_blocks=12, comes_later=True)
    assert len(started) > 100
    assert "r1000" not in started
    assert scheduler._state.live["r1000"].num_passed > 100


ARRIVALS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.0, 1.0, 5.0]), st.integers(1, 18), st.integers(1, 20)), max_size=40
)
"""Of each request when it comes, after the one before it, its prompt's length, and its output's."""


@settings(max_examples=100, deadline=None)
@given(ARRIVALS, st.sampled_from([0.02, 0.1, 1.0]), st.sampled_from([AlwaysRecompute(), SwapIfItFits()]))
def test_nobody_takes_room_before_one_who_has_waited_for_much_longer(arrivals, share, action):
    """New or preempted, as long as anybody holds blocks; and all of them end."""
    policy = dataclasses.replace(SHORT_FIRST, max_extra_wait=share, action=action)
    scheduler = make_scheduler(policy, num_gpu_blocks=10, num_host_blocks=8)
    state, now, index, came = scheduler._state, 0.0, 0, 0.0
    while scheduler.has_unfinished or index < len(arrivals):
        now += 1.0
        while index < len(arrivals) and came + arrivals[index][0] <= now:
            gap, length, limit = arrivals[index]
            came += gap
            scheduler.add(make_request(index, length, max_new_tokens=limit, arrival_time=came))
            index += 1
        queued, are_there = [*state.waiting, *state.swapped], state.num_holders > 0
        output = scheduler.schedule(now)
        scheduler.check()
        left = {*state.waiting, *state.swapped}
        first = min([one.arrival_time for one in left.intersection(queued)], default=now)
        for one in queued:
            waited = now - one.arrival_time
            assert one in left or not are_there or waited * (1.0 + share) >= (now - first) * (1.0 - 1e-9)
        take(scheduler, output)


def test_where_all_came_together_the_bound_on_waits_changes_nothing():
    """As in offline generation; a microsecond apart from each other is together."""
    orders = []
    for share in (None, 0.1):
        scheduler = make_scheduler(dataclasses.replace(SHORT_FIRST, max_extra_wait=share), num_gpu_blocks=10)
        for index in range(60):
            scheduler.add(
                make_request(index, 1 + index * 7 % 19, max_new_tokens=9, arrival_time=1e-6 * index)
            )
        order, now = [], 0.001
        while scheduler.has_unfinished:
            now += 0.001
            output = scheduler.schedule(now)
            order += [chunk.request.request_id for chunk in output.prefill if chunk.is_first]
            take(scheduler, output)
        orders.append(order)
    assert orders[0] == orders[1]
    assert orders[0][10:] != sorted(orders[0][10:], key=lambda name: int(name[1:]))


def test_turns_of_conversations_may_pass_and_be_passed():
    """Served late they have lost their KV."""
    policy = dataclasses.replace(SHORT_FIRST, max_extra_wait=0.1)
    for is_turn in (True, False):
        scheduler = make_scheduler(policy, num_gpu_blocks=10)
        scheduler.add(make_request(0, 1, max_new_tokens=20))
        step(scheduler, 1.0)
        long, short = make_request(1, 39, max_new_tokens=1), make_request(2, 2, arrival_time=8.0)
        short.program_arrival_time = 8.0 - is_turn
        scheduler.add(long)
        scheduler.add(short)
        assert step(scheduler, 10.0) == ("r0 | r2[0:2]!" if is_turn else "r0")
    scheduler = make_scheduler(policy, num_gpu_blocks=10)
    scheduler.add(make_request(0, 1, max_new_tokens=20))
    step(scheduler, 1.0)
    long = make_request(1, 39, max_new_tokens=1)
    long.program_arrival_time = -1.0
    scheduler.add(long)
    scheduler.add(make_request(2, 2, arrival_time=8.0))
    assert step(scheduler, 10.0) == "r0 | r2[0:2]!"
