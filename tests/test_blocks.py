"""BlockPool and HostCopies: single cases, and a state machine against a naive model."""

import collections

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scheduler_helpers import make_request

from jaxllm.errors import ConfigError, KVCacheError
from jaxllm.sched.cache.blocks import BlockPool
from jaxllm.sched.cache.names import BlockName
from jaxllm.sched.cache.preview import PoolPreview
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
    del pool._free[2]
    with pytest.raises(KVCacheError, match="block 2 has 0 references, free: False"):
        pool.check()
    pool._free[2] = None
    pool._by_name[name(0)] = [0]
    with pytest.raises(KVCacheError, match="do not agree"):
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


def name(content):
    return BlockName(b"%d" % content, b"")


class BlockPoolMachine(RuleBasedStateMachine):
    """The model: references by block, the queue of free ones, and names in the order they were given."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks, 16)
        self.counts = [0] * num_blocks
        self.free = list(range(num_blocks))
        self.names = []
        self.watching = []

    @rule(count=st.integers(0, 9))
    def allocate(self, count):
        if count > len(self.free):
            with pytest.raises(KVCacheError):
                self.pool.allocate(count)
            return
        expected, self.free = self.free[:count], self.free[count:]
        assert self.pool.allocate(count) == expected
        self.names = [(block_id, content) for block_id, content in self.names if block_id not in expected]
        for block_id in expected:
            self.counts[block_id] = 1

    @rule(data=st.data())
    def release(self, data):
        block_ids = data.draw(st.lists(st.integers(-1, self.pool.num_blocks), max_size=5))
        held = collections.Counter(dict(enumerate(self.counts)))
        if collections.Counter(block_ids) - held:
            with pytest.raises(KVCacheError):
                self.pool.release(block_ids)
            return
        if len(set(block_ids)) < len(block_ids):
            return  # no sequence has a block twice
        self.pool.release(block_ids)
        for block_id in block_ids:
            self.counts[block_id] -= 1
        named = {block_id for block_id, _ in self.names}
        for block_id in reversed(block_ids):
            if not self.counts[block_id]:
                self.free.insert(len(self.free) if block_id in named else 0, block_id)

    @rule(data=st.data(), content=st.integers(0, 3))
    def give_a_name(self, data, content):
        held = [block_id for block_id, count in enumerate(self.counts) if count]
        if held:
            block_id = data.draw(st.sampled_from(held))
            self.pool.name(block_id, name(content))
            if block_id not in {named for named, _ in self.names}:
                self.names.append((block_id, content))

    @rule(contents=st.lists(st.integers(0, 3), unique=True))
    def find_and_acquire(self, contents):
        expected = []
        for content in contents:
            blocks = [block_id for block_id, named in self.names if named == content]
            if not blocks:
                break
            expected.append(blocks[0])
        found = self.pool.find([name(content) for content in contents])
        assert found == expected
        self.pool.acquire(found)
        for block_id in found:
            self.counts[block_id] += 1
        self.free = [block_id for block_id in self.free if block_id not in found]

    @rule(content=st.integers(0, 3))
    def watch(self, content):
        self.pool.watch(name(content))
        self.watching.append(content)

    @rule(data=st.data())
    def unwatch(self, data):
        if self.watching:
            content = data.draw(st.sampled_from(self.watching))
            self.pool.unwatch(name(content))
            self.watching.remove(content)

    @rule()
    def forget(self):
        self.pool.forget_names()
        self.names = []

    @rule(data=st.data())
    def preview(self, data):
        """What a preview says is what happens then."""
        preview = PoolPreview(self.pool)
        count = data.draw(st.integers(0, len(self.free)))
        preview.take(count)
        gone = set(self.free[:count])
        for content in range(4):
            blocks = [block_id for block_id, named in self.names if named == content and block_id not in gone]
            hit = preview.find([name(content)])
            assert hit.num_blocks == bool(blocks)
            is_held = bool(blocks) and self.counts[blocks[0]] > 0
            assert (hit.held if is_held else hit.free) == tuple(blocks[:1])
            assert len(hit.held) + len(hit.free) == hit.num_blocks
        held = data.draw(st.permutations([b for b, references in enumerate(self.counts) if references]))
        freed = [preview.release([block_id]) for block_id in held]
        assert sum(freed) == sum(self.counts[block_id] == 1 for block_id in held)

    @invariant()
    def agrees_with_the_model(self):
        self.pool.check()
        assert list(self.pool.free_blocks()) == self.free
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks
        assert self.pool.has_shared == any(count > 1 for count in self.counts)
        found = {content for _, content in self.names}.intersection(self.watching)
        assert self.pool.may_find == (bool(found) or len(set(self.watching)) < len(self.watching))


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
