"""Products of activations and packed weights, as items of a job.

A weight `[out, in]` is packed once, when it is loaded, into panels of 32 output features, in which the
numbers that are multiplied with one activation lie side by side:

    panels[out / 32, in, 32]    panel 0:  w[0, 0] w[1, 0] ... w[31, 0]   w[0, 1] w[1, 1] ... w[31, 1]   ...

An item is a few panels and some rows. It goes through a panel in parts of 128 input features, and in each
through the rows in tiles, whose sums are kept in registers. A part is read from memory once, while the part
before it is computed, and then from the nearest cache for one tile after the other. A row's results do not
depend on what other rows there are: it is summed from the bias and the first input feature to the last, and
then raised to 0 if asked. The oracle is `x @ weight.T + bias`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from jaxllm.pallas_kernels.native.memory import int64s, memcpy, memset
from jaxllm.pallas_kernels.native.shape import PANEL, LinearShape
from jaxllm.pallas_kernels.native.threads import ARGUMENTS
from jaxllm.pallas_kernels.native.vectors import LANES, Builder, vector_code

DEPTH_AT_ONCE = 128
"""Input features of a part: 16 KiB, of which two and some rows of activations are in the nearest cache."""
MOST_TILES = 8
"""Above so many there is time to read a panel in one part, and none to fetch sums for each."""

# Arguments of the items, in words of the job.
(
    X, PANELS, OUT, NUM_ROWS, IN_FEATURES, OUT_FEATURES,
    NUM_PANELS, PANELS_PER_ITEM, NUM_PARTS, ROWS_PER_ITEM, BIAS, IS_RELU,
) = range(ARGUMENTS, ARGUMENTS + 12)  # fmt: skip


def linear_item(shape: LinearShape) -> Callable[[int, int, int], None]:
    """An item of a panel and some rows, for numba."""
    most, panel_bytes = shape.rows, 4 * PANEL
    compute = _tiles(most, shape.vectors)

    @njit(error_model="numpy")
    def item(job, scratch, index):  # type: ignore[no-untyped-def]
        words = int64s(job)
        depth, features, num_panels = words[IN_FEATURES], words[OUT_FEATURES], words[NUM_PANELS]
        first = index // words[NUM_PARTS] * words[PANELS_PER_ITEM]
        first_row = index % words[NUM_PARTS] * words[ROWS_PER_ITEM]
        last_row = min(first_row + words[ROWS_PER_ITEM], words[NUM_ROWS])
        num_tiles = (last_row - first_row + most - 1) // most
        step = panel_bytes // num_tiles
        at_once = DEPTH_AT_ONCE if num_tiles <= MOST_TILES else depth
        zeros = scratch + words[ROWS_PER_ITEM] * panel_bytes
        memset(zeros, 0, panel_bytes)
        for panel in range(first, min(first + words[PANELS_PER_ITEM], num_panels)):
            weights = words[PANELS] + panel * depth * panel_bytes
            width = min(features - panel * PANEL, PANEL)
            bias = zeros
            if words[BIAS] != 0:
                bias = words[BIAS] + panel * panel_bytes
            if words[BIAS] != 0 and width < PANEL:
                bias = zeros
                memcpy(zeros, words[BIAS] + panel * panel_bytes, width * 4)
            for start in range(0, depth, at_once):
                part = min(at_once, depth - start)
                is_relu = words[IS_RELU] if start + part == depth else 0
                ahead = weights + at_once * panel_bytes
                row = first_row
                for tile in range(num_tiles):
                    end = first_row + (last_row - first_row) * (tile + 1) // num_tiles
                    x = words[X] + (row * depth + start) * 4
                    out = words[OUT] + (row * features + panel * PANEL) * 4
                    stride = features
                    if width < PANEL:
                        out, stride = scratch + (row - first_row) * panel_bytes, np.int64(PANEL)
                    compute(
                        end - row, x, depth, weights, bias, start, part, is_relu, out, stride, ahead, step
                    )
                    ahead += part * step
                    row = end
                weights += part * panel_bytes
            if width < PANEL:
                for row in range(first_row, last_row):
                    out = words[OUT] + (row * features + panel * PANEL) * 4
                    memcpy(out, scratch + (row - first_row) * panel_bytes, width * 4)

    return item


def _tiles(most: int, vectors: int) -> Any:
    """`out = x[num_rows, part] @ panel[part, PANEL]`, added to what is there, or to `bias` if `start` is 0.

    `num_rows` is 1 to `most`; `depth` and `stride` are numbers from row to row of `x` and `out`. Meanwhile it
    asks for what lies ahead, every `step` bytes.
    """
    parts = [range(i, i + vectors) for i in range(0, PANEL // LANES, vectors)]

    @vector_code
    def tiles(
        b: Builder,
        num_rows: Any,
        x: Any,
        depth: Any,
        panel: Any,
        bias: Any,
        start: Any,
        part: Any,
        is_relu: Any,
        out: Any,
        stride: Any,
        ahead: Any,
        step: Any,
    ) -> None:
        is_first = b.is_zero(start)
        least = b.either(b.is_zero(is_relu), b.constant(float("-inf")), b.constant(0.0))

        def tile(num_rows: int) -> None:
            rows = [b.floats(x).at(b.times(depth, row)) for row in range(num_rows)]
            targets = [b.floats(out).at(b.times(stride, row)) for row in range(num_rows)]
            for columns in parts:
                sums = b.registers(num_rows * vectors)
                places = [(target, LANES * i) for target in targets for i in columns]
                for n, (target, place) in enumerate(places):
                    sums[n] = b.either(is_first, b.floats(bias).load(place), target.load(place))
                with b.loop(part) as k:
                    offset = b.multiplied(k, step)
                    for line in range(0, 4 * PANEL, 64):
                        b.prefetch(ahead, b.added(offset, line))
                    weights = b.floats(panel).at(b.times(k, PANEL))
                    loaded = [weights.load(LANES * i) for i in columns]
                    for row in range(num_rows):
                        factor = rows[row].at(k).splat()
                        for i in range(vectors):
                            n = row * vectors + i
                            sums[n] = b.fma(factor, loaded[i], sums[n])
                for n, (target, place) in enumerate(places):
                    target.store(b.at_least(sums[n], least), place)

        b.choose(num_rows, [functools.partial(tile, count) for count in range(1, most + 1)])

    return tiles
