"""Who waits, who runs, and who holds what; with the moves of a request that keep all of it in step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxllm.errors import KVCacheError
from jaxllm.sched.block_manager import BlockPool, EvictedBlocks
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.copies import HostCopies
from jaxllm.sched.invariants import check_invariants
from jaxllm.sched.ledger import Ledger
from jaxllm.sched.policies import SchedulerPolicy
from jaxllm.sched.pressure import PoolState, RecentPressure
from jaxllm.sched.queues import RequestQueue
from jaxllm.sched.running import RunningRequests
from jaxllm.types import Request, RequestStatus, Swap


class SchedulerState:
    """What a scheduler and its parts share.

    Attributes:
        config, policy, ledger: those of the scheduler.
        pool: the device's blocks.
        copies: KV in host memory, within the blocks of `host`.
        free_slots: slots nobody holds.
        live: requests by id: added and not finished.
        waiting: those to prefill.
        swapped: those in host memory, unless they are on their way back.
        running: those that decode.
        prefilling: the one whose prompt spans iterations.
        ending: those whose last token has been scheduled, and which still hold what they held.
        evicted: what preempted requests left on the device, by id.
        copied_out_at: when copies to the host end by prediction, by id, on the engine's clock.
        recent: what happened of late.
        num_leaving: blocks of device memory beside the pool that copies out take.
    """

    def __init__(self, config: SchedulerConfig, policy: SchedulerPolicy, ledger: Ledger | None) -> None:
        """Nobody, and everything free."""
        self.config = config
        self.policy = policy
        self.ledger = ledger
        self.pool = BlockPool(config.num_gpu_blocks, config.block_size)
        self.copies = HostCopies(config.num_host_blocks)
        self.host = self.copies.budget
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.live: dict[str, Request] = {}
        self.waiting = RequestQueue(policy.priority)
        self.swapped = RequestQueue(policy.priority)
        self.running = RunningRequests(config.block_size)
        self.prefilling: Request | None = None
        self.ending: list[Request] = []
        self.evicted: dict[str, EvictedBlocks] = {}
        self.copied_out_at: dict[str, float] = {}
        self.recent = RecentPressure()
        self.num_leaving = 0

    # Views

    def started(self) -> list[Request]:
        """Requests that hold blocks of either kind."""
        started = list(self.running.requests)
        if self.prefilling is not None:
            started.append(self.prefilling)
        if self.copies.is_loading:
            started += self.copies.loading
        if self.swapped:
            started += self.swapped
        return started

    def num_growing(self) -> int:
        """Blocks that must be free for the running requests' next tokens."""
        running, growing = self.running, self.running.growing
        # vLLM 0.2.5 asks for a free block on behalf of each request in turn, also of one that needs none.
        needs_spare = (
            self.policy.decode_needs_free_block and len(running) > 1 and running.requests[-1] not in growing
        )
        return len(growing) + needs_spare

    def num_intact_tokens(self, request: Request) -> int:
        """Tokens of a waiting request whose KV nobody has overwritten, or is in host memory."""
        evicted = self.evicted.get(request.request_id)
        if evicted is None and request.host_handle is None:
            return 0
        num_blocks = self.copies.num_blocks(request)
        if evicted is not None:
            num_blocks = max(num_blocks, self.pool.num_intact(evicted))
        return min(num_blocks * self.pool.block_size, request.num_tokens - 1)

    def pools(self, num_free: int, started: Sequence[Request], *more: Any) -> PoolState:
        """The pools when `num_free` blocks are left; `more` is what only action policies are told."""
        pool, host = self.pool, self.host
        num_host_free = host.num_free + self.copies.num_head_blocks
        return PoolState(
            num_free,
            pool.num_blocks,
            pool.block_size,
            num_host_free,
            host.num_blocks,
            started,
            self.recent,
            *more,
        )

    def pressure(self, num_free: int) -> PoolState:
        """The pools when `num_free` blocks are left, with what the costs of an action depend on."""
        running = self.running.requests
        num_context_tokens = sum([one.num_tokens for one in running])
        return self.pools(
            num_free,
            self.started(),
            len(running),
            num_context_tokens,
            len(self.waiting),
            self.num_leaving,
            self.copies.num_head_blocks,
        )

    # Moves

    def hold(self, request: Request, num_blocks: int) -> None:
        """Give a request the blocks it lacks and a slot."""
        request.block_ids += self.pool.allocate(num_blocks - len(request.block_ids))
        request.slot = self.free_slots.pop()

    def take_back(self, request: Request) -> None:
        """Give a request what is intact of the blocks it held; before anybody else takes blocks."""
        self.copied_out_at.pop(request.request_id, None)
        if not request.metrics.num_preemptions:
            return
        lost_share = 1.0
        evicted = self.evicted.pop(request.request_id, None)
        if evicted is not None:
            request.block_ids = self.pool.reclaim(evicted)
            lost_share -= len(request.block_ids) / len(evicted.block_ids)
        self.recent.returned(lost_share)

    def release(self, request: Request, *, keep: bool = False) -> None:
        """Free a request's blocks and slot. Its old block table is left as it is for those who read it.

        With `keep` it gets back what nobody has taken in the meantime.
        """
        if request.slot is None:
            raise KVCacheError(f"cannot release request {request.request_id!r}: it holds no slot")
        if keep:
            self.evicted[request.request_id] = self.pool.evict(request.block_ids)
        else:
            self.pool.release(request.block_ids)
        request.block_ids = []
        self.free_slots.append(request.slot)
        request.slot = None

    def resume(self, swap: Swap) -> None:
        """Let a request decode in the iteration that fills its blocks."""
        self.copies.read(swap)
        swap.request.status = RequestStatus.RUNNING
        self.running.join(swap.request)

    def join(self, swap: Swap) -> None:
        """Let a request decode whose copy an earlier iteration started; it need not have arrived."""
        self.copies.join(swap)
        swap.request.status = RequestStatus.RUNNING
        self.running.join(swap.request)

    def queue_again(self, victim: Request) -> None:
        """Let a preempted request wait to be prefilled from its start."""
        self.copied_out_at.pop(victim.request_id, None)
        if victim.status is RequestStatus.SWAPPED:
            victim.metrics.num_swaps -= 1  # it counts as dropped
        victim.num_computed_tokens = 0
        victim.status = RequestStatus.WAITING
        self.waiting.add(victim)

    def check(self) -> None:
        """Verify every invariant of queues, slots and blocks, in O(live requests + blocks).

        Raises:
            KVCacheError: one is broken; the message says which.
        """
        check_invariants(
            pool=self.pool,
            host=self.host,
            num_slots=self.config.max_num_seqs,
            free_slots=self.free_slots,
            live=self.live,
            running=self.running,
            prefilling=self.prefilling,
            ending=self.ending,
            waiting=list(self.waiting),
            swapped=list(self.swapped),
            loading=self.copies.loading,
            evicted=self.evicted,
        )
