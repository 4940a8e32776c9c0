"""Llama, and the decoders that differ from it in details, in Flax NNX."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.models.architecture import ModelConfig
from jaxllm.models.layers import (
    Attend,
    Embedding,
    KVScales,
    Linear,
    RMSNorm,
    gelu_glu,
    scaled,
    soft_capped,
    swiglu,
    whole,
)
from jaxllm.models.rope import RopeConfig, rope_table
from jaxllm.pallas_kernels.heads import RopeTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """Llama 1, 2 and 3.x: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

    Decoders like it have other values of what Llama leaves at its default.

    `attention_bias` is that of queries, keys and values. `windows` has for each layer how many of the latest
    tokens a token sees, its own included, or None for all; it is empty where all layers see all. Layers in
    `unrotated` have no positions. With
    `qk_norm` queries and keys are normalised head by head before they are rotated. `attention_scale` is the
    factor of scores, by default `head_dim ** -0.5`. Embeddings and what each block adds are multiplied by
    `embedding_multiplier` and `residual_multiplier`, and logits divided by `logits_divisor`. With `is_gemma`
    there are norms before and after each block, whose weights are what the factors have beyond 1, and GELU
    instead of SiLU. Scores and logits are soft-capped. Layers in `local` take positions from `local_rope`.
    With `is_stretched` the positions that config.json counts are those after scaling.
    """

    architecture: str = "LlamaForCausalLM"
    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    unrotated: frozenset[int] = frozenset()
    attention_scale: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    is_gemma: bool = False
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    local: frozenset[int] = frozenset()
    local_rope: RopeConfig | None = None
    is_stretched: bool = False

    @property
    def has_bounds(self) -> bool:
        """Whether attention is bounded in any layer, by a window or a soft cap."""
        return bool(self.windows) or self.attention_soft_cap is not None

    @property
    def max_model_len(self) -> int:
        """Positions stretched by linear, dynamic or yarn scaling count in full."""
        factor = 1 if self.is_stretched else self.rope.length_factor
        return int(self.max_position_embeddings * factor)

    def with_max_model_len(self, max_model_len: int) -> Self:
        """As in the base class; also fixes the frequencies that depend on this length.

        Windows that no sequence of this length outgrows are dropped.
        """
        super().with_max_model_len(max_model_len)
        windows = tuple(None if size is None or size >= max_model_len else size for size in self.windows)
        rope = dataclasses.replace(self.rope, max_model_len=max_model_len)
        return dataclasses.replace(self, rope=rope, windows=windows if any(windows) else ())


def _norms(config: LlamaConfig, dtype: jnp.dtype) -> Callable[[int], RMSNorm]:
    """Makes the norms of a model, of so many features."""
    offset = 1.0 if config.is_gemma else 0.0
    return functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype, offset=offset)


class LlamaAttention(nnx.Module):
    """Grouped-query attention with one fused q, k, v projection."""

    def __init__(self, config: LlamaConfig, layer: int, dtype: jnp.dtype) -> None:
        self.layer = layer
        self.scale = config.attention_scale or config.head_dim**-0.5
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.is_rotated = layer not in config.unrotated
        self.soft_cap = config.attention_soft_cap
        self.window = config.windows[layer] if config.windows else None
        heads = config.num_heads + 2 * config.num_kv_heads
        size, out_bias = config.hidden_size, config.attention_output_bias
        self.qkv_proj = Linear(size, heads * config.head_dim, bias=config.attention_bias, dtype=dtype)
        width, axis = config.num_heads * config.head_dim, config.axis
        self.o_proj = Linear(width, size, bias=out_bias, dtype=dtype, axis=axis)
        norm = _norms(config, dtype)
        self.q_norm = norm(config.head_dim) if config.qk_norm else None
        self.k_norm = norm(config.head_dim) if config.qk_norm else None
        sizes = config.num_heads, config.num_kv_heads, config.head_dim
        self.kv_scales = KVScales(*sizes, dtype) if config.has_kv_scales else None

    def __call__(self, x: jax.Array, rope: RopeTable, attend: Attend) -> jax.Array:
        """`x` [T, hidden_size] -> `Linear.parts` of [T, hidden_size]."""
        if self.q_norm is None and self.kv_scales is None:
            qkv = self.qkv_proj.parts(x, attend)
        else:
            qkv = self._normed(self.qkv_proj(x, attend.num_rows))
            qkv = qkv if self.kv_scales is None else self.kv_scales.divided(qkv)
        table = rope if self.is_rotated else None
        out = attend(self.layer, qkv, table, self.scale, self.window, self.soft_cap, x.dtype)
        out = out if self.kv_scales is None else self.kv_scales.multiplied(out)
        return self.o_proj.parts(out.reshape(x.shape[0], -1), attend)

    def _normed(self, qkv: jax.Array) -> jax.Array:
        """The fused projection, queries and keys normalised head by head where the model does that."""
        if self.q_norm is None or self.k_norm is None:
            return qkv
        heads = qkv.reshape(qkv.shape[0], -1, self.head_dim)
        num_kv_heads = (heads.shape[1] - self.num_heads) // 2
        q, k, v = jnp.split(heads, (self.num_heads, self.num_heads + num_kv_heads), axis=1)
        return jnp.concatenate([self.q_norm(q)[1], self.k_norm(k)[1], v], axis=1).reshape(qkv.shape)


class LlamaMLP(nnx.Module):
    """SwiGLU, or Gemma's GELU in its place, with one fused gate and up projection."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype) -> None:
        size, bias = config.intermediate_size, config.mlp_bias
        self.has_gelu = config.is_gemma
        self.gate_up_proj = Linear(config.hidden_size, 2 * size, bias=bias, dtype=dtype)
        self.down_proj = Linear(size, config.hidden_size, bias=bias, dtype=dtype, axis=config.axis)

    def __call__(self, x: jax.Array, attend: Attend) -> jax.Array:
        """`x` [T, hidden_size] -> `Linear.parts` of [T, hidden_size]."""
        gate_up = self.gate_up_proj(x, attend.num_rows)
        if self.has_gelu:
            return self.down_proj.parts(gelu_glu(gate_up), attend)
        gated = swiglu(gate_up, attend.num_rows, is_native=self.gate_up_proj.is_packed)
        return self.down_proj.parts(gated, attend)


class LlamaLayer(nnx.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: LlamaConfig, layer: int, dtype: jnp.dtype) -> None:
        eps = config.rms_norm_eps
        self.residual_multiplier = config.residual_multiplier
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
        delta = scaled(self.self_attn(normed, rope, attend), self.residual_multiplier)
        x, normed = self.post_attention_layernorm(x, delta, num_rows, is_native=is_native)
        return x, scaled(self.mlp(normed, attend), self.residual_multiplier)


class GemmaLayer(nnx.Module):
    """One decoder layer with norms before and after each block."""

    def __init__(self, config: LlamaConfig, layer: int, dtype: jnp.dtype) -> None:
        norm, size = _norms(config, dtype), config.hidden_size
        self.input_layernorm = norm(size)
        self.self_attn = LlamaAttention(config, layer, dtype)
        self.post_attention_layernorm = norm(size)
        self.pre_feedforward_layernorm = norm(size)
        self.mlp = LlamaMLP(config, dtype)
        self.post_feedforward_layernorm = norm(size)

    def __call__(
        self, x: jax.Array, delta: jax.Array | None, rope: RopeTable, attend: Attend
    ) -> tuple[jax.Array, jax.Array]:
        """`x` [T, hidden_size], and what is yet to be added to it -> same."""
        num_rows = attend.num_rows
        options: Any = {"num_rows": num_rows, "is_native": self.self_attn.qkv_proj.is_packed}
        x, normed = self.input_layernorm(x, delta, **options)
        attended = whole(self.self_attn(normed, rope, attend), x.dtype)
        _, delta = self.post_attention_layernorm(attended, **options)
        x, normed = self.pre_feedforward_layernorm(x, delta, **options)
        computed = whole(self.mlp(normed, attend), x.dtype)
        return x, self.post_feedforward_layernorm(computed, **options)[1]


class LlamaForCausalLM(nnx.Module):
    """A decoder like Llama with its output head."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype, layer: Any = LlamaLayer) -> None:
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nnx.List([layer(config, i, dtype) for i in range(config.num_layers)])
        self.norm = _norms(config, dtype)(config.hidden_size)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.num_head_rows, bias=False, dtype=dtype)
        )

    @property
    def is_packed(self) -> bool:
        """Whether its products are native."""
        return self.layers[0].mlp.down_proj.is_packed

    def __call__(self, token_ids: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """`token_ids`, `positions` [T] int32 -> final hidden states [T, hidden_size]."""
        rotary = self.config.rope
        rope = rope_table(positions, rotary.inverse_frequencies(), rotary.attention_factor)
        local_rope, local = self.config.local_rope, self.config.local
        ropes = [rope] * len(self.layers)
        if local_rope is not None:
            table = rope_table(positions, local_rope.inverse_frequencies(), local_rope.attention_factor)
            ropes = [table if i in local else rope for i in range(len(self.layers))]
        x = self.embed_tokens(token_ids)
        if self.config.embedding_multiplier != 1:  # rounded to the dtype, as Gemma was trained
            x = x * jnp.asarray(self.config.embedding_multiplier, x.dtype)
        delta = None
        for i, layer in enumerate(self.layers):
            x, delta = attend.run(i, layer, x, delta, ropes[i])
        return self.norm(x, delta, attend.num_rows, is_native=self.is_packed)[1]

    def logits(self, hidden: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
        """`hidden` [N, hidden_size], of which `num_rows` are in use -> [N, num_head_rows] float32."""
        head = self.embed_tokens.as_head if self.lm_head is None else self.lm_head
        logits = head(hidden, num_rows, out_dtype=jnp.dtype(jnp.float32))
        if self.config.logits_divisor != 1:
            logits = logits / self.config.logits_divisor
        return soft_capped(logits, self.config.logits_soft_cap)
