"""HTTP connections that hold nobody up: bounded in number, and in time to send or to read."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxllm.server.config import ServerConfig
from jaxllm.server.errors import error_object

_SECONDS_TO_LEAVE = 1.0
_MAX_CHUNK_LINES = 8  # one line end in so many bytes: chunks of a few bytes cost as much as large ones
_SMALL = 4096


class _Lingering:
    """A transport that, when it is closed, reads on for a moment, so that the peer gets what was written."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self.is_left = False

    def close(self) -> None:
        """Say that nothing more will come, and leave soon."""
        if self.is_closing():
            return
        self.is_left = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        with contextlib.suppress(RuntimeError):  # it reads already
            self._transport.resume_reading()
        self._loop.call_later(_SECONDS_TO_LEAVE, self._transport.close)

    def is_closing(self) -> bool:
        """Whether nothing more is to be written."""
        return self.is_left or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def protocol_class(config: ServerConfig) -> type[H11Protocol]:
    """The protocol of a server's connections."""

    class Connection(H11Protocol):
        """uvicorn's, which by itself waits for ever for a request's head, and for a reader."""

        _head_timer: asyncio.TimerHandle | None = None
        _reader_timer: asyncio.TimerHandle | None = None
        _is_chunked = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Take a connection, unless there are too many."""
            super().connection_made(_Lingering(transport, self.loop))  # type: ignore[arg-type]
            if len(self.connections) > config.max_connections:
                message = f"{config.max_connections} connections are open already: try again later"
                self._refuse(503, "Service Unavailable", message, "overloaded", retry=True)
                return
            self._await_head(config.request_timeout)

        def connection_lost(self, exc: Exception | None) -> None:
            """Let go of everything."""
            self._stop(self._head_timer)
            self._stop(self._reader_timer)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            """Take what came."""
            if self.transport.is_left:  # type: ignore[attr-defined]
                return
            if self._has_tiny_chunks(data):
                self._refuse(400, "Bad Request", "chunks of a few bytes: send larger ones", "invalid_http")
                return
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._stop(self._head_timer)

        def on_response_complete(self) -> None:
            """Wait for the next request."""
            is_whole = self.conn.their_state in (h11.IDLE, h11.DONE)
            super().on_response_complete()
            if not is_whole:
                self.transport.close()
            elif not self.transport.is_closing() and self.conn.their_state is h11.IDLE:
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
            self._refuse(400, "Bad Request", msg, "invalid_http")

        def _has_tiny_chunks(self, data: bytes) -> bool:
            if self.conn.their_state is h11.IDLE:
                self._is_chunked = b"chunked" in data[: config.max_header_bytes].lower()
            return self._is_chunked and data.count(b"\r\n") > _SMALL // 16 + len(data) // _MAX_CHUNK_LINES

        def _refuse(self, status: int, phrase: str, message: str, code: str, *, retry: bool = False) -> None:
            if self.cycle is None or not self.cycle.response_started:
                self.transport.write(_raw_error(status, phrase, message, code, retry=retry))
            self.transport.close()

        def _await_head(self, seconds: float) -> None:
            self._stop(self._head_timer)
            self._head_timer = self.loop.call_later(seconds, self.transport.close)

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
