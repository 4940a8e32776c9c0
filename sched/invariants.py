"""What must hold between two iterations of the scheduler."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Collection, Iterable

from jaxllm.errors import KVCacheError
from jaxllm.sched.state import SchedulerState
from jaxllm.types import Request, RequestStatus


def check_invariants(state: SchedulerState, held_ids: Collection[int] = ()) -> None:
    """Verify that every live request is in one place, and that blocks and slots add up.

    `held_ids` are blocks that are held for nobody who is live.

    Raises:
        KVCacheError: something does not hold; the message says what.
    """
    pool, host, live, running = state.pool, state.host, state.live, state.running
    waiting, swapped, loading = list(state.waiting), list(state.swapped), state.loaders
    pool.check()
    host.check()
    running.check()
    holders = [*running, *state.ending, *state.prompts, *state.aside, *state.verifying]
    released = [r for r in live.values() if r.status is RequestStatus.RUNNING and r.slot is None]
    placed = [r.request_id for r in (*waiting, *swapped, *loading, *holders, *released)]
    _require(
        len(placed) == len(set(placed)) and set(placed) == live.keys(),
        f"live requests {sorted(live)} are queued as {sorted(placed)}",
    )
    _require_each(
        (*swapped, *loading),
        lambda r: (
            r.status is RequestStatus.SWAPPED
            and (r.num_computed_tokens > 0 or bool(r.kept_ranges))
            and r.num_computed_tokens < r.num_tokens
        ),
        "swapped",
    )
    sizes = {request: pool.blocks_for(request.num_computed_tokens) for request in live.values()}
    _require_each(swapped, lambda r: len(r.host_blocks) == sizes[r], "blocks on the host")
    _require_each(live.values(), lambda r: r in swapped or not r.host_blocks, "holds host blocks")
    on_host = [place for request in swapped for place in request.host_blocks]
    on_host += [place for swap in state.loading.values() for place in swap.host_blocks]
    on_host += [place for read, _, kept in state.being_read.values() for place in (*read, *kept)]
    host.check_references(on_host)
    _require_each(
        waiting, lambda r: r.status is RequestStatus.WAITING and r.num_computed_tokens == 0, "waiting"
    )
    for queue, name in ((state.waiting, "waiting"), (state.swapped, "swapped")):
        num_tokens = sum(request.num_tokens for request in queue)
        _require(queue.num_tokens == num_tokens, f"{queue.num_tokens} {name} tokens")
    _require_each(released, lambda r: r.num_tokens == r.max_total_tokens, "released early")
    nobody = *waiting, *swapped, *released
    _require_each(nobody, lambda r: not r.block_ids and r.slot is None, "must hold nothing")
    _require_each(state.prompts, lambda r: r.num_computed_tokens < r.num_tokens, "has nothing to compute")
    _require_each(holders, lambda r: r.status is RequestStatus.RUNNING, "holds blocks")
    holders += loading
    sizes |= {r: pool.blocks_for(r.kept_ranges[-1][1]) for r in holders if r.kept_ranges}
    _require_each(holders, lambda r: len(r.block_ids) == sizes[r], "table size")
    tails = (tail for _, tail in state.tails.values())
    held = itertools.chain(held_ids, *tails, *(request.block_ids for request in holders))
    counts = collections.Counter(held)
    _require(
        len(counts) == pool.num_used and all(pool.num_references(one) == counts[one] for one in counts),
        f"{pool.num_used} blocks are used; tables hold {counts.total()}, {len(counts)} distinct",
    )
    slots = [*state.free_slots, *(r.slot for r in holders if r.slot is not None)]
    _require(sorted(slots) == list(range(state.config.max_num_seqs)), f"slots free or held: {sorted(slots)}")
    first = min([*waiting, *swapped], key=lambda request: request.arrival_index, default=None)
    _require(state.first_queued() is first, f"{first} is the first that is queued")
    alone = [request for request in (*waiting, *swapped) if not request.goes_on]
    first = min(alone, key=lambda request: request.arrival_index, default=None)
    _require(state.first_queued(is_alone=True) is first, f"{first} is the first that is queued alone")


def _require_each(requests: Iterable[Request], holds: Callable[[Request], bool], problem: str) -> None:
    for request in requests:
        _require(holds(request), f"{problem}: {request}")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise KVCacheError(f"scheduler invariant broken: {problem}")
