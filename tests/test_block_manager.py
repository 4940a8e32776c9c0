"""BlockPool and HostCopies: single cases, and a state machine against a naive model."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scheduler_helpers import make_request

from jaxllm.errors import ConfigError, KVCacheError
from jaxllm.sched.block_manager import BlockPool
from jaxllm.sched.copies import HostCopies


def test_allocation_hands_out_low_ids_first_and_counts():
    pool = BlockPool(5, 16)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(0) == []
    assert pool.allocate(3) == [2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 5)


def test_allocation_is_all_or_nothing():
    pool = BlockPool(3, 16)
    pool.allocate(1)
    with pytest.raises(KVCacheError, match="cannot allocate 3 blocks: 2 of 3 are free"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check()


@pytest.mark.parametrize("bad", [[2], [-1], [3], [0, 0], [0, 1, 2]])
def test_a_refused_release_changes_nothing(bad):
    pool = BlockPool(3, 16)
    held = pool.allocate(2)
    with pytest.raises(KVCacheError, match="cannot release block"):
        pool.release(bad)
    assert pool.num_used == 2
    pool.check()
    pool.release(held)
    assert pool.num_free == 3
    pool.check()


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for(num_tokens, num_blocks):
    assert BlockPool(1, 4).blocks_for(num_tokens) == num_blocks


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (16, 0), (-1, 16)])
def test_sizes_are_checked(num_blocks, block_size):
    with pytest.raises(ConfigError, match="at least 1"):
        BlockPool(num_blocks, block_size)


def test_check_finds_corruption():
    pool = BlockPool(3, 16)
    pool.allocate(2)
    pool._free.append(2)
    with pytest.raises(KVCacheError, match="free list of 2 blocks holds 1"):
        pool.check()
    pool._free[:] = [2, 0]
    with pytest.raises(KVCacheError, match="block 0 is used and free"):
        pool.check()
    pool._free.clear()
    with pytest.raises(KVCacheError, match="block 2 is neither used nor free"):
        pool.check()


def swapped(copies, index, num_blocks):
    request = make_request(index, 4 * num_blocks)
    return copies.make(request, range(num_blocks))


def counts(copies):
    return copies.num_free, copies.num_used, copies.num_in_flight


def test_host_blocks_hold_a_copy_then_are_in_flight_then_free():
    copies = HostCopies(5)
    first, second = swapped(copies, 0, 2), swapped(copies, 1, 3)
    assert first.handle != second.handle
    assert counts(copies) == (0, 5, 0)
    copies.read(first)
    assert (counts(copies), first.request.host_handle) == ((0, 3, 2), None)
    copies.check()
    assert copies.emit(7) == ((), ())
    copies.complete(6)
    assert counts(copies) == (0, 3, 2)
    copies.complete(7)
    assert counts(copies) == (2, 3, 0)
    copies.give_up(second.request)
    assert (counts(copies), copies.emit(8)) == ((5, 0, 0), ((), (second.handle,)))
    assert swapped(copies, 2, 1).handle not in (first.handle, second.handle)
    copies.check()


def test_a_load_is_under_way_until_it_joins():
    copies = HostCopies(5)
    first, second = swapped(copies, 0, 2), swapped(copies, 1, 1)
    copies.load(second)
    copies.load(first)
    assert (copies.num_loading, copies.loading) == (2, [second.request, first.request])
    assert copies.arrived({first.handle, 99}) == [first]
    assert copies.first_loading() is second
    copies.join(first)
    assert (copies.num_loading, counts(copies)) == (1, (2, 1, 2))
    copies.leave(first.request)  # it ended before executors were told
    assert (counts(copies), copies.emit(0)) == ((4, 1, 0), ((), (first.handle,)))
    copies.join(second)
    assert copies.emit(1) == ((second,), ())


def test_a_copy_that_does_not_fit_is_refused():
    copies = HostCopies(3)
    swapped(copies, 0, 2)
    for count in (2, 0):
        with pytest.raises(KVCacheError, match=f"cannot take {count} host blocks: 1 of 3 are free"):
            copies.make(make_request(1, 8), range(count))
    assert counts(copies) == (1, 2, 0)
    with pytest.raises(KVCacheError, match="0 of 0"):
        swapped(HostCopies(0), 0, 1)


def test_check_finds_corrupt_copies():
    copies = HostCopies(3)
    swapped(copies, 0, 1)
    copies.num_free += 1
    with pytest.raises(KVCacheError, match="3 free, 1 used and 0 in-flight"):
        copies.check()


class BlockPoolMachine(RuleBasedStateMachine):
    """The model is the set of used blocks."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks, 16)
        self.model = set()

    @rule(count=st.integers(0, 9))
    def allocate(self, count):
        if count > self.pool.num_blocks - len(self.model):
            with pytest.raises(KVCacheError):
                self.pool.allocate(count)
            return
        block_ids = self.pool.allocate(count)
        assert len(set(block_ids)) == count
        assert all(0 <= b < self.pool.num_blocks and b not in self.model for b in block_ids)
        self.model.update(block_ids)

    @rule(data=st.data())
    def release(self, data):
        block_ids = data.draw(st.lists(st.integers(-1, self.pool.num_blocks), max_size=5))
        if len(set(block_ids)) < len(block_ids) or not self.model.issuperset(block_ids):
            with pytest.raises(KVCacheError):
                self.pool.release(block_ids)
            return
        self.pool.release(block_ids)
        self.model.difference_update(block_ids)

    @invariant()
    def agrees_with_the_model(self):
        self.pool.check()
        assert self.pool.num_used == len(self.model)
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
