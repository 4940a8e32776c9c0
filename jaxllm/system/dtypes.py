"""The dtypes of weights and KV, and every name they go by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.errors import ConfigError, did_you_mean, shown

ITEMSIZES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number by NumPy's name of its dtype."""
DTYPES = tuple(ITEMSIZES)
SAFETENSORS_NAMES: Mapping[str, str] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_NAMES = {**{name: name for name in DTYPES}, **SAFETENSORS_NAMES, "float": "float32", "half": "float16"}


def find_dtype(name: object) -> str | None:
    """NumPy's name of a dtype by that of NumPy, torch, vLLM or safetensors; None if it is not supported."""
    return _NAMES.get(name.removeprefix("torch.")) if isinstance(name, str) else None


def dtype_of(origin: str, name: object, *, also: str = "") -> str:
    """As `find_dtype`, of what `origin` says.

    Raises:
        ConfigError: it is not supported.
    """
    if (found := find_dtype(name)) is None:
        hint = did_you_mean(name, DTYPES) if also else ""  # a checkpoint's is not misspelt
        raise ConfigError(
            f"{origin}={shown(name)} is not supported; pass dtype as one of {', '.join(DTYPES)}{also}"
            f"{hint and '; '}{hint}".rstrip("; ")
        )
    return found


def dtype_or_auto(origin: str, name: Any) -> str:
    """As `dtype_of`; "auto" stays."""
    return "auto" if name == "auto" else dtype_of(origin, name, also=", auto")
