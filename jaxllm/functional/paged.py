"""A paged KV cache as a pytree: prefill and decode."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jaxllm.errors import RequestError
from jaxllm.executor.step import forward
from jaxllm.executor.step_rows import DecodeInputs, PrefillInputs, chunk_of
from jaxllm.functional.checks import (
    Params,
    check_cache,
    check_lengths,
    check_range,
    check_sizes,
    checked_edit,
    checked_params,
    checked_prompts,
    integers,
    is_known,
    parts_of,
    transformable,
)
from jaxllm.models.architecture import ModelConfig
from jaxllm.models.layers import Edit
from jaxllm.pallas_kernels.kv_layout import KVLayout
from jaxllm.pallas_kernels.settings import under_jax_defaults
from jaxllm.system.dtypes import KV_DTYPES, dtype_of


class KVCache(NamedTuple):
    """A block pool and the block table of each row.

    `pool` [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; `block_tables` [B, M] int32.
    """

    pool: jax.Array
    block_tables: jax.Array


export.register_namedtuple_serialization(KVCache, serialized_name="jaxllm.KVCache")


@under_jax_defaults
def init_pool(
    config: ModelConfig, num_blocks: int, block_size: int = 16, dtype: Any = jnp.float32
) -> jax.Array:
    """An empty KV pool [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].

    `dtype` is that of NumPy or JAX, or one of `jaxllm.system.dtypes.KV_DTYPES`; of "int8" the last axis is
    four longer (`jaxllm.pallas_kernels.kv_layout`).

    Raises:
        ConfigError: a size is no positive integer, or the dtype is not supported.
    """
    check_sizes(config, num_blocks=num_blocks, block_size=block_size)
    is_kv_dtype = isinstance(dtype, str) and dtype in KV_DTYPES
    layout = KVLayout(dtype if is_kv_dtype else dtype_of("dtype", dtype), config.head_dim)
    shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, block_size, layout.width)
    return jnp.zeros(shape, layout.array_dtype)


@under_jax_defaults
def init_cache(
    config: ModelConfig, batch_size: int, max_len: int, block_size: int = 16, dtype: Any = jnp.float32
) -> KVCache:
    """A cache in which each of `batch_size` rows owns blocks for `max_len` tokens.

    Raises:
        ConfigError: a size is no positive integer, or the dtype is not supported.
    """
    check_sizes(config, batch_size=batch_size, max_len=max_len, block_size=block_size)
    blocks_per_row = -(-max_len // block_size)
    tables = jnp.arange(batch_size * blocks_per_row, dtype=jnp.int32).reshape(batch_size, blocks_per_row)
    return KVCache(init_pool(config, batch_size * blocks_per_row, block_size, dtype), tables)


@under_jax_defaults
def fork(cache: KVCache, rows: jax.Array) -> KVCache:
    """A cache whose rows are copies of rows of another, each with blocks of its own.

    Args:
        cache: is not changed: arrays are values, so that a cache kept is a snapshot.
        rows: [N] int32, of `cache`; one may occur any number of times.

    Raises:
        ConfigError: `cache` is none.
        RequestError: `rows` is no vector of integers, or (outside of a caller's `jax.jit`) one is not there.
    """
    pool, tables = parts_of(cache)
    rows = integers("rows", rows, 1)
    check_range("rows", rows, 0, tables.shape[0] - 1)
    tables = tables[jnp.asarray(rows, jnp.int32)]
    own = jnp.arange(tables.size, dtype=jnp.int32).reshape(tables.shape)
    return KVCache(pool[tables.reshape(-1)], own)


@under_jax_defaults
def prefill(
    params: Params,
    config: ModelConfig,
    cache: KVCache,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    cached: jax.Array | None = None,
    all_positions: bool = False,
    implementation: str | None = None,
    edit: Edit | None = None,
) -> tuple[KVCache, jax.Array]:
    """Store the KV of prompts, or of what goes on with them, and score what follows.

    Args:
        params: flat weights, as `jaxllm.loading.load_params` returns.
        config: the model's configuration (static).
        cache: rows must have room for the tokens.
        tokens: [B, L] int32, padded at the end.
        lengths: [B] int32, in [1, L].
        cached: [B] int32, tokens of each row whose KV the cache holds; `tokens` come after them. 0 if None.
        all_positions: score every token, as the verification of drafted tokens does (static).
        implementation: of attention: "reference" can be differentiated and exported, others are faster.
        edit: `edit(layer, x)` returns the residual stream `x` [rows, hidden_size] before a layer, changed.
            Rows are the tokens of one prompt after another, without padding between them.

    Returns:
        The cache, and the logits [B, vocab_size] float32 after each row's last token; with `all_positions`
        [B, L, vocab_size] after each token, those of padding meaning nothing.

    Raises:
        ConfigError, RequestError: shapes do not fit one another, or (outside of a caller's `jax.jit`, where
            values are known) tokens or lengths are out of range; or gradients of this implementation are
            asked for.
    """
    params, edit = checked_params(params, config), checked_edit(edit)
    tokens, lengths = checked_prompts(config, tokens, lengths)
    before = jnp.zeros_like(lengths) if cached is None else integers("cached", cached, 1)
    if before.shape != lengths.shape:
        raise RequestError(f"cached {before.shape} and lengths {lengths.shape} must both be [B]")
    check_range("cached", before, 0, config.max_model_len)
    before = jnp.asarray(before, jnp.int32)
    check_cache(config, cache, before + lengths)
    check_lengths(config, before + lengths)

    def run(
        edit: Edit | None,
        params: Params,
        pool: jax.Array,
        tables: jax.Array,
        tokens: jax.Array,
        lengths: jax.Array,
        before: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        inputs = ragged_prefill(tables, tokens, lengths, before)
        pool, hidden, model = forward(
            config, params, pool, None, inputs.tokens, inputs, implementation=implementation, edit=edit
        )
        if not all_positions:
            return pool, model.logits(hidden[inputs.query_starts[1:] - 1])
        batch_size, most = tokens.shape
        rows = inputs.query_starts[:-1, None] + jnp.minimum(jnp.arange(most), lengths[:, None] - 1)
        logits = model.logits(hidden[rows.reshape(-1)])
        return pool, logits.reshape(batch_size, most, -1)

    block_size = cache.pool.shape[4]
    pool, logits = transformable(run, implementation, config, block_size, edit)(
        params, cache.pool, cache.block_tables, tokens, lengths, before
    )
    return KVCache(pool, cache.block_tables), logits


@under_jax_defaults
def decode(
    params: Params,
    config: ModelConfig,
    cache: KVCache,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    implementation: str | None = None,
    edit: Edit | None = None,
) -> tuple[KVCache, jax.Array]:
    """Feed one token per row.

    Args:
        params: as in `prefill`.
        config: as in `prefill`.
        cache: holds the KV of `lengths - 1` tokens of each row.
        tokens: [B] int32, the newest token of each row.
        lengths: [B] int32, tokens with KV after this step; rows with 0 are left alone.
        implementation: as in `prefill`.
        edit: as in `prefill`, of a row for each of the batch.

    Returns:
        The cache, and the logits [B, vocab_size] float32 of the next token.

    Raises:
        ConfigError, RequestError: as `prefill`.
    """
    params, edit = checked_params(params, config), checked_edit(edit)
    tokens, lengths = integers("tokens", tokens, 1), integers("lengths", lengths, 1)
    if tokens.shape != lengths.shape:
        raise RequestError(f"tokens {tokens.shape} and lengths {lengths.shape} must both be [B]")
    check_cache(config, cache, lengths)
    check_lengths(config, lengths)
    if is_known(tokens, lengths):
        check_range("tokens", np.asarray(tokens)[np.asarray(lengths) > 0], 0, config.vocab_size - 1)
        check_range("lengths", lengths, 0, math.inf)
    tokens, lengths = jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)

    def run(
        edit: Edit | None,
        params: Params,
        pool: jax.Array,
        tables: jax.Array,
        tokens: jax.Array,
        lengths: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        inputs = DecodeInputs(rows, lengths, tables)
        pool, hidden, model = forward(
            config, params, pool, inputs, tokens, None, implementation=implementation, edit=edit
        )
        return pool, model.logits(hidden)

    block_size = cache.pool.shape[4]
    pool, logits = transformable(run, implementation, config, block_size, edit)(
        params, cache.pool, cache.block_tables, tokens, lengths
    )
    return KVCache(pool, cache.block_tables), logits


def ragged_prefill(
    block_tables: jax.Array, tokens: jax.Array, lengths: jax.Array, cached: jax.Array
) -> PrefillInputs:
    """Padded tokens [B, L] as chunks one after another, each behind so many that are `cached` [B]."""
    batch_size, prompt_len = tokens.shape
    ends = jnp.cumsum(lengths)
    flat = jnp.arange(batch_size * prompt_len, dtype=jnp.int32)
    seq = jnp.minimum(chunk_of(ends, flat), batch_size - 1)
    offset = jnp.clip(flat - (ends - lengths)[seq], 0, prompt_len - 1)
    packed = tokens.astype(jnp.int32)[seq, offset]
    rows = jnp.arange(batch_size, dtype=jnp.int32)
    return PrefillInputs(
        tokens=packed,
        targets=packed,
        query_starts=jnp.concatenate([jnp.zeros(1, jnp.int32), ends]),
        lengths=cached + lengths,
        slots=rows,
        num_seqs=jnp.full(1, batch_size, jnp.int32),
        sampled=jnp.stack([ends - 1, rows, cached + lengths]),
        block_tables=block_tables,
    )
