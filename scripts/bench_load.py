"""How much memory loading an int4 checkpoint takes at its peak, over the size of its folder.

    python scripts/bench_load.py --out load.json

Makes a folder of Llama-2-7B's shape with random codes (compressed-tensors, groups of 128; head and embeddings
of bfloat16), and loads it with a pool of four blocks. The peak is that of the process less what it had when
JAX had started, sampled every 10 ms.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxllm import LLM
from jaxllm.research.bench.results import about, write_json
from jaxllm.system.output_files import OutputParser, new_file

_HIDDEN, _MLP, _VOCABULARY, _GROUP = 4096, 11008, 32000, 128
_LINEAR = {
    **{f"self_attn.{part}_proj": (_HIDDEN, _HIDDEN) for part in "qkvo"},
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (_MLP, _HIDDEN)),
    "mlp.down_proj": (_HIDDEN, _MLP),
}


def make_folder(folder: Path, num_layers: int, seed: int) -> int:
    """Write a checkpoint; its bytes."""
    rng, index = np.random.default_rng(seed), {}

    def save(name: str, tensors: dict[str, np.ndarray]) -> None:
        save_file(tensors, folder / name)
        index.update(dict.fromkeys(tensors, name))

    for layer in range(num_layers):
        prefix, tensors = f"model.layers.{layer}.", {}
        for name, (out, width) in _LINEAR.items():
            codes = rng.integers(-(2**31), 2**31, (out, width // 8), np.int32)
            tensors[f"{prefix}{name}.weight_packed"] = codes
            scales = np.full((out, width // _GROUP), 0.002, ml_dtypes.bfloat16)
            tensors[f"{prefix}{name}.weight_scale"] = scales
            tensors[f"{prefix}{name}.weight_shape"] = np.array([out, width])
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = np.ones(_HIDDEN, ml_dtypes.bfloat16)
        save(f"model-{layer:05d}.safetensors", tensors)
    names, shape = ("model.embed_tokens.weight", "lm_head.weight"), (_VOCABULARY, _HIDDEN)
    last = {name: np.full(shape, 0.02, ml_dtypes.bfloat16) for name in names}
    last["model.norm.weight"] = np.ones(_HIDDEN, ml_dtypes.bfloat16)
    save("model-last.safetensors", last)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _MLP,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return sum(file.stat().st_size for file in folder.iterdir())


def resident_bytes() -> int:
    """Of this process."""
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmRSS")]
    return 1024 * int(line.split()[1])


def main() -> None:
    """Make, load, print and write."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=new_file, required=True)
    args = parser.parse_args()
    if args.layers < 1:
        parser.error(f"--layers {args.layers} must be at least 1")
    with tempfile.TemporaryDirectory() as name:
        num_bytes = make_folder(Path(name), args.layers, args.seed)
        jax.devices()
        before = peak = resident_bytes()
        is_over = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not is_over.is_set():
                peak = max(peak, resident_bytes())
                time.sleep(0.01)

        watcher = threading.Thread(target=watch)
        watcher.start()
        options = {"num_gpu_blocks_override": 4, "num_host_blocks": 0, "max_model_len": 64}
        started = time.perf_counter()
        LLM(name, skip_tokenizer_init=True, max_num_seqs=1, max_num_batched_tokens=32, **options).close()
        seconds = time.perf_counter() - started
        is_over.set()
        watcher.join()
    share = (peak - before) / num_bytes
    print(f"{num_bytes / 1e9:.2f} GB: {(peak - before) / 1e9:.2f} GB at the peak, {share:.2f} of it")
    found = {"folder_bytes": num_bytes, "peak_bytes": peak - before, "share": share, "seconds": seconds}
    write_json(args.out, {**about(["python", "scripts/bench_load.py", *sys.argv[1:]]), **found})


if __name__ == "__main__":
    main()
