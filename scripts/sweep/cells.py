"""The sweep's runs: which there are, and how one is simulated."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from jaxllm.predictors.base import CostModel
from jaxllm.research.simulator.truth import ExpectedAction, HindsightAction, RegretMeter
from jaxllm.research.workloads import make_trace, parse_arrivals
from jaxllm.sched.policies import AdaptiveAction, AlwaysRecompute, SchedulerPolicy, SwapIfItFits
from jaxllm.sched.presets import adaptive
from sweep.simulated import Device, noise_of

ALL_MODELS = ("opt-13b", "opt-30b", "llama-13b", "llama-32.5b")
LINK_SPEEDS = (0.01, 0.03, 0.06, 0.09, 0.12, 0.17, 0.25, 0.5, 1.0, 4.0)  # times the data sheet's
HOST_BLOCKS = (16, 64, 256)
OUTPUT_LENGTHS = (32, 64, 256)
MORE_REQUESTS = {32: 4, 64: 2}
"""How many times more requests a trace of shorter outputs has: there are few preemptions in each."""
ALL_DATASETS = ("chatbot", "alpaca", "summary")
ACTIONS = ("recompute", "swap", "adaptive", "expected", "hindsight")
ORACLES = frozenset({"expected", "hindsight"})
ORACLE_HOST_BLOCKS = 64  # one pool is enough to see how far they are


@dataclasses.dataclass(frozen=True)
class Cell:
    """One simulation; `variant` is one of `ACTIONS`."""

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
    arrivals: str = "all"


def run_cell(cell: Cell) -> dict[str, Any]:
    """Simulate one cell."""
    device = Device(cell.model, link_speed=cell.link_speed, samples=cell.samples, seed=cell.seed)
    truth = device.costs(), noise_of(device)
    hindsight = HindsightAction(AdaptiveAction, *truth)
    meter: RegretMeter | None = None

    def policy_of(costs: CostModel) -> SchedulerPolicy:
        nonlocal meter
        policy = adaptive(costs)
        if cell.variant == "adaptive":
            action = meter = RegretMeter(policy.action, hindsight)
        elif cell.variant == "expected":
            action = meter = RegretMeter(ExpectedAction(AdaptiveAction, *truth), hindsight)
        else:
            others = {"recompute": AlwaysRecompute(), "swap": SwapIfItFits(costs), "hindsight": hindsight}
            return dataclasses.replace(policy, action=others[cell.variant])
        return dataclasses.replace(policy, action=action)

    trace = make_trace(
        cell.dataset,
        cell.num_requests,
        cell.max_output_len,
        outputs="uniform",
        arrivals=parse_arrivals(cell.arrivals),
        seed=cell.seed,
    )
    result = device.run(trace, policy_of, overlap=True, num_host_blocks=cell.num_host_blocks)
    row = {**dataclasses.asdict(cell), **result.summary()}
    if meter is not None:
        row["regret"] = {
            "seconds": meter.regret_seconds,
            "best_seconds": meter.best_seconds,
            "num_decisions": meter.num_decisions,
            "num_wrong": meter.num_wrong,
        }
    return row


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
    arrivals: str = "all",
    near: Iterable[tuple[str, str, int, int, float]] = (),
) -> list[Cell]:
    """Every simulation. Recomputing uses neither link nor host memory: once per trace.

    `num_requests` is that of the longest outputs; see `MORE_REQUESTS`. `near` lists model, data set, output
    length, host blocks and link speed of the cells of part `near`.
    """
    cells = []

    def add(part: str, trace: tuple[str, str, int, int], host: int, speed: float, variant: str) -> None:
        model, dataset, output, seed = trace
        requests = num_requests * MORE_REQUESTS.get(output, 1)
        cells.append(
            Cell(part, model, dataset, output, host, speed, variant, requests, seed, samples, arrivals)
        )

    if "actions" in parts:
        for trace in itertools.product(models, datasets, output_lengths, seeds):
            add("actions", trace, 0, 1.0, "recompute")
            for host, speed, action in itertools.product(host_blocks, link_speeds, ACTIONS):
                if action != "recompute" and (action not in ORACLES or host == ORACLE_HOST_BLOCKS):
                    add("actions", trace, host, speed, action)
    if "near" in parts:
        chosen = list(dict.fromkeys(near))
        for trace in itertools.product(dict.fromkeys(cell[:3] for cell in chosen), seeds):
            add("near", (*trace[0], trace[1]), 0, 1.0, "recompute")
        for (*of_trace, host, speed), seed in itertools.product(chosen, seeds):
            for action in ("swap", "adaptive", "expected", "hindsight"):
                add("near", (*of_trace, seed), host, speed, action)
    return sorted(cells, key=lambda cell: (cell.model, cell.link_speed, cell.seed))  # few predictors to fit
