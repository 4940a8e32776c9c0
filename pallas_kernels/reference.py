"""Naive float32 oracle of the paged-attention ops, in NumPy: gathers each sequence's tokens, one at a time.

For tests. Unused blocks and the unwritten tail of a block are never read. Arguments are as in
`pallas_kernels`, concrete; results are NumPy arrays. With `rounds` probabilities (before they are divided by
their sum) and results are rounded to the dtype of `q`, as a kernel of that precision must: its error against
the unrounded oracle is what a kernel's is to be compared with.
"""

from __future__ import annotations

import numpy as np
from jax.typing import ArrayLike


def decode_attention(
    q: ArrayLike,
    pool: ArrayLike,
    block_tables: ArrayLike,
    lengths: ArrayLike,
    *,
    layer: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    rounds: bool = False,
) -> np.ndarray:
    """Float32 `[num_rows, num_q_heads, head_dim]`; see `pallas_kernels.decode_attention`."""
    queries, tables = _float32(q), np.asarray(block_tables)
    rounding = np.asarray(q).dtype if rounds else None
    out = np.zeros_like(queries)
    for row, length in enumerate(np.asarray(lengths).tolist()):
        if length > 0:
            key, value = _gather(pool, tables[row], length, layer)
            query, position = queries[row : row + 1], np.array([length - 1])
            out[row] = _attend(query, key, value, position, scale, window, soft_cap, rounding)[0]
    return out


def prefill_attention(
    q: ArrayLike,
    pool: ArrayLike,
    block_tables: ArrayLike,
    query_starts: ArrayLike,
    lengths: ArrayLike,
    num_seqs: ArrayLike,
    *,
    layer: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    rounds: bool = False,
) -> np.ndarray:
    """Float32 `[num_tokens, num_q_heads, head_dim]`; see `pallas_kernels.prefill_attention`."""
    queries, tables = _float32(q), np.asarray(block_tables)
    starts, all_lengths = np.asarray(query_starts).tolist(), np.asarray(lengths).tolist()
    rounding = np.asarray(q).dtype if rounds else None
    out = np.zeros_like(queries)
    for seq in range(int(np.asarray(num_seqs))):
        start, stop, length = starts[seq], starts[seq + 1], all_lengths[seq]
        if stop > start:
            key, value = _gather(pool, tables[seq], length, layer)
            positions = np.arange(length - (stop - start), length)
            query = queries[start:stop]
            out[start:stop] = _attend(query, key, value, positions, scale, window, soft_cap, rounding)
    return out


def write_kv(
    pool: ArrayLike, k: ArrayLike, v: ArrayLike, slot_mapping: ArrayLike, *, layer: int
) -> np.ndarray:
    """A copy of the pool with each token's K and V at its slot; negative slots are dropped."""
    result = np.array(pool)
    block_size = result.shape[4]
    kv = np.stack([np.asarray(k), np.asarray(v)], axis=1).astype(result.dtype)
    for token, slot in enumerate(np.asarray(slot_mapping).tolist()):
        if slot >= 0:
            result[slot // block_size, layer, :, :, slot % block_size] = kv[token]
    return result


def rotate(x: ArrayLike, cos: ArrayLike, sin: ArrayLike) -> np.ndarray:
    """Rotary embedding of `x` [T, heads, head_dim] by `[T, head_dim / 2]` each, in the dtype of `x`."""
    first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
    turned = (first + 1j * second) * (np.asarray(cos) + 1j * np.asarray(sin))[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1).astype(np.asarray(x).dtype)


def _gather(
    pool: ArrayLike, block_table: np.ndarray, length: int, layer: int
) -> tuple[np.ndarray, np.ndarray]:
    """K and V `[length, num_kv_heads, head_dim]` of one sequence."""
    blocks = np.asarray(pool)
    block_size = blocks.shape[4]
    positions = np.arange(length)
    kv = blocks[block_table[positions // block_size], layer, :, :, positions % block_size]
    return _float32(kv[:, 0]), _float32(kv[:, 1])


def _attend(
    q: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    positions: np.ndarray,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    rounding: np.dtype | None,
) -> np.ndarray:
    """Softmax attention; the query at `positions[i]` sees the last `window` of `key[: positions[i] + 1]`."""
    group = q.shape[1] // key.shape[1]
    key, value = (np.repeat(part, group, axis=1) for part in (key, value))
    scores = np.einsum("qhd,thd->hqt", q, key) * np.float32(scale)
    if soft_cap is not None:
        scores = np.float32(soft_cap) * np.tanh(scores / np.float32(soft_cap))
    seen = np.arange(key.shape[0])[None, :] <= positions[:, None]
    if window is not None:
        seen &= np.arange(key.shape[0])[None, :] > positions[:, None] - window
    scores = np.where(seen[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total = weights.sum(axis=-1)
    out = np.einsum("hqt,thd->qhd", _rounded(weights, rounding), value)
    return _rounded(out / total.T[..., None], rounding)


def _rounded(array: np.ndarray, dtype: np.dtype | None) -> np.ndarray:
    return array if dtype is None else array.astype(dtype).astype(np.float32)


def _float32(array: ArrayLike) -> np.ndarray:
    return np.asarray(array).astype(np.float32)
