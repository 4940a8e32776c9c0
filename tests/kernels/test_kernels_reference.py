"""The oracle against values worked out by hand."""

import math

import numpy as np
import pytest

from jaxllm.pallas_kernels import reference

NAN = math.nan


@pytest.fixture
def pool():
    """Two layers of NaN; layer 1 holds tokens (block 2, block 0) of one head of dimension 2, block size 2."""
    pool = np.full((4, 2, 2, 1, 2, 2), NAN, np.float32)
    pool[2, 1, 0, 0] = [[0, 0], [math.log(3), 0]]
    pool[2, 1, 1, 0] = [[4, 0], [8, 4]]
    pool[0, 1, 0, 0, 0] = [math.log(4), 0]
    pool[0, 1, 1, 0, 0] = [0, 8]
    return pool


def test_decode_by_hand(pool):
    """Scores log 1, log 3, log 4: weights 1/8, 3/8, 4/8."""
    q = np.array([[[1, 5]], [[1, 5]], [[0, 0]], [[9, 9]]], np.float32)
    tables = np.array([[2, 0], [2, -7], [2, 0], [99, 99]])
    out = reference.decode_attention(q, pool, tables, np.array([3, 2, 3, 0]), layer=1, scale=1.0)
    np.testing.assert_allclose(out[:, 0], [[3.5, 5.5], [7, 3], [4, 4], [0, 0]], rtol=1e-6)


def test_scale_multiplies_the_scores(pool):
    q = np.array([[[2, 0]]], np.float32)
    out = reference.decode_attention(q, pool, np.array([[2, 0]]), np.array([3]), layer=1, scale=0.5)
    np.testing.assert_allclose(out[0, 0], [3.5, 5.5], rtol=1e-6)


def test_prefill_by_hand(pool):
    """Rows 1 and 2 sit at positions 1 and 2 of a sequence of 3 tokens; row 0 is another's first token."""
    q = np.array([[[1, 0]], [[1, 0]], [[1, 0]], [[NAN, 0]]], np.float32)
    out = reference.prefill_attention(
        q, pool, np.array([[2, -1], [2, 0]]), np.array([0, 1, 3]), np.array([1, 3]), 2, layer=1, scale=1.0
    )
    np.testing.assert_allclose(out[:, 0], [[4, 0], [7, 3], [3.5, 5.5], [0, 0]], rtol=1e-6)


def test_query_heads_share_kv_heads_in_order():
    """With one token the output is its V: heads 0, 1 read KV head 0 and heads 2, 3 read KV head 1."""
    pool = np.zeros((1, 1, 2, 2, 1, 1), np.float32)
    pool[0, 0, 1, :, 0, 0] = [10, 20]
    out = reference.decode_attention(
        np.ones((1, 4, 1), np.float32), pool, np.array([[0]]), np.array([1]), layer=0, scale=1.0
    )
    assert out[0, :, 0].tolist() == [10, 10, 20, 20]


def test_write_by_hand():
    pool = np.zeros((2, 1, 2, 1, 2, 1), np.float32)
    k, v = np.array([[[1]], [[2]], [[3]]]), np.array([[[4]], [[5]], [[6]]])
    written = reference.write_kv(pool, k, v, np.array([3, -1, 0]), layer=0)
    assert written[:, 0, :, 0, :, 0].tolist() == [[[3, 0], [6, 0]], [[0, 1], [0, 4]]]
    assert not pool.any()
