"""Calls of an ASGI application without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.types import ASGIApp, Message


async def call(
    app: ASGIApp, method: str, path: str, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()
) -> tuple[int, bytes]:
    """The status and the content of a response.

    Args:
        app: the application, started.
        method: such as "POST".
        path: such as "/v1/completions".
        body: the whole of it, JSON.
        headers: further ones.
    """
    status, parts = 0, []
    requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    never = asyncio.Event()

    async def receive() -> Message:
        if not requests:
            await never.wait()
        return requests.pop()

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("ascii"),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), *headers],
        "client": None,
        "server": None,
        "state": {},
    }
    await app(scope, receive, send)
    return status, b"".join(parts)
