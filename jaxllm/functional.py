"""Pure functions for research code: a paged KV cache, prefill, decode, and generation as one program.

    from jaxllm import functional as F

    @jax.jit
    def answer(params, tokens, lengths, key):
        return F.generate(params, config, tokens, lengths, 64, key, temperature=0.8).tokens

Nothing here touches global state; every function may be called inside `jax.jit` with `config` closed over.
The steps are the engine's own, so greedy tokens are the engine's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllm.errors import ConfigError, RequestError, shown
from jaxllm.executor.sampler import Sampling, SlotParams
from jaxllm.executor.step import DecodeInputs, DeviceState, PrefillInputs, chunk_of, forward, run_step
from jaxllm.models.architecture import ModelConfig
from jaxllm.pallas_kernels.settings import under_jax_defaults
from jaxllm.sampling.params import MAX_LOGIT_BIAS

Params = Mapping[str, jax.Array]
_MAX_TEMPERATURE = 1e6


class KVCache(NamedTuple):
    """A block pool and the block table of each row.

    `pool` [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; `block_tables` [B, M] int32.
    """

    pool: jax.Array
    block_tables: jax.Array


class Generated(NamedTuple):
    """`tokens` [B, max_new_tokens] int32, 0 after a row's end; `lengths` [B] int32.

    A token of -1 ends a row whose logits hold a NaN or infinity, so that there is none to sample.
    """

    tokens: jax.Array
    lengths: jax.Array


@under_jax_defaults
def init_pool(
    config: ModelConfig, num_blocks: int, block_size: int = 16, dtype: Any = jnp.float32
) -> jax.Array:
    """An empty KV pool [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].

    Raises:
        ConfigError: a size is no positive integer.
    """
    _check_sizes(config, num_blocks=num_blocks, block_size=block_size)
    shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
    return jnp.zeros(shape, dtype)


@under_jax_defaults
def init_cache(
    config: ModelConfig, batch_size: int, max_len: int, block_size: int = 16, dtype: Any = jnp.float32
) -> KVCache:
    """A cache in which each of `batch_size` rows owns blocks for `max_len` tokens.

    Raises:
        ConfigError: a size is no positive integer.
    """
    _check_sizes(config, batch_size=batch_size, max_len=max_len, block_size=block_size)
    blocks_per_row = -(-max_len // block_size)
    tables = jnp.arange(batch_size * blocks_per_row, dtype=jnp.int32).reshape(batch_size, blocks_per_row)
    return KVCache(init_pool(config, batch_size * blocks_per_row, block_size, dtype), tables)


@under_jax_defaults
def prefill(
    params: Params,
    config: ModelConfig,
    cache: KVCache,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    implementation: str | None = None,
) -> tuple[KVCache, jax.Array]:
    """Store the KV of prompts, and score what follows them.

    Args:
        params: flat weights, as `jaxllm.loading.load_params` returns.
        config: the model's configuration (static).
        cache: rows must have room for the prompts.
        tokens: [B, L] int32, padded at the end.
        lengths: [B] int32, in [1, L].
        implementation: of attention.

    Returns:
        The cache, and the logits [B, vocab_size] float32 after each prompt's last token.

    Raises:
        ConfigError, RequestError: shapes do not fit one another, or (outside of a caller's `jax.jit`, where
            values are known) tokens or lengths are out of range.
    """
    _check_params(params, config)
    tokens, lengths = _checked_prompts(config, tokens, lengths)
    _check_cache(config, cache, lengths)
    inputs = _ragged_prefill(cache.block_tables, tokens, lengths)
    pool, hidden, model = forward(
        config, params, cache.pool, None, inputs.tokens, inputs, implementation=implementation
    )
    last = inputs.query_starts[1:] - 1
    return KVCache(pool, cache.block_tables), model.logits(hidden[last])


@under_jax_defaults
def decode(
    params: Params,
    config: ModelConfig,
    cache: KVCache,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    implementation: str | None = None,
) -> tuple[KVCache, jax.Array]:
    """Feed one token per row.

    Args:
        params: as in `prefill`.
        config: as in `prefill`.
        cache: holds the KV of `lengths - 1` tokens of each row.
        tokens: [B] int32, the newest token of each row.
        lengths: [B] int32, tokens with KV after this step; rows with 0 are left alone.
        implementation: of attention.

    Returns:
        The cache, and the logits [B, vocab_size] float32 of the next token.

    Raises:
        ConfigError, RequestError: as `prefill`.
    """
    _check_params(params, config)
    tokens, lengths = _integers("tokens", tokens, 1), _integers("lengths", lengths, 1)
    if tokens.shape != lengths.shape:
        raise RequestError(f"tokens {tokens.shape} and lengths {lengths.shape} must both be [B]")
    _check_cache(config, cache, lengths)
    if _is_known(tokens, lengths):
        _check_range("tokens", np.asarray(tokens)[np.asarray(lengths) > 0], 0, config.vocab_size - 1)
        _check_range("lengths", lengths, 0, math.inf)
    tokens, lengths = jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    inputs = DecodeInputs(rows, lengths, cache.block_tables)
    pool, hidden, model = forward(
        config, params, cache.pool, inputs, tokens, None, implementation=implementation
    )
    return KVCache(pool, cache.block_tables), model.logits(hidden)


@under_jax_defaults
def generate(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    lengths: jax.Array,
    max_new_tokens: int,
    key: jax.Array,
    *,
    temperature: float | jax.Array = 0.0,
    top_k: int | jax.Array = 0,
    top_p: float | jax.Array = 1.0,
    min_p: float | jax.Array = 0.0,
    eos_token_ids: Sequence[int] = (),
    block_size: int = 16,
    implementation: str | None = None,
) -> Generated:
    """Complete a batch of prompts in one device program that stops when every row has ended.

    Args:
        params: as in `prefill`; their dtype is the cache's.
        config: the model's configuration (static).
        tokens: [B, L] int32 prompts, padded at the end with anything.
        lengths: [B] int32, in [1, L].
        max_new_tokens: most tokens to add to a row (static).
        key: PRNG key; a row's samples depend on it, the row and the position.
        temperature: 0 is greedy; a number, or one for each row [B].
        top_k: 0 is off; likewise.
        top_p: 1 is off; likewise.
        min_p: 0 is off; likewise.
        eos_token_ids: tokens that end a row (static).
        block_size: tokens per KV block (static).
        implementation: of attention.

    Raises:
        ConfigError, RequestError: shapes do not fit, the result would exceed the model's positions, or
            (outside of a caller's `jax.jit`, where values are known) a value is out of range.
    """
    _check_params(params, config)
    tokens, lengths = _checked_prompts(config, tokens, lengths)
    _check_sizes(config, max_new_tokens=max_new_tokens, block_size=block_size)
    batch_size, prompt_len = tokens.shape
    _check_key(key)
    for name, value, low, high in (
        ("temperature", temperature, 0, _MAX_TEMPERATURE),
        ("top_k", top_k, 0, 2**31 - 1),
        ("top_p", top_p, float(np.finfo(np.float32).tiny), 1),
        ("min_p", min_p, 0, 1),
    ):
        if np.shape(value) not in ((), (batch_size,)):
            raise RequestError(
                f"{name} {np.shape(value)} must be a number, or one for each row [{batch_size}]"
            )
        _check_range(name, value, low, high)
    ends = _integers("eos_token_ids", [*eos_token_ids] if isinstance(eos_token_ids, Iterable) else 0, 1)
    _check_range("eos_token_ids", ends, 0, config.vocab_size - 1)
    max_len = prompt_len + max_new_tokens
    if max_len > config.max_model_len:
        raise RequestError(
            f"prompts of {prompt_len} and {max_new_tokens} new tokens exceed the model's "
            f"{config.max_model_len} positions; lower max_new_tokens or shorten the prompts"
        )
    rope = getattr(config, "rope", None)
    if rope is not None and rope.depends_on_length and rope.max_model_len is None:
        raise ConfigError(
            f"rope type {rope.rope_type!r} needs the longest sequence its frequencies are to be made for; "
            f"pass config.with_max_model_len({max_len}), or the engine's max_model_len for its tokens"
        )
    dtype = next(iter(params.values())).dtype
    cache = init_cache(config, batch_size, max_len, block_size, dtype)
    sampling = _sampling(temperature, top_k, top_p, min_p)
    slot_params = _slot_params(batch_size, lengths, key, temperature, top_k, top_p, min_p)
    history = jnp.zeros((batch_size + 1, max_len + 1), jnp.int32)
    rows = jnp.arange(batch_size, dtype=jnp.int32)
    inputs = _ragged_prefill(cache.block_tables, tokens, lengths)
    stops = jnp.asarray(ends, jnp.int32)

    def is_end(new: jax.Array) -> jax.Array:
        return (new < 0) | jnp.any(new[:, None] == stops[None, :], axis=-1)

    state, outputs = run_step(
        config,
        params,
        DeviceState(cache.pool, history),
        slot_params,
        None,
        inputs,
        sampling=sampling,
        implementation=implementation,
    )
    start_lengths = lengths.astype(jnp.int32)
    carry = (state, start_lengths, is_end(outputs.sampled.tokens), jnp.int32(1))

    def unfinished(carry: tuple[DeviceState, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return (carry[3] < max_new_tokens) & ~jnp.all(carry[2])

    def body(
        carry: tuple[DeviceState, jax.Array, jax.Array, jax.Array],
    ) -> tuple[DeviceState, jax.Array, jax.Array, jax.Array]:
        state, kv_lengths, done, step = carry
        kv_lengths = jnp.where(done, kv_lengths, kv_lengths + 1)
        inputs = DecodeInputs(rows, jnp.where(done, 0, kv_lengths), cache.block_tables)
        state, outputs = run_step(
            config,
            params,
            state,
            slot_params,
            inputs,
            None,
            sampling=sampling,
            implementation=implementation,
        )
        return state, kv_lengths, done | is_end(outputs.sampled.tokens), step + 1

    state, kv_lengths, _, _ = lax.while_loop(unfinished, body, carry)
    new_lengths = kv_lengths - start_lengths + 1
    places = jnp.arange(max_new_tokens, dtype=jnp.int32)[None, :]
    new_tokens = jnp.take_along_axis(state.history[:batch_size], start_lengths[:, None] + places, axis=1)
    return Generated(jnp.where(places < new_lengths[:, None], new_tokens, 0), new_lengths)


def _check_range(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, jax.core.Tracer):
        return
    try:
        is_inside = bool(np.all((np.asarray(value) >= low) & (np.asarray(value) <= high)))
    except (TypeError, ValueError):  # no numbers
        is_inside = False
    if not is_inside:
        raise RequestError(f"{name}={shown(value)} must be from {low:g} to {high:g}")


def _is_known(*values: Any) -> bool:
    """Whether these are values and not what a program is traced with."""
    return not any(isinstance(value, jax.core.Tracer) for value in values)


def _check_sizes(config: ModelConfig, **sizes: int) -> None:
    if not isinstance(config, ModelConfig):
        raise ConfigError(
            f"config={shown(config)} must be a model's: config_from_dict(read_hf_config(folder)) makes it"
        )
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or not 1 <= size < 2**31:
            raise ConfigError(f"{name}={shown(size)} must be an integer of at least 1")


def _check_params(params: Params, config: ModelConfig) -> None:
    _check_sizes(config)
    if not isinstance(params, Mapping) or not params or not all(isinstance(name, str) for name in params):
        raise ConfigError(
            "params must be weights by name, as jaxllm.loading.load_params returns, not "
            f"{shown(list(params)[:3]) if isinstance(params, Mapping) else type(params).__name__}"
        )


def _integers(name: str, value: Any, num_dims: int) -> Any:
    """As an array of that many dimensions."""
    found = value if hasattr(value, "dtype") else np.asarray(value)
    if not np.size(found) and not hasattr(value, "dtype"):
        found = found.astype(np.int32)
    if found.ndim != num_dims or not jnp.issubdtype(found.dtype, jnp.integer):
        raise RequestError(
            f"{name} of shape {found.shape} and dtype {found.dtype} must be "
            f"{'[B, L]' if num_dims == 2 else '[B]'}, integers"
        )
    return found


def _checked_prompts(config: ModelConfig, tokens: Any, lengths: Any) -> tuple[jax.Array, jax.Array]:
    """Prompts [B, L] and their lengths [B], as arrays; padding may be anything."""
    tokens, lengths = _integers("tokens", tokens, 2), _integers("lengths", lengths, 1)
    if lengths.shape != tokens.shape[:1] or not tokens.size:
        raise RequestError(f"tokens {tokens.shape} must be [B, L] and lengths {lengths.shape} [B], not empty")
    _check_range("lengths", lengths, 1, tokens.shape[1])
    if _is_known(tokens, lengths):
        is_token = np.arange(tokens.shape[1]) < np.asarray(lengths)[:, None]
        _check_range("tokens", np.asarray(tokens)[is_token], 0, config.vocab_size - 1)
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)


def _check_cache(config: ModelConfig, cache: KVCache, lengths: jax.Array) -> None:
    """Verify that a cache is of the model, and has room for rows of these lengths."""
    pool, tables = cache
    block_size = pool.shape[4] if pool.ndim == 6 else 0
    expected = config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim
    if pool.ndim != 6 or pool.shape[1:] != expected or tables.shape[:1] != lengths.shape:
        raise ConfigError(
            f"a cache of shape {pool.shape} with block tables {tables.shape} is not of this model and "
            f"{lengths.shape[0]} rows: make it with init_cache(config, {lengths.shape[0]}, max_len)"
        )
    _check_range("lengths (of a cache with so much room)", lengths, 0, tables.shape[1] * block_size)


def _check_key(key: Any) -> None:
    is_typed = hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    is_raw = getattr(key, "dtype", None) == np.uint32 and key.ndim == 1
    if not (is_typed and key.ndim == 0) and not is_raw:
        raise RequestError(f"key={shown(key)} must be a PRNG key: jax.random.key(0)")


def _sampling(temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> Sampling:
    """What the program must be able to do; a value that is not known yet may ask for anything."""

    def may_differ(value: Any, neutral: float) -> bool:
        return isinstance(value, jax.core.Tracer) or bool(np.any(np.asarray(value) != neutral))

    if not may_differ(temperature, 0):
        return Sampling.GREEDY
    if may_differ(top_k, 0) or may_differ(top_p, 1) or may_differ(min_p, 0):
        return Sampling.RANDOM | Sampling.FILTERED
    return Sampling.RANDOM


def _ragged_prefill(block_tables: jax.Array, tokens: jax.Array, lengths: jax.Array) -> PrefillInputs:
    """Padded prompts [B, L] as chunks one after another."""
    batch_size, prompt_len = tokens.shape
    lengths = lengths.astype(jnp.int32)
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
        lengths=lengths,
        slots=rows,
        num_seqs=jnp.full(1, batch_size, jnp.int32),
        sampled=jnp.stack([ends - 1, rows, lengths]),
        block_tables=block_tables,
    )


def _slot_params(
    batch_size: int, lengths: jax.Array, key: jax.Array, temperature: Any, top_k: Any, top_p: Any, min_p: Any
) -> SlotParams:
    """One row of parameters per prompt, and the greedy row of padding."""

    def per_row(value: Any, dtype: Any, padding: Any) -> jax.Array:
        values = jnp.broadcast_to(jnp.asarray(value, dtype), (batch_size,))
        return jnp.append(values, jnp.asarray(padding, dtype))

    zeros = per_row(0, jnp.float32, 0)
    seeds = jax.vmap(lambda row: jax.random.bits(jax.random.fold_in(key, row), (2,), jnp.uint32))(
        jnp.arange(batch_size + 1)
    )
    return SlotParams(
        temperature=per_row(temperature, jnp.float32, 0),
        top_p=per_row(top_p, jnp.float32, 1),
        min_p=per_row(min_p, jnp.float32, 0),
        presence_penalty=zeros,
        frequency_penalty=zeros,
        repetition_penalty=per_row(1, jnp.float32, 1),
        top_k=per_row(top_k, jnp.int32, 0),
        seeds=seeds,
        prompt_length=per_row(lengths, jnp.int32, 0),
        min_length=per_row(0, jnp.int32, 0),
        first_position=per_row(0, jnp.int32, 0),
        has_logprobs=per_row(0, jnp.int32, 0),
        bias_ids=jnp.full((batch_size + 1, MAX_LOGIT_BIAS), -1, jnp.int32),
        bias_values=jnp.zeros((batch_size + 1, MAX_LOGIT_BIAS), jnp.float32),
        banned_ids=jnp.full((batch_size + 1, 1), -1, jnp.int32),
        end_ids=jnp.full((batch_size + 1, 1), -1, jnp.int32),
    )
