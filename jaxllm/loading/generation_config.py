"""A checkpoint's own sampling parameters, from its `generation_config.json`."""

from __future__ import annotations

import os
from pathlib import Path

from jaxllm.errors import ConfigError, SamplingParamsError
from jaxllm.sampling.params import SamplingParams
from jaxllm.system.json_text import read_object

MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")
"""Parameters that are read, as vLLM does."""


def default_sampling_params(model_dir: str | os.PathLike[str]) -> SamplingParams:
    """What requests of a checkpoint take that bring no parameters; `SamplingParams()` if it does not say.

    Raises:
        ConfigError: the file is no JSON object, or a field is out of range.
    """
    path = Path(model_dir) / "generation_config.json"
    if not path.exists():
        return SamplingParams()
    content = read_object(path)
    content["max_tokens"] = content.get("max_new_tokens")
    values = {name: content.get(name) for name in MODEL_DEFAULTS}
    try:
        return SamplingParams.from_optional(**values)
    except SamplingParamsError as error:
        raise ConfigError(f"{str(path)!r}: {error} Repair the file, or remove the field.") from error
