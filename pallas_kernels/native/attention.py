"""Attention over a paged pool, as items of a job: rows of decodes, and tiles of prompts' rows.

What depends on the model's shape is unrolled when it is compiled: how many query heads share a KV head, the
size of heads, how the pool stores numbers. All else is read from the arrays, and all is computed in float32.

A decode item is a row and some of its KV heads. It reads the row's blocks once, in order, sixteen tokens at a
time, with the softmax kept relative to the largest score so far:

    pool[block, layer]    K: head 0 [tokens, head_dim], head 1 ...    V: head 0 [tokens, head_dim], head 1 ...

A prompt item is a tile of consecutive rows of one chunk and one KV head; the rows of the query heads that
share it lie below one another. Their products with 64 keys at a time, transposed, and with 64 values are
small matrix products out of the cache:

    [rows * heads, head_dim] @ [head_dim, 64] -> scores, softmax -> [rows * heads, 64] @ [64, head_dim]

Values of tokens that do not exist are never multiplied: stale memory may hold NaNs. The oracle is
`pallas_kernels.reference`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from jaxllm.pallas_kernels.native.arrays import LANES
from jaxllm.pallas_kernels.native.memory import floats, int32s, int64s, memset
from jaxllm.pallas_kernels.native.shape import AttentionShape
from jaxllm.pallas_kernels.native.threads import ARGUMENTS, LAST_ARGUMENT
from jaxllm.pallas_kernels.native.vectors import LEAST, Builder, vector_code

KEYS = 64
"""Keys that a prompt item looks at in one go."""
_PRODUCT_ROWS, _PRODUCT_VECTORS, _ROW_VECTORS = 6, 4, 24
_TILE_ROWS = 96

# Arguments of the items, in words of the job.
(
    KIND, Q, POOL, OUT, LAYER, NUM_LAYERS, NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE,
    DECODE_TABLES, DECODE_LENGTHS, DECODE_WIDTH, NUM_DECODE_ITEMS, HEADS_PER_ITEM,
    PROMPT_TABLES, PROMPT_LENGTHS, PROMPT_WIDTH, QUERY_STARTS, WINDOW, SCALE_AND_CAP,
    QKV, COS, SIN, SLOTS, NUM_ROWS,
) = range(ARGUMENTS, ARGUMENTS + 25)  # fmt: skip
assert NUM_ROWS <= LAST_ARGUMENT


def scratch_sizes(shape: AttentionShape) -> tuple[int, int]:
    """Bytes that a thread needs for each query head of a row, and at least."""
    group, head_dim, _ = shape
    rows = _rows_of(group)
    for_prompts = rows * (2 * head_dim + 2 + KEYS) + 2 * KEYS * head_dim
    return 4 * (2 * head_dim + 2 + 2 * LANES), 4 * for_prompts


def tile_rows(group: int) -> int:
    """Rows of a prompt that an item takes."""
    return max(8, _TILE_ROWS // group)


def _rows_of(group: int) -> int:
    rows = tile_rows(group) * group
    return -(-rows // _PRODUCT_ROWS) * _PRODUCT_ROWS


@vector_code
def scale_and_clear(b: Builder, source: Any, scale: Any, count: Any, target: Any, cleared: Any) -> None:
    """Copy `count` floats, a multiple of the lanes, times the float at `scale`; and clear as many."""
    factor = b.floats(scale).splat()
    with b.loop(count, step=LANES) as index:
        b.floats(target).store(b.multiply(b.floats(source).load(index), factor), index)
        b.floats(cleared).store(b.constant(0.0), index)


@vector_code
def divide(b: Builder, source: Any, total: Any, count: Any, target: Any) -> None:
    """Store `count` floats over the float at `total`."""
    factor = b.divide(b.constant(1.0), b.floats(total).splat())
    with b.loop(count, step=LANES) as index:
        b.floats(target).store(b.multiply(b.floats(source).load(index), factor), index)


@vector_code
def cap_scores(b: Builder, scores: Any, count: Any, cap: Any) -> None:
    """`cap * tanh(score / cap)` of `count` scores, with the float at `cap`."""
    limit = b.floats(cap).splat()
    with b.loop(count, step=LANES) as index:
        score = b.floats(scores).load(index)
        b.floats(scores).store(b.multiply(limit, b.tanh(b.divide(score, limit))), index)


def decode_item(shape: AttentionShape) -> Callable[[int, int, int], None]:
    """An item of a row and some of its KV heads, for numba."""
    group, head_dim, dtype = shape
    itemsize, vectors, token_bytes = shape.itemsize, head_dim // LANES, shape.token_bytes
    scale_bytes = shape.scale_bytes
    heads_at_once = max(1, _ROW_VECTORS // vectors)
    head_parts = [range(i, min(i + heads_at_once, group)) for i in range(0, group, heads_at_once)]

    @vector_code
    def score(b: Builder, query: Any, keys: Any, scales: Any, scores: Any, following: Any) -> None:
        """Products of the group's queries with 16 keys; asks for those that follow."""
        key, ahead = b.array(keys, dtype), b.array(following, dtype)
        lines = iter(range(0, LANES * head_dim, 64 // itemsize))
        per_product = -(-LANES * token_bytes // (64 * LANES * group))
        for head in range(group):
            q = [b.floats(query).load(head * head_dim + LANES * i) for i in range(vectors)]
            products = []
            for token in range(LANES):
                product = b.multiply(q[0], key.load(token * head_dim))
                for i in range(1, vectors):
                    product = b.fma(q[i], key.load(token * head_dim + LANES * i), product)
                products.append(product)
                for line in itertools.islice(lines, per_product):
                    ahead.prefetch(line)
            total = b.totals(products)
            total = b.multiply(total, b.floats(scales).load()) if scale_bytes else total
            b.floats(scores).store(total, head * LANES)

    @vector_code
    def weigh(b: Builder, scores: Any, start: Any, stop: Any, peaks: Any, totals: Any, decays: Any) -> None:
        """Scores of tokens from `start` to `stop` become weights; what earlier sums are to be times."""
        for head in range(group):
            kept = b.keep(b.floats(scores).load(head * LANES), start, stop)
            old, total = b.floats(peaks).scalar(head), b.floats(totals).scalar(head)
            peak = b.larger(old, b.largest(kept))
            decay = b.exp(b.splat(b.subtract(old, peak)))
            weights = b.exp(b.subtract(kept, b.splat(peak)))
            b.floats(scores).store(weights, head * LANES)
            b.floats(decays).store(decay, head * LANES)
            b.floats(peaks).put(peak, head)
            b.floats(totals).put(b.add(b.multiply(total, b.first(decay)), b.total(weights)), head)

    @vector_code
    def accumulate(
        b: Builder,
        weights: Any,
        values: Any,
        scales: Any,
        start: Any,
        stop: Any,
        decays: Any,
        sums: Any,
        following: Any,
    ) -> None:
        """Add the weighted values of tokens from `start` to `stop` to the sums of each head."""
        ahead = b.array(following, dtype)
        for heads in head_parts:
            kept = b.registers(len(heads) * vectors)
            for n, head in enumerate(heads):
                decay = b.floats(decays).load(head * LANES)
                for i in range(vectors):
                    kept[n * vectors + i] = b.multiply(
                        b.floats(sums).load(head * head_dim + LANES * i), decay
                    )
            with b.loop(stop, start) as token:
                value = b.array(values, dtype).at(b.times(token, head_dim))
                row = _row(b, value, b.floats(scales).at(token), shape)
                for line in range(0, head_dim, 64 // itemsize) if heads is head_parts[0] else ():
                    ahead.at(b.times(token, head_dim)).prefetch(line)
                for n, head in enumerate(heads):
                    weight = b.floats(weights).at(token).splat(head * LANES)
                    for i in range(vectors):
                        kept[n * vectors + i] = b.fma(weight, row[i], kept[n * vectors + i])
            for n, head in enumerate(heads):
                for i in range(vectors):
                    b.floats(sums).store(kept[n * vectors + i], head * head_dim + LANES * i)

    @njit(error_model="numpy")
    def item(job, scratch, index):  # type: ignore[no-untyped-def]
        words = int64s(job)
        num_kv_heads, heads, size = words[NUM_KV_HEADS], words[HEADS_PER_ITEM], words[BLOCK_SIZE]
        items_per_row = num_kv_heads // heads
        row, first = index // items_per_row, index % items_per_row * heads
        count = heads * group * head_dim
        offset = 4 * (row * num_kv_heads + first) * group * head_dim
        length = np.int64(int32s(words[DECODE_LENGTHS])[row])
        out = words[OUT] + offset
        if length <= 0:
            memset(out, 0, 4 * count)
            return
        query, sums = scratch, scratch + 4 * count
        peaks = sums + 4 * count
        totals = peaks + 4 * heads * group
        scores = totals + 4 * heads * group
        decays = scores + 4 * group * LANES
        scale, cap = words[SCALE_AND_CAP], words[SCALE_AND_CAP] + 4
        scale_and_clear(words[Q] + offset, scale, count, query, sums)
        for i in range(heads * group):
            floats(peaks)[i] = LEAST
            floats(totals)[i] = 0.0
        is_capped = floats(cap)[0] > 0
        window = words[WINDOW]
        first_seen = max(0, length - window) if window > 0 else 0
        table = int32s(words[DECODE_TABLES] + 4 * row * words[DECODE_WIDTH])
        head_bytes = size * (token_bytes + scale_bytes)
        for start in range(first_seen // LANES * LANES, length, LANES):
            block = min(max(np.int64(table[start // size]), 0), words[NUM_BLOCKS] - 1)
            of_layer = (block * words[NUM_LAYERS] + words[LAYER]) * 2 * num_kv_heads
            tokens = words[POOL] + of_layer * head_bytes + start % size * token_bytes
            to_scales = (size - start % size) * token_bytes + start % size * scale_bytes
            after = tokens
            if start + LANES < length:
                block = min(max(np.int64(table[(start + LANES) // size]), 0), words[NUM_BLOCKS] - 1)
                of_layer = (block * words[NUM_LAYERS] + words[LAYER]) * 2 * num_kv_heads
                after = words[POOL] + of_layer * head_bytes + (start + LANES) % size * token_bytes
            after += first * head_bytes
            low, high = max(first_seen - start, 0), min(length - start, LANES)
            for head in range(heads):
                keys = tokens + (first + head) * head_bytes
                following = keys + head_bytes if head + 1 < heads else after
                score(query + 4 * head * group * head_dim, keys, keys + to_scales, scores, following)
                if is_capped:
                    cap_scores(scores, group * LANES, cap)
                weigh(scores, low, high, peaks + 4 * head * group, totals + 4 * head * group, decays)
                values = keys + num_kv_heads * head_bytes
                following += num_kv_heads * head_bytes
                accumulate(scores, values, values + to_scales, low, high, decays,
                           sums + 4 * head * group * head_dim, following)  # fmt: skip
        for i in range(heads * group):
            divide(sums + 4 * i * head_dim, totals + 4 * i, head_dim, out + 4 * i * head_dim)

    return item


def prompt_item(shape: AttentionShape) -> Callable[[int, int, int], None]:
    """An item of a tile of a prompt's rows and a KV head, for numba."""
    group, head_dim, dtype = shape
    vectors, token_bytes, scale_bytes = head_dim // LANES, shape.token_bytes, shape.scale_bytes
    num_rows, per_tile = _rows_of(group), tile_rows(group)
    score = _product(head_dim, KEYS, head_dim, KEYS // LANES, accumulates=False)
    accumulate = _product(KEYS, head_dim, KEYS, vectors, accumulates=True)

    @vector_code
    def transpose(b: Builder, keys: Any, scales: Any, target: Any) -> None:
        """16 keys [16, head_dim] become columns of [head_dim, KEYS]."""
        tokens = [(b.array(keys, dtype).at(t * head_dim), b.floats(scales).at(t)) for t in range(LANES)]
        for i in range(vectors):
            rows = [_part(b, *token, shape, i) for token in tokens]
            for dimension, column in enumerate(b.transposed(rows)):
                b.floats(target).store(column, (LANES * i + dimension) * KEYS)

    @vector_code
    def copy(b: Builder, values: Any, scales: Any, count: Any, target: Any) -> None:
        """The values of `count` tokens as float32."""
        with b.loop(count) as token:
            value = b.array(values, dtype).at(b.times(token, head_dim))
            for i, part in enumerate(_row(b, value, b.floats(scales).at(token), shape)):
                b.floats(target).at(b.times(token, head_dim)).store(part, LANES * i)

    @vector_code
    def weigh(b: Builder, scores: Any, start: Any, stop: Any, peak: Any, total: Any, sums: Any) -> None:
        """A row's scores of keys from `start` to `stop` become weights, its sums decay."""
        kept = [b.keep(b.floats(scores).load(i), start, stop, first_lane=i) for i in range(0, KEYS, LANES)]
        highest = kept[0]
        for one in kept[1:]:
            highest = b.maximum(highest, one)
        old = b.floats(peak).scalar()
        new = b.larger(old, b.largest(highest))
        decay = b.exp(b.splat(b.subtract(old, new)))
        added = b.constant(0.0)
        for i, one in enumerate(kept):
            weights = b.exp(b.subtract(one, b.splat(new)))
            b.floats(scores).store(weights, i * LANES)
            added = b.add(added, weights)
        b.floats(peak).put(new)
        b.floats(total).put(b.add(b.multiply(b.floats(total).scalar(), b.first(decay)), b.total(added)))
        for i in range(vectors):
            b.floats(sums).store(b.multiply(b.floats(sums).load(LANES * i), decay), LANES * i)

    @njit(error_model="numpy")
    def item(job, scratch, index):  # type: ignore[no-untyped-def]
        words = int64s(job)
        num_kv_heads, size = words[NUM_KV_HEADS], words[BLOCK_SIZE]
        starts = int32s(words[QUERY_STARTS])
        tile, head = index // num_kv_heads, index % num_kv_heads
        seq = 0
        while True:
            num_tiles = (starts[seq + 1] - starts[seq] + per_tile - 1) // per_tile
            if tile < num_tiles:
                break
            tile -= num_tiles
            seq += 1
        first = np.int64(starts[seq]) + tile * per_tile
        rows = min(per_tile, np.int64(starts[seq + 1]) - first)
        position = np.int64(int32s(words[PROMPT_LENGTHS])[seq]) - (np.int64(starts[seq + 1]) - first)
        end = position + rows
        row_bytes = 4 * num_kv_heads * group * head_dim
        offset = first * row_bytes + 4 * head * group * head_dim
        query, sums = scratch, scratch + 4 * num_rows * head_dim
        peaks = sums + 4 * num_rows * head_dim
        totals = peaks + 4 * num_rows
        scores = totals + 4 * num_rows
        keys = scores + 4 * num_rows * KEYS
        values = keys + 4 * KEYS * head_dim
        scale, cap = words[SCALE_AND_CAP], words[SCALE_AND_CAP] + 4
        count = group * head_dim
        for i in range(rows):
            place = 4 * i * count
            scale_and_clear(words[Q] + offset + i * row_bytes, scale, count, query + place, sums + place)
        used = rows * group
        whole = (used + 5) // 6 * 6
        if whole > used:
            memset(query + 4 * used * head_dim, 0, 4 * (whole - used) * head_dim)
            memset(sums + 4 * used * head_dim, 0, 4 * (whole - used) * head_dim)
        for i in range(whole):
            floats(peaks)[i] = LEAST
            floats(totals)[i] = 0.0
        is_capped = floats(cap)[0] > 0
        window = words[WINDOW]
        first_seen = max(0, position + 1 - window) if window > 0 else 0
        table = int32s(words[PROMPT_TABLES] + 4 * seq * words[PROMPT_WIDTH])
        head_bytes = size * (token_bytes + scale_bytes)
        for start in range(first_seen // KEYS * KEYS, end, KEYS):
            for part in range(0, KEYS, LANES):
                token = start + part
                left = min(end - token, LANES)
                if left > 0:
                    block = min(max(np.int64(table[token // size]), 0), words[NUM_BLOCKS] - 1)
                    of_layer = (block * words[NUM_LAYERS] + words[LAYER]) * 2 * num_kv_heads + head
                    source = words[POOL] + of_layer * head_bytes + token % size * token_bytes
                    to_scales = (size - token % size) * token_bytes + token % size * scale_bytes
                    transpose(source, source + to_scales, keys + 4 * part)
                    source += num_kv_heads * head_bytes
                    copy(source, source + to_scales, left, values + 4 * part * head_dim)
                left = max(left, 0)
                if left < LANES:
                    memset(values + 4 * (part + left) * head_dim, 0, 4 * (LANES - left) * head_dim)
            for i in range(0, whole, 6):
                score(query + 4 * i * head_dim, keys, scores + 4 * i * KEYS)
            if is_capped:
                cap_scores(scores, whole * KEYS, cap)
            for i in range(whole):
                seen = position + i // group + 1
                low = max(seen - window, 0) if window > 0 else 0
                weigh(scores + 4 * i * KEYS, low - start, seen - start,
                      peaks + 4 * i, totals + 4 * i, sums + 4 * i * head_dim)  # fmt: skip
            for i in range(0, whole, 6):
                accumulate(scores + 4 * i * KEYS, values, sums + 4 * i * head_dim)
        for i in range(used):
            target = words[OUT] + offset + i // group * row_bytes + 4 * (i % group) * head_dim
            divide(sums + 4 * i * head_dim, totals + 4 * i, head_dim, target)

    return item


def _product(depth: int, columns: int, a_stride: int, vectors: int, *, accumulates: bool) -> Any:
    """`c [6, columns] = a [6, depth] @ b [depth, columns]`, or `+=`, in parts of few enough columns."""
    parts = [range(i, min(i + _PRODUCT_VECTORS, vectors)) for i in range(0, vectors, _PRODUCT_VECTORS)]

    @vector_code
    def product(b: Builder, left: Any, right: Any, target: Any) -> None:
        out = b.floats(target)
        for part in parts:
            sums = b.registers(_PRODUCT_ROWS * len(part))
            places = [(row, i) for row in range(_PRODUCT_ROWS) for i in part]
            for n, (row, i) in enumerate(places):
                sums[n] = out.load(row * columns + LANES * i) if accumulates else b.constant(0.0)
            with b.loop(b.integer(depth)) as k:
                values = {i: b.floats(right).at(b.times(k, columns)).load(LANES * i) for i in part}
                for row in range(_PRODUCT_ROWS):
                    factor = b.floats(left).at(k).splat(row * a_stride)
                    for n, (of, i) in enumerate(places):
                        if of == row:
                            sums[n] = b.fma(factor, values[i], sums[n])
            for n, (row, i) in enumerate(places):
                out.store(sums[n], row * columns + LANES * i)

    return product


def _part(b: Builder, head: Any, scale: Any, shape: AttentionShape, part: int) -> Any:
    """Sixteen numbers of a token's head in the pool."""
    found = head.load(LANES * part)
    return b.multiply(found, scale.splat()) if shape.scale_bytes else found


def _row(b: Builder, head: Any, scale: Any, shape: AttentionShape) -> list[Any]:
    """All of them."""
    return [_part(b, head, scale, shape, i) for i in range(shape.head_dim // LANES)]
