"""`jaxllm replay-oracle`: decisions recorded from vLLM's own schedulers, and the first one that differs."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxllm.errors import ConfigError, reason
from jaxllm.research.bench.oracles import first_difference
from jaxllm.system.json_text import parse


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command, and add its options."""
    parser.description = (
        "Replay decisions recorded from vLLM's own schedulers, such as tests/data/oracles has: those of "
        "vLLM 0.2.5 through preset vllm, those of V1 (0.32) through vllm_v1. Exits with 1 if one differs."
    )
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="file of recorded decisions")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Say of each file what differs first; returns the exit code."""
    status = 0
    for path in args.traces:
        try:
            found = first_difference(parse(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
            raise ConfigError(f"{path} is no record of decisions: {reason(error)}") from error
        print(f"{path}: {'the same decisions' if found is None else found}")
        status = status or int(found is not None)
    return status
