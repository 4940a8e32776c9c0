"""`System`: a model on a simulated device, with the pools its memory has room for and costs by name."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.errors import CapacityError, ConfigError, did_you_mean, shown
from jaxllm.predictors.base import CostModel, ModelShape, check_integer, check_link, check_number
from jaxllm.predictors.devices import DeviceSpec, device_spec
from jaxllm.predictors.own import own_costs
from jaxllm.predictors.roofline import RooflineCostModel
from jaxllm.predictors.silicon import SiliconCostModel
from jaxllm.predictors.store import Profile
from jaxllm.research.shapes import Formats, Model, read_model
from jaxllm.research.simulator.gpu import UTILIZATION, blocks_beside, pool_blocks
from jaxllm.system.options import checked_path
from jaxllm.system.sizes import parse_bytes

HOST_BYTES = 4 * 2**30
"""Host memory for KV unless told otherwise, as of an engine; at most as many blocks as the device has."""
_BY_NAME = ("silicon", "roofline")
DEFAULT_MODEL, DEFAULT_DEVICE = "llama-3-8b", "a100"


@dataclasses.dataclass(frozen=True)
class System:
    """What a trace is simulated on.

    Args:
        model: its sizes.
        device: what it runs on, for people.
        costs: seconds of steps and copies: the truth.
        source: where these are from, for people.
        block_size: tokens per KV block.
        num_gpu_blocks, num_host_blocks: KV blocks of device and host.
        max_model_len: tokens that the model takes; None if its configuration is not known.
    """

    model: ModelShape
    device: str
    costs: CostModel
    source: str
    block_size: int
    num_gpu_blocks: int
    num_host_blocks: int
    max_model_len: int | None = None

    def facts(self) -> dict[str, Any]:
        """What a report says of it, as JSON values."""
        return {
            "model": self.model.name,
            "dtype": self.model.dtype,
            "weights": self.model.weights,
            "kv_dtype": self.model.kv_dtype,
            "device": self.device,
            "costs": self.source,
            "block_size": self.block_size,
            "num_gpu_blocks": self.num_gpu_blocks,
            "num_host_blocks": self.num_host_blocks,
        }


def make_system(
    model: Model | ModelShape | None = None,
    *,
    device: str | DeviceSpec | None = None,
    costs: str | os.PathLike[str] | CostModel = "silicon",
    dtype: str = "bfloat16",
    quantization: str | None = None,
    quantize_lm_head: bool = True,
    kv_cache_dtype: str = "auto",
    block_size: int = 16,
    gpu_blocks: int | None = None,
    memory_utilization: float | None = None,
    host_blocks: int | None = None,
    host_memory: float | str | None = None,
    link: float | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
) -> System:
    """A model on a device.

    Args:
        model: a published name, a checkpoint, its config.json or what that holds, see
            `jaxllm.research.load_shape`; or sizes; None is "llama-3-8b", or the model of a profile.
        device: a name of `jaxllm.predictors.devices`, or one's own; None is "a100", or that of a profile.
        costs: "silicon": kernels that others measured on it; "roofline": data-sheet rates and assumed
            efficiencies; the JSON file of a profile (`jaxllm profile`); any cost model, or
            its import path, "module:attribute".
        dtype: of weights and KV, where `model` is no sizes.
        quantization, quantize_lm_head, kv_cache_dtype: likewise, see `jaxllm.research.load_shape`.
        block_size: tokens per KV block.
        gpu_blocks: of the device's pool; None takes what fits.
        memory_utilization: share of the device's memory that weights, KV and 3 GB of other things take; None
            is `UTILIZATION`.
        host_blocks: blocks of host memory; or
        host_memory: bytes of it, or such as "64GB". None of both is 4 GiB, and no more blocks than the device
            has.
        link: bytes per second between device and host that copies reach; None takes the device's.
        tensor_parallel: GPUs that share each layer; of "silicon".
        pipeline_parallel: stages of layers, each on as many; of "silicon".

    Raises:
        ConfigError: a name is unknown, a value out of range, or two of them are at odds.
        CapacityError: the weights leave no room for KV.
        ProfileError: the profile cannot be read.
    """
    check_integer("block_size", block_size, 1, 1024)
    if gpu_blocks is not None and memory_utilization is not None:
        raise ConfigError(
            f"gpu_blocks={gpu_blocks} and memory_utilization={memory_utilization} both say how large "
            "the pool is: pass one of them"
        )
    memory_utilization = UTILIZATION if memory_utilization is None else memory_utilization
    check_number("memory_utilization", memory_utilization, 0.01, 1.0)
    profile = _profile(costs)
    limit = None
    formats = Formats(quantization, quantize_lm_head, kv_cache_dtype)
    is_known = isinstance(model, ModelShape) or (profile is not None and model is None)
    if is_known and formats != Formats():
        raise ConfigError(
            f"quantization={quantization!r} and kv_cache_dtype={kv_cache_dtype!r} are part of sizes, and of "
            "profiles: leave them out, or name a model"
        )
    if isinstance(model, ModelShape):
        shape = model
    elif profile is not None and model is None:
        shape = profile.model
    else:
        shape, config, _ = read_model(DEFAULT_MODEL if model is None else model, dtype, formats)
        limit = None if config is None else config.default_max_model_len
    chosen = _device(device, profile)
    layout = {"tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel}
    if profile is not None:
        asked: dict[str, Any] = {"device": device, "link": link}
        asked |= {name: count for name, count in layout.items() if count != 1}
        _check_profile(profile, shape, block_size, {name: value for name, value in asked.items() if value})
        found: tuple[CostModel, str] = profile.table, f"the profile {Path(os.fspath(costs)).name}"  # type: ignore[arg-type]
    else:
        found = _costs(costs, shape, chosen, block_size, link, layout)
    if gpu_blocks is None:
        gpu_blocks = _fitting(found[0], shape, chosen, block_size, memory_utilization)
    check_integer("gpu_blocks", gpu_blocks, 1, 2**31 - 1)
    block_bytes = _kv_bytes(found[0], shape) * block_size
    name, gpus = "unknown" if chosen is None else chosen.name, tensor_parallel * pipeline_parallel
    return System(
        shape,
        (f"{gpus} x {name}" if gpus > 1 else name)
        + (f" in {pipeline_parallel} stages" if pipeline_parallel > 1 else ""),
        *found,
        block_size,
        gpu_blocks,
        _host_blocks(host_blocks, host_memory, block_bytes, gpu_blocks),
        limit,
    )


def _profile(costs: Any) -> Profile | None:
    """The profile that `costs` names."""
    if isinstance(costs, str) and (costs in _BY_NAME or ":" in costs):
        return None
    if isinstance(costs, str | os.PathLike):
        if not Path(checked_path("costs", costs)).is_file():
            hint = did_you_mean(os.fspath(costs), _BY_NAME)
            raise ConfigError(
                f"costs={os.fspath(costs)!r}: {hint}it must be silicon, roofline, a profile's JSON file or "
                "module:attribute, and there is no such file"
            )
        return Profile.load(costs)
    if not all(hasattr(costs, name) for name in ("step_seconds", "swap_out_seconds", "swap_in_seconds")):
        raise ConfigError(
            f"costs={shown(costs)} must be 'silicon', 'roofline', the path of a profile, or a CostModel "
            "(jaxllm.predictors.base)"
        )
    return None


def _device(device: str | DeviceSpec | None, profile: Profile | None) -> DeviceSpec | None:
    if isinstance(device, DeviceSpec):
        return device
    if device is None and profile is not None:
        from jaxllm.engine.costs import DATA_SHEETS  # whose module imports JAX

        return device_spec(DATA_SHEETS[profile.device]) if profile.device in DATA_SHEETS else None
    if device is not None and not isinstance(device, str):
        raise ConfigError(f"device={shown(device)} must be a name, such as 'a100', or a DeviceSpec")
    return device_spec(DEFAULT_DEVICE if device is None else device)


def _check_profile(profile: Profile, shape: ModelShape, block_size: int, given: dict[str, object]) -> None:
    for name in given:
        raise ConfigError(f"{name} is part of what a profile measured: leave it out, or take costs='silicon'")
    profile.check_matches(device=profile.device, model=shape, block_size=block_size)


def _costs(
    costs: Any,
    shape: ModelShape,
    device: DeviceSpec | None,
    block_size: int,
    link: float | None,
    layout: Mapping[str, int],
) -> tuple[CostModel, str]:
    assert device is not None  # only of profiles
    if costs == "silicon":
        sizes: dict[str, Any] = {"block_size": block_size, **layout}
        model = SiliconCostModel(shape, device, link=link, in_parts=True, **sizes)
        return model, f"measured kernels ({model.tables.source})"
    for name, count in layout.items():
        if count != 1:
            raise ConfigError(f"{name}={count} is of costs='silicon'; leave it out")
    if costs == "roofline":
        if link is None:
            roofline = RooflineCostModel(shape, device, block_size=block_size)
        else:
            check_link(link)
            linked = dataclasses.replace(device, host_bandwidth=link)
            roofline = RooflineCostModel(shape, linked, block_size=block_size, link_efficiency=1.0)
        return roofline, "a roofline of data-sheet rates"
    if link is not None:
        raise ConfigError("link is part of a cost model of one's own: leave it out")
    if isinstance(costs, str):
        own = own_costs(costs)
        return own.model, own.source
    return costs, type(costs).__name__


def _fitting(
    costs: CostModel, shape: ModelShape, device: DeviceSpec | None, block_size: int, utilization: float
) -> int:
    if isinstance(costs, SiliconCostModel):
        return pool_blocks(costs, utilization)
    if device is None:
        raise ConfigError("the memory of the profile's device is not known: pass gpu_blocks")
    return blocks_beside(shape.weight_bytes, shape.block_bytes(block_size), device, utilization)


def _kv_bytes(costs: CostModel, shape: ModelShape) -> int:
    return costs.kv_bytes_per_token if isinstance(costs, SiliconCostModel) else shape.kv_bytes_per_token


def _host_blocks(blocks: int | None, memory: float | str | None, block_bytes: int, gpu_blocks: int) -> int:
    if blocks is not None and memory is not None:
        raise ConfigError(f"host_blocks={blocks} and host_memory={memory} say the same: pass one of them")
    if blocks is not None:
        check_integer("host_blocks", blocks, 0, 2**31 - 1)
        return blocks
    if memory is None:
        return min(gpu_blocks, HOST_BYTES // block_bytes)
    if isinstance(memory, str):
        try:
            memory = parse_bytes(memory)
        except ValueError as error:
            raise ConfigError(f"host_memory={memory!r} must be bytes, or such as '64GB'") from error
    check_number("host_memory", memory, 0, 1e16)
    found = int(memory // block_bytes)
    if memory and not found:
        raise CapacityError(
            f"host_memory={memory:g} bytes hold no block of {block_bytes}; raise it, or pass 0"
        )
    return found
