"""Costs from peak rates: what a step takes if each part of it runs at a fixed share of the peak."""

from __future__ import annotations

from jaxllm.predictors.base import ModelShape, check_integer, check_number
from jaxllm.predictors.devices import DeviceSpec

DEFAULT_COMPUTE_EFFICIENCY = 0.6
"""Assumed share of peak flops that large matrix products reach. An assumption, not a measurement."""
DEFAULT_MEMORY_EFFICIENCY = 0.8
"""Assumed share of peak bandwidth at which weights and KV are read. An assumption, not a measurement."""
DEFAULT_LINK_EFFICIENCY = 0.8
"""Assumed share of the PCIe rate that large pinned copies reach. An assumption, not a measurement."""
DEFAULT_STEP_OVERHEAD_SECONDS = 0.5e-3
"""Assumed fixed cost of a step: launching the program and the kernels' tails. An assumption."""
DEFAULT_TRANSFER_LATENCY_SECONDS = 20e-6
"""Assumed fixed cost of a host transfer, however small. An assumption."""


class RooflineCostModel:
    """A `CostModel` from a model's shape and a device's data sheet, without any measurement.

    A step runs three parts one after another, and each takes the longer of its flops and its bytes:

    | part          | flops                                         | bytes                    |
    |---------------|-----------------------------------------------|--------------------------|
    | linear layers | 2 x layer parameters x tokens                 | layer weights            |
    | attention     | 4 x layers x heads x head_dim x (query, key)s | KV read and written      |
    | lm head       | 2 x hidden x vocabulary x sequences           | lm head weights          |

    Prefill flops take sequences of equal length; activations are taken to stay in caches. A swap takes
    `transfer_latency_seconds` and its bytes at the link's rate.

    Args:
        model: the shape; its dtype picks the device's peak rate.
        device: from `devices.device_spec`, or one's own.
        block_size: tokens per KV block, for swaps.
        compute_efficiency, memory_efficiency, link_efficiency: share of the peak that is reached, in
            [0.001, 1]. `None` takes the `DEFAULT_*` assumption above, or 1 for a device whose figures are
            measurements.
        step_overhead_seconds: fixed cost of a step.
        transfer_latency_seconds: fixed cost of a swap in one direction.

    Raises:
        ConfigError: a value is out of range, or the device has no rate for the model's dtype.
    """

    def __init__(
        self,
        model: ModelShape,
        device: DeviceSpec,
        *,
        block_size: int = 16,
        compute_efficiency: float | None = None,
        memory_efficiency: float | None = None,
        link_efficiency: float | None = None,
        step_overhead_seconds: float = DEFAULT_STEP_OVERHEAD_SECONDS,
        transfer_latency_seconds: float = DEFAULT_TRANSFER_LATENCY_SECONDS,
    ) -> None:
        measured = device.is_measured
        self.model = model
        self.device = device
        self.block_size = block_size
        self.compute_efficiency = _efficiency(compute_efficiency, DEFAULT_COMPUTE_EFFICIENCY, measured)
        self.memory_efficiency = _efficiency(memory_efficiency, DEFAULT_MEMORY_EFFICIENCY, measured)
        self.link_efficiency = _efficiency(link_efficiency, DEFAULT_LINK_EFFICIENCY, measured)
        self.step_overhead_seconds = step_overhead_seconds
        self.transfer_latency_seconds = transfer_latency_seconds
        check_integer("block_size", block_size, 1, 1024)
        for name in ("compute_efficiency", "memory_efficiency", "link_efficiency"):
            check_number(name, getattr(self, name), 0.001, 1.0)
        for name in ("step_overhead_seconds", "transfer_latency_seconds"):
            check_number(name, getattr(self, name), 0.0, 60.0)

        # Seconds per unit of work: a prediction is a few products, for simulators ask for millions.
        flop = 1.0 / (device.flops_for(model.dtype) * self.compute_efficiency)
        byte = 1.0 / (device.memory_bandwidth * self.memory_efficiency)
        self._linear_per_token = 2 * model.num_layer_parameters * flop
        self._linear_bytes = model.num_layer_parameters * model.itemsize * byte
        self._head_per_seq = 2 * model.num_head_parameters * flop
        self._head_bytes = model.num_head_parameters * model.itemsize * byte
        self._attention_per_pair = 4 * model.num_layers * model.num_heads * model.head_dim * flop
        self._kv_per_token = model.kv_bytes_per_token * byte
        self._swap_per_block = model.block_bytes(block_size) / (device.host_bandwidth * self.link_efficiency)

    def prefill_seconds(self, num_tokens: int, num_seqs: int, context_tokens: int = 0) -> float:
        """Seconds of a prefill step; see `CostModel.prefill_seconds`. Every sequence samples once."""
        if num_tokens <= 0 or num_seqs <= 0:
            return 0.0
        if context_tokens < 0:
            context_tokens = 0
        # A query sees its sequence's context, and on average half of its own chunk.
        pairs = num_tokens * (context_tokens / num_seqs + (num_tokens / num_seqs + 1) / 2)
        kv_tokens = 2 * num_tokens + context_tokens  # new ones are written and read
        return self._step(num_tokens, num_seqs, pairs, kv_tokens)

    def decode_seconds(self, batch: int, context_tokens: int) -> float:
        """Seconds of a decode step; see `CostModel.decode_seconds`."""
        if batch <= 0:
            return 0.0
        if context_tokens < 0:
            context_tokens = 0
        return self._step(batch, batch, context_tokens, batch + context_tokens)

    def swap_out_seconds(self, num_blocks: int) -> float:
        """Seconds to copy blocks to the host: KV bytes / DtoH bandwidth (AdaptiveLLM), and a latency."""
        if num_blocks <= 0:
            return 0.0
        return self.transfer_latency_seconds + num_blocks * self._swap_per_block

    def swap_in_seconds(self, num_blocks: int) -> float:
        """Seconds to copy blocks to the device: KV bytes / HtoD bandwidth (AdaptiveLLM), and a latency."""
        return self.swap_out_seconds(num_blocks)

    def _step(self, num_tokens: int, num_sampled: int, pairs: float, kv_tokens: int) -> float:
        linear = self._linear_per_token * num_tokens
        attention = self._attention_per_pair * pairs
        kv = self._kv_per_token * kv_tokens
        head = self._head_per_seq * num_sampled
        # max() would take as long as all the rest.
        return (
            self.step_overhead_seconds
            + (linear if linear > self._linear_bytes else self._linear_bytes)
            + (attention if attention > kv else kv)
            + (head if head > self._head_bytes else self._head_bytes)
        )

    def __repr__(self) -> str:
        return (
            f"RooflineCostModel({self.model.name!r}, {self.model.dtype}, {self.device.name!r}, efficiencies "
            f"{self.compute_efficiency}/{self.memory_efficiency}/{self.link_efficiency})"
        )


def _efficiency(given: float | None, assumed: float, is_measured: bool) -> float:
    if given is not None:
        return given
    return 1.0 if is_measured else assumed
