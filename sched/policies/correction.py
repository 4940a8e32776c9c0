"""What measurements make of a cost model's predictions."""

from __future__ import annotations

_RATE = 0.1


class Correction:
    """How many times as long as predicted work of each size took.

    Between two sizes that were measured it lies between theirs, and beyond them it is as at the last.
    """

    def __init__(self) -> None:
        """Nothing was measured."""
        self._ratios: dict[int, tuple[float, int]] = {}  # each with of how many it is the mean
        self._factors: dict[int, float] = {}  # what they come to, as far as was asked since

    def __bool__(self) -> bool:
        """Whether anything was measured."""
        return bool(self._ratios)

    def add(self, size: int, ratio: float, *, doubts: bool = False) -> None:
        """Take measured seconds over predicted ones; who doubts what was measured before counts it once."""
        known, count = self._ratios.get(size, (ratio, 0))
        count = min(count, 1) if doubts else count
        # One that was interrupted counts no more than one twice as long.
        known += max(_RATE, 1 / (count + 1)) * (min(max(ratio, known / 2), known * 2) - known)
        self._ratios[size] = known, count + 1
        self._factors.clear()

    def factor(self, size: int) -> float:
        """What predicted seconds are to be times; 1 if nothing was measured."""
        factor = self._factors.get(size)
        if factor is None:
            factor = self._factors[size] = self._factor(size)
        return factor

    def _factor(self, size: int) -> float:
        known = self._ratios
        if not known:
            return 1.0
        below = max((one for one in known if one <= size), default=min(known))
        above = min((one for one in known if one >= size), default=max(known))
        share = min(1.0, max(0.0, (size - below) / (above - below))) if above > below else 0.0
        return known[below][0] * (1 - share) + known[above][0] * share
