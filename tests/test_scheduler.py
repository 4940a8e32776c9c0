"""Scheduler: hand-computed traces, limits, and the life of a request."""

import dataclasses
import subprocess
import sys

import pytest
from scheduler_helpers import NO_WATERMARK, describe, make_request, make_scheduler, step

from jaxllm.errors import KVCacheError, RequestError
from jaxllm.sched.policies import (
    HostBoundAdmission,
    MoreUrgentFirst,
    PrefillFirst,
    SchedulerPolicy,
    SwapIfItFits,
    WatermarkAdmission,
)
from jaxllm.types import RequestStatus


def steps(scheduler, count):
    return [step(scheduler) for _ in range(count)]


# Prefill iterations


def test_prefill_then_decode_until_the_length_limit():
    scheduler = make_scheduler()
    first, second = make_request(0, 3, max_new_tokens=3), make_request(1, 4, max_new_tokens=2)
    scheduler.add(first)
    scheduler.add(second)
    assert step(scheduler) == "P r0[0:3]! r1[0:4]!"
    assert (first.block_ids, second.block_ids) == ([0], [1])
    assert (first.num_computed_tokens, first.num_tokens) == (3, 4)
    assert step(scheduler) == "D r0 r1"  # r1 fed position 4: its second block
    assert (first.num_computed_tokens, first.num_tokens) == (4, 5)
    assert second.is_finished
    assert second.finish_reason == "length"
    assert step(scheduler) == "D r0"
    assert step(scheduler) == "-"
    assert not scheduler.has_unfinished
    assert scheduler.num_free_blocks == 64


def test_step_ids_count_calls():
    scheduler = make_scheduler()
    assert [scheduler.schedule(0.0).step_id for _ in range(3)] == [0, 1, 2]


def test_a_long_first_prompt_is_chunked_and_its_last_chunk_shares_the_iteration():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    for index, length in enumerate([10, 2, 3]):
        scheduler.add(make_request(index, length))
    assert scheduler.schedule(0.0).num_prefill_tokens == 4
    assert scheduler.num_free_blocks == 64 - 3  # all its blocks at once
    scheduler.check()
    assert steps(scheduler, 4) == ["P r0[4:8]", "P r0[8:10]! r1[0:2]!", "P r2[0:3]!", "D r0 r1 r2"]


def test_a_prompt_beyond_the_remaining_budget_waits_whole():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    for index, length in enumerate([5, 4, 1]):
        scheduler.add(make_request(index, length))
    # r2 would fit after r0, but first come is first served.
    assert steps(scheduler, 2) == ["P r0[0:5]!", "P r1[0:4]! r2[0:1]!"]


def test_a_head_that_does_not_fit_the_pool_blocks_those_behind_it():
    scheduler = make_scheduler(num_gpu_blocks=4)
    scheduler.add(make_request(0, 7, max_new_tokens=2))
    scheduler.add(make_request(1, 12, max_new_tokens=2))
    scheduler.add(make_request(2, 1, max_new_tokens=1))
    assert steps(scheduler, 4) == ["P r0[0:7]!", "D r0", "P r1[0:12]! r2[0:1]!", "D r1"]


def test_slots_limit_admission_and_are_reused():
    scheduler = make_scheduler(max_num_seqs=2)
    requests = [make_request(index, 2, max_new_tokens=2 + index) for index in range(3)]
    for request in requests:
        scheduler.add(request)
    assert step(scheduler) == "P r0[0:2]! r1[0:2]!"
    assert [request.slot for request in requests] == [0, 1, None]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert step(scheduler) == "D r0 r1"
    assert step(scheduler) == "P r2[0:2]!"
    assert [request.slot for request in requests] == [None, 1, 0]


def test_max_prefill_seqs_limits_one_prefill_iteration():
    scheduler = make_scheduler(max_prefill_seqs=2)
    for index in range(3):
        scheduler.add(make_request(index, 2))
    assert steps(scheduler, 3) == ["P r0[0:2]! r1[0:2]!", "P r2[0:2]!", "D r0 r1 r2"]


def test_the_watermark_holds_back_a_request_while_others_run():
    scheduler = make_scheduler(SchedulerPolicy(admission=WatermarkAdmission(0.3)), num_gpu_blocks=10)
    scheduler.add(make_request(0, 16, max_new_tokens=3))  # 4 blocks, 6 left
    scheduler.add(make_request(1, 16, max_new_tokens=2))  # would leave 2, fewer than 3
    assert steps(scheduler, 4) == ["P r0[0:16]!", "D r0", "D r0", "P r1[0:16]!"]


def test_the_watermark_never_starves_a_request_that_is_alone():
    scheduler = make_scheduler(SchedulerPolicy(admission=WatermarkAdmission(0.99)), num_gpu_blocks=10)
    scheduler.add(make_request(0, 40, max_new_tokens=1))
    scheduler.add(make_request(1, 1, max_new_tokens=1))
    assert steps(scheduler, 2) == ["P r0[0:40]!", "P r1[0:1]!"]


def test_a_request_that_ends_with_its_prefill_never_decodes():
    scheduler = make_scheduler()
    scheduler.add(make_request(0, 4, max_new_tokens=1))
    assert steps(scheduler, 2) == ["P r0[0:4]!", "-"]


# Preemption


def test_the_latest_arrival_is_preempted_and_prefilled_again():
    scheduler = make_scheduler(num_gpu_blocks=3)
    first, second = make_request(0, 4, max_new_tokens=5), make_request(1, 3, max_new_tokens=3)
    scheduler.add(first)
    scheduler.add(second)
    assert steps(scheduler, 3) == ["P r0[0:4]! r1[0:3]!", "D r0 r1", "D r0 -r1"]
    # r1 held [0, 5), so it needs two blocks; one is free until r0 ends.
    assert (second.status, second.num_computed_tokens, second.block_ids, second.slot) == (
        RequestStatus.WAITING,
        0,
        [],
        None,
    )
    assert second.metrics.num_preemptions == 1
    assert steps(scheduler, 3) == ["D r0", "D r0", "P r1[0:5]!"]
    assert second.is_finished
    assert len(second.output_token_ids) == 3
    assert not scheduler.has_unfinished


def test_a_request_may_preempt_itself():
    scheduler = make_scheduler(num_gpu_blocks=2)
    scheduler.add(make_request(0, 2, max_new_tokens=3))
    scheduler.add(make_request(1, 4, max_new_tokens=2))
    assert steps(scheduler, 2) == ["P r0[0:2]! r1[0:4]!", "D r0 -r1"]


def test_a_preempted_request_goes_before_later_arrivals():
    scheduler = make_scheduler(num_gpu_blocks=3, max_num_seqs=2)
    for index in range(3):
        scheduler.add(make_request(index, 4, max_new_tokens=3))
    assert steps(scheduler, 4) == [
        "P r0[0:4]! r1[0:4]!",
        "D r0 -r1",
        "D r0",  # one block is free: r2 could start, but r1, which needs two, is first
        "P r1[0:5]! r2[0:4]!",
    ]


def test_several_victims_of_one_iteration():
    scheduler = make_scheduler(num_gpu_blocks=4)
    for index in range(4):
        scheduler.add(make_request(index, 4, max_new_tokens=3))
    # All four need a second block: r3's and r2's blocks serve r0 and r1.
    assert steps(scheduler, 2)[1] == "D r0 r1 -r3 -r2"


def test_blocks_of_one_token():
    scheduler = make_scheduler(num_gpu_blocks=5, block_size=1)
    scheduler.add(make_request(0, 2, max_new_tokens=4))
    scheduler.add(make_request(1, 2, max_new_tokens=3))
    assert steps(scheduler, 6) == [
        "P r0[0:2]! r1[0:2]!",
        "D r0 -r1",
        "D r0",
        "D r0",
        "P r1[0:3]!",
        "D r1",
    ]


def test_an_in_flight_token_delays_the_prefill_of_a_preempted_request():
    scheduler = make_scheduler(num_gpu_blocks=2)
    first, second = make_request(0, 4, max_new_tokens=2), make_request(1, 4, max_new_tokens=2)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.schedule(0.0)
    assert describe(scheduler.schedule(0.0)) == "D r0 -r1"
    assert scheduler.schedule(0.0).is_empty  # the pool is free, but r1's first token is not read yet
    scheduler.check()
    second.output_token_ids.append(5)
    assert describe(scheduler.schedule(0.0)) == "P r1[0:5]!"


def test_the_first_scheduled_time_survives_a_preemption():
    scheduler = make_scheduler(num_gpu_blocks=2)
    requests = [make_request(index, 4, max_new_tokens=2) for index in range(2)]
    for request in requests:
        scheduler.add(request)
    assert requests[0].metrics.first_scheduled_time is None
    trace = [step(scheduler, now=10.0 + i) for i in range(3)]
    assert trace == ["P r0[0:4]! r1[0:4]!", "D r0 -r1", "P r1[0:5]!"]
    assert [request.metrics.first_scheduled_time for request in requests] == [10.0, 10.0]


# Swapping

SWAP = dataclasses.replace(NO_WATERMARK, action=SwapIfItFits())


def test_a_swapped_request_goes_on_where_it_was():
    scheduler = make_scheduler(SWAP, num_gpu_blocks=3, num_host_blocks=2)
    first, second = make_request(0, 4, max_new_tokens=4), make_request(1, 3, max_new_tokens=4)
    scheduler.add(first)
    scheduler.add(second)
    assert steps(scheduler, 2) == ["P r0[0:4]! r1[0:3]!", "D r0 r1"]
    output = scheduler.schedule(0.0)  # r1 needs a second block
    assert describe(output) == "D r0 <r1"
    (swap,) = output.swap_out
    assert (swap.request, swap.handle, swap.block_ids) == (second, second.host_handle, (1,))
    assert (second.status, second.slot, second.block_ids) == (RequestStatus.SWAPPED, None, [])
    assert (second.num_computed_tokens, second.num_tokens) == (4, 5)
    assert (scheduler.num_swapped, scheduler.num_free_host_blocks) == (1, 1)
    assert (second.metrics.num_preemptions, second.metrics.num_swaps) == (1, 1)
    first.output_token_ids.append(0)
    assert step(scheduler) == "D r0"  # r1 needs two blocks, one is free
    output = scheduler.schedule(0.0)
    assert describe(output) == "D r1 >r1"
    assert [(swap.handle, len(swap.block_ids)) for swap in output.swap_in] == [(swap.handle, 1)]
    assert output.swap_in[0].block_ids == tuple(second.block_ids[:1])
    assert (second.host_handle, second.num_computed_tokens, second.num_tokens) == (None, 5, 6)
    assert (scheduler.num_swapped, scheduler.num_free_host_blocks) == (0, 1)  # its copy is under way
    scheduler.check()
    scheduler.complete(output.step_id)
    assert scheduler.num_free_host_blocks == 2


def test_what_does_not_fit_the_host_pool_is_dropped():
    scheduler = make_scheduler(SWAP, num_gpu_blocks=4, num_host_blocks=1)
    for index in range(4):
        scheduler.add(make_request(index, 4, max_new_tokens=3))
    assert steps(scheduler, 2)[1] == "D r0 r1 <r3 -r2"


def test_nothing_starts_before_what_is_swapped_is_back():
    scheduler = make_scheduler(SWAP, num_gpu_blocks=3, num_host_blocks=2)
    for index, length in enumerate([4, 4, 1]):
        scheduler.add(make_request(index, length, max_new_tokens=3))
    # r2 would fit beside r0. Once r1 is back, its block, a spare one and r1's next are all there are.
    assert steps(scheduler, 4) == ["P r0[0:4]! r1[0:4]! r2[0:1]!", "D r0 <r2 <r1", "D r0", "D r1 >r1"]


def test_an_in_flight_token_delays_a_swap_in():
    scheduler = make_scheduler(SWAP, num_gpu_blocks=2, num_host_blocks=2)
    first, second = make_request(0, 4, max_new_tokens=2), make_request(1, 4, max_new_tokens=2)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.schedule(0.0)
    assert describe(scheduler.schedule(0.0)) == "D r0 <r1"
    assert scheduler.schedule(0.0).is_empty
    second.output_token_ids.append(5)
    assert describe(scheduler.schedule(0.0)) == "D r1 >r1"


def test_an_aborted_swapped_request_is_discarded_with_the_next_step():
    scheduler = make_scheduler(SWAP, num_gpu_blocks=2, num_host_blocks=2)
    first, second = make_request(0, 4, max_new_tokens=5), make_request(1, 4, max_new_tokens=2)
    scheduler.add(first)
    scheduler.add(second)
    assert steps(scheduler, 2)[1] == "D r0 <r1"
    handle = second.host_handle
    scheduler.finish(second, "abort")
    scheduler.check()
    assert (second.host_handle, scheduler.num_free_host_blocks) == (None, 2)
    assert scheduler.schedule(0.0).discarded == (handle,)
    assert scheduler.schedule(0.0).discarded == ()


class NeverSwapIn(PrefillFirst):
    def swaps_in(self, waiting, swapped, now):
        return False


def test_no_policy_leaves_the_only_set_of_requests_alone():
    policy = dataclasses.replace(SWAP, restore=NeverSwapIn())
    scheduler = make_scheduler(policy, num_gpu_blocks=2, num_host_blocks=2)
    scheduler.add(make_request(0, 4, max_new_tokens=2))
    scheduler.add(make_request(1, 4, max_new_tokens=2))
    assert steps(scheduler, 3) == ["P r0[0:4]! r1[0:4]!", "D r0 <r1", "D r1 >r1"]


def test_the_host_bound_counts_a_prompt_that_is_partly_prefilled():
    policy = dataclasses.replace(SWAP, admission=HostBoundAdmission(0.0))
    scheduler = make_scheduler(policy, num_gpu_blocks=20, num_host_blocks=10, max_num_batched_tokens=8)
    scheduler.add(make_request(0, 12, max_new_tokens=21))  # 8 blocks at its end
    scheduler.add(make_request(1, 4, max_new_tokens=21))  # 6
    assert steps(scheduler, 3) == ["P r0[0:8]", "P r0[8:12]!", "D r0"]


def test_who_joins_a_split_prompt_leaves_the_next_blocks_of_the_running_ones():
    policy = dataclasses.replace(NO_WATERMARK, restore=MoreUrgentFirst())
    scheduler = make_scheduler(policy, num_gpu_blocks=4, max_num_batched_tokens=4)
    scheduler.add(make_request(0, 4))  # needs a second block to decode
    assert step(scheduler) == "P r0[0:4]!"
    scheduler.add(make_request(1, 6))
    scheduler.add(make_request(2, 2))
    assert steps(scheduler, 3) == ["P r1[0:4]", "P r1[4:6]!", "D r0 r1"]


# The end of a request


def test_a_request_at_its_length_limit_keeps_its_blocks_until_the_next_iteration():
    scheduler = make_scheduler()
    request = make_request(0, 4, max_new_tokens=2)
    scheduler.add(request)
    scheduler.schedule(0.0)
    output = scheduler.schedule(0.0)
    assert describe(output) == "D r0"
    assert (request.num_tokens, request.block_ids, request.slot) == (6, [0, 1], 0)
    scheduler.check()
    assert scheduler.schedule(0.0).is_empty
    assert (request.status, request.block_ids, request.slot) == (RequestStatus.RUNNING, [], None)
    assert scheduler.num_free_blocks == 64
    assert scheduler.has_unfinished
    scheduler.check()
    scheduler.finish(request, "length")
    assert not scheduler.has_unfinished
    scheduler.check()


def test_finish_works_in_every_state():
    scheduler = make_scheduler(max_num_batched_tokens=4, max_num_seqs=4)
    running, ending, partial, waiting = (
        make_request(0, 2),
        make_request(1, 2, max_new_tokens=1),
        make_request(2, 9),
        make_request(3, 1),
    )
    for request in (running, ending, partial, waiting):
        scheduler.add(request)
    scheduler.schedule(0.0)
    scheduler.finish(ending, "stop", stop_reason=7)
    scheduler.check()
    assert describe(scheduler.schedule(0.0)) == "P r2[0:4]"
    for request in (partial, waiting, running):
        scheduler.finish(request, "abort")
        scheduler.check()
        assert (request.status, request.finish_reason) == (RequestStatus.FINISHED, "abort")
        assert (request.block_ids, request.slot) == ([], None)
    assert (ending.finish_reason, ending.stop_reason) == ("stop", 7)
    assert (scheduler.num_free_blocks, scheduler.num_running, scheduler.num_waiting) == (64, 0, 0)
    assert scheduler.schedule(0.0).is_empty


def test_finishing_twice_or_a_stranger_is_an_error():
    scheduler = make_scheduler()
    request = make_request(0, 2)
    with pytest.raises(RequestError, match="'r0': it was never added"):
        scheduler.finish(request, "abort")
    scheduler.add(request)
    with pytest.raises(RequestError, match="never added"):
        scheduler.finish(make_request(0, 2), "abort")  # the same id is not the same request
    scheduler.finish(request, "abort")
    with pytest.raises(RequestError, match="'r0': it has already finished"):
        scheduler.finish(request, "abort")


def test_a_live_id_cannot_be_added_again_but_a_finished_one_can():
    scheduler = make_scheduler()
    request = make_request(0, 2)
    scheduler.add(request)
    with pytest.raises(RequestError, match="'r0' is in use"):
        scheduler.add(make_request(0, 3))
    scheduler.finish(request, "abort")
    with pytest.raises(RequestError, match="scheduled before"):
        scheduler.add(request)
    scheduler.add(make_request(0, 3))


def test_the_largest_request_that_fits_runs_to_its_end():
    scheduler = make_scheduler(num_gpu_blocks=10)
    request = make_request(0, 30, max_new_tokens=11)  # 41 tokens, of which 40 need KV
    scheduler.add(request)
    assert steps(scheduler, 12) == ["P r0[0:30]!", *["D r0"] * 10, "-"]
    assert request.is_finished


# Invariants and imports


def _leak_a_block(scheduler, request):
    request.block_ids.pop()


def _drop_a_request(scheduler, request):
    scheduler._state.running.requests.remove(request)


def _share_a_slot(scheduler, request):
    scheduler._state.free_slots[0] = request.slot


def _queue_twice(scheduler, request):
    scheduler._state.waiting.add(request)


def _forget_growth(scheduler, request):
    for bucket in scheduler._state.running._growing:
        bucket.clear()


def _skip_a_position(scheduler, request):
    request.num_tokens += 1


@pytest.mark.parametrize(
    "corrupt",
    [_leak_a_block, _drop_a_request, _share_a_slot, _queue_twice, _forget_growth, _skip_a_position],
)
def test_check_finds_corruption(corrupt):
    scheduler = make_scheduler(NO_WATERMARK)
    request = make_request(0, 4)
    scheduler.add(request)
    scheduler.schedule(0.0)
    scheduler.check()
    corrupt(scheduler, request)
    with pytest.raises(KVCacheError, match="invariant broken"):
        scheduler.check()


def test_the_scheduler_runs_without_jax():
    code = "import sys; import jaxllm.sched.scheduler; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
