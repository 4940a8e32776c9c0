"""Building blocks shared by the models. Activations are flat over tokens: `[T, features]`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxllm.models.linear_weights import Weight, precision_of, product
from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.heads import RopeTable
from jaxllm.pallas_kernels.norms import add_rms_norm

_LAYER_NORM_EPS = 1e-5
TENSOR = "tensor"
"""The mesh axis of devices that share each layer."""
_SPLIT_PRODUCT_SIZE = 2**21  # numbers in the parts of a product on a GPU: two tiles of 64 x 128 a core


class KVScales(nnx.Module):
    """What a checkpoint wants keys and values to be divided by before they are stored, each a number.

    Queries are multiplied by that of keys instead, and what attention gives by that of values: so it need not
    know of them.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> None:
        self._sizes = num_heads * head_dim, num_kv_heads * head_dim
        self.pair = nnx.Param(jnp.ones((2,), dtype))

    def divided(self, qkv: jax.Array) -> jax.Array:
        """The fused projection, keys and values divided."""
        k, v = self.pair.get_value().astype(jnp.float32)
        q_size, kv_size = self._sizes
        factors = [jnp.full(q_size, k), jnp.full(kv_size, 1 / k), jnp.full(kv_size, 1 / v)]
        return (qkv.astype(jnp.float32) * jnp.concatenate(factors)).astype(qkv.dtype)

    def multiplied(self, out: jax.Array) -> jax.Array:
        """What attention gives, of values that are not divided."""
        return (out.astype(jnp.float32) * self.pair.get_value()[1].astype(jnp.float32)).astype(out.dtype)


Edit = Callable[[int, jax.Array], jax.Array]
"""Changes an activation: `edit(layer, x)` of the residual stream `x` [..., hidden_size] before a layer."""


class LayerInputs:
    """What some layers of a pass were given, from the first to the last.

    Args:
        layers: their numbers.

    Attributes:
        found: of each [T, hidden_size].
    """

    def __init__(self, layers: Collection[int]) -> None:
        self.found: list[jax.Array] = []
        self._layers = layers

    def add(self, index: int, x: jax.Array, delta: jax.Array | None) -> None:
        """Note what layer `index` is given, as `Attend.run` is."""
        if index in self._layers:
            self.found.append(x if delta is None else x + whole(delta, x.dtype))


class Attend:
    """Attention over the sequences that a pass works on, beside whatever else depends on the kind of pass.

    Attributes:
        num_rows: of a step's rows so many, an int32 scalar, are in use; the others are padding, whose results
            mean nothing. None if all may be.
        splits_products: whether products may be left in parts, which a GPU's kernels add up.
        edit: changes the residual stream; None leaves it.
        keeps: is told what layers are given, if it is not None.
    """

    num_rows: jax.Array | None = None
    splits_products = False
    edit: Edit | None = None
    keeps: LayerInputs | None = None

    def __call__(
        self,
        layer: int,
        qkv: jax.Array,
        rope: RopeTable | None,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        dtype: jnp.dtype | None = None,
    ) -> jax.Array:
        """`qkv` [T, (num_heads + 2 * num_kv_heads) * head_dim] -> [T, num_heads, head_dim].

        Of the fused projection, or of the sum of its `Linear.parts` in `dtype`, queries and keys are rotated
        by `rope`, if it is given. A token sees the latest `window` tokens, its own included, or all. Scores
        are capped softly, if at all.
        """
        raise NotImplementedError

    def run(
        self, index: int, layer: Callable[..., Any], x: jax.Array, delta: jax.Array | None, *rest: Any
    ) -> tuple[jax.Array, jax.Array | None]:
        """`layer(x, delta, *rest, self)`: `x` [T, hidden_size], and what is yet to be added -> same."""
        if self.edit is not None:
            x, delta = self.edit(index, x if delta is None else x + whole(delta, x.dtype)), None
        if self.keeps is not None:
            self.keeps.add(index, x, delta)
        found: tuple[jax.Array, jax.Array | None] = layer(x, delta, *rest, self)
        return found


def gelu_glu(gate_up: jax.Array) -> jax.Array:
    """`gelu(gate) * up` of `gate_up` [T, 2 * features], GELU by its tanh approximation -> [T, features]."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.gelu(gate, approximate=True) * up


def whole(parts: jax.Array, dtype: jnp.dtype | None) -> jax.Array:
    """The sum of `Linear.parts`, in a dtype."""
    return parts if parts.ndim == 2 else parts.sum(axis=0).astype(dtype)


def soft_capped(x: jax.Array, cap: float | None) -> jax.Array:
    """`cap * tanh(x / cap)`, if there is one."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def swiglu(gate_up: jax.Array, num_rows: jax.Array | None, *, is_native: bool) -> jax.Array:
    """`silu(gate) * up` of `gate_up` [T, 2 * features], of which `num_rows` are in use -> [T, features]."""
    if is_native and gate_up.shape[1] % (2 * native.LANES) == 0:
        return native.gated(gate_up, num_rows)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """`x` times a factor, in float32 (many have none in 16 bits)."""
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)


class Linear(nnx.Module):
    """A linear layer whose weight is stored `[out, in]`, with an optional bias.

    With an `axis` the devices along it have some of the inputs each, and sum what these give.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: jnp.dtype, axis: str | None = None
    ) -> None:
        self.weight = nnx.Param(jnp.zeros((out_features, in_features), dtype))
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if bias else None
        self.out_features, self.axis = out_features, axis

    @property
    def is_packed(self) -> bool:
        """Whether its products are native."""
        weight = self.weight.get_value()
        return isinstance(weight, Weight) and weight.is_native

    def __call__(
        self,
        x: jax.Array,
        num_rows: jax.Array | None = None,
        *,
        relu: bool = False,
        out_dtype: jnp.dtype | None = None,
    ) -> jax.Array:
        """`x` [T, in], of which `num_rows` are in use -> [T, out]; with `relu` at least 0."""
        bias = None if self.bias is None else self.bias[...]
        if self.axis is None:
            return product(x, self.weight.get_value(), num_rows, bias=bias, relu=relu, out_dtype=out_dtype)
        y = lax.psum(product(x, self.weight.get_value(), num_rows, out_dtype=out_dtype), self.axis)
        y = y if bias is None else y + bias
        return jax.nn.relu(y) if relu else y

    def parts(self, x: jax.Array, attend: Attend) -> jax.Array:
        """`x` [T, in] -> [T, out]; or, for a kernel that adds them up, parts of it, [parts, T, out].

        Few rows are too few tiles of a product for all cores of a GPU: there its sum is split as well.
        """
        if self.bias is not None or not attend.splits_products:
            return self(x, attend.num_rows)
        weight = self.weight.get_value()
        if isinstance(weight, Weight) or self.axis is not None:
            return self(x, attend.num_rows)[None]
        rows, in_features = x.shape
        wanted = -(-_SPLIT_PRODUCT_SIZE // (rows * self.out_features))
        num_parts = math.gcd(in_features, min(8, 1 << (wanted.bit_length() - 1))) if wanted > 1 else 1
        if num_parts == 1:
            return self(x, attend.num_rows)[None]
        split = x.reshape(rows, num_parts, -1), weight.reshape(self.out_features, num_parts, -1)
        dimensions = (((2,), (2,)), ((1,), (1,)))
        return lax.dot_general(
            *split, dimensions, precision=precision_of(x.dtype), preferred_element_type=jnp.float32
        )


class Embedding(nnx.Module):
    """A table `[num_embeddings, features]`; also the output head where embeddings are tied."""

    def __init__(self, num_embeddings: int, features: int, *, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.zeros((num_embeddings, features), dtype))
        self.num_embeddings = num_embeddings

    def __call__(self, ids: jax.Array) -> jax.Array:
        """`ids` [T] int32 -> [T, features]. Ids are validated before they reach the device."""
        table = self.weight.get_value()
        if isinstance(table, Weight):
            return table.rows(ids)
        return table.at[ids].get(mode="clip")

    def as_head(self, x: jax.Array, num_rows: jax.Array | None = None, *, out_dtype: jnp.dtype) -> jax.Array:
        """`x` [T, features], of which `num_rows` are in use, times the table -> [T, num_embeddings]."""
        return product(x, self.weight.get_value(), num_rows, out_dtype=out_dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the features, computed in float32.

    With an `offset` (Gemma) the factors are the weights plus that, and what they multiply is not rounded.
    """

    def __init__(self, features: int, *, eps: float, dtype: jnp.dtype, offset: float = 0.0) -> None:
        self.weight = nnx.Param(jnp.ones((features,), dtype))
        self.eps, self.offset = eps, offset

    def __call__(
        self,
        x: jax.Array,
        delta: jax.Array | None = None,
        num_rows: jax.Array | None = None,
        *,
        is_native: bool = False,
    ) -> tuple[jax.Array, jax.Array]:
        """`x` [T, features], plus `delta` of `Linear.parts` if it is given: the sum, and what it becomes.

        Only the first `num_rows` need be right.
        """
        factors = self.weight[...] + self.offset if self.offset else self.weight[...]
        if is_native and native.normalizes(x):
            return native.norm(x, delta, factors, None, eps=self.eps, num_rows=num_rows)
        if delta is not None and delta.ndim == 3:
            return add_rms_norm(x, delta, self.weight[...], eps=self.eps)
        x = x if delta is None else x + delta
        x32 = x.astype(jnp.float32)
        x32 = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        if self.offset:
            return x, (x32 * (self.weight[...].astype(jnp.float32) + self.offset)).astype(x.dtype)
        return x, self.weight[...] * x32.astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer normalisation over the features, computed in float32 with eps 1e-5."""

    def __init__(self, features: int, *, affine: bool, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.ones((features,), dtype)) if affine else None
        self.bias = nnx.Param(jnp.zeros((features,), dtype)) if affine else None

    def __call__(
        self,
        x: jax.Array,
        delta: jax.Array | None = None,
        num_rows: jax.Array | None = None,
        *,
        is_native: bool = False,
    ) -> tuple[jax.Array, jax.Array]:
        """`x` [T, features], plus `delta` like it if it is given: the sum, and what it becomes.

        Only the first `num_rows` need be right.
        """
        weight = None if self.weight is None else self.weight[...]
        bias = None if self.bias is None else self.bias[...]
        if is_native and weight is not None and native.normalizes(x):
            return native.norm(x, delta, weight, bias, eps=_LAYER_NORM_EPS, num_rows=num_rows)
        x = x if delta is None else x + delta
        x32 = x.astype(jnp.float32)
        centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        y = centred * lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + _LAYER_NORM_EPS)
        if weight is not None and bias is not None:
            y = y * weight.astype(jnp.float32) + bias.astype(jnp.float32)
        return x, y.astype(x.dtype)
