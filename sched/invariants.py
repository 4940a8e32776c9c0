"""What must hold between two iterations of the scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxllm.errors import KVCacheError
from jaxllm.sched.block_manager import BlockPool, EvictedBlocks, HostBudget
from jaxllm.sched.running import RunningRequests
from jaxllm.types import Request, RequestStatus


def check_invariants(
    *,
    pool: BlockPool,
    host: HostBudget,
    num_slots: int,
    free_slots: Sequence[int],
    live: Mapping[str, Request],
    running: RunningRequests,
    prefilling: Request | None,
    ending: Sequence[Request],
    waiting: Sequence[Request],
    swapped: Sequence[Request],
    loading: Sequence[Request],
    evicted: Mapping[str, EvictedBlocks],
) -> None:
    """Verify that every live request is in one place, and that blocks and slots add up.

    Args:
        pool: the device's blocks.
        host: the host's.
        num_slots: slots there are.
        free_slots: those nobody holds.
        live: requests by id: added and not finished.
        running: those that decode.
        prefilling: the one whose prompt spans iterations.
        ending: those whose last token has been scheduled, and which still hold what they held.
        waiting: those to prefill.
        swapped: those in host memory.
        loading: those that are copied back while others decode.
        evicted: what preempted requests left on the device, by id.

    Raises:
        KVCacheError: something does not hold; the message says what.
    """
    pool.check()
    host.check()
    running.check()
    holders = [*running, *ending, *([] if prefilling is None else [prefilling])]
    released = [r for r in live.values() if r.status is RequestStatus.RUNNING and r.slot is None]
    placed = [r.request_id for r in (*waiting, *swapped, *loading, *holders, *released)]
    _require(
        len(placed) == len(set(placed)) and set(placed) == live.keys(),
        f"live requests {sorted(live)} are queued as {sorted(placed)}",
    )
    for request in (*swapped, *loading):
        _require(
            request.status is RequestStatus.SWAPPED
            and request.num_computed_tokens + 1 == request.num_tokens
            and request.host_handle is not None,
            f"swapped {request}",
        )
    copied = [r for r in (*swapped, *loading, *waiting) if r.host_handle is not None]
    handles = [r.host_handle for r in live.values() if r.host_handle is not None]
    _require(len(handles) == len(set(handles)) == len(copied), f"host handles {sorted(handles)}")
    sizes = {handle: host.size(handle) for handle in handles}
    _require(host.num_used == sum(sizes.values()), f"{host.num_used} host blocks are used")
    for request in copied:
        size, all_blocks = sizes[request.host_handle or 0], pool.blocks_for(request.num_tokens - 1)
        is_whole = request.status is RequestStatus.SWAPPED
        _require(size == all_blocks if is_whole else size < all_blocks, f"{request}: {size} host blocks")
    for request in waiting:
        _require(
            request.status is RequestStatus.WAITING and request.num_computed_tokens == 0,
            f"waiting {request}",
        )
    for request in released:
        _require(request.num_tokens == request.max_total_tokens, f"released early: {request}")
    for request in (*waiting, *swapped, *released):
        _require(not request.block_ids and request.slot is None, f"{request} must hold nothing")
    for request in holders:
        _require(request.status is RequestStatus.RUNNING, f"{request} holds blocks")
    holders += loading
    for request in holders:
        # A prompt gets all its blocks at once; past it, the newest token has none yet.
        num_tokens = request.num_tokens if request is prefilling else request.num_computed_tokens
        _require(len(request.block_ids) == pool.blocks_for(num_tokens), f"{request} table size")
    away = {request.request_id for request in (*waiting, *swapped)}
    _require(evicted.keys() <= away, f"blocks are kept for {sorted(evicted.keys() - away)}")
    held = [block_id for request in holders for block_id in request.block_ids]
    _require(
        len(held) == len(set(held)) == pool.num_used,
        f"{pool.num_used} blocks are used; tables hold {len(held)}, {len(set(held))} distinct",
    )
    slots = [*free_slots, *(r.slot for r in holders if r.slot is not None)]
    _require(sorted(slots) == list(range(num_slots)), f"slots free or held: {sorted(slots)}")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise KVCacheError(f"scheduler invariant broken: {problem}")
