"""Predictors fitted to a ladder of models, beside what the device itself allows."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxllm.predictors.base import COST_KINDS, CostKind
from jaxllm.predictors.regression import REGRESSORS, fit
from ladder.measure import Ladder, Measured


def fit_ladder(ladder: Ladder, *, seed: int, max_features: int, processes: int = 1) -> list[dict[str, Any]]:
    """A row for each family and kind: `fit_kind` of its measurements.

    Raises:
        ConfigError: there are too few of a kind to fit.
    """
    tasks = [
        (family, kind, found, seed, max_features)
        for family in ladder.families
        for kind in COST_KINDS
        if (found := ladder.of(family, kind))
    ]
    if processes == 1:
        return [fit_kind(*task) for task in tasks]
    spawn = multiprocessing.get_context("spawn")  # a copy of a process with JAX's threads may hang
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        return list(pool.map(fit_kind, *zip(*tasks, strict=True)))


def fit_kind(
    family: str,
    kind: CostKind,
    measured: Sequence[Measured],
    seed: int = 0,
    max_features: int = 300,
    names: Sequence[str] = REGRESSORS,
    degrees: Sequence[int] = range(1, 11),
) -> dict[str, Any]:
    """The best predictor of a kind of cost, its errors, and the device's own.

    Fitted to 80 % of the distinct work and tested on the rest, as in AdaptiveLLM's Section 4.5; the choice
    among regressors and degrees is made within the 80 %. That is done twice: with what describes the work, as
    in the paper, and with what the engine makes of it (`predictors.derived`) besides.

    The error floor is that of predicting the second measurement of a test point by its first:
    `|first - second| / second`. A predictor that knew the device's mean would be off by about 1 / sqrt(2) of
    it, for it has the noise of one measurement and not of two.

    Returns:
        `family`, `kind`; `work` and `derived`, `FitReport`s of either, the first with the test error of every
        candidate; `floor`, an `ErrorStats`; `num_pairs`, the test points it is of; `ratio`, the error with
        derived features over the floor, of the means (`mape`) and the medians; `copies`, of swaps only, rows
        of block bytes, blocks, measured seconds and those predicted with derived features, of the test part.

    Raises:
        ConfigError: there are too few measurements.
    """
    samples = [one.sample for one in measured]
    tried: dict[str, Any] = {
        "seed": seed, "names": names, "degrees": degrees, "max_features": max_features,
    }  # fmt: skip
    plain = fit(samples, test_all=True, **tried)
    fitted = fit(samples, derived=True, **tried)  # the same split
    origin = {id(one.sample): one for one in measured}
    floor = error_floor([origin[id(sample)] for sample in fitted.test])
    row: dict[str, Any] = {"family": family, "kind": kind}
    row |= {"work": plain.report.to_dict(), "derived": fitted.report.to_dict()}
    test = row["derived"]["test"]
    row |= {"num_pairs": floor.pop("num_pairs"), "floor": floor}
    row["ratio"] = {
        name: test[name] / floor[name] if floor.get(name) else None for name in ("mape", "median")
    }
    if kind in ("swap_out", "swap_in"):
        predicted = fitted.regressor.predict(np.array([sample.features for sample in fitted.test]))
        row["copies"] = [
            [*sample.features, sample.seconds, float(seconds)]
            for sample, seconds in zip(fitted.test, predicted, strict=True)
        ]
    return row


def error_floor(measured: Sequence[Measured]) -> dict[str, Any]:
    """`ErrorStats` of predicting second measurements by first ones, and how many pairs there are."""
    pairs: dict[tuple[int, int], dict[int, float]] = {}
    for one in measured:
        pairs.setdefault((one.model, one.point), {})[one.turn] = one.sample.seconds
    errors = [abs(of[0] - of[1]) / of[1] for of in pairs.values() if len(of) == 2]
    if not errors:
        return {"num_pairs": 0}
    return {
        "num_pairs": len(errors),
        "mape": statistics.fmean(errors),
        "median": statistics.median(errors),
        "largest": max(errors),
    }
