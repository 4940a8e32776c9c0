"""A simulated GPU: the KV pool that its memory has room for, and costs that note where they are from."""

from __future__ import annotations

import collections

from jaxllm.errors import CapacityError
from jaxllm.predictors.devices import DeviceSpec
from jaxllm.predictors.silicon import SiliconCostModel
from jaxllm.predictors.silicon_kernels import Source

UTILIZATION = 0.9
"""Share of a GPU's memory that a server takes, as vLLM's by default."""
RESERVED_BYTES = 3e9
"""Of each GPU's share, for activations, communication and the driver; an assumption."""
_EVERY = 16  # steps: whose parts are looked at


def pool_blocks(costs: SiliconCostModel, utilization: float = UTILIZATION) -> int:
    """KV blocks that fit the memory of all of a model's GPUs beside its weights.

    Args:
        costs: of the model on its GPUs.
        utilization: share of the memory of each that is used, of which `RESERVED_BYTES` are not for KV.

    Raises:
        CapacityError: the weights leave no room.
    """
    gpus = costs.tensor_parallel * costs.pipeline_parallel
    block_bytes = costs.kv_bytes_per_token * costs.block_size
    return blocks_beside(costs.weight_bytes, block_bytes, costs.device, utilization, gpus)


def blocks_beside(
    weight_bytes: int, block_bytes: int, device: DeviceSpec, utilization: float = UTILIZATION, gpus: int = 1
) -> int:
    """The same of any weights and blocks.

    Raises:
        CapacityError: the weights leave no room.
    """
    room = gpus * (device.memory_bytes * utilization - RESERVED_BYTES) - weight_bytes
    num_blocks = int(room / block_bytes)
    if num_blocks < 1:
        raise CapacityError(
            f"{weight_bytes / 1e9:.1f} GB of weights leave no room for KV in {utilization:g} of the "
            f"{device.memory_bytes / 1e9:g} GB of {gpus} x {device.name}, less "
            f"{RESERVED_BYTES / 1e9:g} GB each; take more of them, or weights of fewer bits (quantization)"
        )
    return num_blocks


class WatchedCosts:
    """Costs of which it is noted where they are from, in every so many steps.

    Args:
        model: is asked.
    """

    def __init__(self, model: SiliconCostModel) -> None:
        self.model = model
        self._num_steps = 0
        self._work: tuple[int, ...] | None = None  # the decodes alone, of a step that may have prompts, too
        self._seconds: collections.defaultdict[Source, float] = collections.defaultdict(float)

    def step_seconds(
        self,
        batch: int,
        context_tokens: int,
        prompt_tokens: int = 0,
        num_prompts: int = 0,
        prompt_context: int = 0,
    ) -> float:
        """The model's."""
        work = batch, context_tokens, prompt_tokens, num_prompts, prompt_context
        if self._work is not None:
            self._look(work if prompt_tokens else self._work)
        if not (batch and prompt_tokens):  # of a step with both, the decodes are asked for first
            if self._num_steps % _EVERY == 0:
                self._work = work
            self._num_steps += 1
        return self.model.step_seconds(*work)

    def swap_out_seconds(self, num_blocks: int) -> float:
        """The model's."""
        return self.model.swap_out_seconds(num_blocks)

    def swap_in_seconds(self, num_blocks: int) -> float:
        """The model's."""
        return self.model.swap_in_seconds(num_blocks)

    def forget(self) -> None:
        """Begin anew."""
        self._num_steps, self._work = 0, None
        self._seconds.clear()

    def shares(self) -> dict[Source, float]:
        """Shares of the seconds by source, the largest first."""
        if self._work is not None:
            self._look(self._work)
        total = sum(self._seconds.values()) or 1.0
        ranked = sorted(self._seconds.items(), key=lambda item: -item[1])
        return {source: seconds / total for source, seconds in ranked}

    def _look(self, work: tuple[int, ...]) -> None:
        self._work = None
        for part in self.model.parts(*work):
            self._seconds[part.source] += part.seconds
