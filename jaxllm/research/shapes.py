"""A model's sizes by what people call it: a published name, a checkpoint, or its config.json."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from jaxllm.errors import ConfigError, did_you_mean, shown
from jaxllm.predictors.base import WEIGHT_FORMATS, ModelShape
from jaxllm.predictors.published_shapes import MODEL_SHAPES, model_shape
from jaxllm.system.dtypes import dtype_of, kv_dtype_of
from jaxllm.system.options import check_choice, checked_path

if TYPE_CHECKING:
    from jaxllm.models.architecture import ModelConfig
    from jaxllm.models.config import SupportsDict
    from jaxllm.models.linear_formats import LinearFormats

Model: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | SupportsDict"
"""What a model is named by: see `load_shape`."""


def load_shape(
    model: Model,
    dtype: str = "bfloat16",
    *,
    quantization: str | None = None,
    quantize_lm_head: bool = True,
    kv_cache_dtype: str = "auto",
) -> ModelShape:
    """The sizes that decide what a model costs; its weights need not be there.

    Args:
        model: a name of `jaxllm.predictors.base.MODEL_SHAPES`, such as "llama-3-8b"; a `config.json`; or a
            checkpoint: its folder, or the id of one in Hugging Face's cache; or a configuration: that file's
            object, or one of transformers.
        dtype: of weights and KV.
        quantization: how weights are held, one of `jaxllm.predictors.base.WEIGHT_FORMATS`; None as the
            checkpoint has them.
        quantize_lm_head: whether that is of the output head, too.
        kv_cache_dtype: of KV, as `LLM` takes it.

    Raises:
        ConfigError: there is no such model, dtype or format, or the configuration is not supported.
    """
    formats = Formats(quantization, quantize_lm_head, kv_cache_dtype)
    return read_model(model, dtype, formats).shape


class Formats(NamedTuple):
    """How weights and KV are held, by the names of `LLM`; see `load_shape`."""

    quantization: str | None = None
    quantize_lm_head: bool = True
    kv_cache_dtype: str = "auto"

    def check(self) -> None:
        """Verify the names.

        Raises:
            ConfigError: one is unknown, or the head is left out of nothing.
        """
        if self.quantization is not None:
            check_choice("quantization", self.quantization, tuple(WEIGHT_FORMATS))
        elif not self.quantize_lm_head:
            raise ConfigError(
                "quantize_lm_head=False leaves the output head out of a quantization, and there is none: set "
                "quantization, or leave it out"
            )
        kv_dtype_of("kv_cache_dtype", self.kv_cache_dtype)


class Read(NamedTuple):
    """A model's sizes, and of what has one its configuration and the formats of its weights."""

    shape: ModelShape
    config: ModelConfig | None = None
    formats: LinearFormats | None = None


def read_model(model: Model, dtype: str, asked: Formats) -> Read:
    """The same with the configuration, which a published name does not have.

    Raises:
        ConfigError: as `load_shape`.
    """
    asked.check()
    asked = asked._replace(kv_cache_dtype=kv_dtype_of("kv_cache_dtype", asked.kv_cache_dtype))
    dtype = dtype_of("dtype", dtype)
    to_dict = getattr(model, "to_dict", None)
    if callable(to_dict) and not isinstance(model, type):
        model = to_dict()
    if isinstance(model, Mapping):
        called = model.get("_name_or_path") or model.get("model_type") or "model"
        return _read_config(dict(model), None, str(called), dtype, asked)
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(
            f"model={shown(model)} must be a published shape's name, a checkpoint, a config.json or what it "
            "holds; such as 'llama-3-8b'"
        )
    name = checked_path("model", model)
    path = Path(name)
    if name in MODEL_SHAPES and not path.exists():
        weights = asked.quantization or "auto"
        head = weights if asked.quantize_lm_head else "auto"
        shape = model_shape(name, dtype)
        return Read(dataclasses.replace(shape, weights=weights, head=head, kv_dtype=asked.kv_cache_dtype))
    from jaxllm.loading.checkpoints import checkpoint_folder
    from jaxllm.models.config import read_hf_config, read_object

    if path.suffix == ".json" and not path.is_dir():
        hf_config = read_object(path)
        folder, called = None, path.resolve().parent.name if path.name == "config.json" else path.stem
    else:
        try:
            folder = checkpoint_folder(path)
        except ConfigError as error:
            hint = did_you_mean(name, MODEL_SHAPES)
            raise ConfigError(f"{error}; {hint}published shapes: {', '.join(MODEL_SHAPES)}") from error
        hf_config, called = read_hf_config(folder), folder.resolve().name
    return _read_config(hf_config, folder, called, dtype, asked)


def _read_config(
    hf_config: Mapping[str, Any], folder: Path | None, called: str, dtype: str, asked: Formats
) -> Read:
    from jaxllm.engine.costs import shape_of
    from jaxllm.models.config import config_from_dict

    kv_dtype = None if asked.kv_cache_dtype == "auto" else asked.kv_cache_dtype
    config = config_from_dict(hf_config)
    if kv_dtype is None and config.has_kv_scales:
        kv_dtype = "fp8_e4m3"
    formats = _formats(folder, config, hf_config, asked)
    return Read(shape_of(config, called, dtype, formats, kv_dtype), config, formats)


def _formats(
    folder: Path | None, config: ModelConfig, hf_config: Mapping[str, Any], asked: Formats
) -> LinearFormats:
    """What weights are held in: as asked for, or as a checkpoint has them."""
    from jaxllm.loading.load import checkpoint_formats
    from jaxllm.models.linear_formats import LinearFormats
    from jaxllm.models.quantisation import quantisation_of
    from jaxllm.models.registry import head_name

    has_weights = folder is not None and bool(list(folder.glob("*.safetensors")))
    if asked.quantization is not None and has_weights and quantisation_of(hf_config):
        raise ConfigError(
            f"quantization={asked.quantization!r} is for checkpoints of 16 or 32 bits, and the weights of "
            f"{str(folder)!r} are quantised already: leave it out, or give their config.json alone"
        )
    if asked.quantization is not None:
        head = head_name(config)
        return LinearFormats.named(asked.quantization, head, quantize_lm_head=asked.quantize_lm_head)
    if not quantisation_of(hf_config):
        return LinearFormats()
    if folder is None or not has_weights:
        raise ConfigError(
            "config.json says that weights are quantised, and they are not there to tell how: give a folder "
            f"with them, or quantization, one of {', '.join(WEIGHT_FORMATS)}"
        )
    return checkpoint_formats(folder, config, hf_config)
