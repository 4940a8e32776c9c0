"""Convert pickled weights (pytorch_model*.bin, *.pt) to safetensors; needs the extra `parity`.

    python scripts/bin_to_safetensors.py SRC DST

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

_INDEX = "pytorch_model.bin.index.json"
_SINGLE = "pytorch_model.bin"


class ConversionError(Exception):
    """What stops a conversion, as a message for the user."""


def convert(src: Path, dst: Path) -> None:
    """Write `dst`: config.json, the tokenizer files, and one safetensors file per file of weights in `src`.

    Raises:
        ConversionError: `dst` is not empty, `src` has no such weights, or a file is unreadable or unsafe.
    """
    from jaxllm.errors import JaxllmError
    from jaxllm.loading.convert import SIDE_FILES
    from jaxllm.models.config import config_from_dict, read_hf_config

    if dst.exists() and not (dst.is_dir() and not any(dst.iterdir())):
        raise ConversionError(f"{str(dst)!r} exists and is not an empty folder; choose another or remove it")
    try:
        tied = config_from_dict(read_hf_config(src)).tie_word_embeddings
    except JaxllmError as error:
        raise ConversionError(str(error)) from error
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
                raise ConversionError(f"{', '.join(twice)} is in {shard.name} and in an earlier file")
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
    from jaxllm.loading.shards import pickled_weights

    if (src / _SINGLE).is_file():
        return [src / _SINGLE]
    if not (src / _INDEX).is_file():
        files = pickled_weights(src)
        if not files:
            raise ConversionError(
                f"{str(src)!r} has no {_SINGLE}, {_INDEX} or other *.bin, *.pt or *.pth file"
            )
        return files
    try:
        names = sorted(set(json.loads((src / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{str(src / _INDEX)!r} is not a JSON object with 'weight_map'") from error
    bad = [name for name in names if Path(name).name != name or not (src / name).is_file()]
    if bad or not names:
        raise ConversionError(f"{str(src / _INDEX)!r} names files that are not beside it: {', '.join(bad)}")
    return [src / name for name in names]


def _convert_in_subprocess(shard: Path, output: Path, tied: bool) -> dict:
    command = [
        sys.executable,
        __file__,
        "--one-shard",
        *(["--tied"] if tied else []),
        str(shard),
        str(output),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConversionError(done.stderr.strip() or f"reading {str(shard)!r} ended with {done.returncode}")
    return json.loads(done.stdout)


def convert_shard(shard: Path, output: Path, *, tied: bool) -> dict:
    """Convert one file; returns the `names` and total `size` in bytes of its tensors."""
    import torch
    from safetensors.torch import save_file

    try:
        mapped = zipfile.is_zipfile(shard)
        state = torch.load(shard, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise ConversionError(
            f"{str(shard)!r} is refused: it holds more than tensors and could run code ({reason})"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConversionError(
            f"{str(shard)!r} cannot be read, it is truncated or corrupt ({reason})"
        ) from error
    if not isinstance(state, dict) or not state:
        raise ConversionError(f"{str(shard)!r} does not hold a dictionary of tensors")
    others = [str(name) for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ConversionError(f"{str(shard)!r} has entries that are not tensors: {', '.join(others)}")
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


def main() -> None:
    """Parse the command line and convert."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("src", type=Path, help="folder with config.json and pytorch_model*.bin")
    parser.add_argument("dst", type=Path, help="new folder for the safetensors checkpoint")
    parser.add_argument("--one-shard", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tied", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        if args.one_shard:
            print(json.dumps(convert_shard(args.src, args.dst, tied=args.tied)))
        else:
            convert(args.src, args.dst)
            print(f"wrote {args.dst}")
    except ConversionError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
