"""From which context on is swapping faster than recomputing?"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from jaxllm.errors import CapacityError, ConfigError
from jaxllm.predictors.base import CostModel, ModelShape
from jaxllm.predictors.devices import DEVICES
from jaxllm.predictors.silicon import SiliconCostModel
from jaxllm.research.figures import import_pyplot, save
from jaxllm.research.simulator.gpu import pool_blocks

_LONGEST = 131072
_LINKS = 22e9, 50e9
_MOST_GPUS = 8
_ALONE, _BUSY = "#56b4e9", "#d55e00"
_LEAST_POOL = 16384  # tokens that a device must have room for beside the weights


@dataclasses.dataclass(frozen=True)
class Busy:
    """What else a step computes: `batch` sequences that decode after `context` tokens each."""

    batch: int
    context: int

    def recompute_seconds(self, costs: CostModel, num_tokens: int, most: int) -> float:
        """What prompts of so many tokens add to steps that decode, in chunks of at most `most` tokens."""
        added, done = 0.0, 0
        decodes = costs.step_seconds(self.batch, self.batch * self.context)
        while done < num_tokens:
            length = min(most - self.batch, num_tokens - done)
            added += costs.step_seconds(self.batch, self.batch * self.context, length, 1, done) - decodes
            done += length
        return added


ALONE = Busy(0, 0)
BUSY = Busy(64, 1000)


def crossover(
    costs: SiliconCostModel, busy: Busy = ALONE, *, max_num_batched_tokens: int = 8192
) -> int | None:
    """The fewest tokens from which on copying KV out and back takes less than computing it again.

    Args:
        costs: of a model on its GPUs.
        busy: what decodes in the steps that compute it; copies are not hidden behind them.
        max_num_batched_tokens: tokens of a step.

    Returns:
        Tokens, in whole blocks, up to 131,072; None if copying takes longer up to there.
    """
    found = None
    sizes = sorted({round(costs.block_size * 2 ** (step / 8)) for step in range(8 * 13 + 1)})
    for num_blocks in sorted({max(1, size // costs.block_size) for size in sizes}, reverse=True):
        num_tokens = num_blocks * costs.block_size
        if num_tokens > _LONGEST:
            continue
        swap = costs.swap_out_seconds(num_blocks) + costs.swap_in_seconds(num_blocks)
        if swap >= busy.recompute_seconds(costs, num_tokens, max_num_batched_tokens):
            return found
        found = num_tokens
    return found


@dataclasses.dataclass(frozen=True)
class Crossover:
    """Where copying out and back gets cheaper than computing again; in tokens, None for nowhere.

    `alone` is with nothing else to do, `busy` within steps of `BUSY`. `link` is in bytes per second of one
    GPU.
    """

    model: str
    device: str
    gpus: int
    link: float
    alone: int | None
    busy: int | None
    swap_ms_of_4096: float
    recompute_ms_of_4096: float
    source: str


def crossovers(shapes: Iterable[ModelShape], devices: Iterable[str]) -> Iterator[Crossover]:
    """For each model and device, on as few GPUs as hold the weights, over each kind of link.

    Links are the device's own, and what PCIe of the fourth and fifth generation reach (22 and 50 GB/s).
    """
    devices = list(devices)
    for shape in shapes:
        for device in devices:
            costs = _fewest_gpus(shape, device)
            if costs is None:
                continue
            own = DEVICES[device].copied_per_second
            for link in sorted({own, *(other for other in _LINKS if not 0.9 < other / own < 1.1)}):
                yield _of(shape, device, costs.tensor_parallel, link)


def _fewest_gpus(shape: ModelShape, device: str) -> SiliconCostModel | None:
    gpus = 1
    while gpus <= _MOST_GPUS:
        if shape.num_heads % gpus == 0:
            try:
                costs = SiliconCostModel(shape, device, tensor_parallel=gpus)
            except ConfigError as error:
                raise ConfigError(f"{shape.name} on {device}: {error}") from error
            with contextlib.suppress(CapacityError):
                if pool_blocks(costs) * costs.block_size >= _LEAST_POOL:
                    return costs
        gpus *= 2
    return None


def _of(shape: ModelShape, device: str, gpus: int, link: float) -> Crossover:
    costs = SiliconCostModel(shape, device, tensor_parallel=gpus, link=link)
    num_blocks = 4096 // costs.block_size
    return Crossover(
        model=shape.name,
        device=device,
        gpus=gpus,
        link=link,
        alone=crossover(costs),
        busy=crossover(costs, BUSY),
        swap_ms_of_4096=1e3 * (costs.swap_out_seconds(num_blocks) + costs.swap_in_seconds(num_blocks)),
        recompute_ms_of_4096=1e3 * costs.step_seconds(0, 0, 4096, 1),
        source=costs.tables.source,
    )


def plot_crossovers(found: Sequence[Crossover], path: Path) -> None:
    """Draw for each model, and each device and link, at which contexts swapping wins.

    Args:
        found: of at least one model.
        path: of the image.

    Raises:
        ConfigError: matplotlib is missing, or writes no such files.
    """
    pyplot = import_pyplot()
    models = list(dict.fromkeys(one.model for one in found))
    counts = [sum(one.model == model for one in found) for model in models]
    figure, panels = pyplot.subplots(
        len(models),
        1,
        sharex=True,
        figsize=(9, 1.2 + 0.26 * len(found)),
        layout="constrained",
        squeeze=False,
        height_ratios=counts,
    )
    for panel, model in zip(panels.flat, models, strict=True):
        rows = [one for one in found if one.model == model]
        for place, one in enumerate(rows):
            for start, colour, height in ((one.alone, _ALONE, 0.7), (one.busy, _BUSY, 0.3)):
                if start is not None:
                    panel.barh(place, _LONGEST - start, left=start, height=height, color=colour)
        names = [f"{one.gpus} x {one.device}, {one.link / 1e9:.0f} GB/s" for one in rows]
        panel.set_yticks(range(len(rows)), names, fontsize=8)
        panel.set_ylim(len(rows) - 0.5, -0.5)
        panel.set_title(model, loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    panel.set_xscale("log", base=2)
    panel.set_xlim(16, _LONGEST)
    ticks = [16 * 4**power for power in range(7)]
    panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    panel.set_xlabel("tokens whose KV is copied out and back, or computed again")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in (_ALONE, _BUSY)]
    labels = "swapping wins alone", f"and in steps in which {BUSY.batch} requests decode"
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    save(figure, path)


def describe_crossovers(found: Iterable[Crossover]) -> str:
    """As Markdown."""
    lines = [
        "Simulated from kernels measured on GPUs. Swapping copies KV to the host and back; recomputing "
        "prefills it again.",
        "Busy: in steps in which 64 requests decode after 1,000 tokens each.",
        "",
        "| model | GPUs | link, GB/s | swapping wins from (tokens) | busy | 4,096 tokens: swap, ms | "
        "recompute, ms |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for one in found:
        alone, busy = ("never" if tokens is None else f"{tokens:,}" for tokens in (one.alone, one.busy))
        lines.append(
            f"| {one.model} | {one.gpus} x {one.device} | {one.link / 1e9:.0f} | {alone} | {busy} | "
            f"{one.swap_ms_of_4096:.1f} | {one.recompute_ms_of_4096:.1f} |"
        )
    return "\n".join(lines)
