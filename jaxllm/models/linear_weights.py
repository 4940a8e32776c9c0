"""Weights that activations are multiplied by, as they are held: their arrays, and how these multiply.

no codes        the array, 16 or 32 bits                              on CPUs in float32: `Panels`
int8 by int8    `Int8`: codes with a scale for each output, and activations rounded to int8 as well, row
                by row, by 1 / 127 of their largest (the rounding of vLLM)      on CPUs: `Int8Panels`
other codes     `Coded`: of 8 or 4 bits, integers or floats, with scales for groups of inputs; they
                become numbers again when they are multiplied                   on CPUs: `CodedPanels`
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.pallas_kernels import native

STATIC: Any = {"static": True}
"""Metadata of a field that is no array."""

# Up to this many rows `weight @ x.T` was mostly faster than `x @ weight.T` on a CPU (docs/architecture.md);
# on GPUs the two are the same call.
_MAX_ROWS_WEIGHT_FIRST = 128


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
        """See `Weight.multiply`; all is float32."""
        return native.linear(x, self.panels, self.shape[0], num_rows, bias=bias, relu=relu)

    def rows(self, ids: jax.Array) -> jax.Array:
        """See `Weight.rows`."""
        return native.unpacked_rows(self.panels, ids).astype(self.dtype)

    def portable(self) -> jax.Array:
        """The array [out, in]."""
        return self.rows(jnp.arange(self.shape[0]))


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
