"""Measurements of a ladder of models, each size of work twice, and their file."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.engine.profiling import Profiler, Work
from jaxllm.errors import ConfigError
from jaxllm.predictors.base import COST_KINDS, CostKind
from jaxllm.predictors.regression import Sample
from jaxllm.predictors.samples import load_samples, save_samples


@dataclasses.dataclass(frozen=True)
class Measured:
    """A sample, and where it is from: which model, which of its sizes of work, and which time (0 or 1)."""

    sample: Sample
    model: int
    point: int
    turn: int


@dataclasses.dataclass
class Ladder:
    """Measurements of several models; `models` says of each its name, family and sizes."""

    models: list[dict[str, Any]]
    measured: list[Measured]
    facts: dict[str, Any]

    def of(self, family: str, kind: CostKind) -> list[Measured]:
        """Those of a kind, of all models of a family."""
        return [
            one
            for one in self.measured
            if one.sample.kind == kind and self.models[one.model]["family"] == family
        ]

    @property
    def families(self) -> list[str]:
        """As they come."""
        return list(dict.fromkeys(model["family"] for model in self.models))


def measure(profiler: Profiler, seconds: float, model: int, seed: int) -> list[Measured]:
    """Draw sizes of work and measure them for half of `seconds`, then all of them again in another order."""
    profiler.warm_up()
    points: list[Work] = []
    found: list[Measured] = []
    started = time.perf_counter()
    while not points or time.perf_counter() - started < seconds / 2:
        for work in profiler.draw():
            found += [Measured(sample, model, len(points), 0) for sample in profiler.measure(work)]
            points.append(work)
    order = list(range(len(points)))
    random.Random(seed).shuffle(order)
    for point in order:
        found += [Measured(sample, model, point, 1) for sample in profiler.measure(points[point])]
    return found


def save_ladder(path: pathlib.Path, ladder: Ladder) -> None:
    """Write the samples as `jaxllm profile --samples` does, and beside them where each is from.

    Raises:
        ConfigError: the file cannot be written.
    """
    by_kind = _by_kind(ladder.measured)
    samples = {kind: [one.sample for one in found] for kind, found in by_kind.items()}
    origins = {kind: [[one.model, one.point, one.turn] for one in found] for kind, found in by_kind.items()}
    facts = {**ladder.facts, "models": [json.dumps(model) for model in ladder.models]}
    facts["origin_columns"] = ["model", "point", "turn"]
    facts["origins"] = {kind: json.dumps(rows) for kind, rows in origins.items()}
    save_samples(path, samples, facts)


def load_ladder(path: pathlib.Path) -> Ladder:
    """Read what `save_ladder` wrote.

    Raises:
        ConfigError: the file is missing or malformed, or holds samples of something else.
    """
    samples = load_samples(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    try:
        models = [json.loads(model) for model in content["models"]]
        origins = {kind: json.loads(content["origins"][kind]) for kind in samples}
        measured = [
            Measured(sample, *origin)
            for kind, found in samples.items()
            for sample, origin in zip(found, origins[kind], strict=True)
        ]
        if any(one.model not in range(len(models)) or one.turn not in (0, 1) for one in measured):
            raise ValueError("a sample is of no model, or measured for a third time")
        facts = {name: content[name] for name in ("command", "hardware", "versions")}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no samples of a ladder of models: {type(error).__name__}: {error}"
        ) from error
    return Ladder(models, measured, facts)


def _by_kind(measured: Sequence[Measured]) -> Mapping[CostKind, list[Measured]]:
    found: dict[CostKind, list[Measured]] = {
        kind: [one for one in measured if one.sample.kind == kind] for kind in COST_KINDS
    }
    return {kind: of_kind for kind, of_kind in found.items() if of_kind}
