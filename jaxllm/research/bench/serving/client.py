"""Requests to an OpenAI-compatible server, by aiohttp."""

from __future__ import annotations

import contextlib
import importlib
import json
import time
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from jaxllm.errors import ConfigError
from jaxllm.research.bench.serving.answers import Answer, AnswerStream, error_message

if TYPE_CHECKING:
    import aiohttp

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
"""Where requests go, by the name of the endpoint."""
_CONNECT_SECONDS = 30.0


def import_from_extra(name: str) -> ModuleType:
    """A module of the extra `serve`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f'the load generator needs {name}, which is not installed: pip install "jaxllm[serve]"'
        ) from None


def check_url(url: str) -> str:
    """A server's base URL, without the `/v1` that some clients want at its end.

    Raises:
        ConfigError: it is none.
    """
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is no number, or brackets without an address
        is_url = False
    if not is_url:
        raise ConfigError(f"base URL {url!r} is no http or https URL: write http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")


class Client:
    """A session with one server; an asynchronous context manager.

    There is no limit to connections, and no proxy is used.

    Args:
        base_url: of the server, see `check_url`.
        endpoint: one of `PATHS`.
        api_key: sent as a bearer token if there is one.
        timeout: seconds that one request may take.

    Raises:
        ConfigError: aiohttp is not installed, or the URL is none.
    """

    def __init__(
        self,
        base_url: str,
        *,
        endpoint: str = "completions",
        api_key: str | None = None,
        timeout: float = 3600.0,
    ) -> None:
        self._aiohttp = import_from_extra("aiohttp")
        self.base_url = check_url(base_url)
        self._url = self.base_url + PATHS[endpoint]
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        aiohttp = self._aiohttp
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout, sock_connect=_CONNECT_SECONDS),
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._open.close()

    @property
    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the client is used as a context manager"
        return self._session

    async def first_model(self, wanted: str | None) -> str:
        """The model to ask for: the one that is wanted, or the first that the server has.

        Raises:
            ConfigError: the server cannot be reached, refuses the API key, or names no model if it has to.
        """
        status, text = await self._get("/v1/models")
        if status in (401, 403):
            raise ConfigError(
                f"{self.base_url} refuses the API key ({status}): pass --api-key, or correct it"
            )
        if wanted is not None:
            return wanted
        with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
            return str(json.loads(text)["data"][0]["id"])
        raise ConfigError(
            f"{self.base_url}/v1/models names no model (status {status}): is it an OpenAI-compatible server? "
            "Correct --base-url, or name the model with --model"
        )

    async def get_text(self, path: str) -> str | None:
        """What is at a path; None if there is nothing."""
        try:
            status, text = await self._get(path)
        except ConfigError:
            return None
        return text if status == 200 else None

    async def send(self, answer: Answer, body: bytes) -> None:
        """Send a request, and read its answer to the end, whatever that is."""
        aiohttp, headers = self._aiohttp, {"Content-Type": "application/json"}
        stream = AnswerStream(answer)
        answer.start_time = time.perf_counter()
        try:
            async with self._open.post(self._url, data=body, headers=headers) as response:
                answer.status = response.status
                if response.status != 200:
                    answer.error = (
                        f"status {response.status}: {_shown(await response.text(errors='replace'))}"
                    )
                else:
                    async for data in response.content.iter_any():
                        stream.feed(data, time.perf_counter())
                    stream.close()
        except TimeoutError:
            answer.error = f"it took more than the {self._timeout:g} s that a request may take"
        except (aiohttp.ClientError, OSError) as error:
            answer.error = f"the connection failed ({type(error).__name__}: {error})"
        if answer.error:
            answer.latency = time.perf_counter() - answer.start_time

    async def _get(self, path: str) -> tuple[int, str]:
        try:
            timeout = self._aiohttp.ClientTimeout(total=_CONNECT_SECONDS)
            async with self._open.get(self.base_url + path, timeout=timeout) as response:
                return response.status, await response.text()
        except (self._aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ConfigError(
                f"cannot reach {self.base_url} ({str(error) or type(error).__name__}): start the server, or "
                "correct --base-url"
            ) from error


def _shown(text: str) -> str:
    """What an error's body says."""
    try:
        body: Any = json.loads(text)
    except ValueError:
        body = text.strip()
    return error_message(body) if isinstance(body, Mapping | str) else text[:200]
