"""Blocks of the paged KV pool."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.errors import ConfigError, KVCacheError


class BlockPool:
    """Hands out block ids `0 .. num_blocks - 1`.

    Every method either succeeds or raises and leaves the pool as it was.
    """

    __slots__ = ("_free", "_is_used", "block_size", "num_blocks")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """A pool of `num_blocks` free blocks of `block_size` tokens each."""
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low ids leave first
        self._is_used = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks somebody holds."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the KV of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` free blocks.

        Raises:
            KVCacheError: fewer blocks are free.
        """
        free = self._free
        if not 0 <= num_blocks <= len(free):
            raise KVCacheError(
                f"cannot allocate {num_blocks} blocks: {len(free)} of {self.num_blocks} are free; "
                "preempt or finish a request first"
            )
        split = len(free) - num_blocks
        block_ids = free[split:]
        block_ids.reverse()
        del free[split:]
        for block_id in block_ids:
            self._is_used[block_id] = True
        return block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """Free blocks.

        Raises:
            KVCacheError: a block is free already (double free), named twice, or unknown.
        """
        is_used = self._is_used
        for place, block_id in enumerate(block_ids):
            if not (0 <= block_id < self.num_blocks and is_used[block_id]):
                for released in block_ids[:place]:
                    is_used[released] = True
                problem = "it is free" if 0 <= block_id < self.num_blocks else "there is none"
                raise KVCacheError(
                    f"cannot release block {block_id} of a pool of {self.num_blocks}: {problem}"
                )
            is_used[block_id] = False
        self._free.extend(block_ids)

    def check(self) -> None:
        """Verify that each block is either free, once, or used.

        Raises:
            KVCacheError: the pool is corrupt.
        """
        free = set(self._free)
        if len(free) != self.num_free:
            raise KVCacheError(f"the free list of {self.num_free} blocks holds {len(free)} distinct ones")
        for block_id, is_used in enumerate(self._is_used):
            if bool(is_used) == (block_id in free):
                raise KVCacheError(
                    f"block {block_id} is {'used and' if is_used else 'neither used nor'} free"
                )
