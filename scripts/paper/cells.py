"""The runs of the evaluation: which there are, and how the simulator or the engine does one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import CostModel, model_shape
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.predictors.roofline import RooflineCostModel
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.ledger import Ledger
from jaxllm.sched.presets import make_preset
from jaxllm.simulator.fitted import noise_and_predictor
from jaxllm.simulator.run import simulate
from jaxllm.simulator.truth import Residuals
from jaxllm.workloads import Trace, make_trace

if TYPE_CHECKING:
    from jaxllm.llm import LLM

DEVICE = "A800-80GB-PCIe"
MODELS = ("opt-13b", "opt-30b", "llama-13b", "llama-32.5b")
DATASETS = ("chatbot", "alpaca", "summary")
# What the published systems do with copies: they stop the device. Ours run beside it.
OVERLAP = {
    "vllm": False,
    "vllm_swap": False,
    "vllm_swap_both": False,
    "vllm_v1": False,
    "paper": False,
    "adaptive": True,
}
NUM_GPU_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE = 128, 64, 16
MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 2048, 256, 2560
OUTPUT_LENGTHS = (8, 16, 32, 64, 128, 256)
BATCH_LIMITS = (8, 16, 32, 64, 128)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run."""

    part: str
    model: str
    dataset: str
    preset: str
    max_output_len: int
    max_num_seqs: int
    outputs: str
    num_requests: int
    seed: int


def make_cells(
    parts: Sequence[str],
    models: Sequence[str],
    datasets: Sequence[str],
    *,
    num_requests: int,
    seeds: Sequence[int],
    max_num_seqs: int = MAX_NUM_SEQS,
    presets: Sequence[str] = tuple(OVERLAP),
    batch_limits: Sequence[int] = BATCH_LIMITS,
) -> list[Cell]:
    """Every run of the parts."""
    cells = []
    for seed, preset in itertools.product(seeds, presets):
        if "table3" in parts:
            for model, dataset, outputs in itertools.product(models, datasets, ("max", "uniform")):
                cells.append(
                    Cell("table3", model, dataset, preset, 64, max_num_seqs, outputs, num_requests, seed)
                )
        if "fig3" in parts:
            for dataset, length in itertools.product(datasets, OUTPUT_LENGTHS):
                cells.append(
                    Cell("fig3", models[0], dataset, preset, length, max_num_seqs, "max", num_requests, seed)
                )
        if "fig4" in parts:
            for dataset, limit in itertools.product(datasets, batch_limits):
                if limit <= max_num_seqs:
                    cells.append(
                        Cell("fig4", models[0], dataset, preset, 64, limit, "max", num_requests, seed)
                    )
    return cells


def _trace(cell: Cell) -> Trace:
    return make_trace(
        cell.dataset, cell.num_requests, cell.max_output_len, outputs=cell.outputs, seed=cell.seed
    )


def fitting(trace: Trace, max_model_len: int) -> Trace:
    """The trace with prompts cut to what the model's positions leave beside the outputs."""
    longest = max_model_len - trace.output_lens
    if longest.min() < 1:
        raise ConfigError(
            f"outputs of {trace.output_lens.max()} tokens leave no prompt in {max_model_len} positions"
        )
    return dataclasses.replace(trace, prompt_lens=np.minimum(trace.prompt_lens, longest))


def simulated_costs(model: str) -> RooflineCostModel:
    """The simulated device's, without noise."""
    return RooflineCostModel(model_shape(model), device_spec(DEVICE), block_size=BLOCK_SIZE)


@functools.lru_cache(maxsize=16)
def _noise_and_predictor(model: str, samples: str | None, seed: int) -> tuple[Residuals, CostModel]:
    return noise_and_predictor(
        simulated_costs(model),
        model_shape(model),
        samples,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
        num_gpu_blocks=NUM_GPU_BLOCKS,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        seed=seed,
    )


def simulate_cell(cell: Cell, samples: str | None) -> dict[str, Any]:
    """Simulate one cell; the result holds the cell's fields and the summary."""
    residuals, predicted = _noise_and_predictor(cell.model, samples, cell.seed)
    calibration = None if samples is None else OnlineCalibration(predicted)
    config = SchedulerConfig(
        num_gpu_blocks=NUM_GPU_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=cell.max_num_seqs,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        num_host_blocks=NUM_HOST_BLOCKS,
    )
    result = simulate(
        _trace(cell),
        config,
        make_preset(cell.preset, calibration or predicted),
        simulated_costs(cell.model),
        overlap_swaps=OVERLAP[cell.preset],
        residuals=residuals,
        calibration=calibration,
    )
    return {
        **dataclasses.asdict(cell),
        **result.summary(),
        "scheduling_seconds": result.scheduling_seconds,
    }


def run_cell(cell: Cell, llm: LLM) -> dict[str, Any]:
    """Run one cell on the real engine, whose copies run beside computation whatever the preset.

    `num_cut` counts prompts that were too long for the model, see `fitting`.
    """
    from jaxllm.bench.replay import replay

    costs = OnlineCalibration(llm.costs.model)
    config = dataclasses.replace(
        llm.engine.scheduler.config,
        max_num_seqs=cell.max_num_seqs,
        max_prefill_seqs=min(llm.executor.config.buckets.max_prefill_seqs, cell.max_num_seqs),
        num_gpu_blocks=NUM_GPU_BLOCKS,
        num_host_blocks=NUM_HOST_BLOCKS,
    )
    ledger = Ledger()
    policy = make_preset(cell.preset, costs)
    asked = _trace(cell)
    trace = fitting(asked, config.max_model_len)
    result = replay(llm, trace, config, policy, costs=costs, ledger=ledger)
    return {
        **dataclasses.asdict(cell),
        **result.summary(),
        "num_cut": int((trace.prompt_lens < asked.prompt_lens).sum()),
        "scheduling_seconds": result.scheduling_seconds,
        "prediction_seconds": result.prediction_seconds,
        "prediction_errors": {kind: dataclasses.asdict(one) for kind, one in costs.report().items()},
    }


def load_engine(model: str, *, max_num_seqs: int, load_format: str, dtype: str) -> LLM:
    """An engine with the evaluation's pools, for `run_cell`."""
    from jaxllm import LLM

    return LLM(
        model,
        skip_tokenizer_init=True,
        load_format=load_format,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        num_gpu_blocks_override=NUM_GPU_BLOCKS,
        num_host_blocks=NUM_HOST_BLOCKS,
        block_size=BLOCK_SIZE,
    )
