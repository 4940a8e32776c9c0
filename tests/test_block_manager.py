"""BlockPool and HostBudget: single cases, and a state machine against a naive model."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxllm.errors import ConfigError, KVCacheError
from jaxllm.sched.block_manager import BlockPool, HostBudget


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


def test_a_shared_block_is_freed_by_its_last_holder():
    pool = BlockPool(2, 16)
    blocks = pool.allocate(2)
    pool.share([0])
    pool.release(blocks)
    assert (pool.num_free, pool.num_used) == (1, 1)
    pool.release([0])
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


@pytest.mark.parametrize("bad", [[2], [-1], [0, 7]])
def test_a_refused_share_changes_nothing(bad):
    pool = BlockPool(3, 16)
    pool.allocate(2)
    with pytest.raises(KVCacheError, match="cannot share block"):
        pool.share(bad)
    pool.release([0, 1])
    assert pool.num_free == 3


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
    with pytest.raises(KVCacheError, match="free lists of 2 blocks hold 1"):
        pool.check()
    pool._free[:] = [2, 0]
    with pytest.raises(KVCacheError, match="block 0 has 1 references and is in the free list"):
        pool.check()
    pool._free.clear()
    pool._ref_counts[0] = 0
    with pytest.raises(KVCacheError, match="block 0 has 0 references and is not in the free list"):
        pool.check()


def test_a_host_loan_is_used_then_in_flight_then_free():
    host = HostBudget(5)
    first, second = host.lend(2), host.lend(3)
    assert first != second
    assert (host.num_free, host.num_used, host.num_in_flight) == (0, 5, 0)
    host.start_return(first)
    assert (host.num_free, host.num_used, host.num_in_flight) == (0, 3, 2)
    host.check()
    host.finish_return(first)
    host.cancel(second)
    assert (host.num_free, host.num_used, host.num_in_flight) == (5, 0, 0)
    assert host.lend(1) not in (first, second)
    host.check()


def test_a_refused_host_loan_or_return_changes_nothing():
    host = HostBudget(3)
    handle = host.lend(2)
    for count in (2, 0, -1):
        with pytest.raises(KVCacheError, match=f"cannot take {count} host blocks: 1 of 3 are free"):
            host.lend(count)
    with pytest.raises(KVCacheError, match="no host loan"):
        host.finish_return(handle)  # it was not started
    host.start_return(handle)
    for refused in (host.start_return, host.cancel):
        with pytest.raises(KVCacheError, match="no host loan"):
            refused(handle)
    assert (host.num_free, host.num_in_flight) == (1, 2)
    host.check()


def test_a_host_pool_may_be_empty_but_not_negative():
    with pytest.raises(KVCacheError, match="0 of 0"):
        HostBudget(0).lend(1)
    with pytest.raises(ConfigError, match="at least 0, got -1"):
        HostBudget(-1)


def test_check_finds_a_corrupt_host_budget():
    host = HostBudget(3)
    host.lend(1)
    host.num_free += 1
    with pytest.raises(KVCacheError, match="3 free, 1 used and 0 in-flight"):
        host.check()


class BlockPoolMachine(RuleBasedStateMachine):
    """The model is a dictionary from block id to the number of references."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks, 16)
        self.model = {}

    @rule(count=st.integers(0, 9))
    def allocate(self, count):
        if count > self.pool.num_blocks - len(self.model):
            with pytest.raises(KVCacheError):
                self.pool.allocate(count)
            return
        block_ids = self.pool.allocate(count)
        assert len(set(block_ids)) == count
        assert all(0 <= b < self.pool.num_blocks and b not in self.model for b in block_ids)
        self.model.update(dict.fromkeys(block_ids, 1))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def share(self, data):
        block_ids = data.draw(st.lists(st.sampled_from(sorted(self.model)), max_size=5))
        self.pool.share(block_ids)
        for block_id in block_ids:
            self.model[block_id] += 1

    @rule(data=st.data())
    def release(self, data):
        block_ids = data.draw(st.lists(st.integers(-1, self.pool.num_blocks), max_size=5))
        if any(block_ids.count(b) > self.model.get(b, 0) for b in block_ids):
            with pytest.raises(KVCacheError):
                self.pool.release(block_ids)
            return
        self.pool.release(block_ids)
        for block_id in block_ids:
            self.model[block_id] -= 1
            if self.model[block_id] == 0:
                del self.model[block_id]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release_all_of_one(self, data):
        block_id = data.draw(st.sampled_from(sorted(self.model)))
        self.pool.release([block_id] * self.model.pop(block_id))

    @invariant()
    def agrees_with_the_model(self):
        self.pool.check()
        assert self.pool.num_used == len(self.model)
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
