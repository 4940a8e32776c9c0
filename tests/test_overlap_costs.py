"""What the default preset thinks that swapping, returning and recomputing cost."""

import dataclasses

import pytest
from scheduler_helpers import LinearCosts, holder, make_request, pools

from jaxllm.errors import ConfigError
from jaxllm.sched.policies import (
    OverlapAwareAction,
    OverlapAwareResume,
    PreemptionAction,
    ResumeAction,
)
from jaxllm.sched.pressure import RecentPressure
from jaxllm.types import MAX_STAGED_BLOCKS

RECOMPUTE, SWAP = PreemptionAction.RECOMPUTE, PreemptionAction.SWAP


def pressured(**recent):
    """Three requests of ten tokens run; host blocks are plenty."""
    return dataclasses.replace(
        pools(num_host_free=99, num_host_blocks=99),
        num_running=3,
        num_context_tokens=30,
        recent=RecentPressure(**recent),
    )


def weigh(costs, num_blocks=64, **recent):
    state = dataclasses.replace(pressured(**recent), num_blocks=num_blocks)
    decision = OverlapAwareAction(costs).choose(holder(0, 10, 3), state, 0.0)
    return decision.swap_seconds, decision.recompute_seconds


def test_copies_cost_what_steps_do_not_hide():
    costs = LinearCosts(prefill=1.0, decode=1.0, swap=2.0)  # a step takes 3, a copy of the victim 6
    assert weigh(costs, num_blocks=3)[0] == 3
    assert weigh(costs, num_blocks=3, swap_in_seqs=3.0)[0] == 5  # three share the step
    assert weigh(costs, num_blocks=3, lost_share=1 / 3)[0] == 0  # one block comes back, in 2
    assert weigh(costs, num_blocks=9)[0] == 2  # a third of the pool idles for 6


def test_a_copy_out_waits_for_room_on_the_device():
    costs = LinearCosts(prefill=1.0, decode=1.0, swap=2.0)
    victim, state = holder(0, 10, 3), dataclasses.replace(pressured(), num_blocks=9)
    for num_leaving, seconds in ((29, 0), (30, 2), (32, 6)):  # 32 blocks may be under way
        crowded = dataclasses.replace(state, num_leaving=num_leaving)
        assert OverlapAwareAction(costs).choose(victim, crowded, 0.0).swap_seconds == seconds + 2
    long = holder(0, 200, 50)  # more than that by itself
    copy_in = 2.0 * 50 * 50 / 100
    roomy = dataclasses.replace(state, num_blocks=100)
    assert OverlapAwareAction(costs).choose(long, roomy, 0.0).swap_seconds == 2.0 * 18 + copy_in


def returning(
    costs, num_lost=3, copied_out_at=0.0, num_blocks=9, num_waiting=0, num_free=9, started=(), **recent
):
    state = dataclasses.replace(
        pressured(**recent),
        num_blocks=num_blocks,
        num_waiting=num_waiting,
        num_free=num_free,
        started=started,
    )
    decision = OverlapAwareResume(costs).choose(make_request(0, 10), num_lost, copied_out_at, state, 0.0)
    return decision.action


def test_a_hidden_copy_resumes_at_once():
    assert returning(LinearCosts(swap=0.5)) is ResumeAction.AT_ONCE  # 1.5 s beside a step of 3 s
    assert returning(LinearCosts(swap=99.0), num_lost=0, copied_out_at=9.0) is ResumeAction.AT_ONCE


def test_a_longer_copy_runs_in_the_background_if_few_blocks_idle():
    costs = LinearCosts(swap=1.5)  # 3 s longer than half a step
    assert returning(costs, num_blocks=9) is ResumeAction.IN_BACKGROUND  # a third of the pool for 4.5 s
    assert returning(costs, num_blocks=4) is ResumeAction.AT_ONCE  # 3 < 4.5 * 3 / 4
    hidden = LinearCosts(swap=0.5)
    assert returning(hidden, copied_out_at=0.5) is ResumeAction.AT_ONCE  # 0.5 < 3 / 3, a step of idleness
    assert returning(hidden, copied_out_at=2.5) is ResumeAction.IN_BACKGROUND


def test_a_dear_copy_is_given_up():
    assert returning(LinearCosts(prefill=1.0, swap=11.0)) is ResumeAction.RECOMPUTE  # 10 < 33 / 3
    assert returning(LinearCosts(prefill=1.0, swap=11.0), num_lost=1) is ResumeAction.RECOMPUTE  # 2 < 11 / 3
    assert returning(LinearCosts(prefill=2.0, swap=9.0)) is ResumeAction.IN_BACKGROUND


def test_a_busy_link_is_waited_for_while_others_can_use_the_blocks():
    costs = LinearCosts(prefill=9.0, swap=1.0)
    assert returning(costs, copy_in_until=4.0, num_waiting=1) is ResumeAction.LATER
    assert returning(costs, copy_in_until=4.0) is ResumeAction.IN_BACKGROUND
    assert returning(costs, copy_in_until=2.0, num_waiting=1) is ResumeAction.IN_BACKGROUND


def test_a_return_that_costs_something_leaves_room_to_grow():
    """Of three blocks, with an eighth of a block, half a token, for each of eight requests."""
    costs, hidden = LinearCosts(swap=1.5), LinearCosts(swap=0.5)
    outputs = {"started": [make_request(i, 10) for i in range(8)], "output_tokens": 0.5 / 0.04}
    assert returning(costs, num_free=4, **outputs) is ResumeAction.IN_BACKGROUND
    assert returning(costs, num_free=3, **outputs) is ResumeAction.LATER
    assert returning(costs, num_free=3, **{**outputs, "output_tokens": 0.0}) is ResumeAction.IN_BACKGROUND
    assert returning(hidden, num_free=3, **outputs) is ResumeAction.AT_ONCE
    dear = LinearCosts(prefill=1.0, swap=11.0)
    assert returning(dear, num_free=4, **outputs) is ResumeAction.RECOMPUTE
    assert returning(dear, num_free=3, **outputs) is ResumeAction.LATER  # not before it could come back
    recent = RecentPressure(output_tokens=outputs["output_tokens"])
    state = dataclasses.replace(
        pressured(), num_blocks=9, num_free=3, started=outputs["started"], recent=recent
    )
    policy = OverlapAwareResume(costs, patience=4)  # steps, of 3 s each
    for waited, expected in ((11.9, ResumeAction.LATER), (12.0, ResumeAction.IN_BACKGROUND)):
        assert policy.choose(make_request(0, 10), 3, 0.0, state, waited).action is expected
    with pytest.raises(ConfigError, match="patience must be at least 0 and finite, got nan"):
        OverlapAwareResume(costs, patience=float("nan"))
    with pytest.raises(ConfigError, match="output_share must be at least 0 and finite, got -1"):
        OverlapAwareResume(costs, output_share=-1)


def test_recomputes_share_a_prefill_iteration():
    costs = FloorCosts(floor=40.0, per_token=1.0)
    assert weigh(costs)[1] == 40  # alone
    assert weigh(costs, prefill_tokens=40.0, prefill_seqs=4.0)[1] == 10  # a quarter of 40
    assert weigh(costs, prefill_tokens=400.0, prefill_seqs=4.0)[1] == 310 / 4
    assert weigh(costs, prefill_tokens=800.0, prefill_seqs=80.0)[1] == 10  # what it adds
    assert weigh(costs, prefill_tokens=800.0, prefill_seqs=80.0, lost_share=0.5)[1] == pytest.approx(
        9.94, abs=0.1
    )


class FloorCosts(LinearCosts):
    def __init__(self, floor, per_token):
        super().__init__(prefill=per_token)
        object.__setattr__(self, "floor", floor)

    def prefill_seconds(self, num_tokens, num_seqs, context_tokens=0):
        return max(self.floor, self.prefill * num_tokens) if num_tokens > 0 else 0.0


def test_the_overlap_aware_action_takes_the_cheaper_that_fits():
    assert OverlapAwareAction(LinearCosts(swap=0.1)).choose(holder(0, 10, 3), pressured(), 0.0).action is SWAP
    dear = OverlapAwareAction(LinearCosts(swap=20.0))
    assert dear.choose(holder(0, 10, 3), pressured(), 0.0).action is PreemptionAction.RECOMPUTE
    full = dataclasses.replace(pressured(), num_host_free=2)
    cheap = OverlapAwareAction(LinearCosts(swap=0.1))
    assert cheap.choose(holder(0, 10, 3), full, 0.0).action is PreemptionAction.RECOMPUTE


class SteepCosts(LinearCosts):
    """Two blocks cost next to nothing, three more than any prefill."""

    def swap_in_seconds(self, num_blocks):
        return 1000.0 if num_blocks > 2 else 0.1 * num_blocks


def test_the_overlap_aware_action_copies_heads_where_it_is_told_to():
    def choose(swap, **changes):
        policy = OverlapAwareAction(LinearCosts(swap=swap), mixes=True)
        return policy.choose(holder(0, 10, 3), dataclasses.replace(pressured(), **changes), 0.0)

    assert choose(0.1).action is SWAP
    room_for_two = choose(0.1, num_host_free=2)
    assert (room_for_two.action, room_for_two.num_blocks) == (PreemptionAction.MIXED, 2)
    assert room_for_two.mixed_seconds < room_for_two.recompute_seconds
    assert room_for_two.copy_seconds == pytest.approx(0.2)
    # What holds the heads of others is not given up for the head of one more.
    assert choose(0.1, num_host_free=2, num_host_heads=2).action is RECOMPUTE
    # Swapping all is dear, but half a step hides two blocks.
    hidden = OverlapAwareAction(SteepCosts(), mixes=True).choose(holder(0, 10, 3), pressured(), 0.0)
    assert hidden.swap_seconds > hidden.recompute_seconds > hidden.mixed_seconds
    assert (hidden.action, hidden.num_blocks) == (PreemptionAction.MIXED, 2)
    leaving = dataclasses.replace(pressured(), num_leaving=MAX_STAGED_BLOCKS - 1)
    found = OverlapAwareAction(SteepCosts(), mixes=True).choose(holder(0, 10, 3), leaving, 0.0)
    assert (found.action, found.num_blocks) == (PreemptionAction.MIXED, 1)  # else the copy out would wait
    assert choose(20.0).action is RECOMPUTE
    assert choose(0.1, num_host_free=0).action is RECOMPUTE


# Plugged into a scheduler
