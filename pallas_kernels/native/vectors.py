"""Vector code for CPUs: sixteen float32 lanes at a time, built as LLVM's IR and called from numba.

numba compiles what is scalar. What must be vectors is written as a function of a `Builder`, in which each
call appends an instruction and Python's own loops unroll:

    @vector_code
    def axpy(b, x, y):
        rows = b.floats(x), b.floats(y)
        b.floats(y).store(b.fma(rows[0].splat(0), rows[0].load(1), rows[1].load(0)))

`axpy(address, address)` may then be called in any function that numba compiles. LLVM lays the lanes out in
the registers there are: one of AVX-512, two of AVX2, four of NEON.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from jaxllm.pallas_kernels.native.arrays import ELEMENTS, LANES, Array, Registers, all_lanes, splat
from jaxllm.pallas_kernels.native.small_floats import from_code

_FLOAT, _HALF = ir.FloatType(), ir.HalfType()
_INT8, _INT16, _INT32, _INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOATS = ir.VectorType(_FLOAT, LANES)
_INTS = ir.VectorType(_INT32, LANES)
_HALF_BITS = ir.VectorType(_INT16, LANES)
_LN2_HIGH, _LN2_LOW, _LOG2_E = 0.693359375, -2.12194440e-4, 1.4426950408889634
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)

LEAST = -1e30
"""Score of what is masked: below every other, and finite, so that differences are."""


def vector_code(body: Callable[..., None]) -> Any:
    """A function for numba of as many int64s as `body` takes after its `Builder`; it returns 0."""
    names = list(inspect.signature(body).parameters)[1:]

    def typed(context: Any, *arguments: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[Any]) -> Any:
            body(Builder(builder), *values)
            return _INT64(0)

        return types.int64(*[types.int64] * len(names)), generate

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in ("context", *names)]
    typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    typed.__name__ = body.__name__
    return intrinsic(typed)


def _bits(number: int) -> Any:
    """In all lanes of 16 bits."""
    return ir.Constant(_HALF_BITS, [number] * LANES)


class Builder:
    """Appends vector instructions to the code an `IRBuilder` is building."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        """At its place."""
        self._b = builder

    def array(self, address: Any, dtype: str) -> Array:
        """The numbers of `dtype` from an address (int64) on."""
        return Array(self._b, self._b.inttoptr(address, ELEMENTS[dtype].as_pointer()), dtype)

    def floats(self, address: Any) -> Array:
        """The float32 numbers from an address (int64) on."""
        return self.array(address, "float32")

    def registers(self, count: int, dtype: str = "float32") -> Registers:
        """Uninitialised vectors of float32 or int32."""
        return Registers(self._b, count, ir.VectorType(ELEMENTS[dtype], LANES))

    @contextlib.contextmanager
    def loop(self, stop: Any, start: Any = None, step: int = 1) -> Iterator[Any]:
        """A loop over the int64s from `start`, or 0, up to before `stop`."""
        start = _INT64(0) if start is None else start
        with cgutils.for_range_slice(self._b, start, stop, _INT64(step)) as (index, _):
            yield index

    def choose(self, number: Any, bodies: Sequence[Callable[[], None]]) -> None:
        """Run one of `bodies`, by its number (an int64), the first being 1; the last for any other number."""
        b = self._b
        blocks = [b.append_basic_block() for _ in bodies]
        end = b.append_basic_block()
        switch = b.switch(number, blocks[-1])
        for place, (block, body) in enumerate(zip(blocks, bodies, strict=True), 1):
            switch.add_case(_INT64(place), block)
            b.position_at_end(block)
            body()
            b.branch(end)
        b.position_at_end(end)

    def integer(self, value: int) -> Any:
        """An int64."""
        return _INT64(value)

    def multiplied(self, x: Any, y: Any) -> Any:
        """Product of two int64s."""
        return self._b.mul(x, y)

    def prefetch(self, address: Any, offset: Any) -> None:
        """Ask for the cache line of a number of bytes after an address."""
        self.array(self._b.add(address, offset), "int64").prefetch()

    def added(self, index: Any, number: int) -> Any:
        """An int64 and a number."""
        return self._b.add(index, _INT64(number))

    def is_zero(self, number: Any) -> Any:
        """Whether an int64 is 0."""
        return self._b.icmp_signed("==", number, _INT64(0))

    def either(self, condition: Any, x: Any, y: Any) -> Any:
        """`x` if a condition holds, else `y`."""
        return self._b.select(condition, x, y)

    def at_least(self, x: Any, least: Any) -> Any:
        """Lanes of `x`, those below `least` raised to it; NaN stays NaN."""
        return self._b.select(self._b.fcmp_ordered("<", x, least), least, x)

    def times(self, index: Any, factor: int) -> Any:
        """An int64 times a number."""
        return self._b.mul(index, _INT64(factor))

    # Arithmetic

    def constant(self, value: float) -> Any:
        """It in all lanes."""
        return ir.Constant(_FLOATS, [value] * LANES)

    def splat(self, scalar: Any) -> Any:
        """A float32 or int32 in all lanes."""
        return splat(self._b, scalar)

    def first(self, vector: Any) -> Any:
        """Lane 0."""
        return self._b.extract_element(vector, _INT32(0))

    def add(self, x: Any, y: Any) -> Any:
        """`x + y`, of vectors or scalars."""
        return self._b.fadd(x, y)

    def subtract(self, x: Any, y: Any) -> Any:
        """`x - y`."""
        return self._b.fsub(x, y)

    def multiply(self, x: Any, y: Any) -> Any:
        """`x * y`."""
        return self._b.fmul(x, y)

    def divide(self, x: Any, y: Any) -> Any:
        """`x / y`."""
        return self._b.fdiv(x, y)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """`x * y + z`."""
        return self._call("llvm.fma.v16f32", _FLOATS, (x, y, z))

    def sqrt(self, x: Any) -> Any:
        """Square root of each lane."""
        return self._call("llvm.sqrt.v16f32", _FLOATS, (x,))

    def maximum(self, x: Any, y: Any) -> Any:
        """The larger of each lane; undefined where one is NaN."""
        return self._call("llvm.maxnum.v16f32", _FLOATS, (x, y), ("nnan", "nsz"))

    def maximum_or_nan(self, x: Any, y: Any) -> Any:
        """The larger of each lane; NaN where one is."""
        return self._call("llvm.maximum.v16f32", _FLOATS, (x, y), ("nsz",))

    def larger(self, x: Any, y: Any) -> Any:
        """The larger of two scalars."""
        return self._b.select(self._b.fcmp_ordered(">", x, y), x, y)

    def largest(self, x: Any) -> Any:
        """Of all lanes; undefined if one is NaN."""
        return self._call("llvm.vector.reduce.fmax.v16f32", _FLOAT, (x,), ("nnan", "nsz"))

    def largest_or_nan(self, x: Any) -> Any:
        """Of all lanes; NaN if one is."""
        return self._call("llvm.vector.reduce.fmaximum.v16f32", _FLOAT, (x,), ("nsz",))

    def total(self, x: Any) -> Any:
        """Of all lanes."""
        zero = ir.Constant(_FLOAT, 0.0)
        return self._call("llvm.vector.reduce.fadd.v16f32", _FLOAT, (zero, x), ("reassoc",))

    def exp(self, x: Any) -> Any:
        """e to the power of each lane, which is at most 0: within 2 ulp, 1e-38 below -87, and NaN of NaN.

        Cody and Waite's reduction to `2**n * exp(f)` with |f| <= ln(2) / 2, and Cephes' polynomial.
        """
        b = self._b
        least = self.constant(-87.0)
        x = b.select(b.fcmp_ordered("<", x, least), least, x)
        shifted = self.fma(x, self.constant(_LOG2_E), self.constant(0.5))
        n = self._call("llvm.floor.v16f32", _FLOATS, (shifted,))
        f = self.fma(n, self.constant(-_LN2_HIGH), x)
        f = self.fma(n, self.constant(-_LN2_LOW), f)
        p = self.constant(_EXP[0])
        for coefficient in _EXP[1:]:
            p = self.fma(p, f, self.constant(coefficient))
        p = self.fma(b.fmul(p, f), f, b.fadd(f, self.constant(1.0)))
        exponent = b.add(b.fptosi(n, _INTS), ir.Constant(_INTS, [127] * LANES))
        return b.fmul(p, b.bitcast(b.shl(exponent, ir.Constant(_INTS, [23] * LANES)), _FLOATS))

    def sigmoid(self, x: Any) -> Any:
        """1 / (1 + e to the power of minus each lane)."""
        one = self.constant(1.0)
        e = self.exp(self.multiply(self.absolute(x), self.constant(-1.0)))
        is_negative = self._b.fcmp_ordered("<", x, self.constant(0.0))
        return self.divide(self._b.select(is_negative, e, one), self.add(one, e))

    def tanh(self, x: Any) -> Any:
        """Of each lane."""
        e = self.exp(self.multiply(self.absolute(x), self.constant(-2.0)))
        one = self.constant(1.0)
        tanh = self.divide(self.subtract(one, e), self.add(one, e))
        return self._call("llvm.copysign.v16f32", _FLOATS, (tanh, x))

    # Integers: vectors of int32, of which some are sixteen times four numbers of eight bits

    def no_integers(self) -> Any:
        """0 in all lanes."""
        return all_lanes(0)

    def as_floats(self, x: Any) -> Any:
        """Integers as float32."""
        return self._b.sitofp(x, _FLOATS)

    def minus(self, x: Any, y: Any) -> Any:
        """`x - y` of integers."""
        return self._b.sub(x, y)

    def rounded(self, x: Any) -> Any:
        """To the nearest integer, or even, as float32."""
        return self._call("llvm.rint.v16f32", _FLOATS, (x,))

    def absolute(self, x: Any) -> Any:
        """Of each lane."""
        return self._call("llvm.fabs.v16f32", _FLOATS, (x,))

    def decoded(self, address: Any, index: Any, kind: str) -> list[Any]:
        """The numbers of `LANES` bytes from an index on; of halves of bytes the lower ones first.

        `kind` is one of `shape.CODES`.
        "code_int4" is 0 to 15 for -8 to 7. Floats of eight and four bits are numbers of 16 bits with fewer
        digits, and a smaller exponent: e4m3 gives 2**-8 of what it stands for, fp4 2**-14, e5m2 the number.
        """
        b = self._b
        source = b.inttoptr(b.add(address, index), ir.VectorType(_INT8, LANES).as_pointer())
        raw = b.load(source, align=1)
        if kind == "code_int8":
            return [b.sitofp(b.sext(raw, _INTS), _FLOATS)]
        if kind in ("code_e4m3", "code_e5m2"):
            return [from_code(b, raw, 8, 7 if kind == "code_e4m3" else 8)]
        wide = b.zext(raw, _HALF_BITS)
        parts = b.and_(wide, _bits(15)), b.lshr(wide, _bits(4))
        if kind == "code_fp4":
            return [from_code(b, part, 4, 9) for part in parts]
        return [b.sitofp(b.sub(part, _bits(8)), _FLOATS) for part in parts]

    def widened(self, address: Any, index: Any, dtype: str) -> Any:
        """`LANES` numbers of bfloat16 or float16 from an index on, as float32."""
        b = self._b
        place = b.add(address, b.mul(index, index.type(2)))
        raw = b.load(b.inttoptr(place, _HALF_BITS.as_pointer()), align=2)
        if dtype == "float16":
            return b.fpext(b.bitcast(raw, ir.VectorType(_HALF, LANES)), _FLOATS)
        shifted = b.shl(b.zext(raw, _INTS), ir.Constant(_INTS, [16] * LANES))
        return b.bitcast(shifted, _FLOATS)

    def put_bytes(self, address: Any, index: Any, x: Any) -> None:
        """Store `LANES` float32 that are integers from 0 to 255 as bytes, from an index on."""
        b = self._b
        bytes_ = b.trunc(b.fptosi(x, _INTS), ir.VectorType(_INT8, LANES))
        b.store(bytes_, b.inttoptr(b.add(address, index), bytes_.type.as_pointer()), align=1)

    def dot(self, unsigned: Any, signed: Any, total: Any, how: str) -> Any:
        """`total` plus the four products of bytes in each lane, none of which has 0 to 255 times -128 to 127.

        `how` is that of a `LinearShape`.
        """
        b = self._b
        if how == "vnni512":
            bytes_ = [b.bitcast(x, ir.VectorType(_INT8, 4 * LANES)) for x in (unsigned, signed)]
            return self._call("llvm.x86.avx512.vpdpbusd.512", _INTS, (total, *bytes_))
        if how == "vnni256":
            return self._in_halves(self._vnni_half, total, unsigned, signed)
        if how == "pairs":
            return self._in_halves(self._pairs_half, total, unsigned, signed)
        for place in range(4):
            left = b.and_(b.lshr(unsigned, all_lanes(8 * place)), all_lanes(255))
            right = b.ashr(b.shl(signed, all_lanes(24 - 8 * place)), all_lanes(24))
            total = b.add(total, b.mul(left, right))
        return total

    def _in_halves(self, operation: Callable[..., Any], *vectors: Any) -> Any:
        """Of eight lanes each."""
        halves = [range(LANES // 2), range(LANES // 2, LANES)]
        low, high = (operation(*(self._shuffle(x, x, half) for x in vectors)) for half in halves)
        return self._shuffle(low, high, range(LANES))

    def _vnni_half(self, total: Any, unsigned: Any, signed: Any) -> Any:
        bytes_ = [self._b.bitcast(x, ir.VectorType(_INT8, 2 * LANES)) for x in (unsigned, signed)]
        return self._call("llvm.x86.avx512.vpdpbusd.256", total.type, (total, *bytes_))

    def _pairs_half(self, total: Any, unsigned: Any, signed: Any) -> Any:
        """Even and odd bytes apart, as 16 bits, since two products of bytes do not fit 16 bits."""
        b, kind = self._b, ir.VectorType(_INT16, LANES)
        eight = ir.Constant(kind, [8] * LANES)
        unsigned, signed = b.bitcast(unsigned, kind), b.bitcast(signed, kind)
        even = b.and_(unsigned, ir.Constant(kind, [255] * LANES)), b.ashr(b.shl(signed, eight), eight)
        odd = b.lshr(unsigned, eight), b.ashr(signed, eight)
        for pair in (even, odd):
            total = b.add(total, self._call("llvm.x86.avx2.pmadd.wd", total.type, pair))
        return total

    def keep(self, x: Any, start: Any, stop: Any, first_lane: int = 0) -> Any:
        """`x` in lanes whose number plus `first_lane` is in [start, stop) (int64s), else `LEAST`."""
        b = self._b
        lanes = ir.Constant(_INTS, [first_lane + lane for lane in range(LANES)])
        low, high = (self.splat(b.trunc(limit, _INT32)) for limit in (start, stop))
        inside = b.and_(b.icmp_signed(">=", lanes, low), b.icmp_signed("<", lanes, high))
        return b.select(inside, x, self.constant(LEAST))

    # Lanes

    def totals(self, vectors: Sequence[Any]) -> Any:
        """A vector whose lane i is the total of the i-th of `LANES` vectors.

        Pairs of vectors are folded into one, which holds halves of both's totals, and so on:

            x  x0 x1 x2 x3    even lanes  x0 y1 x2 y3    sums  x01 y01 x23 y23
            y  y0 y1 y2 y3    odd lanes   x1 y0 x3 y2
        """
        vectors, distance = list(vectors), 1
        while len(vectors) > 1:
            folded = []
            for x, y in zip(vectors[::2], vectors[1::2], strict=True):
                own = [lane if not lane & distance else LANES + lane for lane in range(LANES)]
                other = [index ^ distance for index in own]
                folded.append(self.add(self._shuffle(x, y, own), self._shuffle(x, y, other)))
            vectors, distance = folded, distance * 2
        return vectors[0]

    def transposed(self, vectors: Sequence[Any]) -> list[Any]:
        """`LANES` vectors whose lane j of the i-th is lane i of the j-th of `vectors`."""
        vectors = list(vectors)
        for distance in (1, 2, 4, 8):
            low = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
            high = [lane + distance if not lane & distance else LANES + lane for lane in range(LANES)]
            for i in range(LANES):
                if not i & distance:
                    x, y = vectors[i], vectors[i | distance]
                    vectors[i], vectors[i | distance] = self._shuffle(x, y, low), self._shuffle(x, y, high)
        return vectors

    def _shuffle(self, x: Any, y: Any, lanes: Sequence[int]) -> Any:
        return self._b.shuffle_vector(x, y, ir.Constant(ir.VectorType(_INT32, len(lanes)), list(lanes)))

    def _call(self, name: str, result: Any, arguments: Sequence[Any], flags: Sequence[str] = ()) -> Any:
        kind = ir.FunctionType(result, [one.type for one in arguments])
        function = cgutils.get_or_insert_function(self._b.module, kind, name)
        return self._b.call(function, arguments, fastmath=flags)
