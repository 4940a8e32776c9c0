"""Any server of OpenAI's API, as a worker of `jaxllm compare`: SGLang, TensorRT-LLM, llama.cpp's, vLLM's."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import time
import urllib.parse
from typing import Any

import protocol

_TIMEOUT_SECONDS = 3600


class OpenAIEngine(protocol.Engine):
    """Token ids go to `/v1/completions`. The server runs already, and is not stopped between turns."""

    def load(self) -> dict[str, float | None]:
        """Find the model that it serves.

        Raises:
            RuntimeError: it does not answer as such a server does.
        """
        self._url = urllib.parse.urlsplit(self.job["server"])
        connection = self._connect()
        connection.request("GET", f"{self._base}/models", headers=self._headers())
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise RuntimeError(f"{self.job['server']} answers {response.status} to /models: {body[:200]!r}")
        self._model = json.loads(body)["data"][0]["id"]
        return {"load_seconds": None, "compile_seconds": None}

    def generate(
        self, prompts: list[list[int]], max_tokens: list[int], variant: int | None
    ) -> list[list[int]] | None:
        """All requests at once; token ids where the server tells them."""
        found = self._all(prompts, max_tokens, [0.0] * len(prompts))
        outputs = [one["token_ids"] for one in found]
        return outputs if all(map(len, outputs)) else None

    def serve_at(
        self, prompts: list[list[int]], max_tokens: list[int], arrivals: list[float]
    ) -> list[tuple[float, float]]:
        """Requests as they come, each on a connection of its own."""
        return [(one["first"], one["last"]) for one in self._all(prompts, max_tokens, arrivals)]

    def _all(
        self, prompts: list[list[int]], max_tokens: list[int], arrivals: list[float]
    ) -> list[dict[str, Any]]:
        began = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            asked = zip(prompts, max_tokens, arrivals, strict=True)
            sent = [pool.submit(self._ask, began, *one) for one in asked]
            return [one.result() for one in sent]

    def _ask(self, began: float, prompt: list[int], count: int, arrival: float) -> dict[str, Any]:
        """Send a request when it is due; its tokens, and when the first and the last came.

        Raises:
            RuntimeError: the server refuses it, or gives another number of tokens.
        """
        time.sleep(max(0.0, began + arrival - time.perf_counter()))
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.job["server_token_ids"]:
            body["return_token_ids"] = True
        connection = self._connect()
        headers = {"Content-Type": "application/json", **self._headers()}
        connection.request("POST", f"{self._base}/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"the server answers {response.status}: {response.read()[:300]!r}")
        first = last = 0.0
        token_ids: list[int] = []
        num_tokens = None
        while line := response.readline():
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise RuntimeError(f"the server failed: {chunk['error']}")
            now = time.perf_counter() - began
            for choice in chunk.get("choices", []):
                first, last = first or now, now
                token_ids += choice.get("token_ids") or []
            if chunk.get("usage"):
                num_tokens = chunk["usage"]["completion_tokens"]
        connection.close()
        if num_tokens is not None and num_tokens != count:
            raise RuntimeError(f"a request gave {num_tokens} tokens instead of {count}: is ignore_eos known?")
        return {"first": first, "last": last, "token_ids": token_ids}

    @property
    def _base(self) -> str:
        return self._url.path.rstrip("/")

    def _headers(self) -> dict[str, str]:
        key = self.job.get("api_key")
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        return kind(self._url.netloc, timeout=_TIMEOUT_SECONDS)


if __name__ == "__main__":
    protocol.serve(OpenAIEngine)
