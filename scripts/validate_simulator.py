"""How well the simulator predicts the real engine: the same trace, presets and costs, on this machine.

    python scripts/validate_simulator.py --model MODEL --out validation.json

Loads MODEL, measures its costs (`jaxllm profile`), runs a trace on the real engine under every preset, in a
pool too small for it, and simulates each run with the distilled profile. Prints predicted and real seconds
and preemptions.

A shared machine changes its speed all the time. So the presets take turns, and before each turn costs are
measured again for a while. The simulations use costs that are fitted to all of it, and are compared with the
mean of the repetitions (a fit of relative errors lies somewhat below the mean of what it was given).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from sweep.options import list_of

from jaxllm import LLM, hardware
from jaxllm.bench.replay import replay
from jaxllm.bench.results import command_line, write_json
from jaxllm.costs import shape_of
from jaxllm.predictors.base import CostKind, CostModel
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.predictors.regression import Sample
from jaxllm.profiling import Profiler
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.presets import PRESETS, make_preset
from jaxllm.simulator.run import simulate
from jaxllm.workloads import Trace, UniformLengths, make_trace
from jaxllm.workloads.result import RunResult


class Run(NamedTuple):
    """A run of the real engine, and what its predictions had to be multiplied with."""

    result: RunResult
    factors: dict[str, float]


def run(llm: LLM, costs: CostModel, trace: Trace, config: SchedulerConfig, preset: str) -> Run:
    """One run of the real engine under a preset."""
    calibration = OnlineCalibration(costs)
    result = replay(llm, trace, config, make_preset(preset, calibration), costs=calibration)
    return Run(result, {kind: one.factor for kind, one in calibration.report().items()})


def compare(
    preset: str, runs: Sequence[Run], trace: Trace, config: SchedulerConfig, costs: CostModel
) -> dict[str, Any]:
    """One preset: its runs, and the simulation of them."""
    simulated = simulate(trace, config, make_preset(preset, costs), costs, overlap_swaps=True)
    seconds = [run.result.seconds for run in runs]
    preemptions = [run.result.num_preemptions for run in runs]
    spent = [dataclasses.asdict(run.result.spent) for run in runs]
    return {
        "preset": preset,
        "seconds": seconds,
        "simulated_seconds": simulated.seconds,
        "seconds_standard_error": _standard_error(seconds),
        "seconds_error": _error(simulated.seconds, statistics.fmean(seconds)),
        "preemptions": preemptions,
        "simulated_preemptions": simulated.num_preemptions,
        "preemptions_error": _error(simulated.num_preemptions, statistics.median(preemptions)),
        "swaps": [run.result.num_swaps for run in runs],
        "simulated_swaps": simulated.num_swaps,
        "weighted_turnaround": [float(run.result.weighted_turnaround.mean()) for run in runs],
        "simulated_weighted_turnaround": float(simulated.weighted_turnaround.mean()),
        "online_factors": [run.factors for run in runs],
        "real_spent": {part: statistics.fmean(one[part] for one in spent) for part in spent[0]},
        "simulated_spent": dataclasses.asdict(simulated.spent),
    }


def _standard_error(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def _error(predicted: float, real: float) -> float | None:
    return predicted / real - 1 if real else None


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of a checkpoint (default: the demo model)")
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--prompt-len", type=int, default=24, help="longest prompt, shortest is a quarter")
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--gpu-blocks", type=int, default=40)
    parser.add_argument("--host-blocks", type=int, default=20)
    parser.add_argument("--profile-seconds", type=float, default=60.0)
    parser.add_argument("--presets", type=list_of(str), default=",".join(sorted(PRESETS)))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, help="write the results to this JSON file")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.presets) - set(PRESETS)):
        parser.error(f"--presets: there is no {', '.join(unknown)}; presets are {', '.join(sorted(PRESETS))}")
    counts = (args.requests, args.prompt_len, args.output_len, args.max_num_seqs, args.gpu_blocks)
    if min(*counts, args.host_blocks, args.repetitions) < 1:
        parser.error("numbers of requests, tokens, sequences, blocks and repetitions must be at least 1")
    if not 0 < args.profile_seconds < math.inf:
        parser.error("--profile-seconds must be above 0, and finite")
    if args.out is not None:
        try:
            args.out.open("a").close()  # now rather than after the runs
        except OSError as error:
            parser.error(f"--out {args.out}: {error.strerror}")
    return args


def load(args: argparse.Namespace) -> LLM:
    """The engine, with a pool that a batch of the profile fits into."""
    return LLM(
        args.model,
        skip_tokenizer_init=True,
        max_model_len=max(128, args.prompt_len + args.output_len),
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=max(args.gpu_blocks, args.max_num_seqs * 8),
        num_host_blocks=args.host_blocks,
        decode_buckets=[size for size in (4, 8) if size < args.max_num_seqs] + [args.max_num_seqs],
        prefill_buckets=[32, 128],
        profile_seconds=0.0,
    )


def main(argv: list[str] | None = None) -> None:
    """Run it from the command line."""
    args = parse_args(argv)
    llm = load(args)
    name = pathlib.Path(llm.config.model).resolve().name
    profiler = Profiler(llm.executor, shape_of(llm.model_config, name, llm.dtype), seed=args.seed)
    config = dataclasses.replace(
        llm.engine.scheduler.config, num_gpu_blocks=args.gpu_blocks, num_host_blocks=args.host_blocks
    )
    trace = make_trace(
        UniformLengths(shortest=max(1, args.prompt_len // 4), longest=args.prompt_len),
        args.requests,
        args.output_len,
        outputs="uniform",
        seed=args.seed,
        name="validation",
    )
    replay(llm, trace.head(min(4, len(trace))), config, make_preset("vllm"))  # warm-up
    samples: dict[CostKind, list[Sample]] = {}
    runs: dict[str, list[Run]] = {preset: [] for preset in args.presets}
    for turn in range(args.repetitions):
        print(f"turn {turn + 1} of {args.repetitions}: measuring costs, running the presets", file=sys.stderr)
        for kind, more in profiler.samples(args.profile_seconds / args.repetitions).items():
            samples[kind] = samples.get(kind, []) + more
        costs = profiler.profile(samples, profiler.fit(samples, is_brief=True)).table
        first = turn % len(args.presets)
        for preset in args.presets[first:] + args.presets[:first]:
            runs[preset].append(run(llm, costs, trace, config, preset))
    profile = profiler.profile(samples, profiler.fit(samples))
    rows = []
    for preset, of_preset in runs.items():
        row = compare(preset, of_preset, trace, config, profile.table)
        rows.append(row)
        print(
            f"{preset}: real {statistics.fmean(row['seconds']):.2f} s "
            f"({min(row['seconds']):.2f}..{max(row['seconds']):.2f}), simulated "
            f"{row['simulated_seconds']:.2f} s ({row['seconds_error']:+.1%}); preemptions "
            f"{row['preemptions']} (swaps {row['swaps']}), simulated {row['simulated_preemptions']} "
            f"({row['simulated_swaps']})",
            flush=True,
        )
    if args.out is not None:
        report = {
            "command": command_line(["python", *sys.argv]),
            "hardware": hardware.describe_hardware(),
            "versions": hardware.versions(),
            "model": name,
            "profile_errors": {kind: report["test"] for kind, report in profile.errors.items()},
            "rows": rows,
        }
        write_json(args.out, report)


if __name__ == "__main__":
    main()
