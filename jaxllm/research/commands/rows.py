"""Options of commands that read traces: how a file is read, and what becomes of rows that do not fit."""

from __future__ import annotations

import argparse
from typing import Any, Literal

from jaxllm.commands.needs import only_with

_READING: tuple[tuple[str, Any, str, str], ...] = (
    ("time-unit", str, "UNIT", "of timestamps in a trace: s or ms (default: ms beside hash_ids, else s)"),
    ("hash-block-len", int, "N", "tokens that one of hash_ids stands for (default: 512)"),
    ("benchmark", int, "N", "which of guidellm's benchmarks, from 0"),
)
_NAMES = ("time_unit", "hash_block_len", "benchmark", "on_bad")


def add_of_traces(parser: argparse.ArgumentParser, group: Any, trace: str | None, *others: str) -> None:
    """Add what says how a trace is read: `reading_of` and `too_long_of`.

    Args:
        parser: of the command.
        group: where they are listed: of the parser, or the parser.
        trace: the option that names a trace, without which they do nothing; None if the command sees to that.
        others: options that name other files, whose rows `--on-bad` is of, too.
    """
    for name, convert, metavar, text in _READING:
        group.add_argument(f"--{name}", type=convert, metavar=metavar, help=text)
    too_long = group.add_mutually_exclusive_group()
    too_long.add_argument("--clip", action="store_true", help="cut requests that are too long")
    too_long.add_argument("--skip", action="store_true", help="leave them out")
    group.add_argument(
        "--on-bad",
        choices=("raise", "skip"),
        help="rows of a file that cannot be read are an error, or are left out (default: raise)",
    )
    if trace is not None:
        only_with(parser, trace, options=("time_unit", "hash_block_len", "benchmark"))
        only_with(parser, trace, *others, options=("on_bad",))


def reading_of(args: argparse.Namespace) -> dict[str, Any]:
    """How files are read, as `jaxllm.research.workloads.load_trace` takes it: what was given alone."""
    return {name: getattr(args, name) for name in _NAMES if getattr(args, name) is not None}


def too_long_of(args: argparse.Namespace) -> Literal["raise", "clip", "skip"]:
    """What `--clip` and `--skip` say, as `jaxllm.research.workloads.fit_trace` takes it."""
    return "clip" if args.clip else "skip" if args.skip else "raise"
