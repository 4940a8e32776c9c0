"""The rows of a step: what is decoded, what is computed of prompts, and where each row belongs."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class DecodeInputs(NamedTuple):
    """`slots` [B], `lengths` [B] (tokens with KV after this step; 0 in padding), `block_tables` [B, M]."""

    slots: jax.Array
    lengths: jax.Array
    block_tables: jax.Array


class PrefillInputs(NamedTuple):
    """Chunks one after another, after the decode rows.

    `tokens` [R], of which those of decode rows are not read; `targets` [R], the token after each (for prompt
    log-probabilities); `query_starts` [P + 1], rows, the first of them the number of decode rows; `lengths`
    [P], tokens with KV after this step; `slots` [P]; `num_seqs` [1]; `sampled` [3, S]: the rows that are
    sampled, their slots and their lengths, with slot -1 in padding; `block_tables` [P, M]. All int32.
    """

    tokens: jax.Array
    targets: jax.Array
    query_starts: jax.Array
    lengths: jax.Array
    slots: jax.Array
    num_seqs: jax.Array
    sampled: jax.Array
    block_tables: jax.Array


class Places(NamedTuple):
    """Per row of the step: its slot, position and place in the pool; padding has the last slot, and -1."""

    slots: jax.Array
    positions: jax.Array
    slot_mapping: jax.Array


def slot_of(block_tables: jax.Array, rows: jax.Array, positions: jax.Array, block_size: int) -> jax.Array:
    """Pool slot, `block * block_size + offset`, of each position (-1 stays -1)."""
    position = jnp.maximum(positions, 0)
    column = jnp.minimum(position // block_size, block_tables.shape[1] - 1)
    slot = block_tables[rows, column] * block_size + position % block_size
    return jnp.where(positions >= 0, slot, -1)


def chunk_of(ends: jax.Array, rows: jax.Array) -> jax.Array:
    """How many of `ends` [P], in ascending order, are not after each of `rows` [R]; [R] int32."""
    return jnp.sum(ends[None, :] <= rows[:, None], axis=1, dtype=jnp.int32)


def _decode_places(decode: DecodeInputs, padding_slot: int, block_size: int) -> Places:
    positions = decode.lengths - 1
    rows = jnp.arange(positions.shape[0], dtype=jnp.int32)
    slots = jnp.where(positions >= 0, decode.slots, padding_slot)
    return Places(slots, positions, slot_of(decode.block_tables, rows, positions, block_size))


def _prefill_places(inputs: PrefillInputs, padding_slot: int, block_size: int) -> Places:
    rows = jnp.arange(inputs.tokens.shape[0], dtype=jnp.int32)
    ends = inputs.query_starts[1:]
    seq = chunk_of(ends, rows)
    inside = (seq < inputs.num_seqs[0]) & (rows >= inputs.query_starts[0])
    seq = jnp.minimum(seq, ends.shape[0] - 1)
    positions = jnp.where(inside, inputs.lengths[seq] - (ends[seq] - rows), -1)
    slots = jnp.where(inside, inputs.slots[seq], padding_slot)
    return Places(slots, positions, slot_of(inputs.block_tables, seq, positions, block_size))


def places_of(
    decode: DecodeInputs | None, prefill: PrefillInputs | None, padding_slot: int, block_size: int
) -> Places:
    """Of all rows of the step."""
    if prefill is None:
        if decode is None:
            raise ValueError("a step needs decodes or prompts")
        return _decode_places(decode, padding_slot, block_size)
    prompts = _prefill_places(prefill, padding_slot, block_size)
    if decode is None:
        return prompts
    decodes = _decode_places(decode, padding_slot, block_size)
    is_decode = decodes.positions >= 0
    merged = (
        part.at[: len(is_decode)].set(jnp.where(is_decode, own, part[: len(is_decode)]))
        for own, part in zip(decodes, prompts, strict=True)
    )
    return Places(*merged)


def num_rows_of(decode: DecodeInputs | None, prefill: PrefillInputs | None) -> jax.Array:
    """Up to which row a step's rows are in use."""
    if prefill is not None:
        return prefill.query_starts[prefill.num_seqs[0]]
    assert decode is not None
    rows = jnp.arange(1, decode.lengths.shape[0] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(decode.lengths > 0, rows, 0))
