"""Model configurations, read from a checkpoint's `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxllm.errors import ConfigError, UnsupportedModelError, shown
from jaxllm.models.architecture import ARCHITECTURES, Architecture, ModelConfig
from jaxllm.models.fields import INERT_FIELDS, Fields
from jaxllm.models.quantisation import KEYS, quantisation_of, read_quantisation
from jaxllm.system.json_text import read_object

# Of the inert fields, what others than the model itself read.
_OVERRIDABLE = frozenset({"architectures", "model_type", "eos_token_id", "dtype", "torch_dtype"})
_BESIDE = {"quant_config.json": "awq", "quantize_config.json": "gptq"}
"""Files in which older AutoAWQ and AutoGPTQ say what others put into config.json."""


@runtime_checkable
class SupportsDict(Protocol):
    """A configuration of transformers."""

    def to_dict(self) -> dict[str, Any]:
        """The fields of its config.json, those at their defaults as well."""
        ...


def config_from_dict(
    values: Mapping[str, Any] | SupportsDict, hf_overrides: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Build a model configuration from the contents of a Hugging Face `config.json`.

    Args:
        values: the decoded JSON object (`read_hf_config` reads that of a folder), or a configuration of
            transformers, such as `AutoConfig.from_pretrained` makes.
        hf_overrides: fields to replace first; `None` drops a field.

    Raises:
        UnsupportedModelError: the architecture, rope type or a field is not implemented.
        ConfigError: a field is missing or has an impossible value, or an override would change nothing.
    """
    if isinstance(values, SupportsDict) and not isinstance(values, type):
        values = values.to_dict()
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{shown(values)} must be a mapping of config.json's fields, which read_hf_config(folder) reads, "
            "or a configuration of transformers"
        )
    values = _override(values, hf_overrides or {})
    architectures = values.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ConfigError(f"config.json: architectures={architectures!r} must be a list of names")
    if not architectures:
        model_type = values.get("model_type")
        named = [name for name, one in ARCHITECTURES.items() if model_type == _model_type(one)]
        architectures = named or [f"model_type={model_type!r}"]
    architecture = architectures[0]
    has_kv_scales = False
    if quantised := quantisation_of(values):
        has_kv_scales = read_quantisation(quantised).has_kv_scales  # the loader reads the rest
    for name in KEYS:
        values.pop(name, None)
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    fields = Fields(values)
    config = ARCHITECTURES[architecture].read(fields)
    fields.refuse_unread()
    return dataclasses.replace(config, architecture=architecture, has_kv_scales=has_kv_scales)


def check_model_config(config: object) -> None:
    """Verify that something is a model's configuration.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(config, ModelConfig):
        raise ConfigError(
            f"config={shown(config)} must be a model's: config_from_dict(read_hf_config(folder)) makes it"
        )


def _model_type(architecture: Architecture) -> str:
    return architecture.model_type or architecture.name.removesuffix("ForCausalLM").lower()


def _override(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"hf_overrides={overrides!r} must be a dictionary of config.json fields")
    for name in overrides:
        if not isinstance(name, str):
            raise ConfigError(f"hf_overrides has {shown(name)}, which is no name of a config.json field")
    if said := overrides.keys() & {*KEYS}:
        raise ConfigError(
            f"hf_overrides has {min(said)}, which says how the files' weights lie: leave it out, or "
            "correct config.json"
        )
    idle = sorted(overrides.keys() & (INERT_FIELDS - _OVERRIDABLE))
    if idle:
        raise ConfigError(f"hf_overrides has {', '.join(idle)}, which jaxllm does not read: leave them out")
    changed = {**values, **overrides}
    rope = changed.get("rope_parameters")
    if "rope_theta" in overrides and "rope_parameters" not in overrides and isinstance(rope, Mapping):
        # transformers 5 moved the field there.
        changed["rope_parameters"] = {**rope, "rope_theta": overrides["rope_theta"]}
    return changed


def path_is_gguf(path: Path) -> bool:
    """Whether a name is that of a GGUF file."""
    return path.suffix.lower() == ".gguf"


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """Read `config.json` from a checkpoint folder.

    What an older AutoAWQ or AutoGPTQ says of its weights in a file beside it becomes `quantization_config`.

    Raises:
        UnsupportedModelError: it holds GGUF or an adapter.
        ConfigError: the folder or the file is missing, or the file is not a JSON object.
    """
    folder = Path(path)
    file = folder / "config.json"
    try:
        is_folder, exists, is_file = folder.is_dir(), folder.exists(), file.is_file()
    except OSError as error:
        raise ConfigError(f"cannot read the model folder {str(folder)!r}: {error.strerror}") from error
    if path_is_gguf(folder) or (is_folder and not is_file and any(map(path_is_gguf, folder.iterdir()))):
        raise UnsupportedModelError(
            f"{str(folder)!r} is GGUF, which is not read; make a checkpoint of it with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder, gguf_file=name).save_pretrained(other), and its "
            "tokenizer likewise"
        )
    if is_folder and not is_file and (folder / "adapter_config.json").is_file():
        raise UnsupportedModelError(
            f"{str(folder)!r} is an adapter (LoRA), and adapters are not loaded; merge it into its model "
            "with peft: AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload(), and "
            "save_pretrained(other)"
        )
    if not is_folder:
        raise ConfigError(
            f"model folder {str(folder)!r} {'is a file' if exists else 'does not exist'}; pass the path of a "
            "folder with config.json and *.safetensors (models are not downloaded)"
        )
    if not is_file:
        raise ConfigError(f"{str(folder)!r} has no config.json; it is not a Hugging Face checkpoint folder")
    found = read_object(file)
    for name, method in _BESIDE.items():
        if quantisation_of(found) is None and (folder / name).is_file():
            found["quantization_config"] = {"quant_method": method, **read_object(folder / name)}
    return found
