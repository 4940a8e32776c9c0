"""The XLA implementation: random lengths and tables against the oracle, and updates in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import LAYER, Shape, decode_case, prefill_case, relative_error

from jaxllm import pallas_kernels
from jaxllm.pallas_kernels import reference, xla
from jaxllm.pallas_kernels.kv_layout import KVLayout
from jaxllm.system.dtypes import KV_DTYPES

SHAPE = Shape(num_q_heads=2, num_kv_heads=1, head_dim=8, block_size=4, max_blocks=5)
MAX_LENGTH = SHAPE.block_size * SHAPE.max_blocks
PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)


@functools.cache
def jitted(op):
    return jax.jit(functools.partial(op, layer=LAYER, scale=SHAPE.scale))


@PROPERTY
@given(lengths=st.lists(st.integers(0, MAX_LENGTH), min_size=4, max_size=4), seed=st.integers(0, 2**16))
def test_decode_property(lengths, seed):
    case = decode_case(SHAPE, lengths, seed)
    expected = reference.decode_attention(*case.decode_args(), layer=LAYER, scale=SHAPE.scale)
    assert relative_error(jitted(xla.decode_attention)(*case.decode_args()), expected) < 1e-5


@st.composite
def chunk_lists(draw):
    """Up to 4 sequences whose chunks fill at most 40 rows."""
    chunks = []
    for _ in range(draw(st.integers(0, 4))):
        length = draw(st.integers(0, MAX_LENGTH))
        chunk = draw(st.integers(0, min(length, 10)))
        chunks.append((length - chunk, chunk))
    return chunks


@PROPERTY
@given(chunks=chunk_lists(), first_row=st.integers(0, 8), seed=st.integers(0, 2**16))
def test_prefill_property(chunks, first_row, seed):
    case = prefill_case(SHAPE, chunks, num_tokens=48, max_seqs=4, seed=seed, first_row=first_row)
    expected = reference.prefill_attention(*case.prefill_args(), layer=LAYER, scale=SHAPE.scale)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "_PREFILL_ROWS", 4)
        patch.setattr(xla, "_PREFILL_KV_BLOCKS", 2)
        actual = jitted(xla.prefill_attention)(*case.prefill_args())
    assert relative_error(actual, expected) < 1e-5


@PROPERTY
@given(slots=st.permutations(range(24)), dropped=st.sets(st.integers(0, 5)), seed=st.integers(0, 2**16))
def test_write_property(slots, dropped, seed):
    rng = np.random.default_rng(seed)
    pool = rng.standard_normal((6, 2, 2, 1, 4, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, 6, 1, 8)).astype(np.float32)
    mapping = np.array([-1 if i in dropped else slots[i] for i in range(6)], np.int32)
    actual = _jitted_write(jnp.asarray(pool), k, v, mapping)
    np.testing.assert_array_equal(actual, reference.write_kv(pool, k, v, mapping, layer=LAYER))


_jitted_write = jax.jit(functools.partial(xla.write_kv, layer=LAYER))


@pytest.mark.parametrize("dtype", sorted(KV_DTYPES))
def test_writes_are_in_place_whatever_the_dtype(dtype):
    layout, struct = KVLayout(dtype, 64), jax.ShapeDtypeStruct
    pool = struct((4096, 2, 2, 2, 16, layout.width), layout.array_dtype)
    heads, slots = struct((12, 2, 64), jnp.float32), struct((12,), jnp.int32)
    write = jax.jit(functools.partial(xla.write_kv, layer=1), donate_argnums=0)
    memory = write.lower(pool, heads, heads, slots).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool.size * pool.dtype.itemsize
    assert memory.temp_size_in_bytes < pool.size * pool.dtype.itemsize / 50


def test_layers_update_the_pool_in_place():
    """Two layers that write, then attend: the pool is aliased and temporaries stay small.

    As in a model, what a layer writes depends on what the layer before it read.
    """

    def program(pool, q, slots, tables, starts, lengths, num_seqs):
        options = {"scale": 0.1, "implementation": "xla"}
        for layer in range(2):
            k, v = q[:, :2], q[:, 2:]
            pool = pallas_kernels.write_kv(pool, k, v, slots, layer=layer, implementation="xla")
            decoded = pallas_kernels.decode_attention(q[:4], pool, tables, lengths, layer=layer, **options)
            prefilled = pallas_kernels.prefill_attention(
                q[4:], pool, tables, starts, lengths, num_seqs, layer=layer, **options
            )
            q = jnp.concatenate([decoded, prefilled])
        return pool, q

    pool = jax.ShapeDtypeStruct((4096, 2, 2, 2, 16, 64), jnp.float32)
    q = jax.ShapeDtypeStruct((12, 4, 64), jnp.float32)
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((12,), (4, 8), (5,), (4,), ())]
    memory = jax.jit(program, donate_argnums=0).lower(pool, q, *ints).compile().memory_analysis()
    pool_bytes = pool.size * pool.dtype.itemsize
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 50
