"""The programs of a draft model: what is new to it, and several greedy decode steps, without the host."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllm.executor.config import ExecutorConfig
from jaxllm.executor.drafter import CompiledAhead, placed
from jaxllm.executor.fastest import FASTEST
from jaxllm.executor.programs import state_shapes
from jaxllm.executor.sampler import largest
from jaxllm.executor.step import DecodeInputs, PrefillInputs, forward
from jaxllm.models.architecture import ModelConfig
from jaxllm.models.registry import abstract_params

_CATCH_UP_ROWS = 128
NEW_TOKENS = 2
"""Most tokens that are new to the model where all of its drafts were right: the last one, and one more."""


class DraftKey(NamedTuple):
    """What is static of a program: `rows` of new tokens, of `seqs` requests."""

    rows: int
    seqs: int


class DraftInputs(NamedTuple):
    """The new tokens of up to C requests, one after another in R rows, and how many to draft after them.

    `tokens` [R]; `starts` [C + 1], rows, with the end of the last one; `lengths` [C], tokens with KV after
    these; `counts` [C], tokens to draft; `num_seqs` [1]; `block_tables` [C, M]. All int32.
    """

    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray
    num_seqs: np.ndarray
    block_tables: np.ndarray

    @classmethod
    def zeros(cls, key: DraftKey, max_blocks: int) -> DraftInputs:
        """Those of nobody."""
        shapes = (key.rows,), (key.seqs + 1,), (key.seqs,), (key.seqs,), (1,), (key.seqs, max_blocks)
        return cls(*(np.zeros(shape, np.int32) for shape in shapes))


def run_draft(
    config: ModelConfig,
    most: int,
    implementation: str | None,
    params: Mapping[str, jax.Array],
    pool: jax.Array,
    inputs: Any,
) -> tuple[jax.Array, jax.Array]:
    """Compute what is new, and draft: of each request the likeliest token, and the likeliest after that.

    Args:
        config: the draft model's configuration (static).
        most: most tokens to draft (static).
        implementation: of attention (static).
        params: flat weights.
        pool: its KV pool, as in `step.DeviceState`.
        inputs: `DraftInputs`, on the device.

    Returns:
        The pool, and the drafts [most, C] int32; those beyond a request's count mean nothing.
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
    options: Any = {"implementation": implementation}
    pool, hidden, model = forward(config, params, pool, None, inputs.tokens, prompts, **options)
    logits = model.logits(hidden[jnp.maximum(inputs.starts[1:] - 1, 0)], num_seqs)
    tokens = largest(logits, is_native=model.is_packed)
    drafts = jnp.zeros((most, len(tokens)), jnp.int32).at[0].set(tokens)

    def step(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        pool, tokens, drafts = carry
        lengths = jnp.where(number < inputs.counts, inputs.lengths + number, 0)
        decode = DecodeInputs(unused, lengths, inputs.block_tables)
        pool, hidden, model = forward(config, params, pool, decode, tokens, None, **options)
        tokens = largest(model.logits(hidden, num_seqs), is_native=model.is_packed)
        return pool, tokens, drafts.at[number].set(tokens)

    pool, _, drafts = lax.fori_loop(1, jnp.max(inputs.counts), step, (pool, tokens, drafts))
    return pool, drafts


class DraftPrograms(CompiledAhead[DraftKey]):
    """A draft model's programs.

    Args:
        model_config: the draft model.
        config: sizes of its arrays, and of the batches that it drafts for.
        most: most tokens that it drafts of a request.
        device: to compile for.
    """

    def __init__(
        self, model_config: ModelConfig, config: ExecutorConfig, most: int, device: jax.Device
    ) -> None:
        self._model_config, self._config, self._most, self._device = model_config, config, most, device
        buckets = config.buckets
        sizes = sorted({min(_CATCH_UP_ROWS, buckets.sizes[-1]), buckets.sizes[-1]})
        self.drafting = [DraftKey(NEW_TOKENS * size, size) for size in buckets.decode]
        self.catching_up = [DraftKey(size, buckets.max_chunks(size)) for size in sizes]
        super().__init__([*reversed(self.drafting), *self.catching_up])

    def lower(self, key: DraftKey) -> jax.stages.Lowered:
        """See `CompiledAhead`."""
        config, model = self._config, self._model_config
        implementation = None if config.implementation == FASTEST else config.implementation
        run = functools.partial(run_draft, model, self._most, implementation)
        params = abstract_params(model, config.dtype, config.formats)
        arguments = params, pool_shape(model, config), DraftInputs.zeros(key, config.max_blocks)
        return jax.jit(run, donate_argnums=1).lower(*placed(arguments, self._device))


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
