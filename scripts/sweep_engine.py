"""Swap, recompute, or choose, on the real engine: over link speed, host pool and output length.

    python scripts/sweep_engine.py --out-dir out/sweep-engine

The link is slowed down (`jaxllm.research.slow_link`), to multiples of the speed at which copying a typical
request out and back takes as long as one prefill of it. For each speed the swaps are measured and predictors
fitted anew; prefill and decode are measured once. All three actions share every other policy of preset
`adaptive`, and are compared seed by seed on the same trace.

A shared machine changes its speed from second to second. So the actions run side by side, on an engine each,
in turns of 50 ms, and each is timed by a clock that goes only while it has its turn, as does its link; so no
step is dispatched ahead, as the engine otherwise does. Which engine runs which action changes from seed to
seed. A second adaptive engine runs beside them: how far the two differ is what chance does. What is left is
that a run which takes longer than the others ends alone, and that a link whose speed is fixed is another
multiple of a machine whose speed is not: a prefill is timed at the end again.

Writes results.json and report.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sweep.options import ARRIVALS_HELP, in_words, list_of
from sweep.report import Place, shares_report

from jaxllm import LLM
from jaxllm.engine.costs import shape_of
from jaxllm.engine.profiling import Profiler
from jaxllm.errors import ConfigError
from jaxllm.predictors.base import CostModel
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.research.bench.replay import Replay, Stopwatch, replay_side_by_side
from jaxllm.research.bench.results import command_line, write_json
from jaxllm.research.slow_link import slow_down
from jaxllm.research.workloads import Trace, UniformLengths, make_trace, parse_arrivals
from jaxllm.research.workloads.result import RunResult
from jaxllm.sched.policies import AlwaysRecompute, SchedulerPolicy, SwapIfItFits
from jaxllm.sched.presets import adaptive
from jaxllm.system import hardware
from jaxllm.system.output_files import NewFolder, OutputParser

SPEEDS = (0.02, 0.1, 0.4, 1.0, 10.0)
AGAIN = "adaptive again"
ACTIONS = ("recompute", "swap", "adaptive", AGAIN)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a checkpoint (default: the demo model)")
    parser.add_argument(
        "--speeds", type=list_of(float), default=",".join(map(str, SPEEDS)), help="default: %(default)s"
    )
    parser.add_argument("--host-blocks", type=list_of(int), default="12,48", help="default: %(default)s")
    parser.add_argument(
        "--output-lengths", type=list_of(int), default="32,64", help="longest outputs (default: %(default)s)"
    )
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument(
        "--arrivals",
        default="all",
        help=ARRIVALS_HELP,
    )
    parser.add_argument("--prompt-len", type=int, default=96, help="longest; the shortest is a quarter")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--gpu-blocks", type=int, default=36)
    parser.add_argument("--profile-seconds", type=float, default=30.0)
    parser.add_argument("--seeds", type=list_of(int), default="0,1,2,3,4")
    parser.add_argument("--out-dir", type=NewFolder("results.json", "report.md"), required=True)
    args = parser.parse_args(argv)
    try:
        parse_arrivals(args.arrivals)
    except ConfigError as error:
        parser.error(f"--arrivals: {error}")
    if not all(0 < speed < math.inf for speed in args.speeds):
        parser.error("--speeds must be above 0, and finite")
    counts = (args.requests, args.prompt_len, args.max_num_seqs, args.gpu_blocks)
    if min(*counts, *args.host_blocks, *args.output_lengths) < 1:
        parser.error("numbers of requests, tokens, sequences and blocks must be at least 1")
    if not 0 < args.profile_seconds < math.inf:
        parser.error("--profile-seconds must be above 0, and finite")
    return args


def load(args: argparse.Namespace) -> LLM:
    """An engine with a pool that is too small for the workload."""
    return LLM(
        args.model,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        warm_up="all",
        max_model_len=max(128, args.prompt_len + max(args.output_lengths)),
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=args.gpu_blocks,
        num_host_blocks=max(args.host_blocks),
        decode_buckets=[args.max_num_seqs],
        prefill_buckets=[64, 256],
        profile_seconds=0.0,
    )


def policy_of(action: str, costs: CostModel) -> SchedulerPolicy:
    """Preset `adaptive` with another action."""
    policy = adaptive(costs)
    if action in ("adaptive", AGAIN):
        return policy
    fixed = AlwaysRecompute() if action == "recompute" else SwapIfItFits(costs)
    return dataclasses.replace(policy, action=fixed)


def side_by_side(
    engines: Sequence[LLM], trace: Trace, costs: CostModel, num_host_blocks: int, bandwidth: float
) -> dict[str, RunResult]:
    """Run a trace with every action, each on its own engine, behind links of `bandwidth` bytes per second."""
    runs = []
    for llm, action in zip(engines, ACTIONS, strict=True):
        watch, calibration = Stopwatch(), OnlineCalibration(costs)
        slow_down(llm.executor, bandwidth, watch)
        config = dataclasses.replace(llm.engine.scheduler.config, num_host_blocks=num_host_blocks)
        policy = policy_of(action, calibration)
        runs.append(
            Replay(llm, trace, config, policy, costs=calibration, async_scheduling=False, clock=watch)
        )
    results = replay_side_by_side(runs)
    for llm in engines:
        slow_down(llm.executor, None)
    return dict(zip(ACTIONS, results, strict=True))


def tokens_per_second(run: RunResult) -> float:
    """Of all requests together."""
    return run.num_output_tokens / run.seconds


ByAction = Mapping[str, Mapping[int, RunResult]]


def row_of(place: Place, by_action: ByAction, bandwidth: float) -> dict[str, Any]:
    """A cell, for the results."""

    def of_each(name: str) -> dict[str, list[Any]]:
        return {action: [getattr(run, name) for run in of.values()] for action, of in by_action.items()}

    return {
        **dataclasses.asdict(place),
        "share": place.share,
        "host_bandwidth_limit": bandwidth,
        "seconds": of_each("seconds"),
        "preemptions": of_each("num_preemptions"),
        "swaps": of_each("num_swaps"),
    }


def line_of(place: Place, by_action: ByAction) -> str:
    """A cell, for the screen."""
    seconds = {
        action: statistics.median(run.seconds for run in of.values()) for action, of in by_action.items()
    }
    counts = [f"{run.num_swaps}/{run.num_preemptions}" for run in by_action["adaptive"].values()]
    return (
        f"link x{place.speed:g}, output {place.output}, {place.host} host blocks: "
        + ", ".join(f"{action} {value:.2f} s" for action, value in seconds.items())
        + f"; share {place.share:.3f}; swapped {counts}"
    )


def noise_report(found: Sequence[Place]) -> list[str]:
    """How far two runs differ that do the same."""
    of_seeds = [
        abs(place.rates[AGAIN][seed] / rate - 1)
        for place in found
        for seed, rate in place.rates["adaptive"].items()
    ]
    of_places = [abs(place.ratio(AGAIN, "adaptive") - 1) for place in found]
    again = sum(place.share_of(AGAIN) > 1 for place in found)
    return [
        "## Noise",
        "",
        "Two adaptive engines on the same trace, side by side, differ by "
        f"{statistics.median(of_seeds):.1%} (median over cells and seeds; at most {max(of_seeds):.1%}); the "
        f"medians over seeds, by {statistics.median(of_places):.1%} (at most {max(of_places):.1%}). "
        f"The second is faster than both fixed actions in {again} of {len(found)} cells, the first in "
        f"{sum(place.share > 1 for place in found)}.",
        "",
    ]


def main(argv: list[str] | None = None) -> None:
    """Run it from the command line."""
    args = parse_args(argv)
    command = command_line(["python", "scripts/sweep_engine.py", *(sys.argv[1:] if argv is None else argv)])
    args.out_dir.mkdir(parents=True, exist_ok=True)
    engines = [load(args) for _ in ACTIONS]
    llm = engines[0]
    name = pathlib.Path(llm.config.model).resolve().name
    profiler = Profiler(llm.executor, shape_of(llm.model_config, name, llm.dtype))
    print(f"measuring costs for {args.profile_seconds:g} s", file=sys.stderr)
    slow_down(llm.executor, None)
    samples = profiler.samples(args.profile_seconds)
    table = profiler.costs_of(profiler.profile(samples, profiler.fit(samples, is_brief=True)))
    num_tokens = (args.prompt_len * 5 // 8) + max(args.output_lengths) // 2
    block_size = llm.executor.block_size
    num_bytes = 2 * -(-num_tokens // block_size) * profiler.model.block_bytes(block_size)
    equal = num_bytes / table.step_seconds(0, 0, num_tokens, 1)
    prefill_seconds = [profiler.time_prefill(num_tokens, 1)]
    prompts = UniformLengths(shortest=max(1, args.prompt_len // 4), longest=args.prompt_len)
    rows, found = [], []
    for speed in args.speeds:
        bandwidth = speed * equal
        slow_down(llm.executor, bandwidth)
        measured = {**samples, **profiler.swap_samples(60)}
        costs = profiler.costs_of(profiler.profile(measured, profiler.fit(measured, is_brief=True)))
        for output_len, num_host_blocks in itertools.product(args.output_lengths, args.host_blocks):
            results = {}
            for turn, seed in enumerate(args.seeds):
                trace = make_trace(
                    prompts,
                    args.requests,
                    output_len,
                    outputs="uniform",
                    arrivals=parse_arrivals(args.arrivals),
                    seed=seed,
                    name="sweep",
                )
                turned = engines[turn % len(engines) :] + engines[: turn % len(engines)]
                results[seed] = side_by_side(turned, trace, costs, num_host_blocks, bandwidth)
            by_action = {action: {seed: of[action] for seed, of in results.items()} for action in ACTIONS}
            place = Place(
                name,
                "uniform",
                output_len,
                num_host_blocks,
                speed,
                {
                    action: {seed: tokens_per_second(run) for seed, run in of.items()}
                    for action, of in by_action.items()
                },
                None,
            )
            found.append(place)
            rows.append(row_of(place, by_action, bandwidth))
            print(line_of(place, by_action), flush=True)
    slow_down(llm.executor, None)
    prefill_seconds.append(profiler.time_prefill(num_tokens, 1))
    values = {
        "command": command,
        "hardware": hardware.describe_hardware(),
        "versions": hardware.versions(),
        "model": name,
        "equal_speed_bytes_per_second": equal,
        "prefill_seconds": prefill_seconds,
        "rows": rows,
    }
    write_json(args.out_dir / "results.json", values)
    found.sort(key=lambda place: (place.output, place.host, place.speed))
    lines = [
        "# Swap or recompute, on the real engine",
        "",
        f"Command: `{command}`. {name} on {values['hardware']['cpu']}, {args.gpu_blocks} device blocks of "
        f"{block_size} tokens; {args.requests} requests, {in_words(args.arrivals)}, prompts of at most "
        f"{args.prompt_len} tokens, outputs uniform in a quarter of the maximum to the maximum; medians over "
        f"seeds {args.seeds} of ratios on the same trace. Speed 1 is {equal / 1e6:.1f} MB/s: copying a "
        f"request of {num_tokens} tokens out and back then takes as long as one prefill of it "
        f"({prefill_seconds[0] * 1e3:.2f} ms at first, {prefill_seconds[1] * 1e3:.2f} ms at the end). The "
        "actions ran side by side, in turns of 50 ms, on an engine each that dispatches no step ahead.",
        "",
        *shares_report(found, "that at which a copy takes as long as a prefill"),
        *noise_report(found),
    ]
    (args.out_dir / "report.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
