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

_NUM_WAITS = 64

_Place = tuple[float, int]
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

    A group stays in order of urgency, so that only the first of each is ever compared: with lengths as
    groups, finding the most urgent of 100,000 requests looks at some hundred. Lengths of queued requests must
    not change.

    Attributes:
        num_tokens: of all of them.
    """

    def __init__(self, priority: PriorityPolicy) -> None:
        """An empty queue, read by `priority`."""
        self._priority = priority
        self._groups: dict[Hashable, _Group] = {}
        self._where: dict[str, tuple[Hashable, _Place]] = {}
        self._lengths: collections.defaultdict[int, int] = collections.defaultdict(int)
        self._shortest: int | None = None  # None if it must be looked for
        self._groups_are_lengths = True
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
        key, length = self._priority.group(request), request.num_tokens
        entry = self._place(request), request
        self._where[request.request_id] = key, entry[0]
        if key != length:
            self._groups_are_lengths = False
        group = self._groups.setdefault(key, collections.deque())
        if not group or group[-1][0] < entry[0]:
            group.append(entry)
        elif entry[0] < group[0][0]:
            group.appendleft(entry)
        else:
            group.insert(bisect.bisect_left(group, entry[0], key=operator.itemgetter(0)), entry)
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
        key, place = self._where.get(request.request_id, (None, (0.0, 0)))
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
        self, now: float, judge: Callable[[Request], Verdict], too_long: float = math.inf
    ) -> list[Request]:
        """Ask `judge` about each request, the most urgent first; returns those to take, still queued.

        It is not asked about those of `too_long` tokens or more, which stay.
        """
        score, by_length = self._score, self._groups_are_lengths
        heads = [
            (-score(group[0][1], now), group[0][1].arrival_index, 0, group)
            for group in self._groups.values()
            if not by_length or group[0][1].num_tokens < too_long
        ]
        heapq.heapify(heads)
        taken: list[Request] = []
        num_left = _MAX_LOOKED_PAST
        while heads and num_left:
            _, _, place, group = heads[0]
            request = group[place][1]
            if request.num_tokens < too_long:
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
            if place == len(group) or (by_length and request.num_tokens >= too_long):
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


class Waits:
    """How long new requests have waited, and how long they would have in order of arrival.

    They start at some pace, in whatever order. In order of arrival each would have started when as many
    prompt tokens had started as had come until it came, its own included.

    Attributes:
        new: those that wait, as they came, by id.
    """

    def __init__(self) -> None:
        """Nobody waits, and nobody ever did."""
        self.new: collections.OrderedDict[str, Request] = collections.OrderedDict()
        self._in_order: collections.deque[tuple[int, float]] = collections.deque()  # of those yet to start so
        self._num_come = self._num_started = 0  # prompt tokens
        self._longest: collections.deque[float] = collections.deque(maxlen=_NUM_WAITS)

    def begin(self, request: Request) -> None:
        """Let a new request wait; nothing happens if it is not new, or goes on with a conversation."""
        is_new = request.metrics.first_scheduled_time is None
        if is_new and request.program_arrival_time >= request.arrival_time:
            self._num_come += request.num_prompt_tokens
            self._in_order.append((self._num_come, request.arrival_time))
            self.new[request.request_id] = request

    def end(self, request: Request, now: float) -> None:
        """Let a request wait no longer, whatever the reason; nothing happens if it was not new."""
        if self.new.pop(request.request_id, None) is not None:
            self._num_started += request.num_prompt_tokens
            while self._in_order and self._in_order[0][0] <= self._num_started:
                self._longest.append(now - self._in_order.popleft()[1])

    def overdue(self, now: float, share: float) -> Request | None:
        """The new request that came first, if it waits longer by `share` than anybody would in that order.

        The longest of the last 64 waits in order of arrival counts, and that which has not ended.
        """
        if not self.new:
            return None
        first = next(iter(self.new.values()))
        longest = max(self._longest, default=0.0)
        if self._in_order:
            longest = max(longest, now - self._in_order[0][1])
        return first if now - first.arrival_time > (1.0 + share) * longest else None
