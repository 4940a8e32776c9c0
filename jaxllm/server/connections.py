"""HTTP connections that hold nobody up: bounded in number, and in time to send or to read."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import http
import json
import re
import sys
import termios
from typing import Any, NoReturn

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxllm.server.config import ServerConfig
from jaxllm.server.errors import error_object

_SECONDS_TO_LEAVE = 1.0
_MANY_CHUNKS = 256
_BYTES_PER_CHUNK = 8  # on average, of many: chunks of a few bytes cost as much as large ones
_HEAD_LINE_BYTES = 4  # that a header is longer than its name and value
_ORIGIN = re.compile(rb"(?i)https?://[^/?]*")
_PHRASES = {code.value: code.phrase for code in http.HTTPStatus}


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


class _Messages(h11.Connection):
    """HTTP as it comes, with bounds where the library has none."""

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self._max_header_bytes = max_header_bytes
        self._is_chunked = False
        self._num_chunks = self._num_bytes = 0
        self.refusal = 400, "this is no HTTP request"

    def next_event(self) -> Any:
        """The next part of a request, whose target is without the server's own name.

        Raises:
            h11.RemoteProtocolError: it is none, or too much; see `refusal`.
        """
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self._refuse(error.error_status_hint, str(error))
        if isinstance(event, h11.Request):
            headers = event.headers.raw_items()
            size = len(event.target) + sum(
                len(name) + len(value) + _HEAD_LINE_BYTES for name, value in headers
            )
            if size > self._max_header_bytes:
                self._refuse(431, f"{size} bytes")
            self._is_chunked = any(name.lower() == b"transfer-encoding" for name, _ in headers)
            self._num_chunks = self._num_bytes = 0
            if found := _ORIGIN.match(event.target):
                target = event.target[found.end() :]
                target = target if target.startswith(b"/") else b"/" + target
                return h11.Request(
                    method=event.method, headers=headers, target=target, http_version=event.http_version
                )
        elif isinstance(event, h11.Data) and self._is_chunked:
            self._num_chunks += 1
            self._num_bytes += len(event.data)
            if self._num_chunks > _MANY_CHUNKS + self._num_bytes // _BYTES_PER_CHUNK:
                self._refuse(400, "chunks of a few bytes: send larger ones")
        return event

    def _refuse(self, status: int, why: str) -> NoReturn:
        if status == 431:
            why = f"the request's head has over {self._max_header_bytes} bytes ({why}): send less"
        self.refusal = status, why
        raise h11.RemoteProtocolError(why, status)


def protocol_class(config: ServerConfig) -> type[H11Protocol]:
    """The protocol of a server's connections."""

    class Connection(H11Protocol):
        """uvicorn's, which by itself waits for ever for a request's head, and for a reader."""

        _head_timer: asyncio.TimerHandle | None = None
        _reader_timer: asyncio.TimerHandle | None = None
        _num_unread = 0
        conn: _Messages

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.conn = _Messages(config.max_header_bytes)

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Take a connection, unless there are too many."""
            super().connection_made(_Lingering(transport, self.loop))  # type: ignore[arg-type]
            if len(self.connections) > config.max_connections:
                message = f"{config.max_connections} connections are open already: try again later"
                self._refuse(503, message, "overloaded", retry=True)
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
            self._num_unread = _num_unread(self.transport)
            self._reader_timer = self.loop.call_later(config.send_timeout, self._look_up_reader)

        def resume_writing(self) -> None:
            """It does again."""
            self._stop(self._reader_timer)
            super().resume_writing()

        def send_400_response(self, msg: str) -> None:
            """Say what is wrong with the HTTP."""
            status, why = self.conn.refusal
            self._refuse(status, why, "invalid_http")

        def _look_up_reader(self) -> None:
            """Give up on a reader that has read nothing since the last look; a slow one may go on."""
            num_unread = _num_unread(self.transport)
            if num_unread >= self._num_unread:
                self.transport.abort()
                return
            self._num_unread = num_unread
            self._reader_timer = self.loop.call_later(config.send_timeout, self._look_up_reader)

        def _refuse(self, status: int, message: str, code: str, *, retry: bool = False) -> None:
            if self.cycle is None or not self.cycle.response_started:
                self.transport.write(_raw_error(status, message, code, retry=retry))
            self.transport.close()

        def _await_head(self, seconds: float) -> None:
            self._stop(self._head_timer)
            self._head_timer = self.loop.call_later(seconds, self.transport.close)

        @staticmethod
        def _stop(timer: asyncio.TimerHandle | None) -> None:
            if timer is not None:
                timer.cancel()

    return Connection


def _num_unread(transport: asyncio.Transport) -> int:
    """Bytes that were written and did not arrive, those included that the system holds."""
    size = transport.get_write_buffer_size()
    with contextlib.suppress(OSError, ValueError):  # no such system, or the socket is closed
        queued = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        size += int.from_bytes(queued, sys.byteorder)
    return size


def _raw_error(status: int, message: str, code: str, *, retry: bool = False) -> bytes:
    """A whole response, for where there is no request yet."""
    body: Any = json.dumps(error_object(status, message, None, code)).encode("ascii")
    lines = [
        f"HTTP/1.1 {status} {_PHRASES[status]}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *(["retry-after: 1"] if retry else []),
    ]
    return "\r\n".join(lines).encode("ascii") + b"\r\n\r\n" + body
