"""The ingress: reads requests, has them answered by replicas, and tries another one if one dies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxllm.cluster.forwarding import GENERATING_PATHS, ForwardedRequest, Message, forwarded, is_event_stream
from jaxllm.cluster.merged_metrics import merge_metrics
from jaxllm.errors import EngineError
from jaxllm.server.auth import Keys
from jaxllm.server.config import ServerConfig
from jaxllm.server.errors import ApiError, busy_with_bodies, shutting_down, too_large, too_late
from jaxllm.server.guard import request_id_of
from jaxllm.server.streams import last_event

_logger = logging.getLogger(__name__)
_MOST_TRIES = 3
_LARGE_BODY = 2**16  # bytes; beyond, it is read in a thread

_BYTES_TO_TELL = 2**18  # that have been passed on, before a replica is told
_CLOSED_BY_CLIENT = 499

Forward = Callable[[ForwardedRequest], AsyncIterator[list[Message]]]
"""Has a request answered by a replica; closing the iterator ends the request."""
Acknowledge = Callable[[str, str, int], object]
"""Tells a replica, by its name, how many more bytes of the answer of a flow have been passed on."""


class Ingress:
    """One request in, one response out, whichever replica it is of: an ASGI application.

    A replica that dies before any of a response's body has been passed on is replaced by another one, and so
    is one that has no room. Once some of it was passed on, an event stream ends with an error object, and
    anything else breaks off. `/metrics` is of all replicas together, `/live` of the one that the query names
    as `replica` while it is there; its headers say whose it is and who else there is.

    Args:
        send: how replicas are reached.
        config: how much of a body to read, and for how long. All else about requests replicas decide.
        lost: errors of `send` that mean that a replica is no more.
        acknowledge: tells replicas how far their answers have been read.
    """

    def __init__(
        self,
        send: Forward,
        config: ServerConfig,
        lost: tuple[type[BaseException], ...],
        acknowledge: Acknowledge = lambda *_: None,
    ) -> None:
        self._send, self._config, self._lost, self._acknowledge = send, config, lost, acknowledge
        self._keys = Keys(config.key_digests)
        self._num_bytes = 0
        self._is_closing = self._is_closed = False
        self._waits: set[asyncio.Timeout] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        response = await self.answer(Request(scope, receive))
        await response(scope, receive, send)

    def refuse_new(self) -> None:
        """Answer 503 to new requests for outputs from now on."""
        self._is_closing = True

    def close(self) -> None:
        """Wait no longer for what clients have yet to send."""
        self._is_closed = True
        for wait in self._waits:
            wait.reschedule(0.0)

    async def answer(self, request: Request) -> Response:
        """The response to a request."""
        if self._is_closing and request.url.path in GENERATING_PATHS:
            return _as_response(shutting_down())
        held = _Held()
        response: Response | None = None
        try:
            response = await self._answer(request, held)
        finally:
            if isinstance(response, _Forwarded):
                response.on_end = functools.partial(self._let_go, held)
            else:
                self._let_go(held)
        response.headers.setdefault("x-request-id", request_id_of(request.headers))  # of our own errors
        return response

    def _let_go(self, held: _Held) -> None:
        self._num_bytes -= held.num_bytes

    async def _answer(self, request: Request, held: _Held) -> Response:
        try:
            authorization = request.headers.get("authorization", "").encode("latin-1")
            self._keys.check(request.url.path, authorization or None)
            body = await self._body(request, held)
            if len(body) > _LARGE_BODY:
                to_forward = await asyncio.to_thread(forwarded, request.scope, body)
            else:
                to_forward = forwarded(request.scope, body)
            if request.url.path == "/live":
                to_forward.target = request.query_params.get("replica")
            async with _ended_on_disconnect(request.receive):
                response = await self._forward(to_forward)
        except ApiError as error:
            return _as_response(error)
        except ClientDisconnect:
            return Response(status_code=_CLOSED_BY_CLIENT)
        if request.url.path == "/metrics" and response.status_code == 200:
            return await self._metrics(to_forward, response)
        if request.url.path == "/live" and response.status_code == 200:
            response.headers["x-jaxllm-replica"] = to_forward.target or to_forward.tried[-1]
            response.headers["x-jaxllm-replicas"] = ",".join(sorted(to_forward.replicas))
        return response

    async def _forward(self, to_forward: ForwardedRequest) -> Response:
        """The response of a replica that has one."""
        tries = 0
        while True:
            tries += 1
            answer = _Answer(self._send(to_forward))
            try:
                await answer.begin()
            except self._lost:
                if tries < _MOST_TRIES:
                    continue
                return _as_response(_lost_replicas(tries))
            except Exception:
                _logger.exception("a replica failed to answer")
                return _as_response(ApiError(500, "the server failed to answer", code="internal_error"))
            except BaseException:
                await answer.close()
                raise
            if (
                answer.status == 503
                and tries < _MOST_TRIES
                and set(to_forward.replicas).difference(to_forward.tried)
            ):
                await answer.close()
                continue
            replica = to_forward.target or to_forward.tried[-1]
            answer.on_read = functools.partial(self._acknowledge, replica, to_forward.flow_id)
            return _Forwarded(answer, self._lost)

    async def _metrics(self, request: ForwardedRequest, first: Response) -> Response:
        """The metrics of all replicas; of those that answer, that is."""
        answered = request.tried[-1]

        async def ask(replica: str) -> str | None:
            asked = dataclasses.replace(request, target=replica, tried=[])
            response = await self._forward(asked)
            if response.status_code != 200 or asked.target is None:
                return None
            return await _text_of(response)

        others = [replica for replica in request.replicas if replica != answered]
        texts = await asyncio.gather(_text_of(first), *map(ask, others))
        pages = {replica: text for replica, text in zip([answered, *others], texts, strict=True) if text}
        return Response(merge_metrics(pages), media_type=first.headers.get("content-type"))

    async def _body(self, request: Request, held: _Held) -> bytes:
        """The body.

        Raises:
            ApiError: it is too large, or did not come in time, or there is no room for it beside the others.
        """
        most = self._config.max_body_bytes
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and (len(declared) > 19 or int(declared) > most):
            raise too_large(f"{declared[:20]} bytes", most)
        chunks, size = [], 0
        wait = asyncio.timeout(0.0 if self._is_closed else self._config.request_timeout)
        try:
            async with wait:
                self._waits.add(wait)
                async for chunk in request.stream():
                    chunks.append(chunk)
                    size += len(chunk)
                    held.num_bytes += len(chunk)
                    self._num_bytes += len(chunk)
                    if size > most:
                        raise too_large(f"over {most} bytes", most)
                    if self._num_bytes > self._config.max_total_body_bytes:
                        raise busy_with_bodies(self._config.max_total_body_bytes)
        except TimeoutError:
            if self._is_closed:
                raise shutting_down() from None
            raise too_late(self._config.request_timeout) from None
        finally:
            self._waits.discard(wait)
        return b"".join(chunks)


@contextlib.asynccontextmanager
async def _ended_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block when the client has gone.

    Raises:
        ClientDisconnect: it has.
    """
    task = asyncio.current_task()
    assert task is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if is_gone and not task.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()


@dataclasses.dataclass(slots=True)
class _Held:
    """What an ingress holds of a request until it has been answered."""

    num_bytes: int = 0


class _Answer:
    """A replica's answer: status and headers, and then its body."""

    def __init__(self, batches: AsyncIterator[list[Message]]) -> None:
        self._batches = batches
        self._first: list[Message] = []
        self.status = 0
        self.headers: Sequence[tuple[bytes, bytes]] = ()
        self.on_read: Callable[[int], object] = lambda num_bytes: None

    async def begin(self) -> None:
        """Read up to where the body begins."""
        while not (self.status and self._first):
            batch = await anext(self._batches, None)
            if batch is None:
                raise EngineError("a replica ended a response before it began")
            for message in batch:
                if message["type"] == "http.response.start":
                    self.status, self.headers = message["status"], message["headers"]
                else:
                    self._first.append(message)

    async def body(self) -> AsyncIterator[bytes]:
        """The body, in pieces as they come; asking for the next one says that the last was passed on."""
        num_read = 0
        batch: list[Message] | None = self._first
        while batch is not None:
            piece = b"".join(message.get("body", b"") for message in batch)
            if not batch[-1].get("more_body", False):
                with contextlib.suppress(Exception):  # the router knows of its end before the client
                    await anext(self._batches, None)
                yield piece
                return
            yield piece
            num_read += len(piece)
            if num_read >= _BYTES_TO_TELL:
                self.on_read(num_read)
                num_read = 0
            batch = await anext(self._batches, None)

    async def close(self) -> None:
        """Let the replica end it."""
        with contextlib.suppress(Exception):  # it is no longer wanted, whatever becomes of it
            await self._batches.aclose()  # type: ignore[attr-defined]


class _Forwarded(StreamingResponse):
    """A response as a replica makes it, header by header."""

    def __init__(self, answer: _Answer, lost: tuple[type[BaseException], ...]) -> None:
        super().__init__(self._pieces(answer, lost), answer.status)
        self.raw_headers = list(answer.headers)
        self._answer = answer
        self.on_end: Callable[[], None] = lambda: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on, and let the replica end it if nobody wants it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.on_end()
            await self._answer.close()

    async def _pieces(self, answer: _Answer, lost: tuple[type[BaseException], ...]) -> AsyncIterator[bytes]:
        try:
            async for piece in answer.body():
                yield piece
        except lost as error:
            if not is_event_stream(answer.headers):
                raise EngineError("a replica died, and a response broke off") from error
            ended = ApiError(
                503, "the replica that answered this has died: send it again", code="replica_died"
            )
            yield last_event(ended)
        finally:
            await answer.close()


async def _text_of(response: Response) -> str | None:
    """What a replica answered; None if it died meanwhile."""
    assert isinstance(response, _Forwarded)  # others are errors
    try:
        pieces = [piece async for piece in response.body_iterator]
    except EngineError:
        return None
    return b"".join(piece for piece in pieces if isinstance(piece, bytes)).decode()


def _lost_replicas(tries: int) -> ApiError:
    return ApiError(
        503,
        f"{tries} replicas died while they answered this: send it again later",
        code="replica_died",
        headers={"Retry-After": "1"},
    )


def _as_response(error: ApiError) -> Response:
    return Response(error.content(), error.status_code, error.headers, media_type="application/json")
