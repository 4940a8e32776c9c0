"""HTTP connections that hold nobody up: bounded in number, and in time to send or to read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxllm.server.config import ServerConfig
from jaxllm.server.errors import error_object

_SECONDS_TO_LEAVE = 1.0


def protocol_class(config: ServerConfig) -> type[H11Protocol]:
    """The protocol of a server's connections."""

    class Connection(H11Protocol):
        """uvicorn's, which by itself waits for ever for a request's head, and for a reader."""

        _is_refused = False
        _head_timer: asyncio.TimerHandle | None = None
        _reader_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Take a connection, unless there are too many."""
            super().connection_made(transport)
            if len(self.connections) > config.max_connections:
                message = f"{config.max_connections} connections are open already: try again later"
                transport.write(_raw_error(503, "Service Unavailable", message, "overloaded", retry=True))
                transport.write_eof()
                self._is_refused = True  # what it sends is read, so that the answer is not lost
                self._await_head(_SECONDS_TO_LEAVE)
                return
            self._await_head(config.request_timeout)

        def connection_lost(self, exc: Exception | None) -> None:
            """Let go of everything."""
            self._stop(self._head_timer)
            self._stop(self._reader_timer)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            """Take what came."""
            if self._is_refused:
                return
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._stop(self._head_timer)

        def on_response_complete(self) -> None:
            """Wait for the next request."""
            super().on_response_complete()
            if not self.transport.is_closing() and self.conn.their_state is h11.IDLE:
                self._await_head(config.keep_alive_timeout)

        def pause_writing(self) -> None:
            """The client does not read what there is."""
            super().pause_writing()
            self._reader_timer = self.loop.call_later(config.send_timeout, self.transport.abort)

        def resume_writing(self) -> None:
            """It does again."""
            self._stop(self._reader_timer)
            super().resume_writing()

        def send_400_response(self, msg: str) -> None:
            """Say that this is no HTTP."""
            self.transport.write(_raw_error(400, "Bad Request", msg, "invalid_http"))
            self.transport.close()

        def _await_head(self, seconds: float) -> None:
            self._stop(self._head_timer)
            self._head_timer = self.loop.call_later(seconds, self._give_up)

        def _give_up(self) -> None:
            if not self.transport.is_closing():
                self.transport.close()

        @staticmethod
        def _stop(timer: asyncio.TimerHandle | None) -> None:
            if timer is not None:
                timer.cancel()

    return Connection


def _raw_error(status: int, phrase: str, message: str, code: str, *, retry: bool = False) -> bytes:
    """A whole response, for where there is no request yet."""
    body: Any = json.dumps(error_object(status, message, None, code)).encode("ascii")
    lines = [
        f"HTTP/1.1 {status} {phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *(["retry-after: 1"] if retry else []),
    ]
    return "\r\n".join(lines).encode("ascii") + b"\r\n\r\n" + body
