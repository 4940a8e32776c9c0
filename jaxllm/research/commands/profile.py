"""`jaxllm profile`: measure this device and model, and fit the cost predictors that policies use."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from jaxllm.commands.needs import alone, only_with
from jaxllm.commands.options import (
    add_engine_options,
    check_distinct,
    engine_settings,
    load_llm,
    model_name,
    note,
    note_compile_report,
)
from jaxllm.errors import ConfigError
from jaxllm.system.output_files import add_overwrite, check_writable

_DEFAULT_HOST_BLOCKS = 64
_REFUSED = {
    "profile_seconds": "--seconds is the time to measure",
    "costs": "they are what is measured",
    "scheduler_policy": "steps and copies are measured one by one",
    "ledger": "nobody is preempted",
    "async_scheduling": "a step is always dispatched while the one before it runs",
    "enable_prefix_caching": "prompts are made up, and computed whole",
    "prefix_cache_dir": "prompts are made up, and computed whole",
    "prefix_cache_dir_bytes": "prompts are made up, and computed whole",
    "num_scheduler_steps": "steps are measured one by one",
    "data_parallel_size": "one engine is measured",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command, and add its options."""
    parser.description = (
        "Measure what steps and swaps cost on this device with this model, the steps in short runs of "
        "which each is dispatched ahead, as the engine does it. Fit eight regressors of degrees 1 to 10 "
        "to each kind, print their held-out errors, and store the best for engines to load."
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="least time to measure, and at least 60 of each kind (default: %(default)s)",
    )
    parser.add_argument(
        "--repetitions",
        type=int,
        default=1,
        metavar="N",
        help="measure each size so often, and keep the median (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sizes measured (default: %(default)s)")
    parser.add_argument(
        "--output-dir", type=Path, metavar="DIR", help="of profiles (default: a user cache folder)"
    )
    parser.add_argument(
        "--samples", type=Path, metavar="FILE.json", help="also write every single measurement there"
    )
    add_overwrite(parser)
    parser.add_argument(
        "--with-samples",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE.json",
        help="fit these measurements too, which --samples wrote for other models on this device",
    )
    parser.add_argument(
        "--fit",
        type=Path,
        metavar="FILE.csv",
        help="measure nothing: fit the regressors to timings of any server's iterations in this file, and "
        "print their errors, on a random split and with whole regions left out",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="of --fit: also write what was found there")
    add_engine_options(parser)
    only_with(parser, "fit", options=("json",))
    alone(parser, "fit", but=("json", "overwrite", "seed"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, fit, print, store; returns the exit code."""
    if args.fit is not None:
        return _fit(args)
    return _measure(args)


def _fit(args: argparse.Namespace) -> int:
    """Fit the timings of a file."""
    from jaxllm.research.bench.results import command_line
    from jaxllm.research.iterations import describe, fit_iterations, load_iterations, num_too_few

    check_distinct({"--fit": str(args.fit), "--json": args.json and str(args.json)})
    check_writable({"--json": args.json}, overwrite=args.overwrite)
    samples = load_iterations(args.fit)
    note(f"fitting {len(samples)} iterations")
    too_few = num_too_few(samples)
    for kind, count in too_few.items():
        note(f"{kind} is not fitted: {count} distinct amounts of work are too few")
    kinds = []
    for found in fit_iterations(samples, seed=args.seed):
        print(describe(found))
        regions = [dataclasses.asdict(region) for region in found.regions]
        kinds.append({"fit": found.report.to_dict(), "regions": regions})
    if args.json is not None:
        content = {"command": command_line(["jaxllm", *args.command_line]), "seed": args.seed}
        content |= {"too_few": too_few, "kinds": kinds}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def _measure(args: argparse.Namespace) -> int:
    """Measure the device."""
    from jaxllm.engine.costs import profile_folder, shape_of
    from jaxllm.engine.profiling import Profiler
    from jaxllm.predictors.samples import check_formats, load_samples, save_samples
    from jaxllm.research.bench.results import about
    from jaxllm.sched.policies import SchedulerPolicy

    if not 0 < args.seconds <= 86400:
        raise ConfigError(f"--seconds {args.seconds} must be above 0 and at most 86400")
    if not 1 <= args.repetitions <= 100:
        raise ConfigError(f"--repetitions {args.repetitions} must be from 1 to 100")
    settings: dict[str, Any] = {"seed": args.seed, "skip_tokenizer_init": True, **engine_settings(args)}
    if settings.setdefault("num_host_blocks", _DEFAULT_HOST_BLOCKS) == 0:
        raise ConfigError("--num-host-blocks 0 leaves no swaps to measure; give at least 1")
    for name, reason in _REFUSED.items():
        if name in settings:
            raise ConfigError(f"--{name.replace('_', '-')} means nothing here: {reason}")
    folder = args.output_dir or profile_folder()
    for path in args.with_samples:
        check_distinct({"--samples": args.samples and str(args.samples), "--with-samples": str(path)})
    check_writable({"--samples": args.samples}, overwrite=args.overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):  # now rather than after measuring
        pass
    others = [load_samples(path) for path in args.with_samples]
    settings["scheduler_policy"] = SchedulerPolicy()  # what is measured does not depend on it
    llm = load_llm({"warm_up": "all", **settings})
    if args.compile_report:
        note_compile_report(llm)
    name = model_name(settings)
    shape = shape_of(
        llm.model_config,
        name,
        llm.dtype,
        llm.executor.config.formats,
        llm.executor.config.kv_dtype,
        llm.config.tensor_parallel_size,
        llm.config.pipeline_parallel_size,
        llm.config.prefill_context_parallel_size,
    )
    for path in args.with_samples:
        check_formats(path, shape)
    profiler = Profiler(llm.executor, shape, seed=args.seed, repetitions=args.repetitions)
    note(f"measuring for {args.seconds:g} s")
    samples = profiler.samples(args.seconds)
    if args.samples is not None:
        facts = {
            **about(["jaxllm", *args.command_line]),
            "model": dataclasses.asdict(profiler.model),
            "block_size": llm.executor.block_size,
        }
        save_samples(args.samples, samples, facts)
    for other in others:
        samples = {kind: [*found, *other.get(kind, ())] for kind, found in samples.items()}
    note("fitting " + ", ".join(f"{len(found)} {kind}" for kind, found in samples.items()) + " samples")
    fits = profiler.fit(samples)
    for kind, found in fits.items():
        print(f"## {kind}\n\n{found.report.to_markdown()}\n")
    path = profiler.profile(samples, fits).save(folder)
    note(f"stored {path.name} and its .npz")
    return 0
