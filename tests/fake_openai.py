"""A server that answers like OpenAI's without a model: what it says is up to the test."""

import asyncio
import contextlib
import json
import threading

from aiohttp import web

DONE = "[DONE]"


def words(count, prompt_len=7, **usage):
    """Events of a completion of so many one-token chunks, and its usage."""
    events = [
        {"choices": [{"index": 0, "text": f"w{number} ", "finish_reason": None}]} for number in range(count)
    ]
    events[-1]["choices"][0]["finish_reason"] = "length"
    counts = {"prompt_tokens": prompt_len, "completion_tokens": count, **usage}
    return [*events, {"choices": [], "usage": counts}, DONE]


def chat_words(count):
    """The same of a chat: whose turn it is comes first."""
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    events = [
        {"choices": [{"index": 0, "delta": {"content": f"w{number} "}, "finish_reason": None}]}
        for number in range(count)
    ]
    return [role, *events, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": count}}, DONE]


class FakeServer:
    """Runs in a thread of its own.

    `answer` says what becomes of a request, from its body: a list of events, in which None breaks the
    connection off; or a status and the body of a response. With `together=n` none is answered before n are
    there.

    Attributes:
        url: where it listens.
        bodies: of all requests for completions, in order of arrival.
        headers: of all of them.
        most: most requests that were there at once.
        metrics: texts of /metrics, one for each time it is read, the last from then on; None is no page.
    """

    def __init__(self, answer, *, together=1, models=("fake",), api_key=None, metrics=None):
        self.answer, self.models, self.api_key, self.metrics = answer, models, api_key, metrics
        self.bodies, self.headers, self.most, self.num_here = [], [], 0, 0
        self.url = ""
        self._together = together

    async def _complete(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers)
        self.num_here += 1
        self.most = max(self.most, self.num_here)
        try:
            await self._barrier.wait()
            answer = self.answer(body)
            if isinstance(answer, tuple):
                status, content = answer
                return web.json_response(content, status=status)
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            for event in answer:
                if event is None:
                    request.transport.abort()
                    break
                text = event if isinstance(event, str) else json.dumps(event)
                await response.write(f"data: {text}\n\n".encode())
            return response
        finally:
            self.num_here -= 1

    async def _models(self, request):
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": {"message": "who are you?"}}, status=401)
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})

    async def _metrics(self, _):
        if self.metrics is None:
            raise web.HTTPNotFound
        text = self.metrics.pop(0) if len(self.metrics) > 1 else self.metrics[0]
        return web.Response(text=text)

    async def _serve(self, is_ready):
        self._barrier = asyncio.Barrier(self._together)
        app = web.Application()
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        is_ready.set()
        await self._stop.wait()
        await runner.cleanup()

    def __enter__(self):
        is_ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(is_ready)))
        self._thread.start()
        assert is_ready.wait(30)
        return self

    def __exit__(self, *exc_info):
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()
