"""Options of commands that read traces: what becomes of rows that are too long, or cannot be read."""

from __future__ import annotations

import argparse
from typing import Any, Literal


def add_of_rows(parser: Any) -> None:
    """Add `--clip`, `--skip` and `--on-bad` to a parser or a group."""
    too_long = parser.add_mutually_exclusive_group()
    too_long.add_argument("--clip", action="store_true", help="cut requests of --trace that are too long")
    too_long.add_argument("--skip", action="store_true", help="leave them out")
    add_on_bad(parser)


def add_on_bad(parser: Any) -> None:
    """Add `--on-bad` alone."""
    parser.add_argument(
        "--on-bad",
        choices=("raise", "skip"),
        help="rows of a file that cannot be read are an error, or are left out (default: raise)",
    )


def too_long_of(args: argparse.Namespace) -> Literal["raise", "clip", "skip"]:
    """What `--clip` and `--skip` say, as `jaxllm.research.workloads.fit_trace` takes it."""
    return "clip" if args.clip else "skip" if args.skip else "raise"
