"""What `bench_link.py` found, as Markdown and as a figure."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.predictors.link import LinkCosts
from memory.block_size import LAYOUTS, crossover, lines_of

Report = Mapping[str, Any]
COLORS = {"engine": "#1f77b4", "vllm": "#d1495b"}


def link_lines(report: Report) -> list[str]:
    """Tables of the measured copies and of the fitted constants."""
    kv, machine = report["kv"], report["hardware"]
    lines = [
        "## Copies between device and pinned host memory",
        "",
        f"Command: `{report['command']}`. Measured on {machine['device']} ({machine['cpu']}); medians of "
        f"{report['repetitions']} repetitions (lowest to highest). KV of {kv['num_layers']} layers "
        f"x {kv['num_kv_heads']} heads x {kv['head_dim']} in {kv['dtype']}. Layout `engine`: whole blocks, "
        "gathered from the pool and scattered into it; `vllm`: K and V of each block and layer copied apart.",
        "",
        "| layout | direction | tokens | block size | pieces | MB | ms | GB/s |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report["copies"]:
        took = row["seconds"]
        span = f"{1e3 * took['min']:.3g} to {1e3 * took['max']:.3g}"
        lines.append(
            f"| {row['layout']} | {row['direction']} | {row['tokens']} | {row['block_size']} | "
            f"{row['num_pieces']} | {row['num_bytes'] / 1e6:.2f} | {1e3 * took['median']:.3g} ({span}) | "
            f"{row['num_bytes'] / took['median'] / 1e9:.2f} |"
        )
    lines += [
        "",
        "Fitted: seconds = latency + pieces x a piece's + bytes / rate, least squares of relative errors. "
        "Held out: each block size predicted from the others.",
        "",
        "| direction | layout | latency, us | a piece, us | GB/s | median error | held out |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in report["fits"]:
        rate = row["bytes_per_second"]
        held_out = row["held_out_error"]
        lines.append(
            f"| {row['direction']} | {row['layout']} | {1e6 * row['latency_seconds']:.1f} | "
            f"{1e6 * row['piece_seconds']:.2f} | {'no limit' if rate is None else f'{rate / 1e9:.2f}'} | "
            f"{row['median_error']:.1%} | {'-' if held_out is None else f'{held_out:.1%}'} |"
        )
    return [*lines, ""]


def block_size_lines(rows: Sequence[Mapping[str, Any]], what: str) -> list[str]:
    """A table of swap time over recompute time, from simulated or measured rows or both.

    Args:
        rows: as `block_size_rows` and `measured_rows` return them.
        what: a sentence on what they are of.
    """
    sizes = sorted({row["block_size"] for row in rows})
    lines = [
        "## Swapping against recomputing, by block size (vLLM, Fig. 19)",
        "",
        f"{what} One sequence swapped out and in again, over one prefill of it: below 1 swapping is faster.",
        "",
        "| | layout | tokens | recompute, ms | " + " | ".join(map(str, sizes)) + " | what is faster |",
        "|---|---|---:|---:|" + "---:|" * len(sizes) + "---|",
    ]
    for (source, layout, tokens), line in lines_of(rows).items():
        ratios = {row["block_size"]: row["swap_seconds"] / row["recompute_seconds"] for row in line}
        cells = [f"{ratios[size]:.2f}" if size in ratios else "-" for size in sizes]
        took = sorted({f"{1e3 * row['recompute_seconds']:.3g}" for row in line}, key=float)
        span = took[0] if len(took) == 1 else f"{took[0]} to {took[-1]}"
        lines.append(f"| {source} | {layout} | {tokens} | {span} | {' | '.join(cells)} | {crossover(line)} |")
    return [*lines, ""]


def report_lines(report: Report) -> list[str]:
    """All there is in a report."""
    lines = link_lines(report) if "copies" in report else []
    if "block_sizes" in report:
        lines += block_size_lines(report["block_sizes"], report["block_sizes_of"])
    return lines


def draw_link(report: Report, path: pathlib.Path) -> None:
    """Copies in the first row of panels, simulated and measured block sizes in those below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    rows = report.get("block_sizes", ())
    titles = {"copies": "copies"} if "copies" in report else {}
    titles |= {source: source for source in dict.fromkeys(row["source"] for row in rows)}
    lengths = sorted({row["tokens"] for row in (*rows, *report.get("copies", ()))})
    figure, panels = pyplot.subplots(
        len(titles),
        len(lengths),
        figsize=(3.7 * len(lengths), 0.6 + 3.1 * len(titles)),
        squeeze=False,
        layout="constrained",
    )
    for line, part in zip(panels, titles, strict=True):
        for panel, tokens in zip(line, lengths, strict=True):
            if part == "copies":
                _draw_copies(panel, report, tokens)
            else:
                _draw_block_sizes(panel, rows, part, tokens)
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xlabel("block size [tokens]")
            sizes = sorted({row["block_size"] for row in (*rows, *report.get("copies", ()))})
            panel.set_xticks(sizes, map(str, sizes))
            panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            panel.minorticks_off()
        line[0].set_ylabel("time [ms]")
        line[-1].legend(fontsize=7)
    figure.suptitle(
        "KV of one sequence: copied to pinned host memory and back, swapped, or recomputed "
        f"(measured on: {report['hardware']['device']})"
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_copies(panel: Any, report: Report, tokens: int) -> None:
    fits = {
        (row["layout"], row["direction"]): LinkCosts(
            row["latency_seconds"], row["piece_seconds"], row["bytes_per_second"] or float("inf")
        )
        for row in report["fits"]
    }
    for layout, (direction, marker) in itertools.product(LAYOUTS, (("out", "o"), ("in", "s"))):
        found = [
            row
            for row in report["copies"]
            if (row["layout"], row["direction"], row["tokens"]) == (layout, direction, tokens)
        ]
        sizes = [row["block_size"] for row in found]
        middle = [1e3 * row["seconds"]["median"] for row in found]
        ends = [
            [1e3 * abs(row["seconds"]["median"] - row["seconds"][end]) for row in found]
            for end in ("min", "max")
        ]
        style = {"color": COLORS[layout], "alpha": 1.0 if direction == "out" else 0.5}
        panel.errorbar(
            sizes, middle, ends, fmt=marker, capsize=2, label=f"layout {layout}, {direction}", **style
        )
        costs = fits[layout, direction]
        fitted = [1e3 * costs.seconds(row["num_bytes"], row["num_pieces"]) for row in found]
        panel.plot(sizes, fitted, "--", **style)
    panel.set_title(f"one copy of {tokens} tokens (dashed: fitted)", fontsize=9)


def _draw_block_sizes(panel: Any, rows: Sequence[Mapping[str, Any]], source: str, tokens: int) -> None:
    for layout in LAYOUTS:
        line = lines_of(rows).get((source, layout, tokens), [])
        sizes = [row["block_size"] for row in line]
        swaps = [1e3 * row["swap_seconds"] for row in line]
        panel.plot(sizes, swaps, "o-", color=COLORS[layout], label=f"swap out and in, layout {layout}")
    recompute = [1e3 * row["recompute_seconds"] for row in line]
    panel.plot(sizes, recompute, "k^-", label="recompute (one prefill)")
    panel.set_title(f"{source}, {tokens} tokens", fontsize=9)
