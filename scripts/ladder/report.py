"""Markdown of a ladder's results, and the figure of swap errors."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Results = Mapping[str, Any]

BAR = 1.5
"""The most that a predictor's error should be of the device's own."""
# AdaptiveLLM, Sections 4.5 and 4.6 and Fig. 5.
PAPER_RECOMPUTE = {"opt": 0.0176, "llama": 0.0130}
PAPER_SWAP = (0.010, 0.015)
_PAPER_SWAPS = {"swap_in": "1.5 % (Llama-13B), 1.1 % (32.5B)", "swap_out": "1.0 % (Llama-13B), 1.2 % (32.5B)"}
_NUM_GROUPS = 8
_MEBI = 2**20


def ladder_errors(results: Results) -> list[str]:
    """Test errors of the chosen predictors, the device's floor, and the paper's figures beside them."""
    models = results["models"]
    total = sum(_num_samples(row) for row in results["fits"])
    lines = [
        "## Prediction errors over a ladder of models (Section 4.5)",
        "",
        f"Measured: {total} samples of {len(models)} random-weight models ("
        + ", ".join(model["name"] for model in models)
        + "; layers x hidden size), every size of work twice, apart in time. Eight regressors x degrees 1 "
        "to 10, fitted to 80 % of the distinct work (chosen within it) and tested on 20 %; degrees that make "
        "more polynomial features than `--max-features` are skipped, and shown as `-` where all are listed. "
        "The floor is the error of predicting the second measurement of a test point by its first, the ratio "
        "an error over it.",
        "",
        "The first error is of fits to what describes the work (layers, hidden size, tokens, batch; bytes of "
        "a block and blocks of copies), which is what `jaxllm profile` fits; the others are of fits to what "
        "the engine makes of it besides: pieces and bytes of copies, products and KV reads of steps.",
        "",
        "| family | kind | samples, test | regressor, degree | MAPE | ratio | with derived features | MAPE | "
        "floor | ratio | median | floor | ratio | paper's MAPE |",
        "|---|---|---:|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in results["fits"]:
        plain, report, floor, ratio = row["work"], row["derived"], row["floor"], row["ratio"]
        cells = [row["family"], row["kind"], f"{_num_samples(row)}, {report['num_test']}"]
        cells += [_name(plain["chosen"]), _percent(plain["test"]["mape"]), _ratio(_of_plain(row))]
        cells.append(_name(report["chosen"]))
        for name in ("mape", "median"):
            cells += [_percent(report["test"][name]), _percent(floor.get(name)), _ratio(ratio[name])]
        lines.append("| " + " | ".join([*cells, _papers(row)]) + " |")
    lines.append("")
    for fitted, ratios in (
        ("What `jaxllm profile` fits", [_of_plain(row) for row in results["fits"]]),
        ("With derived features", [row["ratio"]["mape"] for row in results["fits"]]),
    ):
        worse = [
            f"{row['family']} {row['kind']}"
            for row, ratio in zip(results["fits"], ratios, strict=True)
            if ratio is None or ratio > BAR
        ]
        verdict = f"above it or unknown: {', '.join(worse)}" if worse else "all of them"
        lines += [f"{fitted}: MAPE within {BAR:g} times the floor: {verdict}.", ""]
    return lines


def _of_plain(row: Mapping[str, Any]) -> float | None:
    """The error of the fit to what describes the work, over the floor."""
    floor = row["floor"].get("mape")
    return row["work"]["test"]["mape"] / floor if floor else None


def ladder_candidates(results: Results, kind: str = "prefill") -> list[str]:
    """For each family, the test MAPE of every regressor at every degree, of one kind of cost."""
    lines = []
    for row in results["fits"]:
        if row["kind"] != kind:
            continue
        candidates, chosen = row["work"]["candidates"], row["work"]["chosen"]
        degrees = sorted({one["degree"] for one in candidates})
        cells = {(one["regressor"], one["degree"]): _candidate(one, chosen) for one in candidates}
        lines += [
            f"Test MAPE, {row['family']}, {kind}; the one chosen within the training part is bold:",
            "",
            "| regressor | " + " | ".join(f"degree {degree}" for degree in degrees) + " |",
            "|---|" + "---:|" * len(degrees),
        ]
        for name in dict.fromkeys(one["regressor"] for one in candidates):
            lines.append(f"| {name} | " + " | ".join(cells[name, degree] for degree in degrees) + " |")
        if any(one["skipped"] for one in candidates):
            lines += ["", "-: more polynomial features than `--max-features`."]
        lines.append("")
    return lines


def swap_figure(results: Results, path: pathlib.Path) -> list[str]:
    """Fig. 5: errors of swap predictions by size and direction, on test samples; a plot, and its table."""
    lines = [
        "## Swap prediction errors by size (Fig. 5)",
        "",
        f"|predicted - measured| / measured of test samples, of all models; `{path.name}`. "
        f"The paper's are {100 * PAPER_SWAP[0]:.1f} to {100 * PAPER_SWAP[1]:.1f} %.",
        "",
        "| direction | MiB | samples | lower quartile | median | upper quartile |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    directions = (("swap_in", "in (host to device)"), ("swap_out", "out (device to host)"))
    panels = []
    for kind, title in directions:
        sizes, errors = _swap_errors(results, kind)
        groups = _by_size(sizes, errors)
        panels.append((title, sizes, errors, groups, _swap_floor(results, kind)))
        for least, most, of_group in groups:
            low, middle, high = np.quantile(of_group, (0.25, 0.5, 0.75))
            lines.append(
                f"| {kind.removeprefix('swap_')} | {least:.3g}..{most:.3g} | {len(of_group)} | {low:.1%} | "
                f"{middle:.1%} | {high:.1%} |"
            )
    _draw(panels, path)
    return [*lines, ""]


def _draw(panels: Sequence[Any], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(9.5, 3.8), layout="constrained", sharey=True)
    for panel, (title, sizes, errors, groups, floor) in zip(axes, panels, strict=True):
        panel.scatter(
            sizes, [max(100 * error, 0.01) for error in errors], s=5, alpha=0.25, label="one test sample"
        )
        places = [(least * most) ** 0.5 for least, most, _ in groups]
        quartiles = np.array([np.quantile(of_group, (0.25, 0.5, 0.75)) for *_, of_group in groups]) * 100
        if len(quartiles):
            low, middle, high = quartiles.T
            panel.errorbar(
                places, middle, [middle - low, high - middle], fmt="o-", color="black", capsize=3,
                label="median and quartiles",
            )  # fmt: skip
        if floor is not None:
            panel.axhline(
                100 * floor, color="tab:red", linestyle=":", label="floor: same copy, twice (median)"
            )
        panel.axhspan(
            100 * PAPER_SWAP[0], 100 * PAPER_SWAP[1], color="tab:green", alpha=0.4,
            label="paper: 1.0 to 1.5 %",
        )  # fmt: skip
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_title(f"swap {title}")
        panel.set_xlabel("size of the copy, MiB")
    axes[0].set_ylabel("prediction error, % of measured time")
    axes[-1].legend(fontsize="small")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _swap_errors(results: Results, kind: str) -> tuple[list[float], list[float]]:
    """MiB and relative errors of all test samples of a direction."""
    rows = [copy for row in results["fits"] if row["kind"] == kind for copy in row["copies"]]
    sizes = [block_bytes * num_blocks / _MEBI for block_bytes, num_blocks, _, _ in rows]
    return sizes, [abs(predicted - seconds) / seconds for _, _, seconds, predicted in rows]


def _swap_floor(results: Results, kind: str) -> float | None:
    """Median error floor of a direction, averaged over families."""
    floors = [row["floor"]["median"] for row in results["fits"] if row["kind"] == kind and row["num_pairs"]]
    return statistics.fmean(floors) if floors else None


def _by_size(sizes: Sequence[float], errors: Sequence[float]) -> list[tuple[float, float, list[float]]]:
    """Errors by size, in groups of about as many: least and most MiB, errors; equal sizes together."""
    if not sizes:
        return []
    edges = np.unique(np.quantile(sizes, np.arange(1, _NUM_GROUPS) / _NUM_GROUPS))
    places = np.searchsorted(edges, sizes, side="right")
    groups = []
    for place in np.unique(places):
        inside = np.flatnonzero(places == place).tolist()
        of_sizes = [sizes[index] for index in inside]
        groups.append((min(of_sizes), max(of_sizes), [errors[index] for index in inside]))
    return groups


def _num_samples(row: Mapping[str, Any]) -> int:
    return sum(row["work"][part] for part in ("num_train", "num_held_out", "num_test"))


def _papers(row: Mapping[str, Any]) -> str:
    if row["kind"] == "prefill":
        return f"{100 * PAPER_RECOMPUTE[row['family']]:.2f} %"
    return _PAPER_SWAPS.get(row["kind"], "-")


def _name(candidate: Mapping[str, Any]) -> str:
    return f"{candidate['regressor']}, {candidate['degree']}"


def _candidate(candidate: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
    if candidate["test"] is None:
        return "-"
    text = _percent(candidate["test"]["mape"])
    is_chosen = all(candidate[name] == chosen[name] for name in ("regressor", "degree"))
    return f"**{text}**" if is_chosen else text


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.2f} %"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"
