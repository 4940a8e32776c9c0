"""Everything worth measuring on a GPU, in one command of under nine minutes.

    python scripts/bench_gpu.py --out gpu.json
    python scripts/bench_gpu.py --smoke --out smoke.json    # tiny, on any device, to see that it runs

Checks every kernel against a float32 oracle on fresh random data; measures the device's copy bandwidth and
bf16 matmul ceiling, kernels and whole steps of random-weight models as shares of them, swaps against plain
pinned copies and beside matmuls and decode steps, cold and warm start times, predictor errors, and the
presets against each other with 128 device and 64 host blocks; with torch and transformers installed also
throughput against transformers, by `compare_frameworks.py`. Needs the repository and an installed JAX. The
JSON is written after every part, so that an interrupted run loses nothing; a part that fails is reported, and
the others go on.

Exit status: 0; 1 if a kernel misses its limit or a part failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other frameworks get their turn

import jax
from gpu import engine, kernels

from jaxllm import LLM, hardware
from jaxllm.bench.results import command_line, write_json
from jaxllm.costs import shape_of
from jaxllm.pallas_kernels import default_implementation

SCRIPTS = Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured."""

    megabytes: int = 1024
    matmul: int = 8192
    batches: tuple[int, ...] = (1, 16, 64, 256)
    contexts: tuple[int, ...] = (256, 1024, 4096)
    prefill_tokens: tuple[int, ...] = (512, 2048)
    swap_blocks: tuple[int, ...] = (1, 4, 16, 64)
    models: tuple[str, ...] = ("llama-3-8b", "opt-13b")
    context: int = 512
    max_model_len: int = 2048
    max_num_batched_tokens: int = 2048
    profile_seconds: float = 15.0
    requests: int = 200
    output_len: int = 64
    blocks: int = 128
    host_blocks: int = 64
    compare_model: str = "107m"
    compare_requests: int = 64


SMOKE = Sizes(
    megabytes=4,
    matmul=128,
    batches=(1, 4),
    contexts=(32,),
    prefill_tokens=(32,),
    swap_blocks=(1, 3),
    models=("smoke",),
    context=32,
    max_model_len=128,
    max_num_batched_tokens=64,
    profile_seconds=0.1,
    requests=6,
    output_len=24,
    blocks=24,
    host_blocks=16,
    compare_model="tiny",
    compare_requests=4,
)


class Report:
    """Results so far, on disk after every part."""

    def __init__(self, out: Path | None, values: dict[str, Any]) -> None:
        self.values = values
        self.failed: list[str] = []
        self._out = out
        self._started = time.perf_counter()

    def part(
        self, name: str, measure: Callable[[], Any], describe: Callable[[Any], Any] = lambda result: result
    ) -> Any:
        """Run a part and keep what `describe` makes of its result, JSON values; None if it failed."""
        print(f"[{time.perf_counter() - self._started:5.0f} s] {name}", file=sys.stderr, flush=True)
        result = described = None
        try:
            result = measure()
            described = describe(result)
            json.dumps(described)
        except Exception as error:  # the other parts are worth having
            traceback.print_exc()
            self.failed.append(name)
            described, self.values.setdefault("errors", {})[name] = None, f"{type(error).__name__}: {error}"
        self.values[name] = described
        self.values["seconds"] = time.perf_counter() - self._started
        if self._out is not None:
            write_json(self._out, self.values)
        return result


def device_implementations() -> list[str]:
    """The default implementation of attention, and what else is written for the default device."""
    capability = str(getattr(jax.devices()[0], "compute_capability", "0"))
    return [default_implementation(), *(["mosaic"] if capability.startswith("9.") else [])]


def measure_model(report: Report, name: str, sizes: Sizes, found: dict[str, float], folder: Path) -> None:
    """Steps, predictors and presets of one model."""
    llm = report.part(
        f"{name}: start",
        lambda: engine.load(
            name,
            folder,
            max_model_len=sizes.max_model_len,
            max_num_seqs=max(sizes.batches),
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            num_host_blocks=sizes.host_blocks,
            decode_buckets=sizes.batches,
            num_gpu_blocks_override=blocks_for(name, sizes),
        ),
        describe=describe_start,
    )
    if llm is None:
        return
    report.part(
        f"{name}: steps",
        lambda: list(
            engine.step_speeds(
                llm,
                found,
                sizes.batches,
                sizes.context,
                min(sizes.max_num_batched_tokens, sizes.max_model_len - 1),
            )
        ),
    )
    report.part(
        f"{name}: swaps beside decode",
        lambda: list(engine.hidden_swaps(llm, sizes.swap_blocks, sizes.batches[1], sizes.context)),
    )
    predicted = report.part(
        f"{name}: predictors",
        lambda: engine.predictor_errors(llm, sizes.profile_seconds),
        describe=lambda found: found[0],
    )
    if predicted is None:
        return
    _, costs = predicted
    report.part(
        f"{name}: presets",
        lambda: list(
            engine.preset_speeds(
                llm,
                costs,
                sizes.requests,
                blocks=sizes.blocks,
                host_blocks=sizes.host_blocks,
                output_len=sizes.output_len,
            )
        ),
    )


def describe_start(llm: LLM) -> dict[str, Any]:
    """Load times and programs."""
    programs = llm.executor.compile_report()
    return {
        **dataclasses.asdict(llm.load_times),
        "programs": [{"name": program.name, **dataclasses.asdict(program)} for program in programs],
    }


def blocks_for(name: str, sizes: Sizes) -> int:
    """Blocks that hold the largest decode batch at the context that is timed, as far as memory goes."""
    wanted = max(sizes.blocks, max(sizes.batches) * -(-(sizes.context + 1) // 16))
    limit = hardware.describe_hardware()["device_memory_bytes"]
    if limit is None:
        return wanted
    shape = shape_of(engine.model_config(name), name, "bfloat16")
    fitting = int((0.8 * limit - shape.weight_bytes) // shape.block_bytes(16))
    return max(sizes.blocks, min(wanted, fitting))


def compare(workload: str, sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Throughput beside transformers, each in a process of its own."""
    model, out = folder / f"bench-{sizes.compare_model}", folder / f"compare-{workload}.json"
    if not model.exists():
        make = [
            sys.executable,
            str(SCRIPTS / "make_bench_model.py"),
            str(model),
            "--size",
            sizes.compare_model,
        ]
        subprocess.run(make, check=True, stdout=sys.stderr)
    device = "cpu" if jax.default_backend() == "cpu" else "gpu"
    command = [
        *(sys.executable, str(SCRIPTS / "compare_frameworks.py"), str(model), workload),
        *("--backends", "jaxllm,transformers,transformers-cb", "--device", device, "--repetitions", "2"),
        *("--num-requests", str(sizes.compare_requests), "--static-batch-sizes", "64,16"),
        *("--dtype", "float32" if device == "cpu" else "bfloat16"),
        *("--out", str(out)),
    ]
    subprocess.run(command, check=False, stdout=sys.stderr)
    return dict(json.loads(out.read_text(encoding="utf-8")))


def table(values: dict[str, Any]) -> str:
    """What there is, as Markdown."""
    lines = ["| what | value |", "|---|---:|"]
    checks = values.get("kernel checks") or []
    if checks:
        worst = max(checks, key=lambda row: row["relative_error"] / row["limit"])
        passed = sum(row["passed"] for row in checks)
        lines.append(f"| kernel checks passed | {passed} of {len(checks)} |")
        lines.append(f"| largest error over its limit | {worst['relative_error'] / worst['limit']:.2f} |")
    for name, rate in (values.get("ceilings") or {}).items():
        lines.append(f"| {name} | {rate:.3g} |")
    for row in values.get("decode attention") or []:
        what = f"{row['implementation']} decode, batch {row['batch']}, context {row['context']}, of the copy"
        lines.append(f"| {what} | {row['share_of_copy']:.0%} |")
    for row in values.get("prefill attention") or []:
        what = f"{row['implementation']} prefill, {row['tokens']} tokens, of the matmul ceiling"
        lines.append(f"| {what} | {row['share_of_matmul']:.0%} |")
    for row in values.get("swaps") or []:
        lines.append(
            f"| swap of {row['blocks']} blocks, out / in of a pinned copy, hidden by matmuls | "
            f"{row['out_share_of_pinned_copy']:.0%} / {row['in_share_of_pinned_copy']:.0%}, "
            f"{row['hidden_share']:.0%} |"
        )
        copy = (values.get("ceilings") or {}).get("copy_bytes_per_second")
        if copy:
            shares = [row[f"{one}_bytes_per_second"] / copy for one in ("gather", "scatter")]
            what = f"gather / scatter of {row['blocks']} blocks, of the copy"
            lines.append(f"| {what} | {shares[0]:.0%} / {shares[1]:.0%} |")
    for name, part in values.items():
        if name.endswith(": steps"):
            for row in part or []:
                size = f"batch {row['batch']}" if row["step"] == "decode" else f"{row['tokens']} tokens"
                what = f"{name.removesuffix(': steps')}, {row['step']} step, {size}"
                lines.append(
                    f"| {what}: ms, of its roofline | {1e3 * row['seconds']:.2f}, {row['share']:.0%} |"
                )
        if name.endswith(": swaps beside decode"):
            for row in part or []:
                what = f"{name.removesuffix(': swaps beside decode')}, {row['blocks']} blocks out / in"
                lines.append(
                    f"| {what}, hidden by decode of {row['batch']} | "
                    f"{row['out_hidden']:.0%} / {row['in_hidden']:.0%} |"
                )
        if name.endswith(": presets"):
            for row in part or []:
                what = f"{name.removesuffix(': presets')}, preset {row['preset']}, {row['arrivals']}"
                lines.append(f"| {what}, output tokens/s | {row['output_tokens_per_second']:.0f} |")
        if name.startswith("against transformers"):
            for row in (part or {}).get("rows", []):
                rate = row["output_tokens_per_second"]
                size = "" if row["batch_size"] is None else f", batch {row['batch_size']}"
                shown = "-" if rate is None else f"{rate['median']:.0f}"
                lines.append(f"| {name}, {row['backend']}{size}, output tokens/s | {shown} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure, print one table, write one JSON file; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on any device")
    parser.add_argument(
        "--implementation", default=None, help="of attention (default: all that the device runs)"
    )
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the kernels' random data")
    parser.add_argument("--no-compare", action="store_true", help="leave transformers out")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    if jax.default_backend() == "cpu" and not args.smoke:
        parser.error("there is no GPU here; --smoke shows that the command runs")
    sizes = SMOKE if args.smoke else Sizes()
    implementations = [args.implementation] if args.implementation else device_implementations()
    report = Report(
        args.out,
        {
            "command": command_line(
                ["python", "scripts/bench_gpu.py", *(sys.argv[1:] if argv is None else argv)]
            ),
            "hardware": hardware.describe_hardware(),
            "versions": hardware.versions(),
            "implementations": implementations,
            "default_implementation": default_implementation(),
            "seed": args.seed,
        },
    )
    checks = report.part(
        "kernel checks", lambda: [row for one in implementations for row in kernels.check(one, args.seed)]
    )
    found = report.part("ceilings", lambda: kernels.ceilings(megabytes=sizes.megabytes, matmul=sizes.matmul))
    if found is not None:
        report.part(
            "decode attention",
            lambda: [
                row
                for one in implementations
                for row in kernels.decode_speeds(one, found, sizes.batches, sizes.contexts)
            ],
        )
        report.part(
            "prefill attention",
            lambda: [
                row
                for one in implementations
                for row in kernels.prefill_speeds(one, found, sizes.prefill_tokens)
            ],
        )
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        folder = Path(name)
        shape = shape_of(engine.model_config(sizes.models[0]), sizes.models[0], "bfloat16")
        report.part("swaps", lambda: list(engine.swap_speeds(shape, 16, sizes.swap_blocks, sizes.matmul)))
        if found is not None:
            for model in sizes.models:
                measure_model(report, model, sizes, found, folder)
        report.part(
            "start times",
            lambda: engine.start_times(
                sizes.models[0], folder, max_model_len=sizes.max_model_len, max_num_seqs=max(sizes.batches),
                max_num_batched_tokens=sizes.max_num_batched_tokens, decode_buckets=sizes.batches,
                num_gpu_blocks_override=blocks_for(sizes.models[0], sizes),
            ),
        )  # fmt: skip
        if not args.no_compare and all(map(importlib.util.find_spec, ("torch", "transformers"))):
            for workload in ("short", "long", "mixed"):
                report.part(
                    f"against transformers, {workload}",
                    lambda workload=workload: compare(workload, sizes, folder),
                )
    print(table(report.values))
    for name in report.failed:
        print(f"{name} failed: {report.values['errors'][name]}", file=sys.stderr)
    wrong = [row for row in checks or [] if not row["passed"] or not row["same_bits_again"]]
    for row in wrong:
        print(f"kernel check failed: {row}", file=sys.stderr)
    return 1 if wrong or report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
