"""Sampling apart from steps: whatever few requests ask for, of the logits that a step leaves.

Options are inputs of these programs, so that requests of any mix share one of them. They are small, and know
nothing of a step's shape: the rows that are sampled so are taken out of its logits first.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxllm.executor.sampler import SampledRows, sample
from jaxllm.executor.slot_params import FILTERED, PackedSlotParams, Sampling
from jaxllm.sampling.logits_processors import LogitsProcessor
from jaxllm.sampling.structured_outputs import mask_width

_SIZES = 1, 16, 64, 256
_FIRST_SIZE = 16


@dataclasses.dataclass(frozen=True)
class RowsKey:
    """A program that samples so many rows; `sampling` is what it can do.

    Keys of several kinds are in one dictionary, so that they are no tuples, which would be equal.
    """

    rows: int
    sampling: Sampling

    @property
    def name(self) -> str:
        """What the program computes."""
        return f"sampling of {self.rows}{self.sampling.words}"


@dataclasses.dataclass(frozen=True)
class TakeKey:
    """A program that takes so many rows out of the logits of `num_logits`."""

    num_logits: int
    rows: int

    @property
    def name(self) -> str:
        """What the program computes."""
        return f"{self.rows} of {self.num_logits} logits"


def row_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows that there are programs for; more rows are sampled in turns."""
    return sorted({min(size, max_num_seqs) for size in _SIZES})


def first_size(max_num_seqs: int) -> int:
    """Of the program that is compiled first, which samples any number of rows until others are there."""
    return min(_FIRST_SIZE, row_sizes(max_num_seqs)[-1])


def kind_of(sampling: Sampling) -> Sampling:
    """What a program can do that serves rows which ask for this."""
    if Sampling.ALL_LOGPROBS in sampling:
        return Sampling.COMPLETE | Sampling.ALL_LOGPROBS
    return FILTERED if sampling in FILTERED else Sampling.COMPLETE


def rows_program(
    key: RowsKey,
    *,
    vocab_size: int,
    max_num_seqs: int,
    max_model_len: int,
    processors: tuple[LogitsProcessor, ...] = (),
    is_native: bool = False,
    is_lazy: bool = False,
) -> tuple[jax.stages.Wrapped, tuple[Any, ...]]:
    """A program that samples rows and stores their tokens in the history, and its arguments, as shapes.

    Arguments: the history, which is updated in place, [max_num_seqs + 1, max_model_len + 1] int32; the slots'
    parameters; logits [rows, vocab_size] float32; slots and lengths [2, rows] int32, padding's being the last
    slot; with `Sampling.MASKED` masks [rows, mask_width] int32. `processors`, `is_native` and `is_lazy` are
    those of `sample`.
    """
    options: dict[str, Any] = {"processors": processors, "is_native": is_native, "is_lazy": is_lazy}
    history = jax.ShapeDtypeStruct((max_num_seqs + 1, max_model_len + 1), jnp.int32)
    slot_params = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, PackedSlotParams.host_zeros(max_num_seqs)))
    logits = jax.ShapeDtypeStruct((key.rows, vocab_size), jnp.float32)
    places = jax.ShapeDtypeStruct((2, key.rows), jnp.int32)
    masks: tuple[Any, ...] = ()
    if Sampling.MASKED in key.sampling:
        masks = (jax.ShapeDtypeStruct((key.rows, mask_width(vocab_size)), jnp.int32),)
    run = functools.partial(_sample_rows, key.sampling, options)
    return jax.jit(run, donate_argnums=0), (history, slot_params, logits, places, *masks)


def take_program(
    key: TakeKey, num_tokens: int, sharding: Sharding
) -> tuple[jax.stages.Wrapped, tuple[Any, ...]]:
    """A program that takes rows out of logits, and its arguments: these, and the rows [rows] int32.

    Of the logits each device has those of `num_tokens` tokens; the rows it takes are whole, and lie as
    `sharding` says.
    """
    logits = jax.ShapeDtypeStruct((key.num_logits, num_tokens), jnp.float32)
    arguments = logits, jax.ShapeDtypeStruct((key.rows,), jnp.int32)
    return jax.jit(_take, out_shardings=sharding), arguments


def padded(numbers: list[int], size: int, padding: int) -> np.ndarray:
    """So many numbers, int32."""
    return np.array([*numbers, *[padding] * (size - len(numbers))], np.int32)


def _take(logits: jax.Array, rows: jax.Array) -> jax.Array:
    return logits[rows]


def _sample_rows(
    sampling: Sampling,
    options: dict[str, Any],
    history: jax.Array,
    slot_params: PackedSlotParams,
    logits: jax.Array,
    places: jax.Array,
    masks: jax.Array | None = None,
) -> tuple[jax.Array, SampledRows]:
    slots, lengths = places
    params = slot_params.unpack()
    sampled = sample(logits, params, slots, history, lengths, sampling, masks=masks, **options)
    end = jnp.minimum(lengths, history.shape[1] - 1)
    return history.at[slots, end].set(sampled.tokens), sampled
