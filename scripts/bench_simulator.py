"""How fast a long trace is replayed in simulation, and whether memory stays flat.

    python scripts/bench_simulator.py --out simulator.json

100,000 requests with Chatbot's lengths and 64 output tokens, 128 device and 64 host blocks, no ledger, one
core. `at once` puts all in the queue at time 0; `poisson` lets them come at 90 % of the throughput of that
run, so that the queue stays short and memory that grows would be a leak.
"""

from __future__ import annotations

import gc
import os
import pathlib
import sys
import time
from importlib.metadata import version
from typing import Any

from jaxllm.predictors.base import model_shape
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.roofline import RooflineCostModel
from jaxllm.research.bench.results import command_line, write_json
from jaxllm.research.simulator.run import simulate
from jaxllm.research.workloads import AllAtOnce, ArrivalProcess, ClosedLoop, Poisson, make_trace
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.presets import PRESETS, make_preset
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


def main() -> None:
    """Run the benchmark from the command line."""
    parser = OutputParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--preset", default="adaptive", choices=sorted(PRESETS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=new_file, help="write the results to this JSON file")
    args = parser.parse_args()
    if args.requests < 10:
        parser.error(f"--requests must be at least 10, got {args.requests}")
    small = replay(AllAtOnce(), args.requests // 10, args.preset, args.seed)
    rate = LOAD * small["simulated_requests_per_second"]
    rows = {
        "poisson, a tenth": replay(Poisson(rate), args.requests // 10, args.preset, args.seed),
        "poisson": replay(Poisson(rate), args.requests, args.preset, args.seed),
        "closed loop": replay(ClosedLoop(CLIENTS), args.requests, args.preset, args.seed),
        "at once": replay(AllAtOnce(), args.requests, args.preset, args.seed),
    }
    for name, row in rows.items():
        print(
            f"{name}: {row['num_requests']} requests, {row['num_steps']} steps in {row['seconds']:.1f} s, "
            f"{row['rss_growth_bytes'] / 2**20:+.1f} MiB, {row['num_preemptions']} preemptions"
        )
    if args.out is not None:
        report = {
            "command": command_line(["python", *sys.argv]),
            "preset": args.preset,
            "versions": {"jaxllm": version("jaxllm"), "python": sys.version.split()[0]},
            "replays": rows,
        }
        write_json(args.out, report)


if __name__ == "__main__":
    main()
