"""Sums of the residual stream and their norms, as items of a job: a few rows each.

Every mean is that of a row's features, all of it in float32:

    RMS norm      sum / sqrt(mean(sum ** 2) + eps) * weight
    layer norm    (sum - mean(sum)) / sqrt(mean((sum - mean(sum)) ** 2) + eps) * weight + bias

with `sum = x + delta`, or `x` alone. The oracle is these formulas in float64.
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
_X, _DELTA, _WEIGHT, _BIAS, _FACTORS, _SUM, _OUT, _FEATURES = range(ARGUMENTS, ARGUMENTS + 8)


@vector_code
def _add(b: Builder, x: Any, delta: Any, count: Any, target: Any) -> None:
    """`count` numbers, a multiple of the lanes."""
    with b.loop(count, step=LANES) as index:
        b.floats(target).store(b.add(b.floats(x).load(index), b.floats(delta).load(index)), index)


def _scale(b: Builder, squares: Any, factors: Any) -> Any:
    """1 / sqrt(mean + eps) of the lanes' sums of squares."""
    mean = b.fma(b.splat(b.total(squares)), b.floats(factors).splat(0), b.floats(factors).splat(1))
    return b.divide(b.constant(1.0), b.sqrt(mean))


@vector_code
def _rms(b: Builder, x: Any, weight: Any, bias: Any, factors: Any, count: Any, target: Any) -> None:
    """One row."""
    squares = b.registers(1)
    squares[0] = b.constant(0.0)
    with b.loop(count, step=LANES) as index:
        values = b.floats(x).load(index)
        squares[0] = b.fma(values, values, squares[0])
    scale = _scale(b, squares[0], factors)
    with b.loop(count, step=LANES) as index:
        normed = b.multiply(b.floats(x).load(index), scale)
        b.floats(target).store(b.multiply(normed, b.floats(weight).load(index)), index)


@vector_code
def _layer(b: Builder, x: Any, weight: Any, bias: Any, factors: Any, count: Any, target: Any) -> None:
    """One row."""
    sums = b.registers(1)
    sums[0] = b.constant(0.0)
    with b.loop(count, step=LANES) as index:
        sums[0] = b.add(sums[0], b.floats(x).load(index))
    mean = b.multiply(b.splat(b.total(sums[0])), b.floats(factors).splat(0))
    sums[0] = b.constant(0.0)
    with b.loop(count, step=LANES) as index:
        centred = b.subtract(b.floats(x).load(index), mean)
        sums[0] = b.fma(centred, centred, sums[0])
    scale = _scale(b, sums[0], factors)
    with b.loop(count, step=LANES) as index:
        normed = b.multiply(b.subtract(b.floats(x).load(index), mean), scale)
        normed = b.fma(normed, b.floats(weight).load(index), b.floats(bias).load(index))
        b.floats(target).store(normed, index)


@njit(error_model="numpy")
def describe(frame, words):  # type: ignore[no-untyped-def]
    """The arguments of items: of a call with `x`, `weight`, `bias`, and 1 / features and eps.

    It makes the norm; or, with `delta` as one more argument, the sum and its norm.
    """
    last = ffi.num_results(frame) - 1
    words[_X], words[_WEIGHT] = ffi.argument(frame, 1), ffi.argument(frame, 2)
    words[_BIAS], words[_FACTORS] = ffi.argument(frame, 3), ffi.argument(frame, 4)
    if last == 1:
        words[_DELTA], words[_SUM] = ffi.argument(frame, 5), ffi.result(frame, 0)
    words[_OUT], words[_FEATURES] = ffi.result(frame, last), ffi.dimension(frame, 1, 1)


def item(shape: RowsShape) -> Callable[[int, int, int], None]:
    """An item of `ROWS_AT_ONCE` rows, for numba."""
    norm = {"rms_norm": _rms, "layer_norm": _layer}[shape.operation]

    @njit(error_model="numpy")
    def normed(job, scratch, index):  # type: ignore[no-untyped-def]
        words = int64s(job)
        features = words[_FEATURES]
        for row in range(index * ROWS_AT_ONCE, min((index + 1) * ROWS_AT_ONCE, words[NUM_ROWS])):
            place = 4 * row * features
            x = words[_X] + place
            if words[_DELTA] != 0:
                _add(x, words[_DELTA] + place, features, words[_SUM] + place)
                x = words[_SUM] + place
            norm(x, words[_WEIGHT], words[_BIAS], words[_FACTORS], features, words[_OUT] + place)

    return normed
