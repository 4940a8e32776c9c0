"""Settings of the server: where it listens, whom it lets in, and how much it takes."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
from collections.abc import Sequence
from typing import Any

from jaxllm.commands.options import API_KEYS_VARIABLE
from jaxllm.errors import ConfigError, shown
from jaxllm.system.options import byte_count, check_options, check_range, option, with_options

_MAX_COUNT = 2**20
_DAY = 86400.0
_MIN_KEY_LENGTH = 8
MAX_KEY_LENGTH = 4096
_HASHED = "sha256:"


def _bytes(default: int, maximum: int) -> Any:
    return option(default, within=(1024, maximum), parse=byte_count)


def _seconds(default: float) -> Any:
    return option(default, within=(0.0, _DAY))


def _host(name: str, value: object) -> object:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name}={shown(value)} must be an address, such as 127.0.0.1")
    return value


def _names(name: str, value: Sequence[object]) -> tuple[object, ...]:
    for one in value:
        if not isinstance(one, str) or not one:
            raise ConfigError(f"{name} holds {shown(one)}: names are text that is not empty")
    return tuple(value)


def _keys(name: str, value: Sequence[object] | None) -> tuple[str, ...]:
    if value is None:
        variable = os.environ.get(API_KEYS_VARIABLE)
        value = [key for key in (variable or "").split(",") if key]
        if variable is not None and not value:
            raise ConfigError(
                f"{API_KEYS_VARIABLE}={variable!r} is set and holds no key: put one there, or unset it"
            )
    return tuple(map(_hashed, value))


def _silence(name: str, value: Any) -> Any:
    if value != 0 or isinstance(value, bool):
        check_range(name, value, 0.1, _DAY, is_integer=False)
    return value


@with_options
class ServerConfig:
    """How to serve a model.

    What waits is bounded twice, in requests and in tokens; beyond that requests are answered 503 before they
    are read. Each sample of each prompt counts as a request.

    Args:
        host: Address to listen on; only this machine's clients reach 127.0.0.1.
        port: To listen on; 0 picks a free one.
        served_model_names: What clients call the model, by default the name of its folder or id; may be
            repeated. The first is in responses.
        api_keys: Let in only who has one; may be repeated; who can list processes can read it: rather set
            JAXLLM_API_KEY. One must come with each request but those for /health and /ping; by default those
            in that variable of the environment, separated by commas, and none lets everybody in. A key may be
            given as its hash, "sha256:" and 64 hexadecimal digits; nothing else of it is kept.
        max_queued_requests: Most requests admitted beyond the `max_num_seqs` that run; by default four times
            as many.
        max_queued_tokens: Most prompt tokens of all admitted requests; by default as many as
            `max_queued_requests` and those that run have at 2048 tokens each, or one of the model's length.
        max_prompts: Most prompts of one request.
        max_body_bytes: Largest request body, in bytes.
        max_total_body_bytes: Largest sum of all bodies that are being read or worked on.
        max_header_bytes: Largest head of a request, in bytes.
        max_connections: Most open connections.
        request_timeout: Seconds in which a request's head, and then its body, must have arrived.
        send_timeout: Seconds after which a client that reads nothing is taken to be gone.
        keep_alive_timeout: Seconds that an idle connection is kept open. They are longer than proxies' usual
            60, so that none of them sends a request into a connection that is being closed.
        stream_keep_alive: Seconds of silence after which a stream has a comment (": keep-alive"); 0 for none.
            Proxies keep the connections of requests that wait so.
        shutdown_timeout: Seconds that requests under way have to end when the server is told to stop; those
            left are aborted.
        log_requests: Write a line for each request to the log.
        otlp_traces_endpoint: URL of an OpenTelemetry collector (OTLP over HTTP) to send traces to; needs the
            extra otel.

    Raises:
        ConfigError: a value is out of range.
    """

    host: str = option("127.0.0.1", check=_host)
    port: int = option(8000, within=(0, 65535))
    served_model_names: Sequence[str] = option((), check=_names, flag="served_model_name", is_repeated=True)
    api_keys: Sequence[str] = option(None, check=_keys, metavar="KEY", flag="api_key", is_repeated=True)
    max_queued_requests: int | None = option(None, within=(0, _MAX_COUNT))
    max_queued_tokens: int | None = option(None, within=(1, 2**40))
    max_prompts: int = option(2048, within=(1, _MAX_COUNT))
    max_body_bytes: int = _bytes(8 * 2**20, 2**32)
    max_total_body_bytes: int = _bytes(128 * 2**20, 2**36)
    max_header_bytes: int = _bytes(64 * 2**10, 2**24)
    max_connections: int = option(4096, within=(1, _MAX_COUNT))
    request_timeout: float = _seconds(30.0)
    send_timeout: float = _seconds(60.0)
    keep_alive_timeout: float = _seconds(75.0)
    stream_keep_alive: float = option(15.0, check=_silence, parse=float)
    shutdown_timeout: float = _seconds(30.0)
    log_requests: bool = option(True)
    otlp_traces_endpoint: str | None = option(None, metavar="URL")

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_total_body_bytes < self.max_body_bytes:
            raise ConfigError(
                f"max_total_body_bytes={self.max_total_body_bytes} is below max_body_bytes="
                f"{self.max_body_bytes}, so that the largest body could never be taken: raise it"
            )

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
        return tuple(bytes.fromhex(key.removeprefix(_HASHED)) for key in self.api_keys)


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
