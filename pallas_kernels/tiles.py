"""How kernels cut their work into programs; shared by the back-ends."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

_MAX_PROGRAMS = 2048  # that decode: four at a time on each core of an H100, four times over


def chunk_tokens(num_programs: int, max_tokens: int, kv_tile: int) -> int:
    """How many tokens of a row a decode program reads, so that a long row does not hold up the others.

    Two tiles where there are few rows; more where that makes more programs than fill the device: those beyond
    the end of a row have nothing to do, but are started.
    """
    chunk = 2 * kv_tile
    while chunk < max_tokens and num_programs * pl.cdiv(max_tokens, chunk) > _MAX_PROGRAMS:
        chunk *= 2
    return chunk


def kv_chunks(lengths: jax.Array, chunk: int, max_chunks: int) -> tuple[jax.Array, jax.Array]:
    """The chunks of rows that hold tokens, one row's after another's.

    Args:
        lengths: int32 `[num_rows]`, tokens of each row.
        chunk: tokens of a chunk.
        max_chunks: of a row.

    Returns:
        Int32 `[num_rows * max_chunks, 2]`, row and place of each chunk in it, of which the first ones count;
        int32 `[1]`, how many do.
    """
    num_chunks = -(-lengths // chunk)
    ends = jnp.cumsum(num_chunks)
    number = jnp.arange(lengths.shape[0] * max_chunks, dtype=jnp.int32)
    row = jnp.minimum((number[:, None] >= ends[None, :]).sum(axis=1), lengths.shape[0] - 1)
    place = number - (ends[row] - num_chunks[row])
    return jnp.stack([row, place], axis=1).astype(jnp.int32), ends[-1:].astype(jnp.int32)


def query_tiles(
    query_starts: jax.Array, lengths: jax.Array, num_seqs: jax.Array, num_tokens: int, tile_rows: int
) -> jax.Array:
    """Int32 `[max_tiles, 4]`: sequence, first row, number of rows, position of the first row.

    Sequences are cut into tiles one after another; tiles beyond the last one hold 0 rows.
    """
    max_seqs = lengths.shape[0]
    query_lens = jnp.where(jnp.arange(max_seqs) < num_seqs, query_starts[1:] - query_starts[:-1], 0)
    num_tiles = -(-query_lens // tile_rows)
    ends = jnp.cumsum(num_tiles)
    tile = jnp.arange(num_tokens // tile_rows + min(max_seqs, num_tokens), dtype=jnp.int32)
    seq = jnp.minimum((tile[:, None] >= ends[None, :]).sum(axis=1), max_seqs - 1)
    offset = (tile - ends[seq] + num_tiles[seq]) * tile_rows
    rows = jnp.clip(query_lens[seq] - offset, 0, tile_rows)
    position = lengths[seq] - query_lens[seq] + offset
    return jnp.stack([seq, query_starts[seq] + offset, rows, position], axis=1).astype(jnp.int32)


_AMPERE = re.compile(r"\b(A100|A800|A30|A10G?|A16|A2|A40|A[2456]000|RTX 30\d\d)\b")


def multiplies_float8() -> bool:
    """Whether the device of programs is a GPU with products of e4m3: of compute capability 8.9 or newer."""
    device = current_device()
    # One that is only compiled for has a name, and no capability.
    known = getattr(device, "compute_capability", "8.0" if _AMPERE.search(device.device_kind) else "9.0")
    parts = str(known).split(".")
    return device.platform == "gpu" and all(map(str.isdigit, parts)) and [int(one) for one in parts] >= [8, 9]


def is_interpreted() -> bool:
    """Whether there is no GPU to run on, nor one that is being compiled for."""
    return current_device().platform == "cpu"


def current_device() -> Any:
    """The device that programs run on or are compiled for: its `platform` and `device_kind`."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    return jax.devices()[0] if device is None else device
