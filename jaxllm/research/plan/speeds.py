"""How fast a model would be on a GPU, simulated by costs of measured kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jaxllm.errors import CapacityError
from jaxllm.predictors.silicon import SiliconCostModel
from jaxllm.predictors.silicon_kernels import Source
from jaxllm.research.simulator.gpu import WatchedCosts, pool_blocks
from jaxllm.research.simulator.run import simulate
from jaxllm.research.workloads import Trace
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.presets import make_preset

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
    sources: dict[Source, float]


def speeds(
    costs: SiliconCostModel,
    lengths: Sequence[tuple[int, int]],
    concurrencies: Sequence[int],
    *,
    num_blocks: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int = 8192,
) -> Iterator[Speed]:
    """Simulated speeds of the engine's scheduler (`adaptive`), for each of `lengths` and `concurrencies`.

    Args:
        costs: of the model on its GPUs.
        lengths: tokens of prompts and outputs.
        concurrencies: clients.
        num_blocks: of the KV pool, and of the host's; None takes what fits (`pool_blocks`).
        max_num_seqs: sequences of a step; None is no bound.
        max_num_batched_tokens: tokens of a step.

    Raises:
        CapacityError: a request has no room, even alone.
    """
    num_blocks = pool_blocks(costs) if num_blocks is None else num_blocks
    for num_input, num_output in lengths:
        needed = -(-(num_input + num_output) // costs.block_size)
        if needed > num_blocks:
            raise CapacityError(
                f"{num_input} and {num_output} tokens need {needed} blocks, more than the {num_blocks} of "
                "the pool"
            )
        for concurrency in concurrencies:
            running = min(concurrency, max_num_seqs or concurrency)
            config = SchedulerConfig(
                num_gpu_blocks=num_blocks,
                block_size=costs.block_size,
                max_model_len=max(2, num_input + num_output),
                max_num_seqs=running,
                max_num_batched_tokens=max(max_num_batched_tokens, running),
                num_host_blocks=num_blocks,
            )
            yield _speed(costs, config, num_input, num_output, concurrency)


def _speed(
    costs: SiliconCostModel, config: SchedulerConfig, num_input: int, num_output: int, concurrency: int
) -> Speed:
    count = _ROUNDS * concurrency
    trace = Trace(
        name=f"{num_input}:{num_output}",
        seed=0,
        arrival_times=np.zeros(count),
        prompt_lens=np.full(count, num_input),
        output_lens=np.full(count, num_output),
        num_clients=concurrency,
    )
    watched = WatchedCosts(costs)
    result = simulate(
        trace,
        config,
        make_preset("adaptive", costs),
        watched,
        overlap_swaps=True,
        client_seconds=CLIENT_SECONDS,
    )
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
        sources=watched.shares(),
    )
