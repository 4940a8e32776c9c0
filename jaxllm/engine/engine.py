"""The engine: continuous batching over any `Executor`.

It knows the scheduler and the executor's protocol, never a concrete executor.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm import tokenizer as tokenization
from jaxllm.engine.observer import StepObserver
from jaxllm.engine.output_processor import RequestState
from jaxllm.errors import ConfigError, KVCacheError, RequestError, SamplingParamsError
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import MAX_BANNED_TOKEN_IDS, SamplingParams
from jaxllm.sched.scheduler import Scheduler
from jaxllm.types import (
    MAX_DECODE_STEPS,
    Executor,
    Request,
    SampledTokens,
    SchedulerOutput,
    StepResult,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SECONDS_AT_A_TIME = 0.05
_RATE = 0.1  # weight of the newest decode step

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclasses.dataclass(slots=True)
class _Dispatched:
    """A step under way, and when it was sent; a void one computes nothing, as the one before ended early."""

    scheduled: SchedulerOutput
    result: StepResult
    dispatched: float
    is_void: bool = False

    @property
    def may_end_early(self) -> bool:
        return self.scheduled.may_end_early and not self.is_void


class Engine:
    """Runs requests to their end, many at a time.

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
    ) -> None:
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self._executor = executor
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
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
        self._decode_seconds = math.inf
        self._clock = clock
        self._observer = observer
        self._last_fetched = 0.0
        self._arrivals = itertools.count()
        self._states: dict[str, RequestState] = {}
        self._in_flight: collections.deque[_Dispatched] = collections.deque()
        self._unreported: list[RequestOutput] = []

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do or to report."""
        return bool(self._states or self._in_flight or self._unreported)

    @property
    def num_live(self) -> int:
        """Requests added and not ended."""
        return len(self._states)

    def put_back(self, outputs: Iterable[RequestOutput]) -> None:
        """Report these again at the next `step`: for a caller that stepped on behalf of others."""
        self._unreported.extend(outputs)

    def is_live(self, request_id: str) -> bool:
        """Whether the request was added and has not ended."""
        return request_id in self._states

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        arrival_time: float | None = None,
        stream: bool = False,
    ) -> None:
        """Queue a request. A refused one leaves the engine as it was.

        Args:
            request_id: unique among live requests.
            prompt: text, token ids, or `{"prompt": text}` / `{"prompt_token_ids": ids}`.
            sampling_params: vLLM's defaults if None.
            arrival_time: seconds of the engine's clock; now if None.
            stream: report the request after every step it advanced in, not only when it has finished.

        Raises:
            RequestError: the prompt is empty or malformed, or a token id is out of range.
            RequestTooLargeError: it can never fit.
            SamplingParamsError: a token id is out of range, or stop strings lack a tokenizer.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r} must be a string")
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise SamplingParamsError(
                f"sampling_params must be a SamplingParams, not {type(params).__name__}; "
                "build one with SamplingParams.from_dict(...)"
            )
        text, token_ids = self._tokenize(prompt)
        params.validate_for_vocab(self._vocab_size)
        num_banned = len({*(params.stop_token_ids or ()), *self._eos_token_ids})
        if params.min_tokens and num_banned > MAX_BANNED_TOKEN_IDS:
            raise SamplingParamsError(
                f"min_tokens={params.min_tokens} would keep back {num_banned} end and stop tokens; "
                f"at most {MAX_BANNED_TOKEN_IDS} are supported: drop min_tokens or some stop_token_ids"
            )
        if params.stop and self.tokenizer is None:
            raise SamplingParamsError("stop strings need a tokenizer; use stop_token_ids with this engine")
        limit = self.scheduler.config.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(token_ids) + params.max_tokens)
        now = self._clock() if arrival_time is None else arrival_time
        request = Request(
            request_id,
            token_ids,
            params,
            arrival_time=now,
            arrival_index=next(self._arrivals),
            max_total_tokens=limit,
            eos_token_ids=self._eos_token_ids,
        )
        self.scheduler.add(request)
        self._states[request_id] = RequestState(
            request, text, self.tokenizer, primary_eos_token_id=self._primary_eos, stream=stream
        )

    def step(self) -> list[RequestOutput]:
        """Run one iteration; returns the requests that finished, and those streaming that advanced."""
        if any(step.may_end_early for step in self._in_flight) and not self.scheduler.decodes_on:
            # What to decide depends on how far they got.
            while self._in_flight:
                self._unreported = self._commit(self._in_flight.popleft())
        copies = self._executor.copies()
        if self._observer is not None and copies.timed:
            self._observer.observe_copies(copies.timed)
        scheduled = self.scheduler.schedule(self._clock(), copies, self._max_decode_steps())
        self._dispatch(scheduled)
        return self._commit(self._oldest_due(scheduled))

    def abort(self, request_id: str) -> None:
        """End a request in any state; `step` reports it with finish_reason "abort".

        Raises:
            RequestError: no live request has this id.
        """
        state = self._states.get(request_id)
        if state is None:
            raise RequestError(f"cannot abort request {request_id!r}: no live request has this id")
        self._unreported.append(self._finish(state, "abort", None))

    def _max_decode_steps(self) -> int:
        if self._num_scheduler_steps is not None:
            return self._num_scheduler_steps
        most = min(MAX_DECODE_STEPS, self._executor.max_decode_steps)
        return max(1, min(most, int(_SECONDS_AT_A_TIME / self._decode_seconds)))

    # The three parts of a step

    def _dispatch(self, scheduled: SchedulerOutput) -> None:
        if not scheduled.is_empty:
            dispatched = self._clock()
            self._in_flight.append(_Dispatched(scheduled, self._executor.execute(scheduled), dispatched))

    def _oldest_due(self, scheduled: SchedulerOutput) -> _Dispatched | None:
        """The step to read back now: the newest, or with run-ahead the one before it."""
        due = len(self._in_flight) > self._depth or (scheduled.is_empty and self._in_flight)
        return self._in_flight.popleft() if due else None

    def _commit(self, step: _Dispatched | None) -> list[RequestOutput]:
        reports, self._unreported = self._unreported, []
        if step is None:
            return reports
        scheduled = step.scheduled
        sampled = step.result.fetch()
        now = self._clock()
        # The device runs steps one after another: this one began when it was sent or the last one ended.
        seconds = now - max(step.dispatched, self._last_fetched)
        self._last_fetched = now
        num_steps = sampled.num_decode_steps
        if num_steps is None:
            num_steps = scheduled.num_decode_steps
        if self._observer is not None:
            self._observer.observe(scheduled, seconds, num_steps)
        if scheduled.decode and not scheduled.prefill and num_steps:
            self._decode_seconds = min(_SECONDS_AT_A_TIME, self._decode_seconds)
            self._decode_seconds += _RATE * (seconds / num_steps - self._decode_seconds)
        self.scheduler.complete(scheduled.step_id)
        self._commit_prompt_logprobs(scheduled, sampled)
        requests = [*scheduled.decode, *(chunk.request for chunk in scheduled.prefill if chunk.is_last)]
        if scheduled.decode:
            requests *= num_steps
        logprobs = sampled.logprobs or [None] * len(requests)
        states = self._states
        streaming: dict[str, RequestState] = {}
        for request, token_id, scores in zip(requests, sampled.token_ids, logprobs, strict=True):
            if request.is_finished:
                continue  # it has ended: this is a token of the overrun
            state = states[request.request_id]
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
            ended = state.append(token_id, scores)
            if ended is not None:
                reports.append(self._finish(state, *ended))
            elif state.stream:
                streaming[request.request_id] = state
        reports += [state.output() for state in streaming.values() if not state.request.is_finished]
        if num_steps < scheduled.num_decode_steps and not step.is_void:
            self._rewind(scheduled, scheduled.num_decode_steps - num_steps)
        return reports

    def _rewind(self, scheduled: SchedulerOutput, num_steps: int) -> None:
        """Take back the last iterations of a step, which ended early, and those dispatched to follow it."""
        if all(request.is_finished for request in scheduled.decode):
            return  # nobody is left to go on
        if num_steps == scheduled.num_decode_steps:  # it would be scheduled again and again
            raise KVCacheError(
                f"the executor computed nothing of step {scheduled.step_id}, which is not over"
            )
        self.scheduler.rewind(scheduled.decode, num_steps)
        for later in self._in_flight:
            self.scheduler.rewind(later.scheduled.decode, later.scheduled.num_decode_steps)
            later.is_void = True

    def _commit_prompt_logprobs(self, scheduled: SchedulerOutput, sampled: SampledTokens) -> None:
        if sampled.prompt_logprobs:
            for chunk in scheduled.prefill:
                request_id = chunk.request.request_id
                scores = sampled.prompt_logprobs.get(request_id)
                if scores and not chunk.request.is_finished:
                    self._states[request_id].add_prompt_logprobs(scores, chunk.start + 1)

    def _finish(self, state: RequestState, reason: Any, stop_reason: int | str | None) -> RequestOutput:
        request = state.request
        self.scheduler.finish(request, reason, stop_reason)
        request.metrics.finished_time = self._clock()
        del self._states[request.request_id]
        return state.output()

    # Prompts

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            keys = set(prompt)
            if keys not in ({"prompt"}, {"prompt_token_ids"}):
                raise RequestError(
                    "a prompt dictionary must have the one key 'prompt' or 'prompt_token_ids', "
                    f"not {sorted(map(str, keys))}"
                )
            (key,), (prompt,) = keys, prompt.values()
            if isinstance(prompt, str) != (key == "prompt"):
                expected = "text" if key == "prompt" else "a list of token ids"
                raise RequestError(f"the prompt's {key!r} must be {expected}, not {type(prompt).__name__}")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this engine has no tokenizer; pass the prompt as token ids")
            token_ids = tokenization.encode(self.tokenizer, prompt) if prompt else []
            if not token_ids:
                raise RequestError("the prompt is empty; send text, or the token ids to start from")
            return prompt, self._check_token_ids(token_ids)
        return None, self._check_token_ids(prompt)

    def _check_token_ids(self, prompt: Any) -> list[int]:
        is_array = hasattr(prompt, "tolist") and getattr(prompt, "ndim", None) == 1
        if not is_array and (not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray)):
            shape = f" of shape {prompt.shape}" if hasattr(prompt, "shape") else ""
            raise RequestError(
                f"a prompt must be text or a list of token ids, not {type(prompt).__name__}{shape}"
            )
        values = prompt.tolist() if is_array else list(prompt)
        if not values:
            raise RequestError("the prompt is empty; send at least one token id")
        for position, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int):
                index = getattr(value, "__index__", None)
                if index is None or isinstance(value, bool) or (hasattr(value, "tolist") and value.ndim):
                    raise RequestError(f"prompt token {value!r} at position {position} is not an integer")
                values[position] = value = index()
            if not 0 <= value < self._vocab_size:
                raise RequestError(
                    f"prompt token id {value} at position {position} is out of range; "
                    f"this model's vocabulary has ids 0 to {self._vocab_size - 1}"
                )
        return values
