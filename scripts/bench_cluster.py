"""What more workers are worth to a data set, and what routing finds in the caches of real replicas.

    python scripts/bench_cluster.py --out cluster.json

Starts a Ray cluster on this machine. Data sets: `jaxllm.cluster.generate` over rows of random token ids, by
one and by two engines of a processor each, and by one of two; rows a second in the middle of each job (from
30 to 90 % of the rows), without start and end: median, lowest and highest of jobs that take turns. Replicas:
two engines of a processor each behind Ray Serve, and clients that hold several conversations in turn; tokens
found in caches, by routing policy, beside those that caches without bounds would have, and the most loaded
replica's work over the mean. Hops: milliseconds of a
request that needs no engine, through proxy, ingress and replica.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import json
import logging
import pathlib
import random
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import jaxllm.cluster
from jaxllm import SamplingParams
from jaxllm.cluster.ray_extra import require_ray
from jaxllm.cluster.serve import ClusterConfig, engine_apps, started
from jaxllm.research.bench.results import command_line, write_json
from jaxllm.server.config import ServerConfig
from jaxllm.system.output_files import OutputParser, new_file

SIZES = {"max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 256, "num_host_blocks": 0}
BATCH_SIZE, PROMPT_LEN, OUTPUT_LEN = 16, 64, 64
WINDOW = (0.3, 0.9)
WORKERS = ((1, 1), (2, 1), (1, 2))
LIVE, SERVED_BLOCKS, BLOCK, MAX_TURNS = (6, 9, 12, 15), 256, 16, 8
SAID_WORDS, ANSWER_TOKENS, MOST_PROMPT = (8, 24), 16, 400
_SAMPLE = re.compile(r'jaxllm:(\w+)\{replica="([^"]+)"[^}]*\} (\S+)')


def measure_generate(
    folder: pathlib.Path, num_rows: int, repetitions: int, seed: int
) -> list[dict[str, Any]]:
    """Rows a second, by number of workers and processors of each, which take turns."""
    rng = random.Random(seed)
    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for _ in range(num_rows):
            file.write(json.dumps({"prompt_token_ids": rng.choices(range(5, 1000), k=PROMPT_LEN)}) + "\n")
    arguments = {
        "sampling_params": SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True),
        "batch_size": BATCH_SIZE,
        "show_progress": False,
        **SIZES,
    }
    runs: dict[tuple[int, int], list[tuple[float, float]]] = {one: [] for one in WORKERS}
    for repetition, (num_workers, cpus) in itertools.product(range(repetitions), WORKERS):
        output = folder / f"out-{repetition}-{num_workers}-{cpus}"
        began = time.perf_counter()
        jaxllm.cluster.generate(
            path, output=output, num_workers=num_workers, cpus_per_worker=cpus, **arguments
        )
        seconds = time.perf_counter() - began
        times = sorted(part.stat().st_mtime for part in output.glob("part-*"))
        first, last = (int(share * len(times)) for share in WINDOW)
        rate = (last - first) * BATCH_SIZE / (times[last] - times[first])
        runs[num_workers, cpus].append((rate, seconds))
        print(num_workers, cpus, rate, seconds, flush=True)
    return [
        {
            "workers": num_workers,
            "cpus_per_worker": cpus,
            "rows_per_second": statistics.median(rate for rate, _ in of_one),
            "lowest": min(rate for rate, _ in of_one),
            "highest": max(rate for rate, _ in of_one),
            "seconds": statistics.median(seconds for _, seconds in of_one),
        }
        for (num_workers, cpus), of_one in runs.items()
    ]


def words(rng: random.Random, count: int) -> str:
    """A text of so many words."""
    return " ".join("".join(rng.choices("abcdefghij", k=4)) for _ in range(count))


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """A completion."""
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer


class Turn(NamedTuple):
    """One of a conversation's: tokens of its prompt, how many were found, and could have been; seconds."""

    prompt: int
    cached: int
    findable: int
    seconds: float


def converse(url: str, seed: int, number: int) -> Iterator[Turn]:
    """One conversation, turn by turn."""
    rng = random.Random(f"{seed} {number}")
    spoken, known = "", 0
    for _ in range(rng.randint(2, MAX_TURNS)):
        spoken += f" {words(rng, rng.randint(*SAID_WORDS))}:"
        body = {"prompt": spoken, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        began = time.perf_counter()
        answer = ask(url, body)
        usage = answer["usage"]
        found = usage["prompt_tokens_details"]["cached_tokens"]
        yield Turn(usage["prompt_tokens"], found, known // BLOCK * BLOCK, time.perf_counter() - began)
        spoken += answer["choices"][0]["text"]
        known = usage["total_tokens"] - 1  # the last one is not computed yet
        if usage["prompt_tokens"] > MOST_PROMPT:
            break


def talk(url: str, seed: int, num_live: int, numbers: Sequence[int]) -> list[Turn]:
    """A client's conversations, some at a time in turn, as if their users thought meanwhile."""
    waiting = iter(numbers)
    live = [converse(url, seed, number) for number in itertools.islice(waiting, num_live)]
    turns = []
    while live:
        for one in list(live):
            turn = next(one, None)
            if turn is not None:
                turns.append(turn)
                continue
            live.remove(one)
            live += [converse(url, seed, number) for number in itertools.islice(waiting, 1)]
    return turns


def serve_once(
    policy: str, num_live: int, num_conversations: int, num_clients: int, seed: int
) -> dict[str, float]:
    """Hits and balance of two replicas."""
    server = ServerConfig(port=0, log_requests=False, shutdown_timeout=1.0)
    cluster = ClusterConfig(num_replicas=2, policy=policy)
    settings = {**SIZES, "num_gpu_blocks_override": SERVED_BLOCKS}
    with started(engine_apps(require_ray(), settings, server, cluster), server, cluster) as running:
        url = running.url
        for number in range(8):  # both compile their programs
            ask(url, {"prompt": f"{number} {number}", "max_tokens": 2})
        before = work_of(url)
        began = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(num_clients) as clients:
            shares = [range(first, num_conversations, num_clients) for first in range(num_clients)]
            talks = clients.map(functools.partial(talk, url, seed, num_live), shares)
            turns = list(itertools.chain.from_iterable(talks))
        seconds = time.perf_counter() - began
        after = work_of(url)
        work = [after[replica] - before.get(replica, 0.0) for replica in after]
        hops = hop_milliseconds(url)
    num_tokens, cached, findable, latencies = zip(*turns, strict=True)
    return {
        "turns": len(turns),
        "prompt_tokens": sum(num_tokens),
        "cached_tokens": sum(cached),
        "share_cached": sum(cached) / sum(num_tokens),
        "share_findable": sum(findable) / sum(num_tokens),
        "balance_of_work": max(work) / statistics.mean(work),
        "turns_per_second": len(turns) / seconds,
        "median_seconds": statistics.median(latencies),
        "hop_milliseconds": hops,
    }


def measure_serve(
    num_conversations: int, num_clients: int, repetitions: int, seed: int
) -> list[dict[str, Any]]:
    """The same by policy: medians of repetitions, each of other conversations."""
    rows = []
    for num_live in LIVE:
        runs: dict[str, list[dict[str, float]]] = {policy: [] for policy in ("round_robin", "prefix")}
        for repetition, policy in itertools.product(range(repetitions), runs):
            run = serve_once(policy, num_live, num_conversations, num_clients, seed + repetition)
            runs[policy].append(run)
            print(num_live * num_clients, policy, run, flush=True)
        pairs = zip(runs["prefix"], runs["round_robin"], strict=True)
        ratios = [one["cached_tokens"] / other["cached_tokens"] for one, other in pairs]
        for policy, of_policy in runs.items():
            medians = {key: statistics.median(run[key] for run in of_policy) for key in of_policy[0]}
            rows.append({"live_conversations": num_live * num_clients, "policy": policy, **medians})
        rows[-1] |= {"hits_over_round_robin": statistics.median(ratios), "lowest_ratio": min(ratios)}
    return rows


def work_of(url: str) -> dict[str, float]:
    """Tokens that each replica has computed."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        page = response.read().decode()
    work: dict[str, float] = {}
    for name, replica, value in _SAMPLE.findall(page):
        if name in ("prompt_tokens_total", "generation_tokens_total"):  # without those that were found
            work[replica] = work.get(replica, 0.0) + float(value)
    return work


def hop_milliseconds(url: str, count: int = 100) -> float:
    """Median of requests that need no engine."""
    spent = []
    for _ in range(count):
        began = time.perf_counter()
        with urllib.request.urlopen(f"{url}/version", timeout=30) as response:
            response.read()
        spent.append(1000 * (time.perf_counter() - began))
    return statistics.median(spent)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1200, help="of the data set (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=3, help="of each (default: %(default)s)")
    parser.add_argument("--conversations", type=int, default=120, help="default: %(default)s")
    parser.add_argument("--clients", type=int, default=4, help="that hold them (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=new_file, required=True)
    args = parser.parse_args(argv)
    if min(args.conversations, args.clients, args.repetitions) < 1 or args.rows < 10 * BATCH_SIZE:
        parser.error(f"--rows must be at least {10 * BATCH_SIZE}, and --conversations and the like positive")
    ray = require_ray()
    ray.init(
        num_cpus=2,
        object_store_memory=150 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    logging.getLogger("ray").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        generated = measure_generate(pathlib.Path(folder), args.rows, args.repetitions, args.seed)
    served = measure_serve(args.conversations, args.clients, args.repetitions, args.seed)
    ray.shutdown()
    from jaxllm.system.hardware import describe_hardware, versions  # JAX, which must not be forked

    values = {
        "command": command_line(["python", "scripts/bench_cluster.py", *(argv or sys.argv[1:])]),
        "hardware": describe_hardware(),
        "versions": {**versions(), "ray": version("ray")},
        "seed": args.seed,
        "generate": {
            "rows": args.rows,
            "prompt_len": PROMPT_LEN,
            "output_len": OUTPUT_LEN,
            "runs": generated,
        },
        "serve": {
            "conversations": args.conversations,
            "replicas": 2,
            "blocks": SERVED_BLOCKS,
            "runs": served,
        },
    }
    write_json(args.out, values)


if __name__ == "__main__":
    main()
