"""Decode iterations with drafts, each on what the one before it kept, without the host between.

By prompt lookup there are several in one program: in each the device looks for what followed a request's
newest tokens before, as `sched.proposers.ngram` does. Drafts of a model or of heads come from a program of
their own (`jaxllm.executor.chain`), and go into one iteration. They are computed behind the newest token,
each place is sampled, and what is as sampled is kept:

    history   ... newest | draft draft draft |        each place is sampled with the row's own seed
    sampled                a     b     c     d        and options at its position: a is kept, b if the
                                                      first draft is a, c if the second is b, ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.executor.sampler import SampledRows
from jaxllm.executor.slot_params import SlotParams
from jaxllm.executor.step import DeviceState, StepOutputs, ends, run_step
from jaxllm.executor.step_rows import DecodeInputs, PrefillInputs
from jaxllm.models.architecture import ModelConfig
from jaxllm.types import NO_TOKEN, WRONG_DRAFT


class Lookup(NamedTuple):
    """Static of programs that draft: most drafts of a request in an iteration, and how long runs may be.

    None are looked for if `most` is 0: the drafts are given.
    """

    num_drafts: int
    least: int = 0
    most: int = 0


def look_up(history: jax.Array, lengths: jax.Array, lookup: Lookup) -> tuple[jax.Array, jax.Array]:
    """What followed the last `most` to `least` tokens before: the longest run, and of several the latest.

    Args:
        history: [B, N] int32, tokens of each row, `lengths` [B] of them.
        lengths: as above.
        lookup: what is looked for (static).

    Returns:
        Drafts [B, K] int32; where they reach the end of the history they go round. And whether each row has
        any, [B].
    """
    size, width = jnp.arange(history.shape[1]), lookup.most
    newest = lengths[:, None] - 1
    are_alike = jnp.ones(history.shape, bool)
    found = jnp.zeros(history.shape, jnp.int32)  # how long a run ends before each place
    for back in range(width):
        wanted = jnp.take_along_axis(history, jnp.maximum(newest - back, 0), axis=1)
        before = jnp.pad(history, ((0, 0), (back + 1, 0)))[:, : history.shape[1]]
        are_alike &= (before == wanted) & (size > back)
        found += are_alike
    is_place = (size <= newest) & (found >= lookup.least)
    best = jnp.where(is_place, found * history.shape[1] + size, 0)
    place = jnp.max(best, axis=1, keepdims=True) % history.shape[1]
    period = jnp.maximum(newest + 1 - place, 1)
    drafts = jnp.take_along_axis(history, place + jnp.arange(lookup.num_drafts) % period, axis=1)
    return drafts, jnp.any(is_place, axis=1)


class _Carry(NamedTuple):
    turn: jax.Array
    state: DeviceState
    lengths: jax.Array
    is_live: jax.Array
    collected: jax.Array


def run_lookup_steps(
    config: ModelConfig,
    params: Mapping[str, jax.Array],
    state: DeviceState,
    slot_params: SlotParams,
    decode: DecodeInputs,
    limits: jax.Array,
    num_drafts: jax.Array,
    num_steps: jax.Array,
    given: jax.Array | None = None,
    *,
    max_steps: int,
    lookup: Lookup,
    **options: Any,
) -> tuple[DeviceState, StepOutputs]:
    """Compute several iterations, each on what the one before it kept.

    Args:
        config, params, state, slot_params: as of `step.run_decode_steps`.
        decode: the rows; `lengths` are their known tokens, and the block tables have blocks for `limits`.
        limits: [B] int32, how many tokens each may have at the end.
        num_drafts: int32, most drafts of each in an iteration.
        num_steps: int32, iterations to compute.
        given: [K, B] int32, drafts of the only iteration; None to look for them.
        max_steps: the most there may be (static).
        lookup: how drafts are found (static).
        options: static ones of `run_step`.

    Returns:
        The state, and outputs with `[max_steps * B * (K + 1)]` rows, one iteration after another. What a row
        did not keep is `WRONG_DRAFT` where there was a draft, else `NO_TOKEN`. Their `lengths` are the
        known tokens of who goes on after that, 0 of others.
    """
    rows, width = decode.slots.shape[0], lookup.num_drafts + 1
    places, of_rows = jnp.arange(width), jnp.arange(rows)

    def decode_only(
        state: DeviceState, lengths: jax.Array, drafts: jax.Array, counts: jax.Array
    ) -> tuple[DeviceState, jax.Array]:
        """The same where no row has drafts: as many rows as there are, not as there may be."""
        inputs = DecodeInputs(decode.slots, jnp.where(counts > 0, lengths, 0), decode.block_tables)
        state, outputs = run_step(config, params, state, slot_params, inputs, None, **options)
        return state, jnp.pad(outputs.sampled.tokens[:, None], ((0, 0), (0, width - 1)))

    def verify(
        state: DeviceState, lengths: jax.Array, drafts: jax.Array, counts: jax.Array
    ) -> tuple[DeviceState, jax.Array]:
        """Compute `counts` [B] tokens of each row, the newest and its drafts; [B, K + 1] are sampled."""
        # Those without drafts first, as decodes; then chunks of those with some; who has ended is last.
        is_decode, is_chunk = counts == 1, counts > 1
        num_decodes, num_chunks = jnp.sum(is_decode), jnp.sum(is_chunk)
        kinds = jnp.stack([is_decode, is_chunk, counts == 0])
        firsts = jnp.stack([0 * num_decodes, num_decodes, num_decodes + num_chunks])
        ranks = jnp.sum(kinds * (firsts[:, None] + jnp.cumsum(kinds, axis=1) - 1), axis=0)
        order = jnp.zeros(rows, jnp.int32).at[ranks].set(of_rows)
        chunks = order[jnp.minimum(num_decodes + of_rows, rows - 1)]
        chunk_rows = jnp.where(of_rows < num_chunks, counts[chunks], 0)
        of_chunks = jnp.where(is_chunk, counts, 0)
        starts = jnp.where(is_chunk, num_decodes + jnp.cumsum(of_chunks) - of_chunks, ranks)
        own = jnp.where(places < counts[:, None], starts[:, None] + places, rows * width)
        newest = state.history[decode.slots, lengths - 1]
        parts = (
            jnp.concatenate([newest[:, None], drafts], axis=1),
            decode.slots[:, None],
            lengths[:, None] + places,
        )
        packed = jnp.full((3, rows * width), jnp.array([[0], [-1], [0]]), jnp.int32)
        packed = packed.at[:, own].set(jnp.stack(jnp.broadcast_arrays(*parts)), mode="drop")
        decodes = DecodeInputs(
            decode.slots[order],
            jnp.where(of_rows < num_decodes, lengths[order], 0),
            decode.block_tables[order],
        )
        prompts = PrefillInputs(
            tokens=packed[0],
            targets=packed[0],
            query_starts=num_decodes + jnp.pad(jnp.cumsum(chunk_rows), (1, 0)),
            lengths=(lengths + counts - 1)[chunks],
            slots=decode.slots[chunks],
            num_seqs=num_chunks[None],
            sampled=packed.at[0].set(jnp.arange(rows * width)),
            block_tables=decode.block_tables[chunks],
        )
        state, outputs = run_step(config, params, state, slot_params, decodes, prompts, **options)
        return state, outputs.sampled.tokens[jnp.minimum(own, rows * width - 1)]

    def verify_any(
        state: DeviceState, lengths: jax.Array, drafts: jax.Array, counts: jax.Array
    ) -> tuple[DeviceState, jax.Array]:
        """The same, by whichever has fewer rows. Two loops of one turn: `lax.cond` may copy the pool."""
        inputs, sampled = (lengths, drafts, counts), jnp.zeros((rows, width), jnp.int32)
        any_drafts = jnp.any(counts > 1)

        def turn(step: Callable[..., Any], found: tuple[Any, ...]) -> tuple[Any, ...]:
            return jnp.array(False), *step(found[1], *inputs)

        for step, is_due in ((verify, any_drafts), (decode_only, ~any_drafts)):
            _, state, sampled = lax.while_loop(
                lambda found: found[0], functools.partial(turn, step), (is_due, state, sampled)
            )
        return state, sampled

    def body(carry: _Carry) -> _Carry:
        turn, state, lengths, is_live, collected = carry
        if given is None:
            drafts, are_there = look_up(state.history[decode.slots], lengths, lookup)
        else:
            drafts, are_there = given.T, jnp.array(True)
        room = jnp.minimum(num_drafts, limits - lengths - 1)
        counts = jnp.where(is_live, 1 + jnp.where(are_there, room, 0), 0)
        state, sampled = lax.platform_dependent(
            state, lengths, drafts, counts, cpu=verify_any, default=verify
        )
        is_draft = places[1:] < counts[:, None]
        are_right = jnp.cumprod((sampled[:, :-1] == drafts) & is_draft, axis=1)
        are_kept = jnp.pad(are_right, ((0, 0), (1, 0)), constant_values=1) & is_live[:, None]
        are_ends = ends(slot_params, decode.slots[:, None], sampled, lengths[:, None] + places)
        are_kept &= jnp.cumsum(are_ends, axis=1) - are_ends == 0
        kept = jnp.sum(are_kept, axis=1)
        nothing = jnp.where(places < counts[:, None], WRONG_DRAFT, NO_TOKEN)
        collected = collected.at[turn].set(jnp.where(are_kept, sampled, nothing))
        lengths = lengths + kept
        is_live &= ~jnp.any(are_kept & are_ends, axis=1) & (lengths < limits)
        return _Carry(turn + 1, state, lengths, is_live, collected)

    carry = _Carry(
        jnp.int32(0),
        state,
        decode.lengths,
        (decode.lengths > 0) & (decode.lengths < limits),
        jnp.full((max_steps, rows, width), NO_TOKEN, jnp.int32),
    )
    if given is None:
        carry = lax.while_loop(lambda carry: (carry.turn < num_steps) & jnp.any(carry.is_live), body, carry)
    else:
        carry = body(carry)
    sampled = SampledRows(carry.collected.reshape(-1), None)
    lengths = jnp.where(carry.is_live, carry.lengths, 0)
    return carry.state, StepOutputs(sampled, None, jnp.zeros((0, config.num_head_rows), jnp.float32), lengths)
