"""Swap, recompute, or choose: simulated over host bandwidth, host pool and output length.

    python scripts/sweep_actions.py --samples benchmarks/profile-cpu-samples.json --out-dir out/sweep
    python scripts/sweep_actions.py --arrivals closed:128 --out-dir out/closed
    python scripts/sweep_actions.py --parts near --near-of out/sweep/results.json --requests 1200 \\
        --samples benchmarks/profile-cpu-samples.json --out-dir out/near

Part `actions`: always swap (while it fits), always recompute, the adaptive choice, the best by expected
costs and hindsight, with everything else alike, in every cell; the link's speed goes from far too slow to far
too fast. Part `near`: the cells near a crossover of an earlier sweep once more, on traces as long as one
likes.

The device is a roofline (`jaxllm.predictors.roofline`) times noise: ratios measured / predicted of a real
profile. Predictors are fitted to other noisy samples and corrected while they run, as the engine's are.
Without --samples there is no noise and predictions are exact. Writes results.json and report.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from sweep.cells import (
    ALL_DATASETS,
    ALL_MODELS,
    HOST_BLOCKS,
    LINK_SPEEDS,
    OUTPUT_LENGTHS,
    make_cells,
    run_cell,
)
from sweep.options import list_of
from sweep.report import load_near, places, report
from sweep.simulated import DEVICE, MAX_MODEL_LEN, run_all

from jaxllm.errors import ConfigError
from jaxllm.predictors.samples import load_samples
from jaxllm.research.bench.results import command_line, write_json
from jaxllm.research.workloads import parse_arrivals
from jaxllm.system.output_files import NewFolder, OutputParser

PARTS = ("actions", "near")
OPTIONS: dict[str, tuple[Callable[[str], Any], Any, str]] = {
    "models": (str, ALL_MODELS[:1], "actions"),
    "datasets": (str, ("chatbot", "summary"), "actions"),
    "output-lengths": (int, OUTPUT_LENGTHS, "actions"),
    "host-blocks": (int, HOST_BLOCKS, "actions"),
    "link-speeds": (float, LINK_SPEEDS, "actions"),
}
"""Options of one part: type of the values, which go with commas, default, and the part."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts",
        type=list_of(str),
        default="actions",
        help="some of " + ", ".join(PARTS) + " (default: %(default)s)",
    )
    parser.add_argument(
        "--near-of",
        type=pathlib.Path,
        nargs="+",
        help="near: results.json of the earlier sweeps, whose cells are taken",
    )
    for name, (kind, default, part) in OPTIONS.items():
        shown = ",".join(map(str, default))
        parser.add_argument(f"--{name}", type=list_of(kind), help=f"of {part} (default: {shown})")
    parser.add_argument(
        "--arrivals", default="all", help="all, poisson:RATE, gamma:RATE:CV, closed:CLIENTS[:THINK]"
    )
    parser.add_argument("--requests", type=int, default=300, help="more for short outputs; see the report")
    parser.add_argument(
        "--seeds", type=list_of(int), default="0,1,2,3,4", help="comma-separated (default: %(default)s)"
    )
    parser.add_argument("--samples", help="measurements of a real profile, whose noise to add")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument(
        "--out-dir", type=NewFolder("results.json", "report.md", journals=["cells.jsonl"]), required=True
    )
    args = parser.parse_args(argv)
    if not set(args.parts) <= set(PARTS):
        parser.error(f"--parts {','.join(args.parts)}: name some of {', '.join(PARTS)}")
    for name, (_, default, part) in OPTIONS.items():
        field = name.replace("-", "_")
        if getattr(args, field) is None:
            setattr(args, field, list(default))
        elif part not in args.parts:
            parser.error(f"--{name} is of part {part}, not of {', '.join(args.parts)}")
    for name, known in (("models", ALL_MODELS), ("datasets", ALL_DATASETS)):
        values = getattr(args, name)
        if not set(values) <= set(known):
            parser.error(f"--{name} {','.join(values)}: name some of {', '.join(known)}")
    if ("near" in args.parts) != (args.near_of is not None):
        parser.error("--parts near and --near-of RESULTS go together")
    if args.requests < 1 or args.jobs < 1:
        parser.error("--requests and --jobs must be at least 1")
    if min(args.output_lengths) < 1 or max(args.output_lengths) > MAX_MODEL_LEN // 2:
        parser.error(f"--output-lengths must be from 1 to {MAX_MODEL_LEN // 2}")
    if min(args.host_blocks) < 0 or not all(0 < speed < math.inf for speed in args.link_speeds):
        parser.error("--host-blocks start at 0; --link-speeds must be above 0, and finite")
    try:
        parse_arrivals(args.arrivals)
        if args.samples is not None:
            load_samples(args.samples)
    except ConfigError as error:
        parser.error(str(error))
    return args


def main(argv: list[str] | None = None) -> None:
    """Simulate, and write JSON and the report."""
    args = parse_args(argv)
    args.command = command_line(
        ["python", "scripts/sweep_actions.py", *(sys.argv[1:] if argv is None else argv)]
    )
    args.out_dir.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    near = [
        (place.model, place.dataset, place.output, place.host, place.speed)
        for path in args.near_of or ()
        for place in load_near(path)
    ]
    if args.near_of and not near:
        sys.exit("--near-of: no cell of these sweeps is near a crossover")
    cells = make_cells(
        args.parts,
        args.models,
        args.datasets,
        args.requests,
        args.seeds,
        args.samples,
        output_lengths=args.output_lengths,
        host_blocks=args.host_blocks,
        link_speeds=args.link_speeds,
        arrivals=args.arrivals,
        near=near,
    )
    rows = run_all(cells, run_cell, jobs=args.jobs, journal=args.out_dir / "cells.jsonl")
    values = {
        "command": args.command,
        "models": sorted({cell.model for cell in cells}),
        "device": DEVICE,
        "seconds_of_last_start": round(time.perf_counter() - started, 1),
        "versions": {"jaxllm": version("jaxllm"), "python": sys.version.split()[0]},
        "places": [{**dataclasses.asdict(place), "share": place.share} for place in places(rows)],
        "near": [{**dataclasses.asdict(place), "share": place.share} for place in places(rows, "near")],
    }
    write_json(args.out_dir / "results.json", values)
    (args.out_dir / "report.md").write_text(report(rows, args), encoding="utf-8")
    print(f"{len(rows)} simulations in {values['seconds_of_last_start']} s; see {args.out_dir / 'report.md'}")


if __name__ == "__main__":
    main()
