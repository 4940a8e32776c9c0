"""The programs of a draft model: what is new to it, and several greedy decode steps, without the host."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllm.executor.chain import Chain, chains_of
from jaxllm.executor.config import ExecutorConfig
from jaxllm.executor.drafted import warm_up_filling
from jaxllm.executor.drafter import CompiledAhead, placed
from jaxllm.executor.fastest import FASTEST
from jaxllm.executor.programs import EngineState, state_shapes
from jaxllm.executor.sampler import largest
from jaxllm.executor.step import forward
from jaxllm.executor.step_rows import DecodeInputs, PrefillInputs, chunk_of, slot_of
from jaxllm.models.architecture import ModelConfig
from jaxllm.models.registry import abstract_params, bind
from jaxllm.types import Request

_CATCH_UP_ROWS = 128
Array = Any
"""Of numpy's on the host, and of JAX's in programs."""


class DraftKey(NamedTuple):
    """What is static of a program: `rows` of new tokens, of `seqs` requests."""

    rows: int
    seqs: int


class DraftInputs(NamedTuple):
    """The new tokens of up to C requests, one after another in R rows, and how many to draft after them.

    `tokens` [R]; `sources` [R], where in the model's own pool the KV is of the tokens that these are beside;
    `starts` [C + 1], rows, with the end of the last one; `lengths` [C], tokens with KV after these; `counts`
    [C], tokens to draft; `num_seqs` [1]; `block_tables` [C, M]. All int32.
    """

    tokens: Array
    sources: Array
    starts: Array
    lengths: Array
    counts: Array
    num_seqs: Array
    block_tables: Array

    @classmethod
    def zeros(cls, key: DraftKey, max_blocks: int) -> DraftInputs:
        """Those of nobody."""
        shapes = (
            (key.rows,),
            (key.rows,),
            (key.seqs + 1,),
            (key.seqs,),
            (key.seqs,),
            (1,),
            (key.seqs, max_blocks),
        )
        return cls(*(np.zeros(shape, np.int32) for shape in shapes))


class DraftCore(Protocol):
    """What drafts: a model, or heads with attention."""

    @property
    def num_behind(self) -> int:
        """How many tokens fewer than there are it computes: those from this place on."""
        ...

    @property
    def num_new(self) -> int:
        """Most tokens of a request that are new to it after drafts, if it has drafted before."""
        ...

    @property
    def keeps_drafts(self) -> bool:
        """Whether KV of drafts that were right need not be computed again."""
        ...

    def params(self) -> Any:
        """Shapes of its weights."""
        ...

    def pool(self) -> jax.ShapeDtypeStruct:
        """Shape of its KV pool, as in `step.DeviceState`."""
        ...

    def layers(self) -> jax.ShapeDtypeStruct | None:
        """Shape of `step.DeviceState.layers`; None if it does not look at them."""
        ...

    def follows(self, request: Request) -> bool:
        """Whether it can draft for a request."""
        ...

    def begin(
        self, params: Any, pool: jax.Array, layers: jax.Array | None, inputs: Any, prompts: PrefillInputs
    ) -> tuple[jax.Array, jax.Array]:
        """Compute what is new: the pool, and hidden states [R, features] of `DraftInputs`."""
        ...

    def go_on(
        self, params: Any, pool: jax.Array, decode: DecodeInputs, tokens: jax.Array, hidden: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Compute `tokens` [C] that `hidden` [C, features] said: the pool, and hidden states like those."""
        ...

    def likeliest(self, params: Any, hidden: jax.Array, num_seqs: jax.Array) -> jax.Array:
        """Tokens [C] int32 that hidden states [C, features] say, `num_seqs` of which are in use."""
        ...


@dataclasses.dataclass(frozen=True)
class ModelCore:
    """A whole model."""

    model: ModelConfig
    config: ExecutorConfig
    num_behind = 0
    num_new = 2  # the last of its drafts, and one more
    keeps_drafts = True

    @property
    def _options(self) -> dict[str, Any]:
        return {"implementation": implementation_of(self.config)}

    def params(self) -> Any:
        """See `DraftCore`."""
        return abstract_params(self.model, self.config.dtype, self.config.formats)

    def pool(self) -> jax.ShapeDtypeStruct:
        """See `DraftCore`."""
        return pool_shape(self.model, self.config)

    def layers(self) -> None:
        """See `DraftCore`."""

    def follows(self, request: Request) -> bool:
        """See `DraftCore`."""
        return True

    def begin(
        self, params: Any, pool: jax.Array, layers: jax.Array | None, inputs: Any, prompts: PrefillInputs
    ) -> tuple[jax.Array, jax.Array]:
        """See `DraftCore`."""
        return forward(self.model, params, pool, None, inputs.tokens, prompts, **self._options)[:2]

    def go_on(
        self, params: Any, pool: jax.Array, decode: DecodeInputs, tokens: jax.Array, hidden: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """See `DraftCore`."""
        return forward(self.model, params, pool, decode, tokens, None, **self._options)[:2]

    def likeliest(self, params: Any, hidden: jax.Array, num_seqs: jax.Array) -> jax.Array:
        """See `DraftCore`."""
        model = bind(self.model, params)
        return largest(model.logits(hidden, num_seqs), is_native=model.is_packed)


def run_draft(
    core: DraftCore,
    most: int,
    width: int,
    params: Any,
    pool: jax.Array,
    layers: jax.Array | None,
    inputs: Any,
) -> tuple[jax.Array, jax.Array]:
    """Compute what is new, and draft: of each request the likeliest token, and the likeliest after that.

    Args:
        core: what drafts (static).
        most: most tokens to draft (static).
        width: columns of what is drafted, at least as many as requests (static).
        params: its weights.
        pool: its KV pool, as in `step.DeviceState`.
        layers: those of the model's `step.DeviceState`, if it looks at them.
        inputs: `DraftInputs`, on the device.

    Returns:
        The pool, and the drafts [most, width] int32; those beyond a request's count mean nothing.
    """
    unused, num_seqs = jnp.zeros_like(inputs.lengths), inputs.num_seqs[0]
    prompts = PrefillInputs(
        tokens=inputs.tokens,
        targets=inputs.tokens,
        query_starts=inputs.starts,
        lengths=inputs.lengths,
        slots=unused,
        num_seqs=inputs.num_seqs,
        sampled=unused,
        block_tables=inputs.block_tables,
    )
    pool, hidden = core.begin(params, pool, layers, inputs, prompts)
    hidden = hidden[jnp.maximum(inputs.starts[1:] - 1, 0)]
    tokens = core.likeliest(params, hidden, num_seqs)
    drafts = jnp.zeros((most, width), jnp.int32).at[0, : len(tokens)].set(tokens)

    def step(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        pool, hidden, tokens, drafts = carry
        lengths = jnp.where(number < inputs.counts, inputs.lengths + number, 0)
        decode = DecodeInputs(unused, lengths, inputs.block_tables)
        pool, hidden = core.go_on(params, pool, decode, tokens, hidden)
        tokens = core.likeliest(params, hidden, num_seqs)
        return pool, hidden, tokens, drafts.at[number, : len(tokens)].set(tokens)

    pool, _, _, drafts = lax.fori_loop(1, jnp.max(inputs.counts), step, (pool, hidden, tokens, drafts))
    return pool, drafts


def run_chained(
    core: DraftCore,
    most: int,
    chain: Chain,
    params: Any,
    pool: jax.Array,
    carried: EngineState,
    block_tables: jax.Array,
    packed: jax.Array,
    lengths: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Draft as `run_draft` does, by what the device knows, for one of several iterations.

    Args:
        core, most: as there; the K that an iteration takes are at most as many (static).
        chain: how its inputs lie (static).
        params, pool: as there.
        carried: an executor's state without its pool.
        block_tables: [B, M] int32, of what drafts. All is in its pool but the newest `num_new` tokens.
        packed, lengths: of `Chain.rows`.

    Returns:
        The pool, and the inputs of the iteration with its drafts.
    """
    rows = chain.rows(carried.tables, packed, lengths)
    is_there = jnp.arange(chain.num_rows) < rows.num_seqs[0]
    seen = jnp.where(is_there, jnp.maximum(lengths - core.num_behind, 1), 0)  # of who has ended any will do
    new = jnp.minimum(seen, core.num_new)
    starts = jnp.pad(jnp.cumsum(new), (1, 0))
    row = jnp.arange(core.num_new * chain.num_rows)
    of_rows = jnp.minimum(chunk_of(starts[1:], row), chain.num_rows - 1)
    places = jnp.where(row < starts[-1], (seen - new - starts[:-1])[of_rows] + row, 0)
    size = chain.block_size
    inputs = DraftInputs(
        tokens=carried.history[rows.slots[of_rows], places + core.num_behind],
        sources=slot_of(rows.tables, of_rows, places, size),
        starts=starts,
        lengths=seen,
        counts=rows.counts,
        num_seqs=rows.num_seqs,
        block_tables=block_tables,
    )
    pool, drafts = run_draft(core, most, chain.num_rows, params, pool, carried.layers, inputs)
    return pool, chain.filled(packed, lengths, drafts[: chain.key.num_lookups])


class DraftPrograms(CompiledAhead[DraftKey | Chain]):
    """The programs of what drafts.

    Args:
        core: that.
        config: sizes of its arrays, and of the batches that it drafts for.
        most: most tokens that it drafts of a request.
        device: to compile for.
        carried: an executor's state without its pool, or its shapes; None to draft for no iterations that
            follow one another.
    """

    def __init__(
        self,
        core: DraftCore,
        config: ExecutorConfig,
        most: int,
        device: jax.Device,
        carried: EngineState | None = None,
    ) -> None:
        self._core, self._config, self._most, self._device = core, config, most, device
        self._carried = carried
        self.chains = {} if carried is None else chains_of(config)
        buckets = config.buckets
        sizes = sorted({min(_CATCH_UP_ROWS, buckets.sizes[-1]), buckets.sizes[-1]})
        self.drafting = [DraftKey(core.num_new * size, size) for size in buckets.decode]
        self.catching_up = [DraftKey(size, buckets.max_chunks(size)) for size in sizes]
        super().__init__([*reversed(self.drafting), *self.catching_up, *self.chains.values()])

    def lower(self, key: DraftKey | Chain) -> jax.stages.Lowered:
        """See `CompiledAhead`."""
        most, max_blocks = self._most, self._config.max_blocks
        if isinstance(key, Chain):
            assert self._carried is not None
            jitted, arguments = chained_program(self._core, most, key, self._carried, max_blocks)
        else:
            width = max(key.seqs, self.drafting[-1].seqs)
            jitted, arguments = draft_program(self._core, most, width, key, max_blocks)
        return jitted.lower(*placed(arguments, self._device))

    def finish(self) -> None:
        """See `CompiledAhead`."""
        warm_up_filling(self._config, self._most, self._device)


def draft_program(
    core: DraftCore, most: int, width: int, key: DraftKey, max_blocks: int
) -> tuple[jax.stages.Wrapped, tuple[Any, ...]]:
    """`run_draft`, which updates the pool in place, and its arguments, from shapes alone."""
    arguments = core.params(), core.pool(), core.layers(), DraftInputs.zeros(key, max_blocks)
    return jax.jit(functools.partial(run_draft, core, most, width), donate_argnums=1), arguments


def chained_program(
    core: DraftCore, most: int, chain: Chain, carried: EngineState, max_blocks: int
) -> tuple[jax.stages.Wrapped, tuple[Any, ...]]:
    """`run_chained`, which updates the pool in place, and its arguments, from shapes alone."""
    tables = jax.ShapeDtypeStruct((chain.num_rows, max_blocks), jnp.int32)
    arguments = core.params(), core.pool(), carried, tables, *chain.shapes()
    return jax.jit(functools.partial(run_chained, core, most, chain), donate_argnums=1), arguments


def implementation_of(config: ExecutorConfig) -> str | None:
    """Of what drafts the attention: the executor's, unless that is chosen program by program."""
    return None if config.implementation == FASTEST else config.implementation


def pool_shape(model: ModelConfig, config: ExecutorConfig) -> jax.ShapeDtypeStruct:
    """Of the KV pool of a draft model."""
    shapes = state_shapes(
        model,
        dtype=config.dtype,
        num_gpu_blocks=config.num_gpu_blocks,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_dtype=config.kv_dtype,
    )
    return shapes.pool  # type: ignore[return-value]
