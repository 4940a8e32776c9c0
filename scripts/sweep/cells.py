"""The sweep's runs: which there are, and how one is simulated."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxllm.predictors.base import CostModel, model_shape
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.predictors.roofline import RooflineCostModel
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.policies import (
    AdaptiveAction,
    AlwaysRecompute,
    FairPriority,
    FCFSPriority,
    LeastUrgentVictim,
    MixedIterations,
    OverlapAwareAction,
    ResumeAtOnce,
    ResumeFirst,
    SchedulerPolicy,
    SeparateIterations,
    SwapIfItFits,
    WatermarkAdmission,
)
from jaxllm.sched.presets import adaptive
from jaxllm.simulator.fitted import noise_and_predictor
from jaxllm.simulator.run import simulate
from jaxllm.simulator.truth import HindsightAction, RegretMeter, Residuals
from jaxllm.workloads import make_trace

ALL_MODELS = ("opt-13b", "opt-30b", "llama-13b", "llama-32.5b")
DEVICE = "A800-80GB-PCIe"
NUM_GPU_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 128, 16, 2048
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 2560
LINK_SPEEDS = (0.01, 0.03, 0.06, 0.09, 0.12, 0.17, 0.25, 0.5, 1.0, 4.0)  # times the data sheet's
HOST_BLOCKS = (16, 64, 256)
OUTPUT_LENGTHS = (32, 64, 256)
MORE_REQUESTS = {32: 4, 64: 2}
"""How many times more requests a trace of shorter outputs has: there are few preemptions in each."""
ALL_DATASETS = ("chatbot", "alpaca", "summary")
ACTIONS = ("recompute", "swap", "adaptive", "hindsight")
HINDSIGHT_HOST_BLOCKS = 64  # one pool is enough to see how far it is
POLICIES_HOST_BLOCKS = 64


@dataclasses.dataclass(frozen=True)
class Cell:
    """One simulation; `variant` is an action, or a policy that differs from `adaptive`."""

    part: str
    model: str
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
    costs = device_costs(cell.model, cell.link_speed)
    residuals, model = _noise_and_predictor(cell.model, cell.samples, cell.link_speed, cell.seed)
    calibration = None if cell.samples is None else OnlineCalibration(model)
    predicted = model if calibration is None else calibration
    policy = adaptive(predicted)
    meter = None
    if cell.part in ("actions", "near"):
        hindsight = HindsightAction(OverlapAwareAction, costs, residuals)
        meter = RegretMeter(policy.action, hindsight)
        action = {
            "recompute": AlwaysRecompute(),
            "swap": SwapIfItFits(predicted),
            "adaptive": meter,
            "hindsight": hindsight,
        }[cell.variant]
        policy = dataclasses.replace(policy, action=action)
    else:
        policy = VARIANTS[cell.variant](policy, predicted)
    config = SchedulerConfig(
        num_gpu_blocks=NUM_GPU_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
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
        calibration=calibration,
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


def device_costs(model: str, link_speed: float) -> RooflineCostModel:
    """The device with a link of so many times its speed."""
    device = device_spec(DEVICE)
    device = dataclasses.replace(device, host_bandwidth=device.host_bandwidth * link_speed)
    return RooflineCostModel(model_shape(model), device, block_size=BLOCK_SIZE)


@functools.lru_cache(maxsize=64)
def _noise_and_predictor(
    model: str, samples: str | None, link_speed: float, seed: int
) -> tuple[Residuals, CostModel]:
    return noise_and_predictor(
        device_costs(model, link_speed),
        model_shape(model),
        samples,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
        num_gpu_blocks=NUM_GPU_BLOCKS,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        seed=seed,
    )


Change = Callable[[SchedulerPolicy, CostModel], SchedulerPolicy]


def _with(**changes: Any) -> Change:
    return lambda policy, costs: dataclasses.replace(policy, **changes)


VARIANTS: dict[str, Change] = {
    "adaptive": _with(),
    "action: recompute": _with(action=AlwaysRecompute()),
    "action: swap if it fits": lambda policy, costs: dataclasses.replace(policy, action=SwapIfItFits(costs)),
    "action: serial costs": lambda policy, costs: dataclasses.replace(policy, action=AdaptiveAction(costs)),
    "resume: at once": _with(resume=ResumeAtOnce()),
    "iterations: as many prompt tokens as fit": _with(iterations=MixedIterations()),
    "iterations: separate": _with(iterations=SeparateIterations()),
    "priority: first come": _with(priority=FCFSPriority()),
    "victim: least urgent": _with(victim=LeastUrgentVictim(FairPriority())),
    "restore: resume first": _with(restore=ResumeFirst()),
    "admission: 5 % watermark": _with(admission=WatermarkAdmission(0.05)),
    "patience: none": _with(patience=None),
}


def make_cells(
    parts: Sequence[str],
    models: Sequence[str],
    datasets: Sequence[str],
    num_requests: int,
    seeds: Sequence[int],
    samples: str | None,
    *,
    output_lengths: Sequence[int] = OUTPUT_LENGTHS,
    host_blocks: Sequence[int] = HOST_BLOCKS,
    link_speeds: Sequence[float] = LINK_SPEEDS,
    policies_at: tuple[int, float] = (64, 1.0),
    near: Iterable[tuple[str, str, int, int, float]] = (),
) -> list[Cell]:
    """Every simulation. Recomputing uses neither link nor host memory: once per trace.

    `num_requests` is that of the longest outputs; see `MORE_REQUESTS`. `policies_at` is the output length and
    the link speed of part `policies`, `near` lists model, data set, output length, host blocks and link speed
    of the cells of part `near`.
    """
    cells = []

    def add(part: str, trace: tuple[str, str, int, int], host: int, speed: float, variant: str) -> None:
        model, dataset, output, seed = trace
        requests = num_requests * (MORE_REQUESTS.get(output, 1) if part != "policies" else 1)
        cells.append(Cell(part, model, dataset, output, host, speed, variant, requests, seed, samples))

    if "actions" in parts:
        for trace in itertools.product(models, datasets, output_lengths, seeds):
            add("actions", trace, 0, 1.0, "recompute")
            for host, speed, action in itertools.product(host_blocks, link_speeds, ACTIONS):
                if action != "recompute" and (action != "hindsight" or host == HINDSIGHT_HOST_BLOCKS):
                    add("actions", trace, host, speed, action)
    if "near" in parts:
        chosen = list(dict.fromkeys(near))
        for trace in itertools.product(dict.fromkeys(cell[:3] for cell in chosen), seeds):
            add("near", (*trace[0], trace[1]), 0, 1.0, "recompute")
        for (*of_trace, host, speed), seed in itertools.product(chosen, seeds):
            for action in ("swap", "adaptive", "hindsight"):
                add("near", (*of_trace, seed), host, speed, action)
    if "policies" in parts:
        for dataset, seed, variant in itertools.product(ALL_DATASETS, seeds, VARIANTS):
            output, speed = policies_at
            add("policies", (models[0], dataset, output, seed), POLICIES_HOST_BLOCKS, speed, variant)
    return sorted(cells, key=lambda cell: (cell.model, cell.link_speed, cell.seed))  # few predictors to fit
