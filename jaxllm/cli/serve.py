"""`jaxllm serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxllm.cli import serve_ray
from jaxllm.commands.options import (
    add_engine_options,
    byte_count,
    engine_settings,
    model_name,
    note,
    tell_of_programs,
)
from jaxllm.engine.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.loading.checkpoints import demo_model_path

_OPTIONS: Mapping[str, tuple[Callable[[str], Any], str, str]] = {
    "host": (str, "ADDRESS", "to listen on (default: 127.0.0.1, this machine only)"),
    "port": (int, "N", "to listen on; 0 picks a free one (default: 8000)"),
    "max_queued_requests": (int, "N", "most requests beyond those that run (default: four times as many)"),
    "max_queued_tokens": (int, "N", "most prompt tokens of all of them together"),
    "max_prompts": (int, "N", "most prompts of one request (default: 2048)"),
    "max_body_bytes": (byte_count, "BYTES", "largest request body; takes KiB, MiB and GiB (default: 8MiB)"),
    "max_total_body_bytes": (byte_count, "BYTES", "of all bodies at a time (default: 128MiB)"),
    "max_header_bytes": (byte_count, "BYTES", "largest head of a request (default: 64KiB)"),
    "max_connections": (int, "N", "most open connections (default: 4096)"),
    "request_timeout": (float, "S", "for a request's head, and its body, to arrive (default: 30)"),
    "send_timeout": (float, "S", "after which a client that reads nothing is gone (default: 60)"),
    "keep_alive_timeout": (float, "S", "that an idle connection is kept (default: 75)"),
    "stream_keep_alive": (float, "S", "of silence after which a stream has a comment; 0: none (default: 15)"),
    "shutdown_timeout": (float, "S", "for requests to end when told to stop; then abort them (default: 30)"),
    "otlp_traces_endpoint": (str, "URL", "OpenTelemetry collector to send traces to (extra: otel)"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command, and add its options."""
    parser.description = (
        "Serve a model: /v1/completions, /v1/chat/completions, /v1/models, /tokenize, /detokenize, "
        "/health, /metrics, and a page at / that shows what the scheduler does. SIGTERM or Ctrl-C lets "
        "requests under way end; a second one does not wait."
    )
    group = parser.add_argument_group("server options")
    for name, (convert, metavar, text) in _OPTIONS.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=convert, metavar=metavar, default=argparse.SUPPRESS, help=text)
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        default=[],
        help="let in only who has one; may be repeated. Who can list processes can read it: rather set "
        "JAXLLM_API_KEY",
    )
    group.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        default=[],
        help="what clients call the model; may be repeated (default: the name of its folder)",
    )
    group.add_argument("--no-log-requests", action="store_true", help="no line on stderr for each request")
    serve_ray.add_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def server_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The server options that were given, as arguments of `ServerConfig`."""
    settings = {name: getattr(args, name) for name in _OPTIONS if hasattr(args, name)}
    if args.api_key:
        settings["api_keys"] = args.api_key
    settings["served_model_names"] = args.served_model_name
    settings["log_requests"] = not args.no_log_requests
    return settings


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; returns the exit code."""
    with needs_server_packages():
        from jaxllm.server.config import ServerConfig
        from jaxllm.server.run import listen, log_to_stderr, make_server, tune_interpreter
        from jaxllm.server.service import Service
    serve_ray.check_options(args)
    settings = engine_settings(args)
    config = ServerConfig(**server_settings(args))
    if config.is_open:
        note(f"{config.host} is reached from other machines, and no API key is asked for: set JAXLLM_API_KEY")
    if args.replicas is not None:
        return serve_ray.run(args, settings, config)
    policy = settings.pop("scheduler_policy", None)
    engine = EngineConfig(**{**settings, "model": settings["model"] or demo_model_path()})
    listener = listen(config.host, config.port)  # now rather than after loading
    with listener:
        log_to_stderr()
        note(f"loading {model_name(settings)}")
        tell_of_programs()
        service = Service.load(engine, config, policy)
        tune_interpreter()
        make_server(service, listener, note).run(sockets=[listener])
    return 0


@contextlib.contextmanager
def needs_server_packages() -> Iterator[None]:
    """Imports of the server.

    Raises:
        ConfigError: a package is missing.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f'the server needs further packages: pip install "jaxllm[serve]" ({error})'
        ) from error
