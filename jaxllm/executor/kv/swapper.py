"""Copies KV blocks between the device's pool and pinned host memory."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllm.executor.kv.copy_timer import CopyTimer
from jaxllm.executor.placement import ANYWHERE, BY_KV_HEADS, ON_EACH, Placement
from jaxllm.types import (
    MAX_PIECE_BLOCKS,
    MAX_STAGED_BLOCKS,
    CopyProgress,
    HostBlock,
    HostPiece,
    piece_sizes,
)

Piece = tuple[np.ndarray, jax.Array]
"""Block ids, and their contents on the host or the device; ids from `_UNWANTED` on are of no block."""

_UNWANTED = np.iinfo(np.int32).max - MAX_PIECE_BLOCKS


@dataclasses.dataclass
class _Load:
    """A copy back that runs beside the steps: pieces still on the host, and those on their way."""

    waiting: collections.deque[Piece]
    staged: collections.deque[Piece] = dataclasses.field(default_factory=collections.deque)

    @property
    def num_blocks(self) -> int:
        """Blocks that are not in the pool."""
        return self.num_staged + sum(len(ids) for ids, _ in self.waiting)

    @property
    def num_staged(self) -> int:
        """Blocks of device memory it takes beside the pool."""
        return sum(len(ids) for ids, _ in self.staged)

    @property
    def has_arrived(self) -> bool:
        """Whether everything is on the device."""
        return not self.waiting and all(_is_ready(piece) for _, piece in self.staged)


class BlockSwapper:
    """Moves blocks out of the pool and back, in pieces of 1, 2, 4, ... blocks.

    Blocks that are copied out together are cut into such pieces without padding, so that few programs are
    compiled. Going out, a piece is read into an array of its own by a device program, in order with the
    steps, so that the pool's blocks may be written right after; the copy to the host then runs beside the
    next steps. Coming back, the copy to the device runs ahead of the program that writes the piece into the
    pool: of the next step only (`swap_in`), or of as many as it takes (`load`, then `join` when it is in
    `arrived`). A piece comes as a whole; blocks of it that nobody wants are not written. Each piece is a
    pinned-host array of its own, until it is dropped; arrays never change, so a piece that is dropped while
    it is being copied disturbs nobody. Every number comes back with the bits it had; only on CPUs, where XLA
    emulates floats of 16 and 8 bits, a NaN may come back as another one.

    Args:
        placement: of the pool. Of several devices each copies its heads, and a piece on the host has all.
        max_blocks: most blocks of one request.
        wait: for arrays to be computed.
    """

    def __init__(
        self, placement: Placement, max_blocks: int, wait: Callable[[Any], Any] = jax.block_until_ready
    ) -> None:
        self._placement, self._wait = placement, wait
        self._on_device = placement.sharding(BY_KV_HEADS)
        self._on_host = placement.sharding(BY_KV_HEADS, memory_kind="pinned_host")
        self.sizes = _program_sizes(max_blocks)
        self._gather, self._scatter = _jitted(placement)
        self._pieces: dict[int, dict[int, jax.Array]] = {}  # by handle and number
        self._leaving: dict[int, list[jax.Array]] = {}  # those of copies out that are timed
        self._loads: dict[int, _Load] = {}
        self._staged: collections.deque[jax.Array] = collections.deque()
        self._num_staged = 0
        self._clock: Callable[[], float] = time.perf_counter
        self._out_timer = CopyTimer(is_out=True, begins_when_sent=False)
        self._in_timer = CopyTimer(is_out=False, begins_when_sent=True)
        self._looks_until_known = 0  # copies that steps wait for are not looked at

    @property
    def pieces(self) -> frozenset[HostPiece]:
        """What is in host memory, or on its way there."""
        return frozenset(HostPiece(handle, one) for handle, pieces in self._pieces.items() for one in pieces)

    @property
    def loads(self) -> frozenset[int]:
        """Copies back that are neither joined nor discarded."""
        return frozenset(self._loads)

    @staticmethod
    def programs(
        pool: Any, max_blocks: int, placement: Placement = ANYWHERE
    ) -> Iterator[tuple[str, jax.stages.Wrapped, tuple[Any, ...]]]:
        """Names, functions and abstract arguments of every program that swaps a device's `pool` like this."""
        gather, scatter = _jitted(placement)
        for size in _program_sizes(max_blocks):
            ids = jax.ShapeDtypeStruct((size,), jnp.int32)
            piece = jax.ShapeDtypeStruct((size, *pool.shape[1:]), pool.dtype)
            arguments = placement.structs((pool, ids, piece), (BY_KV_HEADS, ON_EACH, BY_KV_HEADS))
            yield f"swap out of {size}", gather, arguments[:2]
            yield f"swap in of {size}", scatter, arguments

    def warm_up(self, pool: jax.Array) -> jax.Array:
        """Compile every program; returns the pool with the contents it had."""
        for size in self.sizes:
            ids = np.arange(size, dtype=np.int32)
            if size > len(pool):
                continue  # no request has so many
            piece = jax.device_put(self._gather(pool, ids), self._on_host)
            pool = self._scatter(pool, ids, jax.device_put(piece, self._on_device))
        return pool

    def swap_out(self, pool: jax.Array, handle: int, block_ids: Sequence[int]) -> None:
        """Read blocks out of `pool` and start their copy to the host.

        Waits for the oldest copies while more than `MAX_STAGED_BLOCKS` are under way.
        """
        self._pieces[handle] = pieces = {}
        is_known = len(block_ids) <= MAX_STAGED_BLOCKS  # else its parts are sent one after another
        self._out_timer.send(handle, len(block_ids), self._clock(), is_known=is_known)
        for number, ids in reversed(list(enumerate(_cut(block_ids)))):
            self._trim_staged(MAX_STAGED_BLOCKS - len(ids))
            piece = jax.device_put(self._gather(pool, ids), self._on_host)
            pieces[number] = piece
            self._staged.append(piece)
            self._num_staged += len(ids)
        self._leaving[handle] = list(pieces.values())

    def swap_in(
        self, pool: jax.Array, block_ids: Sequence[int], host_blocks: Sequence[HostBlock]
    ) -> jax.Array:
        """Write blocks of the host, which stay there, into the donated `pool`.

        Waits for the device after every `MAX_STAGED_BLOCKS`.
        """
        if not host_blocks:
            return pool
        self._trim_staged(MAX_STAGED_BLOCKS)
        self._looks_until_known = 2  # one while the step before it runs, one while its own does
        return self._write(pool, self._gathered(block_ids, host_blocks))

    def load(self, handle: int, block_ids: Sequence[int], host_blocks: Sequence[HostBlock]) -> None:
        """Start to copy blocks of the host back, where they stay, too.

        The device's are the load's own until `join` or `discard`. At most `MAX_STAGED_BLOCKS` at a time are
        on their way, or one piece; `advance` starts the others.
        """
        self._trim_staged(MAX_STAGED_BLOCKS)
        now, is_known = self._clock(), not self._looks_until_known
        handles = {place.handle for place in host_blocks}
        is_known = is_known and all(self._has_left(one) for one in handles)
        pieces = self._gathered(block_ids, host_blocks)
        num_blocks = sum(len(ids) for ids, _ in pieces)
        num_loading = num_blocks + sum(load.num_blocks for load in self._loads.values())
        is_known = is_known and num_loading <= MAX_STAGED_BLOCKS  # else parts of it wait for steps
        self._in_timer.send(handle, num_blocks, now, is_known=is_known)
        self._loads[handle] = _Load(collections.deque(pieces))
        self._start_copies()

    def arrived(self) -> list[int]:
        """Handles of the loads that are on the device as a whole."""
        return [handle for handle, load in self._loads.items() if load.has_arrived]

    def progress(self) -> CopyProgress:
        """Loads that have arrived, blocks of copies out that have not left, and how long copies took."""
        self._trim_staged(MAX_STAGED_BLOCKS)
        now, arrived = self._clock(), self.arrived()
        self._looks_until_known = max(0, self._looks_until_known - 1)
        timed = self._out_timer.look(now, self._has_left)
        timed += self._in_timer.look(now, arrived.__contains__)
        return CopyProgress(arrived, self._num_staged, timed)

    def advance(self, pool: jax.Array) -> jax.Array:
        """Write the pieces of loads that have arrived into the donated `pool`, and start further copies."""
        for load in self._loads.values():
            while load.staged and _is_ready(load.staged[0][1]):
                ids, piece = load.staged.popleft()
                pool = self._scatter(pool, ids, piece)
        self._start_copies()
        return pool

    def join(self, pool: jax.Array, handle: int) -> jax.Array:
        """Write what is left of a load into the donated `pool`; waits for what has not arrived."""
        load = self._loads.pop(handle)
        self._in_timer.forget(handle)
        if not load.has_arrived:  # what is read of the pool in this step waits for it
            self._out_timer.disturb()
        return self._write(pool, [*load.staged, *load.waiting])

    def settle(self) -> None:
        """Wait until no copy is under way."""
        self._wait([*self._staged, *(p for load in self._loads.values() for _, p in load.staged)])

    def wait(self, handle: int) -> None:
        """Wait until a copy has reached the host."""
        self._wait(list(self._pieces[handle].values()))

    def discard(self, handle: int) -> None:
        """Forget a load that nobody will join."""
        self._in_timer.forget(handle)
        del self._loads[handle]
        self._trim_staged(MAX_STAGED_BLOCKS)

    def put(self, handle: int, pieces: Sequence[np.ndarray]) -> None:
        """Keep blocks in host memory that were read from files."""
        self._pieces[handle] = {
            number: jax.device_put(piece, self._on_host) for number, piece in enumerate(pieces)
        }

    def held(self, handle: int) -> list[jax.Array]:
        """The pieces of a copy out, in order."""
        return [piece for _, piece in sorted(self._pieces[handle].items())]

    def drop(self, piece: HostPiece) -> None:
        """Let go of blocks in host memory that nobody will read."""
        pieces = self._pieces[piece.handle]
        del pieces[piece.number]
        if not pieces:
            del self._pieces[piece.handle]
            self._out_timer.forget(piece.handle)
            self._leaving.pop(piece.handle, None)
        self._trim_staged(MAX_STAGED_BLOCKS)

    def drop_all(self, handle: int) -> None:
        """Let go of what was copied out together."""
        for number in list(self._pieces[handle]):
            self.drop(HostPiece(handle, number))

    def _has_left(self, handle: int) -> bool:
        """Whether a copy has reached the host."""
        if not all(map(_is_ready, self._leaving.get(handle, ()))):
            return False
        self._leaving.pop(handle, None)
        return True

    def _trim_staged(self, limit: int) -> None:
        """Let go of copies that have left, and wait for the oldest until at most `limit` blocks have not."""
        staged = self._staged
        while staged and (self._num_staged > limit or _is_ready(staged[0])):
            piece = staged.popleft()
            self._num_staged -= piece.shape[0]
            self._wait(piece)

    def _start_copies(self) -> None:
        num_staged = sum(load.num_staged for load in self._loads.values())
        for load in self._loads.values():
            while load.waiting and num_staged + len(load.waiting[0][0]) <= MAX_STAGED_BLOCKS:
                ids, piece = load.waiting.popleft()
                load.staged.append((ids, jax.device_put(piece, self._on_device)))
                num_staged += len(ids)

    def _write(self, pool: jax.Array, pieces: Iterable[Piece]) -> jax.Array:
        num_staged = 0
        for ids, piece in pieces:
            if num_staged + len(ids) > MAX_STAGED_BLOCKS:
                self._wait(pool)
                num_staged = 0
            pool = self._scatter(pool, ids, jax.device_put(piece, self._on_device))
            num_staged += len(ids)
        return pool

    def _gathered(self, block_ids: Sequence[int], host_blocks: Sequence[HostBlock]) -> list[Piece]:
        """The pieces that hold blocks of the host, and the ids these get on the device."""
        found: dict[HostPiece, np.ndarray] = {}
        for block_id, place in zip(block_ids, host_blocks, strict=True):
            if place.piece not in found:
                size = len(self._pieces[place.handle][place.number])
                found[place.piece] = np.arange(_UNWANTED, _UNWANTED + size, dtype=np.int32)
            found[place.piece][place.row] = block_id
        return [(ids, self._pieces[handle][number]) for (handle, number), ids in found.items()]


def _cut(block_ids: Sequence[int]) -> list[np.ndarray]:
    ids, pieces = np.asarray(block_ids, np.int32), []
    for size in piece_sizes(len(ids)):
        pieces.append(ids[:size])
        ids = ids[size:]
    return pieces


def _is_ready(array: jax.Array) -> bool:
    return array.is_ready()  # type: ignore[attr-defined]


def _program_sizes(max_blocks: int) -> tuple[int, ...]:
    """All that a piece of at most `max_blocks` may have, the largest first."""
    return tuple(1 << bit for bit in reversed(range(min(max_blocks, MAX_PIECE_BLOCKS).bit_length())))


def _jitted(placement: Placement) -> tuple[jax.stages.Wrapped, jax.stages.Wrapped]:
    ids, blocks = ON_EACH, BY_KV_HEADS
    gather = placement.jit(_gather, (blocks, ids), blocks)
    return gather, placement.jit(_scatter, (blocks, ids, blocks), blocks, donate_argnums=0)


def _gather(pool: jax.Array, ids: jax.Array) -> jax.Array:
    """Blocks `ids` [n] of the pool, one after another.

    A block is one row of bytes here: XLA then copies all of them in one kernel, in words of 8 or 16 bytes.
    """
    blocks = pool.reshape(len(pool), -1).at[ids].get(mode="promise_in_bounds")
    return blocks.reshape(len(ids), *pool.shape[1:])


def _scatter(pool: jax.Array, ids: jax.Array, blocks: jax.Array) -> jax.Array:
    """The pool with `blocks` at `ids` [n], distinct ones, or beyond its end; in place if it is donated."""
    if len(ids) == 1:  # XLA would read the old block, too
        return lax.dynamic_update_slice_in_dim(pool, blocks, ids[0], 0)
    return lax.platform_dependent(pool, ids, blocks, cpu=_scatter_in_turn, default=_scatter_at_once)


def _scatter_at_once(pool: jax.Array, ids: jax.Array, blocks: jax.Array) -> jax.Array:
    rows = pool.reshape(len(pool), -1)
    rows = rows.at[ids].set(blocks.reshape(len(ids), -1), mode="drop", unique_indices=True)
    return rows.reshape(pool.shape)


def _scatter_in_turn(pool: jax.Array, ids: jax.Array, blocks: jax.Array) -> jax.Array:
    """XLA for CPUs scatters floats of 8 bits and bfloat16 in a copy of the pool in wider ones."""

    def put(index: jax.Array, pool: jax.Array) -> jax.Array:
        def write(pool: jax.Array) -> jax.Array:
            block = lax.dynamic_slice_in_dim(blocks, index, 1, 0)
            return lax.dynamic_update_slice_in_dim(pool, block, ids[index], 0)

        return lax.cond(ids[index] < len(pool), write, lambda pool: pool, pool)

    return lax.fori_loop(0, len(ids), put, pool)
