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
from jaxllm.server.errors import as_api_error

_logger = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


def dumps(value: Any) -> bytes:
    """JSON as short as it is written, in UTF-8; lone surrogates are escaped."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(value) + b"\n\n"


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
    """A response of events, whose first chunk is there already.

    What goes wrong after that ends the stream with an event that holds the error. Writing waits for the
    connection, so that nothing piles up here for a client that does not read.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncIterator[bytes]) -> None:
        self._first, self._rest = first, rest
        self.status_code, self.background = 200, None
        self.init_headers(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await _send(send, self._first)
            async for chunk in self._rest:
                await _send(send, chunk)
        except ClientGoneError:
            pass
        except Exception as error:
            found = as_api_error(error)
            if found.status_code == 500:
                _logger.exception("a stream failed")
            await _send(send, event(found.body()) + DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send(send: Send, chunk: bytes) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": True})
