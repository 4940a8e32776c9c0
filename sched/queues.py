"""Queues of requests that wait for blocks, read in the order of a priority policy."""

from __future__ import annotations

import bisect
import collections
import enum
import heapq
import math
import numbers
import operator
from collections.abc import Callable, Hashable, Iterator

from jaxllm.errors import ConfigError, KVCacheError, called, shown
from jaxllm.sched.policies.priority import PriorityPolicy
from jaxllm.types import Request

_MAX_LOOKED_PAST = 256
"""Requests that a visit leaves where they are before it ends, those of a group of too long ones apart."""

_Place = tuple[float, int]
_Key = tuple[bool, Hashable]  # whether they are later turns, and the policy's group
_Group = collections.deque[tuple[_Place, Request]]


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

    Later turns of conversations are in groups of their own. A group stays in order of urgency, so that only
    the first of each is ever compared: with lengths as groups, finding the most urgent of 100,000 requests
    looks at some hundred. Lengths of queued requests must not change.

    Attributes:
        num_tokens: of all of them.
    """

    def __init__(self, priority: PriorityPolicy) -> None:
        """An empty queue, read by `priority`."""
        self._priority = priority
        self._groups: dict[_Key, _Group] = {}
        self._where: dict[str, tuple[_Key, _Place]] = {}
        self._lengths: collections.defaultdict[int, int] = collections.defaultdict(int)
        self._shortest: int | None = None  # None if it must be looked for
        self._groups_are_lengths = True
        self._late_are_last = True  # in every group
        self._size = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """All requests, in order of arrival."""
        members = [request for group in self._groups.values() for _, request in group]
        return iter(sorted(members, key=operator.attrgetter("arrival_index")))

    @property
    def min_num_tokens(self) -> int:
        """Length of the shortest request in it; 0 if it is empty."""
        if self._shortest is None:
            self._shortest = min(self._lengths, default=0)
        return self._shortest

    def add(self, request: Request) -> None:
        """Put a request in its place.

        Raises:
            ConfigError: the policy scores it with something that is not a number.
        """
        group_of_policy, length = self._priority.group(request), request.num_tokens
        entry, key = (self._place(request), request), (request.goes_on, group_of_policy)
        self._where[request.request_id] = key, entry[0]
        if group_of_policy != length:
            self._groups_are_lengths = False
        group = self._groups.setdefault(key, collections.deque())
        index = len(group)
        if group and not group[-1][0] < entry[0]:
            index = bisect.bisect_left(group, entry[0], key=operator.itemgetter(0))
        group.insert(index, entry)
        beside = range(max(0, index - 1), min(index + 2, len(group)))
        came = [group[place][1].arrival_time for place in beside]
        self._late_are_last &= came == sorted(came)
        self._lengths[length] += 1
        if self._shortest is not None and (length < self._shortest or not self._size):
            self._shortest = length
        self._size += 1
        self.num_tokens += length

    def remove(self, request: Request) -> None:
        """Take a request out.

        Raises:
            KVCacheError: it is not queued.
        """
        key, place = self._where.get(request.request_id, ((False, None), (0.0, 0)))
        group = self._groups.get(key, ())
        index = 0
        if group and group[0][1] is not request:
            index = bisect.bisect_left(group, place, key=operator.itemgetter(0))
        if index == len(group) or group[index][1] is not request:
            raise KVCacheError(f"{request!r} is not in the queue")
        del group[index], self._where[request.request_id]
        if not group:
            del self._groups[key]
        length = request.num_tokens
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]
            if length == self._shortest:
                self._shortest = None
        self._size -= 1
        self.num_tokens -= length

    def visit(
        self,
        now: float,
        judge: Callable[[Request], Verdict],
        too_long: float = math.inf,
        latest: float = math.inf,
    ) -> list[Request]:
        """Ask `judge` about each request, the most urgent first; returns those to take, still queued.

        It is not asked about those of `too_long` tokens or more, which stay, nor about those that came after
        `latest`, unless they go on with a conversation.
        """
        score, by_length = self._score, self._groups_are_lengths
        heads = [
            (-score(group[0][1], now), group[0][1].arrival_index, 0, group)
            for (is_turn, _), group in self._groups.items()
            if not by_length or group[0][1].num_tokens < too_long
            if is_turn or group[0][1].arrival_time <= latest or not self._late_are_last
        ]
        heapq.heapify(heads)
        taken: list[Request] = []
        num_left = _MAX_LOOKED_PAST
        while heads and num_left:
            _, _, place, group = heads[0]
            request = group[place][1]
            is_late = request.arrival_time > latest and not request.goes_on
            if is_late:
                pass  # it is not looked past, either
            elif request.num_tokens < too_long:
                verdict = judge(request)
                if verdict is Verdict.STOP:
                    break
                if verdict is Verdict.TAKE:
                    taken.append(request)
                else:
                    num_left -= 1
                    if verdict is Verdict.SKIP:
                        too_long = request.num_tokens
            elif not by_length:
                num_left -= 1
            place += 1
            are_too_long = by_length and request.num_tokens >= too_long
            if place == len(group) or are_too_long or (is_late and self._late_are_last):
                heapq.heappop(heads)
            else:
                follower = group[place][1]
                heapq.heapreplace(heads, (-score(follower, now), follower.arrival_index, place, group))
        return taken

    def _place(self, request: Request) -> _Place:
        """Where a request stands in its group."""
        return -self._score(request, 0.0), request.arrival_index

    def _score(self, request: Request, now: float) -> float:
        score = self._priority.score(request, now)
        if (type(score) is not float and not isinstance(score, numbers.Real)) or score != score:
            raise ConfigError(
                f"{called(self._priority)} scores {request!r} with {shown(score)}, which is not a number"
            )
        return score
