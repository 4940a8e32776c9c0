"""What the pool will be when those who are planned to take blocks have taken them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxllm.sched.cache.blocks import BlockPool
from jaxllm.sched.cache.names import BlockName, NameIndex
from jaxllm.types import HostBlock


class Hit(NamedTuple):
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


class PoolPreview:
    """Takes blocks of a pool, and gives some back, without changing it.

    Whoever is planned first takes first, as it will be when the plan is carried out: a new block loses its
    name, and what is computed is found under its name by those who are planned later.

    Attributes:
        kept: blocks of the host that victims will hold.
        num_stored: blocks that they will store there.
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
        self.kept: set[HostBlock] = set()
        self.num_stored = 0

    def take(self, num_blocks: int) -> None:
        """As many new blocks, or all there are."""
        while num_blocks > 0 and (block_id := next(self._queue, None)) is not None:
            if block_id not in self._held:
                self._gone.add(block_id)
                num_blocks -= 1

    def compute(self, names: Sequence[BlockName]) -> None:
        """What full blocks will hold."""
        self._computed.update(names)

    def find(
        self,
        names: Sequence[BlockName],
        on_host: NameIndex[HostBlock] | None = None,
        *,
        looks_past_gaps: bool = False,
    ) -> Hit:
        """Blocks of `names`, until one will not be there, nor is `on_host`; or all of them that are."""
        count = num_first = num_missing = 0
        free: list[int] = []
        held: list[int] = []
        copied: list[HostBlock] = []
        for number, name in enumerate(names):
            if not self._find(name, free, held) and name not in self._computed:
                place = None if on_host is None else on_host.first(name)
                if place is None and looks_past_gaps:
                    continue
                if place is None:
                    break
                copied.append(place)
            if count == number:
                num_first += 1
            elif not num_missing:
                num_missing = number - num_first
            count += 1
        if not count:
            return NO_HIT
        return Hit(count, tuple(free), tuple(held), tuple(copied), num_first, num_missing)

    def find_each(self, names: Sequence[BlockName], host_blocks: Sequence[HostBlock]) -> Hit:
        """Where the blocks are that a swapped request has on the host; `names` are of the first ones."""
        free: list[int] = []
        held: list[int] = []
        copied = [
            place
            for number, place in enumerate(host_blocks)
            if number >= len(names) or not self._find(names[number], free, held)
        ]
        return Hit(len(host_blocks), tuple(free), tuple(held), tuple(copied))

    def _find(self, name: BlockName, free: list[int], held: list[int]) -> bool:
        """Look for a block in the pool, and add it to those that are free, or held."""
        pool, may_be_free = self._pool, False
        for block_id in pool.names.places.get(name, ()):
            if block_id in self._gone:
                may_be_free = not self._is_exact  # a lookup may find this one yet
                continue
            is_held = pool.num_references(block_id) or block_id in self._held
            (held if is_held and not may_be_free else free).append(block_id)
            return True
        return False

    def hold(self, hit: Hit) -> None:
        """What was found."""
        self._held.update(hit.free)

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
