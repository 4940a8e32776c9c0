"""Decode iterations, each on what the one before it kept, without the host between.

Each yields one token of a request, or more with drafts. By prompt lookup the device looks in each iteration
for what followed a request's newest tokens before, as `sched.proposers.ngram` does. Drafts of a model or of
heads come from a program of their own (`jaxllm.executor.chain`), and go into one iteration. They are computed
behind the newest token, each place is sampled, and what is as sampled is kept:

    history   ... newest | draft draft draft |        each place is sampled with the row's own seed
    sampled                a     b     c     d        and options at its position: a is kept, b if the
                                                      first draft is a, c if the second is b, ...
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.executor.sampler import SampledRows
from jaxllm.executor.slot_params import SlotParams
from jaxllm.executor.step import DeviceState, StepOutputs, run_step
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


def ends(params: SlotParams, slots: jax.Array, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """Whether tokens at places `lengths` of their slots' histories end the requests, as the host decides."""
    is_end = jnp.any(params.end_ids[slots] == tokens[..., None], axis=-1)
    least = jnp.maximum(params.prompt_length + 1, params.min_length)[slots]
    return (tokens < 0) | (is_end & (lengths + 1 >= least))


class Drafting(NamedTuple):
    """What is asked of iterations with drafts.

    `limits` [B] int32 are how many tokens each row may have at the end, and `num_drafts` int32 the most
    drafts of each in an iteration. `given` [K, B] int32 are those of the only iteration; None to look for
    them.
    """

    limits: jax.Array
    num_drafts: jax.Array
    given: jax.Array | None = None


class _Wanted(NamedTuple):
    """`counts` [B] tokens of each row: the newest of its `lengths` [B], and the first of `drafts` [B, K]."""

    lengths: jax.Array
    drafts: jax.Array
    counts: jax.Array


_Sampled = tuple[DeviceState, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class _Iteration:
    """Computes what is wanted of each row, and samples of it.

    Gives the state, what was sampled [B, K + 1] int32, and the logits where there are no drafts.

    Args:
        step: `run_step` of the model, by state, decodes and prompts.
        rows: of `run_decode_steps`.
        width: K + 1.
        no_logits: given where there are drafts.
    """

    step: Callable[..., tuple[DeviceState, StepOutputs]]
    rows: DecodeInputs
    width: int
    no_logits: jax.Array

    def decode(self, state: DeviceState, wanted: _Wanted) -> _Sampled:
        """Where no row has drafts: as many rows as there are, not as there may be."""
        inputs = self.rows._replace(lengths=jnp.where(wanted.counts > 0, wanted.lengths, 0))
        state, outputs = self.step(state, inputs, None)
        sampled = jnp.pad(outputs.sampled.tokens[:, None], ((0, 0), (0, self.width - 1)))
        return state, sampled, self.no_logits if self.width > 1 else outputs.logits

    def verify(self, state: DeviceState, wanted: _Wanted) -> _Sampled:
        """Where some may have some."""
        lengths, drafts, counts = wanted
        num_rows, places = len(lengths), jnp.arange(self.width)
        size, of_rows = num_rows * self.width, jnp.arange(num_rows)
        # Those without drafts first, as decodes; then chunks of those with some; who has ended is last.
        is_decode, is_chunk = counts == 1, counts > 1
        num_decodes, num_chunks = jnp.sum(is_decode), jnp.sum(is_chunk)
        kinds = jnp.stack([is_decode, is_chunk, counts == 0])
        firsts = jnp.stack([0 * num_decodes, num_decodes, num_decodes + num_chunks])
        ranks = jnp.sum(kinds * (firsts[:, None] + jnp.cumsum(kinds, axis=1) - 1), axis=0)
        order = jnp.zeros(num_rows, jnp.int32).at[ranks].set(of_rows)
        chunks = order[jnp.minimum(num_decodes + of_rows, num_rows - 1)]
        chunk_rows = jnp.where(of_rows < num_chunks, counts[chunks], 0)
        of_chunks = jnp.where(is_chunk, counts, 0)
        starts = jnp.where(is_chunk, num_decodes + jnp.cumsum(of_chunks) - of_chunks, ranks)
        own = jnp.where(places < counts[:, None], starts[:, None] + places, size)
        newest = state.history[self.rows.slots, lengths - 1]
        parts = (
            jnp.concatenate([newest[:, None], drafts], axis=1),
            self.rows.slots[:, None],
            lengths[:, None] + places,
        )
        packed = jnp.full((3, size), jnp.array([[0], [-1], [0]]), jnp.int32)
        packed = packed.at[:, own].set(jnp.stack(jnp.broadcast_arrays(*parts)), mode="drop")
        decodes = DecodeInputs(
            self.rows.slots[order],
            jnp.where(of_rows < num_decodes, lengths[order], 0),
            self.rows.block_tables[order],
        )
        prompts = PrefillInputs(
            tokens=packed[0],
            targets=packed[0],
            query_starts=num_decodes + jnp.pad(jnp.cumsum(chunk_rows), (1, 0)),
            lengths=(lengths + counts - 1)[chunks],
            slots=self.rows.slots[chunks],
            num_seqs=num_chunks[None],
            sampled=packed.at[0].set(jnp.arange(size)),
            block_tables=self.rows.block_tables[chunks],
        )
        state, outputs = self.step(state, decodes, prompts)
        return state, outputs.sampled.tokens[jnp.minimum(own, size - 1)], self.no_logits

    def either(self, state: DeviceState, wanted: _Wanted) -> _Sampled:
        """Whichever computes fewer rows. Two loops of one turn: `lax.cond` may copy the pool."""
        any_drafts = jnp.any(wanted.counts > 1)

        def turn(step: Callable[..., _Sampled], found: tuple[Any, ...]) -> tuple[Any, ...]:
            return jnp.array(False), *step(found[1], wanted)

        found: Any = state, jnp.zeros((len(wanted.counts), self.width), jnp.int32), self.no_logits
        for step, is_due in ((self.verify, any_drafts), (self.decode, ~any_drafts)):
            once = functools.partial(turn, step)
            found = lax.while_loop(lambda found: found[0], once, (is_due, *found))[1:]
        return found

    def __call__(self, state: DeviceState, wanted: _Wanted) -> _Sampled:
        """By the way that is fastest."""
        if self.width == 1:
            return self.decode(state, wanted)
        return lax.platform_dependent(state, wanted, cpu=self.either, default=self.verify)


class _Carry(NamedTuple):
    turn: jax.Array
    state: DeviceState
    lengths: jax.Array
    is_live: jax.Array
    collected: jax.Array
    logits: jax.Array


def run_decode_steps(
    config: ModelConfig,
    params: Mapping[str, jax.Array],
    state: DeviceState,
    slot_params: SlotParams,
    decode: DecodeInputs,
    num_steps: jax.Array,
    drafting: Drafting | None = None,
    *,
    max_steps: int,
    lookup: Lookup | None = None,
    **options: Any,
) -> tuple[DeviceState, StepOutputs]:
    """Compute several decode iterations, each on what the one before it kept.

    A row that samples one of its `end_ids` is padding from then on; when all rows are, the program ends.
    Without drafts they are so in the program after this one, too, which the host may have sent before it
    knows.

    Args:
        config: the model's configuration (static).
        params: flat weights.
        state: the device state.
        slot_params: by slot.
        decode: the rows; `lengths` are their known tokens, and the block tables have blocks for all that they
            may have at the end.
        num_steps: int32, iterations to compute.
        drafting: see there; None for a token of each row and iteration.
        max_steps: the most iterations there may be (static).
        lookup: how drafts are found, and how many K are at most (static); None without.
        options: static ones of `run_step`.

    Returns:
        The state, and outputs with `[max_steps * B * (K + 1)]` rows, one iteration after another. What a row
        did not keep is `WRONG_DRAFT` where there was a draft, else `NO_TOKEN`. Their `lengths` are the
        known tokens of who goes on after that, 0 of others. There are `logits` where there are no drafts.
    """
    rows, width = len(decode.slots), 1 if lookup is None else lookup.num_drafts + 1
    no_logits = jnp.zeros((rows if drafting is None else 0, config.num_head_rows), jnp.float32)
    if drafting is None:
        drafting = Drafting(decode.lengths + num_steps, jnp.int32(0), jnp.zeros((0, rows), jnp.int32))
    limits, places = drafting.limits, jnp.arange(width)

    def step(state: DeviceState, *inputs: Any) -> tuple[DeviceState, StepOutputs]:
        return run_step(config, params, state, slot_params, *inputs, **options)

    compute = _Iteration(step, decode, width, no_logits)

    def body(carry: _Carry) -> _Carry:
        turn, state, lengths, is_live, collected, _ = carry
        if lookup is not None and drafting.given is None:
            drafts, are_there = look_up(state.history[decode.slots], lengths, lookup)
        else:
            drafts, are_there = jnp.asarray(drafting.given).T, jnp.array(True)
        room = jnp.minimum(drafting.num_drafts, limits - lengths - 1)
        counts = jnp.where(is_live, 1 + jnp.where(are_there, room, 0), 0)
        state, sampled, logits = compute(state, _Wanted(lengths, drafts, counts))
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
        return _Carry(turn + 1, state, lengths, is_live, collected, logits)

    newest = jnp.maximum(decode.lengths - 1, 0)
    has_ended = ends(slot_params, decode.slots, state.history[decode.slots, newest], newest)
    carry = _Carry(
        jnp.int32(0),
        state,
        decode.lengths,
        (decode.lengths > 0) & (decode.lengths < limits) & ~has_ended,
        jnp.full((max_steps, rows, width), NO_TOKEN, jnp.int32),
        no_logits,
    )
    if max_steps > 1:
        carry = lax.while_loop(lambda carry: (carry.turn < num_steps) & jnp.any(carry.is_live), body, carry)
    else:
        carry = body(carry)
    state = carry.state
    if width == 1:
        # Where the next program looks for the newest tokens it finds the ends of rows that have ended.
        last = state.history[decode.slots, jnp.maximum(carry.lengths - 1, 0)]
        slots = jnp.where(decode.lengths > 0, decode.slots, state.history.shape[0] - 1)
        place = jnp.minimum(newest + num_steps, state.history.shape[1] - 1)
        state = state._replace(history=state.history.at[slots, place].set(last))
    outputs = SampledRows(carry.collected.reshape(-1), None)
    lengths = jnp.where(carry.is_live, carry.lengths, 0)
    return state, StepOutputs(outputs, None, carry.logits, lengths)
