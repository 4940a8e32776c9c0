"""Llama 1, 2 and 3.x in Flax NNX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.models.config import LlamaConfig
from jaxllm.models.layers import Attend, Embedding, Linear, RMSNorm, swiglu
from jaxllm.models.rope import rope_table
from jaxllm.pallas_kernels.heads import RopeTable


class LlamaAttention(nnx.Module):
    """Grouped-query attention with one fused q, k, v projection."""

    def __init__(self, config: LlamaConfig, layer: int, dtype: jnp.dtype) -> None:
        self.layer = layer
        self.scale = config.head_dim**-0.5
        heads = config.num_heads + 2 * config.num_kv_heads
        bias = config.attention_bias
        self.qkv_proj = Linear(config.hidden_size, heads * config.head_dim, bias=bias, dtype=dtype)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, bias=bias, dtype=dtype)

    def __call__(self, x: jax.Array, rope: RopeTable, attend: Attend) -> jax.Array:
        """`x` [T, hidden_size] -> `Linear.parts` of [T, hidden_size]."""
        out = attend(self.layer, self.qkv_proj(x, attend.num_rows), rope, self.scale)
        return self.o_proj.parts(out.reshape(x.shape[0], -1), attend.num_rows)


class LlamaMLP(nnx.Module):
    """SwiGLU with one fused gate and up projection."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype) -> None:
        size, bias = config.intermediate_size, config.mlp_bias
        self.gate_up_proj = Linear(config.hidden_size, 2 * size, bias=bias, dtype=dtype)
        self.down_proj = Linear(size, config.hidden_size, bias=bias, dtype=dtype)

    def __call__(self, x: jax.Array, num_rows: jax.Array | None) -> jax.Array:
        """`x` [T, hidden_size] -> `Linear.parts` of [T, hidden_size]."""
        gate_up = self.gate_up_proj(x, num_rows)
        return self.down_proj.parts(
            swiglu(gate_up, num_rows, is_native=self.gate_up_proj.is_packed), num_rows
        )


class LlamaLayer(nnx.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: LlamaConfig, layer: int, dtype: jnp.dtype) -> None:
        eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(config.hidden_size, eps=eps, dtype=dtype)
        self.self_attn = LlamaAttention(config, layer, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=eps, dtype=dtype)
        self.mlp = LlamaMLP(config, dtype)

    def __call__(
        self, x: jax.Array, delta: jax.Array | None, rope: RopeTable, attend: Attend
    ) -> tuple[jax.Array, jax.Array]:
        """`x` [T, hidden_size], and `Linear.parts` yet to be added to it -> same."""
        num_rows, is_native = attend.num_rows, self.self_attn.qkv_proj.is_packed
        x, normed = self.input_layernorm(x, delta, num_rows, is_native=is_native)
        delta = self.self_attn(normed, rope, attend)
        x, normed = self.post_attention_layernorm(x, delta, num_rows, is_native=is_native)
        return x, self.mlp(normed, num_rows)


class LlamaForCausalLM(nnx.Module):
    """A Llama decoder with its output head."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype) -> None:
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nnx.List([LlamaLayer(config, i, dtype) for i in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        )

    @property
    def is_packed(self) -> bool:
        """Whether its products are native."""
        return self.layers[0].mlp.down_proj.is_packed

    def __call__(self, token_ids: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """`token_ids`, `positions` [T] int32 -> final hidden states [T, hidden_size]."""
        rope = rope_table(positions, self.config.rope.inverse_frequencies())
        x = self.embed_tokens(token_ids)
        delta = None
        for layer in self.layers:
            x, delta = layer(x, delta, rope, attend)
        return self.norm(x, delta, attend.num_rows, is_native=self.is_packed)[1]

    def logits(self, hidden: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
        """`hidden` [N, hidden_size], of which `num_rows` are in use -> [N, vocab_size] float32."""
        head = self.embed_tokens.as_head if self.lm_head is None else self.lm_head
        return head(hidden, num_rows, out_dtype=jnp.dtype(jnp.float32))
