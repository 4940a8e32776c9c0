"""Which blocks of the prefix cache stay in host memory, when room is needed?

They go in pieces that were copied there together. On the device the blocks that were let go of longest ago go
first, of one sequence its last or its first ones.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import CostModel
from jaxllm.types import BlockName

_MAX_COUNTED_USES = 3
_MIN_SECONDS = 1e-3  # shorter intervals are as good as none


class IdlePiece(NamedTuple):
    """Blocks in host memory that nobody holds.

    Attributes:
        names: what they hold.
        position: tokens before them in their sequence, on average.
        num_tokens: of all of them.
        idle_seconds: since they were let go of, here or on the device.
        stored_seconds: since they were copied here.
        num_uses: how often they were asked for since then.
    """

    names: Sequence[BlockName]
    position: float
    num_tokens: int
    idle_seconds: float
    stored_seconds: float = 0.0
    num_uses: int = 0


class RetentionPolicy(Protocol):
    """What is kept. It may also be a `QueueAwareRetention`."""

    @property
    def loses_heads(self) -> bool:
        """Whether the first blocks of a sequence go before its last ones: requests then look past them."""
        ...

    def values(self, pieces: Sequence[IdlePiece], now: float) -> Sequence[float]:
        """What keeping each piece is worth; those of the least value go first."""
        ...

    def observe(self, piece: IdlePiece, *, is_used: bool) -> None:
        """Learn that a piece is asked for, or was not and goes."""
        ...


@runtime_checkable
class QueueAwareRetention(Protocol):
    """A retention that may spare what is queued for; for any other only first blocks are watched."""

    @property
    def looks_ahead(self) -> bool:
        """Whether all blocks that queued requests would ask for are watched."""
        ...


@dataclasses.dataclass(frozen=True)
class LeastRecentlyUsed:
    """What was let go of longest ago goes first (vLLM V1, SGLang).

    Recomputed tokens by byte with a decay make the same order, where all blocks have as many bytes a token.

    Args:
        looks_ahead: whether what queued requests will ask for goes last (CachedAttention, Section 3.3.2).
    """

    looks_ahead: bool = False
    loses_heads = False

    def values(self, pieces: Sequence[IdlePiece], now: float) -> Sequence[float]:
        """The less the longer ago."""
        return [-piece.idle_seconds for piece in pieces]

    def observe(self, piece: IdlePiece, *, is_used: bool) -> None:
        """There is nothing to learn."""


class S3FIFO:
    """S3-FIFO (Yang et al., SOSP 2023): what is not asked for again soon after it was stored goes first.

    Pieces that were never asked for, and did not go a while ago, may take `small_share` of all; where they
    take more, the one stored first goes. Else it is, of the others, the one stored first of those that were
    asked for the fewest times.

    Args:
        small_share: in [0, 1].

    Raises:
        ConfigError: it is out of range.
    """

    loses_heads = False

    def __init__(self, small_share: float = 0.1) -> None:
        if not 0.0 <= small_share <= 1.0:
            raise ConfigError(f"small_share={small_share!r} must lie in [0, 1]: a share of the pieces")
        self._small_share = small_share
        self._ghosts: collections.OrderedDict[BlockName, None] = collections.OrderedDict()
        self._num_ghosts = 0  # as many as there are blocks

    def values(self, pieces: Sequence[IdlePiece], now: float) -> Sequence[float]:
        """Their places in the order in which they go."""
        self._num_ghosts = sum([len(piece.names) for piece in pieces])
        small, main = list[int](), list[int]()
        for place in sorted(range(len(pieces)), key=lambda place: -pieces[place].stored_seconds):
            is_new = not pieces[place].num_uses and self._ghosts.keys().isdisjoint(pieces[place].names)
            (small if is_new else main).append(place)
        num_first = max(0, len(small) - int(self._small_share * len(pieces)))
        main.sort(key=lambda place: min(pieces[place].num_uses, _MAX_COUNTED_USES))
        values = [0.0] * len(pieces)
        for value, place in enumerate([*small[:num_first], *main, *small[num_first:]]):
            values[place] = float(value)
        return values

    def observe(self, piece: IdlePiece, *, is_used: bool) -> None:
        """Remember what went without having been asked for."""
        if not (is_used or piece.num_uses):
            self._ghosts.update(dict.fromkeys(piece.names))
            while len(self._ghosts) > self._num_ghosts:
                self._ghosts.popitem(last=False)


@dataclasses.dataclass(frozen=True)
class CostOverIdleTime:
    """Pensieve's retention value (V = Cost(s, l) / T): heads are the cheapest to compute again.

    Args:
        costs: predicts seconds.
    """

    costs: CostModel
    loses_heads = True

    def values(self, pieces: Sequence[IdlePiece], now: float) -> Sequence[float]:
        """Seconds that computing a token again takes, by seconds since its last use."""
        return [
            recompute_seconds(self.costs, piece) / piece.num_tokens / max(_MIN_SECONDS, piece.idle_seconds)
            for piece in pieces
        ]

    def observe(self, piece: IdlePiece, *, is_used: bool) -> None:
        """There is nothing to learn."""


class Hindsight:
    """Cost-weighted Belady: knows when each block is asked for next. A bound, for simulations.

    Args:
        costs: predicts seconds.
        uses: ascending times at which blocks were asked for, by name.
    """

    loses_heads = True

    def __init__(self, costs: CostModel, uses: Mapping[BlockName, Sequence[float]]) -> None:
        self._costs, self._uses = costs, uses

    def values(self, pieces: Sequence[IdlePiece], now: float) -> Sequence[float]:
        """What the next use of each saves, by how far away that is."""
        return [self._value(piece, now) for piece in pieces]

    def observe(self, piece: IdlePiece, *, is_used: bool) -> None:
        """It knows already."""

    def _value(self, piece: IdlePiece, now: float) -> float:
        uses = [self._uses.get(name, ()) for name in piece.names]
        following = [
            times[place] for times in uses if (place := bisect.bisect_right(times, now)) < len(times)
        ]
        return _saved_by_token(self._costs, piece) / (min(following) - now) if following else 0.0


def _saved_by_token(costs: CostModel, piece: IdlePiece) -> float:
    """Seconds that copying it back takes less than computing it again."""
    saved = recompute_seconds(costs, piece) - costs.swap_in_seconds(len(piece.names))
    return saved / piece.num_tokens


def recompute_seconds(costs: CostModel, piece: IdlePiece) -> float:
    """Seconds of computing a piece again, behind what is before it."""
    return costs.step_seconds(0, 0, piece.num_tokens, 1, int(piece.position))
