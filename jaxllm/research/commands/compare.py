"""`jaxllm compare`: frameworks side by side on one model, with the same token ids and output lengths."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.commands.needs import alone, only_with
from jaxllm.commands.options import API_KEYS_VARIABLE, note
from jaxllm.errors import ConfigError, reason
from jaxllm.models.config import read_hf_config
from jaxllm.research.bench.results import command_line, write_json
from jaxllm.research.commands.rows import add_of_traces, reading_of, too_long_of
from jaxllm.research.compare import machine, report
from jaxllm.research.compare.backends import BACKENDS, get_backends, interpreters
from jaxllm.research.compare.install import RECIPES, install
from jaxllm.research.compare.latency import poisson_arrivals
from jaxllm.research.compare.runner import Comparison
from jaxllm.research.compare.workloads import (
    BLOCK_SIZE,
    PROMPT_LENGTHS,
    Workload,
    get_workload,
    save_workload,
)
from jaxllm.research.figures import check_picture
from jaxllm.system.cache_folder import cache_folder
from jaxllm.system.options import flag, json_object
from jaxllm.system.output_files import add_overwrite, check_writable

MAX_MODEL_LEN = 1024
MAX_DISAGREEMENT = 0.05
"""Rounding decides near-ties: about one greedy token in 10^4 of a random-weight model in float32."""
_EXIT_DIFFERENT = 1
_SIZES = ("vocab_size", "num_attention_heads", "hidden_size", "num_hidden_layers")
_MOST_REQUESTS = 10**6
_POSITIVE = ("repetitions", "threads", "num_prompts", "max_num_seqs", "max_num_batched_tokens")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command, and add its options."""
    parser.description = (
        "Compare frameworks: the same model, token ids and output lengths, each framework in a process of "
        "its own, in turn. Prints Markdown. The exit code is 1 if jaxllm and transformers differ in more "
        "than --max-disagreement of the requests, or if no back-end gave a result."
    )
    parser.add_argument("model", type=Path, nargs="?", help="checkpoint folder")
    parser.add_argument(
        "workload",
        nargs="?",
        help=f"of {','.join(PROMPT_LENGTHS)}, files of prompts and traces: one or more, with commas",
    )
    of_peers = parser.add_argument_group("what is compared")
    of_peers.add_argument("--backends", default="jaxllm,transformers", help=f"of {','.join(BACKENDS)}")
    of_peers.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a server of OpenAI's API that runs already, such as sglang=http://127.0.0.1:30000/v1",
    )
    of_peers.add_argument(
        "--server-token-ids",
        action="store_true",
        help="ask servers for token ids (return_token_ids, as vLLM and jaxllm know it), to compare them",
    )
    of_peers.add_argument(
        "--python", action="append", default=[], metavar="NAME=PATH", help="the Python to run a back-end with"
    )
    of_peers.add_argument(
        "--install",
        metavar="NAME,...",
        help=f"first make environments of their own for these back-ends: {','.join(RECIPES)}",
    )
    of_peers.add_argument(
        "--environments",
        type=Path,
        metavar="DIR",
        help="where they are (default: compare in the cache folder)",
    )
    of_peers.add_argument(
        "--pip", default="", metavar="ARGUMENTS", help="of each pip install, such as an index of torch builds"
    )
    _add_measuring(parser.add_argument_group("how it is measured"))
    of_traces = parser.add_argument_group("how traces are read")
    add_of_traces(parser, of_traces, None)
    of_traces.add_argument("--tokenizer", metavar="DIR", help="makes tokens of a workload's text")
    of_result = parser.add_argument_group("result")
    of_result.add_argument("--save-workload", type=Path, metavar="FILE.json", help="write what was sent")
    of_result.add_argument("--out", type=Path, metavar="FILE.json", help="written anew after each repetition")
    of_result.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it on one page")
    of_result.add_argument(
        "--from-json", type=Path, metavar="FILE.json", help="show earlier results, run nothing"
    )
    add_overwrite(parser)
    only_with(parser, "install", options=("pip",))
    only_with(parser, "server", options=("server_token_ids",))
    of_install = ("install", "environments", "pip")
    alone(parser, "from_json", but=("plot", "overwrite", "max_disagreement", *of_install))
    parser.set_defaults(run=run)


def _add_measuring(group: argparse._ArgumentGroup) -> None:
    whole: tuple[tuple[str, int, str], ...] = (
        ("repetitions", 3, "in turn"),
        ("threads", 2, "cores that each framework may use"),
        ("max-num-seqs", 64, "requests that run at once"),
        ("max-num-batched-tokens", 512, "in a step of jaxllm or transformers-cb"),
        ("seed", 0, "of what is drawn"),
    )
    for name, default, text in whole:
        group.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (%(default)s)")
    group.add_argument(
        "--num-prompts",
        "--num-requests",
        type=int,
        default=64,
        metavar="N",
        help="of a named workload, and the most of a trace (%(default)s)",
    )
    group.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help="also measure waiting where requests come so many a second (Poisson); a trace's own times if 0",
    )
    group.add_argument(
        "--repeat-within",
        type=float,
        default=1.3,
        metavar="FACTOR",
        help="stop static batch sizes that take longer than this times the best one's first time",
    )
    group.add_argument(
        "--give-up-factor",
        type=float,
        default=5.0,
        metavar="FACTOR",
        help="stop static batch sizes that take longer than this times the fastest other back-end",
    )
    group.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    group.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of weights and KV; in 16 bits batch shapes change rounding, so greedy tokens may differ",
    )
    group.add_argument(
        "--dummy-weights",
        action="store_true",
        help="MODEL needs a config.json only; each framework draws weights, and tokens are not compared",
    )
    group.add_argument(
        "--static-batch-sizes", default="64,32,16,8", metavar="N,...", help="to try for transformers"
    )
    group.add_argument(
        "--jaxllm-settings",
        type=json_object,
        default={},
        metavar="JSON",
        help="further fields of EngineConfig",
    )
    group.add_argument("--max-disagreement", type=float, default=MAX_DISAGREEMENT, metavar="SHARE")
    group.add_argument(
        "--timeout", type=float, default=3600, metavar="S", help="seconds one worker's command may take"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit code."""
    outputs = {"--out": args.out, "--plot": args.plot, "--save-workload": args.save_workload}
    check_picture(args.plot)
    check_writable({name: path and str(path) for name, path in outputs.items()}, overwrite=args.overwrite)
    environments = args.environments or cache_folder("compare")
    for name in args.install.split(",") if args.install else ():
        python = install(name, environments, device=args.device, pip_arguments=args.pip.split())
        note(f"{name} is installed: {python}")
    if args.install and args.workload is None and args.from_json is None:
        return 0
    if args.from_json is not None:
        results = _read_results(args.from_json)
    else:
        check(args)
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end the workers on the way out
        try:
            for results in measure(args, environments, command_line(["jaxllm", *args.command_line])):
                if args.out is not None:
                    write_json(args.out, results)
        finally:
            signal.signal(signal.SIGTERM, before)
    print(report.table(results))
    if args.plot is not None:
        report.plot(results, args.plot)
    share = report.disagreement(results["rows"])
    if share is not None and share > args.max_disagreement:
        note(
            f"jaxllm and transformers differ in {share:.0%} of the requests; "
            f"{args.max_disagreement:.0%} may be near-ties"
        )
        return _EXIT_DIFFERENT
    return 0 if any(row["output_tokens_per_second"] for row in results["rows"]) else _EXIT_DIFFERENT


def _read_results(path: Path) -> dict[str, Any]:
    expected = "must be what `jaxllm compare --out FILE.json` wrote"
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--from-json {str(path)!r} {expected}: {reason(error)}") from error
    if not isinstance(results, dict):
        raise ConfigError(f"--from-json {str(path)!r} {expected}, and holds a {type(results).__name__}")
    try:
        report.table(results)
        report.disagreement(results["rows"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        found = ", ".join(map(repr, list(results)[:8])) or "nothing"
        raise ConfigError(
            f"--from-json {str(path)!r} {expected}, and holds {found}, but not all that it writes "
            f"({type(error).__name__}: {error})"
        ) from error
    return results


def check(args: argparse.Namespace) -> None:
    """Verify options before anything is loaded.

    Raises:
        ConfigError: one is out of range, or there are not so many cores.
    """
    if args.model is None or args.workload is None:
        raise ConfigError("name a checkpoint folder and a workload, or --from-json, or --install alone")
    for name in ("repeat_within", "give_up_factor"):
        if not getattr(args, name) >= 1:
            raise ConfigError(f"{name}={getattr(args, name)} must be at least 1")
    if not 0 < args.timeout < math.inf:
        raise ConfigError(f"timeout={args.timeout} must be seconds, above 0")
    if args.num_prompts > _MOST_REQUESTS:
        raise ConfigError(f"num_prompts={args.num_prompts} must be at most {_MOST_REQUESTS}")
    for name in _POSITIVE:
        if getattr(args, name) < 1:
            raise ConfigError(f"{name}={getattr(args, name)} must be at least 1")
    if args.rate is not None and not 0 <= args.rate < float("inf"):
        raise ConfigError(f"rate={args.rate} must be requests a second, or 0 for a trace's own times")
    if not 0 <= args.max_disagreement <= 1:
        raise ConfigError(f"max_disagreement={args.max_disagreement} must be a share, from 0 to 1")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if args.threads > cores:
        raise ConfigError(
            f"threads={args.threads} is more than the {cores} cores that this process may use: frameworks "
            f"would wait for each other's threads; pass at most {cores}"
        )
    if not (args.model / "config.json").is_file():
        raise ConfigError(f"{str(args.model)!r} has no config.json; name a checkpoint folder")


def measure(args: argparse.Namespace, environments: Path, command: str) -> Iterator[dict[str, Any]]:
    """Run the comparison; yields the results so far, as JSON values, after each repetition.

    Raises:
        ConfigError: an argument does not fit the others or the model.
    """
    config = read_hf_config(args.model)
    if lacking := [name for name in _SIZES if not isinstance(config.get(name), int)]:
        raise ConfigError(
            f"{str(args.model / 'config.json')!r} has no {', '.join(lacking)}, by which workloads and pools "
            "are made: name the checkpoint folder of a decoder"
        )
    backends = get_backends(args.backends, args.server)
    pythons = interpreters(args.python, backends, environments)
    workloads = _workloads(args, config)
    try:
        sizes = [int(size) for size in args.static_batch_sizes.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise ConfigError(f"--static-batch-sizes {args.static_batch_sizes}: every size must be at least 1")
    job = make_job(args, config, *workloads)
    results = _facts(args, config, job, command)
    summaries: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="jaxllm-compare-") as folder,
        Comparison(backends, pythons, job, Path(folder), args.timeout) as comparison,
    ):
        for workload in workloads:
            variants = {backend.name: backend.variants(sizes, len(workload.prompts)) for backend in backends}
            for repetitions in comparison.run(
                workload, variants, args.repetitions, args.repeat_within, args.give_up_factor
            ):
                summary = workload.summary() | {"repetitions": repetitions}
                if repetitions == args.repetitions and args.rate is not None:
                    arrivals = _arrivals(args, workload)
                    comparison.measure_latency(workload, arrivals)
                    summary["latency_requests_per_second"] = (len(arrivals) - 1) / max(arrivals[-1], 1e-9)
                present = report.collect(comparison, workload, compares_tokens=not args.dummy_weights)
                yield results | {"workloads": [*summaries, summary], "rows": [*rows, *present]}
            summaries.append(summary)
            rows += present


def _workloads(args: argparse.Namespace, config: Mapping[str, Any]) -> list[Workload]:
    names = args.workload.split(",")
    too_long, reading = too_long_of(args), reading_of(args)
    of_traces = [*reading, *([too_long] if too_long != "raise" else [])]
    if of_traces and all(name in PROMPT_LENGTHS for name in names):
        raise ConfigError(f"{flag(of_traces[0])} is of traces: leave it out, or name one as the workload")
    positions = config.get("max_position_embeddings", MAX_MODEL_LEN)
    workloads = [
        get_workload(
            name,
            num_requests=args.num_prompts,
            vocab_size=config["vocab_size"],
            seed=args.seed,
            tokenizer=args.tokenizer,
            max_len=positions,
            too_long=too_long,
            **reading,
        )
        for name in names
    ]
    if len({workload.name for workload in workloads}) < len(workloads):
        raise ConfigError(f"workloads {args.workload!r}: give each name once")
    if args.rate == 0 and (timeless := [one.name for one in workloads if one.arrivals is None]):
        raise ConfigError(f"--rate 0 takes a trace's own times, and {timeless[0]!r} has none: give a rate")
    if args.save_workload is not None:
        if len(workloads) > 1:
            raise ConfigError(f"--save-workload takes one workload, not {args.workload!r}")
        save_workload(workloads[0], args.save_workload)
    return workloads


def _arrivals(args: argparse.Namespace, workload: Workload) -> Sequence[float]:
    if args.rate or workload.arrivals is None:
        return poisson_arrivals(args.rate, len(workload.prompts), args.seed)
    return workload.arrivals


def _facts(
    args: argparse.Namespace, config: Mapping[str, Any], job: Mapping[str, Any], command: str
) -> dict[str, Any]:
    """What a reader of the results needs to know."""
    names = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    own: tuple[str, ...] = ("seed", "device", "dtype", "threads", "repeat_within", "give_up_factor", "rate")
    own += ("max_num_seqs", "max_num_batched_tokens", "dummy_weights", "jaxllm_settings")
    return {
        "command": command,
        "model": {"name": args.model.resolve().name, **{name: config.get(name) for name in names}},
        **{name: getattr(args, name) for name in own},
        **{name: job[name] for name in ("max_model_len", "num_blocks")},
        "hardware": machine.hardware(),
    }


def make_job(args: argparse.Namespace, config: Mapping[str, Any], *workloads: Workload) -> dict[str, Any]:
    """What every worker is asked to set up: one length limit, one pool size, one number of threads.

    Raises:
        ConfigError: a workload is too long for the model.
    """
    positions = config.get("max_position_embeddings", MAX_MODEL_LEN)
    longest = max(workload.longest for workload in workloads)
    for workload in workloads:
        if workload.longest > positions:
            place = workload.lengths().index(workload.longest)
            raise ConfigError(
                f"workload {workload.name!r}: request {place} has {workload.longest} tokens, and the model "
                f"ends at {positions}: take another model, or other prompts"
            )
    heads = config["num_attention_heads"]
    row = config.get("num_key_value_heads", heads) * config.get("head_dim", config["hidden_size"] // heads)
    num_blocks = max(workload.num_blocks(args.max_num_seqs) for workload in workloads)
    itemsize = 4 if args.dtype == "float32" else 2
    pool_bytes = num_blocks * BLOCK_SIZE * config["num_hidden_layers"] * row * 2 * itemsize
    max_model_len = min(positions, max(MAX_MODEL_LEN, longest))
    names = ("device", "dtype", "threads", "seed", "max_num_seqs", "max_num_batched_tokens", "dummy_weights")
    return {
        "model": str(args.model.resolve()),
        **{name: getattr(args, name) for name in names},
        "max_model_len": max_model_len,
        "block_size": BLOCK_SIZE,
        "num_blocks": max(num_blocks, -(-max_model_len // BLOCK_SIZE)),
        "kv_cache_gib": -(-pool_bytes // 2**30),
        "settings": args.jaxllm_settings,
        "server_token_ids": args.server_token_ids,
        "api_key": os.environ.get(API_KEYS_VARIABLE),
    }
