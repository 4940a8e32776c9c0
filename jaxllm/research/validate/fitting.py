"""The seconds that no table of kernels has: what is assumed of them, and how they are fitted to servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from jaxllm.errors import ConfigError
from jaxllm.predictors.silicon import HOST_SECONDS, SYNC_SECONDS
from jaxllm.research.validate.playing import World
from jaxllm.research.validate.records import Record
from jaxllm.research.validate.report import validate

START = World(
    host_seconds=0.35e-3,
    layer_seconds=4e-6,
    sync_seconds=2e-6,
    ingress_seconds=0.010,
    token_seconds=3e-6,
    client_seconds=0.035,
)
"""Guesses, made without a fit: what a scheduler's loop takes, four launches a layer, one for each all-reduce,
some milliseconds of HTTP, a tokenizer that reads 300,000 tokens a second, and what clients are said to
take."""
FITTED = dataclasses.replace(
    START, host_seconds=HOST_SECONDS, sync_seconds=SYNC_SECONDS, ingress_seconds=0.0051
)
"""Three of them fitted to benchmarks/silicon/vllm-h100-serving.json alone (`validate-costs --fit`)."""
_FREE = ("host_seconds", "sync_seconds", "ingress_seconds")
_STEPS = (0.1e-3, 1e-6, 2e-3)  # of derivatives
_METRICS = ("tpot", "ttft")
_ROUNDS = 3
_KEPT_UP = 0.95  # of the rate of arrivals is answered by a server that keeps up


def fit(
    records: Sequence[Record], start: World, *, seed: int = 0, tell: Callable[[str], None] = lambda text: None
) -> World:
    """The world in which host, synchronisation and ingress fit best, none below 0.

    Least squares of the relative errors of time per token and first token, by Gauss and Newton.

    Open loops that were overloaded are not among them: their first tokens say what a queue does.

    Raises:
        ConfigError: there is nothing to fit to.
    """
    kept = [record for record in records if "all" not in record.left_out and not _is_overloaded(record)]
    values = np.array([getattr(start, name) for name in _FREE])
    for number in range(_ROUNDS):
        errors = _errors(kept, _at(start, values), seed)
        if len(errors) < len(_FREE):
            raise ConfigError(
                f"{len(_FREE)} constants cannot be fitted to {len(errors)} figures; give more records"
            )
        slopes = []
        for place, step in enumerate(_STEPS):
            moved = values.copy()
            moved[place] += step
            slopes.append((_errors(kept, _at(start, moved), seed) - errors) / step)
        values = _solved(np.array(slopes).T, errors, values)
        stated = ", ".join(f"{name}={value:.3g}" for name, value in zip(_FREE, values, strict=True))
        tell(f"round {number + 1}: {stated}")
    return _at(start, values)


def _is_overloaded(record: Record) -> bool:
    """Whether requests came faster than they were answered."""
    rate = None if record.load is None else record.load.rate
    answered = record.measured.get("throughput")
    return rate is not None and answered is not None and answered.value < _KEPT_UP * rate


def _at(start: World, values: npt.NDArray[np.float64]) -> World:
    return dataclasses.replace(start, **dict(zip(_FREE, map(float, values), strict=True)))


def _errors(records: Sequence[Record], world: World, seed: int) -> npt.NDArray[np.float64]:
    rows = [validate(record, world, seed=seed) for record in records]
    return np.array([row.compared[name].error for row in rows for name in _METRICS if name in row.compared])


def _solved(
    slopes: npt.NDArray[np.float64], errors: npt.NDArray[np.float64], values: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Where the errors would be least if they were straight; what would fall below 0 stays there."""
    free = np.ones(len(values), bool)
    while True:
        wanted = np.zeros(len(values))
        target = slopes @ values - errors
        wanted[free] = np.linalg.lstsq(slopes[:, free], target, rcond=None)[0]
        if (wanted >= 0.0).all():
            return wanted
        free &= wanted > 0.0
