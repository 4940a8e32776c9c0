"""Floats of eight and four bits as float32 and back, in LLVM's IR, for vectors of any number of lanes.

    e4m3fn  s eeee mmm   bias 7, up to 448; all ones are NaN, and there are no infinities
    e5m2    s eeeee mm   bias 15, up to 57,344: the upper byte of a float16
    e2m1    s ee m       bias 1, up to 6

Each is a float16 with fewer digits, whose exponent may be smaller.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir


class _Float8(NamedTuple):
    """Bits of the mantissa, bias of the exponent, the largest number, and the code of NaN."""

    mantissa: int
    bias: int
    largest: float
    nan: int


FLOATS_OF_8 = {
    "float8_e4m3fn": _Float8(3, 7, 448.0, 0x7F),
    "float8_e5m2": _Float8(2, 15, 57344.0, 0x7E),
}
"""By NumPy's name."""


def from_float8(b: ir.IRBuilder, codes: Any, dtype: str) -> Any:
    """Bytes as float32."""
    if dtype == "float8_e5m2":
        return from_code(b, codes, 8, 8)
    rest = b.and_(codes, _constant(codes.type, 0x7F))
    is_nan = b.icmp_unsigned("==", rest, _constant(codes.type, 0x7F))
    numbers = from_code(b, codes, 8, 7)
    numbers = b.fmul(numbers, _constant(numbers.type, 256.0))
    return b.select(is_nan, _constant(numbers.type, float("nan")), numbers)


def to_float8(b: ir.IRBuilder, vector: Any, dtype: str) -> Any:
    """Float32 as bytes, as `KVLayout.stored` has them: to the nearest, or even; what is no number is NaN."""
    mantissa, bias, largest, nan = FLOATS_OF_8[dtype]
    floats, ints = vector.type, ir.VectorType(ir.IntType(32), vector.type.count)
    dropped, least = 23 - mantissa, 2.0 ** (1 - bias)

    def fixed(number: int) -> Any:
        return _constant(ints, number)

    size = b.bitcast(b.and_(b.bitcast(vector, ints), fixed(0x7FFFFFFF)), floats)
    is_number = b.fcmp_ordered("<", size, _constant(floats, float("inf")))
    size = b.select(b.fcmp_ordered("<", size, _constant(floats, largest)), size, _constant(floats, largest))
    bits = b.bitcast(size, ints)
    odd = b.and_(b.lshr(bits, fixed(dropped)), fixed(1))
    rounded = b.lshr(b.add(bits, b.add(odd, fixed((1 << (dropped - 1)) - 1))), fixed(dropped))
    normal = b.sub(rounded, fixed((127 - bias) << mantissa))
    # Below the smallest normal number codes count steps, which are the last digits of a sum this large.
    large = _constant(floats, 2.0 ** (23 - mantissa) * least)
    steps = b.sub(b.bitcast(b.fadd(size, large), ints), b.bitcast(large, ints))
    is_small = b.fcmp_ordered("<", size, _constant(floats, least))
    code = b.select(is_small, steps, normal)
    sign = b.and_(b.lshr(b.bitcast(vector, ints), fixed(24)), fixed(0x80))
    code = b.select(is_number, b.or_(code, sign), fixed(nan))
    return b.trunc(code, ir.VectorType(ir.IntType(8), vector.type.count))


def from_code(b: ir.IRBuilder, codes: Any, bits: int, shift: int) -> Any:
    """Codes of so many bits, the first of them the sign, whose others go so far to the left, as float32.

    They become float16, of a smaller exponent where there are more bits than fill it. `codes` are integers of
    8 or 16 bits, in whose other bits is 0.
    """
    halves = ir.VectorType(ir.IntType(16), codes.type.count)
    codes = b.zext(codes, halves) if codes.type != halves else codes
    sign = b.shl(b.and_(codes, _constant(halves, 1 << (bits - 1))), _constant(halves, 16 - bits))
    rest = b.shl(b.and_(codes, _constant(halves, (1 << (bits - 1)) - 1)), _constant(halves, shift))
    half = b.bitcast(b.or_(sign, rest), ir.VectorType(ir.HalfType(), codes.type.count))
    return b.fpext(half, ir.VectorType(ir.FloatType(), codes.type.count))


def _constant(kind: Any, number: float) -> Any:
    """In all lanes."""
    return ir.Constant(kind, [number] * kind.count)
