"""The requests that decode, with calendars of what their next iterations need."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Collection, Iterator

from jaxllm.errors import KVCacheError
from jaxllm.types import DecodeClock, Request

_arrival_index = operator.attrgetter("arrival_index")


class RunningRequests:
    """Requests that decode together, in order of arrival.

    Each gains one token per iteration, so the iterations in which it needs a block (known modulo
    `block_size`) and in which it decodes last do not change while it is here: an iteration looks them up
    instead of asking every request, whose lengths follow the `clock`.
    """

    def __init__(self, block_size: int) -> None:
        """None yet, with blocks of `block_size` tokens."""
        self.requests: list[Request] = []
        self.clock = DecodeClock()
        self._block_size = block_size
        self._batch: tuple[Request, ...] | None = ()
        self._num_tokens = 0  # of all of them, less the ticks since they came
        # Dictionaries as sets that keep their order: a request leaves in no time, however many there are.
        self._growing: list[dict[Request, None]] = [{} for _ in range(block_size)]
        self._last_decodes: dict[int, dict[Request, None]] = {}

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __contains__(self, request: Request) -> bool:
        place = bisect.bisect_left(self.requests, request.arrival_index, key=_arrival_index)
        return request in self.requests[place : place + 1]

    @property
    def num_tokens(self) -> int:
        """Tokens of all of them."""
        return self._num_tokens + self.clock.ticks * len(self.requests)

    @property
    def growing(self) -> Collection[Request]:
        """Those whose next token needs another block."""
        return self._growing[self.clock.ticks % self._block_size]

    @property
    def filling(self) -> Collection[Request]:
        """Those whose next iteration computes the last token that their blocks hold."""
        return self._growing[(self.clock.ticks + 1) % self._block_size]

    def growing_within(self, num_steps: int) -> list[Request]:
        """Those that need another block for their next `num_steps` tokens, at most `block_size`."""
        phases = range(self.clock.ticks, self.clock.ticks + num_steps)
        return [request for phase in phases for request in self._growing[phase % self._block_size]]

    def num_steps_to_last(self, limit: int) -> int:
        """Decode iterations until somebody's last token by length, that one included; `limit` at most."""
        for num_steps in range(1, limit):
            if self.clock.ticks + num_steps - 1 in self._last_decodes:
                return num_steps
        return limit

    def join(self, request: Request) -> None:
        """Let a request decode from the next iteration on."""
        bisect.insort(self.requests, request, key=_arrival_index)
        base = request.follow(self.clock)
        self._num_tokens += base
        self._growing[(1 - base) % self._block_size][request] = None
        self._last_decodes.setdefault(request.max_total_tokens - base - 1, {})[request] = None
        self._batch = None

    def leave(self, request: Request) -> None:
        """Take a request out.

        Raises:
            ValueError: it is not running.
        """
        place = bisect.bisect_left(self.requests, request.arrival_index, key=_arrival_index)
        del self.requests[self.requests.index(request, place)]
        base = request.num_tokens - self.clock.ticks
        request.leave_clock()
        self._num_tokens -= base
        del self._growing[(1 - base) % self._block_size][request]
        last_decode = request.max_total_tokens - base - 1
        del self._last_decodes[last_decode][request]
        if not self._last_decodes[last_decode]:
            del self._last_decodes[last_decode]
        self._batch = None

    def advance(self, num_steps: int = 1) -> tuple[tuple[Request, ...], list[Request]]:
        """Schedule `num_steps` tokens of each, at most `num_steps_to_last`.

        Returns:
            The batch in order of arrival, and those of it whose last token is among them; they have left.
        """
        batch = self._batch
        if batch is None:
            batch = self._batch = tuple(self.requests)
        self.clock.ticks += num_steps
        ending = list(self._last_decodes.get(self.clock.ticks - 1, ()))
        for request in ending:
            self.leave(request)
        return batch, ending

    def check(self) -> None:
        """Verify order, lengths and calendars.

        Raises:
            KVCacheError: one is broken; the message says which.
        """
        requests = self.requests
        if any(a.arrival_index > b.arrival_index for a, b in itertools.pairwise(requests)):
            raise KVCacheError("scheduler invariant broken: the running requests are not in arrival order")
        for request in requests:
            base = request.num_tokens - self.clock.ticks
            if not request.num_computed_tokens + 1 == request.num_tokens < request.max_total_tokens:
                raise KVCacheError(
                    f"scheduler invariant broken: running {request} has computed "
                    f"{request.num_computed_tokens} tokens"
                )
            if request not in self._growing[(1 - base) % self._block_size]:
                raise KVCacheError(f"scheduler invariant broken: running {request} would not grow")
            if request not in self._last_decodes.get(request.max_total_tokens - base - 1, ()):
                raise KVCacheError(f"scheduler invariant broken: running {request} would not end")
        if self.num_tokens != sum(request.num_tokens for request in requests):
            raise KVCacheError(f"scheduler invariant broken: running requests have {self.num_tokens} tokens")
        for calendar in (self._growing, self._last_decodes.values()):
            if sum(map(len, calendar)) != len(requests):
                raise KVCacheError(
                    "scheduler invariant broken: a calendar holds a request that is not running"
                )
