"""What fewer bytes of KV are worth where memory is short: tokens/s of two policies, simulated.

    python scripts/compare_kv.py --out-dir out/kv

Keys and values of 16 bits, of int8 with a scale for each head of a token, and of float8, in pools of the
same bytes on device and host. A closed loop of clients asks for more KV than the pool holds, on kernels
measured on GPUs (`jaxllm.predictors.silicon`). Policies are `vllm_v1`, which recomputes whom it preempts, and
`adaptive`.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import plots
from sweep.options import list_of

from jaxllm.errors import CapacityError, ConfigError
from jaxllm.research import simulate
from jaxllm.research.bench.results import about, write_json
from jaxllm.research.simulator.system import make_system
from jaxllm.research.workloads import UniformLengths
from jaxllm.system.output_files import NewFolder, OutputParser

POLICIES = ("vllm_v1", "adaptive")
KV_DTYPES = ("bfloat16", "int8", "fp8_e4m3")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=list_of(str), default=["llama-13b", "llama-3-8b"])
    parser.add_argument("--devices", type=list_of(str), default=["a800-80gb-pcie", "h100"])
    parser.add_argument("--tokens", type=int, default=32768, help="of 16 bits that the pool holds")
    parser.add_argument("--clients", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=400, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--out-dir", type=NewFolder("kv.json", "kv.png"), required=True)
    args = parser.parse_args(argv)
    if min(args.tokens // 2048, args.clients, args.requests, args.seeds) < 1:
        parser.error("--clients, --requests and --seeds must be at least 1, and --tokens 2048")
    try:
        for model, device in itertools.product(args.models, args.devices):
            make_system(model, device=device)
    except (ConfigError, CapacityError) as error:
        parser.error(str(error))
    return args


def measure(args: argparse.Namespace, model: str, device: str) -> list[dict[str, Any]]:
    """Rows of one model on one device."""
    wide = make_system(model, device=device).model.kv_bytes_per_token
    rows = []
    for kv_dtype in KV_DTYPES:
        try:
            system = make_system(model, device=device, kv_cache_dtype=kv_dtype)
        except ConfigError as error:  # KV of float8 was not measured on every device
            print(f"{model}, {device}, {kv_dtype}: {error}", file=sys.stderr)
            continue
        each = system.costs.kv_bytes_per_token  # type: ignore[attr-defined]
        blocks = int(args.tokens * wide / each / 16)
        found = simulate(
            model=model,
            device=device,
            kv_cache_dtype=kv_dtype,
            gpu_blocks=blocks,
            host_blocks=blocks // 2,
            dataset=UniformLengths(shortest=256, longest=1024),
            output_len=UniformLengths(shortest=128, longest=512),
            policy=POLICIES,
            closed=args.clients,
            num_prompts=args.requests,
            seeds=args.seeds,
        )
        for policy in POLICIES:
            runs = [run for run in found.runs if run.policy == policy]
            speeds = [run.figures["tokens_per_second"] for run in runs]
            rows.append(
                {
                    "model": model,
                    "device": device,
                    "kv_dtype": kv_dtype,
                    "kv_bytes_per_token": each,
                    "num_gpu_blocks": blocks,
                    "policy": policy,
                    "tokens_per_second": statistics.median(speeds),
                    "range": [min(speeds), max(speeds)],
                    "num_preemptions": statistics.median([run.result.num_preemptions for run in runs]),
                }
            )
            print(rows[-1], flush=True)
    return rows


def draw(rows: list[dict[str, Any]], path: pathlib.Path, source: str) -> None:
    """Tokens/s against bytes of KV per token, a panel for each model and device."""
    panels = list(dict.fromkeys((row["model"], row["device"]) for row in rows))
    colours = dict(zip(POLICIES, (plots.PUBLISHED, plots.OURS), strict=True))
    with plots.figure(path, source, 1, len(panels), figsize=(3.6 * len(panels), 3.4)) as axes:
        for panel, (model, device) in zip(axes.flat, panels, strict=True):
            for policy in POLICIES:
                ours = [
                    row
                    for row in rows
                    if (row["model"], row["device"], row["policy"]) == (model, device, policy)
                ]
                kib = [row["kv_bytes_per_token"] / 1024 for row in ours]
                panel.plot(
                    kib, [row["tokens_per_second"] for row in ours], "o-", color=colours[policy], label=policy
                )
            for row in ours:
                at = row["kv_bytes_per_token"] / 1024, row["tokens_per_second"]
                above = -14 if row["kv_dtype"].startswith("fp8") else 4
                panel.annotate(row["kv_dtype"], at, (-34, above), textcoords="offset points", fontsize=8)
            panel.set(title=f"{model}, {device}", xlabel="KiB of KV per token", ylabel="tokens/s")
            panel.set_xlim(left=0)
            panel.set_ylim(bottom=0)
        axes.flat[0].legend(fontsize=8)


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate, write rows and the figure."""
    args = parse_args(argv)
    rows: list[dict[str, Any]] = []
    for model, device in itertools.product(args.models, args.devices):
        rows += measure(args, model, device)
    folder = pathlib.Path(args.out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "kv.json", about(["python", *sys.argv]) | {"rows": rows})
    draw(rows, folder / "kv.png", "simulated from kernels measured on these GPUs")


if __name__ == "__main__":
    main()
