"""How far simulated runs of presets are from real ones: figures of measured rows, words and a drawing."""

from __future__ import annotations

import itertools
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import plots

from jaxllm.research.intervals import ratio_interval


def summary(errors: Sequence[float]) -> dict[str, Any]:
    """Relative errors, one a trace: their median and range, and the median of their sizes."""
    return {
        "median": statistics.median(errors),
        "least": min(errors),
        "most": max(errors),
        "median_size": statistics.median(map(abs, errors)),
        "of_traces": list(errors),
    }


def ratios(row: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """How many times as fast as the first preset, and its weighted turnaround over the first one's."""
    found: dict[str, Any] = {}
    for prefix in ("", "simulated_"):
        for name, ours, theirs in (("speed", first, row), ("turnaround", row, first)):
            value = prefix + ("seconds" if name == "speed" else "weighted_turnaround")
            found[prefix + name] = ratio_interval(
                [one / other for one, other in zip(ours[value], theirs[value], strict=True)]
            )
    return found


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each pair of presets: the ratio of real seconds with its interval, that of simulated ones, and both.

    `verdict` is "undecided" where the real interval holds 1, else "same" or "opposite".
    """
    found = []
    for one, other in itertools.combinations(rows, 2):
        real, simulated = (
            ratio_interval([b / a for a, b in zip(one[name], other[name], strict=True)])
            for name in ("seconds", "simulated_seconds")
        )
        is_decided = not real[1] <= 1.0 <= real[2]
        agrees = (real[0] > 1.0) == (simulated[0] > 1.0)
        verdict = ("same" if agrees else "opposite") if is_decided else "undecided"
        found.append(
            {
                "preset": one["preset"],
                "over": other["preset"],
                "real": real,
                "simulated": simulated[0],
                "verdict": verdict,
            }
        )
    return found


def describe(row: dict[str, Any], first: str) -> str:
    """One preset, in words."""
    error, noise, over = row["error"], row["noise"], row["over_first"]
    speed, low, high = over["speed"]
    turnaround, least, most = over["turnaround"]
    return (
        f"{row['preset']}: real {statistics.fmean(row['seconds']):.2f} s, simulated "
        f"{statistics.fmean(row['simulated_seconds']):.2f} s; error {error['median']:+.1%} "
        f"({error['least']:+.1%}..{error['most']:+.1%}), noise {noise['median_size']:.1%} "
        f"({noise['least']:+.1%}..{noise['most']:+.1%}); preemptions "
        f"{statistics.fmean(row['preemptions']):.1f} (swaps {statistics.fmean(row['swaps']):.1f}), simulated "
        f"{statistics.fmean(row['simulated_preemptions']):.1f} "
        f"({statistics.fmean(row['simulated_swaps']):.1f}); {speed:.3f} ({low:.3f}..{high:.3f}) times as "
        f"fast as {first}, simulated {over['simulated_speed'][0]:.3f}; turnaround {turnaround:.2f} "
        f"({least:.2f}..{most:.2f}) of its, simulated {over['simulated_turnaround'][0]:.2f}; mean latency "
        f"{statistics.fmean(row['mean_latency']):.2f} s, simulated "
        f"{statistics.fmean(row['simulated_mean_latency']):.2f} s"
    )


def draw(report: dict[str, Any], path: pathlib.Path) -> None:
    """Tokens/s and turnaround of each preset over the first one's, with 95 % intervals."""
    rows = sorted(report["rows"], key=lambda row: row["over_first"]["speed"][0])
    first, machine = report["rows"][0]["preset"], report["hardware"]
    source = (
        f"Measured on {machine['cpu_count']} cores of an {machine['cpu']}, model {report['model']}, a pool "
        f"too small: {len(rows[0]['seconds'])} traces, twice each; means and 95 % intervals"
    )
    size = (10, 0.36 * len(rows) + 1.6)
    with plots.figure(path, source, 1, 2, figsize=size, sharey=True) as ((speed, turnaround),):
        for panel, name, title in (
            (speed, "speed", f"tokens/s over {first}'s: right is better"),
            (turnaround, "turnaround", f"turnaround by token over {first}'s: left is better"),
        ):
            panel.axvline(1, color="0.6", linewidth=1)
            for place, row in enumerate(rows):
                middle, low, high = row["over_first"][name]
                colour = plots.OURS if row["preset"].startswith("adaptive") else plots.PUBLISHED
                panel.plot([low, high], [place, place], color=colour, linewidth=2)
                panel.plot(middle, place, "o", color=colour, markersize=7)
            panel.set_title(title, fontsize=11)
            panel.spines["left"].set_visible(False)
            panel.tick_params(left=False)
        speed.set_yticks(range(len(rows)), [row["preset"] for row in rows], fontsize=11)
