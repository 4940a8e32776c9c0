"""Configurations of the paper's models, to run them with random weights."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from jaxllm.predictors.published_shapes import model_shape
from paper.cells import MODELS


def hf_config(name: str) -> dict[str, Any]:
    """What `config.json` of one of `MODELS` says of its sizes, as Hugging Face writes it."""
    shape = model_shape(name)
    config = {
        "dtype": "float16",
        "hidden_size": shape.hidden_size,
        "max_position_embeddings": 2048,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "vocab_size": shape.vocab_size,
    }
    if shape.gated_mlp:
        of_llama = {"num_key_value_heads": shape.num_kv_heads, "intermediate_size": shape.intermediate_size}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "rms_norm_eps": 1e-6,
            **config,
            **of_llama,
        }
    of_opt = {"ffn_dim": shape.intermediate_size, "word_embed_proj_dim": shape.hidden_size}
    return {"architectures": ["OPTForCausalLM"], "model_type": "opt", **config, **of_opt}


def model_folder(model: str, load_format: str, folder: pathlib.Path) -> str:
    """The folder of a model: its own, or for a name of `MODELS` with random weights one made in `folder`."""
    if load_format != "dummy" or model not in MODELS or pathlib.Path(model).exists():
        return model
    made = folder / "configs" / model
    made.mkdir(parents=True, exist_ok=True)
    (made / "config.json").write_text(json.dumps(hf_config(model), indent=1) + "\n", encoding="utf-8")
    return str(made)
