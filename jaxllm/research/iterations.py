"""Anybody's timings of a server's iterations: AdaptiveLLM's predictors fitted to them, and how far these
reach.

A CSV file, a row an iteration, as inference servers log them: `prefill_tokens`, `num_prefills`,
`prefill_kv_tokens` (cached tokens before the prompts), `num_decodes`, `decode_kv_tokens`, and `latency_ms` or
`seconds`; `tensor_parallel` where several are mixed. Other columns are left alone.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import os
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import CostKind, step_kind
from jaxllm.predictors.features import FEATURE_NAMES
from jaxllm.predictors.fit_report import ErrorStats, FitReport
from jaxllm.predictors.regression import REGRESSORS, FittedRegressor, Sample, fit
from jaxllm.system.options import checked_path

COUNTS = ("num_decodes", "decode_kv_tokens", "prefill_tokens", "num_prefills", "prefill_kv_tokens")
"""Columns of work, in the order of `CostModel.step_seconds`."""
_TOP_QUARTER = 75.0
_HIDDEN = 8192  # of one GPU; of which several have a share each
_MOST_SAMPLES = 4000
_FEWEST = 60


@dataclasses.dataclass(frozen=True)
class Region:
    """A part of the iterations that nothing was fitted to, and the error of the chosen regressor there."""

    name: str
    num_samples: int
    errors: ErrorStats


@dataclasses.dataclass(frozen=True)
class IterationFit:
    """What was fitted to iterations of one kind: on a random split, and with whole regions left out.

    `regressor` is that of the random split.
    """

    regressor: FittedRegressor
    report: FitReport
    regions: tuple[Region, ...]


def load_iterations(path: str | os.PathLike[str]) -> list[Sample]:
    """Read a CSV file, be it compressed with gzip; each kind of step is a kind of sample.

    A GPU's share of the hidden size stands for the parallelism, which is what its kernels see.

    Raises:
        ConfigError: the file cannot be read, a column is missing, or a row is malformed; it names the line.
    """
    path = Path(checked_path("path", path))
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            columns = rows.fieldnames or ()
            missing = [name for name in COUNTS if name not in columns]
            if missing or not {"latency_ms", "seconds"} & set(columns):
                raise ConfigError(
                    f"{path} has no column {', '.join(missing) or 'latency_ms or seconds'}; a file of "
                    f"iterations has {', '.join(COUNTS)} and latency_ms or seconds"
                )
            return [_sample(row, f"{path}, line {rows.line_num}") for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read the iterations {os.fspath(path)!r}: {error}") from error


def _sample(row: dict[str, str], where: str) -> Sample:
    try:
        if None in row.values():
            raise ValueError("fewer values than columns")
        counts = [int(row[name]) for name in COUNTS]
        seconds = float(row["seconds"]) if "seconds" in row else float(row["latency_ms"]) * 1e-3
        parallel = int(row.get("tensor_parallel") or 1)
        if parallel < 1:
            raise ValueError(f"tensor_parallel={parallel}")
        kind = step_kind(counts[0], counts[2])
        work = {"decode": counts[:2], "prefill": counts[2:]}.get(kind, counts)
        return Sample(kind, (1, _HIDDEN / parallel, *work), seconds)
    except (ValueError, TypeError, ConfigError) as error:
        raise ConfigError(f"{where}: {error}") from error


def fit_iterations(
    samples: Sequence[Sample],
    *,
    seed: int = 0,
    names: Sequence[str] = REGRESSORS,
    degrees: Sequence[int] = range(1, 11),
    most_samples: int = _MOST_SAMPLES,
) -> Iterator[IterationFit]:
    """Fit the paper's regressors to iterations, pure decodes, prefills and mixed ones apart.

    Args:
        samples: of `load_iterations`.
        seed: of the splits, and of which samples are taken where there are more than `most_samples`.
        names, degrees: as for `regression.fit`.
        most_samples: of a kind, for a fit: forests take minutes for more.

    Yields:
        For each kind of which there are at least 60 distinct amounts of work (`num_too_few`): the fit on a
        random split, and the errors where a region was left out of another fit: the largest quarter of
        batches, of prompts or of contexts, and each parallelism that lies between others.

    Raises:
        ConfigError: there are too few iterations of every kind.
    """
    too_few = num_too_few(samples)
    kinds: dict[CostKind, list[Sample]] = {}
    for sample in samples:
        if sample.kind not in too_few:
            kinds.setdefault(sample.kind, []).append(sample)
    if not kinds:
        raise ConfigError(
            f"{len(samples)} iterations are too few: a fit needs {_FEWEST} distinct amounts of work of a kind"
        )
    for of_kind in kinds.values():
        found = fit(_some(of_kind, most_samples, seed), seed=seed, names=names, degrees=degrees)
        chosen = found.report.chosen
        regions = []
        for name, is_inside in _regions(of_kind):
            outside = [sample for sample in of_kind if not is_inside(sample)]
            inside = [sample for sample in of_kind if is_inside(sample)]
            if min(len(outside), len(inside)) < _FEWEST:
                continue
            other = fit(
                _some(outside, most_samples, seed),
                seed=seed,
                names=[chosen.regressor],
                degrees=[chosen.degree],
            )
            regions.append(Region(name, len(inside), errors_of(other.regressor, inside)))
        yield IterationFit(found.regressor, found.report, tuple(regions))


def num_too_few(samples: Sequence[Sample]) -> dict[CostKind, int]:
    """Distinct amounts of work of each kind of which there are too few for a fit."""
    distinct: dict[CostKind, set[tuple[float, ...]]] = {}
    for sample in samples:
        distinct.setdefault(sample.kind, set()).add(sample.features)
    return {kind: len(works) for kind, works in distinct.items() if len(works) < _FEWEST}


def errors_of(regressor: FittedRegressor, samples: Sequence[Sample]) -> ErrorStats:
    """Relative errors of a regressor over samples of its kind."""
    predicted = regressor.predict(np.array([sample.features for sample in samples]))
    seconds = np.array([sample.seconds for sample in samples])
    off = np.abs(predicted - seconds) / seconds
    return ErrorStats(float(off.mean()), float(np.median(off)), float(off.max()))


def _some(samples: Sequence[Sample], most: int, seed: int) -> list[Sample]:
    return random.Random(seed).sample(list(samples), min(most, len(samples)))


def _regions(samples: Sequence[Sample]) -> Iterator[tuple[str, Callable[[Sample], bool]]]:
    """Parts of the samples of a kind, by name, and who is inside."""
    names = FEATURE_NAMES[samples[0].kind]
    for feature in names[2:]:
        place = names.index(feature)
        values = [sample.features[place] for sample in samples]
        bound = float(np.percentile(values, _TOP_QUARTER))
        if bound < max(values):

            def is_larger(sample: Sample, place: int = place, bound: float = bound) -> bool:
                return sample.features[place] > bound

            yield f"{feature} above {bound:g}", is_larger
    shares = sorted({sample.features[1] for sample in samples}, reverse=True)
    for share in shares[1:-1]:

        def is_shared(sample: Sample, share: float = share) -> bool:
            return sample.features[1] == share

        yield f"{_HIDDEN / share:g} GPUs", is_shared


def describe(found: IterationFit) -> str:
    """As Markdown."""
    report = found.report
    lines = [f"## {report.kind}", "", report.to_markdown().rstrip(), ""]
    if found.regions:
        lines += [
            f"{report.chosen.regressor}, degree {report.chosen.degree}, fitted without a region:",
            "",
            "| left out | iterations | MAPE there | median |",
            "|---|---:|---:|---:|",
        ]
        lines += [
            f"| {one.name} | {one.num_samples} | {one.errors.mape:.2%} | {one.errors.median:.2%} |"
            for one in found.regions
        ]
    return "\n".join(lines) + "\n"
