"""Iteration-level continuous batching over a paged KV pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxllm.errors import ConfigError, KVCacheError, RequestError
from jaxllm.sched.actions import num_copied_blocks
from jaxllm.sched.block_manager import BlockPool, EvictedBlocks
from jaxllm.sched.candidates import Candidates
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.copies import HostCopies
from jaxllm.sched.invariants import check_invariants
from jaxllm.sched.ledger import Ledger, StepRecord
from jaxllm.sched.policies import (
    PoolState,
    PreemptionAction,
    ResumeAction,
    ResumeDecision,
    SchedulerPolicy,
)
from jaxllm.sched.pressure import RecentPressure
from jaxllm.sched.queues import RequestQueue
from jaxllm.sched.running import RunningRequests
from jaxllm.types import (
    MULTI_STEP_SEQS,
    NO_COPIES,
    CopyProgress,
    FinishReason,
    PrefillChunk,
    Request,
    RequestStatus,
    SchedulerOutput,
    Swap,
)

_DEFAULT_POLICY = SchedulerPolicy()


class Scheduler:
    """Decides, iteration by iteration, which requests compute which tokens.

    A request's way, and what it holds (blocks and a slot, or nothing):

        add -> waiting -> prefilling -> running -> ending -> released -> finish
               nothing    holds         holds      holds     nothing
                  ^           only a prompt that   |  ^
                  |           spans iterations     |  +-- loading <-- swapped in -- swapped
                  |                                |      holds                     host blocks
                  +---------- dropped -------------+------------- swapped out ------^

    An iteration either prefills or decodes. Lengths advance when a step is scheduled, not when its tokens
    are known, so that the host can run one step ahead. A request whose last token (by length) has been
    scheduled is `ending`: the step still reads its block table, so what it holds is released at the next
    `schedule`, and it stays RUNNING until `finish` is called.

    A swapped request's device blocks are free at once: the executor reads them out, in the order of the
    device's programs, before whoever gets them next writes. Coming back it decodes in the same iteration, or
    is `loading` until the executor says that its copy has arrived; it cannot be preempted meanwhile. Host
    blocks it was swapped in from stay in flight until `complete` says that the step after the copy has ended.
    Of a dropped request the head may be in host memory; it is swapped in by the iteration that prefills it.

    With `policy.lazy_eviction` what a preempted request held is free, but handed out last and tail first: of
    the blocks that nobody took until the request is back nothing is copied or computed again.

    Executors must read `block_ids` and `slot` before the next call of any method.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: SchedulerPolicy = _DEFAULT_POLICY,
        *,
        ledger: Ledger | None = None,
    ) -> None:
        """An empty scheduler within the limits of `config`; `ledger` records its decisions."""
        self.config = config
        self.policy = policy
        self.ledger = ledger
        self._pool = BlockPool(config.num_gpu_blocks, config.block_size)
        self._copies = HostCopies(config.num_host_blocks)
        self._host = self._copies.budget
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._live: dict[str, Request] = {}
        self._waiting = RequestQueue(policy.priority)
        self._swapped = RequestQueue(policy.priority)
        self._running = RunningRequests(config.block_size)
        self._prefilling: Request | None = None
        self._ending: list[Request] = []
        self._evicted: dict[str, EvictedBlocks] = {}
        self._copied_out_at: dict[str, float] = {}
        self._recent = RecentPressure()
        self._num_leaving = 0
        self._step_id = 0
        self._candidates = Candidates(
            config,
            policy,
            self._pool,
            waiting=self._waiting,
            swapped=self._swapped,
            free_slots=self._free_slots,
            num_intact_tokens=self._num_intact_tokens,
            started=self._started,
            pool_state=self._state,
        )

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
        """Device blocks nobody holds."""
        return self._pool.num_free

    @property
    def num_swapped(self) -> int:
        """Requests whose KV is in host memory."""
        return len(self._swapped)

    @property
    def num_free_host_blocks(self) -> int:
        """Host blocks that are neither used nor in flight."""
        return self._host.num_free

    @property
    def decodes_on(self) -> bool:
        """Whether the next iteration will do nothing but decode the requests that decode now."""
        return (
            len(self._running) > 0
            and not (self._ending or self._swapped or self._copies.is_loading)
            and self._prefilling is None
            and not (self._waiting and self._free_slots)
            and self._num_growing() <= self._pool.num_free
        )

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
        self._waiting.add(request)

    def schedule(
        self, now: float, copies: CopyProgress = NO_COPIES, max_decode_steps: int = 1
    ) -> SchedulerOutput:
        """Decide the next iteration and advance the lengths of the requests in it.

        Args:
            now: the engine's clock, in seconds.
            copies: what the executor's `copies` says.
            max_decode_steps: decode iterations that may be scheduled together. There are fewer, or one, where
                a request ends by length, a pool runs full, copies start or arrive, or many requests run.

        Returns:
            A prefill or a decode iteration. It is empty when there is nothing to compute, or when what
            waits needs a token that is still in flight.

        Raises:
            ConfigError: a policy's answer is not one of those it may give.
        """
        for request in self._ending:
            self._release(request)
        self._ending = []
        step_id = self._step_id
        self._step_id = step_id + 1
        for swap in self._copies.arrived(copies.arrived):
            self._join(swap)
        self._num_leaving = copies.num_leaving
        if not copies.num_leaving:  # whatever was predicted, the link is idle
            self._recent.copy_out_until = min(self._recent.copy_out_until, now)
        if self._prefilling is not None or (
            self._waiting and not self._swapped and self.policy.restore.prefill_first
        ):
            num_free = self._pool.num_free
            if not self.policy.restore.prefill_first:
                num_free -= self._num_growing()
            chunks, heads = self._prefill_all(self._startable(now, num_free), now)
            if chunks:
                return self._output(step_id, now, prefill=chunks, swap_in=heads)
        preempted, swap_out = self._make_room(step_id, now)
        swap_in: tuple[Swap, ...] = ()
        load: tuple[Swap, ...] = ()
        if not preempted and (self._waiting or self._swapped):
            starting, resuming = self._choose_source(now)
            swap_in, load = self._swap_in_all(resuming, step_id, now)
            if load and not swap_in and not self.policy.restore.prefill_first:
                starting = self._startable(now, self._pool.num_free - self._num_growing())
            if starting:
                chunks, heads = self._prefill_all(starting, now)
                return self._output(step_id, now, prefill=chunks, swap_in=heads, load=load)
        if not self._running and load:  # nothing to do but to wait for a copy
            swap_in, load = load[:1], load[1:]
            self._resume(swap_in[0])
        elif not self._running and self._copies.is_loading:
            self._join(self._copies.first_loading())
            preempted, swap_out = self._make_room(step_id, now)
        if not self._running:
            return SchedulerOutput(step_id)
        num_steps = 1
        if max_decode_steps > 1 and not (preempted or swap_in or load):
            num_steps = self._num_decode_steps(max_decode_steps)
        self._grow_block_tables(num_steps)
        batch, self._ending = self._running.advance(num_steps)
        return self._output(
            step_id,
            now,
            decode=batch,
            num_decode_steps=num_steps,
            preempted=tuple(preempted),
            swap_out=tuple(swap_out),
            swap_in=swap_in,
            load=load,
        )

    def complete(self, step_id: int) -> None:
        """Note that the device has finished step `step_id` and those before it, with their copies."""
        self._copies.complete(step_id)

    def rewind(self, requests: Sequence[Request], num_steps: int) -> None:
        """Take back the last `num_steps` decode iterations that were scheduled for unfinished ones of these.

        For iterations that were not computed after all. Of the blocks they would have filled, those without
        a token are free again. Between the iterations and this call nothing may have been scheduled but
        further iterations of the same requests (`decodes_on`), which must be taken back, too.

        Raises:
            KVCacheError: a request does not decode, or has not decoded as often.
        """
        requests = [request for request in requests if not request.is_finished]
        for request in requests:
            if request not in self._running and request not in self._ending:
                raise KVCacheError(f"cannot rewind {request}: it does not decode")
            if not 0 <= num_steps <= request.num_in_flight:
                raise KVCacheError(
                    f"cannot rewind {request} by {num_steps} tokens: {request.num_in_flight} are in flight"
                )
        for request in requests:
            if request in self._ending:
                self._ending.remove(request)
            else:
                self._running.leave(request)
            request.num_tokens -= num_steps
            request.num_computed_tokens -= num_steps
            num_blocks = self._pool.blocks_for(request.num_computed_tokens)
            self._pool.release(request.block_ids[num_blocks:])
            del request.block_ids[num_blocks:]
            self._running.join(request)

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
        self._copied_out_at.pop(request.request_id, None)
        evicted = self._evicted.pop(request.request_id, None)
        if evicted is not None:
            self._pool.forget(evicted)
        if request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
            if request.host_handle is not None:
                self._copies.give_up(request)
        elif request.host_handle is not None:
            if request.slot is None:
                self._swapped.remove(request)
            else:
                self._release(request)
            self._copies.give_up(request)
        elif request.slot is not None:
            if request is self._prefilling:
                self._prefilling = None
            elif request in self._ending:
                self._ending.remove(request)
            else:
                self._running.leave(request)
            self._copies.leave(request)
            self._release(request)
        del self._live[request.request_id]
        if self.ledger is not None:
            self.ledger.finished(request.request_id)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason

    def _output(self, step_id: int, now: float, **parts: Any) -> SchedulerOutput:
        joined, discarded = self._copies.emit(step_id, parts.get("swap_in", ()))
        ending = tuple(self._ending)
        output = SchedulerOutput(step_id, discarded=discarded, joined=joined, ending=ending, **parts)
        if self.ledger is not None:
            self._record(output, now)
        return output

    def _record(self, output: SchedulerOutput, now: float) -> None:
        assert self.ledger is not None
        record = StepRecord(
            step_id=output.step_id,
            time=now,
            num_waiting=self.num_waiting,
            num_running=self.num_running,
            num_swapped=self.num_swapped,
            num_used_blocks=self._pool.num_used,
            num_used_host_blocks=self._host.num_blocks - self._host.num_free,
            num_prefill_tokens=output.num_prefill_tokens,
            num_decoded=len(output.decode) * output.num_decode_steps,
            num_dropped=len(output.preempted) - len(output.swap_out),
            num_swapped_out=len(output.swap_out),
            num_swapped_in=len(output.swap_in) + len(output.joined),
        )
        self.ledger.step(record)

    # Who starts and who resumes

    def _choose_source(self, now: float) -> tuple[list[Request], list[tuple[Request, ResumeDecision]]]:
        """The waiting requests to prefill or the swapped ones to bring back; one of the two is empty.

        The blocks that the running requests need next stay free.
        """
        restore = self.policy.restore
        num_free = self._pool.num_free - self._num_growing()
        if not self._copies.is_loading:  # whatever was predicted, the link is idle
            self._recent.copy_in_until = min(self._recent.copy_in_until, now)
        busy_until = self._recent.copy_in_until
        # Where a copy is all there is to wait for, no other is put before it.
        swapped = self._resumable(now, num_free) if self._running or not self._copies.is_loading else []
        # With `prefill_first` they were tried before, or must wait until nothing is swapped.
        waiting = [] if restore.prefill_first else self._startable(now, num_free)
        if not swapped and not waiting and not self._running and not self._copies.is_loading:
            # Nothing will ever change: whoever was put off goes, be it to the prefills it was sent to.
            swapped = self._resumable(now, num_free, put_off=False)
            waiting = [] if swapped else self._startable(now, num_free)
        # The policy chooses between two sets; it cannot leave the only one alone.
        resuming = [request for request, _ in swapped]
        if swapped and (not waiting or restore.swaps_in(waiting, resuming, now)):
            return [], swapped
        self._recent.copy_in_until = busy_until
        return waiting, []

    def _startable(self, now: float, num_free: int) -> list[Request]:
        """Waiting requests that fit an iteration together with `num_free` blocks, the most urgent first."""
        return self._candidates.startable(now, num_free, self._prefilling)

    def _resumable(
        self, now: float, num_free: int, *, put_off: bool = True
    ) -> list[tuple[Request, ResumeDecision]]:
        """Swapped requests that fit into `num_free` blocks with their next token, the most urgent first.

        Those whose copy the policy gives up go to the waiting ones. Without `put_off` it is not asked, and
        the first that fits resumes at once.
        """
        state: PoolState | None = None

        def decide(request: Request, num_free: int) -> ResumeDecision:
            nonlocal state
            if state is None:
                state = self._pressure(num_free)
            elif state.num_free != num_free:
                state = dataclasses.replace(state, num_free=num_free)
            return self._how_to_resume(request, state, now)

        taken, given_up = self._candidates.resumable(now, num_free, decide if put_off else None)
        for request, decision in given_up:
            self._recompute_instead(request, decision)
        return taken

    def _how_to_resume(self, request: Request, state: PoolState, now: float) -> ResumeDecision:
        """What the policy says of a swapped request; a copy that starts is one the next ones wait for."""
        evicted = self._evicted.get(request.request_id)
        num_lost = self._pool.blocks_for(request.num_computed_tokens)
        num_lost -= 0 if evicted is None else self._pool.num_intact(evicted)
        copied_out_at = self._copied_out_at.get(request.request_id, now)
        decision = self.policy.resume.choose(request, num_lost, copied_out_at, state, now)
        if not isinstance(getattr(decision, "action", None), ResumeAction):
            raise ConfigError(f"{self.policy.resume} answered {decision!r}, which is not a ResumeDecision")
        if decision.action in (ResumeAction.AT_ONCE, ResumeAction.IN_BACKGROUND) and decision.copy_seconds:
            self._recent.copying_in(now, decision.copy_seconds)
        return decision

    def _recompute_instead(self, request: Request, decision: ResumeDecision) -> None:
        """Let a swapped request be prefilled again."""
        self._swapped.remove(request)
        self._copies.give_up(request)
        if self.ledger is not None:
            self.ledger.returns(request.request_id, decision)
        self._queue_again(request)

    def _state(self, num_free: int, started: Sequence[Request], *more: Any) -> PoolState:
        """The pools when `num_free` blocks are left; `more` is what only action policies are told."""
        pool, host = self._pool, self._host
        num_host_free = host.num_free + self._copies.num_head_blocks
        return PoolState(
            num_free, pool.num_blocks, pool.block_size, num_host_free, host.num_blocks, started, *more
        )

    def _started(self) -> list[Request]:
        """Requests that hold blocks of either kind."""
        started = list(self._running.requests)
        if self._prefilling is not None:
            started.append(self._prefilling)
        if self._copies.is_loading:
            started += self._copies.loading
        if self._swapped:
            started += self._swapped
        return started

    def _swap_in_all(
        self, resuming: Sequence[tuple[Request, ResumeDecision]], step_id: int, now: float
    ) -> tuple[tuple[Swap, ...], tuple[Swap, ...]]:
        """Bring requests back; returns the copies that this iteration waits for, and those it only starts."""
        for request, _ in resuming:
            self._swapped.remove(request)
            self._take_back(request)
        swap_in, load = [], []
        for request, decision in resuming:
            swap = self._swap_in(request, decision, step_id, now)
            if decision.action is ResumeAction.AT_ONCE:
                self._resume(swap)
                swap_in.append(swap)
            else:
                self._copies.load(swap)
                load.append(swap)
        if swap_in:
            self._recent.swapped_in(len(swap_in))
        return tuple(swap_in), tuple(load)

    def _swap_in(self, request: Request, decision: ResumeDecision, step_id: int, now: float) -> Swap:
        """The copy that fills the blocks a swapped request gets."""
        handle = request.host_handle
        assert handle is not None  # whatever is swapped has one
        num_intact = len(request.block_ids)
        self._hold(request, self._pool.blocks_for(request.num_computed_tokens))
        if self.ledger is not None:
            self.ledger.returns(request.request_id, decision)
            self.ledger.resumed(request, step_id, now)
        return Swap(request, handle, tuple(request.block_ids), num_intact)

    def _resume(self, swap: Swap) -> None:
        """Let a request decode in the iteration that fills its blocks."""
        self._copies.read(swap)
        swap.request.status = RequestStatus.RUNNING
        self._running.join(swap.request)

    def _join(self, swap: Swap) -> None:
        """Let a request decode whose copy an earlier iteration started; it need not have arrived."""
        self._copies.join(swap)
        swap.request.status = RequestStatus.RUNNING
        self._running.join(swap.request)

    def _hold(self, request: Request, num_blocks: int) -> None:
        """Give a request the blocks it lacks and a slot."""
        request.block_ids += self._pool.allocate(num_blocks - len(request.block_ids))
        request.slot = self._free_slots.pop()

    def _take_back(self, request: Request) -> None:
        """Give a request what is intact of the blocks it held; before anybody else takes blocks."""
        self._copied_out_at.pop(request.request_id, None)
        if not request.metrics.num_preemptions:
            return
        lost_share = 1.0
        evicted = self._evicted.pop(request.request_id, None)
        if evicted is not None:
            request.block_ids = self._pool.reclaim(evicted)
            lost_share -= len(request.block_ids) / len(evicted.block_ids)
        self._recent.returned(lost_share)

    def _num_intact_tokens(self, request: Request) -> int:
        """Tokens of a waiting request whose KV nobody has overwritten, or is in host memory."""
        evicted = self._evicted.get(request.request_id)
        if evicted is None and request.host_handle is None:
            return 0
        num_blocks = self._copies.num_blocks(request)
        if evicted is not None:
            num_blocks = max(num_blocks, self._pool.num_intact(evicted))
        return min(num_blocks * self._pool.block_size, request.num_tokens - 1)

    def _swap_in_head(self, request: Request, num_intact: int) -> list[Swap]:
        """The copy that fills the first blocks of a request to be prefilled, if any has to be filled."""
        num_blocks, handle = self._copies.num_blocks(request), request.host_handle
        if handle is None:
            return []
        if num_intact >= num_blocks:
            self._copies.give_up(request)
            return []
        swap = Swap(request, handle, tuple(request.block_ids[:num_blocks]), num_intact)
        self._copies.read(swap)
        return [swap]

    # Prefill iterations

    def _prefill_all(
        self, starting: Sequence[Request], now: float
    ) -> tuple[tuple[PrefillChunk, ...], tuple[Swap, ...]]:
        """Prompt chunks of the partly prefilled request, if there is one, and of those that start.

        With them go the copies that bring back the first blocks of the latter.
        """
        budget = self.config.max_num_batched_tokens
        chunks: list[PrefillChunk] = []
        heads: list[Swap] = []
        if self._prefilling is not None:
            chunks.append(self._prefill(self._prefilling, budget, is_first=False))
        for request in starting:
            request.num_computed_tokens = self._num_intact_tokens(request)
            self._waiting.remove(request)
            self._take_back(request)
        for request in starting:
            num_intact = len(request.block_ids)
            self._hold(request, self._pool.blocks_for(request.num_tokens))
            heads += self._swap_in_head(request, num_intact)
            request.status = RequestStatus.RUNNING
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = now
            elif self.ledger is not None:
                self.ledger.resumed(request, self._step_id - 1, now)
            chunks.append(self._prefill(request, budget, is_first=True))
        if chunks:
            self._recent.prefilled(sum([chunk.length for chunk in chunks]), len(chunks))
        return tuple(chunks), tuple(heads)

    def _prefill(self, request: Request, budget: int, *, is_first: bool) -> PrefillChunk:
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
                self._running.join(request)
        is_recompute = request.metrics.num_preemptions > request.metrics.num_swaps
        return PrefillChunk(request, start, length, is_last, is_first, is_recompute)

    # Decode iterations

    def _num_growing(self) -> int:
        """Blocks that must be free for the running requests' next tokens."""
        running, growing = self._running, self._running.growing
        # vLLM 0.2.5 asks for a free block on behalf of each request in turn, also of one that needs none.
        needs_spare = (
            self.policy.decode_needs_free_block and len(running) > 1 and running.requests[-1] not in growing
        )
        return len(growing) + needs_spare

    def _make_room(self, step_id: int, now: float) -> tuple[list[Request], list[Swap]]:
        """Preempt running requests until the next tokens of the others fit; returns them, and the swaps.

        At least one request stays: `add` made sure that one alone fits. If a policy fails, the swaps decided
        so far become drops, for nobody will copy them.
        """
        preempted: list[Request] = []
        swaps: list[Swap] = []
        while self._num_growing() > self._pool.num_free:
            if len(self._running) == 1 and self._copies.is_loading:
                self._join(self._copies.first_loading())  # so that somebody is left
            try:
                victim = self.policy.victim.choose(self._running.requests, now)
                swap = self._preempt(victim, step_id, now)
            except BaseException:
                for swap in swaps:
                    self._drop_swapped(swap.request)
                raise
            if swap is not None:
                swaps.append(swap)
            preempted.append(victim)
        return preempted, swaps

    def _num_decode_steps(self, limit: int) -> int:
        """How many iterations may go by before the next decision."""
        running = self._running
        if len(running) > MULTI_STEP_SEQS or self._swapped or self._copies.is_loading:
            return 1
        if self.policy.decode_needs_free_block:
            return 1  # there may be a decision at any block that is taken
        if self._waiting and self._free_slots:
            return 1  # whoever waits starts as soon as there are blocks
        num_steps = running.num_steps_to_last(min(limit, self._pool.block_size))
        while num_steps > 1 and len(running.growing_within(num_steps)) > self._pool.num_free:
            num_steps -= 1
        return num_steps

    def _grow_block_tables(self, num_steps: int) -> None:
        """Give each running request the block that its next tokens need."""
        growing = self._running.growing_within(num_steps)
        for request, block_id in zip(growing, self._pool.allocate(len(growing)), strict=True):
            request.block_ids.append(block_id)

    def _preempt(self, victim: Request, step_id: int, now: float) -> Swap | None:
        """Take a running request's blocks and slot, and queue it to be prefilled again or swapped in."""
        if victim not in self._running:
            raise ConfigError(f"{self.policy.victim} chose {victim!r}, which is not one of the candidates")
        decision = self.policy.action.choose(victim, self._pressure(self._pool.num_free), now)
        num_copied = num_copied_blocks(self.policy.action, decision, len(victim.block_ids))
        num_host_free = self._host.num_free
        if decision.action is PreemptionAction.SWAP:
            num_host_free += self._copies.num_head_blocks
        if num_copied > num_host_free:
            raise ConfigError(
                f"{self.policy.action} swaps {num_copied} blocks; {num_host_free} of "
                f"{self._host.num_blocks} host blocks are free: drop the victim or raise num_host_blocks"
            )
        if self.ledger is not None:
            scores = [(one.request_id, self.policy.priority.score(one, now)) for one in self._running]
            self.ledger.preempted(victim, step_id, now, scores, decision)
        self._running.leave(victim)
        block_ids = tuple(victim.block_ids)
        self._release(victim, keep=self.policy.lazy_eviction)
        victim.metrics.num_preemptions += 1
        swap = None
        if num_copied:
            for loser in self._copies.make_room(num_copied):
                if self.ledger is not None:
                    self.ledger.head_given_up(loser.request_id)
            is_head = decision.action is PreemptionAction.MIXED
            swap = self._copies.make(victim, block_ids[:num_copied], is_head=is_head)
            if decision.copy_seconds is not None:
                ends_at = self._recent.copying_out(now, decision.copy_seconds)
                self._copied_out_at[victim.request_id] = ends_at
            self._num_leaving += num_copied
        if decision.action is PreemptionAction.SWAP:
            victim.metrics.num_swaps += 1
            victim.status = RequestStatus.SWAPPED
            self._swapped.add(victim)
        else:
            self._queue_again(victim)
        return swap

    def _queue_again(self, victim: Request) -> None:
        self._copied_out_at.pop(victim.request_id, None)
        if victim.status is RequestStatus.SWAPPED:
            victim.metrics.num_swaps -= 1  # it counts as dropped
        victim.num_computed_tokens = 0
        victim.status = RequestStatus.WAITING
        self._waiting.add(victim)

    def _drop_swapped(self, victim: Request) -> None:
        """Give up a copy that was decided but never started."""
        self._copies.unmake(victim)
        if victim.status is RequestStatus.SWAPPED:
            self._swapped.remove(victim)
            self._queue_again(victim)

    def _pressure(self, num_free: int) -> PoolState:
        """The pools when `num_free` blocks are left, with what the costs of an action depend on."""
        running = self._running.requests
        num_context_tokens = sum([one.num_tokens for one in running])
        return self._state(
            num_free,
            self._started(),
            len(running),
            num_context_tokens,
            self._recent,
            len(self._waiting),
            self._num_leaving,
            self._copies.num_head_blocks,
        )

    def _release(self, request: Request, *, keep: bool = False) -> None:
        """Free a request's blocks and slot. Its old block table is left as it is for those who read it.

        With `keep` it gets back what nobody has taken in the meantime.
        """
        if request.slot is None:
            raise KVCacheError(f"cannot release request {request.request_id!r}: it holds no slot")
        if keep:
            self._evicted[request.request_id] = self._pool.evict(request.block_ids)
        else:
            self._pool.release(request.block_ids)
        request.block_ids = []
        self._free_slots.append(request.slot)
        request.slot = None

    def check(self) -> None:
        """Verify every invariant of queues, slots and blocks, in O(live requests + blocks).

        Raises:
            KVCacheError: one is broken; the message says which.
        """
        check_invariants(
            pool=self._pool,
            host=self._host,
            num_slots=self.config.max_num_seqs,
            free_slots=self._free_slots,
            live=self._live,
            running=self._running,
            prefilling=self._prefilling,
            ending=self._ending,
            waiting=list(self._waiting),
            swapped=list(self._swapped),
            loading=self._copies.loading,
            evicted=self._evicted,
        )
