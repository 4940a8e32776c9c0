"""Proposers that compute on the device of an executor, and what that takes."""

from __future__ import annotations

from typing import Protocol

from jaxllm.sched.proposers import Proposer

_RATE = 0.1


class Drafter(Proposer, Protocol):
    """A proposer with weights on the device."""

    def warm_up(self) -> None:
        """Compile what is not compiled, and measure what it takes."""
        ...

    def let_go(self, *, weights: bool) -> None:
        """Give the memory of all but the weights back, and with `weights` theirs; nobody runs."""
        ...

    def take_back(self) -> None:
        """Have all of it again.

        Raises:
            CapacityError: it does not fit any more.
        """
        ...

    def release(self) -> None:
        """Let go of everything: nothing will be drafted any more."""
        ...


class DraftTimes:
    """Seconds to draft so many tokens of each of so many requests, by the sizes of programs.

    They are measured once, and corrected by what it takes from then on. Between one token and the most, which
    are measured, it is a straight line.

    Args:
        most: most tokens of a request.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._ends: dict[int, tuple[float, float]] = {}  # by size: of one token, and of the most
        self._factors: dict[int, float] = {}

    def measured(self, size: int, one: float, most: float) -> None:
        """Note what a program of `size` requests takes for one token of each, and for the most."""
        self._ends[size] = one, most
        self._factors[size] = 1.0

    def seconds(self, num_requests: int, num_tokens: int) -> float:
        """Predicted; 0 while nothing is measured."""
        size = self._size(num_requests)
        return 0.0 if size is None else self._line(size, num_tokens) * self._factors[size]

    def observe(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        """Take what it took."""
        size = self._size(num_requests)
        if size is not None and (line := self._line(size, num_tokens)) > 0:
            known = self._factors[size]
            # One that was interrupted counts no more than one twice as long.
            self._factors[size] += _RATE * (min(seconds / line, 2 * known) - known)

    def _size(self, num_requests: int) -> int | None:
        sizes = sorted(self._ends)
        return next((size for size in sizes if size >= num_requests), sizes[-1] if sizes else None)

    def _line(self, size: int, num_tokens: int) -> float:
        one, most = self._ends[size]
        return one + (most - one) * (num_tokens - 1) / max(1, self._most - 1)
