"""Errors as clients of OpenAI expect them: `{"error": {message, type, param, code}}`, whatever went wrong."""

from __future__ import annotations

import http
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException

from jaxllm.errors import (
    ConfigError,
    EngineError,
    RequestError,
    SamplingParamsError,
    TryAgainError,
    shown,
)

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    503: "service_unavailable",
}
_API = "/v1"
_OTHER_APIS = {
    "/responses": "OpenAI's Responses API is not served; use chat completions (of the openai package, "
    "client.chat.completions.create), at /v1/chat/completions",
    "/messages": "Anthropic's API is not served; use OpenAI's chat completions, at /v1/chat/completions",
    "/api/generate": "Ollama's API is not served; use OpenAI's, at /v1/completions",
    "/api/chat": "Ollama's API is not served; use OpenAI's, at /v1/chat/completions",
    "/batches": "files of requests are for the command `jaxllm run-batch`",
    "/files": "files of requests are for the command `jaxllm run-batch`",
    "/embeddings": "models only generate text here",
    "/score": "models only generate text here; a prompt's own log-probabilities are those of /v1/completions "
    "with echo, logprobs and max_tokens 0",
}
_MAX_PARAM, _MAX_MESSAGE = 200, 1000


class ApiError(HTTPException):
    """A request is answered with an error.

    Args:
        status: the HTTP status.
        message: what is wrong, with the value, the limit and the way out.
        param: the field of the request that is wrong.
        code: a word that programs can look at; one by the status if None.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > _MAX_MESSAGE:
            message = message[: _MAX_MESSAGE - 3] + "..."
        super().__init__(status, message, dict(headers or {}))
        self.message, self.param = message, None if param is None else param[:_MAX_PARAM]
        self.code = _CODES.get(status) if code is None else code

    def body(self) -> dict[str, Any]:
        """The error object."""
        return error_object(self.status_code, self.message, self.param, self.code)

    def content(self) -> bytes:
        """The same as JSON, spaced as OpenAI's is: some clients look for `"code": "` in the text."""
        return json.dumps(self.body()).encode("ascii")


def error_object(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    default = "server_error" if status >= 500 else "invalid_request_error"
    kind = _TYPES.get(status, default)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that is wrong."""
    return ApiError(400, message, param=param, code=code)


def too_long(message: str, param: str, max_model_len: int) -> ApiError:
    """A prompt, or what it may grow to, does not fit; clients know it by OpenAI's own first sentence."""
    return refused(
        f"This model's maximum context length is {max_model_len} tokens. However, {message}",
        param,
        "context_length_exceeded",
    )


def busy(message: str, seconds: int, code: str = "overloaded") -> ApiError:
    """The server takes no more for now; try again after so many seconds."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(seconds)})


def busy_with_bodies(num_bytes: int) -> ApiError:
    """The server holds as many bytes of requests as it may."""
    return ApiError(
        503,
        f"bodies of {num_bytes} bytes are being worked on: try again later",
        headers={"Retry-After": "1"},
    )


def too_large(what: str, limit: int) -> ApiError:
    """A body of so much is more than is taken."""
    return ApiError(413, f"the request's body has {what}; at most {limit} are taken: send less at once")


def too_late(seconds: float) -> ApiError:
    """A body did not come in time."""
    return ApiError(408, f"the request's body did not arrive within {seconds:g} seconds")


def shutting_down() -> ApiError:
    """The server takes no more, and ends what it has not done in time."""
    return busy("the server is shutting down: send the request to another one", 1, "shutting_down")


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of an error: its own faults in full, of the server's that there is one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, SamplingParamsError | RequestError | ConfigError):
        return refused(str(error))
    if isinstance(error, TryAgainError):
        return busy(str(error), 1, "try_again")
    if isinstance(error, EngineError):
        return ApiError(503, "the engine has failed; the server must be restarted", code="engine_failed")
    return ApiError(500, f"the server failed ({type(error).__name__}); its log says more", code="internal")


def of_validation(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of the problems that pydantic found."""
    first = problems[0]
    place = [str(part) for part in first.get("loc", ()) if part != "body"]
    param = ".".join(place) or None
    if first["type"] == "extra_forbidden":
        return refused(f"unknown field {shown(param, 80)}: leave it out, or correct its name", param)
    if first["type"] == "missing":
        lacks = "the request lacks a JSON object, sent with `Content-Type: application/json`"
        return refused(lacks if param is None else f"{param} is required", param)
    if param is None and first["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return refused("the request must be a JSON object, sent with `Content-Type: application/json`")
    given = first.get("input")
    message = str(first["msg"]).removeprefix("Value error, ")
    about = "the request body" if param is None else param
    if isinstance(given, str | int | float | bool | None):
        about += f"={shown(given, 80)}"
    return refused(f"{about}: {message}", param)


def of_status(error: HTTPException, path: str, paths: Collection[str]) -> ApiError:
    """An error that only has a status, such as that of an unknown route.

    Args:
        error: the error.
        path: what was asked for.
        paths: what there is.
    """
    if error.status_code == 404:
        return ApiError(404, f"there is no {shown(path, 200)} here: {_way_to(path, paths)}")
    if error.status_code == 405:
        methods = {name.lower(): value for name, value in (error.headers or {}).items()}["allow"]
        return ApiError(405, f"{path} takes {methods}: send that", headers=error.headers)
    phrase = http.HTTPStatus(error.status_code).phrase
    detail = str(error.detail or phrase)
    return ApiError(error.status_code, detail, headers=error.headers)


def _way_to(path: str, paths: Collection[str]) -> str:
    """What a client that asked for a path there is not probably wants."""
    for end, way_out in _OTHER_APIS.items():
        if path.endswith(end):
            return way_out
    for known in sorted(paths, key=len, reverse=True):
        route = known.removeprefix(_API)
        if route != "/" and path.endswith(route):
            base = f"http://<host>:<port>{_API if known.startswith(_API) else ''}"
            return f"it is {known}; set the client's base URL to {base}"
    return f"OpenAI's API has the base URL http://<host>:<port>{_API}, and /openapi.json lists all routes"
