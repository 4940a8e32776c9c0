"""What drafts gain: tokens a second of editing and of ordinary completion, over numbers of streams.

    python scripts/bench_speculation.py --out speculation.json

Engines of one model, without drafts, with fixed numbers of them, and with as many as pay by cost, take turns
on the same prompts, so that what else the machine does meets all of them. What counts is the median over
`--repeats` of the ratio to the engine without drafts in the same turn. Editing is greedy: part of a file, and
its beginning once more. Ordinary completion samples at a temperature of 0.8.
"""

from __future__ import annotations

import argparse
import inspect
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from jaxllm import LLM, SamplingParams
from jaxllm.research.bench.results import about, write_json
from jaxllm.sched import queues, reading, running
from jaxllm.sched.policies import iterations, order, priority
from jaxllm.system.options import sizes
from jaxllm.system.output_files import OutputParser, new_file

_MODULES = queues, reading, running, iterations, order, priority
_OPENINGS = (
    "def read_lines(path):\n",
    "import json\n\n\ndef load(",
    "class Queue:\n    def __init__(self",
    "for number in range(",
    "# Count the words of a text\n",
    "try:\n    import numpy\nexcept ",
    "def test_sum():\n    assert ",
    "async def fetch(session, url):\n",
)


def prompts_of(kind: str, count: int) -> list[str]:
    """Prompts, each of its own: parts of files, or openings."""
    if kind == "chat":
        return [f"# Part {number}\n{_OPENINGS[number % len(_OPENINGS)]}" for number in range(count)]
    prompts = []
    for number in range(count):
        lines = inspect.getsource(_MODULES[number % len(_MODULES)]).splitlines()
        first = 10 + 5 * (number // len(_MODULES)) % max(1, len(lines) - 50)
        part = "\n".join(lines[first : first + 36])
        prompts.append(f"{part}\n\n\n# Again:\n{part[: len(part) // 6]}")
    return prompts


def params_of(kind: str, num_tokens: int) -> SamplingParams:
    """Greedy for edits, else at random."""
    if kind == "edit":
        return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return SamplingParams(temperature=0.8, seed=1, max_tokens=num_tokens, ignore_eos=True)


def configs_of(args: argparse.Namespace) -> dict[str, dict[str, Any] | None]:
    """Settings by name, that without drafts first."""
    found: dict[str, dict[str, Any] | None] = {"off": None}
    for count in args.fixed:
        found[f"fixed {count}"] = {"policy": "fixed", "num_speculative_tokens": count}
    found["by cost"] = {"policy": "cost", "num_speculative_tokens": args.most}
    return {name: config and {"method": args.method, **config} for name, config in found.items()}


def one_run(llm: LLM, kind: str, streams: int, num_tokens: int) -> tuple[float, float, list[list[int]]]:
    """Tokens a second, tokens of each verification, and the tokens."""
    speculation = llm.engine.scheduler.speculation
    before = (0, 0)
    if speculation is not None:
        before = speculation.counts.num_verifications, speculation.counts.num_kept
    began = time.perf_counter()
    outputs = llm.generate(prompts_of(kind, streams), params_of(kind, num_tokens), use_tqdm=False)
    seconds = time.perf_counter() - began
    yielded = 0.0
    if speculation is not None and (count := speculation.counts.num_verifications - before[0]):
        yielded = 1 + (speculation.counts.num_kept - before[1]) / count
    tokens = [list(output.token_ids) for output in outputs]
    return sum(map(len, tokens)) / seconds, yielded, tokens


def measure(llms: dict[str, LLM], kind: str, streams: int, num_tokens: int, repeats: int) -> dict[str, Any]:
    """A case, all engines in turns after one run each that does not count."""
    speeds: dict[str, list[float]] = {name: [] for name in llms}
    yielded, same = dict.fromkeys(llms, 0.0), dict.fromkeys(llms, True)
    for turn in range(repeats + 1):
        expected: list[list[int]] = []
        for name, llm in llms.items():
            speed, per_step, tokens = one_run(llm, kind, streams, num_tokens)
            expected = expected or tokens
            same[name] &= tokens == expected
            if turn:
                speeds[name].append(speed)
                yielded[name] += per_step / repeats
    return {
        "kind": kind,
        "streams": streams,
        "tokens_per_second": speeds,
        "ratio": {
            name: statistics.median(one / off for one, off in zip(found, speeds["off"], strict=True))
            for name, found in speeds.items()
        },
        "tokens_per_verification": yielded,
        "same_tokens": same,
    }


def line_of(row: dict[str, Any]) -> str:
    """A case in a line: each engine's ratio, and the tokens of a verification."""
    parts = [
        f"{name} {row['ratio'][name]:.2f} ({row['tokens_per_verification'][name]:.1f})"
        for name in row["ratio"]
        if name != "off"
    ]
    off = statistics.median(row["tokens_per_second"]["off"])
    return f"{row['kind']:5} {row['streams']:3} streams: off {off:.0f} tokens/s; {', '.join(parts)}"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=new_file, required=True)
    parser.add_argument("--model", help="folder of a checkpoint; by default the embedded model")
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--fixed", type=sizes, default=[3, 5, 8], help="fixed numbers of drafts")
    parser.add_argument("--most", type=int, default=8, help="most drafts by cost")
    parser.add_argument("--streams", type=sizes, default=[1, 8, 64])
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=["edit", "chat"])
    parser.add_argument("--tokens", type=int, default=96, help="of each output")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    llms = {
        name: LLM(args.model, speculative_config=config, max_num_seqs=64, warm_up="all")
        for name, config in configs_of(args).items()
    }
    rows = []
    for kind in args.kinds:
        for streams in args.streams:
            row = measure(llms, kind, streams, args.tokens, args.repeats)
            print(line_of(row), flush=True)
            rows.append(row)
    values = about(["python", "scripts/bench_speculation.py", *(sys.argv[1:] if argv is None else argv)])
    if os.getloadavg()[0] > (os.cpu_count() or 1):
        values["note"] = "other work kept the processors busy: ratios, taken in turns, tell more than seconds"
    write_json(args.out, {**values, "rows": rows})


if __name__ == "__main__":
    main()
