"""The tensors of a folder of safetensors files, read one at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes  # also registers bfloat16 with NumPy, which safetensors looks up by name
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxllm.errors import WeightsError
from jaxllm.system.dtypes import find_dtype
from jaxllm.system.json_text import parse

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FLOAT8 = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
_TRAINING_STATE = ("training_args", "optimizer", "scheduler", "rng_state")
_GIT_LFS_POINTER = b"version https://git-lfs"


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies and what its header says, before any data is read."""

    name: str
    file: Path
    shape: tuple[int, ...]
    stored_dtype: str

    @property
    def dtype(self) -> str | None:
        """NumPy name of the dtype; None where jaxllm cannot load it (integers, float8...)."""
        return find_dtype(self.stored_dtype)

    @property
    def files(self) -> frozenset[Path]:
        """That must be read for it."""
        return frozenset((self.file,))

    def read(self, reader: ShardReader) -> np.ndarray:
        """Its values, in host memory."""
        return reader.read(self)


@contextlib.contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="np") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> WeightsError:
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
        with _open(file) as handle:
            for name in handle.keys():  # noqa: SIM118  the handle is not a mapping
                if name in tensors:
                    problems.append(f"{name} is in both {tensors[name].file.name} and {file.name}")
                view = handle.get_slice(name)
                tensors[name] = StoredTensor(name, file, tuple(view.get_shape()), view.get_dtype())
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


def _read_float8(tensor: StoredTensor) -> np.ndarray:
    """A tensor of a dtype that safetensors has no NumPy for."""
    with tensor.file.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(length))[tensor.name]["data_offsets"]
        file.seek(8 + length + begin)
        data = file.read(end - begin)
    return np.frombuffer(data, _FLOAT8[tensor.stored_dtype]).reshape(tensor.shape)


class ShardReader:
    """Reads tensors while keeping open only the files the current weight needs.

    An open file is mapped into memory, and its pages count as this process's until it is closed.
    """

    def __init__(self) -> None:
        self._open: dict[Path, contextlib.ExitStack] = {}
        self._handles: dict[Path, Any] = {}

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep(set())

    def keep(self, files: set[Path]) -> None:
        """Close every open file but `files`."""
        for file in self._open.keys() - files:
            del self._handles[file]
            self._open.pop(file).close()

    def read(self, tensor: StoredTensor, rows: slice | None = None) -> np.ndarray:
        """The tensor, or some rows of it, copied into host memory."""
        try:
            if tensor.file not in self._open:
                with contextlib.ExitStack() as stack:
                    self._handles[tensor.file] = stack.enter_context(_open(tensor.file))
                    self._open[tensor.file] = stack.pop_all()
            if tensor.stored_dtype in _FLOAT8:
                return _read_float8(tensor)[slice(None) if rows is None else rows]
            handle = self._handles[tensor.file]
            return handle.get_tensor(tensor.name) if rows is None else handle.get_slice(tensor.name)[rows]
        except SafetensorError as error:
            raise _unreadable(tensor.file, error) from error
