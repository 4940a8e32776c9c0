"""`jaxllm make-model`: a random-weight Llama or OPT checkpoint to benchmark with.

Linear layers keep the size of what they are given (their spread is one over the root of the inputs), which
outweighs the embeddings: with tied embeddings a weaker model would repeat its last token for ever, and
comparing tokens would tell little. The embeddings' own spread keeps the two best logits apart, so that
rounding seldom changes a greedy token. There is no tokenizer and no end-of-sequence token; prompts are token
ids.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxllm.system.output_files import NewFolder, add_overwrite, check_writable

_FOLDER = NewFolder("config.json", "model.safetensors")
EMBEDDING_STD = 0.05
BIAS_STD = 0.02
MAX_POSITION_EMBEDDINGS = 2048
OPT_POSITION_OFFSET = 2  # rows of the table before position 0
_COMMON = {
    "bos_token_id": None,
    "dtype": "float32",
    "eos_token_id": None,
    "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
    "pad_token_id": None,
    "tie_word_embeddings": True,
}
_LLAMA = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
_OPT = _COMMON | {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "activation_function": "relu",
    "do_layer_norm_before": True,
}
SIZES = {
    "107m": {
        "head_dim": 64,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "num_key_value_heads": 12,
        "vocab_size": 32000,
    },
    "107m-gqa": {
        "head_dim": 64,
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
    "5m": {
        "head_dim": 64,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "vocab_size": 4096,
    },
    "tiny": {
        "head_dim": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "vocab_size": 512,
    },
}
OPT_SIZES = {
    "opt-125m": {
        "ffn_dim": 3072,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "vocab_size": 50272,
        "word_embed_proj_dim": 768,
    },
}


class Normal:
    """Draws float32 arrays, one after the other."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, std: float, *shape: int) -> np.ndarray:
        """An array of this shape and standard deviation, with mean 0."""
        return self._rng.standard_normal(shape, dtype=np.float32) * np.float32(std)


def make_weights(config: dict[str, int], seed: int) -> dict[str, np.ndarray]:
    """A Llama: Hugging Face's names to float32 arrays, [out, in] for linear layers."""
    normal = Normal(seed)
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key_value = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    weights = {"model.embed_tokens.weight": normal(EMBEDDING_STD, config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key_value, hidden),
            "self_attn.v_proj": (key_value, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, shape in shapes.items():
            weights[f"{prefix}{name}.weight"] = normal(shape[1] ** -0.5, *shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = np.ones(hidden, np.float32)
    weights["model.norm.weight"] = np.ones(hidden, np.float32)
    return weights


def make_opt_weights(config: dict[str, int], seed: int) -> dict[str, np.ndarray]:
    """An OPT, in the same form. Biases are drawn too, so that leaving one out changes the tokens."""
    normal = Normal(seed)
    hidden, inner = config["hidden_size"], config["ffn_dim"]
    positions = MAX_POSITION_EMBEDDINGS + OPT_POSITION_OFFSET
    weights = {
        "model.decoder.embed_tokens.weight": normal(EMBEDDING_STD, config["vocab_size"], hidden),
        "model.decoder.embed_positions.weight": normal(EMBEDDING_STD, positions, hidden),
    }
    norms = ["model.decoder.final_layer_norm"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.decoder.layers.{layer}."
        shapes = {f"self_attn.{name}_proj": (hidden, hidden) for name in ("q", "k", "v", "out")}
        for name, shape in (shapes | {"fc1": (inner, hidden), "fc2": (hidden, inner)}).items():
            weights[f"{prefix}{name}.weight"] = normal(shape[1] ** -0.5, *shape)
            weights[f"{prefix}{name}.bias"] = normal(BIAS_STD, shape[0])
        norms += [f"{prefix}self_attn_layer_norm", f"{prefix}final_layer_norm"]
    for name in norms:
        weights[f"{name}.weight"] = np.ones(hidden, np.float32)
        weights[f"{name}.bias"] = np.zeros(hidden, np.float32)
    return weights


def write_checkpoint(folder: Path, size: str, seed: int = 0) -> int:
    """Write config.json and model.safetensors; return the number of parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    if size in OPT_SIZES:
        config, weights = _OPT | OPT_SIZES[size], make_opt_weights(OPT_SIZES[size], seed)
    else:
        config, weights = _LLAMA | SIZES[size], make_weights(SIZES[size], seed)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(array.size for array in weights.values())


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command, and add its options."""
    parser.description = (
        "Write a random-weight Llama or OPT checkpoint in float32 to benchmark with. It has no tokenizer and "
        "no end-of-sequence token; prompts are token ids."
    )
    parser.add_argument("folder", type=_FOLDER, metavar="DIR", help="folder to write")
    parser.add_argument("--size", choices=sorted(SIZES | OPT_SIZES), default="107m")
    parser.add_argument("--seed", type=int, metavar="N", default=0)
    add_overwrite(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write it; returns the exit code."""
    files = {f"{path.name}:": path for path in _FOLDER.files(args.folder)}
    check_writable(files, overwrite=args.overwrite)
    num_parameters = write_checkpoint(args.folder, args.size, args.seed)
    print(f"{args.folder}: {num_parameters / 1e6:.1f} million parameters in float32")
    return 0
