"""The default beside published policies on measured GPUs, at the sizes and loads of today, simulated.

    python scripts/compare_on_silicon.py --out out/silicon.json

Each cell is a model on GPUs, a load and a limit on running requests, with 64 GB of host memory, 8,192 tokens
a step, the pool that 0.9 of the GPUs' memory leaves (`jaxllm.research.simulator.gpu`), and steps and copies
of `SiliconCostModel`. Nobody knows an output's length before it ends. Lengths are lognormal, clipped.
Everything is sent at once, by clients that each wait for their answer, or by a Poisson process at a share of
what `vllm_v1` serves when it is sent at once. In cells of turns agents answer 12 times on average, 5 s apart,
and each time begin with all that was said; the prefix cache is on, and latencies are a turn's. In those of
tools 5 s are the mean of a lognormal with a heavy tail: half of them are under 1.4 s, and one in a hundred
takes a minute.

`before` is the default as it was until admission by growth, kept here for the comparison;
`adaptive_throughput` is today's and was the same. For each preset: tokens/s, mean latency, 99th percentile
and first token over those of `vllm_v1` in the same cell and seed, swaps a request, and tokens that lost their
KV of those computed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxllm.predictors.lengths import TrueLength
from jaxllm.predictors.published_shapes import model_shape
from jaxllm.predictors.silicon import SiliconCostModel
from jaxllm.research.bench.results import command_line, write_json
from jaxllm.research.simulator.gpu import pool_blocks
from jaxllm.research.simulator.run import simulate
from jaxllm.research.workloads import AllAtOnce, Poisson, Trace, make_conversations
from jaxllm.research.workloads.lengths import LognormalLengths
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.policies import (
    CostAwareVictim,
    FCFSPriority,
    FeedbackLimit,
    FewestComputedVictim,
    FullLengthAdmission,
    LeastUrgentVictim,
    MoreUrgentFirst,
    NewTokenRatio,
    PastFuture,
    SchedulerPolicy,
    WatermarkAdmission,
)
from jaxllm.sched.presets import make_preset
from jaxllm.sched.scheduler import Scheduler
from jaxllm.system.output_files import OutputParser, new_file

LONGEST = 32768
_STEP = 8192  # tokens
LOADS: Mapping[str, tuple[LognormalLengths, LognormalLengths]] = {
    "chat": (
        LognormalLengths(mean=200, sigma=0.8, shortest=8, longest=2000),
        LognormalLengths(mean=300, sigma=0.8, shortest=8, longest=2000),
    ),
    "summary": (
        LognormalLengths(mean=3000, sigma=0.5, shortest=500, longest=12000),
        LognormalLengths(mean=300, sigma=0.6, shortest=20, longest=1500),
    ),
    "agent": (
        LognormalLengths(mean=6000, sigma=0.5, shortest=500, longest=16000),
        LognormalLengths(mean=600, sigma=0.8, shortest=20, longest=4000),
    ),
    "reasoning": (
        LognormalLengths(mean=300, sigma=0.6, shortest=16, longest=2000),
        LognormalLengths(mean=4000, sigma=0.6, shortest=200, longest=13000),
    ),
}
"""Prompts and outputs, in tokens."""
TURNS: Mapping[str, float | None] = {"turns": None, "tools": 1.6}
"""Loads of conversations, with the `think_sigma` of their pauses."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A setting; `load` of several names joined by "+" draws each request from one of them.

    Args:
        num_requests: of `TURNS`, conversations.
        rate: a share of what `vllm_v1` serves; of `TURNS`, conversations that begin in a second. None sends
            or begins everything at once.
        clients: that each send their next request when they have an answer; 0 for none.
        gpus: that share the model, tensor parallel.
        host_bytes: for KV.
        num_gpu_blocks: None for what fits.
    """

    device: str
    model: str
    load: str
    max_num_seqs: int
    num_requests: int
    rate: float | None = None
    clients: int = 0
    gpus: int = 1
    host_bytes: float = 64e9
    num_gpu_blocks: int | None = None


CELLS = (
    Cell("h100", "llama-3-8b", "chat", 1024, 3000),
    Cell("h100", "llama-3-8b", "summary", 256, 800),
    Cell("h100", "llama-3-8b", "agent", 256, 400),
    Cell("a100", "llama-2-13b", "chat", 256, 800),
    Cell("h100", "llama-3-8b", "reasoning", 256, 768),
    Cell("h100", "llama-3-8b", "reasoning", 1024, 768),
    Cell("a100", "llama-2-13b", "reasoning", 256, 300),
    # Not looked at while the default was chosen:
    Cell("h200", "llama-3-8b", "reasoning", 256, 768),
    Cell("l40s", "llama-3-8b", "reasoning", 256, 200),
    Cell("l40s", "llama-3-8b", "chat+agent", 256, 300),
    Cell("h100", "llama-3-8b", "chat+summary+agent+reasoning", 256, 600),
    Cell("h100", "llama-3-8b", "reasoning", 256, 600, rate=0.7),
    Cell("h100", "llama-3-8b", "reasoning", 256, 600, rate=1.1),
    Cell("a100", "llama-2-13b", "chat", 256, 800, rate=1.1),
    Cell("h100", "llama-3-8b", "reasoning", 256, 600, clients=300),
    Cell("a100", "llama-2-13b", "reasoning", 256, 200, clients=60),
    Cell("h200", "llama-3-8b", "chat", 1024, 3000, clients=1500),
    Cell("l40s", "llama-2-13b", "chat", 256, 600, gpus=2),
    Cell("l40s", "llama-2-13b", "summary", 256, 200, gpus=2, rate=1.1),
    Cell("h100", "llama-3-8b", "reasoning", 256, 600, host_bytes=8e9),
    Cell("h100", "llama-3-8b", "reasoning", 256, 600, host_bytes=256e9),
    Cell("h100", "llama-3-8b", "chat", 256, 300, host_bytes=0.2e9, num_gpu_blocks=384),
    Cell("h100", "llama-3-8b", "turns", 256, 150, rate=1.0),
    Cell("h100", "llama-3-8b", "turns", 256, 150, rate=1.0, host_bytes=16e9),
    Cell("h100", "llama-3-8b", "turns", 256, 150, rate=1.0, host_bytes=256e9),
    Cell("h100", "llama-3-8b", "tools", 256, 150, rate=1.0),
    Cell("h100", "llama-3-8b", "tools", 256, 150, rate=1.0, host_bytes=16e9),
    Cell("a100", "llama-2-13b", "turns", 256, 30, rate=0.1),
    Cell("l40s", "llama-3-8b", "turns", 256, 80, rate=0.3, gpus=2),
)


def part(**parts: Callable[[], Any]) -> Callable[[SiliconCostModel], SchedulerPolicy]:
    """`adaptive` with other answers, made anew each time: some learn."""

    def policy(costs: SiliconCostModel) -> SchedulerPolicy:
        changed = make_preset("adaptive", costs)
        assert isinstance(changed, SchedulerPolicy)
        return dataclasses.replace(changed, **{question: make() for question, make in parts.items()})

    return policy


class BothWays(SiliconCostModel):
    """As if whoever returns computed its first tokens, for nothing, while the last are copied.

    Jin et al., "Compute Or Load KV Cache? Why Not Both?" (Cake, ICML 2025, arXiv 2410.03065). What that gains
    is less: computing takes time from others.
    """

    def swap_in_seconds(self, num_blocks: int) -> float:
        """Both speeds together."""
        copying = super().swap_in_seconds(num_blocks)
        if not num_blocks:
            return copying
        num_tokens = num_blocks * self.block_size
        num_steps = -(-num_tokens // _STEP)
        return 1 / (1 / copying + 1 / (num_steps * self.step_seconds(0, 0, num_tokens // num_steps, 1)))


def _none() -> WatermarkAdmission:
    return WatermarkAdmission(0.0)


def _preset(name: str) -> Callable[[SiliconCostModel], Any]:
    return lambda costs: make_preset(name, costs)


POLICIES: Mapping[str, Callable[[SiliconCostModel], Any]] = {
    "vllm_v1": _preset("vllm_v1"),
    "before": part(admission=_none, victim=LeastUrgentVictim),
    "adaptive_throughput": _preset("adaptive_throughput"),
    "adaptive": _preset("adaptive"),
    "adaptive, victims as before": part(victim=LeastUrgentVictim),
    "adaptive, fewest computed": part(victim=FewestComputedVictim),
    "adaptive, cost-aware victims": part(victim=CostAwareVictim),
    "adaptive, no admission": part(admission=_none),
    "adaptive, waits unbounded": part(max_extra_wait=lambda: None),
    "adaptive, past-future": part(admission=PastFuture),
    "adaptive, new-token ratio": part(admission=NewTokenRatio),
    "adaptive, full lengths": part(admission=FullLengthAdmission),
    "adaptive, feedback": part(admission=FeedbackLimit),
    "adaptive, true lengths": part(admission=lambda: PastFuture(lengths=TrueLength())),
    "adaptive, true lengths, in order of arrival": part(
        admission=lambda: PastFuture(lengths=TrueLength()),
        priority=FCFSPriority,
        restore=lambda: MoreUrgentFirst(FCFSPriority()),
        patience=lambda: 1,
    ),
    "adaptive, both ways": _preset("adaptive"),
}
CACHES: Mapping[str, Callable[[SiliconCostModel], Any]] = {
    name: _preset(name)
    for name in ("vllm_v1", "hicache", "cached_attention", "pensieve", "continuum", "adaptive")
}
"""Compared where there are turns."""
MAIN = ("vllm_v1", "before", "adaptive_throughput", "adaptive")
COSTS: Mapping[str, type[SiliconCostModel]] = {"adaptive, both ways": BothWays}
"""Of presets for which copies take less than they do."""


def trace_of(cell: Cell, seed: int, served: float) -> Trace:
    """Requests of a cell; `served` is what a rate is a share of, in requests a second."""
    if cell.load in TURNS:
        return make_conversations(
            cell.num_requests,
            messages=LognormalLengths(mean=1500, sigma=0.8, shortest=20, longest=8000),
            answers=LognormalLengths(mean=150, sigma=0.8, shortest=5, longest=1000),
            mean_turns=12,
            mean_think=5.0,
            think_sigma=TURNS[cell.load],
            common_len=1200,
            max_len=LONGEST - 1,
            arrivals=AllAtOnce() if cell.rate is None else Poisson(cell.rate),
            seed=seed,
        )
    rng = np.random.default_rng(seed)
    names = cell.load.split("+")
    which = rng.integers(len(names), size=cell.num_requests)
    drawn = [[lengths.sample(cell.num_requests, rng) for lengths in LOADS[name]] for name in names]
    prompts, outputs = (np.choose(which, [of[side] for of in drawn]) for side in range(2))
    arrivals = np.zeros(cell.num_requests)
    if cell.rate is not None:
        arrivals = np.cumsum(rng.exponential(1.0 / (cell.rate * served), cell.num_requests))
    return Trace(
        name=cell.load,
        seed=seed,
        arrival_times=arrivals,
        prompt_lens=prompts,
        output_lens=outputs,
        num_clients=cell.clients,
    )


def run(cell: Cell, seed: int, name: str, served: float = 1.0) -> dict[str, float]:
    """One preset in one cell."""
    dtype = "bfloat16" if "3" in cell.model.split("-") else "float16"
    model = COSTS.get(name, SiliconCostModel)
    costs = model(model_shape(cell.model, dtype), cell.device, tensor_parallel=cell.gpus)
    policy = (POLICIES | CACHES)[name](costs)
    block_bytes = costs.kv_bytes_per_token * costs.block_size
    config = SchedulerConfig(
        num_gpu_blocks=cell.num_gpu_blocks or pool_blocks(costs),
        block_size=costs.block_size,
        max_model_len=LONGEST,
        max_num_seqs=cell.max_num_seqs,
        max_num_batched_tokens=_STEP,
        num_host_blocks=int(cell.host_bytes / block_bytes) if policy.may_swap else 0,
        enable_prefix_caching=cell.load in TURNS,
    )
    scheduler = Scheduler(config, policy)
    trace = trace_of(cell, seed, served)
    found = simulate(trace, config, policy, costs, overlap_swaps=True, scheduler=scheduler)
    latencies = found.finish_times - found.arrival_times
    progress = scheduler.progress
    return {
        "tokens_per_second": found.num_output_tokens / found.seconds,
        "mean_latency_seconds": float(latencies.mean()),
        "p99_latency_seconds": float(np.percentile(latencies, 99)),
        "mean_first_token_seconds": float((found.first_token_times - found.arrival_times).mean()),
        "requests_per_second": len(latencies) / found.seconds,
        "swaps_per_request": found.num_swaps / len(latencies),
        "lost_share": progress.num_lost
        / (progress.num_lost + found.num_output_tokens + int(trace.prompt_lens.sum())),
        "steps": found.num_steps,
    }


def run_cell(cell: Cell, seed: int, names: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Presets in a cell, and `vllm_v1`, whose rate of serving is a load of 1."""
    served = 1.0
    if cell.load in TURNS:
        names = names if COSTS.keys() & {*names} else tuple(CACHES)
    elif cell.rate is not None:
        served = run(dataclasses.replace(cell, rate=None), seed, "vllm_v1")["requests_per_second"]
    return {name: run(cell, seed, name, served) for name in names}


def summary(rows: list[dict[str, Any]]) -> str:
    """A line for each cell and preset, means over seeds of ratios to `vllm_v1`."""
    lines = [
        "| cell | preset | tokens/s | mean latency | 99th percentile | first token | swaps | lost |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for (cell, name), group in itertools.groupby(rows, key=lambda row: (row["cell"], row["preset"])):
        found = list(group)
        means = [
            statistics.fmean(row["over_vllm_v1"][key] for row in found)
            for key in ("tokens_per_second", "mean_latency_seconds", "p99_latency_seconds")
        ]
        first = statistics.fmean(row["over_vllm_v1"]["mean_first_token_seconds"] for row in found)
        swaps = statistics.fmean(row["swaps_per_request"] for row in found)
        lost = statistics.fmean(row["lost_share"] for row in found)
        figures = " | ".join(f"{value:.3f}" for value in means)
        lines.append(f"| {cell} | {name} | {figures} | {first:.2f} | {swaps:.2f} | {100 * lost:.1f} % |")
    return "\n".join(lines)


def name_of(cell: Cell) -> str:
    """How tables call it."""
    rate = "at once" if cell.rate is None else f"Poisson {cell.rate:g}"
    rate = f"{cell.clients} clients" if cell.clients else rate
    device = f"{cell.gpus} x {cell.device}" if cell.gpus > 1 else cell.device
    name = f"{device}, {cell.model}, {cell.load}, {cell.max_num_seqs}, {rate}"
    if cell.num_gpu_blocks is not None:
        name += f", {cell.num_gpu_blocks} blocks"
    return name if cell.host_bytes == Cell.host_bytes else f"{name}, host {cell.host_bytes / 1e9:g} GB"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=new_file, required=True, help="JSON file to write")
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 on (default: 3)")
    parser.add_argument("--cells", default="", help="only those whose name holds this")
    parser.add_argument("--parts", action="store_true", help="what each part of the default is worth, too")
    parser.add_argument("--both-ways", action="store_true", help="only the default, and with `BothWays`")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--scale", type=int, default=1, help="divide the numbers of requests, for a trial")
    args = parser.parse_args(argv)
    for name in ("seeds", "jobs", "scale"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} must be at least 1")
    args.chosen = [cell for cell in CELLS if args.cells in name_of(cell)]
    if not args.chosen:
        known = "\n".join(map(name_of, CELLS))
        parser.error(f"--cells {args.cells!r} is in the name of no cell; these are:\n{known}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Simulate, print a table, write one JSON file; returns the exit status."""
    args = parse_args(argv)
    command = command_line(
        ["python", "scripts/compare_on_silicon.py", *(sys.argv[1:] if argv is None else argv)]
    )
    names = tuple(POLICIES) if args.parts else ("vllm_v1", "adaptive", *COSTS) if args.both_ways else MAIN
    cells = [
        dataclasses.replace(cell, num_requests=-(-cell.num_requests // args.scale)) for cell in args.chosen
    ]
    jobs = list(itertools.product(cells, range(args.seeds)))
    with concurrent.futures.ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(run_cell, *zip(*[(*job, names) for job in jobs], strict=True)))
    rows = []
    for (cell, seed), of_cell in zip(jobs, found, strict=True):
        for name, figures in of_cell.items():
            base = of_cell["vllm_v1"]
            ratios = {key: figures[key] / base[key] for key in figures if base[key]}
            row = {"cell": name_of(cell), "preset": name, "seed": seed, **figures}
            rows.append(row | {"over_vllm_v1": ratios})
    order = {name: number for number, name in enumerate(dict.fromkeys([*names, *CACHES]))}
    places = {name_of(cell): number for number, cell in enumerate(cells)}
    rows.sort(key=lambda row: (places[row["cell"]], order[row["preset"]], row["seed"]))
    write_json(args.out, {"command": command, "rows": rows})
    print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
