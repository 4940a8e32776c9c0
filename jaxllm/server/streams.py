"""Server-sent events, and what is done when their reader leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxllm.server.core import ClientGoneError, Generation
from jaxllm.server.errors import ApiError, as_api_error

_logger = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


def dumps(value: Any) -> bytes:
    """JSON as short as it is written, in UTF-8; lone surrogates are escaped."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(value) + b"\n\n"


def last_event(error: ApiError) -> bytes:
    """What ends a stream that fails."""
    return b"data: " + error.content() + b"\n\n" + DONE


@contextlib.asynccontextmanager
async def closed_on_disconnect(generation: Generation, receive: Receive) -> AsyncIterator[None]:
    """End a generation as soon as its client has gone."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.close()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


class EventStream(Response):
    """A response of events, which begins before there is any.

    While there is none, as for a request that waits for its turn, comments tell proxies and clients that the
    connection lives. What goes wrong ends the stream with an event that holds the error. Writing waits for
    the connection, so that nothing piles up here for a client that does not read.

    Args:
        events: what to send.
        silent_seconds: after which there is a comment; none if it is 0.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], silent_seconds: float) -> None:
        self._events, self._silent_seconds = events, silent_seconds
        self._last_time = 0.0
        self._is_sending = False
        self.status_code, self.background = 200, None
        self.init_headers(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        comments = asyncio.create_task(self._comment(send)) if self._silent_seconds else None
        try:
            async for chunk in self._events:
                await self._send(send, chunk)
        except ClientGoneError:
            pass
        except Exception as error:
            found = as_api_error(error)
            if found.status_code == 500:
                _logger.exception("a stream failed")
            await self._send(send, last_event(found))
        finally:
            if comments is not None:
                comments.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _comment(self, send: Send) -> None:
        """Break silences; not while an event is on its way to a reader who is slow."""
        now = asyncio.get_running_loop().time
        self._last_time = now()
        while True:
            wait = self._silent_seconds
            if not self._is_sending:
                wait -= now() - self._last_time
            if wait > 0:
                await asyncio.sleep(wait)
            else:
                await self._send(send, _COMMENT)

    async def _send(self, send: Send, chunk: bytes) -> None:
        self._is_sending = True
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._is_sending = False
        self._last_time = asyncio.get_running_loop().time()
