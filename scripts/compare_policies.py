"""Which policy should be the default: candidates over arrivals, data, outputs, links and host pools.

    python scripts/compare_policies.py --samples benchmarks/profile-cpu-samples.json --out-dir out/policies
    python scripts/compare_policies.py --parts devices --requests 200 --out-dir out/devices

Part `arrivals`: every combination of order, victim, who returns first and reserve, and `adaptive` with one
answer changed, beside the published systems, those that copy also with copies overlapped; all at once, in
closed loops, and with Poisson and gamma arrivals. Part `devices`: presets, published systems and a few of the
candidates on other links, with other host pools and longer outputs. Simulated, with the noise of a real
profile (--samples) or none; interrupted, it goes on where it was (`cells.jsonl`). Writes results.json and
report.md, and a figure of the Pareto fronts of part `arrivals`; `--parts devices` alone draws none.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from importlib.metadata import version

from policies.cells import MODEL, make_cells, run_cell
from policies.report import MEASURES, report
from sweep.options import list_of
from sweep.simulated import DEVICE, Device, run_all

from jaxllm.errors import ConfigError
from jaxllm.predictors.samples import load_samples
from jaxllm.research.bench.results import command_line, write_json
from jaxllm.system.output_files import NewFolder, OutputParser

PARTS = ("arrivals", "devices")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=list_of(str), default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seeds", type=list_of(int), default="0", help="default: %(default)s")
    parser.add_argument("--samples", help="measurements of a real profile, whose noise to add")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument(
        "--out-dir", type=NewFolder("results.json", "report.md", journals=["cells.jsonl"]), required=True
    )
    args = parser.parse_args(argv)
    if not set(args.parts) <= set(PARTS):
        parser.error(f"--parts {','.join(args.parts)}: name some of {', '.join(PARTS)}")
    if args.requests < 1 or args.jobs < 1 or min(args.seeds) < 0:
        parser.error("--requests and --jobs must be at least 1, --seeds at least 0")
    if args.samples is not None:
        try:
            load_samples(args.samples)
        except ConfigError as error:
            parser.error(f"--samples: {error}")
    return args


def main(argv: list[str] | None = None) -> None:
    """Simulate, and write JSON, figure and report."""
    args = parse_args(argv)
    command = command_line(
        ["python", "scripts/compare_policies.py", *(sys.argv[1:] if argv is None else argv)]
    )
    started = time.perf_counter()
    cells = make_cells(args.parts, num_requests=args.requests, seeds=args.seeds, samples=args.samples)
    rows = run_all(cells, run_cell, jobs=args.jobs, journal=args.out_dir / "cells.jsonl")
    noise = (
        "without noise" if args.samples is None else f"with the noise of `{pathlib.Path(args.samples).name}`"
    )
    facts = (
        f"Simulated: `{Device(MODEL).costs()!r}`, {noise}; {args.requests} requests a run, "
        f"seeds {args.seeds}, medians."
    )
    kept = ("part", "policy", "dataset", "outputs", "setting", "seed", *MEASURES)
    values = {
        "command": command,
        "device": DEVICE,
        "seconds_of_last_start": round(time.perf_counter() - started, 1),
        "versions": {"jaxllm": version("jaxllm"), "python": sys.version.split()[0]},
        "cells": [{name: row[name] for name in kept} for row in rows],
    }
    write_json(args.out_dir / "results.json", values)
    text = report(rows, command, facts, args.out_dir / "fronts.png")
    (args.out_dir / "report.md").write_text(text, encoding="utf-8")
    print(f"{len(rows)} simulations in {values['seconds_of_last_start']} s; see {args.out_dir / 'report.md'}")


if __name__ == "__main__":
    main()
