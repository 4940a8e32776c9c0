"""Swap, recompute, or choose, on the real engine: over the speed of a throttled link to the host.

    python scripts/sweep_engine.py --out sweep-engine.json

The link is slowed down by the executor's experiment option (`host_bandwidth_limit`), to multiples of the
speed at which copying a typical request out and back takes as long as one prefill of it. For each speed the
swaps are measured and predictors fitted anew; prefill and decode are measured once. All three actions share
every other policy of preset `adaptive`. They take turns within a seed, each seed beginning with another, and
are compared on the same trace: the share is the median over seeds of the fixed action's seconds over those
of the adaptive one, for the better fixed action.

A shared machine changes its speed from run to run. So a yardstick, some decode and prefill steps, is timed
before and after each run; the link is set to that speed, too, and the run's seconds are divided by how many
times longer than at first the yardstick took. Of the repetitions the median counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxllm import LLM
from jaxllm.bench import hardware
from jaxllm.bench.command import command_line
from jaxllm.bench.profile import Profiler
from jaxllm.bench.replay import replay
from jaxllm.costs import shape_of
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.sched.policies import AlwaysRecompute, OverlapAwareResume, SwapIfItFits
from jaxllm.sched.presets import adaptive
from jaxllm.workloads import UniformLengths, make_trace

SPEEDS = (0.1, 0.35, 0.7, 1.4, 3.0, 10.0)
ACTIONS = ("recompute", "swap", "adaptive")


class Run(NamedTuple):
    """A run's seconds at the machine's first speed, as measured, and how slow the machine was."""

    seconds: float
    measured_seconds: float
    slowness: float
    num_preemptions: int
    num_swaps: int


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of a checkpoint (default: the demo model)")
    parser.add_argument("--speeds", default=",".join(map(str, SPEEDS)), help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--prompt-len", type=int, default=96, help="longest; the shortest is a quarter")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--gpu-blocks", type=int, default=64)
    parser.add_argument("--host-blocks", type=int, default=64)
    parser.add_argument("--profile-seconds", type=float, default=30.0)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--repetitions", type=int, default=3, help="of each run")
    parser.add_argument("--out", type=pathlib.Path, help="write the results to this JSON file")
    args = parser.parse_args(argv)
    args.speeds = [float(speed) for speed in args.speeds.split(",")]
    args.seeds = [int(seed) for seed in args.seeds.split(",")]
    if min(args.speeds) <= 0 or args.repetitions < 1:
        parser.error("--speeds must be above 0, and --repetitions at least 1")
    return args


def load(args: argparse.Namespace) -> LLM:
    """The engine, with a pool that is too small for the workload."""
    return LLM(
        args.model,
        skip_tokenizer_init=True,
        max_model_len=max(128, args.prompt_len + args.output_len),
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=args.gpu_blocks,
        num_host_blocks=args.host_blocks,
        decode_buckets=[args.max_num_seqs],
        prefill_buckets=[64, 256],
        profile_seconds=0.0,
    )


def in_turn(turn: int) -> tuple[str, ...]:
    """The actions in the order of a seed's runs."""
    first = turn % len(ACTIONS)
    return ACTIONS[first:] + ACTIONS[:first]


def yardstick(profiler: Profiler, args: argparse.Namespace) -> float:
    """Seconds that a fixed piece of work takes now."""
    decode = profiler.time_decode(args.max_num_seqs, 8, 20)
    return 16 * decode + profiler.time_prefill(64, 1, 10)


def seed_by_seed(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """How many times longer each fixed action takes than the adaptive one, median over seeds."""
    return {
        action: statistics.median(
            fixed / chosen for fixed, chosen in zip(seconds[action], seconds["adaptive"], strict=True)
        )
        for action in ("recompute", "swap")
    }


def main(argv: list[str] | None = None) -> None:
    """Run it from the command line."""
    args = parse_args(argv)
    llm = load(args)
    name = pathlib.Path(llm.config.model).resolve().name
    profiler = Profiler(llm.executor, shape_of(llm.model_config, name, llm.dtype))
    print(f"measuring costs for {args.profile_seconds:g} s", file=sys.stderr)
    samples = profiler.samples(args.profile_seconds)
    table = profiler.profile(samples, profiler.fit(samples, is_brief=True)).table
    num_tokens = (args.prompt_len * 5 // 8) + args.output_len // 2
    block_size = llm.executor.block_size
    num_bytes = 2 * -(-num_tokens // block_size) * profiler.model.block_bytes(block_size)
    equal = num_bytes / table.prefill_seconds(num_tokens, 1)
    first_yardstick = yardstick(profiler, args)
    traces = {
        seed: make_trace(
            UniformLengths(shortest=max(1, args.prompt_len // 4), longest=args.prompt_len),
            args.requests,
            args.output_len,
            outputs="uniform",
            seed=seed,
            name="sweep",
        )
        for seed in args.seeds
    }
    config = llm.engine.scheduler.config
    rows = []
    for speed in args.speeds:
        llm.executor.limit_host_bandwidth(speed * equal)
        swaps = profiler.swap_samples(60)
        costs = profiler.profile(
            {**samples, **swaps}, profiler.fit({**samples, **swaps}, is_brief=True)
        ).table
        runs: dict[str, list[Run]] = {action: [] for action in ACTIONS}
        for turn, trace in enumerate(traces.values()):
            of_trace: dict[str, list[Run]] = {action: [] for action in ACTIONS}
            for repetition in range(args.repetitions):
                for action in in_turn(turn + repetition):
                    calibration = OnlineCalibration(costs)
                    policy = adaptive(calibration)
                    if action != "adaptive":
                        fixed = AlwaysRecompute() if action == "recompute" else SwapIfItFits()
                        resume = OverlapAwareResume(calibration, gives_up=False)
                        policy = dataclasses.replace(policy, action=fixed, resume=resume)
                    before = yardstick(profiler, args) / first_yardstick
                    llm.executor.limit_host_bandwidth(speed * equal / before)
                    result = replay(llm, trace, config, policy, costs=calibration)
                    slowness = (before + yardstick(profiler, args) / first_yardstick) / 2
                    run = Run(
                        result.seconds / slowness,
                        result.seconds,
                        slowness,
                        result.num_preemptions,
                        result.num_swaps,
                    )
                    of_trace[action].append(run)
            for action, of in of_trace.items():
                runs[action].append(sorted(of)[len(of) // 2])
        seconds = {action: statistics.median(run.seconds for run in of) for action, of in runs.items()}
        ratios = seed_by_seed({action: [run.seconds for run in of] for action, of in runs.items()})
        share = min(ratios.values())
        rows.append(
            {
                "speed": speed,
                "host_bandwidth_limit": speed * equal,
                "seconds": {action: [run.seconds for run in of] for action, of in runs.items()},
                "measured_seconds": {
                    action: [run.measured_seconds for run in of] for action, of in runs.items()
                },
                "slowness": {action: [run.slowness for run in of] for action, of in runs.items()},
                "preemptions": {action: [run.num_preemptions for run in of] for action, of in runs.items()},
                "swaps": {action: [run.num_swaps for run in of] for action, of in runs.items()},
                "ratios": ratios,
                "share": share,
            }
        )
        shown = ", ".join(f"{action} {value:.2f} s" for action, value in seconds.items())
        counts = [f"{run.num_swaps}/{run.num_preemptions}" for run in runs["adaptive"]]
        print(
            f"link x{speed:g} ({speed * equal / 1e6:.1f} MB/s): {shown}; share {share:.3f}; swapped {counts}",
            flush=True,
        )
    if args.out is not None:
        report = {
            "command": command_line(["python", *sys.argv]),
            "hardware": hardware.describe_hardware(),
            "versions": hardware.versions(),
            "model": name,
            "equal_speed_bytes_per_second": equal,
            "rows": rows,
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
