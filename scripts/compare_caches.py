"""What the prefix cache is worth to conversations, simulated over load and size of the pool.

    python scripts/compare_caches.py --out-dir out/caches

Conversations in the manner of ShareGPT (`jaxllm.workloads.make_conversations`): a turn is sent a time of
thinking after the answer before it, and begins with all that was said. Policies with the prefix cache and
without, on a roofline of an A800 with OPT-13B. Writes results.json and report.md; interrupted, it goes on
where it was (cells.jsonl).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
import sys
import time
from importlib.metadata import version
from typing import Any

import numpy as np
from sweep.options import list_of
from sweep.simulated import BLOCK_SIZE, DEVICE, run_all

from jaxllm.bench.results import command_line, write_json
from jaxllm.predictors.base import model_shape
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.roofline import RooflineCostModel
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.presets import make_preset
from jaxllm.simulator.run import simulate
from jaxllm.workloads import Poisson, make_conversations

MODEL, MAX_LEN, MEAN_THINK, COMMON_LEN = "opt-13b", 2048, 60.0, 64
PRESETS = ("vllm_v1", "adaptive")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One simulation; `rate` is conversations that begin in a second."""

    preset: str
    caches: bool
    rate: float
    num_blocks: int
    num_conversations: int
    seed: int


def run_cell(cell: Cell) -> dict[str, Any]:
    """Simulate one cell."""
    trace = make_conversations(
        cell.num_conversations,
        mean_think=MEAN_THINK,
        common_len=COMMON_LEN,
        max_len=MAX_LEN,
        arrivals=Poisson(cell.rate),
        seed=cell.seed,
    )
    costs = RooflineCostModel(model_shape(MODEL), device_spec(DEVICE), block_size=BLOCK_SIZE)
    config = SchedulerConfig(
        num_gpu_blocks=cell.num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_LEN + 1,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        num_host_blocks=cell.num_blocks,
        enable_prefix_caching=cell.caches,
    )
    result = simulate(trace, config, make_preset(cell.preset, costs), costs, overlap_swaps=True)
    latency = (result.finish_times - result.arrival_times) / trace.output_lens
    first = result.first_token_times - result.arrival_times
    later = trace.follows >= 0 if trace.follows is not None else np.zeros(len(trace), bool)
    return {
        **dataclasses.asdict(cell),
        "num_requests": len(trace),
        "tokens_per_second": result.output_tokens_per_second,
        "first_token_seconds": float(first.mean()),
        "later_first_token_seconds": float(first[later].mean()),
        "seconds_per_token": float(latency.mean()),
        "prefill_tokens": result.num_prefill_tokens,
        "share_found": result.num_cached_tokens / int(trace.prompt_lens.sum()),
        "num_preemptions": result.num_preemptions,
    }


def report(rows: list[dict[str, Any]], command: str) -> str:
    """Markdown: a table for each size of the pool."""
    lines = [
        "# What the prefix cache is worth to conversations",
        "",
        f"Command: `{command}`. Simulated: {MODEL} on a roofline of {DEVICE}; turns {MEAN_THINK:g} s apart "
        f"on average, {COMMON_LEN} tokens that all begin with, at most {MAX_LEN} tokens. Found: share of the "
        "prompts' tokens. First tokens: mean seconds from sending, of all turns and of those after the "
        "first; latency: mean seconds by output token.",
        "",
    ]
    for num_blocks, of_pool in itertools.groupby(rows, key=lambda row: row["num_blocks"]):
        lines += [
            f"## {num_blocks} blocks, {num_blocks * BLOCK_SIZE:,} tokens",
            "",
            "| conversations/s | preset | cache | found | first token | of later turns | latency | tokens/s "
            "| preemptions |",
            "|---:|---|---|---:|---:|---:|---:|---:|---:|",
        ]
        lines += [
            f"| {row['rate']:g} | {row['preset']} | {'on' if row['caches'] else 'off'} "
            f"| {row['share_found']:.0%} | {row['first_token_seconds']:.3f} "
            f"| {row['later_first_token_seconds']:.3f} | {row['seconds_per_token']:.4f} "
            f"| {row['tokens_per_second']:.0f} | {row['num_preemptions']} |"
            for row in of_pool
        ]
        lines.append("")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Simulate, and write JSON and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--rates", type=list_of(float), default="0.5,1,1.5,2,3", help="default: %(default)s")
    parser.add_argument("--blocks", type=list_of(int), default="1500,3000,6000", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--out-dir", type=pathlib.Path, required=True)
    args = parser.parse_args(argv)
    if args.conversations < 1 or args.jobs < 1 or args.seed < 0 or min(args.rates) <= 0:
        parser.error("--conversations, --jobs and --rates must be positive, --seed at least 0")
    if min(args.blocks) * BLOCK_SIZE < MAX_LEN:
        parser.error(f"--blocks must hold {MAX_LEN} tokens: at least {MAX_LEN // BLOCK_SIZE}")
    command = command_line(["python", "scripts/compare_caches.py", *(sys.argv[1:] if argv is None else argv)])
    started = time.perf_counter()
    cells = [
        Cell(preset, caches, rate, num_blocks, args.conversations, args.seed)
        for num_blocks, rate, preset, caches in itertools.product(
            args.blocks, args.rates, PRESETS, (False, True)
        )
    ]
    rows = run_all(cells, run_cell, jobs=args.jobs, journal=args.out_dir / "cells.jsonl")
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
