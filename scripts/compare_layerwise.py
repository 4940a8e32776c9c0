"""What bringing blocks back layer by layer would be worth to conversations, simulated.

    python scripts/compare_layerwise.py --out-dir out/layerwise

The engine brings blocks from host memory as a whole, beside the steps of others, and a request computes when
all of its own have come. Layer by layer (Pensieve, CachedAttention) it would compute the first layers while
the others are on their way. Copies by the step's own program, which XLA can overlap, begin with the step;
those of a step that were cut into several programs could begin before it, as whole blocks do. Conversations,
rooflines and memories are those of `scripts/compare_caches.py`; layers are of equal size, and nothing is lost
between them. Writes results.json and report.md; interrupted, it goes on where it was (cells.jsonl).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from importlib.metadata import version
from typing import Any

from compare_caches import DEVICE, GPU_BYTES, HOST_BYTES, NUM_DEVICES, Cell, costs_of, run_cell
from sweep.options import list_of
from sweep.simulated import run_all

from jaxllm.research.bench.results import command_line, write_json
from jaxllm.system.output_files import NewFolder, OutputParser

SYSTEMS = ("adaptive, copies at once", "pensieve")
"""Systems of `compare_caches` whose requests begin at once, so that their steps wait for copies."""
COPIES: dict[str, tuple[int | None, bool]] = {
    "whole": (1, False),
    "layers, by the step's program": (None, True),
    "4 groups of layers, ahead": (4, False),
    "layers, ahead": (None, False),
}
"""Groups of layers that come one by one, None for each layer, and whether the step's own program copies.

Others begin beside the step before, as whole blocks do.
"""


@dataclasses.dataclass(frozen=True)
class LayerCell(Cell):
    """One simulation."""

    copies: str


def run_layer_cell(cell: LayerCell) -> dict[str, Any]:
    """Simulate one cell."""
    num_groups, in_step = COPIES[cell.copies]
    num_groups = num_groups or costs_of(cell.model).model.num_layers
    return run_cell(cell, num_layer_groups=num_groups, copies_in_step=in_step)


def report(rows: list[dict[str, Any]], command: str) -> str:
    """Markdown: a table of all cells; ratios are to the same model and rate under `adaptive`."""
    lines = [
        "# Blocks brought back layer by layer",
        "",
        f"Command: `{command}`. Simulated: rooflines of {DEVICE}, {GPU_BYTES / 1e9:g} GB of KV and "
        f"{HOST_BYTES / 1e9:g} GB of host memory for each. First tokens: mean seconds of turns after the "
        "first; latency: mean seconds by output token; waited: seconds in which the device waited for "
        "copies; ratios are to the first row of a model and rate.",
        "",
        "| model | conversations/s | system | copies | on host | first token of later turns | ratio "
        "| latency | ratio | tokens/s | waited |",
        "|---|---:|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for _, of_cell in itertools.groupby(rows, key=lambda row: (row["model"], row["rate"])):
        cell = list(of_cell)
        first, latency = (cell[0][key] for key in ("later_first_token_seconds", "seconds_per_token"))
        lines += [
            f"| {row['model']} | {row['rate']:g} | {row['system']} "
            f"| {row['copies']} | {row['share_found_on_host']:.0%} "
            f"| {row['later_first_token_seconds']:.4f} | {row['later_first_token_seconds'] / first:.3f} "
            f"| {row['seconds_per_token']:.4f} | {row['seconds_per_token'] / latency:.3f} "
            f"| {row['tokens_per_second']:.0f} | {row['copy_stall_seconds']:.1f} |"
            for row in cell
        ]
    return "\n".join([*lines, ""])


def main(argv: list[str] | None = None) -> None:
    """Simulate, and write JSON and report."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=400)
    parser.add_argument(
        "--cells",
        type=list_of(str),
        default="opt-13b:1,opt-13b:1.5,opt-66b:1,llama-2-70b:4",
        help="MODEL:RATE, conversations that begin in a second (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument(
        "--out-dir", type=NewFolder("results.json", "report.md", journals=["cells.jsonl"]), required=True
    )
    args = parser.parse_args(argv)
    pairs = [text.partition(":") for text in args.cells]
    if args.conversations < 1 or args.jobs < 1 or args.seed < 0:
        parser.error("--conversations and --jobs must be positive, --seed at least 0")
    if not {model for model, _, _ in pairs} <= NUM_DEVICES.keys():
        parser.error(f"--cells: MODEL:RATE of {', '.join(NUM_DEVICES)}")
    command = command_line(
        ["python", "scripts/compare_layerwise.py", *(sys.argv[1:] if argv is None else argv)]
    )
    started = time.perf_counter()
    cells = [
        LayerCell(system, model, float(rate), args.conversations, args.seed, copies)
        for model, _, rate in pairs
        for system, copies in [("adaptive", "whole"), *itertools.product(SYSTEMS, COPIES)]
    ]
    rows = run_all(cells, run_layer_cell, jobs=args.jobs, journal=args.out_dir / "cells.jsonl")
    values = {
        "command": command,
        "device": DEVICE,
        "seconds_of_last_start": round(time.perf_counter() - started, 1),
        "versions": {"jaxllm": version("jaxllm"), "python": sys.version.split()[0]},
        "rows": rows,
    }
    write_json(args.out_dir / "results.json", values)
    (args.out_dir / "report.md").write_text(report(rows, command), encoding="utf-8")
    print(f"{len(rows)} simulations in {values['seconds_of_last_start']} s; see {args.out_dir / 'report.md'}")


if __name__ == "__main__":
    main()
