"""/v1/chat/completions: conversations answered."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxllm import tokenizer as tokenization
from jaxllm.errors import JaxllmError
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.server.errors import refused
from jaxllm.server.generation import BYTES_PER_TOKEN, Call, reserve
from jaxllm.server.parameters import chat_params, conversation
from jaxllm.server.protocol import ChatCompletionRequest
from jaxllm.server.scores import chat_logprobs, prompt_logprobs
from jaxllm.server.service import Service
from jaxllm.server.streams import dumps

_ROLE = "assistant"


class _ChatForm:
    """OpenAI's chat completions, with vLLM's further fields."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatCompletionRequest) -> None:
        self._body = body
        self._echoed = ""
        if body.echo:
            last = body.messages[-1]["content"]
            self._echoed = last if isinstance(last, str) else "".join(part["text"] for part in last or [])

    def choice(self, index: int, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        """See `Form`."""
        body = self._body
        choice = {
            "index": index,
            "message": {"role": _ROLE, "content": self._echoed + one.text, "refusal": None},
            **self._end(one),
        }
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if body.return_token_ids:
            choice["prompt_token_ids"] = list(output.prompt_token_ids)
        return choice

    def first_chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """See `Form`: whose turn it is, and the last message if it is to be repeated."""
        delta = {"role": _ROLE, "content": self._echoed}
        first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if self._body.return_token_ids:
            first["prompt_token_ids"] = list(output.prompt_token_ids)
        return [first]

    def chunk(self, index: int, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        """See `Form`."""
        return {"index": index, "delta": {"content": one.text}, **self._end(one)}

    def _end(self, one: CompletionOutput) -> dict[str, Any]:
        """Scores, and how it ended."""
        body, scores = self._body, None
        if body.logprobs:
            as_ids = bool(body.return_tokens_as_token_ids)
            scores = chat_logprobs(one.token_ids, one.logprobs or [], body.top_logprobs or 0, as_ids=as_ids)
        ending: dict[str, Any] = {
            "logprobs": scores,
            "finish_reason": one.finish_reason,
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
    params = chat_params(body, service.default_params)
    num_tokens = len(dumps(body.messages)) // BYTES_PER_TOKEN
    reservation = reserve(service, request, params, 1, num_tokens)
    tokenizer = service.needed_tokenizer()

    def read() -> dict[str, Any]:
        text = conversation(tokenizer, body)
        service.prompt_limits.check_text(text, "messages")
        try:
            token_ids = tokenization.encode(tokenizer, text, add_special_tokens=bool(body.add_special_tokens))
        except JaxllmError as error:
            raise refused(str(error), "messages") from error
        return {"prompt": text, "prompt_token_ids": token_ids}

    prompt = await service.core.call(read)
    call = Call(service, request, body, [prompt], params, _ChatForm(body))
    return await call.respond(arrival_time, reservation)
