"""How long copies take, by looking at them between steps: they run beside the steps, and nobody waits."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from jaxllm.types import CopyTime


@dataclasses.dataclass(slots=True)
class _Copy:
    handle: int
    num_blocks: int
    sent_at: float
    begun_by: float | None
    is_known: bool


class CopyTimer:
    """Brackets the durations of the copies in one direction of a link, which does them one after another.

    A copy ends between two looks, and begins when it is sent or when the one before it ends, which is known
    as well as that. Where steps are long, such brackets say little.

    Args:
        is_out: whether the copies go to the host.
        begins_when_sent: whether an idle link begins a copy when it is sent; else by the next look, since the
            device must do something before.
    """

    def __init__(self, *, is_out: bool, begins_when_sent: bool) -> None:
        self._is_out, self._begins_when_sent = is_out, begins_when_sent
        self._copies: collections.deque[_Copy] = collections.deque()
        self._looked_at = self._free_after = self._free_by = float("-inf")
        self._is_disturbed = False

    @property
    def is_idle(self) -> bool:
        """Whether all copies are over, as far as it was told."""
        return not self._copies

    def send(self, handle: int, num_blocks: int, now: float, *, is_known: bool = True) -> None:
        """Take a copy; with `is_known` False one that may begin later, and is not timed."""
        if not num_blocks:
            return  # there is nothing to copy
        begun_by = now if self._begins_when_sent else None
        is_known = is_known and not self._is_disturbed
        self._is_disturbed = False
        self._copies.append(_Copy(handle, num_blocks, now, begun_by, is_known))

    def disturb(self) -> None:
        """Do not time the next copy that is sent: something else delays it."""
        self._is_disturbed = True

    def look(self, now: float, is_over: Callable[[int], bool]) -> list[CopyTime]:
        """Ask which copies are over by now; returns the durations of those that were timed."""
        found = []
        while self._copies and is_over(self._copies[0].handle):
            copy = self._copies.popleft()
            ended_after = max(copy.sent_at, self._looked_at)
            begun_after = max(copy.sent_at, self._free_after)
            begun_by = max(now if copy.begun_by is None else copy.begun_by, self._free_by)
            if copy.is_known:
                shortest = max(0.0, ended_after - begun_by)
                found.append(CopyTime(self._is_out, copy.num_blocks, shortest, now - begun_after))
            self._free_after, self._free_by = ended_after, now
        self._looked_at = now
        for copy in self._copies:
            if copy.begun_by is None:
                copy.begun_by = now
        return found

    def forget(self, handle: int) -> None:
        """Look at a copy no longer. The next one is not timed: this one may still keep the link busy."""
        for place, copy in enumerate(self._copies):
            if copy.handle == handle:
                del self._copies[place]
                if place < len(self._copies):
                    self._copies[place].is_known = False
                else:
                    self.disturb()
                return
