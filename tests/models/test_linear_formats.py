"""Weights in formats of their own: their arithmetic, their native products, and engines that hold them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import llvmlite.binding as llvm
import ml_dtypes
import numpy as np
import pytest
from checkpoint_helpers import stored, write
from hypothesis import given, settings
from hypothesis import strategies as st
from variants import golden_checkpoint

from jaxllm import LLM, SamplingParams
from jaxllm.errors import ConfigError
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.loading.convert import convert_checkpoint
from jaxllm.loading.load import load_params
from jaxllm.models.coded_weights import Coded, Int8
from jaxllm.models.codes import CODES
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.models.linear_formats import QUANTIZATIONS, LinearFormat, LinearFormats
from jaxllm.models.linear_weights import Panels, Table, Weight
from jaxllm.models.registry import abstract_params, linear_weights, weight_bytes
from jaxllm.models.weight_parts import stacked
from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.native import machine_code
from jaxllm.pallas_kernels.native.shape import LinearShape

INT8 = QUANTIZATIONS["int8"]
INT8_HERE = dataclasses.replace(INT8, is_native=True)
FEATURES = llvm.get_host_cpu_features()
DOTS = {"vnni512": ("avx512vnni",), "vnni256": ("avx512vnni", "avx512vl"), "pairs": ("avx2",), "": ()}
SHAPES = [
    pytest.param(
        LinearShape(*tile, "int8", dot),
        marks=pytest.mark.skipif(
            not all(map(FEATURES.get, needed)), reason="this processor has no such instructions"
        ),
    )
    for dot, needed in DOTS.items()
    for tile in ((13, 2), (6, 1))
    if (dot == "vnni512") == (tile == (13, 2)) or not dot
]


def rounded(x):
    """Rows as integers and their units, by the formula."""
    units = np.maximum(np.abs(x).max(axis=1), np.float32(1e-10)) * np.float32(1 / 127)
    return np.rint(x / units[:, None]).astype(np.int64), units


def oracle(x, weight, bias):
    """What int8 products are, in the order in which float32 is rounded; the sums are exact."""
    (codes, units), (of_weight, scales) = rounded(x), rounded(weight)
    exact = (codes @ of_weight.T).astype(np.float32)
    return exact * units[:, None] * scales + bias


def random(seed, num_rows, in_features, out_features):
    rng = np.random.default_rng(seed)
    sizes = (num_rows, in_features), (out_features, in_features), (out_features,)
    x, weight, bias = (rng.standard_normal(size).astype(np.float32) for size in sizes)
    return x * np.exp(rng.normal(size=(num_rows, 1))).astype(np.float32), weight, bias


@functools.partial(jax.jit, static_argnames="relu")
def multiply(held, x, bias, relu):
    """One program, where each operation would be compiled for each shape."""
    return held.multiply(x, bias=bias, relu=relu)


@jax.jit
def rows_of(held, ids):
    return held.rows(ids)


@jax.jit
def portable(held):
    return held.portable()


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_products_are_exact_with_every_instruction(shape, monkeypatch):
    monkeypatch.setattr(machine_code, "linear_shape", lambda numbers: shape)
    for seed, sizes in enumerate(((1, 16, 33), (7, 512, 32), (30, 2064, 70), (200, 48, 31))):
        x, weight, bias = random(seed, *sizes)
        if seed == 1:
            x[:] = 0
        if seed == 2:  # the largest sums there are
            x, weight = np.sign(x), np.sign(weight)
        made = INT8_HERE.make(jnp.asarray(weight))
        assert made.is_native
        found = np.asarray(made.multiply(jnp.asarray(x), bias=jnp.asarray(bias)))
        np.testing.assert_allclose(found, oracle(x, weight, bias), rtol=2e-6, atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([1, 3, 8, 40]),
    st.sampled_from([1, 2, 7, 20]),
    st.sampled_from([1, 16, 33, 100]),
    st.booleans(),
    st.integers(0, 9),
)
def test_int8_products_are_the_same_here_and_everywhere(num_rows, sixteenths, out_features, relu, seed):
    x, weight, bias = random(seed, num_rows, 16 * sixteenths, out_features)
    everywhere, here = jax.jit(lambda weight: (INT8.make(weight), INT8_HERE.make(weight)))(weight)
    expected = oracle(x, weight, bias)
    expected = np.maximum(expected, 0) if relu else expected
    for one in (everywhere, here):
        assert one.shape == weight.shape
        np.testing.assert_allclose(multiply(one, x, bias, relu), expected, rtol=2e-6, atol=1e-5)
    ids = np.random.default_rng(seed).integers(0, out_features, 9)
    np.testing.assert_array_equal(rows_of(here, ids), rows_of(everywhere, ids))
    back = portable(here)
    np.testing.assert_array_equal(back.codes, everywhere.codes)
    np.testing.assert_array_equal(back.scales, everywhere.scales)


def test_a_matrix_is_within_half_a_step_of_what_it_was():
    _, weight, _ = random(0, 1, 64, 40)
    made = Int8.quantised(jnp.asarray(weight))
    assert (np.abs(made.rows(jnp.arange(40)) - weight) <= np.asarray(made.scales)[:, None] / 2 + 1e-7).all()
    assert np.abs(made.codes).max() == 127


def test_rows_that_are_not_finite_stay_that():
    x, weight, _ = random(0, 4, 64, 40)
    x[1, 3], x[2, 5] = np.nan, np.inf
    for is_native in (False, True):
        found = np.asarray(
            dataclasses.replace(INT8, is_native=is_native).make(jnp.asarray(weight)).multiply(jnp.asarray(x))
        )
        assert not np.isfinite(found[1:3]).any()
        assert np.isfinite(found[[0, 3]]).all()


@pytest.mark.parametrize("num_rows", [0, 1, 13, 40])
def test_only_rows_in_use_are_computed(num_rows):
    x, weight, bias = random(0, 40, 96, 70)
    made = INT8_HERE.make(jnp.asarray(weight))
    some = np.asarray(made.multiply(jnp.asarray(x), jnp.int32(num_rows), bias=jnp.asarray(bias)))
    np.testing.assert_allclose(some[:num_rows], oracle(x, weight, bias)[:num_rows], rtol=2e-6, atol=1e-5)


def test_sizes_that_kernels_do_not_take_are_multiplied_by_xla():
    x, weight, bias = random(0, 5, 20, 33)
    made = INT8_HERE.make(jnp.asarray(weight))
    assert not made.is_native
    found = jax.jit(lambda x: made.multiply(x, bias=jnp.asarray(bias)))(jnp.asarray(x))
    np.testing.assert_allclose(found, oracle(x, weight, bias), rtol=2e-6, atol=1e-5)


KINDS = [
    LinearFormat(),
    *QUANTIZATIONS.values(),
    LinearFormat("fp4", 16),
    LinearFormat("e5m2", 32, "fp8"),
    LinearFormat("int4", 64, has_offsets=True, is_ordered=True),
    LinearFormat("int8", 0, "int8_static"),
    LinearFormat(parts=((16, LinearFormat()), (24, LinearFormat("int4", 64)))),
]


@pytest.mark.parametrize("held", KINDS, ids=lambda held: held.name or "plain")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_native", [False, True])
def test_structures_are_those_of_what_is_made(held, dtype, is_native):
    held = dataclasses.replace(held, is_native=is_native)
    weight = jnp.asarray(random(0, 1, 128, 40)[1], dtype)
    made, struct = held.make(weight), held.struct(jax.ShapeDtypeStruct(weight.shape, weight.dtype))
    assert jax.tree.structure(made) == jax.tree.structure(struct)
    for array, one in zip(jax.tree.leaves(made), jax.tree.leaves(struct), strict=True):
        assert (array.shape, array.dtype) == (one.shape, one.dtype)
    if isinstance(made, Weight):
        assert (tuple(made.shape), made.dtype) == (weight.shape, dtype)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([one for one in KINDS if one.kind and one.rounds != "int8"]),
    st.sampled_from([1, 5, 40]),
    st.sampled_from([1, 3, 12]),
    st.sampled_from([1, 33, 80]),
    st.booleans(),
    st.integers(0, 9),
)
def test_products_of_codes_are_those_of_their_numbers(held, num_rows, width, out_features, relu, seed):
    x, weight, bias = random(seed, num_rows, 128 * width, out_features)
    made = jax.jit(held.make)(weight)
    if made.order is not None:
        made = dataclasses.replace(
            made, order=jnp.asarray(np.random.default_rng(seed).permutation(128 * width))
        )
    if made.offsets is not None:
        made = dataclasses.replace(made, offsets=-3 * made.scales)
    here = jax.jit(lambda one: one.for_cpu())(made)
    assert here.is_native
    back, ids = portable(here), np.arange(out_features)
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(back), strict=True):
        np.testing.assert_array_equal(one, other)
    numbers = np.asarray(rows_of(made, ids), np.float64)
    np.testing.assert_allclose(rows_of(here, ids), numbers, rtol=1e-6)
    down, up = (np.asarray(one, np.float64) for one in rounded_inputs(x, made))
    expected = down @ numbers.T + bias
    expected = np.maximum(expected, 0) if relu else expected
    size = np.abs(x).max(axis=1, keepdims=True)
    room = 2e-5 * np.sqrt(128 * width) * size + np.abs(up - down) @ np.abs(numbers.T)
    for one in (made, here):
        found = np.asarray(multiply(one, x, bias, relu))
        np.testing.assert_array_less(np.abs(found - expected), room)


def rounded_inputs(x, made):
    """By the formulas, [rows, features]: ties rounded down, and up; compilers divide in several ways."""
    if made.rounds == "int8_static":
        return (np.clip(np.rint(x) + 1, -128, 127) - 1,) * 2
    if not made.rounds:
        return x, x
    units = np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(1e-10)) / np.float32(448)
    ways = (np.clip(x / units * np.float32(one), -448, 448) for one in (1 - 3e-7, 1 + 3e-7))
    return [way.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * units for way in ways]


@pytest.mark.parametrize("out_features", [1, 33, 80])
def test_a_tie_of_rounding_goes_either_way(out_features):
    """A number of each is 304 units, between two codes: 303.99997 by some ways to divide, 304 by others."""
    (held,) = (one for one in KINDS if one.kind == "e4m3" and one.rounds == "fp8" and one.group == 0)
    x, weight, _ = random(8, 40, 384, out_features)
    down, up = rounded_inputs(x, held.make(jnp.asarray(weight)))
    assert np.argwhere(down != up).tolist() == [[13, 267]]
    run = test_products_of_codes_are_those_of_their_numbers.hypothesis.inner_test
    run(held, 40, 3, out_features, False, 8)


def test_every_code_stands_for_what_its_format_says():
    """All codes there are, against ml_dtypes and the definition of the others."""
    every = np.arange(256, dtype=np.uint8)
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    halves = np.stack([every & 15, every >> 4], 1).ravel()
    expected = {
        "int8": every.view(np.int8).astype(np.float32),
        "e4m3": every.view(ml_dtypes.float8_e4m3fn).astype(np.float32),
        "e5m2": every.view(ml_dtypes.float8_e5m2).astype(np.float32),
        "int4": halves.astype(np.float32) - 8,
        "fp4": np.where(halves & 8, -1, 1) * e2m1[halves & 7],
    }
    for kind, numbers in expected.items():
        codes = every.view(np.dtype(CODES[kind]))
        made = Coded(
            jnp.asarray(codes[:, None].repeat(2, 1)),
            jnp.ones((256, 1)),
            None,
            None,
            None,
            kind,
            "",
            "float32",
        )
        for one in (made, made.for_cpu()):
            rows = np.asarray(one.rows(jnp.arange(256)))
            repeated = numbers.reshape(256, -1)
            np.testing.assert_array_equal(rows[:, : repeated.shape[1]], repeated)
        unit = jnp.eye(2)[:1]
        finite = np.isfinite(numbers.reshape(256, -1)[:, 0])
        products = np.asarray(made.for_cpu().multiply(unit))[0]
        np.testing.assert_array_equal(products[finite], numbers.reshape(256, -1)[finite, 0])


@pytest.mark.parametrize(("name", "steps"), [("int8_weight", 1), ("int4_weight", 1), ("fp8", 32)])
def test_numbers_are_rounded_to_the_nearest_code(name, steps):
    _, weight, _ = random(0, 1, 256, 40)
    made = QUANTIZATIONS[name].make(jnp.asarray(weight))
    off = np.abs(np.asarray(made.rows(jnp.arange(40))) - weight).reshape(40, made.scales.shape[1], -1)
    assert (off <= np.asarray(made.scales)[:, :, None] * steps * 0.501).all()


def test_weights_above_one_another_are_those_of_fused_layers():
    first, second = (Int8.quantised(jnp.asarray(random(seed, 1, 32, 8)[1])) for seed in (0, 1))
    both = stacked([first, second])
    assert both.shape == (16, 32)
    np.testing.assert_array_equal(both.rows(jnp.arange(8, 16)), second.rows(jnp.arange(8)))


# Engines


OPTIONS = {"skip_tokenizer_init": True, "max_num_seqs": 4, "decode_buckets": [4], "prefill_buckets": [32]}
PROMPTS = [[5, 6, 7, 8, 9], [100, 3, 17] * 8, list(range(40, 60))]


def tokens_of(llm):
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    return [one.outputs[0].token_ids for one in outputs]


@pytest.mark.parametrize("quantization", ["int4_weight", "fp8"])
def test_an_engine_holds_codes_of_any_kind(quantization):
    with LLM(golden_checkpoint("llama_gqa"), quantization=quantization, **OPTIONS) as llm:
        native_tokens = tokens_of(llm)
    xla = {"attention_implementation": "xla", "quantization": quantization}
    with LLM(golden_checkpoint("llama_gqa"), **xla, **OPTIONS) as llm:
        assert tokens_of(llm) == native_tokens


@pytest.mark.parametrize("name", ["llama_gqa", "opt_pre_norm"])
def test_an_engine_in_int8_has_the_tokens_of_its_rounded_weights(name):
    with LLM(golden_checkpoint(name), quantization="int8", **OPTIONS) as llm:
        native_tokens = tokens_of(llm)
        formats = llm.executor.config.formats
    assert formats.default == INT8
    with LLM(golden_checkpoint(name), quantization="int8", attention_implementation="xla", **OPTIONS) as llm:
        assert tokens_of(llm) == native_tokens


def test_all_products_of_an_engine_are_those_it_was_asked_for():
    with LLM(golden_checkpoint("llama_gqa"), quantization="int8", quantize_lm_head=False, **OPTIONS) as llm:
        params, config = llm.executor._params, llm.model_config
        kinds = {name: type(params[name]) for name in linear_weights(config)}
    head = kinds.pop("embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight")
    assert {kind.__name__ for kind in kinds.values()} <= {"Int8Panels", "Int8"}
    assert head in (Panels, jax.Array) or "Array" in head.__name__


def test_a_model_in_int8_takes_a_quarter_of_the_bytes():
    config = config_from_dict(read_hf_config(demo_model_path()))
    whole, quantised = (weight_bytes(config, "float32", LinearFormats(one)) for one in (LinearFormat(), INT8))
    assert 0.25 < quantised / whole < 0.265
    assert abstract_params(config, "bfloat16", LinearFormats(INT8))["norm.weight"].dtype == "bfloat16"


def test_other_weights_come_in_the_same_format():
    with LLM(golden_checkpoint("llama_gqa"), quantization="int8", **OPTIONS) as llm:
        before = tokens_of(llm)
        llm.sleep(level=2)
        llm.wake_up()
        assert tokens_of(llm) == before
        llm.update_weights(load_params(golden_checkpoint("llama_gqa"), llm.model_config))
        assert tokens_of(llm) == before


def test_what_contradicts_itself_is_refused():
    with pytest.raises(ConfigError, match="quantize_lm_head=False leaves the output head out"):
        LLM(golden_checkpoint("llama_gqa"), quantize_lm_head=False)
    with pytest.raises(ConfigError, match="quantization='int9' is not supported"):
        LLM(golden_checkpoint("llama_gqa"), quantization="int9")


def test_native_panels_are_as_wide_as_they_say():
    panels, sums = native.pack_codes(jnp.ones((33, 16), jnp.int8))
    assert panels.shape == (2, 4, 32, 4)
    assert sums.tolist() == [128 * 16] * 33 + [0] * 31


@pytest.mark.parametrize("name", QUANTIZATIONS)
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_matrix_that_is_not_finite_stays_that(name, wrong):
    """In large arrays, too, of which XLA's reductions on CPUs drop NaNs."""
    weight = np.random.default_rng(0).standard_normal((128, 256)).astype(np.float32)
    weight[3, 4] = wrong
    for is_native in (False, True):
        made = dataclasses.replace(QUANTIZATIONS[name], is_native=is_native).make(jnp.asarray(weight))
        found = np.asarray(made.multiply(jnp.ones((2, 256))))
        assert not np.isfinite(found[:, 3]).any()
        assert np.isfinite(np.delete(found, 3, axis=1)).all()


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("shape", [(1, 4096), (64, 4096), (512, 512)])
def test_activations_that_are_not_finite_stay_that(name, shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x[0, 5] = np.nan
    weight = jnp.asarray(np.random.default_rng(1).standard_normal((64, shape[1])), jnp.float32)
    for is_native in (False, True):
        made = dataclasses.replace(QUANTIZATIONS[name], is_native=is_native).make(weight)
        found = np.asarray(made.multiply(jnp.asarray(x)))
        assert np.isnan(found[0]).all()
        assert np.isfinite(found[1:]).all()


def test_an_odd_number_of_inputs_has_no_four_bits():
    assert "take int8_weight" in QUANTIZATIONS["int4_weight"].why_not(99)
    assert QUANTIZATIONS["int4_weight"].why_not(98) is None
    assert QUANTIZATIONS["int8"].why_not(99) is None


@pytest.mark.parametrize("quantization", ["awq", "gptq", "compressed-tensors"])
def test_names_of_quantised_checkpoints_are_answered(quantization):
    with pytest.raises(ConfigError, match="needs no option: leave it out"):
        LLM(golden_checkpoint("llama_gqa"), quantization=quantization)


def test_int4_is_told_its_name():
    with pytest.raises(ConfigError, match="its name is int4_weight"):
        LLM(golden_checkpoint("llama_gqa"), quantization="int4")


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 60), st.integers(1, 200), st.integers(1, 70), st.booleans(), st.integers(0, 99))
def test_numbers_of_16_bits_are_multiplied_as_float32_bit_for_bit(
    stored, num_rows, width, out_features, relu, seed
):
    x, weight, bias = random(seed, num_rows, width, out_features)
    weight = weight.astype(np.dtype(stored)).astype(np.float32)
    formats = [LinearFormat(is_native=True, stored=one) for one in ("", stored)]
    wide, narrow = jax.jit(lambda weight: [one.make(weight) for one in formats])(weight)
    assert (wide.panels.dtype, narrow.panels.dtype) == (jnp.float32, stored)
    expected, found = (np.asarray(multiply(one, x, bias, relu)) for one in (wide, narrow))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(rows_of(narrow, np.arange(out_features)), weight)
    np.testing.assert_array_equal(portable(narrow), weight)


def test_a_checkpoint_of_16_bits_is_held_as_it_is(caplog):
    """In half the bytes, with the same tokens; unless float32 is asked for."""
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1)
    answers, held = [], []
    for settings_ in ({}, {"dtype": "float32"}):
        with LLM(demo_model_path(), **OPTIONS, **settings_) as llm:
            weights = [llm.executor._params[name] for name in linear_weights(llm.model_config)]
            held.append({str(one.panels.dtype) for one in weights})
            (output,) = llm.generate(PROMPTS[:1], params, use_tqdm=False)
            answers.append(output.outputs[0])
            if not settings_:
                llm.update_weights(load_params(demo_model_path(), llm.model_config, "float32"))
                (again,) = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    assert held == [{"bfloat16"}, {"float32"}]
    assert again.outputs[0].token_ids == answers[0].token_ids == answers[1].token_ids
    assert answers[0].cumulative_logprob == answers[1].cumulative_logprob
    assert "weights are held in bfloat16" in caplog.text
    config = config_from_dict(read_hf_config(demo_model_path()))
    formats = [LinearFormats(LinearFormat(stored=one), is_native=True) for one in ("", "bfloat16")]
    wide, narrow = (weight_bytes(config, "float32", one) for one in formats)
    assert narrow < 0.52 * wide


def test_embeddings_beside_a_head_are_held_in_16_bits(tmp_path):
    """And take the room of 16: what is planned is what is held."""
    tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in stored("llama_gqa").items()}
    folder = write(tmp_path / "narrow", tensors, torch_dtype="bfloat16")
    tokens = []
    for dtype in ("auto", "float32"):
        with LLM(folder, dtype=dtype, **OPTIONS) as llm:
            params = llm.executor._params
            held = params["embed_tokens.weight"]
            if dtype == "auto":
                assert isinstance(held, Table)
                assert held.values.dtype == jnp.bfloat16
            else:
                assert held.dtype == jnp.float32
            planned = weight_bytes(llm.model_config, "float32", llm.executor.config.formats)
            assert planned == sum(array.nbytes for array in jax.tree.leaves(params))
            prompts = [{"prompt_token_ids": [5, 6, 7]}]
            (output,) = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
            tokens.append(output.outputs[0].token_ids)
    assert tokens[0] == tokens[1]
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].astype(np.float32) * 1.001
    mixed = write(tmp_path / "mixed", tensors, torch_dtype="bfloat16")
    with LLM(mixed, **OPTIONS) as llm:
        assert llm.executor.config.formats.default.stored == ""


def test_numbers_of_other_dtypes_are_held_in_float32(tmp_path):
    """As those of float32 in a folder of any kind, what is quantised, and what XLA multiplies."""
    convert_checkpoint(demo_model_path(), tmp_path / "wide", "float32")
    for model, settings_ in (
        (tmp_path / "wide", {}),
        (demo_model_path(), {"attention_implementation": "xla"}),
        (demo_model_path(), {"quantization": "int8"}),
    ):
        with LLM(model, **OPTIONS, **settings_) as llm:
            assert llm.executor.config.formats.default.stored == ""
