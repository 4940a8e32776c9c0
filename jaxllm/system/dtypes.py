"""The dtypes of weights and KV, and every name they go by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError, did_you_mean, shown

ITEMSIZES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number by NumPy's name of its dtype."""
DTYPES = tuple(ITEMSIZES)
KV_DTYPES: Mapping[str, str] = {
    **{name: name for name in DTYPES},
    "int8": "int8",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""What keys and values may be stored as, and NumPy's name of the pool's dtype."""
KV_OF_SCALES = "fp8_e4m3"
"""What a checkpoint that has scales of KV means."""
KV_CAPABILITIES: Mapping[str, tuple[int, int]] = {"fp8_e4m3": (8, 9)}
"""Least compute capability of GPUs that have such KV, where it is not that of all kernels."""
SAFETENSORS_NAMES: Mapping[str, str] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_NAMES = {**{name: name for name in DTYPES}, **SAFETENSORS_NAMES, "float": "float32", "half": "float16"}


def kv_row_bytes(kv_dtype: str, head_dim: int) -> int:
    """Bytes of one head of a token's keys or values; of int8 with their scale, a float32."""
    if kv_dtype == "int8":
        return head_dim + 4
    return head_dim * ITEMSIZES.get(kv_dtype, 1)


def find_dtype(name: object) -> str | None:
    """NumPy's name of a dtype; None if it is not supported.

    Args:
        name: that of NumPy, torch, vLLM or safetensors, or a dtype of NumPy, JAX (`jnp.bfloat16`) or torch.
    """
    if name is None or isinstance(name, str):
        text = name or ""
    else:
        try:
            text = np.dtype(name).name  # type: ignore[call-overload]
        except TypeError:  # torch's, or none
            text = str(name)
    return _NAMES.get(text.removeprefix("torch."))


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


def kv_dtype_of(origin: str, name: object) -> str:
    """One of `KV_DTYPES` or "auto", by any name that it goes by; "fp8" is e4m3, as in vLLM.

    Raises:
        ConfigError: it is not supported.
    """
    found = "fp8_e4m3" if isinstance(name, str) and name == "fp8" else find_dtype(name) or name
    if not isinstance(found, str) or found not in ("auto", *KV_DTYPES):
        known = ("auto", *KV_DTYPES)
        raise ConfigError(
            f"{origin}={shown(name)} is not supported; {did_you_mean(name, known)}use one of "
            f"{', '.join(known)}"
        )
    return found


def dtype_or_auto(origin: str, name: Any) -> str:
    """As `dtype_of`; "auto" stays."""
    return "auto" if isinstance(name, str) and name == "auto" else dtype_of(origin, name, also=", auto")
