"""Write a random-weight Llama checkpoint to benchmark with; it needs numpy and safetensors only.

    python scripts/make_bench_model.py out/bench107m --size 107m
    python scripts/make_bench_model.py out/bench_tiny --size tiny

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

EMBEDDING_STD = 0.05
_COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": None,
    "dtype": "float32",
    "eos_token_id": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "pad_token_id": None,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
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


def make_weights(config: dict[str, int], seed: int) -> dict[str, np.ndarray]:
    """Hugging Face's names to float32 arrays, [out, in] for linear layers."""
    rng = np.random.default_rng(seed)

    def normal(std: float, *shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)

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


def write_checkpoint(folder: Path, size: str, seed: int = 0) -> int:
    """Write config.json and model.safetensors; return the number of parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**_COMMON, **SIZES[size]}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    weights = make_weights(SIZES[size], seed)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(array.size for array in weights.values())


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("--size", choices=sorted(SIZES), default="107m")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    num_parameters = write_checkpoint(args.folder, args.size, args.seed)
    print(f"{args.folder}: {num_parameters / 1e6:.1f} million parameters in float32")


if __name__ == "__main__":
    main()
