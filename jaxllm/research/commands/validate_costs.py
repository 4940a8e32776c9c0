"""`jaxllm validate-costs`: costs from measured kernels against servers that others measured."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from jaxllm.commands.options import note
from jaxllm.errors import ConfigError
from jaxllm.predictors.base import check_number
from jaxllm.research.bench.results import command_line, write_json
from jaxllm.research.validate.fitting import FITTED, START, fit
from jaxllm.research.validate.playing import World
from jaxllm.research.validate.reading import read_records
from jaxllm.research.validate.records import Record
from jaxllm.research.validate.report import Row, as_json, as_markdown, describe_left_out, validate
from jaxllm.system.output_files import add_overwrite, check_writable

_SECONDS = {
    "host_seconds": "of the host in each step",
    "layer_seconds": "of small kernels in each layer of a step",
    "sync_seconds": "that GPUs wait for each other in each all-reduce",
    "ingress_seconds": "from a client's sending until the scheduler sees a request",
    "token_seconds": "more of that for each token of a prompt",
    "client_seconds": "from an answer until a client of a closed loop sends the next request",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command, and add its options."""
    parser.description = (
        "Simulate vLLM's scheduler on costs from measured kernels (`SiliconCostModel`) under loads that "
        "servers on GPUs were measured under, and report the errors of request latency, time per token, "
        "first token and throughput. Files are JSON lists of runs with stages of constant rates, or of "
        "closed loops, or a CSV of single points; benchmarks/silicon has some. Needs no GPU."
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what was measured")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write all of it there")
    parser.add_argument(
        "--records", metavar="TEXT", default="", help="only records with this text in their names"
    )
    for name, text in _SECONDS.items():
        default = getattr(FITTED, name)
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=float, metavar="S", help=f"{text} (default: {default:g})")
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--unfitted", action="store_true", help="start from guesses made before any server was looked at"
    )
    group.add_argument(
        "--fit",
        action="store_true",
        help="fit host, sync and ingress seconds to the files first, from guesses",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts (default: 0)")
    add_overwrite(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate, print, and return the exit code."""
    check_writable({"--json": args.json}, overwrite=args.overwrite)
    given = {name: getattr(args, name) for name in _SECONDS if getattr(args, name) is not None}
    for name, seconds in given.items():
        check_number(f"--{name.replace('_', '-')}", seconds, 0.0, 1.0)
    world = dataclasses.replace(START if args.unfitted or args.fit else FITTED, **given)
    records = [record for path in args.files for record in read_records(path) if args.records in record.name]
    if not records:
        raise ConfigError(f"--records {args.records!r}: no record has that in its name")
    if args.fit:
        world = fit(records, world, seed=args.seed, tell=note)
    rows = [_validated(record, world, args.seed) for record in records]
    print(as_markdown(rows))
    content = as_json(rows, world)
    for line in describe_left_out(content):
        note(line)
    if args.json is not None:
        about = {"command": command_line(["jaxllm", *args.command_line])}
        write_json(args.json, about | content)
    return 0


def _validated(record: Record, world: World, seed: int) -> Row:
    if sys.stderr.isatty():
        note(record.name)
    return validate(record, world, seed=seed)
