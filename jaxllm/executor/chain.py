"""Iterations with drafts of a model or heads that follow one another on the device.

One program drafts and puts the drafts among the inputs of the next iteration, `decode_steps` computes that,
and what it says of lengths goes to the first program again. The host sends all of them and waits for none.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.executor.config import ExecutorConfig
from jaxllm.executor.programs import PackedStep, ProgramKey, refilled, unpacked


class ChainRows(NamedTuple):
    """The requests of one of the iterations, as it begins: those of a batch first, then padding.

    `slots` [B]; `lengths` [B], known tokens, 0 of who has ended; `counts` [B], tokens to draft; `num_seqs`
    [1] of them are no padding; `tables` [B, M] are their block tables. All int32.
    """

    slots: jax.Array
    lengths: jax.Array
    counts: jax.Array
    num_seqs: jax.Array
    tables: jax.Array


class Chain(NamedTuple):
    """Static of a program that drafts for iterations of a `key`: how their inputs lie."""

    key: ProgramKey
    max_num_seqs: int
    block_size: int

    @classmethod
    def of(cls, config: ExecutorConfig, size: int) -> Chain:
        """That of a batch of so many requests."""
        return cls(config.lookup_key(size), config.max_num_seqs, config.block_size)

    @property
    def num_rows(self) -> int:
        """Most requests."""
        return self.key.num_decodes(self.max_num_seqs)

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Of `packed` and `lengths`."""
        sizes = PackedStep(*self).array.size, self.num_rows
        packed, lengths = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes]
        return packed, lengths

    def rows(self, tables: jax.Array, packed: jax.Array, lengths: jax.Array) -> ChainRows:
        """Those of an iteration.

        Args:
            tables: block tables of the slots, as they were before the first of the iterations.
            packed: the first one's inputs, a `PackedStep`'s.
            lengths: [B] int32, its own.
        """
        _, decode, _, parts = unpacked(*self, tables, packed)
        counts = jnp.minimum(parts["num_drafts"][0], parts["limits"] - lengths - 1)
        num_seqs = jnp.sum(decode.lengths > 0, dtype=jnp.int32)[None]
        return ChainRows(
            decode.slots, lengths, jnp.where(lengths > 0, counts, 0), num_seqs, decode.block_tables
        )

    def filled(self, packed: jax.Array, lengths: jax.Array, drafts: jax.Array) -> jax.Array:
        """The inputs of an iteration whose requests have `lengths` [B], and `drafts` [K, B]."""
        return refilled(*self, packed, lengths, jnp.maximum(drafts, 0))


def chains_of(config: ExecutorConfig) -> dict[int, Chain]:
    """Those of an executor, by sizes of batches in ascending order."""
    if config.lookup is None or config.lookup.most:
        return {}
    return {size: Chain.of(config, size) for size in config.lookup_sizes}
