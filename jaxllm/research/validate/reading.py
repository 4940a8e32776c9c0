"""Reads records from the files of those who measured servers: which form one has is seen by what it holds.

- A JSON list of runs with `stages` of constant rates, as of github.com/inference-sim/training.
- A JSON list of closed loops, one a record, as of github.com/natoscott/benchmarks.
- A CSV of single points, as `silicon_sample.csv` of the package `aiconfigurator-core`.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError, reason
from jaxllm.predictors.silicon_tables import MEASURED
from jaxllm.research.validate.records import Figure, Load, Metric, Record, Server, shape_named
from jaxllm.system.json_text import parse

_DEVICES = {
    "A100": "A100-80GB",
    "H100": "H100-SXM",
    "H200": "H200",
    "L40S": "L40S",
    "L4": "L4",
    "B200": "B200",
}
_ASYNC_SINCE = 0, 14
"""vLLM's version that plans ahead by default, on one pipeline stage."""
_COLUMNS = ("backend", "system", "model_path", "isl", "osl", "tp_size", "silicon_ttft_ms", "silicon_tpot_ms")
_BIASED = re.compile(r"\b(ttft|throughput|itl|latency)(?![a-z])(?=[^;]*\bbiased\b)")
_REPEATED = re.compile(r"prompts_repeat_from_previous_run\D*([\d.]+) *%")
_AS_ONE_GPU = re.compile(r"treat as TP=(\d+)")
_METRIC_OF: Mapping[str, Metric] = {
    "ttft": "ttft",
    "throughput": "throughput",
    "itl": "tpot",
    "latency": "latency",
}
_UNKNOWN_DISPATCH = "several replicas behind a router that is not described"


def read_records(path: Path) -> list[Record]:
    """The records of a file.

    Raises:
        ConfigError: it cannot be read, or has none of the forms.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path} ({reason(error)})") from error
    forms = (
        f"{path}: a file holds a JSON list of runs with stages, or of closed loops, or a CSV with columns "
    )
    if text.lstrip()[:1] in ("[", "{"):
        try:
            content = parse(text)
        except ValueError as error:
            raise ConfigError(f"{path}: no valid JSON ({error})") from error
        if isinstance(content, dict):
            content = content.get("records")
        if not isinstance(content, list) or not all(isinstance(run, dict) for run in content) or not content:
            raise ConfigError(forms + ", ".join(_COLUMNS))
        return [record for number, run in enumerate(content) for record in _read(path, number, run)]
    rows = list(csv.DictReader(io.StringIO(text)))
    if not rows or not set(_COLUMNS) <= set(rows[0]):
        raise ConfigError(forms + ", ".join(_COLUMNS))
    return [_of_row(path, number, row) for number, row in enumerate(rows)]


def _read(path: Path, number: int, run: dict[str, Any]) -> list[Record]:
    try:
        return _of_stages(run) if "stages" in run else [_of_closed_loop(run)]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: record {number} is incomplete or malformed ({error!r})") from error


def _of_stages(run: dict[str, Any]) -> list[Record]:
    """A record for each stage of constant rate."""
    server, problem = _try(lambda: _server_of_stages(run))
    work, records = run["workload"], []
    num_users = work["num_unique_system_prompts"] * work["num_users_per_system_prompt"]
    for stage, planned in zip(run["stages"], run["load"]["stages"], strict=True):
        prompt_len = work["system_prompt_len"] + work["question_len"]
        output_len = int(work["output_len"])
        load = Load(
            prompt_len=round(stage.get("prompt_tokens", {}).get("mean", prompt_len)),
            output_len=output_len,
            rate=float(planned["rate"]),
            seconds=float(planned["duration"]),
            num_users=num_users,
            users_per_prefix=work["num_users_per_system_prompt"],
            prefix_len=work["system_prompt_len"],
        )
        measured: dict[Metric, Figure] = {}
        for metric, key in (("latency", "request_latency_s"), ("ttft", "time_to_first_token_s")):
            if figure := _figure(stage.get(key) or {}, "mean", "median"):
                measured[metric] = figure  # type: ignore[index]
        if {"latency", "ttft"} <= measured.keys() and output_len > 1:
            rest = measured["latency"].value - measured["ttft"].value
            measured["tpot"] = Figure(rest / (output_len - 1), measured["latency"].statistic)
        if rate := stage.get("throughput", {}).get("requests_per_sec"):
            measured["throughput"] = Figure(float(rate))
        notes = (f"{stage['failed']} requests failed",) if stage.get("failed") else ()
        name = f"{run['name']}@{load.rate:g}/s"
        left_out = {"all": problem} if problem else {}
        record = Record(
            name=name, server=server, load=load, measured=measured, left_out=left_out, notes=notes
        )
        records.append(record)
    return records


def _server_of_stages(run: dict[str, Any]) -> Server:
    return Server(
        shape=shape_named(run["model"]),
        device=_device(run["gpu"]),
        weights=_weights(run.get("dtype", "bfloat16")),
        tensor_parallel=run["tensor_parallel_size"],
        pipeline_parallel=run.get("pipeline_parallel_size", 1),
        prefix_caching=run.get("enable_prefix_caching", True),
        async_scheduling=_plans_ahead(run.get("engine_version", ""), run.get("pipeline_parallel_size", 1)),
        **_limits(run),
    )


def _of_closed_loop(run: dict[str, Any]) -> Record:
    """A record of the second form, with what its flags say."""
    flags = tuple(run.get("flags", ()))
    server, problem = _try(lambda: _server_of_closed_loop(run, flags))
    completed = run.get("completed")
    repeated = [float(found[1]) / 100 for flag in flags if (found := _REPEATED.search(flag))]
    load = Load(
        prompt_len=run["input_tokens_configured"],
        output_len=run["output_tokens_configured"],
        concurrency=run["concurrency"],
        seconds=run.get("max_duration_s"),
        num_requests=completed,
        known_share=repeated[0] if repeated else 0.0,
    )
    measured: dict[Metric, Figure] = {}
    for metric, key in (("latency", "request_latency_ms"), ("ttft", "ttft_ms"), ("tpot", "itl_ms")):
        figure = _figure(run, f"{key}_mean", f"{key}_p50")
        if figure is not None:
            measured[metric] = figure._replace(value=figure.value / 1e3)  # type: ignore[index]
    if run.get("requests_per_s") is not None:
        measured["throughput"] = Figure(float(run["requests_per_s"]))
    left_out: dict[str, str] = {}
    for said in (run.get("quality", ""), *flags):
        for word in _BIASED.findall(said):
            left_out[_METRIC_OF[word]] = "flagged as biased: prompts repeat those of the run before"
    if run.get("num_replicas", 1) > 1 and run["concurrency"] > 1:
        left_out = {"all": _UNKNOWN_DISPATCH}
    if problem:
        left_out = {"all": problem}
    notes = tuple(flag for flag in flags if not _BIASED.search(flag))
    return Record(name=run["id"], server=server, load=load, measured=measured, left_out=left_out, notes=notes)


def _server_of_closed_loop(run: dict[str, Any], flags: tuple[str, ...]) -> Server:
    parallel, stages = run.get("tensor_parallel", 1), run.get("pipeline_parallel", 1)
    for flag in flags:
        if found := _AS_ONE_GPU.search(flag):
            parallel = int(found[1])
    if run.get("engine", "vLLM").lower() != "vllm":
        raise ConfigError(f"the scheduler of {run['engine']} is not simulated")
    return Server(
        shape=shape_named(run["model"]),
        device=_device(run["gpu"]),
        weights=_weights(run.get("weights_dtype", "bfloat16")),
        tensor_parallel=parallel,
        pipeline_parallel=stages,
        prefix_caching="off" not in str(run.get("prefix_caching", True)).lower().split(),
        async_scheduling=_plans_ahead(run.get("engine_version", ""), stages),
        **_limits(run),
    )


def _of_row(path: Path, number: int, row: dict[str, str]) -> Record:
    """A record of a CSV's row; of what cannot be simulated it says why."""
    try:
        server, problem = _try(lambda: _server_of_row(row))
        said = re.search(r"silicon_concurrency=(\d+)", row.get("silicon_data_source", ""))
        concurrency = int(said[1]) if said else int(row.get("batch_size") or 0)
        if not concurrency:
            problem = problem or "its concurrency is not known"
        output_len = int(row["osl"])
        load = Load(prompt_len=int(row["isl"]), output_len=output_len, concurrency=concurrency)
        measured: dict[Metric, Figure] = {}
        for metric, column in (("tpot", "silicon_tpot_ms"), ("ttft", "silicon_ttft_ms")):
            if row[column]:
                measured[metric] = Figure(float(row[column]) / 1e3)  # type: ignore[index]
        if {"ttft", "tpot"} <= measured.keys():
            rest = (output_len - 1) * measured["tpot"].value
            measured["latency"] = Figure(measured["ttft"].value + rest)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: row {number} is incomplete or malformed ({error!r})") from error
    left_out = {"all": problem} if problem else {}
    name = row.get("id") or f"row {number}"
    return Record(name=name, server=server, load=load, measured=measured, left_out=left_out)


def _server_of_row(row: dict[str, str]) -> Server:
    devices = {theirs: ours for ours, theirs in MEASURED.items()}
    precision = row.get("precision") or "bfloat16"
    if row["backend"] != "vllm":
        raise ConfigError("another server than vLLM")
    if row["system"] not in devices:
        raise ConfigError("a device without stored kernels")
    if row.get("mode", "agg") != "agg" or precision not in ("bfloat16", "fp8"):
        raise ConfigError(
            "prefill and decode on servers of their own, or another precision than 16 bits and FP8"
        )
    shape, _ = _try(lambda: shape_named(row["model_path"]))
    if shape is None or shape.num_experts:
        raise ConfigError("a model whose shape is not stored, or of experts")
    return Server(
        shape=shape,
        device=devices[row["system"]],
        weights=precision,
        tensor_parallel=int(row["tp_size"]),
        pipeline_parallel=int(row.get("pp_size") or 1),
        async_scheduling=_plans_ahead(row.get("backend_version") or "0.12", int(row.get("pp_size") or 1)),
    )


def _try(make: Callable[[], Any]) -> tuple[Any, str]:
    """What `make` makes, or None and why not."""
    try:
        return make(), ""
    except ConfigError as error:
        return None, str(error)


def _figure(values: Mapping[str, Any], mean: str, median: str) -> Figure | None:
    if values.get(mean) is not None:
        return Figure(float(values[mean]))
    if values.get(median) is not None:
        return Figure(float(values[median]), "median")
    return None


def _limits(run: Mapping[str, Any]) -> dict[str, Any]:
    """The limits that a record states."""
    names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "gpu_memory_utilization")
    return {name: run[name] for name in names if run.get(name) is not None}


def _device(text: str) -> str:
    words = re.split(r"[^A-Z0-9]+", text.upper())
    for word in words:
        if word in _DEVICES:
            return _DEVICES[word]
    raise ConfigError(f"no kernels of GPU {text!r} are stored; known: {', '.join(_DEVICES)}")


def _weights(dtype: str) -> str:
    return "bfloat16" if dtype in ("float16", "half", "auto") else dtype


def _plans_ahead(version: str, stages: int) -> bool:
    """Whether a server plans ahead; one whose version nobody says is taken to be of today."""
    numbers = re.findall(r"\d+", version)[:2]
    return stages == 1 and (len(numbers) < 2 or (int(numbers[0]), int(numbers[1])) >= _ASYNC_SINCE)
