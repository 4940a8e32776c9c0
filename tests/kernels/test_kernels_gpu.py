"""The implementations for GPUs where none is needed: helpers, and lowering for one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import LAYER, Shape

from jaxllm.pallas_kernels import mosaic, triton, triton_tiles
from jaxllm.pallas_kernels.kv_layout import KVLayout
from jaxllm.pallas_kernels.tiles import chunk_tokens, query_tiles


def test_query_tiles():
    """Chunks of 5, 0, 4 and 1 rows in tiles of 4; the sequences beyond `num_seqs` hold no tile."""
    starts = jnp.asarray([0, 5, 5, 9, 10, 10], jnp.int32)
    lengths = jnp.asarray([5, 3, 11, 1, 7], jnp.int32)
    tiles = np.asarray(query_tiles(starts, lengths, jnp.int32(4), 16, 4))
    assert tiles[:4].tolist() == [[0, 0, 4, 0], [0, 4, 1, 4], [2, 5, 4, 7], [3, 9, 1, 0]]
    assert not tiles[4:, 2].any()


@pytest.mark.parametrize(
    ("programs", "tokens", "chunk"),
    [
        (1, 64, 128),
        (8, 2048, 128),
        (8, 131072, 512),
        (512, 2048, 512),
        (2048, 2048, 2048),
        (9999, 9, 128),
    ],
)
def test_chunks_fill_the_device_and_no_more(programs, tokens, chunk):
    assert chunk_tokens(programs, tokens, 64) == chunk


@pytest.mark.parametrize("num_chunks", [2, 40])
def test_only_chunks_in_use_are_combined(num_chunks):
    """Chunks of 10 tokens: a row of none, of one, of a few and of all; what others hold is NaN.

    So do places beside the 3 query heads of each of 2 KV heads.
    """
    rng = np.random.default_rng(0)
    lengths = np.array([0, 10, 11, 10 * num_chunks - 9])
    shape = (4, num_chunks, 2, 4, 24)
    acc, peak, total = (rng.random(dims) + 0.5 for dims in (shape, shape[:4], shape[:4]))
    unused = np.arange(num_chunks) >= -(-lengths // 10)[:, None]
    weights = np.where(unused[..., None, None], 0, np.exp2(peak))
    sums = (weights * total).sum(axis=1)[..., None]
    expected = (weights[..., None] * acc).sum(axis=1) / np.where(sums > 0, sums, 1)
    parts = [
        jnp.asarray(np.where(np.expand_dims(unused, tuple(range(2, x.ndim))), np.nan, x), jnp.float32)
        for x in (acc, peak, total)
    ]
    parts = [x.at[:, :, :, 3].set(jnp.nan) for x in parts]
    expected = expected[:, :, :3].reshape(4, 6, 24)
    q = jnp.zeros(expected.shape, jnp.float32)
    combine = functools.partial(triton.combine_chunks, chunk=10)
    actual = jax.jit(combine)(*parts, jnp.asarray(lengths, jnp.int32), q)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert not np.asarray(actual[0]).any()
    held = jnp.full((6, *q.shape[1:]), 7.0)  # rows of prompts are among those of decodes, and behind them
    kept = np.asarray(jax.jit(functools.partial(combine, in_place=True))(*parts, jnp.asarray(lengths), held))
    np.testing.assert_array_equal(kept[1:4], actual[1:])
    assert (kept[[0, 4, 5]] == 7.0).all()


@pytest.mark.parametrize(
    ("scale", "soft_cap"), [(0.125, None), (1e-30, None), (0.0, None), (-2.0, None), (1, 0.5)]
)
def test_rows_that_see_nothing_of_a_tile_stay_as_they_are(scale, soft_cap):
    """A GPU multiplies and subtracts in one step: what is left of -1e30 less itself, rounded, is 1e21."""
    layout = KVLayout("float32", 16)
    query, tile = (
        triton_tiles.Query([jnp.ones((16, 16))]),
        triton_tiles.Tile(*[[jnp.full((32, 16), 1e37)]] * 2),
    )
    seen = jnp.zeros((16, 32), bool)
    state = triton_tiles.empty_state(16, layout)
    [acc], peak, total = triton_tiles.accumulate(state, query, tile, seen, scale, soft_cap)
    assert not acc.any()
    assert not total.any()
    np.testing.assert_array_equal(peak, state[1])
    few = triton_tiles.Tile([jnp.ones((32, 16))], tile.value)
    _, _, total = triton_tiles.accumulate(state, query, few, seen.at[:, :3].set(True), scale, soft_cap)
    np.testing.assert_allclose(total, 3.0)


@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_cores_with_little_shared_memory_get_small_tiles(op):
    large = triton.default_tiling(op, "NVIDIA A100-SXM4-80GB", "bfloat16", 128)
    hopper = triton.default_tiling(op, "NVIDIA H100 80GB HBM3", "float16", 64)
    assert {large, hopper} < {*triton.alternative_tilings(op, "bfloat16"), large}
    assert hopper.kv_tile == large.kv_tile
    assert triton.default_tiling(op, "NVIDIA H100 80GB HBM3", "bfloat16", 256) == triton.Tiling()
    for kind in ("NVIDIA L40S", "NVIDIA L4", "NVIDIA A10G", "NVIDIA GeForce RTX 4090", "NVIDIA RTX A6000"):
        small = triton.default_tiling(op, kind, "bfloat16", 128)
        assert small.kv_tile < large.kv_tile
        assert small in triton.alternative_tilings(op, "bfloat16")
    single, wide = (
        triton.default_tiling(op, "NVIDIA A100-SXM4-80GB", "float32", head_dim) for head_dim in (128, 256)
    )
    assert wide.kv_tile < single.kv_tile < large.kv_tile
    assert not triton.alternative_tilings(op, "float32")


def test_tilings_are_written_as_they_are_read():
    for op in ("decode", "prefill"):
        for tiling in triton.alternative_tilings(op, "bfloat16"):
            assert triton.Tiling.parse(str(tiling)) == tiling


@pytest.mark.parametrize(
    ("implementation", "shape"),
    [
        (triton, Shape(32, 8, 128, dtype="bfloat16")),
        (triton, Shape(4, 4, 80, block_size=64)),
        (mosaic, Shape(32, 8, 128, dtype="bfloat16")),
        (mosaic, Shape(4, 4, 64, block_size=64, dtype="float16")),
        (mosaic, Shape(40, 40, 128, block_size=128, dtype="float16")),
    ],
    ids=lambda value: value.__name__.rpartition(".")[2] if hasattr(value, "__name__") else str(value),
)
def test_lowers_for_cuda(implementation, shape):
    """The kernels are accepted by Pallas' lowering, which interpret mode does not exercise."""
    heads, dim = shape.num_kv_heads, shape.head_dim
    pool = jax.ShapeDtypeStruct((64, 2, 2, heads, shape.block_size, dim), shape.dtype)
    q = jax.ShapeDtypeStruct((100, shape.num_q_heads, dim), shape.dtype)
    kv = jax.ShapeDtypeStruct((100, heads, dim), shape.dtype)
    tables, hundred, starts, scalar = (
        jax.ShapeDtypeStruct(dims, jnp.int32) for dims in ((100, 8), (100,), (101,), ())
    )
    h100 = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=h100)
    options = {"layer": LAYER, "scale": shape.scale}
    decode = functools.partial(implementation.decode_attention, **options)
    prefill = functools.partial(implementation.prefill_attention, **options)
    write = functools.partial(implementation.write_kv, layer=LAYER)
    store = functools.partial(implementation.rotate_and_write, layer=LAYER, dtype=q.dtype)
    step = functools.partial(implementation.step_attention, **options)
    qkv = jax.ShapeDtypeStruct((100, (shape.num_q_heads + 2 * heads) * dim), shape.dtype)
    angles = jax.ShapeDtypeStruct((100, dim // 2), jnp.float32)
    for op, arguments in (
        (decode, (q, pool, tables, hundred)),
        (prefill, (q, pool, tables, starts, hundred, scalar)),
        (write, (pool, kv, kv, hundred)),
        (store, (qkv, (angles, angles), pool, hundred)),
        (step, (q, pool, (tables, hundred), (tables, starts, hundred, scalar))),
    ):
        with jax.sharding.use_abstract_mesh(mesh):
            lowered = jax.jit(op).trace(*arguments).lower(lowering_platforms=("cuda",))
        kernel = "mosaic_gpu" if implementation is mosaic and op in (decode, prefill, step) else "triton"
        assert kernel in lowered.as_text()
