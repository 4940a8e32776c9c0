"""How many GPUs share a model: memory and simulated speeds of each layout, and the smallest within bounds."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxllm.errors import CapacityError, ConfigError
from jaxllm.predictors.base import ModelShape
from jaxllm.predictors.devices import DeviceSpec
from jaxllm.predictors.silicon import SiliconCostModel
from jaxllm.research.plan.speeds import Speed, speeds
from jaxllm.research.simulator.gpu import UTILIZATION, pool_blocks

BOUNDS = {"ttft": "first_token_seconds", "tpot": "seconds_per_token"}
"""Names of bounds, and the figure of `Speed` that each is of."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """GPUs that share each layer, times stages of layers.

    Attributes:
        weight_bytes: of each GPU, on average.
        num_blocks: of the KV pool of all together.
        source: of the costs.
        speeds: simulated.
        why_not: why there are none.
    """

    tensor_parallel: int
    pipeline_parallel: int
    weight_bytes: float = 0.0
    num_blocks: int = 0
    source: str = ""
    speeds: tuple[Speed, ...] = ()
    why_not: str = ""

    @property
    def num_gpus(self) -> int:
        """Of all stages."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def name(self) -> str:
        """For people."""
        stages = f" x PP {self.pipeline_parallel}" if self.pipeline_parallel > 1 else ""
        return f"TP {self.tensor_parallel}{stages}"


def layouts(
    shape: ModelShape,
    device: str | DeviceSpec,
    tensor_parallel: Sequence[int],
    pipeline_parallel: Sequence[int],
    lengths: Sequence[tuple[int, int]],
    concurrencies: Sequence[int],
    *,
    block_size: int = 16,
    utilization: float = UTILIZATION,
    num_blocks: int | None = None,
    **options: Any,
) -> Iterator[Layout]:
    """All layouts, those of fewer GPUs first.

    Args:
        shape: of the model.
        device: each GPU.
        tensor_parallel: numbers of GPUs that share each layer.
        pipeline_parallel: numbers of stages.
        lengths: tokens of prompts and outputs.
        concurrencies: clients.
        block_size: tokens of a block.
        utilization: share of each GPU's memory that is used.
        num_blocks: of the pool; None takes what fits.
        options: of `speeds`.
    """
    pairs = itertools.product(tensor_parallel, pipeline_parallel)
    for shared, stages in sorted(set(pairs), key=lambda pair: (pair[0] * pair[1], pair[1])):
        try:
            layout: Any = {"tensor_parallel": shared, "pipeline_parallel": stages}
            costs = SiliconCostModel(shape, device, block_size=block_size, in_parts=True, **layout)
            count = num_blocks or pool_blocks(costs, utilization)
            found = tuple(speeds(costs, lengths, concurrencies, num_blocks=count, **options))
        except (CapacityError, ConfigError) as error:
            yield Layout(shared, stages, why_not=str(error))
            continue
        weights = costs.weight_bytes / (shared * stages)
        yield Layout(shared, stages, weights, count, costs.tables.source, found)


def smallest_within(
    found: Sequence[Layout], bounds: Mapping[str, float]
) -> dict[tuple[int, int, int], Layout | None]:
    """Of each prompt, output and number of clients the layout of fewest GPUs within bounds.

    Of layouts of as many GPUs it is the one of most tokens a second.

    Args:
        found: layouts.
        bounds: by names of `BOUNDS`, seconds.

    Returns:
        None where there is none.
    """
    best: dict[tuple[int, int, int], tuple[int, float, Layout] | None] = {}
    for layout in found:
        for speed in layout.speeds:
            cell = speed.input_tokens, speed.output_tokens, speed.concurrency
            known = best.setdefault(cell, None)
            if any(getattr(speed, BOUNDS[name]) > most for name, most in bounds.items()):
                continue
            if known is None or (layout.num_gpus, -speed.tokens_per_second) < known[:2]:
                best[cell] = layout.num_gpus, -speed.tokens_per_second, layout
    return {cell: one and one[2] for cell, one in best.items()}
