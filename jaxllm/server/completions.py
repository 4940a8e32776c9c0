"""/v1/completions: prompts continued."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from jaxllm.engine.outputs import CompletionOutput, RequestOutput
from jaxllm.server.errors import refused
from jaxllm.server.generation import Call
from jaxllm.server.parameters import completion_params
from jaxllm.server.protocol import CompletionRequest
from jaxllm.server.scores import completion_logprobs, prompt_logprobs
from jaxllm.server.service import Service
from jaxllm.text.detokenizer import TextOffsets, TokenNames

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _CompletionForm:
    """OpenAI's text completions, with vLLM's further fields."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: CompletionRequest, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._body, self._tokenizer = body, tokenizer
        self._is_scored = body.logprobs is not None
        self._has_output = body.max_tokens != 0
        self._offsets: dict[int, TextOffsets] = {}
        self._told: set[int] = set()

    def choice(self, index: int, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        """See `Form`."""
        text = one.text if self._has_output else ""
        scores = None
        echoed = self._echoed(output) if self._body.echo else ""
        if self._is_scored:
            of_output = self._scores(one, self._offsets_of_output(output, echoed))
            of_prompt = self._scores_of_prompt(output, echoed) if self._body.echo else {}
            scores = {name: [*of_prompt.get(name, ()), *values] for name, values in of_output.items()}
        return self._choice(index, echoed + text, scores, output, one, is_whole=True)

    def first_chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """See `Form`: the prompt, if it is to be repeated."""
        echoed = self._echoed(output) if self._body.echo else ""
        if self._is_scored:
            self._offsets[index] = self._offsets_of_output(output, echoed)
        if not self._body.echo:
            return []
        scores = self._scores_of_prompt(output, echoed) if self._is_scored else None
        return [
            {"index": index, "text": echoed, "logprobs": scores, "finish_reason": None, "stop_reason": None}
        ]

    def chunk(self, index: int, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        """See `Form`."""
        text = one.text if self._has_output else ""
        scores = self._scores(one, self._offsets[index]) if self._is_scored else None
        choice = self._choice(index, text, scores, output, one, is_whole=False)
        if self._body.return_token_ids and index not in self._told:
            self._told.add(index)
            choice["prompt_token_ids"] = list(output.prompt_token_ids)
        return choice

    def _choice(
        self,
        index: int,
        text: str,
        scores: dict[str, Any] | None,
        output: RequestOutput,
        one: CompletionOutput,
        *,
        is_whole: bool,
    ) -> dict[str, Any]:
        body = self._body
        choice = {
            "index": index,
            "text": text,
            "logprobs": scores,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason if one.finish_reason == "stop" else None,
        }
        if is_whole and body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if body.return_token_ids:
            choice["token_ids"] = list(one.token_ids) if self._has_output else []
            if is_whole:
                choice["prompt_token_ids"] = list(output.prompt_token_ids)
        return choice

    def _repeats(self, output: RequestOutput) -> bool:
        """Whether the prompt's own text is repeated, which has no special tokens that were added to it."""
        return output.prompt is not None and self._body.truncate_prompt_tokens is None

    def _echoed(self, output: RequestOutput) -> str:
        """The prompt's text, as far as it was used."""
        if self._repeats(output):
            return str(output.prompt)
        return "" if self._tokenizer is None else str(self._tokenizer.decode(output.prompt_token_ids))

    def _scores_of_prompt(self, output: RequestOutput, echoed: str) -> dict[str, Any]:
        token_ids, tokenizer = output.prompt_token_ids, self._tokenizer
        as_ids = bool(self._body.return_tokens_as_token_ids) or tokenizer is None
        naming = None if as_ids else TokenNames(tokenizer)
        names = [f"token_id:{one}" if naming is None else naming.name(one) for one in token_ids[:1]]
        offsets = TextOffsets(tokenizer, skip_special_tokens=self._repeats(output)).append(token_ids)
        return completion_logprobs(
            token_ids,
            output.prompt_logprobs or [None] * len(token_ids),
            [min(offset, len(echoed)) for offset in offsets],
            names=names,
            as_ids=as_ids,
        )

    def _offsets_of_output(self, output: RequestOutput, echoed: str) -> TextOffsets:
        is_hidden = self._body.skip_special_tokens is not False
        return TextOffsets(
            self._tokenizer, output.prompt_token_ids, len(echoed), skip_special_tokens=is_hidden
        )

    def _scores(self, one: CompletionOutput, offsets: TextOffsets) -> dict[str, Any]:
        token_ids = one.token_ids if self._has_output else []
        positions = (one.logprobs or []) if self._has_output else []
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return completion_logprobs(token_ids, positions, offsets.append(token_ids), as_ids=as_ids)


async def complete(service: Service, request: Request, body: CompletionRequest) -> Response:
    """Answer a request.

    Raises:
        ApiError: it is refused, or failed.
    """
    arrival_time = time.monotonic()
    service.check_model(body.model)
    if body.add_special_tokens is False:
        raise refused(
            "add_special_tokens=false is for chats and /tokenize: send token ids for a prompt without "
            "special tokens",
            "add_special_tokens",
        )

    def read() -> Call:
        params = completion_params(body, service.default_params)
        prompts, form = service.prompt_limits.prompts(body.prompt), _CompletionForm(body, service.tokenizer)
        return Call(service, request, body, prompts, params, form, counts_outputs=body.max_tokens != 0)

    call = await service.core.call(read, pool="bodies") if request.state.is_large else read()
    return await call.respond(arrival_time)
