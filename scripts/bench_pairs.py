"""Two checkouts of this repository in turns on one machine: which is faster, with intervals.

    git worktree add ../before COMMIT
    jaxllm make-model out/bench107m --size 107m-gqa
    python scripts/bench_pairs.py ../before --model out/bench107m --out pairs.json

Both checkouts hold an engine, or a server, at the same time; while one works the other one waits. They take
turns, and the first of a pair is the second of the next. Offline: the workloads of `jaxllm compare`. Server:
64 requests at once, streamed and whole, and the first token of one alone. Start: from the first line of
Python to a token, with everything cached. Scheduler: iterations of each checkout's own
`scripts/bench_scheduler.py`.

A ratio is of speeds, this checkout over the other one: above 1, this one is faster. Of the pairs' ratios the
median is given with an interval that holds the true median 95 times of 100, by the binomial distribution.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import scipy.stats
from bench_server import body_of, draw_texts, go_first, read, served_seconds, session, with_tokenizer
from bench_start import timed

from jaxllm.research.bench.results import command_line, write_json
from jaxllm.research.bench.serving.server_process import running_server
from jaxllm.research.compare.workloads import PROMPT_LENGTHS, Workload, make_workload
from jaxllm.system.hardware import describe_hardware, versions
from jaxllm.system.output_files import OutputParser, new_file

_HERE = pathlib.Path(__file__).resolve().parents[1]
_PARTS = ("offline", "server", "start", "scheduler")
_OFFLINE = """
import json, sys, time
from jaxllm import LLM, SamplingParams
settings = {"max_num_seqs": 64, "num_gpu_blocks_override": 4097, "skip_tokenizer_init": True}
llm = LLM(sys.argv[1], warm_up="all", enable_prefix_caching=False, **settings)
print("ready", flush=True)
for line in sys.stdin:
    prompts, max_tokens = json.loads(line)
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in max_tokens]
    prompts = [{"prompt_token_ids": ids} for ids in prompts]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    print(json.dumps([seconds, [list(one.outputs[0].token_ids) for one in outputs]]), flush=True)
"""
_START = """
import sys
from jaxllm import LLM, SamplingParams
llm = LLM(sys.argv[1], compilation_cache_dir=sys.argv[2], skip_tokenizer_init=True, kv_cache_memory=2**28)
params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
llm.generate([[5 + i] * 24 for i in range(64)], params, use_tqdm=False)
print("ready", flush=True)
"""


Seconds = Callable[[int], float]


@dataclasses.dataclass
class Side:
    """One of the two checkouts."""

    folder: pathlib.Path
    model: str

    def environment(self) -> dict[str, str]:
        """Of its processes: Python finds this checkout's package and no other."""
        return {**os.environ, "PYTHONPATH": str(self.folder)}

    def python(self, *arguments: str) -> subprocess.Popen[str]:
        """A process of it that takes and gives lines."""
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @contextlib.contextmanager
    def engine(self) -> Iterator[subprocess.Popen[str]]:
        """An offline engine in a process of its own."""
        with self.python("-c", _OFFLINE, self.model) as process:
            try:
                line_of(process)
                yield process
            finally:
                process.kill()

    @contextlib.contextmanager
    def server(self) -> Iterator[str]:
        """Its server's URL."""
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = str(self.folder)  # what `running_server` starts takes this over
        settings = ["--model", self.model, "--warm-up", "all", "--no-log-requests"]
        try:
            with running_server([*settings, "--num-gpu-blocks-override", "1024"]) as url:
                yield url
        finally:
            os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line a process prints.

    Raises:
        RuntimeError: it has ended.
    """
    assert process.stdout is not None
    if line := process.stdout.readline():
        return line
    raise RuntimeError(f"{process.args!r:.60} ended with {process.wait()}")


def in_turns(name: str, pairs: int, new: Seconds, old: Seconds) -> dict[str, Any]:
    """Seconds of both, pair by pair; each is told the pair's number, from -1, which is not counted."""
    seconds = []
    for number in range(-1, pairs):
        first, second = (new, old) if number % 2 else (old, new)
        one, other = first(number), second(number)
        seconds.append((one, other) if number % 2 else (other, one))
    return row(name, seconds[1:])


def row(name: str, seconds: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Pairs of seconds, this checkout's first, as a row of the result."""
    ratios = sorted(old / new for new, old in seconds)
    low = int(scipy.stats.binom.ppf(0.025, len(ratios), 0.5))
    interval = [ratios[low - 1], ratios[len(ratios) - low]] if low else [None, None]
    found = {
        "what": name,
        "pairs": len(ratios),
        "this_seconds": float(np.median([new for new, _ in seconds])),
        "other_seconds": float(np.median([old for _, old in seconds])),
        "ratio": float(np.median(ratios)),
        "interval": interval,
    }
    print(found, flush=True)
    return found


def offline(
    new: Side, old: Side, pairs: int, seed: int, workloads: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The workloads of `jaxllm compare`, and whether both give the same tokens."""
    said: dict[int, Any] = {}

    def run(process: subprocess.Popen[str], work: Workload) -> float:
        assert process.stdin is not None
        process.stdin.write(json.dumps([work.prompts, work.max_tokens]) + "\n")
        process.stdin.flush()
        seconds, said[process.pid] = json.loads(line_of(process))
        return float(seconds)

    vocab_size = json.loads(pathlib.Path(new.model, "config.json").read_text())["vocab_size"]
    with new.engine() as ours, old.engine() as theirs:
        for name in workloads:
            work = make_workload(name, num_requests=64, vocab_size=vocab_size, seed=seed)
            sides = [lambda _, one=one, work=work: run(one, work) for one in (ours, theirs)]
            found = in_turns(f"offline, {name}", pairs, *sides)
            yield found | {"same_tokens": said[ours.pid] == said[theirs.pid]}


def server(new: Side, old: Side, pairs: int, seed: int) -> Iterator[dict[str, Any]]:
    """64 requests at once, and one alone."""
    texts = draw_texts(64, 40, 200, seed)

    def together(url: str, number: int, streamed: bool) -> float:
        salt = f"{streamed} {number}"
        return asyncio.run(served_seconds(url, [body_of(one, 64, salt, stream=streamed) for one in texts]))

    with new.server() as ours, old.server() as theirs:
        go_first()
        for name, streamed in (("whole responses", False), ("streams", True)):
            sides = [functools.partial(together, url, streamed=streamed) for url in (ours, theirs)]
            yield in_turns(f"server, {name}", pairs, *sides)
        sides = [functools.partial(first, url, texts) for url in (ours, theirs)]
        yield in_turns("server, first token", 10 * pairs, *sides)


def first(url: str, texts: Sequence[str], number: int) -> float:
    """Seconds to the first token of a request alone."""

    async def ask() -> float:
        async with session() as opened:
            return (await read(opened, url, body_of(texts[number % 64], 8, f"one {number}", stream=True)))[0]

    return asyncio.run(ask())


def start(new: Side, old: Side, pairs: int) -> Iterator[dict[str, Any]]:
    """From the first line of Python to 64 tokens, with what the start before it left."""
    with tempfile.TemporaryDirectory() as made:

        def run(side: Side) -> float:
            cache = str(pathlib.Path(made, str(side is new)))
            environment = side.environment() | {"PYTHONPYCACHEPREFIX": cache}
            environment.pop("PYTHONDONTWRITEBYTECODE", None)
            return timed([sys.executable, "-c", _START, side.model, cache], environment)[0]

        yield in_turns("start", pairs, lambda _: run(new), lambda _: run(old))


def scheduler(new: Side, old: Side, pairs: int, seed: int) -> Iterator[dict[str, Any]]:
    """Medians of the iterations that both checkouts' own benchmark knows."""
    runs: dict[str, list[tuple[float, float]]] = {}

    with tempfile.TemporaryDirectory() as made:

        def run(side: Side, number: int) -> dict[str, float]:
            out = pathlib.Path(made, f"{side is new}-{number}.json")
            script = ["scripts/bench_scheduler.py", "--running", "256", "--repetitions", "500"]
            with side.python(*script, "--seed", str(seed), "--out", str(out)) as process:
                process.communicate()
            if process.returncode:
                raise RuntimeError(f"{side.folder / script[0]} ended with {process.returncode}")
            timings = json.loads(out.read_text())["timings"]
            return {one["iteration"]: one["median_us"] / 1e6 for one in timings}

        for number in range(pairs):
            sides = (new, old) if number % 2 else (old, new)
            found = {side is new: run(side, number) for side in sides}
            for name in found[True].keys() & found[False].keys():
                runs.setdefault(name, []).append((found[True][name], found[False][name]))
    for name, seconds in sorted(runs.items()):
        yield row(f"scheduler, {name}", seconds)


def commit_of(folder: pathlib.Path) -> str:
    """What a checkout has checked out."""
    asked = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Measure, and write JSON, a row at a time."""
    parser = OutputParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=pathlib.Path, help="folder of the other checkout")
    parser.add_argument("--model", type=pathlib.Path, required=True, help="folder of a checkpoint")
    parser.add_argument("--parts", default=",".join(_PARTS), help="of the measurement (default: %(default)s)")
    parser.add_argument("--workloads", default="short,mixed,long", help="offline (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=9, help="of each measurement (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=new_file, required=True, help="JSON file")
    args = parser.parse_args()
    parts = args.parts.split(",")
    for name, given, known in (
        ("--parts", parts, _PARTS),
        ("--workloads", args.workloads.split(","), (*PROMPT_LENGTHS,)),
    ):
        if unknown := set(given) - set(known):
            parser.error(f"{name} knows {', '.join(known)}, not {', '.join(map(repr, sorted(unknown)))}")
    if not (args.other / "jaxllm" / "__init__.py").exists():
        parser.error(f"{args.other} is no checkout of this repository: git worktree add {args.other} COMMIT")
    if not (args.model / "config.json").exists():
        parser.error(f"{args.model} is no checkpoint: jaxllm make-model {args.model} --size 107m-gqa")
    if args.pairs < 6:
        parser.error(f"--pairs must be at least 6 for an interval of 95 %, got {args.pairs}")
    with with_tokenizer(args.model) as folder:
        new, old = (Side(path.resolve(), str(folder)) for path in (_HERE, args.other))
        result = {
            "command": command_line(["python", *sys.argv]),
            "hardware": describe_hardware(),
            "versions": versions(),
            "this_commit": commit_of(new.folder),
            "other_commit": commit_of(old.folder),
            "seed": args.seed,
            "rows": [],
        }
        measure = {
            "offline": lambda: offline(new, old, args.pairs, args.seed, args.workloads.split(",")),
            "server": lambda: server(new, old, args.pairs, args.seed),
            "start": lambda: start(new, old, args.pairs),
            "scheduler": lambda: scheduler(new, old, args.pairs, args.seed),
        }
        for part in parts:
            for found in measure[part]():
                result["rows"].append(found)
                write_json(args.out, result)  # whatever fails later, what was measured is kept


if __name__ == "__main__":
    main()
