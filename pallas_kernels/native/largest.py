"""Where the largest number of a row is, the first of equals, as items of a job: a row each.

The oracle is `numpy.argmax`; of a row whose largest is no finite number, as a NaN makes it, the place is -1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from jaxllm.pallas_kernels.native import ffi
from jaxllm.pallas_kernels.native.arrays import LANES
from jaxllm.pallas_kernels.native.memory import floats, int32s, int64s
from jaxllm.pallas_kernels.native.shape import RowsShape
from jaxllm.pallas_kernels.native.threads import ARGUMENTS
from jaxllm.pallas_kernels.native.vectors import Builder, vector_code

_PART = 1024
"""Numbers of which the largest is found at once, and which are searched for it if it is that of the row."""
ROWS_AT_ONCE = 1
_X, _OUT, _FEATURES = range(ARGUMENTS, ARGUMENTS + 3)


@vector_code
def _largest(b: Builder, x: Any, count: Any, target: Any) -> None:
    """Store the largest of `count` numbers, a multiple of the lanes; NaN if one of them is."""
    largest = b.registers(1)
    largest[0] = b.floats(x).load()
    with b.loop(count, step=LANES) as index:
        largest[0] = b.maximum_or_nan(largest[0], b.floats(x).load(index))
    b.floats(target).put(b.largest_or_nan(largest[0]))


@njit(error_model="numpy")
def describe(frame, words):  # type: ignore[no-untyped-def]
    """The arguments of items: of a call with `x [rows, features]`, to `[rows]` int32."""
    words[_X], words[_OUT] = ffi.argument(frame, 1), ffi.result(frame, 0)
    words[_FEATURES] = ffi.dimension(frame, 1, 1)


def item(shape: RowsShape) -> Callable[[int, int, int], None]:
    """An item of a row, for numba; `scratch` has room for a number."""

    @njit(error_model="numpy")
    def argmax(job, scratch, index):  # type: ignore[no-untyped-def]
        words = int64s(job)
        features = words[_FEATURES]
        address = words[_X] + 4 * index * features
        row = floats(address)
        largest, part, whole = row[0], 0, features // LANES * LANES
        for start in range(0, whole, _PART):
            _largest(address + 4 * start, min(_PART, whole - start), scratch)
            found = floats(scratch)[0]
            if found > largest or np.isnan(found):  # and is never left again
                largest, part = found, start
        place = part
        while place < features - 1 and row[place] != largest:
            place += 1
        for i in range(whole, features):
            if row[i] > largest or np.isnan(row[i]):
                largest, place = row[i], i
        int32s(words[_OUT])[index] = place if np.isfinite(largest) else -1

    return argmax
