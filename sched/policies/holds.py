"""For how long does a request's KV stay on the device after its end, for the next turn?"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Protocol

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import CostModel
from jaxllm.sched.pool_state import PoolState

_WINDOW = 1024
_GUESSES = 8


class HoldPolicy(Protocol):
    """For how long the blocks of a request that has ended are kept from others.

    They are given up earlier where those who run, or nobody, could not go on without them.
    """

    def seconds(self, num_tokens: int, queue_seconds: float, state: PoolState) -> float:
        """For how long; 0 holds nothing. Asked once for each request that ends with blocks others can find.

        Args:
            num_tokens: in these blocks.
            queue_seconds: for how long turns whose blocks were not held waited for their first step, of late.
            state: how full the pools are.
        """
        ...

    def came_back(self, seconds: float) -> None:
        """A turn came that goes on with a request that ended so many seconds before."""
        ...


@dataclasses.dataclass(frozen=True)
class NoHold:
    """What has ended holds nothing: its blocks are found until somebody takes them (vLLM, SGLang)."""

    def seconds(self, num_tokens: int, queue_seconds: float, state: PoolState) -> float:
        """None."""
        return 0.0

    def came_back(self, seconds: float) -> None:
        """There is nothing to learn."""


@dataclasses.dataclass(unsafe_hash=True)
class TimeToLive:
    """Continuum's: the time that is worth most (arXiv 2511.02230).

    That is the probability that the next turn comes within it, times the seconds of computing the KV again,
    or of copying it back, and of queueing for its room, less the time for which others miss the share of the
    pool. How soon turns come is learned from the last 1,024; before, gaps are taken to be exponential. How
    many turns are the last is learned, too. Of a tool that is called it knows nothing: requests do not say.

    Args:
        costs: predicts seconds.
        first_guess: mean gap in seconds, before any is known.

    Raises:
        ConfigError: `first_guess` is not positive and finite.
    """

    costs: CostModel
    first_guess: float = 2.0

    def __post_init__(self) -> None:
        if not 0.0 < self.first_guess < math.inf:
            raise ConfigError(f"first_guess={self.first_guess!r} must be positive and finite: seconds")
        guesses = -self.first_guess * np.log1p(-(np.arange(_GUESSES) + 0.5) / _GUESSES)
        self._gaps: collections.deque[float] = collections.deque(guesses.tolist(), maxlen=_WINDOW)
        self._num_ended, self._num_back = 2.0, 1.0

    def seconds(self, num_tokens: int, queue_seconds: float, state: PoolState) -> float:
        """The gap, of those there were, that is worth most to wait for; 0 if none is worth anything."""
        self._num_ended += 1.0
        benefit = self._benefit(num_tokens, queue_seconds, state)
        if benefit <= 0.0:
            return 0.0
        gaps = np.sort(np.array(self._gaps))
        comes = np.arange(1, len(gaps) + 1) / len(gaps) * min(1.0, self._num_back / self._num_ended)
        share = -(-num_tokens // state.block_size) / state.num_blocks
        # Held until it comes, or the time is over: the integral of what has not come.
        held = np.cumsum(np.diff(gaps, prepend=0.0) * (1.0 - np.concatenate([[0.0], comes[:-1]])))
        worth = comes * benefit - share * held
        best = int(worth.argmax())
        return float(gaps[best]) if worth[best] > 0.0 else 0.0

    def _benefit(self, num_tokens: int, queue_seconds: float, state: PoolState) -> float:
        """Seconds that a turn saves which comes in time."""
        again, reload = self._again(num_tokens, state)
        return (min(again, reload) if state.num_host_blocks else again) + queue_seconds  # where it may be

    def _again(self, num_tokens: int, state: PoolState) -> tuple[float, float]:
        """Seconds of computing KV again, and of copying it back, which is 0 where there is no host memory."""
        again = self.costs.step_seconds(0, 0, num_tokens, 1)
        if not state.num_host_blocks:
            return again, 0.0
        return again, self.costs.swap_in_seconds(-(-num_tokens // state.block_size))

    def came_back(self, seconds: float) -> None:
        """Remember the gap."""
        self._gaps.append(seconds)
        self._num_back += 1.0


class HoldIfLost(TimeToLive):
    """Continuum's time to live (arXiv 2511.02230), counting what turns that were not held have lost.

    What a turn saves that comes in time is computing its KV again, times the share of such KV that turns of
    late found neither on the device nor on the host, and copying back the rest. While nothing is lost nothing
    is held. The more paused conversations outgrow the pools, the more of them are held, and new requests wait
    for room instead of driving out what is wanted next.

    Unlike Continuum's it does not count waiting for room, which holding moves from some to others.
    """

    def _benefit(self, num_tokens: int, queue_seconds: float, state: PoolState) -> float:
        lost = state.lost_share
        if not lost:
            return 0.0
        again, reload = self._again(num_tokens, state)
        return lost * again + (1.0 - lost) * min(again, reload)
