"""How sure means over seeds are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scipy.stats import t as student_t


class Interval(NamedTuple):
    """A mean, and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean of values, with Student's interval; of a single one its ends are infinite."""
    mean, half = statistics.fmean(values), math.inf
    if len(values) > 1:
        error = statistics.stdev(values) / math.sqrt(len(values))
        half = float(student_t.ppf(0.975, len(values) - 1)) * error
    return Interval(mean, mean - half, mean + half)


def ratio_interval(ratios: Sequence[float]) -> Interval:
    """The geometric mean of ratios, with Student's interval of their logarithms; of one 0 and infinity."""
    return Interval(*(math.exp(value) for value in mean_interval([math.log(ratio) for ratio in ratios])))
