"""The one suite that every implementation of the paged-attention ops must pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import (
    LAYER,
    NUM_LAYERS,
    Shape,
    assert_no_races,
    decode_case,
    prefill_case,
    relative_error,
)

from jaxllm import pallas_kernels
from jaxllm.errors import ConfigError
from jaxllm.pallas_kernels import mosaic, mosaic_tiles, reference

IMPLEMENTATIONS = ["native", "xla", "triton", "reference"]
WITH_WINDOWS = ["native", "xla", "triton", "reference"]
TOLERANCE = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 1e-3}

SHAPES = [
    Shape(num_q_heads=2, num_kv_heads=2, head_dim=64, block_size=16),
    Shape(num_q_heads=8, num_kv_heads=2, head_dim=80, block_size=16),
    Shape(num_q_heads=8, num_kv_heads=1, head_dim=128, block_size=32, max_blocks=3),
    Shape(num_q_heads=3, num_kv_heads=1, head_dim=64, block_size=64, max_blocks=2),
    Shape(num_q_heads=4, num_kv_heads=1, head_dim=64, block_size=16, dtype="bfloat16"),
    Shape(num_q_heads=4, num_kv_heads=1, head_dim=64, block_size=16, dtype="float16"),
]

HALF_SHAPES = [
    Shape(num_q_heads=2, num_kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16"),
    Shape(num_q_heads=8, num_kv_heads=1, head_dim=128, block_size=32, max_blocks=3, dtype="bfloat16"),
    Shape(num_q_heads=11, num_kv_heads=1, head_dim=64, block_size=64, max_blocks=2, dtype="float16"),
    Shape(num_q_heads=1, num_kv_heads=1, head_dim=128, block_size=128, max_blocks=2, dtype="bfloat16"),
]
"""For kernels of tensor cores, which take 16 bits only."""

all_shapes = [
    *((name, shape) for name in IMPLEMENTATIONS for shape in SHAPES),
    ("triton:k16,q16,w1,s1", SHAPES[1]),
    ("triton:k128,q32,w8,s5", SHAPES[4]),
]
with_shapes_and_mosaic = pytest.mark.parametrize(
    ("implementation", "shape"), [*all_shapes, *(("mosaic", shape) for shape in HALF_SHAPES)], ids=str
)
# The GPU interpreter of JAX 0.10 takes half a minute for two heads and minutes for more.
SMALLEST = Shape(num_q_heads=1, num_kv_heads=1, dtype="bfloat16")
few_shapes = HALF_SHAPES if mosaic_tiles.IS_NEWER_JAX else [SMALLEST]
with_shapes_and_some_mosaic = pytest.mark.parametrize(
    ("implementation", "shape"), [*all_shapes, *(("mosaic", shape) for shape in few_shapes)], ids=str
)
with_each_and_newer_mosaic = pytest.mark.parametrize(
    "implementation", [*IMPLEMENTATIONS, "mosaic"] if mosaic_tiles.IS_NEWER_JAX else IMPLEMENTATIONS
)
with_each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@pytest.fixture(autouse=True)
def _no_races(request):
    yield
    if "mosaic" in request.node.name and "refused" not in request.node.name:
        assert_no_races()


def small(**changes):
    """A shape that compiles fast."""
    return Shape(**{"num_q_heads": 2, "num_kv_heads": 1, **changes})


@functools.cache
def jitted(op, implementation, shape=None, donate=False):
    """The op compiled for one implementation; interpreted kernels skip the optimiser, to compile faster."""
    options = {} if shape is None else {"scale": shape.scale}
    call = functools.partial(op, layer=LAYER, implementation=implementation, **options)
    is_compiled = implementation in ("native", "xla", "reference")
    compiler_options = None if is_compiled else {"xla_backend_optimization_level": 0}
    return jax.jit(call, donate_argnums=0 if donate else (), compiler_options=compiler_options)


def repeats(implementation):
    """Whether to compute twice; the older GPU interpreter, which looks for races, takes minutes for that."""
    return implementation != "mosaic" or mosaic_tiles.IS_NEWER_JAX


@with_shapes_and_mosaic
def test_decode_matches_oracle(implementation, shape):
    longest = shape.max_blocks * shape.block_size
    case = decode_case(shape, [longest, 0, 1, shape.block_size, shape.block_size + 3, 0])
    expected = reference.decode_attention(*case.decode_args(), layer=LAYER, scale=shape.scale)
    decode = jitted(pallas_kernels.decode_attention, implementation, shape)
    actual = decode(*case.decode_args())
    assert actual.dtype == case.q.dtype
    assert actual.shape == case.q.shape
    assert relative_error(actual, expected) < TOLERANCE[shape.dtype]
    if shape.dtype != "float32":
        rounded = reference.decode_attention(*case.decode_args(), layer=LAYER, scale=shape.scale, rounds=True)
        assert relative_error(actual, expected) < 1.5 * relative_error(rounded, expected)
    assert not np.asarray(actual, np.float32)[[1, 5]].any()
    if repeats(implementation):
        np.testing.assert_array_equal(np.asarray(decode(*case.decode_args())), np.asarray(actual))


@with_each
def test_decode_every_length(implementation):
    shape = small()
    decode = jitted(pallas_kernels.decode_attention, implementation, shape)
    for first in range(1, 61, 24 if implementation == "triton" else 6):
        case = decode_case(shape, list(range(first, first + 6)), seed=first)
        expected = reference.decode_attention(*case.decode_args(), layer=LAYER, scale=shape.scale)
        actual = decode(*case.decode_args())
        errors = [relative_error(a, e) for a, e in zip(actual, expected, strict=True)]
        assert max(errors) < TOLERANCE[shape.dtype]


@with_each_and_newer_mosaic
def test_decode_over_several_chunks(implementation):
    """One long row among short ones, which get the same bits beside a row of no token."""
    shape = small(max_blocks=20, dtype="float16" if implementation == "mosaic" else "float32")
    case = decode_case(shape, [1, 0, 64, 320, 65, 129])
    expected = reference.decode_attention(*case.decode_args(), layer=LAYER, scale=shape.scale)
    decode = jitted(pallas_kernels.decode_attention, implementation, shape)
    actual = np.asarray(decode(*case.decode_args()))
    errors = [relative_error(a, e) for a, e in zip(actual, expected, strict=True)]
    assert max(errors) < TOLERANCE[shape.dtype]
    alone = decode(*case.decode_args()[:3], case.lengths.at[3].set(0))
    np.testing.assert_array_equal(np.delete(np.asarray(alone), 3, axis=0), np.delete(actual, 3, axis=0))


def test_programs_of_mosaic_take_several_chunks(monkeypatch):
    """Two take the KV heads of three rows in turn, one of which is empty; or each takes one or none."""
    shape = HALF_SHAPES[0]
    case = decode_case(shape, [shape.max_blocks * shape.block_size, 0, 5])
    expected = reference.decode_attention(*case.decode_args(), layer=LAYER, scale=shape.scale)
    for num_programs in (2, 100):
        monkeypatch.setattr(mosaic, "_DECODE_PROGRAMS", num_programs)
        decode = jitted.__wrapped__(pallas_kernels.decode_attention, "mosaic", shape)
        assert relative_error(decode(*case.decode_args()), expected) < TOLERANCE[shape.dtype]


@with_each
def test_decode_with_no_active_row(implementation):
    shape = small()
    case = decode_case(shape, [0] * 6)
    actual = jitted(pallas_kernels.decode_attention, implementation, shape)(*case.decode_args())
    assert not np.asarray(actual).any()


@with_each
def test_decode_large_scores(implementation):
    """A softmax without its maximum subtracted overflows here."""
    shape = small()
    case = decode_case(shape, [50, 17, 64, 1, 2, 33])
    args = (case.q * 100, *case.decode_args()[1:])
    expected = reference.decode_attention(*args, layer=LAYER, scale=shape.scale)
    actual = jitted(pallas_kernels.decode_attention, implementation, shape)(*args)
    assert relative_error(actual, expected) < 10 * TOLERANCE[shape.dtype]


@with_shapes_and_some_mosaic
def test_prefill_matches_oracle(implementation, shape):
    """No history, history, one-token chunks, an empty chunk, padding rows and unused sequences.

    By themselves, and behind the rows of decodes.
    """
    longest = shape.max_blocks * shape.block_size
    chunks = [(0, 9), (longest - 1, 1), (0, 1), (5, 0), (shape.block_size, 7)]
    prefill = jitted(pallas_kernels.prefill_attention, implementation, shape)
    for first_row in (0, 5) if repeats(implementation) else (5,):
        case = prefill_case(shape, chunks, num_tokens=24, max_seqs=6, first_row=first_row)
        expected = reference.prefill_attention(*case.prefill_args(), layer=LAYER, scale=shape.scale)
        actual = prefill(*case.prefill_args())
        assert actual.dtype == case.q.dtype
        assert relative_error(actual, expected) < TOLERANCE[shape.dtype]
        if shape.dtype != "float32":
            rounded = reference.prefill_attention(
                *case.prefill_args(), layer=LAYER, scale=shape.scale, rounds=True
            )
            assert relative_error(actual, expected) < 1.5 * relative_error(rounded, expected)
        others = np.r_[:first_row, first_row + 18 : 24]
        assert not np.asarray(actual, np.float32)[others].any()
        if repeats(implementation):
            np.testing.assert_array_equal(np.asarray(prefill(*case.prefill_args())), np.asarray(actual))


@with_each_and_newer_mosaic
def test_prefill_over_several_tiles(implementation):
    """Chunks longer than a tile of query rows, which start at unaligned rows, behind decodes."""
    shape = small(max_blocks=10, dtype="float16" if implementation == "mosaic" else "float32")
    chunks = [(3, 70), (0, 1), (20, 140)]
    case = prefill_case(shape, chunks, num_tokens=216, max_seqs=3, first_row=5)
    expected = reference.prefill_attention(*case.prefill_args(), layer=LAYER, scale=shape.scale)
    prefill = jitted(pallas_kernels.prefill_attention, implementation, shape)
    assert relative_error(prefill(*case.prefill_args()), expected) < TOLERANCE[shape.dtype]


@with_each
def test_prefill_with_no_sequence(implementation):
    shape = SHAPES[0]
    case = prefill_case(shape, [], num_tokens=24, max_seqs=6)
    actual = jitted(pallas_kernels.prefill_attention, implementation, shape)(*case.prefill_args())
    assert not np.asarray(actual).any()


@with_each
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_write_stores_exactly_the_slots(implementation, head_dim, dtype):
    rng = np.random.default_rng(1)
    pool = jnp.asarray(rng.standard_normal((4, NUM_LAYERS, 2, 3, 16, head_dim)), dtype)
    k, v = (jnp.asarray(rng.standard_normal((6, 3, head_dim)), jnp.float32) for _ in range(2))
    slots = jnp.asarray([63, -1, 0, 17, -1, 16], jnp.int32)
    expected = reference.write_kv(pool, k, v, slots, layer=LAYER)
    actual = jitted(pallas_kernels.write_kv, implementation)(pool, k, v, slots)
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))
    assert (np.asarray(actual) != np.asarray(pool)).any(axis=-1).sum() == 4 * 2 * 3


@with_each
def test_write_then_attend(implementation):
    """Two chunks written through permuted slots, read by a prefill and by a decode."""
    shape = small(num_q_heads=4, num_kv_heads=2)
    rng = np.random.default_rng(2)
    table, length = [3, 0, 2], 40
    k, v = (jnp.asarray(rng.standard_normal((length, 2, 64)), shape.dtype) for _ in range(2))
    q = jnp.asarray(rng.standard_normal((length, 4, 64)), shape.dtype)
    slots = jnp.asarray([table[i // 16] * 16 + i % 16 for i in range(length)], jnp.int32)
    pool = jnp.full((4, NUM_LAYERS, 2, 2, 16, 64), jnp.nan, shape.dtype)
    write = jitted(pallas_kernels.write_kv, implementation, donate=True)
    for part in (slice(0, 20), slice(20, 40)):
        pool = write(pool, k[part], v[part], slots[part])
    tables, lengths = jnp.asarray([table], jnp.int32), jnp.asarray([length], jnp.int32)
    starts = jnp.asarray([0, length], jnp.int32)
    prefill = jitted(pallas_kernels.prefill_attention, implementation, shape)
    prefilled = prefill(q, pool, tables, starts, lengths, 1)
    decoded = jitted(pallas_kernels.decode_attention, implementation, shape)(q[-1:], pool, tables, lengths)

    q, keys, values = (x.astype(jnp.float32) for x in (q, *(jnp.repeat(x, 2, axis=1) for x in (k, v))))
    scores = jnp.einsum("qhd,thd->hqt", q, keys, precision="highest") * shape.scale
    weights = jax.nn.softmax(jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf), axis=-1)
    dense = jnp.einsum("hqt,thd->qhd", weights, values, precision="highest")
    assert relative_error(prefilled, dense) < TOLERANCE[shape.dtype]
    assert relative_error(decoded[0], dense[-1]) < TOLERANCE[shape.dtype]


@pytest.mark.parametrize("implementation", WITH_WINDOWS)
@pytest.mark.parametrize(("window", "soft_cap"), [(1, None), (20, 5.0), (1000, None), (None, 0.5)])
def test_windows_and_caps(implementation, window, soft_cap):
    """Of a window longer and shorter than a tile of keys, and of caps above and below most scores."""
    shape = small(max_blocks=10)
    options = {"scale": shape.scale, "layer": LAYER, "window": window, "soft_cap": soft_cap}
    case = decode_case(shape, [150, 0, 1, 16, 19, 160])
    expected = reference.decode_attention(*case.decode_args(), **options)
    actual = pallas_kernels.decode_attention(*case.decode_args(), **options, implementation=implementation)
    assert relative_error(actual, expected) < TOLERANCE[shape.dtype]
    case = prefill_case(shape, [(3, 70), (0, 1), (20, 140)], num_tokens=216, max_seqs=3, first_row=5)
    expected = reference.prefill_attention(*case.prefill_args(), **options)
    actual = pallas_kernels.prefill_attention(*case.prefill_args(), **options, implementation=implementation)
    assert relative_error(actual, expected) < TOLERANCE[shape.dtype]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("wrong", "soft_cap"), [(np.nan, None), (np.nan, 5.0), (np.inf, None)])
def test_queries_that_are_not_finite_have_results_that_are_none(implementation, wrong, soft_cap):
    shape = Shape()
    options = {"scale": shape.scale, "layer": LAYER, "soft_cap": soft_cap, "implementation": implementation}
    case = decode_case(shape, [1, 17, 60])
    q, *rest = case.decode_args()
    found = np.asarray(pallas_kernels.decode_attention(q.at[1, 2, 3].set(wrong), *rest, **options))
    is_wrong = np.zeros(found.shape, bool)
    is_wrong[1, 2] = True
    np.testing.assert_array_equal(np.isnan(found), is_wrong)
    case = prefill_case(shape, [(30, 20)], 20, 1)
    q, *rest = case.prefill_args()
    found = np.asarray(pallas_kernels.prefill_attention(q.at[7, 1, 5].set(wrong), *rest, **options))
    is_wrong = np.zeros(found.shape, bool)
    is_wrong[7, 1] = True
    np.testing.assert_array_equal(np.isnan(found), is_wrong)


def test_windows_are_refused_where_there_are_none():
    case = decode_case(small(), [5])
    options = {"layer": LAYER, "scale": 1.0, "implementation": "mosaic"}
    with pytest.raises(ConfigError, match="'mosaic' has no window and no soft_cap: use 'triton' or 'xla'"):
        pallas_kernels.decode_attention(*case.decode_args(), window=4, soft_cap=1.0, **options)
    with pytest.raises(ConfigError, match="window is 0: it must be at least 1"):
        pallas_kernels.decode_attention(*case.decode_args(), window=0, **options)
    with pytest.raises(ConfigError, match=r"soft_cap is 0\.0: it must be above 0"):
        pallas_kernels.decode_attention(*case.decode_args(), soft_cap=0.0, **options)


@with_each
@pytest.mark.parametrize(
    ("num_decodes", "is_rotated", "changes"),
    [
        (0, False, {}),
        (3, True, {}),
        (5, False, {"dtype": "bfloat16"}),
        (5, True, {"dtype": "bfloat16", "num_q_heads": 6, "head_dim": 80}),
    ],
)
def test_attend_is_rotation_a_write_and_both_attentions(implementation, num_decodes, is_rotated, changes):
    """A step's decodes, which may be fewer than rows for them, before prompts; all are new in the pool."""
    shape, first_row = small(**{"num_q_heads": 4, "num_kv_heads": 2, **changes}), num_decodes
    rng = np.random.default_rng(3)
    decodes = decode_case(shape, [9, 17, 64, 33, 1][:num_decodes] + [0] * (5 - num_decodes))
    chunks = [(3, 20), (0, 1)]
    prompts = prefill_case(shape, chunks, num_tokens=32, max_seqs=4, first_row=first_row)
    num_blocks = decodes.pool.shape[0]
    pool = jnp.concatenate([decodes.pool, prompts.pool])
    tables = prompts.block_tables + num_blocks
    q = prompts.q.at[:num_decodes].set(decodes.q[:num_decodes])
    k, v = (jnp.asarray(rng.standard_normal((32, 2, shape.head_dim)), shape.dtype) for _ in range(2))
    qkv = jnp.concatenate([part.reshape(32, -1) for part in (q, k, v)], axis=1)
    rope = None
    if is_rotated:
        angles = rng.uniform(-np.pi, np.pi, (32, shape.head_dim // 2))
        rope = tuple(jnp.asarray(part, jnp.float32) for part in (np.cos(angles), np.sin(angles)))
        q, k = (jnp.asarray(reference.rotate(part, *rope)) for part in (q, k))
    slots = np.full(32, -1)
    for row, length in enumerate(np.asarray(decodes.lengths)[:num_decodes].tolist()):
        slots[row] = decodes.block_tables[row, (length - 1) // 16] * 16 + (length - 1) % 16
    for place in range(20):
        slots[first_row + place] = tables[0, (3 + place) // 16] * 16 + (3 + place) % 16
    slots[first_row + 20] = tables[1, 0] * 16
    slots = jnp.asarray(slots, jnp.int32)
    decode = decodes.block_tables, decodes.lengths
    rest = tables, prompts.query_starts, prompts.lengths, prompts.num_seqs
    written = reference.write_kv(pool, k, v, slots, layer=LAYER)
    expected = reference.prefill_attention(q, written, *rest, layer=LAYER, scale=shape.scale)
    expected[:5] += reference.decode_attention(q[:5], written, *decode, layer=LAYER, scale=shape.scale)
    call = jitted(pallas_kernels.attend, implementation, shape)
    for _ in range(2):
        stored, actual = call(qkv, rope, pool, slots, decode, rest)
        rounding = {"rtol": 0, "atol": 0} if rope is None else {"rtol": 2e-2, "atol": 1e-5}
        stored, exact = (np.asarray(x, np.float32) for x in (stored, written))
        np.testing.assert_allclose(stored[:, :, 0], exact[:, :, 0], **rounding)  # where NaN is, NaN stays
        np.testing.assert_array_equal(stored[:, :, 1], exact[:, :, 1])
        is_key = ~np.isnan(exact[:, :, 0])
        error = relative_error(stored[:, :, 0][is_key], exact[:, :, 0][is_key])
        assert error < (0.1 if is_rotated else 1) * TOLERANCE[shape.dtype]
        assert actual.dtype == qkv.dtype
        used = np.r_[:num_decodes, first_row : first_row + 21]
        assert relative_error(actual[used], expected[used]) < TOLERANCE[shape.dtype]
    with pytest.raises(ConfigError, match="attend needs decodes or prompts"):
        pallas_kernels.attend(qkv, rope, pool, slots, None, None, layer=LAYER, scale=1.0)
    with pytest.raises(ConfigError, match="dtype is int8: make it one of float32, "):
        pallas_kernels.attend(qkv, rope, pool, slots, decode, rest, layer=LAYER, scale=1.0, dtype=jnp.int8)


@with_each
@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attend_takes_parts_of_a_projection(implementation, dtype, num_parts):
    """Their sum is rounded once, before heads are rotated: as if it had been whole."""
    shape = small(num_q_heads=4, num_kv_heads=2, dtype=dtype)
    case, rng = decode_case(shape, [9, 17, 1]), np.random.default_rng(4)
    parts = jnp.asarray(rng.standard_normal((num_parts, 3, 8 * shape.head_dim)), jnp.float32)
    whole = parts.sum(axis=0).astype(dtype)
    angles = rng.uniform(-np.pi, np.pi, (3, shape.head_dim // 2))
    rope = tuple(jnp.asarray(part, jnp.float32) for part in (np.cos(angles), np.sin(angles)))
    ends = np.asarray(case.lengths) - 1
    slots = jnp.asarray(np.asarray(case.block_tables)[range(3), ends // 16] * 16 + ends % 16, jnp.int32)
    decode = case.block_tables, case.lengths
    call = functools.partial(pallas_kernels.attend, dtype=jnp.dtype(dtype))
    expected, actual = (
        jitted(call, implementation, shape)(qkv, rope, case.pool, slots, decode, None)
        for qkv in (whole, parts)
    )
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        one, other = (np.nan_to_num(np.asarray(x, np.float32)) for x in (one, other))
        assert relative_error(one, other) < TOLERANCE[dtype]
