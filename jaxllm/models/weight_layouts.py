"""Layouts of quantised weights in checkpoints, and the arithmetic that gives the weights back.

A layout names the arrays that stand in a checkpoint for a weight of `[out, in]`. Nothing here reads files.
Sources: the layouts of compressed-tensors, GPTQ, AutoAWQ, torchao and of the FP8 checkpoints of Qwen and
DeepSeek.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from jaxllm.errors import WeightsError
from jaxllm.models.linear_formats import LinearFormat
from jaxllm.models.linear_weights import Coded, Int8, Weight

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]
Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = Mapping[str, Shape]
Floats: TypeAlias = npt.NDArray[np.float32]

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FLOATS = ("F32", "BF16", "F16")
_INTEGERS = ("I32", "I64")
OF_DTYPES = {"I8": "int8", "F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}
"""Kinds of codes by the dtype of what is stored, as safetensors calls it."""
_SAFETENSORS = {"int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the columns of eight nibbles lie in their word


class Codes(NamedTuple):
    """A weight as codes and scales: `(codes - zeros) * scales`, of the group of each input.

    Attributes:
        kind: one of `linear_weights.CODES`.
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
        groups = _groups(self.groups, width, -(-width // self.scales.shape[1]))
        found = self.codes.astype(np.float32)
        if self.kind == "int4":
            found -= 8
        elif self.kind == "fp4":
            found = np.where(self.codes & 8, -1, 1).astype(np.float32) * _E2M1[self.codes & 7]
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
        kind: of the codes, one of `linear_weights.CODES`; "" if the dtype of `values` says it.
        group: inputs of a group, of so many; 0 for all of them.
        kinds: dtypes that each array may have, by safetensors' names.
        aliases: other names of arrays.
        rounds: how activations are rounded, one of `linear_weights.ROUNDS`.
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
        kinds = {**self.kinds, "input_scale": _FLOATS, zero: ("I8", *_INTEGERS, "F8_E4M3")}

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
        groups = _order(order, width, group)
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


def unpack(words: npt.NDArray[Any], bits: int, axis: int) -> npt.NDArray[np.uint8]:
    """Codes of `bits` from 32-bit words, low bits first, along an axis that becomes 32 / bits as long."""
    words = np.moveaxis(words.view(np.uint32), axis, -1)
    codes = np.empty((*words.shape, 32 // bits), np.uint8)
    for place in range(32 // bits):  # one after another, each of a byte: a layer's copy in 32 bits is large
        codes[..., place] = (words >> np.uint32(bits * place)) & np.uint32((1 << bits) - 1)
    return np.moveaxis(codes.reshape(*words.shape[:-1], -1), -1, axis)


def _rows(scales: npt.NDArray[Any], out: int, block: Shape = ()) -> npt.NDArray[Any]:
    """Scales or zero points of a tensor, rows, groups of inputs or blocks, as `[out, groups]`."""
    found = scales.reshape(-1, 1) if scales.ndim < 2 else scales
    if block:
        found = np.repeat(found, block[0], 0)[:out]
    return np.broadcast_to(found, (out, found.shape[1]))


def _nibbles(packed: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Of bytes, the lower one first."""
    return np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)


def _exponents(scales: npt.NDArray[Any]) -> Floats:
    """Powers of two from their biased exponents."""
    return np.exp2(scales.view(np.uint8).astype(np.float32) - 127)


def _groups(given: npt.NDArray[Any] | None, width: int, size: int) -> npt.NDArray[Any]:
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


def _order(given: npt.NDArray[Any] | None, width: int, size: int) -> npt.NDArray[Any] | None:
    """The group of each input; None if they lie one after another, all of one size."""
    groups = _groups(given, width, size)
    return None if width % size == 0 and (groups == np.arange(width) // size).all() else groups


def _kind_of(bits: int) -> str:
    return "int8" if bits == 8 else "int4"


def _integers(
    bits: int,
    codes: npt.NDArray[np.uint8],
    scales: Floats,
    zeros: npt.NDArray[Any] | None,
    groups: npt.NDArray[Any] | None = None,
) -> Codes:
    """Of codes of two, four or eight bits from 0 on, whose zero is the middle unless one is given."""
    middle, wide = 1 << (bits - 1), 128 if bits == 8 else 8
    if zeros is None and middle != wide:
        zeros = np.full(scales.shape, middle)
    zeros = None if zeros is None else zeros.astype(np.int32) - wide
    codes = (codes ^ np.uint8(128)).view(np.int8) if bits == 8 else codes
    return Codes(_kind_of(bits), codes, scales, zeros, groups)


# Layouts


def _plain_shape(shapes: Shapes, name: str = "weight") -> Shape:
    return shapes[name]


def _count(width: int, group: int) -> int:
    """Whole groups of inputs.

    Raises:
        ValueError: a part of one is left over.
    """
    if width % group:
        raise ValueError(
            f"groups of {group} do not divide its {width} inputs: take a checkpoint whose groups do, or one "
            "in 16 bits"
        )
    return width // group


def _of_rows(out: int, width: int, block: Shape, group: int | None, strategy: str | None) -> list[Shape]:
    """Shapes that scales may have."""
    if block:
        return [(-(-out // block[0]), -(-width // block[1]))]
    if group:
        return [(out, _count(width, group))]
    of_tensor, of_rows = [(), (1,), (1, 1)], [(out,), (out, 1)]
    return {"tensor": of_tensor, "channel": of_rows}.get(strategy or "", [*of_tensor, *of_rows])


def scaled(
    name: str,
    values: str = "weight",
    scale: str = "weight_scale",
    zero: str = "weight_zero_point",
    alias: str | None = None,
    block: Shape = (),
    group: int | None = None,
    is_float: bool = True,
    strategy: str | None = None,
) -> WeightLayout:
    """Numbers of eight bits, as they are, times scales: of a "tensor", a "channel", or perhaps of either."""

    def codes(arrays: Arrays, out: int, width: int) -> Codes:
        scales = _rows(arrays[scale], out, block).astype(np.float32)
        zeros = _rows(arrays[zero], out, block) if zero in arrays else None
        groups = np.arange(width) // block[1] if block and width % block[1] else None
        return Codes(
            OF_DTYPES[_SAFETENSORS[arrays[values].dtype.name]], arrays[values], scales, zeros, groups
        )

    def expected(shapes: Shapes, out: int, width: int) -> dict[str, Sequence[Shape]]:
        allowed = _of_rows(out, width, block, group, strategy)
        return {scale: allowed, zero: allowed}

    def shape(shapes: Shapes) -> Shape:
        return _plain_shape(shapes, values)

    kinds = {
        values: ("F8_E4M3", "F8_E5M2") if is_float else ("I8",),
        scale: _FLOATS,
        zero: (*_FLOATS, "I8", *_INTEGERS, "F8_E4M3"),
    }
    aliases = {alias: scale} if alias else {}
    size = block[1] if block else group or 0
    return WeightLayout(
        name,
        values,
        (scale,),
        (zero,),
        shape,
        expected,
        codes,
        "",
        lambda width: min(size, width),
        kinds,
        aliases,
    )


def packed(bits: int, group: int | None) -> WeightLayout:
    """compressed-tensors' pack-quantized: words along the inputs, zero points along the outputs."""
    per_word = 32 // bits

    def codes(arrays: Arrays, out: int, width: int) -> Codes:
        words, stored = arrays["weight_packed"], arrays.get("weight_zero_point")
        scales = np.asarray(arrays["weight_scale"], np.float32).reshape(out, -1)
        groups = _order(arrays.get("weight_g_idx"), width, group or width)
        zeros = None if stored is None else unpack(stored, bits, 0)[:out]
        return _integers(bits, unpack(words, bits, 1)[:out, :width], scales, zeros, groups)

    def shape(shapes: Shapes) -> Shape:
        if "weight_shape" in shapes:
            return shapes["weight_shape"]
        out, words = shapes["weight_packed"]
        count = shapes["weight_scale"][-1] if len(shapes["weight_scale"]) == 2 else 1
        # The last word may be filled up; whole groups say how many inputs there are.
        return out, (count * group if group else words * per_word)

    def expected(shapes: Shapes, out: int, width: int) -> dict[str, Sequence[Shape]]:
        count = _count(width, group) if group else 1
        return {
            "weight_packed": [(out, -(-width // per_word))],
            "weight_scale": [(out, count)] if group else [(out, 1), (out,)],
            "weight_zero_point": [(-(-out // per_word), count)],
            "weight_g_idx": [(width,)],
        }

    optional = ("weight_zero_point", "weight_g_idx", "weight_shape")
    return WeightLayout(
        "pack-quantized",
        "weight_packed",
        ("weight_scale",),
        optional,
        shape,
        expected,
        codes,
        _kind_of(bits),
        lambda _: group or 0,
        {
            "weight_packed": ("I32",),
            "weight_scale": _FLOATS,
            "weight_zero_point": ("I32",),
            "weight_g_idx": _INTEGERS,
        },
        is_offset=bits == 2,
        no_zero=(1 << (bits - 1)) * (0xFFFFFFFF // ((1 << bits) - 1)) - (1 << 32),
    )


def float4(name: str, group: int, others: tuple[str, ...]) -> WeightLayout:
    """mxfp4 and nvfp4: two numbers of four bits in a byte, a scale for each group of inputs."""

    def codes(arrays: Arrays, out: int, width: int) -> Codes:
        scales = arrays["weight_scale"]
        if "weight_global_scale" in others:
            whole = np.float32(arrays["weight_global_scale"].item())
            if not 0 < whole < np.inf:
                raise ValueError(f"weight_global_scale is {whole}, and must be above 0 and finite")
            scales = scales.astype(np.float32) / whole
        else:
            scales = _exponents(scales)
        return Codes("fp4", _nibbles(arrays["weight_packed"].view(np.uint8)), scales)

    def expected(shapes: Shapes, out: int, width: int) -> dict[str, Sequence[Shape]]:
        return {"weight_scale": [(out, _count(width, group))], "weight_global_scale": [(1,), ()]}

    def shape(shapes: Shapes) -> Shape:
        return shapes["weight_packed"][0], 2 * shapes["weight_packed"][1]

    kinds = {
        "weight_packed": ("U8", "I8"),
        "weight_scale": ("F8_E4M3",) if others else ("U8", "F8_E8M0"),
        "weight_global_scale": _FLOATS,
    }
    return WeightLayout(
        name,
        "weight_packed",
        ("weight_scale", *others),
        (),
        shape,
        expected,
        codes,
        "fp4",
        lambda _: group,
        kinds,
    )


def mxfp8() -> WeightLayout:
    """Numbers of eight bits with an exponent for each 32 inputs (OCP microscaling)."""

    def codes(arrays: Arrays, out: int, width: int) -> Codes:
        kind = OF_DTYPES[_SAFETENSORS[arrays["weight"].dtype.name]]
        return Codes(kind, arrays["weight"], _exponents(arrays["weight_scale"]))

    def expected(shapes: Shapes, out: int, width: int) -> dict[str, Sequence[Shape]]:
        return {"weight_scale": [(out, _count(width, 32))]}

    return WeightLayout(
        "mxfp8-quantized",
        "weight",
        ("weight_scale",),
        (),
        _plain_shape,
        expected,
        codes,
        "",
        lambda _: 32,
        {"weight": ("F8_E4M3", "F8_E5M2"), "weight_scale": ("U8", "F8_E8M0")},
    )


def gptq(bits: int, group: int, *, is_second: bool, is_symmetric: bool) -> WeightLayout:
    """GPTQ's words along the inputs, with zero points less one unless it is the second version."""
    per_word = 32 // bits

    def size_of(width: int) -> int:
        return min(group, width) if group > 0 else width

    def codes(arrays: Arrays, out: int, width: int) -> Codes:
        scales = arrays["scales"].astype(np.float32).T
        groups = _order(arrays.get("g_idx"), width, size_of(width))
        words, middle = arrays["qzeros"].view(np.uint32), 1 << (bits - 1)
        zeros = unpack(words, bits, 1)[:, :out]
        if is_symmetric and np.isin(zeros, (middle - 1, middle)).all():
            zeros = np.full_like(zeros, middle)  # some writers of the first version store it as it is
        elif not is_second:  # whose words are less by one in each place, so that a zero of 0 has borrowed
            zeros = unpack(words + np.uint32(0xFFFFFFFF // ((1 << bits) - 1)), bits, 1)[:, :out]
        return _integers(bits, unpack(arrays["qweight"], bits, 0).T, scales, zeros.T, groups)

    def shape(shapes: Shapes) -> Shape:
        return shapes["qweight"][1], shapes["qweight"][0] * per_word

    def expected(shapes: Shapes, out: int, width: int) -> dict[str, Sequence[Shape]]:
        count = -(-width // size_of(width))
        return {
            "scales": [(count, out)],
            "qzeros": [(count, -(-out // per_word))],
            "g_idx": [(width,)],
        }

    kinds = {"qweight": ("I32",), "qzeros": ("I32",), "scales": _FLOATS, "g_idx": _INTEGERS}
    return WeightLayout(
        "GPTQ",
        "qweight",
        ("qzeros", "scales"),
        ("g_idx",),
        shape,
        expected,
        codes,
        _kind_of(bits),
        size_of,
        kinds,
    )


def awq(group: int) -> WeightLayout:
    """AutoAWQ's words along the outputs (gemm), eight nibbles in an order of their own."""

    def codes_of(words: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        codes = unpack(words, 4, 1)
        return codes.reshape(len(codes), -1, 8)[:, :, _AWQ_ORDER].reshape(codes.shape)

    def codes(arrays: Arrays, out: int, width: int) -> Codes:
        scales, zeros = arrays["scales"].astype(np.float32).T, codes_of(arrays["qzeros"]).T
        return _integers(4, codes_of(arrays["qweight"]).T, scales, zeros)

    def shape(shapes: Shapes) -> Shape:
        return shapes["qweight"][1] * 8, shapes["qweight"][0]

    def expected(shapes: Shapes, out: int, width: int) -> dict[str, Sequence[Shape]]:
        count = _count(width, group) if group > 0 else 1
        return {"scales": [(count, out)], "qzeros": [(count, out // 8)]}

    kinds = {"qweight": ("I32",), "qzeros": ("I32",), "scales": _FLOATS}
    return WeightLayout(
        "AWQ",
        "qweight",
        ("qzeros", "scales"),
        (),
        shape,
        expected,
        codes,
        "int4",
        lambda _: max(group, 0),
        kinds,
    )
