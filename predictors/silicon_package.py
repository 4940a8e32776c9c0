"""Reads the kernel tables of the package `aiconfigurator-core` (extra `silicon`)."""

from __future__ import annotations

import collections
import importlib.metadata
import importlib.util
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.predictors.silicon_tables import DTYPES, MEASURED, KernelTable, Key, SiliconTables

_PACKAGE = "aiconfigurator_core"
_EXPERTS = "power_law_1.01"
"""How tokens are spread over experts in the rows that are taken: nearly evenly, as trained routers do."""

Record = Mapping[str, Any]
Samples = dict[Key, dict[tuple[float, ...], float]]


def package_folder(folder: pathlib.Path | None = None) -> pathlib.Path:
    """`systems` of the installed package, or `folder`.

    Raises:
        ConfigError: the package is not installed.
    """
    if folder is not None:
        return folder
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ConfigError('the package aiconfigurator-core is not installed; pip install "jaxllm[silicon]"')
    return pathlib.Path(found.submodule_search_locations[0]) / "systems"


def package_version(folder: pathlib.Path | None = None) -> str:
    """Of the installed package, or of the metadata beside a `folder` that was unpacked from it."""
    if folder is None:
        return importlib.metadata.version("aiconfigurator-core")
    names = [path.name for path in folder.parent.parent.glob("aiconfigurator_core-*.dist-info")]
    return names[0].split("-")[1].removesuffix(".dist") if names else "of an unknown version"


def read_package(
    device: str, folder: pathlib.Path | None = None, *, rows: Sequence[int] = (), smallest: int = 1
) -> SiliconTables:
    """All tables of a device: the newest of vLLM's kernels, and the faster of custom all-reduces and NCCL's.

    Args:
        device: one of `silicon_tables.MEASURED`.
        folder: `systems` of the package; None takes the installed one.
        rows: of products, which are kept; all if none.
        smallest: outputs and inputs of the products that are kept.

    Raises:
        ConfigError: the device was not measured, the package is not installed, or a table is missing.
    """
    if device not in MEASURED:
        raise ConfigError(f"no kernels measured on {device!r}; there are: {', '.join(MEASURED)}")
    data = package_folder(folder) / "data" / MEASURED[device]
    tables: dict[str, KernelTable] = {}
    sources: list[str] = []
    for kind, read in _KINDS.items():
        path = _newest(data / _FOLDERS[kind], read.file)
        records = _records(path)
        samples: Samples = collections.defaultdict(dict)
        if kind == "products":
            records += _integer_products(data, sources)
        for record in records:
            key, point = read.key(record), read.point(record)
            is_kept = kind != "products" or not rows or point[0] in rows
            if key is not None and is_kept and (kind != "products" or min(key[1:]) >= smallest):
                _keep_fastest(samples[key], point, record["latency"] * 1e3)
        if kind == "all_reduce":
            for record in _records(_newest(data / "comm" / "nccl", "nccl_perf.parquet")):
                if record["op_name"] == "all_reduce" and record["nccl_dtype"] == "half":
                    _keep_fastest(samples[record["num_gpus"],], read.point(record), record["latency"] * 1e3)
        tables[kind] = _table(kind, samples)
        sources.append(f"{kind} {path.parent.name}")
    about = records[0].get("device", MEASURED[device])
    version = package_version(folder)
    return SiliconTables(
        device, f"{about}, vLLM kernels ({', '.join(sources)}), aiconfigurator-core {version}", tables
    )


class _Read:
    """How a file's records are read: whose row they belong to, and at which point of it."""

    def __init__(
        self, file: str, key: Callable[[Record], Key | None], point: Callable[[Record], tuple[float, ...]]
    ) -> None:
        self.file, self.key, self.point = file, key, point


_NAMES = {"sq": "int8", "int8_wo": "int8_weight", "int4_wo": "int4_weight"}


def _product(record: Record) -> Key | None:
    dtype = _NAMES.get(record["gemm_dtype"], record["gemm_dtype"])
    return (DTYPES.index(dtype), record["n"], record["k"]) if dtype in DTYPES else None


def _attention(record: Record) -> Key | None:
    dtype = DTYPES.index(record["kv_cache_dtype"])
    window = record.get("window_size") or 0
    return dtype, record["head_dim"], window, record["num_heads"], record["num_key_value_heads"]


def _all_reduce(record: Record) -> Key | None:
    return (record["num_gpus"],)


def _expert(record: Record) -> Key | None:
    dtype = record["moe_dtype"]
    if dtype not in DTYPES or record["distribution"] != _EXPERTS or record["moe_ep_size"] != 1:
        return None
    shape = record["hidden_size"], record["inter_size"], record["topk"], record["num_experts"]
    return DTYPES.index(dtype), *shape, record["moe_tp_size"]


_FOLDERS = {
    "products": "gemm/vllm",
    "decode": "attention/vllm",
    "prefill": "attention/vllm",
    "all_reduce": "comm/vllm",
    "experts": "moe/vllm",
}
_KINDS = {
    "products": _Read("gemm_perf.parquet", _product, lambda one: (one["m"],)),
    # A new token attends to itself as well.
    "decode": _Read(
        "generation_attention_perf.parquet",
        _attention,
        lambda one: (one["batch_size"], one["step"] + one["isl"]),
    ),
    "prefill": _Read(
        "context_attention_perf.parquet", _attention, lambda one: (one["batch_size"], one["isl"])
    ),
    "all_reduce": _Read("custom_allreduce_perf.parquet", _all_reduce, lambda one: (one["message_size"],)),
    "experts": _Read("moe_perf.parquet", _expert, lambda one: (one["num_tokens"],)),
}


def _integer_products(data: pathlib.Path, sources: list[str]) -> list[dict[str, Any]]:
    """Products with int8 and int4, which were measured of TensorRT-LLM's kernels alone, on some devices."""
    path = _newest(data / "gemm" / "trtllm", "gemm_perf.parquet")
    found = [record for record in _records(path) if record["gemm_dtype"] in _NAMES]
    if found:
        sources.append(f"integer products TensorRT-LLM {path.parent.name}")
    return found


def _newest(folder: pathlib.Path, file: str) -> pathlib.Path:
    found = sorted(
        folder.glob(f"*/{file}"), key=lambda path: [int(one) for one in re.findall(r"\d+", path.parent.name)]
    )
    if not found:
        raise ConfigError(f"there is no {file} in {folder}/*: is it `systems` of aiconfigurator-core 0.12?")
    return found[-1]


def _records(path: pathlib.Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    records: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return records


def _keep_fastest(row: dict[tuple[float, ...], float], point: tuple[float, ...], micros: float) -> None:
    if micros > 0:
        row[point] = min(micros, row.get(point, np.inf))


def _table(kind: str, samples: Samples) -> KernelTable:
    points: Iterable[tuple[float, ...]] = {point for row in samples.values() for point in row}
    axes = [sorted(set(values)) for values in zip(*points, strict=True)]
    places = [{value: place for place, value in enumerate(axis)} for axis in axes]
    rows = {}
    for key, row in samples.items():
        rows[key] = np.full([len(axis) for axis in axes], np.nan)
        for point, micros in row.items():
            rows[key][tuple(place[value] for place, value in zip(places, point, strict=True))] = micros
    return KernelTable(kind, tuple(np.array(axis, np.float64) for axis in axes), rows)
