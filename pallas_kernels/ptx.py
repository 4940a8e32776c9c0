"""What Triton's kernels compute by PTX: codes of 8 and 4 bits that become numbers, and powers of two.

Triton's own conversions take several instructions for each number. These take few for two or four numbers
that lie together in a register. `halves` and `number` say the same in JAX; on a CPU kernels take these.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plgpu

from jaxllm.pallas_kernels.tiles import is_interpreted

PTX_OF_HALVES = {
    "int8": tuple(
        f"""{{
            .reg .b32 bits, mask, unit;
            shr.u32 bits, $1, {8 * half};
            mov.b32 mask, 0x00ff00ff;
            mov.b32 unit, 0x64806480;
            lop3.b32 bits, bits, mask, unit, 0x6a;
            sub.rn.f16x2 $0, bits, unit;
        }}"""
        for half in range(2)
    ),
    "fp8_e4m3": tuple(
        f"""{{
            .reg .b32 bits;
            .reg .b16 codes, others;
            prmt.b32 bits, $1, 0, {selected};
            mov.b32 {{codes, others}}, bits;
            cvt.rn.f16x2.e4m3x2 $0, codes;
        }}"""
        for selected in ("0x4420", "0x4431")
    ),
    "fp8_e5m2": tuple(
        f"""{{
            .reg .b32 bits;
            shl.b32 bits, $1, {8 - 8 * half};
            and.b32 $0, bits, 0xff00ff00;
        }}"""
        for half in range(2)
    ),
}
"""What `halves` does, of two words at a time, by KV dtype.

A float16 of the bits 0x6480 is 1024 + 128. With a code in place of its last 8 bits, the sign turned, it is
1024 + 128 + code.
"""

_NIBBLES = """{{
    .reg .b32 bits, upper, one, less;
    shr.u32 bits, $2, {shift};
    and.b32 bits, bits, 0x0f0f0f0f;
    mov.b32 upper, {upper};
    mov.b32 one, {one};
    mov.b32 less, {less};
    prmt.b32 $0, bits, upper, 0x4140;
    prmt.b32 $1, bits, upper, 0x4342;
    fma.rn.{kind}x2 $0, $0, one, less;
    fma.rn.{kind}x2 $1, $1, one, less;
}}"""
PTX_OF_NUMBERS = {
    ("int8", "bfloat16"): (
        """{
            .reg .b32 sizes, signs, upper, less, first, second;
            and.b32 sizes, $2, 0x7f7f7f7f;
            and.b32 signs, $2, 0x80808080;
            mov.b32 upper, 0x43434343;
            mov.b32 less, 0xbf80bf80;
            prmt.b32 first, signs, upper, 0x4140;
            prmt.b32 second, signs, upper, 0x4342;
            prmt.b32 $0, sizes, upper, 0x4140;
            prmt.b32 $1, sizes, upper, 0x4342;
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
"""What `number` does, of four bytes at a time, by kind of codes and dtype of the numbers.

A bfloat16 whose upper byte is 0x43 is 128 and its last 7 bits, or 256 and twice these if the bit before them
is 1; a float16 with 0x64 is 1024 and its last 8 bits.
"""


def words_as_halves(words: jax.Array, kv_dtype: str) -> list[jax.Array]:
    """The first and the second number of int16 words of a pool of `kv_dtype`, as float16."""
    if is_interpreted():
        return halves(words, kv_dtype)
    return [
        _inline(code, words, constraints="=r,r", pack=2, dtype=jnp.float16)
        for code in PTX_OF_HALVES[kv_dtype]
    ]


def halves(words: jax.Array, kv_dtype: str) -> list[jax.Array]:
    """The same, without PTX."""
    if kv_dtype == "int8":
        return [(lane << 8 >> 8).astype(jnp.float16) for lane in (words, words >> 8)]
    if kv_dtype == "fp8_e5m2":  # the upper half of a float16
        return [lax.bitcast_convert_type(lane, jnp.float16) for lane in (words << 8, words & -256)]
    codes = [(lane << 8 >> 8).astype(jnp.int8) for lane in (words, words >> 8)]
    return [lax.bitcast_convert_type(code, jnp.float8_e4m3fn).astype(jnp.float16) for code in codes]


UNITS = {"e4m3": 2.0**8, "fp4": 2.0**14}
"""What is 1 of these kinds when their bits are taken for those of a float16, whose exponents are larger."""


def bytes_as_numbers(codes: jax.Array, kind: str, dtype: Any) -> list[jax.Array]:
    """What int8 bytes of codes stand for, in `UNITS`; of four bits the first of each byte, and the second.

    They are of `dtype`, or of one that becomes it without rounding.
    """
    key = kind, jnp.dtype(dtype).name
    if key in PTX_OF_NUMBERS and not is_interpreted():
        return [
            _inline(code, codes, constraints="=r,=r,r", pack=4, dtype=dtype) for code in PTX_OF_NUMBERS[key]
        ]
    return [number(codes, kind, place) for place in range(2 if kind in ("int4", "fp4") else 1)]


def number(codes: jax.Array, kind: str, place: int) -> jax.Array:
    """The same of one place in each byte, without PTX."""
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


def exp2_of(x: jax.Array, factor: float, less: jax.Array) -> jax.Array:
    """`2 ** (x * factor - less)` of float32; on a GPU 0 for results that are no normal number."""
    if is_interpreted():
        return jnp.exp2(x * factor - less)
    bits = np.float32(factor).view(np.uint32)
    code = f"{{ .reg .f32 at; fma.rn.f32 at, $1, 0f{bits:08X}, $2; ex2.approx.ftz.f32 $0, at; }}"
    less = jnp.broadcast_to(-less, x.shape)
    return _inline(code, x, less, constraints="=f,f,f", pack=1, dtype=jnp.float32)


def _inline(code: str, *arguments: jax.Array, constraints: str, pack: int, dtype: Any) -> jax.Array:
    shape = jax.ShapeDtypeStruct(arguments[0].shape, dtype)
    [found] = plgpu.elementwise_inline_asm(
        code, args=arguments, constraints=constraints, pack=pack, result_shape_dtypes=[shape]
    )
    return found
