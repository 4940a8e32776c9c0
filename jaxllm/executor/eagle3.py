"""EAGLE-3 heads: one decoder layer that goes on from what layers of the model were given.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (2025,
arXiv 2503.01840), section 3.1. Beside each token stands what three layers were given for the one before it,
made one by a linear layer; after the first draft that is the head's own output. There are no trees of
candidates.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.executor.config import ExecutorConfig
from jaxllm.executor.draft_programs import implementation_of, pool_shape
from jaxllm.executor.sampler import largest
from jaxllm.executor.step import PagedAttention
from jaxllm.executor.step_rows import DecodeInputs, PrefillInputs, places_of
from jaxllm.models.eagle3 import LAYER, TO_TARGET, Eagle3Config
from jaxllm.models.layers import swiglu
from jaxllm.models.linear_weights import product
from jaxllm.models.rope import rope_table
from jaxllm.types import Request


@dataclasses.dataclass(frozen=True)
class Eagle3Core:
    """See `draft_programs.DraftCore`.

    Steps leave what the layers were given in blocks like those of KV, so that it is found where KV is found.
    Of KV that was in host memory it is not: who was swapped, or began with such blocks, drafts nothing.
    """

    heads: Eagle3Config
    config: ExecutorConfig
    most: int
    num_behind = 1
    keeps_drafts = False

    @property
    def num_new(self) -> int:
        """See `DraftCore`: all drafts, and one more."""
        return self.most + 1

    def params(self) -> Any:
        """See `DraftCore`."""
        dtype = jnp.dtype(self.config.dtype)
        return {
            name: jax.ShapeDtypeStruct(shape, jnp.int32 if name == TO_TARGET else dtype)
            for name, shape in self.heads.shapes().items()
        }

    def pool(self) -> jax.ShapeDtypeStruct:
        """See `DraftCore`."""
        return pool_shape(self.heads.layer, self.config)

    def layers(self) -> jax.ShapeDtypeStruct:
        """See `DraftCore`."""
        width = len(self.heads.kept_layers) * self.heads.target_size
        shape = self.config.num_gpu_blocks, self.config.block_size, width
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.config.dtype))

    def follows(self, request: Request) -> bool:
        """See `DraftCore`."""
        was_away = request.metrics.num_swaps or request.num_host_cached_tokens
        return not (was_away or request.num_disk_cached_tokens)

    def begin(
        self, params: Any, pool: jax.Array, layers: jax.Array | None, inputs: Any, prompts: PrefillInputs
    ) -> tuple[jax.Array, jax.Array]:
        """See `DraftCore`."""
        assert layers is not None
        given = layers.reshape(-1, layers.shape[2])[inputs.sources]
        hidden = product(given, params["fc.weight"])
        return self._layer(params, pool, None, prompts, inputs.tokens, hidden)

    def go_on(
        self, params: Any, pool: jax.Array, decode: DecodeInputs, tokens: jax.Array, hidden: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """See `DraftCore`."""
        return self._layer(params, pool, decode, None, tokens, hidden)

    def likeliest(self, params: Any, hidden: jax.Array, num_seqs: jax.Array) -> jax.Array:
        """See `DraftCore`."""
        scores = product(
            self._norm(hidden, params["norm.weight"]),
            params["lm_head.weight"],
            out_dtype=jnp.dtype(jnp.float32),
        )
        tokens = largest(scores, is_native=False)
        if TO_TARGET not in params:
            return tokens
        return jnp.where(tokens < 0, -1, tokens + params[TO_TARGET][tokens])

    def _layer(
        self,
        params: Any,
        pool: jax.Array,
        decode: DecodeInputs | None,
        prompts: PrefillInputs | None,
        tokens: jax.Array,
        hidden: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """The decoder layer: `tokens` [T] beside `hidden` [T, hidden_size] -> the pool, and the same."""
        heads, layer = self.heads, self.heads.layer
        places = places_of(decode, prompts, 0, pool.shape[4])
        attend = PagedAttention(pool, places.slot_mapping, decode, prompts, implementation_of(self.config))
        rope = rope_table(
            jnp.maximum(places.positions, 0), layer.rope.inverse_frequencies(), layer.rope.attention_factor
        )
        embedded = params["embed_tokens.weight"].at[tokens].get(mode="clip")
        normed = self._norm(hidden, params[f"{LAYER}.hidden_norm.weight"])
        residual = normed if heads.norm_before_residual else hidden
        x = jnp.concatenate([self._norm(embedded, params[f"{LAYER}.input_layernorm.weight"]), normed], axis=1)

        def linear(x: jax.Array, name: str) -> jax.Array:
            bias = params.get(f"{LAYER}.{name}.bias")
            return product(x, params[f"{LAYER}.{name}.weight"], bias=bias)

        qkv = jnp.concatenate([linear(x, f"self_attn.{name}_proj") for name in "qkv"], axis=1)
        attended = attend(0, qkv, rope, layer.head_dim**-0.5)
        x = residual + linear(attended.reshape(len(x), -1), "self_attn.o_proj")
        normed = self._norm(x, params[f"{LAYER}.post_attention_layernorm.weight"])
        both = jnp.concatenate([linear(normed, f"mlp.{name}_proj") for name in ("gate", "up")], axis=1)
        return attend.pool, x + linear(swiglu(both, None, is_native=False), "mlp.down_proj")

    def _norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        mean = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        return weight * (x32 * lax.rsqrt(mean + self.heads.layer.rms_norm_eps)).astype(x.dtype)
