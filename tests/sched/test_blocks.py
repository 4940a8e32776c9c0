"""BlockPool and HostPool: single cases, and state machines against naive models."""

import collections

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxllm.errors import ConfigError, KVCacheError
from jaxllm.sched.cache.blocks import BlockPool
from jaxllm.sched.cache.host import HostPool
from jaxllm.sched.cache.names import BlockName
from jaxllm.sched.cache.preview import PoolPreview
from jaxllm.sched.policies import S3FIFO, LeastRecentlyUsed
from jaxllm.types import HostBlock, host_blocks_of


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
    pool.names.places[name(0)] = [0]
    with pytest.raises(KVCacheError, match="do not agree"):
        pool.check()


def name(content):
    return BlockName(b"%d" % content, b"")


def names(*contents):
    return [None if content is None else name(content) for content in contents]


def counts(pool):
    return pool.num_free, pool.num_available, pool.num_reading


def test_private_host_blocks_are_held_then_read_then_gone():
    pool = HostPool(5)
    first, second = pool.store([None] * 2), pool.store([None] * 3)
    assert (first, second) == (host_blocks_of(first[0].handle, 2), host_blocks_of(second[0].handle, 3))
    assert counts(pool) == (0, 0, 0)
    pool.read(first[:1])
    pool.read(first[1:])
    pool.check()
    pool.check_references(second)
    assert (pool.emit(7), counts(pool)) == ((), (0, 0, 2))
    pool.complete(6)
    assert counts(pool) == (0, 0, 2)
    pool.complete(7)
    assert counts(pool) == (2, 2, 0)
    pool.release(second)
    assert counts(pool) == (5, 5, 0)
    pool.check()
    assert pool.emit(8) == (first[0].piece, second[2].piece, second[0].piece)
    assert pool.emit(9) == ()


def test_a_handle_is_never_used_again():
    """Not even by another pool: one executor may serve several schedulers."""
    handles = []
    for pool in (HostPool(2), HostPool(2)):
        for contents in ((None,), (0,), (None, None), (1,), (2, 3)):
            blocks = pool.store(names(*contents))
            handles.append(blocks[0].handle)
            pool.release(blocks)
    assert len(set(handles)) == len(handles)


def test_what_does_not_fit_in_host_memory_is_refused():
    pool = HostPool(3)
    held = pool.store(names(0, 1))
    for count in (2, 0):
        with pytest.raises(KVCacheError, match=f"cannot take {count} host blocks: 1 of 3 are"):
            pool.store([None] * count)
    assert counts(pool) == (1, 1, 0)
    pool.release(held)
    with pytest.raises(KVCacheError, match="cannot take 4 host blocks: 3 of 3 are"):
        pool.store([None] * 4)
    assert (pool.names.places, pool.emit(0)) == ({name(0): [held[0]], name(1): [held[1]]}, ())
    pool.check()
    with pytest.raises(KVCacheError, match="0 of 0"):
        HostPool(0).store([None])


def test_a_piece_takes_its_room_until_its_last_block_is_gone():
    pool = HostPool(7)
    blocks = pool.store([None] * 7)  # pieces of 4, 2 and 1
    pool.release(blocks[:3] + blocks[4:5])
    assert (counts(pool), pool.emit(0)) == ((0, 0, 0), ())
    pool.release(blocks[6:])
    assert (counts(pool), pool.emit(1)) == ((1, 1, 0), (blocks[6].piece,))
    pool.release(blocks[3:4])
    assert (counts(pool), pool.emit(2)) == ((5, 5, 0), (blocks[0].piece,))
    pool.check()
    pool.check_references(blocks[5:6])


def test_a_piece_of_private_and_named_blocks_stays_for_the_named_ones():
    pool = HostPool(4)
    blocks = pool.store(names(0, None, 1, None))
    pool.release(blocks)
    assert (counts(pool), pool.emit(0)) == ((0, 4, 0), ())
    assert pool.names.places == {name(0): blocks[:1], name(1): blocks[2:3]}
    pool.check()
    pool.store(names(2))
    assert (counts(pool), pool.emit(1)) == ((3, 3, 0), (blocks[0].piece,))
    assert pool.names.first(name(0)) is pool.names.first(name(1)) is None
    pool.check()


def test_named_host_blocks_are_found_until_their_room_is_needed():
    pool = HostPool(4)
    blocks = pool.store(names(0, 1))
    assert pool.names.first(name(1)) == blocks[1]  # others may hold it at once
    pool.release(blocks)
    other = pool.store([None] * 2)
    assert (pool.names.first(name(0)), counts(pool)) == (blocks[0], (0, 2, 0))
    pool.hold(blocks[:1])
    with pytest.raises(KVCacheError, match="0 of 4"):
        pool.store([None])
    pool.release(blocks[:1])
    other += pool.store([None])
    assert (pool.names.places, counts(pool)) == ({}, (1, 1, 0))
    pool.check_references(other)


def test_of_host_blocks_of_equal_names_the_first_that_is_there_is_found():
    pool = HostPool(2)
    first, second = pool.store(names(0)), pool.store(names(0))
    assert pool.names.first(name(0)) == first[0]
    pool.release(first)
    pool.store([None])
    assert pool.names.first(name(0)) == second[0]


def test_the_piece_whose_first_block_was_let_go_of_longest_ago_goes_first():
    pool = HostPool(6)
    first, second, third = (pool.store(names(2 * one, 2 * one + 1)) for one in range(3))
    pool.release(second[:1])
    pool.release(first)
    pool.release(third)
    pool.release(second[1:])
    pool.hold(third)
    pool.release(third)
    gone = []
    for _ in range(3):
        pool.store([None] * 2)
        gone += pool.emit(0)
    assert gone == [second[0].piece, first[0].piece, third[0].piece]


def test_what_is_waited_for_goes_last():
    host = HostPool(3, retention=LeastRecentlyUsed(looks_ahead=True))
    old, middle, new = names(0, 1, 2)
    for one in (old, middle, new):
        host.release(host.store([one]))
    host.names.watch(old)
    assert stored(host, 3) == {old, new, name(3)}
    host.names.watch(new)
    host.names.watch(name(3))
    assert old not in stored(host, 4)  # when all of it is, the oldest
    host.check()


def stored(host, content):
    """What is in a host pool once it has stored something more."""
    host.release(host.store([name(content)]))
    return set(host.names.places)


def test_s3_fifo_lets_go_of_what_was_used_once():
    host = HostPool(4, retention=S3FIFO(0.25))
    for host.now, content in enumerate(range(4)):
        stored(host, content)
    (used,) = host.names.places[name(0)]
    host.hold([used])
    host.release([used])
    host.now = 10.0
    assert name(1) not in stored(host, 4)  # the first of those never asked for
    host.now = 20.0
    assert name(2) not in stored(host, 1)  # which is back, so it is kept with those that were
    host.now = 30.0
    assert stored(host, 5) == {name(one) for one in (0, 1, 4, 5)}
    host.now = 40.0
    assert stored(host, 6) == {name(one) for one in (0, 1, 5, 6)}
    with pytest.raises(ConfigError, match="small_share=2 must lie in"):
        S3FIFO(2)
    host.check()


def test_a_touched_block_is_as_if_just_let_go_of():
    host = HostPool(2)
    for content in (0, 1):
        stored(host, content)
    host.touch(host.names.places[name(0)][0])
    assert stored(host, 2) == {name(0), name(2)}
    host.check()


def test_the_last_piece_of_a_sequence_goes_first():
    pool = HostPool(3)
    blocks = pool.store(names(0, 1, 2))  # pieces of 2 and 1
    pool.release(blocks)
    pool.store([None])
    assert pool.emit(0) == (blocks[2].piece,)


def test_a_piece_stays_while_one_of_its_blocks_is_held_or_read():
    pool = HostPool(4)
    blocks = pool.store(names(*range(4)))
    pool.release(blocks[:3])
    assert counts(pool) == (0, 0, 0)
    pool.read(blocks[3:])
    pool.emit(0)
    assert counts(pool) == (0, 0, 1)
    with pytest.raises(KVCacheError, match="0 of 4"):
        pool.store([None])
    pool.complete(0)
    assert counts(pool) == (0, 4, 0)
    assert len(pool.names.places) == 4


def test_blocks_that_are_read_twice_are_let_go_of_twice():
    pool = HostPool(1)
    blocks = pool.store(names(0))
    for step_id in range(2):
        pool.hold(blocks)
        pool.read(blocks)
        pool.emit(step_id)
    pool.release(blocks)
    pool.complete(0)
    assert counts(pool) == (0, 0, 1)
    pool.check_references([])
    pool.complete(1)
    assert counts(pool) == (0, 1, 0)


def test_what_is_available_beside_blocks_is_less_their_pieces():
    pool = HostPool(8)
    first, second = pool.store(names(0, 1, 2)), pool.store(names(3, 4))
    pool.release(first)
    assert pool.num_available == pool.num_available_beside([]) == 6
    assert pool.num_available_beside(second) == 6  # somebody holds them
    assert pool.num_available_beside([first[1]]) == pool.num_available_beside([*first[:2], *second]) == 4
    assert pool.num_available_beside(first) == 3


def test_forgotten_names_leave_what_is_held_to_its_holders():
    pool = HostPool(5)
    held, idle = pool.store(names(0, 1)), pool.store(names(2, 3))
    pool.release(idle)
    pool.names.watch(name(0))
    assert pool.names.may_find
    pool.forget_names()
    pool.check()
    pool.check_references(held)
    assert (pool.names.places, pool.names.may_find, counts(pool)) == ({}, False, (3, 3, 0))
    assert pool.emit(0) == (idle[0].piece,)
    pool.release(held)
    assert (counts(pool), pool.emit(1)) == ((5, 5, 0), (held[0].piece,))


@pytest.mark.parametrize(
    ("corrupt", "problem"),
    [
        (lambda pool: setattr(pool, "num_free", 3), "3 free and 3 used host blocks are not the 5"),
        (lambda pool: setattr(pool, "_num_idle", 1), "1 are not the 0 idle ones"),
        (lambda pool: pool._idle.clear(), "do not agree"),
        (lambda pool: pool.names.places.clear(), "do not agree"),
        (lambda pool: setattr(next(iter(pool._blocks.values())).piece, "num_held", 2), "1 blocks of host pi"),
    ],
)
def test_check_finds_a_corrupt_host_pool(corrupt, problem):
    pool = HostPool(5)
    blocks = pool.store(names(0, 1, None))
    pool.release(blocks[:1])
    pool.check()
    corrupt(pool)
    with pytest.raises(KVCacheError, match=problem):
        pool.check()


def test_check_finds_wrong_references():
    pool = HostPool(3)
    blocks = pool.store(names(0, 1))
    pool.check_references(blocks)
    for held in (blocks[:1], [*blocks, blocks[0]]):
        with pytest.raises(KVCacheError, match="has 1 references"):
            pool.check_references(held)
    with pytest.raises(KVCacheError, match="are held, and not in host memory"):
        pool.check_references([*blocks, HostBlock(-1, 0, 0)])


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
        self.pool.names.watch(name(content))
        self.watching.append(content)

    @rule(data=st.data())
    def unwatch(self, data):
        if self.watching:
            content = data.draw(st.sampled_from(self.watching))
            self.pool.names.unwatch(name(content))
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
        assert self.pool.names.may_find == (bool(found) or len(set(self.watching)) < len(self.watching))


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)


class HostPoolMachine(RuleBasedStateMachine):
    """The model: what each block holds, who holds it, and the order in which blocks were let go of."""

    @initialize(num_blocks=st.integers(1, 16))
    def start(self, num_blocks):
        self.pool = HostPool(num_blocks)
        self.contents = {}  # by block, those stored first first
        self.sizes = {}  # by piece
        self.handles = set()
        self.holders = []
        self.read = []
        self.reading = []  # step ids and blocks
        self.idle = []
        self.dropped = []
        self.step_id = 0

    @property
    def held(self):
        read = [*self.read, *(block for _, blocks in self.reading for block in blocks)]
        return [*read, *(block for blocks in self.holders for block in blocks)]

    @property
    def num_free(self):
        return self.pool.num_blocks - sum(self.sizes.values())

    def num_available(self, held):
        pieces = {block.piece for block in held}
        return self.pool.num_blocks - sum(size for piece, size in self.sizes.items() if piece in pieces)

    def _forget(self, block):
        del self.contents[block]
        if block in self.idle:
            self.idle.remove(block)
        if block.piece not in {other.piece for other in self.contents}:
            del self.sizes[block.piece]
            self.dropped.append(block.piece)

    def _let_go(self, blocks):
        """Of blocks that are among `held` no longer."""
        for place, block in reversed(list(enumerate(blocks))):
            if block in self.held or block in blocks[:place]:
                continue
            if self.contents[block] is None:
                self._forget(block)
            else:
                self.idle.append(block)

    @rule(contents=st.lists(st.sampled_from([None, *range(6)]), max_size=9), is_kept=st.booleans())
    def store(self, contents, is_kept):
        if not 0 < len(contents) <= self.num_available(self.held):
            with pytest.raises(KVCacheError, match="cannot take"):
                self.pool.store(names(*contents))
            return
        while self.num_free < len(contents):
            held = {block.piece for block in self.held}
            oldest = next(block.piece for block in self.idle if block.piece not in held)
            for block in [block for block in self.contents if block.piece == oldest]:
                self._forget(block)
        blocks = self.pool.store(names(*contents))
        handle = blocks[0].handle
        assert blocks == host_blocks_of(handle, len(contents))
        assert handle not in self.handles
        self.handles.add(handle)
        self.contents.update(zip(blocks, contents, strict=True))
        self.sizes.update(collections.Counter(block.piece for block in blocks))
        if is_kept:
            self.holders.append(blocks)
        else:
            self.pool.release(blocks)
            self._let_go(blocks)

    @rule(contents=st.lists(st.integers(0, 5), unique=True))
    def find_and_hold(self, contents):
        blocks = [self.pool.names.first(name(content)) for content in contents]
        blocks = [block for block in blocks if block is not None]
        self.pool.hold(blocks)
        self._add_holder(blocks)
        self.idle = [block for block in self.idle if block not in blocks]

    def _add_holder(self, blocks):
        if blocks:
            self.holders.append(blocks)

    def _take_some(self, data):
        """Blocks that a holder holds no longer, in the order it held them in."""
        held = data.draw(st.sampled_from(self.holders))
        some = held if data.draw(st.booleans()) else data.draw(st.sets(st.sampled_from(held)))
        self.holders.remove(held)
        self._add_holder([block for block in held if block not in some])
        return [block for block in held if block in some]

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), is_read=st.booleans())
    def let_go(self, data, is_read):
        blocks = self._take_some(data)
        if is_read:
            self.pool.read(blocks)
            self.read += blocks
        else:
            self.pool.release(blocks)
            self._let_go(blocks)

    @rule(num_left=st.integers(0, 2))
    def iterate(self, num_left):
        """All iterations but so many have ended then."""
        assert self.pool.emit(self.step_id) == tuple(self.dropped)
        self.reading.append((self.step_id, self.read))
        self.dropped, self.read = [], []
        last = self.step_id - num_left
        self.step_id += 1
        self.pool.complete(last)
        while self.reading and self.reading[0][0] <= last:
            self._let_go(self.reading.pop(0)[1])

    @rule()
    def forget_names(self):
        self.pool.forget_names()
        for block in list(self.idle):
            self._forget(block)
        self.contents = dict.fromkeys(self.contents)

    @rule(data=st.data())
    def ask_what_is_available_beside(self, data):
        blocks = data.draw(st.sets(st.sampled_from([*self.contents] or [None]))) - {None}
        assert self.pool.num_available_beside(blocks) == self.num_available([*self.held, *blocks])

    @invariant()
    def agrees_with_the_model(self):
        pool, found = self.pool, {}
        for block, content in self.contents.items():
            if content is not None:
                found.setdefault(name(content), []).append(block)
        pool.check()
        pool.check_references(block for blocks in self.holders for block in blocks)
        assert pool.names.places == found
        num_reading = len(self.read) + sum(len(blocks) for _, blocks in self.reading)
        assert counts(pool) == (self.num_free, self.num_available(self.held), num_reading)


TestHostPoolMachine = HostPoolMachine.TestCase
TestHostPoolMachine.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
