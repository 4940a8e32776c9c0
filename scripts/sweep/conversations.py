"""Conversations played on the real engine, under one system after another."""

from __future__ import annotations

import dataclasses
import random
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxllm import LLM
from jaxllm.engine.costs import shape_of
from jaxllm.engine.profiling import Profiler
from jaxllm.predictors.base import CostModel
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.research.bench.compare import turns
from jaxllm.research.bench.replay import replay
from jaxllm.research.workloads import LognormalLengths, Poisson, Trace, make_conversations
from jaxllm.research.workloads.result import RunResult
from jaxllm.sched.policies import SchedulerPolicy

MAX_LEN, COMMON_LEN = 512, 32
NUM_GPU_BLOCKS, NUM_HOST_BLOCKS, MAX_NUM_SEQS = 256, 1024, 32
RATE = 12.0
"""Conversations that begin in a second."""
_MESSAGES = LognormalLengths(mean=38.0, sigma=1.0, shortest=1, longest=256)
_ANSWERS = LognormalLengths(mean=40.0, sigma=0.8, shortest=1, longest=128)


@dataclasses.dataclass(frozen=True)
class EngineSystem:
    """A policy, whether it caches, and in how many host blocks."""

    policy: Callable[[CostModel], SchedulerPolicy]
    caches: bool = True
    num_host_blocks: int = NUM_HOST_BLOCKS


def play(
    systems: Mapping[str, EngineSystem],
    *,
    num_conversations: int,
    repetitions: int,
    mean_think: float,
    profile_seconds: float,
    seed: int,
) -> list[dict[str, Any]]:
    """Medians of each system's runs on the embedded model.

    Systems take turns in an order drawn anew for each repetition, which has conversations of its own.

    Args:
        systems: by name.
        num_conversations: of each repetition.
        repetitions: runs of each system that count.
        mean_think: seconds between an answer and the next turn.
        profile_seconds: for which costs are measured before.
        seed: of the first repetition's conversations, and of the order.
    """
    llm = LLM(
        skip_tokenizer_init=True,
        max_model_len=MAX_LEN + 1,
        max_num_seqs=MAX_NUM_SEQS,
        num_gpu_blocks_override=NUM_GPU_BLOCKS,
        num_host_blocks=NUM_HOST_BLOCKS,
        warm_up="all",
        profile_seconds=0.0,
    )
    profiler = Profiler(llm.executor, shape_of(llm.model_config, "demo", llm.dtype), seed=seed)
    samples = profiler.samples(profile_seconds)
    costs = profiler.costs_of(profiler.profile(samples, profiler.fit(samples, is_brief=True)))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    order = random.Random(seed)
    for repetition in range(repetitions + 1):
        trace = make_conversations(
            num_conversations,
            messages=_MESSAGES,
            answers=_ANSWERS,
            mean_think=mean_think,
            common_len=COMMON_LEN,
            max_len=MAX_LEN,
            arrivals=Poisson(RATE),
            seed=seed + repetition,
        )
        if not repetition:
            trace = trace.head(8)  # warms everything up, and counts for nothing
        for _, name in turns(list(systems), 1, order):
            row = _run(llm, trace, systems[name], costs)
            if repetition:
                print(f"repetition {repetition} of {repetitions}: {name}", file=sys.stderr)
                found[name].append(row)
    llm.close()
    return [
        {"system": name, "num_runs": len(rows)}
        | {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for name, rows in found.items()
    ]


def _run(llm: LLM, trace: Trace, system: EngineSystem, costs: CostModel) -> dict[str, Any]:
    calibration = OnlineCalibration(costs)
    config = dataclasses.replace(
        llm.engine.scheduler.config,
        num_host_blocks=system.num_host_blocks,
        enable_prefix_caching=system.caches,
    )
    return figures(trace, replay(llm, trace, config, system.policy(calibration), costs=calibration))


def figures(trace: Trace, result: RunResult) -> dict[str, Any]:
    """What reports say of a run of conversations."""
    prompt_tokens, spent = int(trace.prompt_lens.sum()), result.spent
    latency = (result.finish_times - result.arrival_times) / trace.output_lens
    first = result.first_token_times - result.arrival_times
    later = trace.follows >= 0 if trace.follows is not None else np.zeros(len(trace), bool)
    return {
        "num_requests": len(trace),
        "tokens_per_second": result.output_tokens_per_second,
        "first_token_seconds": float(first.mean()),
        "later_first_token_seconds": float(first[later].mean()),
        "seconds_per_token": float(latency.mean()),
        "p90_seconds_per_token": float(np.percentile(latency, 90)),
        "prompt_tokens_per_second": prompt_tokens / (spent.prefill + spent.recompute + spent.swap_stall),
        "prefill_tokens": result.num_prefill_tokens,
        "share_found": result.num_cached_tokens / prompt_tokens,
        "share_found_on_host": result.num_host_cached_tokens / prompt_tokens,
        "share_found_in_files": result.num_disk_cached_tokens / prompt_tokens,
        "num_preemptions": result.num_preemptions,
        "copy_stall_seconds": result.spent.swap_stall,
    }
