"""The weights of the model in `jaxllm/demo_model` while `train_demo_model.py` trains them, and its loss."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxllm import functional as F
from jaxllm.models.llama import LlamaConfig

Weights = dict[str, jax.Array]


def weight_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of every weight."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (query, hidden),
            f"{prefix}.self_attn.k_proj.weight": (key, hidden),
            f"{prefix}.self_attn.v_proj.weight": (key, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, query),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes | {"model.norm.weight": (hidden,)}


def init_weights(config: LlamaConfig, seed: int) -> Weights:
    """Random weights; what writes to the residual stream starts small."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        if len(shape) == 1:
            value = np.ones(shape)
        elif "embed" in name:
            value = rng.normal(0.0, 0.02, shape)
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            value = rng.normal(0.0, (0.1 if residual else 0.6) / math.sqrt(shape[1]), shape)
        weights[name] = jnp.asarray(value, jnp.float32)
    return weights


def fuse(config: LlamaConfig, weights: Weights) -> Weights:
    """From Hugging Face names to those of `jaxllm.models`, where q, k, v and gate, up are one matrix each."""
    params = {
        "embed_tokens.weight": weights["model.embed_tokens.weight"],
        "norm.weight": weights["model.norm.weight"],
    }
    for layer in range(config.num_layers):
        for fused, parts in (
            ("input_layernorm", ("input_layernorm",)),
            ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("self_attn.o_proj", ("self_attn.o_proj",)),
            ("post_attention_layernorm", ("post_attention_layernorm",)),
            ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
            ("mlp.down_proj", ("mlp.down_proj",)),
        ):
            values = [weights[f"model.layers.{layer}.{part}.weight"] for part in parts]
            params[f"layers.{layer}.{fused}.weight"] = jnp.concatenate(values)
    return params


def losses(config: LlamaConfig, weights: Weights, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Negative log-likelihood in nats of each target, flat."""
    logits = F.logits(fuse(config, weights), config, inputs).reshape(-1, config.vocab_size)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets.reshape(-1))
