"""`jaxllm generate --ray`: the same for data sets, on all nodes of a Ray cluster."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from typing import Any

from jaxllm.commands.needs import only_with
from jaxllm.commands.options import note
from jaxllm.commands.signals import signals_as_interrupts
from jaxllm.errors import ConfigError
from jaxllm.sampling.params import SamplingParams

EXIT_INTERRUPTED = 130
_OPTIONS: Mapping[str, tuple[type, str, str]] = {
    "ray_address": (
        str,
        "ADDRESS",
        "of the cluster (default: RAY_ADDRESS, one that runs here, or a new one)",
    ),
    "num_workers": (int, "N", "engines (default: as many as there is room for)"),
    "gpus_per_worker": (
        float,
        "F",
        "GPUs of an engine (default: of each device one, or 0 if there are none)",
    ),
    "cpus_per_worker": (int, "N", "processors of an engine without a GPU (default: all of a node)"),
    "batch_size": (int, "N", "rows that are answered and repeated as one (default: 256)"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add `--ray`, and the options that go with it."""
    group = parser.add_argument_group(
        "options of clusters",
        "With --ray, --input is .jsonl, .ndjson, .parquet or a folder of these, a bad row is answered by an "
        "error, and --output is needed: a .jsonl file, in order, a folder of Parquet (.parquet) or one of "
        "JSON Lines.",
    )
    group.add_argument("--ray", action="store_true", help="run on a Ray cluster (extra: ray)")
    for name, (convert, metavar, text) in _OPTIONS.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=convert, metavar=metavar, default=argparse.SUPPRESS, help=text)
    only_with(parser, "ray", options=_OPTIONS)


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of clusters that were given, but for `--ray`."""
    return {name: getattr(args, name) for name in _OPTIONS if hasattr(args, name)}


def run(args: argparse.Namespace, sampling_params: SamplingParams, settings: Mapping[str, Any]) -> int:
    """Answer a data set; returns the exit code."""
    from jaxllm.cluster import GenerateResult, generate
    from jaxllm.cluster.ray_extra import require_ray
    from jaxllm.cluster.shards import input_files

    if args.prompts or args.text or args.input is None or args.output is None:
        raise ConfigError("--ray is for data sets: name one with --input and where answers go with --output")
    if args.where or args.rows or args.chat_template:
        raise ConfigError("--where, --rows and --chat-template are of one engine: leave them out with --ray")
    if args.compile_report or "ledger" in settings:
        raise ConfigError("--compile-report and --ledger are of one engine, and with --ray there are several")
    input_files(args.input)
    named = {"prompt": args.column, "id": args.id_column}
    columns = {key: name for key, name in named.items() if name is not None}
    options = given_options(args)
    address = options.pop("ray_address", None)
    ray = require_ray("ray.data")
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    ray.init(address=address, log_to_driver=not args.quiet, logging_level=logging.WARNING)
    try:
        with signals_as_interrupts():
            result = generate(
                args.input,
                sampling_params,
                output=args.output,
                resume=args.resume,
                chat=args.chat,
                show_progress=not args.quiet,
                columns=columns or None,
                **options,
                **settings,
            )
    except (KeyboardInterrupt, SystemExit) as error:
        note("interrupted: run again with --resume to continue")
        if isinstance(error, SystemExit):
            raise
        return EXIT_INTERRUPTED
    assert isinstance(result, GenerateResult)  # there is an output
    if not args.quiet:
        bad = f"; {result.num_errors} of these rows were bad" if result.num_errors else ""
        note(f"{result.num_rows} rows are in {args.output}, {result.num_answered} of them answered now{bad}")
    return 0
