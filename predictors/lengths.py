"""How long outputs will be, from prompts and the outputs of past ones: a value, a range, or a rank.

All learn online: they are fitted again whenever the outputs they have seen have doubled, to the most recent
ones, with linear models that take milliseconds. scikit-learn is imported when something is fitted.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from jaxllm.types import Request

Array = NDArray[np.float64]

_NUM_HASHED = 512
_FIRST_FIT = 32
_WINDOW = 4096


class LengthPolicy(Protocol):
    """How many tokens a request will generate."""

    def predict(self, request: Request) -> float | None:
        """Expected output tokens of a new request, above 0; None before anything is known."""
        ...

    def observe(self, request: Request, num_tokens: int) -> None:
        """Take a request that ended by itself after `num_tokens` output tokens."""
        ...


def prompt_features(prompt_token_ids: Sequence[int]) -> Array:
    """Features `[514]` of a prompt: log length, share of distinct tokens, and hashed token frequencies."""
    ids = np.asarray(prompt_token_ids, np.int64)
    counts = np.bincount(ids * 2654435761 % 2**32 % _NUM_HASHED, minlength=_NUM_HASHED) / len(ids)
    return np.concatenate([[math.log(len(ids)), len(np.unique(ids)) / len(ids)], counts])


class TrueLength:
    """Knows how many tokens may be generated, as where `ignore_eos` is set: the perfect prediction."""

    def predict(self, request: Request) -> float | None:
        """The request's limit."""
        return float(request.max_total_tokens - request.num_prompt_tokens)

    def observe(self, request: Request, num_tokens: int) -> None:
        """There is nothing to learn."""


@dataclasses.dataclass
class _Learned(abc.ABC):
    """Keeps what was seen, and says when to fit again."""

    def __post_init__(self) -> None:
        self._features: collections.deque[Array] = collections.deque(maxlen=_WINDOW)
        self._outputs: collections.deque[int] = collections.deque(maxlen=_WINDOW)
        self._num_seen, self._next_fit = 0, _FIRST_FIT
        self._is_fitted = False

    def predict(self, request: Request) -> float | None:
        """Expected output tokens; None before the first fit."""
        features = prompt_features(request.prompt_token_ids)
        return max(1.0, self._predict(features)) if self._is_fitted else None

    def observe(self, request: Request, num_tokens: int) -> None:
        """Take an output, and learn from all of them now and then."""
        self._features.append(prompt_features(request.prompt_token_ids))
        self._outputs.append(max(1, num_tokens))
        self._num_seen += 1
        if self._num_seen >= self._next_fit:
            self._next_fit = min(2 * self._num_seen, self._num_seen + _WINDOW)
            self._fit(np.stack(self._features), np.asarray(self._outputs, np.float64))
            self._is_fitted = True

    @abc.abstractmethod
    def _fit(self, features: Array, outputs: Array) -> None:
        """Learn from features `[N, 514]` and output lengths `[N]`."""

    @abc.abstractmethod
    def _predict(self, features: Array) -> float:
        """Tokens that a prompt with these features leads to."""


@dataclasses.dataclass
class ValuePredictor(_Learned):
    """The expected length itself: ridge regression of its logarithm."""

    def _fit(self, features: Array, outputs: Array) -> None:
        from sklearn.linear_model import Ridge

        model = Ridge(alpha=0.1).fit(features, np.log(outputs))
        self._weights, self._bias = model.coef_, float(model.intercept_)

    def _predict(self, features: Array) -> float:
        return math.exp(float(self._weights @ features) + self._bias)


@dataclasses.dataclass
class RangePredictor(_Learned):
    """The upper end of a range of lengths, as S3 does (Jin et al., 2023): a classifier of ten ranges.

    Args:
        num_ranges: with equally many of the outputs seen in each.
    """

    num_ranges: int = 10

    def _fit(self, features: Array, outputs: Array) -> None:
        from sklearn.linear_model import RidgeClassifier

        ends = np.unique(np.quantile(outputs, np.arange(1, self.num_ranges + 1) / self.num_ranges))
        labels = np.searchsorted(ends, outputs)
        self._ends = ends[np.unique(labels)]
        self._weights = np.zeros((1, features.shape[1]))
        self._bias = np.zeros(1)
        if len(self._ends) > 1:
            model = RidgeClassifier(alpha=0.1).fit(features, labels)
            self._weights, self._bias = model.coef_, model.intercept_
            if len(self._ends) == 2:  # one row of weights tells two classes apart
                self._weights = np.concatenate([np.zeros_like(self._weights), self._weights])
                self._bias = np.concatenate([np.zeros(1), self._bias])

    def _predict(self, features: Array) -> float:
        return float(self._ends[int(np.argmax(self._weights @ features + self._bias))])


@dataclasses.dataclass
class RankPredictor(_Learned):
    """A rank among the outputs seen: learning to rank (Fu et al., 2024), from pairs of prompts.

    A linear scorer is fitted to which of two prompts had the longer output. What it predicts is the length
    whose place among the outputs seen is the score's among the scores: only the order is learned.

    Args:
        num_pairs: drawn for a fit.
        seed: of the draw.
    """

    num_pairs: int = 4000
    seed: int = 0

    def _fit(self, features: Array, outputs: Array) -> None:
        from sklearn.linear_model import Ridge

        rng = np.random.default_rng(self.seed)
        first, second = rng.integers(len(outputs), size=(2, self.num_pairs))
        differs = outputs[first] != outputs[second]
        first, second = first[differs], second[differs]
        self._weights = np.zeros(features.shape[1])
        is_longer = outputs[first] > outputs[second]
        if is_longer.any() and not is_longer.all():
            model = Ridge(alpha=0.1, fit_intercept=False)
            model.fit(features[first] - features[second], np.where(is_longer, 1.0, -1.0))
            self._weights = model.coef_
        self._scores, self._outputs_in_order = np.sort(features @ self._weights), np.sort(outputs)

    def _predict(self, features: Array) -> float:
        return float(np.interp(features @ self._weights, self._scores, self._outputs_in_order))
