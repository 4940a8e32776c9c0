"""The report of the comparison, and its figure."""

from __future__ import annotations

import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import plots
from sweep.simulated import DEVICE

from policies.cells import BASELINES, CHANGED, COMBINED, ELSEWHERE, OURS

Row = Mapping[str, Any]
LEAST_RATE, MOST_TURNAROUND = 0.98, 1.02
MEASURES = {
    "output_tokens_per_second": "tokens/s",
    "mean_weighted_turnaround": "weighted turnaround",
    "mean_latency_seconds": "mean latency",
    "p99_latency_seconds": "99th percentile",
}
_RATE, _TURNAROUND, _LATENCY = list(MEASURES)[:3]


class Score(NamedTuple):
    """A candidate over all settings, each measure relative to the best baseline of the setting.

    `means` are geometric, `worst` the least of tokens/s and the most of the others; `lost` the settings in
    which it is beyond `LEAST_RATE` or `MOST_TURNAROUND`.
    """

    means: dict[str, float]
    worst: dict[str, float]
    lost: list[str]

    @property
    def balance(self) -> float:
        """Tokens/s over the product of the others; larger is better."""
        rate, *others = self.means.values()
        return rate / math.prod(others)


def settings(rows: Sequence[Row]) -> dict[tuple[str, ...], dict[str, dict[str, float]]]:
    """By setting and policy the medians over seeds of each measure."""
    found: dict[tuple[str, ...], dict[str, list[Row]]] = {}
    for row in rows:
        setting = row["dataset"], row["outputs"], row["setting"]
        found.setdefault(setting, {}).setdefault(row["policy"], []).append(row)
    return {
        setting: {
            policy: {name: statistics.median([one[name] for one in of_policy]) for name in MEASURES}
            for policy, of_policy in policies.items()
        }
        for setting, policies in found.items()
    }


def relative(policies: Mapping[str, Mapping[str, float]], policy: str) -> dict[str, float]:
    """Each measure of a policy over that of the best baseline."""
    ratios = {}
    for name in MEASURES:
        best = (max if name == _RATE else min)(policies[baseline][name] for baseline in BASELINES)
        ratios[name] = policies[policy][name] / best
    return ratios


def scores(rows: Sequence[Row]) -> dict[str, Score]:
    """Of every policy of the rows."""
    by_setting = settings(rows)
    found = {}
    for policy in dict.fromkeys(row["policy"] for row in rows):
        ratios = {setting: relative(policies, policy) for setting, policies in by_setting.items()}
        columns = {name: [one[name] for one in ratios.values()] for name in MEASURES}
        found[policy] = Score(
            {name: statistics.geometric_mean(values) for name, values in columns.items()},
            {name: (min if name == _RATE else max)(values) for name, values in columns.items()},
            [
                ", ".join(setting)
                for setting, one in ratios.items()
                if one[_RATE] < LEAST_RATE or one[_TURNAROUND] > MOST_TURNAROUND
            ],
        )
    return found


def front(found: Mapping[str, Score], measure: str) -> set[str]:
    """Policies that no other beats in mean tokens/s and mean `measure` at once."""
    points = {policy: (score.means[_RATE], score.means[measure]) for policy, score in found.items()}
    return {
        policy
        for policy, (rate, other) in points.items()
        if not any(r >= rate and o <= other and (r, o) != (rate, other) for r, o in points.values())
    }


def table(found: Mapping[str, Score], policies: Sequence[str]) -> list[str]:
    """A line for each policy, the best balanced first."""
    fronts = {measure: front(found, measure) for measure in list(MEASURES)[1:]}
    heads = " | ".join(f"{name} | worst" for name in MEASURES.values())
    lines = [
        f"| policy | {heads} | settings lost | on the front of tokens/s and |",
        "|---|" + "---:|" * (2 * len(MEASURES) + 1) + "---|",
    ]
    ordered = sorted(policies, key=lambda policy: (len(found[policy].lost), -found[policy].balance))
    for policy in ordered:
        score = found[policy]
        cells = " | ".join(f"{score.means[name]:.3f} | {score.worst[name]:.2f}" for name in MEASURES)
        on = ", ".join(MEASURES[measure] for measure, members in fronts.items() if policy in members)
        name = f"**{policy}**" if policy in OURS else policy
        lines.append(f"| {name} | {cells} | {len(score.lost)} | {on} |")
    return [*lines, ""]


def better_balanced(found: Mapping[str, Score]) -> str:
    """Candidates that `adaptive` leads only because it loses fewer settings, or does not lead."""
    ours = found["adaptive"]
    better = [policy for policy, score in found.items() if score.balance > ours.balance]
    better.sort(key=lambda policy: -found[policy].balance)
    if not better:
        return f"None has a better balance than `adaptive`, which loses {len(ours.lost)} settings."
    return (
        f"`adaptive` has a balance of {ours.balance:.3f}, and loses {len(ours.lost)} settings. "
        "A better balance (tokens/s over the product of the others) have: "
        + "; ".join(
            f"`{policy}` ({found[policy].balance:.3f}, loses {len(found[policy].lost)})" for policy in better
        )
        + "."
    )


def lost(rows: Sequence[Row], policy: str) -> list[str]:
    """The settings in which a policy is worse than the best baseline, by name."""
    lines = []
    for setting, policies in settings(rows).items():
        where, ratios = ", ".join(setting), relative(policies, policy)
        for name, is_lost, best in (
            (_RATE, ratios[_RATE] < LEAST_RATE, max),
            (_TURNAROUND, ratios[_TURNAROUND] > MOST_TURNAROUND, min),
        ):
            if is_lost:
                winner = best(BASELINES, key=lambda baseline: policies[baseline][name])
                theirs = {one: policies[winner][one] / policies[policy][one] for one in MEASURES}
                lines.append(
                    f"- {where}: {MEASURES[name]} {ratios[name]:.3f} of `{winner}`'s, which has "
                    f"{theirs[_RATE]:.2f} of its tokens/s and {theirs[_LATENCY]:.2f} of its mean latency"
                )
    return lines or ["- none"]


def every_setting(rows: Sequence[Row]) -> list[str]:
    """Tokens/s and turnaround of the presets in each setting."""
    presets = (*BASELINES, *OURS)
    lines = [
        "Tokens/s; mean weighted turnaround; mean and 99th percentile of latency in seconds.",
        "",
        "| data | outputs | setting | " + " | ".join(presets) + " |",
        "|---|---|---|" + "---:|" * len(presets),
    ]
    for setting, policies in settings(rows).items():
        cells = []
        for preset in presets:
            rate, turnaround, mean, most = (policies[preset][name] for name in MEASURES)
            cells.append(f"{rate:.0f}; {turnaround:.2f}; {mean:.2f}, {most:.1f}")
        lines.append(f"| {' | '.join(setting)} | {' | '.join(cells)} |")
    return [*lines, ""]


def report(rows: Sequence[Row], command: str, facts: str, plot: pathlib.Path) -> str:
    """The Markdown text; draws `plot`, or removes an older one, if there are no candidates to be drawn."""
    of_arrivals = [row for row in rows if row["part"] == "arrivals"]
    of_devices = [row for row in rows if row["part"] == "devices"]
    lines = ["# Which policy is the default", "", f"Command: `{command}`. {facts}", ""]
    plot.unlink(missing_ok=True)
    if of_arrivals:
        found = scores(of_arrivals)
        num_others = len(found) - len({*BASELINES, *OURS})
        draw(found, plot)
        lines += [
            "## Over arrivals, data and outputs",
            "",
            f"Each measure over that of the best of {', '.join(BASELINES)} in the same setting (so no "
            f"baseline is 1 everywhere): geometric mean and worst over {len(settings(of_arrivals))} "
            "settings. More tokens/s are better, less of the others. A setting is lost with tokens/s below "
            f"{LEAST_RATE} or weighted turnaround above {MOST_TURNAROUND} of the best baseline's. Ordered by "
            "settings lost, then by tokens/s over the product of the others.",
            "",
            f"![Tokens/s against turnaround and latency of all candidates]({plot.name})",
            "",
            *table(found, [*BASELINES, *OURS]),
            f"{len(OURS)} presets and {num_others} candidates: {len(COMBINED)} combinations of order of the "
            "queues; victim; who returns or starts first; share of the pool that stays free when one starts "
            f"(0 where none is named), and {len(CHANGED)} with one answer of `adaptive` changed.",
            "",
            better_balanced(found),
            "",
            *table(found, [*BASELINES, "adaptive", *COMBINED]),
            "`adaptive` with one answer changed.",
            "",
            *table(found, ["adaptive", *CHANGED]),
        ]
        for preset in OURS:
            lines += [f"What `{preset}` loses:", "", *lost(of_arrivals, preset), ""]
    if of_devices:
        lines += [
            "## Other links, host pools and outputs",
            "",
            *table(scores(of_devices), [*BASELINES, *OURS, *ELSEWHERE]),
        ]
        for preset in OURS:
            lines += [f"What `{preset}` loses:", "", *lost(of_devices, preset), ""]
    lines += ["## Every setting", "", *every_setting(rows)]
    return "\n".join(lines)


_PANELS = (
    ("mean_weighted_turnaround", "shorter turnaround, more tokens/s"),
    ("p99_latency_seconds", "what it pays: the longest waits"),
)


def draw(found: Mapping[str, Score], path: pathlib.Path) -> None:
    """Mean tokens/s against turnaround, and against the longest waits, with the fronts."""
    num_others = sum(policy not in (*BASELINES, *OURS) for policy in found)
    source = (
        f"Simulated on a roofline of an {DEVICE}: geometric means over all arrivals, over the best published "
        f"system in each; grey: {num_others} candidates; dashed: the Pareto front"
    )
    with plots.figure(path, source, 1, len(_PANELS), figsize=(11, 5.2), sharey=True) as ((*panels,),):
        for panel, (measure, title) in zip(panels, _PANELS, strict=True):
            for policy, score in found.items():
                at = score.means[measure], score.means[_RATE]
                if policy not in (*BASELINES, *OURS):
                    panel.plot(*at, ".", color=plots.OTHERS)
            for policy in (*BASELINES, *OURS):
                at = found[policy].means[measure], found[policy].means[_RATE]
                colour = plots.OURS if policy in OURS else plots.PUBLISHED
                panel.plot(*at, "o", color=colour, markersize=7)
                above = {"adaptive": -14, "adaptive_throughput": 8}.get(policy, 6)
                name = policy.replace(", copies overlapped", ", overlapped")
                place = {"xytext": (4, above), "textcoords": "offset points"}
                panel.annotate(name, at, fontsize=9, color=colour, **place)
            members = front(found, measure)
            line = sorted((found[policy].means[measure], found[policy].means[_RATE]) for policy in members)
            panel.plot(*zip(*line, strict=True), color="0.4", linewidth=0.8, linestyle="--")
            panel.set_title(title, fontsize=12)
            panel.set_xlabel(f"{MEASURES[measure]} (left is better)")
            panel.margins(x=0.18, y=0.08)
        panels[0].set_ylabel("tokens/s (up is better)")
