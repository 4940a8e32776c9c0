"""Scheduler: hand-computed traces, limits, and the life of a request.

Without another policy it decides as today's vLLM: mixed iterations, first come first served.
"""

import dataclasses
import subprocess
import sys

import pytest
from scheduler_helpers import V1, describe, make_request, make_scheduler, step, take

from jaxllm.errors import ConfigError, KVCacheError, RequestError
from jaxllm.sched.policies import (
    PriorityClasses,
    ResumeFirst,
    SchedulerPolicy,
    SeparateIterations,
    SwapIfItFits,
    WatermarkAdmission,
)
from jaxllm.types import RequestStatus


def steps(scheduler, count):
    return [step(scheduler) for _ in range(count)]


# Mixed iterations


def test_prompts_then_decodes_until_the_length_limit():
    scheduler = make_scheduler()
    first, second = make_request(0, 3, max_new_tokens=3), make_request(1, 4, max_new_tokens=2)
    scheduler.add(first)
    scheduler.add(second)
    assert step(scheduler) == "| r0[0:3]! r1[0:4]!"
    assert (first.block_ids, second.block_ids) == ([0], [1])
    assert (first.num_computed_tokens, first.num_tokens) == (3, 4)
    assert step(scheduler) == "r0 r1"  # r1 fed position 4: its second block
    assert (first.num_computed_tokens, first.num_tokens) == (4, 5)
    assert second.is_finished
    assert second.finish_reason == "length"
    assert step(scheduler) == "r0"
    assert step(scheduler) == "-"
    assert not scheduler.has_unfinished
    assert scheduler.num_free_blocks == 64


def test_step_ids_count_calls():
    scheduler = make_scheduler()
    assert [scheduler.schedule(0.0).step_id for _ in range(3)] == [0, 1, 2]


def test_a_prompt_rides_in_chunks_beside_the_decodes_and_takes_its_blocks_piece_by_piece():
    scheduler = make_scheduler(max_num_batched_tokens=4, max_num_seqs=3)
    scheduler.add(make_request(0, 2))
    assert step(scheduler) == "| r0[0:2]!"
    scheduler.add(make_request(1, 7))
    scheduler.add(make_request(2, 1))
    # One of four tokens decodes r0, and then two decode r0 and r1.
    assert step(scheduler) == "r0 | r1[0:3]"
    assert scheduler.num_free_blocks == 64 - 2
    assert steps(scheduler, 3) == ["r0 | r1[3:6]", "r0 | r1[6:7]! r2[0:1]!", "r0 r1 r2"]
    assert scheduler.num_free_blocks == 64 - 2 - 2 - 1


def test_the_budget_counts_all_tokens_and_the_last_prompt_is_cut():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    for index, length in enumerate([5, 4, 1]):
        scheduler.add(make_request(index, length))
    assert steps(scheduler, 3) == ["| r0[0:5]! r1[0:3]", "r0 | r1[3:4]! r2[0:1]!", "r0 r1 r2"]


def test_a_head_that_does_not_fit_the_pool_blocks_those_behind_it():
    scheduler = make_scheduler(num_gpu_blocks=4)
    scheduler.add(make_request(0, 7, max_new_tokens=2))
    scheduler.add(make_request(1, 12, max_new_tokens=2))
    scheduler.add(make_request(2, 1, max_new_tokens=1))
    assert steps(scheduler, 4) == ["| r0[0:7]!", "r0", "| r1[0:12]! r2[0:1]!", "r1"]


def test_a_prompt_starts_only_if_all_of_it_fits_and_what_it_will_need_is_not_given_away():
    scheduler = make_scheduler(num_gpu_blocks=4, max_num_batched_tokens=8, max_num_seqs=4)
    scheduler.add(make_request(0, 12, max_new_tokens=2))
    assert step(scheduler) == "| r0[0:8]"
    assert scheduler.num_free_blocks == 2
    scheduler.add(make_request(1, 5))  # two blocks are free, and one is r0's
    scheduler.add(make_request(2, 2, max_new_tokens=1))
    assert step(scheduler) == "| r0[8:12]!"
    assert step(scheduler) == "r0"  # takes the last block


def test_slots_limit_admission_and_are_reused():
    scheduler = make_scheduler(max_num_seqs=2)
    requests = [make_request(index, 2, max_new_tokens=2 + index) for index in range(3)]
    for request in requests:
        scheduler.add(request)
    assert step(scheduler) == "| r0[0:2]! r1[0:2]!"
    assert [request.slot for request in requests] == [0, 1, None]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert step(scheduler) == "r0 r1"
    assert step(scheduler) == "r1 | r2[0:2]!"
    assert [request.slot for request in requests] == [None, None, 0]


def test_max_prefill_seqs_limits_the_chunks_of_one_iteration():
    scheduler = make_scheduler(max_prefill_seqs=2)
    for index in range(3):
        scheduler.add(make_request(index, 2))
    assert steps(scheduler, 3) == ["| r0[0:2]! r1[0:2]!", "r0 r1 | r2[0:2]!", "r0 r1 r2"]


def test_the_watermark_holds_back_a_request_while_others_run():
    scheduler = make_scheduler(SchedulerPolicy(admission=WatermarkAdmission(0.3)), num_gpu_blocks=10)
    scheduler.add(make_request(0, 16, max_new_tokens=3))  # 4 blocks, 6 left
    scheduler.add(make_request(1, 16, max_new_tokens=2))  # would leave 2, fewer than 3
    assert steps(scheduler, 4) == ["| r0[0:16]!", "r0", "r0", "| r1[0:16]!"]


def test_the_watermark_never_starves_a_request_that_is_alone():
    scheduler = make_scheduler(SchedulerPolicy(admission=WatermarkAdmission(0.99)), num_gpu_blocks=10)
    scheduler.add(make_request(0, 40, max_new_tokens=1))
    scheduler.add(make_request(1, 1, max_new_tokens=1))
    assert steps(scheduler, 2) == ["| r0[0:40]!", "| r1[0:1]!"]


def test_a_request_that_ends_with_its_prefill_never_decodes():
    scheduler = make_scheduler()
    scheduler.add(make_request(0, 4, max_new_tokens=1))
    assert steps(scheduler, 2) == ["| r0[0:4]!", "-"]


def test_separate_iterations_prefill_or_decode():
    policy = SchedulerPolicy(iterations=SeparateIterations())
    scheduler = make_scheduler(policy, max_num_batched_tokens=8)
    for index, length in enumerate([5, 4, 10]):
        scheduler.add(make_request(index, length, max_new_tokens=9))
    # Only an iteration's first prompt is cut, and it goes on at once.
    assert steps(scheduler, 5) == ["| r0[0:5]!", "| r1[0:4]!", "| r2[0:8]", "| r2[8:10]!", "r0 r1 r2"]


# Cutting prompts for programs


def cut(decodes, prompt, sizes, behind=0):
    """Prompt tokens computed beside so many decodes, with another prompt of `behind` tokens waiting."""
    limits = {"max_num_batched_tokens": sizes[-1], "program_sizes": sizes, "max_num_seqs": 9}
    scheduler = make_scheduler(**limits)
    for index in range(decodes):
        scheduler.add(make_request(index, 1))
    if decodes:
        step(scheduler)
    for index, length in enumerate((prompt, behind) if behind else (prompt,), decodes):
        scheduler.add(make_request(index, length))
    output = scheduler.schedule(0.0)
    scheduler.check()
    assert len(output.decode) == decodes
    return output.num_prefill_tokens


@pytest.mark.parametrize(
    ("decodes", "prompt", "computed"),
    [
        (8, 24, 24),  # 32 rows
        (8, 21, 21),  # 29 of 32 are full enough
        (8, 40, 24),  # 32, then 8 + 16 of 32, instead of 48 of 64
        (8, 50, 50),  # 58 of 64
        (0, 33, 32),  # 32, then 1 of 8
        (0, 45, 45),  # 32 and 32 would be no less than 64
        (8, 3, 3),  # no smaller program has room for more than the decodes
        (0, 90, 64),  # the budget
    ],
)
def test_prompts_are_cut_to_fill_a_program_where_that_computes_less_in_vain(decodes, prompt, computed):
    assert cut(decodes, prompt, (8, 32, 64)) == computed


def test_who_waits_behind_fills_the_next_program():
    scheduler = make_scheduler(max_num_batched_tokens=64, program_sizes=(32, 64), max_prefill_seqs=1)
    for index in range(2):
        scheduler.add(make_request(index, 45))
    assert steps(scheduler, 3) == ["| r0[0:32]", "| r0[32:45]!", "r0 | r1[0:31]"]


# Preemption


def test_the_latest_arrival_is_preempted_and_prefilled_again():
    scheduler = make_scheduler(num_gpu_blocks=3)
    first, second = make_request(0, 4, max_new_tokens=5), make_request(1, 3, max_new_tokens=3)
    scheduler.add(first)
    scheduler.add(second)
    assert steps(scheduler, 3) == ["| r0[0:4]! r1[0:3]!", "r0 r1", "r0 -r1"]
    # r1 held [0, 5), so it needs two blocks; one is free until r0 ends.
    assert (second.status, second.num_computed_tokens, second.block_ids, second.slot) == (
        RequestStatus.WAITING,
        0,
        [],
        None,
    )
    assert second.metrics.num_preemptions == 1
    assert steps(scheduler, 2) == ["r0", "r0"]
    output = scheduler.schedule(0.0)
    assert describe(output) == "| r1[0:5]!"
    assert output.prefill[0].num_recomputed == 4  # its newest token had not been computed
    take(scheduler, output)
    assert second.is_finished
    assert len(second.output_token_ids) == 3
    assert not scheduler.has_unfinished


def test_a_request_may_preempt_itself():
    scheduler = make_scheduler(num_gpu_blocks=2)
    scheduler.add(make_request(0, 2, max_new_tokens=3))
    scheduler.add(make_request(1, 4, max_new_tokens=2))
    assert steps(scheduler, 2) == ["| r0[0:2]! r1[0:4]!", "r0 -r1"]


def test_a_prompt_under_way_is_a_victim_like_any_other():
    scheduler = make_scheduler(num_gpu_blocks=4, max_num_batched_tokens=5, max_num_seqs=4)
    scheduler.add(make_request(0, 3, max_new_tokens=10))
    assert step(scheduler) == "| r0[0:3]!"
    prompt = make_request(1, 12, max_new_tokens=2)
    scheduler.add(prompt)
    assert steps(scheduler, 2) == ["r0 | r1[0:4]", "r0 | r1[4:8]"]
    # r0 has two blocks and r1 two; r0 needs no more yet, but r1 does.
    assert (scheduler.num_free_blocks, step(scheduler)) == (0, "r0 -r1")
    assert (prompt.num_computed_tokens, prompt.status) == (0, RequestStatus.WAITING)
    scheduler.finish(scheduler._state.live["r0"], "abort")
    output = scheduler.schedule(0.0)
    assert describe(output) == "| r1[0:5]"
    assert output.prefill[0].num_recomputed == 5


def test_a_preempted_request_goes_before_later_arrivals():
    scheduler = make_scheduler(num_gpu_blocks=3, max_num_seqs=2)
    for index in range(3):
        scheduler.add(make_request(index, 4, max_new_tokens=3))
    assert steps(scheduler, 4) == [
        "| r0[0:4]! r1[0:4]!",
        "r0 -r1",
        "r0",  # one block is free: r2 could start, but r1, which needs two, is first
        "| r1[0:5]! r2[0:4]!",
    ]


def test_several_victims_of_one_iteration():
    scheduler = make_scheduler(num_gpu_blocks=4)
    for index in range(4):
        scheduler.add(make_request(index, 4, max_new_tokens=3))
    # All four need a second block: r3's and r2's blocks serve r0 and r1.
    assert steps(scheduler, 2)[1] == "r0 r1 -r3 -r2"


def test_blocks_of_one_token():
    scheduler = make_scheduler(num_gpu_blocks=5, block_size=1)
    scheduler.add(make_request(0, 2, max_new_tokens=4))
    scheduler.add(make_request(1, 2, max_new_tokens=3))
    assert steps(scheduler, 6) == ["| r0[0:2]! r1[0:2]!", "r0 -r1", "r0", "r0", "| r1[0:3]!", "r1"]


def test_an_in_flight_token_delays_the_prefill_of_a_preempted_request():
    scheduler = make_scheduler(num_gpu_blocks=2)
    first, second = make_request(0, 4, max_new_tokens=2), make_request(1, 4, max_new_tokens=2)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.schedule(0.0)
    assert describe(scheduler.schedule(0.0)) == "r0 -r1"
    assert scheduler.schedule(0.0).is_empty  # the pool is free, but r1's first token is not read yet
    scheduler.check()
    second.output_token_ids.append(5)
    assert describe(scheduler.schedule(0.0)) == "| r1[0:5]!"


def test_the_first_scheduled_time_survives_a_preemption():
    scheduler = make_scheduler(num_gpu_blocks=2)
    requests = [make_request(index, 4, max_new_tokens=2) for index in range(2)]
    for request in requests:
        scheduler.add(request)
    assert requests[0].metrics.first_scheduled_time is None
    trace = [step(scheduler, now=10.0 + i) for i in range(3)]
    assert trace == ["| r0[0:4]! r1[0:4]!", "r0 -r1", "| r1[0:5]!"]
    assert [request.metrics.first_scheduled_time for request in requests] == [10.0, 10.0]


# Swapping

SWAP = dataclasses.replace(V1, action=SwapIfItFits())


def test_a_swapped_request_goes_on_where_it_was():
    scheduler = make_scheduler(SWAP, num_gpu_blocks=3, num_host_blocks=2)
    first, second = make_request(0, 4, max_new_tokens=4), make_request(1, 3, max_new_tokens=4)
    scheduler.add(first)
    scheduler.add(second)
    assert steps(scheduler, 2) == ["| r0[0:4]! r1[0:3]!", "r0 r1"]
    output = scheduler.schedule(0.0)  # r1 needs a second block
    assert describe(output) == "r0 <r1"
    (swap,) = output.swap_out
    assert (swap.request, swap.block_ids, second.host_blocks) == (second, (1,), [(swap.handle, 0, 0)])
    assert (second.status, second.slot, second.block_ids) == (RequestStatus.SWAPPED, None, [])
    assert (second.num_computed_tokens, second.num_tokens) == (4, 5)
    assert (scheduler.num_swapped, scheduler.num_free_host_blocks) == (1, 1)
    assert (second.metrics.num_preemptions, second.metrics.num_swaps) == (1, 1)
    first.output_token_ids.append(0)
    assert step(scheduler) == "r0"  # r1 needs two blocks, one is free
    output = scheduler.schedule(0.0)
    assert describe(output) == "r1 >r1"
    assert [(back.host_blocks, len(back.block_ids)) for back in output.swap_in] == [
        (((swap.handle, 0, 0),), 1)
    ]
    assert output.swap_in[0].block_ids == tuple(second.block_ids[:1])
    assert (second.host_blocks, second.num_computed_tokens, second.num_tokens) == ([], 5, 6)
    assert (scheduler.num_swapped, scheduler.num_free_host_blocks) == (0, 1)  # its copy is under way
    scheduler.check()
    scheduler.complete(output.step_id)
    assert scheduler.num_free_host_blocks == 2


def test_a_swapped_prompt_goes_on_where_it_was():
    scheduler = make_scheduler(
        SWAP, num_gpu_blocks=4, num_host_blocks=2, max_num_batched_tokens=5, max_num_seqs=4
    )
    scheduler.add(make_request(0, 3, max_new_tokens=3))
    assert step(scheduler) == "| r0[0:3]!"
    prompt = make_request(1, 12, max_new_tokens=2)
    scheduler.add(prompt)
    scheduler.add(make_request(2, 1, max_new_tokens=1))
    assert steps(scheduler, 1) == ["r0 | r1[0:4]"]
    scheduler.finish(scheduler._state.live["r2"], "abort")
    assert step(scheduler) == "r0 | r1[4:8]"
    assert step(scheduler) == "| r1[8:12]!"


def test_a_swapped_prompt_comes_back_with_its_next_chunk():
    policy = dataclasses.replace(SWAP, restore=ResumeFirst())
    scheduler = make_scheduler(
        policy, num_gpu_blocks=4, num_host_blocks=2, max_num_batched_tokens=5, max_num_seqs=4
    )
    scheduler.add(make_request(0, 3, max_new_tokens=4))
    assert step(scheduler) == "| r0[0:3]!"
    prompt = make_request(1, 12, max_new_tokens=2)
    scheduler.add(prompt)
    assert steps(scheduler, 3) == ["r0 | r1[0:4]", "r0 | r1[4:8]", "r0 <r1"]
    assert (prompt.status, prompt.num_computed_tokens, scheduler.num_free_host_blocks) == (
        RequestStatus.SWAPPED,
        8,
        0,
    )
    output = scheduler.schedule(0.0)
    scheduler.check()
    assert describe(output) == "| r1[8:12]! >r1"
    assert output.prefill[0].is_first
    assert output.prefill[0].num_recomputed == 0


def test_what_does_not_fit_the_host_pool_is_dropped():
    scheduler = make_scheduler(SWAP, num_gpu_blocks=4, num_host_blocks=1)
    for index in range(4):
        scheduler.add(make_request(index, 4, max_new_tokens=3))
    assert steps(scheduler, 2)[1] == "r0 r1 <r3 -r2"


def test_an_in_flight_token_delays_a_swap_in():
    scheduler = make_scheduler(SWAP, num_gpu_blocks=2, num_host_blocks=2)
    first, second = make_request(0, 4, max_new_tokens=2), make_request(1, 4, max_new_tokens=2)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.schedule(0.0)
    assert describe(scheduler.schedule(0.0)) == "r0 <r1"
    assert scheduler.schedule(0.0).is_empty
    second.output_token_ids.append(5)
    assert describe(scheduler.schedule(0.0)) == "r1 >r1"


def test_an_aborted_swapped_request_is_discarded_with_the_next_step():
    scheduler = make_scheduler(SWAP, num_gpu_blocks=2, num_host_blocks=2)
    first, second = make_request(0, 4, max_new_tokens=5), make_request(1, 4, max_new_tokens=2)
    scheduler.add(first)
    scheduler.add(second)
    assert steps(scheduler, 2)[1] == "r0 <r1"
    handle = second.host_blocks[0].handle
    scheduler.finish(second, "abort")
    scheduler.check()
    assert (second.host_blocks, scheduler.num_free_host_blocks) == ([], 2)
    assert scheduler.schedule(0.0).dropped == ((handle, 0),)
    assert scheduler.schedule(0.0).discarded == ()


class NeverSwapIn(ResumeFirst):
    def swaps_in(self, waiting, swapped, now):
        return False


def test_no_policy_leaves_the_only_set_of_requests_alone():
    policy = dataclasses.replace(SWAP, restore=NeverSwapIn())
    scheduler = make_scheduler(policy, num_gpu_blocks=2, num_host_blocks=2)
    scheduler.add(make_request(0, 4, max_new_tokens=2))
    scheduler.add(make_request(1, 4, max_new_tokens=2))
    assert steps(scheduler, 3) == ["| r0[0:4]! r1[0:4]!", "r0 <r1", "r1 >r1"]


def test_swapped_and_waiting_requests_take_room_in_one_iteration():
    policy = dataclasses.replace(SWAP, restore=ResumeFirst())
    scheduler = make_scheduler(policy, num_gpu_blocks=4, num_host_blocks=4)
    scheduler.add(make_request(0, 4, max_new_tokens=10))
    scheduler.add(make_request(1, 8, max_new_tokens=3))
    assert steps(scheduler, 2) == ["| r0[0:4]! r1[0:8]!", "r0 <r1"]
    scheduler.add(make_request(2, 2, max_new_tokens=4))
    scheduler.finish(scheduler._state.live["r0"], "abort")
    assert step(scheduler) == "r1 | r2[0:2]! >r1"


# Priorities


def test_a_queued_request_can_be_given_another_priority():
    scheduler = make_scheduler(SchedulerPolicy(priority=PriorityClasses()), max_num_seqs=1)
    requests = [make_request(index, 2, max_new_tokens=1, priority=5) for index in range(3)]
    for request in requests:
        scheduler.add(request)
    scheduler.reprioritize(requests[2], 1)
    scheduler.check()
    assert steps(scheduler, 3) == ["| r2[0:2]!", "| r0[0:2]!", "| r1[0:2]!"]


# The end of a request


def test_a_request_at_its_length_limit_keeps_its_blocks_until_the_next_iteration():
    scheduler = make_scheduler()
    request = make_request(0, 4, max_new_tokens=2)
    scheduler.add(request)
    scheduler.schedule(0.0)
    output = scheduler.schedule(0.0)
    assert describe(output) == "r0"
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
    scheduler = make_scheduler(max_num_batched_tokens=5, max_num_seqs=4)
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
    assert describe(scheduler.schedule(0.0)) == "r0 | r2[1:5]"
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
    assert steps(scheduler, 12) == ["| r0[0:30]!", *["r0"] * 10, "-"]
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
    request._num_tokens += 1


@pytest.mark.parametrize(
    "corrupt",
    [_leak_a_block, _drop_a_request, _share_a_slot, _queue_twice, _forget_growth, _skip_a_position],
)
def test_check_finds_corruption(corrupt):
    scheduler = make_scheduler()
    request = make_request(0, 4)
    scheduler.add(request)
    scheduler.schedule(0.0)
    scheduler.check()
    corrupt(scheduler, request)
    with pytest.raises(KVCacheError, match="invariant broken"):
        scheduler.check()


def test_the_budget_must_let_everybody_decode():
    with pytest.raises(ConfigError, match="max_num_batched_tokens=7 must be at least max_num_seqs=8"):
        make_scheduler(max_num_batched_tokens=7)


def test_clear_forgets_everything():
    scheduler = make_scheduler(SWAP, num_gpu_blocks=2, num_host_blocks=2)
    for index in range(2):
        scheduler.add(make_request(index, 4, max_new_tokens=4))
    assert steps(scheduler, 2)[1] == "r0 <r1"
    scheduler.clear()
    scheduler.check()
    assert (scheduler.num_free_blocks, scheduler.num_free_host_blocks) == (2, 2)
    assert not scheduler.has_unfinished
    scheduler.add(make_request(0, 4, max_new_tokens=4))
    assert step(scheduler) == "| r0[0:4]!"


def test_the_scheduler_runs_without_jax():
    code = "import sys; import jaxllm.sched.scheduler; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
