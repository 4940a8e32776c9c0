"""Products of activations and packed weights, as items of a job.

A weight `[out, in]` is packed once, when it is loaded, into panels of 32 output features, in which the
numbers that are multiplied with one activation lie side by side:

    panels[out / 32, in, 32]    panel 0:  w[0, 0] w[1, 0] ... w[31, 0]   w[0, 1] w[1, 1] ... w[31, 1]   ...

Weights of int8 lie in panels of as many bytes: four input features of an output feature side by side,

    panels[out / 32, in / 4, 32, 4]

and activations are rounded to int8, row by row, by 1 / 127 of the largest in the row. 128 is added to each,
since the instructions multiply unsigned with signed bytes; 128 times the sum of an output's weights, `sums`,
is taken off again. What was added up exactly is multiplied with the scale of the row and that of the output.

Weights of codes, of eight or four bits with scales for groups of inputs, lie in panels of bytes,

    panels[out / 32, in, 32], or [out / 32, in / 2, 32] with two inputs in a byte, the first one below,

and a part becomes numbers, `code * scale + offset`, before the tiles of all rows take it. So do weights of
bfloat16 and float16, which lie as those of float32 do.

An item is a few panels and some rows. It goes through a panel in parts of 128 input features, and in each
through the rows in tiles, whose sums are kept in registers. A part is read from memory once, while the part
before it is computed, and then from the nearest cache for one tile after the other. A row's results do not
depend on what other rows there are: it is summed from the bias and the first input feature to the last, and
then raised to 0 if asked. The oracle is `x @ weight.T + bias`, of int8 that of the rounded numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from jaxllm.pallas_kernels.native.arrays import LANES
from jaxllm.pallas_kernels.native.memory import int64s, memcpy, memset
from jaxllm.pallas_kernels.native.shape import CODES, PANEL, STORED, LinearShape
from jaxllm.pallas_kernels.native.threads import ARGUMENTS
from jaxllm.pallas_kernels.native.vectors import Builder, vector_code

STEPS_AT_ONCE = 128
"""Steps of a part: 16 KiB, of which two and some rows of activations are in the nearest cache."""
STEP_BYTES = 4 * PANEL
"""Of a panel that one number of a row, or four of int8, are multiplied by."""
DECODED_AT_ONCE = 512
"""Input features of a part of codes where there are many tiles: 64 KiB of numbers."""
ROWS_AT_ONCE = 4
"""Rows that an item rounds."""
MOST_TILES = 8
"""Above so many there is time to read a panel in one part, and none to fetch sums for each."""

# Arguments of the items, in words of the job.
(
    X, PANELS, OUT, NUM_ROWS, STEPS, OUT_FEATURES,
    NUM_PANELS, PANELS_PER_ITEM, NUM_PARTS, ROWS_PER_ITEM, BIAS, IS_RELU,
    SCALES, SUMS, ROW_SCALES, ROUNDED_FROM, IN_FEATURES, OFFSETS, GROUP,
) = range(ARGUMENTS, ARGUMENTS + 19)  # fmt: skip


def linear_item(shape: LinearShape) -> Callable[[int, int, int], None]:
    """An item of a panel and some rows, for numba."""
    if shape.numbers in STORED:
        return _stored_item(shape)
    most = shape.rows
    compute = _tiles(shape)

    @njit(error_model="numpy")
    def item(job, scratch, index):  # type: ignore[no-untyped-def]
        words = int64s(job)
        steps, features, num_panels = words[STEPS], words[OUT_FEATURES], words[NUM_PANELS]
        first = index // words[NUM_PARTS] * words[PANELS_PER_ITEM]
        first_row = index % words[NUM_PARTS] * words[ROWS_PER_ITEM]
        last_row = min(first_row + words[ROWS_PER_ITEM], words[NUM_ROWS])
        num_tiles = (last_row - first_row + most - 1) // most
        stride_ahead = STEP_BYTES // num_tiles
        at_once = STEPS_AT_ONCE if num_tiles <= MOST_TILES else steps
        zeros = scratch + words[ROWS_PER_ITEM] * STEP_BYTES
        memset(zeros, 0, STEP_BYTES)
        for panel in range(first, min(first + words[PANELS_PER_ITEM], num_panels)):
            weights = words[PANELS] + panel * steps * STEP_BYTES
            width = min(features - panel * PANEL, PANEL)
            scales, sums = words[SCALES] + panel * 4 * PANEL, words[SUMS] + panel * 4 * PANEL
            bias = zeros
            if words[BIAS] != 0:
                bias = words[BIAS] + panel * 4 * PANEL
            if words[BIAS] != 0 and width < PANEL:
                bias = zeros
                memcpy(zeros, words[BIAS] + panel * 4 * PANEL, width * 4)
            for start in range(0, steps, at_once):
                part = min(at_once, steps - start)
                is_last = np.int64(start + part == steps)
                ahead = weights + at_once * STEP_BYTES
                row = first_row
                for tile in range(num_tiles):
                    end = first_row + (last_row - first_row) * (tile + 1) // num_tiles
                    x = words[X] + (row * steps + start) * 4
                    out = words[OUT] + (row * features + panel * PANEL) * 4
                    stride = features
                    if width < PANEL:
                        out, stride = scratch + (row - first_row) * 4 * PANEL, np.int64(PANEL)
                    compute(
                        end - row, x, steps, weights, start, part, is_last, is_last * words[IS_RELU],
                        out, stride, bias, scales, sums, words[ROW_SCALES] + 4 * row, ahead, stride_ahead,
                    )  # fmt: skip
                    ahead += part * stride_ahead
                    row = end
                weights += part * STEP_BYTES
            if width < PANEL:
                for row in range(first_row, last_row):
                    out = words[OUT] + (row * features + panel * PANEL) * 4
                    memcpy(out, scratch + (row - first_row) * 4 * PANEL, width * 4)

    return item


def _stored_item(shape: LinearShape) -> Callable[[int, int, int], None]:
    """As `linear_item`, of weights that become float32."""
    most, bits = shape.rows, STORED[shape.numbers]
    compute, expand = _tiles(shape), _expand(shape)
    at_a_time = max(1, 8 // bits)  # input features that are read together

    @njit(error_model="numpy")
    def widened(words, panel, start, part, zeros, target):  # type: ignore[no-untyped-def]
        numbers = words[PANELS] + (panel * words[IN_FEATURES] + start) * bits // 8 * PANEL
        expand(numbers, part, zeros, zeros, target)

    @njit(error_model="numpy")
    def expanded(words, panel, start, part, zeros, target):  # type: ignore[no-untyped-def]
        depth, group = words[IN_FEATURES], words[GROUP]
        end = start + part
        while start < end:
            place = panel * (depth // group) + start // group
            size = min(group - start % group, end - start)
            offsets = zeros
            if words[OFFSETS] != 0:
                offsets = words[OFFSETS] + place * STEP_BYTES
            codes = words[PANELS] + (panel * depth + start) * bits // 8 * PANEL
            expand(codes, size // at_a_time, words[SCALES] + place * STEP_BYTES, offsets, target)
            start += size
            target += size * STEP_BYTES

    made = expanded if shape.numbers in CODES else widened

    @njit(error_model="numpy")
    def item(job, scratch, index):  # type: ignore[no-untyped-def]
        words = int64s(job)
        steps, features, num_panels = words[IN_FEATURES], words[OUT_FEATURES], words[NUM_PANELS]
        first = index // words[NUM_PARTS] * words[PANELS_PER_ITEM]
        first_row = index % words[NUM_PARTS] * words[ROWS_PER_ITEM]
        last_row = min(first_row + words[ROWS_PER_ITEM], words[NUM_ROWS])
        num_tiles = (last_row - first_row + most - 1) // most
        at_once = STEPS_AT_ONCE if num_tiles <= MOST_TILES else DECODED_AT_ONCE
        zeros = scratch + words[ROWS_PER_ITEM] * STEP_BYTES
        numbers = zeros + 2 * STEP_BYTES
        memset(zeros, 0, 2 * STEP_BYTES)
        for panel in range(first, min(first + words[PANELS_PER_ITEM], num_panels)):
            width = min(features - panel * PANEL, PANEL)
            bias = zeros
            if words[BIAS] != 0:
                bias = words[BIAS] + panel * STEP_BYTES
            if words[BIAS] != 0 and width < PANEL:
                bias = zeros + STEP_BYTES
                memcpy(bias, words[BIAS] + panel * STEP_BYTES, width * 4)
            for start in range(0, steps, at_once):
                part = min(at_once, steps - start)
                is_last = np.int64(start + part == steps)
                made(words, panel, start, part, zeros, numbers)
                ahead = words[PANELS] + (panel * steps + start + at_once) * bits // 8 * PANEL
                row = first_row
                for tile in range(num_tiles):
                    end = first_row + (last_row - first_row) * (tile + 1) // num_tiles
                    x = words[X] + (row * steps + start) * 4
                    out = words[OUT] + (row * features + panel * PANEL) * 4
                    stride = features
                    if width < PANEL:
                        out, stride = scratch + (row - first_row) * STEP_BYTES, np.int64(PANEL)
                    compute(
                        end - row, x, steps, numbers, start, part, is_last, is_last * words[IS_RELU],
                        out, stride, bias, zeros, zeros, zeros, ahead, np.int64(PANEL * bits // 8),
                    )  # fmt: skip
                    row = end
            if width < PANEL:
                for row in range(first_row, last_row):
                    out = words[OUT] + (row * features + panel * PANEL) * 4
                    memcpy(out, scratch + (row - first_row) * STEP_BYTES, width * 4)

    return item


def _expand(shape: LinearShape) -> Any:
    """`numbers = codes * scales + offsets` of a panel's inputs of one group, `[count, PANEL]` bytes.

    Of 16 bits they are `[count, PANEL]` numbers, and become float32 without scales.
    """
    if shape.numbers not in CODES:

        @vector_code
        def widen(b: Builder, stored: Any, count: Any, _: Any, __: Any, numbers: Any) -> None:
            with b.loop(count) as k:
                for place in range(0, PANEL, LANES):
                    at = b.added(b.times(k, PANEL), place)
                    b.floats(numbers).store(b.widened(stored, at, shape.numbers), at)

        return widen

    @vector_code
    def expand(b: Builder, codes: Any, count: Any, scales: Any, offsets: Any, numbers: Any) -> None:
        places = [LANES * i for i in range(PANEL // LANES)]
        factors = [(b.floats(scales).load(place), b.floats(offsets).load(place)) for place in places]
        with b.loop(count) as k:
            for place, (scale, offset) in zip(places, factors, strict=True):
                decoded = b.decoded(codes, b.added(b.times(k, PANEL), place), shape.numbers)
                for i, code in enumerate(decoded):
                    target = b.added(b.times(k, len(decoded) * PANEL), i * PANEL + place)
                    b.floats(numbers).store(b.fma(code, scale, offset), target)

    return expand


def rounding_item() -> Callable[[int, int, int], None]:
    """An item of `ROWS_AT_ONCE` rows that are rounded to int8, for numba."""

    @njit(error_model="numpy")
    def item(job, scratch, index):  # type: ignore[no-untyped-def]
        words = int64s(job)
        features = words[IN_FEATURES]
        for row in range(index * ROWS_AT_ONCE, min((index + 1) * ROWS_AT_ONCE, words[NUM_ROWS])):
            target, scale = words[X] + 4 * row * words[STEPS], words[ROW_SCALES] + 4 * row
            _round(words[ROUNDED_FROM] + 4 * row * features, features, target, scale)

    return item


@vector_code
def _round(b: Builder, x: Any, count: Any, target: Any, scale: Any) -> None:
    """A row, whose number of features is a multiple of the lanes: its codes plus 128, and its scale."""
    largest = b.registers(1)
    largest[0] = b.constant(1e-10)
    with b.loop(count, step=LANES) as index:
        largest[0] = b.maximum_or_nan(largest[0], b.absolute(b.floats(x).load(index)))
    unit = b.multiply(b.splat(b.largest_or_nan(largest[0])), b.constant(1 / 127))
    b.floats(scale).put(b.first(unit))
    with b.loop(count, step=LANES) as index:
        code = b.rounded(b.divide(b.floats(x).load(index), unit))
        b.put_bytes(target, index, b.add(code, b.constant(128.0)))


def _tiles(shape: LinearShape) -> Any:
    """`out = x[num_rows, part] @ panel[part, PANEL]`, added to what is there unless `start` is 0.

    `num_rows` is 1 to `shape.rows`; `steps` and `stride` are numbers from row to row of `x` and `out`.
    Meanwhile it asks for what lies ahead, every `stride_ahead` bytes.
    """
    vectors, is_float = shape.vectors, shape.numbers != "int8"
    parts = [range(i, i + vectors) for i in range(0, PANEL // LANES, vectors)]
    dtype = "float32" if is_float else "int32"

    @vector_code
    def tiles(
        b: Builder,
        num_rows: Any,
        x: Any,
        steps: Any,
        panel: Any,
        start: Any,
        part: Any,
        is_last: Any,
        is_relu: Any,
        out: Any,
        stride: Any,
        bias: Any,
        scales: Any,
        sums_of_weights: Any,
        row_scales: Any,
        ahead: Any,
        stride_ahead: Any,
    ) -> None:
        is_first = b.is_zero(start)
        least = b.either(b.is_zero(is_relu), b.constant(float("-inf")), b.constant(0.0))

        def first(place: int) -> Any:
            return b.floats(bias).load(place) if is_float else b.no_integers()

        def added(total: Any, factor: Any, weights: Any) -> Any:
            return b.fma(factor, weights, total) if is_float else b.dot(factor, weights, total, shape.dot)

        def finished(total: Any, row: int, place: int) -> Any:
            if not is_float:
                exact = b.as_floats(b.minus(total, b.array(sums_of_weights, "int32").load(place)))
                scaled = b.multiply(
                    b.multiply(exact, b.floats(row_scales).splat(row)), b.floats(scales).load(place)
                )
                total = b.add(scaled, b.floats(bias).load(place))
            return b.at_least(total, least)

        def columns_of_tile(num_rows: int, columns: range) -> None:
            rows = [b.array(x, dtype).at(b.times(steps, row)) for row in range(num_rows)]
            targets = [b.array(out, dtype).at(b.times(stride, row)) for row in range(num_rows)]
            sums = b.registers(num_rows * vectors, dtype)
            places = [(row, LANES * i) for row in range(num_rows) for i in columns]
            for n, (row, place) in enumerate(places):
                sums[n] = b.either(is_first, first(place), targets[row].load(place))
            with b.loop(part) as k:
                offset = b.multiplied(k, stride_ahead)
                for line in range(0, STEP_BYTES, 64):
                    b.prefetch(ahead, b.added(offset, line))
                weights = b.array(panel, dtype).at(b.times(k, PANEL))
                loaded = [weights.load(LANES * i) for i in columns]
                for row in range(num_rows):
                    factor = rows[row].at(k).splat()
                    for i in range(vectors):
                        n = row * vectors + i
                        sums[n] = added(sums[n], factor, loaded[i])

            def finish() -> None:
                for n, (row, place) in enumerate(places):
                    target = b.floats(out).at(b.times(stride, row))
                    target.store(finished(sums[n], row, place), place)

            def go_on() -> None:
                for n, (row, place) in enumerate(places):
                    targets[row].store(sums[n], place)

            finish() if is_float else b.choose(is_last, [finish, go_on])

        def tile(num_rows: int) -> None:
            for columns in parts:
                columns_of_tile(num_rows, columns)

        b.choose(num_rows, [functools.partial(tile, count) for count in range(1, shape.rows + 1)])

    return tiles
