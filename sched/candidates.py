"""Who could start or resume in an iteration, the most urgent first, within what the pools have left."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from jaxllm.sched.actions import ResumeAction, ResumeDecision
from jaxllm.sched.block_manager import BlockPool
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.policies import SchedulerPolicy
from jaxllm.sched.pressure import PoolState
from jaxllm.sched.queues import RequestQueue, Verdict
from jaxllm.types import Request


class Candidates:
    """Reads the queues, the pools and the policies of a scheduler, and changes none of them.

    Args:
        config: its limits.
        policy: its policies.
        pool: the device's blocks.
        waiting: requests to prefill.
        swapped: requests in host memory.
        free_slots: slots nobody holds.
        num_intact_tokens: tokens of a waiting request whose KV nobody has overwritten.
        started: the requests that hold blocks of either kind.
        pool_state: what policies are told, of free blocks and of the requests that started.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: SchedulerPolicy,
        pool: BlockPool,
        *,
        waiting: RequestQueue,
        swapped: RequestQueue,
        free_slots: Sequence[int],
        num_intact_tokens: Callable[[Request], int],
        started: Callable[[], list[Request]],
        pool_state: Callable[[int, Sequence[Request]], PoolState],
    ) -> None:
        self._config = config
        self._policy = policy
        self._pool = pool
        self._waiting, self._swapped = waiting, swapped
        self._free_slots = free_slots
        self._num_intact_tokens, self._started, self._pool_state = num_intact_tokens, started, pool_state
        self._max_prefill_seqs = config.max_prefill_seqs or config.max_num_seqs
        skips = policy.restore.skips
        # What the visit of a request leads to that is too large, and of one that does not suit now.
        self._too_large = Verdict.SKIP if skips else Verdict.STOP
        self._unsuited = Verdict.SKIP_ONE if skips else Verdict.STOP

    def startable(self, now: float, num_free: int, prefilling: Request | None) -> list[Request]:
        """Waiting requests that fit an iteration together with `num_free` blocks.

        The tokens that `prefilling`, whose prompt spans iterations, has left come first.
        """
        if not self._free_slots or not self._waiting or num_free < 1:
            return []
        pool, policy = self._pool, self._policy
        too_large, unsuited = self._too_large, self._unsuited
        if pool.blocks_for(self._waiting.min_num_tokens) > num_free:
            return []
        budget = self._config.max_num_batched_tokens
        lengths: list[int] = []
        if prefilling is not None:
            lengths.append(min(prefilling.num_tokens - prefilling.num_computed_tokens, budget))
        num_left = budget - sum(lengths)
        num_slots = min(len(self._free_slots), self._max_prefill_seqs - len(lengths))
        taken: list[Request] = []
        started: list[Request] = []  # filled in for the first who asks

        def judge(request: Request) -> Verdict:
            nonlocal num_free, num_left, started
            if len(taken) == num_slots:
                return Verdict.STOP
            length = request.num_tokens - self._num_intact_tokens(request)
            if lengths:  # only an iteration's first prompt is split
                if length > num_left:
                    return too_large if length == request.num_tokens else unsuited
                if not policy.batching.fits([*lengths, length], budget):
                    return unsuited
            num_needed = pool.blocks_for(request.num_tokens)
            if num_needed > num_free:
                return too_large
            if request.num_in_flight:
                return unsuited  # just preempted: its newest token is not known yet
            # Whoever has the pool to itself starts, whatever the policy says: nothing would ever free more.
            if num_free < pool.num_blocks or self._swapped:
                started = started or [*self._started(), *taken]
                if not policy.admission.admits(request, num_needed, self._pool_state(num_free, started)):
                    return too_large
                started.append(request)
            num_free -= num_needed
            lengths.append(min(length, budget))
            num_left -= lengths[-1]
            taken.append(request)
            return Verdict.TAKE

        return self._waiting.visit(now, judge, self._least_too_long(num_free))

    def resumable(
        self, now: float, num_free: int, decide: Callable[[Request, int], ResumeDecision] | None
    ) -> tuple[list[tuple[Request, ResumeDecision]], list[tuple[Request, ResumeDecision]]]:
        """Swapped requests that fit into `num_free` blocks with their next token, and how they come back.

        Args:
            now: the engine's clock.
            num_free: blocks.
            decide: says how a request comes back when so many blocks are free; None lets the first that fits
                resume at once, alone.

        Returns:
            Those that resume, and those whose copy is to be given up.
        """
        taken: list[tuple[Request, ResumeDecision]] = []
        given_up: list[tuple[Request, ResumeDecision]] = []
        if not self._swapped or not self._free_slots or num_free < 1:
            return taken, given_up
        pool = self._pool
        num_slots = len(self._free_slots)
        watermark = self._policy.restore.resume_watermark

        def judge(request: Request) -> Verdict:
            nonlocal num_free, num_slots
            if num_slots == 0:
                return Verdict.STOP
            num_needed = pool.blocks_for(request.num_tokens)
            if num_needed > num_free:
                return self._too_large
            if watermark is not None and num_free < pool.num_blocks:
                num_spare = 1 + int(watermark * pool.num_blocks)
                if pool.blocks_for(request.num_computed_tokens) + num_spare > num_free:
                    return self._too_large
            if request.num_in_flight:
                return self._unsuited
            if decide is not None:
                decision = decide(request, num_free)
                if decision.action is ResumeAction.LATER:
                    return Verdict.STOP
                if decision.action is ResumeAction.RECOMPUTE:
                    given_up.append((request, decision))
                    return Verdict.SKIP_ONE
            elif taken:
                return Verdict.STOP
            else:
                decision = ResumeDecision(ResumeAction.AT_ONCE)
            taken.append((request, decision))
            num_free -= num_needed
            num_slots -= 1
            return Verdict.TAKE

        self._swapped.visit(now, judge, self._least_too_long(num_free))
        return taken, given_up

    def _least_too_long(self, num_free: int) -> float:
        """Tokens that `num_free` blocks do not hold, if requests of so many may be passed over."""
        return num_free * self._pool.block_size + 1 if self._policy.restore.skips else math.inf
