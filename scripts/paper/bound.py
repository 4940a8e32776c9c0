"""The most tokens a second that the memory of the device allows, whatever the policy."""

from __future__ import annotations

import functools

import numpy as np
from sweep.simulated import BLOCK_SIZE, NUM_GPU_BLOCKS, Device

from jaxllm.research.workloads import make_trace


@functools.lru_cache(maxsize=256)
def most_tokens_per_second(
    model: str,
    dataset: str,
    outputs: str,
    num_requests: int,
    seed: int,
    max_output_len: int = 64,
    source: str = "roofline",
) -> float:
    """Output tokens/s if every block were in use in every iteration, and prompts and copies took no time.

    A request holds `ceil(n / block_size)` blocks in the iteration that computes its n-th token; so the sum of
    that over all tokens, by the number of blocks, is the least number of iterations.
    """
    trace = make_trace(
        dataset, num_requests, max_output_len, outputs="max" if outputs == "max" else "uniform", seed=seed
    )
    lengths = np.concatenate(
        [
            np.arange(prompt + 1, prompt + output)  # the first token comes with the prompt
            for prompt, output in zip(trace.prompt_lens.tolist(), trace.output_lens.tolist(), strict=True)
        ]
    )
    num_steps = float(np.ceil(lengths / BLOCK_SIZE).sum()) / NUM_GPU_BLOCKS
    batch, context = len(lengths) / num_steps, float(lengths.sum()) / num_steps
    # Linear in batch and context, where reading memory takes the time.
    costs = Device(model, source=source).costs()
    low, high = (costs.step_seconds(size, round(context)) for size in (int(batch), int(batch) + 1))
    seconds = num_steps * (low + (batch - int(batch)) * (high - low))
    return float(trace.output_lens.sum()) / seconds
