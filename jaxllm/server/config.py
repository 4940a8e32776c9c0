"""Settings of the server: where it listens, whom it lets in, and how much it takes."""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
import os
import re
from collections.abc import Sequence
from typing import Any

from jaxllm.commands.options import API_KEYS_VARIABLE
from jaxllm.errors import ConfigError, shown

_MAX_COUNT = 2**20
_MIN_KEY_LENGTH = 8
MAX_KEY_LENGTH = 4096
_HASHED = "sha256:"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How to serve a model.

    What waits is bounded twice, in requests and in tokens; beyond that requests are answered 503 before they
    are read. Each sample of each prompt counts as a request.

    Args:
        host: address to listen on; only this machine's clients reach 127.0.0.1.
        port: to listen on; 0 picks a free one.
        served_model_names: what clients call the model; the first is in responses. The checkpoint's folder or
            id, the last part of it, if there are none.
        api_keys: one of them must come with each request but those for /health and /ping; by default those
            in the environment's JAXLLM_API_KEY, separated by commas, and none lets everybody in. A key may be
            given as its hash, "sha256:" and 64 hexadecimal digits; nothing else of it is kept.
        max_queued_requests: most requests admitted beyond the `max_num_seqs` that run; by default four times
            as many as run.
        max_queued_tokens: most prompt tokens of all admitted requests; by default as many as
            `max_queued_requests` and those that run have at 2048 tokens each, or one of the model's length.
        max_prompts: most prompts of one request.
        max_body_bytes: largest request body.
        max_total_body_bytes: largest sum of all bodies that are being read or worked on.
        max_header_bytes: largest head of a request.
        max_connections: most open connections.
        request_timeout: seconds in which a request's head, and then its body, must have arrived.
        send_timeout: seconds after which a client that reads nothing is taken to be gone.
        keep_alive_timeout: seconds that an idle connection is kept open; longer than proxies' usual 60, so
            that none of them sends a request into a connection that is being closed.
        stream_keep_alive: seconds of silence after which a stream has a comment (": keep-alive"), so that
            proxies keep the connections of requests that wait; 0 for none.
        shutdown_timeout: seconds that requests under way have to end when the server is told to stop; those
            left are aborted.
        log_requests: write a line for each request to the log.
        otlp_traces_endpoint: URL of an OpenTelemetry collector (OTLP over HTTP) to send traces to.

    Raises:
        ConfigError: a value is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: Sequence[str] = ()
    api_keys: Sequence[str] | None = None
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    max_prompts: int = 2048
    max_body_bytes: int = 8 * 2**20
    max_total_body_bytes: int = 128 * 2**20
    max_header_bytes: int = 64 * 2**10
    max_connections: int = 4096
    request_timeout: float = 30.0
    send_timeout: float = 60.0
    keep_alive_timeout: float = 75.0
    stream_keep_alive: float = 15.0
    shutdown_timeout: float = 30.0
    log_requests: bool = True
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError(f"host={shown(self.host)} must be an address, such as 127.0.0.1")
        for name, low, high in (
            ("port", 0, 65535),
            ("max_queued_requests", 0, _MAX_COUNT),
            ("max_queued_tokens", 1, 2**40),
            ("max_prompts", 1, _MAX_COUNT),
            ("max_body_bytes", 1024, 2**32),
            ("max_total_body_bytes", 1024, 2**36),
            ("max_header_bytes", 1024, 2**24),
            ("max_connections", 1, _MAX_COUNT),
        ):
            _check_number(name, getattr(self, name), low, high, int)
        for name in ("request_timeout", "send_timeout", "keep_alive_timeout", "shutdown_timeout"):
            _check_number(name, getattr(self, name), 0.0, 86400.0, float)
        if self.stream_keep_alive != 0:
            _check_number("stream_keep_alive", self.stream_keep_alive, 0.1, 86400.0, float)
        if self.max_total_body_bytes < self.max_body_bytes:
            raise ConfigError(
                f"max_total_body_bytes={self.max_total_body_bytes} is below max_body_bytes="
                f"{self.max_body_bytes}, so that the largest body could never be taken: raise it"
            )
        names = tuple(self.served_model_names)
        for name in names:
            if not isinstance(name, str) or not name:
                raise ConfigError(f"served_model_names holds {shown(name)}: names are text that is not empty")
        keys = self.api_keys
        if keys is None:
            given = os.environ.get(API_KEYS_VARIABLE)
            keys = [key for key in (given or "").split(",") if key]
            if given is not None and not keys:
                raise ConfigError(
                    f"{API_KEYS_VARIABLE}={given!r} is set and holds no key: put one there, or unset it"
                )
        object.__setattr__(self, "served_model_names", names)
        object.__setattr__(self, "api_keys", tuple(map(_hashed, keys)))

    @property
    def is_open(self) -> bool:
        """Whether other machines' clients come in without a key."""
        if self.api_keys or self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name
            return True

    @property
    def key_digests(self) -> tuple[bytes, ...]:
        """SHA-256 of each key."""
        return tuple(bytes.fromhex(key.removeprefix(_HASHED)) for key in self.api_keys or ())


def _hashed(key: object) -> str:
    if isinstance(key, str) and re.fullmatch(_HASHED + "[0-9a-f]{64}", key):
        return key
    if isinstance(key, str) and key.startswith(_HASHED):
        raise ConfigError(
            f"an API key that begins with {_HASHED} must be a hash: 64 digits follow, 0 to 9 and a to f"
        )
    if not isinstance(key, str) or not re.fullmatch(f"[!-~]{{{_MIN_KEY_LENGTH},{MAX_KEY_LENGTH}}}", key):
        raise ConfigError(
            f"an API key must be {_MIN_KEY_LENGTH} to {MAX_KEY_LENGTH} ASCII characters without spaces; make "
            "one with `python -c 'import secrets; print(secrets.token_urlsafe(32))'`"
        )
    return _HASHED + hashlib.sha256(key.encode("ascii")).hexdigest()


def _check_number(name: str, value: Any, low: float, high: float, kind: type) -> None:
    if value is None and name in ("max_queued_requests", "max_queued_tokens"):
        return
    kinds = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        what = "an integer" if kind is int else "a number"
        raise ConfigError(f"{name}={shown(value)} must be {what} from {low:g} to {high:g}")
