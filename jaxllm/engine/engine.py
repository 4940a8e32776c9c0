"""The engine: continuous batching over any `Executor`.

It knows the scheduler and the executor's protocol, never a concrete executor.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.engine.inputs import InputProcessor, Prompt
from jaxllm.engine.loop import Loop
from jaxllm.engine.observer import StepObserver
from jaxllm.engine.output_builder import OutputBuilder, Samples
from jaxllm.engine.output_processor import RequestState, Sink
from jaxllm.engine.outputs import RequestOutput
from jaxllm.engine.owner import Owner
from jaxllm.errors import EngineError
from jaxllm.sampling.param_checks import RequestOutputKind
from jaxllm.sampling.params import SamplingParams
from jaxllm.sched.scheduler import Scheduler
from jaxllm.types import Executor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        inputs: checks what is sent, in any thread.
        loop: takes the requests on.
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
        self.inputs = InputProcessor(
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
        self.loop = Loop(
            executor,
            scheduler,
            async_scheduling=async_scheduling,
            num_scheduler_steps=num_scheduler_steps,
            clock=clock,
            observer=observer,
        )
        self._outbox = self.loop.outbox
        self._clock = clock
        self._arrivals = itertools.count()
        self.is_asleep = False
        me = weakref.ref(self)  # else it would be let go of, and the pool with it, only by the collector
        self.owner = Owner(lambda: 0 if (engine := me()) is None else engine.num_unfinished)
        self._failure: BaseException | None = None

    @property
    def on_tokens(self) -> Callable[[int], object]:
        """Called with how many tokens each step has sampled, as far as they are wanted; may be set."""
        return self.loop.on_tokens

    @on_tokens.setter
    def on_tokens(self, call: Callable[[int], object]) -> None:
        self.loop.on_tokens = call

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do or to report."""
        return bool(self.loop.states) or self.loop.is_draining or self._outbox.holds_any

    @property
    def num_live(self) -> int:
        """Requests added and not ended."""
        return len(self.loop.states)

    @property
    def num_unfinished(self) -> int:
        """The same as a number: of live requests, while there are any."""
        return len(self.loop.states) or int(self.has_unfinished_requests)

    def is_live(self, request_id: str) -> bool:
        """Whether the request was added and has not ended."""
        return self.loop.is_live(request_id)

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
            self.loop.add([state for state, _ in prepared])
            self._outbox.builders.update(prepared)

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
        requests, text = self.inputs.make(
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
            if self._failure is not None or self.is_asleep:
                raise self._refusal()
            self.loop.add(states)

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
        return self._outbox.take_reports()

    def advance(self) -> None:
        """As `step`, without returning anything: the next `step` does."""
        with self._used(), self._changing():
            self.loop.advance()
            fault = self.scheduler.faults.take()
            if fault is not None:  # calls end with it, also those whose last tokens these are
                self._outbox.forget_sinks()
            self._outbox.send()
        if fault is not None:
            raise fault

    def abort(self, request_id: str) -> None:
        """End a request in any state; `step` reports it with finish_reason "abort".

        Raises:
            RequestError: no live request has this id.
            EngineError: the engine has failed, or another thread uses it.
        """
        with self._used():
            states = self.loop.live(request_id)
            with self._changing():
                for state in states:
                    self.loop.finish(state, "abort")

    def drop(self, request_id: str) -> None:
        """End a request in any state, and report nothing.

        Raises:
            RequestError: no live request has this id.
            EngineError: the engine has failed, or another thread uses it.
        """
        with self._used():
            states = self.loop.live(request_id)
            with self._changing():
                for state in states:
                    self.loop.drop(state)

    def set_priority(self, request_id: str, priority: int) -> None:
        """Give a live request another priority, for policies that look at it; lower is more urgent.

        Raises:
            RequestError: no live request has this id, or the priority is no integer, or would be ignored.
            EngineError: the engine has failed, or another thread uses it.
        """
        with self._used():
            self.inputs.check_priority(priority)
            states = self.loop.live(request_id)
            with self._changing():
                for state in states:
                    self.scheduler.reprioritize(state.request, priority)

    def reset_prefix_cache(self) -> None:
        """Forget what blocks hold, so that later requests compute all of their prompts.

        Raises:
            EngineError: the engine has failed, or another thread uses it.
        """
        with self._used(), self._changing():
            self.loop.reset_prefix_cache()

    def while_idle(self, change: Callable[[], object]) -> None:
        """Make a change that no request may live through, once nothing is left of those before it.

        None of the present blocks will be found again, wherever they are. If the change fails, the engine
        does.

        Raises:
            EngineError: requests are under way, the engine has failed, or another thread uses it.
        """
        with self._used():
            if self.num_live:
                raise EngineError(
                    f"{self.num_live} requests are under way: wait for them or abort them, and call again"
                )
            with self._changing():
                self.loop.settle()
                self.loop.reset_prefix_cache()
                self.loop.settle()
                change()

    def close(self) -> None:
        """End all requests (as "abort"), and take no more; `executor` is still to be released.

        Raises:
            EngineError: another thread uses it.
        """
        with self.owner.used():
            self.inputs.clear()
            if self._failure is not None:
                return
            with self._changing():
                self.loop.close()
                self._outbox.send()
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
        states = self.loop.give_up()
        self._outbox.send()
        self._outbox.builders.clear()
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
        dead.finished = self._outbox.take_reports()
        return dead
