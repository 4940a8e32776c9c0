"""Which of two ways of doing the same is faster, measured in turns."""

from __future__ import annotations

import dataclasses

_WINDOW, _TRIAL = 32.0, 8.0
_RATE = 0.5
_FIRST_PATIENCE, _MOST_PATIENCE = 8, 128
_CLEAR = 1.2
_TIE = 0.99


@dataclasses.dataclass(slots=True)
class Regime:
    """With or without something: what was faster so far, and at times the other.

    Each is measured over windows of `_WINDOW` units of work. The other one is tried for `_TRIAL` of them
    after some windows of the better one, and after twice as many each time that it was no better, four times
    where that was clear. So little is lost, and a change of the load is noticed. With is what it begins with,
    and what it does where there is no difference.

    Attributes:
        is_with: what to do now.
    """

    is_with: bool = True
    _is_better_with: bool = True
    _speeds: list[float | None] = dataclasses.field(default_factory=lambda: [None, None])
    _done: float = 0.0
    _seconds: float = 0.0
    _skips: bool = True
    _patience: int = _FIRST_PATIENCE
    _num_left: int = _FIRST_PATIENCE

    def observe(self, work: float, seconds: float) -> None:
        """Take so much work, done in the present way; the first after a change may have been begun before."""
        if self._skips or seconds <= 0.0:
            self._skips = False
            return
        self._done += work
        self._seconds += seconds
        is_trial = self.is_with != self._is_better_with
        if self._done < (_TRIAL if is_trial else _WINDOW):
            return
        speed, before = self._done / self._seconds, self._speeds[self.is_with]
        self._speeds[self.is_with] = speed if before is None else before + _RATE * (speed - before)
        self._done = self._seconds = 0.0
        is_with = self._next(is_trial)
        self._skips, self.is_with = is_with != self.is_with, is_with

    def _next(self, is_trial: bool) -> bool:
        """What to do in the next window."""
        without, with_it = self._speeds
        if without is None or with_it is None:
            return without is not None
        is_better = with_it >= _TIE * without
        if is_better != self._is_better_with:
            self._is_better_with, self._patience = is_better, _FIRST_PATIENCE
        elif is_trial:
            is_clear = max(without, with_it) > _CLEAR * min(without, with_it)
            self._patience = min((4 if is_clear else 2) * self._patience, _MOST_PATIENCE)
        else:
            self._num_left -= 1
            return is_better if self._num_left else not is_better
        self._num_left = self._patience
        return is_better
