"""What is measured: sizes, models, and requests of ShareGPT's lengths. Imports no JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.research.workloads.lengths import LognormalLengths

_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama-3-8b": {
        **_LLAMA,
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
    "opt-13b": {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "vocab_size": 50272,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "ffn_dim": 20480,
        "word_embed_proj_dim": 5120,
        "max_position_embeddings": 2048,
    },
    "rehearsal": {
        **_LLAMA,
        "vocab_size": 256,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 256,
    },
}
"""Published shapes, and a tiny one, as their config.json has them."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much of everything.

    Args:
        megabytes: of the array copied for the copy ceiling.
        matmul: rows and columns of the product for the matmul ceiling.
        heads: (query heads, KV heads, head_dim) that kernels are checked for.
        timed_heads: those that kernels are timed for.
        batches: of decode attention, and of decode steps.
        contexts: KV tokens of each sequence of decode attention.
        prefill_tokens: of prefill attention.
        products: hidden and intermediate size of products of codes; `product_rows` of their inputs.
        turn_bytes: KV that attention reads before it reads the same again: more than caches hold.
        chain: fewest kernels in the body of a loop on the device; `loop_kernels` at most in all turns.
        swap_blocks: sizes of swaps.
        llama: a model of `CONFIGS`; `opt` likewise.
        context: KV tokens of each sequence of decode steps; half of it for the `opt` model.
        max_model_len, max_num_batched_tokens: of the engines.
        prefill_buckets: rows of the engines' programs with prompts.
        requests: of the run with ShareGPT's lengths; `longest` is the longest prompt, and output, in tokens.
        profile_seconds: for the samples that predictors are fitted to.
        trace_requests, output_len, blocks, host_blocks: of the presets' comparison.
        long_blocks, long_requests, long_seqs: of the presets' comparison on long outputs; outputs have up to
            1.25 times `longest` tokens.
        compare_requests: of those against transformers; `compare_model` is one of `jaxllm make-model`.
        compare_seqs: most of them at once: both engines' weights and pools fit 80 GB beside each other.
    """

    megabytes: int = 1024
    matmul: int = 8192
    heads: tuple[tuple[int, int, int], ...] = ((8, 8, 64), (8, 2, 128), (10, 10, 80), (32, 4, 128))
    timed_heads: tuple[int, int, int] = (32, 8, 128)
    batches: tuple[int, ...] = (1, 16, 64, 256)
    contexts: tuple[int, ...] = (256, 1024, 4096)
    prefill_tokens: tuple[int, ...] = (512, 2048)
    products: tuple[int, int] = (4096, 14336)
    product_rows: tuple[int, ...] = (1, 16, 64, 256, 2048)
    turn_bytes: int = 2**28
    chain: int = 8
    loop_kernels: int = 2000
    swap_blocks: tuple[int, ...] = (1, 4, 16, 64)
    llama: str = "llama-3-8b"
    opt: str = "opt-13b"
    context: int = 1024
    max_model_len: int = 2048
    max_num_batched_tokens: int = 2048
    prefill_buckets: tuple[int, ...] = (512, 2048)
    requests: int = 768
    longest: int = 1024
    profile_seconds: float = 15.0
    trace_requests: int = 200
    output_len: int = 64
    blocks: int = 128
    host_blocks: int = 64
    long_blocks: int = 450
    long_requests: int = 128
    long_seqs: int = 64
    compare_model: str = "107m"
    compare_requests: int = 192
    compare_seqs: int = 64


REHEARSAL = Sizes(
    megabytes=4,
    matmul=128,
    heads=((4, 2, 64),),
    timed_heads=(4, 2, 64),
    batches=(1, 4),
    contexts=(32,),
    prefill_tokens=(32,),
    products=(128, 256),
    product_rows=(2,),
    turn_bytes=0,
    chain=2,
    loop_kernels=8,
    swap_blocks=(1, 3),
    llama="rehearsal",
    opt="rehearsal",
    context=32,
    max_model_len=128,
    max_num_batched_tokens=64,
    prefill_buckets=(64,),
    requests=8,
    longest=40,
    profile_seconds=0.1,
    trace_requests=6,
    output_len=24,
    blocks=24,
    host_blocks=16,
    long_blocks=20,
    long_requests=8,
    long_seqs=2,
    compare_model="tiny",
    compare_requests=4,
    compare_seqs=4,
)
"""Sizes that a CPU manages."""


def sharegpt_like(
    num_requests: int, *, longest: int, vocab_size: int, seed: int = 0
) -> tuple[list[list[int]], list[int]]:
    """Prompts of random token ids, and the tokens each is to be answered with.

    The means are those that vLLM's paper (section 6.1) gives for ShareGPT, 161.31 and 337.99 tokens, less
    where `longest` cuts them; that lengths are lognormal with sigma 1 is an assumption.
    """
    rng = np.random.default_rng(seed)
    lengths = [
        LognormalLengths(mean=min(mean, longest / 2), sigma=1.0, shortest=4, longest=longest)
        for mean in (161.31, 337.99)
    ]
    inputs, outputs = (of.sample(num_requests, rng).tolist() for of in lengths)
    return [rng.integers(vocab_size, size=count).tolist() for count in inputs], outputs
