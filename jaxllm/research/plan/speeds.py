"""How fast a model would be on a GPU, simulated by costs of measured kernels."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jaxllm.errors import CapacityError
from jaxllm.predictors.silicon import SiliconCostModel
from jaxllm.research.simulator.run import simulate
from jaxllm.research.workloads import Trace
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.presets import make_preset

UTILIZATION = 0.9
RESERVED_BYTES = 3e9
"""Of a GPU's memory, beside weights and KV: activations, communication, the driver."""
CLIENT_SECONDS = 0.025
"""Mean time, assumed, from an answer to its client's next request."""
_ROUNDS = 3  # of all clients, of which the first is not counted


@dataclasses.dataclass(frozen=True)
class Speed:
    """A server's speed with so many clients, each of which sends its next request when it has its answer.

    Seconds are means over requests; `sources` are shares of the steps' seconds by where these are from.
    """

    input_tokens: int
    output_tokens: int
    concurrency: int
    tokens_per_second: float
    seconds_per_token: float
    first_token_seconds: float
    num_preemptions: int
    sources: dict[str, float]


def pool_blocks(costs: SiliconCostModel) -> int:
    """KV blocks that fit the memory of all GPUs beside weights, at `UTILIZATION`.

    Raises:
        CapacityError: the weights leave no room.
    """
    model, gpus = costs.model, costs.tensor_parallel * costs.pipeline_parallel
    itemsize = 1 if costs.weights.startswith("fp8") else 2
    weights = model.num_parameters * itemsize
    room = gpus * (costs.device.memory_bytes * UTILIZATION - RESERVED_BYTES) - weights
    num_blocks = int(room / (costs.kv_bytes_per_token * costs.block_size))
    if num_blocks < 1:
        raise CapacityError(
            f"{weights / 1e9:.1f} GB of weights leave no room for KV in {UTILIZATION:g} of the "
            f"{costs.device.memory_bytes / 1e9:g} GB of {gpus} x {costs.device.name}, less "
            f"{RESERVED_BYTES / 1e9:g} GB each; take more of them, or FP8"
        )
    return num_blocks


def speeds(
    costs: SiliconCostModel,
    lengths: Sequence[tuple[int, int]],
    concurrencies: Sequence[int],
    *,
    max_num_batched_tokens: int = 8192,
) -> Iterator[Speed]:
    """Simulated speeds of the engine's scheduler (`adaptive`), for each of `lengths` and `concurrencies`.

    Args:
        costs: of the model on its GPUs.
        lengths: tokens of prompts and outputs.
        concurrencies: clients.
        max_num_batched_tokens: tokens of a step.

    Raises:
        CapacityError: a request has no room, even alone.
    """
    num_blocks = pool_blocks(costs)
    for num_input, num_output in lengths:
        needed = -(-(num_input + num_output) // costs.block_size)
        if needed > num_blocks:
            raise CapacityError(
                f"{num_input} and {num_output} tokens need {needed} blocks, more than the {num_blocks} of "
                "the pool"
            )
        for concurrency in concurrencies:
            yield _speed(costs, num_blocks, num_input, num_output, concurrency, max_num_batched_tokens)


def _speed(
    costs: SiliconCostModel, num_blocks: int, num_input: int, num_output: int, concurrency: int, most: int
) -> Speed:
    count = _ROUNDS * concurrency
    trace = Trace(
        name=f"{num_input}:{num_output}",
        seed=0,
        arrival_times=np.zeros(count),
        prompt_lens=np.full(count, num_input),
        output_lens=np.full(count, num_output),
        num_clients=concurrency,
        # Clients that all answered at once would march in step for ever.
        think_times=np.random.default_rng(0).uniform(0.0, 2 * CLIENT_SECONDS, count),
    )
    config = SchedulerConfig(
        num_gpu_blocks=num_blocks,
        block_size=costs.block_size,
        max_model_len=max(2, num_input + num_output),
        max_num_seqs=concurrency,
        max_num_batched_tokens=max(most, concurrency),
        num_host_blocks=num_blocks,
    )
    watched = _Watched(costs)
    result = simulate(trace, config, make_preset("adaptive", costs), watched, overlap_swaps=True)
    counted = slice(concurrency, None)  # the first round marches in step
    first = result.first_token_times[counted] - result.arrival_times[counted]
    rest = result.finish_times[counted] - result.first_token_times[counted]
    began = float(np.sort(result.finish_times)[concurrency - 1])
    seconds = result.seconds - (began - float(result.arrival_times.min()))
    return Speed(
        input_tokens=num_input,
        output_tokens=num_output,
        concurrency=concurrency,
        tokens_per_second=(count - concurrency) * num_output / seconds,
        seconds_per_token=float(np.mean(rest) / max(1, num_output - 1)),
        first_token_seconds=float(np.mean(first)),
        num_preemptions=result.num_preemptions,
        sources=watched.sources(),
    )


class _Watched:
    """Costs that remember where the steps' seconds are from; of many steps alike, one is looked at."""

    def __init__(self, costs: SiliconCostModel) -> None:
        self._costs = costs
        self._seconds: collections.Counter[str] = collections.Counter()
        self._num_asked = 0

    def step_seconds(
        self,
        batch: int,
        context_tokens: int,
        prompt_tokens: int = 0,
        num_prompts: int = 0,
        prompt_context: int = 0,
    ) -> float:
        work = batch, context_tokens, prompt_tokens, num_prompts, prompt_context
        if self._num_asked % 64 == 0:
            for part in self._costs.parts(*work):
                self._seconds[part.source] += part.seconds  # type: ignore[assignment]
        self._num_asked += 1
        return self._costs.step_seconds(*work)

    def swap_out_seconds(self, num_blocks: int) -> float:
        return self._costs.swap_out_seconds(num_blocks)

    def swap_in_seconds(self, num_blocks: int) -> float:
        return self._costs.swap_in_seconds(num_blocks)

    def sources(self) -> dict[str, float]:
        total = sum(self._seconds.values())
        return {name: seconds / total for name, seconds in self._seconds.most_common()}
