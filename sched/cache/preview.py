"""What the pool will be when those who are planned to take blocks have taken them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxllm.sched.cache.blocks import BlockPool
from jaxllm.sched.cache.names import BlockName


class Hit(NamedTuple):
    """What a lookup found: so many blocks, nobody's in `free`, somebody's in `held`."""

    num_blocks: int
    free: tuple[int, ...]
    held: tuple[int, ...]


NO_HIT = Hit(0, (), ())


class PoolPreview:
    """Takes blocks of a pool, and gives some back, without changing it.

    Whoever is planned first takes first, as it will be when the plan is carried out: a new block loses its
    name, and what is computed is found under its name by those who are planned later.
    """

    def __init__(self, pool: BlockPool) -> None:
        """As the pool is now."""
        self._pool = pool
        self._queue: Iterator[int] = pool.free_blocks()
        self._gone: set[int] = set()
        self._held: set[int] = set()
        self._computed: set[BlockName] = set()
        self._released: dict[int, int] = {}
        self._freed: set[int] = set()

    def take(self, num_blocks: int) -> None:
        """As many new blocks, or all there are."""
        while num_blocks > 0 and (block_id := next(self._queue, None)) is not None:
            if block_id not in self._held:
                self._gone.add(block_id)
                num_blocks -= 1

    def compute(self, names: Sequence[BlockName]) -> None:
        """What full blocks will hold."""
        self._computed.update(names)

    def find(self, names: Sequence[BlockName]) -> Hit:
        """Blocks of the first of `names`, until one will not be there."""
        pool, count = self._pool, 0
        free: list[int] = []
        held: list[int] = []
        for name in names:
            block_id = next((one for one in pool.named(name) if one not in self._gone), None)
            if block_id is not None:
                is_held = pool.num_references(block_id) or block_id in self._held
                (held if is_held else free).append(block_id)
            elif name not in self._computed:
                break
            count += 1
        return Hit(count, tuple(free), tuple(held)) if count else NO_HIT

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
