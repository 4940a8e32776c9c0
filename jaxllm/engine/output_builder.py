"""A client's half of its requests' outputs: deltas put together, text and lists made where somebody looks."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxllm.engine.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from jaxllm.errors import EngineError, SamplingParamsError
from jaxllm.sampling.param_checks import RequestOutputKind
from jaxllm.sampling.params import SamplingParams
from jaxllm.text.detokenizer import IncrementalDetokenizer, TokenNames
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
        self._is_delta = is_delta
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
        self._names = self._prompt_names = None
        if tokenizer is not None and (params.logprobs is not None or params.prompt_logprobs is not None):
            skips = params.skip_special_tokens
            unscored = self._prompt_token_ids[: len(request.dropped_token_ids) + 1]
            self._names = TokenNames(tokenizer, self._prompt_token_ids, skip_special_tokens=skips)
            self._prompt_names = TokenNames(tokenizer, unscored, skip_special_tokens=skips)

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
            self._prompt_logprobs += [_named(one, self._prompt_names) for one in delta.prompt_logprobs]
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
        if not self._is_delta:
            return _Completion(self, len(self._token_ids), self._cumulative_logprob, delta)
        is_scored = self._scored is not None
        return CompletionOutput(
            index=self.index,
            text=self._detokenize(len(self._token_ids), delta.finish_reason, delta.stop_reason),
            token_ids=delta.token_ids,
            cumulative_logprob=self._cumulative_logprob if is_scored else None,
            logprobs=[_named(one, self._names) for one in delta.logprobs] if is_scored else None,
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
        self._named.extend(_named(one, self._names) for one in self._scored[len(self._named) : count])
        return self._named[:count]

    def text(self, count: int, finish_reason: FinishReason | None, stop_reason: int | str | None) -> str:
        """The text of the first `count` tokens; it leaves out a token that ended the request."""
        self._detokenize(count, finish_reason, stop_reason)
        return "" if self._detokenizer is None else self._detokenizer.text

    def _detokenize(
        self, count: int, finish_reason: FinishReason | None, stop_reason: int | str | None
    ) -> str:
        """What the tokens up to the first `count` add to the text."""
        if self._detokenizer is None:
            return ""
        by_token = finish_reason == "stop" and not isinstance(stop_reason, str)
        if by_token and not self._params.include_stop_str_in_output:
            count -= 1
        if count < self._num_detokenized:  # somebody looks back
            self._detokenizer, self._num_detokenized = self._new_detokenizer(), 0
            assert self._detokenizer is not None
        detokenizer, first, shown = self._detokenizer, self._num_detokenized, []
        if self._params.stop:  # whether one counts depends on the place of its last token
            for place in range(first, count):
                detokenizer.append(self._token_ids[place : place + 1])
                shown.append(detokenizer.flush(may_stop=place >= self._params.min_tokens))
        else:
            detokenizer.append(self._token_ids[first:count])
        self._num_detokenized = count
        shown.append(detokenizer.flush(finish_reason is not None, may_stop=False))
        return "".join(shown)

    def _new_detokenizer(self) -> IncrementalDetokenizer | None:
        return make_detokenizer(self._request, self._tokenizer) if self._params.detokenize else None


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
        self._is_delta = stream and params.output_kind is RequestOutputKind.DELTA
        self._indices: list[int] = []
        self._completions: list[CompletionOutput] = []  # of these, the latest
        self._first: RequestOutput | None = None
        self._metrics: RequestMetrics | None = None
        self._finished: set[int] = set()

    def add(self, index: int, output: RequestOutput) -> RequestOutput | None:
        """The output of all samples after one more of the `index`-th one; None before all have ended.

        It costs the same however many samples there are, but for the list of all of them.
        """
        place = bisect.bisect_left(self._indices, index)
        if place == len(self._indices) or self._indices[place] != index:
            self._indices.insert(place, index)
            self._completions.insert(place, output.outputs[0])
        self._completions[place] = output.outputs[0]
        if place == 0:
            self._first = output
        if output.finished:
            self._finished.add(index)
            self._metrics = _later(self._metrics, output.metrics)
        is_finished = len(self._finished) == self._params.num_samples
        if not (is_finished or self._stream):
            return None
        assert self._first is not None  # one place is the first
        metrics = _later(self._first.metrics, self._metrics) if is_finished else self._first.metrics
        completions = output.outputs if self._is_delta else [*self._completions]
        if len(completions) > self._params.n:
            completions = self._best(completions)
        return dataclasses.replace(self._first, outputs=completions, finished=is_finished, metrics=metrics)

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


def _named(scored: TokenLogprobs, names: TokenNames | None) -> PositionLogprobs:
    """vLLM's form: token id -> Logprob, for the chosen token, which is first, and the most likely ones."""
    position = {scored.token_id: (scored.logprob, scored.rank)}
    ranked = zip(scored.top_token_ids, scored.top_logprobs, strict=True)
    for rank, (token_id, logprob) in enumerate(ranked, start=1):
        position.setdefault(token_id, (logprob, rank))
    named: PositionLogprobs = {
        token_id: Logprob(logprob, rank, None if names is None else names.name(token_id))
        for token_id, (logprob, rank) in position.items()
    }
    if names is not None:
        names.append(scored.token_id)
    return named


def _later(metrics: RequestMetrics | None, other: RequestMetrics | None) -> RequestMetrics | None:
    """With the other's end, if that is later."""
    if metrics is None or other is None:
        return metrics or other
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
