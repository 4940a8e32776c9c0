"""Generation of whole batches as one function: prefill, and a loop of decodes that sample."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from jaxllm.errors import RequestError, shown
from jaxllm.executor.slot_params import Sampling, SlotParams
from jaxllm.executor.step import DeviceState, StepOutputs, run_step
from jaxllm.executor.step_rows import DecodeInputs
from jaxllm.functional.checks import (
    Params,
    check_key,
    check_positions,
    check_range,
    check_sharding,
    check_sizes,
    checked_edit,
    checked_params,
    checked_prompts,
    integers,
    is_known,
    transformable,
)
from jaxllm.functional.paged import KVCache, init_cache, ragged_prefill
from jaxllm.models.architecture import ModelConfig
from jaxllm.models.layers import Edit
from jaxllm.pallas_kernels.settings import under_jax_defaults
from jaxllm.pallas_kernels.varying import varying_as
from jaxllm.sampling.param_checks import MAX_LOGIT_BIAS

_MAX_TEMPERATURE = 1e6


class Generated(NamedTuple):
    """`tokens` [B, max_new_tokens] int32, 0 after a row's end; `lengths` [B] int32.

    A token of -1 ends a row whose logits hold a NaN or infinity, so that there is none to sample.
    """

    tokens: jax.Array
    lengths: jax.Array


export.register_namedtuple_serialization(Generated, serialized_name="jaxllm.Generated")


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
    edit: Edit | None = None,
) -> Generated:
    """Complete a batch of prompts in one device program that stops when every row has ended.

    To a gradient the tokens are constants.

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
        implementation: as in `prefill`.
        edit: as in `prefill`, and then as in `decode`.

    Raises:
        ConfigError, RequestError: shapes do not fit, the result would exceed the model's positions, or
            (outside of a caller's `jax.jit`, where values are known) a value is out of range.
    """
    params, edit = checked_params(params, config), _without_gradients(checked_edit(edit))
    tokens, lengths = checked_prompts(config, tokens, lengths)
    check_sizes(config, max_new_tokens=max_new_tokens, block_size=block_size)
    batch_size, prompt_len = tokens.shape
    check_key(key)
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
        check_sharding(name, value)
        check_range(name, value, low, high)
    check_sharding("key", key)
    if not jnp.issubdtype(jnp.result_type(top_k), jnp.integer):
        raise RequestError(f"top_k={shown(top_k)} must be an integer, or one for each row")
    if isinstance(eos_token_ids, Iterable) and not is_known(*eos_token_ids):
        raise RequestError(
            "eos_token_ids must be known while a program is traced: close over them, as a tuple"
        )
    ends = integers("eos_token_ids", [*eos_token_ids] if isinstance(eos_token_ids, Iterable) else 0, 1)
    check_range("eos_token_ids", ends, 0, config.vocab_size - 1)
    max_len = prompt_len + max_new_tokens
    if max_len > config.max_model_len:
        raise RequestError(
            f"prompts of {prompt_len} and {max_new_tokens} new tokens exceed the model's "
            f"{config.max_model_len} positions; lower max_new_tokens or shorten the prompts"
        )
    check_positions(config, max_len)
    sampling = _sampling(temperature, top_k, top_p, min_p)
    stops = jnp.asarray(ends, jnp.int32)

    def run(
        edit: Edit | None,
        params: Params,
        tokens: jax.Array,
        lengths: jax.Array,
        key: jax.Array,
        *options: Any,
    ) -> Generated:
        cache = init_cache(config, batch_size, max_len, block_size, next(iter(params.values())).dtype)
        slot_params = _slot_params(batch_size, lengths, key, *options)
        step = functools.partial(
            run_step, config, params, sampling=sampling, implementation=implementation, edit=edit
        )
        return _generated(step, slot_params, cache, tokens, lengths, max_new_tokens, stops)

    arguments = lax.stop_gradient((params, tokens, lengths, key, temperature, top_k, top_p, min_p))
    return transformable(run, implementation, config, block_size, edit)(*arguments)


def _without_gradients(edit: Edit | None) -> Edit | None:
    """An edit whose results are taken as constants, whatever it closes over."""
    return None if edit is None else lambda layer, x: lax.stop_gradient(edit(layer, x))


def _generated(
    step: Callable[..., tuple[DeviceState, StepOutputs]],
    slot_params: SlotParams,
    cache: KVCache,
    tokens: jax.Array,
    lengths: jax.Array,
    most: int,
    stops: jax.Array,
) -> Generated:
    """Up to `most` tokens of each row by `run_step`, until they have all sampled one of `stops` [S]."""
    batch_size, prompt_len = tokens.shape
    history = jnp.zeros((batch_size + 1, prompt_len + most + 1), jnp.int32)
    rows = jnp.arange(batch_size, dtype=jnp.int32)

    def is_end(new: jax.Array) -> jax.Array:
        if not stops.size:  # an empty constant inside a `shard_map` crashes JAX 0.11's compiler
            return new < 0
        return (new < 0) | jnp.any(new[:, None] == stops[None, :], axis=-1)

    inputs = ragged_prefill(cache.block_tables, tokens, lengths, jnp.zeros_like(lengths))
    state, outputs = step(DeviceState(cache.pool, history), slot_params, None, inputs)
    first = outputs.sampled.tokens

    def varying(state: DeviceState) -> DeviceState:  # as sampled tokens do, which steps write into it
        return state._replace(pool=varying_as(state.pool, first), history=varying_as(state.history, first))

    carry = varying(state), varying_as(lengths, first), is_end(first), jnp.int32(1)

    def unfinished(carry: tuple[DeviceState, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return (carry[3] < most) & ~jnp.all(carry[2])

    def body(
        carry: tuple[DeviceState, jax.Array, jax.Array, jax.Array],
    ) -> tuple[DeviceState, jax.Array, jax.Array, jax.Array]:
        state, kv_lengths, done, count = carry
        kv_lengths = jnp.where(done, kv_lengths, kv_lengths + 1)
        inputs = DecodeInputs(rows, jnp.where(done, 0, kv_lengths), cache.block_tables)
        state, outputs = step(state, slot_params, inputs, None)
        return varying(state), kv_lengths, done | is_end(outputs.sampled.tokens), count + 1

    state, kv_lengths, _, _ = lax.while_loop(unfinished, body, carry)
    new_lengths = kv_lengths - lengths + 1
    places = jnp.arange(most, dtype=jnp.int32)[None, :]
    new_tokens = jnp.take_along_axis(state.history[:batch_size], lengths[:, None] + places, axis=1)
    return Generated(jnp.where(places < new_lengths[:, None], new_tokens, 0), new_lengths)


def _sampling(temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> Sampling:
    """What the program must be able to do; a value that is not known yet may ask for anything."""

    def may_differ(value: Any, neutral: float) -> bool:
        return isinstance(value, jax.core.Tracer) or bool(np.any(np.asarray(value) != neutral))

    if not may_differ(temperature, 0):
        return Sampling.GREEDY
    if may_differ(top_k, 0) or may_differ(top_p, 1) or may_differ(min_p, 0):
        return Sampling.RANDOM | Sampling.FILTERED
    return Sampling.RANDOM


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
