"""A client's half of its requests' outputs: deltas put together, text and lists made where somebody looks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxllm.detokenizer import IncrementalDetokenizer
from jaxllm.errors import EngineError
from jaxllm.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from jaxllm.types import FinishReason, Request, TokenLogprobs

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


class OutputBuilder:
    """Puts a request's deltas together, and makes outputs of everything so far.

    An output costs the same however long the request is: text and lists are made when somebody looks.

    Args:
        request: whose deltas they are.
        request_id: the outputs'.
        prompt: its text, if it was given as text.
        tokenizer: turns tokens into text; None leaves it empty.
    """

    def __init__(
        self,
        request: Request,
        request_id: str,
        prompt: str | None,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        params = request.sampling_params
        self.request_id, self._prompt = request_id, prompt
        self._request, self._params = request, params
        self._tokenizer = tokenizer
        self._prompt_token_ids = list(request.prompt_token_ids)
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

    def add(self, delta: Delta) -> RequestOutput:
        """The output after one more delta.

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
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[_Completion(self, len(self._token_ids), self._cumulative_logprob, delta)],
            finished=delta.finish_reason is not None,
            metrics=self._request.metrics,
            num_cached_tokens=self._request.num_cached_tokens or 0,
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
        return None if self._tokenizer is None else str(self._tokenizer.decode([token_id]))


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
            "index": 0,
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
