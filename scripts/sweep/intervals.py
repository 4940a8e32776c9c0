"""How sure a ratio is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy.stats import t as student_t


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of ratios, and the ends of its 95 % interval: Student's, of the logarithms.

    Of a single ratio they are 0 and infinity.
    """
    logarithms = [math.log(ratio) for ratio in ratios]
    mean, half = statistics.fmean(logarithms), math.inf
    if len(logarithms) > 1:
        error = statistics.stdev(logarithms) / math.sqrt(len(logarithms))
        half = float(student_t.ppf(0.975, len(logarithms) - 1)) * error
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)
