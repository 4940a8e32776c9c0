"""Convert a Hugging Face checkpoint into an Orbax one that loads straight onto the device."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax

from jaxllm.errors import ConfigError
from jaxllm.loading.compressed_tensors import write_quantised
from jaxllm.loading.load import iter_params, resolve_dtype
from jaxllm.loading.orbax_format import has_orbax_params, save_orbax
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.models.linear_formats import QUANTIZATIONS
from jaxllm.models.quantisation import KEYS, quantisation_of
from jaxllm.pallas_kernels.settings import under_jax_defaults
from jaxllm.system.options import check_choice, checked_path

# Everything a folder needs besides config.json and weights.
SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@under_jax_defaults
def convert_checkpoint(
    src: str | Path, dst: str | Path, dtype: str = "auto", *, quantization: str | None = None
) -> Path:
    """Write `dst` with config.json, the tokenizer files and `params/`, an Orbax checkpoint in `dtype`.

    With `quantization` (see `EngineConfig`) it is a folder of safetensors instead, as compressed-tensors has
    them, which vLLM reads, too: linear layers but for the output head are quantised, all else stays.

    The weights pass through host memory in groups of up to 4 GiB. Work happens in a hidden folder beside
    `dst` that is renamed at the end, so that an interrupted conversion leaves no `dst`.

    Returns:
        `dst` as a path.

    Raises:
        ConfigError: `dst` exists and is not an empty folder, the model is not supported, or it is to be
            quantised and is so already, or is no folder of safetensors.
        WeightsError: the weights of `src` cannot be read or do not match its config.json.
    """
    src, dst = Path(checked_path("src", src)), Path(checked_path("dst", dst))
    if dst.exists() and not (dst.is_dir() and not any(dst.iterdir())):
        raise ConfigError(f"{str(dst)!r} exists and is not an empty folder; choose another or remove it")
    hf_config = read_hf_config(src)
    config = dataclasses.replace(config_from_dict(hf_config), has_kv_scales=False)
    if quantization is not None:
        _check_quantization(src, hf_config, dtype, quantization)
    dtype = resolve_dtype(src, dtype, hf_config=hf_config)
    dst = dst.absolute()
    partial = dst.with_name(f".{dst.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by an interrupted conversion
    partial.mkdir(parents=True)
    try:
        cpu = jax.local_devices(backend="cpu")[0]
        for name in ("torch_dtype", *KEYS):
            hf_config.pop(name, None)
        said = {}
        if quantization is None:
            save_orbax(partial, iter_params(src, config, dtype, device=cpu))
        else:
            with jax.default_device(cpu):
                said = {"quantization_config": write_quantised(src, partial, config, quantization)}
        described = {**hf_config, "dtype": dtype, **said}
        (partial / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        for name in SIDE_FILES:
            if (src / name).is_file():
                shutil.copyfile(src / name, partial / name)
        partial.rename(dst)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return dst


def _check_quantization(src: Path, hf_config: dict[str, Any], dtype: str, quantization: str) -> None:
    check_choice("quantization", quantization, tuple(QUANTIZATIONS))
    if quantisation_of(hf_config):
        raise ConfigError(
            f"quantization={quantization!r}: the weights of {str(src)!r} are quantised already; convert the "
            "checkpoint that they were made of"
        )
    if has_orbax_params(src) and not any(src.glob("*.safetensors")):
        raise ConfigError(
            f"quantization={quantization!r}: {str(src)!r} is a converted checkpoint (Orbax), and tensors of "
            "safetensors are quantised; convert the folder that it was made of, or quantise it when it is "
            "loaded"
        )
    if dtype != "auto":
        raise ConfigError(
            f"dtype={dtype!r} and quantization={quantization!r}: what is not quantised stays as it is; leave "
            "the dtype out"
        )
