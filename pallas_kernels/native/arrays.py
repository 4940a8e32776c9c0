"""Numbers of vector code: in memory from an address on, and in registers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from jaxllm.pallas_kernels.native.small_floats import FLOATS_OF_8, from_float8, to_float8

LANES = 16

_FLOAT, _HALF = ir.FloatType(), ir.HalfType()
_INT8, _INT16, _INT32, _INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
ELEMENTS = {
    **dict.fromkeys(("int8", *FLOATS_OF_8), _INT8),
    "float32": _FLOAT,
    "bfloat16": _INT16,
    "float16": _HALF,
    "int32": _INT32,
    "int64": _INT64,
}
_FLOATS = ir.VectorType(_FLOAT, LANES)
_INTS = ir.VectorType(_INT32, LANES)
_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8}


class Array:
    """Numbers in memory from an address on; what is loaded is float32 (int32 where they are int32)."""

    def __init__(self, builder: ir.IRBuilder, pointer: Any, dtype: str) -> None:
        """Of `dtype`."""
        self._builder, self._pointer, self._dtype = builder, pointer, dtype

    def at(self, index: Any) -> Array:
        """The same from an index on."""
        index = index if isinstance(index, ir.Value) else _INT64(index)
        return Array(self._builder, self._builder.gep(self._pointer, [index]), self._dtype)

    def scalar(self, index: Any = 0) -> Any:
        """One number."""
        return self._builder.load(self.at(index)._pointer)

    def put(self, value: Any, index: Any = 0) -> None:
        """Store one number."""
        self._builder.store(value, self.at(index)._pointer)

    def load(self, index: Any = 0) -> Any:
        """The next `LANES` numbers."""
        b = self._builder
        element = ELEMENTS[self._dtype]
        source = b.bitcast(self.at(index)._pointer, ir.VectorType(element, LANES).as_pointer())
        loaded = b.load(source, align=_SIZES.get(self._dtype, 1))
        if self._dtype == "bfloat16":
            high = b.shl(b.zext(loaded, _INTS), all_lanes(16))
            return b.bitcast(high, _FLOATS)
        if self._dtype == "int8":
            return b.sitofp(b.sext(loaded, _INTS), _FLOATS)
        if self._dtype in FLOATS_OF_8:
            return from_float8(b, loaded, self._dtype)
        return b.fpext(loaded, _FLOATS) if self._dtype == "float16" else loaded

    def store(self, vector: Any, index: Any = 0) -> None:
        """Store `LANES` float32 numbers, rounded to the nearest, or even, where the array's are shorter."""
        b = self._builder
        if self._dtype == "float16":
            vector = b.fptrunc(vector, ir.VectorType(_HALF, LANES))
        elif self._dtype == "bfloat16":
            bits = b.bitcast(vector, _INTS)
            odd = b.and_(b.lshr(bits, all_lanes(16)), all_lanes(1))
            rounded = b.add(bits, b.add(odd, all_lanes(0x7FFF)))
            bits = b.select(b.fcmp_unordered("uno", vector, vector), all_lanes(0x7FC00000), rounded)
            vector = b.trunc(b.lshr(bits, all_lanes(16)), ir.VectorType(_INT16, LANES))
        elif self._dtype == "int8":
            vector = b.trunc(b.fptosi(vector, _INTS), ir.VectorType(_INT8, LANES))
        elif self._dtype in FLOATS_OF_8:
            vector = to_float8(b, vector, self._dtype)
        target = b.bitcast(self.at(index)._pointer, vector.type.as_pointer())
        b.store(vector, target, align=_SIZES.get(self._dtype, 1))

    def floats(self) -> Array:
        """The float32 numbers from its first one's place on."""
        return Array(self._builder, self._builder.bitcast(self._pointer, _FLOAT.as_pointer()), "float32")

    def splat(self, index: Any = 0) -> Any:
        """One number in all lanes."""
        return splat(self._builder, self.scalar(index))

    def prefetch(self, index: Any = 0) -> None:
        """Ask for the cache line of a number."""
        b = self._builder
        pointer = b.bitcast(self.at(index)._pointer, ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _INT32, _INT32, _INT32])
        function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
        b.call(function, [pointer, _INT32(0), _INT32(3), _INT32(1)])


class Registers:
    """Vectors that a loop changes, which LLVM keeps in registers."""

    def __init__(self, builder: ir.IRBuilder, count: int, kind: Any) -> None:
        self._builder = builder
        self._places = [cgutils.alloca_once(builder, kind) for _ in range(count)]

    def __getitem__(self, index: int) -> Any:
        return self._builder.load(self._places[index])

    def __setitem__(self, index: int, vector: Any) -> None:
        self._builder.store(vector, self._places[index])


def splat(builder: ir.IRBuilder, scalar: Any) -> Any:
    """A float32 or int32 in all lanes."""
    kind = ir.VectorType(scalar.type, LANES)
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, scalar, _INT32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))


def all_lanes(number: int) -> Any:
    """An int32 in all of them."""
    return ir.Constant(_INTS, [number] * LANES)
