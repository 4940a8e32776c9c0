"""Which of several ways of doing the same is fastest, measured in turns."""

from __future__ import annotations

from collections.abc import Collection

_WINDOW, _TRIAL = 32.0, 4.0
_KEPT, _LEAST = 0.95, 1e-3
_FIRST_PATIENCE, _MOST_PATIENCE = 16, 64
_CLEAR = 1.2
_CREDIT = 1.03


class Regime:
    """One of several ways: what was fastest so far, and at times another.

    Each is measured over windows of `_WINDOW` units of work. Another one is tried for `_TRIAL` of them after
    some windows of the best, and after twice as many each time that it was no better, four times where that
    was clear. So little is lost, and a change of the load is noticed. The last way is thought to lose little:
    it is tried for a whole window, for what pays now may not have paid a moment ago.

    Args:
        num_ways: of how many. Each is tried once, in order.
        usual: the best as long as no other one is clearly faster (`_CREDIT`); None for the last.
        begins_with_last: the last one is taken at once, and others are tried as they are later.

    Attributes:
        way: which one to take now.
    """

    def __init__(self, num_ways: int, *, usual: int | None = None, begins_with_last: bool = False) -> None:
        """Nothing was measured."""
        self._usual = num_ways - 1 if usual is None else usual
        self._best, self._tries_in_order = num_ways - 1, not begins_with_last
        self.way = self._best if begins_with_last else 0
        self._totals = [(0.0, 0.0)] * num_ways  # work and seconds, what was before counts less
        self._patience = [_FIRST_PATIENCE] * num_ways
        # Windows of the best, until each is tried again; soon, for the first time tells least.
        self._num_left = [_FIRST_PATIENCE // 4] * num_ways
        self._done = self._seconds = 0.0
        self._skips = True

    def observe(self, work: float, seconds: float, *, barred: Collection[int] = ()) -> None:
        """Take so much work, done in the present way; the first after a change may have been begun before.

        Ways that are `barred` are not tried again now.
        """
        if self._skips or seconds <= 0.0:
            self._skips = False
            return
        self._done += work
        self._seconds += seconds
        if not self._suffices():
            return
        speed, is_first = self._done / self._seconds, not self._totals[self.way][0]
        self._totals = [
            (_KEPT * done, _KEPT * seconds) if done > _LEAST else (done, seconds)
            for done, seconds in self._totals
        ]
        done, seconds = self._totals[self.way]
        self._totals[self.way] = done + self._done, seconds + self._seconds
        self._done = self._seconds = 0.0
        way = self._next(speed, is_first=is_first, barred=barred)
        self._skips, self.way = way != self.way, way

    def decline(self) -> None:
        """Leave the present way, predicted to be far slower, for the best, or if it is that for the last."""
        self._num_left[self.way] = _FIRST_PATIENCE
        if self.way == self._best:
            self._best = len(self._totals) - 1
            self._totals[self.way] = 0.0, 0.0
        self.way, self._tries_in_order = self._best, False
        self._done = self._seconds = 0.0
        self._skips = True

    @property
    def is_trying(self) -> bool:
        """Whether the present way is not the best."""
        return self.way != self._best

    def _suffices(self) -> bool:
        """Whether a window or a trial is at its end, a slow one once the fastest had done twice as much."""
        if self.way in (self._best, len(self._totals) - 1):
            return self._done >= _WINDOW
        known = [one for one in self._totals if one[0]]
        if not known:
            return True
        done, seconds = max(known, key=lambda one: one[0] / one[1])
        return self._done >= _TRIAL or 2 * _TRIAL * seconds <= self._seconds * done

    def _next(self, newest: float, *, is_first: bool, barred: Collection[int]) -> int:
        """What to do in the next window, after one of this speed, the first of its way or not."""
        if self._tries_in_order:
            for way, (done, _) in enumerate(self._totals):
                if not done:
                    return way
        speeds = [done / seconds if done else 0.0 for done, seconds in self._totals]
        speeds[self._usual] *= _CREDIT
        best = speeds.index(max(speeds))
        if best != self._best:
            self._patience[self._best] = self._num_left[self._best] = _FIRST_PATIENCE
            self._best = best
        elif self.way != best and not is_first:
            longer = 4 if speeds[best] > _CLEAR * speeds[self.way] else 2
            patience = min(longer * self._patience[self.way], _MOST_PATIENCE)
            self._patience[self.way] = patience if newest < speeds[best] else 1
            self._num_left[self.way] = self._patience[self.way]
        else:
            self._num_left = [left - 1 for left in self._num_left]
            others = [
                way
                for way, left in enumerate(self._num_left)
                if left <= 0 and way != best and way not in barred
            ]
            return min(others, key=self._num_left.__getitem__, default=best)
        return best
