"""`Record`: a server that was measured, its load, and what was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import ModelShape
from jaxllm.predictors.published_shapes import MODEL_SHAPES, model_shape
from jaxllm.research.simulator.gpu import UTILIZATION

Metric = Literal["latency", "tpot", "ttft", "throughput"]
METRICS: tuple[Metric, ...] = ("latency", "tpot", "ttft", "throughput")
"""Seconds of a request, of each token after its first one, and of its first one; requests per second."""
Statistic = Literal["mean", "median"]

MAX_NUM_SEQS = 1024
MAX_NUM_BATCHED_TOKENS = 8192
"""What vLLM's server takes on GPUs of 70 GiB and more, where a record does not say."""
BLOCK_SIZE = 16


class Figure(NamedTuple):
    """What was measured: a mean, or the median where only that is known."""

    value: float
    statistic: Statistic = "mean"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """A replica of vLLM.

    Args:
        shape: of the model, in 16 bits.
        device: of the table.
        weights, kv: dtypes as of `SiliconCostModel`.
        tensor_parallel, pipeline_parallel: GPUs.
        max_num_seqs, max_num_batched_tokens, max_model_len: limits of its scheduler.
        gpu_memory_utilization: share of each GPU's memory that is its own.
        prefix_caching: whether it finds prompts again.
        async_scheduling: whether it plans each step while the one before runs.
    """

    shape: ModelShape
    device: str
    weights: str
    kv: str = "bfloat16"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    max_num_seqs: int = MAX_NUM_SEQS
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS
    max_model_len: int = 2**20
    gpu_memory_utilization: float = UTILIZATION
    prefix_caching: bool = True
    async_scheduling: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What clients ask for: so many requests a second for `seconds`, or so many at a time.

    Args:
        prompt_len, output_len: tokens of each request.
        rate: requests a second at a constant pace; None in a closed loop.
        concurrency: clients of a closed loop; 0 in an open one.
        seconds: how long it lasted; None if nobody says.
        num_requests: that were completed; None if nobody says.
        num_users: who ask in turn, each the same prompt every time; 0 if all prompts differ.
        users_per_prefix, prefix_len: users whose prompts begin with the same tokens, and with how many.
        known_share: of the prompts, that an earlier run has left in the prefix cache.
    """

    prompt_len: int
    output_len: int
    rate: float | None = None
    concurrency: int = 0
    seconds: float | None = None
    num_requests: int | None = None
    num_users: int = 0
    users_per_prefix: int = 1
    prefix_len: int = 0
    known_share: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A load on a server, and what was measured.

    Args:
        name: unique in its file.
        server, load: None if they cannot be simulated; then everything is left out.
        measured: what there is to compare.
        left_out: what there is and is not compared, and why; all of it if the key is "all".
        notes: what to know of it.
    """

    name: str
    server: Server | None
    load: Load | None
    measured: Mapping[Metric, Figure]
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def shape_named(model: str) -> ModelShape:
    """The shape of a checkpoint by its id, such as "meta-llama/Llama-2-7b-hf".

    Raises:
        ConfigError: none is stored.
    """
    name = model.rpartition("/")[2].lower().replace("meta-", "")
    known = [shape for shape in MODEL_SHAPES if name == shape or name.startswith((f"{shape}-", f"{shape}."))]
    if not known:
        raise ConfigError(f"no shape of model {model!r} is stored; known: {', '.join(MODEL_SHAPES)}")
    return model_shape(max(known, key=len), "bfloat16")
