"""Pictures of a simulation: figures by policy, and what waits and runs over time."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jaxllm.research.figures import COLOURS, import_pyplot, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from jaxllm.research.simulator.outcome import Run, Simulation

_DRAWN = ("tokens_per_second", "first_token_seconds", "token_seconds", "waiting_seconds")
_DASHES = ("-", "--", "-.", ":")


def draw(simulation: Simulation, path: Path) -> None:
    """Draw means over seeds with their 95 % intervals by policy, and below them the first seed's queue.

    Raises:
        ConfigError: matplotlib is missing, or writes no such files.
    """
    pyplot = import_pyplot()
    figure = pyplot.figure(figsize=(12, 7.5), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.1))
    for panel, name in zip(above.subplots(1, len(_DRAWN)), _DRAWN, strict=True):
        _bars(panel, simulation, name)
    seed = simulation.seeds[0]
    waiting, running = below.subplots(2, 1, sharex=True)
    for place, policy in enumerate(simulation.policies):
        style: dict[str, Any] = {
            "color": COLOURS[place % len(COLOURS)],
            "linestyle": _DASHES[place % len(_DASHES)],
            "label": policy,
        }
        run = simulation.of(policy)[0]
        for panel, (times, counts) in zip((waiting, running), queue_of(run), strict=True):
            panel.step(times, counts, where="post", **style)
    for panel, text in ((waiting, "waiting for\na first step"), (running, "begun and\nnot ended")):
        panel.set_ylabel(text)
        panel.set_ylim(bottom=0)
    running.set_xlabel(f"simulated seconds of seed {seed}: requests")
    below.legend(*running.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="0.92")
        panel.set_axisbelow(True)
    figure.suptitle("\n".join(textwrap.wrap(simulation.caption(), 150)), fontsize=8, color="0.35")
    save(figure, path)


def queue_of(run: Run) -> list[tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]]:
    """Times and, from each on, how many requests wait to begin; and how many have begun and not ended."""
    result = run.result
    return [
        _counts(result.arrival_times, result.first_scheduled_times),
        _counts(result.first_scheduled_times, result.finish_times),
    ]


def _counts(
    begins: npt.NDArray[np.float64], ends: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    times = np.unique(np.concatenate([begins, ends]))
    begun, ended = (np.searchsorted(np.sort(events), times, side="right") for events in (begins, ends))
    return times, begun - ended


def _bars(panel: Axes, simulation: Simulation, name: str) -> None:
    from jaxllm.research.simulator.outcome import FIGURES

    title, scale, _ = FIGURES[name]
    for place, policy in enumerate(simulation.policies):
        one = simulation.figure(policy, name)
        spread = None if np.isinf(one.high) else scale * (one.high - one.low) / 2
        colour = COLOURS[place % len(COLOURS)]
        panel.bar(place, scale * one.mean, yerr=spread, color=colour, capsize=4, width=0.7)
    panel.set_xticks(range(len(simulation.policies)), simulation.policies, rotation=30, ha="right")
    panel.set_title(title, fontsize=10, loc="left")
