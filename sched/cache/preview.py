"""What the pool will be when those who are planned to take blocks have taken them."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxllm.sched.cache.blocks import BlockPool
from jaxllm.sched.cache.names import Absence, BlockName, NameIndex
from jaxllm.types import HostBlock


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Hit:
    """What a lookup found: so many blocks, nobody's in `free`, somebody's in `held`, `copied` on the host.

    Those in `free` take one that is free, or may do so.

    The others will have been computed. The first `num_first` of the sequence are among them, and the next
    one that is comes `num_missing` later, if that is not 0.
    """

    num_blocks: int
    free: tuple[int, ...]
    held: tuple[int, ...]
    copied: tuple[HostBlock, ...] = ()
    num_first: int = 0
    num_missing: int = 0

    @property
    def num_on_device(self) -> int:
        """Blocks that need no new one of the device."""
        return self.num_blocks - len(self.copied)


NO_HIT = Hit(0, (), ())
_OnHost = NameIndex[HostBlock] | None
_NAMES_AT_A_TIME = 8
"""Names that together take as long as one alone."""


class _Walk:
    """Where the blocks of a sequence will be, as far as anybody has asked.

    Of sequences that begin alike only what differs is looked up: names are chained, so that those before
    equal ones are equal, too.

    Attributes:
        names: of the sequence that was looked up last.
        places: of its blocks, one by one: on the device, on the host, nowhere (None), or `COMPUTED`.
    """

    COMPUTED = object()

    def __init__(self) -> None:
        """Of nobody."""
        self.names: Sequence[BlockName] = ()
        self.places: list[object] = []
        self._found: list[int] = []  # numbers of blocks that will be somewhere,
        self._free: list[int] = []  # that are nobody's,
        self._copied: list[int] = []  # and that are on the host
        self._hits: dict[int, Hit] = {}  # by how many blocks were found
        self._parting = 0  # how many blocks the last two sequences had in common

    def cut(self, size: int) -> None:
        """Forget all but the first `size` blocks."""
        if size < len(self.places):
            del self.places[size:]
            for numbers in (self._found, self._free, self._copied):
                del numbers[bisect.bisect_left(numbers, size) :]
            for count in [count for count in self._hits if count > len(self._found)]:
                del self._hits[count]

    def follow(self, names: Sequence[BlockName]) -> None:
        """Turn to another sequence, of which only the blocks stay known that are the same."""
        if names is not self.names:
            low, high = 0, min(len(names), len(self.places))
            parting = self._parting  # many part where those before them did
            if parting < high and names[parting] != self.names[parting]:
                high = parting
            if 0 < parting <= high and names[parting - 1] == self.names[parting - 1]:
                low = parting
            while low < high:
                middle = (low + high) // 2
                is_equal = names[middle] == self.names[middle]
                low, high = (middle + 1, high) if is_equal else (low, middle)
            self.cut(low)
            self.names, self._parting = names, low

    def add_each(self, others: Iterable[tuple[object, bool]], *, stops: bool) -> None:
        """Say where the next blocks are, and whether that is free; it `stops` after one that is nowhere."""
        places, found, free, copied = self.places, self._found, self._free, self._copied
        for number, (place, is_free) in enumerate(others, len(places)):
            places.append(place)
            if place is not None:
                found.append(number)
            elif stops:
                break
            if is_free:
                free.append(number)
            elif isinstance(place, HostBlock):
                copied.append(number)

    def add_held(self, block_ids: Sequence[int]) -> None:
        """Say of the next blocks that they are on the device, and somebody's."""
        number = len(self.places)
        self.places += block_ids
        self._found += range(number, number + len(block_ids))

    def cut_changed(self, is_changed: Callable[[object], bool]) -> None:
        """Forget all from the first block on that was nobody's and is so no more."""
        first = next((number for number in self._free if is_changed(self.places[number])), None)
        if first is not None:
            self.cut(first)

    def cut_missing(self) -> None:
        """Forget all from the first block on that is not on the device, and may be now."""
        first = self._num_first(len(self._found))
        self.cut(min([first, *self._copied[:1]]))

    def hit(self, num_blocks: int) -> Hit:
        """What was found among the first blocks."""
        count = bisect.bisect_left(self._found, num_blocks)
        if not count:
            return NO_HIT
        hit = self._hits.get(count)
        if hit is None:
            stop, num_first = self._found[count - 1] + 1, self._num_first(count)
            free = self._free[: bisect.bisect_left(self._free, stop)]
            copied = self._copied[: bisect.bisect_left(self._copied, stop)]
            is_free, places = set(free), self.places
            held = [places[number] for number in self._found[:count] if number not in is_free]
            hit = self._hits[count] = Hit(
                count,
                tuple([place for number in free if isinstance(place := places[number], int)]),
                tuple([place for place in held if isinstance(place, int)]),
                tuple([place for number in copied if isinstance(place := places[number], HostBlock)]),
                num_first,
                self._found[num_first] - num_first if num_first < count else 0,
            )
        return hit

    def _num_first(self, count: int) -> int:
        """How many of the first `count` that were found nothing is missing before."""
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._found[middle] == middle else (low, middle)
        return low


class PoolPreview:
    """Takes blocks of a pool, and gives some back, without changing it.

    Whoever is planned first takes first, as it will be when the plan is carried out: a new block loses its
    name, and what is computed is found under its name by those who are planned later.

    Attributes:
        kept: blocks of the host that victims will hold.
        num_stored: blocks that they will store there.
        num_looked_up: names that were looked up.
    """

    def __init__(self, pool: BlockPool, *, is_exact: bool = True) -> None:
        """As the pool is now; not `is_exact` if it is told of more blocks that are taken than will be."""
        self._pool, self._is_exact = pool, is_exact
        self._queue: Iterator[int] = pool.free_blocks()
        self._gone: set[int] = set()
        self._held: set[int] = set()
        self._computed: set[BlockName] = set()
        self._released: dict[int, int] = {}
        self._freed: set[int] = set()
        self._walks: dict[tuple[BlockName, bool, bool], _Walk] = {}  # by the first block's name, and how
        self._news: dict[int, list[BlockName] | None] = {}  # by how many names had been added before
        self.kept: set[HostBlock] = set()
        self.num_stored = self.num_looked_up = 0

    def take(self, num_blocks: int) -> None:
        """As many new blocks, or all there are."""
        before = len(self._gone)
        while num_blocks > 0 and (block_id := next(self._queue, None)) is not None:
            if block_id not in self._held:
                self._gone.add(block_id)
                num_blocks -= 1
        if len(self._gone) > before:
            for walk in self._walks.values():
                walk.cut_changed(self._gone.__contains__)

    def compute(self, names: Sequence[BlockName]) -> None:
        """What full blocks will hold."""
        if names:
            self._computed.update(names)
            for walk in self._walks.values():
                walk.cut_missing()

    def is_there(self, name: BlockName, on_host: _OnHost = None) -> bool:
        """Whether a block of this name will be anywhere."""
        self.num_looked_up += 1
        ((place, _),) = self._look_up([name], on_host)
        return place is not None

    def find(
        self,
        names: Sequence[BlockName],
        on_host: _OnHost = None,
        *,
        looks_past_gaps: bool = False,
        is_chain: bool = True,
    ) -> Hit:
        """Blocks of `names`, until one will not be there, nor is `on_host`; or all of them that are.

        Unless `is_chain`, equal names may come after others that are not.
        """
        return self._walk(names, on_host, looks_past_gaps, is_chain).hit(len(names))

    def _walk(
        self, names: Sequence[BlockName], on_host: _OnHost, looks_past_gaps: bool, is_chain: bool
    ) -> _Walk:
        """Look up what is not known of a sequence yet."""
        walk = _Walk()
        if is_chain and names:
            walk = self._walks.setdefault((names[0], on_host is not None, looks_past_gaps), walk)
        walk.follow(names)
        if looks_past_gaps and self._is_nowhere(names[len(walk.places) :], on_host):
            walk.places += [None] * (len(names) - len(walk.places))
        elif len(walk.places) < len(names) and None not in walk.places[-1:]:
            walk.add_held(self._first_held(names, len(walk.places)))
        if len(walk.places) < len(names) and (looks_past_gaps or None not in walk.places[-1:]):
            num_known = len(walk.places)
            walk.add_each(self._look_up(names[num_known:], on_host), stops=not looks_past_gaps)
            self.num_looked_up += len(walk.places) - num_known
        return walk

    def absence(self, names: Sequence[BlockName]) -> Absence:
        """Where a sequence's names end that may be on the device."""
        absence = self._pool.names.absence(names)
        self.num_looked_up += (absence.stop - absence.first) // _NAMES_AT_A_TIME
        return absence

    def is_lasting(self, absence: Absence, names: Sequence[BlockName]) -> bool:
        """Whether what of a chain of `names` was on the device nowhere will still be there nowhere.

        Only what has come since is compared, by its place in the chain.
        """
        first, stop, num_added = absence
        if num_added not in self._news:
            self._news[num_added] = self._pool.names.added_since(num_added)
        news = self._news[num_added]
        if news is None or _have_any(names, first, stop, news):
            return False
        if len(self._computed) < stop - first:
            return not _have_any(names, first, stop, self._computed)
        return self._computed.isdisjoint(names[first:stop])

    def find_each(
        self, names: Sequence[BlockName], host_blocks: Sequence[HostBlock], *, is_chain: bool = True
    ) -> Hit:
        """Where the blocks are that a swapped request has on the host; `names` are of the first ones."""
        walk = self._walk(names[: len(host_blocks)], None, True, is_chain)
        hit, both = walk.hit(len(host_blocks)), itertools.zip_longest(host_blocks, walk.places)
        copied = tuple([place for place, found in both if found is None])
        return Hit(len(host_blocks), hit.free, hit.held, copied)

    def _is_nowhere(self, names: Sequence[BlockName], on_host: _OnHost) -> bool:
        """Whether none of these blocks will be anywhere: most often nobody shares a sequence's end."""
        self.num_looked_up += len(names) // _NAMES_AT_A_TIME
        return (
            self._pool.names.places.keys().isdisjoint(names)
            and (on_host is None or on_host.places.keys().isdisjoint(names))
            and self._computed.isdisjoint(names)
        )

    def _first_held(self, names: Sequence[BlockName], start: int) -> list[int]:
        """Blocks of `names[start:]` up to one that is not simply somebody's: most of what many share."""
        found: list[int] = []
        places, gone, count = self._pool.names.places, self._gone, self._pool.num_references
        for name in itertools.islice(names, start, None):
            block_ids = places.get(name)
            if block_ids is None or block_ids[0] in gone or not count(block_ids[0]):
                break
            found.append(block_ids[0])
        self.num_looked_up += len(found)
        return found

    def _look_up(self, names: Sequence[BlockName], on_host: _OnHost) -> Iterator[tuple[object, bool]]:
        """Of each name where its block will be, and whether that is nobody's, or may be."""
        num_references, gone = self._pool.num_references, self._gone
        held, computed = self._held, self._computed
        for name, block_ids in zip(names, map(self._pool.names.places.get, names), strict=True):
            may_be_free = False
            for block_id in block_ids or ():
                if block_id not in gone:
                    yield block_id, may_be_free or not (num_references(block_id) or block_id in held)
                    break
                may_be_free = not self._is_exact  # a lookup may find this one yet
            else:
                if name in computed:
                    yield _Walk.COMPUTED, False
                else:
                    yield (None if on_host is None else on_host.first(name)), False

    def hold(self, hit: Hit) -> None:
        """What was found."""
        if hit.free:
            self._held.update(hit.free)
            for walk in self._walks.values():
                walk.cut_changed(self._held.__contains__)

    def release(self, block_ids: Sequence[int]) -> int:
        """Blocks of a holder; returns how many nobody holds any more."""
        pool, before = self._pool, len(self._freed)
        if pool.has_shared:
            for block_id in block_ids:
                released = self._released[block_id] = self._released.get(block_id, 0) + 1
                if released == pool.num_references(block_id):
                    self._freed.add(block_id)
        else:
            self._freed.update(block_ids)
        return len(self._freed) - before

    def num_released(self, hit: Hit) -> int:
        """How many of the blocks that were found, and held, nobody holds any more."""
        return len(self._freed.intersection(hit.held))


def _have_any(names: Sequence[BlockName], first: int, stop: int, others: Iterable[BlockName]) -> bool:
    """Whether any of `names[first:stop]`, a chain from its first block on, is one of the others."""
    return any(first <= one.number < stop and names[one.number] == one for one in others)
