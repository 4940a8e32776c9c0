"""The kernel that multiplies by codes on GPUs, interpreted: against the matrix that they stand for."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import pallas_kernels
from jaxllm.models import coded_weights, linear_weights
from jaxllm.models.codes import CODES, ROUNDS
from jaxllm.models.linear_formats import QUANTIZATIONS, LinearFormat
from jaxllm.pallas_kernels import products


def weight_of(kind, group, shape, *, has_offsets=False):
    """Codes of random numbers, with offsets of their own if asked for, and the matrix, float32."""
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal(shape) * 10 ** rng.uniform(-2, 1, (shape[0], 1))
    weight = LinearFormat(kind, group, has_offsets=has_offsets).make(jnp.asarray(numbers, jnp.float32))
    if has_offsets:
        offsets = rng.standard_normal(weight.offsets.shape)
        weight = dataclasses.replace(weight, offsets=jnp.asarray(offsets, jnp.float32))
    return weight, np.asarray(weight.rows(jnp.arange(shape[0])), np.float64)


@pytest.mark.parametrize("kind", products.KINDS)
@pytest.mark.parametrize(
    ("group", "shape", "rows", "has_offsets"),
    [
        (0, (70, 100), 3, False),
        (128, (96, 1280), 17, True),
        (64, (33, 320), 70, False),
        (16, (33, 80), 1, True),
        (32, (64, 96), 5, False),
    ],
)
def test_products_are_those_of_the_matrix(kind, group, shape, rows, has_offsets):
    weight, matrix = weight_of(kind, group, shape, has_offsets=has_offsets)
    assert products.covers(shape[1], weight.scales.shape[1], kind)
    x = np.random.default_rng(1).standard_normal((rows, shape[1])).astype(np.float32)
    arrays = weight.codes, weight.scales, weight.offsets
    found = np.asarray(products.coded_product(jnp.asarray(x), *arrays, kind=kind))
    expected = x @ matrix.T
    assert found.shape == expected.shape
    scale = np.abs(x).astype(np.float64) @ np.abs(matrix).T
    assert np.max(np.abs(found - expected) / scale) < 2e-6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits_only_inputs_and_small_groups_are_rounded(dtype):
    x = jnp.asarray(np.random.default_rng(1).standard_normal((4, 256)), dtype)
    for kind, group, bound in (("e4m3", 0, 2e-6), ("int4", 128, 2e-6), ("fp4", 16, 2e-2)):
        weight, matrix = weight_of(kind, group, (32, 256))
        found = products.coded_product(
            x, weight.codes, weight.scales, weight.offsets, kind=kind, out_dtype=jnp.float32
        )
        expected = np.asarray(x, np.float64) @ matrix.T
        error = np.abs(np.asarray(found) - expected) / np.abs(expected).max(axis=0)
        assert error.max() < bound


@pytest.mark.parametrize("kind", products.KINDS)
def test_every_code_is_its_number(kind):
    """By products with ones; what is no number stays none."""
    all_bytes = np.arange(256, dtype=np.uint8).reshape(4, 64)
    codes = jnp.asarray(np.repeat(all_bytes.reshape(-1, 1), 32, axis=1))
    codes = codes if CODES[kind] == jnp.uint8 else jax.lax.bitcast_convert_type(codes, CODES[kind])
    weight = LinearFormat(kind).make(jnp.ones((256, 32 * (2 if CODES[kind] == jnp.uint8 else 1))))
    weight = dataclasses.replace(weight, codes=codes, scales=jnp.full((256, 1), 3.0))
    expected = np.asarray(weight.rows(jnp.arange(256))).astype(np.float64)
    for place in range(expected.shape[1] // 32):
        one = jnp.zeros((1, expected.shape[1])).at[0, place].set(1)
        found = products.coded_product(one, weight.codes, weight.scales, None, kind=kind)
        are_finite = np.isfinite(expected[:, place])  # what is infinite becomes NaN beside a 0
        np.testing.assert_array_equal(np.isfinite(found[0]), are_finite)
        np.testing.assert_array_equal(np.asarray(found)[0, are_finite], expected[are_finite, place])


@pytest.mark.parametrize("kind", products.KINDS)
@pytest.mark.parametrize(
    ("group", "width"), [(0, 48), (0, 40), (0, 96), (0, 4), (16, 96), (64, 320), (128, 384)]
)
@pytest.mark.parametrize("rows", [1, 70])
def test_what_is_covered_can_be_lowered_for_gpus(kind, group, width, rows):
    """Triton takes powers of two, which interpretation does not mind."""
    weight, _ = weight_of(kind, group, (64, width))
    assert products.covers(width, weight.scales.shape[1], kind)
    h100 = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=h100)):
        call = jax.jit(functools.partial(products.coded_product, kind=kind))
        traced = call.trace(jnp.zeros((rows, width), jnp.bfloat16), weight.codes, weight.scales)
        assert "coded_product" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_no_rows_give_none():
    weight, _ = weight_of("int8", 0, (33, 48))
    found = products.coded_product(jnp.zeros((0, 48)), weight.codes, weight.scales, kind="int8")
    assert found.shape == (0, 33)


@pytest.mark.parametrize("rounds", ["fp8", "fp8_static", "fp8_128", "int8_static", ""])
@pytest.mark.parametrize("kind", products.KINDS)
@pytest.mark.parametrize("has_offsets", [False, True])
def test_a_weight_is_multiplied_on_gpus_as_elsewhere(kind, rounds, has_offsets, monkeypatch):
    """Those with and without tensor cores for float8."""
    weight, _ = weight_of(kind, 0, (40, 256), has_offsets=has_offsets)
    inputs = jnp.asarray([0.01, 3.0]) if rounds.endswith("static") else None
    weight = dataclasses.replace(weight, rounds=rounds, inputs=inputs)
    x = jnp.asarray(np.random.default_rng(2).standard_normal((5, 256)), jnp.float32)
    expected = np.asarray(weight.multiply(x))
    for has_float8 in (False, True):
        monkeypatch.setattr(coded_weights, "multiplies_float8", lambda has_float8=has_float8: has_float8)
        error = np.abs(np.asarray(weight._on_gpu(x)) - expected) / np.abs(expected).max(axis=0)
        assert error.max() < 1e-5


@pytest.mark.parametrize("rounds", ROUNDS)
def test_no_rows_have_no_products(rounds):
    inputs = jnp.asarray([0.1, 0.0]) if rounds.endswith("static") else None
    weight, _ = weight_of("e4m3", 0, (32, 256))
    weight = dataclasses.replace(weight, rounds=rounds, inputs=inputs)
    assert weight.multiply(jnp.zeros((0, 256))).shape == (0, 32)


WEIGHTS = QUANTIZATIONS | {
    "gptq": LinearFormat("int4", group=128, has_offsets=True, is_ordered=True),
    "nvfp4": LinearFormat("fp4", group=16),
    "float8 by blocks": LinearFormat("e4m3", group=128, rounds="fp8_128"),
    "fused": LinearFormat(parts=((96, QUANTIZATIONS["int8"]), (64, LinearFormat("int4", group=64)))),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_programs_for_any_number_of_rows_are_xlas(name, monkeypatch):
    monkeypatch.setattr(pallas_kernels, "default_implementation", lambda: "triton")
    weight = WEIGHTS[name].make(jnp.ones((160, 512)))
    rows = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("n"), 512), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: linear_weights.product(x, weight)))(rows)
    assert exported.call(jnp.ones((3, 512))).shape == (3, 160)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("rows", [1, 70])
def test_weights_multiply_on_gpus_as_they_do_elsewhere(name, rows, monkeypatch):
    """Codes with codes, too: of int8 by any rows, of e4m3 by few and by many."""
    rng = np.random.default_rng(0)
    weight = WEIGHTS[name].make(jnp.asarray(rng.standard_normal((160, 512)), jnp.float32))
    x, bias = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((rows, 512), 160))
    monkeypatch.setattr(coded_weights, "multiplies_float8", lambda: True)
    found = []
    for default in ("xla", "triton"):
        monkeypatch.setattr(pallas_kernels, "default_implementation", lambda default=default: default)
        found.append(np.asarray(linear_weights.product(x, weight, bias=bias, relu=True), np.float64))
    expected, actual = found
    assert np.linalg.norm(actual - expected) < 1e-6 * np.linalg.norm(expected)
