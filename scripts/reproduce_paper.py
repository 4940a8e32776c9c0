"""Re-runs the evaluation of the AdaptiveLLM paper in simulation, and sets its numbers beside ours.

    python scripts/reproduce_paper.py --out-dir out/paper
    python scripts/reproduce_paper.py --parts table3 --requests 200 --out-dir out/quick

Parts: `table3` (speed-ups at 64 output tokens), `fig3` (throughput against the output length) and `fig4`
(weighted turnaround against the batch limit). Each writes its cells to `results.json`, a plot, and a section
of `report.md`. The simulator drives the engine's own scheduler; its device is a roofline of an A800-80GB-PCIe
from data-sheet constants and stated efficiencies (`jaxllm.predictors.roofline`), nothing is fitted to the
paper's figures.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import multiprocessing
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from jaxllm.bench.command import command_line
from jaxllm.predictors.base import model_shape
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.roofline import RooflineCostModel
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.presets import make_preset
from jaxllm.simulator.run import simulate
from jaxllm.workloads import make_trace

DEVICE = "A800-80GB-PCIe"
MODELS = ("opt-13b", "opt-30b", "llama-13b", "llama-32.5b")
DATASETS = ("chatbot", "alpaca", "summary")
# What the published systems do with copies: they stop the device. Ours run beside it.
OVERLAP = {"vllm": False, "vllm_swap": False, "paper": False, "adaptive": True}
NUM_GPU_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE = 128, 64, 16
MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 2048, 256, 2560
OUTPUT_LENGTHS = (8, 16, 32, 64, 128, 256)
BATCH_LIMITS = (8, 16, 32, 64, 128)

# Table 3 of the paper: speed-up of AdaptiveLLM over vLLM and over vLLM_s, by model and data set.
PAPER_TABLE3 = {
    "opt-13b": {"chatbot": (1.38, 2.46), "alpaca": (1.36, 2.55), "summary": (1.15, 2.50)},
    "opt-30b": {"chatbot": (1.27, 1.98), "alpaca": (1.22, 1.99), "summary": (1.11, 1.64)},
    "llama-13b": {"chatbot": (1.28, 2.28), "alpaca": (1.40, 2.37), "summary": (1.17, 2.12)},
    "llama-32.5b": {"chatbot": (1.28, 1.95), "alpaca": (1.23, 2.13), "summary": (1.09, 2.18)},
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One simulation."""

    part: str
    model: str
    dataset: str
    preset: str
    max_output_len: int
    max_num_seqs: int
    outputs: str
    num_requests: int
    seed: int


def run_cell(cell: Cell) -> dict[str, Any]:
    """Simulate one cell; the result holds the cell's fields and the summary."""
    costs = RooflineCostModel(model_shape(cell.model), device_spec(DEVICE), block_size=BLOCK_SIZE)
    trace = make_trace(
        cell.dataset, cell.num_requests, cell.max_output_len, outputs=cell.outputs, seed=cell.seed
    )
    config = SchedulerConfig(
        num_gpu_blocks=NUM_GPU_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=cell.max_num_seqs,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        num_host_blocks=NUM_HOST_BLOCKS,
    )
    result = simulate(
        trace, config, make_preset(cell.preset, costs), costs, overlap_swaps=OVERLAP[cell.preset]
    )
    return {**dataclasses.asdict(cell), **result.summary()}


def make_cells(parts: Sequence[str], num_requests: int, seeds: Sequence[int]) -> list[Cell]:
    """Every simulation of the parts."""
    cells = []
    for seed, preset in itertools.product(seeds, OVERLAP):
        if "table3" in parts:
            for model, dataset, outputs in itertools.product(MODELS, DATASETS, ("max", "uniform")):
                cells.append(
                    Cell("table3", model, dataset, preset, 64, MAX_NUM_SEQS, outputs, num_requests, seed)
                )
        if "fig3" in parts:
            for dataset, length in itertools.product(DATASETS, OUTPUT_LENGTHS):
                cells.append(
                    Cell("fig3", MODELS[0], dataset, preset, length, MAX_NUM_SEQS, "max", num_requests, seed)
                )
        if "fig4" in parts:
            for dataset, limit in itertools.product(DATASETS, BATCH_LIMITS):
                cells.append(Cell("fig4", MODELS[0], dataset, preset, 64, limit, "max", num_requests, seed))
    return cells


def median_of(rows: Sequence[dict[str, Any]], value: str, **where: Any) -> float:
    """Median over seeds of the cells that match."""
    found = [row[value] for row in rows if all(row[name] == wanted for name, wanted in where.items())]
    if not found:
        raise KeyError(f"no cell with {where}")
    return statistics.median(found)


def table3(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The 24 ratios of each output rule beside the paper's, with what the time went to."""
    lines = ["## Speed-up at 64 output tokens (Table 3)", ""]
    for outputs in ("max", "uniform"):
        lines += [
            f"Outputs: {'all of 64 tokens' if outputs == 'max' else 'uniform in 16 to 64 tokens'}.",
            "",
            "| model | data | vLLM: paper's | preset paper | preset adaptive | vLLM_s: paper's | "
            "preset paper | preset adaptive |",
            "|---|---|---:|---:|---:|---:|---:|---:|",
        ]
        for model, dataset in itertools.product(MODELS, DATASETS):
            where = {"part": "table3", "model": model, "dataset": dataset, "outputs": outputs}
            rate = {
                preset: median_of(rows, "output_tokens_per_second", preset=preset, **where)
                for preset in OVERLAP
            }
            theirs = PAPER_TABLE3[model][dataset]
            cells = [
                cell
                for baseline, printed in zip(("vllm", "vllm_swap"), theirs, strict=True)
                for cell in (
                    f"{printed:.2f}",
                    f"{rate['paper'] / rate[baseline]:.2f}",
                    f"{rate['adaptive'] / rate[baseline]:.2f}",
                )
            ]
            lines.append(f"| {model} | {dataset} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += [
        "Where the time goes, seconds (outputs of 64 tokens, first seed):",
        "",
        "| model | data | preset | prefill | recompute | decode | swap stall | decode batch | preemptions "
        "(swapped) |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    first_seed = rows[0]["seed"]
    for row in rows:
        if row["part"] == "table3" and row["outputs"] == "max" and row["seed"] == first_seed:
            spent = row["seconds_spent"]
            lines.append(
                f"| {row['model']} | {row['dataset']} | {row['preset']} | {spent['prefill']:.1f} | "
                f"{spent['recompute']:.1f} | {spent['decode']:.1f} | {spent['swap_stall']:.1f} | "
                f"{row['mean_decode_batch']:.1f} | {row['num_preemptions']} ({row['num_swaps']}) |"
            )
    return [*lines, ""]


def series(part: str) -> tuple[str, str, str, tuple[int, ...]]:
    """Title, the cell's field on the x axis, the value on the y axis, and the x values."""
    if part == "fig3":
        title, value = "Throughput against the output length (Fig. 3)", "output_tokens_per_second"
        return title, "max_output_len", value, OUTPUT_LENGTHS
    title, value = "Mean weighted turnaround against the batch limit (Fig. 4)", "mean_weighted_turnaround"
    return title, "max_num_seqs", value, BATCH_LIMITS


def figure(rows: Sequence[dict[str, Any]], part: str, path: pathlib.Path) -> list[str]:
    """A table and a plot of one figure."""
    title, x_name, y_name, values = series(part)
    lines = [f"## {title}", "", f"{MODELS[0]}, outputs all of the maximum; `{path.name}`.", ""]
    lines += ["| data | preset | " + " | ".join(map(str, values)) + " |", "|---|---|" + "---:|" * len(values)]
    curves: dict[tuple[str, str], list[float]] = {}
    for dataset, preset in itertools.product(DATASETS, OVERLAP):
        curve = [
            median_of(rows, y_name, part=part, dataset=dataset, preset=preset, **{x_name: value})
            for value in values
        ]
        curves[dataset, preset] = curve
        digits = 0 if part == "fig3" else 2
        lines.append(f"| {dataset} | {preset} | " + " | ".join(f"{y:.{digits}f}" for y in curve) + " |")
    draw(curves, values, x_name, y_name, path)
    return [*lines, ""]


def draw(
    curves: dict[tuple[str, str], list[float]],
    values: Sequence[int],
    x_name: str,
    y_name: str,
    path: pathlib.Path,
) -> None:
    """One panel for each data set."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(DATASETS), figsize=(11, 3.4), layout="constrained")
    for panel, dataset in zip(panels, DATASETS, strict=True):
        for preset in OVERLAP:
            panel.plot(values, curves[dataset, preset], marker="o", label=preset)
        panel.set_xscale("log", base=2)
        panel.set_xticks(values, map(str, values))
        panel.set_title(dataset)
        panel.set_xlabel(x_name)
        panel.set_ylim(bottom=0)
    panels[0].set_ylabel(y_name)
    panels[-1].legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def report(rows: Sequence[dict[str, Any]], args: argparse.Namespace, folder: pathlib.Path) -> str:
    """The Markdown report; draws the plots."""
    costs = RooflineCostModel(model_shape(MODELS[0]), device_spec(DEVICE), block_size=BLOCK_SIZE)
    lines = [
        "# AdaptiveLLM's evaluation, simulated",
        "",
        f"Command: `{args.command}`. {args.requests} requests, all present at time 0; seeds {args.seeds}, "
        f"medians over them. {NUM_GPU_BLOCKS} device and {NUM_HOST_BLOCKS} host blocks of {BLOCK_SIZE} "
        f"tokens, at most {MAX_NUM_SEQS} requests and {MAX_NUM_BATCHED_TOKENS} prompt tokens a step.",
        "",
        f"Device: a roofline, not a measurement. `{costs!r}`. Predictors know it exactly, so no loss here "
        "comes from wrong predictions. Prompt lengths are lognormal with the paper's means "
        "(`jaxllm.workloads.lengths`); their spread is an assumption.",
        "",
        "`vllm` decides as vLLM 0.2.5; `vllm_swap` is vLLM_s with batches whose worst case fits the host "
        "pool; `paper` is Algorithms 1 and 2 with copies that stop the device; `adaptive` is this engine's "
        "own, with copies beside computation.",
        "",
    ]
    if "table3" in args.parts:
        lines += table3(rows)
    for part in ("fig3", "fig4"):
        if part in args.parts:
            lines += figure(rows, part, folder / f"{part}.png")
    return "\n".join(lines)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="table3,fig3,fig4", help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seeds", default="0", help="comma-separated (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out-dir", type=pathlib.Path, required=True)
    args = parser.parse_args(argv)
    args.parts = args.parts.split(",")
    unknown = sorted(set(args.parts) - {"table3", "fig3", "fig4"})
    if unknown:
        parser.error(f"--parts: there is no {', '.join(unknown)}; parts are table3, fig3 and fig4")
    if args.requests < 1 or args.jobs < 1:
        parser.error("--requests and --jobs must be at least 1")
    args.seeds = [int(seed) for seed in args.seeds.split(",")]
    return args


def main(argv: list[str] | None = None) -> None:
    """Simulate, and write JSON, plots and the report."""
    args = parse_args(argv)
    words = sys.argv[1:] if argv is None else argv
    args.command = command_line(["python", "scripts/reproduce_paper.py", *words])
    folder = args.out_dir
    folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    cells = make_cells(args.parts, args.requests, args.seeds)
    if args.jobs == 1:
        rows = list(map(run_cell, cells))
    else:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
            rows = list(pool.map(run_cell, cells))
    values = {
        "command": args.command,
        "device": DEVICE,
        "seconds": round(time.perf_counter() - started, 1),
        "versions": {"jaxllm": version("jaxllm"), "python": sys.version.split()[0]},
        "cells": rows,
    }
    (folder / "results.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(report(rows, args, folder), encoding="utf-8")
    print(f"{len(rows)} simulations in {values['seconds']} s; see {folder / 'report.md'}")


if __name__ == "__main__":
    main()
