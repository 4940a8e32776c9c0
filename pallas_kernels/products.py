"""Products with weights that are held as codes, as one Pallas kernel lowered through Triton (NVIDIA).

    y[row, o] = sum over i of x[row, i] * (code[o, i] * scale[o, group of i] + offset[o, group of i])

XLA makes the whole matrix of numbers first, in memory. Here a program reads a tile of codes, makes them
numbers of the dtype of `x` in registers, which is exact, and scales the sums of each group. Where `x` has
codes, too, these are multiplied as they are.

On a CPU the kernel runs in Pallas' interpret mode, for tests.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxllm.errors import ConfigError
from jaxllm.pallas_kernels.ptx import UNITS, bytes_as_numbers
from jaxllm.pallas_kernels.settings import under_jax_defaults
from jaxllm.pallas_kernels.tiles import is_interpreted

KINDS = ("int8", "e4m3", "e5m2", "int4", "fp4")
"""Codes, of which the last two lie two in a byte, the first in the lower half."""
_LEAST_GROUP = 32  # bytes: those of smaller ones are scaled one by one
_ASKED = 2**20  # bytes that all programs ask of memory at a time, if there are so many


class ProductTile(NamedTuple):
    """How a product is cut into programs.

    Attributes:
        rows: of `x` in a program.
        out: outputs in a program.
        size: bytes of an output that it reads at a time; of groups at most one.
        num_warps: of a program.
        num_stages: depth of the software pipeline.
    """

    rows: int
    out: int
    size: int
    num_warps: int = 4
    num_stages: int = 4


def product_tile(num_rows: int, x_dtype: Any) -> ProductTile:
    """What `coded_product` takes for so many rows."""
    size = 64 if jnp.dtype(x_dtype).itemsize > 1 else 128
    if num_rows <= 16:
        return ProductTile(16, 32 if size == 64 else 64, size)
    if num_rows <= 64 or jnp.dtype(x_dtype).itemsize == 4:
        return ProductTile(32 if num_rows <= 32 else 64, 64, size)
    return ProductTile(128, 128, size, 8, 3)


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
    units: jax.Array | None = None,
    out_dtype: jnp.dtype | None = None,
    tile: ProductTile | None = None,
) -> jax.Array:
    """`x` times the transpose of the matrix that codes stand for, summed in float32.

    Args:
        x: [rows, in], float32, bfloat16 or float16; or codes of the same dtype as the weight's, int8 or
            float8_e4m3fn. Products of int8 are summed exactly.
        codes: [out, in], or of four bits [out, in / 2]; of a dtype of 8 bits.
        scales: [out, groups] float32, each of in / groups inputs one after another; see `covers`. Where `x`
            has codes there is one group.
        offsets: as scales; None for 0, and where `x` has codes.
        kind: of the codes, one of `KINDS`.
        units: where `x` has codes, [rows] float32: what a code of 1 stands for.
        out_dtype: of the result; that of `x` by default, float32 where `x` has codes.
        tile: how the product is cut; `product_tile` says by default.

    Returns:
        [rows, out].
    """
    (rows, width), (out, num_bytes) = x.shape, codes.shape
    has_codes = units is not None
    out_dtype = jnp.dtype((jnp.float32 if has_codes else x.dtype) if out_dtype is None else out_dtype)
    if has_codes and (offsets is not None or scales.shape[1] != 1):
        raise ConfigError(f"codes times codes have one scale an output and no offsets, not {scales.shape[1]}")
    if not rows:
        return jnp.zeros((0, out), out_dtype)
    halves = width // num_bytes
    codes = lax.bitcast_convert_type(codes, jnp.int8)
    x = lax.bitcast_convert_type(x, jnp.int8) if has_codes else x
    # The inputs of a byte's first code, and of its second.
    inputs = [x[:, place::halves] for place in range(halves)] if halves > 1 else [x]
    tile = tile or product_tile(rows, x.dtype)
    grid = pl.cdiv(rows, tile.rows), pl.cdiv(out, tile.out)
    num_steps = pl.cdiv(num_bytes, tile.size)
    num_parts = max(1, min(_ASKED // (grid[0] * grid[1] * tile.out * tile.size), num_steps // 4))
    summed = jnp.int32 if has_codes and kind == "int8" else jnp.float32
    kernel = functools.partial(
        _kernel,
        kind=kind,
        group=num_bytes // scales.shape[1],
        tile=tile,
        num_steps=pl.cdiv(num_steps, num_parts),
        summed=summed,
    )
    rest = (scales, *(() if offsets is None else (offsets,)), *((units,) if has_codes else ()))
    is_whole = num_parts == 1
    parts = pl.pallas_call(
        kernel,
        grid=(*grid, num_parts),
        out_shape=jax.ShapeDtypeStruct((num_parts, rows, out), out_dtype if is_whole else summed),
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=is_interpreted(),
        name="coded_product",
    )(*inputs, codes, *rest)
    if is_whole:
        return parts[0]
    y = parts.sum(axis=0)
    if units is not None:
        y = y.astype(jnp.float32) * units[:, None] * scales[:, 0]
    return y.astype(out_dtype)


def _kernel(*refs: Any, kind: str, group: int, tile: ProductTile, num_steps: int, summed: Any) -> None:
    halves = 2 if kind in ("int4", "fp4") else 1
    input_refs, (codes_ref, scales_ref), out_ref = refs[:halves], refs[halves : halves + 2], refs[-1]
    has_codes = input_refs[0].dtype == jnp.int8
    others = refs[halves + 2 : -1]
    offset_refs, unit_refs = ((), others) if has_codes else (others, ())
    (num_parts, num_rows, num_out), num_bytes = out_ref.shape, codes_ref.shape[1]
    rows = pl.program_id(0) * tile.rows + jnp.arange(tile.rows)
    outs = pl.program_id(1) * tile.out + jnp.arange(tile.out)
    part = pl.program_id(2)
    is_out, is_row = outs < num_out, rows < num_rows
    has_own_scales = group < _LEAST_GROUP
    is_scaled_once = (
        num_parts == 1 if has_codes else group == num_bytes and not (offset_refs or has_own_scales)
    )
    size = tile.size if has_own_scales or group == num_bytes else min(tile.size, group)

    def load(ref: Any, at: tuple[Any, ...], mask: jax.Array) -> jax.Array:
        return plgpu.load(ref.at[*at], mask=mask, other=0)

    def body(step: jax.Array, sums: jax.Array) -> jax.Array:
        places = step * size + jnp.arange(size)
        is_there = (places < num_bytes)[None, :]
        codes = load(codes_ref, (outs[:, None], places[None, :]), is_out[:, None] & is_there)
        inputs = [
            load(ref, (rows[:, None], places[None, :]), is_row[:, None] & is_there) for ref in input_refs
        ]
        if has_codes:
            return sums + _product_of_codes(codes, inputs[0], kind)
        numbers = bytes_as_numbers(codes, kind, inputs[0].dtype)
        if is_scaled_once:
            return sums + _products(numbers, inputs)
        if has_own_scales:
            groups = jnp.minimum(places // group, scales_ref.shape[1] - 1)
            at, mask = (outs[:, None], groups[None, :]), is_out[:, None]
        else:
            at, mask = (outs, step * size // group), is_out
        scale, *offsets = (load(ref, at, mask) for ref in (scales_ref, *offset_refs))
        add = _scaled_one_by_one if has_own_scales else _scaled_together
        return sums + add(numbers, inputs, scale * UNITS.get(kind, 1.0), offsets)

    steps_each = num_steps * tile.size // size
    num_all = pl.cdiv(num_bytes, size)
    first, last = part * steps_each, jnp.minimum((part + 1) * steps_each, num_all)
    sums = lax.fori_loop(first, last, body, jnp.zeros((tile.out, tile.rows), summed))
    if is_scaled_once:
        unit = 1.0 if has_codes else UNITS.get(kind, 1.0)
        sums = sums.astype(jnp.float32) * (load(scales_ref, (outs, 0), is_out) * unit)[:, None]
        for ref in unit_refs:
            sums *= load(ref, (rows,), is_row)[None, :]
    at = out_ref.at[part, rows[None, :], outs[:, None]]
    plgpu.store(at, sums.astype(out_ref.dtype), mask=is_row[None, :] & is_out[:, None])


def _scaled_one_by_one(
    numbers: list[jax.Array], inputs: list[jax.Array], scale: jax.Array, offsets: list[jax.Array]
) -> jax.Array:
    """Products of numbers with a scale each, [out, size]."""
    return _products([sum(offsets, one.astype(jnp.float32) * scale) for one in numbers], inputs)


def _scaled_together(
    numbers: list[jax.Array], inputs: list[jax.Array], scale: jax.Array, offsets: list[jax.Array]
) -> jax.Array:
    """Products of numbers of one group with its scale, [out]."""
    found = _products(numbers, inputs) * scale[:, None]
    for offset in offsets:
        for one in inputs:
            found += offset[:, None] * one.astype(jnp.float32).sum(axis=1)[None, :]
    return found


def _product_of_codes(codes: jax.Array, inputs: jax.Array, kind: str) -> jax.Array:
    """Of codes as int8, [out, rows] int32 or float32."""
    dimensions = (((1,), (1,)), ((), ()))
    if kind == "int8":
        return lax.dot_general(codes, inputs, dimensions, preferred_element_type=jnp.int32)
    codes, inputs = (lax.bitcast_convert_type(one, jnp.float8_e4m3fn) for one in (codes, inputs))
    if is_interpreted():
        codes, inputs = codes.astype(jnp.float32), inputs.astype(jnp.float32)
    return lax.dot_general(codes, inputs, dimensions, preferred_element_type=jnp.float32)


def _products(numbers: list[jax.Array], inputs: list[jax.Array]) -> jax.Array:
    """Of both halves together, [out, rows] float32."""
    precision = lax.Precision.HIGHEST if inputs[0].dtype == jnp.float32 else None
    found = [
        plgpu.dot(one.astype(x.dtype), x, trans_b=True, precision=precision)
        for one, x in zip(numbers, inputs, strict=True)
    ]
    return found[0] + found[1] if len(found) > 1 else found[0]
