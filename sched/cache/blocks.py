"""Blocks of the paged KV pool."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence

from jaxllm.errors import ConfigError, KVCacheError
from jaxllm.sched.cache.names import BlockName, NameIndex


class BlockPool:
    """Hands out the device's block ids `0 .. num_blocks - 1`, and finds them again by what they hold.

    A block has as many references as requests hold it; without any it is free. A full block may have a name,
    and then whoever starts with the same tokens may `acquire` it, used or free, until it is handed out as a
    new one. Free blocks are handed out from the front of a queue: those without a name were put there, those
    with one at its end, a sequence's last block first (vLLM V1's order: the least recently used go first, and
    tails before heads), or its first one with `heads_go_first`. Of blocks of equal names the one that was
    named first is found.

    Every method either succeeds or raises and leaves the pool as it was.

    Attributes:
        names: where the blocks of names are.
        reclaimed: blocks that lost their names since somebody emptied the list, as they were handed out; what
            they hold is still there until the next iteration runs.
        unfilled: blocks that got names since somebody emptied the set: they hold what these say once the next
            iteration has run.
        num_changes: counts whatever changed which blocks are free.
    """

    __slots__ = (
        "_free",
        "_names",
        "_num_references",
        "_num_shared",
        "block_size",
        "heads_go_first",
        "names",
        "num_blocks",
        "num_changes",
        "reclaimed",
        "unfilled",
    )

    def __init__(self, num_blocks: int, block_size: int, *, heads_go_first: bool = False) -> None:
        """A pool of `num_blocks` free blocks of `block_size` tokens each."""
        self.heads_go_first = heads_go_first
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = collections.OrderedDict.fromkeys(range(num_blocks))
        self._num_references = [0] * num_blocks
        self._num_shared = 0  # references beyond the first of each block
        self._names: list[BlockName | None] = [None] * num_blocks
        self.names: NameIndex[int] = NameIndex()
        self.reclaimed: list[tuple[int, BlockName]] = []
        self.unfilled: set[int] = set()
        self.num_changes = 0

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks somebody holds."""
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks nobody holds that have a name, and are found again until they are needed; counts them."""
        names = self._names
        return sum([names[block_id] is not None for block_id in list(self._free)])

    @property
    def has_shared(self) -> bool:
        """Whether several requests hold one block."""
        return self._num_shared > 0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the KV of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_references(self, block_id: int) -> int:
        """How many requests hold a block."""
        return self._num_references[block_id]

    def num_shared(self, block_ids: Sequence[int]) -> int:
        """How many blocks from the first on are held by others, too."""
        if not self._num_shared:
            return 0
        counts = self._num_references
        return next((place for place, one in enumerate(block_ids) if counts[one] < 2), len(block_ids))

    def free_blocks(self) -> Iterator[int]:
        """The free blocks, in the order they will be handed out in."""
        return iter(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` free blocks, which have no name any more.

        Raises:
            KVCacheError: fewer blocks are free.
        """
        free = self._free
        if not 0 <= num_blocks <= len(free):
            raise KVCacheError(
                f"cannot allocate {num_blocks} blocks: {len(free)} of {self.num_blocks} are free; "
                "preempt or finish a request first"
            )
        block_ids = list(itertools.islice(free, num_blocks))
        self.num_changes += 1
        names, num_references = self._names, self._num_references
        for block_id in block_ids:
            del free[block_id]
            num_references[block_id] = 1
            name = names[block_id]
            if name is not None:
                names[block_id] = None
                self.names.remove(name, block_id)
                self.reclaimed.append((block_id, name))
        return block_ids

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Hold blocks that `find` has found."""
        for block_id in block_ids:
            if self._num_references[block_id]:
                self._num_shared += 1
            else:
                del self._free[block_id]
            self._num_references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Give blocks of a sequence back, which are free if nobody else holds them.

        Raises:
            KVCacheError: a block is free already (double free), named more often than held, or unknown.
        """
        free, counts, names = self._free, self._num_references, self._names
        for place, block_id in enumerate(block_ids):
            if not (0 <= block_id < self.num_blocks and counts[block_id]):
                for released in block_ids[:place]:
                    counts[released] += 1
                problem = "it is free" if 0 <= block_id < self.num_blocks else "there is none"
                raise KVCacheError(
                    f"cannot release block {block_id} of a pool of {self.num_blocks}: {problem}"
                )
            counts[block_id] -= 1
        self.num_changes += 1
        for block_id in block_ids if self.heads_go_first else reversed(block_ids):
            if counts[block_id]:
                self._num_shared -= 1
                continue
            free[block_id] = None
            if names[block_id] is None:
                free.move_to_end(block_id, last=False)

    # Names

    def name(self, block_id: int, name: BlockName) -> None:
        """Say what a held block holds, or will when the iteration that is being decided has run."""
        if self._names[block_id] is None:
            self._names[block_id] = name
            self.names.add(name, block_id)
            self.unfilled.add(block_id)

    def name_of(self, block_id: int) -> BlockName | None:
        """What a block is called."""
        return self._names[block_id]

    def find(self, names: Sequence[BlockName]) -> list[int]:
        """Blocks of the first of `names`, until one is not there."""
        found = []
        for name in names:
            block_id = self.names.first(name)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def forget_names(self) -> None:
        """Find none of the present blocks again."""
        self._names = [None] * self.num_blocks
        self.names.clear()

    def check(self) -> None:
        """Verify that each block is either free or held, and that names lead to their blocks.

        Raises:
            KVCacheError: the pool is corrupt.
        """
        for block_id, count in enumerate(self._num_references):
            if count < 0 or (count == 0) != (block_id in self._free):
                raise KVCacheError(f"block {block_id} has {count} references, free: {block_id in self._free}")
        num_shared = sum(self._num_references) - self.num_used
        if num_shared != self._num_shared:
            raise KVCacheError(f"{num_shared} references are shared, not {self._num_shared}")
        places = self.names.places
        named = {block_id: name for name, block_ids in places.items() for block_id in block_ids}
        if named != {block_id: name for block_id, name in enumerate(self._names) if name is not None}:
            raise KVCacheError("the names of blocks and the blocks of names do not agree")
        if not self.names.is_consistent() or len(named) != sum(map(len, places.values())):
            raise KVCacheError("a name leads to no block, or twice to one, or is not counted")
