"""The routes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from importlib import resources
from pathlib import PurePath
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

import jaxllm
from jaxllm.server.chat import answer
from jaxllm.server.completions import complete
from jaxllm.server.errors import ApiError, of_status, of_validation, refused
from jaxllm.server.guard import Exchange, Guard
from jaxllm.server.live import live
from jaxllm.server.metrics import CONTENT_TYPE, Metrics
from jaxllm.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from jaxllm.server.service import Service
from jaxllm.server.streams import dumps
from jaxllm.server.texts import detokenize, tokenize
from jaxllm.server.tracing import Tracer
from jaxllm.system.json_text import parse

_LARGE_BODY = 2**14  # bytes; beyond, it is parsed and checked in threads
_PAGE_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {
        "description": text,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["error"],
                    "properties": {
                        "error": {
                            "type": "object",
                            "required": ["message", "type", "param", "code"],
                            "properties": {
                                "message": {"type": "string"},
                                "type": {"type": "string"},
                                "param": {"type": ["string", "null"]},
                                "code": {"type": ["string", "null"]},
                            },
                        }
                    },
                }
            }
        },
    }
    for status, text in {
        400: "The request is wrong",
        401: "An API key is needed",
        404: "There is no such model",
        408: "The request did not arrive in time",
        413: "The request is too large",
        415: "The request's body is compressed",
        503: "The server is busy, shutting down or has failed",
    }.items()
}


class _Request(Request):
    """One whose JSON is read as strictly as that of files."""

    async def json(self) -> Any:
        """The body.

        Raises:
            ApiError: it is no JSON.
        """
        body = await self.body()
        self.state.is_large = len(body) > _LARGE_BODY
        try:
            if self.state.is_large:
                return await self.app.state.service.core.call(parse, body, pool="bodies")
            return parse(body)
        except (ValueError, UnicodeDecodeError) as error:
            raise refused(f"the body is no valid JSON: {error}", code="invalid_json") from error


class _Route(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Any]:
        """The handler, given a `_Request`."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_Request(request.scope, request.receive))

        return handle


def make_app(service: Service, *, owns_service: bool = True) -> FastAPI:
    """The server as an ASGI application.

    Args:
        service: the model that it serves.
        owns_service: whether the service is closed when the application shuts down.
    """
    metrics, tracer = Metrics(service), Tracer(service)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.core.start()
        try:
            yield
        finally:
            if owns_service:
                await service.core.call_last(service.core.close)
            tracer.close()

    def ended(exchange: Exchange) -> None:
        metrics.count_http(exchange.path, exchange.status)
        tracer.record(exchange)

    paths: set[str] = set()
    guard = Middleware(Guard, service=service, paths=paths, on_exchange=ended)
    app = FastAPI(
        title="jaxllm",
        version=jaxllm.__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        middleware=[guard],
        separate_input_output_schemas=False,
    )
    app.state.service = service
    app.router.route_class = _Route
    _add_error_handlers(app, paths)
    _add_generation(app, service)
    _add_texts(app, service)
    _add_state(app, service, metrics)
    paths |= {route.path for route in app.routes if hasattr(route, "path")}
    return app


def _add_error_handlers(app: FastAPI, paths: Collection[str]) -> None:
    async def of_api(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        found = error if isinstance(error, ApiError) else of_status(error, request.url.path, paths)
        request.state.log.error = found.message
        content = found.content()
        return Response(content, found.status_code, found.headers, media_type="application/json")

    async def of_wrong(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return await of_api(request, of_validation(error.errors()))

    app.add_exception_handler(HTTPException, of_api)
    app.add_exception_handler(RequestValidationError, of_wrong)


def _add_generation(app: FastAPI, service: Service) -> None:
    stream: dict[str, Any] = {"content": {"application/json": {}, "text/event-stream": {}}}

    @app.post("/v1/completions", responses={200: stream, **_ERRORS}, response_class=Response)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continue prompts."""
        return await complete(service, request, body)

    @app.post("/v1/chat/completions", responses={200: stream, **_ERRORS}, response_class=Response)
    async def chat_completions(request: Request, body: ChatCompletionRequest) -> Response:
        """Answer a conversation."""
        return await answer(service, request, body)


def _add_texts(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", responses=_ERRORS)
    async def to_tokens(body: TokenizeRequest) -> dict[str, Any]:
        """Token ids of a prompt or a conversation."""
        return await service.core.call(tokenize, service, body, pool="texts")

    @app.post("/detokenize", responses=_ERRORS)
    async def to_text(body: DetokenizeRequest) -> dict[str, Any]:
        """The text of token ids."""
        return await service.core.call(detokenize, service, body, pool="texts")


def _add_state(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.get("/v1/models", responses=_ERRORS)
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return service.models()

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def model(name: str) -> dict[str, Any]:
        """One name of it."""
        name = name.rstrip("/")
        service.check_model(name)
        found = service.models()["data"]
        return next((one for one in found if one["id"] == name), found[0])

    @app.get("/health", responses={503: _ERRORS[503]}, response_class=Response)
    async def health() -> Response:
        """200 while the engine takes requests."""
        service.check_health()
        return Response()

    for ask, name in ((app.get, "ping"), (app.post, "ping_by_post")):
        ask("/ping", responses={503: _ERRORS[503]}, response_class=Response, operation_id=name)(health)

    @app.get("/version", responses=_ERRORS)
    async def version() -> dict[str, Any]:
        """Of jaxllm."""
        return {"version": jaxllm.__version__}

    @app.get("/metrics", responses=_ERRORS, response_class=Response)
    async def prometheus() -> Response:
        """Metrics in Prometheus' format."""
        return Response(metrics.text(), headers={"content-type": CONTENT_TYPE})

    @app.get("/live", responses=_ERRORS, response_class=Response)
    async def state() -> Response:
        """What the live page shows."""
        return Response(
            dumps(live(service)), headers={"cache-control": "no-store"}, media_type="application/json"
        )

    for file in resources.files("jaxllm.server").joinpath("page").iterdir():
        path = "/" if file.name == "index.html" else f"/{file.name}"
        page = _page(file.read_bytes(), _PAGE_KINDS[PurePath(file.name).suffix])
        app.add_api_route(path, page, include_in_schema=False, response_class=Response)


def _page(content: bytes, kind: str) -> Callable[[], Any]:
    async def page() -> Response:
        headers = {"content-security-policy": _PAGE_POLICY, "cache-control": "no-cache"}
        return Response(content, headers=headers, media_type=kind)

    return page
