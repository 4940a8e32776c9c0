"""Re-runs the evaluation of the AdaptiveLLM paper, and sets its numbers beside ours.

    python scripts/reproduce_paper.py --out-dir out/paper
    python scripts/reproduce_paper.py --parts table3 --requests 200 --out-dir out/quick
    python scripts/reproduce_paper.py --executor jax --model DIR --requests 100 --out-dir out/real
    python scripts/reproduce_paper.py --executor jax --model opt-13b --load-format dummy --out-dir out/gpu

Parts: `table3` (speed-ups at 64 output tokens), `fig3` (throughput against the output length), `fig4`
(weighted turnaround against the batch limit), `errors` (Section 4.5 and Fig. 5: prediction errors, on the
measurements of --samples) and `overhead` (Section 4.6). They end in `results.json`, plots, and sections of
`report.md`.

`--executor sim` drives the engine's own scheduler with a virtual clock; its device is a roofline of an
A800-80GB-PCIe from data-sheet constants and stated efficiencies (`jaxllm.predictors.roofline`), nothing is
fitted to the paper's figures. With --samples it is as noisy as the profile they are from, and predictors are
fitted to other noisy samples and corrected while they run, as the engine's are; without, predictions are
exact. `--executor jax` runs the engine, in pools of the same size, on every --model: checkpoint folders, or
with `--load-format dummy` folders that hold only a config.json, or names of the paper's models.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import pathlib
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from paper import report as sections
from paper.cells import (
    BATCH_LIMITS,
    DATASETS,
    DEVICE,
    MAX_NUM_SEQS,
    MODELS,
    OVERLAP,
    Cell,
    load_engine,
    make_cells,
    run_cell,
    simulate_cell,
    simulated_costs,
)
from paper.models import model_folder
from sweep.options import list_of

from jaxllm.bench.results import command_line, write_json
from jaxllm.errors import ConfigError
from jaxllm.predictors.fit_report import FitReport
from jaxllm.predictors.regression import fit
from jaxllm.predictors.samples import load_samples

PARTS = ("table3", "fig3", "fig4", "errors", "overhead")


def simulate_all(cells: Sequence[Cell], samples: str | None, jobs: int) -> list[dict[str, Any]]:
    """Simulate every cell, on `jobs` processes."""
    simulate = functools.partial(simulate_cell, samples=samples)
    if jobs == 1:
        return list(map(simulate, cells))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        return list(pool.map(simulate, cells))


def run_all(args: argparse.Namespace, parts: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
    """Run every cell on the engine; returns the rows, and what they ran on.

    Rows are also appended to `cells.jsonl` as they come, so that an interrupted run loses none.
    """
    from jaxllm import hardware

    rows: list[dict[str, Any]] = []
    sources = []
    for place, model in enumerate(args.models):
        llm = load_engine(
            model_folder(model, args.load_format, args.out_dir),
            max_num_seqs=args.max_num_seqs,
            load_format=args.load_format,
            dtype=args.dtype,
        )
        name = pathlib.Path(model).resolve().name
        sources.append(f"{name} in {llm.dtype}, costs: {llm.costs_source}")
        wanted = [part for part in parts if part == "table3" or place == 0]
        cells = make_cells(
            wanted,
            [name],
            args.datasets,
            num_requests=args.requests,
            seeds=args.seeds,
            max_num_seqs=args.max_num_seqs,
            presets=args.presets,
            batch_limits=args.batch_limits,
        )
        if cells:
            run_cell(dataclasses.replace(cells[0], num_requests=min(4, args.requests)), llm)  # warm-up
        for number, cell in enumerate(cells, 1):
            row = run_cell(cell, llm)
            rows.append(row)
            with (args.out_dir / "cells.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            what = f"{cell.part} {cell.dataset} {cell.preset}"
            print(f"{name}, {number} of {len(cells)}: {what}, {row['seconds']:.1f} s", file=sys.stderr)
        del llm
    machine = hardware.describe_hardware()
    num_cut = max((row["num_cut"] for row in rows), default=0)
    cut = f" Prompts too long for a model's positions are cut: up to {num_cut} of a run." if num_cut else ""
    facts = (
        f"Device: {machine['device']} ({machine['cpu']}, {machine['cpu_count']} CPUs), the real engine; "
        f"versions {hardware.versions()}. Models: {'; '.join(sources)}. Copies run beside computation under "
        f"every preset.{cut}"
    )
    return rows, facts


def simulated_facts(samples: str | None) -> str:
    """What a simulation ran on."""
    noise = (
        "Predictors know it exactly, so no loss here comes from wrong predictions."
        if samples is None
        else "Every cost is multiplied by a ratio measured / predicted drawn from the real profile "
        f"`{pathlib.Path(samples).name}`; predictors are fitted to other noisy samples, and corrected by "
        "what steps took, and by what copies took that ran beside them, as the engine's are."
    )
    return (
        f"Device: a roofline, not a measurement. `{simulated_costs(MODELS[0])!r}`. {noise} Prompt lengths "
        "are lognormal with the paper's means (`jaxllm.workloads.lengths`); their spread is an assumption. "
        "Copies stop the device, as in the published systems, except under `adaptive`, which runs them "
        "beside computation."
    )


def fit_samples(path: str) -> tuple[dict[str, FitReport], str]:
    """Reports of all regressors on real measurements, and what these are of."""
    content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    fits = {kind: fit(samples).report for kind, samples in load_samples(path).items()}
    machine = content["hardware"]
    facts = f"{content['model']['name']} on {machine['device']} ({machine['cpu']}), `{content['command']}`"
    return fits, facts


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=list_of(str), default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--executor", choices=("sim", "jax"), default="sim")
    parser.add_argument(
        "--model", dest="models", action="append", default=[], help="with jax; may be repeated"
    )
    parser.add_argument("--load-format", default="auto", help="with jax: dummy for random weights")
    parser.add_argument("--dtype", default="auto", help="with jax")
    parser.add_argument(
        "--datasets", type=list_of(str), default=",".join(DATASETS), help="default: %(default)s"
    )
    parser.add_argument(
        "--presets", type=list_of(str), default=",".join(OVERLAP), help="default: %(default)s"
    )
    parser.add_argument(
        "--batch-limits",
        type=list_of(int),
        help=f"of fig4, those within --max-num-seqs (default: {','.join(map(str, BATCH_LIMITS))})",
    )
    parser.add_argument("--max-num-seqs", type=int, default=MAX_NUM_SEQS, help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument(
        "--seeds", type=list_of(int), default="0", help="comma-separated (default: %(default)s)"
    )
    parser.add_argument("--samples", help="measurements of a real profile (`jaxllm profile --samples`)")
    parser.add_argument("--jobs", type=int, help="processes, with sim (default: 2)")
    parser.add_argument("--out-dir", type=pathlib.Path, required=True)
    args = parser.parse_args(argv)
    for name, known in (("parts", PARTS), ("datasets", DATASETS), ("presets", tuple(OVERLAP))):
        values = getattr(args, name)
        unknown = sorted(set(values) - set(known))
        if unknown:
            parser.error(f"--{name}: there is no {', '.join(unknown)}; choose of {', '.join(known)}")
    if args.executor == "jax" and args.jobs is not None:
        parser.error("--jobs is for --executor sim: the engine runs one cell after the other")
    args.jobs = 2 if args.jobs is None else args.jobs
    if min(args.requests, args.jobs, args.max_num_seqs) < 1:
        parser.error("--requests, --jobs and --max-num-seqs must be at least 1")
    if (args.executor == "jax") != bool(args.models):
        parser.error(
            "--executor jax needs --model, and --executor sim takes none: its models are the paper's"
        )
    if args.executor == "sim" and (args.load_format, args.dtype) != ("auto", "auto"):
        parser.error("--load-format and --dtype are for --executor jax")
    if args.parts == ["errors"] and args.samples is None:
        parser.error("--parts errors needs --samples: measurements that `jaxllm profile --samples` wrote")
    if not set(args.parts) & {"table3", "fig3", "fig4"} and "overhead" in args.parts:
        parser.error("--parts overhead is about the runs of table3, fig3 or fig4: name one of them too")
    if min(args.seeds) < 0:
        parser.error(f"--seeds {args.seeds} must be at least 0")
    if args.batch_limits is not None and "fig4" not in args.parts:
        parser.error("--batch-limits is of part fig4")
    args.batch_limits = list(BATCH_LIMITS) if args.batch_limits is None else args.batch_limits
    if not set(args.batch_limits) <= set(BATCH_LIMITS):
        parser.error(f"--batch-limits {args.batch_limits}: choose of {BATCH_LIMITS}")
    if "fig4" in args.parts and min(args.batch_limits) > args.max_num_seqs:
        parser.error(f"no batch limit of fig4 is within --max-num-seqs {args.max_num_seqs}")
    if args.samples is not None:
        if args.executor == "jax" and "errors" not in args.parts:
            parser.error("--samples is for --executor sim and part errors: the engine has its own costs")
        try:
            load_samples(args.samples)
        except ConfigError as error:
            parser.error(f"--samples: {error}")
    if "table3" in args.parts and set(args.presets) != set(OVERLAP):
        parser.error("--parts table3 compares all presets: leave --presets out, or name other parts")
    return args


def main(argv: list[str] | None = None) -> None:
    """Run or simulate, and write JSON, plots and the report."""
    args = parse_args(argv)
    words = sys.argv[1:] if argv is None else argv
    command = command_line(["python", "scripts/reproduce_paper.py", *words])
    folder = args.out_dir
    folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    parts = [part for part in args.parts if part not in ("errors", "overhead")]
    is_simulated = args.executor == "sim"
    if is_simulated:
        cells = make_cells(
            parts,
            MODELS,
            args.datasets,
            num_requests=args.requests,
            seeds=args.seeds,
            max_num_seqs=args.max_num_seqs,
            presets=args.presets,
            batch_limits=args.batch_limits,
        )
        rows, facts = simulate_all(cells, args.samples, args.jobs), simulated_facts(args.samples)
    else:
        rows, facts = run_all(args, parts)
    lines = sections.introduction(command, facts, args.seeds, args.requests, args.max_num_seqs)
    if "table3" in parts:
        lines += sections.table3(rows)
    for part in ("fig3", "fig4"):
        if part in parts:
            lines += sections.figure(rows, part, folder / f"{part}.png")
    fits: dict[str, FitReport] = {}
    if "errors" in args.parts and args.samples is not None:
        fits, of_what = fit_samples(args.samples)
        lines += sections.errors(fits, of_what)
    elif "errors" in args.parts:
        lines += ["Prediction errors (Section 4.5, Fig. 5) are left out: they need --samples.", ""]
    if "overhead" in args.parts and rows:
        lines += sections.overhead(rows, is_simulated)
    values = {
        "command": command,
        "device": DEVICE if is_simulated else facts,
        "seconds": round(time.perf_counter() - started, 1),
        "versions": {"jaxllm": version("jaxllm"), "python": sys.version.split()[0]},
        "cells": rows,
        "prediction_errors": {kind: found.to_dict() for kind, found in fits.items()},
    }
    write_json(folder / "results.json", values)
    (folder / "report.md").write_text("\n".join(lines), encoding="utf-8")
    print(f"{len(rows)} runs in {values['seconds']} s; see {folder / 'report.md'}")


if __name__ == "__main__":
    main()
