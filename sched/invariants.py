"""What must hold between two iterations of the scheduler."""

from __future__ import annotations

import collections

from jaxllm.errors import KVCacheError
from jaxllm.sched.state import SchedulerState
from jaxllm.types import RequestStatus


def check_invariants(state: SchedulerState) -> None:
    """Verify that every live request is in one place, and that blocks and slots add up.

    Raises:
        KVCacheError: something does not hold; the message says what.
    """
    pool, host, live, running = state.pool, state.host, state.live, state.running
    waiting, swapped, loading = list(state.waiting), list(state.swapped), state.loaders
    pool.check()
    host.check()
    running.check()
    holders = [*running, *state.ending, *state.prompts, *state.aside]
    released = [r for r in live.values() if r.status is RequestStatus.RUNNING and r.slot is None]
    placed = [r.request_id for r in (*waiting, *swapped, *loading, *holders, *released)]
    _require(
        len(placed) == len(set(placed)) and set(placed) == live.keys(),
        f"live requests {sorted(live)} are queued as {sorted(placed)}",
    )
    for request in (*swapped, *loading):
        _require(
            request.status is RequestStatus.SWAPPED
            and (request.num_computed_tokens > 0 or bool(request.kept_ranges))
            and request.num_computed_tokens < request.num_tokens,
            f"swapped {request}",
        )
    for request in swapped:
        num_blocks = len(request.host_blocks)
        is_right = num_blocks == pool.blocks_for(request.num_computed_tokens)
        _require(is_right, f"{request} has {num_blocks} host blocks")
    for request in live.values():
        _require(request in swapped or not request.host_blocks, f"{request} holds host blocks")
    on_host = [place for request in swapped for place in request.host_blocks]
    on_host += [place for swap in state.loading.values() for place in swap.host_blocks]
    on_host += [place for read, _, kept in state.being_read.values() for place in (*read, *kept)]
    host.check_references(on_host)
    for request in waiting:
        is_fresh = request.status is RequestStatus.WAITING and request.num_computed_tokens == 0
        _require(is_fresh, f"waiting {request}")
    for queue, name in ((state.waiting, "waiting"), (state.swapped, "swapped")):
        num_tokens = sum(request.num_tokens for request in queue)
        _require(queue.num_tokens == num_tokens, f"{queue.num_tokens} {name} tokens")
    for request in released:
        _require(request.num_tokens == request.max_total_tokens, f"released early: {request}")
    for request in (*waiting, *swapped, *released):
        _require(not request.block_ids and request.slot is None, f"{request} must hold nothing")
    for request in state.prompts:
        _require(request.num_computed_tokens < request.num_tokens, f"{request} has nothing left to compute")
    for request in holders:
        _require(request.status is RequestStatus.RUNNING, f"{request} holds blocks")
    holders += loading
    for request in holders:
        num_blocks = pool.blocks_for(request.num_computed_tokens)
        if request.kept_ranges:
            num_blocks = pool.blocks_for(request.kept_ranges[-1][1])
        _require(len(request.block_ids) == num_blocks, f"{request} table size")
    held = [block_id for request in holders for block_id in request.block_ids]
    counts = collections.Counter(held)
    _require(
        len(counts) == pool.num_used and all(pool.num_references(one) == counts[one] for one in counts),
        f"{pool.num_used} blocks are used; tables hold {len(held)}, {len(counts)} distinct",
    )
    slots = [*state.free_slots, *(r.slot for r in holders if r.slot is not None)]
    _require(sorted(slots) == list(range(state.config.max_num_seqs)), f"slots free or held: {sorted(slots)}")
    first = min([*waiting, *swapped], key=lambda request: request.arrival_index, default=None)
    _require(state.first_queued() is first, f"{first} is the first that is queued")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise KVCacheError(f"scheduler invariant broken: {problem}")
