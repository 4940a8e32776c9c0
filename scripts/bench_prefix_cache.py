"""Times requests that begin alike, and conversations, with the prefix cache and without.

    python scripts/bench_prefix_cache.py --model out/bench107m-gqa --out prefix-cache.json

`shared`: requests with a common prompt and a few tokens of their own, all at once. `turns`: conversations
whose turns follow one another, each with all that was said before. `apart`: requests that have nothing in
common. `turns-host`: one conversation at a time, in a pool that holds two of them, with host memory for all;
`turns-nowhere`: so, without host memory, where nothing can be found; `turns-files`: as with host memory, and
each round of turns by a new engine that finds only what those before it wrote to files.
With and without take turns, each the first in every other repetition. Time to the first token is from
a request's arrival, the mean over requests, in `turns` over those after a conversation's first. Names of a
long prompt's blocks are timed apart.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from jaxllm import LLM, SamplingParams
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.engine import Engine
from jaxllm.engine.outputs import RequestOutput
from jaxllm.executor.kv.disk import BlockFiles
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.research.bench.results import command_line, write_json
from jaxllm.sched.cache.blocks import BlockPool
from jaxllm.sched.cache.names import names_of, root
from jaxllm.sched.scheduler import Scheduler
from jaxllm.system.hardware import describe_hardware, versions
from jaxllm.system.output_files import OutputParser, new_file

_LONG_PROMPT = 32768


KINDS = ("shared", "turns", "apart", "turns-host", "turns-nowhere", "turns-files")


def make_engine(llm: LLM, kind: str, *, caches: bool, files: BlockFiles | None = None) -> Engine:
    """An engine of its own on the executor of `llm`."""
    built = llm.engine.scheduler
    config = dataclasses.replace(built.config, enable_prefix_caching=caches)
    if kind.startswith("turns-"):
        config = dataclasses.replace(config, num_gpu_blocks=2 * -(-config.max_model_len // config.block_size))
    if kind == "turns-nowhere":
        config = dataclasses.replace(config, num_host_blocks=0)
    scheduler = Scheduler(config, built.policy, files=files if caches and kind == "turns-files" else None)
    return Engine(llm.executor, scheduler, vocab_size=llm.model_config.vocab_size, num_scheduler_steps=1)


def run(engine: Engine, prompts: Sequence[list[int]], output_len: int) -> list[RequestOutput]:
    """All prompts at once; outputs in their order."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    outputs = {}
    while engine.has_unfinished_requests:
        outputs.update({int(output.request_id): output for output in engine.step()})
    return [outputs[index] for index in range(len(prompts))]


def first_token_seconds(outputs: Sequence[RequestOutput]) -> float:
    """Mean over requests."""
    metrics = [output.metrics for output in outputs]
    return statistics.fmean(
        one.first_token_time - one.arrival_time
        for one in metrics
        if one is not None and one.first_token_time is not None
    )


def play(
    llm: LLM, kind: str, args: argparse.Namespace, *, caches: bool, files: BlockFiles | None
) -> dict[str, float]:
    """One run of a kind of load."""
    engine = make_engine(llm, kind, caches=caches, files=files)
    draw = random.Random(args.seed)
    vocab_size = llm.model_config.vocab_size

    def tokens(count: int) -> list[int]:
        return [draw.randrange(vocab_size) for _ in range(count)]

    started = time.perf_counter()
    if kind.startswith("turns"):
        histories = [tokens(args.history) for _ in range(args.conversations)]
        firsts, outputs = [], []
        for turn in range(args.turns):
            if kind == "turns-files":
                engine.reset_prefix_cache()
                llm.executor.flush_files()
                engine = make_engine(llm, kind, caches=caches, files=files)
            at_once = len(histories) if kind == "turns" else 1
            outputs = [
                output
                for first in range(0, len(histories), at_once)
                for output in run(engine, histories[first : first + at_once], args.output_len)
            ]
            if turn:
                firsts.append(first_token_seconds(outputs))
            for history, output in zip(histories, outputs, strict=True):
                history += [*output.token_ids, *tokens(args.own)]
        first, num_tokens = statistics.fmean(firsts), args.turns * args.conversations * args.output_len
    else:
        common = tokens(args.common) if kind == "shared" else []
        own = args.own if kind == "shared" else args.common + args.own
        outputs = run(engine, [common + tokens(own) for _ in range(args.requests)], args.output_len)
        first, num_tokens = first_token_seconds(outputs), args.requests * args.output_len
    seconds = time.perf_counter() - started
    engine.reset_prefix_cache()
    if files is not None:
        llm.executor.flush_files()
        files.clear()
    found = sum(output.num_cached_tokens for output in outputs)
    given = sum(len(output.prompt_token_ids) for output in outputs)
    return {
        "first_token_seconds": first,
        "tokens_per_second": num_tokens / seconds,
        "share_found": found / given,
    }


def time_names(block_size: int, repetitions: int) -> dict[str, float]:
    """Milliseconds to name the blocks of a long prompt, and to find them all."""
    token_ids = list(range(_LONG_PROMPT))
    num_blocks = _LONG_PROMPT // block_size
    pool = BlockPool(num_blocks, block_size)
    block_ids = pool.allocate(num_blocks)
    for block_id, name in zip(block_ids, names_of(token_ids, block_size, root()), strict=True):
        pool.name(block_id, name)
    naming, finding = [], []
    for _ in range(repetitions):
        started = time.perf_counter()
        names = names_of(token_ids, block_size, root())
        named = time.perf_counter()
        assert len(pool.find(names)) == num_blocks
        naming.append(named - started)
        finding.append(time.perf_counter() - named)
    return {
        "tokens": _LONG_PROMPT,
        "names_ms": 1e3 * statistics.median(naming),
        "find_ms": 1e3 * statistics.median(finding),
    }


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = OutputParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(demo_model_path()), help="folder of a checkpoint")
    parser.add_argument("--kinds", default=",".join(KINDS), help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--common", type=int, default=512, help="tokens that all begin with")
    parser.add_argument("--own", type=int, default=16, help="tokens of each request, or turn")
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--history", type=int, default=1000, help="tokens of a conversation's first prompt")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=new_file, required=True)
    args = parser.parse_args(argv)
    kinds = args.kinds.split(",")
    sizes = args.requests, args.common, args.own, args.output_len, args.conversations, args.history
    if not set(kinds) <= set(KINDS) or min(*sizes, args.repetitions) < 1 or args.turns < 2:
        parser.error(f"--kinds takes some of {', '.join(KINDS)}; numbers are at least 1, --turns 2")
    longest = max(
        args.common + args.own + args.output_len,
        args.history + args.turns * (args.own + args.output_len),
    )
    block_size = EngineConfig(model=args.model).block_size
    llm = LLM(
        args.model,
        skip_tokenizer_init=True,
        warm_up="all",
        max_num_seqs=min(64, args.requests),
        max_model_len=longest,
        num_host_blocks=(2 + args.conversations) * -(-longest // block_size),
        num_scheduler_steps=1,
    )
    folder = tempfile.TemporaryDirectory()
    files = None
    rows: list[dict[str, Any]] = []
    for kind in sorted(kinds, key=KINDS.index):
        if kind == "turns-files":  # the last one: from now on all that is copied out is written
            path = pathlib.Path(folder.name)
            files = llm.executor.keep_files(path, "benchmark", 2**40, most_writing=2**20)
        runs: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for number in range(args.repetitions):
            for caches in (False, True) if number % 2 else (True, False):
                runs[caches].append(play(llm, kind, args, caches=caches, files=files))
        row: dict[str, Any] = {"kind": kind}
        for caches, results in runs.items():
            medians = {name: statistics.median(one[name] for one in results) for name in results[0]}
            row["with" if caches else "without"] = medians
        row["first_token_speedup"] = statistics.median(
            without["first_token_seconds"] / found["first_token_seconds"]
            for without, found in zip(*runs.values(), strict=True)
        )
        row["throughput_ratio"] = statistics.median(
            found["tokens_per_second"] / without["tokens_per_second"]
            for without, found in zip(*runs.values(), strict=True)
        )
        rows.append(row)
        print(
            f"{kind}: first token {row['first_token_speedup']:.2f} times as fast, "
            f"{row['throughput_ratio']:.2f} times the tokens/s, {row['with']['share_found']:.0%} found"
        )
    command = ["python", "scripts/bench_prefix_cache.py", *(sys.argv[1:] if argv is None else argv)]
    settings = {name: getattr(args, name) for name in vars(args) if name not in ("out", "model", "kinds")}
    values = {
        "command": command_line(command),
        "model": pathlib.Path(args.model).name,
        "hardware": describe_hardware(),
        "versions": versions(),
        "settings": settings,
        "pool_blocks": llm.executor.num_gpu_blocks,
        "rows": rows,
        "names": time_names(llm.executor.block_size, 25),
    }
    print(values["names"])
    folder.cleanup()
    write_json(args.out, values)


if __name__ == "__main__":
    main()
