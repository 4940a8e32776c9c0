"""Limits the scheduler works within."""

from __future__ import annotations

import dataclasses

from jaxllm.errors import ConfigError, RequestError, RequestTooLargeError
from jaxllm.predictors.base import check_integer
from jaxllm.types import Request

_UPPER_BOUNDS = {
    "num_gpu_blocks": 2**31 - 1,  # block tables are int32 on the device
    "block_size": 1024,
    "max_model_len": 2**24,
    "max_num_seqs": 2**16,
    "max_num_batched_tokens": 2**24,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one scheduler; every one is checked from both sides.

    Args:
        num_gpu_blocks: blocks in the device's KV pool.
        block_size: tokens per block.
        max_model_len: longest sequence (prompt and output), in tokens.
        max_num_seqs: requests that may hold a slot at once.
        max_num_batched_tokens: tokens that one iteration computes, at least `max_num_seqs`, so that all
            running requests can decode in it.
        max_prefill_seqs: prompt chunks in one iteration; `None` leaves `max_num_seqs` as the only limit.
        num_host_blocks: blocks of host memory for swapped requests; 0 turns swapping off.
        enable_prefix_caching: whether requests find blocks of others whose tokens begin alike.
        program_sizes: numbers of tokens, ascending, that the executor's programs with prompts compute; the
            scheduler cuts prompts so that few rows are computed in vain. None of them: any number.

    Raises:
        ConfigError: a value is not an integer, or out of range.
    """

    num_gpu_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_seqs: int | None = None
    num_host_blocks: int = 0
    enable_prefix_caching: bool = False
    program_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, upper in _UPPER_BOUNDS.items():
            check_integer(name, getattr(self, name), 2 if name == "max_model_len" else 1, upper)
        if not isinstance(self.enable_prefix_caching, bool):
            raise ConfigError(f"enable_prefix_caching={self.enable_prefix_caching!r} must be a bool")
        check_integer("num_host_blocks", self.num_host_blocks, 0, 2**31 - 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least max_num_seqs="
                f"{self.max_num_seqs}, so that all running requests can decode in one iteration: raise the "
                "one or lower the other"
            )
        if self.max_prefill_seqs is not None:
            check_integer("max_prefill_seqs", self.max_prefill_seqs, 1, self.max_num_seqs)

    def check_fits(self, request: Request) -> None:
        """Verify that `request` can run to its end when it has the pool to itself.

        Raises:
            RequestTooLargeError: it exceeds `max_model_len` or the pool.
            RequestError: its prompt is empty, or it has nothing to generate.
        """
        num_prompt = request.num_prompt_tokens
        if num_prompt == 0:
            raise RequestError("the prompt is empty; give at least one token")
        if num_prompt >= self.max_model_len:
            raise RequestTooLargeError(
                f"the request has {num_prompt} prompt tokens; max_model_len={self.max_model_len} "
                f"leaves room for an output token after at most {self.max_model_len - 1}: shorten the prompt"
            )
        if request.max_total_tokens > self.max_model_len:
            raise RequestTooLargeError(
                f"the request may grow to {request.max_total_tokens} tokens, more than "
                f"max_model_len={self.max_model_len}; lower max_tokens or shorten the prompt"
            )
        if request.max_total_tokens <= num_prompt:
            raise RequestError(
                f"the request ends at {request.max_total_tokens} tokens and its prompt has "
                f"{num_prompt}: nothing to generate; raise max_tokens"
            )
        # The last token is sampled but never fed back: it needs no KV.
        num_blocks = -(-(request.max_total_tokens - 1) // self.block_size)
        if num_blocks > self.num_gpu_blocks:
            raise RequestTooLargeError(
                f"the request may grow to {request.max_total_tokens} tokens, which takes "
                f"{num_blocks} blocks of {self.block_size} tokens; the pool has {self.num_gpu_blocks}: "
                "lower max_tokens, shorten the prompt or enlarge the pool"
            )
