"""Queues of requests that wait for blocks, read in the order of a priority policy."""

from __future__ import annotations

import bisect
import collections
import enum
import heapq
import math
import numbers
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from jaxllm.errors import ConfigError, KVCacheError
from jaxllm.sched.policies import PriorityPolicy
from jaxllm.types import Request

_arrival_index = operator.attrgetter("arrival_index")


class Verdict(enum.Enum):
    """What a visit of a queued request leads to."""

    TAKE = "take"
    """It starts; the next one is visited."""
    SKIP = "skip"
    """It stays, and so do all that are at least as long."""
    SKIP_ONE = "skip one"
    """It stays; others of its length are visited."""
    STOP = "stop"
    """It stays, and the visit ends."""


class RequestQueue:
    """Requests that hold no device blocks, in the groups of a priority policy.

    Members of a group stay in order of arrival, so that only the first of each is ever compared: with
    lengths as groups, finding the most urgent of 100,000 requests looks at some hundred. Lengths of queued
    requests must not change.
    """

    def __init__(self, priority: PriorityPolicy) -> None:
        """An empty queue, read by `priority`."""
        self._priority = priority
        self._groups: dict[Hashable, list[Request]] = {}
        self._lengths: collections.Counter[int] = collections.Counter()
        self._shortest: int | None = None  # None if it must be looked for
        self._groups_are_lengths = True
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """All requests, in order of arrival."""
        members = [request for group in self._groups.values() for request in group]
        return iter(sorted(members, key=_arrival_index))

    @property
    def min_num_tokens(self) -> int:
        """Length of the shortest request in it; 0 if it is empty."""
        if self._shortest is None:
            self._shortest = min(self._lengths, default=0)
        return self._shortest

    def add(self, request: Request) -> None:
        """Put a request in its place by arrival."""
        key, length = self._priority.group(request), request.num_tokens
        if key != length:
            self._groups_are_lengths = False
        group = self._groups.setdefault(key, [])
        if group and group[-1].arrival_index > request.arrival_index:
            bisect.insort(group, request, key=_arrival_index)
        else:
            group.append(request)
        self._lengths[length] += 1
        if self._shortest is not None and (length < self._shortest or not self._size):
            self._shortest = length
        self._size += 1

    def remove(self, request: Request) -> None:
        """Take a request out.

        Raises:
            KVCacheError: it is not queued.
        """
        key = self._priority.group(request)
        group = self._groups.get(key, [])
        place = bisect.bisect_left(group, request.arrival_index, key=_arrival_index)
        if place == len(group) or group[place] is not request:
            raise KVCacheError(f"{request!r} is not in the queue")
        del group[place]
        if not group:
            del self._groups[key]
        self._lengths[request.num_tokens] -= 1
        if not self._lengths[request.num_tokens]:
            del self._lengths[request.num_tokens]
            if request.num_tokens == self._shortest:
                self._shortest = None
        self._size -= 1

    def _check_scores(self, requests: Sequence[Request], now: float) -> None:
        for request in requests:
            score = self._priority.score(request, now)
            if not isinstance(score, numbers.Real):
                raise ConfigError(
                    f"{self._priority} scores {request!r} with {score!r}, which is not a number"
                )

    def visit(
        self, now: float, judge: Callable[[Request], Verdict], too_long: float = math.inf
    ) -> list[Request]:
        """Ask `judge` about each request, the most urgent first; returns those to take, still queued.

        It is not asked about those of `too_long` tokens or more, which stay.
        """
        score = self._priority.score
        groups: Iterable[list[Request]] = self._groups.values()
        if self._groups_are_lengths and too_long < math.inf:
            groups = [group for group in groups if group[0].num_tokens < too_long]
        try:
            heads = [(-score(group[0], now), group[0].arrival_index, 0, group) for group in groups]
        except TypeError:
            self._check_scores([group[0] for group in groups], now)
            raise
        heapq.heapify(heads)
        taken: list[Request] = []
        shortest = 0
        while heads:
            _, _, place, group = heads[0]
            request = group[place]
            if request.num_tokens < too_long:
                verdict = judge(request)
                if verdict is Verdict.STOP:
                    break
                if verdict is Verdict.TAKE:
                    taken.append(request)
                elif verdict is Verdict.SKIP:
                    too_long = request.num_tokens
                    shortest = shortest or self.min_num_tokens
                    if too_long <= shortest:
                        break
            place += 1
            if place == len(group):
                heapq.heappop(heads)
            else:
                follower = group[place]
                heapq.heapreplace(heads, (-score(follower, now), follower.arrival_index, place, group))
        return taken
