"""The engine: continuous batching over any `Executor`.

It knows the scheduler and the executor's protocol, never a concrete executor.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.engine.inputs import InputProcessor, Prompt
from jaxllm.engine.observer import StepObserver
from jaxllm.engine.output_builder import Delta, OutputBuilder, Samples
from jaxllm.engine.output_processor import NOT_FINITE, RequestState, Sink
from jaxllm.engine.outputs import RequestOutput
from jaxllm.engine.owner import Owner
from jaxllm.engine.speculation import SampledRow, judged
from jaxllm.errors import ConfigError, EngineError, RequestError, shown
from jaxllm.sampling.param_checks import RequestOutputKind
from jaxllm.sampling.params import SamplingParams
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

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SECONDS_AT_A_TIME = 0.05
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


_CLOSED = EngineError("it was closed")
"""What an engine has failed of that was closed."""


class Engine:
    """Runs requests to their end, many at a time.

    It belongs to the thread that adds requests while there are any; `EngineThread` wraps it for several.

    Args:
        executor: computes the scheduled steps.
        scheduler: decides them; its block count and size must be the executor's.
        vocab_size: token ids must be below it.
        tokenizer: turns text into tokens and back; None takes and gives token ids only.
        eos_token_ids: tokens that end a sequence.
        async_scheduling: schedule and dispatch a step before reading the tokens of the one before it.
        num_scheduler_steps: most decode iterations of one step, as the executor was built for; None takes as
            many as are computed in 50 ms, so that few tokens are late, and at most `MAX_DECODE_STEPS`.
        clock: time in seconds, for arrival times and metrics.
        observer: told how long each step took.
        has_rotary_positions: whether the model's are, so that prompts may be cut at their front.

    Attributes:
        on_tokens: called with how many tokens each step has sampled, as far as they are wanted.
        is_asleep: whether weights or pool are gone for a while, so that requests are refused.

    Raises:
        ConfigError: `num_scheduler_steps` is not a number of steps that the executor takes.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        *,
        vocab_size: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        async_scheduling: bool = True,
        num_scheduler_steps: int | None = 1,
        clock: Callable[[], float] = time.monotonic,
        observer: StepObserver | None = None,
        has_rotary_positions: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.tokenizer, self.eos_token_ids = tokenizer, eos_token_ids
        self._executor = executor
        self._inputs = InputProcessor(
            scheduler.config,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids,
            reads=scheduler.policy.reads,
            has_rotary_positions=has_rotary_positions,
        )
        self._primary_eos = (
            tokenizer.eos_token_id if tokenizer is not None else min(eos_token_ids, default=None)
        )
        self._depth = 1 if async_scheduling else 0
        if num_scheduler_steps is not None and (
            isinstance(num_scheduler_steps, bool)
            or not isinstance(num_scheduler_steps, int)
            or not 1 <= num_scheduler_steps <= executor.max_decode_steps
        ):
            raise ConfigError(
                f"num_scheduler_steps={num_scheduler_steps!r} must be None or an integer from 1 to "
                f"{executor.max_decode_steps}, which the executor was built for"
            )
        self._num_scheduler_steps = num_scheduler_steps
        self._speculation = scheduler.speculation
        self._decode_seconds = math.inf
        self._clock = clock
        self._observer = observer
        self._last_read = 0.0
        self._last_ended: float | None = None  # None if that is not known
        self._arrivals = itertools.count()
        self._states: dict[str, RequestState] = {}
        self._samples: dict[str, list[str]] = {}  # ids of live samples, by that of their request
        self._builders: dict[RequestState, OutputBuilder] = {}  # ids may be used again before ends are told
        self._num_following = 0  # requests whose masks depend on their outputs
        self._beyond_steps: collections.Counter[int] = collections.Counter()  # live requests, by their flags
        self._unready: set[str] = set()  # those whose programs are being compiled
        self._to_follow: dict[str, GrammarState] = {}  # those that have got a token since the last step
        self._late: dict[str, GrammarState] = {}  # those that are still following theirs
        self._in_flight: collections.deque[_Dispatched] = collections.deque()
        self._deliveries: list[tuple[RequestState, Delta]] = []
        self._reports: list[RequestOutput] = []
        self.on_tokens: Callable[[int], object] = lambda num_tokens: None
        self.is_asleep = False
        me = weakref.ref(self)  # else it would be let go of, and the pool with it, only by the collector
        self.owner = Owner(lambda: 0 if (engine := me()) is None else engine.num_unfinished)
        self._failure: BaseException | None = None

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do or to report."""
        is_busy = self._states or self._in_flight or self._deliveries or self._reports
        return bool(is_busy) or self.is_draining

    @property
    def num_live(self) -> int:
        """Requests added and not ended."""
        return len(self._states)

    @property
    def num_unfinished(self) -> int:
        """The same as a number: of live requests, while there are any."""
        return self.num_live or int(self.has_unfinished_requests)

    @property
    def is_draining(self) -> bool:
        """Whether all requests have ended, and steps or copies are under way for them."""
        return not self._states and (bool(self._in_flight) or self.scheduler.has_leftovers)

    def is_live(self, request_id: str) -> bool:
        """Whether the request was added and has not ended."""
        return isinstance(request_id, str) and (request_id in self._states or request_id in self._samples)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        arrival_time: float | None = None,
        stream: bool = False,
        priority: int | None = None,
        deadline: float | None = None,
    ) -> None:
        """Queue a request. A refused one leaves the engine as it was.

        Args:
            request_id: unique among live requests.
            prompt: text, token ids, or `{"prompt": text}` / `{"prompt_token_ids": ids}` (with both, the ids
                count and outputs repeat the text), which may have a "cache_salt": only requests of the same
                one find each other's KV. The first "num_dropped_tokens" of its tokens are cut: never attended
                to, nor counted. What is found of the others keeps its KV and its positions, even though it
                was computed while they were there.
            sampling_params: vLLM's defaults if None.
            arrival_time: seconds of the engine's clock; now if None.
            stream: report the request after every step it advanced in, not only when it has finished.
            priority: as in vLLM, lower is more urgent; for policies that look at it.
            deadline: seconds from its arrival by which it should end; likewise.

        Raises:
            RequestError: the prompt is empty or malformed, a token id is out of range, or the policy does not
                look at what was given.
            RequestTooLargeError: it can never fit.
            SamplingParamsError: a token id is out of range, or stop strings lack a tokenizer.
            EngineError: the engine has failed, or another thread uses it.
        """
        with self.owner.used():
            prepared = self.prepare(
                request_id,
                prompt,
                sampling_params,
                stream=stream,
                arrival_time=arrival_time,
                priority=priority,
                deadline=deadline,
            )
            self._add([state for state, _ in prepared])
            self._builders.update(prepared)

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        stream: bool = False,
        sink: Sink | None = None,
        output_id: str | None = None,
        arrival_time: float | None = None,
        **urgency: Any,
    ) -> list[tuple[RequestState, OutputBuilder]]:
        """Check a request, in any thread, without queueing it; arguments and errors as `add_request`.

        Args beside those:
            sink: is given its deltas instead of the caller of `step`.
            output_id: what its outputs are called, if not as the request.

        Returns:
            What there is of it for each sample.
        """
        if self._failure is not None or self.is_asleep:
            raise self._refusal()
        requests, text = self._inputs.make(
            request_id,
            prompt,
            sampling_params,
            arrival_time=self._clock() if arrival_time is None else arrival_time,
            arrivals=self._arrivals,
            **urgency,
        )
        kind = requests[0].sampling_params.output_kind
        stream = stream and kind is not RequestOutputKind.FINAL_ONLY
        is_delta = stream and kind is RequestOutputKind.DELTA
        sampled_for = samples = None
        if sampling_params is not None and len(requests) > 1:
            sampled_for, samples = request_id, Samples(sampling_params, stream=stream)
        prepared = []
        for index, request in enumerate(requests):
            state = RequestState(
                request,
                self.tokenizer,
                primary_eos_token_id=self._primary_eos,
                stream=stream,
                sink=sink,
                sampled_for=sampled_for,
            )
            output_ids = output_id or request_id, text
            builder = OutputBuilder(request, *output_ids, self.tokenizer, samples, index, is_delta=is_delta)
            prepared.append((state, builder))
        return prepared

    def add(self, states: Sequence[RequestState]) -> None:
        """Queue the samples of a prepared request, all or none.

        Raises:
            RequestError: its id is in use.
            EngineError: the engine has failed, or another thread uses it.
        """
        with self.owner.used():
            self._add(states)

    def step(self) -> list[RequestOutput]:
        """Run one iteration; returns the requests that finished, and those streaming that advanced.

        Whatever a scheduling policy raises while an iteration is planned leaves the engine as it was, and
        what a predictor raises that is told of a step or an end, or asked for the ledger, comes after the
        step. Any other exception ends all requests, and the engine with them: also one that comes from
        outside such as Ctrl-C, and what policies of offload and retention raise, which are asked while copies
        are made.

        Raises:
            EngineError: the engine has failed, or another thread uses it. `finished` has what had finished.
            UserCodeError: a scheduling policy or a predictor raised; the message names it.
        """
        self.advance()
        reports, self._reports = self._reports, []
        return reports

    def advance(self) -> None:
        """As `step`, without returning anything: the next `step` does."""
        with self._used(), self._changing():
            self._advance()
            fault = self.scheduler.faults.take()
            if fault is not None:  # calls end with it, also those whose last tokens these are
                self._deliveries = [one for one in self._deliveries if one[0].sink is None]
            self._deliver()
        if fault is not None:
            raise fault

    def abort(self, request_id: str) -> None:
        """End a request in any state; `step` reports it with finish_reason "abort".

        Raises:
            RequestError: no live request has this id.
            EngineError: the engine has failed, or another thread uses it.
        """
        with self._used():
            states = self._live(request_id)
            with self._changing():
                for state in states:
                    self._finish(state, "abort", None)

    def drop(self, request_id: str) -> None:
        """End a request in any state, and report nothing.

        Raises:
            RequestError: no live request has this id.
            EngineError: the engine has failed, or another thread uses it.
        """
        with self._used():
            states = self._live(request_id)
            with self._changing():
                for state in states:
                    self.scheduler.finish(state.request, "error")
                    self._forget(state)
                    self._builders.pop(state, None)

    def check_dropped(self, num_dropped: int, num_tokens: int, params: SamplingParams) -> None:
        """Raise if so many of a prompt's tokens cannot be cut at its front; see `InputProcessor`."""
        self._inputs.check_dropped(num_dropped, num_tokens, params)

    def check_params(self, params: SamplingParams) -> None:
        """Raise a SamplingParamsError if a request could not be sampled so; see `InputProcessor`."""
        self._inputs.check_params(params)

    def takes_long(self, params: SamplingParams) -> bool:
        """Whether preparing such a request may take seconds; see `InputProcessor`."""
        return self._inputs.takes_long(params)

    def truncated(self, token_ids: Sequence[int], params: SamplingParams, num_dropped: int) -> Sequence[int]:
        """What is left of a prompt where its parameters say that it is cut; see `InputProcessor`."""
        return self._inputs.truncated(token_ids, params, num_dropped)

    def check_priority(self, priority: int) -> None:
        """Raise a RequestError if a priority is none, or the policy does not look at it."""
        self._inputs.check_priority(priority)

    def set_priority(self, request_id: str, priority: int) -> None:
        """Give a live request another priority, for policies that look at it; lower is more urgent.

        Raises:
            RequestError: no live request has this id, or the priority is no integer, or would be ignored.
            EngineError: the engine has failed, or another thread uses it.
        """
        with self._used():
            self._inputs.check_priority(priority)
            states = self._live(request_id)
            with self._changing():
                for state in states:
                    self.scheduler.reprioritize(state.request, priority)

    def reset_prefix_cache(self) -> None:
        """Forget what blocks hold, so that later requests compute all of their prompts.

        Raises:
            EngineError: the engine has failed, or another thread uses it.
        """
        with self._used(), self._changing():
            self._executor.drop(self.scheduler.reset_prefix_cache())
            if not self._in_flight:
                self._flush()

    def while_idle(self, change: Callable[[], object]) -> None:
        """Make a change that no request may live through, once nothing is left of those before it.

        None of the present blocks will be found again, wherever they are. If the change fails, the engine
        does.

        Raises:
            EngineError: requests are under way, the engine has failed, or another thread uses it.
        """
        with self._used():
            if self._states:
                raise EngineError(
                    f"{self.num_live} requests are under way: wait for them or abort them, and call again"
                )
            with self._changing():
                while self._in_flight:
                    self._commit(self._in_flight.popleft())
                while self.scheduler.has_leftovers:
                    self._flush()
                self._executor.drop(self.scheduler.reset_prefix_cache())
                while self.scheduler.has_leftovers:
                    self._flush()
                change()

    def close(self) -> None:
        """End all requests (as "abort"), and take no more; `executor` is still to be released.

        Raises:
            EngineError: another thread uses it.
        """
        with self.owner.used():
            self._inputs.clear()
            if self._failure is not None:
                return
            with self._changing():
                for state in list(self._states.values()):
                    self._finish(state, "abort", None)
                self._in_flight.clear()
                while self.scheduler.has_leftovers:
                    self._flush()
                self._deliver()
            self._failure = _CLOSED

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or has failed."""
        return self._failure is not None

    # Failure

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        """Let only the owner in, and nobody once the engine has failed."""
        with self.owner.used():
            if self._failure is not None:
                raise self._dead_with_reports() from self._failure
            yield

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Fail where a change breaks off, but not where a policy raises while an iteration is planned."""
        self.scheduler.is_planning = False
        try:
            yield
        except BaseException as error:
            if self.scheduler.is_planning and isinstance(error, Exception):
                raise
            self._fail(error)
            if not isinstance(error, Exception):
                raise
            raise self._dead_with_reports() from error

    def _fail(self, error: BaseException) -> None:
        """End everything, in an order in which nothing can be lost that has finished."""
        self._failure = error
        states = list(self._states.values())
        self._states.clear()
        self._samples.clear()
        self._to_follow.clear()
        self._late.clear()
        self._unready.clear()
        self._in_flight.clear()
        self.scheduler.clear()
        for state in states:
            state.request.status = RequestStatus.FINISHED
            state.request.finish_reason = "error"
        self._deliver()
        self._builders.clear()
        dead = self._dead()
        dead.__cause__ = error
        for state in states:
            if state.sink is not None:
                state.sink(state, dead)
        self._executor.release()

    def _refusal(self) -> EngineError:
        """Why no requests are taken."""
        if self._failure is not None:
            return self._dead()
        return EngineError("the engine sleeps, without its KV pool or weights; call wake_up() first")

    def _dead(self) -> EngineError:
        error = self._failure
        if error is _CLOSED:
            return EngineError("the engine was closed; make a new one (a new LLM works in the same process)")
        return EngineError(
            f"the engine has failed and all its requests have ended: {type(error).__name__}: {error}; "
            "make a new one (a new LLM works in the same process)"
        )

    def _dead_with_reports(self) -> EngineError:
        """With what had finished and was not handed out."""
        dead = self._dead()
        dead.finished, self._reports = self._reports, []
        return dead

    # The parts of a step

    def _add(self, states: Sequence[RequestState]) -> None:
        if self._failure is not None or self.is_asleep:
            raise self._refusal()
        if not self._states:
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
                    self.scheduler.finish(added.request, "error")
                    self._forget(added)
                raise
            self._states[request_id] = state
            self._num_following += state.follows
            state.beyond_steps = self._executor.beyond_steps(state.request.sampling_params)
            if state.beyond_steps:
                self._beyond_steps[state.beyond_steps] += 1
            self._unready.add(request_id)  # until the next iteration has looked
            if state.sampled_for is not None:
                self._samples.setdefault(state.sampled_for, []).append(request_id)

    def _forget(self, state: RequestState) -> None:
        """Let a request be live no longer."""
        del self._states[state.request.request_id]
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

    def _live(self, request_id: str) -> list[RequestState]:
        """A live request, or those of its samples that have not ended."""
        if not self.is_live(request_id):
            raise RequestError(f"there is no request {shown(request_id)}: no live request has this id")
        return [self._states[name] for name in self._samples.get(request_id, [request_id])]

    def _max_decode_steps(self) -> int:
        if self._num_following:
            return 1
        if self._beyond_steps and not self._executor.steps_together(
            self._beyond_steps, self.scheduler.num_running
        ):
            return 1
        if self._num_scheduler_steps is not None:
            return self._num_scheduler_steps
        most = min(MAX_DECODE_STEPS, self._executor.max_decode_steps)
        return max(1, min(most, int(_SECONDS_AT_A_TIME / self._decode_seconds)))

    def _advance(self) -> None:
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
            self._deliver()
            self._wait()
        while self._in_flight and not self._states:  # all that is in flight is overrun
            self._commit(self._in_flight.popleft())
        self._flush()

    def _foresee_drafts(self, speculation: Speculation) -> None:
        """Read what is in flight if drafts are to follow it."""
        looks_up = not self._beyond_steps and self._executor.looks_up(self.scheduler.num_running)
        speculation.lookup_steps = self._max_decode_steps() if looks_up else 1
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
                self._deliver()  # what others have sampled need not wait, too
                concurrent.futures.wait([begun], seconds)
        while not self.scheduler.lets_sit_out and not all(one.is_ready for one in self._late.values()):
            mask_threads().wait([one for one in self._late.values() if not one.is_ready], _SECONDS_OF_MASKS)
        for request_id, grammar in list(self._late.items()):
            if grammar.is_ready:
                del self._late[request_id]
                if grammar.problem is not None:
                    self._finish(self._states[request_id], "error", grammar.problem)

    def _look_at_programs(self) -> None:
        """Let those begin whose programs are compiled, and end those whose programs cannot be."""
        for request_id in list(self._unready):
            state = self._states[request_id]
            try:
                if not self._executor.is_ready_for(state.request):
                    continue
            except Exception as error:
                self._finish(state, "error", f"a program that it needs cannot be compiled: {error}")
            self._unready.discard(request_id)

    def _flush(self) -> None:
        """Tell the executor what no step will any more, if all requests have ended."""
        if not self._states and self.scheduler.has_leftovers:
            self._executor.transfer(self.scheduler.flush(self._executor.write_room))
            if self.scheduler.has_leftovers:
                self._executor.wait_for_files(_SECONDS_OF_FILES)

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
        states = self._states
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
                self._finish(state, *ended)
                continue
            if request.token_mask is not None and request.token_mask.grammar is not None:
                self._to_follow[request.request_id] = request.token_mask.grammar
            if state.stream:
                streaming[request.request_id] = state
        self.on_tokens(num_tokens)
        if self._speculation is not None:
            self._go_on_after_drafts(scheduled, turns)
            with self.scheduler.faults:
                self._speculation.observe(scheduled, now, turns)
        live = [state for state in streaming.values() if not state.request.is_finished]
        self._deliveries += [(state, state.delta()) for state in live]

    def _go_on_after_drafts(self, scheduled: SchedulerOutput, turns: Sequence[Verified]) -> None:
        """Let those go on whose drafts a step has verified; `turns` are those that the device looked up."""
        for request, verified in zip(scheduled.decode if turns else (), turns, strict=True):
            self.scheduler.accept(request, verified)
        for chunk in scheduled.prefill:
            request = chunk.request
            if chunk.drafts and not request.is_finished:
                num_tokens = request.num_known_tokens - chunk.start - 1
                self.scheduler.accept(request, [(len(chunk.drafts), num_tokens - 1)])

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
        if is_timed and scheduled.decode and not scheduled.prefill:
            self._decode_seconds = min(_SECONDS_AT_A_TIME, self._decode_seconds)
            self._decode_seconds += _RATE * (seconds / scheduled.num_decode_steps - self._decode_seconds)

    def _commit_prompt_logprobs(self, scheduled: SchedulerOutput, sampled: SampledTokens) -> None:
        for chunk in scheduled.prefill:
            request_id = chunk.request.request_id
            scores = (sampled.prompt_logprobs or {}).get(request_id)
            if scores and not chunk.request.is_finished:
                state = self._states[request_id]
                if not state.add_prompt_logprobs(scores, chunk.start + 1):
                    self._finish(state, "error", NOT_FINITE)

    def _finish(self, state: RequestState, reason: FinishReason, stop_reason: int | str | None) -> None:
        request = state.request
        self.scheduler.finish(request, reason, stop_reason)
        request.metrics.finished_time = self._clock()
        self._forget(state)
        self._deliveries.append((state, state.delta()))

    def _deliver(self) -> None:
        """Send what is new where it belongs."""
        deliveries, self._deliveries = self._deliveries, []
        for state, delta in deliveries:
            if state.sink is not None:
                state.sink(state, delta)
                continue
            builder = self._builders.get(state)
            if builder is None:  # it was dropped
                continue
            output = builder.add(delta)
            if output is not None:
                self._reports.append(output)
            if delta.finish_reason is not None:
                del self._builders[state]
