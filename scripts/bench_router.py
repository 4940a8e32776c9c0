"""What routing by prefixes and loads finds in caches, simulated, and what a decision costs.

    python scripts/bench_router.py --out router.json

Hits: conversations in the manner of ShareGPT (`jaxllm.research.workloads.make_conversations`) over replicas
that each run the engine's own scheduler and prefix cache on a roofline of an A100, under each routing policy;
`rate` is conversations that begin in a second, at all replicas together, and `common_len` a system prompt
that all begin with. Balance is the most loaded replica's work over the mean. Weights: the same for other
weights of eviction. Cost: the router alone, with caches as full as they get and a constant number of requests
under way: microseconds of making a prompt's keys, of choosing a replica, and of noting the end; and memory.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import itertools
import multiprocessing
import pathlib
import statistics
import sys
import time
from collections import deque
from typing import Any

import numpy as np
from router_simulation import simulate_routing
from sweep.options import list_of

from jaxllm.cluster.prompt_keys import keys_of_text
from jaxllm.cluster.router import POLICIES, PrefixAndLoad, Router, RoutingPolicy
from jaxllm.predictors.base import model_shape
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.roofline import RooflineCostModel
from jaxllm.research.bench.results import command_line, write_json
from jaxllm.research.workloads import Poisson, Trace, make_conversations
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.presets import vllm_v1
from jaxllm.system.hardware import describe_hardware, versions
from jaxllm.system.output_files import OutputParser, new_file

MODEL, DEVICE, BLOCK_SIZE, CACHE_BYTES = "opt-13b", "A100-80GB", 16, 40e9
MAX_LEN, SECONDS, NUM_REPLICAS = 2048, 200.0, 4
SETTINGS = ((2.0, 64), (4.0, 64), (8.0, 64), (4.0, 512))
WEIGHTS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
CACHE_TOKENS, CONVERSATIONS_PER_REPLICA, LIVE_PER_REPLICA = 2**17, 120, 8


def simulate(policy: RoutingPolicy, rate: float, common_len: int, seed: int) -> dict[str, Any]:
    """One run over four replicas."""
    costs = RooflineCostModel(model_shape(MODEL), device_spec(DEVICE), block_size=BLOCK_SIZE)
    config = SchedulerConfig(
        num_gpu_blocks=int(CACHE_BYTES / costs.model.block_bytes(BLOCK_SIZE)),
        block_size=BLOCK_SIZE,
        max_model_len=MAX_LEN + 1,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        num_host_blocks=0,
        enable_prefix_caching=True,
    )
    trace = make_conversations(
        round(rate * SECONDS), common_len=common_len, max_len=MAX_LEN, arrivals=Poisson(rate), seed=seed
    )
    result = simulate_routing(trace, Router(policy, seed=seed), NUM_REPLICAS, config, vllm_v1(), costs)
    return {"requests": len(trace), **result.summary()}


def measure_hits(seeds: list[int]) -> list[dict[str, Any]]:
    """Every policy under every setting: means over seeds, and hits over round robin's."""
    rows: list[dict[str, Any]] = []
    for rate, common_len in SETTINGS:
        runs = {
            name: [simulate(make(), rate, common_len, seed) for seed in seeds]
            for name, make in POLICIES.items()
        }
        base = runs["round_robin"]
        for name, of_policy in runs.items():
            pairs = zip(of_policy, base, strict=True)
            ratios = [one["cached_tokens"] / other["cached_tokens"] for one, other in pairs]
            rows.append(
                {
                    "rate": rate,
                    "common_len": common_len,
                    "policy": name,
                    "hits_over_round_robin": statistics.mean(ratios),
                    "lowest_ratio": min(ratios),
                    **{key: statistics.mean(run[key] for run in of_policy) for key in of_policy[0]},
                }
            )
            print(rows[-1], flush=True)
    return rows


def measure_weights(seeds: list[int]) -> list[dict[str, Any]]:
    """Weights of eviction, under the two settings that differ most."""
    rows = []
    for (rate, common_len), weight in itertools.product((SETTINGS[0], SETTINGS[2]), WEIGHTS):
        runs = [simulate(PrefixAndLoad(eviction_weight=weight), rate, common_len, seed) for seed in seeds]
        means = {key: statistics.mean(run[key] for run in runs) for key in runs[0]}
        rows.append({"rate": rate, "common_len": common_len, "eviction_weight": weight, **means})
        print(rows[-1], flush=True)
    return rows


def measure_cost(num_replicas: int, seed: int) -> dict[str, Any]:
    """The router alone, before so many replicas."""
    trace = make_conversations(
        CONVERSATIONS_PER_REPLICA * num_replicas,
        common_len=64,
        max_len=4096,
        arrivals=Poisson(float(num_replicas)),
        seed=seed,
    )
    router = Router(seed=seed)
    router.set_replicas(f"replica-{place}" for place in range(num_replicas))
    for replica in router.replicas:
        router.report(replica, now=0.0, queued_tokens=0, cache_tokens=CACHE_TOKENS)
    order, conversations = _order(trace)
    gc.collect()
    before = _resident_bytes()
    system = np.random.default_rng(seed).bytes(2 * 64).hex()
    live: deque[str] = deque()
    spent = np.zeros((len(order), 3))
    for place, index in enumerate(order):
        own = np.random.default_rng((seed, conversations[index])).bytes(2 * 4096).hex()
        prompt_text = (system + own)[: 4 * int(trace.prompt_lens[index])]
        began = time.perf_counter()
        prompt = keys_of_text(prompt_text)
        keyed = time.perf_counter()
        router.route(f"{index}", prompt, now=float(place), max_tokens=256)
        routed = time.perf_counter()
        live.append(f"{index}")
        if len(live) > LIVE_PER_REPLICA * num_replicas:
            router.ended(live.popleft())
        spent[place] = keyed - began, routed - keyed, time.perf_counter() - routed
    gc.collect()
    taken = _resident_bytes() - before - spent.nbytes
    late = spent[len(spent) // 2 :] * 1e6  # caches are full by then
    names = ("keys_us", "choose_us", "end_us")
    return {
        "replicas": num_replicas,
        "requests": len(order),
        "mean_prompt_tokens": float(trace.prompt_lens.mean()),
        **{name: float(np.median(late[:, place])) for place, name in enumerate(names)},
        **{f"p99_{name}": float(np.percentile(late[:, place], 99)) for place, name in enumerate(names)},
        "decisions_per_second": float(1e6 / late.sum(axis=1).mean()),
        "router_bytes": taken,
        "router_bytes_per_replica": taken / num_replicas,
    }


def _order(trace: Trace) -> tuple[list[int], list[int]]:
    """Requests by time, each a minute after the one it goes on with; and which conversation each is of."""
    times, conversations = trace.arrival_times.tolist(), list(range(len(trace)))
    for index in range(len(trace)):
        if (followed := trace.followed(index)) >= 0:
            times[index] = times[followed] + 60.0
            conversations[index] = conversations[followed]
    return sorted(range(len(trace)), key=times.__getitem__), conversations


def _resident_bytes() -> int:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=list_of(int), default="0,1,2", help="%(default)s")
    parser.add_argument("--replicas", type=list_of(int), default="4,100,1000", help="for costs: %(default)s")
    parser.add_argument("--out", type=new_file, required=True)
    args = parser.parse_args(argv)
    if not args.seeds or min(args.seeds) < 0 or min(args.replicas) < 1:
        parser.error("--seeds must be at least 0, --replicas at least 1")
    values = {
        "command": command_line(["python", "scripts/bench_router.py", *(argv or sys.argv[1:])]),
        "hardware": describe_hardware(),
        "versions": versions(),
        "seeds": args.seeds,
        "simulated": {"model": MODEL, "device": DEVICE, "replicas": NUM_REPLICAS, "cache_bytes": CACHE_BYTES},
        "hits": measure_hits(args.seeds),
        "weights": measure_weights(args.seeds),
    }
    values["cost"] = []
    for num_replicas in args.replicas:
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            values["cost"].append(fresh.submit(measure_cost, num_replicas, args.seeds[0]).result())
        print(values["cost"][-1], flush=True)
    write_json(args.out, values)


if __name__ == "__main__":
    main()
