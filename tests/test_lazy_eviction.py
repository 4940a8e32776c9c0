"""Preemption in part: what nobody has taken by the time a victim is back is neither copied nor recomputed."""

import dataclasses

import pytest
from scheduler_helpers import NO_WATERMARK, describe, make_request, make_scheduler, step

from jaxllm.errors import KVCacheError
from jaxllm.sched.block_manager import BlockPool
from jaxllm.sched.policies import SwapIfItFits

DROP = dataclasses.replace(NO_WATERMARK, lazy_eviction=True)
SWAP = dataclasses.replace(DROP, action=SwapIfItFits())


def test_evicted_blocks_are_handed_out_last_the_tail_first_and_come_back_as_a_head():
    pool = BlockPool(6, 16)
    first, second = pool.allocate(3), pool.allocate(2)  # 0 1 2, 3 4
    old = pool.evict(first)
    new = pool.evict(second)
    assert (pool.num_free, pool.num_used) == (6, 0)
    pool.check()
    assert pool.allocate(2) == [5, 2]  # the plain one, then the tail of what was evicted first
    assert (pool.num_intact(old), pool.num_intact(new)) == (2, 2)
    assert pool.reclaim(old) == [0, 1]
    pool.check()
    assert pool.allocate(1) == [4]
    assert pool.reclaim(new) == [3]
    assert pool.num_free == 0
    pool.check()


def test_blocks_after_a_lost_one_do_not_come_back():
    pool = BlockPool(3, 16)
    evicted = pool.evict(pool.allocate(3))
    taken = pool.allocate(2)
    pool.release(taken[:1])  # block 2 is free again, but not what it was
    assert pool.reclaim(evicted) == [0]
    pool.check()
    assert pool.num_free == 1


def test_forgotten_blocks_are_plain_ones():
    pool = BlockPool(3, 16)
    evicted = pool.evict(pool.allocate(2))
    pool.forget(evicted)
    assert pool.num_free == 3
    pool.check()
    assert sorted(pool.allocate(3)) == [0, 1, 2]


def test_only_used_and_unshared_blocks_are_evicted():
    pool = BlockPool(3, 16)
    (block,) = pool.allocate(1)
    pool.share([block])
    with pytest.raises(KVCacheError, match="cannot evict block 0: it has 2 references"):
        pool.evict([block])
    with pytest.raises(KVCacheError, match="cannot evict block 1: it is free"):
        pool.evict([1])
    pool.check()


def preempted(policy, **limits):
    """r1, of 8 tokens in 2 blocks, loses them to r0, which takes one."""
    scheduler = make_scheduler(policy, num_gpu_blocks=3, num_host_blocks=4, **limits)
    scheduler.add(make_request(0, 4, max_new_tokens=3))
    scheduler.add(make_request(1, 7, max_new_tokens=5))
    assert step(scheduler) == "P r0[0:4]! r1[0:7]!"
    return scheduler


def test_a_dropped_request_prefills_only_what_is_lost():
    scheduler = preempted(DROP)
    assert step(scheduler) == "D r0 -r1"
    assert step(scheduler) == "D r0"  # its last token
    assert step(scheduler) == "P r1[4:8]!"
    assert step(scheduler) == "D r1"


def test_without_lazy_eviction_everything_is_prefilled():
    scheduler = preempted(NO_WATERMARK)
    assert [step(scheduler) for _ in range(3)] == ["D r0 -r1", "D r0", "P r1[0:8]!"]


def test_a_swapped_request_copies_only_what_is_lost():
    scheduler = preempted(SWAP)
    out = scheduler.schedule(0.0)
    assert describe(out) == "D r0 <r1"
    (swap,) = out.swap_out
    for request in out.decode:
        request.output_token_ids.append(0)
    scheduler.complete(out.step_id)
    assert step(scheduler) == "D r0"
    back = scheduler.schedule(0.0)
    assert describe(back) == "D r1 >r1"
    (resumed,) = back.swap_in
    assert (resumed.handle, resumed.num_intact) == (swap.handle, 1)
    assert resumed.block_ids[0] == swap.block_ids[0]


def test_an_aborted_request_gives_up_its_claim():
    scheduler = preempted(DROP)
    scheduler.schedule(0.0)
    victim = next(iter(scheduler._state.waiting))
    scheduler.finish(victim, "abort")
    scheduler.check()
    assert not scheduler._state.evicted
    assert not scheduler._state.pool._evicted
