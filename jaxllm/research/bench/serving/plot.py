"""Plots: latencies as cumulative distributions, and throughput and latency against the request rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.research.bench.serving.measure import Measured
from jaxllm.research.bench.serving.metrics import latencies
from jaxllm.research.figures import import_pyplot, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANELS = {"ttft": "time to first token", "tpot": "time per output token", "e2el": "end-to-end latency"}
_AGAINST_RATE = {
    "output_throughput": "output tokens/s",
    "median_ttft_ms": "median TTFT (ms)",
    "median_e2el_ms": "median e2e latency (ms)",
}


def plot(runs: Sequence[Measured], path: Path) -> None:
    """Draw the distributions of all runs, and below them figures against the rate if there are several rates.

    Repetitions of a run are one curve.

    Args:
        runs: whose results have `policy`, `arrivals` and `request_rate`.
        path: of the image.

    Raises:
        ConfigError: matplotlib is missing, or writes no such files.
    """
    pyplot = import_pyplot()
    rates = {run.result["request_rate"] for run in runs if isinstance(run.result["request_rate"], float)}
    num_rows = 2 if len(rates) > 1 else 1
    figure, panels = pyplot.subplots(
        num_rows, len(_PANELS), figsize=(12, 3.6 * num_rows), layout="constrained", squeeze=False
    )
    for panel, (name, title) in zip(panels[0], _PANELS.items(), strict=True):
        _draw_distributions(panel, runs, name)
        panel.set_xlabel(f"{title} (ms)")
    panels[0][0].set_ylabel("share of requests")
    if any(line.get_label() for line in panels[0][0].get_lines()):
        panels[0][0].legend(fontsize="small", loc="lower right")
    if num_rows == 2:
        for panel, (key, title) in zip(panels[1], _AGAINST_RATE.items(), strict=True):
            _draw_against_rate(panel, [run.result for run in runs], key)
            panel.set_xlabel("request rate (1/s)")
            panel.set_ylabel(title)
        panels[1][0].legend(fontsize="small")
    save(figure, path)


def _draw_distributions(panel: Axes, runs: Sequence[Measured], name: str) -> None:
    grouped: dict[str, list[float]] = {}
    for run in runs:
        label = " ".join(filter(None, (run.result["policy"], run.result["arrivals"])))
        grouped.setdefault(label, []).extend(latencies(run.answers)[name])
    for label, seconds in grouped.items():
        times = np.sort(seconds) * 1e3
        panel.step(times, np.arange(1, len(times) + 1) / max(1, len(times)), where="post", label=label)
    panel.set_ylim(0, 1.02)


def _draw_against_rate(panel: Axes, results: Sequence[Mapping[str, Any]], key: str) -> None:
    grouped: dict[str, dict[float, list[float]]] = {}
    for result in results:
        rate, value = result["request_rate"], result.get(key)
        if isinstance(rate, float) and value is not None:
            by_rate = grouped.setdefault(result["policy"] or "server", {})
            by_rate.setdefault(rate, []).append(value)
    for label, by_rate in grouped.items():
        rates = sorted(by_rate)
        panel.plot(rates, [np.median(by_rate[rate]) for rate in rates], marker="o", label=label)
    panel.set_xlim(left=0)
    panel.set_ylim(bottom=0)
