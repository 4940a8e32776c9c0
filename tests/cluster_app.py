"""A server without an engine, which says who it is, waits, fails and dies as it is asked to."""

import asyncio
import json
import os
from pathlib import Path

from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from jaxllm.errors import EngineError


def _shared(one, other):
    """How many characters two texts begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class FakeApp:
    """Remembers prompts as a prefix cache would, a character a token.

    Args:
        folder: where it writes what happened, and reads how many tokens it is to say are queued.
    """

    def __init__(self, folder):
        self._folder, self._seen = Path(folder), []
        self._is_healthy = True
        (self._folder / f"started-{os.getpid()}").touch()
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/who", self._who),
                Route("/fail", self._fail, methods=["POST"]),
            ]
        )

    def check_health(self):
        if not self._is_healthy:
            raise EngineError("the engine has failed")

    def queued_tokens(self):
        path = self._folder / "queued"
        return int(path.read_text()) if path.exists() else 0

    def cache_tokens(self):
        return 2**20

    def bytes_per_token(self):
        return 4.0

    async def drain(self, seconds):
        """Nothing is left when it ends."""

    async def _who(self, request):
        return JSONResponse({"pid": os.getpid(), "header": request.headers.get("x-mine")})

    async def _fail(self, request):
        self._is_healthy = False
        return JSONResponse({"pid": os.getpid()})

    async def _complete(self, request):
        body = await request.json()
        prompt = body["prompt"]
        cached = max((_shared(prompt, one) for one in self._seen), default=0)
        self._seen.append(prompt)
        if body.get("die_once") and not (self._folder / "died").exists():
            (self._folder / "died").touch()
            os._exit(1)
        if body.get("busy_once") and not (self._folder / "busy").exists():
            (self._folder / "busy").write_text(f"{os.getpid()}")
            return PlainTextResponse("busy", 503)
        answer = {"pid": os.getpid(), "cached": cached, "prompt": len(prompt)}
        if body.get("stream"):
            return StreamingResponse(self._stream(answer, body), media_type="text/event-stream")
        return JSONResponse(answer)

    async def _stream(self, answer, body):
        try:
            yield f"data: {json.dumps(answer)}\n\n"
            for number in range(body["stream"]):
                await asyncio.sleep(body.get("pause", 0.0))
                if body.get("die_at") == number:
                    os._exit(1)
                with open(self._folder / "produced", "ab") as file:
                    file.write(b".")
                yield f"data: {number}{' ' * body.get('padding', 0)}\n\n"
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            (self._folder / "cancelled").touch()
            raise
