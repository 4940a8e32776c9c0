"""/v1/chat/completions: conversations answered."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from jaxllm.engine.outputs import CompletionOutput, RequestOutput
from jaxllm.errors import JaxllmError
from jaxllm.sampling.params import SamplingParams
from jaxllm.server.errors import refused
from jaxllm.server.generation import BYTES_PER_TOKEN, Call, reserve
from jaxllm.server.parameters import chat_params, conversation, field_of
from jaxllm.server.protocol import ChatCompletionRequest
from jaxllm.server.scores import chat_logprobs, prompt_logprobs
from jaxllm.server.service import Service
from jaxllm.server.streams import dumps
from jaxllm.server.tools import CallReader, DemandedCalls
from jaxllm.text import tokenizer as tokenization
from jaxllm.text.chat import text_of_part

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROLE = "assistant"


class _ChatForm:
    """OpenAI's chat completions, with vLLM's further fields."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        body: ChatCompletionRequest,
        tokenizer: PreTrainedTokenizerBase,
        calls: DemandedCalls | None = None,
        make_reader: Callable[[], CallReader] | None = None,
    ) -> None:
        self._body, self._tokenizer = body, tokenizer
        self._calls, self._make_reader = calls, make_reader
        self._readers: dict[int, CallReader] = {}
        self._echoed = ""
        if body.echo:
            last = body.messages[-1].get("content")
            self._echoed = last if isinstance(last, str) else "".join(map(text_of_part, last or []))

    def choice(self, index: int, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        """See `Form`."""
        body = self._body
        message: dict[str, Any] = {"role": _ROLE, "content": self._echoed + one.text, "refusal": None}
        if (reader := self._reader(index)) is not None:
            reader.feed(one.text)
            message |= {"content": self._echoed or None, "tool_calls": reader.calls}
        choice = {"index": index, "message": message, **self._end(index, one)}
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if body.return_token_ids:
            choice["prompt_token_ids"] = list(output.prompt_token_ids)
        return choice

    def first_chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """See `Form`: whose turn it is, and the last message if it is to be repeated."""
        delta = {"role": _ROLE, "content": self._echoed if self._calls is None else self._echoed or None}
        first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if self._body.return_token_ids:
            first["prompt_token_ids"] = list(output.prompt_token_ids)
        return [first]

    def chunk(self, index: int, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        """See `Form`."""
        delta: dict[str, Any] = {"content": one.text}
        if (reader := self._reader(index)) is not None:
            news = reader.feed(one.text)
            delta = {"tool_calls": news} if news else {}
        return {"index": index, "delta": delta, **self._end(index, one)}

    def _reader(self, index: int) -> CallReader | None:
        """What finds calls in an output; None if it is text."""
        if self._make_reader is None:
            return None
        if index not in self._readers:
            self._readers[index] = self._make_reader()
        return self._readers[index]

    def _end(self, index: int, one: CompletionOutput) -> dict[str, Any]:
        """Scores, and how it ended: by calls, as OpenAI has it, unless the client had named the function."""
        body, scores = self._body, None
        reason: str | None = one.finish_reason
        if reason == "stop" and self._calls is not None and not self._calls.is_named:
            reason = "tool_calls" if self._readers[index].calls else reason
        if body.logprobs:
            scores = chat_logprobs(
                one.token_ids,
                one.logprobs or [],
                body.top_logprobs or 0,
                self._tokenizer,
                as_ids=bool(body.return_tokens_as_token_ids),
            )
        ending: dict[str, Any] = {
            "logprobs": scores,
            "finish_reason": reason,
            "stop_reason": one.stop_reason if one.finish_reason == "stop" else None,
        }
        if body.return_token_ids:
            ending["token_ids"] = list(one.token_ids)
        return ending


async def answer(service: Service, request: Request, body: ChatCompletionRequest) -> Response:
    """Answer a request.

    Raises:
        ApiError: it is refused, or failed.
    """
    arrival_time = time.monotonic()
    service.check_model(body.model)

    def read_options() -> tuple[SamplingParams, DemandedCalls | None, int]:
        num_bytes = len(dumps(body.messages))
        return chat_params(body, service.default_params), DemandedCalls.of(body), num_bytes // BYTES_PER_TOKEN

    if request.state.is_large:
        params, calls, num_tokens = await service.core.call(read_options, pool="bodies")
    else:
        params, calls, num_tokens = read_options()
    reservation = reserve(service, request, params, 1, num_tokens)
    tokenizer = service.needed_tokenizer()

    def read() -> tuple[dict[str, Any], SamplingParams, _ChatForm]:
        text = conversation(tokenizer, body)
        service.prompt_limits.check_text(text, "messages")
        try:
            token_ids = tokenization.encode(tokenizer, text, add_special_tokens=bool(body.add_special_tokens))
            prompt = {"prompt": text, "prompt_token_ids": token_ids}
            if calls is None:
                return prompt, params, _ChatForm(body, tokenizer)
            form = service.call_format
            make_reader = functools.partial(calls.reader, params, form, tokenizer)
            return (
                prompt,
                calls.bound(params, form, tokenizer),
                _ChatForm(body, tokenizer, calls, make_reader),
            )
        except JaxllmError as error:
            raise refused(str(error), field_of(error, body)) from error

    prompt, bounded, form = await service.core.call(read)
    call = Call(service, request, body, [prompt], bounded, form)
    return await call.respond(arrival_time, reservation)
