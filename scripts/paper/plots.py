"""Figures of the evaluation: a panel for each model and data set."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from plots import COLOURS

from paper import published
from paper.cells import PRESETS

if TYPE_CHECKING:
    from paper.report import Cells

Group = tuple[str, str]
STYLES = {
    "vllm": ("#888888", "o", "vLLM 0.2.5"),
    "vllm_swap": ("#c9a227", "v", "vLLM_s (always swaps)"),
    "vllm_v1": ("#222222", "s", "today's vLLM"),
    "paper_strategy": ("#7fb3d5", "^", "AdaptiveLLM, strategy alone"),
    "paper": ("#1f6fb2", "D", "AdaptiveLLM, strategy and scheduler"),
    "adaptive": ("#d62728", "o", "adaptive (this engine)"),
}


def table3_marks(cells: Cells) -> dict[Group, list[tuple[float, float]]]:
    """The paper's Table 3 in tokens/s, times our `vllm`, at 64 tokens."""
    marks = {}
    for model, dataset in cells.groups():
        theirs = published.TABLE3.get(model, {}).get(dataset)
        if theirs is not None and "vllm" in cells.values("preset"):
            group = {"model": model, "dataset": dataset, "preset": "vllm", "max_output_len": 64}
            marks[model, dataset] = [(64.0, theirs[0] * cells.median("output_tokens_per_second", **group))]
    return marks


def fig4_bands(cells: Cells) -> dict[Group, list[tuple[float, float, float]]]:
    """The published range of turnaround at limits 64 and 128, from our `vllm`: limit, least and most."""
    bands: dict[Group, list[tuple[float, float, float]]] = {}
    if "vllm" not in cells.values("preset"):
        return bands
    low, high = published.FIG4_CHANGE
    for model, dataset in cells.groups():
        for limit in published.FIG4_LIMITS:
            if limit in cells.values("max_num_seqs"):
                group = {"model": model, "dataset": dataset, "preset": "vllm", "max_num_seqs": limit}
                theirs = cells.median("mean_weighted_turnaround", **group)
                bands.setdefault((model, dataset), []).append(
                    (limit, theirs * (1 + low), theirs * (1 + high))
                )
    return bands


def grid(
    cells: Cells,
    path: pathlib.Path,
    *,
    x: tuple[str, str],
    y: tuple[str, str],
    title: str,
    values: Sequence[int],
    is_log: bool = False,
    marks: Mapping[Group, Sequence[tuple[float, float]]] | None = None,
    bands: Mapping[Group, Sequence[tuple[float, float, float]]] | None = None,
) -> None:
    """Draw a row of panels for each model, a column for each data set.

    Args:
        cells: of one figure and arrival process.
        path: PNG file.
        x, y: each a field of the cells and what it says on the axis.
        title: of the whole figure.
        values: on the x axis.
        is_log: whether the y axis is logarithmic.
        marks: the paper's points by panel, `(x, y)`.
        bands: the paper's ranges by panel, `(x, least, most)`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    models, datasets = cells.values("model"), cells.values("dataset")
    size = (3.7 * len(datasets), 2.6 * len(models) + 1.0)
    figure, panels = pyplot.subplots(
        len(models), len(datasets), figsize=size, layout="constrained", squeeze=False, sharex=True
    )
    known = cells.values("preset")
    presets = [*(one for one in PRESETS if one in known), *(one for one in known if one not in PRESETS)]
    others = {one: (COLOURS[place % len(COLOURS)], "x", one) for place, one in enumerate(presets)}
    for model, row in zip(models, panels, strict=True):
        for dataset, panel in zip(datasets, row, strict=True):
            for preset in presets:
                color, marker, label = STYLES.get(preset) or others[preset]
                group = {"model": model, "dataset": dataset, "preset": preset}
                ys = [cells.median(y[0], **group, **{x[0]: value}) for value in values]
                panel.plot(values, ys, color=color, marker=marker, markersize=4, linewidth=1.3, label=label)
            for place, (at, value) in enumerate((marks or {}).get((model, dataset), ())):
                label = "paper, Table 3" if not place else None
                panel.plot(
                    at, value, marker="*", markersize=13, color="#2ca02c", linestyle="none", label=label
                )
            of_panel = (bands or {}).get((model, dataset), ())
            if of_panel:
                ats, lows, highs = zip(*of_panel, strict=True)
                panel.fill_between(
                    ats, lows, highs, color="#2ca02c", alpha=0.25, label="paper's range (Fig. 4)"
                )
            panel.set_xscale("log", base=2)
            panel.set_xticks(list(values), list(map(str, values)))
            panel.set_title(f"{model}, {dataset}", fontsize=10)
            panel.grid(alpha=0.25)
            if is_log:
                panel.set_yscale("log", base=2)
                panel.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            else:
                panel.set_ylim(bottom=0)
    for panel in panels[-1]:
        panel.set_xlabel(x[1])
    for row in panels:
        row[0].set_ylabel(y[1])
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
