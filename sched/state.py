"""Who waits, who runs, and who holds what; with the moves of a request that keep all of it in step."""

from __future__ import annotations

import heapq
import itertools
import sys
from collections.abc import Collection, Iterable, Sequence

from jaxllm.errors import Faults
from jaxllm.sched.cache.blocks import BlockPool
from jaxllm.sched.cache.host import HostPool
from jaxllm.sched.cache.lookups import Lookups
from jaxllm.sched.cache.names import Absence, BlockName, cut_name
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.policies.contract import watched
from jaxllm.sched.policies.priority import CachePriority, PriorityPolicy
from jaxllm.sched.policies.retention import LeastRecentlyUsed, QueueAwareRetention, RetentionPolicy
from jaxllm.sched.pool_state import PoolState, Progress
from jaxllm.sched.queues import RequestQueue
from jaxllm.sched.running import RunningRequests
from jaxllm.types import CopyProgress, HostBlock, Request, RequestStatus, Swap


class SchedulerState:
    """What a scheduler and its planner share; planners only read it.

    Attributes:
        config: the scheduler's limits.
        pool: the device's blocks.
        host: blocks of host memory.
        loading: copies from the host that run beside the iterations, by handle, in order of their start.
        joined: those of them that the next iteration ends.
        discarded: handles of those that nobody waits for any more, and executors were not told of.
        free_slots: slots nobody holds.
        live: requests by id: added and not finished.
        under_way: those of them that have started, in order of their start.
        progress: what has happened so far.
        waiting: those to prefill, from their start or from what they find.
        swapped: those that hold blocks in host memory, and are not on their way back.
        running: those that decode.
        prompts: those whose prompt, or what was lost of it, is computed in part; in order of their start.
        aside: those that decode, but sit out for now.
        verifying: those whose drafts are being verified, until somebody says how many were right.
        sitting_out: ids of all that do, of queued ones, too.
        ending: those whose last token has been scheduled, and which still hold what they held.
        tails: by id, full blocks that released requests hold until their tokens, and so the blocks' names,
            are known; and the number of the first of them.
        being_read: by handle, host blocks that files are read into, what these hold, and host blocks that
            are kept for those who wait for it.
        awaited: reads that waiting requests wait for, by id.
        num_read: tokens that were read from files for waiting requests, by id.
        lookups: names of requests' blocks, and where these are.
        absences: where waiting requests' lookups ended, by id.
        copied_out_at: when copies to the host end by prediction, by id, on the engine's clock.
        copy_out_until, copy_in_until: when the copies under way end by prediction, on the engine's clock.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        priority: PriorityPolicy,
        retention: RetentionPolicy | None = None,
        faults: Faults | None = None,
    ) -> None:
        """Nobody, and everything free; `faults` keeps what `retention` raises."""
        retention = LeastRecentlyUsed() if retention is None else retention
        self.config = config
        self.being_read: dict[int, tuple[Sequence[HostBlock], Sequence[BlockName], Sequence[HostBlock]]] = {}
        self.awaited: dict[str, set[int]] = {}
        self.num_read: dict[str, int] = {}
        sizes = config.num_gpu_blocks, config.block_size
        self.pool = BlockPool(*sizes, heads_go_first=retention.loses_heads)
        self.host = HostPool(config.num_host_blocks, config.block_size, retention, faults)
        caches, past_gaps = config.enable_prefix_caching, retention.loses_heads
        self.lookups = Lookups(self.pool, self.host, is_on=caches, looks_past_gaps=caches and past_gaps)
        self.loading: dict[int, Swap] = {}
        self.joined: list[Swap] = []
        self.discarded: list[int] = []
        self._num_loads = 0
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.live: dict[str, Request] = {}
        self.under_way: dict[str, Request] = {}
        self.progress = Progress()
        self._watched: dict[str, list[BlockName]] = {}
        self.absences: dict[str, Absence] = {}
        looks_ahead = isinstance(retention, QueueAwareRetention) and retention.looks_ahead
        self._num_watched = sys.maxsize if looks_ahead else 1
        self._counts_findable = isinstance(priority, CachePriority) and priority.reads_cache
        self.waiting = RequestQueue(watched(priority))
        self.swapped = RequestQueue(watched(priority))
        self.running = RunningRequests(config.block_size)
        self.prompts: list[Request] = []
        self.aside: list[Request] = []
        self.verifying: list[Request] = []
        self.sitting_out: Collection[str] = ()
        self.ending: list[Request] = []
        self.tails: dict[str, tuple[int, list[int]]] = {}
        self.copied_out_at: dict[str, float] = {}
        self.copy_out_until = self.copy_in_until = float("-inf")
        # Heaps; with some that are queued no longer.
        self._queued: list[tuple[int, int, Request]] = []
        self._queued_alone: list[tuple[int, int, Request]] = []
        self._numbers = itertools.count()  # so that requests are never compared

    # Views

    @property
    def is_queued(self) -> bool:
        """Whether anybody waits to start or to resume."""
        return bool(self.waiting or self.swapped)

    @property
    def may_find(self) -> bool:
        """Whether a waiting request may find blocks, those of others that are about to start included."""
        return self.lookups.looks_past_gaps or self.pool.names.may_find or self.host.names.may_find

    @property
    def loaders(self) -> list[Request]:
        """Requests whose copies are on their way back, while others decode."""
        return [_owner(swap) for swap in self.loading.values()]

    def is_coming(self, found: Iterable[HostBlock]) -> bool:
        """Whether any of these host blocks is on its way to the device for somebody else."""
        if not self.loading:
            return False
        coming = {place for swap in self.loading.values() for place in swap.host_blocks}
        return not coming.isdisjoint(found)

    @property
    def num_holders(self) -> int:
        """Requests that can be preempted."""
        return len(self.running) + len(self.prompts)

    def sits_out(self, request: Request) -> bool:
        """Whether somebody lets it sit out."""
        return request.request_id in self.sitting_out

    def has_to_wait(self, request: Request) -> bool:
        """Whether a queued request waits for more than room: for files, or for who lets it sit out."""
        return request.request_id in self.awaited or self.sits_out(request)

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that a holder lacks to hold the KV of its first `num_tokens`."""
        return max(0, self.pool.blocks_for(num_tokens) - len(request.block_ids))

    def queue_of(self, request: Request) -> RequestQueue | None:
        """The queue that a request is in; None of those that hold blocks, or have ended."""
        if request.slot is None and request.status is RequestStatus.SWAPPED:
            return self.swapped
        return self.waiting if request.status is RequestStatus.WAITING else None

    def first_queued(self, *, is_alone: bool = False) -> Request | None:
        """Of those that are queued, or of those of them without a conversation, the one that came first."""
        queued = self._queued_alone if is_alone else self._queued
        while queued:
            request = queued[0][2]
            if self.queue_of(request) is not None:
                return request
            heapq.heappop(queued)
        return None

    def pools(self, num_free: int, num_host_free: int | None = None) -> PoolState:
        """The pools when so many blocks are left; without `num_host_free` those of the host as they are."""
        pool, running = self.pool, self.running
        if num_host_free is None:
            num_host_free = self.host.num_available
        sizes = num_free, pool.num_blocks, pool.block_size, num_host_free, self.host.num_blocks
        load = len(running), running.num_tokens, len(self.waiting), self.copy_in_until
        return PoolState(*sizes, *load, 0, 0, 0, 0, self.under_way.values(), self.host.now, self.progress)

    # Moves

    def settle(self, copies: CopyProgress, now: float) -> None:
        """Take what has happened since the last iteration: ends, and the progress of copies."""
        for request in self.ending:
            self.release(request, keeps_tail=self.config.enable_prefix_caching)
        self.ending = []
        for swap in [swap for handle, swap in self.loading.items() if handle in copies.arrived]:
            self.join(swap)
        if not copies.num_leaving:  # whatever was predicted, the link is idle
            self.copy_out_until = min(self.copy_out_until, now)
        if not self.loading:
            self.copy_in_until = min(self.copy_in_until, now)

    def sit_out(self, request_ids: Collection[str]) -> None:
        """Let these get no tokens from now on, and those who sat out before go on."""
        self.sitting_out = frozenset(request_ids)
        aside, self.aside = self.aside, []
        for request in aside:
            self.activate(request)
        for request in [one for one in self.running if one.request_id in self.sitting_out]:
            self.running.leave(request)
            self.aside.append(request)

    def take_places(self, request: Request, found: list[int | HostBlock | None]) -> Swap | None:
        """Give a queued request a slot, and blocks that hold what was found, or will hold what was not.

        Returns:
            The copy of those that are on the host, if there are any, or if the request was swapped.
        """
        pool, was_swapped = self.pool, bool(request.host_blocks)
        self.unqueue(request)
        pool.acquire([place for place in found if isinstance(place, int)])
        copied = [place for place in found if isinstance(place, HostBlock)]
        self.host.hold(copied)
        self.host.release(request.host_blocks)
        request.host_blocks = []
        targets = iter(new := pool.allocate(len(copied)))
        empty = iter(pool.allocate(found.count(None)))
        request.block_ids = [
            place if isinstance(place, int) else next(empty if place is None else targets) for place in found
        ]
        request.num_named_blocks = 0
        request.slot = self.free_slots.pop()
        request.is_slot_new = True
        if not (copied or was_swapped):
            return None
        self._num_loads += 1
        return Swap(request, self._num_loads, tuple(new), tuple(copied))

    def start(self, request: Request, *, copies: bool = False) -> Swap | bool:
        """Give a queued request a slot, and the blocks that hold the KV of its first tokens already.

        With `copies`, or if it was swapped, those in host memory count, too.

        Returns:
            The copy of these, or whether a waiting one starts: not, if more other blocks are to be free.
        """
        pool, found = self.pool, self.lookups.locate(request, on_host=copies)
        if request.host_blocks:
            return self.take_places(request, found) or True
        on_device = [place for place in found if isinstance(place, int)]
        num_unused = sum([not pool.num_references(block_id) for block_id in on_device])
        if pool.blocks_for(request.num_tokens) - len(on_device) + num_unused > pool.num_free:
            return False
        if request.uncut_names:  # blocks that are found keep their names
            for number, name in enumerate(self.lookups.findable(request)[: len(found)]):
                if found[number] is not None:
                    request.block_names[number] = name
        swap = self.take_places(request, found)
        runs = _runs(found, pool.block_size)
        request.num_computed_tokens = runs.pop(0)[1] if runs and not runs[0][0] else 0
        request.kept_ranges = runs
        num_read = self.num_read.pop(request.request_id, 0)
        if request.num_cached_tokens is None:
            num_found = len(found) - found.count(None)
            request.num_cached_tokens = num_found * pool.block_size
            num_copied = (num_found - len(on_device)) * pool.block_size
            request.num_disk_cached_tokens = min(num_copied, num_read)
            request.num_host_cached_tokens = num_copied - request.num_disk_cached_tokens
        return swap or True

    def grow(self, request: Request, num_tokens: int) -> None:
        """Give a request the blocks it lacks for its first `num_tokens`."""
        if num_blocks := self.num_missing(request, num_tokens):
            request.block_ids += self.pool.allocate(num_blocks)

    def release(self, request: Request, *, is_filled: bool = True, keeps_tail: bool = False) -> None:
        """Free a request's blocks and slot. Its old block table is left as it is for those who read it.

        Others find its full blocks, unless they are still to be filled. With `keeps_tail` those that lack
        names, since their tokens are in flight, are held until it ends, unless room is short.
        """
        assert request.slot is not None  # whoever holds blocks has one
        if is_filled:  # a row that sampled an end token may not have computed it
            self.lookups.name_blocks(request, request.num_known_tokens - 1)
        if keeps_tail and self.pool.num_free > len(self.live):
            first, stop = request.num_named_blocks, request.num_computed_tokens // self.pool.block_size
            if tail := request.block_ids[first:stop]:
                self.tails[request.request_id] = first, tail
                self.pool.acquire(tail)
        self.pool.release(request.block_ids)
        request.block_ids, request.kept_ranges, request.num_named_blocks = [], [], 0
        self.free_slots.append(request.slot)
        request.slot = None

    def release_tail(self, request: Request) -> None:
        """Name and free the last blocks of a released request that ends, now that its tokens are known."""
        request.num_named_blocks, tail = self.tails.pop(request.request_id)
        self.lookups.name_blocks(request, request.num_known_tokens - 1, tail)
        self.pool.release(tail)

    def activate(self, request: Request) -> None:
        """Let a request that holds blocks and a slot go on where it is."""
        request.status = RequestStatus.RUNNING
        if request.num_computed_tokens == request.num_tokens - 1 > 0:
            request.num_passed = 0
            request.is_slot_new = False
            self.running.join(request)
        else:
            self.prompts.append(request)

    def accept(self, request: Request) -> None:
        """Let a request whose drafts were verified go on after its known tokens; the others never were."""
        self.verifying.remove(request)
        request.num_tokens = request.num_known_tokens
        request.num_computed_tokens = request.num_tokens - 1
        num_blocks = self.pool.blocks_for(request.num_computed_tokens)
        self.pool.release(request.block_ids[num_blocks:])
        request.block_ids = request.block_ids[:num_blocks]
        self.lookups.name_blocks(request)
        self.activate(request)

    def resume(self, swap: Swap, *, as_prompt: bool = False) -> None:
        """Let a request go on in the iteration that fills its blocks; `as_prompt` with a chunk in it."""
        request = _owner(swap)
        self.host.read(swap.host_blocks)
        if as_prompt:
            self.begin(request)
        else:
            self.activate(request)
            self.lookups.name_blocks(request, request.num_known_tokens - 1)

    def begin(self, request: Request) -> None:
        """Let a request that holds blocks and a slot compute its prompt."""
        request.status = RequestStatus.RUNNING
        self.prompts.append(request)
        self.lookups.name_blocks(request)

    def load(self, swap: Swap) -> None:
        """Let a copy back run beside the iterations; its request holds its blocks meanwhile."""
        _owner(swap).status = RequestStatus.SWAPPED
        self.loading[swap.handle] = swap

    def join(self, swap: Swap) -> None:
        """Let a request go on whose copy an earlier iteration started; it need not have arrived."""
        del self.loading[swap.handle]
        self.joined.append(swap)
        self.resume(swap)

    def cancel(self, request: Request) -> bool:
        """Forget a request's copy back, if one runs beside the iterations; whether one did."""
        for swap in self.loading.values():
            if swap.request is request:
                del self.loading[swap.handle]
                self.discarded.append(swap.handle)
                self.host.release(swap.host_blocks)
                return True
        return False

    def emit(self) -> tuple[tuple[Swap, ...], tuple[int, ...]]:
        """Loads that the next iteration ends, and those that nobody waits for any more."""
        told = tuple(self.joined), tuple(self.discarded)
        self.joined, self.discarded = [], []
        return told

    def leave(self, request: Request) -> None:
        """Take a holder out of those that run; it keeps what it holds."""
        if request in self.prompts:
            self.prompts.remove(request)
        elif request in self.aside:
            self.aside.remove(request)
        elif request in self.verifying:
            self.verifying.remove(request)
        else:
            self.running.leave(request)

    def unqueue(self, request: Request) -> None:
        """Take a request out of the queue it is in."""
        self.copied_out_at.pop(request.request_id, None)
        self.awaited.pop(request.request_id, None)
        self.absences.pop(request.request_id, None)
        queue = self.swapped if request.status is RequestStatus.SWAPPED else self.waiting
        queue.remove(request)
        for name in self._watched.pop(request.request_id, ()):
            self.pool.names.unwatch(name)
            self.host.names.unwatch(name)

    def queue(self, request: Request) -> None:
        """Let a request without device blocks wait: to be copied back if its KV is in host memory."""
        if not request.host_blocks:
            request.num_lost_tokens = max(request.num_lost_tokens, request.num_computed_tokens)
            request.num_computed_tokens = 0
            request.status = RequestStatus.WAITING
            self.under_way.pop(request.request_id, None)
            if request.uncut_names:
                request.block_names = [cut_name(name) for name in request.uncut_names]
            if self._counts_findable:
                found = self.lookups.locate(request)
                num_found = len(found) - found.count(None)
                request.num_findable_tokens = num_found * self.config.block_size
            self.waiting.add(request)
            if self.lookups.may_look_up(request):
                num_tokens = min(self._num_watched * self.config.block_size, request.num_tokens)
                names, count = self.lookups.learn_names(request, num_tokens), self._num_watched
                self._watched[request.request_id] = [*names[:count], *request.uncut_names[:count]]
            for name in self._watched.get(request.request_id, ()):
                self.pool.names.watch(name)
                self.host.names.watch(name)
        else:
            request.status = RequestStatus.SWAPPED
            self.swapped.add(request)
        entry = request.arrival_index, next(self._numbers), request
        heapq.heappush(self._queued, entry)
        if not request.goes_on:
            heapq.heappush(self._queued_alone, entry)


def _runs(found: Sequence[object], size: int) -> list[tuple[int, int]]:
    """Ranges of tokens that were found."""
    runs, start = [], 0
    for is_there, run in itertools.groupby(found, key=lambda place: place is not None):
        stop = start + len(list(run)) * size
        if is_there:
            runs.append((start, stop))
        start = stop
    return runs


def _owner(swap: Swap) -> Request:
    assert swap.request is not None  # nobody's blocks are only ever copied out
    return swap.request
