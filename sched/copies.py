"""Copies of swapped requests' KV: in host memory, on their way back, and what executors are told of them."""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence

from jaxllm.sched.block_manager import HostBudget
from jaxllm.types import Request, Swap


class HostCopies:
    """The copies of all swapped requests.

    A copy is made when its request is preempted, and read when the request comes back: by the iteration it
    decodes in, or by an earlier one that only starts to `load` it, until it joins the others; that of a head
    by the iteration which prefills the rest. Its host blocks are in flight until that iteration has ended. It
    may be given up at any moment; those of heads are where there is no room for others.
    """

    def __init__(self, num_blocks: int) -> None:
        """None yet, within `num_blocks` blocks of host memory."""
        self.budget = HostBudget(num_blocks)
        self._loading: dict[int, Swap] = {}
        self._joined: list[Swap] = []
        self._discarded: list[int] = []
        self._in_flight: collections.deque[tuple[int, tuple[Swap, ...]]] = collections.deque()
        self._heads: dict[int, Request] = {}  # executors were told of them
        self._new_heads: dict[int, Request] = {}

    @property
    def loading(self) -> list[Request]:
        """Requests whose copies are on their way back, while others decode."""
        return [swap.request for swap in self._loading.values()]

    @property
    def is_loading(self) -> bool:
        """Whether there are any."""
        return bool(self._loading)

    @property
    def num_head_blocks(self) -> int:
        """Host blocks that `make_room` may give up."""
        return sum(map(self.budget.size, self._heads))

    def make_room(self, num_blocks: int) -> list[Request]:
        """Give up heads, the oldest first, until so many blocks are free or none is left; returns whose."""
        given_up = []
        while self.budget.num_free < num_blocks and self._heads:
            request = next(iter(self._heads.values()))
            self.give_up(request)
            given_up.append(request)
        return given_up

    def make(self, request: Request, block_ids: Sequence[int], *, is_head: bool = False) -> Swap:
        """The copy to the host of a request that held `block_ids`, or of its head."""
        request.host_handle = self.budget.lend(len(block_ids))
        if is_head:
            self._new_heads[request.host_handle] = request
        return Swap(request, request.host_handle, tuple(block_ids))

    def num_blocks(self, request: Request) -> int:
        """Blocks of a request's copy; 0 if it has none."""
        return 0 if request.host_handle is None else self.budget.size(request.host_handle)

    def give_up(self, request: Request) -> None:
        """Forget a request's copy, also one that is being loaded; executors are told."""
        handle = _handle(request)
        self._loading.pop(handle, None)
        self.budget.cancel(handle)
        self._heads.pop(handle, None)
        self._discarded.append(handle)
        request.host_handle = None

    def unmake(self, request: Request) -> None:
        """Forget a copy that no executor was told of."""
        handle = _handle(request)
        self.budget.cancel(handle)
        self._new_heads.pop(handle, None)
        request.host_handle = None

    def load(self, swap: Swap) -> None:
        """Note that a copy is on its way back."""
        self._loading[swap.handle] = swap

    def arrived(self, handles: Collection[int]) -> list[Swap]:
        """The loads among `handles`, in the order they were started in."""
        return [swap for handle, swap in self._loading.items() if handle in handles]

    def first_loading(self) -> Swap:
        """The load that was started first."""
        return next(iter(self._loading.values()))

    def join(self, swap: Swap) -> None:
        """Let the next iteration end a load."""
        self.read(swap)
        self._joined.append(swap)

    def read(self, swap: Swap) -> None:
        """Let the iteration that is being decided read a copy; `emit` is told of it."""
        self._loading.pop(swap.handle, None)
        self._heads.pop(swap.handle, None)
        self.budget.start_return(swap.handle)
        swap.request.host_handle = None

    def leave(self, request: Request) -> None:
        """Forget that a request joined, if executors were not told yet."""
        for swap in self._joined:
            if swap.request is request:
                self.budget.finish_return(swap.handle)
                self._discarded.append(swap.handle)
        self._joined = [swap for swap in self._joined if swap.request is not request]

    def emit(self, step_id: int, swap_in: tuple[Swap, ...]) -> tuple[tuple[Swap, ...], tuple[int, ...]]:
        """What to tell executors with a step that reads `swap_in`: loads that end, and discarded handles."""
        joined, self._joined = tuple(self._joined), []
        discarded, self._discarded = tuple(self._discarded), []
        self._heads.update(self._new_heads)
        self._new_heads.clear()
        if joined or swap_in:
            self._in_flight.append((step_id, (*joined, *swap_in)))
        return joined, discarded

    def complete(self, step_id: int) -> None:
        """Free the host blocks of copies read by `step_id` and the steps before it."""
        while self._in_flight and self._in_flight[0][0] <= step_id:
            for swap in self._in_flight.popleft()[1]:
                self.budget.finish_return(swap.handle)


def _handle(request: Request) -> int:
    assert request.host_handle is not None  # whatever is swapped has one
    return request.host_handle
