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
    return {name: value for name, value in merged.items() if value is not None or name == "pad_token_id"}


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
