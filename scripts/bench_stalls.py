"""What a stream of ordinary requests notices of hostile ones beside it.

    python scripts/bench_stalls.py --out stalls.json

A server of the embedded model in a process of its own, with everything compiled before, answers `--streams`
ordinary requests at a time; for mixes of sampling options one that has compiled what ordinary requests need.
For each case two workers send its requests meanwhile, one after the other, each
new, so that nothing is found in a cache; before that the same is measured without them. A gap is
the time between two chunks of a stream. The goal is a worst gap of at most three times the median of the
ordinary stream and 50 ms; the client is on the same processors as the server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import aiohttp

from jaxllm.research.bench.results import command_line, write_json
from jaxllm.research.bench.serving.server_process import running_server
from jaxllm.system.hardware import describe_hardware, versions
from jaxllm.system.output_files import OutputParser, new_file

_WORKERS = 2
_NUM_BODIES = 64
_OUTPUT_LEN = 200


def _chain(number: int, count: int, link: Callable[[Any], Any]) -> dict[str, Any]:
    names = [f"a{number}_{place}" for place in range(count)]
    definitions = {one: link({"$ref": f"#/$defs/{after}"}) for one, after in itertools.pairwise(names)}
    definitions[names[-1]] = {"type": "string"}
    return {"json": {"$ref": f"#/$defs/{names[0]}", "$defs": definitions}}


def _lark(number: int, count: int, letter: str, rest: str) -> dict[str, Any]:
    names = [f"{letter}{number}_{place}" for place in range(count)]
    lines = [f"{one}: {after}{rest}" for one, after in itertools.pairwise(names)]
    return {"grammar": "\n".join([f"start: {names[0]}", *lines, f'{names[-1]}: "a"'])}


def _properties(number: int) -> dict[str, Any]:
    properties = {f"k{number}_{place}": {"type": "string"} for place in range(3000)}
    return {"json": {"type": "object", "properties": properties}}


_OPTIONS = (
    {"top_p": 0.9},
    {"top_k": 20, "min_p": 0.01},
    {"logprobs": 3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.1},
    {"repetition_penalty": 1.1},
    {"logit_bias": {"5": 1.0}, "min_tokens": 4},
    {"bad_words": ["def"]},
    {"prompt_logprobs": 1},
)


def _mix(number: int) -> dict[str, Any]:
    """One option first, then two and more of them together."""
    chosen = [options for place, options in enumerate(_OPTIONS) if (1 << place) & (number * 37 % 256 or 1)]
    mixed: dict[str, Any] = {}
    for options in [_OPTIONS[number - 1]] if number <= len(_OPTIONS) else chosen:
        mixed |= options
    return mixed


GRAMMARS: dict[str, Callable[[int], dict[str, Any]]] = {
    "references": lambda number: _chain(number, 4000, lambda inner: inner),
    "conjunctions": lambda number: _chain(number, 4000, lambda inner: {"allOf": [inner]}),
    "objects": lambda number: _chain(
        number, 2500, lambda inner: {"type": "object", "properties": {"x": inner}}
    ),
    "arrays": lambda number: _chain(number, 10_000, lambda inner: {"type": "array", "items": inner}),
    "rules": lambda number: _lark(number, 3500, "r", ""),
    "terminals": lambda number: _lark(number, 5000, "T", ' "a"'),
    "repeats": lambda number: {"regex": f"(((a{{{1000 + number}}}){{1000}}){{1000}})"},
    "stars": lambda number: {"regex": f"{number}|" + "(a*)*" * 3200},
    "properties": _properties,
    "slow masks": lambda number: {"regex": f"(((a{{{400 + number}}}){{10}}){{10}})"},
}
"""What the structured_outputs of a case's requests are, by the number of each."""
MIXES = "mixes"
CASES = (*GRAMMARS, MIXES)


async def _stream(session: aiohttp.ClientSession, url: str, seed: int, gaps: list[float]) -> None:
    body = {"prompt": "def add(a, b):", "max_tokens": _OUTPUT_LEN, "ignore_eos": True}
    async with session.post(f"{url}/v1/completions", json={**body, "seed": seed, "stream": True}) as response:
        response.raise_for_status()
        last = None
        async for line in response.content:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last = now


async def _streams(
    session: aiohttp.ClientSession, url: str, place: int, until: float, gaps: list[float]
) -> None:
    for number in itertools.count():
        if time.perf_counter() > until:
            return
        await _stream(session, url, 1000 * place + number, gaps)


async def _send(
    session: aiohttp.ClientSession,
    url: str,
    bodies: Iterator[bytes],
    until: float,
    statuses: dict[int, int],
) -> None:
    headers = {"content-type": "application/json"}
    while time.perf_counter() < until and (body := next(bodies, None)) is not None:
        async with session.post(f"{url}/v1/completions", data=body, headers=headers) as response:
            await response.read()
            statuses[response.status] = statuses.get(response.status, 0) + 1


async def _measure(
    url: str, args: argparse.Namespace, bodies: Sequence[bytes] | None = None
) -> dict[str, Any]:
    """Gaps of the ordinary streams, with a case's requests beside them or without."""
    gaps: list[float] = []
    statuses: dict[int, int] = {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        until = time.perf_counter() + args.seconds
        streams = [_streams(session, url, args.seed + place, until, gaps) for place in range(args.streams)]
        hostile = []
        if bodies is not None:
            left = iter(bodies)
            hostile = [_send(session, url, left, until, statuses) for _ in range(_WORKERS)]
        await asyncio.gather(*streams, *hostile)
    found = {"num_gaps": len(gaps), "median_gap": statistics.median(gaps), "worst_gap": max(gaps)}
    return found if bodies is None else {**found, "statuses": statuses}


def _bodies(case: str) -> list[bytes]:
    """Requests of a case, made before anything is timed."""
    common = {"prompt": "a", "max_tokens": 60}
    numbers = range(1, _NUM_BODIES + 1)
    if case == MIXES:
        return [json.dumps({**common, **_mix(number)}).encode() for number in numbers]
    make = GRAMMARS[case]
    return [json.dumps({**common, "structured_outputs": make(number)}).encode() for number in numbers]


def _measure_case(url: str, args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Gaps without a case's requests and with them, and whether these are within the bound."""
    bodies = _bodies(name)
    alone = asyncio.run(_measure(url, args))
    beside = asyncio.run(_measure(url, args, bodies))
    bound = 3 * alone["median_gap"] + 0.05
    print(
        f"{name}: median gap {1000 * alone['median_gap']:.1f} ms alone and "
        f"{1000 * beside['median_gap']:.1f} beside, worst {1000 * alone['worst_gap']:.0f} and "
        f"{1000 * beside['worst_gap']:.0f}, answers {beside['statuses']}"
    )
    is_kept = beside["worst_gap"] <= bound
    return {"alone": alone, "beside": beside, "bound": bound, "is_within_bound": is_kept}


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = OutputParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES), help="separated by commas (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=4, help="ordinary ones at a time")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=new_file, required=True)
    args = parser.parse_args(argv)
    names = args.cases.split(",")
    for name in names:
        if name not in CASES:
            parser.error(f"--cases {name}: there are {', '.join(CASES)}")
    if args.streams < 1 or args.seconds <= 0:
        parser.error("--streams must be at least 1, and --seconds above 0")
    found: dict[str, Any] = {}
    values = {
        "command": command_line(["python", "scripts/bench_stalls.py", *(argv or sys.argv[1:])]),
        "hardware": describe_hardware(),
        "versions": versions(),
        "seed": args.seed,
        "cases": found,
    }
    if os.getloadavg()[0] > (os.cpu_count() or 1):
        values["note"] = "other work kept the processors busy: gaps without hostile requests tell how much"
    options = ["--max-num-seqs", "16", "--max-model-len", "512", "--num-scheduler-steps", "1"]
    options += ["--decode-buckets", "16", "--prefill-buckets", "64", "--max-num-batched-tokens", "64"]
    if grammars := [name for name in names if name != MIXES]:
        with running_server([*options, "--warm-up", "everything"]) as url:
            for name in grammars:
                found[name] = _measure_case(url, args, name)
                write_json(args.out, values)
    if MIXES in names:  # no program of theirs is compiled yet
        with tempfile.TemporaryDirectory() as cache:
            options += ["--compilation-cache-dir", cache]
            with running_server([*options, "--warm-up", "background"]) as url:
                asyncio.run(_measure(url, args))  # by which the others are
                found[MIXES] = _measure_case(url, args, MIXES)
                write_json(args.out, values)


if __name__ == "__main__":
    main()
