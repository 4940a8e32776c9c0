"""`jaxllm serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jaxllm.checkpoints import demo_model_path
from jaxllm.cli.options import (
    add_engine_options,
    byte_count,
    engine_settings,
    model_name,
    note,
    tell_of_programs,
)
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from jaxllm.server.config import ServerConfig

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
    "keep_alive_timeout": (float, "S", "that an idle connection is kept (default: 60)"),
    "shutdown_timeout": (float, "S", "for requests to end when told to stop; then abort them (default: 30)"),
    "otlp_traces_endpoint": (str, "URL", "OpenTelemetry collector to send traces to (extra: otel)"),
}
_CLUSTER_OPTIONS: Mapping[str, tuple[Callable[[str], Any], str, str]] = {
    "num_replicas": (int, "N", "engines, in processes of their own on a Ray cluster (extra: ray)"),
    "max_replicas": (int, "N", "most engines: as many as what is queued asks for (default: --replicas)"),
    "target_queued_tokens": (int, "N", "of an engine, for their number (default: 16384)"),
    "policy": (str, "NAME", "prefix, two_choices, prefix_only or round_robin (default: prefix)"),
    "gpus_per_replica": (float, "F", "of an engine (default: 1, if the cluster has any)"),
    "cpus_per_replica": (int, "N", "of an engine without a GPU (default: its share)"),
    "ray_address": (str, "ADDRESS", "of a cluster (default: that of this machine, or a new one)"),
}
_CLUSTER_FLAGS = {"num_replicas": "--replicas", "policy": "--routing"}


def add_command(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "serve",
        help="serve a model to clients of OpenAI's API",
        description=(
            "Serve a model: /v1/completions, /v1/chat/completions, /v1/models, /tokenize, /detokenize, "
            "/health, /metrics, and a page at / that shows what the scheduler does. SIGTERM or Ctrl-C lets "
            "requests under way end; a second one does not wait."
        ),
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
    cluster = parser.add_argument_group("options of several engines")
    for name, (convert, metavar, text) in _CLUSTER_OPTIONS.items():
        cluster.add_argument(
            _cluster_flag(name),
            dest=f"cluster_{name}",
            type=convert,
            metavar=metavar,
            default=argparse.SUPPRESS,
            help=text,
        )
    group.add_argument("--no-log-requests", action="store_true", help="no line on stderr for each request")
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
        from jaxllm.server.run import listen, make_server
        from jaxllm.server.service import Service
    settings = engine_settings(args)
    config = ServerConfig(**server_settings(args))
    given = vars(args)
    cluster = {name: given[f"cluster_{name}"] for name in _CLUSTER_OPTIONS if f"cluster_{name}" in given}
    if cluster:
        return _run_replicas(settings, config, cluster)
    policy = settings.pop("scheduler_policy", None)
    engine = EngineConfig(**{**settings, "model": settings["model"] or demo_model_path()})
    listener = listen(config.host, config.port)  # now rather than after loading
    with listener:
        _log_to_stderr()
        note(f"loading {model_name(settings)}")
        tell_of_programs()
        make_server(Service.load(engine, config, policy), listener, note).run(sockets=[listener])
    return 0


def _cluster_flag(name: str) -> str:
    return _CLUSTER_FLAGS.get(name, "--" + name.replace("_", "-"))


def _run_replicas(settings: dict[str, Any], config: ServerConfig, cluster: dict[str, Any]) -> int:
    """Serve with several engines."""
    from jaxllm.cluster.serve import ClusterConfig
    from jaxllm.cluster.serve import run as run_cluster

    if "num_replicas" not in cluster:
        given = ", ".join(map(_cluster_flag, cluster))
        raise ConfigError(f"{given} is for several engines: say how many with --replicas")
    address = cluster.pop("ray_address", None)
    note(f"starting {cluster['num_replicas']} engines of {model_name(settings)}")
    run_cluster(settings, config, ClusterConfig(**cluster), ray_address=address, tell=note)
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


def _log_to_stderr() -> None:
    """Lines of requests, and warnings of the HTTP server."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name, level in (("jaxllm.server", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
