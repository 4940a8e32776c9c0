"""Products with weights that are held as codes, as one Pallas kernel lowered through Triton (NVIDIA).

    y[row, o] = sum over i of x[row, i] * (code[o, i] * scale[o, group of i] + offset[o, group of i])

XLA makes the whole matrix of numbers first, in memory. Here a program reads a tile of codes, makes them
numbers of the dtype of `x` in registers, which is exact, and scales the sums of each group.

On a CPU the kernel runs in Pallas' interpret mode, for tests.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxllm.pallas_kernels.settings import under_jax_defaults
from jaxllm.pallas_kernels.tiles import is_interpreted

KINDS = ("int8", "e4m3", "e5m2", "int4", "fp4")
"""Codes, of which the last two lie two in a byte, the first in the lower half."""
_TILE = 64  # bytes of an output
_LEAST_GROUP = 32  # bytes: those of smaller ones are scaled one by one
_LEAST_ROWS = 16
_ASKED = 2**20  # bytes that all programs ask of memory at a time, if there are so many
_UNITS = {"e4m3": 2.0**8, "fp4": 2.0**14}
"""What is 1 of these kinds when their bits are taken for those of a float16, whose exponents are larger."""


def covers(width: int, num_groups: int, kind: str) -> bool:
    """Whether the kernel takes so many inputs in so many groups of equal size."""
    group = width // num_groups
    return num_groups == 1 or (group % 16 == 0 and group & (group - 1) == 0 and kind in KINDS)


@under_jax_defaults
def coded_product(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    offsets: jax.Array | None = None,
    *,
    kind: str,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """`x` times the transpose of the matrix that codes stand for, summed in float32.

    Args:
        x: [rows, in], float32, bfloat16 or float16.
        codes: [out, in], or of four bits [out, in / 2]; of a dtype of 8 bits.
        scales: [out, groups] float32, each of in / groups inputs one after another; see `covers`.
        offsets: as scales; None for 0.
        kind: of the codes, one of `KINDS`.
        out_dtype: of the result; that of `x` by default.

    Returns:
        [rows, out].
    """
    (rows, width), (out, num_bytes) = x.shape, codes.shape
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if not rows:
        return jnp.zeros((0, out), out_dtype)
    halves = width // num_bytes
    codes = lax.bitcast_convert_type(codes, jnp.int8)
    # The inputs of a byte's first code, and of its second.
    inputs = [x[:, place::halves] for place in range(halves)] if halves > 1 else [x]
    tile_rows = min(64, max(_LEAST_ROWS, pl.next_power_of_2(rows)))
    tile_out = 32 if tile_rows == _LEAST_ROWS else 64
    grid = pl.cdiv(out, tile_out), pl.cdiv(rows, tile_rows)
    num_steps = pl.cdiv(num_bytes, _TILE)
    num_parts = max(1, min(_ASKED // (grid[0] * grid[1] * tile_out * _TILE), num_steps // 4))
    kernel = functools.partial(
        _kernel,
        kind=kind,
        group=num_bytes // scales.shape[1],
        tile=(tile_rows, tile_out),
        num_steps=pl.cdiv(num_steps, num_parts),
    )
    parts = pl.pallas_call(
        kernel,
        grid=(*grid, num_parts),
        out_shape=jax.ShapeDtypeStruct((num_parts, rows, out), jnp.float32 if num_parts > 1 else out_dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=4),
        interpret=is_interpreted(),
        name="coded_product",
    )(*inputs, codes, scales, *(() if offsets is None else (offsets,)))
    return parts.sum(axis=0).astype(out_dtype) if num_parts > 1 else parts[0]


def _kernel(*refs: Any, kind: str, group: int, tile: tuple[int, int], num_steps: int) -> None:
    halves = 2 if kind in ("int4", "fp4") else 1
    input_refs, (codes_ref, scales_ref), out_ref = refs[:halves], refs[halves : halves + 2], refs[-1]
    offset_refs = refs[halves + 2 : -1]
    (_, num_rows, num_out), num_bytes, (tile_rows, tile_out) = out_ref.shape, codes_ref.shape[1], tile
    outs = pl.program_id(0) * tile_out + jnp.arange(tile_out)
    rows = pl.program_id(1) * tile_rows + jnp.arange(tile_rows)
    part = pl.program_id(2)
    is_out, is_row = (outs < num_out)[:, None], (rows < num_rows)[:, None]
    has_own_scales = group < _LEAST_GROUP
    size = _TILE if has_own_scales or group == num_bytes else min(_TILE, group)

    def body(step: jax.Array, sums: jax.Array) -> jax.Array:
        places = step * size + jnp.arange(size)
        is_there = (places < num_bytes)[None, :]
        codes = plgpu.load(codes_ref.at[outs[:, None], places[None, :]], mask=is_out & is_there, other=0)
        inputs = [
            plgpu.load(ref.at[rows[:, None], places[None, :]], mask=is_row & is_there, other=0)
            for ref in input_refs
        ]
        numbers = [_numbers(codes, kind, place) for place in range(halves)]
        if has_own_scales:
            groups = jnp.minimum(places // group, scales_ref.shape[1] - 1)
            at = outs[:, None], groups[None, :]
            scale = plgpu.load(scales_ref.at[*at], mask=is_out, other=0) * _UNITS.get(kind, 1.0)
            numbers = [one.astype(jnp.float32) * scale for one in numbers]
            for ref in offset_refs:
                offset = plgpu.load(ref.at[*at], mask=is_out, other=0)
                numbers = [one + offset for one in numbers]
            return sums + _products(numbers, inputs)
        at = outs, step * size // group
        scale = plgpu.load(scales_ref.at[*at], mask=outs < num_out, other=0) * _UNITS.get(kind, 1.0)
        sums += _products(numbers, inputs) * scale[:, None]
        for ref in offset_refs:
            offset = plgpu.load(ref.at[*at], mask=outs < num_out, other=0)
            for one in inputs:
                sums += offset[:, None] * one.astype(jnp.float32).sum(axis=1)[None, :]
        return sums

    steps_each = num_steps * _TILE // size
    num_all = pl.cdiv(num_bytes, size)
    first, last = part * steps_each, jnp.minimum((part + 1) * steps_each, num_all)
    sums = lax.fori_loop(first, last, body, jnp.zeros((tile_out, tile_rows), jnp.float32))
    at = out_ref.at[part, rows[None, :], outs[:, None]]
    plgpu.store(at, sums.astype(out_ref.dtype), mask=(rows < num_rows)[None, :] & is_out)


def _numbers(codes: jax.Array, kind: str, place: int) -> jax.Array:
    """What codes [.., bytes] int8 stand for, in `_UNITS`; of four bits the first or second of each."""
    if kind == "int8":
        return codes
    bits = codes.astype(jnp.int32) >> (4 * place)
    if kind == "int4":
        return (bits & 15) - 8
    if kind == "e4m3":
        half = jnp.where(bits & 0x7F == 0x7F, 0x7E00, (bits & 0x80) << 8 | (bits & 0x7F) << 7)
    elif kind == "e5m2":
        half = bits << 8
    else:
        half = (bits & 8) << 12 | (bits & 7) << 9
    return lax.bitcast_convert_type(half.astype(jnp.int16), jnp.float16)


def _products(numbers: list[jax.Array], inputs: list[jax.Array]) -> jax.Array:
    """Of both halves together, [out, rows] float32."""
    precision = lax.Precision.HIGHEST if inputs[0].dtype == jnp.float32 else None
    found = [
        plgpu.dot(one.astype(x.dtype), x, trans_b=True, precision=precision)
        for one, x in zip(numbers, inputs, strict=True)
    ]
    return found[0] + found[1] if len(found) > 1 else found[0]
