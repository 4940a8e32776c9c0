"""Allocators of KV memory: whose slots are whose, by hand and for any requests."""

import collections
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import ConfigError
from jaxllm.research.simulator.allocation import (
    RULES,
    BuddyAllocator,
    Paging,
    Reservations,
    SequenceState,
    StaticBatches,
    Usage,
    occupancy,
)

MEMORIES = {
    **{rule: lambda slots, rule=rule: Reservations(slots, rule, 64) for rule in RULES},
    "batches": StaticBatches,
    "paging": lambda slots: Paging(slots, 4),
}
requests = st.lists(st.tuples(st.integers(10, 40), st.integers(1, 24)), min_size=2, max_size=20)


class Watched:
    """A memory whose usage is checked whenever somebody looks."""

    def __init__(self, memory):
        self.memory = memory
        self.num_slots, self.admit, self.release = memory.num_slots, memory.admit, memory.release
        self.make_room = memory.make_room

    def usage(self):
        usage = self.memory.usage()
        assert min(usage) >= 0
        assert sum(usage) == self.num_slots
        return usage


def test_buddies_are_halved_and_joined():
    buddies = BuddyAllocator(16)
    assert [buddies.allocate(size) for size in (3, 5, 1)] == [0, 8, 4]
    assert buddies.blocks == {0: 4, 8: 8, 4: 1}
    assert buddies.allocate(4) is None, "three slots are left, in blocks of 2 and 1"
    buddies.free(8)
    assert buddies.allocate(8) == 8
    for address in (0, 4, 8):
        buddies.free(address)
    assert buddies.allocate(16) == 0
    with pytest.raises(ConfigError, match="must be a power of two"):
        BuddyAllocator(24)


@given(st.lists(st.integers(-6, 20), max_size=60))
def test_buddies_never_overlap(actions):
    buddies, sizes = BuddyAllocator(64), {}
    for action in actions:
        if action > 0:
            address = buddies.allocate(action)
            if address is not None:
                sizes[address] = action
        elif sizes:
            address = sorted(sizes)[-action % len(sizes)]
            buddies.free(address)
            del sizes[address]
        blocks = sorted(buddies.blocks.items())
        assert {address: size >= sizes[address] for address, size in blocks} == dict.fromkeys(sizes, True)
        assert all(address % size == 0 and address + size <= 64 for address, size in blocks)
        assert all(one + size <= other for (one, size), (other, _) in itertools.pairwise(blocks))
    for address in sizes:
        buddies.free(address)
    assert buddies.allocate(64) == 0, "everything is joined again"


@given(requests, st.sampled_from(sorted(MEMORIES)), st.sampled_from([64, 128]))
@settings(deadline=None)
def test_every_slot_is_counted_once_and_everybody_ends(lengths, name, num_slots):
    memory = Watched(MEMORIES[name](num_slots))
    found = occupancy(lengths * 8, memory)
    assert memory.usage() == Usage(0, 0, 0, 0, num_slots)
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.num_steps >= max(output for _, output in lengths)
    if name != "paging":
        assert found.num_preemptions == 0


@pytest.mark.parametrize(
    ("name", "lengths", "usage"),
    [
        ("oracle", (6, 4), Usage(14, 6, 0, 12, 32)),  # two of 10 tokens, in blocks of 16
        ("pow2", (7, 3), Usage(16, 4, 2, 10, 32)),  # 3 outputs become 4
        ("max", (6, 4), Usage(7, 3, 54, 0, 0)),
        ("batches", (6, 4), Usage(14, 6, 0, 0, 44)),
        ("paging", (6, 4), Usage(14, 2, 0, 0, 48)),  # two blocks of 4, the second with a slot to go
        ("paging", (6, 1), Usage(14, 0, 2, 0, 48)),
    ],
)
def test_usage_by_hand(name, lengths, usage):
    memory = MEMORIES[name](64)
    for sequence in memory.admit(collections.deque(SequenceState(*lengths) for _ in range(2))):
        sequence.num_outputs += 1
    assert memory.usage() == usage


def test_a_static_batch_is_as_long_as_its_longest():
    memory = StaticBatches(64)
    first, second = SequenceState(10, 2), SequenceState(10, 10)
    waiting = collections.deque([first, second, SequenceState(20, 5), SequenceState(1, 1)])
    assert memory.admit(waiting) == [first, second], "three of 25 slots do not fit into 64"
    first.num_outputs = second.num_outputs = 2
    assert memory.usage() == Usage(24, 8, 8, 0, 24)
    memory.release(first)
    assert memory.usage() == Usage(12, 8, 20, 0, 24)
    assert memory.admit(waiting) == []
    memory.release(second)
    assert len(memory.admit(waiting)) == 2


def test_paging_takes_blocks_from_the_newest():
    memory = Paging(16, 4)
    first, second = SequenceState(6, 8), SequenceState(7, 8)
    waiting = collections.deque([first, second])
    assert memory.admit(waiting) == [first, second]
    first.num_outputs, second.num_outputs = 2, 1  # eight tokens each: both blocks are full
    assert memory.make_room([first, second]) == [second]
    assert memory.usage() == Usage(8, 4, 0, 0, 4)
    assert occupancy([(6, 8), (7, 8)], Paging(16, 4)).num_preemptions >= 1


def test_what_never_fits_or_waits_is_refused():
    for make in MEMORIES.values():
        with pytest.raises(ConfigError, match=r"100 \+ 30 tokens does not fit into 64 slots"):
            occupancy([(100, 30)], make(64))
        with pytest.raises(ConfigError, match="no request ever waited"):
            occupancy([(1, 1)], make(64))
    with pytest.raises(ConfigError, match="rule"):
        Reservations(64, "min", 64)
