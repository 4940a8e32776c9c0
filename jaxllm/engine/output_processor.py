"""From sampled tokens to a request's output: stop conditions, text, log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxllm.detokenizer import IncrementalDetokenizer
from jaxllm.outputs import CompletionOutput, Logprob, RequestOutput
from jaxllm.types import FinishReason, Request, TokenLogprobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RequestState:
    """What the engine keeps of one request beside the scheduler's `Request`.

    Text is decoded when somebody looks at it: every step with stop strings or while streaming, once at the
    end otherwise.
    """

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        primary_eos_token_id: int | None,
        stream: bool,
    ) -> None:
        params = request.sampling_params
        self.request = request
        self.stream = stream
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._primary_eos = primary_eos_token_id
        self._stop_ids = request.end_token_ids
        self._min_tokens = params.min_tokens
        self._num_detokenized = 0
        self._cumulative_logprob = 0.0
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._prompt_logprobs: list[TokenLogprobs] | None = None if params.prompt_logprobs is None else []
        self._named_logprobs: list[dict[int, Logprob]] = []
        self._named_prompt_logprobs: list[dict[int, Logprob]] = []
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                stop=tuple(params.stop or ()),
                include_stop_str_in_output=params.include_stop_str_in_output,
            )
        self._has_stop_strings = bool(params.stop)

    def append(
        self, token_id: int, logprobs: TokenLogprobs | None
    ) -> tuple[FinishReason, int | str | None] | None:
        """Take one sampled token; returns (finish_reason, stop_reason) if it ends the request.

        As in vLLM, `stop_reason` is the stop string or token id that matched, and None for the tokenizer's
        end-of-sequence token.
        """
        request = self.request
        outputs = request.output_token_ids
        outputs.append(token_id)
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(logprobs)
            self._cumulative_logprob += logprobs.logprob
        if token_id in self._stop_ids and len(outputs) >= self._min_tokens:
            is_eos = token_id == self._primary_eos and not request.sampling_params.ignore_eos
            return "stop", None if is_eos else token_id
        if self._has_stop_strings and self._detokenizer is not None:
            # As in vLLM, a stop string that is complete within the first min_tokens tokens does not count.
            self._detokenize(len(outputs), finished=False, may_stop=len(outputs) > self._min_tokens)
            matched = self._detokenizer.check_stop()
            if matched is not None:
                return "stop", matched
        if request.num_prompt_tokens + len(outputs) >= request.max_total_tokens:
            return "length", None
        return None

    def add_prompt_logprobs(self, scores: list[TokenLogprobs], first_position: int) -> None:
        """Take the scores of prompt positions `first_position...`; repeats are dropped."""
        known = self._prompt_logprobs
        if known is not None and len(known) + 1 == first_position:
            known.extend(scores)

    def _detokenize(self, num_tokens: int, *, finished: bool, may_stop: bool = False) -> None:
        if self._detokenizer is not None:
            self._detokenizer.append(self.request.output_token_ids[self._num_detokenized : num_tokens])
            self._num_detokenized = max(num_tokens, self._num_detokenized)
            self._detokenizer.flush(finished, may_stop=may_stop)

    def output(self) -> RequestOutput:
        """Everything known so far; the text leaves out the token that ended the request."""
        request = self.request
        params = request.sampling_params
        num_tokens = len(request.output_token_ids)
        by_token = request.finish_reason == "stop" and not isinstance(request.stop_reason, str)
        if by_token and not params.include_stop_str_in_output:
            num_tokens -= 1
        self._detokenize(num_tokens, finished=request.is_finished)
        completion = CompletionOutput(
            index=0,
            text="" if self._detokenizer is None else self._detokenizer.text,
            token_ids=list(request.output_token_ids),
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=self._all_named(self._logprobs, self._named_logprobs),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )
        prompt_logprobs = self._all_named(self._prompt_logprobs, self._named_prompt_logprobs)
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            prompt_logprobs=None if prompt_logprobs is None else [None, *prompt_logprobs],
            outputs=[completion],
            finished=request.is_finished,
            metrics=request.metrics,
        )

    def _all_named(
        self, scores: list[TokenLogprobs] | None, named: list[dict[int, Logprob]]
    ) -> list[dict[int, Logprob]] | None:
        """A new list with all of `scores` in vLLM's form; `named` keeps those done before."""
        if scores is None:
            return None
        named.extend(map(self._named, scores[len(named) :]))
        return list(named)

    def _named(self, scored: TokenLogprobs) -> dict[int, Logprob]:
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
