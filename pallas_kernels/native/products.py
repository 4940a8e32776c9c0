"""Products of activations and packed weights, as items of a job.

A weight `[out, in]` is packed once, when it is loaded, into panels of 32 output features, in which the
numbers that are multiplied with one activation lie side by side:

    panels[out / 32, in, 32]    panel 0:  w[0, 0] w[1, 0] ... w[31, 0]   w[0, 1] w[1, 1] ... w[31, 1]   ...

An item is a few panels and some rows. It keeps the sums of a tile of rows in registers and goes through a
panel from the first input feature to the last, so that a row's results do not depend on what other rows
there are. A panel is read from memory once, while the panel before it is computed, and then from a cache for
one tile after the other. The oracle is `x @ weight.T`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import njit

from jaxllm.pallas_kernels.native.memory import int64s, memcpy
from jaxllm.pallas_kernels.native.shape import PANEL, LinearShape
from jaxllm.pallas_kernels.native.threads import ARGUMENTS
from jaxllm.pallas_kernels.native.vectors import LANES, Builder, vector_code

# Arguments of the items, in words of the job.
(
    X, PANELS, OUT, NUM_ROWS, IN_FEATURES, OUT_FEATURES,
    NUM_PANELS, PANELS_PER_ITEM, NUM_PARTS, ROWS_PER_ITEM,
) = range(ARGUMENTS, ARGUMENTS + 10)  # fmt: skip


def scratch_bytes(shape: LinearShape) -> int:
    """Bytes that a thread needs."""
    return 4 * shape.rows * PANEL


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
        for panel in range(first, min(first + words[PANELS_PER_ITEM], num_panels)):
            weights = words[PANELS] + panel * depth * panel_bytes
            ahead = weights + depth * panel_bytes if panel + 1 < num_panels else weights
            width = min(features - panel * PANEL, PANEL)
            row = first_row
            for tile in range(num_tiles):
                end = first_row + (last_row - first_row) * (tile + 1) // num_tiles
                x = words[X] + row * depth * 4
                out = words[OUT] + (row * features + panel * PANEL) * 4
                if width == PANEL:
                    compute(end - row, x, weights, depth, out, features, ahead, step)
                else:
                    compute(end - row, x, weights, depth, scratch, PANEL, ahead, step)
                    for i in range(end - row):
                        memcpy(out + i * features * 4, scratch + i * PANEL * 4, width * 4)
                ahead += depth * step
                row = end

    return item


def _tiles(most: int, vectors: int) -> Any:
    """`out = x[num_rows, depth] @ panel[depth, PANEL]`, with `stride` numbers from row to row of `out`.

    `num_rows` is 1 to `most`. Meanwhile it asks for what lies ahead, every `step` bytes.
    """
    parts = [range(i, i + vectors) for i in range(0, PANEL // LANES, vectors)]

    @vector_code
    def tiles(
        b: Builder,
        num_rows: Any,
        x: Any,
        panel: Any,
        depth: Any,
        out: Any,
        stride: Any,
        ahead: Any,
        step: Any,
    ) -> None:
        def tile(num_rows: int) -> None:
            rows = [b.floats(x).at(b.times(depth, row)) for row in range(num_rows)]
            for part in parts:
                sums = b.registers(num_rows * vectors)
                for n in range(num_rows * vectors):
                    sums[n] = b.constant(0.0)
                with b.loop(depth) as k:
                    b.prefetch(ahead, b.multiplied(k, step))
                    weights = b.floats(panel).at(b.times(k, PANEL))
                    loaded = [weights.load(LANES * i) for i in part]
                    for row in range(num_rows):
                        factor = rows[row].at(k).splat()
                        for i in range(vectors):
                            n = row * vectors + i
                            sums[n] = b.fma(factor, loaded[i], sums[n])
                for row in range(num_rows):
                    target = b.floats(out).at(b.times(stride, row))
                    for n, i in enumerate(part):
                        target.store(sums[row * vectors + n], LANES * i)

        b.choose(num_rows, [functools.partial(tile, count) for count in range(1, most + 1)])

    return tiles
