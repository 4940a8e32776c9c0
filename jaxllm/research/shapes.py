"""A model's sizes by what people call it: a published name, a checkpoint, or its config.json."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from jaxllm.errors import ConfigError, did_you_mean, shown
from jaxllm.predictors.base import MODEL_SHAPES, ModelShape, model_shape
from jaxllm.system.dtypes import dtype_of

if TYPE_CHECKING:
    from jaxllm.models.architecture import ModelConfig


def load_shape(model: str | os.PathLike[str], dtype: str = "bfloat16") -> ModelShape:
    """The sizes that decide what a model costs; its weights need not be there.

    Args:
        model: a name of `jaxllm.predictors.base.MODEL_SHAPES`, such as "llama-3-8b"; a `config.json`; or a
            checkpoint: its folder, or the id of one in Hugging Face's cache.
        dtype: of weights and KV.

    Raises:
        ConfigError: there is no such model or dtype, or the configuration is not supported.
    """
    return read_model(model, dtype)[1]


def read_model(model: str | os.PathLike[str], dtype: str) -> tuple[ModelConfig | None, ModelShape]:
    """The same beside the whole configuration, which a published name does not have.

    Raises:
        ConfigError: as `load_shape`.
    """
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(
            f"model={shown(model)} must be a published shape's name, a checkpoint or a config.json; such as "
            "'llama-3-8b'"
        )
    name, dtype = os.fspath(model), dtype_of("dtype", dtype)
    path = Path(name)
    if name in MODEL_SHAPES and not path.exists():
        return None, model_shape(name, dtype)
    from jaxllm.engine.costs import shape_of
    from jaxllm.loading.checkpoints import checkpoint_folder
    from jaxllm.models.config import config_from_dict, read_hf_config, read_object

    if path.suffix == ".json" and not path.is_dir():
        config = config_from_dict(read_object(path))
        called = path.resolve().parent.name if path.name == "config.json" else path.stem
        return config, shape_of(config, called, dtype)
    try:
        folder = checkpoint_folder(path)
    except ConfigError as error:
        hint = did_you_mean(name, MODEL_SHAPES)
        raise ConfigError(f"{error}; {hint}published shapes: {', '.join(MODEL_SHAPES)}") from error
    config = config_from_dict(read_hf_config(folder))
    return config, shape_of(config, folder.resolve().name, dtype)
