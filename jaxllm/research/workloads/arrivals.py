"""Arrival processes: when each request of a trace is sent.

In the open processes requests come whatever becomes of them; the first always comes at time 0, so `n` of
them have `n - 1` gaps. In a `ClosedLoop` clients wait for their answers. A process is a frozen value; all
randomness comes from the generator it is given, and the times of a short trace are the first times of a
long one.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from typing import Protocol

import numpy as np
import numpy.typing as npt

from jaxllm.errors import ConfigError
from jaxllm.research.workloads.checks import MAX_REQUESTS, MAX_SECONDS, check_integer, check_number

_RATE_BOUNDS = (1e-6, 1e6)
_CV_BOUNDS = (0.01, 20.0)


class ArrivalProcess(Protocol):
    """When requests arrive."""

    def times(self, num_requests: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        """Arrival times `[num_requests]` in seconds, from 0, never decreasing."""
        ...


@dataclasses.dataclass(frozen=True)
class AllAtOnce:
    """Every request is there at time 0: offline inference, and the paper's evaluation."""

    def times(self, num_requests: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        """Zeros."""
        return np.zeros(num_requests)


@dataclasses.dataclass(frozen=True)
class Poisson:
    """Independent users: exponential gaps.

    Args:
        rate: mean requests a second, in [1e-6, 1e6].

    Raises:
        ConfigError: `rate` is out of range.
    """

    rate: float

    def __post_init__(self) -> None:
        check_number("rate", self.rate, *_RATE_BOUNDS)

    def times(self, num_requests: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        """The sums of the gaps."""
        return _times_of(rng.standard_exponential(num_requests - 1) / self.rate)


@dataclasses.dataclass(frozen=True)
class GammaBursts:
    """Bursts and lulls: gamma-distributed gaps of a given coefficient of variation.

    A gamma distribution of shape `1 / cv**2` and scale `cv**2 / rate` has mean `1 / rate` and standard
    deviation `cv / rate`. `cv=1` is a Poisson process in distribution, more is burstier, less more regular.

    Args:
        rate: mean requests a second, in [1e-6, 1e6].
        cv: standard deviation of the gaps divided by their mean, in [0.01, 20].

    Raises:
        ConfigError: an argument is out of range.
    """

    rate: float
    cv: float

    def __post_init__(self) -> None:
        check_number("rate", self.rate, *_RATE_BOUNDS)
        check_number("cv", self.cv, *_CV_BOUNDS)

    def times(self, num_requests: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        """The sums of the gaps."""
        shape = self.cv**-2
        return _times_of(rng.standard_gamma(shape, num_requests - 1) / (shape * self.rate))


@dataclasses.dataclass(frozen=True)
class RecordedArrivals:
    """Replays times that were recorded, from the first on; nothing is drawn.

    Args:
        recorded: seconds on any clock, never decreasing.

    Raises:
        ConfigError: there is no time, or one is not finite, out of range or out of order.
    """

    recorded: tuple[float, ...]

    def __post_init__(self) -> None:
        times = tuple(
            check_number(f"recorded[{index}]", time, -MAX_SECONDS * 1000, MAX_SECONDS * 1000)
            for index, time in enumerate(self.recorded)
        )
        if not times:
            raise ConfigError("recorded arrivals need at least one time")
        for index, (earlier, later) in enumerate(itertools.pairwise(times), 1):
            if later < earlier:
                raise ConfigError(f"recorded[{index}]={later} comes after {earlier}; sort the times")
        object.__setattr__(self, "recorded", times)

    def __repr__(self) -> str:
        return f"RecordedArrivals({len(self.recorded)} times)"

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> RecordedArrivals:
        """The arrivals of a trace, in any form that `load_trace` knows without a tokenizer.

        Raises:
            ConfigError: the file is no trace.
            RequestError: a request in it is malformed.
        """
        from jaxllm.research.workloads.recorded import load_trace  # which needs arrivals

        return cls(tuple(load_trace(path).arrival_times.tolist()))

    def times(self, num_requests: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        """The first `num_requests` times, relative to the first.

        Raises:
            ConfigError: fewer were recorded.
        """
        if num_requests > len(self.recorded):
            raise ConfigError(
                f"num_requests={num_requests}, and only {len(self.recorded)} arrival times were recorded; "
                "lower num_requests"
            )
        return np.array(self.recorded[:num_requests]) - self.recorded[0]


@dataclasses.dataclass(frozen=True)
class ClosedLoop:
    """Clients who think, send the next request of the trace, wait for the answer, and think again.

    However slow the server, no more than `num_clients` requests are under way.

    Args:
        num_clients: how many, in [1, 2**25].
        think: mean of the exponential time between an answer and the next request, and before the first
            one, in seconds, in [0, 1e9]; 0 is none.

    Raises:
        ConfigError: an argument is out of range.
    """

    num_clients: int
    think: float = 0.0

    def __post_init__(self) -> None:
        check_integer("num_clients", self.num_clients, 1, MAX_REQUESTS)
        check_number("think", self.think, 0.0, MAX_SECONDS)

    def times(self, num_requests: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        """Zeros: the answers decide."""
        return np.zeros(num_requests)

    def think_times(self, num_requests: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        """Seconds `[num_requests]` before each sending."""
        return np.minimum(self.think * rng.standard_exponential(num_requests), MAX_SECONDS)


def parse_arrivals(text: str) -> ArrivalProcess:
    """What a command line names.

    Args:
        text: `all`, `poisson:RATE`, `gamma:RATE:CV`, `closed:CLIENTS` or `closed:CLIENTS:THINK`; rates are
            requests a second, `THINK` seconds.

    Raises:
        ConfigError: it is none of these, or a number is out of range.
    """
    kind, *rest = text.split(":")
    try:
        if kind == "closed" and 1 <= len(rest) <= 2:
            return ClosedLoop(int(rest[0]), *map(float, rest[1:]))
        numbers = list(map(float, rest))
        makers = {("all", 0): AllAtOnce, ("poisson", 1): Poisson, ("gamma", 2): GammaBursts}
        return makers[kind, len(numbers)](*numbers)
    except ConfigError as error:
        name, _, rule = str(error).partition(" ")
        raise ConfigError(f"arrivals {text!r}: {name.removeprefix('num_').upper()} {rule}") from error
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"arrivals {text!r}: write all, poisson:RATE, gamma:RATE:CV, closed:CLIENTS or "
            "closed:CLIENTS:THINK (requests a second, and seconds)"
        ) from error


def _times_of(gaps: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.concatenate([[0.0], np.cumsum(gaps)])
