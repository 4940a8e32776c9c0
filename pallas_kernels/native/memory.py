"""Memory by its address, in code that numba compiles: views, atomic counters, calls of C functions."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_INT64 = ir.IntType(64)


def _view(element: Any, bits: Any) -> Any:
    @intrinsic
    def view(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], bits.as_pointer())

        return types.CPointer(element)(types.int64), generate

    return view


floats = _view(types.float32, ir.FloatType())
"""The float32s from an address on: `floats(address)[index]`."""
int32s = _view(types.int32, ir.IntType(32))
"""The int32s from an address on."""
int64s = _view(types.int64, _INT64)
"""The int64s from an address on."""

malloc = types.ExternalFunction("malloc", types.int64(types.int64))
free = types.ExternalFunction("free", types.void(types.int64))
memcpy = types.ExternalFunction("memcpy", types.int64(types.int64, types.int64, types.int64))
memset = types.ExternalFunction("memset", types.int64(types.int64, types.int32, types.int64))
give_way = types.ExternalFunction("sched_yield", types.int32())


@intrinsic
def words_on_stack(context: Any) -> Any:
    """Address of eight int64s that live as long as the function that calls this."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(_INT64, 8)), _INT64)

    return types.int64(), generate


@intrinsic
def fetch_add(context: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at an address in one step that all threads see; returns what it was."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], _INT64.as_pointer())
        return builder.atomic_rmw("add", pointer, values[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def call(context: Any, function: Any, argument: Any) -> Any:
    """Call the C function at an address, of one pointer and to one."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(_INT64, [_INT64])
        return builder.call(builder.inttoptr(values[0], kind.as_pointer()), [values[1]])

    return types.int64(types.int64, types.int64), generate


@intrinsic
def relax(context: Any) -> Any:
    """Tell the processor that this thread waits for another one."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        machine = platform.machine().lower()
        if machine in ("x86_64", "amd64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        elif machine in ("arm64", "aarch64"):
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
            hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.hint")
            builder.call(hint, [ir.IntType(32)(1)])  # yield
        return _INT64(0)

    return types.int64(), generate
