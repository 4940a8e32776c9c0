"""Everything worth measuring on a GPU, in three commands of under five, eight and ten minutes.

    PYTHONPATH=. python scripts/bench_gpu.py --parts first --out gpu-first.json
    PYTHONPATH=. python scripts/bench_gpu.py --parts second --out gpu-second.json
    PYTHONPATH=. python scripts/bench_gpu.py --parts third --out gpu-third.json
    PYTHONPATH=. python scripts/bench_gpu.py --rehearsal --out rehearsal.json    # tiny, on a CPU

Needs the repository, JAX and what pyproject.toml lists; jaxllm need not be installed, nothing is downloaded.
The first command checks the kernels against an oracle on fresh random data and times them as shares of the
device's copy bandwidth and bf16 matmul ceiling (`scripts/gpu/kernels.py` says how), then runs Llama-3-8B with
random weights: how long dispatching holds the host up, steps against the roofline, and requests of ShareGPT's
lengths. The second compares such a run with transformers' continuous batching, then measures swaps, cold and
warm starts, predictors and presets with few blocks, OPT-13B's steps, and the same tokens on a small model;
the two comparisons need torch. The third has what is held in 8 and 4 bits, and tilings of kernels. `--parts`
takes names of single parts, too.

Every part is a process of its own, so that neither its memory nor a fault of the device outlives it. It has a
time budget, and what the parts before it left of theirs; then it is ended. The JSON is replaced for each new
row: an interrupted run keeps what it had. What is missing from it is listed there, with the reason.

Exit status: 0; 1 if a kernel missed its limit or something is missing; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu.inputs import CONFIGS, REHEARSAL, Sizes, sharegpt_like
from gpu.report import Report, replace_json

from jaxllm.research.bench.results import command_line
from jaxllm.system.output_files import OutputParser, new_file

SCRIPTS = Path(__file__).resolve().parent
_STDERR = 2  # the table alone goes to stdout
_LEAST_SECONDS = 5.0  # a process takes them to begin
_SHARE_BESIDE_ANOTHER = 0.45  # of the device's memory; JAX's allocator grows beyond what it needs
_GRACE_SECONDS = 15.0  # for a comparison to end its own processes


@dataclasses.dataclass(frozen=True)
class Run:
    """What the command line asks for.

    Args:
        folder: for what processes exchange.
        sizes: how much of everything.
        options: of the command line, for the parts' own processes.
    """

    folder: Path
    sizes: Sizes
    options: tuple[str, ...]

    @property
    def is_rehearsal(self) -> bool:
        """Whether it runs on a CPU."""
        return self.sizes is REHEARSAL


Command = Callable[[Run, str, Path, float], list[str]]
"""The words that measure a part: of a run, the part's name, its JSON file and seconds."""


def own_process(run: Run, name: str, out: Path, seconds: float) -> list[str]:
    """This script, for one part."""
    limit = ["--limit", f"{seconds:.0f}", "--in-process"]
    return [sys.executable, __file__, "--parts", name, "--out", str(out), *limit, *run.options]


def against_transformers(run: Run, name: str, out: Path, seconds: float) -> list[str]:
    """The run with ShareGPT's lengths, beside transformers' continuous batching."""
    sizes = run.sizes
    model = run.folder / sizes.llama
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIGS[sizes.llama]), encoding="utf-8")
    prompts, max_tokens = sharegpt_like(
        sizes.compare_requests, longest=sizes.longest, vocab_size=CONFIGS[sizes.llama]["vocab_size"]
    )
    workload = run.folder / "sharegpt-like.json"
    workload.write_text(json.dumps({"prompts": prompts, "max_tokens": max_tokens}), encoding="utf-8")
    settings = {
        "decode_buckets": [size for size in sizes.batches if size < sizes.compare_seqs]
        + [sizes.compare_seqs],
        "prefill_buckets": sizes.prefill_buckets,
        "max_num_batched_tokens": sizes.max_num_batched_tokens,
    }
    return [
        "env",
        f"XLA_PYTHON_CLIENT_MEM_FRACTION={_SHARE_BESIDE_ANOTHER}",
        *_compare(run, model, str(workload), out),
        *("--backends", "jaxllm,transformers-cb", "--dummy-weights", "--repetitions", "1"),
        *("--max-num-seqs", str(sizes.compare_seqs)),
        *("--max-num-batched-tokens", str(sizes.max_num_batched_tokens)),
        *("--jaxllm-settings", json.dumps(settings)),
    ]


def same_tokens(run: Run, name: str, out: Path, seconds: float) -> list[str]:
    """A small model whose tokens are compared, beside transformers' static and continuous batches."""
    model = run.folder / f"bench-{run.sizes.compare_model}"
    make = [
        *(sys.executable, "-m", "jaxllm", "make-model"),
        str(model),
        "--size",
        run.sizes.compare_model,
    ]
    subprocess.run(make, check=True, stdout=_STDERR)
    return [
        *_compare(run, model, "mixed", out),
        *("--backends", "jaxllm,transformers-cb,transformers", "--static-batch-sizes", "64"),
        *("--jaxllm-settings", json.dumps({"decode_buckets": [16, 64], "prefill_buckets": [512]})),
        *("--repetitions", "1", "--num-requests", str(min(64, run.sizes.compare_requests))),
        *("--max-disagreement", "1"),  # is in the results; 16 bits round otherwise in other batches
    ]


def _compare(run: Run, model: Path, workload: str, out: Path) -> list[str]:
    where = ("cpu", "float32") if run.is_rehearsal else ("gpu", "bfloat16")
    threads = str(os.cpu_count() or 1)
    return [
        *(sys.executable, "-m", "jaxllm", "compare", str(model), workload, "--out", str(out)),
        *("--device", where[0], "--dtype", where[1], "--threads", threads),
    ]


CALLS: Mapping[str, Mapping[str, tuple[float, Command]]] = {
    "first": {
        "kernels-triton": (55.0, own_process),
        "kernels-mosaic": (60.0, own_process),
        "llama-3-8b": (130.0, own_process),
    },
    "second": {
        "against-transformers": (150.0, against_transformers),
        "llama-3-8b-memory": (145.0, own_process),
        "opt-13b": (70.0, own_process),
        "same-tokens": (55.0, same_tokens),
    },
    "third": {
        "codes": (200.0, own_process),
        "llama-3-8b-codes": (280.0, own_process),
        "kernels-xla": (30.0, own_process),
        "tilings": (60.0, own_process),
    },
}
"""Parts of each command in their order: seconds, and how it is measured."""


def chosen_parts(names: str) -> dict[str, tuple[float, Command]]:
    """The parts of a comma-separated list of commands and parts.

    Raises:
        ValueError: a name is unknown.
    """
    every = {name: part for call in CALLS.values() for name, part in call.items()}
    chosen: dict[str, tuple[float, Command]] = {}
    for name in names.split(","):
        if name not in CALLS and name not in every:
            raise ValueError(f"--parts {name!r} is unknown: use {', '.join(CALLS)} or {', '.join(every)}")
        chosen |= CALLS.get(name) or {name: every[name]}
    return chosen


class Results:
    """The parts' results in one file."""

    def __init__(self, out: Path, values: dict[str, Any]) -> None:
        self.parts: dict[str, dict[str, Any]] = {}
        self._values = {**values, "parts": self.parts}
        self._out, self._started = out, time.perf_counter()
        self._write()

    def merge(self, name: str, path: Path, **facts: Any) -> None:
        """Take over what a part has written so far, and facts of its process."""
        part = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        for row in part.get("rows", []):  # of `jaxllm compare`
            if row["error"] is not None:
                part.setdefault("missing", {})[row["backend"]] = row["error"]
        if "versions" in part:
            self._values.setdefault("hardware", part["hardware"])
            self._values.setdefault("versions", part["versions"])
        reason = facts.pop("reason", None)
        if reason is not None:
            part.setdefault("missing", {})[name] = reason
        self.parts[name] = part | facts
        self._write()

    def problems(self) -> Iterator[str]:
        """What is missing and what is wrong, a line each."""
        for name, part in self.parts.items():
            for what, reason in part.get("missing", {}).items():
                yield f"{name}: {what} is missing: {reason}"
            for row in part.get("results", {}).get("checks", []):
                if "error" not in row and not (row["passed"] and row["same_bits_again"]):
                    yield f"{name}: kernel check failed: {row}"

    def table(self) -> str:
        """Every row as Markdown, but for the checks that passed."""
        lines = ["| part | measured | of | figures |", "|---|---|---|---|"]
        for name, part in self.parts.items():
            for measured, rows in {**part.get("results", {}), "compared": part.get("rows", [])}.items():
                if measured == "checks":
                    passed = sum(row.get("passed", False) for row in rows)
                    lines.append(f"| {name} | checks | passed | {passed} of {len(rows)} |")
                else:
                    lines += [f"| {name} | {measured} | {_cells(row)} |" for row in rows]
        return "\n".join(lines)

    def _write(self) -> None:
        self._values["seconds"] = time.perf_counter() - self._started
        replace_json(self._out, self._values)


def _cells(row: Mapping[str, Any]) -> str:
    """What a row is of, and its first figures."""
    of, figures = [], []
    for key, value in row.items():
        if key == "output_tokens_per_second" and isinstance(value, dict):
            value = value["median"]
        if isinstance(value, float):
            figures.append(f"{key} {value:.3g}")
        elif isinstance(value, str):
            of.append(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            of.append(f"{key} {value}")
    return f"{', '.join(of[:4])} | {', '.join(figures[:6])}"


def run_part(command: list[str], name: str, path: Path, results: Results, seconds: float) -> None:
    """Measure a part in its process, for at most so long."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=_STDERR, start_new_session=True)
    reason, seen = None, 0
    try:
        while process.poll() is None:
            if time.perf_counter() - started > seconds:
                reason = (
                    f"ended after {seconds:.0f} s, its part of --limit: raise it, or choose fewer --parts"
                )
                break
            time.sleep(0.2)
            if path.exists() and (now := path.stat().st_mtime_ns) != seen:
                seen = now
                results.merge(name, path)
        else:
            if process.returncode:
                reason = f"its process ended with status {process.returncode}"
    finally:
        _end(process)
        results.merge(name, path, seconds=time.perf_counter() - started, reason=reason)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those it started: politely at first."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", default="first,second,third", help="first, second, third, or names of parts"
    )
    parser.add_argument("--out", type=new_file, required=True, help="JSON file to write")
    parser.add_argument(
        "--limit", type=float, help="seconds for all parts, shared as their budgets are (default: those)"
    )
    parser.add_argument(
        "--rehearsal", action="store_true", help="tiny sizes and interpreted kernels, on a CPU"
    )
    parser.add_argument("--implementation", help="of the models' attention (default: the device's)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the kernels' random data")
    parser.add_argument(
        "--in-process", action="store_true", help="measure one part in this process, as profilers like it"
    )
    args = parser.parse_args(argv)
    try:
        args.chosen = chosen_parts(args.parts)
    except ValueError as error:
        parser.error(str(error))
    if args.in_process and (len(args.chosen) > 1 or own_process not in next(iter(args.chosen.values()))):
        parser.error(f"--in-process measures one part that is no comparison, not --parts {args.parts}")
    budget = sum(seconds for seconds, _ in args.chosen.values())
    args.limit = budget if args.limit is None else args.limit
    if not args.limit > 0:
        parser.error(f"--limit {args.limit:g} must be a positive number of seconds")
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, write one JSON file; returns the exit status."""
    args = parse_args(argv)
    sizes = REHEARSAL if args.rehearsal else Sizes()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # processes share the device's memory
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")  # as engines do, but before JAX starts
    if args.rehearsal:
        os.environ["JAX_PLATFORMS"] = "cpu"
    command = command_line(["python", "scripts/bench_gpu.py", *(sys.argv[1:] if argv is None else argv)])
    if args.in_process:
        from gpu import parts  # imports JAX, which the process that waits does not need

        report = Report(args.out, args.limit, {"command": command})
        parts.measure(args.parts, report, sizes, args.seed, args.implementation)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end the part on the way out
    started = time.perf_counter()
    results = Results(args.out, {"command": command, "seed": args.seed})
    options = ["--seed", str(args.seed), *(["--rehearsal"] if args.rehearsal else [])]
    options += ["--implementation", args.implementation] if args.implementation else []
    due, budgets = 0.0, sum(budget for budget, _ in args.chosen.values())
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        run = Run(Path(folder), sizes, tuple(options))
        for name, (budget, make_command) in args.chosen.items():
            due += args.limit * budget / budgets
            left = due - (time.perf_counter() - started)
            print(f"{name}: {left:.0f} s", file=sys.stderr, flush=True)
            path = Path(folder) / f"{name}.json"
            if left < _LEAST_SECONDS:
                reason = f"skipped with {left:.0f} s left of its part of --limit {args.limit:.0f}: raise it"
                results.merge(name, path, reason=reason)
                continue
            run_part(make_command(run, name, path, left), name, path, results, left)
    print(results.table())
    problems = list(results.problems())
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
