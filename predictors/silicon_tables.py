"""Kernels as others measured them on GPUs: products, attention, all-reduces and experts, in microseconds.

The measurements are of NVIDIA's package `aiconfigurator-core` (Apache-2.0;
github.com/ai-dynamo/aiconfigurator). A part of them is in this package: 16-bit and FP8, on the devices of
`MEASURED`. `scripts/distil_silicon.py` wrote it. With the package itself (`pip install "jaxllm[silicon]"`)
all of them are at hand.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import pathlib
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxllm.errors import ConfigError

DISTILLED = "silicon_tables.npz"
_STEPS = 2000.0  # of the logarithm of microseconds: 0.05 % apart
_HOLE = -32768

MEASURED: Mapping[str, str] = {
    "A100-80GB": "a100_sxm",
    "H100-SXM": "h100_sxm",
    "H200": "h200_sxm",
    "L40S": "l40s",
    "B200": "b200_sxm",
}
"""Devices of `predictors.devices` with measured kernels, and what the package calls them."""

FIELDS: Mapping[str, tuple[str, ...]] = {
    "products": ("dtype", "out_features", "in_features"),
    "decode": ("kv_dtype", "head_dim", "window", "heads", "kv_heads"),
    "prefill": ("kv_dtype", "head_dim", "window", "heads", "kv_heads"),
    "all_reduce": ("gpus",),
    "experts": ("dtype", "hidden", "inner", "chosen", "experts", "gpus"),
}
"""Kinds of kernels, and what names a row of their tables."""

DTYPES = ("bfloat16", "fp8", "fp8_block", "int8", "int8_weight", "int4_weight")
"""Operands, by their number in a row's name; KV caches take the first two. int8 are codes with codes, and the
last two are weights that become 16-bit numbers (`jaxllm.predictors.base.WEIGHT_FORMATS`)."""

Key = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class KernelTable:
    """Measured times of one kind of kernel on one device.

    Args:
        kind: one of `FIELDS`.
        axes: what varies within a row, ascending: rows of a product; batch and context of decode attention
            (the new token counted); batch and tokens of prefill attention; 16-bit elements of an all-reduce;
            tokens of experts.
        rows: microseconds, shaped as the axes, by key; nan where nothing was measured.
    """

    kind: str
    axes: tuple[npt.NDArray[np.float64], ...]
    rows: Mapping[Key, npt.NDArray[np.float64]]

    def names(self, place: int) -> list[int]:
        """The values that a field of the keys has, ascending."""
        return sorted({key[place] for key in self.rows})


@dataclasses.dataclass(frozen=True)
class SiliconTables:
    """All tables of a device, and where they are from."""

    device: str
    source: str
    tables: Mapping[str, KernelTable]

    def __getitem__(self, kind: str) -> KernelTable:
        return self.tables[kind]


@functools.lru_cache(maxsize=8)
def load_tables(device: str, path: str | pathlib.Path | None = None) -> SiliconTables:
    """The tables of a device.

    Args:
        device: one of `MEASURED`.
        path: a file that `save_tables` wrote; None takes the one of this package.

    Raises:
        ConfigError: the device was not measured, or the file does not hold it.
    """
    if device not in MEASURED:
        raise ConfigError(f"no kernels measured on {device!r} are stored; there are: {', '.join(MEASURED)}")
    where = importlib.resources.files(__package__).joinpath(DISTILLED) if path is None else pathlib.Path(path)
    try:
        with where.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            about = json.loads(str(stored["about"]))
            return SiliconTables(device, about["source"][device], _unpack(stored, device))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{where} is no file of kernel tables that holds {device!r}: {error!r}") from error


def _unpack(stored: Any, device: str) -> dict[str, KernelTable]:
    tables = {}
    for kind in FIELDS:
        name = f"{device}/{kind}"
        axes = [stored[f"{name}/axis{place}"] for place in range(2) if f"{name}/axis{place}" in stored]
        steps = np.cumsum(stored[f"{name}/steps"], axis=0, dtype=np.int16).astype(np.float64)
        micros = np.where(steps == _HOLE, np.nan, np.exp(steps / _STEPS))
        keys = [tuple(key) for key in stored[f"{name}/keys"].tolist()]
        shape = tuple(map(len, axes))
        rows = {key: row.reshape(shape) for key, row in zip(keys, micros, strict=True)}
        tables[kind] = KernelTable(kind, tuple(axis.astype(np.float64) for axis in axes), rows)
    return tables


def save_tables(path: pathlib.Path, tables: list[SiliconTables], notes: Mapping[str, str]) -> None:
    """Write tables to a file for `load_tables`, with what there is to say of them."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    about = dict(notes) | {"source": {one.device: one.source for one in tables}}
    arrays["about"] = np.array(json.dumps(about, indent=1))
    for one in tables:
        for kind, table in one.tables.items():
            name = f"{one.device}/{kind}"
            keys = sorted(table.rows)
            micros = np.array([table.rows[key].ravel() for key in keys]).reshape(len(keys), -1)
            with np.errstate(divide="ignore", invalid="ignore"):
                steps = np.rint(np.log(micros) * _STEPS)
            steps = np.where(np.isfinite(steps), steps, _HOLE).astype(np.int16)
            arrays[f"{name}/keys"] = np.array(keys, np.int32).reshape(len(keys), len(FIELDS[kind]))
            # Differences of rows that are alike are small, and compress; they wrap around and back.
            arrays[f"{name}/steps"] = np.diff(steps, axis=0, prepend=np.int16(0))
            for place, axis in enumerate(table.axes):
                arrays[f"{name}/axis{place}"] = axis.astype(np.int32)
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
