"""The pool as the Mosaic GPU kernels see it, and how its tiles come to shared memory and to wgmma.

Two pairs are everywhere in this order: of K and of V.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm.errors import ConfigError
from jaxllm.pallas_kernels.kv_layout import KVLayout, layout_of
from jaxllm.pallas_kernels.mosaic_tiles import TILE, load_scales, widen, zero_rows_from

SLOTS = 3  # tiles of K and of V in flight


def why_not(dtype: str, layout: KVLayout, block_size: int) -> str | None:
    """Why the kernels do not take queries of a dtype over KV of a layout and block size; None if they do."""
    is_int8 = layout.dtype == "int8"
    if dtype not in ("bfloat16", "float16"):
        return f"it computes in bfloat16 or float16, got q in {dtype}"
    if is_int8 and dtype != "bfloat16":
        return f"it computes over int8 in bfloat16, got q in {dtype}"
    if layout.array_dtype.itemsize > 1 and layout.dtype != dtype:
        return f"it takes KV of 16 bits as q is, got q in {dtype} and KV in {layout.dtype}"
    if layout.head_dim not in (64, 128):  # prompts of larger ones exceed a core's shared memory, or spill
        return f"it takes head_dim 64 or 128, got {layout.head_dim}"
    if block_size not in (16, 32, 64, 128):
        return f"it takes blocks of 16, 32, 64 or 128 tokens, got {block_size}"
    if is_int8 and block_size < 32:  # TMA copies 128 bytes of scales; rows of codes would not be in line
        return f"it takes int8 in blocks of 32 tokens or more, got {block_size}"
    return None


def check(q: jax.Array, pool: jax.Array) -> None:
    """Refuse what the kernels are not written for.

    Raises:
        ConfigError: `why_not` gives a reason, or too many queries share a KV head.
    """
    group = q.shape[1] // pool.shape[3]
    reason = why_not(q.dtype.name, layout_of(pool), pool.shape[4])
    if reason is None and group > TILE:
        reason = f"it takes up to {TILE} query heads per KV head, got {group}"
    if reason is not None:
        raise ConfigError(f"attention implementation 'mosaic': {reason}; use implementation='triton'")


def readable(pool: jax.Array) -> tuple[jax.Array, ...]:
    """The views of a pool that attention reads; nothing moves.

    Its numbers as `[rows, head_dim]`, and of int8 the same as float32 `[KV heads of blocks, numbers]`, which
    is where scales are.
    """
    layout = layout_of(pool)
    rows = pool.reshape(-1, layout.head_dim)
    if layout.dtype != "int8":
        return (rows,)
    numbers = pool.reshape(-1, pool.shape[4] * layout.width // 4, 4)
    return rows, lax.bitcast_convert_type(numbers, jnp.float32)


class Buffers(NamedTuple):
    """Shared memory for tiles, and barriers for those that have arrived, and been consumed.

    Attributes:
        tiles: `[slots, TILE, head_dim]` each, as the pool has them.
        arrived: a barrier for each slot of each.
        consumed: likewise.
        wide: of 8 bits, `[TILE, head_dim]` each of 16 bits, which wgmma multiplies.
        scales: of int8, `[slots, TILE]` float32 each.
    """

    tiles: tuple[Any, Any]
    arrived: tuple[Any, Any]
    consumed: tuple[Any, Any]
    wide: tuple[Any, ...] = ()
    scales: tuple[Any, ...] = ()

    @classmethod
    def of(cls, pool: jax.Array, dtype: Any, num_consumers: int) -> Buffers:
        """Types of those that a kernel for a pool needs, which computes in a dtype of 16 bits."""
        layout, block_size = layout_of(pool), pool.shape[4]
        tile = swizzled((SLOTS, TILE, layout.head_dim), pool.dtype)
        scales = (plgpu.SMEM((SLOTS, TILE), jnp.float32),) * 2 if layout.dtype == "int8" else ()
        wide = (swizzled((TILE, layout.head_dim), dtype),) * 2 if pool.dtype.itemsize == 1 else ()
        copies = (2 if scales else 1) * (TILE // min(block_size, TILE))
        arrived = plgpu.Barrier(num_arrivals=copies, num_barriers=SLOTS)
        consumed = plgpu.Barrier(num_arrivals=num_consumers, num_barriers=SLOTS)
        return cls((tile, tile), (arrived, arrived), (consumed, consumed), wide, scales)

    def wait(self, index: int, slot: jax.Array) -> None:
        """Until a slot's tile of K (0) or V (1) has arrived."""
        plgpu.barrier_wait(self.arrived[index].at[slot])

    def release(self, index: int, slot: jax.Array) -> None:
        """Let the next tile come to a slot."""
        plgpu.barrier_arrive(self.consumed[index].at[slot])

    def widen(self, index: int, slot: jax.Array, num_seen: jax.Array) -> None:
        """Bring a tile of 8 bits to where wgmma takes it; of V rows from `num_seen` on become zero."""
        widen(self.tiles[index].at[slot], self.wide[index], num_seen if index else None)

    def tile(self, index: int, slot: jax.Array) -> Any:
        """What wgmma takes of a slot, after `widen` if its numbers have 8 bits."""
        return self.wide[index] if self.wide else self.tiles[index].at[slot]

    def zero_from(self, slot: jax.Array, num_seen: jax.Array) -> None:
        """Zero V from a row on, of 16 bits."""
        zero_rows_from(self.tiles[1].at[slot], num_seen)

    def scales_of(
        self, index: int, slot: jax.Array, num_seen: jax.Array, shape: tuple[int, int], axis: int
    ) -> jax.Array | None:
        """What numbers of a tile stand for, in the shape of scores whose `axis` are tokens; None for 1."""
        return load_scales(self.scales[index].at[slot], num_seen, shape, axis) if self.scales else None


class Source(NamedTuple):
    """Where the KV of a row is.

    Attributes:
        views: of the pool (`readable`).
        tables: int32 [rows, max_blocks].
        row: of `tables`.
        length: tokens of the row.
        head_of: what says which KV head of a block, counted over all of the pool, K (0) or V (1) is.
        block_size: tokens of a block.
    """

    views: tuple[Any, ...]
    tables: Any
    row: jax.Array
    length: jax.Array
    head_of: Callable[[Any, int], Any]
    block_size: int

    def copy(
        self, buffers: Buffers, first: jax.Array, num_steps: jax.Array, num_before: jax.Array | int = 0
    ) -> None:
        """Bring tiles `[first, first + num_steps)` to shared memory, as many at a time as there are slots.

        `num_before` tiles were brought before; `drain` comes after the last.
        """
        rows = min(self.block_size, TILE)

        @pl.loop(0, num_steps)
        def _(i: jax.Array) -> None:
            slot = lax.rem(num_before + i, jnp.int32(SLOTS))
            for index in range(2):

                @pl.when(num_before + i >= SLOTS)
                def _(index: int = index) -> None:
                    plgpu.barrier_wait(buffers.consumed[index].at[slot])

                for part in range(TILE // rows):
                    self._copy_part(buffers, index, slot, (first + i) * TILE + part * rows, part * rows)

    def _copy_part(self, buffers: Buffers, index: int, slot: jax.Array, token: jax.Array, place: int) -> None:
        """Copy the tokens of one block, or of one tile if it is smaller."""
        block_size, rows = self.block_size, min(self.block_size, TILE)
        # Past the row's last token any block of its own does: what it holds is masked.
        block = self.tables[self.row, jnp.where(token < self.length, token, 0) // block_size]
        offset = 0 if rows == block_size else pl.multiple_of(lax.rem(token, jnp.int32(block_size)), rows)
        head, arrived = self.head_of(block, index), buffers.arrived[index].at[slot]
        head_dim = self.views[0].shape[1]
        per_head = block_size if len(self.views) == 1 else self.views[1].shape[1] * 4 // head_dim
        part = pl.ds(place, rows)
        codes = self.views[0].at[pl.ds(head * per_head + offset, rows)]
        plgpu.copy_gmem_to_smem(codes, buffers.tiles[index].at[slot, part], arrived)
        for view in self.views[1:]:
            scales = view.at[head, pl.ds(block_size * head_dim // 4 + offset, rows)]
            plgpu.copy_gmem_to_smem(scales, buffers.scales[index].at[slot, part], arrived)


def drain(buffers: Buffers, num_tiles: jax.Array) -> None:
    """Wait for the last tiles to be consumed: a barrier may only go when each of its phases has been seen."""

    @pl.loop(0, jnp.minimum(num_tiles, SLOTS))
    def _(slot: jax.Array) -> None:
        for one in buffers.consumed:
            plgpu.barrier_wait(one.at[slot])


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the order that wgmma reads; of 8 bits, where 64 numbers at a time can be read."""
    bits = 8 * jnp.dtype(dtype).itemsize
    swizzle = 64 if bits == 8 else plgpu.find_swizzle(shape[-1] * bits)
    transforms = (plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)
