"""How well the simulator predicts the real engine, and how presets compare on it, on this machine.

    python scripts/validate_simulator.py --model MODEL --repetitions 9 --out validation.json

Loads MODEL, plays traces on the real engine in a pool too small for them, measures its costs between the
runs (as `jaxllm profile` does), and simulates each trace with the distilled profile. On a CPU, whose cores do
both, an iteration is longer by what the host took from it: the processor time of the engine's thread in the
real runs, less what it had in a step of the profile, and less what its kind of step leaves idle, which is
measured as a share of its time (`idle_share` in `jaxllm.research.bench.beside_steps`). All simulated seconds
are multiplied with one factor: as many traces more, which are not compared, are played under the first preset
between the others, and the factor is the median of their real seconds over the simulated ones. The engine
runs ahead, as it does for its users. Of each preset are printed

    error   simulated / real seconds - 1: median and range over the traces, real being the mean of two runs
    noise   real seconds of one run / of the other, on the same trace, - 1: median of its size, and range

how many times as fast as the first preset it is, really and simulated; and of each pair of presets which of
the two is faster, by the interval of their real ratio, and whether the simulation says the same.

A shared machine changes its speed all the time. So each trace is short and played twice under every preset,
in an order drawn anew for each trace, with a slice of the profile before every run. Each repetition has a
trace of its own: the intervals of the ratios (95 %, Student's, of their logarithms) are over traces and
chance together.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from simulation_errors import describe, draw, ratios, summary, verdicts
from sweep.options import ARRIVALS_HELP, arrivals_of, list_of

from jaxllm import LLM
from jaxllm.engine.costs import shape_of
from jaxllm.engine.profiling import Profiler, Work
from jaxllm.predictors.base import CostKind, CostModel, step_kind
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.predictors.programs import ProgramCosts
from jaxllm.research.bench.beside_steps import idle_share, sending_seconds
from jaxllm.research.bench.compare import BUSY_SHARE, OthersShare
from jaxllm.research.bench.replay import replay
from jaxllm.research.bench.results import about, write_json
from jaxllm.research.figures import check_picture
from jaxllm.research.simulator.run import simulate
from jaxllm.research.workloads import LognormalLengths, Trace, UniformLengths, make_trace
from jaxllm.research.workloads.result import RunResult
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.presets import PRESETS, make_preset
from jaxllm.system.output_files import OutputParser, new_file

DEFAULT_PRESETS = ("vllm", "vllm_v1", "paper", "paper_strategy", "adaptive", "adaptive_throughput")
RUNS = 2
"""How often a trace is played under each preset."""
HOST_SECONDS = 1.5e-3
"""Of the host beside a step: what `idle_share` is measured with."""


class Run(NamedTuple):
    """A run of the real engine, and what its predictions had to be multiplied with."""

    result: RunResult
    factors: dict[str, float]


class HostWork(NamedTuple):
    """What the host's work beside a kind of step means for it: `idle_share`, and `sending_seconds`."""

    idle_share: float
    profiled: float


Host = Mapping[CostKind, HostWork]


def host_of(measured: Sequence[Host]) -> Host:
    """The medians of what was measured several times."""
    return {
        kind: HostWork(*map(statistics.median, zip(*(of[kind] for of in measured), strict=True)))
        for kind in measured[0]
    }


class EngineCosts:
    """A cost model of an engine's iterations: a device's steps, and what the host takes from them on a CPU.

    Args:
        costs: of the device.
        host: what the host's work means for each kind of step.
        on_host: processor time of the host beside each step.
        factor: all seconds are multiplied with it.
    """

    def __init__(self, costs: CostModel, host: Host, on_host: float, factor: float = 1.0) -> None:
        self._costs, self._host, self._on_host, self._factor = costs, host, on_host, factor

    def step_seconds(self, batch: int, context_tokens: int, prompt_tokens: int = 0, *prompts: int) -> float:
        """See `CostModel.step_seconds`."""
        seconds = self._costs.step_seconds(batch, context_tokens, prompt_tokens, *prompts)
        host = self._host[step_kind(batch, prompt_tokens)]
        more = self._on_host - host.profiled - host.idle_share * seconds
        return self._factor * (seconds + max(0.0, more))

    def swap_out_seconds(self, num_blocks: int) -> float:
        """See `CostModel.swap_out_seconds`."""
        return self._factor * self._costs.swap_out_seconds(num_blocks)

    def swap_in_seconds(self, num_blocks: int) -> float:
        """See `CostModel.swap_in_seconds`."""
        return self._factor * self._costs.swap_in_seconds(num_blocks)


def work_of_steps(config: SchedulerConfig, prompt_len: int) -> dict[CostKind, Work]:
    """A step of each kind, of prompts as long as fit and as many sequences as there may be."""
    num_seqs = config.max_num_seqs
    num_prompts = min(2, num_seqs // 2)
    most = (config.max_num_batched_tokens - num_seqs) // num_prompts
    prompts: dict[str, tuple[int, ...]] = {
        "lengths": (max(1, min(prompt_len, most)),) * num_prompts,
        "starts": (0,) * num_prompts,
    }
    return {
        "decode": Work(contexts=(prompt_len,) * num_seqs),
        "prefill": Work(**prompts),
        "mixed": Work(contexts=(prompt_len,) * (num_seqs - num_prompts), **prompts),
    }


def host_work(profiler: Profiler, work: Work) -> HostWork:
    """Measured here."""
    return HostWork(idle_share(profiler, HOST_SECONDS, work), sending_seconds(profiler, work))


def play(llm: LLM, preset: str, trace: Trace, config: SchedulerConfig, costs: CostModel) -> Run:
    """One run of the real engine."""
    calibration = OnlineCalibration(costs)
    result = replay(llm, trace, config, make_preset(preset, calibration), costs=calibration)
    return Run(result, {kind: one.factor for kind, one in calibration.report().items()})


def on_host(runs: Sequence[Run]) -> float:
    """Mean processor time of the engine's thread in an iteration."""
    return statistics.fmean((run.result.host_seconds or 0.0) / run.result.num_steps for run in runs)


def simulated_run(
    preset: str, trace: Trace, config: SchedulerConfig, predicted: CostModel, costs: CostModel
) -> RunResult:
    """The simulation of what `play` does: the policy goes by `predicted`, corrected; `costs` come to pass."""
    calibration = OnlineCalibration(predicted)
    policy = make_preset(preset, calibration)
    return simulate(trace, config, policy, costs, overlap_swaps=True, calibration=calibration)


def compare(
    preset: str,
    runs: Sequence[Sequence[Run]],
    traces: Sequence[Trace],
    config: SchedulerConfig,
    predicted: Sequence[CostModel],
    device: CostModel,
    host: Host,
    factor: float,
) -> dict[str, Any]:
    """One preset: its `RUNS` runs of each trace, and the simulations of them.

    The simulated policy goes by what the real one went by, `predicted` of each trace and corrected while it
    runs. What comes to pass are `device`'s seconds, with what `host` says of the mean processor time of an
    iteration in the real runs of the trace, times `factor`.
    """
    beside = [on_host(of_trace) for of_trace in runs]
    simulated = [
        simulated_run(preset, trace, config, costs, EngineCosts(device, host, seconds, factor))
        for trace, costs, seconds in zip(traces, predicted, beside, strict=True)
    ]
    real = [[run.result for run in of_trace] for of_trace in runs]
    seconds = [[run.seconds for run in of_trace] for of_trace in real]
    row: dict[str, Any] = {
        "preset": preset,
        "host_seconds": beside,
        "num_steps": statistics.fmean(run.result.num_steps for of_trace in runs for run in of_trace),
        "seconds": [statistics.fmean(of_trace) for of_trace in seconds],
        "seconds_of_runs": seconds,
        "preemptions": [statistics.fmean(run.num_preemptions for run in of_trace) for of_trace in real],
        "swaps": [statistics.fmean(run.num_swaps for run in of_trace) for of_trace in real],
        "mean_latency": [
            statistics.fmean(run.summary()["mean_latency_seconds"] for run in of_trace) for of_trace in real
        ],
        "weighted_turnaround": [
            statistics.fmean(float(run.weighted_turnaround.mean()) for run in of_trace) for of_trace in real
        ],
        "simulated_seconds": [run.seconds for run in simulated],
        "simulated_preemptions": [run.num_preemptions for run in simulated],
        "simulated_swaps": [run.num_swaps for run in simulated],
        "simulated_mean_latency": [run.summary()["mean_latency_seconds"] for run in simulated],
        "simulated_weighted_turnaround": [float(run.weighted_turnaround.mean()) for run in simulated],
    }
    spent = [dataclasses.asdict(run.spent) for of_trace in real for run in of_trace]
    return row | {
        "error": summary(
            [one / other - 1 for one, other in zip(row["simulated_seconds"], row["seconds"], strict=True)]
        ),
        "noise": summary([one / other - 1 for one, other in seconds]),
        "seconds_error": sum(row["simulated_seconds"]) / sum(row["seconds"]) - 1,
        "online_factors": [[run.factors for run in of_trace] for of_trace in runs],
        "real_spent": {part: statistics.fmean(one[part] for one in spent) for part in spent[0]},
        "simulated_spent": {
            part: statistics.fmean(dataclasses.asdict(run.spent)[part] for run in simulated)
            for part in spent[0]
        },
    }


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a checkpoint (default: the demo model)")
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--prompt-len", type=int, default=24, help="longest prompt, shortest is a quarter")
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--outputs", choices=("uniform", "max"), default="uniform")
    parser.add_argument("--sigma", type=float, help="lognormal outputs instead, of --output-len on average")
    parser.add_argument("--longest", type=int, default=1024, help="of lognormal outputs")
    parser.add_argument("--arrivals", type=arrivals_of, default="all", help=ARRIVALS_HELP)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--gpu-blocks", type=int, default=40)
    parser.add_argument("--host-blocks", type=int, default=20)
    parser.add_argument("--profile-seconds", type=float, default=60.0)
    parser.add_argument(
        "--presets",
        type=list_of(str),
        default=",".join(DEFAULT_PRESETS),
        help="in turn (default: %(default)s)",
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=new_file, help="write the results to this JSON file")
    parser.add_argument("--plot", type=new_file, help="draw tokens/s and turnaround to this .png file")
    parser.add_argument("--from-json", type=pathlib.Path, help="draw what --out wrote, and measure nothing")
    args = parser.parse_args(argv)
    with parser.errors():
        check_picture(args.plot)
    if unknown := sorted(set(args.presets) - set(PRESETS)):
        parser.error(f"--presets: there is no {', '.join(unknown)}; there are {', '.join(sorted(PRESETS))}")
    counts = (args.requests, args.prompt_len, args.output_len, args.max_num_seqs, args.gpu_blocks)
    if min(*counts, args.host_blocks) < 1 or min(args.repetitions, args.max_num_seqs) < 2:
        parser.error(
            "numbers of requests, tokens and blocks must be at least 1, --repetitions and --max-num-seqs at "
            "least 2"
        )
    if args.from_json is not None and (args.plot is None or not args.from_json.is_file()):
        parser.error(f"--from-json {args.from_json}: name a file that is there, and --plot")
    if not 0 < args.profile_seconds < math.inf:
        parser.error("--profile-seconds must be above 0, and finite")
    return args


def trace_of(args: argparse.Namespace, seed: int) -> Trace:
    """What is played."""
    outputs = args.outputs
    if args.sigma is not None:
        outputs = LognormalLengths(mean=args.output_len, sigma=args.sigma, shortest=1, longest=args.longest)
    return make_trace(
        UniformLengths(shortest=max(1, args.prompt_len // 4), longest=args.prompt_len),
        args.requests,
        args.output_len,
        outputs=outputs,
        arrivals=args.arrivals,
        seed=seed,
        name="validation",
    )


def load(args: argparse.Namespace) -> LLM:
    """The engine, with a pool that a batch of the profile fits into."""
    return LLM(
        args.model,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        warm_up="all",
        max_model_len=max(128, args.prompt_len + (args.output_len if args.sigma is None else args.longest)),
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
    if args.from_json is not None:
        draw(json.loads(args.from_json.read_text(encoding="utf-8")), args.plot)
        return
    presets: list[str] = args.presets
    llm = load(args)
    name = pathlib.Path(llm.config.model).resolve().name
    profiler = Profiler(llm.executor, shape_of(llm.model_config, name, llm.dtype), seed=args.seed)
    config = dataclasses.replace(
        llm.engine.scheduler.config, num_gpu_blocks=args.gpu_blocks, num_host_blocks=args.host_blocks
    )
    traces = [trace_of(args, seed) for seed in range(args.seed, args.seed + 2 * args.repetitions)]
    traces, spares = traces[: args.repetitions], traces[args.repetitions :]
    work = work_of_steps(config, args.prompt_len)
    for preset in ("vllm", "vllm_swap_both"):  # warm-up: every program, and both ways to preempt
        replay(llm, traces[0].head(min(2 * args.max_num_seqs, args.requests)), config, make_preset(preset))
    samples = profiler.samples(0.0)  # enough for a first fit
    seconds = args.profile_seconds / (args.repetitions * (len(presets) + 1) * RUNS)
    order = random.Random(args.seed)
    runs: dict[str, list[list[Run]]] = {preset: [] for preset in presets}
    predicted: list[CostModel] = []
    measured: list[Host] = []
    of_spares: list[list[Run]] = []
    others = OthersShare()
    for turn, (trace, spare) in enumerate(zip(traces, spares, strict=True)):
        print(f"trace {turn + 1} of {args.repetitions}: {RUNS} runs of each preset", file=sys.stderr)
        costs = profiler.costs_of(profiler.profile(samples, profiler.fit(samples, is_brief=True)))
        predicted.append(costs)
        measured.append({kind: host_work(profiler, one) for kind, one in work.items()})
        for found in (*runs.values(), of_spares):
            found.append([])
        jobs = [(preset, trace, of_preset[-1]) for preset, of_preset in runs.items()]
        jobs = [*jobs, (presets[0], spare, of_spares[-1])] * RUNS
        for preset, played, found in order.sample(jobs, len(jobs)):
            for kind, more in profiler.samples(seconds, at_least=0).items():
                samples[kind] += more
            found.append(play(llm, preset, played, config, costs))
    others_share = others()
    profile = profiler.profile(samples, profiler.fit(samples))
    device = ProgramCosts(profile.table, profiler.programs)
    host = host_of(measured)
    for kind, of_kind in host.items():
        print(
            f"beside {of_kind.profiled * 1e3:.2f} ms a {kind} step the host may work for "
            f"{of_kind.idle_share:.0%} of its time"
        )
    ratios_of_spares = [
        statistics.fmean(run.result.seconds for run in of_spare)
        / simulated_run(
            presets[0], spare, config, costs, EngineCosts(device, host, on_host(of_spare))
        ).seconds
        for spare, of_spare, costs in zip(spares, of_spares, predicted, strict=True)
    ]
    factor = statistics.median(ratios_of_spares)  # the machine may be slow for a while
    print(f"simulated seconds are multiplied with {factor:.3f}")
    rows: list[dict[str, Any]] = []
    for preset, of_traces in runs.items():
        row = compare(preset, of_traces, traces, config, predicted, device, host, factor)
        row["over_first"] = ratios(row, rows[0] if rows else row)
        rows.append(row)
        print(describe(row, presets[0]), flush=True)
    pairs = verdicts(rows)
    for pair in pairs:
        real, low, high = pair["real"]
        print(
            f"{pair['preset']} is {real:.3f} ({low:.3f}..{high:.3f}) times as fast as {pair['over']}, "
            f"simulated {pair['simulated']:.3f}: {pair['verdict']}"
        )
    if others_share is not None and others_share > BUSY_SHARE:
        print(f"the machine was busy: others took {others_share:.0%} of its processors; measure again")
    report = {
        **about(["python", *sys.argv]),
        "others_share": others_share,
        "model": name,
        "profile_errors": {kind: report["test"] for kind, report in profile.errors.items()},
        "factor": factor,
        "factors": ratios_of_spares,
        "host": {kind: of_kind._asdict() for kind, of_kind in host.items()},
        "rows": rows,
        "verdicts": pairs,
    }
    if args.out is not None:
        write_json(args.out, report)
    if args.plot is not None:
        draw(report, args.plot)


if __name__ == "__main__":
    main()
