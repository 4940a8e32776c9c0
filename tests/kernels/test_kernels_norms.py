"""Sum and norm of the residual stream as a kernel, and the parts of products that it adds up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import relative_error

from jaxllm.models.layers import Attend, Linear, RMSNorm
from jaxllm.pallas_kernels.norms import add_rms_norm

EPS = 1e-5


def splitting():
    attend = Attend()
    attend.splits_products = True
    return attend


@pytest.mark.parametrize("num_parts", [1, 4])
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-6), ("bfloat16", 4e-3), ("float16", 5e-4)])
def test_sum_and_norm_match_float64(dtype, limit, num_parts):
    rng = np.random.default_rng(0)
    x, weight = jnp.asarray(rng.standard_normal((5, 80)), dtype), jnp.asarray(rng.standard_normal(80), dtype)
    delta = jnp.asarray(rng.standard_normal((num_parts, 5, 80)), jnp.float32 if num_parts > 1 else dtype)
    total, normed = jax.jit(lambda *arguments: add_rms_norm(*arguments, eps=EPS))(x, delta, weight)
    exact = np.asarray(x, np.float64) + np.asarray(delta, np.float64).sum(axis=0)
    assert total.dtype == normed.dtype == x.dtype
    assert relative_error(total, exact) < limit
    exact *= np.asarray(weight, np.float64) / np.sqrt((exact**2).mean(axis=1, keepdims=True) + EPS)
    assert relative_error(normed, exact) < limit


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_is_what_the_layer_computes_without_it(dtype):
    rng = np.random.default_rng(1)
    x, delta = (jnp.asarray(rng.standard_normal((3, 64)), dtype) for _ in range(2))
    norm = RMSNorm(64, eps=EPS, dtype=jnp.dtype(dtype))
    norm.weight[...] = jnp.asarray(rng.standard_normal(64), dtype)
    for plain, fused in zip(norm(x, delta), norm(x, delta[None]), strict=True):
        assert relative_error(fused, plain) < 1e-6 if dtype == "float32" else 1e-3


@pytest.mark.parametrize(
    ("rows", "sizes", "num_parts"),
    [
        (64, (4096, 4096), 8),  # o_proj and down_proj of Llama-3-8B
        (256, (14336, 4096), 2),
        (256, (4096, 6144), 2),  # qkv_proj: parts of two tiles at least
        (2048, (4096, 4096), 1),
        (1, (72, 64), 8),
        (1, (63, 64), 1),
    ],
)
def test_products_of_few_rows_come_in_parts_on_gpus(rows, sizes, num_parts):
    x = jax.ShapeDtypeStruct((rows, sizes[0]), jnp.bfloat16)

    def parts_of(x, attend):
        return Linear(*sizes, bias=False, dtype=jnp.dtype(x.dtype)).parts(x, attend)

    assert jax.eval_shape(lambda x: parts_of(x, Attend()), x).shape == (rows, sizes[1])
    parts = jax.eval_shape(lambda x: parts_of(x, splitting()), x)
    assert parts.shape == (num_parts, rows, sizes[1])
    assert parts.dtype == ("float32" if num_parts > 1 else "bfloat16")


def test_parts_add_up_to_the_product():
    rng = np.random.default_rng(2)
    linear, biased = (Linear(96, 32, bias=bias, dtype=jnp.dtype("float32")) for bias in (False, True))
    linear.weight[...] = jnp.asarray(rng.standard_normal((32, 96)), jnp.float32)
    x = jnp.asarray(rng.standard_normal((3, 96)), jnp.float32)
    np.testing.assert_array_equal(linear.parts(x, Attend()), linear(x))
    attend = splitting()
    np.testing.assert_allclose(linear.parts(x, attend).sum(axis=0), linear(x), rtol=1e-5, atol=1e-5)
    assert linear.parts(x, attend).shape == (8, 3, 32)
    assert biased.parts(x, attend).shape == (3, 32)
