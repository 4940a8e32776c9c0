"""What paging costs the attention of a decode step (vLLM, Kwon et al. 2023, Fig. 18a).

    python scripts/bench_paging.py --out paging.json --plot paging.png
    python scripts/bench_paging.py --implementation triton --dtype float16 --out paging-gpu.json

Times the engine's decode attention over a paged pool, whose blocks are in random order, against attention
over K and V that lie in one piece, by block size, batch and context. All sequences have --context tokens.
Two baselines: `contiguous`, plain jax.numpy on `[batch, num_kv_heads, context, head_dim]` with the same mask,
dtype and float32 sums; and with implementation xla also `one_block`, the engine's own attention with each
sequence in a single block, which tells paging from the way the kernel goes about it. Every candidate is
compiled before; they alternate within each repetition, and ratios are taken within repetitions.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from memory.options import add_common, check_files, integer, leave, provenance
from sweep.options import list_of

from jaxllm import pallas_kernels
from jaxllm.errors import JaxllmError
from jaxllm.system.output_files import OutputParser

BASELINES = {"contiguous": "plain jax.numpy, contiguous", "one_block": "the same kernel, one block each"}
Row = dict[str, Any]


def contiguous_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, *, scale: float
) -> jax.Array:
    """Attention of one new token per sequence over KV in one piece.

    Args:
        q: `[batch, num_q_heads, head_dim]`.
        k: `[batch, num_kv_heads, context, head_dim]`.
        v: like `k`.
        lengths: int32 `[batch]`, KV tokens of each sequence.
        scale: factor of the scores.

    Returns:
        `[batch, num_q_heads, head_dim]` in the dtype of `q`.
    """
    batch, num_q_heads, head_dim = q.shape
    queries = q.reshape(batch, k.shape[1], num_q_heads // k.shape[1], head_dim)
    sums: dict[str, Any] = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    scores = scale * jnp.einsum("bhgd,bhtd->bhgt", queries, k, **sums)
    valid = jnp.arange(k.shape[2]) < lengths[:, None]
    weights = jax.nn.softmax(jnp.where(valid[:, None, None], scores, -1e30), axis=-1)
    out = jnp.einsum("bhgt,bhtd->bhgd", weights.astype(v.dtype), v, **sums)
    return out.reshape(q.shape).astype(q.dtype)


def candidates(
    args: argparse.Namespace, batch: int, context: int
) -> dict[str | int, Callable[[], jax.Array]]:
    """Compiled calls on the same sequences: the baselines by name, paging by block size."""
    rng = np.random.default_rng(args.seed)
    heads, dim = args.num_kv_heads, args.head_dim
    kv = rng.standard_normal((2, batch, heads, context, dim), np.float32)
    q = jnp.asarray(rng.standard_normal((batch, args.num_q_heads, dim)), args.dtype)
    k, v = (jnp.asarray(part, args.dtype) for part in kv)
    lengths, scale = jnp.full(batch, context, jnp.int32), dim**-0.5
    dense = jax.jit(functools.partial(contiguous_attention, scale=scale))
    paged = jax.jit(
        functools.partial(
            pallas_kernels.decode_attention, layer=0, scale=scale, implementation=args.implementation
        )
    )

    def over_blocks(block_size: int) -> Callable[[], jax.Array]:
        blocks = context // block_size
        order = rng.permutation(batch * blocks)
        parts = kv.reshape(2, batch, heads, blocks, block_size, dim).transpose(1, 3, 0, 2, 4, 5)
        pool = np.empty((batch * blocks, 1, *parts.shape[2:]), np.float32)
        pool[order, 0] = parts.reshape(batch * blocks, *parts.shape[2:])
        tables = jnp.asarray(order.reshape(batch, blocks), jnp.int32)
        return functools.partial(paged, q, jnp.asarray(pool, args.dtype), tables, lengths)

    calls: dict[str | int, Callable[[], jax.Array]] = {
        "contiguous": functools.partial(dense, q, k, v, lengths)
    }
    if args.implementation == "xla":
        calls["one_block"] = over_blocks(context)
    return calls | {size: over_blocks(size) for size in sorted(args.block_sizes) if size <= context}


def measure(args: argparse.Namespace, batch: int, context: int) -> list[Row]:
    """A row for each block size: seconds, those of the baselines, and the ratios to them."""
    calls = candidates(args, batch, context)
    outputs = {name: np.asarray(call(), np.float32) for name, call in calls.items()}  # compiles
    seconds: dict[str | int, list[float]] = {name: [] for name in calls}
    for repetition in range(1 + args.repetitions):
        for name, call in calls.items():
            started = time.perf_counter()
            for _ in range(args.inner):
                result = call()
            jax.block_until_ready(result)
            if repetition:
                seconds[name].append((time.perf_counter() - started) / args.inner)
    rows = []
    for name in calls:
        if isinstance(name, str):
            continue
        row: Row = {"batch": batch, "context": context, "block_size": name, "seconds": spread(seconds[name])}
        for base in (base for base in BASELINES if base in calls):
            ratios = [ours / theirs for ours, theirs in zip(seconds[name], seconds[base], strict=True)]
            row[base] = {"seconds": spread(seconds[base]), "ratio": spread(ratios)}
        difference = np.linalg.norm(outputs[name] - outputs["contiguous"])
        row["relative_difference"] = float(difference / np.linalg.norm(outputs["contiguous"]))
        rows.append(row)
    return rows


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and both ends."""
    low, middle, high = (float(value) for value in np.quantile(values, [0.25, 0.5, 0.75]))
    return {"median": middle, "q1": low, "q3": high, "min": min(values), "max": max(values)}


def paging_lines(report: Mapping[str, Any]) -> list[str]:
    """The report's Markdown: ratios by block size."""
    machine, options = report["hardware"], report["options"]
    lines = [
        "## What paging costs decode attention (vLLM, Fig. 18a)",
        "",
        f"Command: `{report['command']}`. Measured on {machine['device']} ({machine['cpu']}), implementation "
        f"{report['implementation']}; {options['num_q_heads']} query and {options['num_kv_heads']} KV heads "
        f"of {options['head_dim']} in {options['dtype']}; medians of {report['repetitions']} repetitions "
        "(quartiles). Above 1 paging is slower.",
        "",
    ]
    rows = report["rows"]
    sizes = sorted({row["block_size"] for row in rows})
    for base, what in BASELINES.items():
        if base not in rows[0]:
            continue
        lines += [
            f"Over {what}:",
            "",
            "| batch | context | baseline, ms | " + " | ".join(f"blocks of {size}" for size in sizes) + " |",
            "|---:|---:|---:|" + "---:|" * len(sizes),
        ]
        cells = dict.fromkeys((row["batch"], row["context"]) for row in rows)
        for batch, context in cells:
            found = {r["block_size"]: r[base] for r in rows if (r["batch"], r["context"]) == (batch, context)}
            took = 1e3 * next(iter(found.values()))["seconds"]["median"]
            ratios = [
                "{median:.2f} ({q1:.2f} to {q3:.2f})".format(**found[size]["ratio"]) if size in found else "-"
                for size in sizes
            ]
            lines.append(f"| {batch} | {context} | {took:.3g} | " + " | ".join(ratios) + " |")
        overall = {
            size: statistics.median(row[base]["ratio"]["median"] for row in rows if row["block_size"] == size)
            for size in sizes
        }
        told = ", ".join(f"{size}: {ratio:.2f}" for size, ratio in overall.items())
        lines += ["", f"Median of the cells by block size: {told}.", ""]
    return lines


def draw_paging(report: Mapping[str, Any], path: pathlib.Path) -> None:
    """Time by block size, a panel for each batch and context."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = report["rows"]
    batches, contexts = (sorted({row[name] for row in rows}) for name in ("batch", "context"))
    size = (3.4 * len(contexts), 0.9 + 2.7 * len(batches))
    figure, panels = pyplot.subplots(
        len(batches), len(contexts), figsize=size, squeeze=False, layout="constrained"
    )
    for (line, batch), (column, context) in itertools.product(enumerate(batches), enumerate(contexts)):
        panel = panels[line][column]
        found = [row for row in rows if (row["batch"], row["context"]) == (batch, context)]
        panel.set_title(f"batch {batch}, {context} tokens each", fontsize=9)
        if not found:
            continue
        sizes = [row["block_size"] for row in found]
        middle = [1e3 * row["seconds"]["median"] for row in found]
        ends = [
            [1e3 * abs(row["seconds"][end] - row["seconds"]["median"]) for row in found]
            for end in ("q1", "q3")
        ]
        panel.errorbar(sizes, middle, ends, fmt="o-", capsize=2, label=f"paged, {report['implementation']}")
        for style, (base, what) in zip(("--", ":"), BASELINES.items(), strict=True):
            if base in found[0]:
                panel.axhline(1e3 * found[0][base]["seconds"]["median"], ls=style, color="k", label=what)
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, map(str, sizes))
        panel.set_ylim(bottom=0)
        if line == len(batches) - 1:
            panel.set_xlabel("block size [tokens]")
        if not column:
            panel.set_ylabel("one layer's attention [ms]")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(
        f"Decode attention over paged and contiguous KV, {report['hardware']['device']} "
        "(medians, bars: quartiles)",
        fontsize=10,
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shown = "comma-separated (default: %(default)s)"
    for name, default, what in (
        ("block-sizes", "16,32,64,128,256", "tokens; vLLM has 8 as well, which not every kernel takes"),
        ("batches", "1,8,32", "sequences"),
        ("contexts", "256,1024", "tokens of each sequence, multiples of the block sizes up to it"),
    ):
        kind = list_of(integer(1, 2**17))
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{what}; {shown}")
    for name, default in (("num-q-heads", 8), ("num-kv-heads", 8), ("head-dim", 64)):
        parser.add_argument(f"--{name}", type=integer(1, 1024), default=default, help="default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--implementation", help="native, xla, triton or mosaic; by default the device's")
    parser.add_argument("--repetitions", type=integer(2, 10_000), default=41, help="default: %(default)s")
    parser.add_argument(
        "--inner", type=integer(1, 10_000), default=1, help="calls of one timing; GPUs want more"
    )
    parser.add_argument("--seed", type=integer(0, 2**31), default=0, help="default: %(default)s")
    add_common(parser)
    args = parser.parse_args(argv)
    args.implementation = args.implementation or pallas_kernels.default_implementation()
    if args.num_q_heads % args.num_kv_heads:
        parser.error(f"--num-q-heads {args.num_q_heads} must be a multiple of --num-kv-heads")
    for context, size in itertools.product(args.contexts, args.block_sizes):
        if context % size and size <= context:
            parser.error(f"--contexts: {context} is no multiple of the block size {size}")
    if min(args.contexts) < min(args.block_sizes):
        parser.error(f"--contexts: {min(args.contexts)} is shorter than every block")
    check_files(parser, args)
    return args


def main(argv: list[str] | None = None) -> None:
    """Measure, print the tables, and write JSON and the figure."""
    args = parse_args(argv)
    report = {
        **provenance("bench_paging.py", argv),
        "implementation": args.implementation,
        "repetitions": args.repetitions,
        "inner": args.inner,
        "seed": args.seed,
        "options": {
            name: getattr(args, name) for name in ("num_q_heads", "num_kv_heads", "head_dim", "dtype")
        },
    }
    cells = itertools.product(sorted(args.batches), sorted(args.contexts))
    try:
        report["rows"] = [row for cell in cells for row in measure(args, *cell)]
    except JaxllmError as error:
        raise SystemExit(f"bench_paging.py: {error}") from None
    leave(args, report, paging_lines(report), draw_paging)


if __name__ == "__main__":
    main()
