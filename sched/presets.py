"""Named combinations of policies: published systems, and the engine's own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import CostModel
from jaxllm.sched.policies import (
    AdaptiveAction,
    AlwaysRecompute,
    FairPriority,
    FCFSPriority,
    HostBoundAdmission,
    LatestArrivalVictim,
    LeastUrgentVictim,
    MoreUrgentFirst,
    OutputReserve,
    OverlapAwareAction,
    OverlapAwareResume,
    PaddedBatching,
    PrefillFirst,
    SchedulerPolicy,
    SwapIfItFits,
    WatermarkAdmission,
)
from jaxllm.sched.user_policy import import_policy


def vllm(costs: CostModel | None = None) -> SchedulerPolicy:
    """vLLM 0.2.5, single-sequence requests: FCFS, the latest arrival is dropped and prefilled again.

    Decides as vLLM's own scheduler does, padded prompt budget and spare-block rule included.
    """
    return SchedulerPolicy(
        priority=FCFSPriority(),
        admission=WatermarkAdmission(),
        batching=PaddedBatching(),
        victim=LatestArrivalVictim(),
        action=AlwaysRecompute(),
        restore=PrefillFirst(),
        decode_needs_free_block=True,
    )


def vllm_swap(costs: CostModel | None = None) -> SchedulerPolicy:
    """vLLM 0.2.5 that always swaps (AdaptiveLLM's vLLM_s), with batches that fit the host pool."""
    return SchedulerPolicy(
        priority=FCFSPriority(),
        admission=HostBoundAdmission(),
        batching=PaddedBatching(),
        victim=LatestArrivalVictim(),
        action=SwapIfItFits(),
        restore=PrefillFirst(),
        decode_needs_free_block=True,
    )


def vllm_swap_both(costs: CostModel | None = None) -> SchedulerPolicy:
    """vLLM_s by its second rule: batches that fit device and host pool together less the largest request."""
    return dataclasses.replace(vllm_swap(), admission=HostBoundAdmission(count_device_pool=True))


def paper(costs: CostModel | None = None) -> SchedulerPolicy:
    """AdaptiveLLM: Algorithm 1 (preempt the least urgent, cheaper action) and Algorithm 2 (start).

    Raises:
        ConfigError: `costs` is missing.
    """
    return SchedulerPolicy(
        priority=FairPriority(),
        admission=WatermarkAdmission(0.0),
        victim=LeastUrgentVictim(FairPriority()),
        action=AdaptiveAction(_required("paper", costs)),
        restore=MoreUrgentFirst(FairPriority()),
    )


def adaptive(costs: CostModel | None = None) -> SchedulerPolicy:
    """Ours: the paper's fairness and choice of action, with an order that keeps the host pool in use.

    Against `paper` it starts new requests before it resumes swapped ones only if they are three times as
    urgent, where Algorithm 2 lets urgent new requests keep the host pool full of old ones; it leaves started
    requests room to grow; it weighs delays instead of durations; it copies back beside the steps, once there
    is room to grow, or changes its mind and recomputes; and it evicts a victim's blocks only as they are
    needed. docs/policies.md says what each is worth.

    Raises:
        ConfigError: `costs` is missing.
    """
    return SchedulerPolicy(
        priority=FairPriority(),
        admission=OutputReserve(),
        victim=LeastUrgentVictim(FairPriority()),
        action=OverlapAwareAction(_required("adaptive", costs)),
        resume=OverlapAwareResume(_required("adaptive", costs)),
        restore=MoreUrgentFirst(FairPriority(), margin=3.0),
        lazy_eviction=True,
    )


PRESETS: Mapping[str, Callable[[CostModel | None], SchedulerPolicy]] = {
    "adaptive": adaptive,
    "paper": paper,
    "vllm": vllm,
    "vllm_swap": vllm_swap,
    "vllm_swap_both": vllm_swap_both,
}
DEFAULT_PRESET = "adaptive"
NEEDS_COSTS = frozenset({"adaptive", "paper"})
"""Presets that compare predicted costs; the others take any, and never ask."""


def make_preset(name: str, costs: CostModel | None = None) -> SchedulerPolicy:
    """The policies of a preset, or of the user's own module.

    Args:
        name: one of `PRESETS`, or "module:attribute" (`jaxllm.sched.user_policy.import_policy`); a class that
            answers one question changes that of `adaptive`.
        costs: predicted seconds, for policies that weigh actions.

    Raises:
        ConfigError: there is no such preset or attribute, or it needs `costs`.
    """
    if ":" in name:
        return import_policy(name, functools.partial(adaptive, costs), costs)
    if name not in PRESETS:
        raise ConfigError(
            f"there is no preset {name!r}; presets: {', '.join(sorted(PRESETS))}; your own policy is named "
            "as 'module:attribute'"
        )
    return PRESETS[name](costs)


def _required(name: str, costs: CostModel | None) -> CostModel:
    if costs is None:
        raise ConfigError(f"preset {name!r} weighs swapping against recomputing: pass costs=...")
    return costs
