"""Iteration-level continuous batching over a paged KV pool."""

from __future__ import annotations

import itertools
from collections.abc import Collection

from jaxllm.errors import ConfigError, Faults, RequestError, UserCodeError, called, path_of, shown
from jaxllm.sched.applying import Iteration
from jaxllm.sched.cache.names import FileIndex
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.holding import holding_of
from jaxllm.sched.invariants import check_invariants
from jaxllm.sched.ledger import Ledger
from jaxllm.sched.offloading import Offloader
from jaxllm.sched.plan import Plan, check_plan
from jaxllm.sched.planner import planner_of
from jaxllm.sched.policies import LearningPolicy, Progress, SchedulerPolicy, SchedulingPolicy
from jaxllm.sched.policies.contract import is_outside, name_asker, unchanged, watched
from jaxllm.sched.reading import ReadAhead
from jaxllm.sched.speculation import Speculation, Verified
from jaxllm.sched.state import SchedulerState
from jaxllm.sched.usage import PoolUsage, usage_of
from jaxllm.system.scalars import real
from jaxllm.types import (
    NO_COPIES,
    CopyProgress,
    FinishReason,
    HostPiece,
    Read,
    Request,
    RequestStatus,
    SchedulerOutput,
)

_DEFAULT_POLICY = SchedulerPolicy()
_NUM_WATCHED = 256
"""Requests that a planner from outside the package is held to leave as they are."""


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
    `schedule` (full blocks that lack names once its tokens are known), and it stays RUNNING until `finish`.

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
        speculation: Speculation | None = None,
    ) -> None:
        """An empty scheduler within the limits of `config`; `ledger` records its decisions.

        Args:
            config, policy, ledger: as above.
            files: what of the prefix cache executors can read from files; then every full block is copied to
                the host as soon as it can, and written to a file.
            speculation: drafts tokens of requests that decode, to be verified several in one iteration.

        Raises:
            ConfigError: prefixes are to be shared, and the policy does not; or there are files without
                that, or without host memory to read them into; or nothing plans for the policy; or drafts
                are to be verified, and its iterations hold no prompts beside decodes.
        """
        self.speculation = speculation
        if files is not None and not (config.enable_prefix_caching and config.num_host_blocks):
            raise ConfigError(
                "files of the prefix cache need enable_prefix_caching=True and num_host_blocks of 1 or more, "
                f"got {config.enable_prefix_caching} and {config.num_host_blocks}"
            )
        self._files = files
        if config.enable_prefix_caching and not policy.shares_prefixes:
            raise ConfigError(
                f"enable_prefix_caching=True: {called(policy)} plans without a prefix cache; leave it "
                "out, or take vllm_v1, adaptive or another preset"
            )
        self.config, self.policy = config, policy
        parts = (getattr(policy, question, None) for question in ("admission", "victim"))
        self._learners = [watched(part) for part in parts if isinstance(part, LearningPolicy)]
        if speculation is not None:
            speculation.begin(policy, ledger)
            self._learners.append(speculation)
        self._length = watched(policy.length)
        self.ledger, self.faults = ledger, Faults() if ledger is None else ledger.faults
        self.num_scheduled, self.is_planning = 0, False
        self.clear()

    def clear(self) -> None:
        """Forget all requests, and free whatever they hold."""
        policy, faults = self.policy, self.faults
        self._state = SchedulerState(self.config, policy.priority, policy.retention, faults)
        self._planner = planner_of(self.policy, self._state)
        self._is_outside = is_outside(self._planner)
        self._offloader: Offloader | None = None
        if self.config.enable_prefix_caching and self.config.num_host_blocks:
            has_files = self._files is not None
            self._offloader = Offloader(self._state, policy.offload, is_eager=has_files, faults=faults)
        self._read_ahead: ReadAhead | None = None
        if self._files is not None:
            self._read_ahead = ReadAhead(self._state, self._files, self.policy.offload)
        self._reads: list[Read] = []
        self._holding = holding_of(self.policy, self._state)

    @property
    def has_unfinished(self) -> bool:
        """Whether a request was added and not finished, be it only that its last token was not read yet."""
        return bool(self._state.live)

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing and wait for a prefill."""
        return len(self._state.waiting)

    @property
    def progress(self) -> Progress:
        """What has happened so far; only the scheduler changes it."""
        return self._state.progress

    @property
    def num_running(self) -> int:
        """Requests that hold blocks and a slot."""
        return self.config.max_num_seqs - len(self._state.free_slots)

    @property
    def num_decoding(self) -> int:
        """Requests that decode."""
        return len(self._state.running)

    @property
    def num_free_blocks(self) -> int:
        """Device blocks nobody holds."""
        return self._state.pool.num_free

    @property
    def held_block_ids(self) -> list[int]:
        """Device blocks that are held for next turns, with repeats (`HoldPolicy`)."""
        return [] if self._holding is None else self._holding.block_ids

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
        return usage_of(self._state.pool, self._state.host)

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            RequestTooLargeError: it could not end within `max_model_len` or the block pool, even alone.
            RequestError: its id is that of a live request, or it is empty, has nothing to generate, or
                was added before.
            ConfigError: a policy's or predictor's answer is not one of those it may give.
            UserCodeError: one from outside the package raised. In any case nothing has changed.
        """
        state = self._state
        request_id = request.request_id
        if request_id in state.live:
            raise RequestError(f"request id {request_id!r} is in use; finish that request or pick another id")
        if request.status is not RequestStatus.WAITING or request.num_tokens != request.num_prompt_tokens:
            raise RequestError(f"request {request_id!r} was scheduled before; make a new Request")
        self.config.check_fits(request)
        if self._length is not None:
            request.predicted_tokens = self._predicted_tokens(request)
        if self._holding is not None and self._holding.turns:
            self._holding.recognise(request)
        state.queue(request)
        state.live[request_id] = request

    def _predicted_tokens(self, request: Request) -> float | None:
        """What the length predictor says of a new request."""
        assert self._length is not None
        answer = self._length.predict(request)
        tokens = real(answer)
        if answer is None or (tokens is not None and tokens > 0):
            return tokens
        raise ConfigError(
            f"{self._length!r} predicts {shown(answer)} tokens for request {request.request_id!r}: it must "
            "be a number above 0, or None before anything is known"
        )

    @property
    def lets_sit_out(self) -> bool:
        """Whether the policy can plan without some of those who hold blocks."""
        return self._planner.lets_sit_out

    def sit_out(self, request_ids: Collection[str]) -> None:
        """Let these requests get no tokens until the next call, and those of the last call go on.

        They have computed their prompts, no step of theirs is in flight, and they keep what is not needed.
        """
        if request_ids or self._state.sitting_out:
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
            UserCodeError: a policy or predictor from outside the package raised, now, or where a request
                ended or the ledger was told (`faults`). In both cases, if `is_planning`, nothing has changed.

        With drafts in it (`num_drafts`) it has to be read, and those who verified them accepted (`accept`),
        before the next call.
        """
        state = self._state
        self.is_planning = False
        state.host.now = now
        state.settle(copies, now)
        if self._read_ahead is not None:
            self._read_ahead.settle(copies.read, now)
        if self._holding is not None and (self._holding.claimed or self._holding.held):
            self._holding.settle(now)
        self.is_planning = True
        try:
            if (fault := self.faults.take()) is not None:
                raise fault
            if self._read_ahead is not None:
                self._read_ahead.add_reads(self._reads, now)
            while (plan := self._plan(now)) is None:
                state.join(next(iter(state.loading.values())))
            if self.speculation is not None:
                self.speculation.draft(plan, state)
                num_running = len(state.running)
                max_decode_steps = self.speculation.max_decode_steps(max_decode_steps, num_running)
        except UserCodeError as error:
            name_asker(error)
            raise
        self.is_planning = False
        iteration = Iteration(state, self.ledger, self.num_scheduled, now)
        self.num_scheduled += 1
        iteration.apply(plan, max_decode_steps)
        return iteration.output(self._offloader, copies)

    def _plan(self, now: float) -> Plan | None:
        """The planner's next iteration; one from outside the package is held to its rules."""
        if not self._is_outside:
            return self._planner.plan(now)
        with unchanged(self._planner, itertools.islice(self._state.live.values(), _NUM_WATCHED)):
            plan = self._planner.plan(now)
        if plan is not None:
            check_plan(plan, self._state, path_of(self._planner))
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

    @property
    def expects_drafts(self) -> bool:
        """Whether the next iteration will verify drafts, unless the tokens in flight say otherwise."""
        self.is_planning = True
        is_expected = self.speculation is not None and self.speculation.is_expected(self._state)
        self.is_planning = False
        return is_expected

    def accept(self, request: Request, verified: Verified) -> None:
        """Let a request go on whose drafts were verified, each time with one new token more than were right.

        Args:
            request: its new tokens are among its outputs. If they have ended it, it is only counted.
            verified: what became of its drafts.

        Raises:
            RequestError: none of its drafts were being verified.
        """
        is_verifying = request in self._state.verifying
        if self.speculation is None or not (is_verifying or request.is_finished):
            raise RequestError(f"request {request.request_id!r} verified no drafts")
        if is_verifying:
            self._state.accept(request)
        self._state.progress.num_generated += sum([num_right + 1 for _, num_right in verified])
        self.speculation.verified(request, verified)

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
        if state.queue_of(request) is not None:
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
        elif request.request_id in state.tails:
            state.release_tail(request)
        del state.live[request.request_id]
        state.under_way.pop(request.request_id, None)
        state.progress.num_ended += 1
        state.num_read.pop(request.request_id, None)
        self._tell_of_end(request, reason)
        if self.ledger is not None:
            self.ledger.finished(request.request_id)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason

    def _tell_of_end(self, request: Request, reason: FinishReason) -> None:
        """Let policies and predictors learn of a request; what they raise is kept in `faults`."""
        has_ended = reason in ("stop", "length")
        if has_ended and self._length is not None:
            with self.faults:
                self._length.observe(request, len(request.output_token_ids))
        is_cut = request.sampling_params.max_tokens is not None if reason == "length" else reason != "stop"
        for learner in self._learners:
            with self.faults:
                learner.ended(request, is_whole=not is_cut)
        has_blocks = request.num_known_tokens > self.config.block_size  # the last token's KV is not computed
        if has_ended and has_blocks and self._holding is not None:
            with self.faults:
                self._holding.keep(request, self._state.host.now)

    def reprioritize(self, request: Request, priority: int) -> None:
        """Give a live request another `priority` (`PriorityClasses`)."""
        if (queue := self._state.queue_of(request)) is not None:
            queue.remove(request)
        request.priority = priority
        if queue is not None:
            queue.add(request)

    def reset_prefix_cache(self) -> tuple[HostPiece, ...]:
        """Find none of the present blocks again; those who hold some keep them.

        Returns:
            Pieces of host memory that executors are to let go of.
        """
        self._state.pool.forget_names()
        self._state.host.forget_names()
        for part in (self._holding, self._offloader, self._read_ahead):
            if part is not None:
                part.forget()
        if self.speculation is not None:
            self.speculation.forget_prefixes()
        return self._state.host.take_dropped()

    def check(self) -> None:
        """Verify every invariant of queues, slots and blocks, in O(live requests + blocks).

        Raises:
            KVCacheError: one is broken; the message says which.
        """
        check_invariants(self._state, self.held_block_ids)
