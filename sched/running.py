"""The running requests, with calendars of what their next decode iterations need."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterator

from jaxllm.errors import KVCacheError
from jaxllm.types import Request

_arrival_index = operator.attrgetter("arrival_index")


class RunningRequests:
    """Requests that decode together, in order of arrival.

    Each gains one token per iteration, so the iterations in which it needs a block (known modulo
    `block_size`) and in which it decodes last do not change while it is here: an iteration looks them up
    instead of asking every request.
    """

    def __init__(self, block_size: int) -> None:
        """None yet, with blocks of `block_size` tokens."""
        self.requests: list[Request] = []
        self._block_size = block_size
        self._growing: list[list[Request]] = [[] for _ in range(block_size)]
        self._last_decodes: dict[int, list[Request]] = {}
        self._num_decodes = 0

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __contains__(self, request: Request) -> bool:
        place = bisect.bisect_left(self.requests, request.arrival_index, key=_arrival_index)
        return request in self.requests[place : place + 1]

    @property
    def growing(self) -> list[Request]:
        """Those whose next token needs another block."""
        return self._growing[self._num_decodes % self._block_size]

    def growing_within(self, num_steps: int) -> list[Request]:
        """Those that need another block for their next `num_steps` tokens, at most `block_size`."""
        phases = range(self._num_decodes, self._num_decodes + num_steps)
        return [request for phase in phases for request in self._growing[phase % self._block_size]]

    def num_steps_to_last(self, limit: int) -> int:
        """Decode iterations until somebody's last token by length, that one included; `limit` at most."""
        for num_steps in range(1, limit):
            if self._num_decodes + num_steps - 1 in self._last_decodes:
                return num_steps
        return limit

    def join(self, request: Request) -> None:
        """Let a request decode from the next iteration on."""
        bisect.insort(self.requests, request, key=_arrival_index)
        self._growing[self._growth_phase(request)].append(request)
        self._last_decodes.setdefault(self._last_decode(request), []).append(request)

    def leave(self, request: Request) -> None:
        """Take a request out.

        Raises:
            ValueError: it is not running.
        """
        place = bisect.bisect_left(self.requests, request.arrival_index, key=_arrival_index)
        del self.requests[self.requests.index(request, place)]
        self._growing[self._growth_phase(request)].remove(request)
        last_decode = self._last_decode(request)
        self._last_decodes[last_decode].remove(request)
        if not self._last_decodes[last_decode]:
            del self._last_decodes[last_decode]

    def advance(self, num_steps: int = 1) -> tuple[tuple[Request, ...], list[Request]]:
        """Schedule `num_steps` tokens of each, at most `num_steps_to_last`.

        Returns:
            The batch in order of arrival, and those of it whose last token is among them; they have left.
        """
        batch = tuple(self.requests)
        for request in batch:  # the hot loop
            num_tokens = request.num_tokens + num_steps
            request.num_computed_tokens = num_tokens - 1
            request.num_tokens = num_tokens
        self._num_decodes += num_steps
        ending = list(self._last_decodes.get(self._num_decodes - 1, ()))
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
            if not request.num_computed_tokens + 1 == request.num_tokens < request.max_total_tokens:
                raise KVCacheError(
                    f"scheduler invariant broken: running {request} has computed "
                    f"{request.num_computed_tokens} tokens"
                )
            if request not in self._growing[self._growth_phase(request)]:
                raise KVCacheError(f"scheduler invariant broken: running {request} would not grow")
            if request not in self._last_decodes.get(self._last_decode(request), ()):
                raise KVCacheError(f"scheduler invariant broken: running {request} would not end")
        for calendar in (self._growing, self._last_decodes.values()):
            if sum(map(len, calendar)) != len(requests):
                raise KVCacheError(
                    "scheduler invariant broken: a calendar holds a request that is not running"
                )

    def _growth_phase(self, request: Request) -> int:
        """The decode iteration, modulo `block_size`, in which a request needs a new block."""
        return (self._num_decodes + 1 - request.num_tokens) % self._block_size

    def _last_decode(self, request: Request) -> int:
        """The decode iteration that samples a request's last token by length."""
        return self._num_decodes - 1 + request.max_total_tokens - request.num_tokens
