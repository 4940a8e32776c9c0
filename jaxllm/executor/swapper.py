"""Copies KV blocks between the device's pool and pinned host memory."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

_LARGEST_PIECE = 16  # blocks
MAX_STAGED_BLOCKS = 32
"""Blocks of device memory beside the pool that copies under way may take, in each direction."""


class BlockSwapper:
    """Moves the blocks of a request out of the pool and back, in pieces of 1, 2, 4, ... blocks.

    A request's blocks are cut into such pieces without padding, so that few programs are compiled and no
    byte is moved for nothing. Going out, a piece is read into an array of its own by a device program, in
    order with the steps, so that the pool's blocks may be written right after; the copy to the host then
    runs beside the next steps. Coming back, the copy to the device runs ahead of the program that writes
    the piece into the pool. Each piece is a pinned-host array of its own; arrays never change, so a piece
    that is dropped while it is being copied disturbs nobody. Every number comes back with the bits it had;
    only on CPUs, where XLA emulates 16-bit floats, a signalling NaN comes back as a quiet one.

    Args:
        device: where the pool is.
        max_blocks: most blocks of one request.
        bandwidth_limit: for experiments, bytes per second that the link seems to carry in each direction: a
            copy back waits until such a link would have done it, and the copy out before it. It can only slow
            the real one down.
    """

    def __init__(self, device: jax.Device, max_blocks: int, *, bandwidth_limit: float | None = None) -> None:
        self._on_device = SingleDeviceSharding(device)
        self._on_host = SingleDeviceSharding(device, memory_kind="pinned_host")
        self.sizes = _piece_sizes(max_blocks)
        self._gather, self._scatter = _jitted()
        self._pieces: dict[int, list[jax.Array]] = {}
        self._staged: collections.deque[jax.Array] = collections.deque()
        self._num_staged = 0
        self.bandwidth_limit = bandwidth_limit
        self._out_done_at: dict[int, float] = {}
        self._out_free_at = self._in_free_at = 0.0

    @property
    def handles(self) -> frozenset[int]:
        """What is in host memory or on its way there."""
        return frozenset(self._pieces)

    @staticmethod
    def programs(pool: Any, max_blocks: int) -> Iterator[tuple[str, jax.stages.Wrapped, tuple[Any, ...]]]:
        """Names, functions and abstract arguments of every program that swaps a `pool` of this shape."""
        gather, scatter = _jitted()
        for size in _piece_sizes(max_blocks):
            ids = jax.ShapeDtypeStruct((size,), jnp.int32)
            piece = jax.ShapeDtypeStruct((size, *pool.shape[1:]), pool.dtype)
            yield f"swap out of {size}", gather, (pool, ids)
            yield f"swap in of {size}", scatter, (pool, ids, piece)

    def warm_up(self, pool: jax.Array) -> jax.Array:
        """Compile every program; returns the pool with the contents it had."""
        for size in self.sizes:
            ids = np.arange(size, dtype=np.int32) % pool.shape[0]
            piece = jax.device_put(self._gather(pool, ids), self._on_host)
            pool = self._scatter(pool, ids, jax.device_put(piece, self._on_device))
        return pool

    def swap_out(self, pool: jax.Array, handle: int, block_ids: Sequence[int]) -> None:
        """Read blocks out of `pool` and start their copy to the host.

        Waits for the oldest copies while more than `MAX_STAGED_BLOCKS` are under way.
        """
        self._pieces[handle] = pieces = []
        for ids in self._cut(block_ids):
            self._trim_staged(MAX_STAGED_BLOCKS - len(ids))
            piece = jax.device_put(self._gather(pool, ids), self._on_host)
            pieces.append(piece)
            self._staged.append(piece)
            self._num_staged += len(ids)
        if self.bandwidth_limit is not None:
            seconds = sum(piece.nbytes for piece in pieces) / self.bandwidth_limit
            self._out_free_at = max(time.perf_counter(), self._out_free_at) + seconds
            self._out_done_at[handle] = self._out_free_at

    def swap_in(
        self, pool: jax.Array, handle: int, block_ids: Sequence[int], num_intact: int = 0
    ) -> jax.Array:
        """Write a request's blocks, which may have other ids than before, into the donated `pool`.

        Of the first `num_intact`, which hold their contents, only those that share a piece with a later one
        are written. Waits for the device after every `MAX_STAGED_BLOCKS`.
        """
        self._trim_staged(MAX_STAGED_BLOCKS)
        pieces = self._pieces.pop(handle)
        missing, end = [], 0
        for ids, piece in zip(self._cut(block_ids), pieces, strict=True):
            end += len(ids)
            if end > num_intact:
                missing.append((ids, piece))
        self._wait_for_limit(handle, sum(piece.nbytes for _, piece in missing))
        num_staged = 0
        for ids, piece in missing:
            if num_staged + len(ids) > MAX_STAGED_BLOCKS:
                pool, num_staged = jax.block_until_ready(pool), 0
            pool = self._scatter(pool, ids, jax.device_put(piece, self._on_device))
            num_staged += len(ids)
        return pool

    def wait(self, handle: int) -> None:
        """Wait until a copy has reached the host."""
        jax.block_until_ready(self._pieces[handle])
        if handle in self._out_done_at:
            time.sleep(max(0.0, self._out_done_at[handle] - time.perf_counter()))

    def discard(self, handle: int) -> None:
        """Forget a copy that nobody will read."""
        del self._pieces[handle]
        self._out_done_at.pop(handle, None)
        self._trim_staged(MAX_STAGED_BLOCKS)

    def _trim_staged(self, limit: int) -> None:
        """Let go of copies that have left, and wait for the oldest until at most `limit` blocks have not."""
        staged = self._staged
        while staged and (self._num_staged > limit or staged[0].is_ready()):  # type: ignore[attr-defined]
            piece = staged.popleft()
            self._num_staged -= piece.shape[0]
            piece.block_until_ready()

    def _wait_for_limit(self, handle: int, num_bytes: int) -> None:
        """Wait until a link of the speed of `bandwidth_limit` would have brought `num_bytes` back."""
        copied_out = self._out_done_at.pop(handle, 0.0)
        if num_bytes and self.bandwidth_limit is not None:
            start = max(time.perf_counter(), copied_out, self._in_free_at)
            self._in_free_at = start + num_bytes / self.bandwidth_limit
            time.sleep(max(0.0, self._in_free_at - time.perf_counter()))

    def _cut(self, block_ids: Sequence[int]) -> list[np.ndarray]:
        ids, pieces = np.asarray(block_ids, np.int32), []
        for size in self.sizes:
            while len(ids) >= size:
                pieces.append(ids[:size])
                ids = ids[size:]
        return pieces


def _piece_sizes(max_blocks: int) -> tuple[int, ...]:
    """Powers of two, the largest first."""
    sizes = [1]
    while 2 * sizes[-1] <= min(max_blocks, _LARGEST_PIECE):
        sizes.append(2 * sizes[-1])
    return tuple(reversed(sizes))


def _jitted() -> tuple[jax.stages.Wrapped, jax.stages.Wrapped]:
    return jax.jit(_gather), jax.jit(_scatter, donate_argnums=0)


def _gather(pool: jax.Array, ids: jax.Array) -> jax.Array:
    """Blocks `ids` [n] of the pool, one after another."""
    return jnp.concatenate([lax.dynamic_slice_in_dim(pool, ids[i], 1) for i in range(ids.shape[0])])


def _scatter(pool: jax.Array, ids: jax.Array, blocks: jax.Array) -> jax.Array:
    """The pool with `blocks` at `ids` [n], in place if it is donated."""

    def write(i: jax.Array, pool: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(pool, lax.dynamic_slice_in_dim(blocks, i, 1), ids[i], 0)

    return lax.fori_loop(0, ids.shape[0], write, pool)
