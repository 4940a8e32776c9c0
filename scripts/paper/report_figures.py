"""Figs. 3 and 4: throughput against the output length, and turnaround against the batch limit."""

from __future__ import annotations

import itertools
import pathlib
import statistics
from collections.abc import Mapping, Sequence

from sweep.options import in_words

from paper import plots, published
from paper.cells import BATCH_LIMITS, OUTPUT_LENGTHS
from paper.report import RATE, TURNAROUND, Cells, Row, memory_bound, span

PUBLISHED_CHANGES = {"vllm": published.FIG4_CHANGE, "vllm_swap": published.FIG4_CHANGE_SWAP}


def fig3(rows: Sequence[Row], path: pathlib.Path) -> list[str]:
    """Throughput against the output length."""
    cells = Cells(rows).of(part="fig3")
    arrivals = cells.values("arrivals")[0]
    least = (
        min(
            (
                cells.median(RATE, model=m, dataset=d, preset="adaptive", max_output_len=n)
                / max(
                    cells.median(RATE, model=m, dataset=d, preset=p, max_output_len=n)
                    for p in ("vllm", "vllm_v1")
                ),
                f"{m} {d} at {n}",
            )
            for (m, d), n in itertools.product(cells.groups(), OUTPUT_LENGTHS)
        )
        if {"adaptive", "vllm", "vllm_v1"} <= set(cells.values("preset"))
        else None
    )
    plots.grid(
        cells,
        path,
        x=("max_output_len", "output tokens of every request"),
        y=(RATE, "output tokens/s"),
        title=f"Throughput against output length (Fig. 3), {in_words(arrivals)}",
        values=OUTPUT_LENGTHS,
        marks=plots.table3_marks(cells),
    )
    lines = [
        "## Throughput against the output length (Fig. 3)",
        "",
        f"![Throughput against the output length, four models and three data sets]({path.name})",
        "",
        f"Arrivals: {in_words(arrivals)}. Stars: the paper's Table 3, times our `vllm`. Its text says up to "
        f"{published.FIG3_AT_256} times vLLM at 256 tokens. All figures are in the appendix.",
        "",
    ]
    if least is not None:
        lines += [
            f"`adaptive` over the better of `vllm` and `vllm_v1` is least, {least[0]:.3f}, for {least[1]} "
            "tokens.",
            "",
        ]
    return lines + _fig3_at_most(cells)


def _fig3_at_most(cells: Cells) -> list[str]:
    """Ratios at the longest output, of which the paper speaks, and what bounds them."""
    presets = [one for one in ("paper", "paper_strategy", "adaptive") if one in cells.values("preset")]
    if not presets or "vllm" not in cells.values("preset"):
        return []
    length = OUTPUT_LENGTHS[-1]
    lines = [
        f"At {length} tokens, tokens/s over those of `vllm`; the paper says up to {published.FIG3_AT_256}:",
        "",
        f"| model | data | {' | '.join(presets)} | the most memory allows | vllm: recomputing | its decode "
        "batch |",
        "|---|---|" + "---:|" * (len(presets) + 3),
    ]
    most, bounds, shares, batches = (0.0, ""), [], [], []
    for model, dataset in cells.groups():
        group = cells.of(model=model, dataset=dataset, max_output_len=length)
        base = group.of(preset="vllm")
        shown = []
        for preset in presets:
            ratio = group.median(RATE, preset=preset) / base.median(RATE)
            most = max(most, (ratio, f"`{preset}`, {model} {dataset}"))
            shown.append(f"{ratio:.2f}")
        bound = memory_bound(base, length)
        if bound is not None:
            bounds.append(bound / base.median(RATE))
        shares.append(
            statistics.median(row["seconds_spent"]["recompute"] / row["seconds"] for row in base.rows)
        )
        batches.append(base.median("mean_decode_batch"))
        shown += ["-" if bound is None else f"{bounds[-1]:.2f}", f"{shares[-1]:.0%}", f"{batches[-1]:.1f}"]
        lines.append(f"| {model} | {dataset} | {' | '.join(shown)} |")
    allowed = f", and memory allows at most {span(bounds, '.2f')} times its tokens/s" if bounds else ""
    return [
        *lines,
        "",
        f"The most is {most[0]:.2f} ({most[1]}). Why: `vllm` spends {span(shares, '.0%')} of its time at "
        f"{length} tokens on recomputing, so that recomputing nothing would by itself give "
        f"{1 / (1 - max(shares)):.2f} at most; it decodes {span(batches, '.0f')} requests at a "
        f"time{allowed}.",
        "",
    ]


def fig4(rows: Sequence[Row], folder: pathlib.Path) -> list[str]:
    """Weighted turnaround against the batch limit, one figure for each arrival process."""
    cells = Cells(rows).of(part="fig4")
    if not cells.rows:
        return ["No batch limit of fig4 is within --max-num-seqs.", ""]
    limits = tuple(limit for limit in BATCH_LIMITS if limit in cells.values("max_num_seqs"))
    low, high = published.FIG4_CHANGE
    lines = [
        "## Mean weighted turnaround against the batch limit (Fig. 4)",
        "",
        "(finish - sent) / (finish - first scheduled), mean over requests; 1 is no waiting. The paper's is "
        f"{-high:.0%} to {-low:.0%} lower than vLLM's at limits 64 and 128, the shaded range, and "
        f"{-published.FIG4_CHANGE_SWAP[1]:.0%} to {-published.FIG4_CHANGE_SWAP[0]:.0%} lower than vLLM_s's. "
        "The measure rewards whoever starts every request early and ends it late, so the mean time from "
        "sending to the end is given beside it.",
        "",
    ]
    for arrivals in cells.values("arrivals"):
        of_arrivals = cells.of(arrivals=arrivals)
        is_first = arrivals == cells.values("arrivals")[0]
        path = folder / ("fig4.png" if is_first else f"fig4-{arrivals.replace(':', '-')}.png")
        plots.grid(
            of_arrivals,
            path,
            x=("max_num_seqs", "batch limit (most requests running)"),
            y=(TURNAROUND, "mean weighted turnaround"),
            title=f"Weighted turnaround against the batch limit (Fig. 4), {in_words(arrivals)}",
            values=limits,
            is_log=True,
            bands=plots.fig4_bands(of_arrivals),
        )
        lines += [
            f"### {in_words(arrivals).capitalize()}",
            "",
            f"![Weighted turnaround against the batch limit]({path.name})",
            "",
            *_fig4_changes(of_arrivals, limits),
        ]
    return lines


def _fig4_changes(cells: Cells, limits: Sequence[int]) -> list[str]:
    """Against `vllm` and `vllm_swap`, at the limits of which the paper speaks."""
    shown = [limit for limit in published.FIG4_LIMITS if limit in limits]
    known = cells.values("preset")
    comparisons = [
        (preset, base, limit, value)
        for base, presets in (
            ("vllm", ("paper", "paper_strategy", "adaptive")),
            ("vllm_swap", ("paper", "adaptive")),
        )
        for preset, limit in itertools.product(presets, shown)
        for value in (TURNAROUND, "mean_latency_seconds")
        if {preset, base} <= set(known) and (base == "vllm" or value == TURNAROUND)
    ]
    if not comparisons:
        return []
    columns = [
        "latency"
        if value != TURNAROUND
        else f"{preset} at {limit}: turnaround" + " over vllm_swap" * (base != "vllm")
        for preset, base, limit, value in comparisons
    ]
    lines = ["| model | data | " + " | ".join(columns) + " |", "|---|---|" + "---:|" * len(columns)]
    outside: dict[str, list[str]] = {"vllm": [], "vllm_swap": []}
    changes: dict[str, list[float]] = {TURNAROUND: [], "mean_latency_seconds": []}
    for model, dataset in cells.groups():
        texts = []
        for preset, base, limit, value in comparisons:
            of_limit = cells.of(model=model, dataset=dataset, max_num_seqs=limit)
            change = of_limit.median(value, preset=preset) / of_limit.median(value, preset=base) - 1
            texts.append(f"{change:+.0%}")
            if preset != "paper":
                continue
            if base == "vllm":
                changes[value].append(change)
            low, high = PUBLISHED_CHANGES[base]
            if value == TURNAROUND and not low - 5e-3 <= change <= high + 5e-3:
                outside[base].append(f"{model} {dataset} at {limit} ({change:+.0%})")
        lines.append(f"| {model} | {dataset} | " + " | ".join(texts) + " |")
    lines.append("")
    for base, (low, high) in PUBLISHED_CHANGES.items():
        if {"paper", base} <= set(known):
            where = ", ".join(outside[base]) or "nowhere"
            lines += [
                f"`paper` outside the published range against `{base}` ({low:+.0%} to {high:+.0%}): {where}.",
                "",
            ]
    if changes[TURNAROUND]:
        lines += [_why_turnaround(cells, shown, changes), ""]
    return lines


def _why_turnaround(cells: Cells, limits: Sequence[int], changes: Mapping[str, Sequence[float]]) -> str:
    """What the limits do, and what of the change is in the start of requests alone."""

    def batches(preset: str, limit: int) -> str:
        of_limit = cells.of(preset=preset, max_num_seqs=limit)
        found = [of_limit.median("mean_decode_batch", model=m, dataset=d) for m, d in cells.groups()]
        return f"{span(found, '.0f')} at limit {limit}"

    running = "; ".join(
        f"`{preset}` " + ", ".join(batches(preset, limit) for limit in limits)
        for preset in ("vllm", "vllm_swap", "paper")
        if preset in cells.values("preset")
    )
    return (
        f"Why: requests that decode at a time: {running}. Where that is below the limit, memory binds and "
        f"not the limit. `paper`'s turnaround changes by {span(changes[TURNAROUND], '+.0%')} and its mean "
        f"latency by {span(changes['mean_latency_seconds'], '+.0%')}: what lies between is when a request is "
        "first scheduled, not when it ends."
        + (
            " `vllm_swap` starts only what the host pool can hold: its requests wait the longest for that."
            if "vllm_swap" in cells.values("preset")
            else ""
        )
    )
