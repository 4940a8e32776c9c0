"""Tiny checkpoints of every supported model variant, with recorded answers of transformers.

`scripts/make_golden.py` writes `tests/data/golden` from `CONFIGS`; tests read it through `golden_checkpoint`
and `golden_data`, which need neither torch nor transformers.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN_FOLDER = Path(__file__).parent / "data" / "golden"
NUM_GREEDY_TOKENS = 64
PROMPT_LENGTHS = (1, 7, 19, 40)

# As transformers 4 wrote them; `_V5` has what transformers 5 writes.
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.45.0",
    "use_cache": True,
    "vocab_size": 128,
}
_V5 = {
    "torch_dtype": None,
    "rope_scaling": None,
    "rope_theta": None,
    "dtype": "float32",
    "head_dim": 16,
    "pad_token_id": None,
    "transformers_version": "5.23.0",
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "max_window_layers": 1,
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 12,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 128,
}
_MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "model_type": "mistral",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.0",
    "use_cache": True,
    "vocab_size": 128,
}
_QWEN3 = {
    **_QWEN2,
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 32,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "sliding_window": None,
    "transformers_version": "4.51.0",
}
_SMOLLM3 = {
    **_QWEN2,
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "layer_types": ["full_attention", "full_attention"],
    "max_window_layers": 28,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 0],
    "pad_token_id": 0,
    "pretraining_tp": 2,
    "rope_scaling": None,
    "sliding_window": None,
    "transformers_version": "4.54.0.dev0",
}
_GRANITE = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.1,
    "attention_multiplier": 0.1,
    "bos_token_id": 0,
    "embedding_multiplier": 3.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "logits_scaling": 2.0,
    "max_position_embeddings": 128,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.0.dev0",
    "use_cache": True,
    "vocab_size": 128,
}
_GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 5.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 5.0,
    "head_dim": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "model_type": "gemma2",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 24,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 13,
    "torch_dtype": "float32",
    "transformers_version": "4.42.0.dev0",
    "use_cache": True,
    "vocab_size": 128,
}
_GEMMA3 = {
    **_GEMMA2,
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "hidden_act": None,
    "model_type": "gemma3_text",
    "num_key_value_heads": 1,
    "rope_local_base_freq": 10000,
    "rope_scaling": {"factor": 2.0, "rope_type": "linear"},
    "rope_theta": 1000000,
    "sliding_window_pattern": 2,
    "transformers_version": "4.50.0.dev0",
}
_PHI3 = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "model_type": "phi3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "original_max_position_embeddings": 128,
    "pad_token_id": 0,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 27,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.2",
    "use_cache": True,
    "vocab_size": 128,
}
_NULLABLE = ("pad_token_id", "sliding_window")  # where null is not the same as absent
_OPT = {
    "_remove_final_layer_norm": False,
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "eos_token_id": 2,
    "ffn_dim": 128,
    "hidden_size": 64,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 128,
    "model_type": "opt",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 1,
    "prefix": "</s>",
    "torch_dtype": "float32",
    "transformers_version": "4.21.0",
    "use_cache": True,
    "vocab_size": 128,
    "word_embed_proj_dim": 64,
}


def _config(base: dict[str, Any], *updates: dict[str, Any], **changes: Any) -> dict[str, Any]:
    merged = base.copy()
    for update in (*updates, changes):
        merged |= update
    return {name: value for name, value in merged.items() if value is not None or name in _NULLABLE}


CONFIGS: dict[str, dict[str, Any]] = {
    "llama_mha": _config(_LLAMA),
    "llama_gqa": _config(
        _LLAMA,
        _V5,
        num_key_value_heads=2,
        rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
    ),
    "llama_mqa": _config(_LLAMA, num_key_value_heads=1, rope_theta=500000.0),
    "llama_head_dim": _config(_LLAMA, num_key_value_heads=2, head_dim=32),
    "llama_attention_bias": _config(_LLAMA, num_key_value_heads=2, attention_bias=True),
    "llama_mlp_bias": _config(_LLAMA, num_key_value_heads=2, mlp_bias=True),
    "llama_tied": _config(_LLAMA, num_key_value_heads=2, tie_word_embeddings=True),
    "llama_linear": _config(_LLAMA, num_key_value_heads=2, rope_scaling={"type": "linear", "factor": 2.0}),
    "llama_dynamic": _config(
        _LLAMA,
        _V5,
        num_key_value_heads=2,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0},
    ),
    "llama_llama3": _config(
        _LLAMA,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "qwen2": _config(_QWEN2),
    "qwen2_window": _config(_QWEN2, use_sliding_window=True, tie_word_embeddings=False),
    "qwen2_yarn": _config(
        _QWEN2,
        rope_theta=10000.0,
        rope_scaling={"factor": 4.0, "original_max_position_embeddings": 64, "type": "yarn"},
    ),
    "mistral_window": _config(_MISTRAL, sliding_window=11),
    "mistral_head_dim": _config(_MISTRAL, head_dim=32, rope_theta=1000000.0),
    "qwen3": _config(_QWEN3),
    "qwen3_bias": _config(_QWEN3, attention_bias=True, tie_word_embeddings=False),
    "smollm3": _config(_SMOLLM3),
    "granite": _config(_GRANITE),
    "granite_bias": _config(_GRANITE, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "phi3": _config(_PHI3),
    "phi3_longrope": _config(
        _PHI3,
        max_position_embeddings=512,
        sliding_window=262144,
        rope_scaling={
            "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
            "long_factor": [1.1, 1.4, 2.0, 2.6, 3.1, 3.4, 3.8, 4.0],
            "type": "longrope",
        },
    ),
    "gemma2": _config(_GEMMA2),
    "gemma3": _config(_GEMMA3),
    "opt_pre_norm": _config(_OPT),
    "opt_post_norm": _config(_OPT, do_layer_norm_before=False, word_embed_proj_dim=32),
    "opt_no_bias": _config(_OPT, enable_bias=False),
    "opt_no_affine": _config(_OPT, layer_norm_elementwise_affine=False),
    "opt_no_final_norm": _config(_OPT, _remove_final_layer_norm=True),
    "opt_gelu": _config(_OPT, activation_function="gelu"),
    "opt_untied": _config(_OPT, tie_word_embeddings=False, word_embed_proj_dim=32),
}
VARIANTS: list[str] = list(CONFIGS)


def golden_checkpoint(name: str) -> Path:
    """The Hugging Face checkpoint folder of a variant. Treat it as read-only."""
    return GOLDEN_FOLDER / name


@functools.cache
def golden_data(name: str) -> dict[str, Any]:
    """What transformers computed for a variant in float32.

    Returns:
        `prompts`: lists of token ids, of `PROMPT_LENGTHS`; `logits`: one [n, vocab_size] float32 array per
        prompt; `greedy`: one list of `NUM_GREEDY_TOKENS` token ids per prompt, end-of-sequence ignored;
        `margin`: the smallest lead of a greedy token over the runner-up, in logits.
    """
    with np.load(GOLDEN_FOLDER / name / "golden.npz") as arrays:
        return {
            "prompts": [arrays[f"prompt_{i}"].tolist() for i in range(len(PROMPT_LENGTHS))],
            "logits": [arrays[f"logits_{i}"] for i in range(len(PROMPT_LENGTHS))],
            "greedy": arrays["greedy"].tolist(),
            "margin": float(arrays["margin"]),
        }
