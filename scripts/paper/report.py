"""The Markdown report of the evaluation: each figure and table of the paper beside ours."""

from __future__ import annotations

import itertools
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sweep.options import in_words
from sweep.simulated import BLOCK_SIZE, NUM_GPU_BLOCKS, NUM_HOST_BLOCKS

from jaxllm.research.workloads import DATASETS as SHAPES
from paper import published
from paper.bound import most_tokens_per_second
from paper.cells import OWN, PRESETS, prompts_of, recorded

Row = Mapping[str, Any]
RATE, TURNAROUND = "output_tokens_per_second", "mean_weighted_turnaround"
OUTPUT_NAMES = {"max": "all of 64 tokens", "uniform": "uniform in 16 to 64 tokens"}


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


def introduction(
    command: str,
    facts: str,
    seeds: Sequence[int],
    requests: int,
    pools: tuple[int, int] = (NUM_GPU_BLOCKS, NUM_HOST_BLOCKS),
) -> list[str]:
    """What was run; `pools` are blocks of device and host."""
    return [
        "# AdaptiveLLM's evaluation",
        "",
        f"Command: `{command}`. {requests} requests a run; seeds {list(seeds)}, medians over them. "
        f"{pools[0]} device and {pools[1]} host blocks of {BLOCK_SIZE} tokens.",
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


def prompts(datasets: Sequence[str], data: Mapping[str, str], trace: str | None = None) -> str:
    """Where the prompts are from; `data` has files by data set, as for `prompts_of`, `trace` a file."""
    if trace is not None:
        return f"Requests of {', '.join(datasets)}: {'; '.join(recorded(trace).notes)}."
    found = [f"{name}: {_of_file(data[name])}" for name in datasets if name in data]
    assumed = [name for name in datasets if name not in data]
    if assumed:
        found.append(f"{', '.join(assumed)}: lognormal with the paper's means, the spread is an assumption")
    return f"Prompt lengths of {'; of '.join(found)}."


def _of_file(data: str) -> str:
    """The file, how many prompts it has, and their mean."""
    of_file, path = prompts_of(data), data.rsplit(":", 2)[0]
    return (
        f"`{pathlib.Path(path).name}`, {len(of_file):,} prompts of {of_file.prompt_lens.mean():.2f} tokens "
        "on average"
    )


def datasets(data: Mapping[str, str]) -> list[str]:
    """Table 2, and what stands for it: shapes assumed, or files in `data`."""
    lines = [
        "## Data sets (Table 2)",
        "",
        "The paper gives means, not shapes. Shapes are assumptions (`jaxllm.research.workloads.lengths`); "
        "with the data sets' own files `--data NAME=FILE:COLUMN:TOKENIZER` reads the prompts instead "
        "(`jaxllm.research.workloads.load_dataset_file`).",
        "",
        "| data | source | samples | mean tokens: paper's | ours | ours are |",
        "|---|---|---:|---:|---:|---|",
    ]
    for name, (source, samples, mean) in published.TABLE2.items():
        shape = SHAPES[name]
        ours = f"{shape.mean}"
        what = f"lognormal, sigma {shape.sigma}, clipped to {shape.shortest}-{shape.longest}"
        if name in data:
            ours, what = f"{prompts_of(data[name]).prompt_lens.mean():.2f}", _of_file(data[name])
        lines.append(f"| {name} | {source} | {samples:,} | {mean} | {ours} | {what} |")
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
            bound = memory_bound(of_group)
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


def memory_bound(cells: Cells, max_output_len: int = 64) -> float | None:
    """Output tokens/s, median over seeds; None for models and data that are not the paper's."""
    found = {}
    for row in cells.rows:
        is_own = any(row.get(name) is not None for name in OWN)
        if row["model"] not in published.TABLE3 or row["data"] is not None or is_own:
            return None
        of_row = row["model"], row["dataset"], row["outputs"], row["num_requests"], row["seed"]
        source = row["costs"] or "roofline"
        found[row["seed"]] = most_tokens_per_second(*of_row, max_output_len, source=source)
    return statistics.median(found.values())


def span(values: Sequence[float], form: str) -> str:
    """The least and the most."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low}..{high}"
