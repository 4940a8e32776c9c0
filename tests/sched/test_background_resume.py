"""Swapped requests that come back while others compute."""

import contextlib
import dataclasses

import pytest
from scheduler_helpers import V1, LinearCosts, describe, make_request, make_scheduler, step, take

from jaxllm.errors import ConfigError
from jaxllm.sched.applying import Iteration
from jaxllm.sched.policies import (
    Decision,
    MixedIterations,
    PreemptionAction,
    ResumeAction,
    ResumeDecision,
    SeparateIterations,
    SwapIfItFits,
)
from jaxllm.sched.presets import make_preset
from jaxllm.types import CopyProgress, RequestStatus


class Answer:
    """One decision for everybody."""

    def __init__(self, action):
        self.decision = ResumeDecision(action, swap_seconds=1.0)

    def choose(self, request, copied_out_at, state, now):
        return self.decision


SWAP = dataclasses.replace(V1, action=SwapIfItFits())
BACKGROUND = dataclasses.replace(SWAP, resume=Answer(ResumeAction.IN_BACKGROUND))


def swapped(policy=BACKGROUND, *, running=(4, 6), victim=(4, 6), num_gpu_blocks=3):
    """r1 has been swapped out for r0, both of `(prompt, new)` tokens in blocks of 4."""
    scheduler = make_scheduler(policy, num_gpu_blocks=num_gpu_blocks, num_host_blocks=8)
    for index, (prompt, new) in enumerate((running, victim)):
        scheduler.add(make_request(index, prompt, max_new_tokens=new))
    trace = [step(scheduler)]
    while not scheduler.num_swapped:
        trace.append(step(scheduler))
    assert "<r1" in trace[-1]
    return scheduler


def test_a_request_joins_when_its_copy_has_arrived():
    scheduler = swapped(running=(4, 8), victim=(3, 6), num_gpu_blocks=3)
    victim = scheduler._state.live["r1"]
    assert step(scheduler) == "r0"  # its third block is gone: r1 does not fit
    scheduler.finish(scheduler._state.live["r0"], "abort")
    scheduler.add(make_request(2, 1, max_new_tokens=8))
    out = scheduler.schedule(0.0)
    scheduler.check()
    assert describe(out) == "| r2[0:1]! ~r1"
    (load,) = out.load
    assert (victim.status, victim.block_ids) == (RequestStatus.SWAPPED, list(load.block_ids))
    take(scheduler, out)
    assert step(scheduler, arrived=()) == "r2"
    assert scheduler.num_free_host_blocks == 8 - len(load.block_ids)
    assert step(scheduler, arrived={load.handle}) == "r1 r2 >r1"
    assert scheduler.num_free_host_blocks == 8
    assert victim.status is RequestStatus.RUNNING


def test_nobody_waits_for_a_copy_alone_without_joining_it():
    scheduler = swapped()
    while "r0" in scheduler._state.live:
        step(scheduler)
    assert step(scheduler) == "r1 >r1"  # nobody said that it has arrived


def test_an_abort_in_mid_copy_frees_everything():
    scheduler = swapped(running=(4, 8), victim=(3, 6))
    scheduler.finish(scheduler._state.live["r0"], "abort")
    scheduler.add(make_request(2, 4, max_new_tokens=8))
    out = scheduler.schedule(0.0)
    (load,) = out.load
    scheduler.finish(load.request, "abort")
    scheduler.check()
    assert scheduler.num_free_host_blocks == 8
    scheduler._state.live["r2"].output_token_ids.append(0)
    later = scheduler.schedule(0.0, CopyProgress({load.handle}))
    assert later.discarded == (load.handle,)
    assert set(later.dropped) == {place.piece for place in load.host_blocks}
    assert later.joined == ()


def test_the_last_runner_that_needs_a_block_waits_for_a_copy():
    """r1's copy holds the blocks that r2 needs: r1 joins, so that one of them can be preempted."""
    scheduler = swapped(running=(4, 8), victim=(3, 6))
    scheduler.finish(scheduler._state.live["r0"], "abort")
    scheduler.add(make_request(2, 4, max_new_tokens=8))
    assert describe(scheduler.schedule(0.0)) == "| r2[0:4]! ~r1"
    scheduler._state.live["r2"].output_token_ids.append(0)
    seen = [step(scheduler) for _ in range(12)]
    joined = next(place for place, text in enumerate(seen) if ">r1" in text)
    assert seen[joined] in ("r1 <r2 >r1", "r2 <r1 >r1")


@pytest.mark.parametrize("action", list(ResumeAction))
@pytest.mark.parametrize("iterations", [MixedIterations(), SeparateIterations()])
def test_whatever_a_policy_answers_every_request_ends(action, iterations):
    policy = dataclasses.replace(SWAP, resume=Answer(action), iterations=iterations)
    scheduler = make_scheduler(policy, num_gpu_blocks=4, num_host_blocks=8)
    for index in range(4):
        scheduler.add(make_request(index, 4, max_new_tokens=8))
    for _ in range(100):
        if not scheduler.has_unfinished:
            break
        assert step(scheduler) != "-"
    assert not scheduler.has_unfinished
    assert scheduler.num_free_host_blocks == 8


def test_a_wrong_answer_is_an_error_and_loses_nobody():
    policy = dataclasses.replace(SWAP, resume=Answer(ResumeAction.AT_ONCE))
    policy.resume.decision = "at once"
    scheduler = swapped(policy)
    while scheduler.num_running:
        with contextlib.suppress(ConfigError):
            step(scheduler)
    with pytest.raises(ConfigError, match="answered 'at once', which is not a ResumeDecision"):
        step(scheduler)
    scheduler.check()
    policy.resume.decision = ResumeDecision(ResumeAction.AT_ONCE)
    while scheduler.has_unfinished:
        assert step(scheduler) != "-"


def test_the_default_preset_brings_requests_back_beside_steps():
    costs = LinearCosts(prefill=9.0, decode=1.0, swap=3.0)
    policy = make_preset("adaptive", costs)
    scheduler = make_scheduler(policy, num_gpu_blocks=12, num_host_blocks=24)
    for index in range(8):
        scheduler.add(make_request(index, 4, max_new_tokens=12, arrival_time=0.0))
    now, due, seen = 0.0, {}, []
    while scheduler.has_unfinished:
        now += 2.0
        out = scheduler.schedule(now, CopyProgress([handle for handle, at in due.items() if at <= now]))
        scheduler.check()
        due.update({swap.handle: now + 3.0 * len(swap.block_ids) for swap in out.load})
        for swap in out.joined:
            due.pop(swap.handle)
        seen.append(describe(out))
        take(scheduler, out)
    assert any("~" in text for text in seen)


def test_nobody_is_put_off_for_ever_while_others_start():
    policy = dataclasses.replace(SWAP, resume=Answer(ResumeAction.LATER), patience=10)
    scheduler = swapped(policy, running=(4, 40), victim=(4, 40), num_gpu_blocks=12)
    for index in range(2, 40):
        scheduler.add(make_request(index, 3, max_new_tokens=2))
    seen = [step(scheduler) for _ in range(40)]
    resumed = next(place for place, text in enumerate(seen) if ">r1" in text)
    assert sum(text.count("[0:") for text in seen[:resumed]) == 10 - 1  # it was preempted once


def test_a_prompt_whose_blocks_a_load_holds_waits_for_that():
    """Both were preempted in mid-prompt, and come back in the background."""
    scheduler = make_scheduler(BACKGROUND, block_size=1, num_gpu_blocks=12, num_host_blocks=12)
    first, second = (make_request(index, 8, max_new_tokens=3) for index in range(2))
    for request, num_computed in ((first, 2), (second, 5)):
        scheduler.add(request)
        state = scheduler._state
        state.take_places(request, [])
        state.grow(request, num_computed)
        state.activate(request)
        request.num_computed_tokens = num_computed
        request.metrics.first_scheduled_time = 0.0
    for request in (first, second):
        Iteration(state, None, 0, 0.0).preempt(request, Decision(PreemptionAction.SWAP))
    scheduler.add(make_request(2, 1, max_new_tokens=9))
    requests = dict(scheduler._state.live)
    for now in range(40):
        loads = [handle for handle, swap in state.loading.items() if swap.request is first]
        step(scheduler, float(now), arrived=loads if now > 1 else ())
    assert all(request.is_finished for request in requests.values())


def preempted(*requests, **limits):
    """A scheduler that has prefilled these together, and swapped them out."""
    scheduler = make_scheduler(dataclasses.replace(SWAP, patience=1), num_host_blocks=12, **limits)
    for request in requests:
        scheduler.add(request)
    step(scheduler)
    for request in requests:
        Iteration(scheduler._state, None, 0, 0.0).preempt(request, Decision(PreemptionAction.SWAP))
    return scheduler


def test_a_swapped_request_that_sits_out_holds_up_no_other():
    scheduler = preempted(make_request(0, 4), make_request(1, 4))
    scheduler.sit_out(["r0"])
    assert step(scheduler) == "r1 >r1"
    scheduler.sit_out([])
    assert step(scheduler) == "r0 r1 >r0"


def test_who_is_reserved_room_does_not_count_on_blocks_that_are_computed_after_its_copy():
    scheduler = preempted(make_request(0, 9), num_gpu_blocks=17, block_size=1, enable_prefix_caching=True)
    state, other = scheduler._state, make_request(1, 8, max_new_tokens=2)
    state.pool.forget_names()
    scheduler.add(other)
    state.start(other)
    state.begin(other)  # computes what the first has on the host, in blocks of its own
    assert [step(scheduler), step(scheduler)] == ["| r1[0:8]!", "r0 r1 >r0"]
