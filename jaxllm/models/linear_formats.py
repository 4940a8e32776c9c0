"""How weights that activations are multiplied by are held: their arrays, and how these multiply.

A `LinearFormat` makes a `Weight` of a checkpoint's matrix, or leaves it the array that it is. Layers,
loading, memory planning and programs ask the weight, and nothing else knows formats.

    plain      the array, 16 or 32 bits        on CPUs in float32: `Panels`
    int8       `Int8`: codes and a scale for each output; activations are rounded to int8 as well, row by row,
               by 1 / 127 of their largest (the rounding of vLLM)                  on CPUs: `Int8Panels`
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.pallas_kernels import native

_STATIC: Any = {"static": True}
_LEAST = 1e-10  # of what is the largest of a row


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
class Panels(Weight):
    """float32 in panels for native products.

    Attributes:
        panels: [ceil(out / 32), in, 32] float32.
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
        return native.unpacked_rows(self.panels, ids)

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
        dimensions = (((1,), (1,)), ((), ()))
        exact = lax.dot_general(codes, self.codes, dimensions, preferred_element_type=jnp.int32)
        y = exact.astype(jnp.float32) * units[:, None] * self.scales
        y = y if bias is None else y + bias
        y = jax.nn.relu(y) if relu else y
        return y.astype(x.dtype if out_dtype is None else out_dtype)

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


def _rounded(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows [n, in] as int8 codes, and what a code of 1 stands for, [n] float32."""
    exact = x.astype(jnp.float32)
    units = jnp.maximum(jnp.max(jnp.abs(exact), axis=1), _LEAST) / 127
    return jnp.round(exact / units[:, None]).astype(jnp.int8), units


@dataclasses.dataclass(frozen=True)
class LinearFormat:
    """How one kind of weights is held.

    Args:
        name: one of `FORMATS`.
        is_native: whether it is for native products, where these take it.
    """

    name: str = "plain"
    is_native: bool = False

    def make(self, weight: jax.Array | Weight) -> jax.Array | Weight:
        """The weight in this format: of a matrix [out, in], or of what a checkpoint holds in it already."""
        quantise = FORMATS[self.name]
        found = weight if isinstance(weight, Weight) or quantise is None else quantise(weight)
        if not self.is_native:
            return found
        if isinstance(found, Weight):
            return found.for_cpu()
        if not native.packs(found):
            return found
        out, width = found.shape
        return Panels(native.pack(found), (out, width))

    def struct(self, weight: jax.ShapeDtypeStruct) -> Any:
        """Shapes and dtypes of what `make` gives."""
        return jax.eval_shape(self.make, weight)

    @property
    def numbers(self) -> str:
        """Of native products: "float32" or "int8"."""
        return "float32" if self.name == "plain" else self.name


FORMATS: dict[str, Callable[[jax.Array], Weight] | None] = {"plain": None, "int8": Int8.quantised}
"""What quantises a matrix, by the name of the format."""


def stacked(weights: Sequence[Any]) -> Any:
    """Weights of one format above one another, as those of fused layers."""
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *weights)


@dataclasses.dataclass(frozen=True)
class LinearFormats:
    """The formats of a model's linear weights.

    Args:
        default: of those that are not named.
        others: names, and the formats of these.
        is_native: whether they are for native products.
    """

    default: str = "plain"
    others: tuple[tuple[str, str], ...] = ()
    is_native: bool = False

    def of(self, name: str) -> LinearFormat:
        """Of one weight."""
        return LinearFormat(dict(self.others).get(name, self.default), self.is_native)

    @property
    def suffix(self) -> str:
        """What tells models apart whose weights differ in nothing else: "", or such as "-int8"."""
        names = sorted({self.default, *(name for _, name in self.others)} - {"plain"})
        return "".join(f"-{name}" for name in names) + ("-mixed" if names and self.others else "")

    @property
    def products(self) -> list[str]:
        """The numbers of native products."""
        names = sorted({self.default, *(name for _, name in self.others)})
        return [LinearFormat(name).numbers for name in names] if self.is_native else []
