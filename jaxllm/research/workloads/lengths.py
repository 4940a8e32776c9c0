"""Distributions of prompt and output lengths, in tokens."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from jaxllm.errors import ConfigError
from jaxllm.research.workloads.checks import MAX_LEN, check_integer, check_number

_SIGMA_BOUNDS = (0.01, 4.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LognormalLengths:
    """Lognormal lengths, clipped, whose mean *after* clipping and rounding is the one stated.

    A length is `clip(exp(mu + sigma * Z), shortest, longest)` with Z standard normal, rounded at random to
    one of its two neighbours so that its expectation stays (17.25 gives 17 three times out of four).
    `mu` follows from `mean`: it is solved from the closed form of the clipped expectation.

    Args:
        mean: expected length, in tokens, strictly between `shortest` and `longest`.
        sigma: standard deviation of the logarithm before clipping, in [0.01, 4].
        shortest: lower clip, in tokens, at least 1.
        longest: upper clip, in tokens, at most 2**24.

    Raises:
        ConfigError: an argument is out of range.
    """

    mean: float
    sigma: float
    shortest: int
    longest: int

    def __post_init__(self) -> None:
        check_number("sigma", self.sigma, *_SIGMA_BOUNDS)
        check_integer("shortest", self.shortest, 1, MAX_LEN - 1)
        check_integer("longest", self.longest, self.shortest + 1, MAX_LEN)
        check_number("mean", self.mean, self.shortest, self.longest)
        if self.mean in (self.shortest, self.longest):
            raise ConfigError(
                f"mean={self.mean} must lie strictly between shortest={self.shortest} and "
                f"longest={self.longest}"
            )

    @property
    def mu(self) -> float:
        """Mean of the logarithm before clipping."""
        return _solve_mu(self.mean, self.sigma, self.shortest, self.longest)

    def sample(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """`count` lengths; fewer of them are the first of more of them."""
        shapes, roundings = rng.spawn(2)
        exact = np.exp(self.mu + self.sigma * shapes.standard_normal(count))
        clipped = np.clip(exact, self.shortest, self.longest)
        return np.floor(clipped + roundings.random(count)).clip(max=self.longest).astype(np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniformLengths:
    """Every length of `[shortest, longest]` is as likely; both ends included, in tokens.

    Raises:
        ConfigError: an end is out of range, or the range is empty.
    """

    shortest: int
    longest: int

    def __post_init__(self) -> None:
        check_integer("shortest", self.shortest, 1, MAX_LEN)
        check_integer("longest", self.longest, self.shortest, MAX_LEN)

    @property
    def mean(self) -> float:
        """Expected length, in tokens."""
        return (self.shortest + self.longest) / 2

    def sample(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """`count` lengths; a range of one length draws nothing."""
        if self.shortest == self.longest:
            return np.full(count, self.longest, np.int64)
        return rng.integers(self.shortest, self.longest, size=count, endpoint=True)


CHATBOT = LognormalLengths(mean=17.02, sigma=0.6, shortest=1, longest=64)
"""Chatbot prompts. The mean is the paper's, for alespalla/chatbot_instruction_prompts (258,064 samples);
the paper gives no shape, so lognormal, sigma and clip are assumptions."""

ALPACA = LognormalLengths(mean=19.66, sigma=0.6, shortest=1, longest=64)
"""Alpaca prompts. The mean is the paper's, for gbharti/finance-alpaca (68,912 samples);
lognormal, sigma and clip are assumptions."""

SUMMARY = LognormalLengths(mean=340.48, sigma=0.7, shortest=1, longest=1500)
"""Summary prompts. The mean is the paper's, for khwhrali011/summary-dataset (1,799 samples), which calls
the variance high; lognormal, sigma and clip are assumptions."""

DATASETS: Mapping[str, LognormalLengths] = MappingProxyType(
    {"chatbot": CHATBOT, "alpaca": ALPACA, "summary": SUMMARY}
)
"""Prompt lengths of the paper's three data sets, by name."""


def max_outputs(max_output_len: int) -> UniformLengths:
    """Every output has `max_output_len` tokens: the paper's evaluation, as far as it says.

    Raises:
        ConfigError: `max_output_len` is not in `[1, 2**24]`.
    """
    return UniformLengths(shortest=max_output_len, longest=max_output_len)


def uniform_outputs(max_output_len: int) -> UniformLengths:
    """Outputs uniform in `[ceil(max_output_len / 4), max_output_len]` tokens: our assumption beside `max`.

    Raises:
        ConfigError: `max_output_len` is not in `[1, 2**24]`.
    """
    max_output_len = check_integer("max_output_len", max_output_len, 1, MAX_LEN)
    return UniformLengths(shortest=-(-max_output_len // 4), longest=max_output_len)


def clipped_lognormal_mean(mu: float, sigma: float, low: float, high: float) -> float:
    """Expectation of `clip(exp(mu + sigma * Z), low, high)` for a standard normal Z."""
    a, b = (math.log(low) - mu) / sigma, (math.log(high) - mu) / sigma
    inside = math.exp(mu + sigma**2 / 2) * (_normal_cdf(b - sigma) - _normal_cdf(a - sigma))
    return low * _normal_cdf(a) + inside + high * _normal_cdf(-b)


@functools.lru_cache(maxsize=256)
def _solve_mu(mean: float, sigma: float, low: int, high: int) -> float:
    """Bisection to the last bit: the clipped mean grows with mu, from `low` to `high`."""
    below, above = math.log(low) - 40 * sigma, math.log(high) + 40 * sigma
    while True:
        middle = (below + above) / 2
        if middle in (below, above):
            return middle
        if clipped_lognormal_mean(middle, sigma, low, high) < mean:
            below = middle
        else:
            above = middle


def _normal_cdf(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2
