"""Who waits, who runs, and who holds what; with the moves of a request that keep all of it in step."""

from __future__ import annotations

import heapq

from jaxllm.sched.cache.blocks import BlockPool
from jaxllm.sched.cache.names import BlockName, names_of, root
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.copies import HostCopies
from jaxllm.sched.policies import PriorityPolicy
from jaxllm.sched.pool_state import PoolState
from jaxllm.sched.queues import RequestQueue
from jaxllm.sched.running import RunningRequests
from jaxllm.types import CopyProgress, Request, RequestStatus, Swap


class SchedulerState:
    """What a scheduler and its planner share; planners only read it.

    Attributes:
        config: the scheduler's limits.
        pool: the device's blocks.
        copies: KV in host memory.
        free_slots: slots nobody holds.
        live: requests by id: added and not finished.
        waiting: those to prefill, from their start or from what they find.
        swapped: those in host memory, unless they are on their way back.
        running: those that decode.
        prompts: those whose prompt, or what was lost of it, is computed in part; in order of their start.
        ending: those whose last token has been scheduled, and which still hold what they held.
        copied_out_at: when copies to the host end by prediction, by id, on the engine's clock.
        copy_out_until, copy_in_until: when the copies under way end by prediction, on the engine's clock.
    """

    def __init__(self, config: SchedulerConfig, priority: PriorityPolicy) -> None:
        """Nobody, and everything free."""
        self.config = config
        self.pool = BlockPool(config.num_gpu_blocks, config.block_size)
        self.copies = HostCopies(config.num_host_blocks)
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.live: dict[str, Request] = {}
        self._first_names: dict[str, BlockName] = {}
        self.waiting = RequestQueue(priority)
        self.swapped = RequestQueue(priority)
        self.running = RunningRequests(config.block_size)
        self.prompts: list[Request] = []
        self.ending: list[Request] = []
        self.copied_out_at: dict[str, float] = {}
        self.copy_out_until = self.copy_in_until = float("-inf")
        self._queued: list[tuple[int, int, Request]] = []  # a heap; with some that are queued no longer
        self._num_queued = 0

    # Views

    @property
    def is_queued(self) -> bool:
        """Whether anybody waits to start or to resume."""
        return bool(self.waiting or self.swapped)

    @property
    def num_holders(self) -> int:
        """Requests that can be preempted."""
        return len(self.running) + len(self.prompts)

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that a holder lacks to hold the KV of its first `num_tokens`."""
        return max(0, self.pool.blocks_for(num_tokens) - len(request.block_ids))

    def first_queued(self) -> Request | None:
        """Of the requests that are queued the one that arrived first."""
        queued = self._queued
        while queued:
            request = queued[0][2]
            if request.slot is None and request.status in (RequestStatus.WAITING, RequestStatus.SWAPPED):
                return request
            heapq.heappop(queued)
        return None

    def pools(self, num_free: int, num_host_free: int) -> PoolState:
        """The pools when so many blocks are left."""
        pool, running = self.pool, self.running
        sizes = num_free, pool.num_blocks, pool.block_size, num_host_free, self.copies.num_blocks
        load = len(running), running.num_tokens, len(self.waiting), self.copy_in_until
        return PoolState(*sizes, *load)

    # Names of blocks

    def learn_names(self, request: Request, num_tokens: int) -> list[BlockName]:
        """Names of a request's full blocks, at least those of its first `num_tokens` if these are known.

        Nothing without prefix caching.
        """
        names, size = request.block_names, self.config.block_size
        if self.config.enable_prefix_caching:
            num_blocks = min(num_tokens, request.num_known_tokens) // size
            if len(names) < num_blocks:
                before = names[-1].digest if names else root(request.cache_salt)
                names += names_of(request.token_ids(len(names) * size, num_blocks * size), size, before)
        return names

    def name_blocks(self, request: Request, limit: int | None = None) -> None:
        """Let others find a holder's full blocks whose tokens are known, of its first `limit` tokens."""
        num_computed = request.num_computed_tokens
        if limit is not None:
            num_computed = min(num_computed, limit)
        names = self.learn_names(request, num_computed)
        stop = min(len(names), num_computed // self.config.block_size)
        for place in range(request.num_named_blocks, stop):
            self.pool.name(request.block_ids[place], names[place])
        request.num_named_blocks = max(request.num_named_blocks, stop)

    def may_look_up(self, request: Request) -> bool:
        """Whether a waiting request may find blocks: not if it asks how likely its prompt is."""
        return self.config.enable_prefix_caching and request.sampling_params.prompt_logprobs is None

    def findable(self, request: Request) -> list[BlockName]:
        """Names that a waiting request looks up: not of its last token, which is to be computed."""
        if not self.may_look_up(request):
            return []
        num_tokens = request.num_tokens
        names = self.learn_names(request, num_tokens)
        num_blocks = (num_tokens - 1) // self.config.block_size
        return names if len(names) == num_blocks else names[:num_blocks]

    # Moves

    def settle(self, copies: CopyProgress, now: float) -> None:
        """Take what has happened since the last iteration: ends, and the progress of copies."""
        for request in self.ending:
            self.release(request)
        self.ending = []
        for swap in self.copies.arrived(copies.arrived):
            self.join(swap)
        if not copies.num_leaving:  # whatever was predicted, the link is idle
            self.copy_out_until = min(self.copy_out_until, now)
        if not self.copies.num_loading:
            self.copy_in_until = min(self.copy_in_until, now)

    def start(self, request: Request) -> bool:
        """Give a waiting request a slot, and the blocks that hold the KV of its first tokens already.

        Unless the others of its blocks are more than are free: then it stays.
        """
        pool = self.pool
        found = pool.find(self.findable(request))
        num_cached = len(found) * pool.block_size
        num_total = pool.blocks_for(request.num_tokens)
        num_unused = sum([not pool.num_references(block_id) for block_id in found])
        if num_total - len(found) + num_unused > pool.num_free:
            return False
        self.unqueue(request)
        pool.acquire(found)
        request.slot = self.free_slots.pop()
        request.is_slot_new = True
        request.block_ids, request.num_named_blocks = found, len(found)
        request.num_computed_tokens = num_cached
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached
        request.status = RequestStatus.RUNNING
        self.prompts.append(request)
        return True

    def hold(self, request: Request, num_tokens: int) -> None:
        """Give a queued request a slot, and blocks for so many tokens."""
        request.slot = self.free_slots.pop()
        request.is_slot_new = True
        self.grow(request, num_tokens)

    def grow(self, request: Request, num_tokens: int) -> None:
        """Give a request the blocks it lacks for its first `num_tokens`."""
        num_blocks = self.num_missing(request, num_tokens)
        if num_blocks:
            request.block_ids += self.pool.allocate(num_blocks)

    def release(self, request: Request, *, is_filled: bool = True) -> None:
        """Free a request's blocks and slot. Its old block table is left as it is for those who read it.

        Others find its full blocks, unless they are still to be filled.
        """
        assert request.slot is not None  # whoever holds blocks has one
        if is_filled:  # a row that sampled an end token may not have computed it
            self.name_blocks(request, request.num_known_tokens - 1)
        self.pool.release(request.block_ids)
        request.block_ids, request.num_named_blocks = [], 0
        self.free_slots.append(request.slot)
        request.slot = None

    def activate(self, request: Request) -> None:
        """Let a request that holds blocks and a slot go on where it is."""
        request.status = RequestStatus.RUNNING
        if request.num_computed_tokens == request.num_tokens - 1 > 0:
            request.num_passed = 0
            request.is_slot_new = False
            self.running.join(request)
        else:
            self.prompts.append(request)

    def resume(self, swap: Swap) -> None:
        """Let a request go on in the iteration that fills its blocks."""
        self.copies.read(swap)
        self.activate(swap.request)

    def join(self, swap: Swap) -> None:
        """Let a request go on whose copy an earlier iteration started; it need not have arrived."""
        self.copies.join(swap)
        self.activate(swap.request)

    def leave(self, request: Request) -> None:
        """Take a holder out of those that run; it keeps what it holds."""
        if request in self.prompts:
            self.prompts.remove(request)
        else:
            self.running.leave(request)

    def unqueue(self, request: Request) -> None:
        """Take a waiting request out of the queue."""
        self.waiting.remove(request)
        first = self._first_names.pop(request.request_id, None)
        if first is not None:
            self.pool.unwatch(first)

    def queue(self, request: Request) -> None:
        """Let a request without blocks wait: to be copied back if its KV is in host memory."""
        if request.host_handle is None:
            self.copied_out_at.pop(request.request_id, None)
            request.num_lost_tokens = max(request.num_lost_tokens, request.num_computed_tokens)
            request.num_computed_tokens = 0
            request.status = RequestStatus.WAITING
            self.waiting.add(request)
            if self.may_look_up(request) and (names := self.learn_names(request, self.config.block_size)):
                self._first_names[request.request_id] = names[0]
                self.pool.watch(names[0])
        else:
            request.status = RequestStatus.SWAPPED
            self.swapped.add(request)
        self._num_queued += 1  # so that requests are never compared
        heapq.heappush(self._queued, (request.arrival_index, self._num_queued, request))
