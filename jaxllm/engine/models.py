"""The model of an engine before anything is loaded: what its checkpoint says, and its devices."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxllm.engine.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.executor import memory
from jaxllm.executor.placement import Placement
from jaxllm.loading import resolve_dtype
from jaxllm.loading.checkpoints import checkpoint_folder
from jaxllm.loading.generation_config import default_sampling_params
from jaxllm.loading.given import check_given
from jaxllm.loading.load import checkpoint_formats, linear_dtype
from jaxllm.models.architecture import ModelConfig
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.models.linear_formats import LinearFormat, LinearFormats
from jaxllm.models.quantisation import quantisation_of
from jaxllm.models.registry import PLAIN, abstract_params, head_name, linear_weights
from jaxllm.sampling.params import SamplingParams
from jaxllm.system.cache_folder import cache_folder
from jaxllm.system.dtypes import ITEMSIZES, KV_CAPABILITIES, KV_OF_SCALES, find_dtype

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Model:
    """A checkpoint, and the device that it is to run on.

    Attributes:
        folder: the checkpoint's.
        tokenizer_folder: the tokenizer's.
        placement: its devices.
        config: sizes and layers, for the longest sequences that its positions allow.
        dtype: of weights and activations.
        kv_dtype: keys and values are stored as that, one of `KV_DTYPES`.
        formats: of the weights of linear layers.
        num_weight_bytes: of the weights of a device in that.
        default_params: its own sampling parameters.
    """

    folder: Path
    tokenizer_folder: Path
    placement: Placement
    config: ModelConfig
    dtype: str
    kv_dtype: str
    formats: LinearFormats
    num_weight_bytes: int
    default_params: SamplingParams

    @property
    def device(self) -> jax.Device:
        """The first one of this process."""
        return self.placement.device

    @property
    def own(self) -> ModelConfig:
        """The part of a device, which is of as many layers as a stage has."""
        return self.placement.part(self.config)

    @property
    def itemsize(self) -> int:
        """Bytes of a number of activations."""
        return ITEMSIZES[self.dtype]


def placements(config: EngineConfig) -> list[Placement]:
    """The devices of each replica: of JAX's the first, the next ones, and so on.

    Raises:
        ConfigError: there are fewer.
    """
    # Without effect where JAX has taken its memory already.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(memory.MEM_FRACTION))
    devices, stages = jax.devices(), config.pipeline_parallel_size
    if config.nnodes > 1:
        return [Placement(_devices_of_processes(config, devices))]
    contexts, count = config.prefill_context_parallel_size, config.data_parallel_size
    size = config.tensor_parallel_size * stages * contexts
    if size * count > len(devices):
        others = f"data_parallel_size={count} times " if count > 1 else ""
        others += f"pipeline_parallel_size={stages} times " if stages > 1 else ""
        others += f"prefill_context_parallel_size={contexts} times " if contexts > 1 else ""
        raise ConfigError(
            f"{others}tensor_parallel_size={config.tensor_parallel_size} is more than the devices that JAX "
            f"sees, {len(devices)} of {devices[0].platform}: take fewer (a CPU is as many with XLA_FLAGS="
            f"--xla_force_host_platform_device_count={size * count})"
        )
    starts = range(0, size * count, size)
    return [Placement(tuple(devices[start : start + size]), stages, contexts) for start in starts]


def _devices_of_processes(config: EngineConfig, devices: Sequence[jax.Device]) -> tuple[jax.Device, ...]:
    """As many devices of each process, the first ones.

    Raises:
        ConfigError: one has fewer.
    """
    count = config.tensor_parallel_size // config.nnodes
    found: list[jax.Device] = []
    for rank in range(config.nnodes):
        own = [device for device in devices if device.process_index == rank]
        if len(own) < count:
            raise ConfigError(
                f"tensor_parallel_size={config.tensor_parallel_size} is {count} devices of each of nnodes="
                f"{config.nnodes} processes, and node_rank={rank} has {len(own)}: take fewer, or more "
                "processes"
            )
        found += own[:count]
    return tuple(found)


def read_model(config: EngineConfig, placement: Placement, params: Mapping[str, Any] | None = None) -> Model:
    """Read what the checkpoint says of itself, and set JAX up; `params` are weights instead of its own.

    Raises:
        ConfigError: the checkpoint's configuration is invalid or unsupported.
        WeightsError: `params` are not of it.
        CapacityError: the device cannot hold the weights.
    """
    folder, tokenizer_folder = _folders(config)
    default_params = default_sampling_params(folder)
    device = placement.device
    _set_compilation_cache(config.compilation_cache_dir)
    hf_config = read_hf_config(folder)
    model_config = config_from_dict(hf_config, config.hf_overrides)
    if params is not None:
        if config.load_format != "auto":
            raise ConfigError(
                f"load_format={config.load_format!r} is of the checkpoint's weights, and params are given "
                "instead: leave one of them out"
            )
        check_given(model_config, params)
        hf_config = {**hf_config, "dtype": find_dtype(next(iter(params.values())).dtype) or "float32"}
    dtype = settle_dtype(config, folder, hf_config, device.platform)
    is_given = params is not None
    formats = _formats(config, folder, model_config, hf_config, placement, is_given=is_given)
    is_native = _multiplies_natively(config, device, dtype)
    if is_native and not is_given and config.dtype == "auto" and config.load_format != "dummy":
        stored = linear_dtype(folder, model_config, config.load_format)
        if formats.default == LinearFormat() and stored in ("bfloat16", "float16"):
            formats = dataclasses.replace(formats, default=LinearFormat(stored=stored))
    held = dataclasses.replace(formats, is_native=is_native)
    placement.check(model_config, formats if config.quantization is None else PLAIN)
    num_weight_bytes = placement.weight_bytes(model_config, dtype, held)
    memory.check_fits(device, num_weight_bytes, 0)
    kv_dtype = config.kv_cache_dtype
    if kv_dtype == "auto":
        kv_dtype = _stored_kv_dtype(model_config, device) or dtype
    weights = formats, num_weight_bytes
    return Model(folder, tokenizer_folder, placement, model_config, dtype, kv_dtype, *weights, default_params)


def _multiplies_natively(config: EngineConfig, device: jax.Device, dtype: str) -> bool:
    """Whether products of linear layers are native, unless the sizes of heads keep them from it."""
    is_asked = config.attention_implementation in (None, "native")
    return is_asked and device.platform == "cpu" and dtype == "float32"


def _stored_kv_dtype(model_config: ModelConfig, device: jax.Device) -> str | None:
    """What a checkpoint has scales of KV for, if the device can store that."""
    if not model_config.has_kv_scales:
        return None
    if not stores_kv(device, KV_OF_SCALES):
        _logger.warning(
            "the checkpoint wants KV in %s, which %s does not have", KV_OF_SCALES, device.device_kind
        )
        return None
    return KV_OF_SCALES


def stores_kv(device: jax.Device, kv_dtype: str) -> bool:
    """Whether a device can store keys and values as that."""
    capability = getattr(device, "compute_capability", None)  # of GPUs alone
    if capability is None:
        return True
    return tuple(map(int, str(capability).split("."))) >= KV_CAPABILITIES.get(kv_dtype, (0, 0))


def _formats(
    config: EngineConfig,
    folder: Path,
    model_config: ModelConfig,
    hf_config: Mapping[str, Any],
    placement: Placement,
    *,
    is_given: bool,
) -> LinearFormats:
    """What the settings or the checkpoint make of the weights of linear layers.

    Raises:
        ConfigError: they are quantised already, or cannot be so.
    """
    if config.quantization is None and config.load_format == "dummy" and quantisation_of(hf_config):
        _logger.warning(
            "load_format='dummy': weights are random numbers, not codes as quantization_config says; "
            "quantization makes codes of them"
        )
    if config.quantization is None:
        return PLAIN if is_given else checkpoint_formats(folder, model_config, hf_config, config.load_format)
    is_stored = not is_given and config.load_format != "dummy"
    if is_stored and (said := quantisation_of(hf_config)):
        method = said.get("quant_method") if isinstance(said, Mapping) else said
        raise ConfigError(
            f"quantization={config.quantization!r} is for checkpoints of 16 or 32 bits, and the weights of "
            f"{str(config.model)!r} are quantised already ({method}): leave it out"
        )
    head = head_name(model_config)
    formats = LinearFormats.named(config.quantization, head, quantize_lm_head=config.quantize_lm_head)
    for name, struct in abstract_params(placement.share(model_config), "float32").items():
        reason = formats.of(name).why_not(struct.shape[1]) if name in linear_weights(model_config) else None
        if reason:
            raise ConfigError(f"quantization={config.quantization!r} of {name}: {reason}")
    return formats


def _folders(config: EngineConfig) -> tuple[Path, Path]:
    """The model's, and the tokenizer's."""
    find = functools.partial(checkpoint_folder, download=config.download, cache_dir=config.download_dir)
    folder = find(config.model, revision=config.revision)
    return folder, folder if config.tokenizer is None else find(config.tokenizer)


def settle_dtype(config: EngineConfig, folder: Path, hf_config: Mapping[str, Any], platform: str) -> str:
    """The dtype of weights and KV on a platform.

    Raises:
        ConfigError: config.json names one that is not supported, and the settings none.
    """
    hf_config = {**hf_config, **(config.hf_overrides or {})}
    dtype = resolve_dtype(folder, config.dtype, load_format=config.load_format, hf_config=hf_config)
    return "float32" if config.dtype == "auto" and platform == "cpu" else dtype


def _set_compilation_cache(folder: str | os.PathLike[str] | None) -> None:
    """Turn on JAX's persistent compilation cache, unless the user has set one up already."""
    if folder is None or (folder == "auto" and jax.config.values["jax_compilation_cache_dir"]):
        return
    if folder == "auto":
        folder = str(cache_folder(f"xla-{jax.__version__}"))
    else:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"compilation_cache_dir={folder!r} cannot be made: {error.strerror}; name a folder, or None"
            ) from error
    jax.config.update("jax_compilation_cache_dir", os.fspath(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
