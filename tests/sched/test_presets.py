"""Presets: names and errors, and AdaptiveLLM's two algorithms on cases computed by hand.

Blocks hold 4 tokens; the urgency of a request is (now - arrival) / tokens.
"""

import pytest
from scheduler_helpers import LinearCosts, make_request, make_scheduler, step

from jaxllm.errors import ConfigError
from jaxllm.sched.baselines import VLLM025
from jaxllm.sched.policies import AlwaysRecompute, Decision, PreemptionAction
from jaxllm.sched.presets import NEEDS_COSTS, PRESETS, make_preset

SWAP_IS_CHEAP = LinearCosts(prefill=1.0, swap=0.1)
SWAP_IS_DEAR = LinearCosts(prefill=1.0, swap=10.0)


def paper(costs=SWAP_IS_CHEAP, **limits):
    return make_scheduler(make_preset("paper", costs), **({"num_host_blocks": 8} | limits))


def add(scheduler, index, length, new=8, arrival=None, **changes):
    arrival = float(index if arrival is None else arrival)
    scheduler.add(make_request(index, length, new, arrival_time=arrival, **changes))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_plans(name):
    scheduler = make_scheduler(make_preset(name, LinearCosts()), num_host_blocks=8)
    add(scheduler, 0, 3, new=2)
    assert [step(scheduler, 1.0), step(scheduler, 2.0)] == ["| r0[0:3]!", "r0"]
    assert not scheduler.has_unfinished


@pytest.mark.parametrize("name", sorted(NEEDS_COSTS))
def test_presets_that_weigh_costs_need_them(name):
    with pytest.raises(ConfigError, match=rf"preset '{name}' .* pass costs="):
        make_preset(name)
    with pytest.raises(ConfigError, match="costs is 3, which has no step_seconds"):
        make_preset(name, 3)


def test_an_unknown_preset_is_an_error_that_lists_them():
    with pytest.raises(
        ConfigError, match=r"no preset 'vllm_s'; did you mean .* presets: adaptive, .*, vllm, vllm_swap"
    ):
        make_preset("vllm_s", LinearCosts())


def test_the_baselines_differ_in_what_they_swap():
    assert [make_preset(name) for name in ("vllm", "vllm_swap", "vllm_swap_both")] == [
        VLLM025("never"),
        VLLM025("host"),
        VLLM025("both"),
    ]
    assert make_preset("vllm_v1").patience is None
    with pytest.raises(ConfigError, match="swaps='always' is unknown"):
        VLLM025("always")
    with pytest.raises(ConfigError, match=r"swaps='host' leaves .* nothing to decide"):
        VLLM025("host", AlwaysRecompute())


class Fixed:
    """Swaps every victim there is room for, or none."""

    def __init__(self, action):
        self.action, self.asked = action, []

    def choose(self, victim, state, now):
        self.asked.append((victim.request_id, state.num_host_free))
        fits = state.num_host_free >= len(victim.block_ids)
        return Decision(self.action if fits else PreemptionAction.RECOMPUTE)


def test_the_memory_strategy_alone_keeps_vllms_order():
    """An action that always drops makes vLLM itself; one that swaps resumes before it prefills."""
    steps = {}
    for name, policy in (
        ("vllm", VLLM025()),
        ("drops", VLLM025(action=Fixed(PreemptionAction.RECOMPUTE))),
        ("swaps", VLLM025(action=Fixed(PreemptionAction.SWAP))),
    ):
        scheduler = make_scheduler(policy, num_gpu_blocks=6, num_host_blocks=4)
        for index in range(3):
            add(scheduler, index, 5, new=8)
        steps[name] = [step(scheduler) for _ in range(40) if scheduler.has_unfinished]
        assert not scheduler.has_unfinished
    assert steps["vllm"] == steps["drops"]
    assert any("<" in line for line in steps["swaps"]), steps["swaps"]
    assert sum("|" in line for line in steps["swaps"]) < sum("|" in line for line in steps["vllm"])


# vLLM 0.2.5, beside its recorded decisions (test_oracles)


def vllm(swaps="never", **limits):
    return make_scheduler(VLLM025(swaps), **limits)


def test_a_prompt_batch_is_padded():
    scheduler = vllm(max_num_batched_tokens=8)
    for index, length in enumerate([4, 4, 5, 3]):
        add(scheduler, index, length)
    # Two times 5 tokens would be too many for r2 and r3.
    assert [step(scheduler) for _ in range(4)] == [
        "| r0[0:4]! r1[0:4]!",
        "| r2[0:5]!",
        "| r3[0:3]!",
        "r0 r1 r2 r3",
    ]


def test_at_most_256_tokens_of_a_prompt_batch_are_padding():
    scheduler = vllm(max_num_batched_tokens=2048, max_model_len=1024, num_gpu_blocks=999)
    for index, length in enumerate([300, 44, 43]):
        add(scheduler, index, length)
    assert step(scheduler) == "| r0[0:300]! r1[0:44]!"
    scheduler = vllm(max_num_batched_tokens=2048, max_model_len=1024, num_gpu_blocks=999)
    for index, length in enumerate([300, 43]):
        add(scheduler, index, length)
    assert step(scheduler) == "| r0[0:300]!"


def test_a_request_decodes_only_while_a_block_is_free():
    scheduler = vllm(num_gpu_blocks=2)
    add(scheduler, 0, 2, new=4)
    add(scheduler, 1, 2, new=4)
    assert [step(scheduler), step(scheduler)] == ["| r0[0:2]! r1[0:2]!", "r0 -r1"]


def test_a_prompt_longer_than_the_budget_spans_prefills():
    scheduler = vllm(max_num_batched_tokens=8)
    add(scheduler, 0, 10)
    add(scheduler, 1, 2)
    assert [step(scheduler) for _ in range(3)] == ["| r0[0:8]", "| r0[8:10]! r1[0:2]!", "r0 r1"]


def test_samples_of_a_prompt_are_swapped_together_and_return_together():
    scheduler = vllm(num_gpu_blocks=4, num_host_blocks=4)
    add(scheduler, 0, 4, new=3)
    for index in (1, 2):
        add(scheduler, index, 3, new=3, group_index=1)
    # One block is free, which r0 takes, and each of the others asks for one in its turn. While r0 has two,
    # one sample could return, but not both with a block to spare for each.
    assert [step(scheduler) for _ in range(4)] == [
        "| r0[0:4]! r1[0:3]! r2[0:3]!",
        "r0 <r2 <r1",
        "r0",
        "r1 r2 >r1 >r2",
    ]


def test_samples_that_do_not_fit_the_host_are_dropped_together():
    scheduler = vllm(num_gpu_blocks=4, num_host_blocks=1)
    add(scheduler, 0, 4, new=10)
    for index in (1, 2):
        add(scheduler, index, 3, new=3, group_index=1)
    assert [step(scheduler), step(scheduler)] == ["| r0[0:4]! r1[0:3]! r2[0:3]!", "r0 -r2 -r1"]


def test_of_the_samples_that_came_first_some_stay():
    scheduler = vllm(num_gpu_blocks=3, num_host_blocks=3)
    for index in range(3):
        add(scheduler, index, 4, new=3, group_index=0)
    trace = [step(scheduler) for _ in range(12) if scheduler.has_unfinished]
    assert trace[:2] == ["| r0[0:4]! r1[0:4]! r2[0:4]!", "r0 -r2 -r1"]
    assert not scheduler.has_unfinished


def test_nothing_starts_before_what_is_swapped_is_back():
    scheduler = vllm("both", num_gpu_blocks=7, num_host_blocks=12)
    for index in range(2):
        add(scheduler, index, 8, new=10)
    add(scheduler, 2, 1, new=9)
    trace = [step(scheduler), step(scheduler)]
    add(scheduler, 3, 1, new=2)  # a block is free for it, but not two for r2
    trace.append(step(scheduler))
    assert trace == ["| r0[0:8]! r1[0:8]! r2[0:1]!", "r0 r1 <r2", "r0 r1"]


def test_the_host_bound_counts_everybody_at_its_greatest_length():
    for swaps, host, both_start in (("host", 5, True), ("host", 4, False), ("both", 1, True)):
        scheduler = vllm(swaps, num_gpu_blocks=20, num_host_blocks=host)
        add(scheduler, 0, 4, new=5)  # 2 blocks
        add(scheduler, 1, 4, new=6)  # 3
        assert ("r1" in step(scheduler)) is both_start
    scheduler = vllm("both", num_gpu_blocks=4, num_host_blocks=0)  # 4 - 3 < 2 + 3
    add(scheduler, 0, 4, new=5)
    add(scheduler, 1, 4, new=6)
    assert step(scheduler) == "| r0[0:4]!"


# Algorithm 1: whom to preempt, and how


def two_running(costs, **limits):
    """r0 with 8 tokens and r1 with 4, arrived at 0; the next step needs 2 blocks and 1 is free."""
    scheduler = paper(costs, num_gpu_blocks=4, **limits)
    add(scheduler, 0, 8, arrival=0)
    add(scheduler, 1, 4, arrival=0)
    assert step(scheduler, 9.0) == "| r1[0:4]! r0[0:8]!"  # 9 / 4 against 9 / 8
    return scheduler


def test_the_least_urgent_is_swapped_out_where_that_is_cheaper():
    assert step(two_running(SWAP_IS_CHEAP), 10.0) == "r1 <r0"  # 10 / 9 against 10 / 5


def test_the_least_urgent_is_dropped_where_that_is_cheaper():
    assert step(two_running(SWAP_IS_DEAR), 10.0) == "r1 -r0"


def test_the_least_urgent_is_dropped_where_the_host_pool_is_too_small():
    assert step(two_running(SWAP_IS_CHEAP, num_host_blocks=1), 10.0) == "r1 -r0"


def test_urgency_follows_the_arrival_too():
    scheduler = paper(num_gpu_blocks=4)
    add(scheduler, 0, 8, arrival=0)
    add(scheduler, 1, 4, arrival=8)
    assert step(scheduler, 9.0) == "| r0[0:8]! r1[0:4]!"  # 9 / 8 against 1 / 4
    assert step(scheduler, 10.0) == "r0 <r1"  # 10 / 9 against 2 / 5


# Algorithm 2: who starts


def test_the_waiting_start_by_urgency_and_what_does_not_fit_is_passed_over():
    scheduler = paper(num_gpu_blocks=3)
    add(scheduler, 0, 2, arrival=0)  # 10 / 2
    add(scheduler, 1, 9, new=3, arrival=0)  # 10 / 9, 3 blocks
    add(scheduler, 2, 10, new=3, arrival=0)  # 10 / 10, 3 blocks
    add(scheduler, 3, 4, arrival=8)  # 2 / 4
    assert step(scheduler, 10.0) == "| r0[0:2]! r3[0:4]!"


def test_the_token_budget_passes_over_what_is_too_long():
    scheduler = paper(max_num_batched_tokens=8)
    for index, length in enumerate([4, 5, 4]):
        add(scheduler, index, length, arrival=0)
    assert step(scheduler, 10.0) == "| r0[0:4]! r2[0:4]!"


def test_the_blocks_of_the_next_step_stay_free():
    scheduler = paper(num_gpu_blocks=3)
    add(scheduler, 0, 4, arrival=0)
    assert step(scheduler, 1.0) == "| r0[0:4]!"
    add(scheduler, 1, 5, arrival=0)  # two blocks are free, r0 needs one of them
    assert step(scheduler, 2.0) == "r0"


def test_an_iteration_that_preempts_starts_and_resumes_nobody():
    scheduler = two_running(SWAP_IS_CHEAP)
    add(scheduler, 2, 1, arrival=0)  # the most urgent, and a block is free after r0 left
    assert step(scheduler, 10.0) == "r1 <r0"
    assert step(scheduler, 11.0) == "| r2[0:1]!"


def swapped_and_waiting(new_length, new_arrival):
    """r0, 9 tokens from 0.0, is swapped out; r1 ran alone and has ended; r2 waits beside r0."""
    scheduler = paper(num_gpu_blocks=4)
    add(scheduler, 0, 8, arrival=0)
    add(scheduler, 1, 4, new=2, arrival=0)
    assert [step(scheduler, 9.0), step(scheduler, 10.0)] == ["| r1[0:4]! r0[0:8]!", "r1 <r0"]
    add(scheduler, 2, new_length, arrival=new_arrival)
    return scheduler


def test_the_more_urgent_waiting_set_is_prefilled():
    scheduler = swapped_and_waiting(4, 0.0)  # 11 / 4 against 11 / 9
    assert step(scheduler, 11.0) == "| r2[0:4]!"


def test_the_more_urgent_swapped_set_is_resumed_and_nothing_is_prefilled():
    scheduler = swapped_and_waiting(4, 10.0)  # 1 / 4 against 11 / 9
    assert step(scheduler, 11.0) == "r0 >r0"


def test_of_equally_urgent_sets_the_swapped_one_is_resumed():
    scheduler = swapped_and_waiting(9, 0.0)
    assert step(scheduler, 11.0) == "r0 >r0"


def test_an_empty_set_is_never_the_more_urgent():
    scheduler = paper(num_gpu_blocks=4)
    add(scheduler, 0, 8, arrival=0)
    add(scheduler, 1, 4, new=2, arrival=0)
    # At 0.0 the swapped request's urgency is 0; nobody waits.
    assert [step(scheduler) for _ in range(3)] == ["| r0[0:8]! r1[0:4]!", "r0 <r1", "r0"]


def test_a_set_is_compared_by_its_mean():
    scheduler = swapped_and_waiting(1, 2.0)  # 9 / 1: with r3 the mean is 4.55, against 11 / 9
    add(scheduler, 3, 10, new=3, arrival=10)  # 1 / 10
    assert step(scheduler, 11.0) == "| r2[0:1]! r3[0:10]!"
    scheduler = swapped_and_waiting(4, 3.0)  # 8 / 4: with r3 the mean is 1.05
    add(scheduler, 3, 10, new=3, arrival=10)
    assert step(scheduler, 11.0) == "r0 >r0"


def test_a_swapped_request_needs_room_for_its_next_token():
    scheduler = paper(num_gpu_blocks=3)
    add(scheduler, 0, 8, new=4, arrival=0)
    add(scheduler, 1, 3, new=7, arrival=0)
    assert step(scheduler, 9.0) == "| r1[0:3]! r0[0:8]!"
    # r0 holds 2 blocks and needs a third: while r1 has one, two are free, and that is too few.
    assert [step(scheduler, 10.0), step(scheduler, 11.0)] == ["r1 <r0", "r1"]


# adaptive


def adaptive(**limits):
    return make_scheduler(make_preset("adaptive", SWAP_IS_CHEAP), **({"num_host_blocks": 8} | limits))


def test_adaptive_resumes_before_it_starts_those_who_are_less_urgent():
    scheduler = adaptive(num_gpu_blocks=4)
    add(scheduler, 0, 4, new=2, arrival=0)
    add(scheduler, 1, 8, new=4, arrival=0)
    trace = [step(scheduler, 9.0), step(scheduler, 10.0)]
    add(scheduler, 2, 5, arrival=5)  # 6 / 5 against 11 / 9
    trace.append(step(scheduler, 11.0))
    assert trace == ["| r0[0:4]! r1[0:8]!", "r0 <r1", "r1 >r1"]


def test_adaptive_starts_those_who_are_more_urgent():
    scheduler = adaptive(num_gpu_blocks=3)
    add(scheduler, 0, 4, new=2, arrival=0)
    add(scheduler, 1, 8, new=4, arrival=0)
    trace = [step(scheduler, 9.0), step(scheduler, 10.0)]
    add(scheduler, 2, 2, arrival=0)  # 11 / 2 against 11 / 9
    add(scheduler, 3, 2, arrival=0)
    trace.append(step(scheduler, 11.0))
    assert trace == ["| r0[0:4]! r1[0:8]!", "r0 <r1", "| r2[0:2]! r3[0:2]!"]


def test_adaptive_starts_as_many_as_fit_and_preempts_the_latest():
    scheduler = adaptive(num_gpu_blocks=3)
    for index in range(3):
        add(scheduler, index, 4, arrival=0)
    assert [step(scheduler, 1.0), step(scheduler, 2.0)] == ["| r0[0:4]! r1[0:4]! r2[0:4]!", "r0 <r2 <r1"]
