"""What each HTTP request passes first and last: keys, room, bounded bodies, ids, logs, metrics and traces."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.server.auth import Keys
from jaxllm.server.config import ServerConfig
from jaxllm.server.core import ClientGoneError
from jaxllm.server.errors import ApiError, as_api_error, busy_with_bodies, shutting_down, too_large, too_late
from jaxllm.server.service import Service
from jaxllm.types import RequestMetrics

_logger = logging.getLogger("jaxllm.server.requests")
GENERATING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
_POLLED_PATHS = frozenset({"/live", "/metrics", "/health", "/ping"})
_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_CLOSED_BY_CLIENT = 499
_SMALL_BODY = 2**16
_SECONDS_TO_COME = 0.1
_SECURITY = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@dataclasses.dataclass(slots=True)
class RequestLog:
    """What is told of a request when it has ended."""

    num_prompts: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    metrics: RequestMetrics | None = None
    user: str | None = None
    cache_key: str | None = None
    metadata: dict[str, str] | None = None
    error: str | None = None


@dataclasses.dataclass(slots=True)
class Exchange:
    """One HTTP request and its response."""

    request_id: str
    method: str
    path: str
    headers: Headers
    log: RequestLog
    started: float
    status: int = 0


def request_id_of(headers: Headers) -> str:
    """The client's own, or else a new one."""
    given = headers.get("x-request-id")
    return given if given is not None and _ID.fullmatch(given) else uuid.uuid4().hex


class Guard:
    """The outermost layer around the routes.

    Args:
        app: the routes.
        service: what they serve.
        paths: all routes there are; others count as "other" in metrics.
        on_exchange: called with each request that has ended.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        paths: Collection[str],
        on_exchange: Callable[[Exchange], None],
    ) -> None:
        self._app, self._service, self._paths, self._on_exchange = app, service, paths, on_exchange
        self._config: ServerConfig = service.config
        self._keys = Keys(service.config.key_digests)
        self._all_bodies = [0]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = self._with_tidy_path(scope)
        headers = Headers(scope=scope)
        request_id = request_id_of(headers)
        exchange = Exchange(
            request_id, scope["method"], scope["path"], headers, RequestLog(), time.monotonic()
        )

        body = _Body(receive, headers, self._service, self._all_bodies)
        if (
            scope["method"] == "HEAD"
        ):  # which is answered like GET, but for the body that the connection drops
            scope = {**scope, "method": "GET"}

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = _CLOSED_BY_CLIENT if body.is_gone else message["status"]
                await body.read_what_is_there()
                found = MutableHeaders(scope=message)
                found["x-request-id"] = request_id
                for name, value in _SECURITY.items():
                    found[name] = value
                if not body.is_whole:
                    found["connection"] = "close"  # the rest is not wanted
            await send(message)

        async with contextlib.AsyncExitStack() as stack:
            stack.callback(body.forget)
            state = scope.setdefault("state", {})
            state |= {"request_id": request_id, "stack": stack, "log": exchange.log}
            try:
                self._keys.check(scope["path"], headers.get("authorization", "").encode("latin-1") or None)
                if scope["path"] in GENERATING_PATHS and scope["method"] == "POST":
                    self._service.check_room()
                body.check_size()
                _check_encoding(headers)
                await self._app(scope, body.receive, answer)
            except ClientGoneError:
                exchange.status = exchange.status or _CLOSED_BY_CLIENT
            except Exception as error:
                await self._fail(error, exchange, answer)
        exchange.path = getattr(scope.get("route"), "path", exchange.path)
        self._ended(exchange)

    def _with_tidy_path(self, scope: Scope) -> Scope:
        """The same, where only slashes are too many for a route that there is."""
        path = re.sub("/+", "/", scope["path"])
        path = path if path == "/" else path.removesuffix("/")
        return {**scope, "path": path} if path != scope["path"] and path in self._paths else scope

    async def _fail(self, error: Exception, exchange: Exchange, send: Send) -> None:
        """Answer what the routes did not, or end a response that broke off."""
        found = as_api_error(error)
        exchange.log.error = found.message
        if found.status_code == 500:
            _logger.exception("%s %s %s failed", exchange.request_id, exchange.method, exchange.path)
        if exchange.status:
            raise ConnectionError("a response broke off") from error
        content = found.content()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(content)),
            **(found.headers or {}),
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": found.status_code, "headers": raw})
        await send({"type": "http.response.body", "body": content, "more_body": False})

    def _ended(self, exchange: Exchange) -> None:
        if exchange.path in GENERATING_PATHS and exchange.status == 503:
            self._service.stats.refused()
        if exchange.path not in self._paths:
            exchange.path = "other"
        self._on_exchange(exchange)
        if not self._config.log_requests:
            return
        log = exchange.log
        parts = [
            f"{exchange.request_id} {exchange.method} {exchange.path} {exchange.status}",
            f"{time.monotonic() - exchange.started:.3f} s",
        ]
        if log.num_prompts:
            parts.append(f"{log.num_prompt_tokens} + {log.num_output_tokens} tokens")
        if log.metrics is not None and log.metrics.num_preemptions:
            parts.append(f"{log.metrics.num_preemptions} preemptions")
        for name in ("user", "cache_key", "metadata", "error"):
            if value := getattr(log, name):
                parts.append(f"{name}={value!r}")
        is_polled = exchange.path in _POLLED_PATHS and exchange.status < 400
        _logger.log(logging.DEBUG if is_polled else logging.INFO, "%s", ", ".join(parts))


def _check_encoding(headers: Headers) -> None:
    """Verify that a body is not compressed: what it holds is bounded before it is read.

    Raises:
        ApiError: it is.
    """
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            415,
            f"Content-Encoding: {encoding[:80]} is not supported: send the body as it is, without the header",
            param="content-encoding",
        )


class _Body:
    """A request's body, as far as there is room for it, and in time.

    Args:
        receive: of the connection.
        headers: of the request.
        service: its bounds, and when it ends.
        total: bytes of all bodies; this one's are in it until `forget`.

    Attributes:
        is_whole: whether all of it was read.
        is_gone: whether the client left before that.
    """

    def __init__(self, receive: Receive, headers: Headers, service: Service, total: list[int]) -> None:
        self._receive, self._config, self._core, self._total = receive, service.config, service.core, total
        declared = headers.get("content-length", "")
        self._declared = int(declared) if declared.isdigit() and len(declared) < 20 else 0
        self._deadline = asyncio.get_running_loop().time() + self._config.request_timeout
        self._size = 0
        self.is_whole = self._declared == 0 and "transfer-encoding" not in headers
        self.is_gone = False

    def check_size(self) -> None:
        """Verify that it is not declared too large.

        Raises:
            ApiError: it is.
        """
        if self._declared > self._config.max_body_bytes:
            raise too_large(f"{self._declared} bytes", self._config.max_body_bytes)

    async def receive(self) -> Message:
        """The next part of it, and after it what the connection says.

        Raises:
            ApiError: it is too large, or all bodies together are, or it does not come in time or before the
                server ends.
            ClientGoneError: the client has gone.
        """
        if self.is_whole:
            return await self._receive()
        wait = asyncio.timeout_at(0.0 if self._core.is_drained else self._deadline)
        try:
            async with wait:
                self._core.waits.add(wait)
                message = await self._receive()
        except TimeoutError:
            if self._core.is_drained:
                raise shutting_down() from None
            raise too_late(self._config.request_timeout) from None
        finally:
            self._core.waits.discard(wait)
        if message["type"] == "http.disconnect":
            self.is_gone = True
            raise ClientGoneError
        chunk = len(message.get("body", b""))
        self._size += chunk
        self._total[0] += chunk
        self.is_whole = not message.get("more_body", False)
        if self._size > self._config.max_body_bytes:
            raise too_large(f"over {self._config.max_body_bytes} bytes", self._config.max_body_bytes)
        if self._total[0] > self._config.max_total_body_bytes:
            raise busy_with_bodies(self._config.max_total_body_bytes)
        return message

    async def read_what_is_there(self) -> None:
        """Read a small body that was not wanted, if it has come, so that the connection can be used again."""
        if self.is_whole or self._declared > _SMALL_BODY:
            return
        with contextlib.suppress(TimeoutError, ApiError, ClientGoneError):
            async with asyncio.timeout(_SECONDS_TO_COME):
                while not self.is_whole and self._size <= _SMALL_BODY:
                    await self.receive()

    def forget(self) -> None:
        """It is held no longer."""
        self._total[0] -= self._size
        self._size = 0
