"""`SimulatedFiles`: blocks of the prefix cache in files of a disk that is a rate."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from jaxllm.errors import ConfigError
from jaxllm.sched.cache.names import BlockName


class SimulatedFiles:
    """Blocks in files, at most `num_blocks`, of which those least recently written or read go first.

    Reads and writes run beside each other, each one after another at `bandwidth`.

    Args:
        num_blocks: most of them.
        block_bytes: of one.
        bandwidth: bytes per second, in each direction.

    Raises:
        ConfigError: a number is not positive.
    """

    def __init__(self, num_blocks: int, block_bytes: float, bandwidth: float) -> None:
        if min(num_blocks, block_bytes, bandwidth) <= 0:
            given = f"num_blocks={num_blocks}, block_bytes={block_bytes}, bandwidth={bandwidth}"
            raise ConfigError(f"{given}: all must be positive")
        self.num_blocks, self._seconds = num_blocks, block_bytes / bandwidth
        self._written_at: collections.OrderedDict[BlockName, float] = collections.OrderedDict()
        self._write_free_at = self._read_free_at = 0.0

    def __contains__(self, name: BlockName) -> bool:
        """Whether a block is there, or being written."""
        return name in self._written_at

    def __len__(self) -> int:
        """Blocks that are there."""
        return len(self._written_at)

    def write(self, names: Iterable[BlockName], from_time: float) -> None:
        """Write blocks that are in host memory from that time on."""
        self._write_free_at = max(self._write_free_at, from_time)
        for name in names:
            if name not in self._written_at:
                self._write_free_at += self._seconds
                self._written_at[name] = self._write_free_at
            self._written_at.move_to_end(name)
        while len(self._written_at) > self.num_blocks:
            self._written_at.popitem(last=False)

    def read(self, names: Iterable[BlockName], now: float) -> tuple[float, list[bool]]:
        """Read blocks: when that has ended, and which of them were there."""
        self._read_free_at = max(self._read_free_at, now)
        were_there = []
        for name in names:
            written_at = self._written_at.get(name)
            were_there.append(written_at is not None)
            if written_at is not None:
                self._read_free_at = max(self._read_free_at, written_at) + self._seconds
                self._written_at.move_to_end(name)
        return self._read_free_at, were_there
