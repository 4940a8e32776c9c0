"""Rotary position embeddings: frequencies per rope type, and how far they turn each position."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError, UnsupportedModelError
from jaxllm.pallas_kernels.heads import RopeTable

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3")
_LLAMA3_FIELDS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding parameters.

    `max_model_len` matters to the `dynamic` type only: where transformers recomputes the frequencies as the
    longest sequence seen so far grows (so results depend on history), they are fixed here once for
    `max_model_len`, as in vLLM: results do not depend on history, and equal those of transformers as long
    as `max_model_len` is at most `max_position_embeddings`.
    """

    head_dim: int
    max_position_embeddings: int
    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    max_model_len: int | None = None

    @property
    def length_factor(self) -> float:
        """How far beyond `max_position_embeddings` positions may go."""
        return self.factor if self.rope_type in ("linear", "dynamic") else 1.0

    @classmethod
    def from_hf(
        cls,
        *,
        head_dim: int,
        max_position_embeddings: int,
        rope_theta: float | None,
        rope_scaling: Mapping[str, Any] | None,
        rope_parameters: Mapping[str, Any] | None,
    ) -> RopeConfig:
        """Read `rope_theta` with `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5)."""
        if head_dim % 2:
            raise ConfigError(f"config.json: head_dim={head_dim} must be even for rotary embeddings")
        for value in (rope_scaling, rope_parameters):
            if value is not None and not isinstance(value, Mapping):
                raise ConfigError(f"config.json: rope settings {value!r} must be a JSON object")
        values = {**(rope_scaling or {}), **(rope_parameters or {})}
        rope_type = values.pop("rope_type", None) or values.get("type") or "default"
        values.pop("type", None)
        theta = values.pop("rope_theta", None) or rope_theta or 10000.0
        theta = _positive({"rope_theta": theta}, "rope_theta", rope_type)
        if rope_type not in SUPPORTED_ROPE_TYPES:
            raise UnsupportedModelError(
                f"rope type {rope_type!r} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
            )
        known: dict[str, Any] = {}
        if rope_type != "default":
            known["factor"] = _positive(values, "factor", rope_type)
        if rope_type == "llama3":
            known.update({name: _positive(values, name, rope_type) for name in _LLAMA3_FIELDS})
            if known["low_freq_factor"] >= known["high_freq_factor"]:
                raise ConfigError(
                    f"config.json: rope low_freq_factor={known['low_freq_factor']} must be less than "
                    f"high_freq_factor={known['high_freq_factor']}"
                )
        if values.pop("partial_rotary_factor", 1.0) not in (None, 1.0):
            raise UnsupportedModelError("config.json: partial_rotary_factor other than 1.0 is not supported")
        values.pop("original_max_position_embeddings", None)
        if values:
            raise UnsupportedModelError(
                f"config.json: rope fields {sorted(values)} are not supported for rope type {rope_type!r}"
            )
        if known.get("factor", 1.0) < 1.0:
            raise ConfigError(f"config.json: rope factor={known['factor']} must be at least 1")
        return cls(
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            rope_type=rope_type,
            theta=float(theta),
            **known,
        )

    def inverse_frequencies(self) -> np.ndarray:
        """Rotation per position of each pair of dimensions: `[head_dim / 2]` float32, in radians."""
        theta = self.theta
        if self.rope_type == "dynamic":
            length = max(self.max_model_len or 0, self.max_position_embeddings)
            stretch = self.factor * length / self.max_position_embeddings - (self.factor - 1)
            theta *= stretch ** (self.head_dim / (self.head_dim - 2))
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        frequencies = np.float32(1.0) / np.float32(theta) ** exponents
        if self.rope_type == "linear":
            frequencies = frequencies / np.float32(self.factor)
        elif self.rope_type == "llama3":
            frequencies = self._llama3(frequencies)
        return frequencies.astype(np.float32)

    def _llama3(self, frequencies: np.ndarray) -> np.ndarray:
        """Long wavelengths are slowed down by `factor`, short ones kept, those between interpolated."""
        original = self.original_max_position_embeddings
        wavelengths = 2 * math.pi / frequencies
        smooth = (original / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        smooth = np.clip(smooth, 0.0, 1.0)
        return (1 - smooth) * frequencies / self.factor + smooth * frequencies


def _positive(values: dict[str, Any], name: str, rope_type: str) -> Any:
    value = values.pop(name, None)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"config.json: rope type {rope_type!r} needs a positive {name!r}, not {value!r}")
    return value


def rope_table(positions: jax.Array, frequencies: np.ndarray) -> RopeTable:
    """Cosines and sines of `positions` [T] int32."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)
    return jnp.cos(angles), jnp.sin(angles)
