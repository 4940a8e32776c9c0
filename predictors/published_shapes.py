"""Shapes of published models, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import ModelShape


def _shape(
    name: str,
    layers: int,
    hidden: int,
    heads: tuple[int, int],
    inner: int,
    vocab: int,
    *,
    gated: bool = True,
    tied: bool = False,
    experts: tuple[int, int] = (0, 0),
    head_dim: int = 128,
) -> ModelShape:
    """A model; heads are those of queries and of keys, experts their number and a token's."""
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        intermediate_size=inner,
        vocab_size=vocab,
        gated_mlp=gated,
        tie_word_embeddings=tied,
        num_experts=experts[0],
        experts_per_token=experts[1],
    )


# From the checkpoints' config.json on the Hugging Face hub: facebook/opt-*, huggyllama/llama-*,
# meta-llama/Llama-2-*-hf, Meta-Llama-3-*, Llama-3.1-* and Llama-3.2-*, codellama/CodeLlama-*-hf, mistralai/*,
# 01-ai/Yi-34B, Qwen/Qwen2.5-* and Qwen3-*. The paper's Llama-32.5B is the checkpoint llama-30b.
_SHAPES = (
    _shape("opt-13b", 40, 5120, (40, 40), 20480, 50272, gated=False, tied=True),
    _shape("opt-30b", 48, 7168, (56, 56), 28672, 50272, gated=False, tied=True),
    _shape("llama-13b", 40, 5120, (40, 40), 13824, 32000),
    _shape("llama-32.5b", 60, 6656, (52, 52), 17920, 32000),
    _shape("opt-66b", 64, 9216, (72, 72), 36864, 50272, gated=False, tied=True),
    _shape("llama-2-70b", 80, 8192, (64, 8), 28672, 32000),
    _shape("llama-3-8b", 32, 4096, (32, 8), 14336, 128256),
    _shape("llama-2-7b", 32, 4096, (32, 32), 11008, 32000),
    _shape("llama-2-13b", 40, 5120, (40, 40), 13824, 32000),
    _shape("codellama-7b", 32, 4096, (32, 32), 11008, 32016),
    _shape("codellama-13b", 40, 5120, (40, 40), 13824, 32016),
    _shape("codellama-34b", 48, 8192, (64, 8), 22016, 32000),
    _shape("llama-3-70b", 80, 8192, (64, 8), 28672, 128256),
    _shape("llama-3.1-8b", 32, 4096, (32, 8), 14336, 128256),
    _shape("llama-3.1-70b", 80, 8192, (64, 8), 28672, 128256),
    _shape("llama-3.2-1b", 16, 2048, (32, 8), 8192, 128256, tied=True, head_dim=64),
    _shape("llama-3.3-70b", 80, 8192, (64, 8), 28672, 128256),
    _shape("mistral-7b", 32, 4096, (32, 8), 14336, 32768),
    _shape("mistral-nemo", 40, 5120, (32, 8), 14336, 131072),
    _shape("mixtral-8x7b", 32, 4096, (32, 8), 14336, 32000, experts=(8, 2)),
    _shape("yi-34b", 60, 7168, (56, 8), 20480, 64000),
    _shape("qwen2.5-7b", 28, 3584, (28, 4), 18944, 152064),
    _shape("qwen2.5-14b", 48, 5120, (40, 8), 13824, 152064),
    _shape("qwen2.5-32b", 64, 5120, (40, 8), 27648, 152064),
    _shape("qwen2.5-72b", 80, 8192, (64, 8), 29568, 152064),
    _shape("qwen3-0.6b", 28, 1024, (16, 8), 3072, 151936, tied=True),
    _shape("qwen3-1.7b", 28, 2048, (16, 8), 6144, 151936, tied=True),
    _shape("qwen3-4b", 36, 2560, (32, 8), 9728, 151936, tied=True),
    _shape("qwen3-8b", 36, 4096, (32, 8), 12288, 151936),
    _shape("qwen3-14b", 40, 5120, (40, 8), 17408, 151936),
    _shape("qwen3-32b", 64, 5120, (64, 8), 25600, 151936),
    _shape("qwen3-30b-a3b", 48, 2048, (32, 4), 768, 151936, experts=(128, 8)),
)


MODEL_SHAPES: Mapping[str, ModelShape] = {shape.name: shape for shape in _SHAPES}
"""Published shapes by name, in float16."""


def model_shape(name: str, dtype: str = "float16") -> ModelShape:
    """A published model's shape, with weights and KV of `dtype`.

    Raises:
        ConfigError: the name or the dtype is unknown; the message lists those known.
    """
    if name not in MODEL_SHAPES:
        raise ConfigError(f"no shape of model {name!r} is stored; known: {', '.join(MODEL_SHAPES)}")
    return dataclasses.replace(MODEL_SHAPES[name], dtype=dtype)
