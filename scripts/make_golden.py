"""Record what transformers computes for every variant of tests/variants.py; needs the extra `parity`.

    python scripts/make_golden.py --overwrite  # write tests/data/golden anew
    python scripts/make_golden.py --check      # compare the committed files with the installed transformers

The tiny models have weights drawn from a seed, large enough for varied output, rounded to bfloat16 (which is
how most are stored, to keep the repository small). Of the seeds, the first is taken under which no greedy
token leads its runner-up by less than `MIN_MARGIN`, so that rounding cannot change the tokens, and under
which every answer has at least `MIN_DISTINCT` different tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from jaxllm.system.output_files import NewFolder, OutputParser

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from variants import CONFIGS, GOLDEN_FOLDER, NUM_GREEDY_TOKENS, PROMPT_LENGTHS, golden_data

MIN_MARGIN = 2e-3
MIN_DISTINCT = 8
LOGITS_TOLERANCE = 1e-4
STORED_IN_FLOAT32 = ("llama_mha", "opt_pre_norm")
_MAX_SEEDS = 200
_OF_VARIANT = NewFolder("config.json", "model.safetensors", "golden.npz")


def write_checkpoint(name: str, folder: Path, seed: int) -> None:
    """Write config.json and model.safetensors with weights drawn from `seed`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name], indent=2) + "\n")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    rng = np.random.default_rng(seed)
    weights = {}
    for parameter, value in model.state_dict().items():
        if parameter in tied:
            continue
        drawn = rng.standard_normal(tuple(value.shape), np.float32) * _deviation(name, parameter, value.ndim)
        if "norm" in parameter and parameter.endswith("weight"):
            drawn += 1.0
        drawn = drawn.astype(ml_dtypes.bfloat16)
        weights[parameter] = drawn.astype(np.float32) if name in STORED_IN_FLOAT32 else drawn
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _deviation(name: str, parameter: str, ndim: int) -> np.float32:
    if "embed_positions" in parameter:
        return np.float32(1.0)
    if "embed_tokens" in parameter and name == "opt_no_final_norm":
        return np.float32(0.05)  # its logits are not normalised
    if "embed_tokens" in parameter and name.startswith("gemma"):
        return np.float32(0.1)  # scaled up before the first layer
    return np.float32(0.3 if ndim == 2 else 0.2)


def record(folder: Path, vocab_size: int) -> dict[str, Any]:
    """Logits of each prompt, and greedy tokens, each prompt on its own."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id = None
    rng = np.random.default_rng(1234)
    arrays: dict[str, Any] = {}
    greedy, margins = [], []
    for i, length in enumerate(PROMPT_LENGTHS):
        prompt = rng.integers(0, vocab_size, length)
        ids = torch.tensor(prompt)[None]
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_GREEDY_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
            logits = model(output).logits[0].numpy()
        best = np.sort(logits[length - 1 : -1], axis=-1)
        margins.append(float((best[:, -1] - best[:, -2]).min()))
        greedy.append(output[0, length:].numpy())
        arrays |= {f"prompt_{i}": prompt.astype(np.int32), f"logits_{i}": logits[:length]}
    return arrays | {"greedy": np.array(greedy, np.int32), "margin": np.float32(min(margins))}


def make(name: str, folder: Path) -> None:
    """Write the checkpoint and the recorded answers of a variant."""
    for seed in range(_MAX_SEEDS):
        write_checkpoint(name, folder, seed)
        arrays = record(folder, CONFIGS[name]["vocab_size"])
        distinct = [len(set(tokens)) for tokens in arrays["greedy"].tolist()]
        if arrays["margin"] >= MIN_MARGIN and min(distinct) >= MIN_DISTINCT:
            np.savez_compressed(folder / "golden.npz", **arrays)
            print(f"{name}: seed {seed}, margin {arrays['margin']:.4f}, distinct tokens {distinct}")
            return
    raise SystemExit(f"{name}: no seed below {_MAX_SEEDS} gives varied tokens {MIN_MARGIN} apart")


def check(name: str) -> list[str]:
    """Differences between the committed files of a variant and the installed transformers."""
    folder = GOLDEN_FOLDER / name
    if json.loads((folder / "config.json").read_text()) != CONFIGS[name]:
        return [f"{name}: config.json is not the one in tests/variants.py"]
    committed, live = golden_data(name), record(folder, CONFIGS[name]["vocab_size"])
    problems = []
    for i in range(len(PROMPT_LENGTHS)):
        if committed["prompts"][i] != live[f"prompt_{i}"].tolist():
            problems.append(f"{name}: prompt {i} differs")
            continue
        difference = float(np.abs(committed["logits"][i] - live[f"logits_{i}"]).max())
        if not difference <= LOGITS_TOLERANCE:
            problems.append(f"{name}: logits of prompt {i} differ by {difference:.2e}")
        if committed["greedy"][i] != live["greedy"][i].tolist():
            problems.append(f"{name}: greedy tokens of prompt {i} differ")
    return problems


def main() -> None:
    """Write or check the golden files."""
    parser = OutputParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare those of the repository, write nothing")
    parser.add_argument("--out", type=NewFolder(), default=GOLDEN_FOLDER, help="default: the repository's")
    parser.add_argument("variants", nargs="*", default=list(CONFIGS), help="default: all")
    args = parser.parse_args()
    if not args.check:
        for name in args.variants:
            there = _OF_VARIANT.files(args.out / name)
            parser.check({f"{name}:": path for path in there}, overwrite=args.overwrite)
    torch.set_num_threads(1)
    disable_progress_bar()
    if not args.check:
        for name in args.variants:
            make(name, args.out / name)
        return
    problems = [problem for name in args.variants for problem in check(name)]
    stale = {path.name for path in GOLDEN_FOLDER.iterdir()} - CONFIGS.keys()
    problems += [f"{name}: not in tests/variants.py" for name in sorted(stale)]
    if problems:
        raise SystemExit("\n".join(problems))
    print(f"{len(args.variants)} variants agree with transformers")


if __name__ == "__main__":
    main()
