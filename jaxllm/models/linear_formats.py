"""Which formats weights that activations are multiplied by are held in.

A `LinearFormat` makes a `Weight` of a checkpoint's matrix, or leaves it the array that it is. Layers,
loading, memory planning and programs ask the weight, and nothing else knows formats.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.models.coded_weights import Coded, Int8
from jaxllm.models.codes import LARGEST, LEAST, encoded
from jaxllm.models.linear_weights import Weight, for_cpu
from jaxllm.models.weight_parts import Fused
from jaxllm.pallas_kernels.numbers import largest


@dataclasses.dataclass(frozen=True)
class LinearFormat:
    """How one kind of weights is held.

    Args:
        kind: of codes, one of `CODES`; "" for none.
        group: inputs that have a scale together; 0 for all of an output.
        rounds: how activations are rounded, one of `codes.ROUNDS`.
        has_offsets: whether codes have offsets, as those of an asymmetric quantisation.
        is_ordered: whether inputs go in an order of their own, as with GPTQ's activation order.
        is_native: whether it is for native products, where these take it.
        stored: of no codes, what native products hold in place of float32: "bfloat16" or "float16", of which
            a checkpoint's numbers are; "" for float32.
        parts: instead of all else but that, rows and the formats of these, if they differ.
    """

    kind: str = ""
    group: int = 0
    rounds: str = ""
    has_offsets: bool = False
    is_ordered: bool = False
    is_native: bool = False
    stored: str = ""
    parts: tuple[tuple[int, LinearFormat], ...] = ()

    @property
    def name(self) -> str:
        """For people, and for names of profiles."""
        if self.parts:
            return "-".join(dict.fromkeys(one.name for _, one in self.parts if one.name))
        group = f"-g{self.group}" if self.group else ""
        return f"{self.kind or self.stored}{group}{f'-a{self.rounds}' if self.rounds else ''}"

    @property
    def cost_name(self) -> str:
        """Of `jaxllm.predictors.base.WEIGHT_FORMATS`, the one that costs as much; "auto" for no codes."""
        if self.parts:
            names = [one.cost_name for rows, one in self.parts for _ in range(rows)]
            return max(set(names), key=names.count)
        if self.kind in ("int4", "fp4"):
            return "int4_weight"
        if self.kind == "int8":
            return "int8" if self.rounds.startswith("int8") else "int8_weight"
        if self.kind and not self.rounds:
            return "int8_weight"
        if self.kind:
            return "fp8_block" if self.rounds == "fp8_128" else "fp8"
        return self.stored or "auto"

    def make(self, weight: jax.Array | Weight) -> jax.Array | Weight:
        """The weight in this format: of a matrix [out, in], or of what a checkpoint holds in it already."""
        found: Any = weight
        if not isinstance(weight, Weight) and self.parts:
            ends = list(itertools.accumulate(rows for rows, _ in self.parts))
            pieces = jnp.split(weight, ends[:-1])
            found = Fused(tuple(one.make(piece) for piece, (_, one) in zip(pieces, self.parts, strict=True)))
        elif not isinstance(weight, Weight) and self.kind:
            found = _rounded(self, weight)
        return for_cpu(found, self.stored) if self.is_native else found

    def _coded(self, weight: jax.Array) -> Coded:
        """Round to nearest, each group by its largest number, or of int4 so that both ends fit."""
        out, width = weight.shape
        parts = weight.astype(jnp.float32).reshape(out, -1, self.group_of(width))
        low, high = -parts.min(axis=2), parts.max(axis=2)
        ends = (8.0, 7.0) if self.kind == "int4" else (LARGEST[self.kind],) * 2
        scales = jnp.maximum(jnp.maximum(low / ends[0], high / ends[1]), LEAST / 127)
        scales = scales + 0 * largest(parts, 2)  # NaN where a number is not finite
        codes = encoded((parts / scales[:, :, None]).reshape(out, width), self.kind)
        offsets = jnp.zeros_like(scales) if self.has_offsets else None
        order = jnp.arange(width) if self.is_ordered else None
        inputs = jnp.ones(2) if self.rounds.endswith("static") else None
        arrays = codes, scales, offsets, order, inputs
        return Coded(*arrays, self.kind, self.rounds, weight.dtype.name)

    def group_of(self, width: int) -> int:
        """Inputs of a group where there are `width`: `group`, or a half or a quarter if that fits, or all."""
        sizes = (self.group, self.group // 2, self.group // 4) if self.group else ()
        whole = (size for size in sizes if (size >= 16 or size == self.group) and width % size == 0)
        return next(whole, width)

    @property
    def has_stored_inputs(self) -> bool:
        """Whether inputs are rounded by scales that only a checkpoint has."""
        return self.rounds.endswith("static") or any(one.has_stored_inputs for _, one in self.parts)

    def why_not(self, width: int) -> str | None:
        """What keeps matrices of so many inputs from this format; None if nothing does."""
        if self.kind in ("int4", "fp4") and width % 2:
            return f"{self.kind} has two inputs in a byte, and there are {width}: take int8_weight"
        return None

    def struct(self, weight: jax.ShapeDtypeStruct) -> Any:
        """Shapes and dtypes of what `make` gives."""
        return jax.eval_shape(self.make, weight)

    @property
    def numbers(self) -> frozenset[str]:
        """Of native products: what `native.shape.LinearShape` calls them."""
        if self.parts:
            return frozenset().union(*(one.numbers for _, one in self.parts))
        if not self.kind:
            return frozenset({self.stored or "float32"})
        return frozenset({"int8" if self.rounds == "int8" else f"code_{self.kind}"})


@functools.partial(jax.jit, static_argnums=0)
def _rounded(held: LinearFormat, weight: jax.Array) -> Weight:
    """A matrix as codes; in one program, so that no copies of it are made on the way."""
    return Int8.quantised(weight) if held.rounds == "int8" else held._coded(weight)


QUANTIZATIONS = {
    "int8": LinearFormat("int8", rounds="int8"),
    "int8_weight": LinearFormat("int8"),
    "int4_weight": LinearFormat("int4", group=128),
    "fp8": LinearFormat("e4m3", rounds="fp8"),
}
"""Formats that matrices of 16 or 32 bits may be rounded to, by the names of `quantization`."""


@dataclasses.dataclass(frozen=True)
class LinearFormats:
    """The formats of a model's linear weights.

    Args:
        default: of those that are not named.
        others: names, and the formats of these.
        is_native: whether they are for native products.
    """

    default: LinearFormat = LinearFormat()
    others: tuple[tuple[str, LinearFormat], ...] = ()
    is_native: bool = False

    def of(self, name: str) -> LinearFormat:
        """Of one weight."""
        found = dict(self.others).get(name, self.default)
        return dataclasses.replace(found, is_native=self.is_native)

    def cost_names(self, names: Sequence[str], head: str) -> tuple[str, str]:
        """Of the weights with these names together, and of the output head; see `LinearFormat.cost_name`."""
        found = [self.of(name).cost_name for name in names if name != head]
        return max(sorted(set(found)), key=found.count), self.of(head).cost_name

    @property
    def suffix(self) -> str:
        """What tells models apart whose weights differ in nothing else: "", or such as "-int8-aint8"."""
        found = {self.default, *(one for _, one in self.others)}
        names = sorted({one.name for one in found} - {""})
        return "".join(f"-{name}" for name in names) + ("-mixed" if names and len(found) > 1 else "")

    @classmethod
    def named(cls, quantization: str, head: str, *, quantize_lm_head: bool = True) -> LinearFormats:
        """All in one of `QUANTIZATIONS`, or in "fp8_block", but perhaps for the output head's."""
        held = LinearFormat("e4m3", 128, "fp8_128") if quantization == "fp8_block" else None
        others = () if quantize_lm_head else ((head, LinearFormat()),)
        return cls(held or QUANTIZATIONS[quantization], others)

    @property
    def products(self) -> list[str]:
        """The numbers of native products."""
        found = self.default.numbers.union(*(one.numbers for _, one in self.others))
        return sorted(found) if self.is_native else []
