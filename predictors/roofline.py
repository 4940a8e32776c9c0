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
DEFAULT_PIECE_SECONDS = 8e-6
"""Assumed cost of each further piece of a transfer that memory layout breaks up. An assumption."""


class RooflineCostModel:
    """A `CostModel` from a model's shape and a device's data sheet, without any measurement.

    A step takes the longer of all its flops and all its bytes, whatever it mixes:

    | part          | flops                                         | bytes                    |
    |---------------|-----------------------------------------------|--------------------------|
    | linear layers | 2 x layer parameters of a token x tokens      | layer weights            |
    | attention     | 4 x layers x heads x head_dim x (query, key)s | KV read and written      |
    | lm head       | 2 x hidden x vocabulary x sequences           | lm head weights          |

    Weights have the bytes of their format; int8 and float8 are multiplied at the device's rate of these, if
    it has one. Weights are read once in a step, so prompt tokens beside decodes cost what they add to the
    longer of the two. Prefill flops take chunks of equal length; activations are taken to stay in caches. A
    swap takes `transfer_latency_seconds`, its bytes at the link's rate, and `piece_seconds` for each piece of
    its blocks: none where a block's layers lie together (this engine's pool), two for each layer where K and
    V of each are arrays of their own (vLLM 0.2.5).

    Args:
        model: the shape; its dtype picks the device's peak rate.
        device: from `devices.device_spec`, or one's own.
        block_size: tokens per KV block, for swaps.
        compute_efficiency, memory_efficiency, link_efficiency: share of the peak that is reached, in
            [0.001, 1]. `None` takes the `DEFAULT_*` assumption above, or 1 for a device whose figures are
            measurements.
        step_overhead_seconds: fixed cost of a step.
        transfer_latency_seconds: fixed cost of a swap in one direction.
        pieces_per_block: parts of a block that are copied each by itself.
        piece_seconds: fixed cost of each of them.

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
        pieces_per_block: int = 0,
        piece_seconds: float = DEFAULT_PIECE_SECONDS,
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
        check_integer("pieces_per_block", pieces_per_block, 0, 1 << 20)
        check_number("piece_seconds", piece_seconds, 0.0, 60.0)
        for name in ("compute_efficiency", "memory_efficiency", "link_efficiency"):
            check_number(name, getattr(self, name), 0.001, 1.0)
        for name in ("step_overhead_seconds", "transfer_latency_seconds"):
            check_number(name, getattr(self, name), 0.0, 60.0)

        # Seconds per unit of work: a prediction is a few products, for simulators ask for millions.
        rate = device.flops_for(model.dtype)
        flop = 1.0 / (rate * self.compute_efficiency)
        byte = 1.0 / (device.memory_bandwidth * self.memory_efficiency)
        rates = [device.peak_flops.get(one, rate) for one in (model.products, model.head_products)]
        self._linear_per_token = 2 * model.num_active_parameters / (rates[0] * self.compute_efficiency)
        self._head_per_seq = 2 * model.num_head_parameters / (rates[1] * self.compute_efficiency)
        head_bytes = model.num_head_parameters * model.bytes_per_head_parameter
        self._weights = (model.num_layer_parameters * model.bytes_per_parameter + head_bytes) * byte
        self._attention_per_pair = 4 * model.num_layers * model.num_heads * model.head_dim * flop
        self._kv_per_token = model.kv_bytes_per_token * byte
        link = device.host_bandwidth * self.link_efficiency
        self._swap_per_block = model.block_bytes(block_size) / link + pieces_per_block * piece_seconds

    def step_seconds(
        self,
        batch: int,
        context_tokens: int,
        prompt_tokens: int = 0,
        num_prompts: int = 0,
        prompt_context: int = 0,
    ) -> float:
        """Seconds of a step; see `CostModel.step_seconds`. Every sequence samples once."""
        pairs = kv_tokens = 0.0
        if batch > 0:
            pairs = max(context_tokens, 0)
            kv_tokens = batch + pairs
        else:
            batch = 0
        if prompt_tokens > 0 and num_prompts > 0:
            # A query sees its sequence's context, and on average half of its own chunk.
            context = max(prompt_context, 0)
            pairs += prompt_tokens * (context / num_prompts + (prompt_tokens / num_prompts + 1) / 2)
            kv_tokens += 2 * prompt_tokens + context  # new ones are written and read
        elif batch:
            prompt_tokens = num_prompts = 0
        else:
            return 0.0
        compute = (
            self._linear_per_token * (batch + prompt_tokens)
            + self._attention_per_pair * pairs
            + self._head_per_seq * (batch + num_prompts)
        )
        memory = self._weights + self._kv_per_token * kv_tokens
        return self.step_overhead_seconds + (compute if compute > memory else memory)

    def swap_out_seconds(self, num_blocks: int) -> float:
        """Seconds to copy blocks to the host: KV bytes / DtoH bandwidth (AdaptiveLLM), and a latency."""
        if num_blocks <= 0:
            return 0.0
        return self.transfer_latency_seconds + num_blocks * self._swap_per_block

    def swap_in_seconds(self, num_blocks: int) -> float:
        """Seconds to copy blocks to the device: KV bytes / HtoD bandwidth (AdaptiveLLM), and a latency."""
        return self.swap_out_seconds(num_blocks)

    def __repr__(self) -> str:
        return (
            f"RooflineCostModel({self.model.name!r}, {self.model.dtype}, {self.device.name!r}, efficiencies "
            f"{self.compute_efficiency}/{self.memory_efficiency}/{self.link_efficiency})"
        )


def _efficiency(given: float | None, assumed: float, is_measured: bool) -> float:
    if given is not None:
        return given
    return 1.0 if is_measured else assumed
