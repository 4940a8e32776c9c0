"""In how many parts an iteration goes through stages of layers, so that these work at the same time."""

from __future__ import annotations

from typing import Protocol

STAGED_ROWS = 256
"""Least rows of a part of prompts. One of fewer takes about as long, since it reads as many weights: an A100
or H100 multiplies 156 or 295 rows of 16 bits while it does (by their data sheets). By measured kernels of
both (`SiliconCostModel`) two parts of so many take 0.66 to 1.02 of the time of one of 512 rows, on two or
four stages of Llama-3-8B or 70B."""


class Sizes(Protocol):
    """Of a model."""

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""
        ...

    @property
    def hidden_size(self) -> int:
        """Its columns."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers with KV."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """In each."""
        ...

    @property
    def head_dim(self) -> int:
        """Of each."""
        ...


def num_prompt_parts(num_tokens: int, num_stages: int) -> int:
    """In how many parts an iteration's prompt tokens are computed.

    At most twice as many as stages: of M parts through P stages each stage idles for P - 1, if nothing
    follows, and more parts have less work for a device at a time. Parts have `STAGED_ROWS` at least.
    """
    return max(1, min(2 * num_stages, num_tokens // STAGED_ROWS)) if num_stages > 1 else 1


def least_context(model: Sizes) -> int:
    """Tokens whose KV has as many elements as the output head."""
    return (
        model.vocab_size * model.hidden_size // (2 * model.num_layers * model.num_kv_heads * model.head_dim)
    )


def parts_decodes(model: Sizes, num_stages: int, num_decodes: int, context_tokens: int) -> bool:
    """Whether an iteration's decodes are in as many parts as there are stages.

    They are where that saves more than it takes: each part reads the output head and its own KV, while all
    stages compute. So KV of the context has to have more elements than the head, for each stage.
    """
    return 1 < num_stages <= num_decodes and context_tokens >= num_stages * least_context(model)
