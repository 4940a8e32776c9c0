"""Weights from Hugging Face safetensors, streamed onto the device tensor by tensor."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import WeightsError
from jaxllm.loading.quantised import QuantisedTensor, is_empty_bias, with_quantised
from jaxllm.loading.shards import StoredTensor, list_tensors
from jaxllm.models.architecture import ARCHITECTURES, ModelConfig
from jaxllm.models.config import read_hf_config
from jaxllm.models.linear_formats import LinearFormat, LinearFormats
from jaxllm.models.linear_weights import Weight
from jaxllm.models.names import EMBEDDING, KV_SCALES_LAYER, LM_HEAD, WeightNames
from jaxllm.models.quantisation import Quantisation, quantisation_of, read_quantisation
from jaxllm.models.registry import PLAIN, abstract_params, linear_weights
from jaxllm.models.weight_parts import Fused, stacked
from jaxllm.system.dtypes import SAFETENSORS_NAMES

Placement: TypeAlias = jax.Device | jax.sharding.Sharding | None
_COMPARED_ROWS = 4096
_logger = logging.getLogger(__name__)


def load_safetensors(
    folder: Path,
    config: ModelConfig,
    dtype: str,
    placement: Placement = None,
    formats: LinearFormats = PLAIN,
) -> Iterator[tuple[str, Any]]:
    """Yield every weight of the model, on the device and in `dtype`, in the order of the files.

    Those that are quantised come in their formats, if `formats` has any of them.

    Those that native products hold in the checkpoint's 16 bits come in these, as do embeddings. The whole
    checkpoint is checked from its headers before the first weight is read. On the host there is one tensor at
    a time.

    Raises:
        WeightsError: tensors are missing, unexpected or misshapen (all are named), or a file is corrupt.
    """
    plan = _stored(folder, config)
    if said := _said(folder):
        for note in (*said.notes, *_unsaid(said, plan, config)):
            _logger.warning("%s checkpoint: %s", said.method, note)
    kept = {*linear_weights(config), EMBEDDING}
    # In the order of the last file a weight needs, so that each file is opened about once.
    order = sorted(
        plan, key=lambda target: max(str(file) for tensor in plan[target] for file in tensor.files)
    )
    for target in order:
        parts = plan.pop(target)
        # Blocks, so that host copies never queue up behind a slow transfer.
        held = formats.of(target)
        weight: jax.Array | Weight
        if is_held(held) and any(isinstance(part, QuantisedTensor) for part in parts):
            weight = _held_on_device(parts, held, dtype, placement)
        else:
            stored = held.stored if held.is_native and target in kept else ""
            weight = _to_device(parts, stored or dtype, placement)
        if KV_SCALES_LAYER in target:
            _check_kv_scales(parts, weight)
        yield target, jax.block_until_ready(weight)


def stored_formats(folder: Path, config: ModelConfig) -> LinearFormats:
    """The formats in which an engine holds what of a checkpoint is quantised.

    Parts of a fused layer that are of different formats, or whose inputs are, are held apart. What is held as
    numbers is of the engine's dtype: codes and scales give others than the 16 bits of the weights beside it.

    Raises:
        WeightsError: as `load_safetensors`.
    """
    others: list[tuple[str, LinearFormat]] = []
    plan = _stored(folder, config)
    for target in linear_weights(config):
        if any(isinstance(part, QuantisedTensor) for part in plan[target]):
            others.append((target, _held(plan[target])))
    return LinearFormats(others=tuple(others))


def _check_kv_scales(parts: tuple[StoredTensor, ...], scales: Any) -> None:
    for part, scale in zip(parts, scales.tolist(), strict=True):
        if not 0 < scale < math.inf:
            raise WeightsError(
                f"{part.name} is {scale}: keys and values are divided by it, so it must be above 0"
            )


def linear_dtype_of(folder: Path, config: ModelConfig) -> str | None:
    """The dtype of embeddings and of all linear weights that are no codes; None if they are of several.

    Raises:
        WeightsError: as `load_safetensors`.
    """
    plan = _stored(folder, config)
    parts = [part for target in {*linear_weights(config), EMBEDDING} for part in plan[target]]
    found = {part.dtype for part in parts if not isinstance(part, QuantisedTensor)}
    return found.pop() if len(found) == 1 else None


def _held(parts: tuple[StoredTensor, ...]) -> LinearFormat:
    """The format of a weight of these parts."""
    formats, shared = [], []
    for part in parts:
        is_quantised = isinstance(part, QuantisedTensor)
        formats.append(part.held() if is_quantised else LinearFormat())  # type: ignore[attr-defined]
        shared.append(part.of_inputs() if is_quantised else {})  # type: ignore[attr-defined]
    first = shared[0]
    are_alike = len(set(formats)) == 1 and all(
        one.keys() == first.keys() and all((array == first[name]).all() for name, array in one.items())
        for one in shared
    )
    if are_alike or not any(one.kind for one in formats):
        return formats[0]
    return LinearFormat(parts=tuple((part.shape[0], one) for part, one in zip(parts, formats, strict=True)))


def is_held(held: LinearFormat) -> bool:
    """Whether a format is of any codes."""
    return bool(held.kind or held.parts)


def _stored(folder: Path, config: ModelConfig) -> dict[str, tuple[StoredTensor, ...]]:
    """The stored tensors of each weight."""
    names = ARCHITECTURES[config.architecture].names
    tensors = list_tensors(folder)
    if said := _said(folder):
        tensors = with_quantised(tensors, said, has_kv_scales=config.has_kv_scales)
    found = _by_canonical_name(tensors, names)
    if config.tie_word_embeddings:
        _drop_tied_head(found, folder)
    return _plan(found, names, config, folder)


def _said(folder: Path) -> Quantisation | None:
    """What config.json says of quantised weights, if it is there and does."""
    said = quantisation_of(read_hf_config(folder)) if (folder / "config.json").is_file() else None
    return read_quantisation(said) if said else None


def _unsaid(
    said: Quantisation, plan: Mapping[str, tuple[StoredTensor, ...]], config: ModelConfig
) -> Iterator[str]:
    """That weights are numbers of which config.json says that they are codes, if there are any."""
    inner = [target for target in linear_weights(config) if target not in (LM_HEAD, EMBEDDING)]
    parts = [part for target in inner for part in plan[target] if not isinstance(part, QuantisedTensor)]
    names = [part.name for part in parts if said.layout_of(part.name.removesuffix(".weight"))]
    if names:
        yield (
            f"{names[0]} and {len(names) - 1} more are numbers, which quantization_config does not say: they "
            "and their inputs are taken as they are"
        )


def _by_canonical_name(tensors: Mapping[str, StoredTensor], names: WeightNames) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        canonical = names.canonical(name)
        if canonical is None:
            continue
        if canonical in found:
            raise WeightsError(
                f"the checkpoint holds {canonical!r} twice, as {found[canonical].name!r} and as {name!r}"
            )
        found[canonical] = tensor
    return found


def _drop_tied_head(found: dict[str, StoredTensor], folder: Path) -> None:
    """Remove the output head of a tied model, or use it as the embedding where only the head was saved."""
    head = found.pop(LM_HEAD, None)
    if head is None:
        return
    embedding = found.setdefault(EMBEDDING, head)
    if not _same_values(embedding, head):
        raise WeightsError(
            f"config.json says tie_word_embeddings=True but {embedding.name} and {head.name} differ in "
            f"{str(folder)!r}; correct config.json"
        ).or_else(hf_overrides=", or load with hf_overrides={'tie_word_embeddings': False} to use both")


def _same_values(a: StoredTensor, b: StoredTensor) -> bool:
    if a is b:
        return True
    if a.shape != b.shape or len(a.shape) != 2 or a.stored_dtype != b.stored_dtype or a.dtype is None:
        return False
    count = a.shape[0]
    chunks = [slice(row, min(row + _COMPARED_ROWS, count)) for row in range(0, count, _COMPARED_ROWS)]
    return all(np.array_equal(a.read(rows), b.read(rows)) for rows in chunks)


def _plan(
    found: Mapping[str, StoredTensor], names: WeightNames, config: ModelConfig, folder: Path
) -> dict[str, tuple[StoredTensor, ...]]:
    """The stored tensors of each weight, in row order, after checking that the two sets match exactly."""
    plan: dict[str, tuple[StoredTensor, ...]] = {}
    missing, wrong = [], []
    wanted: set[str] = set()
    for target, struct in abstract_params(config, "float32").items():
        parts = names.parts(config, target, struct.shape)
        wanted.update(part.name for part in parts)
        for part in parts:
            tensor = found.get(part.name)
            if tensor is None:
                missing.append(names.hf_name(part.name))
            elif tensor.shape != part.shape:
                wrong.append(f"{tensor.name} is {list(tensor.shape)}, expected {list(part.shape)}")
            elif tensor.dtype is None:
                expected = ", ".join(SAFETENSORS_NAMES)
                wrong.append(f"{tensor.name} is {tensor.stored_dtype}, expected one of {expected}")
        plan[target] = tuple(found[part.name] for part in parts if part.name in found)
    unexpected = [
        tensor.name
        for canonical, tensor in found.items()
        if canonical not in wanted and not is_empty_bias(canonical, found)
    ]
    problems = {"missing": missing, "unexpected": unexpected, "of the wrong shape or dtype": wrong}
    if any(problems.values()):
        listed = "; ".join(f"{kind}: {', '.join(items)}" for kind, items in problems.items() if items)
        raise WeightsError(
            f"the weights of {str(folder)!r} do not match the {config.architecture} of its config.json: "
            + listed
        )
    return plan


def _to_device(parts: tuple[StoredTensor, ...], dtype: str, placement: Placement) -> jax.Array:
    arrays = []
    for part in parts:
        array = jax.device_put(part.read(), placement)
        arrays.append(array if array.dtype == dtype else _cast(array, dtype))
    return arrays[0] if len(arrays) == 1 else _stack(arrays)


def _held_on_device(
    parts: tuple[StoredTensor, ...], held: LinearFormat, dtype: str, placement: Placement
) -> Weight:
    formats = [one for _, one in held.parts] or [held] * len(parts)
    placed: list[Any] = []
    for part, one in zip(parts, formats, strict=True):
        if one.kind and isinstance(part, QuantisedTensor):
            placed.append(jax.device_put(part.read_held(one, dtype), placement))
        else:
            placed.append(_to_device((part,), dtype, placement))
    if held.parts:
        return Fused(tuple(placed))
    found: Weight = placed[0] if len(placed) == 1 else stacked(placed)
    return found


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(array: jax.Array, dtype: str) -> jax.Array:
    return array.astype(dtype)


@jax.jit
def _stack(arrays: list[jax.Array]) -> jax.Array:
    return jnp.concatenate(arrays)
