"""The layouts of quantised weights that published checkpoints have.

Sources: the layouts of compressed-tensors, GPTQ, AutoAWQ, torchao and of the FP8 checkpoints of Qwen and
DeepSeek.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxllm.models.weight_layouts import (
    FLOATS,
    INTEGERS,
    OF_DTYPES,
    Arrays,
    Codes,
    Floats,
    Shape,
    Shapes,
    WeightLayout,
    order_of,
)

_SAFETENSORS = {"int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the columns of eight nibbles lie in their word


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
        scale: FLOATS,
        zero: (*FLOATS, "I8", *INTEGERS, "F8_E4M3"),
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
        groups = order_of(arrays.get("weight_g_idx"), width, group or width)
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
            "weight_scale": FLOATS,
            "weight_zero_point": ("I32",),
            "weight_g_idx": INTEGERS,
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
        "weight_global_scale": FLOATS,
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
        groups = order_of(arrays.get("g_idx"), width, size_of(width))
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

    kinds = {"qweight": ("I32",), "qzeros": ("I32",), "scales": FLOATS, "g_idx": INTEGERS}
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

    kinds = {"qweight": ("I32",), "qzeros": ("I32",), "scales": FLOATS}
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
