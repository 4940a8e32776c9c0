"""The engine's half of requests' outputs: stop conditions where tokens arrive, and what is new of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from jaxllm.engine.output_builder import Delta, OutputBuilder, make_detokenizer
from jaxllm.engine.outputs import RequestOutput
from jaxllm.types import FinishReason, Request, TokenLogprobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NOT_FINITE = (
    "the logits hold a NaN or infinity, or a logits processor excluded all tokens: check the weights, "
    "processors and extreme penalties, or choose a dtype of a wider range, bfloat16 or float32"
)
"""Why a request ended whose next token there is none to sample for."""

Sink = Callable[["RequestState", Delta | BaseException], object]
"""Where a request's deltas go, or the error that ended it."""


class RequestState:
    """What the engine keeps of one request beside the scheduler's `Request`: stop conditions, what is new.

    Args:
        request: the scheduler's.
        tokenizer: for stop strings; None where there are none.
        primary_eos_token_id: the token whose `stop_reason` is None, as in vLLM.
        stream: whether deltas are wanted in every step, not only when the request has finished.
        sink: where they go; None is the caller of `Engine.step`.
        sampled_for: the id of the request it is one of several samples for.

    Attributes:
        follows: whether which token may come next depends on the one before.
        beyond_steps: flags of what it asks of sampling that not every step does.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        primary_eos_token_id: int | None,
        stream: bool,
        sink: Sink | None = None,
        sampled_for: str | None = None,
    ) -> None:
        params = request.sampling_params
        self.request, self.sampled_for = request, sampled_for
        self.follows = request.token_mask is not None and request.token_mask.depends_on_outputs
        self.beyond_steps = 0
        self.stream = stream
        self.sink = sink
        self._primary_eos = primary_eos_token_id
        self._stop_ids = request.end_token_ids
        self._outputs = request.output_token_ids
        self._most_outputs = request.max_total_tokens - request.num_prompt_tokens
        self._num_sent = 0
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._num_prompt_logprobs = 0
        self._detokenizer = make_detokenizer(request, tokenizer) if params.stop else None

    def append(
        self, token_id: int, logprobs: TokenLogprobs | None
    ) -> tuple[FinishReason, int | str | None] | None:
        """Take one sampled token; returns (finish_reason, stop_reason) if it ends the request.

        As in vLLM, `stop_reason` is the stop string or token id that matched, and None for the tokenizer's
        end-of-sequence token. Of an "error" it says what is wrong; a token below 0 is none.
        """
        outputs = self._outputs
        if token_id < 0:
            return "error", NOT_FINITE
        outputs.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        mask = self.request.token_mask
        if mask is not None and mask.grammar is not None:
            mask.grammar.append(token_id)
        if token_id in self._stop_ids:
            params = self.request.sampling_params
            if len(outputs) >= params.min_tokens:
                is_eos = token_id == self._primary_eos and not params.ignore_eos
                return "stop", None if is_eos else token_id
        if self._detokenizer is not None:
            params = self.request.sampling_params
            # As in vLLM, a stop string that is complete within the first min_tokens tokens does not count.
            self._detokenizer.append((token_id,))
            self._detokenizer.flush(may_stop=len(outputs) > params.min_tokens)
            matched = self._detokenizer.check_stop()
            if matched is not None:
                return "stop", matched
        if len(outputs) >= self._most_outputs:
            return "length", None
        return None

    def add_prompt_logprobs(self, scores: list[TokenLogprobs], first_position: int) -> bool:
        """Take the scores of positions `first_position...`; repeats are dropped. Whether none is NaN."""
        known = self._num_prompt_logprobs + 1 - first_position
        assert known >= 0  # chunks follow one another, from the start after a drop
        self._num_prompt_logprobs += len(scores[known:])
        self._prompt_logprobs += scores[known:]
        return not any(math.isnan(one.logprob) for one in scores)

    def delta(self) -> Delta:
        """What is new since the last time."""
        request = self.request
        start, new = self._num_sent, request.output_token_ids[self._num_sent :]
        self._num_sent += len(new)
        logprobs, self._logprobs = self._logprobs, []
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, []
        return Delta(start, new, logprobs, prompt_logprobs, request.finish_reason, request.stop_reason)


class Outbox:
    """What is new of requests, until it is sent where it belongs.

    Attributes:
        builders: of the requests whose outputs are reports.
    """

    def __init__(self) -> None:
        self.builders: dict[RequestState, OutputBuilder] = {}  # ids may be used again before ends are told
        self._deltas: list[tuple[RequestState, Delta]] = []
        self._reports: list[RequestOutput] = []

    @property
    def holds_any(self) -> bool:
        """Whether anything is to be sent or taken."""
        return bool(self._deltas or self._reports)

    def put(self, states: Iterable[RequestState]) -> None:
        """Take what is new of requests."""
        self._deltas += [(state, state.delta()) for state in states]

    def forget_sinks(self) -> None:
        """Send nothing of what is here to sinks."""
        self._deltas = [one for one in self._deltas if one[0].sink is None]

    def send(self) -> None:
        """Send it to sinks, and make reports of what has none."""
        deltas, self._deltas = self._deltas, []
        for state, delta in deltas:
            if state.sink is not None:
                state.sink(state, delta)
                continue
            builder = self.builders.get(state)
            if builder is None:  # it was dropped
                continue
            output = builder.add(delta)
            if output is not None:
                self._reports.append(output)
            if delta.finish_reason is not None:
                del self.builders[state]

    def take_reports(self) -> list[RequestOutput]:
        """The reports so far."""
        reports, self._reports = self._reports, []
        return reports
