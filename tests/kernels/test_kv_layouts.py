"""Keys and values of other dtypes than activations: what is stored, read, copied, and found again."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import make_llm
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import LAYER, Shape, assert_no_races, decode_case, prefill_case, relative_error

from jaxllm import LLM, EngineConfig, SamplingParams, pallas_kernels
from jaxllm.errors import ConfigError
from jaxllm.executor import memory
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.pallas_kernels import mosaic_tiles, reference, triton_pool
from jaxllm.pallas_kernels.kv_layout import KVLayout, layout_of
from jaxllm.predictors.published_shapes import model_shape
from jaxllm.system.dtypes import KV_DTYPES

IMPLEMENTATIONS = ["native", "xla", "triton", "reference"]
PAIRS = [(name, dtype) for name in IMPLEMENTATIONS for dtype in ("bfloat16", "int8", "fp8_e4m3", "fp8_e5m2")]


def in_layout(case, dtype):
    """The case with its pool stored in a layout; what was NaN is poison there, too."""
    layout = KVLayout(dtype, case.pool.shape[5])
    pool = jnp.where(jnp.isnan(case.pool).any(-1, keepdims=True), jnp.nan, case.pool)
    return dataclasses.replace(case, pool=layout.stored(pool))


def floats(pool):
    return np.asarray(layout_of(pool).loaded(pool))


@pytest.mark.parametrize(("implementation", "dtype"), PAIRS)
@pytest.mark.parametrize(
    "changes", [{}, {"num_q_heads": 3, "num_kv_heads": 1, "head_dim": 128}, {"block_size": 32}]
)
def test_attention_reads_what_is_stored(implementation, dtype, changes):
    shape = Shape(**changes)
    options = {"layer": LAYER, "scale": shape.scale}
    case = in_layout(decode_case(shape, [1, 17, 0, 60]), dtype)
    q, _, tables, lengths = case.decode_args()
    expected = reference.decode_attention(q, floats(case.pool), tables, lengths, **options)
    found = pallas_kernels.decode_attention(*case.decode_args(), **options, implementation=implementation)
    assert relative_error(found, expected) < 1e-5
    case = in_layout(prefill_case(shape, [(0, 20), (30, 7)], 40, 3), dtype)
    q, _, *rest = case.prefill_args()
    expected = reference.prefill_attention(q, floats(case.pool), *rest, **options)
    found = pallas_kernels.prefill_attention(*case.prefill_args(), **options, implementation=implementation)
    assert relative_error(found[:27], expected[:27]) < 1e-5


FEW = {"num_kv_heads": 1, "dtype": "bfloat16"}
FOR_MOSAIC = [("int8", Shape(**FEW, num_q_heads=1, block_size=32, max_blocks=2))]
if mosaic_tiles.IS_NEWER_JAX:  # JAX 0.10 interprets these in minutes
    FOR_MOSAIC += [
        ("fp8_e5m2", Shape(**FEW, num_q_heads=3, block_size=32)),
        ("fp8_e4m3", Shape(num_q_heads=4, max_blocks=9, dtype="float16")),
        ("int8", Shape(num_q_heads=4, block_size=32, max_blocks=5, dtype="bfloat16")),
        ("int8", Shape(**FEW, num_q_heads=3, head_dim=128, block_size=128, max_blocks=2)),
    ]


@pytest.mark.parametrize(("dtype", "shape"), FOR_MOSAIC, ids=str)
def test_mosaic_reads_what_is_stored(dtype, shape):
    """Both attentions, of one tile of KV and of several; what must not be read is poison."""
    longest = shape.max_blocks * shape.block_size
    options = {"layer": LAYER, "scale": shape.scale}
    exact = dataclasses.replace(shape, dtype="float32")
    decode = decode_case(exact, [longest, 0, 1, 17])
    prefill = prefill_case(exact, [(0, 20), (longest - 7, 7), (3, 1)], 40, 4, first_row=5)
    for op, case in (("decode_attention", decode), ("prefill_attention", prefill)):
        case = dataclasses.replace(in_layout(case, dtype), q=case.q.astype(shape.dtype))
        q, pool, *rest = case.decode_args() if case is decode else case.prefill_args()
        rest = [x for x in rest if x is not None]
        call = functools.partial(getattr(pallas_kernels, op), **options, implementation="mosaic")
        call = jax.jit(call, compiler_options={"xla_backend_optimization_level": 0})
        found = call(q, pool, *rest)
        expected, rounded = (
            getattr(reference, op)(q, floats(pool), *rest, **options, rounds=rounds)
            for rounds in (False, True)
        )
        assert_no_races()
        limit = 1.5 * relative_error(rounded, expected)
        # Weights of int8 are rounded with their scales, also the one of a row of one token.
        assert relative_error(found, expected) < (4e-3 if dtype == "int8" else limit)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "head_dim", "block_size", "message"),
    [
        ("float32", "int8", 64, 16, "computes in bfloat16 or float16, got q in float32"),
        ("float16", "int8", 64, 16, "computes over int8 in bfloat16, got q in float16"),
        ("float16", "bfloat16", 64, 16, "got q in float16 and KV in bfloat16"),
        ("bfloat16", "float32", 64, 16, "got q in bfloat16 and KV in float32"),
        ("bfloat16", "bfloat16", 256, 16, "takes head_dim 64 or 128, got 256"),
        ("bfloat16", "fp8_e4m3", 64, 8, "takes blocks of 16, 32, 64 or 128 tokens, got 8"),
        ("bfloat16", "int8", 128, 16, "of 32 tokens or more, got 16; use implementation='triton'"),
        ("bfloat16", "int8", 64, 16, "of 32 tokens or more, got 16; use implementation='triton'"),
    ],
)
def test_what_mosaic_has_no_kernel_for_is_refused(dtype, kv_dtype, head_dim, block_size, message):
    layout = KVLayout(kv_dtype, head_dim)
    pool = jnp.zeros((2, 1, 2, 1, block_size, layout.width), layout.array_dtype)
    q, tables, lengths = (
        jnp.zeros((1, 1, head_dim), dtype),
        jnp.zeros((1, 2), jnp.int32),
        jnp.ones(1, jnp.int32),
    )
    with pytest.raises(ConfigError, match=f"'mosaic': it .*{message}"):
        pallas_kernels.decode_attention(q, pool, tables, lengths, layer=0, scale=1.0, implementation="mosaic")


@pytest.mark.parametrize(("implementation", "dtype"), PAIRS)
def test_what_is_written_is_what_the_layout_says(implementation, dtype):
    rng = np.random.default_rng(0)
    layout = KVLayout(dtype, 64)
    pool = jnp.zeros((5, 2, 2, 2, 16, layout.width), layout.array_dtype)
    k, v = (
        jnp.asarray(rng.standard_normal((7, 2, 64)) * 10 ** rng.uniform(-3, 3, (7, 2, 1)), jnp.float32)
        for _ in "kv"
    )
    k = k.at[3].set(0)
    slots = jnp.asarray([3, 16, -1, 79, 17, 200, 0], jnp.int32)
    found = np.asarray(pallas_kernels.write_kv(pool, k, v, slots, layer=1, implementation=implementation))
    heads = np.zeros((5, 2, 2, 2, 16, 64), np.float32)
    is_written = np.zeros((5, 2, 1, 1, 16, 1), bool)
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < 80:
            heads[slot // 16, 1, :, :, slot % 16] = np.stack([k[token], v[token]])
            is_written[slot // 16, 1, :, :, slot % 16] = True
    expected = np.array(layout.stored(jnp.asarray(heads)))
    if dtype == "int8":  # a scale that nobody wrote is 0
        scales = expected.reshape(5, 2, 2, 2, -1)[..., 16 * 64 :].reshape(5, 2, 2, 2, 16, 4)
        scales[...] = np.where(is_written, scales, 0)
    np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_native_fp8_is_rounded_once(dtype):
    """Ties, numbers a little off ties, those below the smallest normal one, and those too large or none."""
    ties = np.float32(2.0 ** np.arange(-20, 18)[:, None] * (1 + np.arange(16) / 16)).ravel()
    special = [0, 448, 464, 465, 57344, 61440, 61441, 1e30, 1e-45, 2**-126, np.inf, np.nan]
    numbers = np.concatenate([ties, np.nextafter(ties, 0), np.nextafter(ties, np.inf, dtype=np.float32)])
    heads = jnp.asarray(np.resize(np.concatenate([numbers, np.float32(special)]), (16, 2, 64)))
    layout, slots = KVLayout(dtype, 64), jnp.arange(16, dtype=jnp.int32)
    pool = jnp.zeros((1, 1, 2, 2, 16, 64), layout.array_dtype)
    found = pallas_kernels.write_kv(pool, heads, -heads, slots, layer=0, implementation="native")[0, 0]
    for place, stored in enumerate((heads, -heads)):
        mine, theirs = np.asarray(found[place]).swapaxes(0, 1), np.asarray(layout.stored(stored))
        are_numbers = ~np.isnan(theirs.astype(np.float32))  # of which there are several that are none
        np.testing.assert_array_equal(~np.isnan(mine.astype(np.float32)), are_numbers)
        np.testing.assert_array_equal(mine.view(np.uint8)[are_numbers], theirs.view(np.uint8)[are_numbers])


@pytest.mark.parametrize("implementation", ["native", "xla", "triton"])
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_each_code_of_8_bits_is_read_as_what_it_is(implementation, dtype):
    """One token's values are what attention to it gives, to decodes and to prompts."""
    layout = KVLayout(dtype, 64)
    codes = jnp.arange(256, dtype=jnp.uint8).view(layout.array_dtype).reshape(4, 64)
    pool = jnp.zeros((1, 1, 2, 4, 16, 64), layout.array_dtype).at[0, 0, 1, :, 0].set(codes)
    q, table, one = jnp.ones((1, 4, 64)), jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    options = {"layer": 0, "scale": 1.0, "implementation": implementation}
    starts = jnp.asarray([0, 1], jnp.int32)
    found = [
        pallas_kernels.decode_attention(q, pool, table, one, **options),
        pallas_kernels.prefill_attention(q, pool, table, starts, one, jnp.int32(1), **options),
    ]
    for numbers in found:
        np.testing.assert_array_equal(np.asarray(numbers)[0], np.asarray(codes, np.float32))


@pytest.mark.parametrize("dtype", sorted(KV_DTYPES))
def test_offsets_that_pallas_takes_fit_their_bits(dtype):
    """They have 32 bits and a sign in arrays of up to 4 GiB, and a pool of these has more bytes than that."""
    layout = KVLayout(dtype, 128)
    block = 4, 2, 8, 16, layout.width
    for gib in (2.5, 4.0):
        count = int(gib * 2**30) // (math.prod(block) * layout.array_dtype.itemsize)
        pool = jax.ShapeDtypeStruct((count, *block), layout.array_dtype)
        words = jax.eval_shape(triton_pool.areas_of, pool)
        assert words.size * words.dtype.itemsize == pool.size * pool.dtype.itemsize
        assert words.size <= 2**31


def test_heads_of_8_bits_that_triton_cannot_halve_are_refused():
    pool = jnp.zeros((2, 1, 2, 1, 16, 42), jnp.float8_e5m2)
    q, tables, lengths = jnp.zeros((1, 1, 42)), jnp.zeros((1, 2), jnp.int32), jnp.ones(1, jnp.int32)
    with pytest.raises(ConfigError, match="heads of a multiple of 4, and these have 42; use 'xla'"):
        pallas_kernels.decode_attention(q, pool, tables, lengths, layer=0, scale=1.0, implementation="triton")


@pytest.mark.parametrize("implementation", ["native", "xla", "triton"])
@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 2e-3), ("float16", 3e-4), ("float32", 1e-5)])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "float32"])
def test_keys_are_not_rounded_to_what_queries_are(implementation, dtype, limit, kv_dtype):
    shape = Shape(num_q_heads=2, num_kv_heads=1)
    options = {"layer": LAYER, "scale": 4 * shape.scale}
    case = in_layout(prefill_case(shape, [(0, 60)], 60, 1), kv_dtype)
    case = dataclasses.replace(case, q=case.q.astype(dtype))
    q, _, *rest = case.prefill_args()
    expected = reference.prefill_attention(q, floats(case.pool), *rest, **options)
    found = pallas_kernels.prefill_attention(*case.prefill_args(), **options, implementation=implementation)
    assert relative_error(found, expected) < limit


@pytest.mark.parametrize("implementation", ["native", "xla", "triton"])
def test_large_values_of_a_later_token_change_nothing_before_it(implementation):
    shape = Shape(dtype="bfloat16")
    case = prefill_case(dataclasses.replace(shape, dtype="float32"), [(0, 40)], 40, 1)
    last = case.block_tables[0, 39 // 16], LAYER, 1, slice(None), 39 % 16
    case = dataclasses.replace(case, q=case.q.astype("bfloat16"), pool=case.pool.at[last].multiply(1e8))
    case = in_layout(case, "int8")
    q, _, *rest = case.prefill_args()
    options = {"layer": LAYER, "scale": shape.scale}
    expected = reference.prefill_attention(q, floats(case.pool), *rest, **options)
    found = pallas_kernels.prefill_attention(*case.prefill_args(), **options, implementation=implementation)
    assert relative_error(found[:39], expected[:39]) < 3e-3


@pytest.mark.parametrize(
    ("kv_dtype", "head_dim", "block_size", "expected"),
    [
        ("int8", 128, 16, "triton"),
        ("int8", 128, 4, "triton"),
        ("int8", 128, 2, "xla"),
        ("int8", 120, 16, "xla"),
        ("fp8_e4m3", 100, 16, "xla"),
        ("fp8_e4m3", 128, 1, "triton"),
        ("bfloat16", 100, 1, "triton"),
    ],
)
def test_a_gpus_default_takes_the_layout(monkeypatch, kv_dtype, head_dim, block_size, expected):
    from jaxllm.pallas_kernels import api

    monkeypatch.setattr(api, "default_implementation", lambda: "triton")
    monkeypatch.setattr(triton_pool, "is_interpreted", lambda: False)
    name, reason = pallas_kernels.settle_implementation(8, 2, head_dim, block_size, kv_dtype=kv_dtype)
    assert name == expected
    assert reason is None or reason.startswith(f"not triton: on a GPU KV of {kv_dtype} needs heads of")


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(KV_DTYPES)), st.integers(0, 99))
def test_what_is_loaded_is_near_what_was_stored(dtype, seed):
    rng = np.random.default_rng(seed)
    heads = rng.standard_normal((3, 2, 32)).astype(np.float32) * np.float32(10 ** rng.uniform(-3, 2))
    layout = KVLayout(dtype, 32)
    rows = layout.stored(jnp.asarray(heads))
    assert rows.shape == (3, 2, layout.width)
    found = np.asarray(layout.loaded(rows))
    largest = np.abs(heads).max(axis=-1, keepdims=True)
    if dtype == "int8":
        assert (np.abs(found - heads) <= largest / 127 * 0.5001).all()
    else:  # half of a step, which is of the smallest normal number where a number is smaller
        kind = jnp.finfo(layout.array_dtype)
        step = float(kind.eps) * np.maximum(np.abs(heads), float(kind.smallest_normal))
        assert (np.abs(found - heads) <= step / 2 * 1.01).all()
    again = layout.stored(jnp.asarray(found))
    np.testing.assert_allclose(np.asarray(layout.loaded(again)), found, rtol=1e-6)


def test_int8_takes_at_most_0_52_of_bfloat16s_bytes():
    config = dataclasses.replace(config_from_dict(read_hf_config(demo_model_path())), head_dim=128)
    blocks = {dtype: memory.block_bytes(config, 16, dtype) for dtype in KV_DTYPES}
    assert blocks["int8"] <= 0.52 * blocks["bfloat16"]
    assert blocks["fp8_e4m3"] * 2 == blocks["bfloat16"] == blocks["float32"] // 2
    shape = model_shape("llama-3-8b", "bfloat16")
    narrow = dataclasses.replace(shape, kv_dtype="int8")
    assert narrow.kv_bytes_per_token / shape.kv_bytes_per_token == (128 + 4) / 256
    assert narrow.weight_bytes == shape.weight_bytes


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3", "fp8_e5m2", "bfloat16"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_heads_that_are_not_finite_stay_that(dtype, wrong):
    """In large arrays, too, of which XLA's reductions on CPUs drop NaNs."""
    heads = np.random.default_rng(0).standard_normal((64, 2, 256)).astype(np.float32)
    heads[0, 0, 3] = wrong
    layout = KVLayout(dtype, 256)
    found = np.asarray(layout.loaded(layout.stored(jnp.asarray(heads))))
    assert not np.isfinite(found[0, 0]).all()
    assert np.isfinite(found[1:]).all()
    assert np.isfinite(found[0, 1]).all()


# Engines


SMALL = {
    "warm_up": "background",
    "num_gpu_blocks_override": 128,
    "num_host_blocks": 64,
}
PROMPTS = ["import os\n\ndef ", "class Reader:\n    def __init__(self", "def add(a, b):\n", "for i in range("]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
LEAD = 0.2
"""Logits by which the best token leads where another order of sums, rounded again, cannot change it."""


def lead(output, place):
    """Of the best token over the second, at a place."""
    first, second = sorted((one.logprob for one in output.outputs[0].logprobs[place].values()), reverse=True)[
        :2
    ]
    return first - second


def first_difference(mine, theirs):
    """Where two lists of tokens part; None if nowhere."""
    return next((i for i, pair in enumerate(zip(mine, theirs, strict=True)) if len(set(pair)) > 1), None)


def test_files_are_of_one_layout(tmp_path):
    prompt = "import os\n" * 20
    options = {
        **SMALL,
        "skip_tokenizer_init": False,
        "prefix_cache_dir": tmp_path,
        "enable_prefix_caching": True,
    }
    outputs = []
    for kv_cache_dtype, is_found in (("int8", False), ("int8", True), ("bfloat16", False)):
        with make_llm(demo_model_path(), kv_cache_dtype=kv_cache_dtype, **options) as llm:
            output = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
        assert (output.num_cached_tokens > 0) == is_found
        outputs.append(output.outputs[0].token_ids)
    assert outputs[0] == outputs[1]


def test_fp8_has_the_tokens_of_xlas_attention():
    """Where the best leads: sums in another order may be rounded to other codes."""
    outputs = []
    for implementation in ("native", "xla"):
        options = {**SMALL, "block_size": 16, "kv_cache_dtype": "fp8_e4m3"}
        options["attention_implementation"] = implementation
        with make_llm(demo_model_path(), skip_tokenizer_init=False, **options) as llm:
            outputs.append(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
            assert llm.executor._state.pool.dtype == jnp.float8_e4m3fn
            assert {one.implementation for one in llm.executor.compile_report()} == {implementation}
    num_same = 0
    for mine, theirs in zip(*outputs, strict=True):
        parted = first_difference(mine.outputs[0].token_ids, theirs.outputs[0].token_ids)
        assert parted is None or lead(theirs, parted) < LEAD
        num_same += 24 if parted is None else parted
    assert num_same > 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype='int4' is not supported"),
        (
            {"kv_cache_dtype": "int8", "attention_implementation": "fastest"},
            "what is measured has KV of float32",
        ),
    ],
)
def test_what_there_is_not_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(**options)


def test_gpus_whose_programs_would_abort_are_refused(monkeypatch):
    from jaxllm.engine import sizing

    device = type("Device", (), {"compute_capability": "8.0", "platform": "gpu"})()
    model = type("Model", (), {"kv_dtype": "fp8_e4m3", "device": device, "dtype": "bfloat16"})()
    with pytest.raises(ConfigError, match=r"needs a GPU of compute capability 8\.9, and this is 8\.0"):
        sizing._check_kv_dtype("xla", model)
    device.compute_capability = "8.9"
    sizing._check_kv_dtype("xla", model)


def test_names_of_vllm_and_of_dtypes_are_taken():
    assert EngineConfig(kv_cache_dtype="fp8").kv_cache_dtype == "fp8_e4m3"
    assert EngineConfig(kv_cache_dtype="half").kv_cache_dtype == "float16"
    assert EngineConfig(kv_cache_dtype=jnp.bfloat16).kv_cache_dtype == "bfloat16"


def test_a_shape_of_another_dtype_has_kv_of_that():
    shape = model_shape("llama-3-8b", "float16")
    assert dataclasses.replace(shape, dtype="float32").kv_bytes_per_token == 2 * shape.kv_bytes_per_token
    narrow = dataclasses.replace(shape, kv_dtype="int8")
    assert dataclasses.replace(narrow, dtype="float32").kv_bytes_per_token == narrow.kv_bytes_per_token
    with pytest.raises(ConfigError, match="kv_dtype='int3' must be one of"):
        dataclasses.replace(shape, kv_dtype="int3")
