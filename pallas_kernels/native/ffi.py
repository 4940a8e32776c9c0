"""XLA's foreign functions from numba: call frames read word by word, registered, kept on disk.

The layout is that of `xla/ffi/api/c_api.h` (version 0.3): every field takes eight bytes, and a later minor
version only adds to the ends of structures.

    frame      2 functions      3 context       7 arguments   9 -> arguments   12 results   14 -> results
    buffer     2 dtype          3 -> data       4 rank        5 -> dimensions
    functions  6 create error   17 schedule     18 threads
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from jaxllm.pallas_kernels.native.memory import call, int32s, int64s, words_on_stack
from jaxllm.pallas_kernels.native.targets import MAJOR, MINOR

_RESOURCE_EXHAUSTED = 8
HANDLER = types.int64(types.int64)
"""What a handler and a job's worker are, to numba."""


@njit
def num_results(frame):  # type: ignore[no-untyped-def]
    """How many results a call has."""
    return int64s(frame)[12]


@njit
def argument(frame, index):  # type: ignore[no-untyped-def]
    """Address of the data of an argument."""
    return int64s(int64s(int64s(frame)[9])[index])[3]


@njit
def result(frame, index):  # type: ignore[no-untyped-def]
    """Address of the data of a result."""
    return int64s(int64s(int64s(frame)[14])[index])[3]


@njit
def dimension(frame, index, axis):  # type: ignore[no-untyped-def]
    """Length of an argument's axis."""
    return int64s(int64s(int64s(int64s(frame)[9])[index])[5])[axis]


@njit
def result_dimension(frame, index, axis):  # type: ignore[no-untyped-def]
    """Length of a result's axis."""
    return int64s(int64s(int64s(int64s(frame)[14])[index])[5])[axis]


@njit
def asks_for_metadata(frame):  # type: ignore[no-untyped-def]
    """Whether XLA asks which version a handler is for; answers it, too."""
    extension = int64s(frame)[1]
    if extension == 0 or int32s(extension + 8)[0] != 1:
        return False
    metadata = int64s(extension)[3]
    version = int32s(metadata + 24)
    version[0], version[1] = MAJOR, MINOR
    int32s(metadata + 32)[0] = 0
    return True


@intrinsic
def _no_memory(context: Any) -> Any:
    """Address of a message."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        text = "native kernel: out of host memory; lower max_num_batched_tokens or kv_cache_memory"
        pointer = context.insert_const_string(builder.module, text)
        return builder.ptrtoint(pointer, ir.IntType(64))

    return types.int64(), generate


@njit
def out_of_memory(frame):  # type: ignore[no-untyped-def]
    """What a handler returns that could not get memory."""
    words = words_on_stack()
    asked = int64s(words)
    asked[0], asked[1], asked[2], asked[3] = 28, 0, _no_memory(), _RESOURCE_EXHAUSTED
    return call(int64s(int64s(frame)[2])[6], words)


def c_address(name: str) -> Any:
    """A function for numba that returns the address of what `llvmlite.binding.add_symbol` calls `name`."""

    @intrinsic
    def address(context: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
            kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)])
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.ptrtoint(function, ir.IntType(64))

        return types.int64(), generate

    return njit(lambda: address())
