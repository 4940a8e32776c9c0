"""`jaxllm bench serve`: load on an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.commands.needs import only_with
from jaxllm.commands.options import check_distinct, note
from jaxllm.commands.signals import signals_as_interrupts
from jaxllm.commands.words import call_too
from jaxllm.errors import ConfigError
from jaxllm.research.commands.rows import add_of_traces, reading_of, too_long_of
from jaxllm.system.options import bound, json_object
from jaxllm.system.output_files import add_overwrite, check_writable

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from jaxllm.research.bench.serving.measure import Load, Measured
    from jaxllm.research.bench.serving.sweep import Sweep
    from jaxllm.research.workloads import Trace

API_KEY_VARIABLE = "OPENAI_API_KEY"
_BASE_URL = "http://127.0.0.1:8000"
_NUM_PROMPTS = 100
_LENGTHS = (128, 128)
_START_SECONDS = 600.0
_DESCRIPTION = """\
Send requests to an OpenAI-compatible server, and measure what becomes of them. Arrivals are open (all at
once, Poisson, gamma, or a recorded trace) or closed (clients who wait for their answers). A summary goes to
stderr; JSON with the keys of vLLM's benchmark, hardware, versions and the command to stdout or to a file.
With --sweep it starts servers with different scheduling policies, one after another, and prints one table."""


def length_range(text: str) -> tuple[int, int]:
    """A length, or a range of lengths."""
    low, _, high = text.partition(":")
    if not 1 <= int(low) <= int(high or low):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a length of at least 1, or a range LOW:HIGH of them"
        )
    return int(low), int(high or low)


def _names(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def _words(text: str) -> list[str]:
    return shlex.split(text)


# What argparse calls them in "invalid ... value".
length_range.__name__ = "length or range"
_names.__name__, _numbers.__name__ = "list of names", "list of numbers"
_words.__name__ = "command line"

_Options = Mapping[str, tuple[Callable[[str], Any], Any, str, str]]
_WHERE: _Options = {
    "base-url": (str, None, "URL", f"of the server (default: {_BASE_URL})"),
    "api-key": (str, None, "KEY", f"of the server (default: ${API_KEY_VARIABLE}, which nobody else sees)"),
    "model": (str, None, "NAME", "to ask for (default: the first that the server has)"),
}
_WORKLOAD: _Options = {
    "trace": (str, None, "FILE", "recorded arrivals and lengths, in any form that `jaxllm simulate` takes"),
    "max-model-len": (int, None, "N", "tokens that a request of --trace may have (default: any)"),
    "num-prompts": (int, None, "N", f"requests (default: {_NUM_PROMPTS}, or all of --trace)"),
    "input-len": (
        length_range,
        None,
        "N[:M]",
        "random tokens of each prompt, or a range of them (default: 128)",
    ),
    "output-len": (
        length_range,
        None,
        "N[:M]",
        "most tokens of each output, or a range of them (default: 128)",
    ),
    "dataset": (str, None, "FILE", "take prompts from this JSON, JSON Lines or Parquet file"),
    "column": (str, None, "NAME", "the prompts' column in --dataset"),
    "length-column": (str, None, "NAME", "how many tokens they have; then they are sent as text"),
    "tokenizer": (str, None, "DIR", "counts the tokens of --dataset, and makes text of token ids"),
    "vocab-size": (
        int,
        None,
        "N",
        "token ids lie below it (default: the tokenizer's size, or 1000 for random ones)",
    ),
    "seed": (int, None, "N", "of prompts, lengths and arrivals (default: 0)"),
    "temperature": (float, 0.0, "F", "of sampling (default: 0)"),
    "max-concurrency": (int, None, "N", "most requests under way; those due beyond that wait in the client"),
    "extra-body": (json_object, {}, "JSON", "further fields of each request"),
    "num-warmups": (int, 1, "N", "requests before the run (default: 1)"),
    "timeout": (float, 3600.0, "S", "that one request may take (default: 3600)"),
}
_RESULT: _Options = {
    "percentile-metrics": (
        _names,
        ["ttft", "tpot", "itl", "e2el"],
        "NAME,NAME,...",
        "latencies to report (default: ttft,tpot,itl,e2el)",
    ),
    "metric-percentiles": (_numbers, [99.0], "P,P,...", "of each (default: 99)"),
    "output": (str, None, "FILE", "write the JSON to this new file (default: stdout)"),
    "plot": (
        str,
        None,
        "FILE.png",
        "draw distributions of latencies, and figures against the rate, to this new file",
    ),
}
_SWEEP: _Options = {
    "sweep": (
        _names,
        [],
        "NAME,NAME,...",
        "start a server for each of these policies, instead of --base-url",
    ),
    "server-args": (_words, None, "ARGS", "of `jaxllm serve` for --sweep, in one word: '--model DIR ...'"),
    "repetitions": (int, 1, "N", "runs of each (default: 1); the table has medians"),
    "start-timeout": (float, None, "S", "in which such a server must be ready (default: 600)"),
}


def add_measurement(kinds: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the measurement's parser to those of `jaxllm bench`."""
    parser = kinds.add_parser("serve", help="load on a server", description=_DESCRIPTION)
    parser.add_argument(
        "--endpoint", choices=("completions", "chat"), default="completions", help="default: %(default)s"
    )
    parser.add_argument(
        "--arrivals",
        nargs="+",
        default=None,
        metavar="ARRIVALS",
        help="all, poisson:RATE, gamma:RATE:CV, closed:CLIENTS or closed:CLIENTS:THINK, rates in requests a "
        "second (default: all); several are run one after another",
    )
    parser.add_argument(
        "--send-text", action="store_true", help="send prompts as text, rather than as token ids"
    )
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="make outputs as long as they may be (default: on, but for --dataset)",
    )
    add_overwrite(parser)
    parser.add_argument(
        "--goodput",
        nargs="+",
        type=bound,
        default=[],
        metavar="NAME:MS",
        help="count requests within these bounds: ttft, tpot and e2el in milliseconds",
    )
    parser.add_argument(
        "--save-detailed", action="store_true", help="keep what became of each request in the JSON"
    )
    for title, options in (
        ("server", _WHERE),
        ("workload", _WORKLOAD),
        ("result", _RESULT),
        ("several runs", _SWEEP),
    ):
        group = parser.add_argument_group(title)
        for name, (convert, default, metavar, text) in options.items():
            group.add_argument(f"--{name}", type=convert, default=default, metavar=metavar, help=text)
    add_of_traces(parser, parser, "trace", "dataset")
    only_with(parser, "trace", options=("clip", "skip", "max_model_len"))
    only_with(parser, "max_model_len", options=("clip", "skip"))
    only_with(parser, "dataset", options=("column", "length_column"))
    only_with(parser, "sweep", options=("server_args", "start_timeout"))
    call_too(parser, num_requests="--num-prompts")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print, and return the exit code: 1 if no request succeeded."""
    from jaxllm.research.bench.serving.client import import_from_extra
    from jaxllm.research.bench.serving.plot import plot
    from jaxllm.research.bench.serving.report import brief, rows, summary, table
    from jaxllm.research.figures import check_picture

    for name in ("aiohttp", "prometheus_client"):
        import_from_extra(name)
    check_picture(args.plot)
    sweep = _sweep(args)
    check_distinct(
        {"--output": args.output, "--plot": args.plot, "--trace": args.trace, "--dataset": args.dataset}
    )
    check_writable({"--output": args.output, "--plot": args.plot}, overwrite=args.overwrite)
    with signals_as_interrupts():
        facts = _facts(args, sweep)
        runs: list[Measured] = []
        try:
            for measured in sweep.runs():
                runs.append(measured)
                if sweep.num_runs > 1:
                    note(f"run {len(runs)} of {sweep.num_runs}: {brief(measured.result)}")
        finally:  # of a sweep that breaks off, too
            results = [measured.result for measured in runs]
            if runs:
                _write(args.output, _document(facts, sweep, results))
        for line in summary(results[0]) if sweep.num_runs == 1 else table(rows(results)):
            print(line, file=sys.stderr)
        if args.plot is not None:
            plot(runs, Path(args.plot))
    return 0 if all(result["completed"] for result in results) else 1


def _sweep(args: argparse.Namespace) -> Sweep:
    """The runs that the options ask for."""
    from jaxllm.research.bench.serving.client import check_url
    from jaxllm.research.bench.serving.sweep import Sweep

    if args.sweep and args.base_url is not None:
        raise ConfigError("--sweep starts servers of its own: drop --base-url, or drop --sweep")
    return Sweep(
        loads=_loads(args),
        repetitions=args.repetitions,
        base_url=None if args.sweep else check_url(args.base_url or _BASE_URL),
        policies=args.sweep,
        server_args=args.server_args or [],
        start_timeout=_START_SECONDS if args.start_timeout is None else args.start_timeout,
    )


def _loads(args: argparse.Namespace) -> dict[str, Load]:
    """What is sent, by the name of the arrivals."""
    from jaxllm.research.bench.serving.measure import Load
    from jaxllm.research.bench.serving.metrics import Report
    from jaxllm.research.bench.serving.workload import RequestFields
    from jaxllm.research.workloads import load_trace, parse_arrivals
    from jaxllm.text.tokenizer import load_tokenizer

    _check_workload(args)
    goodput = dict(args.goodput)
    if len(goodput) < len(args.goodput):
        raise ConfigError("--goodput has two bounds of one name: drop one of them")
    tokenizer = None if args.tokenizer is None else load_tokenizer(args.tokenizer)
    default_vocab_size = None if tokenizer is None else len(tokenizer)
    fields = RequestFields(
        endpoint=args.endpoint,
        temperature=args.temperature,
        ignore_eos=args.dataset is None if args.ignore_eos is None else args.ignore_eos,
        as_text=args.send_text,
        vocab_size=default_vocab_size if args.vocab_size is None else args.vocab_size,
        tokenizer=tokenizer,
        extra_body=args.extra_body,
    )
    common: dict[str, Any] = {
        "fields": fields,
        "report": Report(
            latencies=args.percentile_metrics, percentiles=args.metric_percentiles, goodput=goodput
        ),
        "model": args.model,
        "api_key": args.api_key or os.environ.get(API_KEY_VARIABLE),
        "tokenizer_id": None if args.tokenizer is None else Path(args.tokenizer).resolve().name,
        "max_concurrency": args.max_concurrency,
        "num_warmups": args.num_warmups,
        "timeout": args.timeout,
        "keep_details": args.save_detailed,
    }
    if args.trace is not None:
        trace = load_trace(
            args.trace,
            tokenizer=tokenizer,
            seed=args.seed,
            max_len=args.max_model_len,
            too_long=too_long_of(args),
            **reading_of(args),
        )
        trace = trace if args.num_prompts is None else trace.head(args.num_prompts)
        return {Path(args.trace).name: Load(trace=trace, arrivals=None, **common)}
    names = args.arrivals or ["all"]
    if len(set(names)) < len(names):
        raise ConfigError(f"one of --arrivals {' '.join(names)} is named twice: use --repetitions")
    chosen = {name: parse_arrivals(name) for name in names}
    traces = _drawn(args, list(chosen.values()), tokenizer)
    return {
        name: Load(trace=trace, arrivals=arrivals, **common)
        for (name, arrivals), trace in zip(chosen.items(), traces, strict=True)
    }


def _drawn(args: argparse.Namespace, arrivals: Sequence[Any], tokenizer: Any) -> list[Trace]:
    from jaxllm.research.bench.serving.workload import drawn_trace
    from jaxllm.research.workloads import load_dataset_file

    prompts: Any = args.input_len or _LENGTHS
    if args.dataset is not None:
        prompts = load_dataset_file(
            args.dataset,
            args.column,
            tokenizer,
            length_column=args.length_column,
            on_bad=args.on_bad or "raise",
        )
    num_prompts = _NUM_PROMPTS if args.num_prompts is None else args.num_prompts
    output_len, seed = args.output_len or _LENGTHS, 0 if args.seed is None else args.seed
    return [drawn_trace(prompts, num_prompts, output_len, process, seed) for process in arrivals]


def _check_workload(args: argparse.Namespace) -> None:
    """Verify that options do not contradict each other."""
    for name in ("arrivals", "input_len", "output_len", "dataset"):
        if args.trace is not None and getattr(args, name) is not None:
            raise ConfigError(
                f"--trace has arrivals and lengths: drop --{name.replace('_', '-')}, or drop --trace"
            )
    if args.dataset is None:
        return
    if args.column is None:
        raise ConfigError("--dataset needs --column, the name of the prompts' column")
    if args.input_len is not None or args.vocab_size is not None:
        raise ConfigError("--dataset has the prompts: drop --input-len and --vocab-size")
    if args.tokenizer is None and args.length_column is None:
        raise ConfigError(
            "--dataset needs --tokenizer, which counts prompts' tokens, or --length-column, which says them"
        )


def _facts(args: argparse.Namespace, sweep: Sweep) -> dict[str, Any]:
    """Command, without keys, hardware and versions."""
    from jaxllm.research.bench.results import command_line
    from jaxllm.system import hardware

    secrets = {args.api_key}
    secrets.update(_values_of("--api-key", args.server_args or []))
    words = ["jaxllm", *args.command_line]
    for secret in filter(None, secrets):
        words = [word.replace(secret, "***") for word in words]
    versions = hardware.versions() | {"aiohttp": importlib.metadata.version("aiohttp")}
    return {"command": command_line(words), "hardware": sweep.hardware(), "versions": versions}


def _values_of(option: str, words: Sequence[str]) -> Iterator[str]:
    for word, following in itertools.pairwise([*words, ""]):
        if word == option:
            yield following
        elif word.startswith(f"{option}="):
            yield word.partition("=")[2]


def _document(facts: Mapping[str, Any], sweep: Sweep, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON: of a single run its result, of several a table's rows and all results."""
    from jaxllm.research.bench.serving.report import rows

    if sweep.num_runs == 1:
        return {**facts, **results[0]}
    is_complete = len(results) == sweep.num_runs
    return {**facts, "is_complete": is_complete, "rows": rows(results), "runs": list(results)}


def _write(path: str | None, document: Mapping[str, Any]) -> None:
    from jaxllm.research.bench.results import to_json, write_json

    if path is None:
        print(to_json(document))
    else:
        write_json(Path(path), document)
