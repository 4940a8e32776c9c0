"""The numbers that regressions predict costs from."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import CostKind
from jaxllm.predictors.derived import derived_features

Array = NDArray[np.float64]

_SHAPE_FEATURES = ("num_layers", "hidden_size")
_SWAP_FEATURES = ("block_bytes", "num_blocks")
FEATURE_NAMES: Mapping[CostKind, tuple[str, ...]] = {
    "prefill": (*_SHAPE_FEATURES, "num_tokens", "num_seqs", "context_tokens"),
    "decode": (*_SHAPE_FEATURES, "batch", "context_tokens"),
    "mixed": (*_SHAPE_FEATURES, "batch", "context_tokens", "num_tokens", "num_seqs", "prompt_context"),
    "swap_out": _SWAP_FEATURES,
    "swap_in": _SWAP_FEATURES,
}
"""What each kind of cost is predicted from. The first names describe the model, the rest the work."""

_ROWS = frozenset({"batch", "num_tokens"})
_MODEL_FEATURES = frozenset({*_SHAPE_FEATURES, "block_bytes"})


class FeatureSpace:
    """Features scaled to [-1, 1], on a linear or logarithmic scale, as standardised polynomials."""

    def __init__(
        self, kind: CostKind, measured: Array, degree: int, is_logarithmic: bool, derived: bool = False
    ) -> None:
        """`measured` `[n, f]` holds all work that was measured, whether it is fitted on or held out."""
        from sklearn.preprocessing import PolynomialFeatures, StandardScaler

        self.is_logarithmic = is_logarithmic
        self._kind = kind
        self._derived = derived
        inputs = self._inputs(measured)
        self._low, self._high = inputs.min(axis=0), inputs.max(axis=0)
        self._varies = self._low < self._high
        self._polynomial = PolynomialFeatures(degree, include_bias=False)
        self._scaler = StandardScaler()
        self._is_fitted = False

    @property
    def num_inputs(self) -> int:
        """Features that differ between samples."""
        return int(self._varies.sum())

    def _inputs(self, features: Array) -> Array:
        columns = dict(zip(FEATURE_NAMES[self._kind], features.T, strict=True))
        more = [derived_features(columns)] if self._derived else []
        return np.concatenate([features, *more], axis=1)

    def transform(self, features: Array) -> Array:
        """Polynomials `[n, num_features]` of `features` `[n, f]`; the first call also fits the scales."""
        inputs = self._inputs(features)
        low, high, unit = (values[..., self._varies] for values in (self._low, self._high, inputs))
        if self.is_logarithmic:
            low, high, unit = np.log1p(low), np.log1p(high), np.log1p(unit)
        unit = 2 * (unit - low) / (high - low) - 1
        if not self._is_fitted:
            self._is_fitted = True
            return np.asarray(self._scaler.fit_transform(self._polynomial.fit_transform(unit)))
        return np.asarray(self._scaler.transform(self._polynomial.transform(unit)))

    def clamp(self, features: Array) -> tuple[Array, Array]:
        """`features` moved into what was measured, and how many times too large each was, at least once.

        Both `[n, f]`; 1 for features of which only one value was measured, but for rows.
        """
        for column, name in enumerate(FEATURE_NAMES[self._kind]):
            low, high, asked = self._low[column], self._high[column], features[:, column]
            if name in _MODEL_FEATURES:
                wrong = asked[(asked < low) | (asked > high)]
            elif name in _ROWS:  # a program computes all of its rows, and there may be but one
                continue
            else:
                wrong = asked[(asked != low) & (low == high)]
            if len(wrong):
                measured = f"{low:g}" if low == high else f"{low:g} to {high:g}"
                raise ConfigError(
                    f"{self._kind} was measured with {name} {measured} only, and is asked for {wrong[0]:g}; "
                    f"measure it there too"
                )
        low, high, varies = (of[: features.shape[1]] for of in (self._low, self._high, self._varies))
        varies = varies | np.array([name in _ROWS for name in FEATURE_NAMES[self._kind]])
        varies &= high > 0
        ratios = np.where(varies, features / np.where(varies, high, 1.0), 1.0)
        return np.clip(features, low, high), np.maximum(ratios, 1.0)

    def halved(self, features: Array, column: int) -> Array:
        """`features` with half as much in a column, or with the least that was measured."""
        half = features.copy()
        half[:, column] = np.maximum(self._low[column], features[:, column] / 2)
        return half
