"""What the `config.json` of published models says, and how many parameters those have."""

from __future__ import annotations

from typing import Any

_QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "model_type": "qwen2",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
}
_MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.0",
    "use_cache": True,
    "vocab_size": 32768,
}
_SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "initializer_range": 0.041666666666666664,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "vocab_size": 49152,
}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_GRANITE = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "granite",
    "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.47.0",
    "use_cache": True,
    "vocab_size": 49155,
}
_PHI3 = {
    "_name_or_path": "Phi-3-mini-4k-instruct",
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.2",
    "use_cache": True,
    "vocab_size": 32064,
}
_GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "transformers_version": "4.42.4",
    "use_cache": True,
    "vocab_size": 256000,
}
_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}


def _sizes(hidden: int, heads: int, kv_heads: int, layers: int, intermediate: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
    }


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Mistral-7B-v0.1": (
        _MISTRAL | {"sliding_window": 4096, "rope_theta": 10000.0, "vocab_size": 32000},
        7_241_732_096,
    ),
    "Mistral-7B-v0.3": (_MISTRAL, 7_248_023_552),
    "Mistral-Nemo-Base-2407": (
        _MISTRAL
        | _sizes(5120, 32, 8, 40, 14336)
        | {"head_dim": 128, "max_position_embeddings": 128000, "vocab_size": 131072},
        12_247_782_400,
    ),
    "Qwen2.5-0.5B": (
        _QWEN25
        | _sizes(896, 14, 2, 24, 4864)
        | {"max_window_layers": 24, "tie_word_embeddings": True, "vocab_size": 151936},
        494_032_768,
    ),
    "Qwen2.5-7B": (
        _QWEN25
        | _sizes(3584, 28, 4, 28, 18944)
        | {"max_window_layers": 28, "tie_word_embeddings": False, "vocab_size": 152064},
        7_615_616_512,
    ),
    "Qwen2.5-7B, 131072 tokens": (
        _QWEN25
        | _sizes(3584, 28, 4, 28, 18944)
        | {
            "max_window_layers": 28,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
            "tie_word_embeddings": False,
            "vocab_size": 152064,
        },
        7_615_616_512,
    ),
    "Qwen3-0.6B": (
        _QWEN3 | _sizes(1024, 16, 8, 28, 3072) | {"max_window_layers": 28, "tie_word_embeddings": True},
        596_049_920,
    ),
    "Qwen3-8B": (
        _QWEN3 | _sizes(4096, 32, 8, 36, 12288) | {"max_window_layers": 36, "tie_word_embeddings": False},
        8_190_735_360,
    ),
    "gemma-2-2b": (_GEMMA2 | _sizes(2304, 8, 4, 26, 9216), 2_614_341_888),
    "gemma-2-9b": (_GEMMA2 | _sizes(3584, 16, 8, 42, 14336), 9_241_705_984),
    "gemma-3-270m": (_GEMMA3 | _sizes(640, 4, 1, 18, 2048), 268_098_176),
    "gemma-3-1b-pt": (_GEMMA3 | _sizes(1152, 4, 1, 26, 6912), 999_885_952),
    "granite-3.1-2b-base": (
        _GRANITE | _sizes(2048, 32, 8, 40, 8192) | {"attention_multiplier": 0.015625, "logits_scaling": 8.0},
        2_533_531_648,
    ),
    "granite-3.1-8b-base": (
        _GRANITE
        | _sizes(4096, 32, 8, 40, 12800)
        | {"attention_multiplier": 0.0078125, "logits_scaling": 16.0},
        8_170_848_256,
    ),
    "Phi-3-mini-4k-instruct": (_PHI3 | _sizes(3072, 32, 32, 32, 8192), 3_821_079_552),
    "Phi-3-medium-4k-instruct": (_PHI3 | _sizes(5120, 40, 10, 40, 17920), 13_960_238_080),
    "Phi-3-mini-128k-instruct": (
        _PHI3
        | _sizes(3072, 32, 32, 32, 8192)
        | {
            "max_position_embeddings": 131072,
            "rope_scaling": {"type": "longrope", "short_factor": [1.05] * 48, "long_factor": [4.0] * 48},
            "sliding_window": 262144,
        },
        3_821_079_552,
    ),
    "phi-4": (
        _PHI3
        | _sizes(5120, 40, 10, 40, 17920)
        | {
            "max_position_embeddings": 16384,
            "original_max_position_embeddings": 16384,
            "rope_theta": 250000,
            "sliding_window": None,
            "vocab_size": 100352,
        },
        14_659_507_200,
    ),
    "SmolLM3-3B": (
        _SMOLLM2
        | _sizes(2048, 16, 4, 36, 11008)
        | {
            "architectures": ["SmolLM3ForCausalLM"],
            "is_llama_config": None,
            "layer_types": ["full_attention"] * 36,
            "max_position_embeddings": 65536,
            "max_window_layers": 28,
            "model_type": "smollm3",
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0] * 9,
            "rms_norm_eps": 1e-06,
            "rope_interleaved": None,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
            "vocab_size": 128256,
        },
        3_075_098_624,
    ),
    "SmolLM2-135M": (_SMOLLM2 | _sizes(576, 9, 3, 30, 1536) | {"rope_theta": 100000}, 134_515_008),
    "SmolLM2-1.7B": (_SMOLLM2 | _sizes(2048, 32, 32, 24, 8192) | {"rope_theta": 130000}, 1_711_376_384),
}
"""Contents of config.json and number of parameters, a tied head counted once."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Mixtral-8x7B-v0.1": (
        _MISTRAL | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8},
        "architecture 'MixtralForCausalLM'",
    ),
    "Qwen3-30B-A3B": (
        _QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
        "architecture 'Qwen3MoeForCausalLM'",
    ),
    "granite-3.1-3b-a800m": (
        _GRANITE | {"architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe"},
        "architecture 'GraniteMoeForCausalLM'",
    ),
    "Phi-4-mini-instruct": (
        _PHI3 | _sizes(3072, 24, 8, 32, 8192) | {"partial_rotary_factor": 0.75, "sliding_window": 262144},
        "partial_rotary_factor=0.75",
    ),
    "gemma-3-4b-pt": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"},
        "architecture 'Gemma3ForConditionalGeneration'",
    ),
    "Qwen2.5-7B-Instruct-AWQ": (
        PUBLISHED["Qwen2.5-7B"][0] | {"quantization_config": {"quant_method": "awq", "bits": 4}},
        "quantization_config",
    ),
}
"""Contents of config.json, and what the error names."""
