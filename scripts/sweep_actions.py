"""Swap, recompute, or choose: simulated over host bandwidth, host pool and output length.

    python scripts/sweep_actions.py --samples benchmarks/profile-cpu-samples.json --out-dir out/sweep
    python scripts/sweep_actions.py --parts policies --out-dir out/sweep

Part `actions`: always swap (while it fits), always recompute, the adaptive choice and hindsight, with
everything else alike, in every cell; the link's speed goes from far too slow to far too fast. Part
`policies`: what each of the policies of preset `adaptive` is worth, one changed at a time.

The device is a roofline (`jaxllm.predictors.roofline`) times noise: ratios measured / predicted of a real
profile. Predictors are fitted to other noisy samples. Without --samples there is no noise and predictions are
exact. Writes results.json and report.md.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from typing import Any

from jaxllm.bench.command import command_line
from jaxllm.predictors.base import CostModel, model_shape
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.roofline import RooflineCostModel
from jaxllm.predictors.samples import load_samples
from jaxllm.predictors.table import TableAxes
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.policies import (
    AdaptiveAction,
    AlwaysRecompute,
    FairPriority,
    FCFSPriority,
    GrowthReserve,
    LatestArrivalVictim,
    LeastUrgentVictim,
    MoreUrgentFirst,
    OverlapAwareAction,
    OverlapAwareResume,
    PrefillFirst,
    ResumeAtOnce,
    SchedulerPolicy,
    SwapIfItFits,
    WatermarkAdmission,
)
from jaxllm.sched.presets import adaptive
from jaxllm.simulator.executor import SimulatedExecutor
from jaxllm.simulator.fitted import fit_predictor, held_out_ratios
from jaxllm.simulator.run import simulate
from jaxllm.simulator.truth import HindsightAction, RegretMeter, Residuals
from jaxllm.types import SchedulerOutput
from jaxllm.workloads import make_trace

MODEL, DEVICE = "opt-13b", "A800-80GB-PCIe"
NUM_GPU_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 128, 16, 2048
LINK_SPEEDS = (0.01, 0.03, 0.06, 0.09, 0.12, 0.17, 0.25, 0.5, 1.0, 4.0)  # times the data sheet's
HOST_BLOCKS = (16, 64, 256)
OUTPUT_LENGTHS = (32, 64, 256)
ACTIONS = ("recompute", "swap", "adaptive", "hindsight")
LEAST_SHARE = 0.98
MIXED = "restore: mixed, at best"
NEAR_CROSSOVER = 2.0


@dataclasses.dataclass(frozen=True)
class Cell:
    """One simulation; `variant` is an action, or a policy that differs from `adaptive`."""

    part: str
    dataset: str
    max_output_len: int
    num_host_blocks: int
    link_speed: float
    variant: str
    num_requests: int
    seed: int
    samples: str | None


def run_cell(cell: Cell) -> dict[str, Any]:
    """Simulate one cell."""
    costs = device_costs(cell.link_speed)
    residuals, predicted = noise_and_predictor(cell.samples, cell.link_speed, cell.seed)
    policy = adaptive(predicted)
    meter = None
    if cell.part == "actions":
        hindsight = HindsightAction(OverlapAwareAction, costs, residuals)
        meter = RegretMeter(policy.action, hindsight)
        action = {
            "recompute": AlwaysRecompute(),
            "swap": SwapIfItFits(),
            "adaptive": meter,
            "hindsight": hindsight,
        }[cell.variant]
        resume = OverlapAwareResume(predicted, gives_up=cell.variant != "swap")
        policy = dataclasses.replace(policy, action=action, resume=resume)
    else:
        policy = VARIANTS[cell.variant](policy, predicted)
    config = SchedulerConfig(
        num_gpu_blocks=NUM_GPU_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=256,
        max_num_batched_tokens=2560,
        num_host_blocks=cell.num_host_blocks,
    )
    trace = make_trace(
        cell.dataset, cell.num_requests, cell.max_output_len, outputs="uniform", seed=cell.seed
    )
    result = simulate(
        trace,
        config,
        policy,
        costs,
        overlap_swaps=True,
        residuals=residuals,
        executor_class=MixedRestoreBound if cell.variant == MIXED else SimulatedExecutor,
    )
    row = {**dataclasses.asdict(cell), **result.summary()}
    if meter is not None and cell.variant == "adaptive":
        row["regret"] = {
            "seconds": meter.regret_seconds,
            "best_seconds": meter.best_seconds,
            "num_decisions": meter.num_decisions,
            "num_wrong": meter.num_wrong,
        }
    return row


def device_costs(link_speed: float) -> RooflineCostModel:
    """The device with a link of so many times its speed."""
    device = device_spec(DEVICE)
    device = dataclasses.replace(device, host_bandwidth=device.host_bandwidth * link_speed)
    return RooflineCostModel(model_shape(MODEL), device, block_size=BLOCK_SIZE)


@functools.lru_cache(maxsize=64)
def noise_and_predictor(samples: str | None, link_speed: float, seed: int) -> tuple[Residuals, CostModel]:
    """The truth's noise, and what the policies predict by."""
    costs = device_costs(link_speed)
    if samples is None:
        return Residuals({}), costs
    for_predictors, for_truth = _ratios(samples)
    axes = TableAxes.geometric(
        max_num_batched_tokens=2560,
        max_num_seqs=256,
        max_context_tokens=NUM_GPU_BLOCKS * BLOCK_SIZE,
        max_num_blocks=NUM_GPU_BLOCKS,
        max_prefill_context_tokens=MAX_MODEL_LEN,
    )
    predictor = fit_predictor(
        costs, model_shape(MODEL), axes, for_predictors, block_size=BLOCK_SIZE, seed=seed
    )
    return Residuals(for_truth, seed=seed), predictor


@functools.lru_cache(maxsize=1)
def _ratios(samples: str) -> Any:
    return held_out_ratios(load_samples(samples))


class MixedRestoreBound(SimulatedExecutor):
    """What restoring a dropped request in part from host memory could save at best.

    Loads, at no cost, as many of its blocks as the copies hidden by the step before would carry, without
    asking whether the host pool had room for them; only the rest is prefilled.
    """

    def _prefill_seconds(self, scheduled: SchedulerOutput, num_tokens: int, context_tokens: int) -> float:
        hidden = self._hidden
        for chunk in scheduled.prefill:
            if chunk.is_recompute:
                blocks = chunk.length // self.block_size
                while blocks and self._costs.swap_in_seconds(blocks) > hidden:
                    blocks -= 1
                if blocks:
                    hidden -= self._costs.swap_in_seconds(blocks)
                    loaded = min(blocks * self.block_size, chunk.length - 1)
                    num_tokens, context_tokens = num_tokens - loaded, context_tokens + loaded
        return super()._prefill_seconds(scheduled, num_tokens, context_tokens)


Change = Callable[[SchedulerPolicy, CostModel], SchedulerPolicy]


def _with(**changes: Any) -> Change:
    return lambda policy, costs: dataclasses.replace(policy, **changes)


VARIANTS: dict[str, Change] = {
    "adaptive": _with(),
    "action: recompute": _with(action=AlwaysRecompute()),
    "action: swap if it fits": _with(action=SwapIfItFits()),
    "action: serial costs": lambda policy, costs: dataclasses.replace(policy, action=AdaptiveAction(costs)),
    "resume: at once": _with(resume=ResumeAtOnce()),
    "resume: never given up": lambda policy, costs: dataclasses.replace(
        policy, resume=OverlapAwareResume(costs, gives_up=False)
    ),
    MIXED: _with(),
    "eviction: all blocks at once": _with(lazy_eviction=False),
    "priority: first come": _with(priority=FCFSPriority(), victim=LeastUrgentVictim(FCFSPriority())),
    "victim: latest arrival": _with(victim=LatestArrivalVictim()),
    "restore: Algorithm 2": _with(restore=MoreUrgentFirst(FairPriority())),
    "restore: prefill first": _with(restore=PrefillFirst()),
    "admission: none": _with(admission=WatermarkAdmission(0.0)),
    "admission: 1 % watermark": _with(admission=WatermarkAdmission(0.01)),
    "admission: 1/8 block each": _with(admission=GrowthReserve(0.125)),
    "admission: 1/2 block each": _with(admission=GrowthReserve(0.5)),
    "admission: 1 block each": _with(admission=GrowthReserve(1.0)),
}


def make_cells(args: argparse.Namespace) -> list[Cell]:
    """Every simulation."""
    cells = []
    if "actions" in args.parts:
        for dataset, output, host, speed, seed, action in itertools.product(
            args.datasets, OUTPUT_LENGTHS, HOST_BLOCKS, LINK_SPEEDS, args.seeds, ACTIONS
        ):
            cells.append(
                Cell("actions", dataset, output, host, speed, action, args.requests, seed, args.samples)
            )
    if "policies" in args.parts:
        for dataset, seed, variant in itertools.product(
            ("chatbot", "alpaca", "summary"), args.seeds, VARIANTS
        ):
            cells.append(
                Cell("policies", dataset, 64, 64, 1.0, variant, 2 * args.requests, seed, args.samples)
            )
    return sorted(cells, key=lambda cell: (cell.link_speed, cell.seed))  # few predictors to fit


@dataclasses.dataclass(frozen=True)
class Place:
    """One cell of the sweep: medians over seeds."""

    dataset: str
    output: int
    host: int
    speed: float
    rates: dict[str, float]
    regret: float | None

    @property
    def share(self) -> float:
        """Throughput of the adaptive action over that of the better fixed one."""
        return self.rates["adaptive"] / max(self.rates["swap"], self.rates["recompute"])

    @property
    def advantage(self) -> float:
        """Of swapping over recomputing, as a logarithm."""
        return math.log(self.rates["swap"] / self.rates["recompute"])


def places(rows: Iterable[dict[str, Any]]) -> list[Place]:
    """Medians of the rows of part `actions`."""
    found: dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        if row["part"] == "actions":
            key = (row["dataset"], row["max_output_len"], row["num_host_blocks"], row["link_speed"])
            found.setdefault(key, {}).setdefault(row["variant"], []).append(row)
    result = []
    for key, variants in sorted(found.items()):
        rates = {
            variant: statistics.median(row["output_tokens_per_second"] for row in of_variant)
            for variant, of_variant in variants.items()
        }
        best = sum(row["regret"]["best_seconds"] for row in variants["adaptive"])
        lost = sum(row["regret"]["seconds"] for row in variants["adaptive"])
        result.append(Place(*key, rates, lost / best if best else None))
    return result


def crossover(line: Sequence[Place]) -> float | None:
    """The link speed from which on swapping wins, interpolated; None if one of the two always does."""
    for low, high in itertools.pairwise(line):
        if low.advantage < 0 <= high.advantage:
            weight = low.advantage / (low.advantage - high.advantage)
            return math.exp(math.log(low.speed) * (1 - weight) + math.log(high.speed) * weight)
    return None


def actions_report(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Shares of every cell, losing cells, crossovers and regret."""
    found = places(rows)
    speeds = sorted({place.speed for place in found})
    lines = [
        "## The action: tokens/s of the adaptive choice over the better of always-swap and always-recompute",
        "",
        "Columns are link speeds, in multiples of the data sheet's. `*`: within "
        f"{NEAR_CROSSOVER:g}x of the speed at which both fixed actions are equally fast.",
        "",
        "| data | output | host blocks | crossover | " + " | ".join(f"{speed:g}" for speed in speeds) + " |",
        "|---|---:|---:|---:|" + "---:|" * len(speeds),
    ]
    near, losing = [], []
    for (dataset, output, host), group in itertools.groupby(
        found, key=lambda place: (place.dataset, place.output, place.host)
    ):
        line = list(group)
        crossing = crossover(line)
        cells = []
        for place in line:
            is_near = crossing is not None and abs(math.log(place.speed / crossing)) <= math.log(
                NEAR_CROSSOVER
            )
            near += [place] * is_near
            losing += [place] * (place.share < LEAST_SHARE)
            cells.append(f"{place.share:.3f}" + "*" * is_near)
        shown = "none" if crossing is None else f"{crossing:.3f}"
        lines.append(f"| {dataset} | {output} | {host} | {shown} | " + " | ".join(cells) + " |")
    ahead = sum(place.share > 1 for place in near)
    regrets = [place.regret for place in found if place.regret is not None]
    lost = sum(row["regret"]["seconds"] for row in rows if "regret" in row)
    best = sum(row["regret"]["best_seconds"] for row in rows if "regret" in row)
    hindsight = [place.rates["adaptive"] / place.rates["hindsight"] for place in found]
    lines += [
        "",
        f"Cells below {LEAST_SHARE}: {len(losing)} of {len(found)}"
        + (": " + "; ".join(_name(place) for place in losing) if losing else "")
        + f". Strictly faster than both within {NEAR_CROSSOVER:g}x of the crossover: {ahead} of {len(near)} "
        f"cells (median share {_median_share(near)}).",
        "",
        f"Regret, all decisions together: {lost / max(best, 1e-12):.1%} of what hindsight would have spent"
        f" (cells: median {statistics.median(regrets or [0.0]):.1%}, largest "
        f"{max(regrets, default=0.0):.1%}). Throughput over that of hindsight: median "
        f"{statistics.median(hindsight):.3f}, least {min(hindsight):.3f}.",
        "",
    ]
    return lines


def _median_share(near: Sequence[Place]) -> str:
    return f"{statistics.median(place.share for place in near):.3f}" if near else "-"


def _name(place: Place) -> str:
    return (
        f"{place.dataset}, output {place.output}, {place.host} host blocks, link x{place.speed:g}: "
        f"{place.share:.3f}"
    )


def policies_report(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What every single change of `adaptive` does."""
    lines = [
        "## The other policies, one changed at a time",
        "",
        "Outputs uniform in 16 to 64 tokens, 64 host blocks, the data sheet's link. Tokens/s relative to "
        "`adaptive`, mean weighted turnaround, preemptions (of them swapped); medians over seeds.",
        "",
        "| changed | " + " | ".join(("chatbot", "alpaca", "summary")) + " |",
        "|---|---:|---:|---:|",
    ]
    for variant in VARIANTS:
        cells = []
        for dataset in ("chatbot", "alpaca", "summary"):
            rate = _median(rows, dataset, variant, "output_tokens_per_second")
            base = _median(rows, dataset, "adaptive", "output_tokens_per_second")
            cells.append(
                f"{rate / base:.3f}, {_median(rows, dataset, variant, 'mean_weighted_turnaround'):.1f}, "
                f"{_median(rows, dataset, variant, 'num_preemptions'):.0f} "
                f"({_median(rows, dataset, variant, 'num_swaps'):.0f})"
            )
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _median(rows: Sequence[dict[str, Any]], dataset: str, variant: str, value: str) -> float:
    return statistics.median(
        row[value]
        for row in rows
        if (row["part"], row["dataset"], row["variant"]) == ("policies", dataset, variant)
    )


def report(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    """The Markdown report."""
    noise = (
        "Predictions are exact."
        if args.samples is None
        else f"Noise: ratios measured / predicted of `{pathlib.Path(args.samples).name}`, one part for the "
        "truth, another for the samples predictors are fitted to."
    )
    lines = [
        "# Swap or recompute, simulated",
        "",
        f"Command: `{args.command}`. {MODEL} on a roofline of {DEVICE}; {NUM_GPU_BLOCKS} device blocks of "
        f"{BLOCK_SIZE} tokens; {args.requests} requests (twice as many for policies), all present at time 0, "
        "outputs uniform in a quarter of the maximum to the maximum; medians over seeds "
        f"{args.seeds}. {noise} Copies run beside computation.",
        "",
    ]
    if "actions" in args.parts:
        lines += actions_report(rows)
    if "policies" in args.parts:
        lines += policies_report(rows)
    return "\n".join(lines)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="actions,policies", help="default: %(default)s")
    parser.add_argument("--datasets", default="chatbot,summary", help="of actions (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seeds", default="0,1,2,3,4", help="comma-separated (default: %(default)s)")
    parser.add_argument("--samples", help="measurements of a real profile, whose noise to add")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out-dir", type=pathlib.Path, required=True)
    args = parser.parse_args(argv)
    for name, known in (("parts", ("actions", "policies")), ("datasets", ("chatbot", "alpaca", "summary"))):
        values = getattr(args, name).split(",")
        if not set(values) <= set(known):
            parser.error(f"--{name} {','.join(values)}: name some of {', '.join(known)}")
        setattr(args, name, values)
    if args.requests < 1 or args.jobs < 1:
        parser.error("--requests and --jobs must be at least 1")
    args.seeds = [int(seed) for seed in args.seeds.split(",")]
    return args


def main(argv: list[str] | None = None) -> None:
    """Simulate, and write JSON and the report."""
    args = parse_args(argv)
    args.command = command_line(
        ["python", "scripts/sweep_actions.py", *(sys.argv[1:] if argv is None else argv)]
    )
    args.out_dir.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    cells = make_cells(args)
    if args.jobs == 1:
        rows = list(map(run_cell, cells))
    else:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
            rows = list(pool.map(run_cell, cells, chunksize=8))
    values = {
        "command": args.command,
        "model": MODEL,
        "device": DEVICE,
        "seconds": round(time.perf_counter() - started, 1),
        "versions": {"jaxllm": version("jaxllm"), "python": sys.version.split()[0]},
        "places": [{**dataclasses.asdict(place), "share": place.share} for place in places(rows)],
        "policies": [row for row in rows if row["part"] == "policies"],
    }
    (args.out_dir / "results.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    (args.out_dir / "report.md").write_text(report(rows, args), encoding="utf-8")
    print(f"{len(rows)} simulations in {values['seconds']} s; see {args.out_dir / 'report.md'}")


if __name__ == "__main__":
    main()
