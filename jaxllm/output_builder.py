"""A client's half of its requests' outputs: deltas put together, text and lists made where somebody looks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxllm.detokenizer import IncrementalDetokenizer, token_text
from jaxllm.errors import EngineError, SamplingParamsError
from jaxllm.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.types import FinishReason, Request, RequestMetrics, TokenLogprobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Delta(NamedTuple):
    """What is new of a request: tokens from place `start` on, their scores, and how it ended if it did."""

    start: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None
    stop_reason: int | str | None

    @property
    def num_scored(self) -> int:
        """Places whose scores are to be named when an output is made of it."""
        return len(self.logprobs) + len(self.prompt_logprobs)


class OutputBuilder:
    """Puts a request's deltas together, and makes outputs of everything so far.

    An output costs the same however long the request is: text and lists are made when somebody looks.

    Args:
        request: whose deltas they are.
        request_id: the outputs'.
        prompt: its text, if it was given as text.
        tokenizer: turns tokens into text; None leaves it empty.
        samples: puts it together with other samples of its prompt, of which it is the `index`-th.
        is_delta: each output holds only what is new (`RequestOutputKind.DELTA`).
    """

    def __init__(
        self,
        request: Request,
        request_id: str,
        prompt: str | None,
        tokenizer: PreTrainedTokenizerBase | None,
        samples: Samples | None = None,
        index: int = 0,
        *,
        is_delta: bool = False,
    ) -> None:
        params = request.sampling_params
        self._is_delta, self._num_characters = is_delta, 0
        self.request_id, self._prompt = request_id, prompt
        self._samples, self.index = samples, index
        self._request, self._params = request, params
        self._tokenizer = tokenizer
        self._prompt_token_ids = [*request.dropped_token_ids, *request.prompt_token_ids]
        self._token_ids: list[int] = []
        self._cumulative_logprob = 0.0
        self._scored: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._named: list[PositionLogprobs] = []
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]
        self._detokenizer = self._new_detokenizer()
        self._num_detokenized = 0

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities were asked for."""
        return self._scored is not None

    def add(self, delta: Delta) -> RequestOutput | None:
        """The output after one more delta; None as long as other samples are waited for.

        Raises:
            EngineError: one before it is missing: the caller was interrupted when it had it in its hands.
        """
        if delta.start != len(self._token_ids):
            raise EngineError(
                f"request {self.request_id!r}: {delta.start - len(self._token_ids)} tokens were lost when "
                "reading them was interrupted; generate again"
            )
        self._token_ids += delta.token_ids
        if self._scored is not None:
            self._scored += delta.logprobs
            self._cumulative_logprob += sum([one.logprob for one in delta.logprobs])
        if self._prompt_logprobs is not None:
            self._prompt_logprobs += map(self._name, delta.prompt_logprobs)
        output = RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[self._completion(delta)],
            finished=delta.finish_reason is not None,
            metrics=self._request.metrics,
            num_cached_tokens=self._request.num_cached_tokens or 0,
            num_host_cached_tokens=self._request.num_host_cached_tokens,
            num_disk_cached_tokens=self._request.num_disk_cached_tokens,
            num_dropped_tokens=len(self._request.dropped_token_ids),
        )
        return output if self._samples is None else self._samples.add(self.index, output)

    def _completion(self, delta: Delta) -> CompletionOutput:
        """What there is to tell of the output after a delta."""
        all_of_it = _Completion(self, len(self._token_ids), self._cumulative_logprob, delta)
        if not self._is_delta:
            return all_of_it
        text, start = all_of_it.text, self._num_characters
        self._num_characters = len(text)
        return CompletionOutput(
            index=self.index,
            text=text[start:],
            token_ids=delta.token_ids,
            cumulative_logprob=all_of_it.cumulative_logprob,
            logprobs=None if self._scored is None else list(map(self._name, delta.logprobs)),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )

    def token_ids(self, count: int) -> list[int]:
        """The first `count` tokens."""
        return self._token_ids[:count]

    def logprobs(self, count: int) -> list[PositionLogprobs] | None:
        """Scores of the first `count` tokens, in vLLM's form."""
        if self._scored is None:
            return None
        self._named.extend(map(self._name, self._scored[len(self._named) : count]))
        return self._named[:count]

    def text(self, count: int, finish_reason: FinishReason | None, stop_reason: int | str | None) -> str:
        """The text of the first `count` tokens; it leaves out a token that ended the request."""
        if self._detokenizer is None:
            return ""
        by_token = finish_reason == "stop" and not isinstance(stop_reason, str)
        if by_token and not self._params.include_stop_str_in_output:
            count -= 1
        if count < self._num_detokenized:  # somebody looks back
            self._detokenizer, self._num_detokenized = self._new_detokenizer(), 0
            assert self._detokenizer is not None
        detokenizer, first = self._detokenizer, self._num_detokenized
        if self._params.stop:  # whether one counts depends on the place of its last token
            for place in range(first, count):
                detokenizer.append(self._token_ids[place : place + 1])
                detokenizer.flush(may_stop=place >= self._params.min_tokens)
        else:
            detokenizer.append(self._token_ids[first:count])
        self._num_detokenized = count
        detokenizer.flush(finish_reason is not None, may_stop=False)
        return detokenizer.text

    def _new_detokenizer(self) -> IncrementalDetokenizer | None:
        return make_detokenizer(self._request, self._tokenizer) if self._params.detokenize else None

    def _name(self, scored: TokenLogprobs) -> PositionLogprobs:
        """vLLM's form: token id -> Logprob, for the chosen token and the most likely ones."""
        ranked = {
            token_id: (logprob, rank)
            for rank, (token_id, logprob) in enumerate(
                zip(scored.top_token_ids, scored.top_logprobs, strict=True), start=1
            )
        }
        ranked[scored.token_id] = (scored.logprob, scored.rank)
        return {
            token_id: Logprob(logprob=logprob, rank=rank, decoded_token=self._decode(token_id))
            for token_id, (logprob, rank) in ranked.items()
        }

    def _decode(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else token_text(self._tokenizer, token_id)


class Samples:
    """Puts outputs of several samples of a prompt together.

    Args:
        params: those of the request.
        stream: whether there are outputs before all samples have ended.

    Raises:
        SamplingParamsError: there are to be, of samples that are to be chosen from.
    """

    def __init__(self, params: SamplingParams, *, stream: bool) -> None:
        if stream and params.num_samples > params.n:
            raise SamplingParamsError(
                f"best_of={params.best_of} above n={params.n} cannot be streamed: which samples are the best "
                "is known at the end; use generate, or leave best_of out"
            )
        self._params, self._stream = params, stream
        self._outputs: dict[int, RequestOutput] = {}

    def add(self, index: int, output: RequestOutput) -> RequestOutput | None:
        """The output of all samples after one more of the `index`-th one; None before all have ended."""
        self._outputs[index] = output
        outputs = [self._outputs[place] for place in sorted(self._outputs)]
        is_finished = len(outputs) == self._params.num_samples and all(one.finished for one in outputs)
        if not (is_finished or self._stream):
            return None
        first, metrics = outputs[0], outputs[0].metrics
        if is_finished and metrics is not None:
            for one in outputs:
                if one.metrics is not None:
                    metrics = _later(metrics, one.metrics)
        completions = [one.outputs[0] for one in outputs]
        if self._stream and self._params.output_kind is RequestOutputKind.DELTA:
            completions = output.outputs
        if len(completions) > self._params.n:
            completions = self._best(completions)
        return dataclasses.replace(first, outputs=completions, finished=is_finished, metrics=metrics)

    def _best(self, completions: list[CompletionOutput]) -> list[CompletionOutput]:
        def rank(one: CompletionOutput) -> tuple[bool, float]:
            return one.finish_reason != "error", one.cumulative_logprob or 0.0

        best = sorted(completions, key=rank, reverse=True)
        return [
            CompletionOutput(
                index=index,
                text=one.text,
                token_ids=one.token_ids,
                cumulative_logprob=one.cumulative_logprob,
                logprobs=None if self._params.logprobs is None else one.logprobs,
                finish_reason=one.finish_reason,
                stop_reason=one.stop_reason,
            )
            for index, one in enumerate(best[: self._params.n])
        ]


class _Completion(CompletionOutput):
    """A completion so far, whose text and lists are made, once, when somebody looks at them."""

    __slots__ = ("_builder", "_count", "_made")
    _builder: OutputBuilder
    _count: int
    _made: dict[str, Any]

    def __init__(self, builder: OutputBuilder, count: int, cumulative_logprob: float, delta: Delta) -> None:
        values = {
            "_builder": builder,
            "_count": count,
            "_made": {},
            "index": builder.index,
            "cumulative_logprob": cumulative_logprob if builder.is_scored else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def token_ids(self) -> list[int]:
        """See the base class."""
        return self._once("token_ids", self._builder.token_ids, self._count)

    @property
    def text(self) -> str:
        """See the base class."""
        return self._once("text", self._builder.text, self._count, self.finish_reason, self.stop_reason)

    @property
    def logprobs(self) -> list[PositionLogprobs] | None:
        """See the base class."""
        return self._once("logprobs", self._builder.logprobs, self._count)

    def _once(self, name: str, make: Callable[..., Any], *args: Any) -> Any:
        if name not in self._made:
            self._made[name] = make(*args)
        return self._made[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return CompletionOutput, tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def _later(metrics: RequestMetrics, other: RequestMetrics) -> RequestMetrics:
    """With the other's end, if that is later."""
    if (other.finished_time or 0.0) <= (metrics.finished_time or 0.0):
        return metrics
    return dataclasses.replace(
        metrics, finished_time=other.finished_time, last_token_time=other.last_token_time
    )


def make_detokenizer(
    request: Request, tokenizer: PreTrainedTokenizerBase | None
) -> IncrementalDetokenizer | None:
    """What turns a request's tokens into text; None without a tokenizer."""
    params = request.sampling_params
    if tokenizer is None:
        return None
    return IncrementalDetokenizer(
        tokenizer,
        request.prompt_token_ids,
        skip_special_tokens=params.skip_special_tokens,
        stop=tuple(params.stop or ()),
        include_stop_str_in_output=params.include_stop_str_in_output,
    )
