"""The sweep's report: shares of every cell, crossovers, regret, and what each policy is worth."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxllm.research.intervals import ratio_interval
from sweep.cells import MORE_REQUESTS, ORACLE_HOST_BLOCKS
from sweep.options import in_words
from sweep.simulated import BLOCK_SIZE, DEVICE, NUM_GPU_BLOCKS

LEAST_SHARE = 0.98
FIXED = ("swap", "recompute")
NEAR_CROSSOVER = 2.0


@dataclasses.dataclass(frozen=True)
class Place:
    """One cell of the sweep. Every action runs the same traces, so they are compared seed by seed.

    Attributes:
        rates: of each action, tokens/s by seed.
        regret: of the adaptive action against hindsight, as a share; None without decisions.
    """

    model: str
    dataset: str
    output: int
    host: int
    speed: float
    rates: dict[str, dict[int, float]]
    regret: float | None

    def ratio(self, action: str, other: str) -> float:
        """Throughput of an action over that of another, median over seeds."""
        rates, others = self.rates[action], self.rates[other]
        return statistics.median(rates[seed] / others[seed] for seed in rates)

    @property
    def share(self) -> float:
        """Throughput of the adaptive action over that of the better fixed one."""
        return self.share_of("adaptive")

    def share_of(self, action: str) -> float:
        """Throughput of an action over that of the better fixed one."""
        return min(self.ratio(action, fixed) for fixed in FIXED)

    def interval(self, action: str, other: str) -> tuple[float, float, float]:
        """Geometric mean over seeds of the ratio of throughputs, and the ends of its 95 % interval."""
        rates, others = self.rates[action], self.rates[other]
        return ratio_interval([rates[seed] / others[seed] for seed in rates])

    @property
    def advantage(self) -> float:
        """Of swapping over recomputing, as a logarithm."""
        return math.log(self.ratio("swap", "recompute"))


def places(rows: Iterable[dict[str, Any]], part: str = "actions") -> list[Place]:
    """The rows of part `actions`, or `near`, by cell."""
    found: dict[tuple[Any, ...], dict[str, dict[int, dict[str, Any]]]] = {}
    recomputed: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in rows:
        if row["part"] != part:
            continue
        trace = row["model"], row["dataset"], row["max_output_len"]
        if row["variant"] == "recompute":
            recomputed.setdefault(trace, {})[row["seed"]] = row["output_tokens_per_second"]
        else:
            key = (*trace, row["num_host_blocks"], row["link_speed"])
            found.setdefault(key, {}).setdefault(row["variant"], {})[row["seed"]] = row
    result = []
    for key, variants in sorted(found.items()):
        rates = {
            variant: {seed: row["output_tokens_per_second"] for seed, row in of_variant.items()}
            for variant, of_variant in variants.items()
        }
        rates["recompute"] = recomputed[key[:3]]
        best = sum(row["regret"]["best_seconds"] for row in variants["adaptive"].values())
        lost = sum(row["regret"]["seconds"] for row in variants["adaptive"].values())
        result.append(Place(*key, rates, lost / best if best else None))
    return result


def crossover(line: Sequence[Place]) -> float | None:
    """The link speed from which on swapping wins, interpolated; None if one of the two always does."""
    for low, high in itertools.pairwise(line):
        if low.advantage < 0 <= high.advantage:
            weight = low.advantage / (low.advantage - high.advantage)
            return math.exp(math.log(low.speed) * (1 - weight) + math.log(high.speed) * weight)
    return None


def lines_of(found: Iterable[Place]) -> Iterator[tuple[float | None, list[Place]]]:
    """Cells that differ by the link's speed alone, each line with its crossover."""
    for _, group in itertools.groupby(
        found, key=lambda place: (place.model, place.dataset, place.output, place.host)
    ):
        line = list(group)
        yield crossover(line), line


def is_near(place: Place, crossing: float | None) -> bool:
    """Whether swapping and recomputing are about equal in a cell, whose line has this crossover."""
    return crossing is not None and abs(math.log(place.speed / crossing)) <= math.log(NEAR_CROSSOVER)


def load_near(path: pathlib.Path) -> list[Place]:
    """The cells near a crossover in the results of an earlier sweep."""
    names = [field.name for field in dataclasses.fields(Place)]
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["places"]
        known = [Place(**{name: place[name] for name in names}) for place in found]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"--near-of {path}: not the results of a sweep: {type(error).__name__}: {error}")
    return [place for crossing, line in lines_of(known) for place in line if is_near(place, crossing)]


def shares_report(found: Sequence[Place], unit: str) -> list[str]:
    """The adaptive choice's shares, and the cells that lose; `unit` is that of the link's speeds."""
    speeds = sorted({place.speed for place in found})
    lines = [
        "## The action: tokens/s of the adaptive choice over the better of always-swap and always-recompute",
        "",
        f"Columns are link speeds, in multiples of {unit}. `*`: within "
        f"{NEAR_CROSSOVER:g}x of the speed at which both fixed actions are equally fast.",
        "",
        "| model | data | output | host blocks | crossover | "
        + " | ".join(f"{speed:g}" for speed in speeds)
        + " |",
        "|---|---|---:|---:|---:|" + "---:|" * len(speeds),
    ]
    near, losing = [], []
    for crossing, line in lines_of(found):
        cells = []
        for place in line:
            starred = is_near(place, crossing)
            near += [place] * starred
            losing += [place] * (place.share < LEAST_SHARE)
            cells.append(f"{place.share:.3f}" + "*" * starred)
        shown = "none" if crossing is None else f"{crossing:.3f}"
        lines.append(f"{_keys(line[0])} | {shown} | " + " | ".join(cells) + " |")
    behind = [place for place in near if place.share <= 1]
    return [
        *lines,
        "",
        f"Cells below {LEAST_SHARE}: {len(losing)} of {len(found)}"
        + (": " + "; ".join(_name(place) for place in losing) if losing else "")
        + f". Strictly faster than both within {NEAR_CROSSOVER:g}x of the crossover: "
        f"{len(near) - len(behind)} of {len(near)} cells (median share {_median_share(near)})"
        + ("; not in " + "; ".join(_name(place) for place in behind) if behind else "")
        + ".",
        "",
    ]


def actions_report(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Shares of every cell, losing cells, crossovers and regret."""
    found = places(rows)
    lines = shares_report(found, "the data sheet's")
    regrets = [place.regret for place in found if place.regret is not None]
    for variant, what in (
        ("adaptive", "Regret of the adaptive choice, all decisions together"),
        (
            "expected",
            "Regret of choosing by the expected costs of the noise's true distribution, the least that can "
            f"be had without hindsight ({ORACLE_HOST_BLOCKS} host blocks)",
        ),
    ):
        of_variant = [
            row for row in rows if row["part"] == "actions" and row["variant"] == variant and "regret" in row
        ]
        lost = sum(row["regret"]["seconds"] for row in of_variant)
        best = sum(row["regret"]["best_seconds"] for row in of_variant)
        run = sum(row["seconds"] for row in of_variant)
        lines.append(
            f"{what}: {lost / max(run, 1e-12):.2%} of the time of the runs, {lost / max(best, 1e-12):.1%} of "
            "what hindsight would have spent."
        )
    lines += [
        f"Cells of the adaptive choice: median {statistics.median(regrets or [0.0]):.1%}, largest "
        f"{max(regrets, default=0.0):.1%}."
    ]
    for oracle in ("expected", "hindsight"):
        ratios = [place.ratio("adaptive", oracle) for place in found if oracle in place.rates]
        if ratios:
            lines.append(
                f"Throughput over that of `{oracle}`: median {statistics.median(ratios):.3f}, least "
                f"{min(ratios):.3f}."
            )
    return [*lines, ""]


def near_report(near: Sequence[Place]) -> list[str]:
    """The cells near a crossover on longer traces: what chance makes of few preemptions averages out."""
    lines = [
        "## Near the crossover",
        "",
        f"The cells within {NEAR_CROSSOVER:g}x of a crossover of an earlier sweep, see the command. Tokens/s "
        "of the adaptive choice, and of hindsight's, over the better of always-swap and always-recompute, "
        "medians over seeds; then the geometric mean of the former, and its 95 % interval over the seeds.",
        "",
        "| model | data | output | host blocks | link | adaptive | hindsight | mean (95 %) |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    intervals = [[place.interval("adaptive", fixed) for fixed in FIXED] for place in near]
    for place, of_place in zip(near, intervals, strict=True):
        mean, low, high = min(of_place)
        lines.append(
            f"{_keys(place)} | {place.speed:g} | {place.share:.4f} | {place.share_of('hindsight'):.4f} "
            f"| {mean:.4f} ({low:.4f} to {high:.4f}) |"
        )
    ahead = [place for place in near if place.share > 1]
    return [
        *lines,
        "",
        f"Strictly faster than both by the median: {len(ahead)} of {len(near)} cells (median share "
        f"{_median_share(near)}); hindsight: {sum(place.share_of('hindsight') > 1 for place in near)}. By "
        f"the mean: {sum(min(of_place)[0] > 1 for of_place in intervals)}. With 95 % confidence faster than "
        f"both: {sum(all(low > 1 for _, low, _ in of_place) for of_place in intervals)}; slower than one of "
        f"them: {sum(any(high < 1 for *_, high in of_place) for of_place in intervals)} (were all equal, "
        f"chance would name {0.05 * len(near):.0f}).",
        "",
        "Not strictly faster: "
        + ("; ".join(_name(place, 4) for place in near if place.share <= 1) or "none")
        + ".",
        "",
    ]


def _keys(place: Place) -> str:
    return f"| {place.model} | {place.dataset} | {place.output} | {place.host}"


def _median_share(near: Sequence[Place]) -> str:
    return f"{statistics.median(place.share for place in near):.3f}" if near else "-"


def _name(place: Place, digits: int = 3) -> str:
    return (
        f"{place.model}, {place.dataset}, output {place.output}, {place.host} host blocks, "
        f"link x{place.speed:g}: {place.share:.{digits}f}"
    )


def _more_requests() -> str:
    return ", ".join(
        f"{times} times as many for outputs of at most {of}" for of, times in MORE_REQUESTS.items()
    )


def report(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    """The Markdown report."""
    noise = (
        "Predictions are exact."
        if args.samples is None
        else f"Noise: ratios measured / predicted of `{pathlib.Path(args.samples).name}`, one part for the "
        "truth, another for the samples predictors are fitted to, and corrected by what steps and copies "
        "took, as the engine's are."
    )
    lines = [
        "# Swap or recompute, simulated",
        "",
        f"Command: `{args.command}`. A roofline of {DEVICE}; {NUM_GPU_BLOCKS} device blocks of "
        f"{BLOCK_SIZE} tokens; {args.requests} requests ({_more_requests()}), arrivals: "
        f"{in_words(args.arrivals)}; outputs uniform in a quarter of the maximum to the maximum; "
        f"medians over seeds {args.seeds} of ratios on the same trace. {noise} Copies run beside "
        "computation.",
        "",
    ]
    if "actions" in args.parts:
        lines += actions_report(rows)
    if "near" in args.parts:
        lines += near_report(places(rows, "near"))
    return "\n".join(lines)
