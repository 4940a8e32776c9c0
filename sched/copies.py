"""Copies of swapped requests' KV: in host memory, on their way back, and what executors are told of them."""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence

from jaxllm.errors import KVCacheError
from jaxllm.types import Request, Swap


class HostCopies:
    """The copies of all swapped requests, within a number of blocks of host memory.

    A copy is made when its request is preempted, and read when the request comes back: by the iteration it
    goes on in, or by an earlier one that only starts to `load` it, until it joins the others. Its host blocks
    are in flight until that iteration has ended. It may be given up at any moment. Each has a handle that is
    never used again, so that whatever is still under way for one cannot be taken for another.

    Attributes:
        num_blocks: of host memory; 0 is a machine without any to swap to.
        num_free: those that neither hold a copy nor are in flight.
    """

    def __init__(self, num_blocks: int) -> None:
        """None yet."""
        self.num_blocks = self.num_free = num_blocks
        self._sizes: dict[int, int] = {}
        self._loading: dict[int, Swap] = {}
        self._joined: list[Swap] = []
        self._discarded: list[int] = []
        self._num_read = 0  # blocks that the next iteration reads
        self._in_flight: collections.deque[tuple[int, int]] = collections.deque()  # step id, blocks
        self._next_handle = 0

    @property
    def num_used(self) -> int:
        """Blocks that hold copies."""
        return sum(self._sizes.values())

    @property
    def num_in_flight(self) -> int:
        """Blocks whose copies have been read by iterations that have not ended."""
        return self._num_read + sum(num_blocks for _, num_blocks in self._in_flight)

    @property
    def loading(self) -> list[Request]:
        """Requests whose copies are on their way back, while others decode."""
        return [swap.request for swap in self._loading.values()]

    @property
    def num_loading(self) -> int:
        """How many there are."""
        return len(self._loading)

    def size(self, request: Request) -> int:
        """Blocks of a request's copy; 0 if it has none."""
        return 0 if request.host_handle is None else self._sizes[request.host_handle]

    def make(self, request: Request, block_ids: Sequence[int]) -> Swap:
        """The copy to the host of a request that held `block_ids`.

        Raises:
            KVCacheError: fewer blocks are free.
        """
        if not 0 < len(block_ids) <= self.num_free:
            raise KVCacheError(
                f"cannot take {len(block_ids)} host blocks: {self.num_free} of {self.num_blocks} are free"
            )
        self.num_free -= len(block_ids)
        handle = request.host_handle = self._next_handle
        self._next_handle += 1
        self._sizes[handle] = len(block_ids)
        return Swap(request, handle, tuple(block_ids))

    def give_up(self, request: Request) -> None:
        """Forget a request's copy, also one that is being loaded; executors are told."""
        handle = request.host_handle
        assert handle is not None  # whatever is swapped has one
        self._loading.pop(handle, None)
        self.num_free += self._sizes.pop(handle)
        self._discarded.append(handle)
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
        self._num_read += self._sizes.pop(swap.handle)
        swap.request.host_handle = None

    def leave(self, request: Request) -> bool:
        """Forget that a request joined, if executors were not told yet; whether they were not."""
        pending = [swap for swap in self._joined if swap.request is request]
        for swap in pending:
            self._num_read -= len(swap.block_ids)
            self.num_free += len(swap.block_ids)
            self._discarded.append(swap.handle)
            self._joined.remove(swap)
        return bool(pending)

    def emit(self, step_id: int) -> tuple[tuple[Swap, ...], tuple[int, ...]]:
        """What to tell executors with a step: loads that end, and discarded handles."""
        joined, self._joined = tuple(self._joined), []
        discarded, self._discarded = tuple(self._discarded), []
        if self._num_read:
            self._in_flight.append((step_id, self._num_read))
            self._num_read = 0
        return joined, discarded

    def complete(self, step_id: int) -> None:
        """Free the host blocks of copies read by `step_id` and the steps before it."""
        while self._in_flight and self._in_flight[0][0] <= step_id:
            self.num_free += self._in_flight.popleft()[1]

    def check(self) -> None:
        """Verify that the blocks add up.

        Raises:
            KVCacheError: they do not.
        """
        if self.num_free + self.num_used + self.num_in_flight != self.num_blocks or self.num_free < 0:
            raise KVCacheError(
                f"{self.num_free} free, {self.num_used} used and {self.num_in_flight} in-flight host blocks "
                f"are not the {self.num_blocks} there are"
            )
