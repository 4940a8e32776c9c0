"""`Feed`: when the requests of a trace are sent, be it to the engine or to the simulator."""

from __future__ import annotations

import heapq
import itertools

from jaxllm.research.workloads.checks import MAX_SECONDS, check_number
from jaxllm.research.workloads.trace import Trace

_GOLDEN = (5**0.5 - 1) / 2
"""The fractions of its multiples are spread evenly, however many there are."""


class Feed:
    """The requests of `trace`, one after another, as they become due.

    In an open loop a request is due at its arrival time. In a closed one whoever of the clients has thought
    longest enough sends the next request, so that the trace's order is that of sending, and the n-th think
    time that of the n-th to be waited for. A request that follows another is due its think time after that
    one's answer.

    Args:
        trace: whose requests.
        start: when the trace begins, in seconds of the caller's clock.
        client_seconds: what a client takes, beside its think time, from an answer to the next request: so
            much on average, and from half to one and a half of it, since clients that always
            take the same march in step.
        ingress_seconds: how long a request is under way before `send` gives it.

    Raises:
        ConfigError: seconds are none.

    Attributes:
        num_sent: how many requests have been sent.
    """

    def __init__(
        self,
        trace: Trace,
        start: float = 0.0,
        *,
        client_seconds: float = 0.0,
        ingress_seconds: float = 0.0,
    ) -> None:
        self.num_sent = 0
        self._trace, self._count = trace, len(trace)
        self._client_seconds = check_number("client_seconds", client_seconds, 0.0, MAX_SECONDS)
        self._ingress_seconds = check_number("ingress_seconds", ingress_seconds, 0.0, MAX_SECONDS)
        self._due: list[tuple[float, int]] = []  # with the place in the trace, or in the order of sending
        self._followers: dict[int, list[int]] = {}
        self._num_unthought = self._num_answered = 0
        if not trace.num_clients:
            times = (trace.arrival_times + (start - trace.arrival_times[0])).tolist()
            for index, time in enumerate(times):
                if trace.followed(index) >= 0:
                    self._followers.setdefault(trace.followed(index), []).append(index)
                else:
                    self._due.append((time + ingress_seconds, index))
            return
        think = itertools.repeat(0.0) if trace.think_times is None else iter(trace.think_times.tolist())
        self._think = think
        self._num_unthought = self._count
        for _ in range(min(trace.num_clients, self._count)):
            self._think_again(start)

    @property
    def is_over(self) -> bool:
        """Whether all have been sent."""
        return self.num_sent == self._count

    @property
    def next_due(self) -> float | None:
        """When the next one is to be given; None if somebody must be answered first, or all have been."""
        return self._due[0][0] if self._due else None

    def send(self, now: float) -> tuple[int, float] | None:
        """Index and time of sending of the next request that is there by `now`; None if there is none."""
        if not self._due or self._due[0][0] > now:
            return None
        time, index = heapq.heappop(self._due)
        if self._trace.num_clients:
            index = self.num_sent
        self.num_sent += 1
        return index, time - self._ingress_seconds

    def answered(self, now: float, index: int = -1) -> None:
        """Note that one of the clients has its answer; in conversations, that a request has."""
        self._num_answered += 1
        now += self._client_seconds * (0.5 + self._num_answered * _GOLDEN % 1.0)
        if self._num_unthought:
            self._think_again(now)
        for follower in self._followers.pop(index, ()):
            think = self._trace.think_times
            due = now + (0.0 if think is None else float(think[follower]))
            heapq.heappush(self._due, (due + self._ingress_seconds, follower))

    def _think_again(self, now: float) -> None:
        self._num_unthought -= 1
        due = now + next(self._think) + self._ingress_seconds
        heapq.heappush(self._due, (due, self._count - self._num_unthought))
