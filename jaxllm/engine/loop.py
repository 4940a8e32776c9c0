"""What takes an engine's requests to their end, one iteration after another."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterable, Sequence

from jaxllm.engine.observer import StepObserver
from jaxllm.engine.output_processor import NOT_FINITE, Outbox, RequestState
from jaxllm.engine.speculation import SampledRow, judged
from jaxllm.errors import ConfigError, RequestError, shown
from jaxllm.sampling.token_masks import GrammarState, mask_threads, patience
from jaxllm.sched.scheduler import Scheduler
from jaxllm.sched.speculation import Speculation, Verified
from jaxllm.types import (
    MAX_DECODE_STEPS,
    Executor,
    FinishReason,
    RequestStatus,
    SampledTokens,
    SchedulerOutput,
    StepResult,
)

_SECONDS_AT_A_TIME = 0.05
_LEAST_SECONDS = 1e-6  # of a decode step, whatever a clock says
_SECONDS_OF_FILES = 0.01
"""How long an idle engine waits for files before it looks at its requests again."""
_SECONDS_OF_MASKS = 0.005
"""The same for masks that are being made, and for programs."""
_SOON = 0.001  # masks that are there by then hold nothing up
_RATE = 0.1  # weight of the newest decode step


@dataclasses.dataclass(slots=True)
class _Dispatched:
    """A step under way; it began when it was sent if the device had nothing else to do.

    `is_undisturbed`: no program was being compiled, which takes time from it.
    """

    scheduled: SchedulerOutput
    result: StepResult
    sent: float
    is_first: bool
    is_undisturbed: bool


class Loop:
    """Requests under way, and the iterations that take them on.

    Whoever calls it lets one thread in at a time, and uses it no more where something has broken off.

    Args:
        executor, scheduler, async_scheduling, num_scheduler_steps, clock, observer: see `Engine`.

    Attributes:
        states: live requests, by their ids.
        outbox: takes what is new of them.
        on_tokens: called with how many tokens each step has sampled, as far as they are wanted.

    Raises:
        ConfigError: `num_scheduler_steps` is not a number of steps that the executor takes.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        *,
        async_scheduling: bool,
        num_scheduler_steps: int | None,
        clock: Callable[[], float],
        observer: StepObserver | None,
    ) -> None:
        if num_scheduler_steps is not None and (
            isinstance(num_scheduler_steps, bool)
            or not isinstance(num_scheduler_steps, int)
            or not 1 <= num_scheduler_steps <= executor.max_decode_steps
        ):
            raise ConfigError(
                f"num_scheduler_steps={num_scheduler_steps!r} must be None or an integer from 1 to "
                f"{executor.max_decode_steps}, which the executor was built for"
            )
        self.scheduler, self._executor = scheduler, executor
        self._depth = 1 if async_scheduling else 0
        self._num_scheduler_steps = num_scheduler_steps
        self._speculation = scheduler.speculation
        self._decode_seconds, self._num_timed = _SECONDS_AT_A_TIME, 0
        self._clock, self._observer = clock, observer
        self._last_read = 0.0
        self._last_ended: float | None = None  # None if that is not known
        self.states: dict[str, RequestState] = {}
        self._samples: dict[str, list[str]] = {}  # ids of live samples, by that of their request
        self._num_following = 0  # requests whose masks depend on their outputs
        self._beyond_steps: collections.Counter[int] = collections.Counter()  # live requests, by their flags
        self._unready: set[str] = set()  # those whose programs are being compiled
        self._to_follow: dict[str, GrammarState] = {}  # those that have got a token since the last step
        self._late: dict[str, GrammarState] = {}  # those that are still following theirs
        self._in_flight: collections.deque[_Dispatched] = collections.deque()
        self.outbox = Outbox()
        self.on_tokens: Callable[[int], object] = lambda num_tokens: None

    @property
    def is_draining(self) -> bool:
        """Whether all requests have ended, and steps or copies are under way for them."""
        return not self.states and (bool(self._in_flight) or self.scheduler.has_leftovers)

    def is_live(self, request_id: str) -> bool:
        """Whether the request was added and has not ended."""
        return isinstance(request_id, str) and (request_id in self.states or request_id in self._samples)

    def live(self, request_id: str) -> list[RequestState]:
        """A live request, or those of its samples that have not ended.

        Raises:
            RequestError: there is none.
        """
        if not self.is_live(request_id):
            raise RequestError(f"there is no request {shown(request_id)}: no live request has this id")
        return [self.states[name] for name in self._samples.get(request_id, [request_id])]

    def add(self, states: Sequence[RequestState]) -> None:
        """Queue the samples of a request, all or none.

        Raises:
            RequestError: its id is in use.
        """
        if not self.states:
            self.scheduler.faults.take()  # of those who ended before, and whom nobody asked about since
        ids = [state.request.request_id for state in states]
        for used in (*(state.sampled_for for state in states), *ids):
            if used is not None and self.is_live(used):
                raise RequestError(f"request id {used!r} is in use; finish that request or pick another id")
        for place, (state, request_id) in enumerate(zip(states, ids, strict=True)):
            try:
                self.scheduler.add(state.request)
            except Exception:  # of a policy or predictor: the samples before it are not to be left alone
                for added in states[:place]:
                    self.drop(added)
                raise
            self.states[request_id] = state
            self._num_following += state.follows
            state.beyond_steps = self._executor.beyond_steps(state.request.sampling_params)
            if state.beyond_steps:
                self._beyond_steps[state.beyond_steps] += 1
            self._unready.add(request_id)  # until the next iteration has looked
            if state.sampled_for is not None:
                self._samples.setdefault(state.sampled_for, []).append(request_id)

    def finish(self, state: RequestState, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a request in any state."""
        self.scheduler.finish(state.request, reason, stop_reason)
        state.request.metrics.finished_time = self._clock()
        self._forget(state)
        self.outbox.put([state])

    def drop(self, state: RequestState) -> None:
        """End a request in any state, and report nothing."""
        self.scheduler.finish(state.request, "error")
        self._forget(state)
        self.outbox.builders.pop(state, None)

    def advance(self) -> None:
        """Schedule, dispatch, commit."""
        while self._num_following and self._in_flight:  # what may come next depends on these tokens
            self._commit(self._in_flight.popleft())
        if self._speculation is not None:
            self._foresee_drafts(self._speculation)
        self._follow_grammars()
        self._look_at_programs()
        self.scheduler.sit_out({*self._late, *self._unready})
        copies = self._executor.copies()
        if self._observer is not None and copies.timed:
            with self.scheduler.faults:
                self._observer.observe_copies(copies.timed)
        scheduled = self.scheduler.schedule(self._clock(), copies, self._max_decode_steps())
        if reads := self.scheduler.take_reads():
            self._executor.drop(self.scheduler.take_dropped())  # whose room they take
            self._executor.read(reads)
        if not scheduled.is_empty:
            sent = self._clock()
            result = self._executor.execute(scheduled)
            is_undisturbed = self._executor.is_undisturbed
            self._in_flight.append(_Dispatched(scheduled, result, sent, not self._in_flight, is_undisturbed))
        if scheduled.num_drafts:
            self._commit_all()  # which of these were right decides what comes next
        elif len(self._in_flight) > self._depth or (scheduled.is_empty and self._in_flight):
            self._commit(self._in_flight.popleft())
        elif scheduled.is_empty:
            self.outbox.send()
            self._wait()
        while self._in_flight and not self.states:  # all that is in flight is overrun
            self._commit(self._in_flight.popleft())
        self.flush()

    def settle(self) -> None:
        """Once all requests have ended: wait until nothing is left of them."""
        self._commit_all()
        while self.scheduler.has_leftovers:
            self.flush()

    def reset_prefix_cache(self) -> None:
        """Forget what blocks hold."""
        self._executor.drop(self.scheduler.reset_prefix_cache())
        if not self._in_flight:
            self.flush()

    def close(self) -> None:
        """End all requests (as "abort"), and leave no copy under way."""
        for state in list(self.states.values()):
            self.finish(state, "abort")
        self._in_flight.clear()
        self.settle()

    def give_up(self) -> list[RequestState]:
        """End all requests with an error that nobody has been told of yet, and return them."""
        states = list(self.states.values())
        for held in (self.states, self._samples, self._to_follow, self._late, self._unready, self._in_flight):
            held.clear()
        self.scheduler.clear()
        for state in states:
            state.request.status = RequestStatus.FINISHED
            state.request.finish_reason = "error"
        return states

    def flush(self) -> None:
        """Tell the executor what no step will any more, if all requests have ended."""
        if not self.states and self.scheduler.has_leftovers:
            self._executor.transfer(self.scheduler.flush(self._executor.write_room))
            if self.scheduler.has_leftovers:
                self._executor.wait_for_files(_SECONDS_OF_FILES)

    def _forget(self, state: RequestState) -> None:
        """Let a request be live no longer."""
        del self.states[state.request.request_id]
        self._num_following -= state.follows
        if state.beyond_steps:
            self._beyond_steps -= collections.Counter({state.beyond_steps: 1})
        self._unready.discard(state.request.request_id)
        self._to_follow.pop(state.request.request_id, None)
        self._late.pop(state.request.request_id, None)
        if state.sampled_for is not None:
            left = self._samples[state.sampled_for]
            left.remove(state.request.request_id)
            if not left:
                del self._samples[state.sampled_for]

    def _max_decode_steps(self, *, looks_up: bool = False) -> int:
        if self._num_following:
            return 1
        if self._beyond_steps and not (
            looks_up or self._executor.steps_together(self._beyond_steps, self.scheduler.num_running)
        ):
            return 1
        if self._num_scheduler_steps is not None:
            return self._num_scheduler_steps
        most = min(MAX_DECODE_STEPS, self._executor.max_decode_steps)
        return max(1, min(most, int(_SECONDS_AT_A_TIME / max(self._decode_seconds, _LEAST_SECONDS))))

    def _foresee_drafts(self, speculation: Speculation) -> None:
        """Read what is in flight if drafts are to follow it."""
        if not speculation.asks(self.scheduler.num_decoding):
            speculation.lookup_steps = 1
            return
        looks_up = self._executor.looks_up(self._beyond_steps, self.scheduler.num_running)
        speculation.lookup_steps = self._max_decode_steps(looks_up=True) if looks_up else 1
        if self._in_flight and self.scheduler.expects_drafts:
            self._commit_all()

    def _commit_all(self) -> None:
        while self._in_flight:
            self._commit(self._in_flight.popleft())

    def _wait(self) -> None:
        """Wait for what nobody can go on without, but not for long: new requests may have come."""
        if self.scheduler.is_reading:
            self._executor.wait_for_files(_SECONDS_OF_FILES)
        elif self._unready:
            self._executor.wait_for_programs(_SECONDS_OF_MASKS)
        elif self._late:
            mask_threads().wait(self._late.values(), _SECONDS_OF_MASKS)

    def _follow_grammars(self) -> None:
        """Have masks made after the newest tokens; who is late with it sits out, unless nobody may."""
        if self._to_follow:
            begun = mask_threads().begin(self._to_follow.values())
            seconds = patience(len(self._to_follow))
            self._late |= self._to_follow
            self._to_follow = {}
            if begun is not None and not concurrent.futures.wait([begun], _SOON).done:
                self.outbox.send()  # what others have sampled need not wait, too
                concurrent.futures.wait([begun], seconds)
        while self._late and not self.scheduler.lets_sit_out:
            if not (unready := [one for one in self._late.values() if not one.is_ready]):
                break
            mask_threads().wait(unready, _SECONDS_OF_MASKS)
        for request_id, grammar in list(self._late.items()):
            if grammar.is_ready:
                del self._late[request_id]
                if grammar.problem is not None:
                    self.finish(self.states[request_id], "error", grammar.problem)

    def _look_at_programs(self) -> None:
        """Let those begin whose programs are compiled, and end those whose programs cannot be."""
        for request_id in list(self._unready):
            state = self.states[request_id]
            try:
                if not self._executor.is_ready_for(state.request):
                    continue
            except Exception as error:
                self.finish(state, "error", f"a program that it needs cannot be compiled: {error}")
            self._unready.discard(request_id)

    def _commit(self, step: _Dispatched) -> None:
        scheduled = step.scheduled
        was_ready = step.result.is_ready()
        sampled = step.result.fetch()
        now = self._clock()
        self._observe(step, was_ready, now)
        self.scheduler.complete(scheduled.step_id)
        if sampled.prompt_logprobs:
            self._commit_prompt_logprobs(scheduled, sampled)
        requests = scheduled.sampled * scheduled.num_decode_steps
        logprobs = sampled.logprobs or [None] * len(requests)
        rows: Iterable[SampledRow] = zip(requests, sampled.token_ids, logprobs, strict=True)
        turns: Sequence[Verified] = ()
        if scheduled.num_drafts:
            rows, turns = judged(scheduled, rows, sampled.token_ids)
        states = self.states
        streaming: dict[str, RequestState] = {}
        num_tokens = 0
        for request, token_id, scores in rows:
            if request.status is RequestStatus.FINISHED:
                continue  # it has ended: this is a token of the overrun
            state = states[request.request_id]
            metrics = request.metrics
            metrics.last_token_time = now
            if metrics.first_token_time is None:
                metrics.first_token_time = now
            ended = state.append(token_id, scores)
            num_tokens += 1
            if ended is not None:
                self.finish(state, *ended)
                continue
            if request.token_mask is not None and request.token_mask.grammar is not None:
                self._to_follow[request.request_id] = request.token_mask.grammar
            if state.stream:
                streaming[request.request_id] = state
        self.on_tokens(num_tokens)
        if self._speculation is not None:
            self._go_on_after_drafts(scheduled, turns)
            with self.scheduler.faults:
                self._speculation.observe(scheduled, now, turns, is_undisturbed=step.is_undisturbed)
        self.outbox.put(state for state in streaming.values() if not state.request.is_finished)

    def _go_on_after_drafts(self, scheduled: SchedulerOutput, turns: Sequence[Verified]) -> None:
        """Let those go on whose drafts a step has verified; `turns` are those that the device looked up."""
        for request, verified in zip(scheduled.decode if turns else (), turns, strict=True):
            self.scheduler.accept(request, verified)
        for chunk in scheduled.prefill:
            num_tokens = chunk.request.num_known_tokens - chunk.start - 1
            if chunk.drafts and num_tokens > 0:  # else it was aborted meanwhile
                self.scheduler.accept(chunk.request, [(len(chunk.drafts), num_tokens - 1)])

    def _observe(self, step: _Dispatched, was_ready: bool, now: float) -> None:
        """Tell how long a step ran: exactly if it was waited for, and began when the last one ended.

        Whatever the host or the caller did meanwhile is not the device's time: then only a bound is known.
        Where a step is read as soon as it is sent there is no meanwhile.
        """
        scheduled = step.scheduled
        began = step.sent if step.is_first else self._last_ended
        is_hidden = was_ready and self._depth and not scheduled.num_drafts
        is_timed = began is not None and not is_hidden and step.is_undisturbed
        seconds = now - (max(step.sent, self._last_read) if began is None else max(step.sent, began))
        self._last_read = now
        self._last_ended = None if was_ready else now
        if self._observer is not None:
            with self.scheduler.faults:
                self._observer.observe(scheduled, seconds, is_timed=is_timed)
        if is_timed and all(chunk.drafts for chunk in scheduled.prefill):
            self._num_timed += 1
            step_seconds = min(seconds / scheduled.num_decode_steps, _SECONDS_AT_A_TIME)
            rate = max(_RATE, 1 / self._num_timed)
            self._decode_seconds += rate * (step_seconds - self._decode_seconds)

    def _commit_prompt_logprobs(self, scheduled: SchedulerOutput, sampled: SampledTokens) -> None:
        for chunk in scheduled.prefill:
            request_id = chunk.request.request_id
            scores = (sampled.prompt_logprobs or {}).get(request_id)
            if scores and not chunk.request.is_finished:
                state = self.states[request_id]
                if not state.add_prompt_logprobs(scores, chunk.start + 1):
                    self.finish(state, "error", NOT_FINITE)
