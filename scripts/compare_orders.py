"""In which order to serve: latency, slowdown and goodput over load, simulated, in one figure and one report.

    python scripts/compare_orders.py --out-dir out/orders

Requests arrive by a Poisson process, by gamma bursts (the gaps' coefficient of variation is 4), or from the
256 clients of a closed loop, who think for as long as makes the load if nobody waits: at a share of what the
device can serve, its throughput when all requests are there at once, first come first served. All at once is
what a load of 1 is measured with, and not itself a load: there is no rate to vary.

Output lengths depend on the prompts with lognormal noise (`jaxllm.research.workloads.TopicOutputs`); orders
that go by length predict it from prompts and past outputs, or know it, or know nothing. Everything else is
preset `adaptive`'s, except for `vllm`, `vllm_v1` and `fastserve`, which are presets.

Slowdown is a request's latency over what it takes alone. Goodput is the share of requests whose slowdown is
at most 5; the deadline that order `deadline` knows is where its slowdown is 5. Order `priority` has three
classes, by the true length: a third of the requests each, the short ones most urgent, as a user who knows
might choose.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import multiprocessing
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import plots
from sweep.options import list_of

from jaxllm.predictors.base import CostModel
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.lengths import LengthPolicy, RangePredictor, RankPredictor, TrueLength, ValuePredictor
from jaxllm.predictors.published_shapes import model_shape
from jaxllm.predictors.roofline import RooflineCostModel
from jaxllm.research.bench.results import command_line, write_json
from jaxllm.research.simulator.run import simulate
from jaxllm.research.workloads import (
    AllAtOnce,
    ArrivalProcess,
    ClosedLoop,
    GammaBursts,
    Poisson,
    TopicOutputs,
    Trace,
    make_trace,
)
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.policies import SchedulingPolicy
from jaxllm.sched.presets import make_preset
from jaxllm.system.output_files import NewFolder, OutputParser

MODEL, DEVICE = "opt-13b", "A800-80GB-PCIe"
DATASET, MAX_OUTPUT_LEN = "chatbot", 512
NUM_GPU_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 256, 512, 16, 2048
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 2560
MOST_SLOWDOWN = 5.0
NUM_CLIENTS = 256
ARRIVALS = ("poisson", "gamma", "closed")
LOADS = (0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.7, 2.0)
PREDICTIONS: Mapping[str, Callable[[], LengthPolicy | None]] = {
    "value": ValuePredictor,
    "range": RangePredictor,
    "rank": RankPredictor,
    "perfect": TrueLength,
    "none": lambda: None,
}
BASELINES = ("vllm", "vllm_v1")
ORDERS = (
    *BASELINES,
    "adaptive_throughput",
    "fair",
    "fastserve",
    "deadline",
    "priority",
    *(f"{order}, {prediction}" for order in ("shortest", "least_work") for prediction in PREDICTIONS),
)
DRAWN = ("vllm", "vllm_v1", "adaptive_throughput", "fair", "fastserve", "shortest, rank", "least_work, rank")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One simulation."""

    arrivals: str
    load: float
    order: str
    num_requests: int
    noise: float
    seed: int


def policy_of(order: str, costs: CostModel) -> SchedulingPolicy:
    """The policy of an order."""
    name, _, prediction = order.partition(", ")
    policy = make_preset({"fair": "adaptive"}.get(name, name), costs)
    return dataclasses.replace(policy, length=PREDICTIONS[prediction]()) if prediction else policy  # type: ignore[type-var]


def costs() -> RooflineCostModel:
    """The device's."""
    return RooflineCostModel(model_shape(MODEL), device_spec(DEVICE), block_size=BLOCK_SIZE)


def config() -> SchedulerConfig:
    """The engine's limits."""
    return SchedulerConfig(
        num_gpu_blocks=NUM_GPU_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        num_host_blocks=NUM_HOST_BLOCKS,
    )


def trace_of(cell: Cell, rate: float | None) -> Trace:
    """The requests; all at once without a rate."""
    arrivals = AllAtOnce() if rate is None else arrivals_of(cell, rate)
    return make_trace(
        DATASET,
        cell.num_requests,
        MAX_OUTPUT_LEN,
        outputs=TopicOutputs(noise=cell.noise),
        seed=cell.seed,
        arrivals=arrivals,
    )


def arrivals_of(cell: Cell, rate: float) -> ArrivalProcess:
    """Requests at a rate; a closed loop's clients think for as long as makes that rate if nobody waits."""
    if cell.arrivals == "closed":
        alone = float(seconds_alone(cell.num_requests, cell.noise, cell.seed).mean())
        return ClosedLoop(NUM_CLIENTS, max(0.0, NUM_CLIENTS / rate - alone))
    return Poisson(rate) if cell.arrivals == "poisson" else GammaBursts(rate, cv=4.0)


@functools.lru_cache(maxsize=8)
def capacity(num_requests: int, noise: float, seed: int) -> float:
    """Requests per second that are served when all are there."""
    trace = trace_of(Cell("", 0.0, "", num_requests, noise, seed), None)
    result = simulate(
        trace, config(), make_preset("adaptive_throughput", costs()), costs(), overlap_swaps=True
    )
    return num_requests / result.seconds


@functools.lru_cache(maxsize=8)
def seconds_alone(num_requests: int, noise: float, seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What each request takes alone."""
    trace, model = trace_of(Cell("", 0.0, "", num_requests, noise, seed), None), costs()
    found = []
    for prompt, output in zip(trace.prompt_lens.tolist(), trace.output_lens.tolist(), strict=True):
        mean = model.step_seconds(1, prompt + output // 2)
        found.append(model.step_seconds(0, 0, prompt, 1) + (output - 1) * mean)
    return np.array(found)


def run_cell(cell: Cell) -> dict[str, Any]:
    """Simulate one cell."""
    of = cell.num_requests, cell.noise, cell.seed
    trace, alone = trace_of(cell, cell.load * capacity(*of)), seconds_alone(*of)
    classes = np.searchsorted(np.quantile(trace.output_lens, [1 / 3, 2 / 3]), trace.output_lens)
    result = simulate(
        trace,
        config(),
        policy_of(cell.order, costs()),
        costs(),
        overlap_swaps=True,
        priorities=classes.tolist(),
        deadlines=(MOST_SLOWDOWN * alone).tolist(),
    )
    latency = result.finish_times - result.arrival_times
    slowdown = latency / alone
    return {
        **dataclasses.asdict(cell),
        "mean_latency": float(latency.mean()),
        "p99_latency": float(np.quantile(latency, 0.99)),
        "seconds_per_token": float((latency / trace.output_lens).mean()),
        "slowdown": [float(slowdown[classes == one].mean()) for one in range(3)],
        "p99_slowdown": float(np.quantile(slowdown, 0.99)),
        "goodput": float((slowdown <= MOST_SLOWDOWN).mean()),
        "output_tokens_per_second": result.output_tokens_per_second,
        "num_preemptions": result.num_preemptions,
    }


def load_at(points: Sequence[tuple[float, float]], limit: float) -> float | None:
    """The load at which a latency reaches `limit`, interpolated; None if it never does within the loads."""
    for (low, below), (high, above) in itertools.pairwise(points):
        if below <= limit < above:
            return low + (high - low) * (limit - below) / (above - below)
    return None


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, float], dict[str, Any]]:
    """By arrivals, order and load: the medians over seeds of every figure."""
    found: dict[tuple[str, str, float], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(_key(row), []).append(row)
    names = [name for name in rows[0] if name not in ("arrivals", "order", "load", "slowdown")]
    return {
        key: {name: statistics.median(row[name] for row in of) for name in names}
        | {
            "slowdown": [
                statistics.median(column) for column in zip(*(row["slowdown"] for row in of), strict=True)
            ]
        }
        for key, of in found.items()
    }


def report(rows: Sequence[Mapping[str, Any]], args: argparse.Namespace) -> str:
    """The Markdown report."""
    found, loads = medians(rows), args.loads
    lines = [
        "# In which order to serve, simulated",
        "",
        f"Command: `{args.command}`. {MODEL} on a roofline of {DEVICE}; {NUM_GPU_BLOCKS} device and "
        f"{NUM_HOST_BLOCKS} host blocks of {BLOCK_SIZE} tokens; {args.requests} requests, prompts as long as "
        f"{DATASET}'s, outputs of at most {MAX_OUTPUT_LEN} tokens that depend on the prompt's topic with "
        f"noise {args.noise:g}; seeds {args.seeds}, medians. A load of 1 is what `adaptive_throughput` "
        "serves when all are there at once. Predictions of costs are exact. Copies run beside the steps.",
        "",
        "Slowdown: latency over that of the request alone, means of the shortest, middle and longest third "
        f"of the outputs. Goodput: share of requests with a slowdown of at most {MOST_SLOWDOWN:g}.",
        "",
    ]
    for arrivals in args.arrivals:
        for load in loads:
            lines += [
                f"## {arrivals}, load {load:g}",
                "",
                "| order | mean latency, s | p99, s | slowdown: short | middle | long | p99 slowdown | "
                "goodput | preemptions |",
                "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
            ]
            for order in ORDERS:
                row = found[arrivals, order, load]
                short, middle, long = row["slowdown"]
                lines.append(
                    f"| {order} | {row['mean_latency']:.2f} | {row['p99_latency']:.1f} | {short:.2f} | "
                    f"{middle:.2f} | {long:.2f} | {row['p99_slowdown']:.1f} | {row['goodput']:.1%} | "
                    f"{row['num_preemptions']:.0f} |"
                )
            lines.append("")
    lines += [
        "## Load at equal latency",
        "",
        "The load at which the mean latency per output token is twice that of `vllm_v1` at the lowest load "
        "(FastServe compares systems by throughput at equal latency), over that of `vllm` and of `vllm_v1`.",
        "",
        "| arrivals | order | load | over vllm | over vllm_v1 |",
        "|---|---|---:|---:|---:|",
    ]
    for arrivals in args.arrivals:
        limit = 2 * found[arrivals, "vllm_v1", loads[0]]["seconds_per_token"]
        reached = {
            order: load_at(
                [(load, found[arrivals, order, load]["seconds_per_token"]) for load in loads], limit
            )
            for order in ORDERS
        }
        for order, load in reached.items():
            ratios = [
                "-" if load is None or reached[base] is None else f"{load / reached[base]:.2f}"  # type: ignore[operator]
                for base in BASELINES
            ]
            shown = f"above {loads[-1]:g}" if load is None else f"{load:.2f}"
            lines.append(f"| {arrivals} | {order} | {shown} | {' | '.join(ratios)} |")
    return "\n".join([*lines, ""])


_LABELS = {"fair": "adaptive"}


def draw(rows: Sequence[Mapping[str, Any]], args: argparse.Namespace, path: pathlib.Path) -> None:
    """A row for each arrival process: mean latency and goodput over load, medians and ranges over seeds."""
    measures = (("mean_latency", "mean latency, s"), ("goodput", f"answered within {MOST_SLOWDOWN:g}x alone"))
    source = (
        f"Simulated: {MODEL} on a roofline of an {DEVICE}; medians over seeds {args.seeds}, shaded from the "
        "least to the most"
    )
    size = (11, 3.1 * len(args.arrivals) + 0.6)
    with plots.figure(path, source, len(args.arrivals), len(measures), figsize=size) as panels:
        for arrivals, of_arrivals in zip(args.arrivals, panels, strict=True):
            for (name, label), panel in zip(measures, of_arrivals, strict=True):
                for order, colour, marker in zip(DRAWN, plots.COLOURS, "osD^vPX", strict=False):
                    of_loads = [
                        [row[name] for row in rows if _key(row) == (arrivals, order, load)]
                        for load in args.loads
                    ]
                    ends = [min(of) for of in of_loads], [max(of) for of in of_loads]
                    panel.fill_between(args.loads, *ends, color=colour, alpha=0.2, linewidth=0)
                    middle = [statistics.median(of) for of in of_loads]
                    panel.plot(
                        args.loads,
                        middle,
                        color=colour,
                        marker=marker,
                        markersize=5,
                        label=_LABELS.get(order, order),
                    )
                panel.set_title(f"{arrivals}: {label}", fontsize=11)
                panel.set_xlabel("load")
                if name == "mean_latency":
                    panel.set_yscale("log")
        panels[0][1].legend(fontsize=9, frameon=False, loc="lower left")


def _key(row: Mapping[str, Any]) -> tuple[str, str, float]:
    return row["arrivals"], row["order"], row["load"]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arrivals", type=list_of(str), default=",".join(ARRIVALS))
    parser.add_argument("--loads", type=list_of(float), default=",".join(map(str, LOADS)))
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--noise", type=float, default=0.3, help="of output lengths, see TopicOutputs")
    parser.add_argument("--seeds", type=list_of(int), default="0,1")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out-dir", type=NewFolder("results.json", "report.md"), required=True)
    args = parser.parse_args(argv)
    if not set(args.arrivals) <= set(ARRIVALS):
        parser.error(f"--arrivals {','.join(args.arrivals)}: name some of {', '.join(ARRIVALS)}")
    args.loads = sorted(args.loads)
    if not (args.loads[0] > 0 and args.loads[-1] <= 10):
        parser.error("--loads must lie above 0 and not above 10")
    if not (args.requests >= 2 and 0 <= args.noise <= 10 and args.jobs >= 1 and min(args.seeds) >= 0):
        parser.error("--requests from 2, --noise from 0 to 10, --jobs from 1, --seeds from 0")
    return args


def main(argv: list[str] | None = None) -> None:
    """Simulate, and write JSON, figure and report."""
    args = parse_args(argv)
    words = sys.argv[1:] if argv is None else argv
    args.command = command_line(["python", "scripts/compare_orders.py", *words])
    args.out_dir.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    cells = [
        Cell(arrivals, load, order, args.requests, args.noise, seed)
        for seed, arrivals, load, order in itertools.product(args.seeds, args.arrivals, args.loads, ORDERS)
    ]
    if args.jobs == 1:
        rows = list(map(run_cell, cells))
    else:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
            rows = list(pool.map(run_cell, cells, chunksize=4))
    values = {
        "command": args.command,
        "device": DEVICE,
        "model": MODEL,
        "seconds": round(time.perf_counter() - started, 1),
        "versions": {"jaxllm": version("jaxllm"), "python": sys.version.split()[0]},
        "capacity": {seed: capacity(args.requests, args.noise, seed) for seed in args.seeds},
        "cells": rows,
    }
    write_json(args.out_dir / "results.json", values)
    (args.out_dir / "report.md").write_text(report(rows, args), encoding="utf-8")
    draw(rows, args, args.out_dir / "orders.png")
    print(f"{len(rows)} simulations in {values['seconds']} s; see {args.out_dir / 'report.md'}")


if __name__ == "__main__":
    main()
