"""Builders shared by the scheduler's tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from jaxllm.sampling_params import SamplingParams
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.ledger import Ledger
from jaxllm.sched.policies import PoolState, SchedulerPolicy, WatermarkAdmission
from jaxllm.sched.scheduler import Scheduler
from jaxllm.types import CopyProgress, PrefillChunk, Request, SchedulerOutput

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


def make_scheduler(
    policy: SchedulerPolicy = NO_WATERMARK, ledger: Ledger | None = None, **changes: Any
) -> Scheduler:
    """A scheduler with blocks of 4 tokens and generous limits, but for `changes`."""
    limits: dict[str, Any] = {
        "num_gpu_blocks": 64,
        "block_size": 4,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
    }
    return Scheduler(SchedulerConfig(**(limits | changes)), policy, ledger=ledger)


def pools(
    num_free: int = 0,
    num_blocks: int = 10,
    num_host_free: int = 0,
    num_host_blocks: int = 0,
    started: Sequence[Request] = (),
) -> PoolState:
    """Pools with blocks of 4 tokens."""
    return PoolState(num_free, num_blocks, 4, num_host_free, num_host_blocks, started)


def holder(index: int, num_tokens: int, num_blocks: int) -> Request:
    """A request that holds blocks."""
    request = make_request(index, num_tokens)
    request.block_ids = list(range(num_blocks))
    return request


def step(scheduler: Scheduler, now: float = 0.0, arrived: Collection[int] = ()) -> str:
    """One iteration, checked, whose tokens are known at once; ends requests that reach their length."""
    output = scheduler.schedule(now, CopyProgress(arrived))
    scheduler.check()
    for request in sampled_requests(output):
        request.output_token_ids.append(0)
    scheduler.complete(output.step_id)
    for request in output.ending:
        scheduler.finish(request, "length")
        scheduler.check()
    return describe(output)


@dataclasses.dataclass(frozen=True)
class LinearCosts:
    """Seconds by formula: `prefill` and `decode` per token, `swap` per block and direction."""

    prefill: float = 1.0
    decode: float = 1.0
    swap: float = 1.0

    def prefill_seconds(self, num_tokens: int, num_seqs: int, context_tokens: int = 0) -> float:
        """Of the new tokens."""
        return self.prefill * num_tokens

    def decode_seconds(self, batch: int, context_tokens: int) -> float:
        """Of the batch."""
        return self.decode * batch

    def swap_out_seconds(self, num_blocks: int) -> float:
        """Of the blocks."""
        return self.swap * num_blocks

    def swap_in_seconds(self, num_blocks: int) -> float:
        """Of the blocks."""
        return self.swap * num_blocks


def sampled_requests(output: SchedulerOutput) -> list[Request]:
    """The requests that get a token in this iteration, in the order executors report them."""
    return [*output.decode, *(chunk.request for chunk in output.prefill if chunk.is_last)]


def describe(output: SchedulerOutput) -> str:
    """An iteration in short.

    `D r0 r1 -r2 <r3 >r1 ~r4`: a decode that dropped r2, swapped r3 out, swapped r1 in (now or in the
    background) and started to copy r4 back; `P r0[0:4] r1[0:3]!` where `!` samples; `-` if empty.
    """
    if output.is_empty:
        return "-"
    back = [">" + swap.request.request_id for swap in (*output.joined, *output.swap_in)]
    back += ["~" + swap.request.request_id for swap in output.load]
    if output.prefill:
        return " ".join(["P", *map(_describe_chunk, output.prefill), *back])
    swapped = [swap.request for swap in output.swap_out]
    return " ".join(
        [
            "D",
            *(request.request_id for request in output.decode),
            *(("<" if one in swapped else "-") + one.request_id for one in output.preempted),
            *back,
        ]
    )


def _describe_chunk(chunk: PrefillChunk) -> str:
    span = f"{chunk.request.request_id}[{chunk.start}:{chunk.start + chunk.length}]"
    return span + "!" * chunk.is_last
