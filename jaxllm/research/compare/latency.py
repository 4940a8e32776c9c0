"""Waiting at a request rate: when requests come, and what each waits for its tokens."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_PERCENTILES = (50, 90, 99)


def poisson_arrivals(rate: float, num_requests: int, seed: int) -> list[float]:
    """Times in seconds of so many requests, `rate` a second, the first at 0."""
    rng = random.Random(seed)
    times = [0.0]
    while len(times) < num_requests:
        times.append(times[-1] + rng.expovariate(rate))
    return times


def summarise(reply: Mapping[str, Any], max_tokens: Sequence[int]) -> dict[str, Any]:
    """Percentiles of what requests waited.

    Args:
        reply: of each request when it came, when its first token did, and when its last, in seconds.
        max_tokens: output tokens of each.
    """
    arrivals, first, last = (np.asarray(reply[name]) for name in ("arrivals", "first", "last"))
    more = np.asarray(max_tokens) - 1
    between = (last - first)[more > 0] / more[more > 0]
    return {
        "seconds": float(last.max() - arrivals.min()),
        "output_tokens_per_second": float(np.sum(max_tokens) / (last.max() - arrivals.min())),
        "first_token_seconds": _percentiles(first - arrivals),
        "seconds_per_token": _percentiles(between),
        "request_seconds": _percentiles(last - arrivals),
    }


def _percentiles(values: Any) -> dict[str, float]:
    if not len(values):
        return {}
    found = {f"p{percent}": float(np.percentile(values, percent)) for percent in _PERCENTILES}
    return {"mean": float(np.mean(values)), **found}
