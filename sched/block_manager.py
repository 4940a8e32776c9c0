"""Reference-counted blocks of the paged KV pool, and the budget of blocks in host memory."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from jaxllm.errors import ConfigError, KVCacheError


@dataclasses.dataclass(frozen=True, slots=True)
class EvictedBlocks:
    """Free blocks whose contents are wanted back, in the order of a request's tokens.

    `ages` holds how often each had been handed out when it was evicted: once it was handed out again its
    contents are gone.
    """

    block_ids: tuple[int, ...]
    ages: tuple[int, ...]


class BlockPool:
    """Hands out block ids `0 .. num_blocks - 1`; a block is free while nobody references it.

    Evicted blocks are free ones whose contents somebody may want back. They are handed out last, the
    earliest eviction first and each from its tail, so that what is left of one is the head of a sequence.

    Every method either succeeds or raises and leaves the pool as it was.
    """

    __slots__ = ("_ages", "_evicted", "_free", "_ref_counts", "block_size", "num_blocks")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """A pool of `num_blocks` free blocks of `block_size` tokens each."""
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low ids leave first
        self._evicted: collections.OrderedDict[int, None] = collections.OrderedDict()  # the first leave first
        self._ref_counts = [0] * num_blocks
        self._ages = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks nobody references."""
        return len(self._free) + len(self._evicted)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the KV of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` free blocks, each with one reference.

        Raises:
            KVCacheError: fewer blocks are free.
        """
        free = self._free
        if not 0 <= num_blocks <= self.num_free:
            raise KVCacheError(
                f"cannot allocate {num_blocks} blocks: {self.num_free} of {self.num_blocks} are free; "
                "preempt or finish a request first"
            )
        split = max(0, len(free) - num_blocks)
        block_ids = free[split:]
        block_ids.reverse()
        del free[split:]
        while len(block_ids) < num_blocks:
            block_ids.append(self._evicted.popitem(last=False)[0])
        ref_counts, ages = self._ref_counts, self._ages
        for block_id in block_ids:
            ref_counts[block_id] = 1
            ages[block_id] += 1
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each block.

        Raises:
            KVCacheError: a block is free or unknown.
        """
        for block_id in block_ids:
            if not self._is_used(block_id):
                raise KVCacheError(f"cannot share block {block_id}: {self._describe(block_id)}")
        for block_id in block_ids:
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block; a block without references is free again.

        Raises:
            KVCacheError: a block is free already (double free) or unknown.
        """
        ref_counts = self._ref_counts
        freed = []
        for index, block_id in enumerate(block_ids):
            if not self._is_used(block_id):
                for released in block_ids[:index]:
                    ref_counts[released] += 1
                raise KVCacheError(f"cannot release block {block_id}: {self._describe(block_id)}")
            ref_counts[block_id] -= 1
            if ref_counts[block_id] == 0:
                freed.append(block_id)
        self._free.extend(freed)

    def evict(self, block_ids: Sequence[int]) -> EvictedBlocks:
        """Free blocks that one request alone references, in a way that `reclaim` may undo.

        Raises:
            KVCacheError: a block is free, unknown or shared.
        """
        for block_id in block_ids:
            if not self._is_used(block_id) or self._ref_counts[block_id] != 1:
                raise KVCacheError(f"cannot evict block {block_id}: {self._describe(block_id)}")
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] = 0
            self._evicted[block_id] = None
        return EvictedBlocks(tuple(block_ids), tuple(self._ages[block_id] for block_id in block_ids))

    def num_intact(self, evicted: EvictedBlocks) -> int:
        """How many of the first blocks still hold what they held."""
        ages = self._ages
        count = 0
        for block_id, age in zip(evicted.block_ids, evicted.ages, strict=True):
            if ages[block_id] != age:
                break
            count += 1
        return count

    def reclaim(self, evicted: EvictedBlocks) -> list[int]:
        """Take the intact head of what was evicted, with one reference each; the rest becomes plain free."""
        count = self.num_intact(evicted)
        self.forget(EvictedBlocks(evicted.block_ids[count:], evicted.ages[count:]))
        block_ids = list(evicted.block_ids[:count])
        for block_id in block_ids:
            del self._evicted[block_id]
            self._ref_counts[block_id] = 1
            self._ages[block_id] += 1
        return block_ids

    def forget(self, evicted: EvictedBlocks) -> None:
        """Say that nobody wants these contents back."""
        for block_id, age in zip(evicted.block_ids, evicted.ages, strict=True):
            if self._ages[block_id] == age:
                del self._evicted[block_id]
                self._free.append(block_id)

    def check(self) -> None:
        """Verify that each block is either free, once, or referenced.

        Raises:
            KVCacheError: the pool is corrupt.
        """
        free = {*self._free, *self._evicted}
        if len(free) != self.num_free:
            raise KVCacheError(f"the free lists of {self.num_free} blocks hold {len(free)} distinct ones")
        for block_id, count in enumerate(self._ref_counts):
            if count < 0 or (count == 0) != (block_id in free):
                where = "in" if block_id in free else "not in"
                raise KVCacheError(f"block {block_id} has {count} references and is {where} the free list")

    def _is_used(self, block_id: int) -> bool:
        return 0 <= block_id < self.num_blocks and self._ref_counts[block_id] > 0

    def _describe(self, block_id: int) -> str:
        if 0 <= block_id < self.num_blocks:
            count = self._ref_counts[block_id]
            return f"it has {count} references" if count else "it is free"
        return f"the pool holds blocks 0 to {self.num_blocks - 1}"


class HostBudget:
    """Blocks of host memory, lent to swapped requests by number, not by place.

    Every loan has a handle that is never given out again, so that whatever is still under way for an
    earlier loan cannot be taken for a later one. A loan is used until it is returned; a returned one may
    stay in flight, its blocks unavailable, while a copy out of it is under way.
    """

    __slots__ = ("_in_flight", "_next_handle", "_used", "num_blocks", "num_free")

    def __init__(self, num_blocks: int) -> None:
        """A budget of `num_blocks` free blocks; 0 is a machine without host memory to swap to."""
        if num_blocks < 0:
            raise ConfigError(f"the number of host blocks must be at least 0, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._used: dict[int, int] = {}
        self._in_flight: dict[int, int] = {}
        self._next_handle = 0

    @property
    def num_used(self) -> int:
        """Blocks lent."""
        return sum(self._used.values())

    @property
    def num_in_flight(self) -> int:
        """Blocks returned whose copy is still under way."""
        return sum(self._in_flight.values())

    def lend(self, num_blocks: int) -> int:
        """Take `num_blocks` free blocks; returns the handle of the loan.

        Raises:
            KVCacheError: fewer are free.
        """
        if not 0 < num_blocks <= self.num_free:
            raise KVCacheError(
                f"cannot take {num_blocks} host blocks: {self.num_free} of {self.num_blocks} are free"
            )
        self.num_free -= num_blocks
        handle = self._next_handle
        self._next_handle += 1
        self._used[handle] = num_blocks
        return handle

    def size(self, handle: int) -> int:
        """Blocks of a loan that was not returned.

        Raises:
            KVCacheError: there is no such loan.
        """
        if handle not in self._used:
            raise KVCacheError(f"there is no host loan {handle}: it was returned already or never made")
        return self._used[handle]

    def start_return(self, handle: int) -> None:
        """Return a loan that is being copied out; `finish_return` frees its blocks.

        Raises:
            KVCacheError: there is no such loan.
        """
        self._in_flight[handle] = self._take(self._used, handle)

    def finish_return(self, handle: int) -> None:
        """Free the blocks of a loan whose copy has ended.

        Raises:
            KVCacheError: no copy of such a loan is under way.
        """
        self.num_free += self._take(self._in_flight, handle)

    def cancel(self, handle: int) -> None:
        """Return a loan that nobody will read and free its blocks.

        Raises:
            KVCacheError: there is no such loan.
        """
        self.num_free += self._take(self._used, handle)

    def check(self) -> None:
        """Verify that free, used and in-flight blocks add up.

        Raises:
            KVCacheError: they do not.
        """
        total = self.num_free + self.num_used + self.num_in_flight
        if total != self.num_blocks or self.num_free < 0:
            raise KVCacheError(
                f"{self.num_free} free, {self.num_used} used and {self.num_in_flight} in-flight host blocks "
                f"are not the {self.num_blocks} there are"
            )

    def _take(self, loans: dict[int, int], handle: int) -> int:
        if handle not in loans:
            raise KVCacheError(f"there is no host loan {handle}: it was returned already or never made")
        return loans.pop(handle)
