"""Requests that find the KV of others: names, and what schedulers plan with them."""

import dataclasses

import pytest
from fake_device import FakeDevice
from scheduler_helpers import LinearCosts, describe, lose, make_request, make_scheduler, step, take

from jaxllm import SamplingParams
from jaxllm.errors import ConfigError
from jaxllm.sched.cache.blocks import BlockPool
from jaxllm.sched.cache.names import names_of, root
from jaxllm.sched.cache.preview import PoolPreview
from jaxllm.sched.policies import (
    AheadOfTime,
    CostOverIdleTime,
    NoOffload,
    ResumeAction,
    ResumeDecision,
    SchedulerPolicy,
    SwapIfItFits,
    WriteBack,
    WriteThrough,
)
from jaxllm.sched.presets import adaptive, make_preset
from jaxllm.types import MAX_STAGED_BLOCKS, CopyProgress

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


# Names


def test_equal_prefixes_have_equal_names():
    long = names_of(range(40), 8, root())
    assert len(long) == 5
    assert names_of(range(17), 8, root()) == long[:2]
    assert names_of(range(16, 40), 8, long[1].digest, 2) == long[2:]
    assert len(set(long)) == 5


def test_a_name_is_of_all_before_it_and_of_the_salt():
    one, other = names_of([1, 2, 3, 4], 2, root()), names_of([9, 2, 3, 4], 2, root())
    assert one[1].tokens == other[1].tokens
    assert one[1] != other[1]
    assert names_of([1, 2], 2, root("a")) != names_of([1, 2], 2, root())
    assert names_of([1, 2], 2, root("a")) == names_of([1, 2], 2, root("a"))


# Schedulers: blocks of 4 tokens


def shared(policy=None, **changes):
    policy = make_preset("vllm_v1") if policy is None else policy
    return make_scheduler(policy, enable_prefix_caching=True, **changes)


def test_a_prefix_is_computed_once():
    scheduler = shared()
    first, second, third = (make_request(i, tokens) for i, tokens in enumerate((10, 12, 8)))
    scheduler.add(first)
    step(scheduler)
    scheduler.add(second)  # 12 tokens, of which two blocks are there
    scheduler.add(third)  # 8 tokens, of which the last is computed anyway
    output = scheduler.schedule(0.0)
    assert [(chunk.start, chunk.length) for chunk in output.prefill] == [(8, 4), (4, 4)]
    assert first.block_ids[:2] == second.block_ids[:2]
    assert third.block_ids[0] == first.block_ids[0]
    assert third.block_ids[1] != first.block_ids[1]
    assert scheduler.num_free_blocks == 64 - (3 + 1 + 1)
    assert [one.num_cached_tokens for one in (first, second, third)] == [0, 8, 4]
    scheduler.check()


def test_requests_of_one_iteration_share():
    scheduler = shared()
    for index in range(3):
        scheduler.add(make_request(index, 10))
    output = scheduler.schedule(0.0)
    assert [(chunk.start, chunk.length) for chunk in output.prefill] == [(0, 10), (8, 2), (8, 2)]
    assert scheduler.num_free_blocks == 64 - (3 + 1 + 1)
    scheduler.check()


def test_eight_of_one_prompt_take_little_more_than_one():
    """Only full blocks are shared: nothing that others read is ever written, so nothing is copied."""
    scheduler = shared(num_gpu_blocks=128)
    requests = [make_request(index, 102, 21) for index in range(8)]
    for request in requests:
        scheduler.add(request)
    while not all(request.num_tokens == 122 for request in requests):
        step(scheduler)
    alone = scheduler._state.pool.blocks_for(121)
    assert 128 - scheduler.num_free_blocks == 25 + 8 * (alone - 25)
    assert 128 - scheduler.num_free_blocks < 0.4 * 8 * alone
    assert len({request.block_ids[-1] for request in requests}) == 8


def test_what_ended_is_found_until_its_blocks_are_needed():
    scheduler = shared(num_gpu_blocks=5)
    scheduler.add(make_request(0, 8, 4))
    while scheduler.has_unfinished:
        step(scheduler)
    assert scheduler.num_free_blocks == 5
    again = make_request(1, 8, 4)
    scheduler.add(again)
    while scheduler.has_unfinished:
        step(scheduler)
    assert again.num_cached_tokens == 4
    scheduler.add(make_request(2, 16, 4, prompt_token_ids=range(100, 116)))  # takes all five
    while scheduler.has_unfinished:
        step(scheduler)
    last = make_request(3, 8, 4)
    scheduler.add(last)
    step(scheduler)
    assert last.num_cached_tokens == 0


def test_outputs_are_found_by_the_next_turn():
    scheduler = shared()
    first = make_request(0, 6, 7)
    scheduler.add(first)
    while scheduler.has_unfinished:
        step(scheduler)
    turn = [*first.prompt_token_ids, *first.output_token_ids, 7, 7]
    second = make_request(1, len(turn), prompt_token_ids=turn)
    scheduler.add(second)
    step(scheduler)
    assert second.num_cached_tokens == 12  # of 13, the last of which was never computed


def run_ahead(scheduler, request, max_decode_steps):
    """As an engine that schedules each iteration before it has read the one before, until all is released."""
    scheduler.add(request)
    pending = scheduler.schedule(0.0)
    while request.slot is not None:
        output = scheduler.schedule(0.0, max_decode_steps=max_decode_steps)
        scheduler.check()
        if request.slot is not None:
            request.output_token_ids += [0] * (pending.num_decode_steps - 1)
            take(scheduler, pending)
            pending = output
    return pending


@pytest.mark.parametrize("max_decode_steps", [1, 3, 4])
@pytest.mark.parametrize(("num_gpu_blocks", "num_found"), [(64, 12), (4, 8)])
def test_a_block_is_found_whose_tokens_were_read_after_its_release(
    num_gpu_blocks, num_found, max_decode_steps
):
    """Unless room is short: then it is free at once, and has no name."""
    scheduler, first = shared(num_gpu_blocks=num_gpu_blocks), make_request(0, 6, 7)
    pending = run_ahead(scheduler, first, max_decode_steps)
    first.output_token_ids += [0] * (pending.num_decode_steps - 1)
    take(scheduler, pending)
    assert not scheduler.has_unfinished
    assert scheduler.num_free_blocks == num_gpu_blocks
    turn = [*first.prompt_token_ids, *first.output_token_ids]
    second = make_request(1, len(turn), 1, prompt_token_ids=turn)
    scheduler.add(second)
    step(scheduler)
    assert second.num_cached_tokens == num_found


@pytest.mark.parametrize("max_decode_steps", [1, 4])
def test_a_block_that_waits_for_its_name_is_free_if_nobody_reads_its_tokens(max_decode_steps):
    scheduler, request = shared(), make_request(0, 6, 7)
    run_ahead(scheduler, request, max_decode_steps)
    assert scheduler.num_free_blocks == 63
    scheduler.finish(request, "abort")
    scheduler.check()
    assert scheduler.num_free_blocks == 64


def test_requests_keep_apart_if_they_ask_to():
    scheduler = shared()
    salted = {"cache_salt": "mine"}
    for index, changes in enumerate([{}, salted, salted]):
        scheduler.add(make_request(index, 9, **changes))
    starts = [chunk.start for chunk in scheduler.schedule(0.0).prefill]
    assert starts == [0, 0, 8]
    scored = make_request(3, 9, sampling_params=SamplingParams(prompt_logprobs=1))
    scheduler.add(scored)
    assert [chunk.start for chunk in scheduler.schedule(1.0).prefill] == [0]  # of which all is computed
    scheduler.reset_prefix_cache()
    scheduler.add(make_request(4, 9))
    assert [chunk.start for chunk in scheduler.schedule(2.0).prefill] == [0]


def test_shared_blocks_outlive_a_victim():
    scheduler = shared(num_gpu_blocks=6, max_num_seqs=2)
    first, second = make_request(0, 10, 8), make_request(1, 10, 8)
    for request in (first, second):
        scheduler.add(request)
    preempted = []
    while scheduler.has_unfinished:
        output = scheduler.schedule(0.0)
        scheduler.check()
        preempted += [request.request_id for request in output.preempted]
        take(scheduler, output)
    assert preempted == ["r1"]  # each needs five blocks, of which they share two: eight of six
    assert [len(one.output_token_ids) for one in (first, second)] == [8, 8]


def test_who_shares_starts_where_others_do_not_fit():
    scheduler = shared(adaptive(LinearCosts()), num_gpu_blocks=10)
    scheduler.add(make_request(0, 22, 6))
    step(scheduler)
    scheduler.add(make_request(1, 23, 4, prompt_token_ids=range(50, 73)))  # six blocks; four are free
    step(scheduler)
    assert scheduler.num_waiting == 1
    scheduler.add(make_request(2, 23, 4))  # six blocks, of which five are there
    assert "r2[20:23]!" in describe(scheduler.schedule(0.0))
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_a_system_without_a_prefix_cache_refuses_one():
    with pytest.raises(ConfigError, match="plans without a prefix cache"):
        make_scheduler(make_preset("vllm"), enable_prefix_caching=True)


@pytest.mark.parametrize(
    ("lost", "chunks"),
    [
        ((0,), ["| r1[0:4]", "| r1[20:22]!"]),  # a head attends to itself
        ((2,), ["| r1[8:12]", "| r1[20:22]!"]),  # a middle to what is before it as well
        ((0, 1, 3), ["| r1[0:8]", "| r1[12:16]", "| r1[20:22]!"]),
        ((4,), ["| r1[16:22]!"]),
        ((0, 1, 2, 3, 4), ["| r1[0:22]!"]),
    ],
)
def test_what_is_missing_is_computed_alone(lost, chunks):
    policy = dataclasses.replace(make_preset("vllm_v1"), retention=CostOverIdleTime(LinearCosts()))
    scheduler = shared(policy)
    scheduler.add(first := make_request(0, 20, 2))
    drain(scheduler)
    lose(scheduler, first, *lost)
    again = make_request(1, 22, 1)
    scheduler.add(again)
    assert [step(scheduler) for _ in chunks] == chunks
    assert again.num_cached_tokens == 20 - 4 * len(lost)
    assert not scheduler.has_unfinished


def test_the_longest_cached_prefix_goes_first_but_not_for_ever():
    scheduler = shared(dataclasses.replace(make_preset("sglang"), patience=2), max_num_seqs=1)
    scheduler.add(make_request(0, 30, 2))
    drain(scheduler)
    scheduler.add(busy := other(1, 2, 3))
    step(scheduler)
    stranger = other(2, 30, 1)
    fans = [make_request(index, length, 1) for index, length in ((3, 10), (4, 30), (5, 20), (6, 30))]
    for request in (stranger, *fans):
        scheduler.add(request)
    started = []
    while scheduler.has_unfinished:
        output = scheduler.schedule(0.0)
        started += [chunk.request.request_id for chunk in output.prefill if chunk.is_first]
        take(scheduler, output)
    assert busy.is_finished
    assert started == ["r4", "r6", "r2", "r5", "r3"]


# Schedulers with host memory


def offloading(offload, **changes):
    policy = dataclasses.replace(make_preset("vllm_v1"), offload=offload)
    return shared(policy, **({"num_gpu_blocks": 5, "num_host_blocks": 8} | changes))


def drain(scheduler):
    """All live requests; returns what was copied out."""
    copied = []
    while scheduler.has_unfinished:
        output = scheduler.schedule(0.0)
        scheduler.check()
        copied += [block_id for swap in output.swap_out for block_id in swap.block_ids]
        take(scheduler, output)
    return copied


def other(index, num_tokens, max_new_tokens=2):
    """A request with nothing in common with those of `make_request`."""
    tokens = range(100 * index, 100 * index + num_tokens)
    return make_request(index, num_tokens, max_new_tokens, prompt_token_ids=tokens)


@pytest.mark.parametrize(
    ("offload", "num_at_once", "num_beside"),
    [
        (WriteBack(), 0, 0),  # when their room is taken
        (WriteThrough(), 3, 0),  # by the iteration after the one that fills them
        (AheadOfTime(1.0), 0, 3),  # by an iteration that runs while they are free
    ],
)
def test_what_the_device_has_no_room_for_is_found_on_the_host(offload, num_at_once, num_beside):
    scheduler = offloading(offload)
    scheduler.add(make_request(0, 13, 2))
    assert len(drain(scheduler)) == num_at_once
    scheduler.add(other(3, 3, 2))
    assert len(drain(scheduler)) == num_beside
    scheduler.add(other(1, 17))
    drain(scheduler)
    again = make_request(2, 13, 2)
    scheduler.add(again)
    output = scheduler.schedule(0.0)
    assert describe(output) == "| r2[12:13]! >r2"
    assert (again.num_cached_tokens, again.num_host_cached_tokens) == (12, 12)


def test_without_offloading_it_is_computed_again():
    scheduler = offloading(NoOffload())
    for request in (make_request(0, 13, 2), other(1, 17), last := make_request(2, 13, 2)):
        scheduler.add(request)
        assert drain(scheduler) == []
    assert (last.num_cached_tokens, scheduler.num_available_host_blocks) == (0, 8)


@pytest.mark.parametrize(("index", "num_tokens"), [(1, 4), (2, 12)])
def test_what_was_used_last_stays_on_the_host(index, num_tokens):
    scheduler = offloading(WriteBack(), num_host_blocks=4)
    for request in (other(1, 13), other(2, 13), other(3, 17)):
        scheduler.add(request)
        drain(scheduler)
    last = make_request(4, 13, 2, prompt_token_ids=range(100 * index, 100 * index + 13))
    scheduler.add(last)
    step(scheduler)
    assert last.num_host_cached_tokens == num_tokens  # its tail had left the device, and then the host, first


def test_a_victims_shared_blocks_are_copied_once_and_come_back_once():
    policy = SchedulerPolicy(action=SwapIfItFits(), patience=None)
    scheduler = shared(policy, num_gpu_blocks=7, num_host_blocks=20)
    prompt = range(12)
    requests = [make_request(index, 13, 12, prompt_token_ids=[*prompt, 50 + index]) for index in range(3)]
    copied, back = [], []
    for request in requests:
        scheduler.add(request)
    while scheduler.has_unfinished:
        output = scheduler.schedule(0.0)
        scheduler.check()
        copied += [len(swap.block_ids) for swap in output.swap_out]
        back += [len(swap.block_ids) for swap in output.swap_in]
        take(scheduler, output)
    assert len(copied) >= 2
    assert copied[0] >= 4  # three shared ones, and its own
    assert all(count < 4 for count in copied[1:])
    assert all(count < 4 for count in back)  # the others hold them, still


def test_what_another_brings_back_is_not_copied_twice():
    class InBackground:
        def choose(self, request, copied_out_at, state, now):
            return ResumeDecision(ResumeAction.IN_BACKGROUND)

    scheduler = offloading(WriteBack(), num_gpu_blocks=8)
    scheduler.policy = dataclasses.replace(scheduler.policy, resume=InBackground())
    scheduler.clear()
    for request in (make_request(0, 13, 2), other(1, 29)):
        scheduler.add(request)
        drain(scheduler)
    running = other(2, 2, 20)
    scheduler.add(running)
    step(scheduler)
    for index in (3, 4):
        scheduler.add(make_request(index, 14, 2))
    output = scheduler.schedule(0.0)
    assert describe(output) == "r2 ~r3"  # r4 waits for what r3 brings
    take(scheduler, output)
    assert step(scheduler) == "r2"
    output = scheduler.schedule(0.0, CopyProgress([output.load[0].handle]))
    assert describe(output) == "r2 | r3[12:14]! r4[12:14]! >r3"
    take(scheduler, output)


# Copies to the host


def write_through(**changes):
    policy = dataclasses.replace(make_preset("vllm_v1"), offload=WriteThrough())
    return make_scheduler(policy, **({"num_host_blocks": 8, "enable_prefix_caching": True} | changes))


def play(scheduler, device, **copies):
    """An iteration on a device that checks what is copied."""
    output = scheduler.schedule(0.0, CopyProgress(**copies))
    device.execute(output)
    take(scheduler, output)
    scheduler.check()


def test_a_block_that_is_named_again_is_copied_when_it_is_filled():
    """A block that waits to be copied may be recycled meanwhile, for the very content it had."""
    scheduler, device = write_through(num_gpu_blocks=2), FakeDevice(4, is_shared=True)
    for index, first in enumerate((0, 10, 0)):
        scheduler.add(make_request(index, 5, 1, prompt_token_ids=range(first, first + 5)))
        play(scheduler, device, num_leaving=MAX_STAGED_BLOCKS if index < 2 else 0)
    while scheduler.has_leftovers:
        device.execute(scheduler.flush())
    copied = [[cell[0] for cell in cells] for cells in device.host.values()]
    assert sorted(copied) == [[0, 1, 2, 3], [10, 11, 12, 13]]


def test_a_flush_lets_go_of_nothing_that_it_copies():
    """More is full than the host holds, and nobody comes: it is copied in turns, as there is room."""
    scheduler, device = write_through(num_gpu_blocks=100, num_host_blocks=40), FakeDevice(4, is_shared=True)
    for index in range(4):
        scheduler.add(make_request(index, 81, 1, prompt_token_ids=range(100 * index, 100 * index + 81)))
    while scheduler.has_unfinished:
        play(scheduler, device, num_leaving=MAX_STAGED_BLOCKS)
    sizes = []
    while scheduler.has_leftovers:
        output = scheduler.flush()
        device.execute(output)
        scheduler.check()
        assert not {block.piece for swap in output.swap_out for block in swap.host_blocks} & {*output.dropped}
        sizes.append(sum(len(swap.block_ids) for swap in output.swap_out))
    assert sizes == [40, 40]
    assert len(device.host) == 40


def test_what_is_full_waits_for_room_in_files():
    scheduler = write_through(num_gpu_blocks=30)
    scheduler.add(make_request(0, 81, 1))
    take(scheduler, scheduler.schedule(0.0, CopyProgress(write_room=0)))
    assert scheduler.flush(write_room=0).swap_out == ()
    sizes = []
    while scheduler.has_leftovers:
        sizes.append(sum(len(swap.block_ids) for swap in scheduler.flush(write_room=3).swap_out))
    assert sizes == [3] * 6 + [2]


# Those who give way


def test_what_a_victim_was_about_to_compute_is_not_found():
    """A request takes the room of one that would have filled a block for it: then there is no such block."""
    scheduler = shared(make_preset("priority", LinearCosts()), num_gpu_blocks=3, num_host_blocks=4)
    scheduler.add(make_request(0, 2, 8, prompt_token_ids=[9, 9], priority=0))
    low = make_request(1, 6, 4, priority=2)
    scheduler.add(low)
    assert [step(scheduler) for _ in range(2)] == ["| r0[0:2]! r1[0:6]!", "r0 r1"]
    urgent = make_request(2, 9, 2, prompt_token_ids=[*range(6), 0, 0, 7], priority=1)
    scheduler.add(urgent)
    assert step(scheduler) == "r0 r1"  # the room of r1 is not enough without the block that it fills
    while scheduler.has_unfinished:
        step(scheduler)


def test_a_lookup_counts_on_no_copy_behind_one_that_may_be_found():
    """Of two blocks of one name the first is found; whether it was handed out is not certain."""
    pool = BlockPool(3, 4)
    (name,) = names_of(range(4), 4, root())
    first, second = pool.allocate(2)
    pool.name(first, name)
    pool.name(second, name)
    pool.release([first])
    while next(pool.free_blocks()) != first:
        pool.allocate(1)
    for is_exact, free, held in ((True, (), (second,)), (False, (second,), ())):
        preview = PoolPreview(pool, is_exact=is_exact)
        preview.take(1)
        hit = preview.find([name])
        assert (hit.free, hit.held) == (free, held)
