"""What a KV block holds, as a name: equal prefixes of tokens have blocks of equal names.

A name is of the tokens of a full block and of all before it, since these are what its keys and values depend
on. Names are chained: each holds a digest of the name before it.

Where a conversation was cut, new keys and values do not depend on what is gone. Blocks of such have names of
their own, still of all tokens and the same for every cut, which only conversations that are cut look up.
"""

from __future__ import annotations

import array
import collections
import hashlib
import itertools
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from jaxllm.types import BlockName

_DIGEST_BYTES = 16
_ITEMSIZE = 4
_NUM_REMEMBERED = 64

Place = TypeVar("Place")


def root(cache_salt: str | None = None) -> bytes:
    """What the first block's name is chained to; caches of other salts share nothing."""
    if cache_salt is None:
        return b""
    return hashlib.blake2b(b"salt:" + cache_salt.encode(), digest_size=_DIGEST_BYTES).digest()


def names_of(
    token_ids: Sequence[int], block_size: int, before: bytes, first_number: int = 0
) -> list[BlockName]:
    """Names of the full blocks of `token_ids`, which follow `first_number` blocks of the digest `before`."""
    size = block_size * _ITEMSIZE
    num_blocks = len(token_ids) // block_size
    content = array.array("i", token_ids[: num_blocks * block_size]).tobytes()
    names, blake2b = [], hashlib.blake2b
    for number, start in enumerate(range(0, num_blocks * size, size), first_number):
        tokens = content[start : start + size]
        before = blake2b(before + tokens, digest_size=_DIGEST_BYTES).digest()
        names.append(BlockName(before, tokens, number))
    return names


def cut_name(name: BlockName) -> BlockName:
    """What a block of this name is called if it is computed after tokens before it were cut."""
    digest = hashlib.blake2b(name.digest, digest_size=_DIGEST_BYTES, person=b"cut").digest()
    return name._replace(digest=digest)


class FileIndex(Protocol):
    """What is in files."""

    def __contains__(self, name: BlockName) -> bool:
        """Whether a block seems to be there."""
        ...


class Absence(NamedTuple):
    """Of a sequence's first `stop` names those from `first` on had no block when `num_added` had got one."""

    first: int
    stop: int
    num_added: int


class NameIndex(Generic[Place]):
    """Where the blocks of names are in one tier, and how many of those who wait would find one.

    Attributes:
        places: by name, those that got it first first; no name is without.
        num_added: names that ever got their first block.
    """

    __slots__ = (
        "_added",
        "_collects_unwatched",
        "_num_found",
        "_num_watching",
        "_unwatched",
        "_watched",
        "num_added",
        "places",
    )

    def __init__(self) -> None:
        """No names, and nobody who waits."""
        self.places: dict[BlockName, list[Place]] = {}
        self._watched: dict[BlockName, int] = {}
        self._collects_unwatched = False
        self._unwatched: list[BlockName] = []
        self._num_watching = self._num_found = 0  # watchers; and of the names they watch those of a block
        self.num_added = 0
        self._added: collections.deque[BlockName] = collections.deque(maxlen=_NUM_REMEMBERED)

    def add(self, name: BlockName, place: Place) -> None:
        """Let a block be found."""
        if (places := self.places.get(name)) is not None:
            places.append(place)
            return
        self.places[name] = [place]
        self.num_added += 1
        self._added.append(name)
        if self._watched:
            self._num_found += name in self._watched

    def remove(self, name: BlockName, place: Place) -> None:
        """Let a block not be found any more."""
        places = self.places[name]
        places.remove(place)
        if not places:
            del self.places[name]
            self._num_found -= name in self._watched

    def first(self, name: BlockName) -> Place | None:
        """Where a block of this name is, if there is one."""
        places = self.places.get(name)
        return None if places is None else places[0]

    def added_since(self, num_added: int) -> list[BlockName] | None:
        """Names that got their first block since there were so many; None if too many did."""
        count = self.num_added - num_added
        if count > len(self._added):
            return None
        return list(itertools.islice(self._added, len(self._added) - count, None))

    def absence(self, names: Sequence[BlockName]) -> Absence:
        """Which names at a sequence's end have no block."""
        first = len(names)
        while first and names[first - 1] not in self.places:
            first -= 1
        return Absence(first, len(names), self.num_added)

    def clear(self) -> None:
        """Let no block be found."""
        self.places = {}
        self._num_found = 0

    def watch(self, name: BlockName) -> None:
        """Count somebody who would find a block of this name."""
        self._num_watching += 1
        count = self._watched.get(name, 0)
        self._watched[name] = count + 1
        self._num_found += not count and name in self.places

    def unwatch(self, name: BlockName) -> None:
        """Take back a `watch`."""
        self._num_watching -= 1
        count = self._watched[name] - 1
        if count:
            self._watched[name] = count
            return
        del self._watched[name]
        if name in self.places:
            self._num_found -= 1
            if self._collects_unwatched:
                self._unwatched.append(name)

    def collect_unwatched(self) -> None:
        """Remember from now on what nobody watches any more, until `take_unwatched`."""
        self._collects_unwatched = True

    def take_unwatched(self) -> list[BlockName]:
        """Names of blocks that nobody watches any more since the last time."""
        unwatched, self._unwatched = self._unwatched, []
        return unwatched

    def is_watched(self, name: BlockName | None) -> bool:
        """Whether somebody would find a block of this name."""
        return name in self._watched

    @property
    def may_find(self) -> bool:
        """Whether any who watch would find a block now, or one of each other's."""
        return self._num_found > 0 or len(self._watched) < self._num_watching

    def is_consistent(self) -> bool:
        """Whether its counts are right."""
        return all(self.places.values()) and self._num_found == len(self._watched.keys() & self.places.keys())
