"""The device program of one iteration, as a pure function.

A step decodes one token each of some requests and computes chunks of prompts beside them; either may be
absent. Where there are prompts both share a fixed number of rows, R, as they come:

    rows    |- decode: D -|-------- prompt tokens: T --------|- padding -|
    sampled   the decode rows, and the last rows of chunks that end their sequences

D and T are data, not shapes. Linear layers see all rows together; attention runs over the first B rows, most
of which may be padding, for the decodes, and over all rows for the chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm import pallas_kernels
from jaxllm.executor.context_parallel import OwnRows, SharedPrompts
from jaxllm.executor.sampler import Logprobs, SampledRows, all_logits, sample, token_logprobs
from jaxllm.executor.slot_params import Sampling, SlotParams
from jaxllm.executor.step_rows import DecodeInputs, Places, PrefillInputs, num_rows_of, places_of
from jaxllm.models.architecture import CausalLM, ModelConfig
from jaxllm.models.layers import Attend, Edit, LayerInputs
from jaxllm.models.registry import bind
from jaxllm.pallas_kernels.heads import RopeTable
from jaxllm.sampling.logits_processors import LogitsProcessor

_PROMPT_LOGPROB_ROWS = 64


class DeviceState(NamedTuple):
    """What steps carry on the device, donated from one to the next.

    `pool` is the KV pool [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; `history` holds the
    tokens of each slot, [num_slots + 1, max_model_len + 1] int32, the last row belonging to padding.
    `hidden` [num_slots + 1, W, features] is what the newest tokens of each slot were sampled from, that of
    position p at p % W; `layers` [num_blocks, block_size, features] is what some layers were given, side by
    side, of each token with KV in the pool. Either is None where nobody wants it.
    """

    pool: jax.Array
    history: jax.Array
    hidden: jax.Array | None = None
    layers: jax.Array | None = None


class StepOutputs(NamedTuple):
    """Sampled rows, and with `Sampling.PROMPT_LOGPROBS` those of each row's target in a step with prompts.

    Of several decode iterations the rows come one iteration after another. `logits` [S, vocab_size] float32
    are those that rows were sampled of, in the last iteration; of devices that share the output head each has
    those of its tokens. `lengths` [B] int32 are those of `decode_steps`.
    """

    sampled: SampledRows
    prompt_logprobs: Logprobs | None
    logits: jax.Array
    lengths: jax.Array | None = None


class PagedAttention(Attend):
    """Attention over decodes and prompts; stores the new KV in the pool it carries through the layers."""

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
        self.num_rows = num_rows_of(decode, prefill)
        plain = pallas_kernels.REFERENCE
        self.splits_products = implementation != plain and pallas_kernels.default_implementation() == "triton"

    def __call__(
        self,
        layer: int,
        qkv: jax.Array,
        rope: RopeTable | None,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        dtype: jnp.dtype | None = None,
    ) -> jax.Array:
        """See `Attend`."""
        decode, prefill = self._decode, self._prefill
        prompts = None
        if prefill is not None:
            prompts = prefill.block_tables, prefill.query_starts, prefill.lengths, prefill.num_seqs[0]
        self.pool, out = pallas_kernels.attend(
            qkv,
            rope,
            self.pool,
            self._slot_mapping,
            None if decode is None else (decode.block_tables, decode.lengths),
            prompts,
            layer=layer,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            dtype=dtype,
            implementation=self._implementation,
        )
        return out


def forward(
    config: ModelConfig,
    params: Mapping[str, jax.Array],
    pool: jax.Array,
    decode: DecodeInputs | None,
    tokens: jax.Array,
    prefill: PrefillInputs | None,
    *,
    first_positions: jax.Array | None = None,
    implementation: str | None = None,
    edit: Edit | None = None,
    keeps: LayerInputs | None = None,
    num_contexts: int = 1,
) -> tuple[jax.Array, jax.Array, CausalLM]:
    """The forward pass over decodes and prompts.

    Args:
        config: the model's configuration (static).
        params: flat weights.
        pool: the KV pool.
        decode: what is decoded, if anything.
        tokens: [R] int32, the tokens of all rows; [B] without prompts.
        prefill: the prompt chunks, if any.
        first_positions: [R] int32, the position that the model sees in the first token of each row's
            sequence; 0 if None.
        implementation: of attention.
        edit: changes the residual stream [R, hidden_size] before layers.
        keeps: is told what layers are given.
        num_contexts: so many devices, along `placement.CONTEXT`, have the rows of a step with prompts between
            them, as many each; they know nothing of `edit` and `keeps`.

    Returns:
        The updated pool, the hidden states [R, features], and the bound model for its output head.
    """
    model = bind(config, params)
    places = places_of(decode, prefill, 0, pool.shape[4])
    positions = jnp.maximum(places.positions, 0)
    if first_positions is not None:
        positions += first_positions
    attend: PagedAttention | SharedPrompts
    if num_contexts > 1 and prefill is not None:
        own = OwnRows(len(tokens), num_contexts, num_rows_of(decode, prefill))
        attend = SharedPrompts(pool, places.slot_mapping, decode, prefill, own, implementation)
        hidden = own.gathered(model(own.of(tokens), own.of(positions), attend))
        return attend.pool, own.in_order(hidden), model
    attend = PagedAttention(pool, places.slot_mapping, decode, prefill, implementation)
    attend.edit, attend.keeps = edit, keeps
    hidden = model(tokens, positions, attend)
    return attend.pool, hidden, model


def run_step(
    config: ModelConfig,
    params: Mapping[str, jax.Array],
    state: DeviceState,
    slot_params: SlotParams,
    decode: DecodeInputs | None,
    prefill: PrefillInputs | None,
    *,
    sampling: Sampling,
    processors: tuple[LogitsProcessor, ...] = (),
    implementation: str | None = None,
    edit: Edit | None = None,
    kept_layers: tuple[int, ...] = (),
    num_contexts: int = 1,
) -> tuple[DeviceState, StepOutputs]:
    """Compute one iteration: forward pass, KV writes, sampling, and the sampled tokens into the history.

    `sampling` is what its requests ask for (static), `processors` those of `sample`, `edit` and
    `num_contexts` as in `forward`; `kept_layers` are those of `DeviceState.layers`.
    """
    pool, history, kept, layers = state
    places, tokens, history = rows_of(history, decode, prefill, pool.shape[4])
    keeps = None if layers is None else LayerInputs(kept_layers)
    pool, hidden, model = forward(
        config,
        params,
        pool,
        decode,
        tokens,
        prefill,
        first_positions=slot_params.first_position[places.slots],
        implementation=implementation,
        edit=edit,
        keeps=keeps,
        num_contexts=num_contexts,
    )
    if layers is not None and keeps is not None:
        flat = layers.reshape(-1, layers.shape[2])
        rows = jnp.where(places.slot_mapping >= 0, places.slot_mapping, len(flat))
        given = jnp.concatenate(keeps.found, axis=1).astype(layers.dtype)
        layers = flat.at[rows].set(given, mode="drop").reshape(layers.shape)
    history, kept, outputs = sample_rows(
        model, config, hidden, history, kept, slot_params, places, decode, prefill, sampling, processors
    )
    return DeviceState(pool, history, kept, layers), outputs


def rows_of(
    history: jax.Array, decode: DecodeInputs | None, prefill: PrefillInputs | None, block_size: int
) -> tuple[Places, jax.Array, jax.Array]:
    """Where a step's rows belong, their tokens [R], and the history with those of prompts."""
    places = places_of(decode, prefill, history.shape[0] - 1, block_size)
    here = places.slots, jnp.maximum(places.positions, 0)
    tokens = history[here]
    if prefill is not None:
        is_prompt = jnp.arange(tokens.shape[0]) >= prefill.query_starts[0]
        tokens = jnp.where(is_prompt, prefill.tokens, tokens)
        history = history.at[here].set(tokens)
    return places, tokens, history


def sample_rows(
    model: CausalLM,
    config: ModelConfig,
    hidden: jax.Array,
    history: jax.Array,
    kept: jax.Array | None,
    slot_params: SlotParams,
    places: Places,
    decode: DecodeInputs | None,
    prefill: PrefillInputs | None,
    sampling: Sampling,
    processors: tuple[LogitsProcessor, ...],
) -> tuple[jax.Array, jax.Array | None, StepOutputs]:
    """What a step samples of its hidden states [R, features], also in the history and in what is kept."""
    padding_slot = history.shape[0] - 1
    prompt_logprobs = None
    if prefill is None:
        slots, lengths = places.slots, places.positions + 1
        num_sampled = num_rows_of(decode, None)
    else:
        rows, slots, lengths = prefill.sampled
        num_sampled = jnp.sum(slots >= 0, dtype=jnp.int32)
        slots = jnp.where(slots >= 0, slots, padding_slot)
        if Sampling.PROMPT_LOGPROBS in sampling:
            prompt_logprobs = _prompt_logprobs(model, config.head_axis, hidden, prefill.targets)
        hidden = hidden[rows]
    if kept is not None:
        kept = kept.at[slots, (lengths - 1) % kept.shape[1]].set(hidden)
    # Whatever is sampled how, the logits are computed in the same way.
    logits = lax.optimization_barrier(model.logits(hidden, num_sampled))
    options: dict[str, Any] = {"processors": processors, "is_native": model.is_packed}
    options["axis"] = config.head_axis
    sampled = sample(logits, slot_params, slots, history, lengths, sampling, **options)
    end = jnp.minimum(lengths, history.shape[1] - 1)
    history = history.at[slots, end].set(sampled.tokens)
    return history, kept, StepOutputs(sampled, prompt_logprobs, logits)


def _prompt_logprobs(model: CausalLM, axis: str | None, hidden: jax.Array, targets: jax.Array) -> Logprobs:
    """Score every prefill row's target, some rows at a time so that the logits stay small."""
    num_rows = hidden.shape[0]
    chunk = min(_PROMPT_LOGPROB_ROWS, num_rows)
    num_chunks = -(-num_rows // chunk)
    padding = num_chunks * chunk - num_rows
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(num_chunks, chunk, -1)
    targets = jnp.pad(targets, (0, padding)).reshape(num_chunks, chunk)

    def scores(some: tuple[jax.Array, jax.Array]) -> Logprobs:
        return token_logprobs(all_logits(model.logits(some[0]), axis), some[1])

    scored = lax.map(scores, (hidden, targets))
    return jax.tree.map(lambda rows: rows.reshape(-1, *rows.shape[2:])[:num_rows], scored)
