"""The sweep's runs: which there are, and how one is simulated."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jaxllm.predictors.base import CostModel, model_shape
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.roofline import RooflineCostModel
from jaxllm.predictors.samples import load_samples
from jaxllm.predictors.table import TableAxes
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.policies import (
    AdaptiveAction,
    AlwaysRecompute,
    FairPriority,
    FCFSPriority,
    GrowthReserve,
    LatestArrivalVictim,
    LeastUrgentVictim,
    MoreUrgentFirst,
    OverlapAwareAction,
    OverlapAwareResume,
    PrefillFirst,
    ResumeAtOnce,
    ResumeFirst,
    SchedulerPolicy,
    SwapIfItFits,
    WatermarkAdmission,
)
from jaxllm.sched.presets import adaptive
from jaxllm.simulator.executor import SimulatedExecutor
from jaxllm.simulator.fitted import fit_predictor, held_out_ratios
from jaxllm.simulator.run import simulate
from jaxllm.simulator.truth import HindsightAction, RegretMeter, Residuals
from jaxllm.types import SchedulerOutput
from jaxllm.workloads import make_trace

MODEL, DEVICE = "opt-13b", "A800-80GB-PCIe"
NUM_GPU_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 128, 16, 2048
LINK_SPEEDS = (0.01, 0.03, 0.06, 0.09, 0.12, 0.17, 0.25, 0.5, 1.0, 4.0)  # times the data sheet's
HOST_BLOCKS = (16, 64, 256)
OUTPUT_LENGTHS = (32, 64, 256)
ALL_DATASETS = ("chatbot", "alpaca", "summary")
ACTIONS = ("recompute", "swap", "adaptive", "hindsight")
MIXED = "restore: mixed, at best"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One simulation; `variant` is an action, or a policy that differs from `adaptive`."""

    part: str
    dataset: str
    max_output_len: int
    num_host_blocks: int
    link_speed: float
    variant: str
    num_requests: int
    seed: int
    samples: str | None


def run_cell(cell: Cell) -> dict[str, Any]:
    """Simulate one cell."""
    costs = device_costs(cell.link_speed)
    residuals, predicted = noise_and_predictor(cell.samples, cell.link_speed, cell.seed)
    policy = adaptive(predicted)
    meter = None
    if cell.part == "actions":
        hindsight = HindsightAction(OverlapAwareAction, costs, residuals)
        meter = RegretMeter(policy.action, hindsight)
        action = {
            "recompute": AlwaysRecompute(),
            "swap": SwapIfItFits(),
            "adaptive": meter,
            "hindsight": hindsight,
        }[cell.variant]
        resume = OverlapAwareResume(predicted, gives_up=cell.variant != "swap")
        policy = dataclasses.replace(policy, action=action, resume=resume)
    else:
        policy = VARIANTS[cell.variant](policy, predicted)
    config = SchedulerConfig(
        num_gpu_blocks=NUM_GPU_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=256,
        max_num_batched_tokens=2560,
        num_host_blocks=cell.num_host_blocks,
    )
    trace = make_trace(
        cell.dataset, cell.num_requests, cell.max_output_len, outputs="uniform", seed=cell.seed
    )
    result = simulate(
        trace,
        config,
        policy,
        costs,
        overlap_swaps=True,
        residuals=residuals,
        executor_class=MixedRestoreBound if cell.variant == MIXED else SimulatedExecutor,
    )
    row = {**dataclasses.asdict(cell), **result.summary()}
    if meter is not None and cell.variant == "adaptive":
        row["regret"] = {
            "seconds": meter.regret_seconds,
            "best_seconds": meter.best_seconds,
            "num_decisions": meter.num_decisions,
            "num_wrong": meter.num_wrong,
        }
    return row


def device_costs(link_speed: float) -> RooflineCostModel:
    """The device with a link of so many times its speed."""
    device = device_spec(DEVICE)
    device = dataclasses.replace(device, host_bandwidth=device.host_bandwidth * link_speed)
    return RooflineCostModel(model_shape(MODEL), device, block_size=BLOCK_SIZE)


@functools.lru_cache(maxsize=64)
def noise_and_predictor(samples: str | None, link_speed: float, seed: int) -> tuple[Residuals, CostModel]:
    """The truth's noise, and what the policies predict by."""
    costs = device_costs(link_speed)
    if samples is None:
        return Residuals({}), costs
    for_predictors, for_truth = _ratios(samples)
    axes = TableAxes.geometric(
        max_num_batched_tokens=2560,
        max_num_seqs=256,
        max_context_tokens=NUM_GPU_BLOCKS * BLOCK_SIZE,
        max_num_blocks=NUM_GPU_BLOCKS,
        max_prefill_context_tokens=MAX_MODEL_LEN,
    )
    predictor = fit_predictor(
        costs, model_shape(MODEL), axes, for_predictors, block_size=BLOCK_SIZE, seed=seed
    )
    return Residuals(for_truth, seed=seed), predictor


@functools.lru_cache(maxsize=1)
def _ratios(samples: str) -> Any:
    return held_out_ratios(load_samples(samples))


class MixedRestoreBound(SimulatedExecutor):
    """What restoring a dropped request in part from host memory could save at best.

    Loads, at no cost, as many of its blocks as the copies hidden by the step before would carry, without
    asking whether the host pool had room for them; only the rest is prefilled.
    """

    def _prefill_seconds(self, scheduled: SchedulerOutput, num_tokens: int, context_tokens: int) -> float:
        hidden = self._hidden
        for chunk in scheduled.prefill:
            if chunk.is_recompute:
                blocks = chunk.length // self.block_size
                while blocks and self._costs.swap_in_seconds(blocks) > hidden:
                    blocks -= 1
                if blocks:
                    hidden -= self._costs.swap_in_seconds(blocks)
                    loaded = min(blocks * self.block_size, chunk.length - 1)
                    num_tokens, context_tokens = num_tokens - loaded, context_tokens + loaded
        return super()._prefill_seconds(scheduled, num_tokens, context_tokens)


Change = Callable[[SchedulerPolicy, CostModel], SchedulerPolicy]


def _with(**changes: Any) -> Change:
    return lambda policy, costs: dataclasses.replace(policy, **changes)


VARIANTS: dict[str, Change] = {
    "adaptive": _with(),
    "action: recompute": _with(action=AlwaysRecompute()),
    "action: swap if it fits": _with(action=SwapIfItFits()),
    "action: serial costs": lambda policy, costs: dataclasses.replace(policy, action=AdaptiveAction(costs)),
    "resume: at once": _with(resume=ResumeAtOnce()),
    "resume: never given up": lambda policy, costs: dataclasses.replace(
        policy, resume=OverlapAwareResume(costs, gives_up=False)
    ),
    MIXED: _with(),
    "eviction: all blocks at once": _with(lazy_eviction=False),
    "priority: first come": _with(priority=FCFSPriority(), victim=LeastUrgentVictim(FCFSPriority())),
    "victim: latest arrival": _with(victim=LatestArrivalVictim()),
    "restore: Algorithm 2": _with(restore=MoreUrgentFirst(FairPriority())),
    "restore: resume first": _with(restore=ResumeFirst()),
    "restore: prefill first": _with(restore=PrefillFirst()),
    "admission: none": _with(admission=WatermarkAdmission(0.0)),
    "admission: 1 % watermark": _with(admission=WatermarkAdmission(0.01)),
    "admission: 1/8 block each": _with(admission=GrowthReserve(0.125)),
    "admission: 1/2 block each": _with(admission=GrowthReserve(0.5)),
    "admission: 1 block each": _with(admission=GrowthReserve(1.0)),
}


def make_cells(
    parts: Sequence[str],
    datasets: Sequence[str],
    num_requests: int,
    seeds: Sequence[int],
    samples: str | None,
) -> list[Cell]:
    """Every simulation. Recomputing uses neither link nor host memory: once per data set, length and seed."""
    cells = []
    if "actions" in parts:
        for dataset, output, seed in itertools.product(datasets, OUTPUT_LENGTHS, seeds):
            cells.append(Cell("actions", dataset, output, 0, 1.0, "recompute", num_requests, seed, samples))
            for host, speed, action in itertools.product(HOST_BLOCKS, LINK_SPEEDS, ACTIONS):
                if action != "recompute":
                    cells.append(
                        Cell("actions", dataset, output, host, speed, action, num_requests, seed, samples)
                    )
    if "policies" in parts:
        for dataset, seed, variant in itertools.product(ALL_DATASETS, seeds, VARIANTS):
            cells.append(Cell("policies", dataset, 64, 64, 1.0, variant, num_requests, seed, samples))
    return sorted(cells, key=lambda cell: (cell.link_speed, cell.seed))  # few predictors to fit
