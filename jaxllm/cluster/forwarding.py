"""HTTP requests as they travel from an ingress to a replica, and what comes back."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.routing.prompt_keys import PromptKeys, keys_of_request
from jaxllm.system.json_text import parse

GENERATING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
"""What is routed by its prompt."""
_LIMITS = ("max_completion_tokens", "max_tokens")
NO_KEYS = PromptKeys((), 0)

Message = dict[str, Any]
"""What ASGI sends."""


@dataclasses.dataclass(slots=True)
class ForwardedRequest:
    """A request with its whole body.

    Args:
        scope: of ASGI, as far as it can travel.
        body: of it, or as much of it as a replica needs to refuse it.
        prompt: keys of its prompt; none if it has none.
        max_tokens: of its answer, if it says so.
        tried: replicas that it was sent to, the latest last. The router notes them.
        replicas: all that there are, likewise.
        target: the one that it is for, if it is for one; the router sets it to None if that has gone.
        flow_id: by which a replica knows it when it is told how much of its answer was passed on.
    """

    scope: Mapping[str, Any]
    body: bytes
    prompt: PromptKeys = NO_KEYS
    max_tokens: int | None = None
    tried: list[str] = dataclasses.field(default_factory=list)
    replicas: tuple[str, ...] = ()
    target: str | None = None
    flow_id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)


def forwarded(scope: Mapping[str, Any], body: bytes) -> ForwardedRequest:
    """A request of ASGI's `scope`, read as far as routing needs; what is wrong with it a replica says."""
    kept = {
        name: scope.get(name) for name in ("type", "http_version", "method", "scheme", "path", "query_string")
    }
    kept |= {"raw_path": scope.get("raw_path"), "root_path": "", "asgi": {"version": "3.0"}}
    kept |= {name: scope.get(name) and tuple(scope[name]) for name in ("client", "server")}
    kept["headers"] = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    request = ForwardedRequest(kept, body)
    if scope["method"] == "POST" and scope["path"] in GENERATING_PATHS:
        try:
            values = parse(body)
        except ValueError:
            return request
        if isinstance(values, dict):
            request.prompt = keys_of_request(values)
            request.max_tokens = _max_tokens(values)
    return request


def is_event_stream(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether a response with these headers is one of server-sent events."""
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    found = [body[name] for name in _LIMITS if isinstance(body.get(name), int) and body[name] >= 0]
    return found[0] if found else None
