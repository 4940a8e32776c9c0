"""Builders shared by the scheduler's tests."""

from __future__ import annotations

from typing import Any

from jaxllm.sampling_params import SamplingParams
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.policies import SchedulerPolicy, WatermarkAdmission
from jaxllm.sched.scheduler import Scheduler
from jaxllm.types import PrefillChunk, Request, SchedulerOutput

NO_WATERMARK = SchedulerPolicy(admission=WatermarkAdmission(0.0))


def make_request(index: int, num_prompt_tokens: int, max_new_tokens: int = 8, **changes: Any) -> Request:
    """Request `r<index>` with prompt tokens 0, 1, ...; `changes` override the constructor's arguments."""
    arguments: dict[str, Any] = {
        "request_id": f"r{index}",
        "prompt_token_ids": range(num_prompt_tokens),
        "sampling_params": SamplingParams(),
        "arrival_time": float(index),
        "arrival_index": index,
        "max_total_tokens": num_prompt_tokens + max_new_tokens,
    }
    return Request(**(arguments | changes))


def make_scheduler(policy: SchedulerPolicy = NO_WATERMARK, **changes: Any) -> Scheduler:
    """A scheduler with blocks of 4 tokens and generous limits, but for `changes`."""
    limits: dict[str, Any] = {
        "num_gpu_blocks": 64,
        "block_size": 4,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
    }
    return Scheduler(SchedulerConfig(**(limits | changes)), policy)


def sampled_requests(output: SchedulerOutput) -> list[Request]:
    """The requests that get a token in this iteration, in the order executors report them."""
    return [*output.decode, *(chunk.request for chunk in output.prefill if chunk.is_last)]


def describe(output: SchedulerOutput) -> str:
    """`D r0 r1 -r2` for a decode that preempted r2; `P r0[0:4] r1[0:3]!` where `!` samples; `-` if empty."""
    if output.is_empty:
        return "-"
    if output.prefill:
        return "P " + " ".join(_describe_chunk(chunk) for chunk in output.prefill)
    parts = [request.request_id for request in output.decode]
    return " ".join(["D", *parts, *(f"-{request.request_id}" for request in output.preempted)])


def _describe_chunk(chunk: PrefillChunk) -> str:
    span = f"{chunk.request.request_id}[{chunk.start}:{chunk.start + chunk.length}]"
    return span + "!" * chunk.is_last
