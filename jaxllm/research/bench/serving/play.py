"""Plays a trace against a server: every request is sent when it is due, and its answer read."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from jaxllm.errors import RequestError
from jaxllm.research.bench.serving.answers import Answer
from jaxllm.research.bench.serving.client import Client
from jaxllm.research.bench.serving.workload import Requests
from jaxllm.research.workloads import Feed


class Play:
    """A run of all requests of a trace.

    Args:
        client: an open session with the server.
        requests: what to send.
        max_concurrency: most requests under way; those due beyond that wait here. None is no limit.
        on_answer: called after each answer.

    Attributes:
        answers: in the order of the trace.
        seconds: from the first request's sending to the last answer.
    """

    def __init__(
        self,
        client: Client,
        requests: Requests,
        *,
        max_concurrency: int | None = None,
        on_answer: Callable[[], object] = lambda: None,
    ) -> None:
        self.answers = [Answer(prompt_len) for prompt_len in requests.trace.prompt_lens.tolist()]
        self.seconds = 0.0
        self._client, self._requests, self._on_answer = client, requests, on_answer
        self._places: contextlib.AbstractAsyncContextManager[object] = contextlib.nullcontext()
        if max_concurrency is not None:
            self._places = asyncio.Semaphore(max_concurrency)
        self._answered = asyncio.Event()

    async def run(self) -> None:
        """Send everything, and wait for the last answer."""
        started = time.perf_counter()
        feed = Feed(self._requests.trace, started)
        async with asyncio.TaskGroup() as tasks:
            while True:
                while (sent := feed.send(time.perf_counter())) is not None:
                    tasks.create_task(self._send(feed, *sent))
                if feed.is_over:
                    break
                wait = None if feed.next_due is None else max(0.0, feed.next_due - time.perf_counter())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._answered.wait()
                self._answered.clear()
        self.seconds = time.perf_counter() - started

    async def _send(self, feed: Feed, index: int, due: float) -> None:
        answer = self.answers[index]
        answer.due_time = due
        async with self._places:
            try:
                body = self._requests.body(index, self.answers)
            except RequestError as error:
                answer.start_time = time.perf_counter()
                answer.error, answer.is_sent = f"not sent: {error}", False
            else:
                await self._client.send(answer, body)
        feed.answered(time.perf_counter(), index)
        self._answered.set()
        self._on_answer()
