"""Iteration-level continuous batching over a paged KV pool."""

from __future__ import annotations

import bisect
import itertools
import operator

from jaxllm.errors import ConfigError, KVCacheError, RequestError
from jaxllm.sched.block_manager import BlockPool
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.policies import PreemptionAction, SchedulerPolicy
from jaxllm.types import FinishReason, PrefillChunk, Request, RequestStatus, SchedulerOutput

_arrival_index = operator.attrgetter("arrival_index")
_DEFAULT_POLICY = SchedulerPolicy()


class Scheduler:
    """Decides, iteration by iteration, which requests compute which tokens.

    A request's way, and what it holds (blocks and a slot, or nothing):

        add -> waiting -> prefilling -> running -> ending -> released -> finish
               nothing    holds         holds      holds     nothing
                  ^           only a prompt that   |
                  |           spans iterations     |
                  +---------- preempted -----------+

    An iteration either prefills or decodes; prefill is tried first. Lengths advance when a step is
    scheduled, not when its tokens are known, so that the host can run one step ahead. A request whose
    last token (by length) has been scheduled is `ending`: the step still reads its block table, so
    what it holds is released at the next `schedule`, and it stays RUNNING until `finish` is called.

    Executors must read `block_ids` and `slot` before the next call of any method.
    """

    def __init__(self, config: SchedulerConfig, policy: SchedulerPolicy = _DEFAULT_POLICY) -> None:
        """An empty scheduler within the limits of `config`."""
        self.config = config
        self.policy = policy
        self._pool = BlockPool(config.num_gpu_blocks, config.block_size)
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._max_prefill_seqs = config.max_prefill_seqs or config.max_num_seqs
        self._live: dict[str, Request] = {}
        # The two queues are kept in arrival order.
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._prefilling: Request | None = None
        self._ending: list[Request] = []
        # Calendars of the running requests. Each gains one token per decode iteration, so the iterations in
        # which it needs a block (known modulo block_size) and decodes last do not change while it is running.
        self._growing: list[list[Request]] = [[] for _ in range(config.block_size)]
        self._last_decodes: dict[int, list[Request]] = {}
        self._num_decodes = 0
        self._step_id = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether a request was added and not finished, be it only that its last token was not read yet."""
        return bool(self._live)

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing and wait for a prefill."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks and a slot."""
        return self.config.max_num_seqs - len(self._free_slots)

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody holds."""
        return self._pool.num_free

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            RequestTooLargeError: it could not end within `max_model_len` or the block pool, even alone.
            RequestError: its id is that of a live request, or it is empty, has nothing to generate, or
                was added before.
        """
        request_id = request.request_id
        if request_id in self._live:
            raise RequestError(f"request id {request_id!r} is in use; finish that request or pick another id")
        if request.status is not RequestStatus.WAITING or request.num_tokens != request.num_prompt_tokens:
            raise RequestError(f"request {request_id!r} was scheduled before; make a new Request")
        self.config.check_fits(request)
        self._live[request_id] = request
        bisect.insort(self._waiting, request, key=_arrival_index)

    def schedule(self, now: float) -> SchedulerOutput:
        """Decide the next iteration and advance the lengths of the requests in it.

        Args:
            now: the engine's clock, in seconds.

        Returns:
            A prefill or a decode iteration. It is empty when there is nothing to compute, or when what
            waits needs a token that is still in flight.

        Raises:
            ConfigError: a policy's answer is not one of those it may give.
        """
        if self._ending:
            for request in self._ending:
                self._release(request)
            self._ending = []
        step_id = self._step_id
        self._step_id = step_id + 1
        if self._waiting or self._prefilling is not None:
            chunks = self._schedule_prefill(now)
            if chunks:
                return SchedulerOutput(step_id, prefill=tuple(chunks))
        if not self._running:
            return SchedulerOutput(step_id)
        preempted = self._grow_block_tables(now)
        return SchedulerOutput(step_id, decode=self._advance_running(), preempted=tuple(preempted))

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a live request in any state; what it holds is free at once.

        That is safe while its last step is in flight: device programs run in order, so whoever takes
        the blocks writes them after that step has read them.

        Raises:
            RequestError: the request is finished already, or was never added.
        """
        if self._live.get(request.request_id) is not request:
            state = "has already finished" if request.is_finished else "was never added"
            raise RequestError(f"cannot finish request {request.request_id!r}: it {state}")
        if request.status is RequestStatus.WAITING:
            _remove(self._waiting, request)
        elif request.slot is not None:
            if request is self._prefilling:
                self._prefilling = None
            elif request in self._ending:
                self._ending.remove(request)
            else:
                self._leave_running(request)
            self._release(request)
        del self._live[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason

    # Prefill iterations

    def _schedule_prefill(self, now: float) -> list[PrefillChunk]:
        """Prompt chunks within the budgets: the partly prefilled request, then waiting ones in order."""
        budget = self.config.max_num_batched_tokens
        chunks: list[PrefillChunk] = []
        if self._prefilling is not None:
            chunks.append(self._prefill(self._prefilling, budget))
            budget -= chunks[0].length
        admitted: list[Request] = []
        for request in self.policy.priority.order(self._waiting, now):
            if len(chunks) == self._max_prefill_seqs or not self._free_slots:
                break
            if chunks and request.num_tokens > budget:
                break  # only an iteration's first prompt is split
            if request.num_in_flight:
                break  # just preempted: its newest token is not known yet
            if not self._admit(request):
                break
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = now
            admitted.append(request)
            chunks.append(self._prefill(request, budget))
            budget -= chunks[-1].length
        for request in admitted:
            _remove(self._waiting, request)
        return chunks

    def _admit(self, request: Request) -> bool:
        """Give a waiting request a slot and the blocks of all its tokens, if it may start now."""
        pool = self._pool
        num_needed = pool.blocks_for(request.num_tokens)
        num_free = pool.num_free
        if num_needed > num_free:
            return False
        # Whoever has the pool to itself starts, whatever the policy says: nothing would ever free more.
        if num_free < pool.num_blocks and not self.policy.admission.admits(
            request, num_needed, num_free, pool.num_blocks
        ):
            return False
        request.block_ids = pool.allocate(num_needed)
        request.slot = self._free_slots.pop()
        request.status = RequestStatus.RUNNING
        return True

    def _prefill(self, request: Request, budget: int) -> PrefillChunk:
        """Schedule up to `budget` tokens of an admitted request, and a sample if none remain."""
        start = request.num_computed_tokens
        length = min(request.num_tokens - start, budget)
        request.num_computed_tokens = start + length
        is_last = start + length == request.num_tokens
        self._prefilling = None if is_last else request
        if is_last:
            request.num_tokens += 1
            if request.num_tokens == request.max_total_tokens:
                self._ending.append(request)
            else:
                self._join_running(request)
        return PrefillChunk(request, start, length, is_last)

    # Decode iterations

    def _grow_block_tables(self, now: float) -> list[Request]:
        """Give each running request the block its next token needs; returns whom that preempted.

        Ends with at least one running request: `add` made sure that one alone fits.
        """
        pool = self._pool
        growing = self._growing[self._num_decodes % pool.block_size]
        preempted: list[Request] = []
        while len(growing) > pool.num_free:
            victim = self.policy.victim.choose(self._running, now)
            self._preempt(victim, now)  # and it no longer grows
            preempted.append(victim)
        for request, block_id in zip(growing, pool.allocate(len(growing)), strict=True):
            request.block_ids.append(block_id)
        return preempted

    def _advance_running(self) -> tuple[Request, ...]:
        """Schedule one token of each running request; returns them in arrival order."""
        batch = tuple(self._running)
        for request in batch:  # the hot loop
            num_tokens = request.num_tokens
            request.num_computed_tokens = num_tokens
            request.num_tokens = num_tokens + 1
        ending = self._last_decodes.get(self._num_decodes)
        self._num_decodes += 1
        if ending:
            self._ending = list(ending)
            for request in self._ending:
                self._leave_running(request)
        return batch

    def _join_running(self, request: Request) -> None:
        bisect.insort(self._running, request, key=_arrival_index)
        self._growing[self._growth_phase(request)].append(request)
        self._last_decodes.setdefault(self._last_decode(request), []).append(request)

    def _leave_running(self, request: Request) -> None:
        _remove(self._running, request)
        self._growing[self._growth_phase(request)].remove(request)
        last_decode = self._last_decode(request)
        self._last_decodes[last_decode].remove(request)
        if not self._last_decodes[last_decode]:
            del self._last_decodes[last_decode]

    def _growth_phase(self, request: Request) -> int:
        """The decode iteration, modulo `block_size`, in which a running request needs a new block."""
        return (self._num_decodes + 1 - request.num_tokens) % self._pool.block_size

    def _last_decode(self, request: Request) -> int:
        """The decode iteration that samples a running request's last token by length."""
        return self._num_decodes - 1 + request.max_total_tokens - request.num_tokens

    def _preempt(self, victim: Request, now: float) -> None:
        """Take a running request's blocks and slot, and put it back in the waiting queue."""
        if victim not in self._running:
            raise ConfigError(f"{self.policy.victim} chose {victim!r}, which is not one of the candidates")
        action = self.policy.action.choose(victim, now)
        if action is not PreemptionAction.RECOMPUTE:
            raise ConfigError(f"{self.policy.action} answered {action!r}, which is not a PreemptionAction")
        self._leave_running(victim)
        self._release(victim)
        victim.num_computed_tokens = 0
        victim.status = RequestStatus.WAITING
        victim.metrics.num_preemptions += 1
        bisect.insort(self._waiting, victim, key=_arrival_index)

    def _release(self, request: Request) -> None:
        """Free a request's blocks and slot. Its old block table is left as it is for those who read it."""
        if request.slot is None:
            raise KVCacheError(f"cannot release request {request.request_id!r}: it holds no slot")
        self._pool.release(request.block_ids)
        request.block_ids = []
        self._free_slots.append(request.slot)
        request.slot = None

    def check(self) -> None:
        """Verify every invariant of queues, slots and blocks, in O(live requests + blocks).

        Raises:
            KVCacheError: one is broken; the message says which.
        """
        self._pool.check()
        running, ending = self._running, self._ending
        holders = running + ending + ([] if self._prefilling is None else [self._prefilling])
        released = [r for r in self._live.values() if r.status is RequestStatus.RUNNING and r.slot is None]
        _require(_is_sorted(self._waiting) and _is_sorted(running), "a queue is not in arrival order")
        placed = [r.request_id for r in self._waiting + holders + released]
        _require(
            len(placed) == len(set(placed)) and set(placed) == self._live.keys(),
            f"live requests {sorted(self._live)} are queued as {sorted(placed)}",
        )
        for request in self._waiting:
            _require(
                request.status is RequestStatus.WAITING and request.num_computed_tokens == 0,
                f"waiting {request}",
            )
        for request in released:
            _require(request.num_tokens == request.max_total_tokens, f"released early: {request}")
        for request in self._waiting + released:
            _require(not request.block_ids and request.slot is None, f"{request} must hold nothing")
        for request in holders:
            # A prompt gets all its blocks at once; past it, the newest token has none yet.
            num_tokens = request.num_tokens if request is self._prefilling else request.num_computed_tokens
            _require(request.status is RequestStatus.RUNNING, f"{request} holds blocks")
            _require(len(request.block_ids) == self._pool.blocks_for(num_tokens), f"{request} table size")
        for request in running:
            _require(
                request.num_computed_tokens + 1 == request.num_tokens < request.max_total_tokens,
                f"running {request} has computed {request.num_computed_tokens} tokens",
            )
            _require(request in self._growing[self._growth_phase(request)], f"{request} would not grow")
            _require(
                request in self._last_decodes.get(self._last_decode(request), ()), f"{request} would not end"
            )
        for calendar in (self._growing, self._last_decodes.values()):
            _require(
                sum(map(len, calendar)) == len(running), "a calendar holds a request that is not running"
            )
        held = [block_id for request in holders for block_id in request.block_ids]
        _require(
            len(held) == len(set(held)) == self._pool.num_used,
            f"{self._pool.num_used} blocks are used; tables hold {len(held)}, {len(set(held))} distinct",
        )
        slots = self._free_slots + [r.slot for r in holders if r.slot is not None]
        _require(
            sorted(slots) == list(range(self.config.max_num_seqs)), f"slots free or held: {sorted(slots)}"
        )


def _remove(queue: list[Request], request: Request) -> None:
    """Remove `request` from a queue in arrival order."""
    del queue[queue.index(request, bisect.bisect_left(queue, request.arrival_index, key=_arrival_index))]


def _is_sorted(queue: list[Request]) -> bool:
    return all(a.arrival_index <= b.arrival_index for a, b in itertools.pairwise(queue))


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise KVCacheError(f"scheduler invariant broken: {problem}")
