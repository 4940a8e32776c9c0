"""Weights that activations are multiplied by, as they are held: their arrays, and how these multiply.

no codes        the array, 16 or 32 bits                              on CPUs in float32: `Panels`
int8 by int8    `Int8`: codes with a scale for each output, and activations rounded to int8 as well, row
                by row, by 1 / 127 of their largest (the rounding of vLLM)      on CPUs: `Int8Panels`
other codes     `Coded`: of 8 or 4 bits, integers or floats, with scales for groups of inputs; they
                become numbers again when they are multiplied                   on CPUs: `CodedPanels`
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllm import pallas_kernels
from jaxllm.pallas_kernels import native, products
from jaxllm.pallas_kernels.numbers import largest
from jaxllm.pallas_kernels.tiles import multiplies_float8

_STATIC: Any = {"static": True}
# Up to this many rows `weight @ x.T` was mostly faster than `x @ weight.T` on a CPU (docs/architecture.md);
# on GPUs the two are the same call.
_MAX_ROWS_WEIGHT_FIRST = 128
LEAST = 1e-10
"""Of what counts as the largest number of a row."""


class Weight:
    """A matrix `[out, in]` in a format of its own; a pytree of its arrays.

    Attributes:
        shape: of the matrix.
        dtype: that it stands for, and its rows and dense forms have; the name of one.
        is_native: whether its products are native calls.
    """

    shape: tuple[int, int]
    dtype: str
    is_native: ClassVar[bool] = False

    def multiply(
        self,
        x: jax.Array,
        num_rows: jax.Array | None = None,
        *,
        bias: jax.Array | None = None,
        relu: bool = False,
        out_dtype: jnp.dtype | None = None,
    ) -> jax.Array:
        """`x` [T, in], of which `num_rows` are in use, times it, plus `bias` [out] -> [T, out].

        Args:
            x: activations.
            num_rows: int32 scalar; the other rows may hold anything.
            bias: to add.
            relu: whether what is below 0 becomes 0.
            out_dtype: of the result; that of `x` by default.
        """
        raise NotImplementedError

    def rows(self, ids: jax.Array) -> jax.Array:
        """Rows `ids` [n] int32 of the matrix, as those of an embedding -> [n, in]."""
        raise NotImplementedError

    def for_cpu(self) -> Weight:
        """As native kernels take it, where they do."""
        return self

    def portable(self) -> Weight | jax.Array:
        """As every device takes it."""
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Table(Weight):
    """An embedding in the 16 bits of its checkpoint, whose rows are float32.

    Attributes:
        values: [out, in] bfloat16 or float16.
    """

    values: jax.Array
    dtype: ClassVar[str] = "float32"  # type: ignore[misc]

    @property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]
        """See `Weight`."""
        return self.values.shape  # type: ignore[return-value]

    def rows(self, ids: jax.Array) -> jax.Array:
        """See `Weight.rows`."""
        return self.values.at[ids].get(mode="clip").astype(self.dtype)

    def portable(self) -> jax.Array:
        """The array [out, in] in float32."""
        return self.values.astype(self.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Panels(Weight):
    """float32 in panels for native products.

    Attributes:
        panels: [ceil(out / 32), in, 32] float32, or where all numbers are of these bfloat16 or float16.
    """

    panels: jax.Array
    shape: tuple[int, int] = dataclasses.field(metadata=_STATIC)
    dtype: ClassVar[str] = "float32"  # type: ignore[misc]
    is_native: ClassVar[bool] = True

    def multiply(
        self,
        x: jax.Array,
        num_rows: jax.Array | None = None,
        *,
        bias: jax.Array | None = None,
        relu: bool = False,
        out_dtype: jnp.dtype | None = None,
    ) -> jax.Array:
        """See `Weight.multiply`; all is float32."""
        return native.linear(x, self.panels, self.shape[0], num_rows, bias=bias, relu=relu)

    def rows(self, ids: jax.Array) -> jax.Array:
        """See `Weight.rows`."""
        return native.unpacked_rows(self.panels, ids).astype(self.dtype)

    def portable(self) -> jax.Array:
        """The array [out, in]."""
        return self.rows(jnp.arange(self.shape[0]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8(Weight):
    """Codes of eight bits with a scale for each output; activations are rounded to int8 row by row.

    Attributes:
        codes: [out, in] int8.
        scales: [out] float32; the matrix is `codes * scales[:, None]`.
    """

    codes: jax.Array
    scales: jax.Array
    dtype: str = dataclasses.field(metadata=_STATIC)

    @classmethod
    def quantised(cls, weight: jax.Array) -> Self:
        """A matrix [out, in] rounded to nearest, each output by 1 / 127 of its largest number."""
        return cls(*_rounded(weight), weight.dtype.name)

    @property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]
        """Of the matrix."""
        return self.codes.shape  # type: ignore[return-value]

    def multiply(
        self,
        x: jax.Array,
        num_rows: jax.Array | None = None,
        *,
        bias: jax.Array | None = None,
        relu: bool = False,
        out_dtype: jnp.dtype | None = None,
    ) -> jax.Array:
        """See `Weight.multiply`; the products are summed exactly, in int32."""
        codes, units = _rounded(x)
        if _has_kernel(x):
            y = products.coded_product(codes, self.codes, self.scales[:, None], kind="int8", units=units)
            return _ended(y, bias, relu, x.dtype if out_dtype is None else out_dtype)
        dimensions = (((1,), (1,)), ((), ()))
        exact = lax.dot_general(codes, self.codes, dimensions, preferred_element_type=jnp.int32)
        y = exact.astype(jnp.float32) * units[:, None] * self.scales
        return _ended(y, bias, relu, x.dtype if out_dtype is None else out_dtype)

    def rows(self, ids: jax.Array) -> jax.Array:
        """See `Weight.rows`."""
        codes = self.codes.at[ids].get(mode="clip").astype(jnp.float32)
        return (codes * self.scales.at[ids].get(mode="clip")[:, None]).astype(self.dtype)

    def for_cpu(self) -> Weight:
        """In panels, if it is of float32 and of a size that native kernels take."""
        if self.dtype != "float32" or not native.packs_codes(self.shape[1]):
            return self
        panels, sums = native.pack_codes(self.codes)
        scales = jnp.pad(self.scales, (0, sums.shape[0] - self.shape[0]))
        return Int8Panels(panels, scales, sums, self.shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Panels(Weight):
    """`Int8` for native products.

    Attributes:
        panels: [ceil(out / 32), in / 4, 32, 4] int8.
        scales: [32 * ceil(out / 32)] float32.
        sums: as `scales`, int32: 128 times the sum of each output's codes.
    """

    panels: jax.Array
    scales: jax.Array
    sums: jax.Array
    shape: tuple[int, int] = dataclasses.field(metadata=_STATIC)
    dtype: ClassVar[str] = "float32"  # type: ignore[misc]
    is_native: ClassVar[bool] = True

    def multiply(
        self,
        x: jax.Array,
        num_rows: jax.Array | None = None,
        *,
        bias: jax.Array | None = None,
        relu: bool = False,
        out_dtype: jnp.dtype | None = None,
    ) -> jax.Array:
        """See `Int8.multiply`."""
        arrays = self.panels, self.scales, self.sums
        return native.linear_int8(x, *arrays, self.shape[0], num_rows, bias=bias, relu=relu)

    def rows(self, ids: jax.Array) -> jax.Array:
        """See `Weight.rows`."""
        return native.unpacked_codes(self.panels, ids).astype(jnp.float32) * self.scales[ids][:, None]

    def portable(self) -> Int8:
        """The codes as a matrix."""
        count = self.shape[0]
        codes = native.unpacked_codes(self.panels, jnp.arange(count))
        return Int8(codes, self.scales[:count], self.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Coded(Weight):
    """Codes of eight or four bits with scales for groups of inputs: `code * scale + offset`.

    Attributes:
        codes: [out, in] int8, float8_e4m3fn or float8_e5m2; or [out, in / 2] uint8, two codes of four bits in
            each, the first in the lower half.
        scales: [out, groups] float32, each for as many inputs one after another.
        offsets: like them; None for 0.
        order: [in] int32: the inputs, group by group; None if they are in order.
        kind: of the codes, one of `CODES`.
        inputs: [2] float32: scale and zero point of activations that are rounded by given ones; else None.
        rounds: how activations are rounded, one of `ROUNDS`.
    """

    codes: jax.Array
    scales: jax.Array
    offsets: jax.Array | None
    order: jax.Array | None
    inputs: jax.Array | None
    kind: str = dataclasses.field(metadata=_STATIC)
    rounds: str = dataclasses.field(metadata=_STATIC)
    dtype: str = dataclasses.field(metadata=_STATIC)

    @property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]
        """Of the matrix."""
        out, width = self.codes.shape
        return out, width * _per_byte(self.kind)

    def multiply(
        self,
        x: jax.Array,
        num_rows: jax.Array | None = None,
        *,
        bias: jax.Array | None = None,
        relu: bool = False,
        out_dtype: jnp.dtype | None = None,
    ) -> jax.Array:
        """See `Weight.multiply`; without Triton the matrix is made of the codes, for each product."""
        x = x if self.order is None else x[:, self.order]
        is_covered = products.covers(self.shape[1], self.scales.shape[1], self.kind)
        if is_covered and _has_kernel(x):
            return _ended(self._on_gpu(x), bias, relu, x.dtype if out_dtype is None else out_dtype)
        x = _in_codes(x, self.rounds, self.inputs)
        numbers = self._numbers(slice(None)).astype(x.dtype)
        return product(x, numbers, num_rows, bias=bias, relu=relu, out_dtype=out_dtype)

    def rows(self, ids: jax.Array) -> jax.Array:
        """See `Weight.rows`."""
        numbers = self._numbers(ids)
        return (numbers if self.order is None else numbers[:, jnp.argsort(self.order)]).astype(self.dtype)

    def _on_gpu(self, x: jax.Array) -> jax.Array:
        """The product, float32, without a matrix of numbers in memory."""
        are_alike = self.kind == "e4m3" and self.rounds in ("fp8", "fp8_static")
        if are_alike and self.scales.shape[1] == 1 and self.offsets is None and multiplies_float8():
            codes, units = _float8_codes(x, self.rounds, self.inputs)
            if x.shape[0] <= _MAX_ROWS_OF_FLOAT8:
                return products.coded_product(
                    codes[:, 0], self.codes, self.scales, kind=self.kind, units=units[:, 0, 0]
                )
            dimensions = (((1,), (1,)), ((), ()))
            y = lax.dot_general(codes[:, 0], self.codes, dimensions, preferred_element_type=jnp.float32)
            return y * units[:, 0] * self.scales[:, 0]
        x = _in_codes(x, self.rounds, self.inputs)
        arrays = self.codes, self.scales, self.offsets
        return products.coded_product(x, *arrays, kind=self.kind, out_dtype=jnp.float32)

    def _numbers(self, ids: Any) -> jax.Array:
        """Rows of the matrix, float32, group by group."""
        codes, scales = self.codes[ids], self.scales[ids][:, :, None]
        raw = _decoded(codes, self.kind).reshape(*scales.shape[:2], -1) * scales
        raw = raw if self.offsets is None else raw + self.offsets[ids][:, :, None]
        return raw.reshape(scales.shape[0], -1)

    def for_cpu(self) -> Weight:
        """In panels, if it is of float32."""
        if self.dtype != "float32" or native.why_not(1, 1, native.LANES, native.LANES) is not None:
            return self
        if (self.shape[1] // self.scales.shape[1]) % _per_byte(self.kind):
            return self
        codes = (
            self.codes if self.codes.dtype == jnp.uint8 else lax.bitcast_convert_type(self.codes, jnp.uint8)
        )
        scales = native.pack(self.scales * (1 / _UNITS.get(self.kind, 1.0)))
        offsets = None if self.offsets is None else native.pack(self.offsets)
        arrays = native.pack(codes), scales, offsets, self.order, self.inputs
        return CodedPanels(*arrays, self.kind, self.rounds, self.shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CodedPanels(Weight):
    """`Coded` for native products.

    Attributes:
        panels: [ceil(out / 32), in or in / 2, 32] uint8, the bytes of the codes.
        scales: [ceil(out / 32), groups, 32] float32.
        offsets: like them; None for 0.
        order: as of `Coded`, as are `inputs`, `kind` and `rounds`.
    """

    panels: jax.Array
    scales: jax.Array
    offsets: jax.Array | None
    order: jax.Array | None
    inputs: jax.Array | None
    kind: str = dataclasses.field(metadata=_STATIC)
    rounds: str = dataclasses.field(metadata=_STATIC)
    shape: tuple[int, int] = dataclasses.field(metadata=_STATIC)
    dtype: ClassVar[str] = "float32"  # type: ignore[misc]
    is_native: ClassVar[bool] = True

    def multiply(
        self,
        x: jax.Array,
        num_rows: jax.Array | None = None,
        *,
        bias: jax.Array | None = None,
        relu: bool = False,
        out_dtype: jnp.dtype | None = None,
    ) -> jax.Array:
        """See `Weight.multiply`."""
        x = _in_codes(x if self.order is None else x[:, self.order], self.rounds, self.inputs)
        arrays, kind = (self.panels, self.scales, self.offsets), f"code_{self.kind}"
        return native.linear_codes(x, *arrays, self.shape[0], num_rows, kind=kind, bias=bias, relu=relu)

    def rows(self, ids: jax.Array) -> jax.Array:
        """See `Weight.rows`."""
        return self._part(ids).rows(jnp.arange(ids.shape[0]))

    def portable(self) -> Coded:
        """The codes as a matrix."""
        return self._part(jnp.arange(self.shape[0]))

    def _part(self, ids: jax.Array) -> Coded:
        """Some rows."""
        codes = native.unpacked_rows(self.panels, ids)
        if (dtype := CODES[self.kind]) != jnp.uint8:
            codes = lax.bitcast_convert_type(codes, dtype)
        scales = native.unpacked_rows(self.scales, ids) * _UNITS.get(self.kind, 1.0)
        offsets = None if self.offsets is None else native.unpacked_rows(self.offsets, ids)
        arrays = codes, scales, offsets, self.order, self.inputs
        return Coded(*arrays, self.kind, self.rounds, self.dtype)


CODES: dict[str, Any] = {
    "int8": jnp.int8,
    "e4m3": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
    "int4": jnp.uint8,
    "fp4": jnp.uint8,
}
"""Kinds of codes, and the dtype of arrays of them; of those of four bits an array has two in each number.

"int4" is 0 to 15 for -8 to 7, "fp4" a sign, two bits of exponent and one of mantissa (OCP's e2m1).
"""
_UNITS = {"e4m3": 2.0**-8, "fp4": 2.0**-14}  # what native kernels see in place of 1
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = {"int8": 127.0, "e4m3": 448.0, "e5m2": 57344.0, "fp4": 6.0}
"""That a code stands for."""


def _per_byte(kind: str) -> int:
    return 2 if CODES[kind] == jnp.uint8 else 1


def _decoded(codes: jax.Array, kind: str) -> jax.Array:
    """What codes [n, width] stand for, float32; two for each of four bits."""
    if kind in ("int8", "e4m3", "e5m2"):
        return codes.astype(jnp.float32)
    halves = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1)
    if kind == "int4":
        return halves.astype(jnp.float32) - 8
    return jnp.where(halves & 8, -1, 1) * jnp.asarray(_E2M1, jnp.float32)[halves & 7]


def encoded(numbers: jax.Array, kind: str) -> jax.Array:
    """The nearest codes of numbers [n, width] that a code may stand for, as arrays of `CODES` have them."""
    if kind in ("e4m3", "e5m2"):
        return numbers.astype(CODES[kind])
    if kind == "int8":
        return jnp.round(numbers).astype(jnp.int8)
    if kind == "int4":
        halves = jnp.clip(jnp.round(numbers) + 8, 0, 15)
    else:
        middles = jnp.asarray([(one + other) / 2 for one, other in itertools.pairwise(_E2M1)])
        halves = jnp.searchsorted(middles, jnp.abs(numbers)) + 8 * (numbers < 0)
    halves = halves.astype(jnp.uint8)
    return halves[:, ::2] | (halves[:, 1::2] << 4)


def _rounded(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows [n, in] as int8 codes, and what a code of 1 stands for, [n] float32."""
    exact = x.astype(jnp.float32)
    units = jnp.maximum(largest(exact, 1), LEAST) * (1 / 127)
    return jnp.round(exact / units[:, None]).astype(jnp.int8), units


_MAX_ROWS_OF_FLOAT8 = 64
"""For more rows XLA's library multiplies e4m3: Triton has no products of it that are as fast."""

ROUNDS = ("", "int8", "int8_static", "fp8", "fp8_128", "fp8_static")
"""How activations are rounded.

Not at all; to int8, each row by 1 / 127 of its largest (`Int8`), or by a given scale and zero point; to e4m3,
each row or each 128 numbers of it by 1 / 448 of their largest, or by a given scale.
"""


def _in_codes(x: jax.Array, rounds: str, inputs: jax.Array | None) -> jax.Array:
    """Rows [n, in] rounded as `ROUNDS` says, in their dtype."""
    if not rounds:
        return x
    exact = x.astype(jnp.float32)
    if inputs is not None and rounds == "int8_static":
        codes = jnp.clip(jnp.round(exact / inputs[0]) + inputs[1], -128, 127)
        return ((codes - inputs[1]) * inputs[0]).astype(x.dtype)
    codes, units = _float8_codes(x, rounds, inputs)
    return (codes.astype(jnp.float32) * units).reshape(x.shape).astype(x.dtype)


def _float8_codes(x: jax.Array, rounds: str, inputs: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Rows [n, in] as e4m3 codes [n, parts, in / parts], and what a code of 1 stands for, [n, parts, 1]."""
    size = 128 if rounds == "fp8_128" else x.shape[1]
    parts = x.astype(jnp.float32).reshape(x.shape[0], x.shape[1] // size, size)
    most = jnp.maximum(largest(parts, 2, keepdims=True), LEAST)
    units = most / LARGEST["e4m3"] if inputs is None else jnp.full_like(most, inputs[0])
    codes = jnp.clip(parts / units, -LARGEST["e4m3"], LARGEST["e4m3"]).astype(jnp.float8_e4m3fn)
    return codes, units


def _has_kernel(x: jax.Array) -> bool:
    """Whether Triton's kernel multiplies these rows; programs for any number of rows have none."""
    return isinstance(x.shape[0], int) and pallas_kernels.default_implementation() == "triton"


def _ended(y: jax.Array, bias: jax.Array | None, relu: bool, dtype: jnp.dtype) -> jax.Array:
    """A product of float32 with all that `Weight.multiply` does to it."""
    y = y if bias is None else y + bias
    return (jax.nn.relu(y) if relu else y).astype(dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fused(Weight):
    """Matrices of formats of their own, one above another, as those of a fused layer.

    Attributes:
        parts: arrays [out of it, in], or weights.
    """

    parts: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]
        """Of the matrix."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def dtype(self) -> str:  # type: ignore[override]
        """That the matrix stands for."""
        return str(jnp.dtype(self.parts[0].dtype))

    @property
    def is_native(self) -> bool:  # type: ignore[override]
        """Whether all products are native."""
        return all(isinstance(part, Weight) and part.is_native for part in self.parts)

    def multiply(
        self,
        x: jax.Array,
        num_rows: jax.Array | None = None,
        *,
        bias: jax.Array | None = None,
        relu: bool = False,
        out_dtype: jnp.dtype | None = None,
    ) -> jax.Array:
        """See `Weight.multiply`."""
        y = jnp.concatenate([product(x, part, num_rows, out_dtype=out_dtype) for part in self.parts], axis=1)
        y = y if bias is None else y + bias
        return jax.nn.relu(y) if relu else y

    def for_cpu(self) -> Weight:
        """Each as native kernels take it, where they do."""
        return Fused(tuple(for_cpu(part) for part in self.parts))

    def portable(self) -> Weight:
        """Each as every device takes it."""
        return Fused(tuple(part.portable() if isinstance(part, Weight) else part for part in self.parts))


def for_cpu(weight: Any, stored: str = "") -> Any:
    """A matrix or weight as native kernels take it, where they do; a matrix in panels of dtype `stored`."""
    if isinstance(weight, Weight):
        return weight.for_cpu()
    if not native.packs(jax.ShapeDtypeStruct(weight.shape, "float32" if stored else weight.dtype)):
        return weight.astype("float32") if stored else weight
    out, width = weight.shape
    return Panels(native.pack(weight.astype(stored) if stored else weight), (out, width))


def product(
    x: jax.Array,
    weight: jax.Array | Weight,
    num_rows: jax.Array | None = None,
    *,
    bias: jax.Array | None = None,
    relu: bool = False,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """`x` [T, in] times `weight` [out, in], plus `bias` [out] -> [T, out]; with `relu` at least 0.

    Rows from `num_rows` on may hold anything.
    """
    if isinstance(weight, Weight):
        return weight.multiply(x, num_rows, bias=bias, relu=relu, out_dtype=out_dtype)
    options: Any = {"precision": precision_of(x.dtype), "preferred_element_type": out_dtype}
    dimensions = (((1,), (1,)), ((), ()))
    num_known = x.shape[0]  # no integer in a program for any number of rows
    if isinstance(num_known, int) and num_known <= _MAX_ROWS_WEIGHT_FIRST:
        y = lax.dot_general(weight, x, dimensions, **options).T
    else:
        y = lax.dot_general(x, weight, dimensions, **options)
    y = y if bias is None else y + bias
    return jax.nn.relu(y) if relu else y


def precision_of(dtype: jnp.dtype) -> lax.Precision:
    """Of products of such numbers."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def stacked(weights: Sequence[Any]) -> Any:
    """Weights of one format above one another, as those of fused layers that share their inputs."""
    first = weights[0]
    if not isinstance(first, Coded):
        return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *weights)
    bare = [dataclasses.replace(one, order=None, inputs=None) for one in weights]
    whole = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *bare)
    return dataclasses.replace(whole, order=first.order, inputs=first.inputs)


def of_outputs(weight: Any, rows: np.ndarray) -> Any:
    """Some outputs of a weight [out, in], or of a bias [out]."""
    if not isinstance(weight, Coded):
        return jax.tree.map(lambda array: array[rows], weight)
    bare = dataclasses.replace(weight, order=None, inputs=None)
    taken = jax.tree.map(lambda array: array[rows], bare)
    return dataclasses.replace(taken, order=weight.order, inputs=weight.inputs)


def of_inputs(weight: Any, start: int, stop: int) -> Any:
    """Some inputs of a weight [out, in], one after another.

    Raises:
        ValueError: codes do not come apart there; says why.
    """
    if not isinstance(weight, Weight):
        return weight[:, start:stop]
    if isinstance(weight, Int8):
        return dataclasses.replace(weight, codes=weight.codes[:, start:stop])
    if not isinstance(weight, Coded) or weight.order is not None:
        raise ValueError("inputs are in an order of their own, or of several formats")
    width = weight.shape[1]

    def part(array: jax.Array) -> jax.Array:
        if array.shape[1] == 1:
            return array
        if start * array.shape[1] % width or stop * array.shape[1] % width:
            raise ValueError(f"{width // array.shape[1]} inputs belong together")
        return array[:, start * array.shape[1] // width : stop * array.shape[1] // width]

    offsets = None if weight.offsets is None else part(weight.offsets)
    return dataclasses.replace(weight, codes=part(weight.codes), scales=part(weight.scales), offsets=offsets)
