"""What the prefix cache and its tiers are worth to conversations, simulated at the sizes of published ones.

    python scripts/compare_caches.py --out-dir out/caches

Conversations in the manner of ShareGPT (`jaxllm.research.workloads.make_conversations`): a turn is sent a
time of thinking after the answer before it, and begins with all that was said. Systems without a cache, with
one on the device, and with host memory beside it, on rooflines of A100s with 40 GB of KV and 220 GB of host
memory each, as Pensieve's (several are a tensor-parallel roofline: rates, links and memories add up, and two
all-reduces a layer are added to a step; llama-13b is Llama 2's as well). `hindsight` is `adaptive` that knows
when blocks are asked for next. "16 GB" are systems with so much host memory, with 2 TB of files at 5 GB/s or
without. What `adaptive` is made of is taken apart on the first model. The same systems then answer
conversations on the real engine, with the embedded model and a pool too small for them. Writes results.json
and report.md; interrupted, it goes on where it was (cells.jsonl).
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from sweep.conversations import MAX_LEN as ENGINE_MAX_LEN
from sweep.conversations import NUM_GPU_BLOCKS, NUM_HOST_BLOCKS, RATE, EngineSystem, figures, play
from sweep.options import list_of
from sweep.simulated import BLOCK_SIZE, run_all

from jaxllm.predictors.base import CostModel
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.published_shapes import model_shape
from jaxllm.predictors.roofline import DEFAULT_STEP_OVERHEAD_SECONDS, RooflineCostModel
from jaxllm.research.bench.results import command_line, write_json
from jaxllm.research.simulator.files import SimulatedFiles
from jaxllm.research.simulator.run import simulate
from jaxllm.research.workloads import Poisson, make_conversations
from jaxllm.sched.cache.names import BlockName
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.policies import (
    S3FIFO,
    AheadOfTime,
    Hindsight,
    LeastRecentlyUsed,
    ResumeAtOnce,
    SchedulerPolicy,
    WriteBack,
    WriteThrough,
)
from jaxllm.sched.presets import adaptive, cached_attention, flashgen, hicache, pensieve, sglang, vllm_v1
from jaxllm.sched.scheduler import Scheduler
from jaxllm.system.hardware import describe_hardware, versions
from jaxllm.system.output_files import NewFolder, OutputParser

DEVICE, GPU_BYTES, HOST_BYTES, FILE_BANDWIDTH = "A100-80GB", 40e9, 220e9, 5e9
MAX_LEN, MEAN_THINK, COMMON_LEN = 2048, 60.0, 64
SECONDS = 400.0  # in which conversations begin
ALL_REDUCE_SECONDS = 15e-6  # an assumption: latency of a small one over NVLink
NUM_DEVICES = {"opt-13b": 1, "opt-66b": 4, "llama-13b": 1, "llama-2-70b": 4}
RATES = {"opt-13b": (0.5, 1.0, 1.5), "opt-66b": (0.5, 1.0, 1.5)}
RATES |= {"llama-13b": (0.5, 1.0, 1.5), "llama-2-70b": (1.0, 3.0, 5.0)}


@dataclasses.dataclass(frozen=True)
class System:
    """A policy, and what it has to cache in, in bytes for each device."""

    policy: Callable[[CostModel], SchedulerPolicy]
    caches: bool = True
    host_bytes: float = HOST_BYTES
    file_bytes: float = 0.0


def _adaptive(**changes: Any) -> Callable[[CostModel], SchedulerPolicy]:
    return lambda costs: dataclasses.replace(adaptive(costs), **{k: v(costs) for k, v in changes.items()})


SYSTEMS: dict[str, System] = {
    "vllm_v1, no cache": System(vllm_v1, caches=False, host_bytes=0),
    "vllm_v1": System(vllm_v1, host_bytes=0),
    "hicache, write-through": System(hicache),
    "hicache, write-back": System(lambda costs: dataclasses.replace(hicache(costs), offload=WriteBack())),
    "sglang": System(sglang),
    "cached_attention": System(cached_attention),
    "flashgen": System(flashgen),
    "pensieve": System(pensieve),
    "S3-FIFO": System(lambda costs: dataclasses.replace(hicache(costs), retention=S3FIFO())),
    "adaptive": System(adaptive),
    "hindsight": System(adaptive),
    "cached_attention, 16 GB": System(cached_attention, host_bytes=16e9),
    "cached_attention, 16 GB, files": System(cached_attention, host_bytes=16e9, file_bytes=2e12),
    "adaptive, 16 GB": System(adaptive, host_bytes=16e9),
    "adaptive, 16 GB, files": System(adaptive, host_bytes=16e9, file_bytes=2e12),
}
PARTS: dict[str, System] = {
    "adaptive, device only": System(adaptive, host_bytes=0),
    "adaptive, write-through": System(_adaptive(offload=lambda costs: WriteThrough())),
    "adaptive, ahead of time": System(_adaptive(offload=lambda costs: AheadOfTime())),
    "adaptive, copies at once": System(_adaptive(resume=lambda costs: ResumeAtOnce())),
    "adaptive, least recently used": System(_adaptive(retention=lambda costs: LeastRecentlyUsed())),
}
ENGINE_SYSTEMS = {
    name: EngineSystem(one.policy, one.caches, NUM_HOST_BLOCKS if one.host_bytes else 0)
    for name, one in SYSTEMS.items()
    if name != "hindsight" and "16 GB" not in name
}
PUBLISHED = list(SYSTEMS)[1 : list(SYSTEMS).index("adaptive")]


_NO_CACHE, _FIRST = "vllm_v1, no cache", "later_first_token_seconds"
_PROMPTS, _LATENCY = "prompt_tokens_per_second", "seconds_per_token"
FIGURES = (
    ("Pensieve over vLLM, tokens/s", "1.14-3.0x", "pensieve", _NO_CACHE, "tokens_per_second"),
    ("Pensieve over vLLM, seconds by token", "-", "pensieve", _NO_CACHE, _LATENCY),
    ("CachedAttention over recomputing, first token", "0.13x", "cached_attention", _NO_CACHE, _FIRST),
    ("CachedAttention over recomputing, prompt tokens/s", "7.8x", "cached_attention", _NO_CACHE, _PROMPTS),
    ("HiCache over a cache on the device, first token", "0.20x", "hicache, write-through", "vllm_v1", _FIRST),
    ("HiCache over the same, tokens/s", "up to 6x", "hicache, write-through", "vllm_v1", "tokens_per_second"),
    ("adaptive over recomputing, first token", "-", "adaptive", _NO_CACHE, _FIRST),
    ("adaptive over recomputing, prompt tokens/s", "-", "adaptive", _NO_CACHE, _PROMPTS),
    ("adaptive over recomputing, tokens/s", "-", "adaptive", _NO_CACHE, "tokens_per_second"),
)
"""What, a paper's figure, and what to compare here: a system, with which other, in what."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One simulation; `rate` is conversations that begin in a second."""

    system: str
    model: str
    rate: float
    num_conversations: int
    seed: int


class _Noting(Scheduler):
    """Notes when blocks are asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.uses: collections.defaultdict[BlockName, list[float]] = collections.defaultdict(list)

    def _start(self, request: Any, decision: Any, step_id: int, now: float) -> Any:
        for name in self._state.lookups.findable(request):
            self.uses[name].append(now)
        return super()._start(request, decision, step_id, now)


def costs_of(model: str) -> RooflineCostModel:
    """A roofline of as many devices as the model is run on."""
    shape, one, count = model_shape(model), device_spec(DEVICE), NUM_DEVICES[model]
    device = dataclasses.replace(
        one,
        name=f"{count} x {DEVICE}",
        peak_flops={dtype: flops * count for dtype, flops in one.peak_flops.items()},
        memory_bandwidth=one.memory_bandwidth * count,
        memory_bytes=one.memory_bytes * count,
        host_bandwidth=one.host_bandwidth * count,
    )
    overhead = DEFAULT_STEP_OVERHEAD_SECONDS
    if count > 1:
        overhead += 2 * shape.num_layers * ALL_REDUCE_SECONDS
    return RooflineCostModel(shape, device, block_size=BLOCK_SIZE, step_overhead_seconds=overhead)


def run_cell(cell: Cell, **options: Any) -> dict[str, Any]:
    """Simulate one cell; `options` are `simulate`'s."""
    trace = make_conversations(
        cell.num_conversations,
        mean_think=MEAN_THINK,
        common_len=COMMON_LEN,
        max_len=MAX_LEN,
        arrivals=Poisson(cell.rate),
        seed=cell.seed,
    )
    system, costs = {**SYSTEMS, **PARTS}[cell.system], costs_of(cell.model)
    block_bytes = costs.model.block_bytes(BLOCK_SIZE) / NUM_DEVICES[cell.model]
    config = SchedulerConfig(
        num_gpu_blocks=int(GPU_BYTES / block_bytes),
        block_size=BLOCK_SIZE,
        max_model_len=MAX_LEN + 1,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        num_host_blocks=int(system.host_bytes / block_bytes),
        enable_prefix_caching=system.caches,
    )
    policy = system.policy(costs)
    if cell.system == "hindsight":
        noting = _Noting(config, policy)
        simulate(trace, config, policy, costs, overlap_swaps=True, scheduler=noting)
        policy = dataclasses.replace(policy, retention=Hindsight(costs, noting.uses))
    files = None
    if system.file_bytes:
        bandwidth = FILE_BANDWIDTH / NUM_DEVICES[cell.model]  # of one disk, whoever's blocks they are
        files = SimulatedFiles(int(system.file_bytes / block_bytes), block_bytes, bandwidth)
    result = simulate(trace, config, policy, costs, overlap_swaps=True, files=files, **options)
    return {
        **dataclasses.asdict(cell),
        "num_gpu_blocks": config.num_gpu_blocks,
        "num_host_blocks": config.num_host_blocks,
        **figures(trace, result),
    }


def report(
    rows: list[dict[str, Any]],
    command: str,
    on_engine: Sequence[dict[str, Any]] = (),
    mean_think: float = 0.0,
) -> str:
    """Markdown: a table for each model and rate."""
    lines = [
        "# What the prefix cache and its tiers are worth to conversations",
        "",
        f"Command: `{command}`. Simulated: rooflines of {DEVICE}, {GPU_BYTES / 1e9:g} GB of KV and "
        f"{HOST_BYTES / 1e9:g} GB of host memory for each; turns {MEAN_THINK:g} s apart on average, "
        f"{COMMON_LEN} tokens that all begin with, at most {MAX_LEN} tokens. Found: share of the prompts' "
        "tokens, and of that on the host and in files; computed: thousands of tokens prefilled, lost ones "
        "again. First tokens: mean seconds from sending, of all turns and of those after the first; "
        "latency: seconds by output token, mean and 90th percentile; prompts: "
        "their tokens by second that they are computed or waited for. Ratios are to `vllm_v1` without a "
        "cache.",
        "",
    ]
    for (model, rate), of_cell in itertools.groupby(rows, key=lambda row: (row["model"], row["rate"])):
        lines += [f"## {model} on {NUM_DEVICES[model]}, {rate:g} conversations/s", "", *_table(list(of_cell))]
    lines += _published(rows)
    if on_engine:
        lines += [
            "## On the engine",
            "",
            f"Measured: the embedded model on this machine, {NUM_GPU_BLOCKS} blocks on the device and "
            f"{NUM_HOST_BLOCKS} on the host, conversations of at most {ENGINE_MAX_LEN} tokens with answers "
            f"of 40 on average, {RATE:g} beginning in a second, turns {mean_think:g} s apart; medians of "
            f"{on_engine[0]['num_runs']} runs of each system, which took turns.",
            "",
            *_table(on_engine),
        ]
    return "\n".join(lines)


def _table(cell: Sequence[dict[str, Any]]) -> list[str]:
    """A row for each system, and `adaptive` over the best of the others."""
    base = cell[0]
    lines = [
        "| system | found | on host | in files | computed | first token | of later turns | ratio "
        "| latency | p90 | ratio | prompts | tokens/s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['system']} | {row['share_found']:.0%} | {row['share_found_on_host']:.0%} "
        f"| {row['share_found_in_files']:.0%} | {row['prefill_tokens'] / 1000:.0f} "
        f"| {row['first_token_seconds']:.3g} | {row['later_first_token_seconds']:.3g} "
        f"| {row['later_first_token_seconds'] / base['later_first_token_seconds']:.2f} "
        f"| {row['seconds_per_token']:.4f} | {row['p90_seconds_per_token']:.4f} "
        f"| {row['seconds_per_token'] / base['seconds_per_token']:.2f} "
        f"| {row['prompt_tokens_per_second'] / base['prompt_tokens_per_second']:.1f}x "
        f"| {row['tokens_per_second']:.0f} |"
        for row in cell
    ]
    of = {row["system"]: row for row in cell}
    lines.append("")
    for other in ("published", "hindsight"):
        others = [of[name] for name in (PUBLISHED if other == "published" else [other]) if name in of]
        if "adaptive" in of and others:
            lines.append(f"`adaptive` over the best {other}: {_ratios(of['adaptive'], others)}.")
    return [*lines, ""]


def _ratios(ours: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """Ours over the best of the others."""
    least = (("latency", "seconds_per_token"), ("90th percentile", "p90_seconds_per_token"))
    least = (*least, ("first token", "first_token_seconds"))
    shares = [f"{name} {ours[key] / min(row[key] for row in others):.2f}" for name, key in least]
    most = (("tokens/s", "tokens_per_second"), ("found", "share_found"))
    shares += [f"{name} {ours[key] / max(row[key] for row in others):.2f}" for name, key in most]
    return ", ".join(shares)


def _published(rows: list[dict[str, Any]]) -> list[str]:
    """What the papers say beside the same ratios here, over all models and rates."""
    of = {(row["model"], row["rate"], row["system"]): row for row in rows}

    def ratios(system: str, base: str, key: str) -> str:
        found = [
            row[key] / of[model, rate, base][key]
            for (model, rate, name), row in of.items()
            if name == system and (model, rate, base) in of
        ]
        return f"{min(found):.2f}-{max(found):.2f}" if found else "-"

    lines = [
        "## Beside the published figures",
        "",
        "Ranges over all models and rates above. The papers' own traces, thinking times and loads are not "
        "these: ShareGPT's conversations are longer, and their baselines computed all of a prompt anew.",
        "",
        "| what | published | here |",
        "|---|---:|---:|",
    ]
    lines += [f"| {what} | {said} | {ratios(*here)} |" for what, said, *here in FIGURES]
    return [*lines, ""]


def main(argv: list[str] | None = None) -> None:
    """Simulate, and write JSON and report."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="in which conversations begin")
    parser.add_argument("--models", type=list_of(str), default=",".join(NUM_DEVICES), help="%(default)s")
    parser.add_argument("--rates", type=list_of(float), help="conversations a second (default: by model)")
    parser.add_argument("--systems", type=lambda text: text.split(";"), default=[*SYSTEMS, *PARTS])
    parser.add_argument("--engine-repetitions", type=int, default=3, help="0 leaves the engine out")
    parser.add_argument("--engine-conversations", type=int, default=120, help="in each of them")
    parser.add_argument("--engine-think", type=float, default=1.0, help="mean seconds between turns there")
    parser.add_argument("--engine-profile-seconds", type=float, default=10.0, help="before them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument(
        "--out-dir", type=NewFolder("results.json", "report.md", journals=["cells.jsonl"]), required=True
    )
    args = parser.parse_args(argv)
    if (
        min(args.engine_repetitions, args.engine_profile_seconds, args.engine_think) < 0
        or args.engine_conversations < 1
    ):
        parser.error("--engine-... must be at least 0, --engine-conversations at least 1")
    if args.jobs < 1 or args.seed < 0 or min([args.seconds, *(args.rates or ())]) <= 0:
        parser.error("--seconds, --jobs and --rates must be positive, --seed at least 0")
    if not set(args.models) <= NUM_DEVICES.keys() or not set(args.systems) <= {*SYSTEMS, *PARTS}:
        names = "; ".join([*SYSTEMS, *PARTS])
        parser.error(f"--models: {', '.join(NUM_DEVICES)}; --systems, with ; between: {names}")
    command = command_line(["python", "scripts/compare_caches.py", *(sys.argv[1:] if argv is None else argv)])
    started = time.perf_counter()
    cells = [
        Cell(system, model, rate, max(1, round(rate * args.seconds)), args.seed)
        for model in args.models
        for rate, system in itertools.product(args.rates or RATES[model], args.systems)
        if system in SYSTEMS or model == args.models[0]
    ]
    rows = run_all(cells, run_cell, jobs=args.jobs, journal=args.out_dir / "cells.jsonl")
    on_engine = []
    if args.engine_repetitions:
        systems = {name: one for name, one in ENGINE_SYSTEMS.items() if name in args.systems}
        on_engine = play(
            systems,
            num_conversations=args.engine_conversations,
            repetitions=args.engine_repetitions,
            mean_think=args.engine_think,
            profile_seconds=args.engine_profile_seconds,
            seed=args.seed,
        )
    values = {
        "command": command,
        "device": DEVICE,
        "seconds_of_last_start": round(time.perf_counter() - started, 1),
        "versions": {"jaxllm": version("jaxllm"), "python": sys.version.split()[0]},
        "rows": rows,
        "engine": {"hardware": describe_hardware(), "versions": versions(), "rows": on_engine},
    }
    write_json(args.out_dir / "results.json", values)
    (args.out_dir / "report.md").write_text(
        report(rows, command, on_engine, args.engine_think), encoding="utf-8"
    )
    print(f"{len(rows)} simulations in {values['seconds_of_last_start']} s; see {args.out_dir / 'report.md'}")


if __name__ == "__main__":
    main()
