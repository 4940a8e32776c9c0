"""Compiles the kernels of a shape; the only module that needs numba when a handler is made."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm

from jaxllm.pallas_kernels.native import handlers
from jaxllm.pallas_kernels.native.machine_code import Code
from jaxllm.pallas_kernels.native.shape import GateShape, LinearShape, Shape, items_symbol


def build(shape: Shape) -> Code:
    """Machine code of the items of a shape, and of its handler, with the names of their functions."""
    if isinstance(shape, LinearShape):
        items = _link(shape, handlers.linear_worker(shape))
        return (*items, *_object_of(handlers.linear_handler(shape)))
    if isinstance(shape, GateShape):
        items = _link(shape, handlers.gate_worker(shape))
        return (*items, *_object_of(handlers.gate_handler(shape)))
    items = _link(shape, handlers.attention_worker(shape))
    return (*items, *_object_of(handlers.attention_handler(shape)))


def _link(shape: Shape, worker: Any) -> tuple[bytes, bytes]:
    """Name and object file of the items' function; handlers that are compiled from now on find it."""
    llvm.add_symbol(items_symbol(shape), worker.address)
    return _object_of(worker)


def _object_of(compiled: Any) -> tuple[bytes, bytes]:
    _, kind, (code, _) = compiled._library.serialize_using_object_code()
    assert kind == "object"
    return compiled._wrapper_name.encode(), code
