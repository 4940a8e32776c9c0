"""Products with weights that are held as codes, as one Pallas kernel lowered through Triton (NVIDIA).

    y[row, o] = sum over i of x[row, i] * (code[o, i] * scale[o, group of i] + offset[o, group of i])

XLA makes the whole matrix of numbers first, in memory. Here a program reads a tile of codes, makes them
numbers of the dtype of `x` in registers, which is exact, and scales the sums of each group. Where `x` has codes,
too, these are multiplied as they are.

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

from jaxllm.pallas_kernels.settings import under_jax_defaults
from jaxllm.pallas_kernels.tiles import is_interpreted

KINDS = ("int8", "e4m3", "e5m2", "int4", "fp4")
"""Codes, of which the last two lie two in a byte, the first in the lower half."""
_LEAST_GROUP = 32  # bytes: those of smaller ones are scaled one by one
_ASKED = 2**20  # bytes that all programs ask of memory at a time, if there are so many
_UNITS = {"e4m3": 2.0**8, "fp4": 2.0**14}
"""What is 1 of these kinds when their bits are taken for those of a float16, whose exponents are larger."""


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
    is_out, is_row = (outs < num_out)[:, None], (rows < num_rows)[:, None]
    has_own_scales, is_one_group = group < _LEAST_GROUP, group == num_bytes and not offset_refs
    size = tile.size if has_own_scales or group == num_bytes else min(tile.size, group)

    def scale_at(step: Any) -> jax.Array:
        scale = plgpu.load(scales_ref.at[outs, step * size // group], mask=outs < num_out, other=0)
        return scale if has_codes else scale * _UNITS.get(kind, 1.0)

    def body(step: jax.Array, sums: jax.Array) -> jax.Array:
        places = step * size + jnp.arange(size)
        is_there = (places < num_bytes)[None, :]
        codes = plgpu.load(codes_ref.at[outs[:, None], places[None, :]], mask=is_out & is_there, other=0)
        inputs = [
            plgpu.load(ref.at[rows[:, None], places[None, :]], mask=is_row & is_there, other=0)
            for ref in input_refs
        ]
        if has_codes:
            return sums + _product_of_codes(codes, inputs[0], kind)
        numbers = _numbers(codes, kind, inputs[0].dtype)
        if has_own_scales:
            groups = jnp.minimum(places // group, scales_ref.shape[1] - 1)
            at = outs[:, None], groups[None, :]
            scale, *offsets = (
                plgpu.load(ref.at[*at], mask=is_out, other=0) for ref in (scales_ref, *offset_refs)
            )
            scaled = [one.astype(jnp.float32) * (scale * _UNITS.get(kind, 1.0)) for one in numbers]
            return sums + _products([sum(offsets, one) for one in scaled], inputs)
        if is_one_group:
            return sums + _products(numbers, inputs)
        sums += _products(numbers, inputs) * scale_at(step)[:, None]
        for ref in offset_refs:
            offset = plgpu.load(ref.at[outs, step * size // group], mask=outs < num_out, other=0)
            for one in inputs:
                sums += offset[:, None] * one.astype(jnp.float32).sum(axis=1)[None, :]
        return sums

    steps_each = num_steps * tile.size // size
    num_all = pl.cdiv(num_bytes, size)
    first, last = part * steps_each, jnp.minimum((part + 1) * steps_each, num_all)
    sums = lax.fori_loop(first, last, body, jnp.zeros((tile.out, tile.rows), summed))
    if (is_one_group and not has_codes and not has_own_scales) or (has_codes and num_parts == 1):
        sums = sums.astype(jnp.float32) * scale_at(0)[:, None]
    for ref in unit_refs if num_parts == 1 else ():
        sums *= plgpu.load(ref.at[rows], mask=rows < num_rows, other=0)[None, :]
    at = out_ref.at[part, rows[None, :], outs[:, None]]
    plgpu.store(at, sums.astype(out_ref.dtype), mask=(rows < num_rows)[None, :] & is_out)


def _product_of_codes(codes: jax.Array, inputs: jax.Array, kind: str) -> jax.Array:
    """Of codes as int8, [out, rows] int32 or float32."""
    dimensions = (((1,), (1,)), ((), ()))
    if kind == "int8":
        return lax.dot_general(codes, inputs, dimensions, preferred_element_type=jnp.int32)
    codes, inputs = (lax.bitcast_convert_type(one, jnp.float8_e4m3fn) for one in (codes, inputs))
    if is_interpreted():
        codes, inputs = codes.astype(jnp.float32), inputs.astype(jnp.float32)
    return lax.dot_general(codes, inputs, dimensions, preferred_element_type=jnp.float32)


def _numbers(codes: jax.Array, kind: str, dtype: Any) -> list[jax.Array]:
    """What codes [.., bytes] int8 stand for, in `_UNITS`; of four bits the first of each byte, the second."""
    key = kind, jnp.dtype(dtype).name
    if key in PTX_OF_NUMBERS and not is_interpreted():
        return [_inline(code, codes, dtype) for code in PTX_OF_NUMBERS[key]]
    return [_number(codes, kind, place) for place in range(2 if kind in ("int4", "fp4") else 1)]


def _number(codes: jax.Array, kind: str, place: int) -> jax.Array:
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


_NIBBLES = """{{
    .reg .b32 bits, one, less;
    shr.u32 bits, $2, {shift};
    and.b32 bits, bits, 0x0f0f0f0f;
    mov.b32 one, {one};
    mov.b32 less, {less};
    prmt.b32 $0, bits, {upper}, 0x4140;
    prmt.b32 $1, bits, {upper}, 0x4342;
    fma.rn.{kind}x2 $0, $0, one, less;
    fma.rn.{kind}x2 $1, $1, one, less;
}}"""
PTX_OF_NUMBERS = {
    ("int8", "bfloat16"): (
        """{
            .reg .b32 sizes, signs, first, second, less;
            and.b32 sizes, $2, 0x7f7f7f7f;
            and.b32 signs, $2, 0x80808080;
            mov.b32 less, 0xbf80bf80;
            prmt.b32 first, signs, 0x43434343, 0x4140;
            prmt.b32 second, signs, 0x43434343, 0x4342;
            prmt.b32 $0, sizes, 0x43434343, 0x4140;
            prmt.b32 $1, sizes, 0x43434343, 0x4342;
            fma.rn.bf16x2 $0, first, less, $0;
            fma.rn.bf16x2 $1, second, less, $1;
        }""",
    ),
    ("int4", "bfloat16"): tuple(
        _NIBBLES.format(shift=shift, kind="bf16", upper="0x43434343", one="0x3f803f80", less="0xc308c308")
        for shift in (0, 4)
    ),
    ("int4", "float16"): tuple(
        _NIBBLES.format(shift=shift, kind="f16", upper="0x64646464", one="0x3c003c00", less="0xe408e408")
        for shift in (0, 4)
    ),
}
"""What `_number` does, of four bytes at a time, by kind of codes and dtype of the numbers.

A bfloat16 whose upper byte is 0x43 is 128 and its last 7 bits, and 256 and these if the bit before them is 1;
a float16 with 0x64 is 1024 and its last 8 bits.
"""


def _inline(code: str, codes: jax.Array, dtype: Any) -> jax.Array:
    [found] = plgpu.elementwise_inline_asm(
        code,
        args=[codes],
        constraints="=r,=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, dtype)],
    )
    return found


def _products(numbers: list[jax.Array], inputs: list[jax.Array]) -> jax.Array:
    """Of both halves together, [out, rows] float32."""
    precision = lax.Precision.HIGHEST if inputs[0].dtype == jnp.float32 else None
    found = [
        plgpu.dot(one.astype(x.dtype), x, trans_b=True, precision=precision)
        for one, x in zip(numbers, inputs, strict=True)
    ]
    return found[0] + found[1] if len(found) > 1 else found[0]
