"""Iteration-level continuous batching over a paged KV pool."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from jaxllm.errors import ConfigError, RequestError
from jaxllm.sched.cache.names import FileIndex
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.invariants import check_invariants
from jaxllm.sched.ledger import Ledger, StepRecord
from jaxllm.sched.offloading import Offloader
from jaxllm.sched.plan import Plan, Planner, PlanningPolicy
from jaxllm.sched.planner import PolicyPlanner
from jaxllm.sched.policies import (
    Decision,
    PreemptionAction,
    ResumeAction,
    ResumeDecision,
    SchedulerPolicy,
    SchedulingPolicy,
)
from jaxllm.sched.reading import ReadAhead
from jaxllm.sched.state import SchedulerState
from jaxllm.types import (
    MULTI_STEP_SEQS,
    NO_COPIES,
    CopyProgress,
    FinishReason,
    HostPiece,
    PrefillChunk,
    Read,
    Request,
    RequestStatus,
    SchedulerOutput,
    Swap,
)

_DEFAULT_POLICY = SchedulerPolicy()


class PoolUsage(NamedTuple):
    """Blocks of a pool: held by requests, kept by the prefix cache alone, and holding nothing."""

    total: int
    held: int
    cached: int
    free: int


class Scheduler:
    """Decides, iteration by iteration, how many tokens each request computes.

    A request's way, and what it holds (blocks and a slot, or nothing):

        add -> waiting -> prompt under way -> running -> ending -> released -> finish
               nothing    holds       |       holds  |   holds     nothing
                  ^                   |       ^      |
                  |                   |       |  loading <-- swapped in -- swapped
                  |                   |       |   holds                   host blocks
                  +---- dropped ------+-------|------+                        ^
                                      +-------|------+---- swapped out -------+

    Each iteration is planned by the policy's planner, which changes nothing, and then applied: whatever a
    policy raises leaves everything as it was. Lengths advance when a step is scheduled, not when its tokens
    are known, so that the host can run one step ahead. A request whose last token (by length) has been
    scheduled is `ending`: the step still reads its block table, so what it holds is released at the next
    `schedule`, and it stays RUNNING until `finish` is called.

    A swapped request's device blocks are free at once: the executor reads them out, in the order of the
    device's programs, before whoever gets them next writes. Coming back it goes on in the same iteration, or
    is `loading` until the executor says that its copy has arrived; it cannot be preempted meanwhile. Host
    blocks it was swapped in from stay in flight until `complete` says that the step after the copy has ended.

    Executors must read `block_ids` and `slot` before the next call of any method.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: SchedulingPolicy = _DEFAULT_POLICY,
        *,
        ledger: Ledger | None = None,
        files: FileIndex | None = None,
    ) -> None:
        """An empty scheduler within the limits of `config`; `ledger` records its decisions.

        Args:
            config, policy, ledger: as above.
            files: what of the prefix cache executors can read from files; then every full block is copied to
                the host as soon as it can, and written to a file.

        Raises:
            ConfigError: prefixes are to be shared, and the policy does not; or there are files without
                that, or without host memory to read them into; or nothing plans for the policy.
        """
        if files is not None and not (config.enable_prefix_caching and config.num_host_blocks):
            raise ConfigError(
                "files of the prefix cache need enable_prefix_caching=True and num_host_blocks of 1 or more, "
                f"got {config.enable_prefix_caching} and {config.num_host_blocks}"
            )
        self._files = files
        if config.enable_prefix_caching and not policy.shares_prefixes:
            raise ConfigError(
                f"enable_prefix_caching=True: {policy} plans without a prefix cache; leave it out, or take "
                "vllm_v1, adaptive or another preset"
            )
        self.config = config
        self.policy = policy
        self.ledger = ledger
        self.num_scheduled = 0
        self.is_planning = False
        self.clear()

    def clear(self) -> None:
        """Forget all requests, and free whatever they hold."""
        self._state = SchedulerState(self.config, self.policy.priority, self.policy.retention)
        self._planner = _planner_of(self.policy, self._state)
        self._offloader: Offloader | None = None
        if self.config.enable_prefix_caching and self.config.num_host_blocks:
            is_eager = self._files is not None
            self._offloader = Offloader(self._state, self.policy.offload, is_eager=is_eager)
        self._read_ahead: ReadAhead | None = None
        if self._files is not None:
            self._read_ahead = ReadAhead(self._state, self._files, self.policy.offload)
        self._reads: list[Read] = []
        self._copies = NO_COPIES

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
        """Host blocks that hold nothing."""
        return self._state.host.num_free

    @property
    def num_available_host_blocks(self) -> int:
        """Host blocks that are free, or that only the prefix cache keeps."""
        return self._state.host.num_available

    def live_requests(self) -> list[Request]:
        """Requests that were added and have not finished, in no order; any thread may ask."""
        return list(self._state.live.values())

    def usage(self) -> tuple[PoolUsage, PoolUsage]:
        """Blocks of the device and of host memory, by what they are; any thread may ask."""
        pool, host = self._state.pool, self._state.host
        num_free, num_cached = pool.num_free, min(pool.num_cached, pool.num_free)
        num_available, num_host_free = host.num_available, host.num_free
        return (
            PoolUsage(pool.num_blocks, pool.num_blocks - num_free, num_cached, num_free - num_cached),
            PoolUsage(
                host.num_blocks,
                max(0, host.num_blocks - num_available),
                max(0, num_available - num_host_free),
                num_host_free,
            ),
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
        if self.policy.length is not None:
            request.predicted_tokens = self.policy.length.predict(request)
        state.queue(request)
        state.live[request_id] = request

    @property
    def lets_sit_out(self) -> bool:
        """Whether the policy can plan without some of those who hold blocks."""
        return self._planner.lets_sit_out

    def sit_out(self, request_ids: Collection[str]) -> None:
        """Let these requests get no tokens until the next call, and those of the last call go on.

        They have computed their prompts, and no step of theirs is in flight. They keep what they hold, unless
        others need it.
        """
        self._state.sit_out(request_ids)

    def schedule(
        self, now: float, copies: CopyProgress = NO_COPIES, max_decode_steps: int = 1
    ) -> SchedulerOutput:
        """Decide the next iteration and advance the lengths of the requests in it.

        Args:
            now: the engine's clock, in seconds.
            copies: what the executor's `copies` says.
            max_decode_steps: decode iterations that may be scheduled together. There are fewer, or one, where
                a request ends by length, a pool runs full, or anybody waits, loads, or prefills.

        Returns:
            The iteration. It is empty when there is nothing to compute, or when what waits needs a token that
            is still in flight.

        Raises:
            ConfigError: a policy's answer is not one of those it may give.
            Exception: whatever a policy raises. In both cases, if `is_planning`, nothing has changed.
        """
        state = self._state
        self.is_planning = False
        self._copies = copies
        state.host.now = now
        state.settle(copies, now)
        if self._read_ahead is not None:
            self._read_ahead.settle(copies.read, now)
            self.is_planning = True
            self._read_ahead.add_reads(self._reads, now)
            self.is_planning = False
        while (plan := self._plan(now)) is None:
            state.join(next(iter(state.loading.values())))
        step_id = self.num_scheduled
        self.num_scheduled += 1
        return self._apply(plan, step_id, now, max_decode_steps)

    def _plan(self, now: float) -> Plan | None:
        self.is_planning = True
        plan = self._planner.plan(now)
        self.is_planning = False
        return plan

    @property
    def has_leftovers(self) -> bool:
        """Whether nobody is left to run iterations, with which executors would have been told of more."""
        state = self._state
        is_left = state.joined or state.discarded or state.host.has_dropped or state.being_read
        return not self.has_unfinished and bool(is_left or (self._offloader and self._offloader.is_behind))

    def flush(self, write_room: int | None = None) -> SchedulerOutput:
        """What executors were to be told with later iterations, when there are `has_leftovers`.

        Files that are still being read will not be waited for: executors are to forget them. There are
        leftovers again while there is no room to copy out all that is to be written to files.
        """
        if self._read_ahead is not None:
            self._read_ahead.cancel()
        self._reads = []
        self._state.host.complete(self.num_scheduled)  # nothing is read any more
        swap_out = [] if self._offloader is None else self._offloader.flush(write_room)
        joined, discarded = self._state.emit()
        step_id = self.num_scheduled
        self.num_scheduled += 1
        dropped = self._state.host.emit(step_id)
        self.complete(step_id)
        return SchedulerOutput(
            step_id, swap_out=tuple(swap_out), joined=joined, discarded=discarded, dropped=dropped
        )

    def take_dropped(self) -> tuple[HostPiece, ...]:
        """Pieces of host memory that executors are to let go of, and were not told of."""
        return self._state.host.take_dropped()

    def take_reads(self) -> list[Read]:
        """What executors are to read from files, and were not told of."""
        reads, self._reads = self._reads, []
        return reads

    @property
    def is_reading(self) -> bool:
        """Whether files are being read."""
        return self._read_ahead is not None and self._read_ahead.is_busy

    def complete(self, step_id: int) -> None:
        """Note that the device has finished step `step_id` and those before it, with their copies."""
        self._state.host.complete(step_id)

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
        if request.slot is None and request.status in (RequestStatus.WAITING, RequestStatus.SWAPPED):
            state.unqueue(request)
            state.host.release(request.host_blocks)
            request.host_blocks = []
        elif request.slot is not None:
            is_filled = not state.cancel(request)
            if request in state.ending:
                state.ending.remove(request)
            elif is_filled:
                state.leave(request)
            state.release(request, is_filled=is_filled)
        del state.live[request.request_id]
        state.num_read.pop(request.request_id, None)
        if reason in ("stop", "length") and self.policy.length is not None:
            self.policy.length.observe(request, len(request.output_token_ids))
        if self.ledger is not None:
            self.ledger.finished(request.request_id)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason

    def reprioritize(self, request: Request, priority: int) -> None:
        """Give a live request another `priority` (`PriorityClasses`)."""
        queue = {RequestStatus.WAITING: self._state.waiting, RequestStatus.SWAPPED: self._state.swapped}
        if request.slot is None and request.status in queue:
            queue[request.status].remove(request)
            request.priority = priority
            queue[request.status].add(request)
        request.priority = priority

    def reset_prefix_cache(self) -> tuple[HostPiece, ...]:
        """Find none of the present blocks again; those who hold some keep them.

        Returns:
            Pieces of host memory that executors are to let go of.
        """
        self._state.pool.forget_names()
        self._state.host.forget_names()
        if self._offloader is not None:
            self._offloader.forget()
        if self._read_ahead is not None:
            self._read_ahead.forget()
        return self._state.host.take_dropped()

    # Applying a plan

    def _apply(self, plan: Plan, step_id: int, now: float, max_decode_steps: int) -> SchedulerOutput:
        state = self._state
        num_steps = self._num_decode_steps(plan, max_decode_steps)
        self._note_passed(plan)
        self._hold_copies(plan)
        swap_out = [self._preempt(*victim, plan.scores, step_id, now) for victim in plan.victims]
        swap_in: list[Swap] = []
        load: list[Swap] = []
        chunks = plan.chunks
        for request, decision, length in plan.resuming:
            swap = self._copy_back(request, decision, step_id, now)
            if decision.action is ResumeAction.AT_ONCE:
                state.resume(swap)
                swap_in.append(swap)
                if request in state.prompts:
                    chunks.append((request, length))
            else:
                state.load(swap)
                load.append(swap)
        batch: tuple[Request, ...] = ()
        num_context_tokens = 0
        if plan.decodes and state.running:
            growing = state.running.growing if num_steps == 1 else state.running.growing_within(num_steps)
            for request, block_id in zip(growing, state.pool.allocate(len(growing)), strict=True):
                request.block_ids.append(block_id)
            num_context_tokens = state.running.num_tokens + len(state.running) * (num_steps - 1) // 2
            filling = list(state.running.filling) if self.config.enable_prefix_caching else []
            batch, ending = state.running.advance(num_steps)
            state.ending += ending
            for request in filling:
                state.name_blocks(request)
        prefill = [self._prefill(request, length) for request, length in chunks]
        for request, length in plan.starting:
            started = self._start(request, plan.fetching.get(request), step_id, now)
            if isinstance(started, Swap) and length:
                swap_in.append(started)
            elif isinstance(started, Swap):
                load.append(started)
            if started and length:
                prefill.append(self._prefill(request, length))
        if not (batch or prefill) and state.prompts:  # whoever was to wait for a copy found its blocks
            prefill.append(self._prefill(state.prompts[0], self.config.max_num_batched_tokens))
        if not (batch or prefill):
            assert not [*swap_out, *swap_in, *load], "copies need an iteration"
            return SchedulerOutput(step_id)  # whatever executors are to be told waits
        out = [swap for swap in swap_out if swap is not None]
        if self._offloader is None:
            state.pool.reclaimed.clear()
            state.pool.unfilled.clear()
        else:
            num_leaving = self._copies.num_leaving + sum([len(swap.block_ids) for swap in out])
            out += self._offloader.swaps(num_leaving, self._copies.write_room)
        joined, discarded = state.emit()
        dropped = state.host.emit(step_id)
        output = SchedulerOutput(
            step_id,
            decode=batch,
            prefill=tuple(prefill),
            preempted=tuple([victim for victim, _ in plan.victims]),
            num_swapped=sum([bool(victim.host_blocks) for victim, _ in plan.victims]),
            swap_out=tuple(out),
            swap_in=tuple(swap_in),
            load=tuple(load),
            joined=joined,
            discarded=discarded,
            dropped=dropped,
            ending=tuple(state.ending),
            num_decode_steps=num_steps,
            num_context_tokens=num_context_tokens,
        )
        if self.ledger is not None:
            self._record(self.ledger, output, now)
        return output

    def _num_decode_steps(self, plan: Plan, limit: int) -> int:
        """How many iterations may go by before the next decision."""
        state = self._state
        running = state.running
        is_calm = plan.is_only_decode and not (state.is_queued or state.prompts or state.loading)
        if limit == 1 or not (is_calm and plan.is_repeatable) or len(running) > MULTI_STEP_SEQS:
            return 1
        num_steps = running.num_steps_to_last(min(limit, state.pool.block_size))
        while num_steps > 1 and len(running.growing_within(num_steps)) > state.pool.num_free:
            num_steps -= 1
        return num_steps

    def _note_passed(self, plan: Plan) -> None:
        """Count those who take blocks while an earlier request has none; who was counted for is protected."""
        if plan.reserved is not None:
            plan.reserved.is_protected = True
        if plan.resuming or plan.starting:
            first = self._state.first_queued()
            taking = [one[0] for one in (*plan.resuming, *plan.starting)]
            if first is not None and first not in taking and not self._state.sits_out(first):
                first.num_passed += len(taking)

    def _preempt(
        self,
        victim: Request,
        decision: Decision,
        scores: Sequence[tuple[str, float]],
        step_id: int,
        now: float,
    ) -> Swap | None:
        """Take a holder's blocks and slot, and queue it to be prefilled again or copied back."""
        state = self._state
        if self.ledger is not None:
            self.ledger.preempted(victim, step_id, now, scores, decision)
        state.leave(victim)
        swap = None
        if decision.action is PreemptionAction.SWAP:
            swap = self._copy_out(victim)
            if decision.copy_seconds is not None:
                state.copy_out_until = max(now, state.copy_out_until) + decision.copy_seconds
                state.copied_out_at[victim.request_id] = state.copy_out_until
            victim.metrics.num_swaps += 1
        state.release(victim)
        victim.metrics.num_preemptions += 1
        victim.num_passed += 1
        state.queue(victim)
        return swap

    def _hold_copies(self, plan: Plan) -> None:
        """Let victims hold what is in host memory already, before copies of others take its room."""
        state = self._state
        for victim, decision in plan.victims:
            if decision.action is PreemptionAction.SWAP:
                victim.host_blocks = state.held_on_host(victim)
                state.host.hold(victim.host_blocks)

    def _copy_out(self, victim: Request) -> Swap | None:
        """The copy of a victim's blocks that are not in host memory; it then holds all of them there."""
        state = self._state
        host, before = state.host, victim.host_blocks
        names = state.names_to_keep(victim)
        places = [None if name is None else host.names.first(name) for name in names]
        missing = [number for number, place in enumerate(places) if place is None]
        host.hold([place for place in places if place is not None])
        host.release(before)
        stored = host.store([names[number] for number in missing]) if missing else []
        for number, place in zip(missing, stored, strict=True):
            places[number] = place
        victim.host_blocks = [place for place in places if place is not None]
        if not missing:
            return None
        block_ids = tuple([victim.block_ids[number] for number in missing])
        stored_names = tuple([names[number] for number in missing])
        return Swap(victim, stored[0].handle, block_ids, tuple(stored), stored_names)

    def _copy_back(self, request: Request, decision: ResumeDecision, step_id: int, now: float) -> Swap:
        """The copy that fills the blocks of a swapped request but for those it finds on the device."""
        swap = self._state.take_places(request, self._state.locate(request))
        assert swap is not None  # it was swapped
        self._note_copy(decision, now)
        if self.ledger is not None:
            self.ledger.returns(request.request_id, decision)
            self.ledger.resumed(request, step_id, now)
        return swap

    def _note_copy(self, decision: ResumeDecision, now: float) -> None:
        if decision.copy_seconds:
            state = self._state
            state.copy_in_until = max(now, state.copy_in_until) + decision.copy_seconds

    def _start(
        self, request: Request, decision: ResumeDecision | None, step_id: int, now: float
    ) -> Swap | bool:
        """Let a waiting request begin, or begin again, with what `decision` brings from the host.

        Not, if it was to find what others were to compute before it, and now compute less of.

        Returns:
            Whether it does; or its copy, if there is one.
        """
        state = self._state
        started = state.start(request, copies=decision is not None)
        if not started:
            return False
        if not isinstance(started, Swap):
            state.begin(request)
        elif decision is not None:
            self._note_copy(decision, now)
            if decision.action is ResumeAction.IN_BACKGROUND:
                state.load(started)
            else:
                state.resume(started, as_prompt=True)
        if request.metrics.first_scheduled_time is None:
            request.metrics.first_scheduled_time = now
        elif self.ledger is not None:
            self.ledger.resumed(request, step_id, now)
        return started

    def _prefill(self, request: Request, length: int) -> PrefillChunk:
        """Schedule `length` tokens of a prompt under way, and a sample if none remain."""
        state = self._state
        start = request.num_computed_tokens
        length = min(length, request.num_to_compute)
        stop = start + length
        state.grow(request, stop)
        if request.kept_ranges and request.kept_ranges[0][0] == stop:
            request.num_computed_tokens = request.kept_ranges.pop(0)[1]
        else:
            request.num_computed_tokens = stop
        state.name_blocks(request)
        is_first, request.is_slot_new = request.is_slot_new, False
        num_recomputed = max(0, min(stop, request.num_lost_tokens) - start)
        if stop >= request.num_lost_tokens:
            request.num_lost_tokens = 0
        is_last = stop == request.num_tokens
        if is_last:
            state.prompts.remove(request)
            request.num_tokens += 1
            if request.num_tokens == request.max_total_tokens:
                state.ending.append(request)
            else:
                state.activate(request)
        return PrefillChunk(request, start, length, is_last, is_first, num_recomputed)

    def _record(self, ledger: Ledger, output: SchedulerOutput, now: float) -> None:
        state = self._state
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
            num_dropped=len(output.preempted) - output.num_swapped,
            num_swapped_out=output.num_swapped,
            num_swapped_in=len(output.swap_in) + len(output.joined),
            num_recomputed_tokens=sum([chunk.num_recomputed for chunk in output.prefill]),
            num_blocks_out=sum([len(swap.block_ids) for swap in output.swap_out]),
            num_blocks_in=sum([len(swap.block_ids) for swap in (*output.swap_in, *output.load)]),
        )
        ledger.step(record)

    def check(self) -> None:
        """Verify every invariant of queues, slots and blocks, in O(live requests + blocks).

        Raises:
            KVCacheError: one is broken; the message says which.
        """
        check_invariants(self._state)


def _planner_of(policy: SchedulingPolicy, state: SchedulerState) -> Planner:
    """The policy's own planner, or the one that plans as its parts answer.

    Raises:
        ConfigError: it is neither a `PlanningPolicy` nor a `SchedulerPolicy`.
    """
    if isinstance(policy, PlanningPolicy):
        return policy.planner(state)
    if isinstance(policy, SchedulerPolicy):
        return PolicyPlanner(state, policy)
    raise ConfigError(
        f"{policy!r} does not say how to plan: pass a SchedulerPolicy, or derive its class from "
        "jaxllm.sched.plan.PlanningPolicy"
    )
