"""The Markdown report of the evaluation, and its plots."""

from __future__ import annotations

import itertools
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.predictors.base import COST_KINDS
from jaxllm.predictors.fit_report import FitReport
from paper.cells import BATCH_LIMITS, BLOCK_SIZE, NUM_GPU_BLOCKS, NUM_HOST_BLOCKS, OUTPUT_LENGTHS, OVERLAP

Row = Mapping[str, Any]

# Table 3 of the paper: speed-up of AdaptiveLLM over vLLM and over vLLM_s, by model and data set.
PAPER_TABLE3 = {
    "opt-13b": {"chatbot": (1.38, 2.46), "alpaca": (1.36, 2.55), "summary": (1.15, 2.50)},
    "opt-30b": {"chatbot": (1.27, 1.98), "alpaca": (1.22, 1.99), "summary": (1.11, 1.64)},
    "llama-13b": {"chatbot": (1.28, 2.28), "alpaca": (1.40, 2.37), "summary": (1.17, 2.12)},
    "llama-32.5b": {"chatbot": (1.28, 1.95), "alpaca": (1.23, 2.13), "summary": (1.09, 2.18)},
}
# Sections 4.5 and 4.6 and Fig. 5 of the paper.
PAPER_RECOMPUTE_MAPE = "1.76 % (OPT), 1.30 % (Llama)"
PAPER_SWAP_MAPE = "1.5/1.0 % in/out (Llama-13B), 1.1/1.2 % (Llama-32.5B), under 4 % together"
PAPER_OVERHEAD = "prediction 0.1-1 % of run time, scheduling 0.2 ms a step"
PUBLISHED = tuple(name for name in OVERLAP if name != "adaptive")


def median_of(rows: Sequence[Row], value: str, **where: Any) -> float:
    """Median over seeds of the cells that match."""
    found = [row[value] for row in rows if all(row[name] == wanted for name, wanted in where.items())]
    if not found:
        raise KeyError(f"no cell with {where}")
    return statistics.median(found)


def names(rows: Sequence[Row], field: str) -> list[Any]:
    """The values of a field, in the order in which they come."""
    return list(dict.fromkeys(row[field] for row in rows))


def table3(rows: Sequence[Row]) -> list[str]:
    """The 24 ratios of each output rule beside the paper's, with what the time went to."""
    rows = [row for row in rows if row["part"] == "table3"]
    lines = ["## Speed-up at 64 output tokens (Table 3)", ""]
    least = least_v1 = float("inf")
    for outputs in names(rows, "outputs"):
        lines += [
            f"Outputs: {'all of 64 tokens' if outputs == 'max' else 'uniform in 16 to 64 tokens'}.",
            "",
            "| model | data | vLLM: paper's | preset paper | preset adaptive | vLLM_s: paper's | "
            "preset paper | preset adaptive | over vLLM_s with both pools: paper | adaptive | "
            "over vllm_v1: paper | adaptive |",
            "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for model, dataset in itertools.product(names(rows, "model"), names(rows, "dataset")):
            where = {"model": model, "dataset": dataset, "outputs": outputs}
            rate = {
                preset: median_of(rows, "output_tokens_per_second", preset=preset, **where)
                for preset in OVERLAP
            }
            least = min(least, rate["adaptive"] / rate["vllm"])
            least_v1 = min(least_v1, rate["adaptive"] / rate["vllm_v1"])
            theirs = PAPER_TABLE3.get(model, {}).get(dataset)
            cells = []
            for place, baseline in enumerate(("vllm", "vllm_swap", "vllm_swap_both", "vllm_v1")):
                if place < 2:
                    cells.append("-" if theirs is None else f"{theirs[place]:.2f}")
                cells += [f"{rate[preset] / rate[baseline]:.2f}" for preset in ("paper", "adaptive")]
            lines.append(f"| {model} | {dataset} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += [
        f"The least of `adaptive` over `vllm` is {least:.3f}, over `vllm_v1` {least_v1:.3f}.",
        "",
        "Where the time goes, seconds (outputs of 64 tokens, first seed):",
        "",
        "| model | data | preset | prefill | recompute | decode | swap stall | decode batch | preemptions "
        "(swapped) |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    first_seed = rows[0]["seed"]
    for row in rows:
        if row["outputs"] == "max" and row["seed"] == first_seed:
            spent = row["seconds_spent"]
            lines.append(
                f"| {row['model']} | {row['dataset']} | {row['preset']} | {spent['prefill']:.1f} | "
                f"{spent['recompute']:.1f} | {spent['decode']:.1f} | {spent['swap_stall']:.1f} | "
                f"{row['mean_decode_batch']:.1f} | {row['num_preemptions']} ({row['num_swaps']}) |"
            )
    return [*lines, "", *ratios_split(rows)]


def ratios_split(rows: Sequence[Row]) -> list[str]:
    """What makes each ratio, from what the runs of the first seed spent their time on."""
    lines = [
        "What each ratio consists of (first seed): 1 plus the seconds saved on each part over the seconds "
        "that the preset took. Recompute: prefills of dropped tokens. Stalls: waiting for copies. Batch: "
        "decode steps, fewer the larger the batch. Other: first prefills, and on an engine the host.",
        "",
    ]
    first_seed = rows[0]["seed"]
    heads = " | ".join(f"{preset} | recompute | stalls | batch | other" for preset in ("paper", "adaptive"))
    for outputs in names(rows, "outputs"):
        lines += [
            f"Outputs: {'all of 64 tokens' if outputs == 'max' else 'uniform in 16 to 64 tokens'}.",
            "",
            f"| model | data | over | {heads} |",
            "|---|---|---|" + "---:|" * 10,
        ]
        found = {
            (row["model"], row["dataset"], row["preset"]): row
            for row in rows
            if row["outputs"] == outputs and row["seed"] == first_seed
        }
        for model, dataset in itertools.product(names(rows, "model"), names(rows, "dataset")):
            for baseline in ("vllm", "vllm_swap"):
                theirs = found[model, dataset, baseline]
                cells = []
                for preset in ("paper", "adaptive"):
                    ratio, *parts = split_ratio(found[model, dataset, preset], theirs)
                    cells += [f"{ratio:.2f}", *(f"{round(part, 2) + 0.0:+.2f}" for part in parts)]
                lines.append(f"| {model} | {dataset} | {baseline} | {' | '.join(cells)} |")
        lines.append("")
    return lines


def split_ratio(ours: Row, theirs: Row) -> list[float]:
    """The ratio of speeds, and what recompute, stalls, the batch and the rest add to 1."""
    ratio = ours["output_tokens_per_second"] / theirs["output_tokens_per_second"]
    parts = [
        (theirs["seconds_spent"][part] - ours["seconds_spent"][part]) / ours["seconds"]
        for part in ("recompute", "swap_stall", "decode")
    ]
    return [ratio, *parts, ratio - 1.0 - sum(parts)]


def series(part: str) -> tuple[str, str, str, tuple[int, ...]]:
    """Title, the cell's field on the x axis, the value on the y axis, and the x values."""
    if part == "fig3":
        title, value = "Throughput against the output length (Fig. 3)", "output_tokens_per_second"
        return title, "max_output_len", value, OUTPUT_LENGTHS
    title, value = "Mean weighted turnaround against the batch limit (Fig. 4)", "mean_weighted_turnaround"
    return title, "max_num_seqs", value, BATCH_LIMITS


def figure(rows: Sequence[Row], part: str, path: pathlib.Path) -> list[str]:
    """A table and a plot of one figure."""
    rows = [row for row in rows if row["part"] == part]
    if not rows:
        return [f"No batch limit of {part} is within --max-num-seqs.", ""]
    title, x_name, y_name, values = series(part)
    values = tuple(value for value in values if value in names(rows, x_name))
    model = rows[0]["model"]
    lines = [f"## {title}", "", f"{model}, outputs all of the maximum; `{path.name}`.", ""]
    lines += ["| data | preset | " + " | ".join(map(str, values)) + " |", "|---|---|" + "---:|" * len(values)]
    curves: dict[tuple[str, str], list[float]] = {}
    datasets = names(rows, "dataset")
    presets = [preset for preset in OVERLAP if preset in names(rows, "preset")]
    for dataset, preset in itertools.product(datasets, presets):
        curve = [
            median_of(rows, y_name, dataset=dataset, preset=preset, **{x_name: value}) for value in values
        ]
        curves[dataset, preset] = curve
        digits = 2 if part == "fig4" or max(curve) < 100 else 0
        lines.append(f"| {dataset} | {preset} | " + " | ".join(f"{y:.{digits}f}" for y in curve) + " |")
    if part == "fig4":
        compared = [
            (preset, base)
            for base in ("vllm", "vllm_v1")
            for preset in ("paper", "adaptive")
            if {preset, base} <= set(presets)
        ]
        for dataset, (preset, base) in itertools.product(datasets, compared):
            pairs = zip(curves[dataset, preset], curves[dataset, base], strict=True)
            changes = [f"{ours / one - 1:+.0%}" for ours, one in pairs]
            lines.append(f"| {dataset} | {preset} against {base} | " + " | ".join(changes) + " |")
    draw(curves, datasets, presets, values, x_name, y_name, path)
    return [*lines, ""]


def draw(
    curves: Mapping[tuple[str, str], Sequence[float]],
    datasets: Sequence[str],
    presets: Sequence[str],
    values: Sequence[int],
    x_name: str,
    y_name: str,
    path: pathlib.Path,
) -> None:
    """One panel for each data set."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width = 11 / 3 * len(datasets)
    figure, panels = pyplot.subplots(
        1, len(datasets), figsize=(width, 3.4), layout="constrained", squeeze=False
    )
    for panel, dataset in zip(panels[0], datasets, strict=True):
        for preset in presets:
            panel.plot(values, curves[dataset, preset], marker="o", label=preset)
        panel.set_xscale("log", base=2)
        panel.set_xticks(values, map(str, values))
        panel.set_title(dataset)
        panel.set_xlabel(x_name)
        panel.set_ylim(bottom=0)
    panels[0][0].set_ylabel(y_name)
    panels[0][-1].legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def errors(fits: Mapping[str, FitReport], facts: str) -> list[str]:
    """Prediction errors on samples of a real profile."""
    lines = [
        "## Prediction errors (Section 4.5, Fig. 5)",
        "",
        f"Measured, not simulated: {facts}. Eight regressors x degrees 1 to 10, fitted on 64 % of the "
        "samples, chosen on 16 %, reported on the 20 % nothing was fitted to.",
        "",
        "| kind | regressor | degree | MAPE | median | largest | test samples |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for kind in COST_KINDS:
        if kind in fits:
            found = fits[kind]
            test = found.test
            lines.append(
                f"| {kind} | {found.chosen.regressor} | {found.chosen.degree} | {test.mape:.2%} | "
                f"{test.median:.2%} | {test.largest:.0%} | {found.num_test} |"
            )
    lines += ["", f"The paper's: recompute {PAPER_RECOMPUTE_MAPE}; swaps {PAPER_SWAP_MAPE}.", ""]
    return lines


def overhead(rows: Sequence[Row], is_simulated: bool) -> list[str]:
    """What scheduling and predicting take."""
    per_step = [1e6 * row["scheduling_seconds"] / row["num_steps"] for row in rows]
    lines = [
        "## Overhead (Section 4.6)",
        "",
        f"Scheduling took {statistics.median(per_step):.0f} microseconds of this machine's time a step "
        f"(median of the runs; the most was {max(per_step):.0f}).",
    ]
    if is_simulated:
        lines.append("`scripts/bench_scheduler.py` times decisions; `--executor jax` their share of a run.")
    else:
        shares = [row["prediction_seconds"] / row["seconds"] for row in rows]
        lines.append(
            f"Decisions and comparing predictions with measurements took {statistics.median(shares):.3%} of "
            f"the run time (most {max(shares):.3%})."
        )
    return [*lines, "", f"The paper's: {PAPER_OVERHEAD}.", ""]


def introduction(
    command: str, facts: str, seeds: Sequence[int], requests: int, max_num_seqs: int
) -> list[str]:
    """What was run."""
    return [
        "# AdaptiveLLM's evaluation",
        "",
        f"Command: `{command}`. {requests} requests, all present at time 0; seeds {list(seeds)}, "
        f"medians over them. {NUM_GPU_BLOCKS} device and {NUM_HOST_BLOCKS} host blocks of {BLOCK_SIZE} "
        f"tokens, at most {max_num_seqs} requests at once.",
        "",
        facts,
        "",
        "`vllm` decides as vLLM 0.2.5; `vllm_swap` is vLLM_s with batches whose worst case fits the host "
        "pool, `vllm_swap_both` the same with host and device pool together less the largest request; "
        "`vllm_v1` decides as today's vLLM, in mixed iterations; "
        "`paper` is Algorithms 1 and 2; `adaptive` is this engine's own.",
        "",
    ]
