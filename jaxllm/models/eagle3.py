"""EAGLE-3 heads as a folder of the `speculators` library describes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.errors import ConfigError, UnsupportedModelError
from jaxllm.models.fields import Fields
from jaxllm.models.like_llama import read_llama
from jaxllm.models.llama import LlamaConfig

LAYER = "layers.0"
TO_TARGET = "d2t"
_UNUSED = ("architectures", "speculators_version", "embed_requires_grad", "has_no_defaults_at_init", "dtype")
_NUM_LAYERS = 3


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """One decoder layer that sees the embedded token beside what three layers of the model were given.

    `layer` has its sizes; `kept_layers` are the model's, each of `target_size` features. It tells
    `num_tokens` tokens apart, of `layer.vocab_size`. With `norm_before_residual` what is added to the
    layer's output has been normalised.
    """

    layer: LlamaConfig
    kept_layers: tuple[int, ...]
    target_size: int
    num_tokens: int
    norm_before_residual: bool

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], num_target_layers: int) -> Eagle3Config:
        """Read config.json's fields, of heads for a model of so many layers.

        Raises:
            ConfigError: one is missing, out of range, or of something that is not implemented.
        """
        fields = Fields(values)
        about = fields.require("speculators_config")
        algorithm = about.get("algorithm") if isinstance(about, Mapping) else about
        if algorithm != "eagle3" or fields.get("speculators_model_type", "eagle3") != "eagle3":
            raise UnsupportedModelError(
                f"config.json: speculators_config has the algorithm {algorithm!r}, and these are to be "
                "EAGLE-3 heads: choose another folder, or another method"
            )
        for name in _UNUSED:
            fields.get(name)
        described = fields.require("transformer_layer_config")
        if not isinstance(described, Mapping):
            raise ConfigError(f"config.json: transformer_layer_config={described!r} must be a dictionary")
        inner = Fields(described)
        inner.expect("model_type", "llama", ("llama",))
        inner.expect("num_hidden_layers", 1, (1,))
        layer = read_llama(inner)
        inner.refuse_unread()
        kept = fields.get("eagle_aux_hidden_state_layer_ids")
        if kept is None:
            kept = [2, num_target_layers // 2, num_target_layers - 3]
        is_list = isinstance(kept, list) and len(kept) == _NUM_LAYERS and sorted(set(kept)) == kept
        if not is_list or not all(type(one) is int and 0 <= one < num_target_layers for one in kept):
            raise ConfigError(
                f"config.json: eagle_aux_hidden_state_layer_ids={kept!r} must be {_NUM_LAYERS} layers of the "
                f"model, from 0 to {num_target_layers - 1}, in ascending order"
            )
        fields.expect("norm_before_fc", False, (False,))
        fields.expect("tie_word_embeddings", False, (False,))
        made = cls(
            layer=layer,
            kept_layers=tuple(kept),
            target_size=fields.size("target_hidden_size", layer.hidden_size),
            num_tokens=fields.size("draft_vocab_size", layer.vocab_size),
            norm_before_residual=fields.flag("norm_before_residual", False),
        )
        fields.refuse_unread()
        return made

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all weights, by name; `d2t` of integers, if it knows fewer tokens than there are."""
        layer, size = self.layer, self.layer.hidden_size
        queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
        found: dict[str, tuple[int, ...]] = {
            "embed_tokens.weight": (layer.vocab_size, size),
            "fc.weight": (size, len(self.kept_layers) * self.target_size),
            f"{LAYER}.input_layernorm.weight": (size,),
            f"{LAYER}.hidden_norm.weight": (size,),
            f"{LAYER}.post_attention_layernorm.weight": (size,),
            f"{attention}.q_proj.weight": (queries, 2 * size),
            f"{attention}.k_proj.weight": (keys, 2 * size),
            f"{attention}.v_proj.weight": (keys, 2 * size),
            f"{attention}.o_proj.weight": (size, queries),
            f"{mlp}.gate_proj.weight": (layer.intermediate_size, size),
            f"{mlp}.up_proj.weight": (layer.intermediate_size, size),
            f"{mlp}.down_proj.weight": (size, layer.intermediate_size),
            "norm.weight": (size,),
            "lm_head.weight": (self.num_tokens, size),
        }
        if layer.attention_bias:
            sizes = {"q": queries, "k": keys, "v": keys, "o": size}
            found |= {f"{attention}.{name}_proj.bias": (width,) for name, width in sizes.items()}
        if layer.mlp_bias:
            sizes = {"gate": layer.intermediate_size, "up": layer.intermediate_size, "down": size}
            found |= {f"{mlp}.{name}_proj.bias": (width,) for name, width in sizes.items()}
        return found if self.num_tokens == layer.vocab_size else {**found, TO_TARGET: (self.num_tokens,)}
