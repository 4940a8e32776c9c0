"""What policies are told of the pools."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import NamedTuple

from jaxllm.types import Request


@dataclasses.dataclass(slots=True)
class Progress:
    """What has happened since the scheduler began; only the scheduler changes it.

    Attributes:
        num_iterations: iterations.
        num_generated: tokens of their decodes.
        num_preempted: how often a request lost its blocks.
        num_ended: requests that have ended, for whatever reason.
        num_lost: tokens whose KV requests lost when they were preempted, and have to compute again.
    """

    num_iterations: int = 0
    num_generated: int = 0
    num_preempted: int = 0
    num_ended: int = 0
    num_lost: int = 0


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
        under_way: requests that have started and not ended, wherever their KV is: on the device, on the host,
            or dropped. Those that the iteration was to start before count, too.
        now: the engine's clock.
        progress: what has happened so far.
        lost_share: of what turns of conversations went on with that was not held for them, the share that
            was neither on the device nor on the host any more, of late.
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
    under_way: Collection[Request] = ()
    now: float = 0.0
    progress: Progress = Progress()
    lost_share: float = 0.0
