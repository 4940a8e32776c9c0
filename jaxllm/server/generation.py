"""What completions and chats share: admission, the engine's run, usage, and how outputs become choices."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from jaxllm.engine.outputs import CompletionOutput, RequestOutput
from jaxllm.errors import RequestError, SamplingParamsError
from jaxllm.sampling.params import SamplingParams
from jaxllm.server.core import MANY_SCORES, Generation, Reservation
from jaxllm.server.errors import ApiError, refused
from jaxllm.server.parameters import Prompt, extras, refusal
from jaxllm.server.protocol import GenerationRequest
from jaxllm.server.service import Service
from jaxllm.server.streams import DONE, EventStream, closed_on_disconnect, dumps, event

BYTES_PER_TOKEN = 3
"""Of a text that is not tokenised yet."""
_MANY_TOKENS = 1024  # whose text takes long
_T = TypeVar("_T")
_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


@dataclasses.dataclass
class Usage:
    """Tokens of one response."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's form."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Form(Protocol):
    """What one kind of response looks like."""

    prefix: str
    """Of its id."""
    object: str
    chunk_object: str

    def choice(self, index: int, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        """A choice of the whole response."""
        ...

    def first_chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Choices of a stream before the first tokens of one."""
        ...

    def chunk(self, index: int, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        """A choice of a stream's chunk, which holds what is new."""
        ...


@dataclasses.dataclass
class Call:
    """One request for outputs, parsed.

    Attributes:
        service: the server's.
        request: the HTTP request.
        body: what was sent.
        prompts: text or token ids; of a chat, the rendered text and its token ids.
        params: how to sample each of them.
        form: of the response.
        counts_outputs: whether tokens computed count; not if none were asked for.
    """

    service: Service
    request: Request
    body: GenerationRequest
    prompts: Sequence[Prompt | Mapping[str, Any]]
    params: SamplingParams
    form: Form
    counts_outputs: bool = True

    def __post_init__(self) -> None:
        given = self.body.request_id
        if given is not None and not _ID.fullmatch(given):
            raise refused(
                f"request_id must be 1 to 128 letters, digits, dots, colons and dashes, not {given[:80]!r}",
                "request_id",
            )
        self.id = f"{self.form.prefix}-{given or self.request.state.request_id or uuid.uuid4().hex}"
        self.created, self.usage = int(time.time()), Usage()
        self._started: set[int] = set()
        self._samples: dict[str, dict[int, tuple[int, str]]] = {}  # tokens, and why it ended, by prompt
        self._last_times: dict[int, float] = {}
        self._is_scored = self.params.logprobs is not None or self.params.prompt_logprobs is not None

    async def respond(self, arrival_time: float, reservation: Reservation | None = None) -> Response:
        """Run it.

        Args:
            arrival_time: when it came, in seconds of `time.monotonic`.
            reservation: room for it, if there is some already.

        Raises:
            ApiError: there is no room, or the engine refuses or fails of it.
            ClientGoneError: the client has gone.
        """
        if reservation is None:
            num_tokens = sum(map(_estimated_tokens, self.prompts))
            reservation = reserve(self.service, self.request, self.params, len(self.prompts), num_tokens)
        generation = await self._begin(arrival_time, reservation)
        if not self.body.stream:
            outputs = await self._all(generation)
            content = await self._made(self._whole, outputs, self.usage.completion_tokens)
            return Response(content, media_type="application/json")
        return EventStream(self._chunks(generation), self.service.config.stream_keep_alive)

    async def _begin(self, arrival_time: float, reservation: Reservation) -> Generation:
        """Queue it; the end of the HTTP request gives everything back."""
        service, stack = self.service, self.request.state.stack
        assert isinstance(stack, contextlib.AsyncExitStack)
        salt = self.body.cache_salt
        requests = [
            {
                "prompt": prompt if salt is None else {**_as_mapping(prompt), "cache_salt": salt},
                "sampling_params": self.params,
                "arrival_time": arrival_time,
                **extras(self.body),
            }
            for prompt in self.prompts
        ]
        run = service.core.generate(
            requests, stream=bool(self.body.stream), reservation=reservation, name=self.id
        )
        try:
            generation = await stack.enter_async_context(run)
        except (RequestError, SamplingParamsError) as error:
            raise refusal(error, self.body, service.core.limits.max_model_len) from error
        await stack.enter_async_context(closed_on_disconnect(generation, self.request.receive))
        log = self.request.state.log
        log.num_prompts, log.metadata = len(self.prompts), self.body.metadata
        log.user = self.body.safety_identifier or self.body.user
        log.cache_key = self.body.prompt_cache_key or self.body.session_id
        return generation

    async def _made(self, make: Callable[[_T], bytes], outputs: _T, num_tokens: int) -> bytes:
        """What is sent of outputs; where it takes long, made in a thread."""
        if num_tokens <= _MANY_TOKENS and not (self._is_scored and num_tokens > MANY_SCORES):
            return make(outputs)
        return await self.service.core.call(make, outputs, pool="outputs")

    async def _all(self, generation: Generation) -> dict[int, RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        async for output in generation:
            self._count(output)
            outputs[int(output.request_id)] = output
        return outputs

    def _whole(self, outputs: Mapping[int, RequestOutput]) -> bytes:
        choices = [
            self.form.choice(place * self.params.n + one.index, outputs[place], one)
            for place in sorted(outputs)
            for one in outputs[place].outputs
        ]
        return dumps({**self._head(self.form.object), "choices": choices, "usage": self.usage.to_dict()})

    async def _chunks(self, generation: Generation) -> AsyncIterator[bytes]:
        options = self.body.stream_options
        has_usage = options is not None and bool(options.include_usage)
        in_each = options is not None and bool(options.continuous_usage_stats)
        head = self._head(self.form.chunk_object)
        written, repeats = b"", bool(getattr(self.body, "echo", None))

        def chunk(choice: dict[str, Any]) -> bytes:
            usage = {"usage": self.usage.to_dict() if in_each else None} if has_usage or in_each else {}
            return event({**head, "choices": [choice], **usage})

        def chunks(output: RequestOutput) -> bytes:
            found = b""
            for one in output.outputs:
                index = int(output.request_id) * self.params.n + one.index
                if index not in self._started:
                    self._started.add(index)
                    found += b"".join(map(chunk, self.form.first_chunks(index, output)))
                found += chunk(self.form.chunk(index, output, one))
            return found

        async for output in generation:
            self._count(output)
            num_tokens = 0
            for one in output.outputs:
                index = int(output.request_id) * self.params.n + one.index
                self._observe_interval(index, one)
                num_tokens += len(one.token_ids)
                if repeats and index not in self._started:
                    num_tokens += len(output.prompt_token_ids)
            written += await self._made(chunks, output, num_tokens)
            if not generation.has_pending:
                yield written
                written = b""
        if has_usage:
            written += event({**head, "choices": [], "usage": self.usage.to_dict()})
        yield written + DONE

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.body.model or self.service.model_names[0],
        }

    def _count(self, output: RequestOutput) -> None:
        """Take an output into account; one that failed fails the whole call.

        Raises:
            ApiError: it did.
        """
        usage, stats = self.usage, self.service.stats
        samples = self._samples.get(output.request_id)
        if samples is None:
            samples = self._samples[output.request_id] = {}
            usage.prompt_tokens += len(output.prompt_token_ids)
            usage.cached_tokens += output.num_cached_tokens
        for one in output.outputs:
            if one.finish_reason == "error":
                raise self._failed(one)
            if one.finish_reason == "abort":
                raise ApiError(503, "the request was aborted: the server shuts down", code="shutting_down")
            num_tokens = len(one.token_ids)
            usage.completion_tokens += num_tokens if self.counts_outputs else 0
            before = samples.get(one.index, (0, ""))[0]
            samples[one.index] = before + num_tokens, one.finish_reason or ""
        if output.finished:
            stats.finished(output, list(samples.values()))
            if self.params.truncate_prompt_tokens is None:
                stats.note_size(output)
        log = self.request.state.log
        log.num_prompt_tokens, log.num_output_tokens = usage.prompt_tokens, usage.completion_tokens
        log.metrics = output.metrics

    def _failed(self, one: CompletionOutput) -> ApiError:
        """Who is at fault: what a client bounds or distorts may leave nothing to sample."""
        self.service.stats.on_failed()
        params = self.params
        is_theirs = params.structured_outputs is not None or params.needs_penalties or params.logit_bias
        message = f"the output failed: {one.stop_reason}"
        return (
            refused(message, code="output_failed") if is_theirs else ApiError(500, message, code="internal")
        )

    def _observe_interval(self, index: int, one: CompletionOutput) -> None:
        now = time.monotonic()
        before = self._last_times.get(index)
        self._last_times[index] = now
        if before is not None and one.token_ids:
            self.service.stats.inter_token_seconds((now - before) / len(one.token_ids))


def reserve(
    service: Service, request: Request, params: SamplingParams, num_prompts: int, num_tokens: int
) -> Reservation:
    """Room for prompts of about so many tokens together, until the HTTP request ends.

    Raises:
        ApiError: there is none.
    """
    num_samples = params.num_samples
    room = service.core.admission.reserved(num_prompts * num_samples, num_tokens * num_samples)
    reservation: Reservation = request.state.stack.enter_context(room)
    return reservation


def _estimated_tokens(prompt: Prompt | Mapping[str, Any]) -> int:
    if isinstance(prompt, str):
        return max(1, len(prompt.encode("utf-8", "replace")) // BYTES_PER_TOKEN)
    return len(prompt["prompt_token_ids"] if isinstance(prompt, Mapping) else prompt)


def _as_mapping(prompt: Prompt | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(prompt, Mapping):
        return prompt
    return {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
