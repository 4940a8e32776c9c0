"""What the blocks of pools are."""

from __future__ import annotations

from typing import NamedTuple

from jaxllm.sched.cache.blocks import BlockPool
from jaxllm.sched.cache.host import HostPool


class PoolUsage(NamedTuple):
    """Blocks of a pool: held by requests, kept by the prefix cache alone, and holding nothing."""

    total: int
    held: int
    cached: int
    free: int


def usage_of(pool: BlockPool, host: HostPool) -> tuple[PoolUsage, PoolUsage]:
    """Of the device's pool and the host's."""
    num_available = pool.num_free
    num_free = max(0, num_available - pool.num_cached)
    on_host = _usage(host.num_blocks, host.num_available, host.num_free)
    return _usage(pool.num_blocks, num_available, num_free), on_host


def _usage(total: int, available: int, free: int) -> PoolUsage:
    return PoolUsage(total, max(0, total - available), max(0, available - free), free)
