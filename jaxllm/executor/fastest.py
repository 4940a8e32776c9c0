"""Which implementation of attention is the fastest on this device, for each shape of program."""

from __future__ import annotations

import dataclasses
import functools
import logging
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import pallas_kernels
from jaxllm.errors import ConfigError

FASTEST = "fastest"
"""The name of an implementation that stands for the fastest one, measured program by program."""
_REPETITIONS = 7
_LARGEST_DIFFERENCE = 0.02  # of 16-bit results from each other
_CHECKED_BLOCKS = 64

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """A program's attention: `num_rows` queries, each of its own sequence or (`num_seqs`) chunks of so many.

    `num_seqs` is None for decoding. Sequences have `context` tokens of KV.
    """

    num_rows: int
    num_seqs: int | None
    context: int


def candidates(op: str, device: jax.Device, dtype: str, head_dim: int, block_size: int) -> tuple[str, ...]:
    """Implementations of `op` ("decode" or "prefill") that run on a device, the default one first.

    Triton's are several: they differ in how the work is cut.
    """
    names = [pallas_kernels.default_implementation()]
    if names[0] == "triton":
        from jaxllm.pallas_kernels import triton

        default = triton.default_tiling(op, device.device_kind, dtype)
        names += [f"triton:{one}" for one in triton.alternative_tilings(op, dtype) if one != default]
    is_hopper = str(getattr(device, "compute_capability", "")).startswith("9.")
    fits_mosaic = dtype != "float32" and head_dim % 16 == 0 and block_size in (16, 32, 64, 128)
    if is_hopper and fits_mosaic:
        names.append("mosaic")
    return tuple(names)


def fastest(
    names: Sequence[str], shape: AttentionShape, pool: jax.Array, num_q_heads: int, scale: float
) -> str:
    """The one of `names` that takes the least time for one layer's attention.

    The first is what the others are compared with: one that does not compile, or whose results differ, is
    left out with a warning.

    Args:
        names: implementations, the default one first.
        shape: what to compute.
        pool: the KV pool, which is only read.
        num_q_heads: query heads of the model.
        scale: factor of the scores.
    """
    seconds: dict[str, float] = {}
    expected: np.ndarray | None = None
    for name in names if len(names) > 1 else ():
        op = pallas_kernels.decode_attention if shape.num_seqs is None else pallas_kernels.prefill_attention
        call = jax.jit(functools.partial(op, layer=0, scale=scale, implementation=name))
        try:
            found = np.asarray(call(*_arguments(shape, _random_pool(pool), num_q_heads)), np.float32)
            arguments = _arguments(shape, pool, num_q_heads)
            jax.block_until_ready(call(*arguments))
        except (ConfigError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            if name == names[0]:
                raise
            _logger.warning("attention implementation %s is left out: %s", name, error)
            continue
        expected = found if expected is None else expected
        difference = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
        if not difference <= _LARGEST_DIFFERENCE:
            _logger.warning("attention implementation %s is left out: it is off by %.2g", name, difference)
            continue
        seconds[name] = statistics.median(_time(call, arguments) for _ in range(_REPETITIONS))
    return min(seconds, key=lambda name: seconds[name], default=names[0])


def _time(call: jax.stages.Wrapped, arguments: tuple[jax.Array, ...]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(call(*arguments))
    return time.perf_counter() - started


def _random_pool(pool: jax.Array) -> jax.Array:
    """A few blocks of one layer, with something in them."""
    shape = (min(pool.shape[0], _CHECKED_BLOCKS), 1, *pool.shape[2:])
    return jax.random.normal(jax.random.key(0), shape, pool.dtype)


def _arguments(shape: AttentionShape, pool: jax.Array, num_q_heads: int) -> tuple[jax.Array, ...]:
    """Random queries over random blocks."""
    rng = np.random.default_rng(0)
    num_blocks, block_size, head_dim = pool.shape[0], *pool.shape[4:]
    q = jnp.asarray(rng.standard_normal((shape.num_rows, num_q_heads, head_dim)), pool.dtype)
    num_seqs = shape.num_rows if shape.num_seqs is None else shape.num_seqs
    tables = rng.integers(0, num_blocks, (num_seqs, -(-shape.context // block_size)))
    lengths = jnp.full(num_seqs, shape.context, jnp.int32)
    if shape.num_seqs is None:
        return q, pool, jnp.asarray(tables, jnp.int32), lengths
    starts = jnp.arange(num_seqs + 1, dtype=jnp.int32) * min(shape.num_rows // num_seqs, shape.context)
    return q, pool, jnp.asarray(tables, jnp.int32), starts, lengths, jnp.int32(num_seqs)
