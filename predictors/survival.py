"""How long outputs of an age will get: learned from those that ended, and from those that go on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxllm.types import Request

Array = NDArray[np.float64]

_WINDOW = 1024
_FIRST_GUESS = 256.0
AHEAD = np.concatenate([[0.0], 2.0 ** np.arange(4.0, 17.0, 0.5)])
"""Further tokens, `[A]`, at which outputs that go on are looked at."""


class OutputSurvival:
    """The share of outputs that are longer than a number of tokens, as Kaplan and Meier (1958) estimate it.

    An output that was cut off, or goes on, is known to be longer than it is. To leave it out would make
    outputs look short, since the long ones end last. Nothing is taken to end before it is twice as long as
    the longest one seen; beyond that the share falls with the square of the length. So it is before anything
    is known.

    Args:
        window: how many outputs that have ended are remembered.
        first_guess: tokens, twice which nothing is taken to end within before anything is known.
    """

    def __init__(self, window: int = _WINDOW, first_guess: float = _FIRST_GUESS) -> None:
        self._ended = np.empty(window)  # twice their lengths, and 1 more of those that were cut off
        self._num_ended = 0
        self._first_guess = first_guess
        self.fit(())

    def add(self, num_tokens: int, *, is_whole: bool) -> None:
        """Take an output that has ended; `is_whole` if nothing cut it off."""
        self._ended[self._num_ended % len(self._ended)] = 2 * num_tokens + (not is_whole)
        self._num_ended += 1

    def ended(self, request: Request, *, is_whole: bool) -> None:
        """Take the output of a request that has ended, if it has any."""
        if request.output_token_ids:
            self.add(len(request.output_token_ids), is_whole=is_whole)

    def fit(self, going_on: Sequence[int] | Array) -> None:
        """Learn from what has ended, and from outputs that are `going_on`, of lengths `[N]` so far."""
        cut_off = 2.0 * np.asarray(going_on, np.float64) + 1.0
        twice = np.concatenate([self._ended[: self._num_ended], cut_off])
        twice.sort()  # of equal lengths the whole outputs first
        lengths = np.floor(twice / 2.0)
        is_whole = twice == 2.0 * lengths
        # One more, that never ends, is at risk: no share is 0, however few there are.
        at_risk = np.arange(len(lengths), 0, -1) + 1.0
        self._lengths = np.concatenate([[0.0], lengths])
        self._shares = np.concatenate([[1.0], np.cumprod(1.0 - is_whole / at_risk)])
        self._longest = max(1.0 if is_whole.any() else self._first_guess, float(self._lengths[-1]))

    def share(self, num_tokens: Array) -> Array:
        """Share of outputs longer than each of `num_tokens`, an array of any shape."""
        place = np.searchsorted(self._lengths, num_tokens, side="right") - 1
        beyond = 2.0 * self._longest / np.maximum(num_tokens, 2.0 * self._longest)
        return np.asarray(self._shares[place] * beyond**2, np.float64)

    def going_on(self, ages: Array, limits: Array) -> Array:
        """Share that goes on after each of `AHEAD` further tokens, `[N, A]`, of outputs `ages` `[N]` long.

        None goes on at its limit `[N]`.
        """
        later = ages[:, None] + AHEAD
        return np.asarray(
            self.share(later) / self.share(ages)[:, None] * (later < limits[:, None]), np.float64
        )
