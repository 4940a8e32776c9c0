"""In which order idle pieces of host memory go, found without looking at all of them."""

from __future__ import annotations

import collections
import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from jaxllm.types import HostBlock, HostPiece

_RANKING_SECONDS = 5.0
"""How long a piece's value is taken to be the same."""
_RANKED_AT_A_TIME = 64
"""Pieces whose values are looked at again, beside those that have become idle."""


class Piece(Protocol):
    """What an order knows of a piece."""

    key: HostPiece
    blocks: set[HostBlock]
    num_held: int
    idle_since: float


class EvictionOrder(Protocol):
    """Which piece goes next, of those of which nobody holds a block."""

    def add(self, place: HostBlock, piece: Piece) -> None:
        """A block that nobody holds was let go of, or found, just now; others of its piece may be held."""
        ...

    def remove(self, place: HostBlock) -> None:
        """A block is held now, or gone."""
        ...

    def free(self, piece: Piece) -> None:
        """Nobody holds any block of a piece any more."""
        ...

    def stop_waiting(self, pieces: Iterable[Piece]) -> None:
        """Nobody waits for some blocks of these any more."""
        ...

    def next(self, now: float) -> Piece:
        """The piece that goes next; there must be one."""
        ...


class RecencyOrder:
    """The piece goes first whose block was let go of longest ago; those that somebody waits for go last.

    Args:
        is_awaited: whether somebody waits for a piece; None if that makes no difference.
    """

    def __init__(self, is_awaited: Callable[[Piece], bool] | None = None) -> None:
        self._is_awaited = is_awaited
        self._newest: dict[HostBlock, int] = {}
        self._queue: list[tuple[int, HostBlock, Piece]] = []  # heaps; of a block only its newest entry counts
        self._awaited: list[tuple[int, HostBlock, Piece]] = []
        self._aside: dict[HostPiece, list[tuple[int, HostBlock, Piece]]] = {}  # entries that were passed over
        self._stamps = itertools.count()

    def add(self, place: HostBlock, piece: Piece) -> None:
        """See `EvictionOrder`."""
        stamp = self._newest[place] = next(self._stamps)
        heapq.heappush(self._queue, (stamp, place, piece))
        if len(self._queue) > 64 + 2 * len(self._newest):
            self._queue = [entry for entry in self._queue if self._counts(entry)]
            heapq.heapify(self._queue)

    def remove(self, place: HostBlock) -> None:
        """See `EvictionOrder`."""
        del self._newest[place]

    def free(self, piece: Piece) -> None:
        """See `EvictionOrder`."""
        for entry in self._aside.pop(piece.key, ()):
            heapq.heappush(self._queue, entry)

    def stop_waiting(self, pieces: Iterable[Piece]) -> None:
        """See `EvictionOrder`."""
        for piece in pieces:
            self.free(piece)

    def next(self, now: float) -> Piece:
        """See `EvictionOrder`."""
        while self._queue:
            entry = self._queue[0]
            piece = entry[2]
            if self._counts(entry):
                is_awaited = not piece.num_held and self._is_awaited is not None and self._is_awaited(piece)
                if not (piece.num_held or is_awaited):
                    return piece
                self._aside.setdefault(piece.key, []).append(entry)
                if is_awaited:
                    heapq.heappush(self._awaited, entry)
            heapq.heappop(self._queue)
        while not self._counts(self._awaited[0]) or self._awaited[0][2].num_held:
            heapq.heappop(self._awaited)
        return self._awaited[0][2]

    def _counts(self, entry: tuple[int, HostBlock, Piece]) -> bool:
        return self._newest.get(entry[1]) == entry[0]


class ValueOrder:
    """The piece of the least value goes first, as it was within some seconds.

    Args:
        values_of: what keeping each piece is worth now.
    """

    def __init__(self, values_of: Callable[[Sequence[Piece]], Sequence[float]]) -> None:
        self._values_of = values_of
        self._new: dict[HostPiece, Piece] = {}  # those to be ranked
        self._ranks: dict[HostPiece, int] = {}  # the newest rank of each
        self._queue: list[tuple[float, float, HostPiece, int, Piece]] = []  # a heap of values
        self._oldest: collections.deque[tuple[float, int, Piece]] = (
            collections.deque()
        )  # when they were ranked
        self._stamps = itertools.count()

    def add(self, place: HostBlock, piece: Piece) -> None:
        """See `EvictionOrder`."""
        if not piece.num_held:
            self._new[piece.key] = piece

    def remove(self, place: HostBlock) -> None:
        """See `EvictionOrder`."""

    def free(self, piece: Piece) -> None:
        """See `EvictionOrder`."""
        self._new[piece.key] = piece

    def stop_waiting(self, pieces: Iterable[Piece]) -> None:
        """See `EvictionOrder`."""

    def next(self, now: float) -> Piece:
        """See `EvictionOrder`."""
        self._rank(now)
        while True:
            _, _, key, rank, piece = self._queue[0]
            if self._ranks.get(key) == rank and self._is_idle(piece):
                return piece
            heapq.heappop(self._queue)
            if self._ranks.get(key) == rank:
                del self._ranks[key]

    def _rank(self, now: float) -> None:
        """Rank what has become idle, and again some of what was ranked longest ago."""
        pieces, oldest = self._new, self._oldest
        self._new = {}
        num_left = _RANKED_AT_A_TIME
        while num_left and oldest and now - oldest[0][0] > _RANKING_SECONDS:
            _, rank, piece = oldest.popleft()
            if self._ranks.get(piece.key) == rank:
                pieces[piece.key] = piece
                num_left -= 1
        idle = [piece for piece in pieces.values() if self._is_idle(piece)]
        for value, piece in zip(self._values_of(idle), idle, strict=True):
            rank = self._ranks[piece.key] = next(self._stamps)
            heapq.heappush(self._queue, (value, piece.idle_since, piece.key, rank, piece))
            oldest.append((now, rank, piece))
        if len(self._queue) > 64 + 2 * len(self._ranks):
            self._queue = [one for one in self._queue if self._ranks.get(one[2]) == one[3]]
            heapq.heapify(self._queue)

    def _is_idle(self, piece: Piece) -> bool:
        return bool(piece.blocks) and not piece.num_held
