"""The pool as kernels that are lowered through Triton see it, and how these are launched."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxllm.errors import ConfigError
from jaxllm.pallas_kernels.kv_layout import KVLayout, layout_of
from jaxllm.pallas_kernels.tiles import is_interpreted


def launch(kernel: Any, num_warps: int = 4, num_stages: int = 2, **options: Any) -> Any:
    """A kernel by Triton; interpreted where there is no GPU."""
    return pl.pallas_call(
        kernel,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=is_interpreted(),
        **options,
    )


def layer_operand(layer: int | jax.Array) -> jax.Array:
    """What tells kernels their layer: as data, so that all layers share one kernel."""
    return jnp.asarray(layer, jnp.int32).reshape(1)


def per_word(layout: KVLayout) -> int:
    """Numbers in an element of the pool as kernels see it."""
    return 2 if layout.array_dtype.itemsize == 1 else 1


def why_not(layout: KVLayout, block_size: int) -> str | None:
    """Why the kernels do not take KV of a layout in blocks of so many tokens, or None if they do."""
    if per_word(layout) == 1:
        return None
    if layout.head_dim % 4:
        return f"KV of {layout.dtype} needs heads of a multiple of 4, and these have {layout.head_dim}"
    is_aligned = layout.head_dim % 16 == block_size * layout.width % 16 == 0
    if is_aligned or is_interpreted():  # JAX 0.10 copies 16 bytes at a time all the same
        return None
    return (
        f"on a GPU KV of {layout.dtype} needs heads of a multiple of 16 and blocks of a multiple of 4, not "
        f"{layout.head_dim} and {block_size}"
    )


def areas_of(pool: jax.Array) -> jax.Array:
    """The pool as kernels see it, `[blocks, layers, 2, KV heads, elements]`; it is not copied.

    One of 8 bits has words of 16 bits, two numbers each: Pallas takes offsets of 32 bits, with a sign, in
    arrays of up to 4 GiB.

    Raises:
        ConfigError: `why_not` gives a reason.
    """
    layout = layout_of(pool)
    areas = pool.reshape(*pool.shape[:4], -1)
    if per_word(layout) == 1:
        return areas
    if reason := why_not(layout, pool.shape[4]):
        raise ConfigError(f"attention implementation 'triton': {reason}; use 'xla', or KV of 16 bits")
    return lax.bitcast_convert_type(areas.reshape(*areas.shape[:4], -1, 2), jnp.int16)


def as_pool(areas: jax.Array, pool: jax.Array) -> jax.Array:
    """What `areas_of` makes of a pool like this one, as it was."""
    return (areas if areas.dtype == pool.dtype else lax.bitcast_convert_type(areas, pool.dtype)).reshape(
        pool.shape
    )


def readable(pool: jax.Array) -> tuple[jax.Array, ...]:
    """The views of a pool that attention reads: its areas, and of int8 the same as float32, for scales."""
    areas = areas_of(pool)
    if num_views(layout_of(pool)) == 1:
        return (areas,)
    return areas, lax.bitcast_convert_type(areas.reshape(*areas.shape[:4], -1, 2), jnp.float32)


def num_views(layout: KVLayout) -> int:
    """How many views `readable` gives."""
    return 2 if layout.dtype == "int8" else 1


def block_size_of(pool_ref: Any, layout: KVLayout) -> int:
    """Tokens of a block, of a pool's areas."""
    return int(pool_ref.shape[4] * per_word(layout) // layout.width)
