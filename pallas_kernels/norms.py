"""Sum and RMS norm of the residual stream in one kernel (NVIDIA, lowered through Triton)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxllm.pallas_kernels.tiles import is_interpreted


@functools.partial(jax.jit, static_argnames="eps")
def add_rms_norm(
    x: jax.Array, delta: jax.Array, weight: jax.Array, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """`x + delta`, and its RMS norm, one program a row.

    Args:
        x: `[rows, features]`.
        delta: `[parts, rows, features]`, whose sum over the parts it is.
        weight: `[features]`, in the dtype of `x`.
        eps: what is added to the mean of the squares.

    Returns:
        Two arrays like `x`, each rounded to its dtype once. The sum takes the place of `x`, and its norm that
        of a `delta` of as many numbers.
    """
    num_warps = max(1, min(8, pl.next_power_of_2(x.shape[1]) // 32))  # none reads what another one stores
    is_alike = delta.shape == (1, *x.shape) and delta.dtype == x.dtype
    total, normed = pl.pallas_call(
        functools.partial(_kernel, eps=eps),
        grid=(x.shape[0],),
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((1, *x.shape), x.dtype),
        ),
        input_output_aliases={0: 0, 1: 1} if is_alike else {0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=is_interpreted(),
        name="add_rms_norm",
    )(x, delta, weight)
    return total, normed[0]


def _kernel(
    x_ref: Any, delta_ref: Any, weight_ref: Any, sum_ref: Any, normed_ref: Any, *, eps: float
) -> None:
    row, (_, features), dtype = pl.program_id(0), x_ref.shape, x_ref.dtype
    columns = jnp.arange(pl.next_power_of_2(features))
    mask = columns < features

    def load(place: Any) -> jax.Array:
        return plgpu.load(place, mask=mask, other=0.0).astype(jnp.float32)

    delta = jnp.zeros(columns.shape, jnp.float32)
    for part in range(delta_ref.shape[0]):
        delta += load(delta_ref.at[part, row, columns])
    total = (load(x_ref.at[row, columns]) + delta.astype(dtype).astype(jnp.float32)).astype(dtype)
    plgpu.store(sum_ref.at[row, columns], total, mask=mask)
    wide = total.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.sum(wide * wide) / features + eps)
    normed = load(weight_ref.at[columns]) * normed.astype(dtype).astype(jnp.float32)
    plgpu.store(normed_ref.at[0, row, columns], normed.astype(dtype), mask=mask)
