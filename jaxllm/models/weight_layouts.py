"""Layouts of quantised weights in checkpoints, and the arithmetic that gives the weights back.

A layout names the arrays that stand in a checkpoint for a weight of `[out, in]`. Nothing here reads files.
`published_layouts` has those that there are.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from jaxllm.errors import WeightsError
from jaxllm.models.coded_weights import Coded, Int8
from jaxllm.models.codes import E2M1
from jaxllm.models.linear_formats import LinearFormat
from jaxllm.models.linear_weights import Weight

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]
Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = Mapping[str, Shape]
Floats: TypeAlias = npt.NDArray[np.float32]

FLOATS = ("F32", "BF16", "F16")
INTEGERS = ("I32", "I64")
OF_DTYPES = {"I8": "int8", "F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}
"""Kinds of codes by the dtype of what is stored, as safetensors calls it."""


class Codes(NamedTuple):
    """A weight as codes and scales: `(codes - zeros) * scales`, of the group of each input.

    Attributes:
        kind: one of `codes.CODES`.
        codes: [out, in]: int8, float8, or nibbles as uint8, 0 to 15 for -8 to 7 or for floats of four bits.
        scales: [out, groups] float32.
        zeros: like them, of numbers that the codes stand for; None for 0.
        groups: [in], of each input, if they do not lie one after another.
    """

    kind: str
    codes: npt.NDArray[Any]
    scales: Floats
    zeros: npt.NDArray[Any] | None = None
    groups: npt.NDArray[Any] | None = None

    def numbers(self) -> Floats:
        """The weight, float32 [out, in]."""
        width = self.codes.shape[1]
        groups = groups_of(self.groups, width, -(-width // self.scales.shape[1]))
        found = self.codes.astype(np.float32)
        if self.kind == "int4":
            found -= 8
        elif self.kind == "fp4":
            found = (
                np.where(self.codes & 8, -1, 1).astype(np.float32)
                * np.array(E2M1, np.float32)[self.codes & 7]
            )
        if self.zeros is not None:
            found -= self.zeros.astype(np.float32)[:, groups]
        return found * self.scales[:, groups]

    def in_format(self, held: LinearFormat, dtype: str, inputs: Floats | None = None) -> Weight:
        """As an engine holds it, in host memory; `inputs` are scale and zero point of rounded activations.

        Raises:
            ValueError: it has zero points where there can be none.
        """
        codes, scales = self.codes, self.scales
        if held.rounds == "int8":
            if self.zeros is not None and self.zeros.any():
                raise ValueError("zero points of weights whose activations are rounded")
            return Int8(codes, scales[:, 0], dtype)  # type: ignore[arg-type]
        order = None
        if held.is_ordered:
            order = np.argsort(self.groups, kind="stable").astype(np.int32)  # type: ignore[arg-type]
            codes = codes[:, order]
        if self.kind in ("int4", "fp4"):
            codes = codes[:, ::2] | (codes[:, 1::2] << 4)
        offsets = None
        if held.has_offsets:
            zeros = np.zeros_like(scales) if self.zeros is None else self.zeros
            offsets = -(zeros * scales).astype(np.float32)
        arrays: dict[str, Any] = {"codes": codes, "scales": scales, "offsets": offsets}
        arrays |= {"order": order, "inputs": inputs}
        return Coded(**arrays, kind=self.kind, rounds=held.rounds, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """How a weight lies in a checkpoint.

    Args:
        name: for people.
        values: the array of its codes, by the end of its name.
        others: further arrays that must be there.
        optional: arrays that may be there.
        shape: `[out, in]` of the weight, from the shapes of its arrays.
        expected: shapes that each array may have, from those of all and `[out, in]`.
        codes: the weight's, from its arrays and `[out, in]`.
        kind: of the codes, one of `codes.CODES`; "" if the dtype of `values` says it.
        group: inputs of a group, of so many; 0 for all of them.
        kinds: dtypes that each array may have, by safetensors' names.
        aliases: other names of arrays.
        rounds: how activations are rounded, one of `codes.ROUNDS`.
        is_offset: whether codes have offsets even if no zero points are stored.
        unread: arrays that the configuration asks for and that are not used here.
        no_zero: the zero point, as it is stored, that changes nothing.
    """

    name: str
    values: str
    others: tuple[str, ...]
    optional: tuple[str, ...]
    shape: Callable[[Shapes], Shape]
    expected: Callable[[Shapes, int, int], Mapping[str, Sequence[Shape]]]
    codes: Callable[[Arrays, int, int], Codes]
    kind: str
    group: Callable[[int], int]
    kinds: Mapping[str, tuple[str, ...]]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rounds: str = ""
    is_offset: bool = False
    unread: frozenset[str] = frozenset()
    no_zero: int = 0

    def rounding(self, rounds: str, *, is_symmetric: bool = True) -> WeightLayout:
        """The same, of a layer whose activations are rounded."""
        if not rounds.endswith("static"):
            return dataclasses.replace(self, rounds=rounds)
        zero = "input_zero_point"
        others = (*self.others, "input_scale", *(() if is_symmetric else (zero,)))
        kinds = {**self.kinds, "input_scale": FLOATS, zero: ("I8", *INTEGERS, "F8_E4M3")}

        def expected(shapes: Shapes, out: int, width: int) -> Mapping[str, Sequence[Shape]]:
            one = [(), (1,), (1, 1)]
            return {**self.expected(shapes, out, width), "input_scale": one, zero: one}

        return dataclasses.replace(self, rounds=rounds, kinds=kinds, others=others, expected=expected)

    def requiring(self, *ends: str) -> WeightLayout:
        """The same, in which arrays that may be there must be."""
        found = tuple(one for one in self.optional if one in ends)
        optional = tuple(one for one in self.optional if one not in ends)
        return dataclasses.replace(self, others=(*self.others, *found), optional=optional)

    def without(self, *ends: str) -> WeightLayout:
        """The same, in which arrays that may be there are not asked for."""
        return dataclasses.replace(self, optional=tuple(one for one in self.optional if one not in ends))

    def leaving(self, *ends: str) -> WeightLayout:
        """The same, beside which there are arrays that are not used here."""
        return dataclasses.replace(self, unread=self.unread | {*ends})

    def held(
        self, shapes: Shapes, stored: str, out: int, width: int, order: npt.NDArray[Any] | None
    ) -> LinearFormat:
        """The format that an engine holds such a weight in: its codes where it can, else its numbers.

        Args:
            shapes: of its arrays.
            stored: the dtype of `values`, by safetensors' name.
            out: rows of the weight.
            width: inputs of it.
            order: the stored groups of its inputs.
        """
        kind, group = self.kind or OF_DTYPES.get(stored, ""), self.group(width) or width
        zeros = [name for name in shapes if name.endswith(("zero_point", "qzeros")) and name[:5] != "input"]
        groups = order_of(order, width, group)
        is_int8 = kind == "int8" and group == width and groups is None
        is_even = width % group == 0 and (groups is None or (np.bincount(groups) == group).all())
        if (self.rounds == "int8" and not is_int8) or (self.rounds == "fp8_128" and width % 128):
            raise ValueError(
                f"inputs rounded as {self.rounds} to {kind} of {width} inputs, groups of {group}"
            )
        if not is_even or (group % 2 and kind in ("int4", "fp4")):
            if self.rounds:
                raise ValueError(f"inputs rounded as {self.rounds}, and groups that are not of one size")
            return LinearFormat()
        has_offsets = self.rounds != "int8" and (bool(zeros) or self.is_offset)
        return LinearFormat(
            kind, 0 if group == width else group, self.rounds, has_offsets, groups is not None
        )

    @property
    def arrays(self) -> tuple[str, ...]:
        """All that may be there."""
        return (self.values, *self.others, *self.optional, *self.aliases)

    def dequantise(self, arrays: Arrays, out: int, width: int) -> Floats:
        """The weight, float32 `[out, in]`."""
        return self.codes(arrays, out, width).numbers()

    def check(
        self,
        module: str,
        shapes: Shapes,
        kinds: Mapping[str, str],
        names: Mapping[str, str] = types.MappingProxyType({}),
    ) -> Shape:
        """The shape of a module's weight, from the shapes and dtypes of its arrays.

        Args:
            module: whose they are.
            shapes: of the arrays, but for `weight_shape`: what it says.
            kinds: dtypes of the arrays, by safetensors' names.
            names: of the arrays, where they are stored as others.

        Raises:
            WeightsError: arrays are missing, misshapen or of other dtypes; all are named.
        """

        def named(end: str) -> str:
            return names.get(end, f"{module}.{end}")

        strange = [
            f"{named(name)} is {kinds[name]}, expected {' or '.join(self.kinds[name])}"
            for name in kinds
            if kinds[name] not in self.kinds.get(name, (kinds[name],))
        ]
        if strange:
            raise WeightsError(f"of the wrong dtype for the layout {self.name}: {'; '.join(strange)}")
        others = {end: f" (or {alias})" for alias, end in self.aliases.items()}
        required = (self.values, *self.others)
        missing = [f"{module}.{end}{others.get(end, '')}" for end in required if end not in shapes]
        if missing:
            raise WeightsError(f"missing of a weight in the layout {self.name}: {', '.join(missing)}")
        if len(shapes[self.values]) != 2:
            raise WeightsError(
                f"{named(self.values)} has shape {list(shapes[self.values])}: expected two axes"
            )
        out, width = self.shape(shapes)
        try:
            expected = self.expected(shapes, out, width)
        except ValueError as error:
            raise WeightsError(f"{named(self.values)}: {error}") from error
        wrong = []
        for name, allowed in expected.items():
            if name in shapes and shapes[name] not in allowed:
                lists = " or ".join(str(list(one)) for one in dict.fromkeys(allowed))
                wrong.append(f"{named(name)} is {list(shapes[name])}, expected {lists}")
        if wrong:
            raise WeightsError(f"of the wrong shape for the layout {self.name}: {'; '.join(wrong)}")
        return out, width


# Arithmetic


def groups_of(given: npt.NDArray[Any] | None, width: int, size: int) -> npt.NDArray[Any]:
    """The group of each input: one after another, unless there is an order (-1 throughout is none).

    Raises:
        ValueError: there is no such group.
    """
    count = -(-width // size)
    if given is None or (given == -1).all():
        return np.arange(width) // size
    if given.min() < 0 or given.max() >= count:
        raise ValueError(f"groups of inputs go from {given.min()} to {given.max()}, and there are {count}")
    return given


def order_of(given: npt.NDArray[Any] | None, width: int, size: int) -> npt.NDArray[Any] | None:
    """The group of each input; None if they lie one after another, all of one size."""
    groups = groups_of(given, width, size)
    return None if width % size == 0 and (groups == np.arange(width) // size).all() else groups


# Layouts
