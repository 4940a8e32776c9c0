"""Where an engine's predicted costs come from: its profile, kernels measured on its GPU, or a roofline."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxllm.models.architecture import ARCHITECTURES, ModelConfig
from jaxllm.models.linear_formats import LinearFormats
from jaxllm.models.registry import PLAIN, abstract_params, head_name, linear_weights
from jaxllm.predictors.base import WEIGHT_FORMATS, CostModel, ModelShape
from jaxllm.predictors.contexts import ContextParallelCosts
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.roofline import RooflineCostModel
from jaxllm.predictors.silicon import ALIKE, SiliconCostModel
from jaxllm.predictors.silicon_tables import MEASURED
from jaxllm.predictors.store import Profile, profile_path
from jaxllm.system.cache_folder import cache_folder

DATA_SHEETS: Mapping[str, str] = {
    "cpu": "cpu-2core",
    "NVIDIA A100-SXM4-80GB": "A100-80GB",
    "NVIDIA A800 80GB PCIe": "A800-80GB-PCIe",
    "NVIDIA H100 80GB HBM3": "H100-SXM",
    "NVIDIA H200": "H200",
    "NVIDIA L40S": "L40S",
    "NVIDIA L4": "L4",
    "NVIDIA B200": "B200",
}
"""Names of `jaxllm.predictors.devices` by what JAX calls a device."""

_MOST_MEASURED = 8  # devices whose sums were measured


def profile_folder() -> Path:
    """Where profiles are kept unless told otherwise: `jaxllm/profiles` in the user's cache folder."""
    return cache_folder("profiles")


def shape_of(
    config: ModelConfig,
    name: str,
    dtype: str,
    formats: LinearFormats = PLAIN,
    kv_dtype: str | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    prefill_context_parallel: int = 1,
) -> ModelShape:
    """The sizes of a model that decide its costs.

    Its name is followed by the formats of weights and KV, by how many devices share each layer, by how many
    stages there are, and by how many groups share prompts.
    """
    kv_dtype = kv_dtype or dtype
    name += formats.suffix + (f"-kv-{kv_dtype}" if kv_dtype != dtype else "")
    weights, head = formats.cost_names(tuple(linear_weights(config)), head_name(config))
    are_codes = weights in WEIGHT_FORMATS, head in WEIGHT_FORMATS
    bits = _bits(config, dtype, formats) if any(are_codes) else (0.0, 0.0)
    layout = {"tp": tensor_parallel, "pp": pipeline_parallel, "pcp": prefill_context_parallel}
    return ModelShape(
        name=name + "".join(f"-{letters}{count}" for letters, count in layout.items() if count > 1),
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        gated_mlp=ARCHITECTURES[config.architecture].has_gated_mlp,
        tie_word_embeddings=config.tie_word_embeddings,
        dtype=dtype,
        kv_dtype="auto" if kv_dtype == dtype else kv_dtype,
        weights=weights,
        head=head,
        weight_bits=bits[0] if are_codes[0] else 0.0,
        head_bits=bits[1] if are_codes[1] else 0.0,
    )


def _bits(config: ModelConfig, dtype: str, formats: LinearFormats) -> tuple[float, float]:
    """Of a number of the linear layers, and of the output head, with their shares of scales."""
    plain, held = (abstract_params(config, dtype, one) for one in (PLAIN, formats))
    head, found = head_name(config), []
    for names in ([name for name in linear_weights(config) if name != head], [head]):
        num_numbers = sum(math.prod(plain[name].shape) for name in names)
        arrays = jax.tree.leaves([held[name] for name in names])
        num_bytes = sum(math.prod(one.shape) * one.dtype.itemsize for one in arrays)
        found.append(8 * num_bytes / num_numbers)
    return found[0], found[1]


def find_costs(
    model: ModelShape,
    device_kind: str,
    block_size: int,
    folder: Path | None = None,
    *,
    use_profile: bool = True,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    prefill_context_parallel: int = 1,
) -> tuple[CostModel, str] | None:
    """Predicted costs of a model on a device, and where they come from.

    They are those of a profile; or of kernels that others measured on the device, in 16 bits; or of a
    roofline. None if there is neither a profile nor a data sheet of the device that covers the model's dtype.

    Args:
        model: the model's sizes.
        device_kind: what JAX calls the device.
        block_size: tokens per KV block.
        folder: of profiles; `profile_folder()` if None.
        use_profile: look for one.
        tensor_parallel: devices that share each layer; the roofline is that of one's part, without sums.
        pipeline_parallel: stages, one after another; the roofline is that of all of them, without what is
            moved between.
        prefill_context_parallel: groups of devices that share prompts, without what they send one another.

    Raises:
        ProfileError: the profile is damaged, or of another model of the same name.
    """
    path = profile_path(folder or profile_folder(), device_kind, model.name, model.dtype)
    if path.exists() and use_profile:
        profile = Profile.load(path)
        profile.check_matches(device=device_kind, model=model, block_size=block_size)
        return profile.table, f"profile {path.name}"
    device = device_spec(DATA_SHEETS[device_kind]) if device_kind in DATA_SHEETS else None
    if device is None or model.dtype not in device.peak_flops:
        return None
    is_measured = device.name in MEASURED.keys() | ALIKE.keys() and model.itemsize == 2
    if is_measured and tensor_parallel <= _MOST_MEASURED:
        layout: Any = {"tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel}
        silicon = SiliconCostModel(model, device, block_size=block_size, in_parts=True, **layout)
        return _of_groups(silicon, prefill_context_parallel), f"measured kernels of {device.name}"
    source = f"roofline of {device.name}"
    if device_kind == "cpu":  # whose devices share its cores
        return RooflineCostModel(model, device, block_size=block_size), source
    roofline = RooflineCostModel(_part(model, tensor_parallel), device, block_size=block_size)
    return _of_groups(roofline, prefill_context_parallel), source


def _of_groups(costs: CostModel, num_contexts: int) -> CostModel:
    return ContextParallelCosts(costs, num_contexts) if num_contexts > 1 else costs


def _part(model: ModelShape, num_devices: int) -> ModelShape:
    """What each of some devices computes of a model."""
    return dataclasses.replace(
        model,
        num_heads=model.num_heads // num_devices,
        num_kv_heads=max(1, model.num_kv_heads // num_devices),
        intermediate_size=model.intermediate_size // num_devices,
        vocab_size=-(-model.vocab_size // num_devices),
    )
