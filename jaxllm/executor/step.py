"""The device program of one iteration, as a pure function.

A step works on a decode slice (one token of each of B requests) and a prefill slice (chunks of up to P
prompts, T tokens in all); either may be absent. Linear layers see the tokens of both together:

    rows    |--- decode: B ---|-------------- prefill: T --------------|
    sampled |--- decode: B ---|- last rows of the chunks: P -|
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm import pallas_kernels
from jaxllm.executor.sampler import SampledRows, SlotParams, sample, token_logprobs
from jaxllm.models.registry import AnyConfig, AnyModel, bind
from jaxllm.sampling_params import MAX_LOGPROBS

_PROMPT_LOGPROB_ROWS = 64
_NOT_COMPUTED = -1  # in place of a token


class DeviceState(NamedTuple):
    """What steps carry on the device, donated from one to the next.

    `pool` is the KV pool [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; `history` holds the
    tokens of each slot, [num_slots + 1, max_model_len + 1] int32, the last row belonging to padding.
    """

    pool: jax.Array
    history: jax.Array


class DecodeInputs(NamedTuple):
    """`slots` [B], `lengths` [B] (tokens with KV after this step; 0 in padding), `block_tables` [B, M]."""

    slots: jax.Array
    lengths: jax.Array
    block_tables: jax.Array


class PrefillInputs(NamedTuple):
    """Chunks one after another.

    `tokens` [T]; `targets` [T], the token after each (for prompt log-probabilities); `query_starts` [P + 1];
    `lengths` [P], tokens with KV after this step; `slots` [P]; `is_last` [P], 1 where the chunk ends its
    sequence and is sampled; `num_seqs` [1]; `block_tables` [P, M]. All int32.
    """

    tokens: jax.Array
    targets: jax.Array
    query_starts: jax.Array
    lengths: jax.Array
    slots: jax.Array
    is_last: jax.Array
    num_seqs: jax.Array
    block_tables: jax.Array


class PromptLogprobs(NamedTuple):
    """Log-probability and rank of each row's target [T], and the most likely tokens [T, MAX_LOGPROBS]."""

    logprob: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


class StepOutputs(NamedTuple):
    """Sampled rows (decode rows first), and prompt log-probabilities if there is a prefill slice.

    Of several decode iterations the rows come one iteration after another, and `num_steps` says how many
    were computed.
    """

    sampled: SampledRows
    prompt_logprobs: PromptLogprobs | None
    num_steps: jax.Array | None = None


class _Ragged(NamedTuple):
    """Per prefill row: its sequence, position and place in the pool; -1 in rows of padding."""

    seq: jax.Array
    positions: jax.Array
    slot_mapping: jax.Array


def slot_of(block_tables: jax.Array, rows: jax.Array, positions: jax.Array, block_size: int) -> jax.Array:
    """Pool slot, `block * block_size + offset`, of each position (-1 stays -1)."""
    position = jnp.maximum(positions, 0)
    column = jnp.minimum(position // block_size, block_tables.shape[1] - 1)
    slot = block_tables[rows, column] * block_size + position % block_size
    return jnp.where(positions >= 0, slot, -1)


def _ragged(inputs: PrefillInputs, block_size: int) -> _Ragged:
    rows = jnp.arange(inputs.tokens.shape[0], dtype=jnp.int32)
    ends = inputs.query_starts[1:]
    seq = jnp.searchsorted(ends, rows, side="right").astype(jnp.int32)
    inside = seq < inputs.num_seqs[0]
    seq = jnp.minimum(seq, ends.shape[0] - 1)
    positions = inputs.lengths[seq] - (ends[seq] - rows)
    positions = jnp.where(inside, positions, -1)
    return _Ragged(seq, positions, slot_of(inputs.block_tables, seq, positions, block_size))


class _PagedAttention:
    """Attention over both slices; stores the new KV in the pool it carries through the layers."""

    def __init__(
        self,
        pool: jax.Array,
        slot_mapping: jax.Array,
        decode: DecodeInputs | None,
        prefill: PrefillInputs | None,
        implementation: str | None,
    ) -> None:
        self.pool = pool
        self._slot_mapping = slot_mapping
        self._decode = decode
        self._prefill = prefill
        self._implementation = implementation

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, scale: float) -> jax.Array:
        implementation = self._implementation
        self.pool = pallas_kernels.write_kv(
            self.pool, k, v, self._slot_mapping, layer=layer, implementation=implementation
        )
        outputs = []
        num_decode = 0
        if self._decode is not None:
            num_decode = self._decode.slots.shape[0]
            outputs.append(
                pallas_kernels.decode_attention(
                    q[:num_decode],
                    self.pool,
                    self._decode.block_tables,
                    self._decode.lengths,
                    layer=layer,
                    scale=scale,
                    implementation=implementation,
                )
            )
        if self._prefill is not None:
            outputs.append(
                pallas_kernels.prefill_attention(
                    q[num_decode:],
                    self.pool,
                    self._prefill.block_tables,
                    self._prefill.query_starts,
                    self._prefill.lengths,
                    self._prefill.num_seqs[0],
                    layer=layer,
                    scale=scale,
                    implementation=implementation,
                )
            )
        return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs)


def _forward_places(
    decode: DecodeInputs | None, prefill: PrefillInputs | None, block_size: int
) -> tuple[jax.Array, jax.Array]:
    """Position and pool slot of every row of the step, -1 in padding."""
    positions, mappings = [], []
    if decode is not None:
        place = decode.lengths - 1
        rows = jnp.arange(place.shape[0], dtype=jnp.int32)
        positions.append(place)
        mappings.append(slot_of(decode.block_tables, rows, place, block_size))
    if prefill is not None:
        ragged = _ragged(prefill, block_size)
        positions.append(ragged.positions)
        mappings.append(ragged.slot_mapping)
    if not positions:
        raise ValueError("a step needs a decode or a prefill slice")
    return jnp.concatenate(positions), jnp.concatenate(mappings)


def forward(
    config: AnyConfig,
    params: Mapping[str, jax.Array],
    pool: jax.Array,
    decode: DecodeInputs | None,
    tokens: jax.Array,
    prefill: PrefillInputs | None,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, AnyModel]:
    """The forward pass over both slices.

    Args:
        config: the model's configuration (static).
        params: flat weights.
        pool: the KV pool.
        decode: the decode slice, if any.
        tokens: [B + T] int32, the tokens of the decode rows, then those of the prefill rows.
        prefill: the prefill slice, if any.
        implementation: of attention.

    Returns:
        The updated pool, the hidden states [B + T, features], and the bound model for its output head.
    """
    model = bind(config, params)
    positions, slot_mapping = _forward_places(decode, prefill, pool.shape[4])
    attend = _PagedAttention(pool, slot_mapping, decode, prefill, implementation)
    hidden = model(tokens, jnp.maximum(positions, 0), attend)
    return attend.pool, hidden, model


def run_step(
    config: AnyConfig,
    params: Mapping[str, jax.Array],
    state: DeviceState,
    slot_params: SlotParams,
    decode: DecodeInputs | None,
    prefill: PrefillInputs | None,
    *,
    implementation: str | None = None,
) -> tuple[DeviceState, StepOutputs]:
    """Compute one iteration: forward pass, KV writes, sampling, and the sampled tokens into the history."""
    pool, history = state
    padding_slot = history.shape[0] - 1
    tokens, slots, lengths = [], [], []
    num_decode = 0
    if decode is not None:
        num_decode = decode.slots.shape[0]
        is_real = decode.lengths > 0
        row_slots = jnp.where(is_real, decode.slots, padding_slot)
        tokens.append(history[row_slots, jnp.maximum(decode.lengths - 1, 0)])
        slots.append(row_slots)
        lengths.append(decode.lengths)
    if prefill is not None:
        ragged = _ragged(prefill, pool.shape[4])
        token_slots = jnp.where(ragged.positions >= 0, prefill.slots[ragged.seq], padding_slot)
        history = history.at[token_slots, jnp.maximum(ragged.positions, 0)].set(prefill.tokens)
        tokens.append(prefill.tokens)
        is_sampled = (jnp.arange(prefill.slots.shape[0]) < prefill.num_seqs[0]) & (prefill.is_last > 0)
        slots.append(jnp.where(is_sampled, prefill.slots, padding_slot))
        lengths.append(prefill.lengths)

    pool, hidden, model = forward(
        config, params, pool, decode, jnp.concatenate(tokens), prefill, implementation=implementation
    )
    sampled_hidden = hidden[:num_decode]
    prompt_logprobs = None
    if prefill is not None:
        last_rows = num_decode + jnp.maximum(prefill.query_starts[1:] - 1, 0)
        sampled_hidden = jnp.concatenate([sampled_hidden, hidden[last_rows]])
        is_wanted = jnp.any(slot_params.num_prompt_logprobs[token_slots] >= 0)
        prompt_logprobs = _prompt_logprobs(model, hidden[num_decode:], prefill.targets, is_wanted)

    all_slots, all_lengths = jnp.concatenate(slots), jnp.concatenate(lengths)
    sampled = sample(model.logits(sampled_hidden), slot_params, all_slots, history, all_lengths)
    end = jnp.minimum(all_lengths, history.shape[1] - 1)
    history = history.at[all_slots, end].set(sampled.tokens)
    return DeviceState(pool, history), StepOutputs(sampled, prompt_logprobs)


def run_decode_steps(
    config: AnyConfig,
    params: Mapping[str, jax.Array],
    state: DeviceState,
    slot_params: SlotParams,
    decode: DecodeInputs,
    num_steps: jax.Array,
    *,
    max_steps: int,
    implementation: str | None = None,
) -> tuple[DeviceState, StepOutputs]:
    """Compute several decode iterations, each on the tokens of the one before it.

    The program ends early when a row samples one of its `end_ids`. Where the next one, which the host may
    dispatch before it knows, looks for the newest tokens there is `_NOT_COMPUTED` then: it computes nothing,
    and neither do those after it, until one starts from tokens that are there. A row that had ended before
    the program is padding.

    Args:
        config: the model's configuration (static).
        params: flat weights.
        state: the device state.
        slot_params: by slot.
        decode: inputs of the first iteration; the block tables have blocks for all of them.
        num_steps: int32, iterations to compute.
        max_steps: the most there may be (static).
        implementation: of attention.

    Returns:
        The state, and outputs with the number of iterations computed and `[max_steps * B]` rows, one
        iteration after another; those of iterations that were not computed, or of rows that had ended
        before, mean nothing.
    """

    def step(state: DeviceState, lengths: jax.Array) -> tuple[DeviceState, SampledRows]:
        inputs = DecodeInputs(decode.slots, lengths, decode.block_tables)
        state, outputs = run_step(
            config, params, state, slot_params, inputs, None, implementation=implementation
        )
        return state, outputs.sampled

    is_real = decode.lengths > 0
    newest = jnp.maximum(decode.lengths - 1, 0)

    def ends(tokens: jax.Array, places: jax.Array) -> jax.Array:
        """Whether these tokens, at these places of the history, end their requests; as the host decides."""
        is_end = jnp.any(slot_params.end_ids[decode.slots] == tokens[:, None], axis=1) & (tokens >= 0)
        least = jnp.maximum(slot_params.prompt_length + 1, slot_params.min_length)[decode.slots]
        return is_end & (places + 1 >= least)

    def unfinished(carry: tuple[jax.Array, DeviceState, jax.Array, SampledRows]) -> jax.Array:
        i, _, is_over, _ = carry
        return (i < num_steps) & ~is_over

    def body(
        carry: tuple[jax.Array, DeviceState, jax.Array, SampledRows],
    ) -> tuple[jax.Array, DeviceState, jax.Array, SampledRows]:
        i, state, _, collected = carry
        state, sampled = step(state, jnp.where(is_live, decode.lengths + i, 0))
        collected = SampledRows(
            *(
                lax.dynamic_update_index_in_dim(x, row, i, 0)
                for x, row in zip(collected, sampled, strict=True)
            )
        )
        return i + 1, state, jnp.any(is_live & ends(sampled.tokens, decode.lengths + i)), collected

    tokens = state.history[decode.slots, newest]
    has_ended = ends(tokens, newest)
    is_live = is_real & ~has_ended
    is_over = ~jnp.any(is_live) | jnp.any(is_real & (tokens == _NOT_COMPUTED))
    shapes = jax.eval_shape(step, state, decode.lengths)[1]
    empty = SampledRows(*(jnp.zeros((max_steps, *shape.shape), shape.dtype) for shape in shapes))
    carry = (jnp.int32(0), state, is_over, empty)
    computed, state, _, collected = lax.while_loop(unfinished, body, carry)
    # Where the next program looks for the newest tokens.
    place = jnp.minimum(newest + num_steps, state.history.shape[1] - 1)
    last = jnp.where(has_ended, tokens, state.history[decode.slots, place])
    last = jnp.where((computed < num_steps) & jnp.any(is_live), _NOT_COMPUTED, last)
    slots = jnp.where(is_real, decode.slots, state.history.shape[0] - 1)
    state = state._replace(history=state.history.at[slots, place].set(last))
    sampled = SampledRows(*(x.reshape(-1, *x.shape[2:]) for x in collected))
    return state, StepOutputs(sampled, None, computed)


def _prompt_logprobs(
    model: AnyModel, hidden: jax.Array, targets: jax.Array, wanted: jax.Array
) -> PromptLogprobs:
    """Score every prefill row's target, some rows at a time so that the logits stay small."""
    num_rows = hidden.shape[0]
    chunk = min(_PROMPT_LOGPROB_ROWS, num_rows)
    num_chunks = -(-num_rows // chunk)
    padding = num_chunks * chunk - num_rows
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(num_chunks, chunk, -1)
    targets = jnp.pad(targets, (0, padding)).reshape(num_chunks, chunk)
    vocab_size = jax.eval_shape(model.logits, hidden[0]).shape[1]
    num_top = min(MAX_LOGPROBS, vocab_size)

    def score() -> PromptLogprobs:
        def one(args: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            return token_logprobs(model.logits(args[0]), args[1])

        flat = (
            x.reshape(num_chunks * chunk, *x.shape[2:])[:num_rows] for x in lax.map(one, (hidden, targets))
        )
        return PromptLogprobs(*flat)

    def none() -> PromptLogprobs:
        return PromptLogprobs(
            jnp.zeros(num_rows, jnp.float32),
            jnp.zeros(num_rows, jnp.int32),
            jnp.zeros((num_rows, num_top), jnp.int32),
            jnp.zeros((num_rows, num_top), jnp.float32),
        )

    return lax.cond(wanted, score, none)
