"""Costs learned from measurements: eight regressors x polynomial degrees, chosen by held-out error.

As AdaptiveLLM fits its recompute predictor (Section 4.5 has its errors), with these choices of ours:

- squared relative errors are minimised, for the choice is by relative errors: the four linear regressors
  fit seconds weighted by 1 / seconds**2, the others fit the logarithm of seconds to that of the features;
- features that never change in the samples are left out (one model has one hidden size);
- measurements of the same work stay on the same side of a split;
- the winner is chosen on one held-out part, fitted again with it, and its error reported on a third part
  that neither the fits nor the choice saw: the least of 80 errors would flatter it.

scikit-learn is imported when something is fitted: it takes seconds to import.
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxllm.errors import ConfigError, shown
from jaxllm.predictors.base import CostKind, ModelShape, check_integer, check_number, step_kind
from jaxllm.predictors.features import _MODEL_FEATURES, FEATURE_NAMES, Array, FeatureSpace
from jaxllm.predictors.fit_report import Candidate, ErrorStats, FitReport

REGRESSORS = (
    "linear",
    "ridge",
    "lasso",
    "elastic net",
    "decision tree",
    "random forest",
    "gradient boosting",
    "k-nearest neighbours",
)
"""Names of the paper's eight regressors."""

_LINEAR = frozenset(REGRESSORS[:4])  # these fit seconds, the others logarithms
_MIN_DISTINCT = 10
_LARGEST = 10**15  # of a feature
_LEAST_SECONDS, _MOST_SECONDS = 1e-9, 1e6


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: `features` in the order of `FEATURE_NAMES[kind]`, and its seconds.

    Raises:
        ConfigError: the number of features is wrong, one is negative or beyond what is counted, or seconds
            are not those of any step or copy.
    """

    kind: CostKind
    features: tuple[float, ...]
    seconds: float

    def __post_init__(self) -> None:
        names = FEATURE_NAMES[self.kind]
        if len(self.features) != len(names):
            raise ConfigError(f"a {self.kind} sample has features {names}, got {self.features}")
        if not all(0 <= value <= _LARGEST for value in self.features):
            raise ConfigError(
                f"a {self.kind} sample's features must lie in [0, {_LARGEST:g}], got {shown(self.features)}"
            )
        if not _LEAST_SECONDS <= self.seconds <= _MOST_SECONDS:
            raise ConfigError(
                f"a {self.kind} sample took {self.seconds} seconds; it must be from {_LEAST_SECONDS:g} to "
                f"{_MOST_SECONDS:g}: are they in another unit?"
            )

    @property
    def work(self) -> tuple[int, ...]:
        """The counts of the work, without those of the model."""
        names = FEATURE_NAMES[self.kind]
        return tuple(
            int(value)
            for name, value in zip(names, self.features, strict=True)
            if name not in _MODEL_FEATURES
        )

    @classmethod
    def step(
        cls,
        model: ModelShape,
        seconds: float,
        batch: int,
        context_tokens: int,
        num_tokens: int = 0,
        num_seqs: int = 0,
        prompt_context: int = 0,
    ) -> Sample:
        """One step, of the kind that it computes; the counts are those of `CostModel.step_seconds`."""
        decodes, prompts = (batch, context_tokens), (num_tokens, num_seqs, prompt_context)
        kind = step_kind(batch, num_tokens)
        work = {"decode": decodes, "prefill": prompts}.get(kind, (*decodes, *prompts))
        return cls(kind, (model.num_layers, model.hidden_size, *work), seconds)

    @classmethod
    def swap_out(cls, model: ModelShape, block_size: int, num_blocks: int, seconds: float) -> Sample:
        """One copy of `num_blocks` blocks of `block_size` tokens to the host."""
        return cls("swap_out", (model.block_bytes(block_size), num_blocks), seconds)

    @classmethod
    def swap_in(cls, model: ModelShape, block_size: int, num_blocks: int, seconds: float) -> Sample:
        """One copy of `num_blocks` blocks of `block_size` tokens to the device."""
        return cls("swap_in", (model.block_bytes(block_size), num_blocks), seconds)


class FittedRegressor:
    """One fitted candidate: features to seconds.

    Work below the samples is predicted at their edge. Beyond them seconds grow on as they do from half the
    edge to the edge, by each feature, at least not at all and at most in proportion: a polynomial would go
    anywhere. Another model than the samples' range of models is refused.
    """

    def __init__(self, space: FeatureSpace, features: Array, seconds: Array, estimator: Any) -> None:
        """Fit `estimator`, an unfitted scikit-learn regressor, to `features` `[n, f]` and `seconds` `[n]`."""
        self._space = space
        self._estimator = estimator
        # Predictions stay within a factor of 2 of what was fitted: polynomials swing between samples.
        self._low, self._high = seconds.min() / 2, seconds.max() * 2
        # Weights average 1, so that a penalty weighs the same whatever the unit of time.
        self._unit = 1.0 if space.is_logarithmic else float(np.mean(seconds**-2.0) ** -0.5)
        inputs = space.transform(features)
        if space.is_logarithmic:
            estimator.fit(inputs, np.log(seconds))
        else:
            estimator.fit(inputs, seconds / self._unit, sample_weight=(seconds / self._unit) ** -2.0)

    def predict(self, features: Array) -> Array:
        """Seconds `[n]` for `features` `[n, f]`, columns in the order of `FEATURE_NAMES`.

        Raises:
            ConfigError: a feature of the model is outside what was measured, or one of the work differs
                from the only value that was measured.
        """
        inside, ratios = self._space.clamp(np.asarray(features, dtype=np.float64))
        at_edge = self._inside(inside)
        seconds = at_edge.copy()
        for column in range(ratios.shape[1]):
            beyond = np.flatnonzero(ratios[:, column] > 1.0)
            if not len(beyond):
                continue
            edge, known = inside[beyond, column], at_edge[beyond]
            half = self._space.halved(inside[beyond], column)
            share = np.ones(len(beyond))  # of the seconds that grow with the feature
            varies = half[:, column] < edge
            grown = (known - self._inside(half))[varies] / known[varies]
            share[varies] = np.clip(grown / (1.0 - half[varies, column] / edge[varies]), 0.0, 1.0)
            seconds[beyond] += known * share * (ratios[beyond, column] - 1.0)
        return seconds

    def _inside(self, features: Array) -> Array:
        """Seconds of work like that of the samples."""
        output = np.asarray(self._estimator.predict(self._space.transform(features)), dtype=np.float64)
        seconds = np.exp(output) if self._space.is_logarithmic else output * self._unit
        return np.clip(seconds, self._low, self._high)


@dataclasses.dataclass(frozen=True)
class Fit:
    """The chosen regressor of one kind of cost, how it was chosen, and the samples nothing was fitted to."""

    regressor: FittedRegressor
    report: FitReport
    test: Sequence[Sample]


def fit(
    samples: Sequence[Sample],
    *,
    seed: int = 0,
    names: Sequence[str] = REGRESSORS,
    degrees: Sequence[int] = range(1, 11),
    max_features: int = 300,
    tolerance: float = 0.02,
    test_all: bool = False,
    derived: bool = False,
) -> Fit:
    """Fit every regressor at every degree, and keep the one of least held-out MAPE.

    Distinct work is split 64 : 16 : 20 into a part to fit on, one to choose by, and one to report on.
    With a few hundred samples that takes seconds to a minute, most of it in forests and boosting.

    Args:
        samples: measurements of one kind.
        seed: of the split and of the regressors that draw numbers.
        names: which of `REGRESSORS` to try.
        degrees: polynomial degrees, each in [1, 10].
        max_features: candidates with more polynomial features than this are skipped, which is reported.
        tolerance: candidates whose MAPE is at most this fraction above the least are as good as it, and the
            one of the lowest degree is kept: it strays least where nothing was measured.
        test_all: report every candidate's error on the third part, too; it takes twice the time.
        derived: also fit to `derived.derived_features`.

    Raises:
        ConfigError: the samples are of several kinds or of fewer than 10 distinct amounts of work, an
            argument is out of range, or `max_features` leaves no candidate.
    """
    kinds = sorted({sample.kind for sample in samples})
    if len(kinds) != 1:
        raise ConfigError(f"fit needs samples of one kind of cost, got {kinds or 'none'}")
    unknown = [name for name in names if name not in REGRESSORS]
    if unknown or not names or not degrees:
        raise ConfigError(
            f"fit needs at least one degree and one of the regressors {', '.join(REGRESSORS)}; got "
            f"degrees={list(degrees)}, names={list(names)}"
        )
    for degree in degrees:
        check_integer("degree", degree, 1, 10)
    check_integer("max_features", max_features, 1, 100_000)
    check_number("tolerance", tolerance, 0.0, 1.0)
    kind = samples[0].kind
    start = time.perf_counter()
    features = np.array([sample.features for sample in samples], dtype=np.float64)
    seconds = np.array([sample.seconds for sample in samples], dtype=np.float64)
    train, held_out, test = _split(kind, features, seed)

    def refit(name: str, degree: int) -> FittedRegressor:
        known = np.concatenate([train, held_out])
        space = FeatureSpace(kind, features, degree, name not in _LINEAR, derived)
        return _fit_one(space, features[known], seconds[known], makers[name])[0]

    num_varying = FeatureSpace(kind, features, 1, False, derived).num_inputs
    candidates: list[Candidate] = []
    makers = {name: make for name, make in _makers(seed).items() if name in names}
    for degree in sorted(set(degrees)):
        num_features = math.comb(num_varying + degree, degree) - 1
        if num_features > max_features:
            reason = f"degree {degree} makes {num_features} features, more than {max_features}"
            candidates += [Candidate(name, degree, num_features, skipped=reason) for name in makers]
            continue
        for name, make in makers.items():
            fit_start = time.perf_counter()
            space = FeatureSpace(kind, features, degree, name not in _LINEAR, derived)
            regressor, converged = _fit_one(space, features[train], seconds[train], make)
            fit_seconds = time.perf_counter() - fit_start
            errors = _errors(regressor, features[held_out], seconds[held_out])
            tested = _errors(refit(name, degree), features[test], seconds[test]) if test_all else None
            found = (errors, fit_seconds, converged, None, tested)
            candidates.append(Candidate(name, degree, num_features, *found))
    chosen = _choose(candidates, tolerance)
    winner = refit(chosen.regressor, chosen.degree)
    report = FitReport(
        kind=kind,
        seed=seed,
        num_train=len(train),
        num_held_out=len(held_out),
        num_test=len(test),
        candidates=tuple(candidates),
        chosen=chosen,
        test=_errors(winner, features[test], seconds[test]),
        fit_seconds=time.perf_counter() - start,
    )
    return Fit(winner, report, [samples[index] for index in test])


class RegressionCostModel:
    """A `CostModel` of fitted regressors, for one model. A call takes up to milliseconds: distil it.

    `TableCostModel.distil(RegressionCostModel(...), axes)` asks it a few times.

    Args:
        fitted: a regressor for each kind of cost. Without one for mixed steps these take what their parts do.
        model: the model whose steps are predicted.
        block_size: tokens per KV block.

    Raises:
        ConfigError: another kind has no regressor.
    """

    def __init__(
        self, fitted: Mapping[CostKind, FittedRegressor], model: ModelShape, block_size: int
    ) -> None:
        check_integer("block_size", block_size, 1, 1024)
        missing = [kind for kind in FEATURE_NAMES if kind not in fitted and kind != "mixed"]
        if missing:
            raise ConfigError(f"no regressor was fitted for {', '.join(missing)}")
        self._fitted = dict(fitted)
        shape = (float(model.num_layers), float(model.hidden_size))
        swap = (float(model.block_bytes(block_size)),)
        self._prefix: dict[CostKind, tuple[float, ...]] = {
            "prefill": shape,
            "decode": shape,
            "mixed": shape,
            "swap_out": swap,
            "swap_in": swap,
        }

    def seconds_many(self, kind: CostKind, work: Array) -> Array:
        """Seconds `[n]` for `work` `[n, k]`; see `table.BatchCostModel`.

        Raises:
            ConfigError: the samples do not cover this model or this work.
        """
        if kind == "mixed" and kind not in self._fitted:
            return self.seconds_many("decode", work[:, :2]) + self.seconds_many("prefill", work[:, 2:])
        prefix = np.broadcast_to(np.array(self._prefix[kind]), (len(work), len(self._prefix[kind])))
        return self._fitted[kind].predict(np.concatenate([prefix, work], axis=1))

    def step_seconds(
        self,
        batch: int,
        context_tokens: int,
        prompt_tokens: int = 0,
        num_prompts: int = 0,
        prompt_context: int = 0,
    ) -> float:
        """Seconds of a step; see `CostModel.step_seconds`."""
        decodes = (batch, max(context_tokens, 0)) if batch > 0 else ()
        prompts = (
            ()
            if min(prompt_tokens, num_prompts) <= 0
            else (prompt_tokens, num_prompts, max(prompt_context, 0))
        )
        if not (decodes or prompts):
            return 0.0
        return self._one(step_kind(len(decodes), len(prompts)), *decodes, *prompts)

    def swap_out_seconds(self, num_blocks: int) -> float:
        """Seconds to copy blocks to the host; see `CostModel.swap_out_seconds`."""
        return self._one("swap_out", num_blocks) if num_blocks > 0 else 0.0

    def swap_in_seconds(self, num_blocks: int) -> float:
        """Seconds to copy blocks to the device; see `CostModel.swap_in_seconds`."""
        return self._one("swap_in", num_blocks) if num_blocks > 0 else 0.0

    def _one(self, kind: CostKind, *work: int) -> float:
        return float(self.seconds_many(kind, np.array([work], dtype=np.float64))[0])


def _choose(candidates: Sequence[Candidate], tolerance: float) -> Candidate:
    """The simplest of those whose MAPE is at most `tolerance` above the least; the better of two equals."""
    fitted = [(c.held_out.mape, c) for c in candidates if c.held_out is not None]
    if not fitted:
        raise ConfigError(f"no candidate was fitted: {candidates[0].skipped}; raise max_features")
    limit = (1 + tolerance) * min(mape for mape, _ in fitted)
    return min((entry for entry in fitted if entry[0] <= limit), key=lambda e: (e[1].degree, e[0]))[1]


def _makers(seed: int) -> dict[str, Callable[[int], Any]]:
    """The eight regressors by name; each makes one, unfitted, for a number of training samples."""
    from sklearn.ensemble import GradientBoostingRegressor, RandomForestRegressor
    from sklearn.linear_model import ElasticNet, Lasso, LinearRegression, Ridge
    from sklearn.neighbors import KNeighborsRegressor
    from sklearn.tree import DecisionTreeRegressor

    # Features are standardised and errors relative, which is what an alpha is weighed against.
    return {
        "linear": lambda n: LinearRegression(),
        "ridge": lambda n: Ridge(alpha=1e-4),
        "lasso": lambda n: Lasso(alpha=1e-4, max_iter=1000),
        "elastic net": lambda n: ElasticNet(alpha=1e-4, max_iter=1000),
        "decision tree": lambda n: DecisionTreeRegressor(random_state=seed),
        "random forest": lambda n: RandomForestRegressor(n_estimators=50, random_state=seed),
        "gradient boosting": lambda n: GradientBoostingRegressor(random_state=seed),
        "k-nearest neighbours": lambda n: KNeighborsRegressor(n_neighbors=min(5, n), weights="distance"),
    }


def _fit_one(
    space: FeatureSpace, features: Array, seconds: Array, make: Callable[[int], Any]
) -> tuple[FittedRegressor, bool]:
    """Fit one candidate; also whether its solver converged."""
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        regressor = FittedRegressor(space, features, seconds, make(len(seconds)))
    return regressor, not any(issubclass(warning.category, ConvergenceWarning) for warning in caught)


def _split(kind: CostKind, features: Array, seed: int) -> tuple[NDArray[np.intp], ...]:
    """Indices of the samples to fit on, to choose by and to report on; equal work goes together."""
    distinct, group = np.unique(features, axis=0, return_inverse=True)
    count = len(distinct)
    if count < _MIN_DISTINCT:
        raise ConfigError(
            f"{kind} was measured at {count} distinct amounts of work; measure at least {_MIN_DISTINCT}"
        )
    num_test = round(0.2 * count)
    num_held_out = round(0.2 * (count - num_test))
    part = np.zeros(count, dtype=np.int64)
    order = np.random.default_rng(seed).permutation(count)
    part[order[:num_test]] = 2
    part[order[num_test : num_test + num_held_out]] = 1
    return tuple(np.flatnonzero(part[group.ravel()] == index) for index in range(3))


def _errors(regressor: FittedRegressor, features: Array, seconds: Array) -> ErrorStats:
    errors = np.abs(regressor.predict(features) - seconds) / seconds
    return ErrorStats(float(errors.mean()), float(np.median(errors)), float(errors.max()))
