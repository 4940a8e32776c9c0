"""Table 3 under every reading of the paper's text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from paper import published
from paper.cells import OUTPUTS, READINGS, Reading
from paper.report import OUTPUT_NAMES, RATE, TURNAROUND, Cells, Row, span

WANTED = {"short": 1.20, "summary": 1.05}
"""What the strategy alone should reach over `vllm`, if the paper is read right."""


def change_and_ratio(
    cells: Cells, reading: Reading, outputs: str
) -> dict[tuple[str, str], tuple[float, float]]:
    """Tokens/s over those of `vllm`, and the change of turnaround, by model and data set."""
    of_setting = cells.of(arrivals=reading.arrivals, outputs=outputs, overhead=reading.overhead)
    ours = of_setting.of(preset=reading.preset, layout=reading.layout, overlap=reading.overlap)
    theirs = of_setting.of(preset="vllm")
    found = {}
    for model, dataset in cells.groups():
        group = {"model": model, "dataset": dataset}
        ratio = ours.median(RATE, **group) / theirs.median(RATE, **group)
        change = ours.median(TURNAROUND, **group) / theirs.median(TURNAROUND, **group) - 1
        found[model, dataset] = ratio, change
    return found


def readings(rows: Sequence[Row]) -> list[str]:
    """Table 3 once more, under every reading of the text."""
    cells = Cells(rows).of(part="readings")
    lines = [
        "## Readings of Table 3",
        "",
        "What the paper's own algorithm gives over `vllm` under each setting that its text allows. Least and "
        "most over the four models, and over Chatbot and Alpaca (short); the paper prints "
        f"{span([t[d][0] for t in published.TABLE3.values() for d in ('chatbot', 'alpaca')], '.2f')} on "
        f"short prompts, {span([t['summary'][0] for t in published.TABLE3.values()], '.2f')} on Summary, "
        "and a weighted turnaround 20 to 40 % lower (Fig. 4). At most "
        f"{cells.values('max_num_seqs')[0]} requests run, the larger limit of Fig. 4 or what --max-num-seqs "
        "leaves of it. The appendix has all cells.",
        "",
        "| reading | why | outputs | short | Summary | turnaround, short | Summary | largest difference from "
        "the paper's |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    reached: dict[str, list[str]] = {name: [] for name in WANTED}
    best = dict.fromkeys(WANTED, (0.0, ""))
    for reading, outputs in itertools.product(READINGS, OUTPUTS):
        found = change_and_ratio(cells, reading, outputs)
        values = {
            "short": [value for (_, dataset), value in found.items() if dataset != "summary"],
            "summary": [value for (_, dataset), value in found.items() if dataset == "summary"],
        }
        columns = [
            span([value[place] for value in of_data], form) if of_data else "-"
            for place, form in ((0, ".2f"), (1, "+.0%"))
            for of_data in values.values()
        ]
        off = {
            group: ratio / published.TABLE3[group[0]][group[1]][0] - 1
            for group, (ratio, _) in found.items()
            if group[0] in published.TABLE3
        }
        furthest = max(off.items(), key=lambda one: abs(one[1]), default=None)
        differs = "-" if furthest is None else f"{furthest[1]:+.0%} ({' '.join(furthest[0])})"
        lines.append(
            f"| {reading.name} | {reading.why} | {OUTPUT_NAMES[outputs]} | "
            + " | ".join(columns)
            + f" | {differs} |"
        )
        name = f"{reading.full_name} ({OUTPUT_NAMES[outputs]})"
        for what, of_data in values.items():
            least = min((value[0] for value in of_data), default=0.0)
            best[what] = max(best[what], (least, name))
            if least >= WANTED[what] and reading.preset == "paper_strategy":
                reached[what].append(name)
    lines += ["", *nearest(cells)]
    for what, title in (("short", "short prompts"), ("summary", "Summary")):
        said = "; ".join(reached[what]) or "none of these readings"
        lines += [
            f"The strategy alone gives {WANTED[what]:.2f} or more in every cell of {title} under: {said}. "
            f"The most of all readings, in its least cell: {best[what][0]:.2f}, {best[what][1]}.",
            "",
        ]
    shares = [
        row["seconds_spent"]["recompute"] / row["seconds"]
        for row in cells.of(preset="vllm", dataset="summary").rows
    ]
    if shares:
        lines += [
            f"Why not more on Summary: `vllm` spends {max(shares):.1%} of its time there on recomputing, at "
            f"most, so that a choice of action which made that free would give {1 / (1 - max(shares)):.2f}. "
            "What the paper prints must come from the order of requests.",
            "",
        ]
    return lines


def nearest(cells: Cells) -> list[str]:
    """For each model and data set the reading that is nearest to the paper's ratio, and to its turnaround."""
    low, high = published.FIG4_CHANGE
    found = {
        f"{reading.full_name} ({OUTPUT_NAMES[outputs]})": change_and_ratio(cells, reading, outputs)
        for reading, outputs in itertools.product(READINGS, OUTPUTS)
    }
    lines = [
        "The reading nearest to the paper's ratio in each cell:",
        "",
        "| model | data | paper's | nearest reading | its ratio | difference |",
        "|---|---|---:|---|---:|---:|",
    ]
    for model, dataset in cells.groups():
        theirs = published.TABLE3.get(model, {}).get(dataset)
        if theirs is None:
            continue
        ratios = {name: values[model, dataset][0] for name, values in found.items()}
        name = min(ratios, key=lambda one: abs(ratios[one] / theirs[0] - 1))
        off = ratios[name] / theirs[0] - 1
        lines.append(f"| {model} | {dataset} | {theirs[0]:.2f} | {name} | {ratios[name]:.2f} | {off:+.0%} |")
    lines += [
        "",
        f"The same of weighted turnaround, whose published range is {low:+.0%} to {high:+.0%}; of readings "
        "inside it, that nearest to its middle:",
        "",
        "| model | data | nearest reading | its change | the range | readings inside |",
        "|---|---|---|---:|---|---:|",
    ]
    for group in cells.groups():
        changes = {name: values[group][1] for name, values in found.items()}
        name = min(changes, key=lambda one: abs(changes[one] - (low + high) / 2))
        inside = [one for one in changes.values() if low <= one <= high]
        lines.append(
            f"| {' | '.join(group)} | {name} | {changes[name]:+.0%} | {'inside' if inside else 'outside'} | "
            f"{len(inside)} of {len(changes)} |"
        )
    return [*lines, ""]
