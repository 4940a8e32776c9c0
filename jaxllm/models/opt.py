"""OPT in Flax NNX: every published size, the 350m layout included."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.errors import ConfigError
from jaxllm.models.architecture import ModelConfig, register
from jaxllm.models.fields import Fields
from jaxllm.models.layers import Attend, Embedding, KVScales, LayerNorm, Linear
from jaxllm.models.names import WeightNames

_POSITION_OFFSET = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class OPTConfig(ModelConfig):
    """OPT: learned positions, LayerNorm before (or, in the 350m model, after) each block, ReLU."""

    architecture: str = "OPTForCausalLM"
    word_embed_proj_dim: int

    do_layer_norm_before: bool = True
    remove_final_layer_norm: bool = False
    activation_function: str = "relu"
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True

    @property
    def num_features(self) -> int:
        """Size of the hidden states that the output head sees."""
        return self.word_embed_proj_dim

    @property
    def has_final_layer_norm(self) -> bool:
        """Whether the decoder ends in a LayerNorm."""
        return self.do_layer_norm_before and not self.remove_final_layer_norm


class OPTAttention(nnx.Module):
    """Multi-head attention with one fused q, k, v projection."""

    def __init__(self, config: OPTConfig, layer: int, dtype: jnp.dtype) -> None:
        self.layer = layer
        self.scale = config.head_dim**-0.5
        size, bias = config.hidden_size, config.enable_bias
        width = config.num_heads * config.head_dim
        self.qkv_proj = Linear(size, 3 * width, bias=bias, dtype=dtype)
        self.out_proj = Linear(width, size, bias=bias, dtype=dtype, axis=config.axis)
        sizes = config.num_heads, config.num_kv_heads, config.head_dim
        self.kv_scales = KVScales(*sizes, dtype) if config.has_kv_scales else None

    def __call__(self, x: jax.Array, attend: Attend) -> jax.Array:
        """`x` [T, hidden_size] -> same."""
        qkv = self.qkv_proj(x, attend.num_rows)
        qkv = qkv if self.kv_scales is None else self.kv_scales.divided(qkv)
        out = attend(self.layer, qkv, None, self.scale)
        out = out if self.kv_scales is None else self.kv_scales.multiplied(out)
        return self.out_proj(out.reshape(x.shape[0], -1), attend.num_rows)


class OPTLayer(nnx.Module):
    """One decoder layer; LayerNorm before each block, or after it in the 350m model."""

    def __init__(self, config: OPTConfig, layer: int, dtype: jnp.dtype) -> None:
        size, bias, affine = config.hidden_size, config.enable_bias, config.layer_norm_elementwise_affine
        self.pre_norm = config.do_layer_norm_before
        self.activation = config.activation_function
        self.self_attn = OPTAttention(config, layer, dtype)
        self.self_attn_layer_norm = LayerNorm(size, affine=affine, dtype=dtype)
        self.fc1 = Linear(size, config.intermediate_size, bias=bias, dtype=dtype)
        self.fc2 = Linear(config.intermediate_size, size, bias=bias, dtype=dtype, axis=config.axis)
        self.final_layer_norm = LayerNorm(size, affine=affine, dtype=dtype)

    def _mlp(self, x: jax.Array, num_rows: jax.Array | None) -> jax.Array:
        hidden = self.fc1(x, num_rows, relu=self.activation == "relu")
        if self.activation == "gelu":
            hidden = jax.nn.gelu(hidden, approximate=False)
        return self.fc2(hidden, num_rows)

    def __call__(
        self, x: jax.Array, delta: jax.Array | None, attend: Attend
    ) -> tuple[jax.Array, jax.Array | None]:
        """`x` [T, hidden_size], and what is yet to be added to it -> same."""
        num_rows = attend.num_rows
        options: Any = {"num_rows": num_rows, "is_native": self.fc1.is_packed}
        if self.pre_norm:
            x, normed = self.self_attn_layer_norm(x, delta, **options)
            x, normed = self.final_layer_norm(x, self.self_attn(normed, attend), **options)
            return x, self._mlp(normed, num_rows)
        _, x = self.self_attn_layer_norm(x, self.self_attn(x, attend), **options)
        return self.final_layer_norm(x, self._mlp(x, num_rows), **options)[1], None


class OPTForCausalLM(nnx.Module):
    """An OPT decoder with its output head."""

    def __init__(self, config: OPTConfig, dtype: jnp.dtype) -> None:
        self.vocab_size = config.vocab_size
        embed_dim, size = config.word_embed_proj_dim, config.hidden_size
        projected = embed_dim != size
        self.embed_tokens = Embedding(config.vocab_size, embed_dim, dtype=dtype)
        self.embed_positions = Embedding(config.max_position_embeddings + _POSITION_OFFSET, size, dtype=dtype)
        self.project_in = Linear(embed_dim, size, bias=False, dtype=dtype) if projected else None
        self.project_out = Linear(size, embed_dim, bias=False, dtype=dtype) if projected else None
        self.layers = nnx.List([OPTLayer(config, i, dtype) for i in range(config.num_layers)])
        affine = config.layer_norm_elementwise_affine
        self.final_layer_norm = (
            LayerNorm(size, affine=affine, dtype=dtype) if config.has_final_layer_norm else None
        )
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(embed_dim, config.num_head_rows, bias=False, dtype=dtype)
        )

    @property
    def is_packed(self) -> bool:
        """Whether its products are native."""
        return self.layers[0].fc1.is_packed

    def __call__(self, token_ids: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """`token_ids`, `positions` [T] int32 -> final hidden states [T, word_embed_proj_dim]."""
        x = self.embed_tokens(token_ids)
        if self.project_in is not None:
            x = self.project_in(x, attend.num_rows)
        x = x + self.embed_positions(positions + _POSITION_OFFSET)
        delta = None
        for i, layer in enumerate(self.layers):
            x, delta = attend.run(i, layer, x, delta)
        if self.final_layer_norm is not None:
            x = self.final_layer_norm(x, delta, attend.num_rows, is_native=self.is_packed)[1]
        elif delta is not None:
            x = x + delta
        return x if self.project_out is None else self.project_out(x, attend.num_rows)

    def logits(self, hidden: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
        """`hidden` [N, word_embed_proj_dim], of which `num_rows` are in use -> [N, num_head_rows] float32."""
        head = self.embed_tokens.as_head if self.lm_head is None else self.lm_head
        return head(hidden, num_rows, out_dtype=jnp.dtype(jnp.float32))


@register(
    name="OPTForCausalLM",
    model=OPTForCausalLM,
    names=WeightNames(
        prefixes=("model.decoder.", "decoder."), fused={"qkv_proj": ("q_proj", "k_proj", "v_proj")}
    ),
    has_rotary_positions=False,
    has_gated_mlp=False,
)
def _opt(fields: Fields) -> OPTConfig:
    hidden_size = fields.size("hidden_size")
    num_heads = fields.size("num_attention_heads")
    if hidden_size % num_heads:
        raise ConfigError(
            f"config.json: hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads}"
        )
    return OPTConfig(
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        num_layers=fields.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=fields.size("ffn_dim"),
        max_position_embeddings=fields.size("max_position_embeddings", 2048),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        word_embed_proj_dim=fields.size("word_embed_proj_dim", hidden_size),
        do_layer_norm_before=fields.flag("do_layer_norm_before", True),
        remove_final_layer_norm=fields.flag("_remove_final_layer_norm", False),
        activation_function=fields.expect("activation_function", "relu", ("relu", "gelu")),
        enable_bias=fields.flag("enable_bias", True),
        layer_norm_elementwise_affine=fields.flag("layer_norm_elementwise_affine", True),
    )
