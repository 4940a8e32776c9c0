"""Load the weights of a model from any supported format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.errors import ConfigError, WeightsError, shown
from jaxllm.loading.dummy import dummy_params
from jaxllm.loading.orbax_format import has_orbax_params, load_orbax, stored_dtype
from jaxllm.loading.safetensors_format import linear_dtype_of, load_safetensors, stored_formats
from jaxllm.loading.shards import INDEX_FILE, SINGLE_FILE, list_tensors
from jaxllm.models.architecture import ModelConfig
from jaxllm.models.config import check_model_config, read_hf_config
from jaxllm.models.linear_formats import LinearFormats
from jaxllm.models.quantisation import HOW_TO_DEQUANTISE, quantisation_of
from jaxllm.models.registry import PLAIN, Params
from jaxllm.pallas_kernels.settings import under_jax_defaults
from jaxllm.system.dtypes import dtype_of, dtype_or_auto
from jaxllm.system.options import check_choice

LOAD_FORMATS = ("auto", "safetensors", "orbax", "dummy")
_SAFETENSORS = "safetensors are read as they are: leave it out"
_OTHER_FORMATS = {
    "hf": _SAFETENSORS,
    "fastsafetensors": _SAFETENSORS,
    "runai_streamer": _SAFETENSORS,
    "pt": "pickled weights are not read: `jaxllm convert-bin` makes safetensors of them",
    "npcache": "pickled weights are not read: `jaxllm convert-bin` makes safetensors of them",
    "mistral": "take the checkpoint in Hugging Face's layout, with config.json and model*.safetensors",
    "tensorizer": "take the checkpoint in safetensors, or make one of Orbax (`jaxllm convert`)",
    "sharded_state": "take the checkpoint in safetensors, or make one of Orbax (`jaxllm convert`)",
    **{name: f"take a checkpoint in 16 bits{made}" for name, made in HOW_TO_DEQUANTISE.items()},
}
"""vLLM's names of formats that there are not, and the way out."""


def check_load_format(name: str, value: object) -> object:
    """A format of weights, as it is.

    Raises:
        ConfigError: there is none of this name.
    """
    if isinstance(value, str) and value in _OTHER_FORMATS:
        raise ConfigError(
            f"{name}={value!r} is not supported, {', '.join(LOAD_FORMATS)} are; {_OTHER_FORMATS[value]}"
        )
    check_choice(name, value, LOAD_FORMATS)
    return value


@under_jax_defaults
def load_params(
    path: str | Path,
    config: ModelConfig,
    dtype: Any = "auto",
    *,
    load_format: str = "auto",
    seed: int = 0,
    device: jax.Device | jax.sharding.Sharding | None = None,
) -> Params:
    """Load every weight of `config`, by the names of `registry.abstract_params`.

    Args:
        path: checkpoint folder. `dummy` reads its config.json only, and only for dtype `auto`.
        config: the model; its shapes must match the checkpoint's exactly.
        dtype: dtype of the result, by name or as NumPy's, JAX's or torch's; "auto" for the checkpoint's own.
        load_format: `auto` takes safetensors where there are any, then Orbax.
        seed: of `dummy` weights.
        device: where the weights go, JAX's default device if None. Arrays are committed to it; commit the KV
            cache too, for jit compiles anew when an argument goes from uncommitted to committed.

    Raises:
        ConfigError: unknown `dtype` or `load_format`, or `path` or `config` is none.
        WeightsError: the weights are missing, corrupt, or do not match `config`.
    """
    if not isinstance(path, str | Path):
        raise ConfigError(f"path={shown(path)} must be that of a checkpoint's folder")
    check_model_config(config)
    return dict(iter_params(path, config, dtype, load_format=load_format, seed=seed, device=device))


def iter_params(
    path: str | Path,
    config: ModelConfig,
    dtype: Any = "auto",
    *,
    load_format: str = "auto",
    seed: int = 0,
    device: jax.Device | jax.sharding.Sharding | None = None,
    formats: LinearFormats = PLAIN,
) -> Iterator[tuple[str, Any]]:
    """As `load_params`, one weight at a time; those that are quantised in `formats`, if it has any."""
    folder = Path(path)
    check_load_format("load_format", load_format)
    dtype = resolve_dtype(folder, dtype, load_format=load_format)
    placement = default_device() if device is None else device
    if load_format == "dummy":
        return dummy_params(config, dtype, seed=seed, placement=placement)
    if _is_orbax(folder, load_format):
        return load_orbax(folder, config, dtype, placement)
    return load_safetensors(folder, config, dtype, placement, formats)


def checkpoint_formats(
    path: str | Path, config: ModelConfig, hf_config: Mapping[str, Any], load_format: str = "auto"
) -> LinearFormats:
    """The formats in which an engine holds a checkpoint's weights; see `stored_formats`."""
    folder = Path(path)
    is_quantised = bool(quantisation_of(hf_config)) and load_format != "dummy"
    return stored_formats(folder, config) if is_quantised and not _is_orbax(folder, load_format) else PLAIN


def linear_dtype(path: str | Path, config: ModelConfig, load_format: str = "auto") -> str | None:
    """The dtype of a checkpoint's linear weights and embeddings that are no codes; None if of several."""
    folder = Path(path)
    return None if _is_orbax(folder, load_format) else linear_dtype_of(folder, config)


def resolve_dtype(
    path: str | Path,
    dtype: Any = "auto",
    *,
    load_format: str = "auto",
    hf_config: Mapping[str, Any] | None = None,
) -> str:
    """The dtype to load in: `dtype` itself, or for `auto` the checkpoint's.

    That is `dtype` or `torch_dtype` of config.json (or `hf_config`, if given), else the dtype of the first
    floating-point tensor.

    Raises:
        ConfigError: the dtype is not supported.
    """
    if (dtype := dtype_or_auto("dtype", dtype)) != "auto":
        return dtype
    hf_config = read_hf_config(path) if hf_config is None else hf_config
    origin, named = "config.json: dtype", hf_config.get("dtype") or hf_config.get("torch_dtype")
    if not named:
        origin, named = "the dtype of the weights", _first_dtype(Path(path), load_format)
    return dtype_of(origin, named)


def default_device() -> jax.Device:
    """The device JAX puts arrays on when none is named."""
    return next(iter(jnp.zeros(()).devices()))


def _is_orbax(folder: Path, load_format: str) -> bool:
    if not folder.is_dir():
        raise WeightsError(f"model folder {str(folder)!r} does not exist (models are not downloaded)")
    if load_format == "orbax" and not has_orbax_params(folder):
        raise WeightsError(f"{str(folder)!r} has no params/ folder; write one with `jaxllm convert`")
    if load_format != "auto":
        return load_format == "orbax"
    has_safetensors = any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))
    return has_orbax_params(folder) and not has_safetensors


def _first_dtype(folder: Path, load_format: str) -> str:
    if load_format == "dummy":
        return "float32"
    if _is_orbax(folder, load_format):
        return stored_dtype(folder) or "float32"
    dtypes = (tensor.dtype for tensor in list_tensors(folder).values())
    return next((dtype for dtype in dtypes if dtype), "float32")
