"""Whether the default holds up: every GPU with every load, limit and arrival process, simulated.

    python scripts/grid_on_silicon.py --out-dir out/grid

A100, H100, H200 and two L40S, with conversations, summaries, long answers, agents with turns and a mixture of
the first three and single agents' requests; at most 256 and 1,024 running requests; sent at once, by half as
many clients as there are requests, which wait for their answers, and by Poisson processes at 0.7 and 1.1 of
what `vllm_v1` serves when all is sent at once. Agents are clients themselves, so they have no closed loop of
their own. All else is as in `scripts/compare_on_silicon.py`.

`results.json` has the figures of every preset in every cell, with each seed. `report.md` says of each bar in
how many cells the means over seeds keep it, and which do not. Beside these stands what the default would have
if it knew how long each output gets and admitted accordingly, in its own order and in that of arrival: where
neither keeps all bars of a cell, knowing lengths is not enough for them. An interrupted run goes on where it
was (`cells.jsonl`).
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from compare_on_silicon import CACHES, TURNS, Cell, run, trace_of
from sweep.options import list_of
from sweep.simulated import run_all

from jaxllm.research.bench.results import command_line, write_json
from jaxllm.system.output_files import NewFolder, OutputParser

GPUS: Mapping[str, tuple[str, str, int]] = {
    "A100": ("a100", "llama-2-13b", 1),
    "H100": ("h100", "llama-3-8b", 1),
    "H200": ("h200", "llama-3-8b", 1),
    "2 x L40S": ("l40s", "llama-2-13b", 2),
}
"""Device, model, and how many of it."""
LOADS: Mapping[str, tuple[str, int]] = {
    "chat": ("chat", 2400),
    "summary": ("summary", 600),
    "reasoning": ("reasoning", 600),
    "mixed": ("chat+summary+agent+reasoning", 600),
    "turns": ("turns", 60),
}
"""What `compare_on_silicon` calls it, and requests, or conversations; a third of them of the larger model."""
LIMITS = 256, 1024
RATES = 0.7, 1.1
PRESETS = "vllm_v1", "adaptive_throughput", "adaptive"
HINDSIGHT = "adaptive, true lengths", "adaptive, true lengths, in order of arrival"
"""Compared where there are no turns."""
_FIGURES = (
    "tokens_per_second",
    "mean_latency_seconds",
    "p99_latency_seconds",
    "mean_first_token_seconds",
    "swaps_per_request",
    "lost_share",
)
_SERVED = "requests_per_second"
Row = dict[str, Any]
Values = Mapping[str, float]
"""A figure of each preset in a cell."""
Ratio = Callable[[Values, str], float]
"""Of a preset, by name."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Cells that differ in when requests come: the first of them tells what is served.

    The numbers of requests are divided by `scale`.
    """

    gpu: str
    load: str
    limit: int
    seed: int
    scale: int = 1

    def at_once(self) -> Cell:
        """The first cell."""
        (device, model, gpus), (load, count) = GPUS[self.gpu], LOADS[self.load]
        parts = self.scale if model == "llama-3-8b" else 3 * self.scale
        return Cell(device, model, load, self.limit, -(-count // parts), gpus=gpus)

    def others(self, served: float) -> Iterator[tuple[str, Cell]]:
        """The others, by when requests come; `served` are requests a second, or conversations."""
        at_once, is_turns = self.at_once(), self.load in TURNS
        for rate in RATES:
            yield f"Poisson {rate}", dataclasses.replace(at_once, rate=rate * served if is_turns else rate)
        if not is_turns:
            yield "closed", dataclasses.replace(at_once, clients=-(-at_once.num_requests // 2))


def run_group(group: Group) -> Row:
    """Every preset in every cell: its `rows`."""
    names = tuple(dict.fromkeys([*PRESETS, *(CACHES if group.load in TURNS else HINDSIGHT)]))
    first, rows = group.at_once(), []

    def add(arrivals: str, cell: Cell, served: float) -> None:
        for preset in names:
            found = run(cell, group.seed, preset, served)
            about = {"cell": f"{group.gpu}, {group.load}, {group.limit}, {arrivals}", "seed": group.seed}
            rows.append({**about, "preset": preset, **{key: found[key] for key in (*_FIGURES, _SERVED)}})

    add("at once", first, 1.0)
    served = rows[0][_SERVED]
    if group.load in TURNS:
        served *= first.num_requests / len(trace_of(first, group.seed, 1.0).prompt_lens)
    for arrivals, cell in group.others(served):
        add(arrivals, cell, served)
    return {"rows": rows}


@dataclasses.dataclass(frozen=True)
class Bar:
    """What must hold in every cell: a ratio, of one figure, not beyond a limit."""

    name: str
    figure: str
    limit: float
    ratio: Ratio
    is_least: bool = False
    only_turns: bool = False

    def holds(self, value: float) -> bool:
        """Whether a value keeps it."""
        return value >= self.limit if self.is_least else value <= self.limit

    def values(self, seeds: Mapping[int, Mapping[str, Row]], name: str = "adaptive") -> list[float]:
        """What a preset has in a cell, with each seed."""
        of_seeds = [{preset: row[self.figure] for preset, row in rows.items()} for rows in seeds.values()]
        return [self.ratio(values, name) for values in of_seeds]

    def mean(self, seeds: Mapping[int, Mapping[str, Row]], name: str = "adaptive") -> float:
        """Their mean."""
        return statistics.fmean(self.values(seeds, name))


def _over(*names: str, best: Callable[..., float] = max) -> Ratio:
    return lambda values, preset: values[preset] / best(values[name] for name in names)


_PUBLISHED = tuple(name for name in CACHES if name != "adaptive")
BARS = (
    Bar("mean latency over vllm_v1", "mean_latency_seconds", 1.0, _over("vllm_v1")),
    Bar("99th percentile over vllm_v1", "p99_latency_seconds", 1.05, _over("vllm_v1")),
    Bar(
        "tokens/s over the better of vllm_v1 and adaptive_throughput",
        "tokens_per_second",
        0.99,
        _over("vllm_v1", "adaptive_throughput"),
        is_least=True,
    ),
    Bar("swaps a request", "swaps_per_request", 3.0, lambda values, preset: values[preset]),
    Bar("share computed again", "lost_share", 0.1, lambda values, preset: values[preset]),
    Bar(
        "tokens/s over the best published cache",
        "tokens_per_second",
        0.97,
        _over(*_PUBLISHED),
        is_least=True,
        only_turns=True,
    ),
    Bar(
        "mean latency over the best published cache",
        "mean_latency_seconds",
        1.03,
        _over(*_PUBLISHED, best=min),
        only_turns=True,
    ),
)


def report(rows: Iterable[Row]) -> str:
    """Of each bar in how many cells it holds, and the others; then of each load what the default gains."""
    cells: dict[str, dict[int, dict[str, Row]]] = collections.defaultdict(dict)
    for row in rows:
        cells[row["cell"]].setdefault(row["seed"], {})[row["preset"]] = row
    lines, all_missed = [], set()
    for bar in BARS:
        found = {cell: seeds for cell, seeds in cells.items() if not bar.only_turns or _has_turns(cell)}
        missed = {cell: seeds for cell, seeds in found.items() if not bar.holds(bar.mean(seeds))}
        all_missed |= missed.keys()
        word = "at least" if bar.is_least else "at most"
        lines.append(f"- {bar.name}, {word} {bar.limit}: {len(found) - len(missed)} of {len(found)} cells")
        for cell, seeds in sorted(missed.items(), key=lambda one: bar.mean(one[1]), reverse=not bar.is_least):
            of_seeds = ", ".join(f"{value:.3f}" for value in bar.values(seeds))
            line = f"    - {bar.mean(seeds):.3f} {cell} ({of_seeds})"
            if not _has_turns(cell):
                knowing = " and ".join(f"{bar.mean(seeds, name):.3f}" for name in HINDSIGHT)
                line += f"; knowing lengths {knowing} in order of arrival"
            lines.append(line)
    bounded = [cell for cell in all_missed if not _has_turns(cell)]
    kept = [cell for cell in bounded if any(_keeps_all(cells[cell], name) for name in HINDSIGHT)]
    lines.append(
        f"- in {len(kept)} of these {len(bounded)} cells all bars would be kept by knowing lengths"
        + "".join(f"\n    - {cell}" for cell in sorted(kept))
    )
    return "\n".join([*lines, "", *_gains(cells)])


def _has_turns(cell: str) -> bool:
    return cell.split(", ")[1] in TURNS


def _keeps_all(seeds: Mapping[int, Mapping[str, Row]], name: str) -> bool:
    """Whether a preset keeps every bar of a cell without turns."""
    return all(bar.holds(bar.mean(seeds, name)) for bar in BARS if not bar.only_turns)


def _gains(cells: Mapping[str, Mapping[int, Mapping[str, Row]]]) -> list[str]:
    """A table: geometric means and the worst of the cells of a load."""
    figures = _FIGURES[:4]
    lines = [
        "| load | preset | tokens/s | worst | mean latency | worst | 99th percentile | worst "
        "| first token | worst |",
        "|---|---|" + "---:|" * 8,
    ]
    for load in LOADS:
        of_load = [seeds for cell, seeds in cells.items() if cell.split(", ")[1] == load]
        presets = dict.fromkeys(name for seeds in of_load for rows in seeds.values() for name in rows)
        for preset in presets:
            parts = []
            for figure in figures:
                means = [
                    statistics.geometric_mean(
                        rows[preset][figure] / rows["vllm_v1"][figure] for rows in seeds.values()
                    )
                    for seeds in of_load
                ]
                worst = min(means) if figure == "tokens_per_second" else max(means)
                parts.append(f"{statistics.geometric_mean(means):.3f} | {worst:.2f}")
            lines.append(f"| {load} | `{preset}` | {' | '.join(parts)} |")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Simulate what a folder lacks, and report; returns the exit status."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out-dir", type=NewFolder("results.json", "report.md", journals=["cells.jsonl"]), required=True
    )
    parser.add_argument(
        "--loads", type=list_of(str), default=list(LOADS), help=f"some of {','.join(LOADS)} (default: all)"
    )
    parser.add_argument("--seeds", type=list_of(int), default="0,1,2", help="(default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--scale", type=int, default=1, help="divide the numbers of requests, for a trial")
    args = parser.parse_args(argv)
    if not {*args.loads} <= LOADS.keys():
        parser.error(f"--loads {','.join(args.loads)}: name some of {', '.join(LOADS)}")
    if args.jobs < 1 or args.scale < 1:
        parser.error("--jobs and --scale must be at least 1")
    command = ["python", "scripts/grid_on_silicon.py", *(sys.argv[1:] if argv is None else argv)]
    kinds = itertools.product(args.seeds, GPUS, args.loads, LIMITS)
    groups = [Group(gpu, load, limit, seed, args.scale) for seed, gpu, load, limit in kinds]
    found = run_all(groups, run_group, jobs=args.jobs, journal=args.out_dir / "cells.jsonl")
    rows = [row for group in found for row in group["rows"]]
    write_json(args.out_dir / "results.json", {"command": command_line(command), "rows": rows})
    text = report(rows)
    (args.out_dir / "report.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
