"""Decoders like Llama: for each what its config.json means, and how its checkpoints name weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.errors import ConfigError, UnsupportedModelError
from jaxllm.models.architecture import register
from jaxllm.models.fields import Fields
from jaxllm.models.llama import GemmaLayer, LlamaConfig, LlamaForCausalLM
from jaxllm.models.names import WeightNames
from jaxllm.models.rope import RopeConfig

_KINDS = ("full_attention", "sliding_attention")
LLAMA_NAMES = WeightNames(
    prefixes=("model.",),
    fused={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
)
_FUSED_NAMES = WeightNames(prefixes=LLAMA_NAMES.prefixes, fused={})
"""Of checkpoints whose projections are fused, in our order."""


_LLAMA: Any = {"model": LlamaForCausalLM, "names": LLAMA_NAMES}
_GEMMA: Any = {**_LLAMA, "model": functools.partial(LlamaForCausalLM, layer=GemmaLayer)}


def llama_like(
    fields: Fields,
    *,
    max_positions: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    rms_norm_eps: float = 1e-6,
    is_tied: bool = False,
    is_gemma: bool = False,
    original_max_positions: int | None = None,
) -> dict[str, Any]:
    """What all decoders like Llama have; but for the last, the arguments are for absent fields.

    They are what transformers takes then.
    """
    hidden_size = fields.size("hidden_size")
    num_heads = fields.size("num_attention_heads")
    head_dim = fields.size("head_dim", head_dim or hidden_size // num_heads)
    if not is_gemma:
        fields.expect("hidden_act", "silu", ("silu",))
    fields.expect("partial_rotary_factor", 1.0, (1.0,))
    max_positions = fields.size("max_position_embeddings", max_positions)
    return {
        "vocab_size": fields.size("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": fields.size("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": fields.size("num_key_value_heads", num_kv_heads or num_heads),
        "head_dim": head_dim,
        "intermediate_size": fields.size("intermediate_size"),
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": fields.flag("tie_word_embeddings", is_tied),
        "rms_norm_eps": fields.positive("rms_norm_eps", rms_norm_eps),
        "rope": RopeConfig.from_hf(
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rope_theta=fields.get("rope_theta"),
            rope_scaling=fields.get("rope_scaling"),
            rope_parameters=fields.get("rope_parameters"),
            original_max_position_embeddings=original_max_positions,
        ),
    }


@register(name="LlamaForCausalLM", **_LLAMA)
def read_llama(fields: Fields) -> LlamaConfig:
    """Llama 1, 2 and 3.x."""
    has_bias = fields.flag("attention_bias", False)
    return LlamaConfig(
        **llama_like(fields, max_positions=2048),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


@register(name="Qwen2ForCausalLM", **_LLAMA)
def _qwen2(fields: Fields) -> LlamaConfig:
    """Qwen 2 and 2.5: biases of queries, keys and values; windows in the upper layers of a few models."""
    return LlamaConfig(
        **llama_like(fields, num_kv_heads=32, max_positions=32768),
        attention_bias=True,
        windows=_qwen_windows(fields),
    )


@register(name="Qwen3ForCausalLM", **_LLAMA)
def _qwen3(fields: Fields) -> LlamaConfig:
    """Qwen 3, dense: norms of queries and keys, heads of a size of their own; windows as in Qwen 2."""
    has_bias = fields.flag("attention_bias", False)
    return LlamaConfig(
        **llama_like(fields, num_kv_heads=32, head_dim=128, max_positions=32768),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        qk_norm=True,
        windows=_qwen_windows(fields),
    )


@register(name="SmolLM3ForCausalLM", **_LLAMA)
def _smollm3(fields: Fields) -> LlamaConfig:
    """SmolLM 3: no positions in every fourth layer."""
    num_layers, interval = fields.size("num_hidden_layers"), fields.size("no_rope_layer_interval", 4)
    rotated = fields.get("no_rope_layers", [int((i + 1) % interval != 0) for i in range(num_layers)])
    if (
        not isinstance(rotated, list)
        or len(rotated) != num_layers
        or any(one not in (0, 1) for one in rotated)
    ):
        raise ConfigError(
            f"config.json: no_rope_layers={rotated!r} must have 1 (with positions) or 0 for each of the "
            f"{num_layers} layers"
        )
    fields.expect("use_sliding_window", False, (False,))
    has_bias = fields.flag("attention_bias", False)
    return LlamaConfig(
        **llama_like(fields, num_kv_heads=4, max_positions=32768, is_tied=True),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        windows=_qwen_windows(fields),
        unrotated=frozenset(i for i, is_rotated in enumerate(rotated) if not is_rotated),
    )


def _gemma(fields: Fields, kind_of: Callable[[int], str]) -> dict[str, Any]:
    """What both versions have; `kind_of` gives a layer's where `layer_types` is absent."""
    num_layers = fields.size("num_hidden_layers")
    fields.get("hidden_act")  # not read by transformers either
    fields.expect("hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
    fields.expect("use_bidirectional_attention", False, (False,))
    has_bias = fields.flag("attention_bias", False)
    kinds = fields.get("layer_types", [kind_of(i) for i in range(num_layers)])
    common = llama_like(fields, num_kv_heads=4, head_dim=256, max_positions=8192, is_tied=True, is_gemma=True)
    caps = {
        name: None if fields.get(name) is None else fields.positive(name, 1.0)
        for name in ("attn_logit_softcapping", "final_logit_softcapping")
    }
    return common | {
        "attention_bias": has_bias,
        "attention_output_bias": has_bias,
        "windows": _windows(_checked_kinds(kinds, num_layers), fields.size("sliding_window", 4096)),
        "attention_scale": fields.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        "embedding_multiplier": common["hidden_size"] ** 0.5,
        "is_gemma": True,
        "attention_soft_cap": caps["attn_logit_softcapping"],
        "logits_soft_cap": caps["final_logit_softcapping"],
    }


@register(name="Gemma2ForCausalLM", **_GEMMA)
def _gemma2(fields: Fields) -> LlamaConfig:
    """Gemma 2: windows in every second layer, soft caps."""
    for name, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
        fields.set_default(name, default)
    return LlamaConfig(**_gemma(fields, lambda layer: _KINDS[layer % 2 == 0]))


@register(name="Gemma3ForCausalLM", model_type="gemma3_text", **_GEMMA)
def _gemma3(fields: Fields) -> LlamaConfig:
    """Gemma 3's text models: five layers with windows and positions of their own, then one without."""
    pattern = fields.size("sliding_window_pattern", 6)
    local_theta = fields.get("rope_local_base_freq", 10000.0)
    fields.set_default("rope_theta", 1000000.0)
    fields.set_default("max_position_embeddings", 131072)
    by_kind = fields.get("rope_parameters")
    local_parameters = None
    if isinstance(by_kind, Mapping) and _KINDS[0] in by_kind:
        local_parameters = by_kind.get(_KINDS[1])
        fields = fields.replaced("rope_parameters", by_kind[_KINDS[0]])
    values = _gemma(fields, lambda layer: _KINDS[(layer + 1) % pattern != 0])
    local_rope = RopeConfig.from_hf(
        head_dim=values["head_dim"],
        max_position_embeddings=values["max_position_embeddings"],
        rope_theta=local_theta,
        rope_scaling=None,
        rope_parameters=local_parameters,
    )
    local = frozenset(i for i, window in enumerate(values["windows"]) if window is not None)
    return LlamaConfig(**values, qk_norm=True, local=local, local_rope=local_rope, is_stretched=True)


@register(name="GraniteForCausalLM", **_LLAMA)
def _granite(fields: Fields) -> LlamaConfig:
    """Granite 3, dense: embeddings, scores, residuals and logits scaled."""
    has_bias = fields.flag("attention_bias", False)
    return LlamaConfig(
        **llama_like(fields, max_positions=2048),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        attention_scale=fields.positive("attention_multiplier", 1.0),
        embedding_multiplier=fields.positive("embedding_multiplier", 1.0),
        residual_multiplier=fields.positive("residual_multiplier", 1.0),
        logits_divisor=fields.positive("logits_scaling", 1.0),
    )


@register(name="Phi3ForCausalLM", model=LlamaForCausalLM, names=_FUSED_NAMES)
def _phi3(fields: Fields) -> LlamaConfig:
    """Phi 3 and 4: fused projections in the checkpoint; a window in all layers of some."""
    original = fields.size("original_max_position_embeddings", 4096)
    fields.expect("attention_bias", False, (False,))
    has_window = fields.get("sliding_window") is not None
    return LlamaConfig(
        **llama_like(fields, max_positions=4096, rms_norm_eps=1e-5, original_max_positions=original),
        windows=_equal_windows(fields) if has_window else (),
    )


@register(name="MistralForCausalLM", **_LLAMA)
def _mistral(fields: Fields) -> LlamaConfig:
    """Mistral: the first version with a window in all layers, later ones without."""
    # Null means none, and absent what transformers takes then.
    has_window = "sliding_window" not in fields or fields.get("sliding_window") is not None
    return LlamaConfig(
        **llama_like(fields, num_kv_heads=8, max_positions=131072),
        windows=_equal_windows(fields, 4096) if has_window else (),
    )


def _equal_windows(fields: Fields, default: int | None = None) -> tuple[int, ...]:
    """The same in all layers."""
    return (fields.size("sliding_window", default),) * fields.size("num_hidden_layers")


def _qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """Of the layers from `max_window_layers` on, or of those that `layer_types` names."""
    num_layers = fields.size("num_hidden_layers")
    is_used = fields.flag("use_sliding_window", False)
    window = fields.size("sliding_window", 4096)
    first, kinds = fields.get("max_window_layers", 28), fields.get("layer_types")
    if not is_used:
        return ()
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise ConfigError(f"config.json: max_window_layers={first!r} must be an integer of at least 0")
    if kinds is None:
        kinds = [_KINDS[i >= first] for i in range(num_layers)]
    return _windows(_checked_kinds(kinds, num_layers), window)


def _windows(kinds: list[str], window: int) -> tuple[int | None, ...]:
    """Of the sliding layers."""
    windows = tuple(window if kind == _KINDS[1] else None for kind in kinds)
    return windows if any(windows) else ()


def _checked_kinds(kinds: Any, num_layers: int) -> list[str]:
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in _KINDS for kind in kinds):
        raise UnsupportedModelError(
            f"config.json: layer_types={kinds!r} is not supported; supported: for each of the {num_layers} "
            f"layers one of {', '.join(map(repr, _KINDS))}"
        )
    return kinds
