"""Time products with weights of each format on this CPU, in turns, by rows; JSON and a table.

    python scripts/bench_products.py --out products.json

Times are medians over rounds, in each of which every format has its turn. Weights of a turn are as many as
`--copies` says, so that they come from memory as those of a model's layers do.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sweep.options import list_of

from jaxllm.models.linear_formats import QUANTIZATIONS, LinearFormat
from jaxllm.models.linear_weights import product
from jaxllm.research.bench.results import about, write_json
from jaxllm.system.output_files import OutputParser, new_file

FORMATS = {
    "float32": LinearFormat(),
    "bfloat16": LinearFormat(stored="bfloat16"),
    **QUANTIZATIONS,
    "fp8_block": LinearFormat("e4m3", 128, "fp8_128"),
    "mxfp8": LinearFormat("e4m3", 32),
    "nvfp4": LinearFormat("fp4", 16),
    "mxfp4": LinearFormat("fp4", 32),
}


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=list_of(int), default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--formats", type=list_of(str), default=list(FORMATS))
    parser.add_argument("--inputs", type=int, default=768, help="default: %(default)s")
    parser.add_argument("--outputs", type=int, default=2304, help="default: %(default)s")
    parser.add_argument("--copies", type=int, default=12, help="matrices of a turn (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=new_file, help="write the results to this JSON file")
    args = parser.parse_args()
    if unknown := [name for name in args.formats if name not in FORMATS]:
        parser.error(f"--formats {unknown[0]!r}: use some of {', '.join(FORMATS)}")
    if min(args.rounds, args.copies, args.inputs, args.outputs, *args.rows) < 1:
        parser.error("--rounds, --copies, --inputs, --outputs and --rows must be at least 1")
    if args.formats[0] != "float32":
        parser.error("--formats must begin with float32, which others are compared with")
    return args


def weights_of(args: argparse.Namespace, name: str) -> list[Any]:
    """Matrices in a format, as native products take them."""
    rng = np.random.default_rng(args.seed)
    held = dataclasses.replace(FORMATS[name], is_native=True)
    made = []
    for _ in range(args.copies):
        matrix = jnp.asarray(rng.standard_normal((args.outputs, args.inputs)), jnp.float32)
        made.append(held.make(matrix))
    return jax.block_until_ready(made)


def main() -> None:
    """Measure, print and write."""
    args = parse_args()
    call = jax.jit(lambda x, weights: [product(x, weight) for weight in weights])
    rng = np.random.default_rng(args.seed)
    weights = {name: weights_of(args, name) for name in args.formats}
    found = []
    print(f"| rows | {' | '.join(args.formats)} |\n|---:|{'---:|' * len(args.formats)}")
    for rows in args.rows:
        x = jnp.asarray(rng.standard_normal((rows, args.inputs)), jnp.float32)
        seconds: dict[str, list[float]] = {name: [] for name in args.formats}
        for one in weights.values():
            jax.block_until_ready(call(x, one))
        for _ in range(args.rounds):
            for name, one in weights.items():
                began = time.perf_counter()
                jax.block_until_ready(call(x, one))
                seconds[name].append((time.perf_counter() - began) / args.copies)
        base, shown = seconds["float32"], []
        for name, times in seconds.items():
            ratio = statistics.median([mine / other for mine, other in zip(times, base, strict=True)])
            micros = 1e6 * statistics.median(times)
            found.append({"rows": rows, "format": name, "microseconds": micros, "over_float32": ratio})
            shown.append(f"{micros:,.0f} us, {ratio:.2f}")
        print(f"| {rows} | {' | '.join(shown)} |", flush=True)
    if args.out is not None:
        shape = {"inputs": args.inputs, "outputs": args.outputs, "copies": args.copies}
        write_json(args.out, about(["python", *sys.argv]) | shape | {"results": found})


if __name__ == "__main__":
    main()
