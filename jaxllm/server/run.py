"""Runs the server until it is told to stop, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Literal

import uvicorn

from jaxllm.errors import ConfigError
from jaxllm.server.app import make_app
from jaxllm.server.config import ServerConfig
from jaxllm.server.connections import protocol_class
from jaxllm.server.service import Service

SECONDS_TO_SEND = 3
"""To slow readers what is left, once requests have ended."""
_SECONDS_TO_CLOSE = 10.0  # the engine after that
_SWITCH_SECONDS = 0.001  # that a thread goes on while another waits; 5 times as often as Python's default
_OBJECTS_BETWEEN_COLLECTIONS = 3_000
EXIT_STUCK = 70


class _Server(uvicorn.Server):
    """uvicorn's, which waits for requests to end before it stops listening, and lets its caller exit."""

    def __init__(self, config: uvicorn.Config, service: Service, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._service, self._on_ready = service, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, let those under way end, abort the rest, and close everything."""
        seconds = self._service.config.shutdown_timeout
        with _in_time(seconds + SECONDS_TO_SEND + _SECONDS_TO_CLOSE):
            await self._service.core.drain(seconds, lambda: self.force_exit)
            self.force_exit = False  # the engine is to be closed in any case
            await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; at the second signal of either kind, without waiting. uvicorn takes only Ctrl-C for that."""
        self.force_exit = self.should_exit
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at SIGINT and SIGTERM; at the second of them, without waiting."""
        handled = (signal.SIGINT, signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def log_to_stderr() -> None:
    """Show lines of requests, and warnings of the HTTP server; Ray passes them on to where it was started."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name, level in (("jaxllm.server", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False


def tune_interpreter() -> None:
    """Keep this process' threads from holding each other up; to be called once the model is loaded.

    What is there by then stays, so the garbage collector need not look through it: while it does, which takes
    it longer than a refusal may, nobody is answered. It need not look at each large body many times, either.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *gc.get_threshold()[1:])


def listen(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """A socket that listens.

    Args:
        host: the address.
        port: 0 picks a free one.
        is_shared: whether other processes listen there, too, and the system chooses who gets a connection.

    Raises:
        ConfigError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror or error}); choose another --host or --port"
        ) from error
    return listener


def make_server(service: Service, listener: socket.socket, tell: Callable[[str], None]) -> uvicorn.Server:
    """A server of a model; `run(sockets=[listener])` serves until a signal, or `should_exit`, says otherwise.

    Args:
        service: the model; it is closed at the end.
        listener: where to listen.
        tell: given a line when the server is ready.
    """
    settings = http_settings(make_app(service), service.config, lifespan="on")
    url = url_of(*listener.getsockname()[:2])
    return _Server(settings, service, lambda: tell(f"serving {service.model_names[0]} on {url}"))


def http_settings(app: Any, config: ServerConfig, lifespan: Literal["on", "off"]) -> uvicorn.Config:
    """How an ASGI application is served.

    Args:
        app: the application.
        config: bounds of connections.
        lifespan: whether the application is told that it starts and stops.
    """
    return uvicorn.Config(
        app,
        http=protocol_class(config),
        ws="none",
        lifespan=lifespan,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        h11_max_incomplete_event_size=config.max_header_bytes,
        timeout_keep_alive=int(max(1, config.keep_alive_timeout)),
        timeout_graceful_shutdown=SECONDS_TO_SEND,
        proxy_headers=False,
    )


def url_of(host: str, port: int) -> str:
    """Where clients find a server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def _in_time(seconds: float) -> Iterator[None]:
    """End the process if the block takes longer: a device that hangs keeps threads that nothing else ends."""
    timer = threading.Timer(seconds, os._exit, [EXIT_STUCK])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
