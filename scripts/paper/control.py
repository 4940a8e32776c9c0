"""The control of Section 4.6: what predicting and scheduling cost, timed."""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from paper import published
from paper.cells import Cell, simulate_cell
from paper.report import Cells, Row

REPETITIONS = 3
PREDICTING, NOT_PREDICTING = "paper, compares and recomputes", "paper, recomputes"


def time_control(cells: Sequence[Cell], repetitions: int = REPETITIONS) -> list[dict[str, Any]]:
    """Simulate cells one at a time, all of them in turn and then again; policies predict by a table.

    Returns:
        a row for each cell, in which `scheduling_seconds` is the median of
        `scheduling_seconds_of_repetitions`; all else is the same in each.
    """
    found: dict[int, dict[str, Any]] = {}
    groups = [(cell.model, cell.dataset, cell.seed) for cell in cells]
    in_turn = sorted(
        range(len(cells)), key=groups.__getitem__
    )  # both variants of a group one after the other
    for _, place in itertools.product(range(repetitions), in_turn):
        gc.collect()
        row = simulate_cell(cells[place], is_table=True)
        kept = found.setdefault(place, {**row, "scheduling_seconds_of_repetitions": []})
        kept["scheduling_seconds_of_repetitions"].append(row["scheduling_seconds"])
    rows = [found[place] for place in range(len(cells))]
    for row in rows:
        row["scheduling_seconds"] = statistics.median(row["scheduling_seconds_of_repetitions"])
    return rows


def control(rows: Sequence[Row], is_simulated: bool) -> list[str]:
    """The section of the report."""
    cells = Cells(rows).of(part="control")
    lines = [
        "## Overhead (Section 4.6)",
        "",
        "The paper's control: predict both costs at each preemption, then recompute whatever they are, "
        "against not predicting. "
        + (
            "Here the device's time is simulated, so that what differs is this machine's time in the "
            "scheduler, measured in one process, one run at a time: microseconds a step, and shares of the "
            f"run; medians of {REPETITIONS} repetitions in turn (least..most). Costs are looked up in a "
            "table and corrected while it runs, as on the engine."
            if is_simulated
            else "Whole runs on the real engine, in seconds."
        ),
        "",
        "| model | data | not predicting | predicting | difference, share of the run | scheduling, share of "
        "the run |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for model, dataset in cells.groups():
        group = cells.of(model=model, dataset=dataset)
        sides = group.of(preset=NOT_PREDICTING), group.of(preset=PREDICTING)
        shown = _simulated(*sides) if is_simulated else _measured(*sides)
        lines.append(f"| {model} | {dataset} | {' | '.join(shown)} |")
    low, high = published.PREDICTION_SHARE
    return [
        *lines,
        "",
        f"The paper's: prediction {low:.1%} to {high:.0%} of run time, scheduling "
        f"{1e3 * published.SCHEDULING_SECONDS:.1f} ms a step (all of its queues sorted in each; ours keep "
        "what does not change).",
        "",
    ]


def _simulated(without: Cells, with_: Cells) -> list[str]:
    """Of all seeds and repetitions, which are compared in pairs."""
    of_steps: list[list[float]] = [[], []]
    differences, shares = [], []
    for alone, comparing in zip(without.rows, with_.rows, strict=True):
        pairs = [row["scheduling_seconds_of_repetitions"] for row in (alone, comparing)]
        for values, row, seconds in zip(of_steps, (alone, comparing), pairs, strict=True):
            values += [1e6 * one / row["num_steps"] for one in seconds]
        for first, second in zip(*pairs, strict=True):
            differences.append((second - first) / alone["seconds"])
            shares.append(second / comparing["seconds"])
    return [
        *(_middle(values, ".0f", " us/step") for values in of_steps),
        _middle(differences, "+.3%"),
        _middle(shares, ".2%"),
    ]


def _measured(without: Cells, with_: Cells) -> list[str]:
    values = [side.median("seconds") for side in (without, with_)]
    share = with_.median("scheduling_seconds") / values[1]
    return [*(f"{one:.1f} s" for one in values), f"{values[1] / values[0] - 1:+.3%}", f"{share:.2%}"]


def _middle(values: Sequence[float], form: str, unit: str = "") -> str:
    return f"{statistics.median(values):{form}}{unit} ({min(values):{form}}..{max(values):{form}})"
