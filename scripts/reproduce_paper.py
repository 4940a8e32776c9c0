"""Re-runs the evaluation of the AdaptiveLLM paper, and sets its numbers beside ours.

    python scripts/reproduce_paper.py --samples benchmarks/profile-cpu-samples.json --out-dir out/paper
    python scripts/reproduce_paper.py --parts fig4 --requests 200 --out-dir out/quick
    python scripts/reproduce_paper.py --model llama-3-8b --device h100 --gpu-blocks 512 --out-dir out/h100
    python scripts/reproduce_paper.py --executor jax --model DIR --requests 100 --out-dir out/real
    python scripts/reproduce_paper.py --executor jax --model opt-13b --load-format dummy --out-dir out/gpu

Parts: `table3` (speed-ups at 64 output tokens), `readings` (the same under every setting the paper's text
allows; simulated), `fig3` (throughput against the output length), `fig4` (weighted turnaround against the
batch limit), `control` (Section 4.6: predicting, and then recomputing all the same; timed, so simulated one
run at a time, and never resumed) and `swap_both` (vLLM_s by another rule). All ends in `results.json`,
figures, `report.md`, the same as `report.html`, and long tables in `appendix.md`.

`--executor sim` drives the engine's own scheduler with a virtual clock; its device is a roofline of an
A800-80GB-PCIe from data-sheet constants and stated efficiencies (`jaxllm.predictors.roofline`), or with
`--costs silicon` kernels measured on an A100 (`jaxllm.predictors.silicon`; an A800 is one with a slower
NVLink). Nothing is fitted to the paper's figures. With --samples it is as noisy as the profile they are from,
and predictors are fitted to other noisy samples and corrected while they run, as the engine's are; without,
predictions are exact. Other settings than the paper's are those of `jaxllm simulate`, in its words: any
--model with a shape, --device, --link, --gpu-blocks, --host-blocks, --policies, and for fig4 a --trace in
place of the data sets. Interrupted, it goes on where it was (`cells.jsonl`). `--executor jax` runs the
engine, in pools of the same size, on every --model: checkpoint folders, or with `--load-format dummy` folders
that hold only a config.json, or names of the paper's models.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from paper import appendix, report_figures, report_readings
from paper import report as sections
from paper.cells import (
    BATCH_LIMITS,
    CLOSED_LOOP,
    DATASETS,
    MAX_NUM_SEQS,
    MODELS,
    OWN,
    PARTS,
    PRESETS,
    RECORDED,
    Cell,
    make_cells,
    policy_of,
    prompts_of,
    recorded,
    simulate_cell,
)
from paper.control import control, time_control
from paper.models import model_folder
from paper.page import html_of
from sweep.options import list_of
from sweep.simulated import (
    COSTS,
    DEVICE,
    MEASURED_DEVICE,
    NUM_GPU_BLOCKS,
    NUM_HOST_BLOCKS,
    Device,
    run_all,
)

from jaxllm.engine.scheduling import UnknownCosts
from jaxllm.errors import CapacityError, ConfigError, RequestError
from jaxllm.predictors.samples import load_samples
from jaxllm.research.bench.results import command_line, write_json
from jaxllm.research.shapes import load_shape
from jaxllm.research.workloads import parse_arrivals
from jaxllm.system.output_files import NewFolder, OutputParser

SIMULATED_ONLY = ("readings", "swap_both")
OF_TRACES = ("fig4",)
"""Parts that do not vary the outputs' lengths."""


def run_on_engine(args: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """Run every cell on the engine; returns the rows, and what they ran on.

    Rows are also appended to `engine-cells.jsonl` as they come, so that an interrupted run loses none.
    """
    from paper.engine_cells import load_engine, run_cell

    from jaxllm.system import hardware

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
        cells = cells_of(args, [part for part in args.parts if part == "table3" or place == 0], [name])
        if cells:
            run_cell(dataclasses.replace(cells[0], num_requests=min(4, args.requests)), llm)  # warm-up
        for number, cell in enumerate(cells, 1):
            row = run_cell(cell, llm)
            rows.append(row)
            with (args.out_dir / "engine-cells.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            what = f"{cell.part} {cell.dataset} {cell.preset} {cell.arrivals}"
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


def simulated_facts(args: argparse.Namespace) -> str:
    """What a simulation ran on."""
    samples, costs = args.samples, args.costs
    found = dataclasses.replace(simulated_device(args), samples=None)
    noise = (
        "Predictions know it exactly, so no loss here comes from wrong predictions."
        if samples is None
        else "Every cost is multiplied by a ratio measured / predicted drawn from the real profile "
        f"`{pathlib.Path(samples).name}`; predictors are fitted to other noisy samples, and corrected by "
        "what steps took, and by what copies took that ran beside them, as the engine's are."
    )
    device = (
        f"a roofline, not a measurement. `{found.costs()!r}`"
        if costs == "roofline"
        else f"simulated from kernels measured on an {found.spec().name} (`jaxllm.predictors.silicon`)"
    )
    return (
        f"Device: {device}. {noise} Copies stop the device, as in the published systems, except under "
        "`adaptive`, which runs them beside computation."
    )


def simulated_device(args: argparse.Namespace) -> Device:
    """That of the first model."""
    own = {
        name: getattr(args, name)
        for name in ("device", "link", "num_gpu_blocks", "num_host_blocks", "kv_cache_dtype")
    }
    return Device(args.models[0], source=args.costs, **own)


def pools_of(args: argparse.Namespace) -> tuple[int, int]:
    """Blocks of device and host."""
    if args.executor != "sim":
        return NUM_GPU_BLOCKS, NUM_HOST_BLOCKS
    system = simulated_device(args).system()
    return system.num_gpu_blocks, system.num_host_blocks


def cells_of(args: argparse.Namespace, parts: Sequence[str], models: Sequence[str]) -> list[Cell]:
    """The runs that were asked for."""
    return make_cells(
        parts,
        models,
        args.datasets,
        num_requests=args.requests,
        seeds=args.seeds,
        max_num_seqs=args.max_num_seqs,
        presets=args.presets,
        batch_limits=args.batch_limits,
        arrivals=args.arrivals,
        samples=args.samples,
        data=args.data,
        costs=args.costs,
        own={name: getattr(args, name) for name in OWN if getattr(args, name) is not None},
    )


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=list_of(str), help="default: all that the executor has")
    parser.add_argument("--executor", choices=("sim", "jax"), default="sim")
    parser.add_argument(
        "--model",
        dest="models",
        action="append",
        default=[],
        help="may be repeated; with sim shapes by name or config.json (default: the paper's)",
    )
    parser.add_argument("--load-format", default="auto", help="with jax: dummy for random weights")
    parser.add_argument("--dtype", default="auto", help="with jax")
    parser.add_argument(
        "--datasets", type=list_of(str), default=",".join(DATASETS), help="default: %(default)s"
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="NAME=FILE:COLUMN:TOKENIZER",
        help="prompts of a data set from its file, instead of the shape assumed for it; may be repeated",
    )
    parser.add_argument(
        "--arrivals",
        type=list_of(str),
        help="all, poisson:RATE, gamma:RATE:CV, closed:CLIENTS[:THINK]; fig3 and the other parts that have "
        "one take the first (default: " + f"{CLOSED_LOOP},all, or as --trace says)",
    )
    parser.add_argument(
        "--presets",
        "--policies",
        type=list_of(str),
        default=",".join(PRESETS),
        help="also others, and module:attribute, where the part is not table3 (default: %(default)s)",
    )
    own = parser.add_argument_group("with sim, other settings than the paper's; as of `jaxllm simulate`")
    own.add_argument("--device", metavar="NAME", help=f"default: {DEVICE}, or {MEASURED_DEVICE} of silicon")
    own.add_argument("--link", type=float, metavar="GB/s", help="that copies reach (default: the device's)")
    own.add_argument("--gpu-blocks", dest="num_gpu_blocks", type=int, metavar="N", help="default: 128")
    own.add_argument("--host-blocks", dest="num_host_blocks", type=int, metavar="N", help="default: 64")
    own.add_argument(
        "--kv-cache-dtype", metavar="NAME", help="of KV in pools of as many bytes (default: float16)"
    )
    own.add_argument("--trace", metavar="FILE", help="requests, in place of --datasets")
    too_long = own.add_mutually_exclusive_group()
    for way in ("clip", "skip"):
        too_long.add_argument(f"--{way}", dest="too_long", action="store_const", const=way)
    parser.add_argument(
        "--batch-limits",
        type=list_of(int),
        help=f"of fig4, those within --max-num-seqs (default: {','.join(map(str, BATCH_LIMITS))})",
    )
    parser.add_argument("--max-num-seqs", type=int, default=MAX_NUM_SEQS, help="default: %(default)s")
    parser.add_argument("--requests", type=int, help="default: 1000, or all of --trace")
    parser.add_argument(
        "--seeds", type=list_of(int), default="0", help="comma-separated (default: %(default)s)"
    )
    parser.add_argument("--samples", help="measurements of a real profile (`jaxllm profile --samples`)")
    parser.add_argument("--costs", choices=COSTS, help="of the simulated device (default: roofline)")
    parser.add_argument("--jobs", type=int, help="processes, with sim (default: 2)")
    parser.add_argument(
        "--out-dir",
        type=NewFolder("results.json", "report.md", journals=["cells.jsonl", "engine-cells.jsonl"]),
        required=True,
    )
    args = parser.parse_args(argv)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where a user's own policy is imported from
    try:
        check(args)
    except (CapacityError, ConfigError, RequestError) as error:
        parser.error(str(error))
    return args


def check(args: argparse.Namespace) -> None:
    """Set what depends on other options.

    Raises:
        ConfigError: options are unknown, out of range or at odds.
    """
    is_simulated = args.executor == "sim"
    if not is_simulated and args.costs is not None:
        raise ConfigError("--costs is for --executor sim: the engine has its own")
    args.costs = args.costs or "roofline"
    own = check_own(args, is_simulated)
    if args.parts is None:
        args.parts = own
    for preset in set(args.presets) - set(PRESETS):
        policy_of(preset, UnknownCosts())
    for name, known in (("parts", own), ("datasets", args.datasets if args.trace else DATASETS)):
        unknown = sorted(set(getattr(args, name)) - set(known))
        if unknown:
            raise ConfigError(f"--{name}: there is no {', '.join(unknown)}; choose of {', '.join(known)}")
    if not is_simulated and args.jobs is not None:
        raise ConfigError("--jobs is for --executor sim: the engine runs one cell after the other")
    args.jobs = 2 if args.jobs is None else args.jobs
    if min(args.requests, args.jobs, args.max_num_seqs) < 1:
        raise ConfigError("--requests, --jobs and --max-num-seqs must be at least 1")
    if is_simulated:
        args.models = args.models or list(MODELS)
        for model in args.models:
            load_shape(model, "float16")
        simulated_device(args).costs()
        if (args.load_format, args.dtype) != ("auto", "auto"):
            raise ConfigError("--load-format and --dtype are for --executor jax")
    elif not args.models:
        raise ConfigError("--executor jax needs --model")
    elif args.samples is not None:
        raise ConfigError("--samples is for --executor sim: the engine has its own costs")
    if min(args.seeds) < 0:
        raise ConfigError(f"--seeds {args.seeds} must be at least 0")
    if args.batch_limits is not None and "fig4" not in args.parts:
        raise ConfigError("--batch-limits is of part fig4")
    args.batch_limits = list(BATCH_LIMITS) if args.batch_limits is None else args.batch_limits
    if not set(args.batch_limits) <= set(BATCH_LIMITS):
        raise ConfigError(f"--batch-limits {args.batch_limits}: choose of {BATCH_LIMITS}")
    if "fig4" in args.parts and min(args.batch_limits) > args.max_num_seqs:
        raise ConfigError(f"no batch limit of fig4 is within --max-num-seqs {args.max_num_seqs}")
    if "table3" in args.parts and set(args.presets) != set(PRESETS):
        raise ConfigError("--parts table3 compares all presets: leave --presets out, or name other parts")
    for arrivals in args.arrivals:
        if arrivals != RECORDED or not args.trace:
            parse_arrivals(arrivals)
    if args.samples is not None:
        load_samples(args.samples)
    data = dict(item.partition("=")[::2] for item in args.data)
    if not set(data) <= set(args.datasets):
        raise ConfigError(
            f"--data {args.data}: write NAME=FILE:COLUMN:TOKENIZER, of {', '.join(args.datasets)}"
        )
    for item in data.values():
        if len(prompts_of(item)) < args.requests:
            raise ConfigError(
                f"--data {item}: has {len(prompts_of(item))} prompts, --requests {args.requests}"
            )
    args.data = data


def check_own(args: argparse.Namespace, is_simulated: bool) -> list[str]:
    """Set what depends on the options that are not of the paper's setting; returns the parts that there are.

    Raises:
        ConfigError: the engine has no such options, or they are at odds.
    """
    parts = [part for part in PARTS if is_simulated or part not in SIMULATED_ONLY]
    given = [
        f"--{name.replace('_', '-').removeprefix('num-')}" for name in OWN if getattr(args, name) is not None
    ]
    if given and not is_simulated:
        raise ConfigError(f"{', '.join(given)}: of --executor sim; the engine runs in the paper's pools")
    if args.costs == "silicon":  # readings vary a roofline's layout and host
        parts.remove("readings")
    if args.link is not None:
        args.link *= 1e9
    arrivals = f"{CLOSED_LOOP},all"
    if args.trace is not None:  # whose lengths are its own
        parts = [part for part in parts if part in OF_TRACES]
        trace = recorded(args.trace)
        args.datasets, arrivals = [trace.name], RECORDED
        args.requests = len(trace) if args.requests is None else args.requests
    elif args.too_long is not None:
        raise ConfigError(f"--{args.too_long} is of --trace: leave it out")
    args.requests = 1000 if args.requests is None else args.requests
    args.arrivals = arrivals.split(",") if args.arrivals is None else args.arrivals
    return parts


def main(argv: list[str] | None = None) -> None:
    """Run or simulate, and write JSON, figures and the reports."""
    args = parse_args(argv)
    words = sys.argv[1:] if argv is None else argv
    command = command_line(["python", "scripts/reproduce_paper.py", *words])
    folder = args.out_dir
    folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    is_simulated = args.executor == "sim"
    if is_simulated:
        cells = cells_of(args, [part for part in args.parts if part != "control"], args.models)
        bare = [dataclasses.replace(cell, part="") for cell in cells]  # some are of several parts
        found = run_all(bare, simulate_cell, jobs=args.jobs, journal=folder / "cells.jsonl")
        rows = [{**row, "part": cell.part} for row, cell in zip(found, cells, strict=True)]
        if "control" in args.parts:  # alone, after the other processes have ended
            rows += time_control(cells_of(args, ["control"], args.models))
        facts = simulated_facts(args)
    else:
        rows, facts = run_on_engine(args)
    lines = sections.introduction(
        command,
        f"{facts} {sections.prompts(args.datasets, args.data, args.trace)}",
        args.seeds,
        args.requests,
        pools_of(args),
    )
    behind = ["# AdaptiveLLM's evaluation: the long tables", "", "Of the runs of [report.md](report.md).", ""]
    if "table3" in args.parts:
        lines += sections.table3(rows)
        behind += appendix.time_spent(rows)
    if "readings" in args.parts:
        lines += report_readings.readings(rows)
        behind += appendix.readings(rows)
    if "fig3" in args.parts:
        lines += report_figures.fig3(rows, folder / "fig3.png")
    if "fig4" in args.parts:
        lines += report_figures.fig4(rows, folder)
    if "control" in args.parts:
        lines += control(rows, is_simulated)
    if args.trace is None:
        lines += sections.datasets(args.data)
    behind += appendix.figures(rows)
    if "swap_both" in args.parts:
        behind += appendix.swapping(rows)
    values = {
        "command": command,
        "device": simulated_device(args).spec().name if is_simulated else facts,
        "seconds_of_last_start": round(time.perf_counter() - started, 1),
        "versions": {"jaxllm": version("jaxllm"), "python": sys.version.split()[0]},
        "cells": rows,
    }
    write_json(folder / "results.json", values)
    text = "\n".join(lines)
    (folder / "report.md").write_text(text, encoding="utf-8")
    (folder / "report.html").write_text(html_of(text, folder), encoding="utf-8")
    (folder / "appendix.md").write_text("\n".join(behind), encoding="utf-8")
    print(f"{len(rows)} runs in {values['seconds_of_last_start']} s; see {folder / 'report.md'}")


if __name__ == "__main__":
    main()
