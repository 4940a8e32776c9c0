"""The Markdown report of the evaluation: each figure and table of the paper beside ours."""

from __future__ import annotations

import itertools
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sweep.options import in_words
from sweep.simulated import BLOCK_SIZE, NUM_GPU_BLOCKS, NUM_HOST_BLOCKS

from jaxllm.workloads import DATASETS as SHAPES
from paper import plots, published
from paper.bound import most_tokens_per_second
from paper.cells import (
    BATCH_LIMITS,
    OUTPUT_LENGTHS,
    OUTPUTS,
    PRESETS,
    READINGS,
    Reading,
)

Row = Mapping[str, Any]
RATE, TURNAROUND = "output_tokens_per_second", "mean_weighted_turnaround"
OUTPUT_NAMES = {"max": "all of 64 tokens", "uniform": "uniform in 16 to 64 tokens"}
WANTED = {"short": 1.20, "summary": 1.05}
"""What the strategy alone should reach over `vllm`, if the paper is read right."""


class Cells:
    """The rows of an evaluation, by what they are of; medians over seeds."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def of(self, **where: Any) -> Cells:
        """Those that match."""
        return Cells([row for row in self.rows if all(row[name] == value for name, value in where.items())])

    def values(self, field: str) -> list[Any]:
        """The values of a field, in the order in which they come."""
        return list(dict.fromkeys(row[field] for row in self.rows))

    def median(self, value: str, **where: Any) -> float:
        """Of a value, over seeds."""
        found = [row[value] for row in self.of(**where).rows]
        if not found:
            raise KeyError(f"no cell with {where}")
        return statistics.median(found)

    def groups(self) -> list[tuple[str, str]]:
        """Models and data sets."""
        return list(itertools.product(self.values("model"), self.values("dataset")))


def introduction(command: str, facts: str, seeds: Sequence[int], requests: int) -> list[str]:
    """What was run."""
    return [
        "# AdaptiveLLM's evaluation",
        "",
        f"Command: `{command}`. {requests} requests a run; seeds {list(seeds)}, medians over them. "
        f"{NUM_GPU_BLOCKS} device and {NUM_HOST_BLOCKS} host blocks of {BLOCK_SIZE} tokens.",
        "",
        facts,
        "",
        "`vllm` decides as vLLM 0.2.5, `vllm_v1` as today's vLLM (mixed iterations); `vllm_swap` is the "
        "paper's vLLM_s; `paper_strategy` is Algorithm 1's choice of action in vLLM 0.2.5's order (Section "
        "4.3), `paper` Algorithms 1 and 2 (Section 4.4), `adaptive` this engine's own. Ratios are of output "
        "tokens a second.",
        "",
        "Where the paper contradicts itself:",
        "",
        *(f"- {line}" for line in published.CONTRADICTIONS),
        "",
    ]


def datasets() -> list[str]:
    """Table 2, and the shapes assumed for it."""
    lines = [
        "## Data sets (Table 2)",
        "",
        "The paper gives means, not shapes. Ours are assumptions (`jaxllm.workloads.lengths`); with the data "
        "sets' own files `--data chatbot=FILE` reads the prompts instead "
        "(`jaxllm.workloads.load_dataset_file`).",
        "",
        "| data | source | samples | mean tokens: paper's | ours | shape |",
        "|---|---|---:|---:|---:|---|",
    ]
    for name, (source, samples, mean) in published.TABLE2.items():
        shape = SHAPES[name]
        lines.append(
            f"| {name} | {source} | {samples:,} | {mean} | {shape.mean} | lognormal, sigma {shape.sigma}, "
            f"clipped to {shape.shortest}-{shape.longest} |"
        )
    return [*lines, ""]


def table3(rows: Sequence[Row]) -> list[str]:
    """The ratios beside the paper's, for each arrival process and output rule."""
    cells = Cells(rows).of(part="table3")
    lines = ["## Speed-up at 64 output tokens (Table 3)", ""]
    for arrivals, outputs in itertools.product(cells.values("arrivals"), cells.values("outputs")):
        where = {"arrivals": arrivals, "outputs": outputs}
        lines += [
            f"Arrivals: {in_words(arrivals)}. Outputs: {OUTPUT_NAMES[outputs]}.",
            "",
            "| model | data | vLLM: paper's | preset adaptive | preset paper | strategy alone | "
            "vLLM_s: paper's | preset adaptive | preset paper | strategy alone | "
            "over vllm_v1: adaptive | paper | strategy alone | over vLLM: the most memory allows |",
            "|---|---|" + "---:|" * 12,
        ]
        least = dict.fromkeys(("vllm", "vllm_v1", "bound"), float("inf"))
        for model, dataset in cells.groups():
            of_group = cells.of(model=model, dataset=dataset, **where)
            rate = {preset: of_group.median(RATE, preset=preset) for preset in PRESETS}
            theirs = published.TABLE3.get(model, {}).get(dataset)
            shown = []
            for place, baseline in enumerate(("vllm", "vllm_swap", "vllm_v1")):
                if place < 2:
                    shown.append("-" if theirs is None else f"{theirs[place]:.2f}")
                ratios = [rate[one] / rate[baseline] for one in ("adaptive", "paper", "paper_strategy")]
                shown += [f"{ratio:.2f}" for ratio in ratios]
                if baseline in least:
                    least[baseline] = min(least[baseline], ratios[0])
            bound = _memory_bound(of_group)
            shown.append("-" if bound is None else f"{bound / rate['vllm']:.2f}")
            if bound is not None:
                least["bound"] = min(least["bound"], rate["adaptive"] / bound)
            lines.append(f"| {model} | {dataset} | " + " | ".join(shown) + " |")
        lines += [
            "",
            f"The least of `adaptive` over `vllm` is {least['vllm']:.3f}, over `vllm_v1` "
            f"{least['vllm_v1']:.3f}"
            + (f", over what memory allows {least['bound']:.3f}." if least["bound"] < float("inf") else "."),
            "",
        ]
    lines += [*_why_differences(cells), ""]
    lines += [
        "The most memory allows: every block in use in every iteration, prompts and copies for nothing "
        "(`paper.bound`). Where outputs all have 64 tokens `adaptive` is near it: the rest is "
        "the time in which the last requests end alone, and blocks that stand empty between iterations.",
        "",
    ]
    return lines


def _why_differences(cells: Cells) -> list[str]:
    """What remains between the paper's numbers and ours, in a line for each preset."""
    model, dataset = cells.groups()[0]
    group = cells.of(model=model, dataset=dataset, arrivals=cells.values("arrivals")[0], outputs="max")
    swapped = {
        preset: f"{group.median('num_swaps', preset=preset):.0f} of "
        f"{group.median('num_preemptions', preset=preset):.0f}"
        for preset in ("paper", "paper_strategy")
    }
    return [
        f"Why `paper` stays below the paper's: of its victims {swapped['paper']} are swapped ({model}, "
        f"{dataset}, outputs of 64). The host pool is full of requests that were swapped out when they were "
        "long, and Algorithm 2 takes shorter, more urgent ones first, so that the others are recomputed. In "
        f"the order of vLLM 0.2.5 {swapped['paper_strategy']} are swapped, and the strategy pays. The paper "
        "says that its short data sets run with many swaps and few recomputes: as the strategy alone does "
        "here.",
    ]


def _memory_bound(cells: Cells) -> float | None:
    """Output tokens/s, median over seeds; None for models and data that are not the paper's."""
    found = {}
    for row in cells.rows:
        if row["model"] not in published.TABLE3 or row["data"] is not None:
            return None
        of_row = row["model"], row["dataset"], row["outputs"], row["num_requests"], row["seed"]
        found[row["seed"]] = most_tokens_per_second(*of_row)
    return statistics.median(found.values())


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


def _span(values: Sequence[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low}..{high}"


def readings(rows: Sequence[Row]) -> list[str]:
    """Table 3 once more, under every reading of the text."""
    cells = Cells(rows).of(part="readings")
    lines = [
        "## Readings of Table 3",
        "",
        "What the paper's own algorithm gives over `vllm` under each setting that its text allows. Least and "
        "most over the four models, and over Chatbot and Alpaca (short); the paper prints "
        f"{_span([t[d][0] for t in published.TABLE3.values() for d in ('chatbot', 'alpaca')], '.2f')} on "
        f"short prompts, {_span([t['summary'][0] for t in published.TABLE3.values()], '.2f')} on Summary, "
        "and a weighted turnaround 20 to 40 % lower (Fig. 4). The appendix has all cells.",
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
            _span([value[place] for value in of_data], form) if of_data else "-"
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
        name = f"{reading.name} ({OUTPUT_NAMES[outputs]})"
        for what, of_data in values.items():
            least = min((value[0] for value in of_data), default=0.0)
            best[what] = max(best[what], (least, name))
            if least >= WANTED[what] and reading.preset == "paper_strategy":
                reached[what].append(name)
    lines.append("")
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
    return lines


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
        f"{-high:.0%} to {-low:.0%} lower than vLLM's at limits 64 and 128, the shaded range. The measure "
        "rewards whoever starts every request early and ends it late, so the mean time from sending to the "
        "end is given beside it.",
        "",
    ]
    for arrivals in cells.values("arrivals"):
        of_arrivals = cells.of(arrivals=arrivals)
        path = folder / (
            "fig4.png" if arrivals == cells.values("arrivals")[0] else f"fig4-{arrivals.split(':')[0]}.png"
        )
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
    """Against `vllm`, at the limits of which the paper speaks."""
    shown = [limit for limit in published.FIG4_LIMITS if limit in limits]
    presets = [
        preset for preset in ("paper", "paper_strategy", "adaptive") if preset in cells.values("preset")
    ]
    if not (shown and presets and "vllm" in cells.values("preset")):
        return []
    columns = [
        f"{preset} at {limit}: turnaround | latency" for preset, limit in itertools.product(presets, shown)
    ]
    lines = ["| model | data | " + " | ".join(columns) + " |", "|---|---|" + "---:|" * (2 * len(columns))]
    outside = []
    low, high = published.FIG4_CHANGE
    for model, dataset in cells.groups():
        texts = []
        for preset, limit in itertools.product(presets, shown):
            of_limit = cells.of(model=model, dataset=dataset, max_num_seqs=limit)
            for value in (TURNAROUND, "mean_latency_seconds"):
                change = of_limit.median(value, preset=preset) / of_limit.median(value, preset="vllm") - 1
                texts.append(f"{change:+.0%}")
                if value == TURNAROUND and preset == "paper" and not low - 5e-3 <= change <= high + 5e-3:
                    outside.append(f"{model} {dataset} at {limit} ({change:+.0%})")
        lines.append(f"| {model} | {dataset} | " + " | ".join(texts) + " |")
    if "paper" in presets:
        lines += ["", f"`paper` outside the published range: {', '.join(outside) if outside else 'nowhere'}."]
    return [*lines, ""]


def control(rows: Sequence[Row], is_simulated: bool) -> list[str]:
    """Section 4.6: what predicting and scheduling cost."""
    cells = Cells(rows).of(part="control")
    comparing = cells.of(preset="paper, compares and recomputes")
    alone = cells.of(preset="paper, recomputes")
    lines = [
        "## Overhead (Section 4.6)",
        "",
        "The paper's control: predict both costs at each preemption, then recompute whatever they are, "
        "against not predicting. "
        + (
            "Here the device's time is simulated, so that what differs is this machine's time in the "
            "scheduler, measured: microseconds a step, and as a share of the run."
            if is_simulated
            else "Whole runs on the real engine, in seconds."
        ),
        "",
        "| model | data | not predicting | predicting | difference, share of the run | scheduling, share "
        "of the run |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for model, dataset in cells.groups():
        group = {"model": model, "dataset": dataset}
        with_, without = comparing.of(**group), alone.of(**group)
        seconds = without.median("seconds")
        field = "scheduling_seconds" if is_simulated else "seconds"
        values = [side.median(field) for side in (without, with_)]
        shown = [
            f"{1e6 * value / side.median('num_steps'):.0f} us/step" if is_simulated else f"{value:.1f} s"
            for value, side in zip(values, (without, with_), strict=True)
        ]
        share = with_.median("scheduling_seconds") / with_.median("seconds")
        lines.append(
            f"| {model} | {dataset} | {shown[0]} | {shown[1]} | {(values[1] - values[0]) / seconds:+.3%} | "
            f"{share:.2%} |"
        )
    low, high = published.PREDICTION_SHARE
    return [
        *lines,
        "",
        f"The paper's: prediction {low:.1%} to {high:.0%} of run time, scheduling "
        f"{1e3 * published.SCHEDULING_SECONDS:.1f} ms a step (all of its queues sorted in each; ours keep "
        "what does not change).",
        "",
    ]
