"""Compiles the kernels of a shape; the only module that needs numba when a handler is made."""

from __future__ import annotations

import json
import sys
from typing import Any

import llvmlite.binding as llvm
from numba.core import errors

from jaxllm.pallas_kernels.native import handlers
from jaxllm.pallas_kernels.native.machine_code import Code, load
from jaxllm.pallas_kernels.native.shape import AttentionShape, LinearShape, RowsShape, Shape, items_symbol

# numba words thousands of messages that nobody sees. To mark up each, it has colorama replace sys.stdout and
# put back what it saw first: the `redirect_stdout` of another thread would end in the middle.
setattr(errors.termcolor(), "_markup", lambda message, *_: message)  # noqa: B010


def build(shape: Shape) -> Code:
    """Machine code of the items of a shape, and of its handler, with the names of their functions."""
    worker, handler = _PARTS[type(shape)]
    items = worker(shape)
    llvm.add_symbol(items_symbol(shape), items.address)  # the handler finds it
    return (*_object_of(items), *_object_of(handler(shape)))


_PARTS: dict[type, tuple[Any, Any]] = {
    AttentionShape: (handlers.attention_worker, handlers.attention_handler),
    LinearShape: (handlers.linear_worker, handlers.linear_handler),
    RowsShape: (handlers.rows_worker, handlers.rows_handler),
}


def _object_of(compiled: Any) -> tuple[bytes, bytes]:
    _, kind, (code, _) = compiled._library.serialize_using_object_code()
    assert kind == "object"
    return compiled._wrapper_name.encode(), code


if __name__ == "__main__":  # see `machine_code.prepare`
    _shapes = {one.__name__: one for one in _PARTS}
    for _name, _sizes in json.loads(sys.argv[1]):
        _shape = _shapes[_name](*_sizes)
        load(_shape)
        print(_shape.name, flush=True)
