"""What a copy between device and host costs: a latency, each piece, and the bytes. Imports no JAX."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import check_integer, check_number


class LinkSample(NamedTuple):
    """A copy of `num_bytes` bytes in `num_pieces` pieces, each copied by itself, that took `seconds`."""

    num_bytes: int
    num_pieces: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class LinkCosts:
    """`seconds = latency_seconds + num_pieces * piece_seconds + num_bytes / bytes_per_second`.

    It separates what small blocks cost from what KV costs (vLLM, Kwon et al. 2023, Fig. 19).

    Args:
        latency_seconds: fixed cost of a copy in one direction.
        piece_seconds: fixed cost of each of its pieces.
        bytes_per_second: rate of the bytes; infinity where they cost nothing.

    Raises:
        ConfigError: a cost is negative or not finite, or the rate is not above 0.
    """

    latency_seconds: float
    piece_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        check_number("latency_seconds", self.latency_seconds, 0.0, 1e9)
        check_number("piece_seconds", self.piece_seconds, 0.0, 1e9)
        check_number("bytes_per_second", self.bytes_per_second, 1e-9, math.inf)

    def seconds(self, num_bytes: float, num_pieces: float) -> float:
        """Seconds of a copy; nothing to copy takes none."""
        if num_bytes <= 0 or num_pieces <= 0:
            return 0.0
        return self.latency_seconds + num_pieces * self.piece_seconds + num_bytes / self.bytes_per_second

    def median_error(self, samples: Sequence[LinkSample]) -> float:
        """Median of `|predicted - measured| / measured`.

        Raises:
            ConfigError: there is no sample.
        """
        _check(samples)
        return statistics.median(
            abs(self.seconds(sample.num_bytes, sample.num_pieces) / sample.seconds - 1.0)
            for sample in samples
        )

    @classmethod
    def fit(cls, samples: Sequence[LinkSample]) -> LinkCosts:
        """The constants with the least squares of *relative* errors, none of them negative.

        What the samples do not tell apart (all of one number of pieces, say) is shared out as it comes.

        Raises:
            ConfigError: there is no sample, or one is not positive.
        """
        _check(samples)
        from scipy.optimize import nnls  # takes a while to import

        parts = np.array([(1.0, sample.num_pieces, sample.num_bytes) for sample in samples])
        relative = parts / np.array([[sample.seconds] for sample in samples])
        scale = relative.max(axis=0)  # else bytes and seconds differ by ten orders of magnitude
        latency, piece, byte = (nnls(relative / scale, np.ones(len(samples)))[0] / scale).tolist()
        return cls(latency, piece, 1.0 / byte if byte > 0 else math.inf)


def _check(samples: Sequence[LinkSample]) -> None:
    if not samples:
        raise ConfigError("costs of a link need at least one sample")
    for sample in samples:
        check_integer("num_bytes", sample.num_bytes, 1, 2**62)
        check_integer("num_pieces", sample.num_pieces, 1, 2**31)
        check_number("seconds", sample.seconds, 1e-12, 1e9)
