"""A replica: one engine with its whole server, to which an ingress forwards requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from jaxllm.cluster.forwarding import ForwardedRequest, Message
from jaxllm.cluster.replica_app import ReplicaApp

_MOST_UNREAD = 64
"""Messages that an application may be ahead of its reader."""
_MOST_UNREAD_BYTES = 2**20
"""That a replica may be ahead of a client; what it sends waits in the ingress' memory."""


class Replica:
    """Runs an ASGI application for requests that come as calls; named as Ray Serve looks for it.

    Args:
        make_app: makes the application.
    """

    def __init__(self, make_app: Callable[[], ReplicaApp]) -> None:
        self._made = make_app()
        self._lifespan = _Lifespan(self._made.app)
        self._flows: dict[str, _Flow] = {}

    async def handle(self, request: ForwardedRequest) -> AsyncIterator[list[Message]]:
        """What the application answers: its messages, as many at a time as there are.

        Closing the iterator tells the application that its client has gone.
        """
        await self._lifespan.start()
        messages: asyncio.Queue[Message | None] = asyncio.Queue(_MOST_UNREAD)
        gone = asyncio.Event()
        is_read = False

        async def receive() -> Message:
            nonlocal is_read
            if not is_read:
                is_read = True
                return {"type": "http.request", "body": request.body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._made.app(dict(request.scope), receive, messages.put)
            finally:
                if not gone.is_set():
                    await messages.put(None)

        task = asyncio.create_task(run())
        flow = self._flows[request.flow_id] = _Flow()
        try:
            while (message := await messages.get()) is not None:
                await flow.wait_for_room()
                batch = [message]
                while not messages.empty() and (message := messages.get_nowait()) is not None:
                    batch.append(message)
                flow.num_unread += sum(len(one.get("body", b"")) for one in batch)
                yield batch
                if message is None:
                    break
            await task  # what went wrong
        finally:
            self._flows.pop(request.flow_id, None)
            gone.set()
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def acknowledge(self, request: ForwardedRequest, flow_id: str, num_bytes: int) -> None:
        """Take note that so many more bytes of an answer have been passed on.

        Args:
            request: says to the router whom this is for; nothing else is in it.
            flow_id: of the answer's request, which may have ended.
            num_bytes: how many.
        """
        if (flow := self._flows.get(flow_id)) is not None:
            flow.acknowledge(num_bytes)

    async def check_health(self) -> None:
        """Verify that it answers requests; Ray Serve asks every few seconds, and first when it starts.

        Raises:
            EngineError: it does not.
        """
        await self._lifespan.start()
        self._made.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaler wants to know."""
        return {"queued_tokens": float(self._made.queued_tokens())}

    def record_routing_stats(self) -> dict[str, float | None]:
        """What routers want to know."""
        made = self._made
        return {
            "queued_tokens": made.queued_tokens(),
            "cache_tokens": made.cache_tokens(),
            "bytes_per_token": made.bytes_per_token(),
        }

    async def drain(self, seconds: float) -> None:
        """Refuse new requests; returns when those under way have ended, or were ended after so long."""
        await self._made.drain(seconds)

    async def close(self) -> None:
        """Let the application end."""
        await self._lifespan.stop()


class _Flow:
    """How far an answer is ahead of its reader."""

    def __init__(self) -> None:
        self.num_unread = 0
        self._has_room = asyncio.Event()

    async def wait_for_room(self) -> None:
        """Returns once there is room for more, of any size."""
        while self.num_unread > _MOST_UNREAD_BYTES:
            self._has_room.clear()
            await self._has_room.wait()

    def acknowledge(self, num_bytes: int) -> None:
        """So much of it has been read."""
        self.num_unread -= num_bytes
        self._has_room.set()


class _Lifespan:
    """Tells an ASGI application that it starts and stops."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._to_app: asyncio.Queue[Message] = asyncio.Queue()
        self._from_app: asyncio.Queue[Message] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._has_started = False

    async def start(self) -> None:
        """Returns once it has started, on the running event loop; starting again does nothing.

        Raises:
            Exception: what it failed of.
        """
        if self._has_started:
            return
        async with self._starting:
            if not self._has_started:
                await self._start()

    async def _start(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
        self._task = asyncio.create_task(self._app(scope, self._to_app.get, self._from_app.put))
        await self._say("startup")
        self._has_started = True

    async def stop(self) -> None:
        """Returns once it has stopped."""
        if self._task is not None and not self._task.done():
            await self._say("shutdown")
            await self._task

    async def _say(self, what: str) -> None:
        assert self._task is not None
        await self._to_app.put({"type": f"lifespan.{what}"})
        answer = asyncio.create_task(self._from_app.get())
        await asyncio.wait([answer, self._task], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            await self._task
            raise RuntimeError(f"the application ended at {what}")
        if answer.result()["type"] != f"lifespan.{what}.complete":
            raise RuntimeError(f"the application failed at {what}: {answer.result().get('message')}")
