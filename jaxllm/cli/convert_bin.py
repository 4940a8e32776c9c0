"""`jaxllm convert-bin`: pickled weights (pytorch_model*.bin, *.pt) to safetensors; needs the extra `torch`.

Each file is read in a process of its own by `torch.load(weights_only=True)`, which runs no code of the
pickle: a file that holds more than tensors is refused. The sharding is kept, so host memory holds one shard.
"""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError, WeightsError
from jaxllm.loading.convert import SIDE_FILES
from jaxllm.loading.shards import pickled_weights
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.system.json_text import parse

_INDEX = "pytorch_model.bin.index.json"
_SINGLE = "pytorch_model.bin"


def convert(src: Path, dst: Path) -> None:
    """Write `dst`: config.json, the tokenizer files, and one safetensors file per file of weights in `src`.

    Raises:
        ConfigError: the configuration is of no model that is known.
        WeightsError: `dst` is not empty, `src` has no such weights, or a file is unreadable or unsafe.
    """
    if dst.exists() and not (dst.is_dir() and not any(dst.iterdir())):
        raise WeightsError(f"{str(dst)!r} exists and is not an empty folder; choose another or remove it")
    tied = config_from_dict(read_hf_config(src)).tie_word_embeddings
    shards = _shards(src)
    dst = dst.absolute()
    partial = dst.with_name(f".{dst.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by an interrupted conversion
    partial.mkdir(parents=True)
    try:
        weight_map: dict[str, str] = {}
        total_size = 0
        for i, shard in enumerate(shards, 1):
            name = (
                f"model-{i:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
            )
            written = _convert_in_subprocess(shard, partial / name, tied)
            twice = sorted(weight_map.keys() & written["names"])
            if twice:
                raise WeightsError(f"{', '.join(twice)} is in {shard.name} and in an earlier file")
            weight_map |= dict.fromkeys(written["names"], name)
            total_size += written["size"]
        if len(shards) > 1:
            index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
            (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        for side_file in ("config.json", *SIDE_FILES):
            if (src / side_file).is_file():
                shutil.copyfile(src / side_file, partial / side_file)
        partial.rename(dst)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _shards(src: Path) -> list[Path]:
    if (src / _SINGLE).is_file():
        return [src / _SINGLE]
    if not (src / _INDEX).is_file():
        files = pickled_weights(src)
        if not files:
            raise WeightsError(f"{str(src)!r} has no {_SINGLE}, {_INDEX} or other *.bin, *.pt or *.pth file")
        return files
    try:
        names = sorted(set(parse((src / _INDEX).read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{str(src / _INDEX)!r} is not a JSON object with 'weight_map'") from error
    bad = [name for name in names if Path(name).name != name or not (src / name).is_file()]
    if bad or not names:
        raise WeightsError(f"{str(src / _INDEX)!r} names files that are not beside it: {', '.join(bad)}")
    return [src / name for name in names]


def _convert_in_subprocess(shard: Path, output: Path, tied: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "jaxllm", "convert-bin", str(shard), str(output), "--one-shard"]
    command += ["--tied"] if tied else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        message = done.stderr.strip().removeprefix("jaxllm: error: ")
        raise WeightsError(message or f"reading {str(shard)!r} ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def convert_shard(shard: Path, output: Path, *, tied: bool) -> dict[str, Any]:
    """Convert one file; returns the `names` and total `size` in bytes of its tensors."""
    try:
        import torch
        from safetensors.torch import save_file
    except ImportError as error:
        raise ConfigError("convert-bin needs torch: pip install 'jaxllm[torch]'") from error

    try:
        mapped = zipfile.is_zipfile(shard)
        state = torch.load(shard, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise WeightsError(
            f"{str(shard)!r} is refused: it holds more than tensors and could run code ({reason})"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise WeightsError(f"{str(shard)!r} cannot be read, it is truncated or corrupt ({reason})") from error
    if not isinstance(state, dict) or not state:
        raise WeightsError(f"{str(shard)!r} does not hold a dictionary of tensors")
    others = [str(name) for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise WeightsError(f"{str(shard)!r} has entries that are not tensors: {', '.join(others)}")
    tensors, seen = {}, set()
    # The embedding is saved and a head tied to it is not; others that share memory become copies.
    for name in sorted(state, key=lambda name: (name == "lm_head.weight", name)):
        tensor = state[name]
        memory = tensor.untyped_storage().data_ptr()
        if memory in seen:
            if tied and name == "lm_head.weight":
                continue
            tensor = tensor.clone()
        seen.add(memory)
        tensors[name] = tensor.contiguous()
    save_file(tensors, output, metadata={"format": "pt"})
    return {"names": list(tensors), "size": sum(t.numel() * t.element_size() for t in tensors.values())}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command, and add its options."""
    parser.description = (
        "Convert pickled weights to safetensors. Each file is read in a process of its own, which runs no "
        "code of the pickle. Needs the extra torch."
    )
    parser.add_argument(
        "src", type=Path, metavar="SRC", help="folder with config.json and pytorch_model*.bin"
    )
    parser.add_argument("dst", type=Path, metavar="DST", help="new folder for the safetensors checkpoint")
    parser.add_argument("--one-shard", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tied", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert; returns the exit code."""
    if args.one_shard:
        print(json.dumps(convert_shard(args.src, args.dst, tied=args.tied)))
    else:
        convert(args.src, args.dst)
        print(f"wrote {args.dst}")
    return 0
