"""Which implementation of attention is the fastest on this device, for each shape of program."""

from __future__ import annotations

import dataclasses
import functools
import logging
import statistics
import time
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import pallas_kernels
from jaxllm.errors import ConfigError
from jaxllm.executor.config import ExecutorConfig
from jaxllm.executor.programs import ProgramKey
from jaxllm.models.architecture import ModelConfig
from jaxllm.pallas_kernels.kv_layout import KVLayout

FASTEST = "fastest"
"""The name of an implementation that stands for the fastest one, measured program by program."""
_REPETITIONS = 7
_LEAST_GAIN = 0.03  # below which the default one stays: what is measured differs from start to start
_LARGEST_DIFFERENCE = 0.02  # of 16-bit results from each other
_CHECKED_BLOCKS = 64
_CHUNK = 128

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """A program's attention: `num_rows` queries, each of its own sequence or (`num_seqs`) chunks of so many.

    `num_seqs` is None for decoding. Sequences have `context` tokens of KV. A program may have room for more
    sequences, up to `max_seqs`.
    """

    num_rows: int
    num_seqs: int | None
    context: int
    max_seqs: int | None = None

    @classmethod
    def decode(cls, num_rows: int, *, max_model_len: int, pool_tokens: int) -> AttentionShape:
        """Of a decode program: the rows share a full pool."""
        return cls(num_rows, None, min(max_model_len, max(1, pool_tokens // num_rows)))

    @classmethod
    def prefill(cls, num_rows: int, max_seqs: int, *, max_model_len: int) -> AttentionShape:
        """Of a prefill program: chunks of some 128 tokens, with some history where they are short."""
        num_seqs = max(1, min(max_seqs, num_rows // _CHUNK))
        context = min(max_model_len, max(num_rows // num_seqs, 2 * _CHUNK))
        return cls(num_rows, num_seqs, context, max_seqs)


def candidates(
    default: str, op: str, device: jax.Device, dtype: str, head_dim: int, block_size: int
) -> tuple[str, ...]:
    """Implementations of `op` ("decode" or "prefill") that run on a device, the default one first.

    Triton's are several: they differ in how the work is cut.
    """
    names = [default]
    if default == "triton":
        from jaxllm.pallas_kernels import triton

        usual = triton.default_tiling(op, device.device_kind, dtype, head_dim)
        names += [f"triton:{one}" for one in triton.alternative_tilings(op, dtype) if one != usual]
    from jaxllm.pallas_kernels import mosaic_pool

    is_hopper = str(getattr(device, "compute_capability", "")).startswith("9.")
    if is_hopper and mosaic_pool.why_not(dtype, KVLayout(dtype, head_dim), block_size) is None:
        names.append("mosaic")
    return tuple(names)


def fastest(
    names: Sequence[str], shape: AttentionShape, pool: jax.Array, num_q_heads: int, scale: float
) -> str:
    """The one of `names` that takes the least time for one layer's attention.

    The first is what the others are compared with: one that does not compile, or whose results differ, is
    left out with a warning; one that is hardly faster is not worth a program of its own.

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
    if not seconds:
        return names[0]
    best = min(seconds, key=lambda name: seconds[name])
    return best if seconds[best] < (1 - _LEAST_GAIN) * seconds[names[0]] else names[0]


def fastest_of_each(
    shapes: Iterable[ProgramKey],
    default: str,
    device: jax.Device,
    model: ModelConfig,
    config: ExecutorConfig,
    pool: jax.Array,
) -> dict[ProgramKey, str]:
    """Measure which attention is the fastest for each shape of a program."""
    pool_tokens = config.num_gpu_blocks * config.block_size
    found: dict[AttentionShape, str] = {}
    chosen: dict[ProgramKey, str] = {}
    for key in shapes:
        if key.max_chunks:
            op = "prefill"
            shape = AttentionShape.prefill(key.rows, key.max_chunks, max_model_len=config.max_model_len)
        else:
            op = "decode"
            shape = AttentionShape.decode(
                key.rows, max_model_len=config.max_model_len, pool_tokens=pool_tokens
            )
        if shape not in found:
            sizes = config.dtype, model.head_dim, config.block_size
            names = candidates(default, op, device, *sizes)
            if model.has_bounds:  # windows or soft caps
                names = tuple(name for name in names if name != "mosaic")
            scale = model.head_dim**-0.5
            found[shape] = fastest(names, shape, pool, model.num_heads, scale)
        chosen[key] = found[shape]
    return chosen


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
    num_tables = shape.num_rows if shape.num_seqs is None else shape.max_seqs or shape.num_seqs
    blocks = rng.integers(0, num_blocks, (num_tables, -(-shape.context // block_size)))
    tables, lengths = jnp.asarray(blocks, jnp.int32), jnp.full(num_tables, shape.context, jnp.int32)
    if shape.num_seqs is None:
        return q, pool, tables, lengths
    ends = np.minimum(np.arange(num_tables + 1), shape.num_seqs)
    starts = jnp.asarray(ends * min(shape.num_rows // shape.num_seqs, shape.context), jnp.int32)
    return q, pool, tables, starts, lengths, jnp.int32(shape.num_seqs)
