"""Functions of the user's that change logits, compiled into the engine's programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.errors import ConfigError
from jaxllm.system.import_path import imported


class LogitsRows(NamedTuple):
    """What a logits processor knows of its rows, each of which samples a token of one request.

    Args:
        tokens: [R, L] int32, the tokens of the rows' requests, prompt and output; those from `lengths` on
            mean nothing.
        lengths: [R] int32, how many tokens there are.
        prompt_lengths: [R] int32, how many of them are the prompt's.
    """

    tokens: jax.Array
    lengths: jax.Array
    prompt_lengths: jax.Array


LogitsProcessor = Callable[[jax.Array, LogitsRows], jax.Array]
"""A pure JAX function of logits [R, vocab_size] float32 and their rows; returns logits of the same shape.

Each row must depend on nothing but itself: which requests share a step is the scheduler's choice.
"""


def load_processors(
    choices: Sequence[str | LogitsProcessor] | None, vocab_size: int, max_model_len: int
) -> tuple[LogitsProcessor, ...]:
    """Import logits processors, and see that they take and return what they should.

    Args:
        choices: import paths "module:function", or functions.
        vocab_size: of the logits that they will be given.
        max_model_len: longest sequence.

    Raises:
        ConfigError: one cannot be imported, traced, or returns something else.
    """
    processors = tuple(
        imported(one, "the logits processor") if isinstance(one, str) else one for one in choices or ()
    )
    num_rows, logits = 3, (3, vocab_size)
    length = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    rows = LogitsRows(jax.ShapeDtypeStruct((num_rows, max_model_len + 1), jnp.int32), length, length)  # type: ignore[arg-type]
    for processor in processors:
        if not callable(processor):
            raise ConfigError(
                f"logits_processors holds {processor!r}, which is no function and no path 'module:function'"
            )
        try:
            found = jax.eval_shape(processor, jax.ShapeDtypeStruct(logits, jnp.float32), rows)
        except Exception as error:
            raise ConfigError(
                f"the logits processor {processor!r} cannot be compiled: {type(error).__name__}: {error}"
            ) from error
        if (getattr(found, "shape", None), getattr(found, "dtype", None)) != (logits, jnp.float32):
            raise ConfigError(
                f"the logits processor {processor!r} returns {found} of logits of {num_rows} rows; it must "
                f"return float32 of their shape, {logits}"
            )
    return processors
