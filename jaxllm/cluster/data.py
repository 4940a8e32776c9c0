"""`generate`: answers to data sets, by an engine on each GPU or slice of processors of a Ray cluster."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.cluster.batch_engine import BatchSettings
from jaxllm.cluster.parts import OutputFolder, PartFormat, Parts
from jaxllm.cluster.paths import for_workers
from jaxllm.cluster.pool import Pool, num_devices
from jaxllm.cluster.ray_extra import own_error, require_ray
from jaxllm.cluster.shards import InputFile, Shard, check_columns, input_files, scan, shards_of
from jaxllm.cluster.worker import RowWorker, ShardWorker, WorkerSettings
from jaxllm.errors import ConfigError
from jaxllm.sampling.params import SamplingParams

if TYPE_CHECKING:
    from ray.data import Dataset

_MOST_BLOCKS = 4096  # of shards, which a driver hands out one by one


@dataclasses.dataclass(frozen=True)
class GenerateResult:
    """What became of a data set.

    Args:
        output: the file or folder of answers.
        num_rows: that it holds.
        num_answered: that this call has answered; the others were there.
        num_errors: of these, rows that were bad, and have an `error`.
    """

    output: Path
    num_rows: int
    num_answered: int
    num_errors: int


def generate(
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Dataset,
    sampling_params: SamplingParams | None = None,
    *,
    output: str | os.PathLike[str] | None = None,
    resume: bool = False,
    columns: Mapping[str, str] | None = None,
    chat: bool = False,
    seed: int = 0,
    num_workers: int | None = None,
    gpus_per_worker: float | None = None,
    cpus_per_worker: int | None = None,
    batch_size: int = 256,
    batches_in_flight: int = 2,
    max_retries: int = 3,
    show_progress: bool = True,
    **settings: Any,
) -> GenerateResult | Dataset:
    """Answer every row of a data set, once.

    Rows are what `jaxllm generate` takes: one of `prompt`, `prompt_token_ids` and `messages`, and optionally
    `id`, `num_dropped_tokens` and `sampling_params`. A row that is bad is answered by an `error`; it stops
    nobody. Answers depend on the row, its index and `seed` alone, not on who computes it beside which others.

    Files are cut into batches of rows, and the answers to a batch are a file of its own that is there as a
    whole or not at all. A worker, a node or the caller may be killed at any time: what has no file is
    answered by others, or by the next call with `resume=True`.

    Args:
        data: paths of .jsonl, .ndjson and .parquet files or of folders of them, which all nodes see; or a
            `ray.data.Dataset`.
        sampling_params: of rows that have none of their own; the checkpoint's if None.
        output: where answers go, on a file system that all nodes see. A name that ends in .jsonl is one file,
            in the order of the rows; one that ends in .parquet is a folder of Parquet files; any other one is
            a folder of JSON Lines. A data set may do without: it is returned with answers as further columns,
            lazily, and its rows are seeded by their column `index`, or else by what they hold, so that equal
            ones have equal answers.
        resume: continue an output that an earlier call with the same data and arguments has begun.
        columns: what the keys of a row are called in the data, such as `{"prompt": "question"}`; other
            columns are ignored then. Without, Parquet's are found by these keys, and lines of JSON must hold
            nothing else.
        chat: take prompts as messages of a user.
        seed: a row without a seed is sampled with one made of this and its index, as in `jaxllm generate`.
        num_workers: engines; by default as many as the cluster has room for.
        gpus_per_worker: by default as many as an engine has devices, if the cluster has GPUs.
        cpus_per_worker: processors of an engine that has no GPU, to which it is bound; by default all of a
            node.
        batch_size: rows that are answered and repeated as one.
        batches_in_flight: batches that an engine works on at once, so that it is never short of rows.
        max_retries: how often a batch is tried again after its engine has failed, or its worker has died. Of
            files, the rows of one whose workers died more often are answered one by one, so that a row that
            kills them is found, and is answered by an error.
        show_progress: show a progress bar on stderr.
        **settings: of the engines, as `LLM` takes them.

    Raises:
        ConfigError: an argument is wrong, Ray is not installed, or the output cannot be used.
        JaxllmError: what stopped a worker; answers so far are kept.
    """
    ray = require_ray("ray.data")
    check_columns(columns)
    for name, value in {"batch_size": batch_size, "batches_in_flight": batches_in_flight}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r} must be an integer of at least 1")
    from jaxllm.jobs.row_requests import fingerprint_context

    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    settings = {"seed": seed, **for_workers(settings)}
    context = fingerprint_context(settings, chat)
    batch = BatchSettings(sampling_params, chat, seed, context, max_retries)
    asked = num_workers, gpus_per_worker, cpus_per_worker, batches_in_flight
    pool = Pool.of_cluster(ray, *asked, num_devices=num_devices(settings))
    worker = WorkerSettings(settings, batch, 0 if pool.gpus else pool.cpus)
    if isinstance(data, ray.data.Dataset) and output is None:
        return data.map_batches(
            RowWorker,
            fn_constructor_args=(worker, columns),
            batch_size=batch_size,
            batch_format="pyarrow",
            **pool.options(ray),
        )
    if output is None:
        raise ConfigError("output says where answers to files go: name a folder or a .jsonl file")
    job = {
        "sampling_params": None if sampling_params is None else repr(sampling_params),
        "columns": None if columns is None else dict(columns),
        "seed": seed,
        "model": context,
    }
    return _answer_files(
        ray,
        data,
        _Target.of(output),
        job,
        functools.partial(_answered, ray, pool, worker, columns),
        resume=resume,
        batch_size=batch_size,
        show_progress=show_progress,
    )


@dataclasses.dataclass(frozen=True)
class _Target:
    """Where answers go in the end, and until all are there."""

    path: Path
    parts: Parts
    is_file: bool

    @classmethod
    def of(cls, output: str | os.PathLike[str]) -> _Target:
        path = Path(output).absolute()
        is_file = path.suffix == ".jsonl"
        part_format: PartFormat = "parquet" if path.suffix == ".parquet" else "jsonl"
        return cls(
            path, Parts(path.with_name(path.name + ".parts") if is_file else path, part_format), is_file
        )


def _answer_files(
    ray: Any,
    data: Any,
    target: _Target,
    job: dict[str, Any],
    answered: Callable[[Parts, Sequence[Shard]], Iterator[tuple[int, int]]],
    *,
    resume: bool,
    batch_size: int,
    show_progress: bool,
) -> GenerateResult:
    """Answer what an output lacks, and complete it."""
    parts, name = target.parts, os.fspath(target.path)
    is_complete = target.is_file and target.path.exists()
    if is_complete and not (resume and parts.folder.is_dir()):
        raise ConfigError(f"the output file {name!r} exists, and is never overwritten: choose another output")
    if isinstance(data, ray.data.Dataset):
        data = _spooled(ray, data, parts.folder.with_name(parts.folder.name + ".input"), resume)
    files = _scanned(ray, input_files(data), batch_size)
    inputs = [[os.path.basename(file.path), file.num_rows, file.digest] for file in files]
    shards = list(shards_of(files, batch_size))
    num_errors = 0
    with OutputFolder(parts.folder, {"inputs": inputs, "batch_size": batch_size, **job}, resume=resume):
        done = parts.done()
        todo = [one for one in shards if not is_complete and (one.first_index, one.num_rows) not in done]
        num_rows, num_todo = (sum(one.num_rows for one in some) for some in (shards, todo))
        with _progress(num_rows, num_rows - num_todo, show_progress) as bar:
            for rows, errors in answered(parts, todo):
                num_errors += errors
                bar.update(rows)
        if target.is_file:
            if not is_complete:
                parts.merge(shards, target.path)
            parts.clear()
    return GenerateResult(target.path, num_rows, num_todo, num_errors)


def _answered(
    ray: Any,
    pool: Pool,
    worker: WorkerSettings,
    columns: Mapping[str, str] | None,
    parts: Parts,
    shards: Sequence[Shard],
) -> Iterator[tuple[int, int]]:
    """Have shards answered; yields numbers of rows and errors as they are."""
    if not shards:
        return
    items = [{"shard": json.dumps(dataclasses.asdict(shard))} for shard in shards]
    blocks = min(len(items), _MOST_BLOCKS)
    pool = dataclasses.replace(pool, size=min(pool.size, blocks))
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = context.print_on_execution_start = context.enable_auto_log_stats = False
    context.raise_original_map_exception = True  # ours, that is
    with ray.data.DataContext.current(context):
        counts = ray.data.from_items(items, override_num_blocks=blocks).map_batches(
            ShardWorker, fn_constructor_args=(worker, parts, columns), batch_size=1, **pool.options(ray)
        )
        try:
            for row in counts.iter_rows():
                yield int(row["num_rows"]), int(row["num_errors"])
        except ray.exceptions.RayError as error:
            raise own_error(error) from error


def _scanned(ray: Any, paths: Sequence[Path], rows_per_shard: int) -> list[InputFile]:
    """The files, read once, wherever there is room."""
    task = ray.remote(scan)
    try:
        found: list[InputFile] = ray.get([task.remote(os.fspath(path), rows_per_shard) for path in paths])
    except ray.exceptions.RayError as error:
        raise own_error(error) from error
    if not sum(file.num_rows for file in found):
        raise ConfigError("the input holds no rows")
    return found


def _spooled(ray: Any, data: Dataset, folder: Path, resume: bool) -> Path:
    """A data set as files, so that its rows have an order, also for those who resume."""
    done = folder / "_complete"
    if done.exists() and not resume:
        raise ConfigError(
            f"{os.fspath(folder)!r} holds the rows of an earlier call. Pass resume=True to continue that, or "
            "choose another output."
        )
    if not done.exists():
        overwrite = ray.data.SaveMode.OVERWRITE  # what an interrupted call has left
        data.write_parquet(os.fspath(folder), mode=overwrite)
        done.touch()
    return folder


def _progress(total: int, done: int, is_shown: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, initial=done, desc="Processed prompts", unit="prompt", disable=not is_shown)
