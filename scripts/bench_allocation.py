"""What allocating KV memory in one piece wastes, beside paging (vLLM, Kwon et al. 2023, Fig. 2).

    python scripts/bench_allocation.py --out allocation.json --plot allocation.png

Nothing is timed: the counts follow from the seeds. All requests are there at the start and are admitted
first come first served; every step gives each running request a token, and computes the prompts of those
just admitted. Shares are averages over the steps at whose end requests wait, for medians over the seeds.

Systems, in slots of one token (`jaxllm.research.simulator.allocation`): Orca reserves a request's prompt and
outputs at once, in a block of a buddy allocator, for as many outputs as there will be (Oracle), for the power
of two above (Pow2), or up to --max-model-len (Max), as in vLLM's evaluation. FasterTransformer, as we read
it, runs a batch to its end in one tensor with rows as long as the batch's longest request will get, and takes
as many of those that wait as fit. Paging takes blocks of --block-size tokens as they are needed; where none
is left the newest request starts over.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from memory.options import add_common, check_files, integer, leave, provenance
from sweep.options import list_of

from jaxllm.errors import ConfigError
from jaxllm.research.simulator.allocation import Memory, Paging, Reservations, StaticBatches, Usage, occupancy
from jaxllm.research.workloads import DATASETS, make_trace
from jaxllm.system.output_files import OutputParser

SYSTEMS = ("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "FasterTransformer", "Paging")
SHARES = {
    "used": "token states",
    "reserved": "reserved, used later",
    "internal": "internal fragmentation",
    "rounding": "rounding to block sizes",
    "external": "free (external fragmentation)",
}
PAPER_USED = {"Orca (Max)": 0.204, "Orca (Pow2)": 0.268, "Orca (Oracle)": 0.382, "Paging": 0.963}
"""Shares of token states in vLLM's Fig. 2, on their own workload."""
COLORS = ("#2a7f3f", "#8fc98f", "#d1495b", "#edae49", "#c9c9c9")
Row = dict[str, Any]


def memory_of(system: str, num_slots: int, max_model_len: int, block_size: int) -> Memory:
    """An empty pool of a system of `SYSTEMS`."""
    makers: dict[str, Callable[[], Memory]] = {
        "Orca (Max)": lambda: Reservations(num_slots, "max", max_model_len),
        "Orca (Pow2)": lambda: Reservations(num_slots, "pow2", max_model_len),
        "Orca (Oracle)": lambda: Reservations(num_slots, "oracle", max_model_len),
        "FasterTransformer": lambda: StaticBatches(num_slots),
        "Paging": lambda: Paging(num_slots, block_size),
    }
    return makers[system]()


def waste_rows(
    *,
    datasets: Sequence[str] = ("chatbot", "alpaca", "summary"),
    output_lengths: Sequence[int] = (64, 256),
    pools: Sequence[int] = (2048, 8192),
    num_requests: int = 500,
    seeds: Sequence[int] = (0,),
    max_model_len: int = 2048,
    block_size: int = 16,
) -> list[Row]:
    """A row for each pool, data set, longest output, system and seed.

    A row has shares of the pool by the names of `SHARES`, `mean_batch` (requests) and `num_steps`.

    Raises:
        ConfigError: an argument is out of range, or no request has to wait.
    """
    rows = []
    for dataset, output_len, seed in itertools.product(datasets, output_lengths, seeds):
        trace = make_trace(dataset, num_requests, output_len, outputs="uniform", seed=seed)
        lengths = list(zip(trace.prompt_lens.tolist(), trace.output_lens.tolist(), strict=True))
        for num_slots, system in itertools.product(pools, SYSTEMS):
            found = occupancy(lengths, memory_of(system, num_slots, max_model_len, block_size))
            where = {"pool": num_slots, "dataset": dataset, "output_len": output_len, "system": system}
            counts = {"num_steps": found.num_steps, "num_preemptions": found.num_preemptions}
            rows.append({**where, "seed": seed, **found.shares, "mean_batch": found.mean_batch, **counts})
    return rows


def summary_rows(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Medians over the seeds, and the range of the used share and of the batch."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        key = row["pool"], row["dataset"], row["output_len"], row["system"]
        groups.setdefault(key, []).append(row)
    found = []
    for key, members in groups.items():
        medians = {
            name: statistics.median(row[name] for row in members)
            for name in (*Usage._fields, "mean_batch", "num_steps", "num_preemptions")
        }
        ranges = {
            f"{name}_range": [min(row[name] for row in members), max(row[name] for row in members)]
            for name in ("used", "mean_batch")
        }
        names = ("pool", "dataset", "output_len", "system")
        found.append({**dict(zip(names, key, strict=True)), **medians, **ranges})
    return sorted(found, key=lambda row: row["pool"])


def allocation_lines(report: Mapping[str, Any]) -> list[str]:
    """The report's Markdown: a table for each pool."""
    rows = report["summary"]
    lines = [
        "## What contiguous allocation wastes (vLLM, Fig. 2)",
        "",
        f"Command: `{report['command']}`. Counted, not timed: {report['num_requests']} requests, all present "
        f"at the start; seeds {report['seeds']}, medians over them. Longest sequence "
        f"{report['max_model_len']} tokens, paging in blocks of {report['block_size']}. Shares of KV memory "
        "while requests wait.",
        "",
    ]
    for pool in dict.fromkeys(row["pool"] for row in rows):
        lines += [
            f"Pool of {pool} tokens:",
            "",
            "| data | outputs up to | system | " + " | ".join(SHARES.values()) + " | mean batch | (range) |",
            "|---|---:|---|" + "---:|" * (len(SHARES) + 2),
        ]
        for row in rows:
            if row["pool"] == pool:
                shares = " | ".join(f"{row[name]:.1%}" for name in SHARES)
                low, high = row["mean_batch_range"]
                lines.append(
                    f"| {row['dataset']} | {row['output_len']} | {row['system']} | {shares} | "
                    f"{row['mean_batch']:.1f} | {low:.1f} to {high:.1f} |"
                )
        lines.append("")
    paper = ", ".join(f"{system} {share:.1%}" for system, share in PAPER_USED.items())
    used = {system: [row["used"] for row in rows if row["system"] == system] for system in SYSTEMS}
    ours = ", ".join(f"{name} {min(shares):.1%} to {max(shares):.1%}" for name, shares in used.items())
    return [*lines, f"Token states in all these cells: {ours}. In vLLM's Fig. 2: {paper}.", ""]


def draw_allocation(report: Mapping[str, Any], path: pathlib.Path) -> None:
    """Stacked bars: a row of panels for each pool, a panel for each data set and output length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = report["summary"]
    pools = list(dict.fromkeys(row["pool"] for row in rows))
    cells = list(dict.fromkeys((row["dataset"], row["output_len"]) for row in rows))
    size = (1 + 2.4 * len(cells), 0.9 + 3.3 * len(pools))
    figure, panels = pyplot.subplots(
        len(pools), len(cells), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for (line, pool), (column, cell) in itertools.product(enumerate(pools), enumerate(cells)):
        panel = panels[line][column]
        found = [row for row in rows if (row["pool"], row["dataset"], row["output_len"]) == (pool, *cell)]
        bottom = [0.0] * len(found)
        for (name, label), color in zip(SHARES.items(), COLORS, strict=True):
            heights = [100 * row[name] for row in found]
            panel.bar(range(len(found)), heights, bottom=bottom, color=color, label=label)
            bottom = [one + other for one, other in zip(bottom, heights, strict=True)]
        for place, row in enumerate(found):
            panel.text(place, 102, f"{row['mean_batch']:.0f}", ha="center", fontsize=8)
        panel.set_ylim(0, 112)
        panel.set_xticks(
            range(len(found)), [row["system"] for row in found], rotation=40, ha="right", fontsize=8
        )
        panel.set_title(f"{cell[0]}, outputs to {cell[1]}\npool of {pool} tokens", fontsize=9)
    for line in panels:
        line[0].set_ylabel("share of KV memory [%]")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(SHARES))
    figure.suptitle("What KV memory holds while requests wait (above each bar: mean batch, in requests)")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shown = "comma-separated (default: %(default)s)"
    parser.add_argument("--datasets", type=list_of(str), default="chatbot,alpaca,summary", help=shown)
    parser.add_argument(
        "--output-lengths",
        type=list_of(integer(1, 2**16)),
        default="64,256",
        help=f"longest outputs, {shown}",
    )
    parser.add_argument(
        "--pools",
        type=list_of(integer(16, 2**20)),
        default="2048,8192",
        help=f"tokens, powers of two, {shown}",
    )
    parser.add_argument("--requests", type=integer(2, 100_000), default=500, help="default: %(default)s")
    parser.add_argument("--seeds", type=list_of(integer(0, 2**31)), default="0,1,2,3,4", help=shown)
    parser.add_argument("--max-model-len", type=integer(1, 2**20), default=2048, help="default: %(default)s")
    parser.add_argument("--block-size", type=integer(1, 1024), default=16, help="of paging (%(default)s)")
    add_common(parser)
    args = parser.parse_args(argv)
    if not set(args.datasets) <= set(DATASETS):
        parser.error(f"--datasets {','.join(args.datasets)}: name some of {', '.join(DATASETS)}")
    if any(pool & (pool - 1) for pool in args.pools):
        parser.error(f"--pools {','.join(map(str, args.pools))} must be powers of two: blocks are halved")
    if min(args.pools) < args.max_model_len:
        parser.error(f"--pools start at --max-model-len ({args.max_model_len}), which Orca (Max) reserves")
    check_files(parser, args)
    return args


def main(argv: list[str] | None = None) -> None:
    """Count, print the tables, and write JSON and the figure."""
    args = parse_args(argv)
    settings = {
        "num_requests": args.requests,
        "seeds": args.seeds,
        "max_model_len": args.max_model_len,
        "block_size": args.block_size,
    }
    try:
        rows = waste_rows(
            datasets=args.datasets, output_lengths=args.output_lengths, pools=args.pools, **settings
        )
    except ConfigError as error:
        raise SystemExit(f"bench_allocation.py: {error}") from None
    report = {
        **provenance("bench_allocation.py", argv),
        "repetitions": len(args.seeds),
        **settings,
        "summary": summary_rows(rows),
    }
    leave(args, report, allocation_lines(report), draw_allocation)


if __name__ == "__main__":
    main()
