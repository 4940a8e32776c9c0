"""Gated activations, `silu(x[:, :features]) * x[:, features:]`, as items of a job: a few rows each.

The oracle is `jax.nn.silu`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from jaxllm.pallas_kernels.native import ffi
from jaxllm.pallas_kernels.native.arrays import LANES
from jaxllm.pallas_kernels.native.memory import int64s
from jaxllm.pallas_kernels.native.shape import RowsShape
from jaxllm.pallas_kernels.native.threads import ARGUMENTS, NUM_ROWS
from jaxllm.pallas_kernels.native.vectors import Builder, vector_code

ROWS_AT_ONCE = 4
_X, _OUT, _FEATURES = range(ARGUMENTS, ARGUMENTS + 3)


@vector_code
def _gate(b: Builder, gates: Any, values: Any, count: Any, target: Any) -> None:
    """`count` numbers, a multiple of the lanes."""
    with b.loop(count, step=LANES) as index:
        gate = b.floats(gates).load(index)
        product = b.multiply(b.multiply(gate, b.sigmoid(gate)), b.floats(values).load(index))
        b.floats(target).store(product, index)


@njit(error_model="numpy")
def describe(frame, words):  # type: ignore[no-untyped-def]
    """The arguments of items: of a call with `x [rows, 2 * features]`, to `[rows, features]`."""
    words[_X], words[_OUT] = ffi.argument(frame, 1), ffi.result(frame, 0)
    words[_FEATURES] = ffi.result_dimension(frame, 0, 1)


def item(shape: RowsShape) -> Callable[[int, int, int], None]:
    """An item of `ROWS_AT_ONCE` rows, for numba."""

    @njit(error_model="numpy")
    def gated(job, scratch, index):  # type: ignore[no-untyped-def]
        words = int64s(job)
        features = words[_FEATURES]
        for row in range(index * ROWS_AT_ONCE, min((index + 1) * ROWS_AT_ONCE, words[NUM_ROWS])):
            gates = words[_X] + 8 * row * features
            _gate(gates, gates + 4 * features, features, words[_OUT] + 4 * row * features)

    return gated
