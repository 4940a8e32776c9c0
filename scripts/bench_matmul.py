"""The matrix products that bound a step on a CPU: native, XLA's in three layouts, OpenBLAS's, and torch's.

    python scripts/bench_matmul.py --rows 1,8,16,32,64,128,512 --out matmul.json

A step multiplies activations `[rows, hidden]` by one weight after another, each read from memory once. So
every timed call runs a chain of `--num-weights` different weights; the candidates alternate within a
repetition. Layouts: `rows_first` is `x @ weight.T` and `weight_first` is `(weight @ x.T).T`, both on the
`[out, in]` weights of checkpoints; `transposed_weight` is `x @ weight` on a weight stored `[in, out]`.
`native` are the packed products that engines take on CPUs, `openblas` is numpy's; torch's is there if it is
installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllm.pallas_kernels import native
from jaxllm.research.bench.results import command_line, write_json
from jaxllm.system import hardware
from jaxllm.system.output_files import OutputParser, new_file

_CONTRACTIONS = {"rows_first": (1, 1), "weight_first": (1, 1), "transposed_weight": (1, 0)}
Chain = Callable[[], object]


def xla_chain(layout: str, x: np.ndarray, weights: list[np.ndarray]) -> Chain:
    """One compiled program that multiplies `x` [rows, in] by every weight [out, in] in turn."""
    dimensions = (tuple((axis,) for axis in _CONTRACTIONS[layout]), ((), ()))
    hidden = x.shape[1]

    @jax.jit
    def run(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        for weight in weights:
            pair = (weight, x) if layout == "weight_first" else (x, weight)
            y = lax.dot_general(*pair, dimensions, precision=lax.Precision.HIGHEST)
            y = y.T if layout == "weight_first" else y
            x = x + 1e-3 * y[:, :hidden]  # the next product must wait for this one
        return x

    stored = [jnp.asarray(w.T.copy() if layout == "transposed_weight" else w) for w in weights]
    rows = jnp.asarray(x)
    return lambda: run(rows, stored).block_until_ready()


def native_chain(x: np.ndarray, weights: list[np.ndarray]) -> Chain:
    """The same chain by `native.linear`."""
    hidden, out_features = x.shape[1], len(weights[0])

    @jax.jit
    def run(x: jax.Array, packed: list[jax.Array]) -> jax.Array:
        for weight in packed:
            x = x + 1e-3 * native.linear(x, weight, out_features)[:, :hidden]
        return x

    rows, packed = jnp.asarray(x), [native.pack(jnp.asarray(weight)) for weight in weights]
    return lambda: run(rows, packed).block_until_ready()


def numpy_chain(x: np.ndarray, weights: list[np.ndarray]) -> Chain:
    """The same chain by numpy, which calls OpenBLAS on its own number of threads."""

    def run() -> object:
        value = x
        for weight in weights:
            value = value + 1e-3 * (value @ weight.T)[:, : x.shape[1]]
        return value

    return run


def torch_chain(x: np.ndarray, weights: list[np.ndarray], threads: int) -> Chain:
    """The same chain by `torch.nn.functional.linear`."""
    import torch

    torch.set_num_threads(threads)
    rows, stored = torch.from_numpy(x), [torch.from_numpy(w) for w in weights]

    def run() -> object:
        value = rows
        with torch.inference_mode():
            for weight in stored:
                value = value + 1e-3 * torch.nn.functional.linear(value, weight)[:, : x.shape[1]]
        return value

    return run


def measure(rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """Median, fastest and slowest milliseconds per product of each candidate, and GFLOP/s by the median."""
    rng = np.random.default_rng(args.seed)
    shape = (args.out_features, args.in_features)
    weights = [rng.standard_normal(shape, np.float32) for _ in range(args.num_weights)]
    x = rng.standard_normal((rows, args.in_features), np.float32)
    chains = {f"xla_{layout}": xla_chain(layout, x, weights) for layout in _CONTRACTIONS}
    if native.packs(jnp.asarray(weights[0])):
        chains["native"] = native_chain(x, weights)
    chains["openblas"] = numpy_chain(x, weights)
    if importlib.util.find_spec("torch") is not None:
        chains["torch"] = torch_chain(x, weights, args.threads)
    seconds: dict[str, list[float]] = {name: [] for name in chains}
    for repetition in range(1 + args.repetitions):
        for name, chain in chains.items():
            started = time.perf_counter()
            chain()
            if repetition:  # the first one compiles
                seconds[name].append((time.perf_counter() - started) / args.num_weights)
    flop = 2 * rows * args.in_features * args.out_features
    return {
        "rows": rows,
        **{
            name: {
                "milliseconds": {
                    "median": round(1e3 * statistics.median(times), 4),
                    "min": round(1e3 * min(times), 4),
                    "max": round(1e3 * max(times), 4),
                },
                "gflop_per_second": round(flop / statistics.median(times) / 1e9, 1),
                "weight_gb_per_second": round(4e-9 * weights[0].size / statistics.median(times), 2),
            }
            for name, times in seconds.items()
        },
    }


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,16,32,64,128,512", help="batch sizes (default: %(default)s)")
    parser.add_argument("--in-features", type=int, default=768)
    parser.add_argument("--out-features", type=int, default=3072)
    parser.add_argument("--num-weights", type=int, default=12)
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=new_file, metavar="FILE.json")
    args = parser.parse_args()
    if args.out_features < args.in_features:
        parser.error(
            f"--out-features {args.out_features} must be at least --in-features {args.in_features}: "
            "each product feeds the next"
        )
    machine = hardware.describe_hardware()
    table = []
    for rows in map(int, args.rows.split(",")):
        table.append(measure(rows, args))
        cells = [
            f"{name} {cell['milliseconds']['median']:.2f} ms {cell['gflop_per_second']:.0f} GFLOP/s"
            for name, cell in table[-1].items()
            if name != "rows"
        ]
        print(f"{rows:4d} rows: " + " | ".join(cells), flush=True)
    if args.out is not None:
        result = {
            "command": command_line(["python", "scripts/bench_matmul.py", *sys.argv[1:]]),
            "in_features": args.in_features,
            "out_features": args.out_features,
            "num_weights": args.num_weights,
            "repetitions": args.repetitions,
            "seed": args.seed,
            "hardware": machine,
            "versions": hardware.versions(),
            "table": table,
        }
        write_json(args.out, result)


if __name__ == "__main__":
    main()
