"""`jaxllm bench`: measurements that state what they ran on, as JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.commands.needs import only_with
from jaxllm.commands.options import (
    add_engine_options,
    check_distinct,
    engine_settings,
    load_llm,
    model_name,
    note,
    note_compile_report,
)
from jaxllm.commands.words import call_too
from jaxllm.errors import ConfigError
from jaxllm.research.commands import bench_serve
from jaxllm.research.commands.rows import add_of_traces, reading_of, too_long_of
from jaxllm.system.output_files import add_overwrite, check_writable

if TYPE_CHECKING:
    from jaxllm.research.bench.throughput import RecordedWorkload, Workload


_NUM_PROMPTS = 64
_LENGTHS = (128, 128)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command, and add its options."""
    parser.description = "Measure an engine."

    def print_help(_: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(run=print_help)
    kinds = parser.add_subparsers(title="measurements", metavar="MEASUREMENT", parser_class=type(parser))
    throughput = kinds.add_parser(
        "throughput",
        help="tokens per second of a batch",
        description=(
            "Complete random prompts, or a trace's, all queued at once, greedily and past the end of "
            "sequence. Prints JSON with hardware, versions, rates, latencies and the engine's overhead; a "
            "summary goes to stderr."
        ),
    )
    throughput.add_argument(
        "--trace",
        metavar="FILE",
        help="prompts and lengths of a recorded trace, as `jaxllm simulate` takes it",
    )
    add_of_traces(throughput, throughput, "trace")
    throughput.add_argument(
        "--num-prompts", type=int, metavar="N", help=f"default: {_NUM_PROMPTS}, or all of --trace"
    )
    for name in ("input", "output"):
        throughput.add_argument(
            f"--{name}-len",
            type=bench_serve.length_range,
            metavar="N[:M]",
            help=f"tokens of each {name}, or a range to draw from (default: 128)",
        )
    throughput.add_argument(
        "--seed", type=int, metavar="N", help="of prompts, lengths and dummy weights (default: 0)"
    )
    throughput.add_argument(
        "--repetitions", type=int, default=3, metavar="N", help="timed passes (default: %(default)s)"
    )
    throughput.add_argument(
        "--warm-up-repetitions", type=int, default=1, metavar="N", help="passes before (default: %(default)s)"
    )
    throughput.add_argument("--detokenize", action="store_true", help="load the tokenizer and make text too")
    throughput.add_argument("--output", metavar="FILE", help="write the JSON there (default: stdout)")
    add_overwrite(throughput)
    add_engine_options(throughput)
    only_with(throughput, "trace", options=("clip", "skip"))
    call_too(throughput, num_requests="--num-prompts")
    throughput.set_defaults(run=run_throughput)
    bench_serve.add_measurement(kinds)


def run_throughput(args: argparse.Namespace) -> int:
    """Measure, print, and return the exit code."""
    from jaxllm.research.bench.results import command_line
    from jaxllm.research.bench.throughput import RecordedWorkload, check_options, measure_throughput
    from jaxllm.research.workloads import fit_trace

    workload = _workload(args)
    settings: dict[str, Any] = {"seed": args.seed or 0, "skip_tokenizer_init": not args.detokenize}
    settings |= engine_settings(args)
    named = {name: settings.get(name) for name in ("prefix_cache_dir", "max_model_len")}
    if args.clip or args.skip:
        named["max_model_len"] = None  # known with the model
    check_options(workload, args.repetitions, args.warm_up_repetitions, **named)
    check_distinct({"--output": args.output, "--ledger": settings.get("ledger"), "--trace": args.trace})
    check_writable({"--output": args.output}, overwrite=args.overwrite)
    llm = load_llm({"warm_up": "all", **settings})
    if args.compile_report:
        note_compile_report(llm)
    if isinstance(workload, RecordedWorkload) and (args.clip or args.skip):
        workload = RecordedWorkload(fit_trace(workload.trace, llm.max_model_len, too_long_of(args)))
    result = {
        "command": command_line(["jaxllm", *args.command_line]),
        "model": model_name(settings),
        **measure_throughput(
            llm,
            workload,
            repetitions=args.repetitions,
            warm_up_repetitions=args.warm_up_repetitions,
            tell=note,
        ),
    }
    text = json.dumps(result, indent=2) + "\n"
    if args.output is None:
        print(text, end="")
    else:
        Path(args.output).write_text(text)
    for line in _summary(result):
        note(line)
    return 0


def _workload(args: argparse.Namespace) -> Workload | RecordedWorkload:
    """The requests that the options ask for."""
    from jaxllm.research.bench.throughput import RecordedWorkload, Workload
    from jaxllm.research.workloads import load_trace
    from jaxllm.text.tokenizer import load_tokenizer

    if args.trace is None:
        return Workload(
            num_prompts=_NUM_PROMPTS if args.num_prompts is None else args.num_prompts,
            input_len=args.input_len or _LENGTHS,
            output_len=args.output_len or _LENGTHS,
            seed=args.seed or 0,
        )
    for name in ("input_len", "output_len"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--trace has lengths: drop --{name.replace('_', '-')}, or drop --trace")
    named = engine_settings(args).get("tokenizer")
    tokenizer = None if named is None else load_tokenizer(named)
    trace = load_trace(args.trace, tokenizer=tokenizer, seed=args.seed, **reading_of(args))
    return RecordedWorkload(trace if args.num_prompts is None else trace.head(args.num_prompts))


def _summary(result: dict[str, Any]) -> list[str]:
    output, total = result["output_tokens_per_second"], result["total_tokens_per_second"]
    steps = result["engine_overhead"]
    host = "" if steps is None else f"host share {steps['host_share']:.1%}, "
    lines = [
        f"{output['median']:.1f} output tokens/s ({output['min']:.1f} to {output['max']:.1f}), "
        f"{total['median']:.1f} total tokens/s, {result['gflop_per_second']['median']:.1f} GFLOP/s",
        f"{host}{sum(result['num_preemptions'])} preemptions, "
        f"{result['compilations_after_warm_up']} compilations after warm-up, "
        f"peak RSS {result['peak_rss_bytes'] / 2**20:.0f} MiB",
    ]
    for name in ("ttft", "tpot"):
        found = result[f"{name}_seconds"]
        if found is not None:
            times = ", ".join(f"{key} {value * 1e3:.2f}" for key, value in found.items())
            lines.append(f"{name.upper()} in ms: {times}")
    return lines
