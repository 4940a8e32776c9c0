"""Another link to the host than the device has, for experiments: a slower one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

import jax

from jaxllm.errors import ConfigError
from jaxllm.executor.kv.copy_timer import CopyTimer
from jaxllm.executor.kv.swapper import BlockSwapper
from jaxllm.executor.model_executor import ModelExecutor
from jaxllm.types import HostBlock, HostPiece


def slow_down(
    executor: ModelExecutor,
    bytes_per_second: float | None,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Slow an executor's link to the host down in each direction; None lifts the limit.

    Args:
        executor: with host blocks, and no copies under way.
        bytes_per_second: what the link seems to carry; it can only be less than it does.
        clock: seconds of the slow link's time.

    Raises:
        ConfigError: the executor has no host blocks or copies some back, or the number is not positive.
    """
    if executor.swapper is None:
        raise ConfigError("there is no link to slow down: num_host_blocks=0 turns swaps off")
    if bytes_per_second is not None and not 0 < bytes_per_second < math.inf:
        raise ConfigError(f"bytes_per_second={bytes_per_second!r} must be a positive number or None")
    executor.swapper.settle()
    if executor.swapper.loads:
        raise ConfigError("the link cannot be changed while copies are under way; finish all requests first")
    executor.swapper = SlowLink(executor.swapper, bytes_per_second or math.inf, clock)


class SlowLink(BlockSwapper):
    """A swapper whose copies seem to take a slower link.

    A copy back waits until such a link would have done it, and the copy out before it.

    Args:
        swapper: whose host memory and programs it goes on with; not to be used any more.
        bytes_per_second: what the link seems to carry in each direction.
        clock: seconds of its time, by which copies are timed.
    """

    def __init__(
        self,
        swapper: BlockSwapper,
        bytes_per_second: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.__dict__.update(vars(swapper))
        self._rate, self._clock = bytes_per_second, clock
        self._leaving = {}
        self._out_timer = CopyTimer(is_out=True, begins_when_sent=False)
        self._in_timer = CopyTimer(is_out=False, begins_when_sent=True)
        self._looks_until_known = 0
        self.out_free_at = self.in_free_at = 0.0
        self._left_at: dict[int, float] = {}
        self._there_at: dict[int, float] = {}

    def swap_out(self, pool: jax.Array, handle: int, block_ids: Sequence[int]) -> None:
        """See `BlockSwapper`."""
        super().swap_out(pool, handle, block_ids)
        seconds = sum(piece.nbytes for piece in self.held(handle)) / self._rate
        self.out_free_at = max(self._clock(), self.out_free_at) + seconds
        self._left_at[handle] = self.out_free_at

    def swap_in(
        self, pool: jax.Array, block_ids: Sequence[int], host_blocks: Sequence[HostBlock]
    ) -> jax.Array:
        """See `BlockSwapper`."""
        if host_blocks:
            self._sleep_until(self._arrival(host_blocks))
        return super().swap_in(pool, block_ids, host_blocks)

    def load(self, handle: int, block_ids: Sequence[int], host_blocks: Sequence[HostBlock]) -> None:
        """See `BlockSwapper`."""
        super().load(handle, block_ids, host_blocks)
        self._there_at[handle] = self._arrival(host_blocks)

    def arrived(self) -> list[int]:
        """See `BlockSwapper`."""
        now = self._clock()
        return [handle for handle in super().arrived() if self._there_at[handle] <= now]

    def join(self, pool: jax.Array, handle: int) -> jax.Array:
        """See `BlockSwapper`."""
        there_at = self._there_at.pop(handle)
        if there_at > self._clock():
            self._out_timer.disturb()
        self._sleep_until(there_at)
        return super().join(pool, handle)

    def wait(self, handle: int) -> None:
        """See `BlockSwapper`."""
        super().wait(handle)
        self._sleep_until(self._left_at.get(handle, 0.0))

    def discard(self, handle: int) -> None:
        """See `BlockSwapper`."""
        super().discard(handle)
        del self._there_at[handle]

    def drop(self, piece: HostPiece) -> None:
        """See `BlockSwapper`."""
        super().drop(piece)
        if piece.handle not in self._pieces:
            self._left_at.pop(piece.handle, None)

    def _has_left(self, handle: int) -> bool:
        return super()._has_left(handle) and self._left_at.get(handle, 0.0) <= self._clock()

    def _arrival(self, host_blocks: Iterable[HostBlock]) -> float:
        """When the slow link will have brought what holds these blocks."""
        pieces = {place.piece for place in host_blocks}
        if not pieces:
            return 0.0
        num_bytes = sum(self._pieces[handle][number].nbytes for handle, number in pieces)
        left_at = [self._left_at.get(piece.handle, 0.0) for piece in pieces]
        self.in_free_at = max(self._clock(), self.in_free_at, *left_at) + num_bytes / self._rate
        return self.in_free_at

    def _sleep_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self._clock()))
