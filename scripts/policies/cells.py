"""Candidates for the default policy, and the settings they are compared in."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sweep.simulated import NUM_HOST_BLOCKS, Device

from jaxllm.predictors.base import CostModel
from jaxllm.research.workloads import make_trace, parse_arrivals
from jaxllm.sched.policies import (
    AlwaysRecompute,
    FairPriority,
    FCFSPriority,
    LatestArrivalVictim,
    LeastUrgentVictim,
    MixedIterations,
    MoreUrgentFirst,
    PriorityPolicy,
    ResumeAtOnce,
    ResumeFirst,
    SchedulerPolicy,
    SchedulingPolicy,
    SeparateIterations,
    SwapIfItFits,
    WatermarkAdmission,
)
from jaxllm.sched.presets import adaptive, make_preset
from jaxllm.types import Request

MODEL = "opt-13b"
OVERLAPPED = ", copies overlapped"
"""Ends the name of a published system whose copies run beside computation; as published they stop it."""
PUBLISHED = ("vllm", "vllm_v1", "paper", "paper_strategy")
BASELINES = (*PUBLISHED, "paper" + OVERLAPPED, "paper_strategy" + OVERLAPPED)
OURS = ("adaptive", "adaptive_throughput")
DATASETS, OUTPUTS = ("chatbot", "summary"), ("max", "uniform")
CLIENTS, LOADS, BURST_LOAD, BURST_CV = (32, 64, 128), (0.8, 1.0, 1.2), 0.9, 3
"""Of closed loops, of Poisson arrivals, and of gamma ones; a load of 1 is what `vllm_v1` serves at most."""

Change = Callable[[SchedulerPolicy, CostModel], SchedulerPolicy]


class FewestBlocksVictim:
    """Preempts who holds least."""

    outranks = None

    def score(self, request: Request, now: float) -> float:
        """Its blocks."""
        return len(request.block_ids)


_ORDERS: Mapping[str, PriorityPolicy] = {"fair": FairPriority(), "first come": FCFSPriority()}
_VICTIMS: Mapping[str, Any] = {
    "latest": LatestArrivalVictim(),
    "least urgent": LeastUrgentVictim(FairPriority()),
    "fewest blocks": FewestBlocksVictim(),
}
_RESTORES: Mapping[str, Callable[[PriorityPolicy], Any]] = {
    "urgent set": MoreUrgentFirst,
    "resume first": lambda priority: ResumeFirst(),
    "in order": lambda priority: ResumeFirst(skips=False),
}


def _with(**changes: Any) -> Change:
    return lambda policy, costs: dataclasses.replace(policy, **changes)


_RESERVES = {"": 0.0, "; 1 % reserve": 0.01}


def _combined(order: str, victim: str, restore: str, reserve: str) -> Change:
    priority = _ORDERS[order]
    return _with(
        priority=priority,
        victim=_VICTIMS[victim],
        restore=_RESTORES[restore](priority),
        admission=WatermarkAdmission(_RESERVES[reserve]),
        patience=1024,
    )


COMBINED: Mapping[str, Change] = {
    f"{order}; {victim}; {restore}{reserve}": _combined(order, victim, restore, reserve)
    for order, victim, restore, reserve in itertools.product(_ORDERS, _VICTIMS, _RESTORES, _RESERVES)
    if (order, restore) != ("first come", "urgent set")  # of equals those who are swapped resume first
}
"""Order of the queues; victim; who returns or starts first; share of the pool that stays free at a start.

All else as in `adaptive`, without patience.
"""
CHANGED: Mapping[str, Change] = {
    **{f"patience {n}": _with(patience=n) for n in (16, 32, 64, 256, 1024)},
    "reserve 1 %": _with(admission=WatermarkAdmission(0.01)),
    "reserve 3 %": _with(admission=WatermarkAdmission(0.03)),
    "swapped requests resume at once": _with(resume=ResumeAtOnce()),
    "always recompute": _with(action=AlwaysRecompute()),
    "always swap while it fits": lambda policy, costs: dataclasses.replace(
        policy, action=SwapIfItFits(costs)
    ),
    "separate iterations": _with(iterations=SeparateIterations()),
    "as many prompt tokens as fit": _with(iterations=MixedIterations()),
    "decodes slowed down 1.2 times": lambda policy, costs: _paced(policy, slowdown=1.2),
    "decodes slowed down 1.5 times": lambda policy, costs: _paced(policy, slowdown=1.5),
}
"""`adaptive` with one answer changed."""
ELSEWHERE = (
    "fair; fewest blocks; urgent set",
    "first come; fewest blocks; resume first",
    "first come; latest; in order; 1 % reserve",
    "patience 64",
    "patience 1024",
    "always recompute",
    "always swap while it fits",
    "swapped requests resume at once",
)
"""Candidates on other devices: ends of the fronts over arrivals, and answers that a link's speed decides."""


def _paced(policy: SchedulerPolicy, slowdown: float) -> SchedulerPolicy:
    paced: Any = policy.iterations
    return dataclasses.replace(policy, iterations=dataclasses.replace(paced, slowdown=slowdown))


def policy_of(name: str, costs: CostModel) -> SchedulingPolicy:
    """A preset, as published or with copies overlapped, or one of the candidates."""
    change = COMBINED.get(name) or CHANGED.get(name)
    if change is None:
        return make_preset(name.removesuffix(OVERLAPPED), costs)
    return change(adaptive(costs), costs)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One simulation; `arrivals` is what `parse_arrivals` takes, `setting` its name in tables."""

    part: str
    policy: str
    dataset: str
    outputs: str
    max_output_len: int
    setting: str
    arrivals: str
    link_speed: float
    num_host_blocks: int
    num_requests: int
    seed: int
    samples: str | None


def run_cell(cell: Cell) -> dict[str, Any]:
    """Simulate one cell."""
    trace = make_trace(
        cell.dataset,
        cell.num_requests,
        cell.max_output_len,
        outputs="max" if cell.outputs == "max" else "uniform",
        arrivals=parse_arrivals(cell.arrivals),
        seed=cell.seed,
    )
    device = Device(MODEL, link_speed=cell.link_speed, samples=cell.samples, seed=cell.seed)
    result = device.run(
        trace,
        lambda costs: policy_of(cell.policy, costs),
        overlap=cell.policy not in PUBLISHED,
        num_host_blocks=cell.num_host_blocks,
    )
    return {**dataclasses.asdict(cell), **result.summary()}


@functools.lru_cache(maxsize=64)
def _capacity(dataset: str, outputs: str, num_requests: int) -> float:
    """Requests a second that `vllm_v1` serves when all are there, without noise."""
    trace = make_trace(dataset, num_requests, 64, outputs="max" if outputs == "max" else "uniform")
    result = Device(MODEL).run(trace, lambda costs: make_preset("vllm_v1", costs), overlap=False)
    return num_requests / result.seconds


def settings_of(dataset: str, outputs: str, num_requests: int) -> dict[str, str]:
    """Arrival processes by their names in tables."""
    rate = _capacity(dataset, outputs, num_requests)
    settings = {"all at once": "all"}
    settings |= {f"{clients} clients": f"closed:{clients}" for clients in CLIENTS}
    think = CLIENTS[-1] / rate / 2  # half of the time between two requests of a client
    settings[f"{CLIENTS[-1]} clients who think"] = f"closed:{CLIENTS[-1]}:{think:.4g}"
    settings |= {f"Poisson, load {load}": f"poisson:{load * rate:.4g}" for load in LOADS}
    settings[f"gamma, load {BURST_LOAD}"] = f"gamma:{BURST_LOAD * rate:.4g}:{BURST_CV}"
    return settings


def make_cells(
    parts: Sequence[str], *, num_requests: int, seeds: Sequence[int], samples: str | None
) -> list[Cell]:
    """Every run: `arrivals` has all candidates, `devices` some of them with other links, pools, outputs."""
    cells = []
    for seed, dataset in itertools.product(seeds, DATASETS):
        if "arrivals" in parts:
            for outputs in OUTPUTS:
                for name, sent in settings_of(dataset, outputs, num_requests).items():
                    cells += [
                        Cell("arrivals", policy, dataset, outputs, 64, name, sent, 1.0, NUM_HOST_BLOCKS,
                             num_requests, seed, samples)
                        for policy in (*BASELINES, *OURS, *CHANGED, *COMBINED)
                    ]  # fmt: skip
        if "devices" in parts:
            for sent, (length, speed, host) in itertools.product(("all", "closed:128"), DEVICES):
                name = f"outputs to {length}, link x {speed:g}, {host} host blocks"
                where = "all at once" if sent == "all" else "128 clients"
                cells += [
                    Cell("devices", policy, dataset, "uniform", length, f"{where}, {name}", sent, speed, host,
                         num_requests, seed, samples)
                    for policy in (*BASELINES, *OURS, *ELSEWHERE)
                ]  # fmt: skip
    return cells


DEVICES = ((64, 0.12, 64), (64, 1.0, 16), (64, 1.0, 256), (256, 0.12, 64), (256, 1.0, 64), (256, 4.0, 256))
"""Longest output, speed of the link, host blocks."""
