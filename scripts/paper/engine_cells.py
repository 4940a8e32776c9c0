"""The runs of the evaluation on the real engine."""

from __future__ import annotations

import dataclasses
from typing import Any

from sweep.simulated import BLOCK_SIZE, NUM_GPU_BLOCKS, NUM_HOST_BLOCKS

from jaxllm import LLM
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.research.bench.replay import replay
from jaxllm.sched.ledger import Ledger
from paper.cells import Cell, fitting, policy_of, trace_of


def run_cell(cell: Cell, llm: LLM) -> dict[str, Any]:
    """Run one cell on the real engine, whose copies run beside computation whatever the preset.

    The row says so (`overlap`), and names no layout, overhead and costs, which are the simulator's; `num_cut`
    counts prompts that were too long for the model, see `fitting`.
    """
    costs = OnlineCalibration(llm.costs.model)
    config = dataclasses.replace(
        llm.engine.scheduler.config,
        max_num_seqs=cell.max_num_seqs,
        max_prefill_seqs=min(llm.executor.config.buckets.max_prefill_seqs, cell.max_num_seqs),
        num_gpu_blocks=NUM_GPU_BLOCKS,
        num_host_blocks=NUM_HOST_BLOCKS,
    )
    asked = trace_of(cell)
    trace = fitting(asked, config.max_model_len)
    policy = policy_of(cell.preset, costs)
    result = replay(llm, trace, config, policy, costs=costs, ledger=Ledger())
    return {
        **cell.values(),
        **{"overlap": True, "layout": None, "overhead": None, "costs": None},
        **result.summary(),
        "num_cut": int((trace.prompt_lens < asked.prompt_lens).sum()),
        "scheduling_seconds": result.scheduling_seconds,
        "prediction_seconds": result.prediction_seconds,
        "prediction_errors": {kind: dataclasses.asdict(one) for kind, one in costs.report().items()},
    }


def load_engine(model: str, *, max_num_seqs: int, load_format: str, dtype: str) -> LLM:
    """An engine with the evaluation's pools, for `run_cell`."""
    return LLM(
        model,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        warm_up="all",
        load_format=load_format,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        num_gpu_blocks_override=NUM_GPU_BLOCKS,
        num_host_blocks=NUM_HOST_BLOCKS,
        block_size=BLOCK_SIZE,
    )
