"""Times one call of `Scheduler.schedule`: steady, preempting and admitting iterations, and whole traces.

    python scripts/bench_scheduler.py --out scheduler.json

Steady: every running request decodes, one in `block_size` needs a block, nobody is admitted or preempted;
with the prefix cache and without, and nothing in common.
Preempting: no free block is left, and one request in 16 needs one, for which as many others go, under the
policies of `vllm_v1` and of `adaptive`. Admitting: one request joins the others. Sharing: requests that
begin with the same tokens wait for room beside those that run; the first such iteration, and the later ones.
Trace: every iteration of 2,000 Chatbot requests of 64 output tokens under a preset, while about half of
`--running` run in a pool that is too small. Decision: one call of the preset's action or resume policy,
predictions and choice, with distilled tables as `jaxllm profile` stores them, corrected online.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import pathlib
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from sweep.options import list_of

from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.predictors.published_shapes import model_shape
from jaxllm.predictors.roofline import RooflineCostModel
from jaxllm.predictors.table import TableAxes, TableCostModel
from jaxllm.research.bench.results import command_line, write_json
from jaxllm.research.workloads import make_trace
from jaxllm.sampling.params import SamplingParams
from jaxllm.sched.cache.lookups import learn_names
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.policies import ActionPolicy, ResumePolicy, SchedulerPolicy, WatermarkAdmission
from jaxllm.sched.presets import PRESETS, make_preset
from jaxllm.sched.scheduler import Scheduler
from jaxllm.system.output_files import OutputParser, new_file
from jaxllm.types import CopyProgress, Request, SchedulerOutput

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2**20
_TRACE_REQUESTS = 2000
_BLOCKS_PER_RUNNING = 3.6  # Chatbot prompts half way through 64 tokens of output
_ROOFLINE = RooflineCostModel(model_shape("opt-13b"), device_spec("A800-80GB-PCIe"))
_AXES = TableAxes.geometric(
    max_num_batched_tokens=2560, max_num_seqs=256, max_context_tokens=2**16, max_num_blocks=128
)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of one kind of iteration over `repetitions` calls."""

    iteration: str
    running: int
    preempted: float
    median_us: float
    p99_us: float
    repetitions: int


def make_request(index: int, num_prompt_tokens: int) -> Request:
    """A request that does not end within the benchmark."""
    return Request(
        f"request-{index}",
        [1 + index] * num_prompt_tokens,
        SamplingParams(),
        arrival_time=0.0,
        arrival_index=index,
        max_total_tokens=4096,
    )


def spread_lengths(num_running: int, seed: int) -> list[int]:
    """Lengths spread evenly over a block's rows."""
    lengths = [BLOCK_SIZE + i % BLOCK_SIZE for i in range(num_running)]
    random.Random(seed).shuffle(lengths)
    return lengths


def running_scheduler(
    lengths: list[int],
    spare_blocks: int,
    spare_slots: int,
    policy: SchedulerPolicy | None = None,
    *,
    caches: bool = False,
) -> Scheduler:
    """Requests of these lengths, just prefilled."""
    num_running = len(lengths)
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in lengths) + spare_blocks
    scheduler = Scheduler(
        SchedulerConfig(
            num_gpu_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=num_running + spare_slots,
            max_num_batched_tokens=MAX_MODEL_LEN,
            num_host_blocks=num_running,
            enable_prefix_caching=caches,
        ),
        policy or SchedulerPolicy(),
    )
    for index, length in enumerate(lengths):
        scheduler.add(make_request(index, length))
    if len(scheduler.schedule(0.0).prefill) != num_running:
        raise RuntimeError("the set-up did not prefill every request")
    return scheduler


def timed(schedule: Callable[[float], SchedulerOutput]) -> tuple[float, SchedulerOutput]:
    """Microseconds and result of one iteration."""
    start = time.perf_counter_ns()
    output = schedule(0.0)
    return (time.perf_counter_ns() - start) / 1e3, output


def summarise(iteration: str, num_running: int, samples: list[tuple[float, int]]) -> Timing:
    """Median and 99th percentile of `(microseconds, preempted requests)` samples."""
    times = [microseconds for microseconds, _ in samples]
    return Timing(
        iteration,
        num_running,
        statistics.fmean(count for _, count in samples),
        statistics.median(times),
        statistics.quantiles(times, n=100)[98],
        len(samples),
    )


def bench_steady(num_running: int, repetitions: int, seed: int, *, caches: bool = False) -> Timing:
    """Decode iterations with enough free blocks."""
    spare = num_running * (repetitions // BLOCK_SIZE + 10)
    scheduler = running_scheduler(spread_lengths(num_running, seed), spare, 0, caches=caches)
    for _ in range(2 * BLOCK_SIZE):  # warm-up
        for request in scheduler.schedule(0.0).decode:
            request.output_token_ids.append(0)
    samples = []
    for _ in range(repetitions):
        microseconds, output = timed(scheduler.schedule)
        if len(output.decode) != num_running or output.preempted:
            raise RuntimeError("the iteration was not steady; lower --repetitions")
        for request in output.decode:
            request.output_token_ids.append(0)
        samples.append((microseconds, 0))
    return summarise("steady decode, prefix cache" if caches else "steady decode", num_running, samples)


def bench_preempting(preset: str, num_running: int, repetitions: int) -> Timing:
    """The first decode iteration of a full pool, in which one request in 16 needs a block."""
    samples = []
    num_growing = max(1, num_running // 16)
    lengths = [BLOCK_SIZE] * num_growing + [BLOCK_SIZE // 2] * (num_running - num_growing)
    for _ in range(repetitions):
        costs = OnlineCalibration(TableCostModel.distil(_ROOFLINE, _AXES))
        policy = make_preset(preset, costs)
        assert isinstance(policy, SchedulerPolicy)
        policy = dataclasses.replace(policy, admission=WatermarkAdmission(0.0))  # else the pool is never full
        scheduler = running_scheduler(lengths, 0, 0, policy)
        microseconds, output = timed(scheduler.schedule)
        if not output.preempted:
            raise RuntimeError("nobody was preempted in a full pool")
        samples.append((microseconds, len(output.preempted)))
    return summarise(f"preempting, {preset}", num_running, samples)


def bench_admitting(num_running: int, repetitions: int, seed: int) -> Timing:
    """Iterations that admit one request beside the decodes of `num_running - 1` others."""
    spare = num_running * (repetitions // BLOCK_SIZE + 10)
    scheduler = running_scheduler(spread_lengths(num_running - 1, seed), spare, 1)
    samples = []
    for repetition in range(repetitions):
        request = make_request(num_running + repetition, BLOCK_SIZE)
        scheduler.add(request)
        microseconds, output = timed(scheduler.schedule)
        if len(output.prefill) != 1:
            raise RuntimeError("the iteration admitted nobody")
        scheduler.finish(request, "abort")
        samples.append((microseconds, 0))
    return summarise("admitting", num_running, samples)


def bench_sharing(preset: str, num_shared: int, num_waiting: int, repetitions: int) -> list[Timing]:
    """Iterations beside which `num_waiting` requests with `num_shared` tokens in common wait for room."""
    costs = OnlineCalibration(TableCostModel.distil(_ROOFLINE, _AXES))
    num_blocks = num_shared // BLOCK_SIZE + 32 * 40 + 10
    scheduler = Scheduler(
        SchedulerConfig(
            num_gpu_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=1024,
            max_num_batched_tokens=8192,
            num_host_blocks=4 * num_blocks,
            enable_prefix_caching=True,
        ),
        make_preset(preset, costs),
    )

    def add(index: int, num_own: int) -> None:
        request = Request(
            f"request-{index}",
            [1] * num_shared + [2 + index] * num_own,
            SamplingParams(),
            arrival_time=0.0,
            arrival_index=index,
            max_total_tokens=num_shared + num_own + 512,
        )
        learn_names(request, request.num_prompt_tokens, BLOCK_SIZE)  # as where requests are prepared
        scheduler.add(request)

    loading: list[int] = []

    def run() -> tuple[float, int]:
        microseconds, output = timed(lambda now: scheduler.schedule(now, CopyProgress(loading)))
        loading[:] = [swap.handle for swap in output.load]
        for request in output.sampled:
            request.output_token_ids.append(0)
        scheduler.complete(output.step_id)
        return microseconds, len(output.preempted)

    for index in range(32):
        add(index, 100)
    run()
    while scheduler.num_waiting or scheduler._state.prompts:
        run()
    for index in range(32, 32 + num_waiting):
        add(index, 600)
    name = f"{num_shared} tokens shared by {num_waiting}, {preset}"
    first, _ = run()
    samples = [run() for _ in range(repetitions + 5)][5:]
    once = Timing(f"first, {name}", scheduler.num_running, 0.0, first, first, 1)
    return [once, summarise(name, scheduler.num_running, samples)]


def bench_trace(preset: str, num_running: int, seed: int, *, decisions: bool = False) -> list[Timing]:
    """Iterations of a trace with about `num_running` requests running, or its decisions."""
    trace = make_trace("chatbot", _TRACE_REQUESTS, 64, seed=seed)
    costs = OnlineCalibration(TableCostModel.distil(_ROOFLINE, _AXES))
    policy = make_preset(preset, costs)
    timed: dict[str, Any] = {
        name: TimedPolicy(one)
        for name in ("action", "resume")
        if decisions and (one := getattr(policy, name, None)) is not None
    }
    scheduler = Scheduler(
        SchedulerConfig(
            num_gpu_blocks=int(num_running * _BLOCKS_PER_RUNNING),
            block_size=BLOCK_SIZE,
            max_model_len=2048,
            max_num_seqs=2 * num_running,
            max_num_batched_tokens=2560,
            num_host_blocks=2 * num_running,
        ),
        dataclasses.replace(policy, **timed) if timed else policy,  # type: ignore[type-var]
    )
    for index, (prompt, output) in enumerate(zip(trace.prompt_lens, trace.output_lens, strict=True)):
        request = make_request(index, int(prompt))
        request.max_total_tokens = int(prompt + output)
        scheduler.add(request)
    samples, now, running = [], 0.0, []
    loading: list[int] = []
    while scheduler.has_unfinished:
        start = time.perf_counter_ns()
        output = scheduler.schedule(now, CopyProgress(loading))
        microseconds = (time.perf_counter_ns() - start) / 1e3
        loading = [swap.handle for swap in output.load]  # copies arrive within an iteration
        if scheduler.num_waiting:  # the drain at the end is cheaper
            samples.append((microseconds, len(output.preempted)))
            running.append(scheduler.num_running)
        now += 0.03
        for request in (*output.decode, *(chunk.request for chunk in output.prefill if chunk.is_last)):
            request.output_token_ids.append(0)
        scheduler.complete(output.step_id)
        for request in output.ending:
            scheduler.finish(request, "length")
    if not decisions:
        return [summarise(f"trace, {preset}", round(statistics.fmean(running)), samples)]
    timings = []
    for question, policy_timed in timed.items():
        if policy_timed.samples:
            times = [(microseconds, 1) for microseconds in policy_timed.samples]
            name = f"decision of {question}, {preset}"
            timings.append(summarise(name, round(statistics.fmean(running)), times))
    return timings


class TimedPolicy:
    """An action or resume policy with its microseconds."""

    def __init__(self, policy: ActionPolicy | ResumePolicy) -> None:
        self._choose: Callable[..., Any] = policy.choose
        self.samples: list[float] = []

    def choose(self, *question: Any) -> Any:
        """The decision of the policy."""
        start = time.perf_counter_ns()
        decision = self._choose(*question)
        self.samples.append((time.perf_counter_ns() - start) / 1e3)
        return decision


def cpu_model() -> str:
    """The processor's name as Linux gives it, or what Python knows of it."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    """Run the benchmark from the command line."""
    parser = OutputParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--running", type=list_of(int), default="256,1024", help="running requests (default: %(default)s)"
    )
    parser.add_argument("--repetitions", type=int, default=2000, help="timed steady and admitting calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=new_file, help="write the results to this JSON file")
    args = parser.parse_args()
    if not all(2 <= running <= 4096 for running in args.running):
        parser.error(f"--running must lie in [2, 4096], got {args.running}")
    if not 10 <= args.repetitions <= 4000:  # a benchmark request ends after 4096 tokens
        parser.error(f"--repetitions must lie in [10, 4000], got {args.repetitions}")

    gc.disable()  # its pauses are the process's, not the scheduler's
    timings = []
    for running in args.running:
        for caches in (False, True):
            timings.append(bench_steady(running, args.repetitions, args.seed, caches=caches))
        for preset in ("vllm_v1", "adaptive"):
            timings.append(bench_preempting(preset, running, max(args.repetitions // 10, 10)))
        timings.append(bench_admitting(running, args.repetitions, args.seed))
        for preset in PRESETS:
            # Policies that are timed are watched, as any from outside the package.
            for decisions in (False, True):
                timings += bench_trace(preset, running // 2, args.seed, decisions=decisions)
    for preset in ("vllm_v1", "adaptive"):
        for shared, waiting in ((1000, 400), (8000, 100), (32000, 300)):
            timings += bench_sharing(preset, shared, waiting, 40)
    print(f"{cpu_model()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, seed {args.seed}")
    print(f"{'iteration':<44} {'running':>7} {'preempted':>9} {'median us':>9} {'p99 us':>9} {'calls':>6}")
    for t in timings:
        print(
            f"{t.iteration:<44} {t.running:>7} {t.preempted:>9.1f} {t.median_us:>9.1f} {t.p99_us:>9.1f} "
            f"{t.repetitions:>6}"
        )
    if args.out is not None:
        report = {
            "benchmark": "scheduler",
            "cpu": cpu_model(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "seed": args.seed,
            "block_size": BLOCK_SIZE,
            "command": command_line(["python", *sys.argv]),
            "timings": [dataclasses.asdict(timing) for timing in timings],
        }
        write_json(args.out, report)


if __name__ == "__main__":
    main()
