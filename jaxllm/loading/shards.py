"""The tensors of a folder of safetensors files, each read by itself."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxllm.errors import WeightsError
from jaxllm.system.dtypes import find_dtype
from jaxllm.system.json_text import parse

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES: dict[str, type[np.generic]] = {
    **{
        f"{kind[0].upper()}{8 * size}": np.dtype(f"{kind}{size}").type
        for kind in "ui"
        for size in (1, 2, 4, 8)
    },
    **{f"F{8 * size}": np.dtype(f"f{size}").type for size in (2, 4, 8)},
    "BOOL": np.bool_,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
"""By safetensors' names."""
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
_TRAINING_STATE = ("training_args", "optimizer", "scheduler", "rng_state")
_GIT_LFS_POINTER = b"version https://git-lfs"


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies and what its header says, before any data is read; `offset` is in bytes."""

    name: str
    file: Path
    shape: tuple[int, ...]
    stored_dtype: str
    offset: int

    @property
    def dtype(self) -> str | None:
        """NumPy name of the dtype; None where jaxllm cannot load it (integers, float8...)."""
        return find_dtype(self.stored_dtype)

    @property
    def files(self) -> frozenset[Path]:
        """That must be read for it."""
        return frozenset((self.file,))

    def read(self, rows: slice | None = None) -> np.ndarray:
        """Its values, or some rows of them, in host memory.

        They are read, not mapped, for pages of a mapped file count as this process's memory.
        """
        if self.stored_dtype not in _DTYPES:
            raise WeightsError(f"{self.name} is {self.stored_dtype}, which is none of {', '.join(_DTYPES)}")
        chosen = range(self.shape[0])[rows] if rows is not None else None
        shape = self.shape if chosen is None else (len(chosen), *self.shape[1:])
        found = np.empty(shape, _DTYPES[self.stored_dtype])
        skipped = 0 if chosen is None else chosen.start * math.prod(shape[1:]) * found.itemsize
        try:
            with self.file.open("rb") as file:
                file.seek(self.offset + skipped)
                size = file.readinto(found.reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise _unreadable(self.file, error) from error
        if size != found.nbytes:
            raise _unreadable(self.file, f"{self.name} has {size} bytes of {found.nbytes}")
        return found


def _read_header(file: Path) -> list[StoredTensor]:
    """The tensors of a file, after safetensors has verified what its header says of them."""
    try:
        with safe_open(file, framework="np"), file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = parse(opened.read(length))
    except (SafetensorError, OSError) as error:
        raise _unreadable(file, error) from error
    return [
        StoredTensor(name, file, tuple(one["shape"]), one["dtype"], 8 + length + one["data_offsets"][0])
        for name, one in sorted(header.items())
        if name != "__metadata__"
    ]


def _unreadable(file: Path, error: object) -> WeightsError:
    reason = f"{error}; it is truncated or corrupt, copy or download it again"
    with contextlib.suppress(OSError), file.open("rb") as start:
        if start.read(len(_GIT_LFS_POINTER)) == _GIT_LFS_POINTER:
            reason = "it is a Git LFS pointer, not the weights; run `git lfs pull` in the checkpoint folder"
    return WeightsError(f"cannot read {str(file)!r}: {reason}")


def list_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Read the headers of the safetensors files of `folder`, in the order of the files.

    Raises:
        WeightsError: there are no safetensors files, a file of the index is missing or a file is corrupt.
    """
    tensors: dict[str, StoredTensor] = {}
    problems = []
    files, indexed = _shard_files(folder)
    for file in files:
        for tensor in _read_header(file):
            if tensor.name in tensors:
                problems.append(f"{tensor.name} is in both {tensors[tensor.name].file.name} and {file.name}")
            tensors[tensor.name] = tensor
    for name, file_name in indexed.items():
        if name not in tensors or tensors[name].file.name != file_name:
            problems.append(f"{name} is not in {file_name}")
    if problems:
        raise WeightsError(f"{INDEX_FILE} does not match the files of {str(folder)!r}: {', '.join(problems)}")
    return tensors


def _shard_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The files to read, and the index's `{tensor: file name}` (empty for a single file)."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE], {}
    index_file = folder / INDEX_FILE
    if not index_file.is_file():
        raise _no_weights(folder)
    try:
        index = parse(index_file.read_bytes())
        weight_map = {str(name): str(file) for name, file in index["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(
            f"{str(index_file)!r} is not a safetensors index (a JSON object with 'weight_map'): {error!r}"
        ) from error
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise WeightsError(f"{str(index_file)!r} names files outside its folder: {', '.join(outside)}")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise WeightsError(
            f"{str(index_file)!r} names "
            + (f"files that the folder lacks: {', '.join(missing)}" if missing else "no files")
        )
    return [folder / name for name in names], weight_map


def pickled_weights(folder: Path) -> list[Path]:
    """The files of `folder` that hold weights as Python pickles, which jaxllm does not read."""
    return sorted(
        file
        for file in folder.iterdir()
        if file.suffix in _PICKLE_SUFFIXES and not file.name.startswith(_TRAINING_STATE) and file.is_file()
    )


def _no_weights(folder: Path) -> WeightsError:
    files = sorted(file.name for file in folder.iterdir())
    expected = f"{SINGLE_FILE}, {INDEX_FILE} with its shards, or the params/ folder of `jaxllm convert`"
    pickled = [file.name for file in pickled_weights(folder)]
    if pickled:
        source = folder.resolve()
        command = shlex.join(["jaxllm", "convert-bin", str(source), f"{source}-safetensors"])
        return WeightsError(
            f"{str(folder)!r} has pickled weights only ({', '.join(pickled)}); jaxllm does not run pickles. "
            f"Convert them, with the extra `torch` installed:\n  {command}\n"
            f"and load {str(source) + '-safetensors'!r} instead"
        )
    found = f"it has {', '.join(files)}" if files else "it is empty"
    return WeightsError(f"{str(folder)!r} has no weights: {found}; expected {expected}")
