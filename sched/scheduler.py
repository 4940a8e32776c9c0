"""Iteration-level continuous batching over a paged KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxllm.errors import KVCacheError, RequestError
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.ledger import Ledger, StepRecord
from jaxllm.sched.policies import SchedulerPolicy
from jaxllm.sched.preemption import Preemption
from jaxllm.sched.returns import Returns
from jaxllm.sched.state import SchedulerState
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
        self._state = SchedulerState(config, policy, ledger)
        self._preemption = Preemption(self._state)
        self._returns = Returns(self._state)
        self._step_id = 0

    @property
    def policy(self) -> SchedulerPolicy:
        """What decides."""
        return self._state.policy

    @property
    def ledger(self) -> Ledger | None:
        """What decisions are written to."""
        return self._state.ledger

    @property
    def has_unfinished(self) -> bool:
        """Whether a request was added and not finished, be it only that its last token was not read yet."""
        return bool(self._state.live)

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing and wait for a prefill."""
        return len(self._state.waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks and a slot."""
        return self.config.max_num_seqs - len(self._state.free_slots)

    @property
    def num_free_blocks(self) -> int:
        """Device blocks nobody holds."""
        return self._state.pool.num_free

    @property
    def num_swapped(self) -> int:
        """Requests whose KV is in host memory."""
        return len(self._state.swapped)

    @property
    def num_free_host_blocks(self) -> int:
        """Host blocks that are neither used nor in flight."""
        return self._state.host.num_free

    @property
    def decodes_on(self) -> bool:
        """Whether the next iteration will do nothing but decode the requests that decode now."""
        state = self._state
        return (
            len(state.running) > 0
            and not (state.ending or state.swapped or state.copies.is_loading)
            and state.prefilling is None
            and not (state.waiting and state.free_slots)
            and state.num_growing() <= state.pool.num_free
        )

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            RequestTooLargeError: it could not end within `max_model_len` or the block pool, even alone.
            RequestError: its id is that of a live request, or it is empty, has nothing to generate, or
                was added before.
        """
        state = self._state
        request_id = request.request_id
        if request_id in state.live:
            raise RequestError(f"request id {request_id!r} is in use; finish that request or pick another id")
        if request.status is not RequestStatus.WAITING or request.num_tokens != request.num_prompt_tokens:
            raise RequestError(f"request {request_id!r} was scheduled before; make a new Request")
        self.config.check_fits(request)
        state.live[request_id] = request
        state.waiting.add(request)

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
        state = self._state
        for request in state.ending:
            state.release(request)
        state.ending = []
        step_id = self._step_id
        self._step_id = step_id + 1
        for swap in state.copies.arrived(copies.arrived):
            state.join(swap)
        state.num_leaving = copies.num_leaving
        if not copies.num_leaving:  # whatever was predicted, the link is idle
            state.recent.copy_out_until = min(state.recent.copy_out_until, now)
        if state.prefilling is not None or (
            state.waiting and not state.swapped and state.policy.restore.prefill_first
        ):
            num_free = state.pool.num_free
            if not state.policy.restore.prefill_first:
                num_free -= state.num_growing()
            chunks, heads = self._prefill_all(self._returns.startable(now, num_free), now)
            if chunks:
                return self._output(step_id, now, prefill=chunks, swap_in=heads)
        preempted, swap_out = self._preemption.make_room(step_id, now)
        swap_in: tuple[Swap, ...] = ()
        load: tuple[Swap, ...] = ()
        if not preempted and (state.waiting or state.swapped):
            starting, resuming = self._returns.choose(now)
            swap_in, load = self._returns.swap_in(resuming, step_id, now)
            if load and not swap_in and not state.policy.restore.prefill_first:
                starting = self._returns.startable(now, state.pool.num_free - state.num_growing())
            if starting:
                chunks, heads = self._prefill_all(starting, now)
                return self._output(step_id, now, prefill=chunks, swap_in=heads, load=load)
        if not state.running and load:  # nothing to do but to wait for a copy
            swap_in, load = load[:1], load[1:]
            state.resume(swap_in[0])
        elif not state.running and state.copies.is_loading:
            state.join(state.copies.first_loading())
            preempted, swap_out = self._preemption.make_room(step_id, now)
        if not state.running:
            return SchedulerOutput(step_id)
        num_steps = 1
        if max_decode_steps > 1 and not (preempted or swap_in or load):
            num_steps = self._num_decode_steps(max_decode_steps)
        self._grow_block_tables(num_steps)
        batch, state.ending = state.running.advance(num_steps)
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
        self._state.copies.complete(step_id)

    def rewind(self, requests: Sequence[Request], num_steps: int) -> None:
        """Take back the last `num_steps` decode iterations that were scheduled for unfinished ones of these.

        For iterations that were not computed after all. Of the blocks they would have filled, those without
        a token are free again. Between the iterations and this call nothing may have been scheduled but
        further iterations of the same requests (`decodes_on`), which must be taken back, too.

        Raises:
            KVCacheError: a request does not decode, or has not decoded as often.
        """
        state = self._state
        requests = [request for request in requests if not request.is_finished]
        for request in requests:
            if request not in state.running and request not in state.ending:
                raise KVCacheError(f"cannot rewind {request}: it does not decode")
            if not 0 <= num_steps <= request.num_in_flight:
                raise KVCacheError(
                    f"cannot rewind {request} by {num_steps} tokens: {request.num_in_flight} are in flight"
                )
        for request in requests:
            if request in state.ending:
                state.ending.remove(request)
            else:
                state.running.leave(request)
            request.num_tokens -= num_steps
            request.num_computed_tokens -= num_steps
            num_blocks = state.pool.blocks_for(request.num_computed_tokens)
            state.pool.release(request.block_ids[num_blocks:])
            del request.block_ids[num_blocks:]
            state.running.join(request)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a live request in any state; what it holds is free at once.

        That is safe while its last step is in flight: device programs run in order, so whoever takes
        the blocks writes them after that step has read them.

        Raises:
            RequestError: the request is finished already, or was never added.
        """
        state = self._state
        if state.live.get(request.request_id) is not request:
            why = "has already finished" if request.is_finished else "was never added"
            raise RequestError(f"cannot finish request {request.request_id!r}: it {why}")
        state.copied_out_at.pop(request.request_id, None)
        evicted = state.evicted.pop(request.request_id, None)
        if evicted is not None:
            state.pool.forget(evicted)
        if request.status is RequestStatus.WAITING:
            state.waiting.remove(request)
            if request.host_handle is not None:
                state.copies.give_up(request)
        elif request.host_handle is not None:
            if request.slot is None:
                state.swapped.remove(request)
            else:
                state.release(request)
            state.copies.give_up(request)
        elif request.slot is not None:
            if request is state.prefilling:
                state.prefilling = None
            elif request in state.ending:
                state.ending.remove(request)
            else:
                state.running.leave(request)
            state.copies.leave(request)
            state.release(request)
        del state.live[request.request_id]
        if reason != "abort":
            state.recent.finished(len(request.output_token_ids))
        if state.ledger is not None:
            state.ledger.finished(request.request_id)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason

    def _output(self, step_id: int, now: float, **parts: Any) -> SchedulerOutput:
        state = self._state
        joined, discarded = state.copies.emit(step_id, parts.get("swap_in", ()))
        ending = tuple(state.ending)
        output = SchedulerOutput(step_id, discarded=discarded, joined=joined, ending=ending, **parts)
        if state.ledger is not None:
            self._record(output, now)
        return output

    def _record(self, output: SchedulerOutput, now: float) -> None:
        state = self._state
        assert state.ledger is not None
        record = StepRecord(
            step_id=output.step_id,
            time=now,
            num_waiting=self.num_waiting,
            num_running=self.num_running,
            num_swapped=self.num_swapped,
            num_used_blocks=state.pool.num_used,
            num_used_host_blocks=state.host.num_blocks - state.host.num_free,
            num_prefill_tokens=output.num_prefill_tokens,
            num_decoded=len(output.decode) * output.num_decode_steps,
            num_dropped=len(output.preempted) - len(output.swap_out),
            num_swapped_out=len(output.swap_out),
            num_swapped_in=len(output.swap_in) + len(output.joined),
        )
        state.ledger.step(record)

    # Prefill iterations

    def _prefill_all(
        self, starting: Sequence[Request], now: float
    ) -> tuple[tuple[PrefillChunk, ...], tuple[Swap, ...]]:
        """Prompt chunks of the partly prefilled request, if there is one, and of those that start.

        With them go the copies that bring back the first blocks of the latter.
        """
        state = self._state
        budget = self.config.max_num_batched_tokens
        chunks: list[PrefillChunk] = []
        heads: list[Swap] = []
        if state.prefilling is not None:
            chunks.append(self._prefill(state.prefilling, budget, is_first=False))
        for request in starting:
            request.num_computed_tokens = state.num_intact_tokens(request)
            state.waiting.remove(request)
            state.take_back(request)
        for request in starting:
            num_intact = len(request.block_ids)
            state.hold(request, state.pool.blocks_for(request.num_tokens))
            heads += self._returns.swap_in_head(request, num_intact)
            request.status = RequestStatus.RUNNING
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = now
            elif state.ledger is not None:
                state.ledger.resumed(request, self._step_id - 1, now)
            chunks.append(self._prefill(request, budget, is_first=True))
        if chunks:
            state.recent.prefilled(sum([chunk.length for chunk in chunks]), len(chunks))
        return tuple(chunks), tuple(heads)

    def _prefill(self, request: Request, budget: int, *, is_first: bool) -> PrefillChunk:
        """Schedule up to `budget` tokens of an admitted request, and a sample if none remain."""
        state = self._state
        start = request.num_computed_tokens
        length = min(request.num_tokens - start, budget)
        request.num_computed_tokens = start + length
        is_last = start + length == request.num_tokens
        state.prefilling = None if is_last else request
        if is_last:
            request.num_tokens += 1
            if request.num_tokens == request.max_total_tokens:
                state.ending.append(request)
            else:
                state.running.join(request)
        is_recompute = request.metrics.num_preemptions > request.metrics.num_swaps
        return PrefillChunk(request, start, length, is_last, is_first, is_recompute)

    # Decode iterations

    def _num_decode_steps(self, limit: int) -> int:
        """How many iterations may go by before the next decision."""
        state = self._state
        running = state.running
        if len(running) > MULTI_STEP_SEQS or state.swapped or state.copies.is_loading:
            return 1
        if state.policy.decode_needs_free_block:
            return 1  # there may be a decision at any block that is taken
        if state.waiting and state.free_slots:
            return 1  # whoever waits starts as soon as there are blocks
        num_steps = running.num_steps_to_last(min(limit, state.pool.block_size))
        while num_steps > 1 and len(running.growing_within(num_steps)) > state.pool.num_free:
            num_steps -= 1
        return num_steps

    def _grow_block_tables(self, num_steps: int) -> None:
        """Give each running request the block that its next tokens need."""
        state = self._state
        growing = state.running.growing_within(num_steps)
        for request, block_id in zip(growing, state.pool.allocate(len(growing)), strict=True):
            request.block_ids.append(block_id)

    def check(self) -> None:
        """Verify every invariant of queues, slots and blocks, in O(live requests + blocks).

        Raises:
            KVCacheError: one is broken; the message says which.
        """
        self._state.check()
