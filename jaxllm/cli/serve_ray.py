"""`jaxllm serve --replicas`: the same server for several engines, on a Ray cluster."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxllm.cluster.config import ClusterConfig
from jaxllm.commands.needs import only_with
from jaxllm.commands.options import model_name, note
from jaxllm.errors import ConfigError
from jaxllm.system.options import add_flags, given, options_of

if TYPE_CHECKING:
    from jaxllm.server.config import ServerConfig


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add `--replicas`, and the options that go with it."""
    group = parser.add_argument_group("options of clusters")
    group.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        default=argparse.SUPPRESS,
        help="of the cluster (default: RAY_ADDRESS, one that runs here, or a new one)",
    )
    add_flags(group, ClusterConfig)
    own = {name for name, _, declared in options_of(ClusterConfig) if declared.flag is not None}
    only_with(parser, "num_replicas", options={*own, "ray_address"} - {"num_replicas"})
    only_with(parser, "max_replicas", options=("target_queued_tokens",))


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
    cluster = ClusterConfig(**given(args, ClusterConfig))
    note(f"loading {model_name(settings)} in {cluster.num_replicas} replicas")
    serve.run(settings, server, cluster, ray_address=getattr(args, "ray_address", None), tell=note)
    return 0
