"""What the server costs beside the offline engine, how fast it is when idle, and what it does when overrun.

    jaxllm make-model out/bench107m --size 107m-gqa
    python scripts/bench_server.py --model out/bench107m --out server.json

`overhead`: the same texts through `LLM.generate` and through the server, streamed and not, in turns; output
tokens per second. `idle`: one request at a time, the time to its first token beside that of the same request
to `LLM.stream`, which is one engine step and the host's part of it. `overload`: requests arrive at a multiple
of what the server can do; refusals are timed, and /health, the queue and the memory are watched. The KV pool
counts as memory once it is written to; it is small here, so that cached blocks soon fill it.

The client is this process, on the same processors as the server. Where that is allowed its own threads go
before others, as if they had a processor to themselves. A model without a tokenizer gets one of its
vocabulary's size, trained on the Python standard library.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import json
import os
import pathlib
import random
import re
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import aiohttp
import numpy as np
from demo_model_data import Corpus, read_corpus, train_tokenizer

from jaxllm import LLM, SamplingParams
from jaxllm.commands.signals import signals_as_interrupts
from jaxllm.research.bench.results import command_line, write_json
from jaxllm.research.bench.serving.server_process import running_server
from jaxllm.research.workloads import Poisson
from jaxllm.system.hardware import describe_hardware, versions
from jaxllm.system.output_files import OutputParser, new_file

_MODES = ("offline", "stream", "whole")
_POLL_SECONDS = 0.2


@functools.cache
def _corpus() -> Corpus:
    return read_corpus(pathlib.Path(sysconfig.get_path("stdlib")))


@contextlib.contextmanager
def with_tokenizer(model: pathlib.Path) -> Iterator[pathlib.Path]:
    """The checkpoint's folder, or a copy that has a tokenizer."""
    if (model / "tokenizer.json").exists():
        yield model
        return
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made) / model.name
        shutil.copytree(model, folder)
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        train_tokenizer(_corpus(), vocab_size).save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        yield folder


def draw_texts(count: int, low: int, high: int, seed: int) -> list[str]:
    """Pieces of source code of some numbers of characters."""
    draw = random.Random(seed)
    sources = "\n".join(text for _, text in _corpus().train)
    pieces = []
    for _ in range(count):
        start, size = draw.randrange(len(sources) - high), draw.randint(low, high)
        pieces.append(sources[start : start + size])
    return pieces


def offline_seconds(llm: LLM, texts: Sequence[str], output_len: int, salt: str) -> float:
    """Of all texts at once."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    started = time.perf_counter()
    prompts = [{"prompt": text, "cache_salt": salt} for text in texts]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(output.text is not None for output in outputs)
    return time.perf_counter() - started


def offline_first_seconds(llm: LLM, text: str, output_len: int, salt: str) -> float:
    """To the first token of a request."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.stream([{"prompt": text, "cache_salt": salt}], params)
    assert next(outputs).outputs[0].token_ids
    first = time.perf_counter() - started
    for _ in outputs:
        pass
    return first


def body_of(text: str, output_len: int, salt: str, *, stream: bool) -> dict[str, Any]:
    """A greedy request of so many tokens."""
    body = {"prompt": text, "max_tokens": output_len, "temperature": 0, "ignore_eos": True}
    return {**body, "cache_salt": salt, "stream": stream}


async def read(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[float, float, int]:
    """Seconds to the first chunk and to the end, and the status."""
    started = time.perf_counter()
    first = 0.0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        async for _ in response.content.iter_any():
            first = first or time.perf_counter()
        return first - started, time.perf_counter() - started, response.status


def go_first() -> int:
    """Have this thread, and those it starts, scheduled before others; returns its niceness."""
    with contextlib.suppress(PermissionError):
        return os.nice(-10)
    return os.nice(0)


def session() -> aiohttp.ClientSession:
    """One without a bound on connections."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=600)
    )


async def served_seconds(url: str, bodies: Sequence[dict[str, Any]]) -> float:
    """Of all requests at once."""
    async with session() as opened:
        started = time.perf_counter()
        answers = await asyncio.gather(*(read(opened, url, body) for body in bodies))
        assert all(status == 200 for _, _, status in answers)
        return time.perf_counter() - started


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure_overhead(llm: LLM, url: str, args: argparse.Namespace) -> dict[str, Any]:
    """Output tokens per second, the first repetition of each not counted."""
    texts = draw_texts(args.num_prompts, 40, 200, args.seed)
    rates: dict[str, list[float]] = {mode: [] for mode in _MODES}
    ratios: dict[str, list[float]] = {mode: [] for mode in _MODES[1:]}
    for repetition in range(args.repetitions + 1):
        seconds = {}
        order = _MODES if repetition % 2 else _MODES[::-1]
        for mode in order:
            salt = f"{mode}-{repetition}"
            if mode == "offline":
                seconds[mode] = offline_seconds(llm, texts, args.output_len, salt)
                continue
            bodies = [body_of(text, args.output_len, salt, stream=mode == "stream") for text in texts]
            seconds[mode] = asyncio.run(served_seconds(url, bodies))
        print(repetition, seconds, file=sys.stderr, flush=True)
        if repetition:
            for mode in _MODES:
                rates[mode].append(args.num_prompts * args.output_len / seconds[mode])
            for mode in ratios:
                ratios[mode].append(seconds["offline"] / seconds[mode])
    return {
        "num_prompts": args.num_prompts,
        "output_len": args.output_len,
        "output_tokens_per_second": {mode: spread(found) for mode, found in rates.items()},
        "share_of_offline": {mode: spread(found) for mode, found in ratios.items()},
    }


def measure_idle(llm: LLM, url: str, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first token of single requests, by turns."""
    texts = draw_texts(args.num_idle + 4, 60, 100, args.seed + 1)
    offline, served = [], []

    async def ask() -> None:
        async with session() as opened:
            for number, text in enumerate(texts):
                salt = f"idle-{number}"
                first = functools.partial(offline_first_seconds, llm, text, args.idle_output_len, salt)
                offline.append(await asyncio.to_thread(first))
                body = body_of(text, args.idle_output_len, salt, stream=True)
                served.append((await read(opened, url, body))[0])

    asyncio.run(ask())
    offline, served = offline[4:], served[4:]
    extra = [one - other for one, other in zip(served, offline, strict=True)]
    return {
        "num_requests": len(served),
        "offline_milliseconds": spread([one * 1e3 for one in offline]),
        "served_milliseconds": spread([one * 1e3 for one in served]),
        "difference_milliseconds": spread([one * 1e3 for one in extra]),
    }


async def overrun(url: str, args: argparse.Namespace) -> dict[str, Any]:
    """Requests at a multiple of what the server can do."""
    texts = draw_texts(256, 40, 80, args.seed + 2)
    bodies = [body_of(text, 16, f"overload-{place}", stream=False) for place, text in enumerate(texts)]
    started = time.perf_counter()
    async with session() as opened:
        await asyncio.gather(*(read(opened, url, body) for body in bodies[:128]))
        capacity = 128 / (time.perf_counter() - started)
        rate = args.overload * capacity
        count = int(rate * args.seconds)
        due = Poisson(rate).times(count, np.random.default_rng(args.seed))
        watching = asyncio.create_task(watch(opened, url))
        begun = time.perf_counter()
        tasks = []
        for number, when in enumerate(due):
            delay = begun + when - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            body = {**bodies[number % len(bodies)], "cache_salt": f"overload-{number}"}
            tasks.append(asyncio.create_task(read(opened, url, body)))
        answers = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - begun
        watching.cancel()
        watched = await watching
    refused = [one for _, one, status in answers if status == 503]
    admitted = [one for _, one, status in answers if status == 200]
    return {
        "capacity_requests_per_second": capacity,
        "offered_requests_per_second": count / float(due[-1]),
        "seconds": seconds,
        "num_sent": count,
        "num_admitted": len(admitted),
        "num_refused": len(refused),
        "num_others": count - len(admitted) - len(refused),
        "admitted_per_second": len(admitted) / seconds,
        "admitted_seconds": {"p50": quantile(admitted, 0.5), "p99": quantile(admitted, 0.99)},
        "refused_milliseconds": {
            "p50": quantile(refused, 0.5) * 1e3,
            "p99": quantile(refused, 0.99) * 1e3,
            "max": max(refused) * 1e3,
        },
        **watched,
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Of values, by interpolation."""
    return float(np.quantile(values, share))


async def watch(opened: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Health, the queue and memory until it is cancelled."""
    statuses: list[int] = []
    latencies, waiting, memory = [], [], []
    try:
        while True:
            started = time.perf_counter()
            async with opened.get(f"{url}/health") as response:
                await response.read()
                statuses.append(response.status)
            latencies.append(time.perf_counter() - started)
            async with opened.get(f"{url}/metrics") as response:
                text = await response.text()
            waiting.append(gauge(text, "jaxllm:num_requests_waiting"))
            memory.append(gauge(text, "process_resident_memory_bytes"))
            await asyncio.sleep(_POLL_SECONDS)
    except asyncio.CancelledError:
        pass
    quarter = max(1, len(memory) // 4)
    return {
        "health": {
            "num_asked": len(statuses),
            "num_green": statuses.count(200),
            "p99_milliseconds": quantile(latencies, 0.99) * 1e3,
        },
        "most_waiting": max(waiting),
        "resident_bytes": {
            "at_the_start": memory[0],
            "after_a_quarter": max(memory[:quarter]),
            "at_the_end": memory[-1],
            "most": max(memory),
        },
    }


def gauge(text: str, name: str) -> float:
    """A metric's value in Prometheus' text format."""
    found = re.search(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write JSON."""
    parser = OutputParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=pathlib.Path, required=True, help="folder of a checkpoint")
    parser.add_argument("--out", type=new_file, required=True, help="JSON file")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--num-gpu-blocks", type=int, default=1024, help="of the KV pool")
    parser.add_argument("--num-idle", type=int, default=100, help="requests, one at a time")
    parser.add_argument("--idle-output-len", type=int, default=8)
    parser.add_argument("--overload", type=float, default=10.0, help="multiple of the capacity")
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals_as_interrupts())
        folder = str(stack.enter_context(with_tokenizer(args.model)))
        pool = ["--num-gpu-blocks-override", str(args.num_gpu_blocks)]
        settings = ["--model", folder, "--warm-up", "all", "--no-log-requests", *pool]
        url = stack.enter_context(running_server(settings))
        llm = stack.enter_context(LLM(folder, warm_up="all", num_gpu_blocks_override=args.num_gpu_blocks))
        gc.freeze()  # as the server does: else this client's own pauses count as the server's
        result = {
            "command": command_line(["python", *sys.argv]),
            "hardware": describe_hardware(),
            "versions": versions(),
            "model": args.model.name,
            "seed": args.seed,
            "client_niceness": go_first(),
            "overhead": measure_overhead(llm, url, args),
            "idle": measure_idle(llm, url, args),
            "overload": asyncio.run(overrun(url, args)),
        }
    write_json(args.out, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
