"""Swapped requests that come back while others decode, or change their mind and are prefilled."""

import contextlib
import dataclasses

import numpy as np
import pytest
from scheduler_helpers import NO_WATERMARK, LinearCosts, describe, make_request, make_scheduler, step

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import model_shape
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.roofline import RooflineCostModel
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.ledger import Ledger
from jaxllm.sched.policies import (
    GrowthReserve,
    OverlapAwareResume,
    ResumeAction,
    ResumeDecision,
    ResumeFirst,
    SwapIfItFits,
)
from jaxllm.sched.presets import adaptive, make_preset
from jaxllm.simulator.run import simulate
from jaxllm.types import CopyProgress, RequestStatus
from jaxllm.workloads import Trace


class Answer:
    """One decision for everybody."""

    def __init__(self, action):
        self.decision = ResumeDecision(action, swap_seconds=1.0, recompute_seconds=2.0)

    def choose(self, request, num_lost, copied_out_at, state, now):
        return self.decision


SWAP = dataclasses.replace(NO_WATERMARK, action=SwapIfItFits(), restore=ResumeFirst())
BACKGROUND = dataclasses.replace(SWAP, resume=Answer(ResumeAction.IN_BACKGROUND))


def swapped(policy=BACKGROUND, *, running=(4, 6), victim=(4, 6), num_gpu_blocks=3, ledger=None):
    """r1 has been swapped out for r0, both of `(prompt, new)` tokens in blocks of 4."""
    scheduler = make_scheduler(policy, ledger, num_gpu_blocks=num_gpu_blocks, num_host_blocks=8)
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
    assert step(scheduler) == "D r0"  # its third block is gone: r1 does not fit
    scheduler.finish(scheduler._state.live["r0"], "abort")
    scheduler.add(make_request(2, 1, max_new_tokens=8))
    out = scheduler.schedule(0.0)
    scheduler.check()
    assert describe(out) == "P r2[0:1]! ~r1"
    (load,) = out.load
    assert (victim.status, victim.block_ids) == (RequestStatus.SWAPPED, list(load.block_ids))
    for request in (scheduler._state.live["r2"],):
        request.output_token_ids.append(0)
    assert step(scheduler, arrived=()) == "D r2"
    assert scheduler.num_free_host_blocks == 8 - len(load.block_ids)
    assert step(scheduler, arrived={load.handle}) == "D r1 r2 >r1"
    assert scheduler.num_free_host_blocks == 8
    assert victim.status is RequestStatus.RUNNING


def test_nobody_waits_for_a_copy_alone_without_joining_it():
    scheduler = swapped()
    while "r0" in scheduler._state.live:
        step(scheduler)
    assert step(scheduler) == "D r1 >r1"  # nobody said that it has arrived


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
    assert later.joined == ()


def test_the_last_runner_that_needs_a_block_waits_for_a_copy():
    """r1's copy holds the blocks that r2 needs: r1 joins, so that one of them can be preempted."""
    scheduler = swapped(running=(4, 8), victim=(3, 6))
    scheduler.finish(scheduler._state.live["r0"], "abort")
    scheduler.add(make_request(2, 4, max_new_tokens=8))
    assert describe(scheduler.schedule(0.0)) == "P r2[0:4]! ~r1"
    scheduler._state.live["r2"].output_token_ids.append(0)
    seen = [step(scheduler) for _ in range(12)]
    joined = next(place for place, text in enumerate(seen) if ">r1" in text)
    assert seen[joined] in ("D r1 <r2 >r1", "D r2 <r1 >r1")


def test_a_copy_given_up_is_prefilled_and_recorded():
    ledger = Ledger()
    scheduler = swapped(dataclasses.replace(SWAP, resume=Answer(ResumeAction.RECOMPUTE)), ledger=ledger)
    handle = scheduler._state.live["r1"].host_handle
    while "r0" in scheduler._state.live:
        assert ">r1" not in step(scheduler)
    out = scheduler.schedule(0.0)
    assert describe(out) == "P r1[0:5]!"
    assert out.prefill[0].is_recompute
    assert scheduler.num_free_host_blocks == 8
    assert handle in out.discarded
    assert out.prefill[0].request.metrics.num_swaps == 0
    ledger.measured("r1", 2.5, out.step_id)
    ledger.close()
    (record,) = ledger.preemptions
    assert (record.action, record.resume_action, record.is_copied_back) == ("swap", "recompute", False)
    assert (record.predicted_seconds, record.regret_seconds) == (2.0, 1.5)


@pytest.mark.parametrize("action", [ResumeAction.LATER, ResumeAction.RECOMPUTE, ResumeAction.IN_BACKGROUND])
@pytest.mark.parametrize("prefill_first", [False, True])
def test_whatever_a_policy_answers_every_request_ends(action, prefill_first):
    restore = ResumeFirst(prefill_first=prefill_first)
    policy = dataclasses.replace(SWAP, resume=Answer(action), restore=restore)
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
        for request in [*out.decode, *(chunk.request for chunk in out.prefill)]:
            request.output_token_ids.append(0)
        scheduler.complete(out.step_id)
        for request in out.ending:
            scheduler.finish(request, "length")
    assert any("~" in text for text in seen)


def test_a_long_request_is_not_put_off_for_as_long_as_short_ones_arrive():
    """A return that costs something waits for more room than it takes, while short requests take that.

    What starts leaves more here than under the preset: there the request would not fit in the first place.
    """
    num_short, gap = 400, 0.0768
    trace = Trace(
        name="one long request, many short ones",
        seed=0,
        arrival_times=np.concatenate([[0.0], gap * np.arange(1, num_short + 1)]),
        prompt_lens=[102] + [8] * num_short,
        output_lens=[71] + [24] * num_short,
    )
    device = device_spec("A800-80GB-PCIe")
    device = dataclasses.replace(device, host_bandwidth=device.host_bandwidth * 0.187)
    costs = RooflineCostModel(model_shape("opt-13b"), device, block_size=16)
    config = SchedulerConfig(
        num_gpu_blocks=12,
        block_size=16,
        max_model_len=2048,
        max_num_seqs=256,
        max_num_batched_tokens=2560,
        num_host_blocks=64,
    )
    finished_at = {}
    for patience in (256.0, 1e9):
        resume = OverlapAwareResume(costs, output_share=1 / 12, patience=patience)
        policy = dataclasses.replace(adaptive(costs), admission=GrowthReserve(), resume=resume)
        result = simulate(trace, config, policy, costs, overlap_swaps=True)
        finished_at[patience] = float(result.finish_times[0])
    assert finished_at[256.0] < 0.7 * trace.arrival_times[-1] < finished_at[1e9]
