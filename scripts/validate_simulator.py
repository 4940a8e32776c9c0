"""How well the simulator predicts the real engine, and how presets compare on it, on this machine.

    python scripts/validate_simulator.py --model MODEL --repetitions 9 --out validation.json

Loads MODEL once per preset, measures its costs (`jaxllm profile`), runs traces on the real engines, in pools
too small for them, and simulates each run with the distilled profile. Prints predicted and real seconds and
preemptions, and how many times as fast as the first preset each is, really and simulated.

A shared machine changes its speed all the time. So the presets run side by side, on an engine each, in turns
of 50 ms, and each is timed by a clock that goes only while it has its turn; so no step is dispatched ahead,
as the engine otherwise does. Each repetition has a trace of its own: the intervals of the ratios (95 %,
Student's, of their logarithms) are over traces and chance together. Before each, costs are measured again for
a while; the simulations use costs that are fitted to all of that.
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

from sweep.intervals import interval
from sweep.options import list_of

from jaxllm import LLM, hardware
from jaxllm.bench.replay import Replay, Stopwatch, replay, replay_side_by_side
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


def side_by_side(
    llms: Sequence[LLM], presets: Sequence[str], costs: CostModel, trace: Trace, config: SchedulerConfig
) -> dict[str, Run]:
    """A run of every preset, each on an engine of its own."""
    runs, calibrations = [], []
    for llm, preset in zip(llms, presets, strict=True):
        calibration = OnlineCalibration(costs)
        policy = make_preset(preset, calibration)
        runs.append(
            Replay(llm, trace, config, policy, costs=calibration, async_scheduling=False, clock=Stopwatch())
        )
        calibrations.append(calibration)
    found = {}
    for preset, result, calibration in zip(presets, replay_side_by_side(runs), calibrations, strict=True):
        found[preset] = Run(result, {kind: one.factor for kind, one in calibration.report().items()})
    return found


def compare(
    preset: str, runs: Sequence[Run], traces: Sequence[Trace], config: SchedulerConfig, costs: CostModel
) -> dict[str, Any]:
    """One preset: its runs, and the simulations of them."""
    simulated = [
        simulate(trace, config, make_preset(preset, costs), costs, overlap_swaps=True) for trace in traces
    ]
    real = [run.result for run in runs]
    spent = [dataclasses.asdict(run.spent) for run in real]
    row: dict[str, Any] = {"preset": preset}
    for prefix, of in (("", real), ("simulated_", simulated)):
        row[prefix + "seconds"] = [run.seconds for run in of]
        row[prefix + "preemptions"] = [run.num_preemptions for run in of]
        row[prefix + "swaps"] = [run.num_swaps for run in of]
        row[prefix + "weighted_turnaround"] = [float(run.weighted_turnaround.mean()) for run in of]
    return row | {
        "seconds_error": _error(sum(row["simulated_seconds"]), sum(row["seconds"])),
        "preemptions_error": _error(sum(row["simulated_preemptions"]), sum(row["preemptions"])),
        "online_factors": [run.factors for run in runs],
        "real_spent": {part: statistics.fmean(one[part] for one in spent) for part in spent[0]},
    }


def ratios(row: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """How many times as fast as the first preset, and its weighted turnaround over the first one's."""
    found: dict[str, Any] = {}
    for prefix in ("", "simulated_"):
        for name, ours, theirs in (("speed", first, row), ("turnaround", row, first)):
            value = prefix + ("seconds" if name == "speed" else "weighted_turnaround")
            found[prefix + name] = interval(
                [one / other for one, other in zip(ours[value], theirs[value], strict=True)]
            )
    return found


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
    parser.add_argument("--outputs", choices=("uniform", "max"), default="uniform")
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
    if min(*counts, args.host_blocks) < 1 or args.repetitions < 2:
        parser.error(
            "numbers of requests, tokens, sequences and blocks must be at least 1, --repetitions at least 2"
        )
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
    presets, llms = args.presets, [load(args) for _ in args.presets]
    llm = llms[0]
    name = pathlib.Path(llm.config.model).resolve().name
    profiler = Profiler(llm.executor, shape_of(llm.model_config, name, llm.dtype), seed=args.seed)
    config = dataclasses.replace(
        llm.engine.scheduler.config, num_gpu_blocks=args.gpu_blocks, num_host_blocks=args.host_blocks
    )
    prompts = UniformLengths(shortest=max(1, args.prompt_len // 4), longest=args.prompt_len)
    traces = [
        make_trace(
            prompts, args.requests, args.output_len, outputs=args.outputs, seed=seed, name="validation"
        )
        for seed in range(args.seed, args.seed + args.repetitions)
    ]
    for one in llms:
        replay(one, traces[0].head(min(4, args.requests)), config, make_preset("vllm"))  # warm-up
    samples: dict[CostKind, list[Sample]] = {}
    runs: dict[str, list[Run]] = {preset: [] for preset in presets}
    for turn, trace in enumerate(traces):
        print(f"turn {turn + 1} of {args.repetitions}: measuring costs, running the presets", file=sys.stderr)
        for kind, more in profiler.samples(args.profile_seconds / args.repetitions).items():
            samples[kind] = samples.get(kind, []) + more
        costs = profiler.profile(samples, profiler.fit(samples, is_brief=True)).table
        first = turn % len(presets)
        turned = llms[first:] + llms[:first]
        for preset, run in side_by_side(turned, presets, costs, trace, config).items():
            runs[preset].append(run)
    profile = profiler.profile(samples, profiler.fit(samples))
    rows: list[dict[str, Any]] = []
    for preset, of_preset in runs.items():
        row = compare(preset, of_preset, traces, config, profile.table)
        row["over_first"] = ratios(row, rows[0] if rows else row)
        rows.append(row)
        speed, low, high = row["over_first"]["speed"]
        turnaround, least, most = row["over_first"]["turnaround"]
        print(
            f"{preset}: real {statistics.fmean(row['seconds']):.2f} s, simulated "
            f"{statistics.fmean(row['simulated_seconds']):.2f} s ({row['seconds_error']:+.1%}); preemptions "
            f"{sum(row['preemptions'])} (swaps {sum(row['swaps'])}), simulated "
            f"{sum(row['simulated_preemptions'])} ({sum(row['simulated_swaps'])}); {speed:.3f} "
            f"({low:.3f}..{high:.3f}) times as fast as {presets[0]}, simulated "
            f"{row['over_first']['simulated_speed'][0]:.3f}; turnaround {turnaround:.2f} "
            f"({least:.2f}..{most:.2f}) of its, simulated {row['over_first']['simulated_turnaround'][0]:.2f}",
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
