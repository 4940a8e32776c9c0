"""Weights held in 8 or 4 bits: their codes and scales, and how they multiply."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm import pallas_kernels
from jaxllm.models.codes import CODES, decoded, float8_codes, in_codes, per_byte, rounded
from jaxllm.models.linear_weights import STATIC, Weight, product
from jaxllm.pallas_kernels import native, products
from jaxllm.pallas_kernels.tiles import multiplies_float8


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
    dtype: str = dataclasses.field(metadata=STATIC)

    @classmethod
    def quantised(cls, weight: jax.Array) -> Self:
        """A matrix [out, in] rounded to nearest, each output by 1 / 127 of its largest number."""
        return cls(*rounded(weight), weight.dtype.name)

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
        codes, units = rounded(x)
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
    shape: tuple[int, int] = dataclasses.field(metadata=STATIC)
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
    kind: str = dataclasses.field(metadata=STATIC)
    rounds: str = dataclasses.field(metadata=STATIC)
    dtype: str = dataclasses.field(metadata=STATIC)

    @property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]
        """Of the matrix."""
        out, width = self.codes.shape
        return out, width * per_byte(self.kind)

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
        x = in_codes(x, self.rounds, self.inputs)
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
            codes, units = float8_codes(x, self.rounds, self.inputs)
            if x.shape[0] <= _MAX_ROWS_OF_FLOAT8:
                return products.coded_product(
                    codes[:, 0], self.codes, self.scales, kind=self.kind, units=units[:, 0, 0]
                )
            dimensions = (((1,), (1,)), ((), ()))
            y = lax.dot_general(codes[:, 0], self.codes, dimensions, preferred_element_type=jnp.float32)
            return y * units[:, 0] * self.scales[:, 0]
        x = in_codes(x, self.rounds, self.inputs)
        arrays = self.codes, self.scales, self.offsets
        return products.coded_product(x, *arrays, kind=self.kind, out_dtype=jnp.float32)

    def _numbers(self, ids: Any) -> jax.Array:
        """Rows of the matrix, float32, group by group."""
        codes, scales = self.codes[ids], self.scales[ids][:, :, None]
        raw = decoded(codes, self.kind).reshape(*scales.shape[:2], -1) * scales
        raw = raw if self.offsets is None else raw + self.offsets[ids][:, :, None]
        return raw.reshape(scales.shape[0], -1)

    def for_cpu(self) -> Weight:
        """In panels, if it is of float32."""
        if self.dtype != "float32" or native.why_not(1, 1, native.LANES, native.LANES) is not None:
            return self
        if (self.shape[1] // self.scales.shape[1]) % per_byte(self.kind):
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
    kind: str = dataclasses.field(metadata=STATIC)
    rounds: str = dataclasses.field(metadata=STATIC)
    shape: tuple[int, int] = dataclasses.field(metadata=STATIC)
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
        x = in_codes(x if self.order is None else x[:, self.order], self.rounds, self.inputs)
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


_UNITS = {"e4m3": 2.0**-8, "fp4": 2.0**-14}  # what native kernels see in place of 1


_MAX_ROWS_OF_FLOAT8 = 64
"""For more rows XLA's library multiplies e4m3: Triton has no products of it that are as fast."""


def _has_kernel(x: jax.Array) -> bool:
    """Whether Triton's kernel multiplies these rows; programs for any number of rows have none."""
    return isinstance(x.shape[0], int) and pallas_kernels.default_implementation() == "triton"


def _ended(y: jax.Array, bias: jax.Array | None, relu: bool, dtype: jnp.dtype) -> jax.Array:
    """A product of float32 with all that `Weight.multiply` does to it."""
    y = y if bias is None else y + bias
    return (jax.nn.relu(y) if relu else y).astype(dtype)
