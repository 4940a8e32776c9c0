"""How well costs are predicted over models of several sizes, beside what the device itself allows.

    python scripts/profile_ladder.py --samples samples.json --out ladder.json --plot swaps.png
    python scripts/profile_ladder.py --reuse samples.json --out ladder.json

AdaptiveLLM's Section 4.5, with its inputs truly varied: a ladder of random-weight Llama and OPT models, of
several numbers of layers and hidden sizes, is measured at varied tokens and batch sizes, as `jaxllm profile`
does it, and the eight regressors x degrees 1 to 10 are fitted to each family's prefill, decode and mixed
steps and copies in both directions. Every size of work is measured twice, apart in time: how well the first
measurement predicts the second is the error floor of the device.

A model takes --seconds-per-model, and a few seconds to compile; the fits take minutes after that.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence

from ladder.fits import fit_ladder
from ladder.measure import Ladder, load_ladder, measure, save_ladder
from ladder.models import FAMILIES, Rung
from ladder.report import ladder_candidates, ladder_errors, swap_figure
from sweep.options import list_of

from jaxllm.engine.costs import shape_of
from jaxllm.engine.profiling import Profiler
from jaxllm.errors import JaxllmError
from jaxllm.research.bench.results import command_line, write_json
from jaxllm.research.figures import check_picture
from jaxllm.system import hardware
from jaxllm.system.output_files import OutputParser, new_file


def measure_ladder(rungs: Sequence[Rung], seconds: float, repetitions: int, seed: int) -> Ladder:
    """Load and measure one model after another."""
    ladder = Ladder([], [], facts())
    for place, rung in enumerate(rungs):
        print(f"model {place + 1} of {len(rungs)}: {rung.name}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            llm = rung.load(pathlib.Path(folder))
        shape = shape_of(llm.model_config, rung.name, llm.dtype)
        profiler = Profiler(llm.executor, shape, seed=seed + place, repetitions=repetitions)
        ladder.measured += measure(profiler, seconds, place, seed)
        ladder.models.append({"name": rung.name, **dataclasses.asdict(rung)})
        llm.executor.release()
        del llm, profiler
        gc.collect()  # before the next pool is made
    return ladder


def facts() -> dict[str, object]:
    """What was run, and on what."""
    return {
        "command": command_line(["python", *sys.argv]),
        "hardware": hardware.describe_hardware(),
        "versions": hardware.versions(),
    }


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", type=list_of(str), default=",".join(FAMILIES))
    parser.add_argument("--layers", type=list_of(int), default="2,4,8")
    parser.add_argument("--hidden", type=list_of(int), default="64,256,512", help="hidden sizes")
    parser.add_argument("--seconds-per-model", type=float, default=15.0, help="to measure, after compiling")
    parser.add_argument(
        "--repetitions", type=int, default=3, help="a sample is the median of so many runs (default: 3)"
    )
    parser.add_argument(
        "--max-features",
        type=int,
        default=130,
        help="skip degrees that make more polynomial features; 1000 is degree 10 of 4 inputs (default: 130)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that fit side by side")
    parser.add_argument("--samples", type=new_file, help="write every measurement to this JSON file")
    parser.add_argument("--reuse", type=pathlib.Path, help="fit what this file holds; measure nothing")
    parser.add_argument("--out", type=new_file, help="write the results to this JSON file")
    parser.add_argument("--plot", type=new_file, help="draw swap errors by size to this file")
    parser.add_argument("--report", type=new_file, help="write the Markdown there, too")
    args = parser.parse_args(argv)
    with parser.errors():
        check_picture(args.plot)
    if unknown := sorted(set(args.families) - set(FAMILIES)):
        parser.error(f"--families: there is no {', '.join(unknown)}; families are {', '.join(FAMILIES)}")
    if min(args.layers) < 1 or max(args.layers) > 64:
        parser.error("--layers must be from 1 to 64")
    if any(not 64 <= hidden <= 4096 or hidden % 64 for hidden in args.hidden):
        parser.error("--hidden must be multiples of 64 up to 4096")
    if not 0 < args.seconds_per_model <= 3600:
        parser.error("--seconds-per-model must be above 0 and at most 3600")
    if not 1 <= args.repetitions <= 100 or not 1 <= args.processes <= 64:
        parser.error("--repetitions must be from 1 to 100, --processes from 1 to 64")
    if not 9 <= args.max_features <= 100_000:
        parser.error("--max-features must be from 9, which is degree 1 of mixed steps, to 100000")
    if args.reuse is not None and args.samples is not None:
        parser.error("--reuse measures nothing that --samples could write")
    return args


def main(argv: list[str] | None = None) -> None:
    """Run it from the command line."""
    args = parse_args(argv)
    try:
        if args.reuse is not None:
            ladder = load_ladder(args.reuse)
        else:
            rungs = [Rung(*sizes) for sizes in itertools.product(args.families, args.layers, args.hidden)]
            ladder = measure_ladder(rungs, args.seconds_per_model, args.repetitions, args.seed)
            if args.samples is not None:
                save_ladder(args.samples, ladder)
        print(f"fitting {len(ladder.measured)} samples", file=sys.stderr)
        fits = fit_ladder(ladder, seed=args.seed, max_features=args.max_features, processes=args.processes)
    except JaxllmError as error:
        sys.exit(f"profile_ladder: {error}")
    results = {
        **facts(),
        "measured_by": ladder.facts["command"],
        "measured_on": ladder.facts["hardware"],
        "models": ladder.models,
        "fits": fits,
    }
    lines = [*ladder_errors(results), *ladder_candidates(results)]
    if args.plot is not None:
        lines += swap_figure(results, args.plot)
    print("\n".join(lines))
    if args.report is not None:
        args.report.write_text("\n".join(lines), encoding="utf-8")
    if args.out is not None:
        write_json(args.out, results)


if __name__ == "__main__":
    main()
