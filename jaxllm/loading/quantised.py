"""Quantised weights among the tensors of a checkpoint, which become weights of float32 as they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxllm.errors import WeightsError
from jaxllm.loading.shards import StoredTensor
from jaxllm.models.linear_formats import LinearFormat
from jaxllm.models.linear_weights import Weight
from jaxllm.models.quantisation import BESIDE, KV_SCALES, Quantisation
from jaxllm.models.weight_layouts import Codes, WeightLayout

_R = TypeVar("_R")


@dataclasses.dataclass(frozen=True)
class QuantisedTensor(StoredTensor):
    """A weight whose codes and scales lie in a checkpoint.

    Args:
        layout: of them.
        arrays: where they lie, by the ends of their names.
    """

    layout: WeightLayout
    arrays: Mapping[str, StoredTensor]

    def held(self) -> LinearFormat:
        """The format that an engine holds it in."""
        shapes = {name: array.shape for name, array in self.arrays.items()}
        out, width = self.shape
        order = next((array for name, array in self.of_inputs().items() if name.endswith("g_idx")), None)
        stored = self.arrays[self.layout.values].stored_dtype
        try:
            return self.layout.held(shapes, stored, out, width, order)
        except ValueError as error:
            raise WeightsError(f"{self.name}: {error}") from error

    def of_inputs(self) -> dict[str, np.ndarray]:
        """Its arrays that fused layers share: order and scales of inputs."""
        ends = ("g_idx", "input_scale", "input_zero_point")
        return {name: array.read() for name, array in self.arrays.items() if name.endswith(ends)}

    @property
    def dtype(self) -> str:
        """What `read` gives."""
        return "float32"

    @property
    def files(self) -> frozenset[Path]:
        """That its arrays lie in."""
        return frozenset(array.file for array in self.arrays.values())

    def read(self, rows: slice | None = None) -> np.ndarray:
        """The weight, float32, or some rows of it.

        Raises:
            WeightsError: it has numbers that are not finite, or arrays of the wrong kind.
        """
        found = self._read(lambda codes, arrays: codes.numbers())
        return found if rows is None else found[rows]

    def read_held(self, held: LinearFormat, dtype: str) -> Weight:
        """The weight as an engine holds it, in host memory.

        Raises:
            WeightsError: see `read`.
        """

        def made(codes: Codes, arrays: Mapping[str, np.ndarray]) -> Weight:
            inputs = None
            if held.rounds.endswith("static"):
                zero = arrays.get("input_zero_point", np.zeros(1))
                inputs = np.array([arrays["input_scale"].item(), zero.item()], np.float32)
                if not 0 < inputs[0] < np.inf:
                    raise ValueError(f"input_scale is {inputs[0]}, and must be above 0")
                least, most = (-128, 127) if held.rounds == "int8_static" else (0, 0)
                if not least <= inputs[1] <= most:
                    raise ValueError(f"input_zero_point is {inputs[1]}, and must lie in [{least}, {most}]")
            return codes.in_format(held, dtype, inputs)

        return self._read(made)

    def _read(self, made: Callable[[Codes, Mapping[str, np.ndarray]], _R]) -> _R:
        arrays = {name: array.read() for name, array in self.arrays.items()}
        try:
            codes = self.layout.codes(arrays, *self.shape)
            found = made(codes, arrays)
        except (IndexError, TypeError, ValueError) as error:
            kinds = ", ".join(f"{array.name} of {array.stored_dtype}" for array in self.arrays.values())
            raise WeightsError(f"{self.name}: {kinds} are no {self.layout.name} ({error})") from error
        if not _are_finite(codes):
            raise WeightsError(f"{self.name}: its scales give numbers that are not finite; load another copy")
        return found


def _are_finite(codes: Codes) -> bool:
    """Whether all numbers are, from codes and scales apart: a layer's copy in 32 bits is large."""
    most = np.float32({"int8": 128, "e4m3": 448, "e5m2": 57344}.get(codes.kind, 16))
    with np.errstate(over="ignore", invalid="ignore"):
        away = 0 if codes.zeros is None else np.abs(codes.zeros.astype(np.float32))
        are_scales = bool(np.isfinite(np.abs(codes.scales) * (most + away)).all())
    if codes.kind not in ("e4m3", "e5m2"):
        return are_scales
    least = 0x7F if codes.kind == "e4m3" else 0x7C  # codes from which on there are none but NaN and infinity
    return are_scales and not bool(((codes.codes.view(np.uint8) & 0x7F) >= least).any())


def with_quantised(
    tensors: Mapping[str, StoredTensor], said: Quantisation, *, has_kv_scales: bool = False
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint with each quantised weight as one; and KV's scales, if they are used.

    Raises:
        WeightsError: arrays of a weight are missing, misshapen, or of a layer that is not to be quantised; or
            there are scales, zero points or orders that `said` does not ask for, and they say something.
    """
    found: dict[str, StoredTensor] = {}
    modules: dict[str, dict[str, StoredTensor]] = {}
    strays: list[StoredTensor] = []
    ends = said.arrays - {"weight"}
    for name, tensor in tensors.items():
        module, _, end = name.rpartition(".")
        if end in BESIDE and not _is_asked(module, end, said):
            strays.append(tensor)
        elif end in ends or (end == "weight" and tensor.dtype is None):
            modules.setdefault(module, {})[end] = tensor
        elif end not in BESIDE or (has_kv_scales and end in KV_SCALES):
            is_scalar = end in KV_SCALES and tensor.shape == ()
            found[name] = dataclasses.replace(tensor, shape=(1,)) if is_scalar else tensor
    for module, arrays in modules.items():
        one = _as_one(module, arrays, found, said.layout_of(module))
        found[one.name] = one
    _refuse_strays(strays, found)
    return found


def _is_asked(module: str, end: str, said: Quantisation) -> bool:
    """Whether what is said asks for an array of a module."""
    layout = said.layout_of(module)
    of_weight = () if layout is None else (*layout.arrays, *layout.unread)
    return end in of_weight or end in said.unused or (said.has_kv_scales and end in KV_SCALES)


def _refuse_strays(strays: list[StoredTensor], found: Mapping[str, StoredTensor]) -> None:
    """Arrays that nothing asks for may be there as many writers leave them: with values that say nothing."""
    wrong = []
    for tensor in strays:
        module, _, end = tensor.name.rpartition(".")
        weight = found.get(f"{module}.weight")
        if not _says_nothing(tensor.read(), end, weight if isinstance(weight, QuantisedTensor) else None):
            wrong.append(tensor.name)
    if wrong:
        raise WeightsError(
            f"{', '.join(wrong)}: quantization_config asks for none, and they would change results (a scale "
            "other than 1, a zero point other than 0, an order of inputs); load a copy whose config.json is "
            "that of its weights"
        )


def _says_nothing(values: np.ndarray, end: str, weight: QuantisedTensor | None) -> bool:
    """Whether an array beside a weight, by the end of its name, changes nothing."""
    none: Any = 1
    if end.endswith("zero_point"):
        is_packed = end == "weight_zero_point" and values.dtype == np.int32
        none = weight.layout.no_zero if weight is not None and is_packed else 0
    elif end.endswith("g_idx"):
        if weight is None:
            return False
        width = weight.shape[1]
        in_order = np.arange(width) // (weight.layout.group(width) or width)
        none = in_order if np.array_equal(values, in_order) else -1
    return bool((values == none).all())


def _as_one(
    module: str,
    arrays: Mapping[str, StoredTensor],
    plain: Mapping[str, StoredTensor],
    layout: WeightLayout | None,
) -> QuantisedTensor:
    """The weight of a module, from its arrays by the ends of their names, beside the other tensors."""
    surplus = set(arrays) - set(() if layout is None else layout.arrays)
    if layout is None or surplus:
        what = ", ".join(arrays[end].name for end in sorted(surplus or arrays))
        raise WeightsError(
            f"{what}: quantization_config says {'another layout' if layout else 'nothing'} of {module}; "
            "load a copy whose config.json is that of its weights"
        )
    for alias, end in layout.aliases.items():
        if alias in arrays and end in arrays:
            raise WeightsError(f"{arrays[alias].name} is there beside {arrays[end].name}: which counts?")
    name, stated = f"{module}.weight", ", ".join(array.name for array in arrays.values())
    if name in plain and layout.values == "weight":
        kinds = " or ".join(layout.kinds["weight"])
        raise WeightsError(f"{name} is {plain[name].stored_dtype}, expected {kinds} beside {stated}")
    if name in plain:
        raise WeightsError(f"{name} is there beside {stated}, which stand for it as well")
    arrays = {layout.aliases.get(end, end): tensor for end, tensor in arrays.items()}
    shapes = {end: tensor.shape for end, tensor in arrays.items()}
    if stated_shape := arrays.get("weight_shape"):
        shapes["weight_shape"] = _pair(stated_shape)
    dtypes = {end: tensor.stored_dtype for end, tensor in arrays.items()}
    shape = layout.check(module, shapes, dtypes, {end: tensor.name for end, tensor in arrays.items()})
    file = arrays[layout.values].file
    return QuantisedTensor(name, file, shape, layout.name, 0, layout, arrays)


def _pair(tensor: StoredTensor) -> tuple[int, ...]:
    """Two integers that a tensor holds."""
    if tensor.shape != (2,) or tensor.stored_dtype not in ("I32", "I64"):
        raise WeightsError(
            f"{tensor.name} is {tensor.stored_dtype} of shape {list(tensor.shape)}, expected two integers: "
            "the weight's outputs and inputs"
        )
    return tuple(tensor.read().tolist())


def is_empty_bias(name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether it is a bias of zeros of a quantised layer: writers of GPTQ give it to those that have none."""
    module, _, end = name.rpartition(".")
    if end != "bias" or not isinstance(tensors.get(f"{module}.weight"), QuantisedTensor):
        return False
    return not tensors[name].read().any()
