"""What a fit says of itself: held-out errors of every candidate, and the test error of the chosen one."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxllm.predictors.base import CostKind


@dataclasses.dataclass(frozen=True)
class ErrorStats:
    """|predicted - measured| / measured over some samples, as fractions: mean (MAPE), median, largest."""

    mape: float
    median: float
    largest: float


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One regressor at one polynomial degree.

    `held_out` and `fit_seconds` are `None` where `skipped` says why there was no fit. `converged` is false
    where the solver stopped at its limit of iterations. `test` is its error on the third part, fitted to both
    others, if `fit` was asked for it.
    """

    regressor: str
    degree: int
    num_features: int
    held_out: ErrorStats | None = None
    fit_seconds: float | None = None
    converged: bool = True
    skipped: str | None = None
    test: ErrorStats | None = None


@dataclasses.dataclass(frozen=True)
class FitReport:
    """All candidates of one kind of cost, the one chosen, and its error on samples nothing was fitted to.

    `num_train`, `num_held_out` and `num_test` count samples; `fit_seconds` is the time of everything.
    """

    kind: CostKind
    seed: int
    num_train: int
    num_held_out: int
    num_test: int
    candidates: tuple[Candidate, ...]
    chosen: Candidate
    test: ErrorStats
    fit_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values; errors are fractions, times seconds."""
        return dataclasses.asdict(self) | {"candidates": [dataclasses.asdict(c) for c in self.candidates]}

    def to_markdown(self) -> str:
        """A table, regressors x degrees, of held-out MAPE in percent and fit seconds; the chosen is bold."""
        degrees = sorted({candidate.degree for candidate in self.candidates})
        regressors = list(dict.fromkeys(candidate.regressor for candidate in self.candidates))
        cells = {(c.regressor, c.degree): self._cell(c) for c in self.candidates}
        lines = [
            f"{self.kind}: {self.chosen.regressor}, degree {self.chosen.degree}; MAPE "
            f"{_percent(self.test.mape)} (median {_percent(self.test.median)}, largest "
            f"{_percent(self.test.largest)}) on {self.num_test} test samples.",
            f"Held-out MAPE on {self.num_held_out} samples (fit seconds, on {self.num_train}):",
            "",
            "| regressor | " + " | ".join(f"degree {degree}" for degree in degrees) + " |",
            "|---|" + "---|" * len(degrees),
        ]
        lines += [f"| {name} | " + " | ".join(cells[name, d] for d in degrees) + " |" for name in regressors]
        skipped = sorted({c.skipped for c in self.candidates if c.skipped})
        if skipped:
            lines += ["", *(f"Skipped (-): {reason}." for reason in skipped)]
        if not all(candidate.converged for candidate in self.candidates):
            lines += ["", "*: stopped at the limit of iterations."]
        return "\n".join(lines) + "\n"

    def _cell(self, candidate: Candidate) -> str:
        if candidate.held_out is None:
            return "-"
        text = _percent(candidate.held_out.mape) + ("" if candidate.converged else "*")
        if candidate == self.chosen:
            text = f"**{text}**"
        return f"{text} ({candidate.fit_seconds:.2f})"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"
