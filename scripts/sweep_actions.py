"""Swap, recompute, or choose: simulated over host bandwidth, host pool and output length.

    python scripts/sweep_actions.py --samples benchmarks/profile-cpu-samples.json --out-dir out/sweep
    python scripts/sweep_actions.py --parts policies --out-dir out/sweep
    python scripts/sweep_actions.py --parts near --near-of out/sweep/results.json --requests 1200 \\
        --samples benchmarks/profile-cpu-samples.json --out-dir out/near

Part `actions`: always swap (while it fits), always recompute, the adaptive choice and hindsight, with
everything else alike, in every cell; the link's speed goes from far too slow to far too fast. Part `near`:
the cells near a crossover of an earlier sweep once more, on traces as long as one likes. Part `policies`:
what each of the policies of preset `adaptive` is worth, one changed at a time.

The device is a roofline (`jaxllm.predictors.roofline`) times noise: ratios measured / predicted of a real
profile. Predictors are fitted to other noisy samples and corrected while they run, as the engine's are.
Without --samples there is no noise and predictions are exact. Writes results.json and report.md.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import math
import multiprocessing
import pathlib
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from sweep.cells import (
    ALL_DATASETS,
    ALL_MODELS,
    DEVICE,
    HOST_BLOCKS,
    LINK_SPEEDS,
    MAX_MODEL_LEN,
    OUTPUT_LENGTHS,
    make_cells,
    run_cell,
)
from sweep.options import list_of
from sweep.report import load_near, places, report

from jaxllm.bench.results import command_line, write_json
from jaxllm.errors import ConfigError
from jaxllm.predictors.samples import load_samples

PARTS = ("actions", "policies")
ALL_PARTS = (*PARTS, "near")
OPTIONS_OF_PARTS: dict[str, tuple[Callable[[str], Any], Any, tuple[str, ...], str]] = {
    "models": (str, ALL_MODELS[:1], PARTS, "; policies takes one"),
    "datasets": (str, ("chatbot", "summary"), ("actions",), "; policies takes all"),
    "output-lengths": (int, OUTPUT_LENGTHS, ("actions",), ""),
    "host-blocks": (int, HOST_BLOCKS, ("actions",), ""),
    "link-speeds": (float, LINK_SPEEDS, ("actions",), ""),
    "policies-output-length": (int, 64, ("policies",), ""),
    "policies-link-speed": (float, 1.0, ("policies",), ""),
}
"""Options that parts of the sweep have: type, default (several go with commas), the parts, and a remark."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts",
        type=list_of(str),
        default=",".join(PARTS),
        help="some of " + ", ".join(ALL_PARTS) + " (default: %(default)s)",
    )
    parser.add_argument(
        "--near-of",
        type=pathlib.Path,
        nargs="+",
        help="near: results.json of the earlier sweeps, whose cells are taken",
    )
    for name, (kind, default, parts, remark) in OPTIONS_OF_PARTS.items():
        several = isinstance(default, tuple)
        shown = ",".join(map(str, default)) if several else default
        parser.add_argument(
            f"--{name}",
            type=list_of(kind) if several else kind,
            help=f"of {', '.join(parts)}{remark} (default: {shown})",
        )
    parser.add_argument("--requests", type=int, default=300, help="more for short outputs; see the report")
    parser.add_argument(
        "--seeds", type=list_of(int), default="0,1,2,3,4", help="comma-separated (default: %(default)s)"
    )
    parser.add_argument("--samples", help="measurements of a real profile, whose noise to add")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out-dir", type=pathlib.Path, required=True)
    args = parser.parse_args(argv)
    if not set(args.parts) <= set(ALL_PARTS):
        parser.error(f"--parts {','.join(args.parts)}: name some of {', '.join(ALL_PARTS)}")
    for name, (_, default, parts, _) in OPTIONS_OF_PARTS.items():
        field = name.replace("-", "_")
        if getattr(args, field) is None:
            setattr(args, field, default)
        elif not set(parts) & set(args.parts):
            parser.error(f"--{name} is of parts {', '.join(parts)}, not of {', '.join(args.parts)}")
    for name, known in (("models", ALL_MODELS), ("datasets", ALL_DATASETS)):
        values = getattr(args, name)
        if not set(values) <= set(known):
            parser.error(f"--{name} {','.join(values)}: name some of {', '.join(known)}")
    if args.parts == ["policies"] and len(args.models) > 1:
        parser.error(f"part policies takes one model, not {', '.join(args.models)}")
    if ("near" in args.parts) != (args.near_of is not None):
        parser.error("--parts near and --near-of RESULTS go together")
    if args.requests < 1 or args.jobs < 1:
        parser.error("--requests and --jobs must be at least 1")
    lengths, speeds = [*args.output_lengths, args.policies_output_length], [*args.link_speeds]
    speeds.append(args.policies_link_speed)
    if min(lengths) < 1 or max(lengths) > MAX_MODEL_LEN // 2:
        parser.error(f"--output-lengths must be from 1 to {MAX_MODEL_LEN // 2}")
    if min(args.host_blocks) < 0 or not all(0 < speed < math.inf for speed in speeds):
        parser.error("--host-blocks start at 0; --link-speeds must be above 0, and finite")
    if args.samples is not None:
        try:
            load_samples(args.samples)
        except ConfigError as error:
            parser.error(f"--samples: {error}")
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
        policies_at=(args.policies_output_length, args.policies_link_speed),
        near=near,
    )
    if args.jobs == 1:
        rows = list(map(run_cell, cells))
    else:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
            rows = list(pool.map(run_cell, cells, chunksize=8))
    values = {
        "command": args.command,
        "models": sorted({cell.model for cell in cells}),
        "device": DEVICE,
        "seconds": round(time.perf_counter() - started, 1),
        "versions": {"jaxllm": version("jaxllm"), "python": sys.version.split()[0]},
        "places": [{**dataclasses.asdict(place), "share": place.share} for place in places(rows)],
        "near": [{**dataclasses.asdict(place), "share": place.share} for place in places(rows, "near")],
        "policies": [row for row in rows if row["part"] == "policies"],
    }
    write_json(args.out_dir / "results.json", values)
    (args.out_dir / "report.md").write_text(report(rows, args), encoding="utf-8")
    print(f"{len(rows)} simulations in {values['seconds']} s; see {args.out_dir / 'report.md'}")


if __name__ == "__main__":
    main()
