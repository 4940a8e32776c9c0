"""Measures the engine's host time outside device programs, with run-ahead (async_scheduling) on and off.

    python scripts/profile_overhead.py --model DIR --num-prompts 32 --output-len 64 --out overhead.json

The scheduler's `schedule`, the executor's `execute`, every compiled program and every `fetch` are wrapped
with timers; see `jaxllm.research.bench.step_times` for what each part holds. The call of a program is timed
apart from the packing of its inputs, because the CPU backend may run the program before the call returns:
only schedule, pack and commit are the host's. Both engines share one executor, so that they run the same
programs, and their repetitions alternate, so that a noisy machine disturbs both.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from jaxllm.commands.options import add_engine_options, engine_settings, load_llm, model_name, note
from jaxllm.engine.engine import Engine
from jaxllm.executor import compile_stats
from jaxllm.llm import LLM
from jaxllm.research.bench.results import command_line
from jaxllm.research.bench.step_times import StepTimer
from jaxllm.research.bench.throughput import Repetition, Workload, num_params, overhead, run_once, spread
from jaxllm.sched.scheduler import Scheduler
from jaxllm.system import hardware
from jaxllm.system.output_files import OutputParser, new_file


def make_engine(llm: LLM, async_scheduling: bool) -> Engine:
    """An engine on the executor of `llm`."""
    return Engine(
        llm.executor,
        Scheduler(dataclasses.replace(llm.engine.scheduler.config, enable_prefix_caching=False)),
        vocab_size=llm.model_config.vocab_size,
        async_scheduling=async_scheduling,
    )


def repeat(llm: LLM, workload: Workload, repetitions: int) -> dict[bool, list[Repetition]]:
    """Timed passes with and without run-ahead, after one of each that is not kept."""
    requests = workload.requests(llm.model_config.vocab_size)
    engines = {is_async: make_engine(llm, is_async) for is_async in (True, False)}
    runs: dict[bool, list[Repetition]] = {True: [], False: []}
    for number in range(1 + repetitions):
        for is_async, engine in engines.items():
            with StepTimer(engine, llm.executor) as timer:
                run = run_once(engine, timer, requests)
            note(f"pass {number}, async_scheduling={is_async}: {run.seconds:.2f} s")
            if number:
                runs[is_async].append(run)
    return runs


def summarize(runs: list[Repetition]) -> dict[str, Any]:
    """Rates and overhead of one engine."""
    return {
        "seconds": [run.seconds for run in runs],
        "output_tokens_per_second": spread([run.num_output_tokens / run.seconds for run in runs]),
        "host_share_by_repetition": [overhead([run])["host_share"] for run in runs],
        **overhead(runs),
    }


def main() -> None:
    """Measure, and write JSON."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=new_file, help="JSON file (default: stdout)")
    add_engine_options(parser)
    args = parser.parse_args()
    workload = Workload(
        num_prompts=args.num_prompts,
        input_len=(args.input_len, args.input_len),
        output_len=(args.output_len, args.output_len),
        seed=args.seed,
    )
    settings = {"seed": args.seed, "skip_tokenizer_init": True, **engine_settings(args)}
    llm = load_llm(settings)
    compiled_before, _ = compile_stats.total()
    runs = repeat(llm, workload, args.repetitions)
    result = {
        "command": command_line(["python", "scripts/profile_overhead.py", *sys.argv[1:]]),
        "model": model_name(settings),
        "num_params": num_params(llm),
        "dtype": llm.dtype,
        "max_num_seqs": llm.executor.config.max_num_seqs,
        "hardware": hardware.describe_hardware(),
        "versions": hardware.versions(),
        "workload": dataclasses.asdict(workload),
        "warm_up_repetitions": 1,
        "repetitions": args.repetitions,
        "compilations_after_warm_up": compile_stats.total()[0] - compiled_before,
        "async_scheduling_on": summarize(runs[True]),
        "async_scheduling_off": summarize(runs[False]),
    }
    text = json.dumps(result, indent=2) + "\n"
    if args.out is None:
        print(text, end="")
    else:
        args.out.write_text(text)
    for is_async, name in ((True, "on"), (False, "off")):
        share = overhead(runs[is_async])["host_share"]
        note(f"async_scheduling {name}: host share {share:.1%}")


if __name__ == "__main__":
    main()
