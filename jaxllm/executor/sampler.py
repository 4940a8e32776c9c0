"""Sampling on the device: from logits to tokens, one row per request.

Every stage that costs more than a few passes over the logits sits behind a `lax.cond`, so a batch pays only
for what one of its requests asks for. The order is vLLM's: logit bias, min_tokens, penalties, temperature,
min_p, top_k, top_p. Log-probabilities are those of the raw logits.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllm.sampling_params import MAX_BANNED_TOKEN_IDS, MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams

_NEGATIVE = -1e30
_MAX_END_IDS = 8


class SlotParams(NamedTuple):
    """Sampling parameters by slot; the last row belongs to padding and is greedy.

    As numpy arrays on the host and, uploaded when a slot changes, as device arrays. `seeds` holds the high
    and low 32 bits. Unused places of `bias_ids` and `banned_ids` are -1. `banned_ids` may not be sampled
    before the request is `min_length` tokens long (prompt included). `end_ids` are tokens that end the
    request, as many as there is room for: the host knows them all.
    """

    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    repetition_penalty: jax.Array
    top_k: jax.Array
    seeds: jax.Array
    prompt_length: jax.Array
    min_length: jax.Array
    num_logprobs: jax.Array
    num_prompt_logprobs: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    banned_ids: jax.Array
    end_ids: jax.Array

    @classmethod
    def host_zeros(cls, num_slots: int) -> SlotParams:
        """Greedy parameters for `num_slots` slots and the padding row, as numpy arrays."""
        rows = num_slots + 1
        floats = [np.zeros(rows, np.float32) for _ in range(6)]
        floats[1][:] = 1.0
        floats[5][:] = 1.0
        arrays = [
            *floats,
            np.zeros(rows, np.int32),
            np.zeros((rows, 2), np.uint32),
            np.zeros(rows, np.int32),
            np.zeros(rows, np.int32),
            np.full(rows, -1, np.int32),
            np.full(rows, -1, np.int32),
            np.full((rows, MAX_LOGIT_BIAS), -1, np.int32),
            np.zeros((rows, MAX_LOGIT_BIAS), np.float32),
            np.full((rows, MAX_BANNED_TOKEN_IDS), -1, np.int32),
            np.full((rows, _MAX_END_IDS), -1, np.int32),
        ]
        return cls(*arrays)  # type: ignore[arg-type]

    def host_set(
        self,
        slot: int,
        params: SamplingParams,
        *,
        seed: int,
        prompt_length: int,
        eos_token_ids: frozenset[int],
        end_token_ids: frozenset[int],
    ) -> None:
        """Write one request's parameters into a slot of the host arrays."""
        scalars = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "repetition_penalty": params.repetition_penalty,
            "top_k": params.top_k,
            "prompt_length": prompt_length,
            "min_length": prompt_length + params.min_tokens,
            "num_logprobs": -1 if params.logprobs is None else params.logprobs,
            "num_prompt_logprobs": -1 if params.prompt_logprobs is None else params.prompt_logprobs,
        }
        host: dict[str, np.ndarray] = self._asdict()
        for name, value in scalars.items():
            host[name][slot] = value
        host["seeds"][slot] = (seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF)
        bias = dict(params.logit_bias or {})
        host["bias_ids"][slot] = -1
        host["bias_ids"][slot, : len(bias)] = list(bias)
        host["bias_values"][slot, : len(bias)] = list(bias.values())
        banned: list[int] = []
        if params.min_tokens:
            banned = sorted({*(params.stop_token_ids or ()), *eos_token_ids})
        host["banned_ids"][slot] = -1
        host["banned_ids"][slot, : len(banned)] = banned
        ends = sorted(end_token_ids)[:_MAX_END_IDS]
        host["end_ids"][slot] = -1
        host["end_ids"][slot, : len(ends)] = ends


class SampledRows(NamedTuple):
    """Tokens [R] int32, and their log-probabilities where a request of the batch asks for them.

    `logprob` [R] and `rank` [R] (1 = most likely) are of the chosen token; `top_ids` and `top_logprobs` are
    [R, MAX_LOGPROBS], most likely first.
    """

    tokens: jax.Array
    logprob: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def sample(
    logits: jax.Array, params: SlotParams, slots: jax.Array, history: jax.Array, lengths: jax.Array
) -> SampledRows:
    """Sample one token per row.

    Args:
        logits: [R, vocab_size] float32.
        params: by slot.
        slots: [R] int32, the row's slot.
        history: [num_slots + 1, max_model_len + 1] int32, the tokens of each slot so far.
        lengths: [R] int32, tokens in the history of the row, which is the position of the sampled token.
    """
    rows = SlotParams(*(array[slots] for array in params))
    adjusted = _adjust(logits, rows, history, slots, lengths)
    greedy = jnp.argmax(adjusted, axis=-1).astype(jnp.int32)
    tokens = lax.cond(
        jnp.any(rows.temperature > 0),
        lambda: jnp.where(rows.temperature > 0, _sample_random(adjusted, rows, lengths), greedy),
        lambda: greedy,
    )
    wanted = jnp.any(rows.num_logprobs >= 0)
    return SampledRows(tokens, *_maybe_logprobs(logits, tokens, wanted))


def _adjust(
    logits: jax.Array, rows: SlotParams, history: jax.Array, slots: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Logit bias, penalties, and the ban on ending before min_tokens."""
    row_ids = jnp.arange(logits.shape[0])[:, None]
    vocab_size = logits.shape[1]

    def biased(logits: jax.Array) -> jax.Array:
        ids = jnp.where(rows.bias_ids >= 0, rows.bias_ids, vocab_size)
        return logits.at[row_ids, ids].add(rows.bias_values, mode="drop")

    def banned(logits: jax.Array) -> jax.Array:
        early = (lengths < rows.min_length)[:, None]
        ids = jnp.where((rows.banned_ids >= 0) & early, rows.banned_ids, vocab_size)
        return logits.at[row_ids, ids].set(_NEGATIVE, mode="drop")

    def penalized(logits: jax.Array) -> jax.Array:
        tokens = history[slots]
        places = jnp.arange(tokens.shape[1])[None, :]
        in_output = (places >= rows.prompt_length[:, None]) & (places < lengths[:, None])
        counts = jnp.zeros(logits.shape, jnp.int32)
        counts = counts.at[row_ids, tokens].add(in_output.astype(jnp.int32), mode="drop")
        seen = jnp.zeros(logits.shape, jnp.int32)
        seen = seen.at[row_ids, tokens].max((places < lengths[:, None]).astype(jnp.int32), mode="drop")
        repetition = rows.repetition_penalty[:, None]
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(seen > 0, repeated, logits)
        logits = logits - rows.frequency_penalty[:, None] * counts
        return logits - rows.presence_penalty[:, None] * (counts > 0)

    def keep(logits: jax.Array) -> jax.Array:
        return logits

    logits = lax.cond(jnp.any(rows.bias_ids >= 0), biased, keep, logits)
    has_penalty = (
        (rows.presence_penalty != 0) | (rows.frequency_penalty != 0) | (rows.repetition_penalty != 1)
    )
    logits = lax.cond(jnp.any(has_penalty), penalized, keep, logits)
    return lax.cond(jnp.any(lengths < rows.min_length), banned, keep, logits)  # last: nothing may undo it


def _sample_random(logits: jax.Array, rows: SlotParams, lengths: jax.Array) -> jax.Array:
    """Gumbel-max sampling; the noise of a row depends on its seed and position only."""
    vocab_size = logits.shape[1]
    scaled = logits / jnp.maximum(rows.temperature, 1e-6)[:, None]
    has_min_p = rows.min_p > 0
    floor = scaled.max(axis=-1) + jnp.log(jnp.where(has_min_p, rows.min_p, 1.0))
    scaled = jnp.where(has_min_p[:, None] & (scaled < floor[:, None]), _NEGATIVE, scaled)
    has_top = (rows.top_k > 0) | (rows.top_p < 1)
    scaled = lax.cond(jnp.any(has_top), lambda x: _filter_top(x, rows), lambda x: x, scaled)

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocab_size,), jnp.float32)

    return jnp.argmax(scaled + jax.vmap(noise)(rows.seeds, lengths), axis=-1).astype(jnp.int32)


def _filter_top(logits: jax.Array, rows: SlotParams) -> jax.Array:
    """Keep the top_k most likely tokens, then the fewest of them whose probability reaches top_p."""
    vocab_size = logits.shape[1]
    ordered = -jnp.sort(-logits, axis=-1)
    top_k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab_size), vocab_size)
    in_top_k = jnp.arange(vocab_size)[None, :] < top_k[:, None]
    probabilities = jax.nn.softmax(jnp.where(in_top_k, ordered, _NEGATIVE), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = in_top_k & ((before < rows.top_p[:, None]) | (rows.top_p >= 1)[:, None])
    kept = kept.at[:, 0].set(True)
    threshold = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1)
    return jnp.where(logits < threshold[:, None], _NEGATIVE, logits)


def _maybe_logprobs(
    logits: jax.Array, tokens: jax.Array, wanted: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    num_rows = logits.shape[0]
    num_top = min(MAX_LOGPROBS, logits.shape[1])

    def none() -> tuple[jax.Array, ...]:
        return (
            jnp.zeros(num_rows, jnp.float32),
            jnp.zeros(num_rows, jnp.int32),
            jnp.zeros((num_rows, num_top), jnp.int32),
            jnp.zeros((num_rows, num_top), jnp.float32),
        )

    return lax.cond(wanted, lambda: token_logprobs(logits, tokens), none)


def token_logprobs(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Log-probability and rank of `tokens` [R], and the most likely tokens with theirs.

    Returns:
        (logprob [R] float32, rank [R] int32, top ids [R, K] int32, top log-probabilities [R, K] float32).
    """
    num_top = min(MAX_LOGPROBS, logits.shape[1])
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)
    rank = jnp.sum(logprobs > chosen, axis=-1).astype(jnp.int32) + 1
    top_logprobs, top_ids = lax.top_k(logprobs, num_top)
    return chosen[:, 0], rank, top_ids.astype(jnp.int32), top_logprobs
