"""What policies are told of the pools."""

from __future__ import annotations

from typing import NamedTuple


class PoolState(NamedTuple):
    """How full the pools are when a policy is asked.

    Attributes:
        num_free, num_blocks: device blocks.
        block_size: tokens per block.
        num_host_free, num_host_blocks: host blocks; those that only the prefix cache keeps are free, too.
        num_running: requests that decode.
        num_context_tokens: their tokens together.
        num_waiting: requests that wait for their first prefill, or for one more.
        copy_in_until: when the copies to the device under way end by prediction, on the engine's clock.
        num_shared: of a victim's blocks, those from the first on that others hold, too: they stay, and it
            finds them again if it is dropped.
        num_on_host: of a victim's blocks, those whose copies are on the host already.
        num_to_copy: blocks that a queued request's return would copy from the host, with those that come
            along; it finds others on the device.
        num_to_recompute: tokens of a waiting request that it would compute if it did not copy these blocks.
    """

    num_free: int
    num_blocks: int
    block_size: int
    num_host_free: int
    num_host_blocks: int
    num_running: int = 0
    num_context_tokens: int = 0
    num_waiting: int = 0
    copy_in_until: float = float("-inf")
    num_shared: int = 0
    num_on_host: int = 0
    num_to_copy: int = 0
    num_to_recompute: int = 0
