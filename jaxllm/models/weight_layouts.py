"""Layouts of quantised weights in checkpoints, and the arithmetic that gives the weights back.

A layout names the arrays that stand in a checkpoint for a weight of `[out, in]`. Nothing here reads files.
Sources: the layouts of compressed-tensors, GPTQ, AutoAWQ, torchao and of the FP8 checkpoints of Qwen and
DeepSeek.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from jaxllm.errors import WeightsError

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]
Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = Mapping[str, Shape]
Floats: TypeAlias = npt.NDArray[np.float32]

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FLOATS = ("F32", "BF16", "F16")
_INTEGERS = ("I32", "I64")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the columns of eight nibbles lie in their word


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
        dequantise: the weight, float32 `[out, in]`, from its arrays and `[out, in]`.
        kinds: dtypes that each array may have, by safetensors' names.
        aliases: other names of arrays.
    """

    name: str
    values: str
    others: tuple[str, ...]
    optional: tuple[str, ...]
    shape: Callable[[Shapes], Shape]
    expected: Callable[[Shapes, int, int], Mapping[str, Sequence[Shape]]]
    dequantise: Callable[[Arrays, int, int], Floats]
    kinds: Mapping[str, tuple[str, ...]]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def arrays(self) -> tuple[str, ...]:
        """All that may be there."""
        return (self.values, *self.others, *self.optional, *self.aliases)

    def check(self, module: str, shapes: Shapes, kinds: Mapping[str, str]) -> Shape:
        """The shape of a module's weight, from the shapes and dtypes of its arrays.

        Raises:
            WeightsError: arrays are missing, misshapen or of other dtypes; all are named.
        """
        strange = [
            f"{module}.{name} is {kinds[name]}, expected {' or '.join(self.kinds[name])}"
            for name in kinds
            if kinds[name] not in self.kinds.get(name, (kinds[name],))
        ]
        if strange:
            raise WeightsError(f"of the wrong dtype for the layout {self.name}: {'; '.join(strange)}")
        missing = [f"{module}.{name}" for name in (self.values, *self.others) if name not in shapes]
        if missing:
            raise WeightsError(f"missing of a weight in the layout {self.name}: {', '.join(missing)}")
        if len(shapes[self.values]) != 2:
            raise WeightsError(
                f"{module}.{self.values} has shape {list(shapes[self.values])}: expected two axes"
            )
        out, width = self.shape(shapes)
        wrong = []
        for name, allowed in self.expected(shapes, out, width).items():
            if name in shapes and shapes[name] not in allowed:
                lists = " or ".join(str(list(one)) for one in dict.fromkeys(allowed))
                wrong.append(f"{module}.{name} is {list(shapes[name])}, expected {lists}")
        if wrong:
            raise WeightsError(f"of the wrong shape for the layout {self.name}: {'; '.join(wrong)}")
        return out, width


# Arithmetic


def unpack(words: npt.NDArray[Any], bits: int, axis: int) -> npt.NDArray[np.int32]:
    """Codes of `bits` from 32-bit words, low bits first, along an axis that becomes 32 / bits as long."""
    words = np.moveaxis(words.view(np.uint32), axis, -1)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (words[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return np.moveaxis(codes.reshape(*words.shape[:-1], -1), -1, axis).astype(np.int32)


def _spread(scales: npt.NDArray[Any], out: int, width: int, block: Shape = ()) -> Floats:
    """Scales of a tensor, rows, groups of inputs or blocks, as they multiply a weight of `[out, width]`."""
    found = np.asarray(scales, np.float32)
    if found.size == 1:
        return found.reshape(1, 1)
    if found.ndim == 1:
        found = found[:, None]
    if block:
        found = np.repeat(np.repeat(found, block[0], 0)[:out], block[1], 1)[:, :width]
    elif found.shape[1] not in (1, width):
        found = np.repeat(found, width // found.shape[1], 1)
    return found


def _fp4(packed: npt.NDArray[Any]) -> Floats:
    """Numbers of four bits (a sign, two of exponent, one of mantissa), low nibble first."""
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    return np.where(codes & 8, -1.0, 1.0).astype(np.float32) * _E2M1[codes & 7]


def _exponents(scales: npt.NDArray[Any], width: int) -> Floats:
    """Powers of two from their biased exponents, one for each group of inputs."""
    found = np.exp2(scales.view(np.uint8).astype(np.float32) - 127)
    return np.repeat(found, width // found.shape[1], 1)


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


# Layouts


def _plain_shape(shapes: Shapes, name: str = "weight") -> Shape:
    return shapes[name]


def _of_rows(out: int, width: int, block: Shape, group: int | None) -> list[Shape]:
    """Shapes that scales may have."""
    if block:
        return [(-(-out // block[0]), -(-width // block[1]))]
    if group:
        return [(out, width // group)]
    return [(), (1,), (1, 1), (out,), (out, 1)]


def scaled(
    name: str,
    values: str = "weight",
    scale: str = "weight_scale",
    zero: str = "weight_zero_point",
    alias: str | None = None,
    block: Shape = (),
    group: int | None = None,
) -> WeightLayout:
    """Numbers of eight bits, as they are, times scales."""

    def dequantise(arrays: Arrays, out: int, width: int) -> Floats:
        codes = arrays[values].astype(np.float32)
        if zero in arrays:
            codes -= _spread(arrays[zero], out, width, block)
        return codes * _spread(arrays[scale], out, width, block)

    def expected(shapes: Shapes, out: int, width: int) -> dict[str, Sequence[Shape]]:
        allowed = _of_rows(out, width, block, group)
        return {scale: allowed, zero: allowed}

    def shape(shapes: Shapes) -> Shape:
        return _plain_shape(shapes, values)

    kinds = {
        values: ("I8", "F8_E4M3", "F8_E5M2"),
        scale: _FLOATS,
        zero: (*_FLOATS, "I8", *_INTEGERS, "F8_E4M3"),
    }
    aliases = {alias: scale} if alias else {}
    return WeightLayout(name, values, (scale,), (zero,), shape, expected, dequantise, kinds, aliases)


def packed(bits: int, group: int | None) -> WeightLayout:
    """compressed-tensors' pack-quantized: words along the inputs, zero points along the outputs."""
    per_word = 32 // bits

    def dequantise(arrays: Arrays, out: int, width: int) -> Floats:
        codes = unpack(arrays["weight_packed"], bits, 1)[:out, :width]
        scales = np.asarray(arrays["weight_scale"], np.float32).reshape(out, -1)
        size = width // scales.shape[1]
        groups = _groups(arrays.get("weight_g_idx"), width, size)
        zeros: Any = 1 << (bits - 1)
        if "weight_zero_point" in arrays:
            zeros = unpack(arrays["weight_zero_point"], bits, 0)[:out][:, groups]
        return (codes - zeros).astype(np.float32) * scales[:, groups]

    def shape(shapes: Shapes) -> Shape:
        out, words = shapes["weight_packed"]
        count = shapes["weight_scale"][-1] if len(shapes["weight_scale"]) == 2 else 1
        # The last word may be filled up; whole groups say how many inputs there are.
        return out, (count * group if group else words * per_word)

    def expected(shapes: Shapes, out: int, width: int) -> dict[str, Sequence[Shape]]:
        count = width // group if group else 1
        return {
            "weight_packed": [(out, -(-width // per_word))],
            "weight_scale": [(out, count)] if group else [(out, 1), (out,)],
            "weight_zero_point": [(-(-out // per_word), count)],
            "weight_g_idx": [(width,)],
            "weight_shape": [(2,)],
        }

    optional = ("weight_zero_point", "weight_g_idx", "weight_shape")
    return WeightLayout(
        "pack-quantized",
        "weight_packed",
        ("weight_scale",),
        optional,
        shape,
        expected,
        dequantise,
        {
            "weight_packed": ("I32",),
            "weight_scale": _FLOATS,
            "weight_zero_point": ("I32",),
            "weight_g_idx": _INTEGERS,
        },
    )


def float4(name: str, group: int, others: tuple[str, ...]) -> WeightLayout:
    """mxfp4 and nvfp4: two numbers of four bits in a byte, a scale for each group of inputs."""

    def dequantise(arrays: Arrays, out: int, width: int) -> Floats:
        numbers = _fp4(arrays["weight_packed"].view(np.uint8))
        if "weight_global_scale" not in others:
            return numbers * _exponents(arrays["weight_scale"], width)
        scales = arrays["weight_scale"].astype(np.float32) / np.float32(arrays["weight_global_scale"].item())
        return numbers * np.repeat(scales, group, 1)

    def expected(shapes: Shapes, out: int, width: int) -> dict[str, Sequence[Shape]]:
        return {"weight_scale": [(out, width // group)], "weight_global_scale": [(1,), ()]}

    def shape(shapes: Shapes) -> Shape:
        return shapes["weight_packed"][0], 2 * shapes["weight_packed"][1]

    kinds = {
        "weight_packed": ("U8", "I8"),
        "weight_scale": ("F8_E4M3",) if others else ("U8", "F8_E8M0"),
        "weight_global_scale": _FLOATS,
    }
    return WeightLayout(
        name, "weight_packed", ("weight_scale", *others), (), shape, expected, dequantise, kinds
    )


def mxfp8() -> WeightLayout:
    """Numbers of eight bits with an exponent for each 32 inputs (OCP microscaling)."""

    def dequantise(arrays: Arrays, out: int, width: int) -> Floats:
        return arrays["weight"].astype(np.float32) * _exponents(arrays["weight_scale"], width)

    def expected(shapes: Shapes, out: int, width: int) -> dict[str, Sequence[Shape]]:
        return {"weight_scale": [(out, width // 32)]}

    return WeightLayout(
        "mxfp8-quantized",
        "weight",
        ("weight_scale",),
        (),
        _plain_shape,
        expected,
        dequantise,
        {"weight": ("F8_E4M3", "F8_E5M2"), "weight_scale": ("U8", "F8_E8M0")},
    )


def gptq(bits: int, group: int, *, is_second: bool, is_symmetric: bool) -> WeightLayout:
    """GPTQ's words along the inputs, with zero points less one unless it is the second version."""
    per_word = 32 // bits

    def dequantise(arrays: Arrays, out: int, width: int) -> Floats:
        codes = unpack(arrays["qweight"], bits, 0)
        scales = arrays["scales"].astype(np.float32)
        groups = _groups(arrays.get("g_idx"), width, -(-width // len(scales)))
        zeros, middle = unpack(arrays["qzeros"], bits, 1)[:, :out], 1 << (bits - 1)
        if is_symmetric and np.isin(zeros, (middle - 1, middle)).all():
            zeros = np.full_like(zeros, middle)  # some writers of the first version store it as it is
        else:
            zeros = zeros + (0 if is_second else 1)
        return np.ascontiguousarray(((codes - zeros[groups]).astype(np.float32) * scales[groups]).T)

    def shape(shapes: Shapes) -> Shape:
        return shapes["qweight"][1], shapes["qweight"][0] * per_word

    def expected(shapes: Shapes, out: int, width: int) -> dict[str, Sequence[Shape]]:
        count = -(-width // group) if group > 0 else 1
        return {
            "scales": [(count, out)],
            "qzeros": [(count, -(-out // per_word))],
            "g_idx": [(width,)],
        }

    kinds = {"qweight": ("I32",), "qzeros": ("I32",), "scales": _FLOATS, "g_idx": _INTEGERS}
    return WeightLayout(
        "GPTQ", "qweight", ("qzeros", "scales"), ("g_idx",), shape, expected, dequantise, kinds
    )


def awq(group: int) -> WeightLayout:
    """AutoAWQ's words along the outputs (gemm), eight nibbles in an order of their own."""

    def codes_of(words: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        codes = unpack(words, 4, 1)
        return codes.reshape(len(codes), -1, 8)[:, :, _AWQ_ORDER].reshape(codes.shape)

    def dequantise(arrays: Arrays, out: int, width: int) -> Floats:
        scales = arrays["scales"].astype(np.float32)
        size = width // len(scales)
        zeros = np.repeat(codes_of(arrays["qzeros"]), size, 0)
        found = (codes_of(arrays["qweight"]) - zeros).astype(np.float32) * np.repeat(scales, size, 0)
        return np.ascontiguousarray(found.T)

    def shape(shapes: Shapes) -> Shape:
        return shapes["qweight"][1] * 8, shapes["qweight"][0]

    def expected(shapes: Shapes, out: int, width: int) -> dict[str, Sequence[Shape]]:
        count = width // group if group > 0 else 1
        return {"scales": [(count, out)], "qzeros": [(count, out // 8)]}

    kinds = {"qweight": ("I32",), "qzeros": ("I32",), "scales": _FLOATS}
    return WeightLayout("AWQ", "qweight", ("qzeros", "scales"), (), shape, expected, dequantise, kinds)
