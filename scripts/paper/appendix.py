"""The long tables behind the report."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from sweep.options import in_words

from paper import published
from paper.cells import OUTPUTS, READINGS
from paper.report import OUTPUT_NAMES, RATE, TURNAROUND, Cells, Row
from paper.report_readings import change_and_ratio


def readings(rows: Sequence[Row]) -> list[str]:
    """Every cell of every reading."""
    cells = Cells(rows).of(part="readings")
    groups = cells.groups()
    lines = [
        "## Readings of Table 3, every cell",
        "",
        "Tokens/s over `vllm` (change of weighted turnaround).",
        "",
    ]
    for outputs in OUTPUTS:
        heads = " | ".join(f"{model} {dataset}" for model, dataset in groups)
        lines += [
            f"Outputs: {OUTPUT_NAMES[outputs]}.",
            "",
            f"| reading | {heads} |",
            "|---|" + "---:|" * len(groups),
        ]
        theirs = [published.TABLE3.get(model, {}).get(dataset) for model, dataset in groups]
        lines.append(
            "| the paper's | " + " | ".join("-" if one is None else f"{one[0]:.2f}" for one in theirs) + " |"
        )
        for reading in READINGS:
            found = change_and_ratio(cells, reading, outputs)
            shown = [f"{ratio:.2f} ({change:+.0%})" for ratio, change in (found[group] for group in groups)]
            lines.append(f"| {reading.name} | {' | '.join(shown)} |")
        lines.append("")
    return lines


def figures(rows: Sequence[Row]) -> list[str]:
    """The numbers that Figs. 3 and 4 are drawn from."""
    lines: list[str] = []
    for part, field, value, title in (
        ("fig3", "max_output_len", RATE, "Fig. 3: output tokens/s"),
        ("fig4", "max_num_seqs", TURNAROUND, "Fig. 4: mean weighted turnaround"),
    ):
        of_part = Cells(rows).of(part=part)
        for arrivals in of_part.values("arrivals"):
            cells = of_part.of(arrivals=arrivals)
            columns = cells.values(field)
            lines += [
                f"## {title}, {in_words(arrivals)}",
                "",
                "| model | data | preset | " + " | ".join(map(str, columns)) + " |",
                "|---|---|---|" + "---:|" * len(columns),
            ]
            for (model, dataset), preset in itertools.product(cells.groups(), cells.values("preset")):
                group = cells.of(model=model, dataset=dataset, preset=preset)
                numbers = [group.median(value, **{field: column}) for column in columns]
                digits = 2 if part == "fig4" or max(numbers) < 100 else 0
                shown = " | ".join(f"{number:.{digits}f}" for number in numbers)
                lines.append(f"| {model} | {dataset} | {preset} | {shown} |")
            lines.append("")
    return lines


def time_spent(rows: Sequence[Row]) -> list[str]:
    """Where the time of Table 3's runs goes, and what that makes of each ratio."""
    cells = Cells(rows).of(part="table3")
    lines = [
        "## Where the time of Table 3 goes",
        "",
        "Seconds of the first seed; the ratio is 1 plus the seconds saved on each part over the seconds that "
        "the preset took. Recompute: prefills of dropped tokens. Stalls: waiting for copies. Batch: decode "
        "steps, fewer the larger the batch. Other: first prefills, waiting for requests, and on an engine "
        "the host.",
        "",
    ]
    first_seed = cells.rows[0]["seed"]
    for arrivals, outputs in itertools.product(cells.values("arrivals"), cells.values("outputs")):
        of_setting = cells.of(arrivals=arrivals, outputs=outputs, seed=first_seed)
        lines += [
            f"Arrivals: {in_words(arrivals)}. Outputs: {OUTPUT_NAMES[outputs]}.",
            "",
            "| model | data | preset | prefill | recompute | decode | stall | decode batch | preempted "
            "(swapped) | over vllm | recompute | stalls | batch | other |",
            "|---|---|---|" + "---:|" * 11,
        ]
        for (model, dataset), preset in itertools.product(cells.groups(), cells.values("preset")):
            row = of_setting.of(model=model, dataset=dataset, preset=preset).rows[0]
            base = of_setting.of(model=model, dataset=dataset, preset="vllm").rows[0]
            spent = row["seconds_spent"]
            ratio, *parts = split_ratio(row, base)
            lines.append(
                f"| {model} | {dataset} | {preset} | {spent['prefill']:.1f} | {spent['recompute']:.1f} | "
                f"{spent['decode']:.1f} | {spent['swap_stall']:.1f} | {row['mean_decode_batch']:.1f} | "
                f"{row['num_preemptions']} ({row['num_swaps']}) | {ratio:.2f} | "
                + " | ".join(f"{round(part, 2) + 0.0:+.2f}" for part in parts)
                + " |"
            )
        lines.append("")
    return lines


def split_ratio(ours: Row, theirs: Row) -> list[float]:
    """The ratio of speeds, and what recompute, stalls, the batch and the rest add to 1."""
    ratio = ours[RATE] / theirs[RATE]
    parts = [
        (theirs["seconds_spent"][part] - ours["seconds_spent"][part]) / ours["seconds"]
        for part in ("recompute", "swap_stall", "decode")
    ]
    return [ratio, *parts, ratio - 1.0 - sum(parts)]


def swapping(rows: Sequence[Row]) -> list[str]:
    """vLLM_s by its other rule."""
    cells = Cells(rows).of(part="swap_both")
    lines = [
        "## vLLM_s by another rule",
        "",
        "`vllm_swap_both` starts what fits device and host pool together less the largest request, where "
        "`vllm_swap` bounds it by the host pool alone.",
        "",
        "| model | data | outputs | paper's over vLLM_s | adaptive over vllm_swap | over vllm_swap_both |",
        "|---|---|---|---:|---:|---:|",
    ]
    for (model, dataset), outputs in itertools.product(cells.groups(), cells.values("outputs")):
        group = cells.of(model=model, dataset=dataset, outputs=outputs)
        ours = group.median(RATE, preset="adaptive")
        theirs = published.TABLE3.get(model, {}).get(dataset)
        lines.append(
            f"| {model} | {dataset} | {OUTPUT_NAMES[outputs]} | "
            f"{'-' if theirs is None else f'{theirs[1]:.2f}'} | "
            f"{ours / group.median(RATE, preset='vllm_swap'):.2f} | "
            f"{ours / group.median(RATE, preset='vllm_swap_both'):.2f} |"
        )
    return [*lines, ""]
