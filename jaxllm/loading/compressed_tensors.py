"""Checkpoints of 16 or 32 bits into quantised ones in compressed-tensors' layout, which vLLM reads, too."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError, WeightsError
from jaxllm.loading.shards import list_tensors
from jaxllm.models.architecture import ARCHITECTURES, ModelConfig
from jaxllm.models.coded_weights import Int8
from jaxllm.models.linear_formats import QUANTIZATIONS
from jaxllm.models.names import EMBEDDING, LM_HEAD
from jaxllm.models.registry import abstract_params, linear_weights

_SHARD_BYTES = 4 * 2**30
_KINDS = {"int8": "I8", "int32": "I32", "int64": "I64", "float32": "F32", "float8_e4m3fn": "F8_E4M3"}
_KINDS |= {"bfloat16": "BF16", "float16": "F16"}


def quantization_config(quantization: str, groups: Mapping[str, int]) -> dict[str, Any]:
    """What config.json says of a checkpoint whose layers of such names have so many inputs in a group.

    A group of 0 inputs is all of an output's.
    """
    held = QUANTIZATIONS[quantization]
    kind = "float" if held.kind.startswith("e") else "int"
    form = f"{kind}-quantized" if held.rounds else "pack-quantized"
    inputs = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": True, "strategy": "token"}
    found = {}
    for place, size in enumerate(sorted(set(groups.values()))):
        weights = {
            "num_bits": 4 if held.kind == "int4" else 8,
            "type": kind,
            "symmetric": True,
            "dynamic": False,
            "strategy": "group" if size else "channel",
            "group_size": size or None,
        }
        layers = sorted(name for name, of_name in groups.items() if of_name == size)
        found[f"group_{place}"] = {
            "format": form,
            "targets": ["Linear"] if len(set(groups.values())) == 1 else [f"re:.*{name}$" for name in layers],
            "weights": weights,
            "input_activations": inputs if held.rounds else None,
            "output_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "config_groups": found,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def write_quantised(src: Path, dst: Path, config: ModelConfig, quantization: str) -> dict[str, Any]:
    """Write the tensors of a checkpoint, those of linear layers but for the output head quantised.

    What is not quantised is written as it is. One tensor at a time is in memory, and what is to be written
    into one file, at most 4 GiB.

    Returns:
        Its `quantization_config`.

    Raises:
        ConfigError: a layer cannot be quantised so.
        WeightsError: the weights of `src` cannot be read, or are not finite.
    """
    names = ARCHITECTURES[config.architecture].names
    shapes = abstract_params(config, "float32")
    targets = [name for name in linear_weights(config) if name not in (LM_HEAD, EMBEDDING)]
    quantised = {part.name for name in targets for part in names.parts(config, name, shapes[name].shape)}
    held = QUANTIZATIONS[quantization]
    groups: dict[str, int] = {}
    files = _Files(dst)
    for tensor in list_tensors(src).values():
        found = tensor.read()
        if names.canonical(tensor.name) not in quantised:
            files.add(tensor.name, found)
            continue
        if reason := held.why_not(found.shape[1]):
            raise ConfigError(f"quantization={quantization!r} of {tensor.name}: {reason}")
        module = tensor.name.removesuffix(".weight")
        group = held.group_of(found.shape[1])
        groups[module.rpartition(".")[2]] = 0 if group == found.shape[1] else group
        for name, array in _quantised(module, found, quantization):
            files.add(name, array)
    files.close()
    return quantization_config(quantization, groups)


class _Files:
    """Files of safetensors, of at most `_SHARD_BYTES` but for one tensor, and their index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._weight_map: dict[str, str] = {}
        self._pending: dict[str, np.ndarray] = {}
        self._size = self._count = 0

    def add(self, name: str, array: np.ndarray) -> None:
        """One more tensor."""
        if self._size and self._size + array.nbytes > _SHARD_BYTES:
            self._write()
        self._pending[name] = np.ascontiguousarray(array)
        self._weight_map[name] = self._name
        self._size += array.nbytes

    def close(self) -> None:
        """Write what is left: one file, or the last one and the index."""
        if not self._count:
            self._write()
            (self._folder / "model-00001.safetensors").rename(self._folder / "model.safetensors")
            return
        self._write()
        index = {"metadata": {}, "weight_map": self._weight_map}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    @property
    def _name(self) -> str:
        return f"model-{self._count + 1:05d}.safetensors"

    def _write(self) -> None:
        _write(self._folder / self._name, self._pending)
        self._pending, self._size = {}, 0
        self._count += 1


def _quantised(module: str, weight: np.ndarray, quantization: str) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays that stand for a weight [out, in].

    Raises:
        WeightsError: it has numbers that are not finite.
    """
    made: Any = QUANTIZATIONS[quantization].make(jnp.asarray(weight))
    codes, scales = np.asarray(made.codes), np.asarray(made.scales)
    if not np.isfinite(scales).all():
        raise WeightsError(f"{module}.weight has numbers that are not finite: take another copy")
    scales = scales[:, None] if isinstance(made, Int8) else scales
    if QUANTIZATIONS[quantization].rounds:
        yield f"{module}.weight", codes
    else:
        words = codes if codes.dtype == np.uint8 else (codes.astype(np.int16) + 128).astype(np.uint8)
        words = np.pad(words, ((0, 0), (0, -words.shape[1] % 4)))
        yield f"{module}.weight_packed", words.view(np.int32)
        yield f"{module}.weight_shape", np.array(weight.shape, np.int64)
    yield f"{module}.weight_scale", scales


def _write(file: Path, arrays: dict[str, np.ndarray]) -> None:
    """A file of safetensors, which its own NumPy half does not write of float8."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, array in arrays.items():
        offsets = [place, place + array.nbytes]
        header[name] = {
            "dtype": _KINDS[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": offsets,
        }
        place += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            opened.write(array.view(np.uint8).data if array.ndim else array.tobytes())
