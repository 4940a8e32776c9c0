"""How fast a long trace is replayed in simulation, and whether memory stays flat.

    python scripts/bench_simulator.py --out simulator.json
    python scripts/bench_simulator.py --bars --out simulator-bars.json

100,000 requests with Chatbot's lengths and 64 output tokens, 128 device and 64 host blocks, no ledger, one
core. `at once` puts all in the queue at time 0; `poisson` lets them come at 90 % of the throughput of that
run, so that the queue stays short and memory that grows would be a leak.

`--bars` times what people wait for instead, on measured kernels of an A100: 1,000 requests of the paper's
size under each preset of its evaluation (llama-13b, its pools, a closed loop of 128 clients, three times, the
median), and a day's 100,000 requests of chat lengths under `--preset` (llama-3-8b, Poisson arrivals).
"""

from __future__ import annotations

import gc
import os
import pathlib
import resource
import statistics
import sys
import time
from importlib.metadata import version
from typing import Any

from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.published_shapes import model_shape
from jaxllm.predictors.roofline import RooflineCostModel
from jaxllm.research import simulate as study
from jaxllm.research.bench.results import command_line, write_json
from jaxllm.research.simulator.run import simulate
from jaxllm.research.workloads import (
    AllAtOnce,
    ArrivalProcess,
    ClosedLoop,
    LognormalLengths,
    Poisson,
    make_trace,
)
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.presets import PRESETS, make_preset
from jaxllm.system import hardware
from jaxllm.system.output_files import OutputParser, new_file

CONFIG = SchedulerConfig(
    num_gpu_blocks=128,
    block_size=16,
    max_model_len=2048,
    max_num_seqs=256,
    max_num_batched_tokens=2560,
    num_host_blocks=64,
)
LOAD = 0.9
CLIENTS = 128
PAPER = ("vllm", "vllm_swap", "vllm_v1", "paper_strategy", "paper", "adaptive")
PAPER_REQUESTS, REPETITIONS = 1000, 3
DAY_SECONDS = 86400
CHAT = {
    "dataset": LognormalLengths(mean=200, sigma=0.8, shortest=8, longest=2000),
    "output_len": LognormalLengths(mean=300, sigma=0.8, shortest=8, longest=2000),
}


def rss_bytes() -> int:
    """Resident memory now."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def replay(arrivals: ArrivalProcess, num_requests: int, preset: str, seed: int) -> dict[str, Any]:
    """One timed replay, with what memory it added."""
    costs = RooflineCostModel(model_shape("opt-13b"), device_spec("A800-80GB-PCIe"))
    trace = make_trace("chatbot", num_requests, 64, arrivals=arrivals, seed=seed)
    policy = make_preset(preset, costs)
    gc.collect()
    before = rss_bytes()
    started = time.perf_counter()
    result = simulate(trace, CONFIG, policy, costs, overlap_swaps=True)
    seconds = time.perf_counter() - started
    return {
        "arrivals": repr(arrivals),
        "num_requests": num_requests,
        "seconds": seconds,
        "num_steps": result.num_steps,
        "steps_per_second": result.num_steps / seconds,
        "rss_growth_bytes": rss_bytes() - before,
        "num_preemptions": result.num_preemptions,
        "simulated_requests_per_second": num_requests / result.seconds,
    }


def bars(num_requests: int, preset: str, seed: int) -> dict[str, Any]:
    """Wall-clock seconds of the paper's size by preset, and of a day."""
    rows: dict[str, Any] = {}
    for name in PAPER:
        taken = []
        for _ in range(REPETITIONS):
            started = time.perf_counter()
            found = study(
                model="llama-13b",
                policy=name,
                num_prompts=PAPER_REQUESTS,
                output_len=64,
                closed=CLIENTS,
                seeds=[seed],
                gpu_blocks=128,
                host_blocks=64,
                max_num_batched_tokens=2560,
            )
            taken.append(time.perf_counter() - started)
        steps = found.runs[0].result.num_steps
        rows[f"paper, {name}"] = {
            "num_requests": PAPER_REQUESTS,
            "seconds": statistics.median(taken),
            "all_seconds": taken,
            "num_steps": steps,
        }
    for count in (num_requests // 10, num_requests):
        gc.collect()
        before, started = rss_bytes(), time.perf_counter()
        arrivals = Poisson(num_requests / DAY_SECONDS)
        found = study(policy=preset, num_prompts=count, arrivals=arrivals, seeds=[seed], **CHAT)
        result = found.runs[0].result
        rows["a day" if count == num_requests else "a tenth of it"] = {
            "num_requests": count,
            "seconds": time.perf_counter() - started,
            "num_steps": result.num_steps,
            "rss_growth_bytes": rss_bytes() - before,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "simulated_seconds": result.seconds,
            "num_preemptions": result.num_preemptions,
        }
    return rows


def replays(num_requests: int, preset: str, seed: int) -> dict[str, Any]:
    """The module's replays."""
    small = replay(AllAtOnce(), num_requests // 10, preset, seed)
    rate = LOAD * small["simulated_requests_per_second"]
    return {
        "poisson, a tenth": replay(Poisson(rate), num_requests // 10, preset, seed),
        "poisson": replay(Poisson(rate), num_requests, preset, seed),
        "closed loop": replay(ClosedLoop(CLIENTS), num_requests, preset, seed),
        "at once": replay(AllAtOnce(), num_requests, preset, seed),
    }


def main() -> None:
    """Run the benchmark from the command line."""
    parser = OutputParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--preset", default="adaptive", choices=sorted(PRESETS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bars", action="store_true", help="time the paper's size and a day's trace")
    parser.add_argument("--out", type=new_file, help="write the results to this JSON file")
    args = parser.parse_args()
    if args.requests < 10:
        parser.error(f"--requests must be at least 10, got {args.requests}")
    rows = (bars if args.bars else replays)(args.requests, args.preset, args.seed)
    for name, row in rows.items():
        grown = f", {row['rss_growth_bytes'] / 2**20:+.1f} MiB" if "rss_growth_bytes" in row else ""
        print(
            f"{name}: {row['num_requests']} requests, {row['num_steps']} steps in "
            f"{row['seconds']:.2f} s{grown}"
        )
    if args.out is not None:
        report = {
            "command": command_line(["python", *sys.argv]),
            "preset": args.preset,
            "hardware": hardware.describe_hardware(),
            "versions": {"jaxllm": version("jaxllm"), "python": sys.version.split()[0]},
            "replays": rows,
        }
        write_json(args.out, report)


if __name__ == "__main__":
    main()
