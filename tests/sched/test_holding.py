"""KV that stays on the device after a turn has ended, for the next one."""

import dataclasses

import numpy as np
import pytest
from scheduler_helpers import LinearCosts, make_request, make_scheduler, pools, take

from jaxllm.errors import ConfigError, UserCodeError
from jaxllm.sched.policies import (
    FairPriority,
    HoldIfLost,
    MoreUrgentFirst,
    NoHold,
    ProgramFCFS,
    SchedulerPolicy,
    TimeToLive,
)
from jaxllm.sched.presets import make_preset


class Fixed:
    """Holds for so long, and notes what came back."""

    def __init__(self, seconds):
        self.time, self.gaps, self.asked, self.lost = seconds, [], [], []

    def seconds(self, num_tokens, queue_seconds, state):
        self.asked.append((num_tokens, queue_seconds))
        self.lost.append(state.lost_share)
        return self.time

    def came_back(self, seconds):
        self.gaps.append(seconds)


def holding(seconds, **changes):
    policy = dataclasses.replace(make_preset("continuum", LinearCosts()), hold=Fixed(seconds))
    return make_scheduler(policy, **({"enable_prefix_caching": True, "num_gpu_blocks": 8} | changes))


def request_of(index, tokens, arrival, num_new=1):
    return make_request(index, len(tokens), num_new, prompt_token_ids=tokens, arrival_time=arrival)


def play(scheduler, now):
    """An iteration; returns its ids."""
    output = scheduler.schedule(now)
    take(scheduler, output)
    scheduler.check()
    return sorted(
        {chunk.request.request_id for chunk in output.prefill} | {r.request_id for r in output.decode}
    )


def after_a_turn(seconds, **changes):
    """Nine tokens have been answered with a 0, and two blocks are held for so long."""
    scheduler = holding(seconds, **changes)
    scheduler.add(request_of(0, range(9), 0.0))
    play(scheduler, 0.0)
    return scheduler


def test_what_ended_is_held_until_its_time_is_over():
    scheduler = holding(10.0)
    scheduler.add(request_of(0, range(21), 0.0))
    play(scheduler, 0.0)
    assert sorted(scheduler.held_block_ids) == [0, 1, 2, 3, 4]  # five full ones
    assert scheduler.num_free_blocks == 3
    scheduler.schedule(9.9)
    assert scheduler.num_free_blocks == 3
    scheduler.schedule(10.0)
    assert not scheduler.held_block_ids
    assert scheduler.num_free_blocks == 8


def test_others_wait_for_held_blocks_while_somebody_runs_and_take_them_when_nobody_does():
    scheduler = after_a_turn(100.0)
    assert len(scheduler.held_block_ids) == 2
    scheduler.add(request_of(1, range(50, 60), 1.0, num_new=2))
    scheduler.add(request_of(2, range(80, 97), 1.0))  # five blocks: not beside the first's two and its three
    assert play(scheduler, 1.0) == ["r1"]
    assert len(scheduler.held_block_ids) == 2
    assert play(scheduler, 2.0) == ["r1"]
    assert play(scheduler, 3.0) == ["r2"]
    assert scheduler.policy.hold.asked[0] == (8, 0.0)


def test_the_next_turn_finds_what_was_held_and_ends_the_hold():
    scheduler = after_a_turn(100.0)
    following = request_of(1, [*range(9), 0, 77], 3.0)
    scheduler.add(following)
    assert scheduler.policy.hold.gaps == [3.0]
    play(scheduler, 3.0)
    assert following.num_cached_tokens == 8
    play(scheduler, 3.5)
    assert sorted(scheduler.held_block_ids) == sorted(next(iter(scheduler._holding.held)).block_ids)
    assert len(scheduler._holding.held) == 1  # its own; the first's went when it began


def test_those_who_run_go_before_those_who_come_back():
    scheduler = holding(100.0)
    scheduler.add(request_of(0, range(17), 0.0))
    play(scheduler, 0.0)
    grows = request_of(1, range(50, 58), 1.0, num_new=20)  # to seven of eight blocks
    scheduler.add(grows)
    for now in range(1, 21):
        play(scheduler, float(now))
        assert grows.metrics.num_preemptions == 0
    assert grows.is_finished


def test_conversations_go_in_the_order_of_their_first_turns():
    scheduler = after_a_turn(0.0, max_num_seqs=1)
    scheduler.add(request_of(1, range(50, 59), 1.0))
    later = request_of(2, [*range(9), 0], 2.0)
    scheduler.add(later)
    assert later.program_arrival_time == 0.0
    assert play(scheduler, 2.0) == ["r2"]
    assert play(scheduler, 3.0) == ["r1"]


def test_fair_turns_are_shorter_by_what_they_find():
    costs = LinearCosts()
    policy = dataclasses.replace(
        make_preset("adaptive", costs), admission=make_preset("continuum", costs).admission
    )
    scheduler = make_scheduler(policy, enable_prefix_caching=True, num_gpu_blocks=16, max_num_seqs=1)
    scheduler.add(request_of(0, range(20), 0.0))
    play(scheduler, 0.0)
    scheduler.add(request_of(1, range(50, 60), 1.0))
    scheduler.add(request_of(2, [*range(20), 0, 7], 1.0))  # twenty of 22 are there: the root of 22 x 2
    assert play(scheduler, 2.0) == ["r2"]
    assert play(scheduler, 3.0) == ["r1"]


def test_how_long_turns_wait_that_were_not_held_is_told():
    scheduler = after_a_turn(0.0)
    scheduler.add(request_of(1, [*range(9), 0, 1, 2, 3], 1.0))
    play(scheduler, 6.0)  # after five seconds
    scheduler.schedule(7.0)
    scheduler.add(request_of(2, range(50, 59), 7.0))
    play(scheduler, 7.0)
    assert scheduler.policy.hold.asked[-1] == (8, pytest.approx(0.5))


def test_what_turns_did_not_find_that_were_not_held_is_told():
    scheduler = after_a_turn(0.0)
    scheduler.add(request_of(1, range(50, 78), 1.0))  # seven of eight blocks, one of these two
    play(scheduler, 1.0)
    scheduler.add(request_of(2, [*range(9), 0, 1, 2, 3], 2.0))
    play(scheduler, 2.0)
    scheduler.schedule(3.0)
    scheduler.add(request_of(3, [*range(9), 0, 1, 2, 3, 0, 7], 3.0))  # all of it is there
    play(scheduler, 3.0)
    scheduler.schedule(4.0)
    scheduler.add(request_of(4, range(80, 89), 5.0))
    play(scheduler, 5.0)
    scheduler.schedule(6.0)
    assert scheduler.policy.hold.lost == pytest.approx([0.0, 0.0, 0.0, 0.05, 0.045])


def test_a_turn_that_was_held_says_nothing_of_what_is_lost():
    scheduler = after_a_turn(100.0)
    scheduler._holding._lost_share = 0.5
    scheduler.add(request_of(1, [*range(9), 0, 77], 3.0))
    play(scheduler, 3.0)
    scheduler.schedule(4.0)
    assert scheduler.policy.hold.lost == [0.0, 0.5]


def test_a_turn_that_is_given_up_may_be_sent_again():
    scheduler = after_a_turn(100.0)
    given_up = request_of(1, [*range(9), 0, 77], 3.0)
    scheduler.add(given_up)
    scheduler.finish(given_up, "abort")
    scheduler.schedule(4.0)
    assert len(scheduler.held_block_ids) == 2
    again = request_of(2, [*range(9), 0, 77], 5.0)
    scheduler.add(again)
    assert again.program_arrival_time == 0.0
    assert scheduler.policy.hold.gaps == [3.0, 5.0]
    play(scheduler, 5.0)
    assert again.num_cached_tokens == 8


def test_samples_of_one_prompt_are_one_turn():
    scheduler = after_a_turn(100.0)
    samples = [request_of(number, [*range(9), 0, 77], 3.0, num_new=4) for number in (1, 2, 3)]
    for one in samples:
        scheduler.add(one)
    assert [one.program_arrival_time for one in samples] == [0.0] * 3
    assert scheduler.policy.hold.gaps == [3.0]
    play(scheduler, 3.0)
    play(scheduler, 3.1)
    assert all(one.num_cached_tokens == 8 for one in samples)
    assert not scheduler.held_block_ids


def test_a_turn_that_nobody_sends_again_is_let_go_in_time():
    scheduler = after_a_turn(10.0)
    given_up = request_of(1, [*range(9), 0, 77], 3.0)
    scheduler.add(given_up)
    scheduler.finish(given_up, "abort")
    scheduler.schedule(10.0)
    assert scheduler.num_free_blocks == 8


def test_a_reset_lets_go():
    scheduler = after_a_turn(100.0)
    assert scheduler.held_block_ids
    scheduler.reset_prefix_cache()
    assert scheduler.num_free_blocks == 8


def test_nothing_is_held_without_a_prefix_cache_or_a_policy():
    for policy, has_cache in ((make_preset("continuum", LinearCosts()), False), (SchedulerPolicy(), True)):
        scheduler = make_scheduler(policy, enable_prefix_caching=has_cache)
        scheduler.add(request_of(0, range(9), 0.0))
        play(scheduler, 0.0)
        assert not scheduler.held_block_ids


def test_conversations_are_followed_where_nothing_is_held():
    priority = ProgramFCFS()
    policy = SchedulerPolicy(priority=priority, restore=MoreUrgentFirst(priority))
    scheduler = make_scheduler(policy, enable_prefix_caching=True)
    scheduler.add(request_of(0, range(9), 0.0))
    play(scheduler, 0.0)
    following = request_of(1, [*range(9), 0, 77], 3.0)
    scheduler.add(following)
    assert following.program_arrival_time == 0.0
    assert not scheduler.held_block_ids


@pytest.mark.parametrize("answer", [-1.0, float("nan"), float("inf"), "long"])
def test_what_is_no_time_is_refused(answer):
    scheduler = holding(answer)
    scheduler.add(request_of(0, range(9), 0.0))
    play(scheduler, 0.0)
    with pytest.raises(ConfigError, match="predict seconds of at least 0"):
        scheduler.schedule(1.0)


class Refusing(Fixed):
    """Raises when a turn comes back, or as a priority."""

    reads, follows_programs, is_broken = (), True, ""

    def came_back(self, seconds):
        if self.is_broken == "hold":
            raise KeyError("lost")
        super().came_back(seconds)

    def score(self, request, now):
        if self.is_broken == "priority":
            raise KeyError("lost")
        return -request.program_arrival_time

    def group(self, request):
        return None


@pytest.mark.parametrize("broken", ["hold", "priority"])
def test_a_turn_that_was_refused_claims_nothing(broken):
    policy = Refusing(5.0)
    preset = dataclasses.replace(make_preset("continuum", LinearCosts()), hold=policy, priority=policy)
    scheduler = make_scheduler(preset, enable_prefix_caching=True, num_gpu_blocks=8)
    scheduler.add(request_of(0, range(9), 0.0))
    play(scheduler, 0.0)
    policy.is_broken = broken
    with pytest.raises(UserCodeError, match="lost"):
        scheduler.add(request_of(1, [*range(9), 0, 5], 1.0))
    policy.is_broken = ""
    scheduler.schedule(1.2)
    assert scheduler.held_block_ids == [0, 1]
    scheduler.schedule(6.0)
    assert scheduler.held_block_ids == []
    scheduler.add(request_of(2, [*range(9), 0, 5], 7.0))
    assert policy.gaps[-1] == 7.0


@pytest.mark.parametrize(("gap", "num_tokens", "expected"), [(3.0, 40, 3.0), (3.0, 4, 0.0)])
def test_the_time_to_live_is_the_gap_that_is_worth_most(gap, num_tokens, expected):
    """40 tokens take 40 s again: more than 3 s of a tenth of the pool by far. 1 s is not, of a whole pool."""
    policy = TimeToLive(LinearCosts(prefill=1.0 if num_tokens == 40 else 0.25, decode=0.0))
    for _ in range(2000):
        policy.came_back(gap)
    state = pools(num_blocks=100 if num_tokens == 40 else 1)
    assert policy.seconds(num_tokens, 0.0, state) == expected


def test_a_long_queue_makes_a_longer_time_worth_it_and_last_turns_a_shorter_one():
    state = pools(num_blocks=10)
    policy = TimeToLive(LinearCosts(prefill=0.01, decode=0.0))
    for number in range(2000):
        policy.came_back(1.0 + number % 2 * 9.0)  # 1 or 10 s
    assert policy.seconds(40, 0.5, state) == 0.0  # 1 s of the whole pool
    assert policy.seconds(40, 3.0, state) == 1.0
    assert policy.seconds(40, 30.0, state) == 10.0
    for _ in range(20_000):
        policy.seconds(40, 0.0, state)  # ends nobody goes on with
    assert policy.seconds(40, 3.0, state) == 0.0


def test_what_would_be_lost_is_held_the_longer_the_likelier():
    shares = 0.0, 0.01, 0.2, 1.0
    policy = HoldIfLost(LinearCosts(prefill=0.5, decode=0.0))
    for number in range(2000):
        policy.came_back(1.0 + number % 2 * 9.0)  # 1 or 10 s
    times = [policy.seconds(40, 1e6, pools(num_blocks=10)._replace(lost_share=share)) for share in shares]
    assert times == [0.0, 0.0, 1.0, 10.0]  # by 0, 0.2, 4 or 20 s of computing; 1 or 5.5 s of the pool


def test_nothing_is_asked_of_costs_while_nothing_is_lost():
    policy = HoldIfLost(LinearCosts(prefill=float("nan")))
    policy.came_back(1.0)
    assert policy.seconds(40, 1e6, pools()) == 0.0


@pytest.mark.parametrize("is_back", [False, True])
def test_the_default_holds_turns_once_others_were_lost_and_nothing_of_those_who_do_not_come_back(is_back):
    policy = make_preset("adaptive", LinearCosts(prefill=10.0))
    scheduler = make_scheduler(policy, enable_prefix_caching=True, num_gpu_blocks=8)
    said = [list(range(100 * agent, 100 * agent + 9)) for agent in range(4)]  # more than eight blocks
    num_held = []
    for number in range(12):
        history = said[number % 4] if is_back else list(range(100 * number, 100 * number + 13))
        request = request_of(number, history, float(number))
        scheduler.add(request)
        while not request.is_finished:
            play(scheduler, float(number))
        scheduler.schedule(number + 0.5)
        num_held.append(len(scheduler.held_block_ids))
        history += [*request.output_token_ids, 1]
    assert num_held[:4] == [0, 0, 0, 0]
    assert (max(num_held) > 0) is is_back


def test_the_default_decides_as_before_where_nobody_goes_on_with_a_conversation():
    fair = FairPriority()
    default = make_preset("adaptive", LinearCosts())
    before = dataclasses.replace(default, priority=fair, restore=MoreUrgentFirst(fair), hold=NoHold())
    rng = np.random.default_rng(0)
    lengths, shared = rng.integers(1, 24, 40).tolist(), list(range(9))
    decided = []
    for policy in (default, before):
        scheduler = make_scheduler(
            policy, enable_prefix_caching=True, num_gpu_blocks=16, num_host_blocks=8, max_num_seqs=4
        )
        steps = []
        for number, length in enumerate(lengths):
            prompt = [*shared[: length % 10], *range(100 * number + 50, 100 * number + 50 + length)]
            scheduler.add(request_of(number, prompt, float(number), num_new=1 + length % 7))
            steps += [play(scheduler, float(number)), scheduler.num_free_blocks]
        while scheduler.has_unfinished:
            steps += [play(scheduler, 100.0), scheduler.num_free_blocks]
        decided.append(steps)
    assert decided[0] == decided[1]


@pytest.mark.parametrize("guess", [0.0, -1.0, float("inf"), float("nan")])
def test_a_first_guess_is_checked(guess):
    with pytest.raises(ConfigError, match=r"first_guess=.* must be positive"):
        TimeToLive(LinearCosts(), guess)
