"""Builders shared by the scheduler's tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from jaxllm.sampling.params import SamplingParams
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.ledger import Ledger
from jaxllm.sched.policies import PoolState, SchedulerPolicy, SchedulingPolicy
from jaxllm.sched.scheduler import Scheduler
from jaxllm.sched.speculation import Speculation
from jaxllm.types import CopyProgress, PrefillChunk, Request, SchedulerOutput

V1 = SchedulerPolicy(patience=None)


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
    policy: SchedulingPolicy = V1,
    ledger: Ledger | None = None,
    files: Any = None,
    speculation: Speculation | None = None,
    **changes: Any,
) -> Scheduler:
    """A scheduler with blocks of 4 tokens and generous limits, but for `changes`."""
    limits: dict[str, Any] = {
        "num_gpu_blocks": 64,
        "block_size": 4,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
    }
    config = SchedulerConfig(**(limits | changes))
    return Scheduler(config, policy, ledger=ledger, files=files, speculation=speculation)


def pools(num_free: int = 0, num_blocks: int = 10, **changes: Any) -> PoolState:
    """Pools with blocks of 4 tokens, and no host memory but for `changes`."""
    return PoolState(num_free, num_blocks, 4, 0, 0)._replace(**changes)


def holder(index: int, num_tokens: int, num_blocks: int) -> Request:
    """A request that holds blocks, all but the last token computed."""
    request = make_request(index, num_tokens)
    request.block_ids = list(range(num_blocks))
    request.num_computed_tokens = num_tokens - 1
    return request


def step(scheduler: Scheduler, now: float = 0.0, arrived: Collection[int] = ()) -> str:
    """One iteration, checked, whose tokens are known at once; ends requests that reach their length."""
    output = scheduler.schedule(now, CopyProgress(arrived))
    scheduler.check()
    take(scheduler, output)
    return describe(output)


def take(scheduler: Scheduler, output: SchedulerOutput) -> None:
    """Let the device finish an iteration, with tokens 0."""
    for request in output.sampled:
        request.output_token_ids.append(0)
    scheduler.complete(output.step_id)
    for request in output.ending:
        scheduler.finish(request, "length")
        scheduler.check()


def lose(scheduler, request, *numbers):
    """Let blocks of a request be found no more."""
    pool = scheduler._state.pool
    for number in numbers:
        name = scheduler._state.lookups.learn_names(request, request.num_tokens)[number]
        block_id = pool.names.first(name)
        pool._names[block_id] = None
        pool.names.remove(name, block_id)
    pool.check()


@dataclasses.dataclass(frozen=True)
class LinearCosts:
    """Seconds by formula: `prefill` and `decode` per token, `swap` per block and direction."""

    prefill: float = 1.0
    decode: float = 1.0
    swap: float = 1.0

    def step_seconds(
        self,
        batch: int,
        context_tokens: int,
        prompt_tokens: int = 0,
        num_prompts: int = 0,
        prompt_context: int = 0,
    ) -> float:
        """Of the batch and the new tokens."""
        return self.decode * batch + self.prefill * prompt_tokens

    def swap_out_seconds(self, num_blocks: int) -> float:
        """Of the blocks."""
        return self.swap * num_blocks

    def swap_in_seconds(self, num_blocks: int) -> float:
        """Of the blocks."""
        return self.swap * num_blocks


def describe(output: SchedulerOutput) -> str:
    """An iteration in short.

    `r0 r1 | r2[0:4] r3[4:7]! -r4 <r5 >r6 ~r7`: r0 and r1 decode beside chunks of r2 and of r3, which samples
    (`!`); r4 was dropped, r5 swapped out, r6 swapped in (now or in the background), and r7 starts to be
    copied back. Without chunks there is no `|`; `-` if empty.
    """
    if output.is_empty:
        return "-"
    words = [request.request_id for request in output.decode]
    if output.prefill:
        words += ["|", *map(_describe_chunk, output.prefill)]
    swapped = [swap.request for swap in output.swap_out]
    words += [("<" if one in swapped else "-") + one.request_id for one in output.preempted]
    words += [">" + swap.request.request_id for swap in (*output.joined, *output.swap_in)]
    words += ["~" + swap.request.request_id for swap in output.load]
    return " ".join(words)


def _describe_chunk(chunk: PrefillChunk) -> str:
    span = f"{chunk.request.request_id}[{chunk.start}:{chunk.start + chunk.length}]"
    return span + "!" * chunk.is_last
