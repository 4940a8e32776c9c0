"""How the default preset brings swapped requests back."""

import pytest
from scheduler_helpers import LinearCosts, make_request, pools

from jaxllm.sched.policies import OverlapAwareResume, ResumeAction, ResumeDecision

AT_ONCE, IN_BACKGROUND, LATER, RECOMPUTE = ResumeAction
POOLS = {"num_running": 3, "num_context_tokens": 30, "num_blocks": 9, "num_free": 9, "num_to_copy": 3}


# Returning: of a request whose nine computed tokens fill three blocks


def resume(costs, copied_out_at=0.0, now=0.0, policy=OverlapAwareResume, **changes):
    request = make_request(0, 10)
    request.num_computed_tokens = 9
    return policy(costs).choose(request, copied_out_at, pools(**(POOLS | changes)), now)


def returning(costs, *args, **changes):
    return resume(costs, *args, **changes).action


def test_a_hidden_copy_resumes_at_once():
    assert resume(LinearCosts(swap=0.5)) == ResumeDecision(AT_ONCE, 0.0, 1.5)  # beside half of a step of 3 s
    assert returning(LinearCosts(swap=0.5), num_running=2) is AT_ONCE  # 0.5 < 2 / 3
    assert resume(LinearCosts(swap=0.5), num_running=0) == ResumeDecision(IN_BACKGROUND, 0.5, 1.5)


def test_a_longer_copy_runs_in_the_background_if_few_blocks_idle():
    costs = LinearCosts(swap=1.5)  # 3 s longer than half a step
    # A third of the pool for 4.5 s, or three of its four blocks.
    assert resume(costs, num_blocks=9) == ResumeDecision(IN_BACKGROUND, 1.5, 4.5)
    assert resume(costs, num_blocks=4) == ResumeDecision(AT_ONCE, 3.0, 4.5)  # 3 < 4.5 * 3 / 4
    hidden = LinearCosts(swap=0.5)
    assert resume(hidden, 0.5) == ResumeDecision(AT_ONCE, 0.5, 1.5)
    assert resume(hidden, 1.0) == ResumeDecision(AT_ONCE, 1.0, 1.5)  # 3 / 3: blocks idle for a step at least
    assert resume(hidden, 1.125) == ResumeDecision(IN_BACKGROUND, 1.0, 1.5)
    assert resume(hidden, 2.5) == ResumeDecision(IN_BACKGROUND, pytest.approx(4 / 3), 1.5)
    assert resume(hidden, 2.5, now=2.0) == ResumeDecision(AT_ONCE, 0.5, 1.5)


def test_a_busy_link_is_waited_for_while_others_can_use_the_blocks():
    costs = LinearCosts(swap=1.0)  # a copy of 3 s
    later = ResumeDecision(LATER, pytest.approx(7 / 3), 3.0)
    assert resume(costs, copy_in_until=4.0, num_waiting=1) == later
    assert resume(costs, 4.0, num_waiting=1) == later  # its own copy out
    assert resume(costs, 4.0, copy_in_until=4.0, num_waiting=1) == later  # the later of both
    assert returning(costs, copy_in_until=4.0) is IN_BACKGROUND
    assert returning(costs, copy_in_until=3.0, num_waiting=1) is IN_BACKGROUND  # no longer than a step
    assert returning(costs, copy_in_until=9.0, now=6.0, num_waiting=1) is IN_BACKGROUND
    assert returning(costs, copy_in_until=9.0, now=5.0, num_waiting=1) is LATER


def test_only_what_is_not_on_the_device_is_copied():
    costs = LinearCosts(swap=1.5)
    assert resume(costs, num_to_copy=2) == ResumeDecision(IN_BACKGROUND, 1.0, 3.0)
    assert resume(costs, num_to_copy=1) == ResumeDecision(AT_ONCE, 0.0, 1.5)  # half of a step
    assert resume(costs, num_to_copy=0) == ResumeDecision(AT_ONCE, 0.0, 0.0)


# A waiting request, which finds three blocks in host memory, and could compute them instead


def test_a_waiting_request_computes_what_it_would_wait_longer_for():
    def found(swap, copied_out_at=0.0, **changes):
        costs = LinearCosts(prefill=0.25, swap=swap)  # 3 s for twelve tokens
        return resume(costs, copied_out_at, num_to_recompute=12, num_waiting=1, **changes)

    assert found(0.5) == ResumeDecision(AT_ONCE, 0.0, 1.5)
    assert found(1.0) == ResumeDecision(AT_ONCE, 1.5, 3.0)  # no longer than to compute them
    assert found(1.5) == ResumeDecision(RECOMPUTE, 4.5, 4.5)
    assert found(0.5, copy_in_until=1.5).action is AT_ONCE
    assert found(0.5, copy_in_until=2.0) == ResumeDecision(RECOMPUTE, 3.5, 1.5)
    assert found(0.5, 2.0) == ResumeDecision(RECOMPUTE, 3.5, 1.5)  # behind their copy to the host
    assert found(0.5, copy_in_until=9.0, now=8.0).action is not RECOMPUTE


def test_a_waiting_request_does_not_stand_back_for_itself():
    costs = LinearCosts(prefill=9.0, swap=1.0)
    waits = {"copy_in_until": 4.0, "num_to_recompute": 12}
    assert returning(costs, num_waiting=1, **waits) is AT_ONCE
    assert returning(costs, num_waiting=2, **waits) is LATER


def test_a_first_token_is_worth_a_step_of_thrice_the_length():
    def found(swap, **changes):
        costs = LinearCosts(prefill=9.0, swap=swap)  # beside a step of 3 s
        return returning(costs, num_to_recompute=12, num_waiting=1, **changes)

    assert found(3.0) is AT_ONCE
    assert found(3.1) is IN_BACKGROUND
    assert found(2.0, num_running=2) is AT_ONCE
    assert found(2.1, num_running=2) is IN_BACKGROUND
