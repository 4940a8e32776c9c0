"""What the default preset thinks that swapping, returning and recomputing cost."""

import pytest
from scheduler_helpers import LinearCosts, holder, make_request, pools

from jaxllm.sched.policies import (
    Decision,
    OverlapAwareAction,
    OverlapAwareResume,
    PreemptionAction,
    RecentPressure,
    ResumeAction,
    ResumeDecision,
)

RECOMPUTE, SWAP = PreemptionAction.RECOMPUTE, PreemptionAction.SWAP
AT_ONCE, IN_BACKGROUND, LATER = ResumeAction


def pressured(recent=None, **changes):
    """Three requests of ten tokens run; host blocks are plenty, and nothing is in them."""
    changes = {"num_running": 3, "num_context_tokens": 30, "num_host_free": 99, "num_blocks": 64} | changes
    changes = {"num_host_blocks": changes["num_host_free"]} | changes
    return pools(recent=RecentPressure(**(recent or {})), **changes)


# Preempting: of a victim whose nine computed tokens fill three blocks


def decide(costs, recent=None, **changes):
    return OverlapAwareAction(costs).choose(holder(0, 10, 3), pressured(recent, **changes), 0.0)


def test_copies_cost_what_steps_do_not_hide():
    costs = LinearCosts(prefill=1.0, decode=1.0, swap=2.0)  # a step takes 3, a copy of the victim 6
    assert decide(costs, num_blocks=3).swap_seconds == 3
    assert decide(costs, {"swap_in_seqs": 3.0}, num_blocks=3).swap_seconds == 5  # three share the step
    assert decide(costs, {"swap_in_seqs": 0.5}, num_blocks=3).swap_seconds == 3
    assert decide(costs, num_blocks=9).swap_seconds == 2  # a third of the pool idles for 6
    assert decide(costs, num_blocks=3, num_running=0).swap_seconds == 6
    assert decide(costs, num_blocks=3, num_running=9).swap_seconds == 0
    assert decide(costs).copy_seconds == 6


def test_a_copy_comes_back_behind_those_in_host_memory():
    costs = LinearCosts(prefill=1.0, decode=1.0, swap=2.0)
    assert decide(costs, num_blocks=9, num_host_blocks=109).swap_seconds == (6 + 20) / 3  # of the pool's time
    assert decide(costs, num_blocks=1, num_host_blocks=109).swap_seconds == 6 + 20 - 3  # a step of 3 hides


def test_a_copy_out_waits_for_room_on_the_device():
    costs = LinearCosts(prefill=1.0, decode=1.0, swap=2.0)
    for num_leaving, seconds in ((29, 0), (30, 2), (32, 6)):  # 32 blocks may be under way
        assert decide(costs, num_blocks=9, num_leaving=num_leaving).swap_seconds == seconds + 2
    long = holder(0, 200, 50)  # more than that by itself
    copy_in = 2.0 * 50 * 50 / 100
    found = OverlapAwareAction(costs).choose(long, pressured(num_blocks=100), 0.0)
    assert found.swap_seconds == 2.0 * 18 + copy_in


def test_only_blocks_that_hold_kv_are_copied():
    victim = holder(0, 10, 3)
    victim.num_computed_tokens = 4  # a prompt under way
    costs = LinearCosts(prefill=1.0, swap=2.0)
    found = OverlapAwareAction(costs).choose(victim, pressured(num_blocks=1), 0.0)
    assert found == Decision(SWAP, swap_seconds=0.0, recompute_seconds=4.0, copy_seconds=2.0)
    victim.num_computed_tokens = 0
    found = OverlapAwareAction(costs).choose(victim, pressured(), 0.0)
    assert found == Decision(RECOMPUTE, swap_seconds=0.0, recompute_seconds=0.0)


class FloorCosts(LinearCosts):
    """A step takes 40 s at least, as if weights were read: whatever fits behind that is free."""

    def step_seconds(self, batch, *work):
        seconds = super().step_seconds(batch, *work)
        return max(40.0, seconds) if seconds else 0.0


def test_recomputing_costs_what_it_adds_to_an_iteration():
    def recompute(recent=None, **changes):
        return decide(FloorCosts(), recent, **changes).recompute_seconds

    assert recompute() == 0  # 3 decodes and 9 tokens fit behind 40
    assert recompute(num_running=35) == 4  # 35 + 9
    assert recompute(num_running=50) == 9
    # The prompt tokens of iterations like the recent ones, and the share of iterations that have any.
    assert recompute({"prompt_tokens": 30.0, "prompt_seqs": 4.0, "prompt_share": 1.0}) == 3 + 30 + 9 - 40
    assert recompute({"prompt_tokens": 30.0, "prompt_seqs": 4.0, "prompt_share": 0.5}) == 0
    assert recompute({"prompt_tokens": 100.0, "prompt_seqs": 4.0, "prompt_share": 1.0}) == 9


def test_recomputing_shares_a_prefill_where_iterations_are_not_mixed():
    def recompute(**recent):
        return decide(FloorCosts(), recent, mixes=False).recompute_seconds

    assert recompute() == 40  # alone
    assert recompute(prompt_tokens=20.0, prompt_seqs=1.0) == 0  # whatever the share of prefills is
    assert recompute(prompt_tokens=35.0, prompt_seqs=1.0) == 4
    assert recompute(prompt_tokens=100.0, prompt_seqs=4.0) == 9


class Recorder(LinearCosts):
    """Notes what it is asked of steps with prompts."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "asked", [])

    def step_seconds(self, batch, context_tokens, *prompts):
        if any(prompts):
            self.asked.append((batch, context_tokens, *prompts))
        return super().step_seconds(batch, context_tokens, *prompts)


def test_recomputes_that_do_not_fit_an_iteration_ride_in_several():
    def asked(num_tokens, recent=None, **changes):
        costs = Recorder()
        victim = holder(0, num_tokens + 1, -(-num_tokens // 4))
        found = OverlapAwareAction(costs).choose(victim, pressured(recent, **changes), 0.0)
        return costs.asked, found.recompute_seconds

    # 128 tokens in all, of which 3 are decodes.
    assert asked(125) == ([(3, 30, 125, 1, 0)], 125)
    assert asked(126) == ([(3, 30, 63, 1, 31)], 2 * 63)  # of the second one, half of the first is before it
    assert asked(300) == ([(3, 30, 100, 1, 100)], 3 * 100)
    others = {"prompt_tokens": 150.0, "prompt_seqs": 5.0, "prompt_share": 0.5}
    assert asked(50, others) == ([(3, 30, 75 + 50, 3 + 1, 0), (3, 30, 75, 3)], 50)
    assert asked(100, others) == ([(3, 30, 75 + 50, 3 + 1, 25), (3, 30, 75, 3)], 2 * 50)
    assert asked(200, mixes=False) == ([(0, 0, 100, 1, 50)], 2 * 100)
    # However full they are, a token rides in each.
    full = {"prompt_tokens": 200.0, "prompt_seqs": 1.0, "prompt_share": 1.0}
    assert asked(9, full) == ([(3, 30, 201, 2, 4), (3, 30, 200, 1)], 9)


def test_what_is_cheaper_and_fits_is_done():
    assert decide(LinearCosts(swap=0.1)).action is SWAP
    assert decide(LinearCosts(swap=99.0)).action is RECOMPUTE
    assert decide(LinearCosts(swap=0.1), num_host_free=3).action is SWAP
    assert decide(LinearCosts(swap=0.1), num_host_free=2).action is RECOMPUTE
    hidden = decide(LinearCosts(prefill=0.0, swap=0.1))
    assert hidden == Decision(RECOMPUTE, 0.0, 0.0, pytest.approx(0.3))  # of equals nothing is copied


# Returning: of a request whose nine computed tokens fill three blocks


def resume(costs, copied_out_at=0.0, now=0.0, policy=OverlapAwareResume, recent=None, **changes):
    request = make_request(0, 10)
    request.num_computed_tokens = 9
    state = pressured(recent, **({"num_blocks": 9, "num_free": 9} | changes))
    return policy(costs).choose(request, copied_out_at, state, now)


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
