"""`jaxllm serve --replicas`: the same server for several engines, on a Ray cluster."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jaxllm.commands.options import model_name, note
from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from jaxllm.server.config import ServerConfig

_OPTIONS: Mapping[str, tuple[str, Callable[[str], Any], str, str]] = {
    "max_replicas": ("max_replicas", int, "N", "let their number follow what is queued, up to N"),
    "target_queued_tokens": ("target_queued_tokens", int, "N", "of each, for that (default: 16384)"),
    "routing": ("policy", str, "NAME", "prefix, two_choices, prefix_only or round_robin (default: prefix)"),
    "ingresses": ("num_ingresses", int, "N", "processes that route requests (default: 1)"),
    "gpus_per_replica": ("gpus_per_replica", float, "F", "of an engine (default: 1, or 0 if there are none)"),
    "cpus_per_replica": ("cpus_per_replica", int, "N", "of an engine without a GPU (default: its share)"),
}
"""Options, and the fields of `ClusterConfig` that they set."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add `--replicas`, and the options that go with it."""
    group = parser.add_argument_group("options of clusters")
    group.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="engines, each with its server, on a Ray cluster (extra: ray)",
    )
    group.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        default=argparse.SUPPRESS,
        help="of the cluster (default: RAY_ADDRESS, one that runs here, or a new one)",
    )
    for name, (_, convert, metavar, text) in _OPTIONS.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=convert, metavar=metavar, default=argparse.SUPPRESS, help=text)


def check_options(args: argparse.Namespace) -> None:
    """Verify that options of clusters come with `--replicas`.

    Raises:
        ConfigError: one does not.
    """
    given = [name for name in (*_OPTIONS, "ray_address") if hasattr(args, name)]
    if given and args.replicas is None:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ConfigError(f"{flags} are options of clusters: add --replicas")


def run(args: argparse.Namespace, settings: Mapping[str, Any], server: ServerConfig) -> int:
    """Serve until told to stop; returns the exit code.

    Args:
        args: the command's.
        settings: of the engines.
        server: how each replica serves.
    """
    from jaxllm.cluster import serve

    if args.compile_report or "ledger" in settings:
        raise ConfigError("--compile-report and --ledger are of one engine, and there are several replicas")
    fields = {field: getattr(args, name) for name, (field, *_) in _OPTIONS.items() if hasattr(args, name)}
    cluster = serve.ClusterConfig(num_replicas=args.replicas, **fields)
    note(f"loading {model_name(settings)} in {args.replicas} replicas")
    serve.run(settings, server, cluster, ray_address=getattr(args, "ray_address", None), tell=note)
    return 0
