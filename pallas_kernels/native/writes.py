"""Native functions that rotate a step's queries and keys, and write its keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import njit

from jaxllm.pallas_kernels.native.arrays import LANES
from jaxllm.pallas_kernels.native.attention import (
    BLOCK_SIZE,
    COS,
    LAYER,
    NUM_BLOCKS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    NUM_ROWS,
    OUT,
    POOL,
    QKV,
    SIN,
    SLOTS,
)
from jaxllm.pallas_kernels.native.memory import int32s, int64s
from jaxllm.pallas_kernels.native.shape import AttentionShape
from jaxllm.pallas_kernels.native.vectors import Builder, vector_code

WRITTEN_AT_ONCE = 8


def write_item(shape: AttentionShape) -> Callable[[int, int], None]:
    """An item of `WRITTEN_AT_ONCE` rows of a projection, for numba.

    Queries and keys are rotated, if there are cosines and sines; queries go to the output, where attention
    reads them, and keys and values to the pool.

        qkv [rows, query heads | key heads | value heads, each head_dim]    cos, sin [rows, head_dim / 2]
    """
    group, head_dim, dtype = shape
    head_bytes, half, token_bytes = 4 * head_dim, head_dim // 2, shape.token_bytes
    stored_bytes, scale_bytes = token_bytes + shape.scale_bytes, shape.scale_bytes
    copy_query, copy_kv = _copy(head_dim, "float32"), _copy(head_dim, dtype)
    rotate_query, rotate_key = _rotate(head_dim, "float32"), _rotate(head_dim, dtype)

    @njit(error_model="numpy")
    def item(job, index):  # type: ignore[no-untyped-def]
        words = int64s(job)
        num_kv_heads, size = words[NUM_KV_HEADS], words[BLOCK_SIZE]
        num_q_heads = num_kv_heads * group
        slots = int32s(words[SLOTS])
        is_rotated = words[COS] != 0
        first = index * WRITTEN_AT_ONCE
        for row in range(first, min(first + WRITTEN_AT_ONCE, words[NUM_ROWS])):
            source = words[QKV] + row * (num_q_heads + 2 * num_kv_heads) * head_bytes
            cos, sin = words[COS] + 4 * row * half, words[SIN] + 4 * row * half
            target = words[OUT] + row * num_q_heads * head_bytes
            for _ in range(num_q_heads):
                if is_rotated:
                    rotate_query(source, cos, sin, target, target)
                else:
                    copy_query(source, target, target)
                source += head_bytes
                target += head_bytes
            slot = np.int64(slots[row])
            if 0 <= slot < words[NUM_BLOCKS] * size:
                of_layer = (slot // size * words[NUM_LAYERS] + words[LAYER]) * 2 * num_kv_heads
                target = words[POOL] + of_layer * size * stored_bytes + slot % size * token_bytes
                scale = target + (size - slot % size) * token_bytes + slot % size * scale_bytes
                to_values = num_kv_heads * size * stored_bytes
                for _ in range(num_kv_heads):
                    if is_rotated:
                        rotate_key(source, cos, sin, target, scale)
                    else:
                        copy_kv(source, target, scale)
                    copy_kv(source + num_kv_heads * head_bytes, target + to_values, scale + to_values)
                    source += head_bytes
                    target += size * stored_bytes
                    scale += size * stored_bytes

    return item


def rotates(head_dim: int) -> bool:
    """Whether halves of a head are whole vectors, so that keys and queries can be rotated here."""
    return head_dim % (2 * LANES) == 0


def _copy(head_dim: int, dtype: str) -> Any:
    """A head of float32 to one of `dtype`."""

    @vector_code
    def copy(b: Builder, source: Any, target: Any, scale: Any) -> None:
        _store(b, target, scale, dtype, [b.floats(source).load(i) for i in range(0, head_dim, LANES)])

    return copy


def _rotate(head_dim: int, dtype: str) -> Any:
    """The same, rotated: dimension i is paired with i + head_dim / 2, whose halves are whole vectors."""
    half = head_dim // 2 if rotates(head_dim) else 0

    @vector_code
    def rotate(b: Builder, source: Any, cos: Any, sin: Any, target: Any, scale: Any) -> None:
        lower, upper = [], []
        for i in range(0, half, LANES):
            first, second = b.floats(source).load(i), b.floats(source).load(half + i)
            c, s = b.floats(cos).load(i), b.floats(sin).load(i)
            lower.append(b.subtract(b.multiply(first, c), b.multiply(second, s)))
            upper.append(b.add(b.multiply(second, c), b.multiply(first, s)))
        _store(b, target, scale, dtype, [*lower, *upper])

    return rotate


def _store(b: Builder, target: Any, scale: Any, dtype: str, parts: Sequence[Any]) -> None:
    """Store a head, and of int8 its scale, as `KVLayout.stored` says."""
    if dtype == "int8":
        largest = b.constant(1e-10)
        for part in parts:
            largest = b.maximum_or_nan(largest, b.absolute(part))
        unit = b.multiply(b.splat(b.largest_or_nan(largest)), b.constant(1 / 127))
        b.floats(scale).put(b.first(unit))
        parts = [b.rounded(b.divide(part, unit)) for part in parts]
    for i, part in enumerate(parts):
        b.array(target, dtype).store(part, LANES * i)
