"""Rotary position embeddings: frequencies per rope type, and how far they turn each position."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError, UnsupportedModelError, shown
from jaxllm.models.fields import check_size, is_number
from jaxllm.pallas_kernels.heads import RopeTable

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_MAX_HEAD_DIM = 2**16
_LLAMA3_FIELDS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding parameters.

    `max_model_len` matters to the types `dynamic` and `longrope` only: where transformers recomputes the
    frequencies as the longest sequence seen so far grows (so results depend on history), they are fixed here
    once for `max_model_len`, as in vLLM: results do not depend on history, and equal those of transformers as
    long as `max_model_len` is at most `max_position_embeddings` (`dynamic`) or
    `original_max_position_embeddings` (`longrope`: `short_factors` up to there, `long_factors` beyond).

    Cosines and sines are multiplied by `attention_factor` (`yarn` and `longrope`). `beta_fast`, `beta_slow`
    and `truncate` are of `yarn`.
    """

    head_dim: int
    max_position_embeddings: int
    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    max_model_len: int | None = None

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies are made for a longest sequence, `max_model_len`."""
        return self.rope_type in ("dynamic", "longrope")

    @property
    def length_factor(self) -> float:
        """How far beyond `max_position_embeddings` positions may go."""
        if self.rope_type == "yarn":
            return max(
                1.0, self.factor * self.original_max_position_embeddings / self.max_position_embeddings
            )
        return self.factor if self.rope_type in ("linear", "dynamic") else 1.0

    @property
    def is_finite(self) -> bool:
        """Whether all frequencies and factors are finite numbers."""
        with np.errstate(all="ignore"):
            try:
                return bool(np.isfinite([*self.inverse_frequencies(), self.attention_factor]).all())
            except (OverflowError, ZeroDivisionError):
                return False

    @classmethod
    def from_hf(
        cls,
        *,
        head_dim: int,
        max_position_embeddings: int,
        rope_theta: float | None,
        rope_scaling: Mapping[str, Any] | None,
        rope_parameters: Mapping[str, Any] | None,
        original_max_position_embeddings: int | None = None,
    ) -> RopeConfig:
        """Read `rope_theta` with `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5).

        `original_max_position_embeddings` is that of Phi 3, beside them; it counts more than one in them.
        """
        check_size("head_dim", head_dim, _MAX_HEAD_DIM)
        if head_dim % 2:
            raise ConfigError(f"config.json: head_dim={head_dim} must be even for rotary embeddings")
        values = _settings(rope_scaling, rope_parameters)
        rope_type = _type_of(values)
        theta = values.pop("rope_theta", None) or rope_theta or 10000.0
        theta = _positive({"rope_theta": theta}, "rope_theta", rope_type)
        known: dict[str, Any] = {}
        if rope_type in ("yarn", "longrope"):
            original = original_max_position_embeddings
            values.setdefault("original_max_position_embeddings", max_position_embeddings)
            if original is not None:
                values["original_max_position_embeddings"] = original
            known = _stretched(values, rope_type, max_position_embeddings, head_dim)
        elif rope_type != "default":
            known["factor"] = _positive(values, "factor", rope_type)
        if rope_type == "llama3":
            known |= _llama3(values)
        if values.pop("partial_rotary_factor", 1.0) not in (None, 1.0):
            raise UnsupportedModelError("config.json: partial_rotary_factor other than 1.0 is not supported")
        values.pop("original_max_position_embeddings", None)
        if values:
            raise UnsupportedModelError(
                f"config.json: rope fields {sorted(values)} are not supported for rope type {rope_type!r}"
            )
        if known.get("factor", 1.0) < 1.0:
            raise ConfigError(f"config.json: rope factor={known['factor']} must be at least 1")
        rope = cls(
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            rope_type=rope_type,
            theta=float(theta),
            **known,
        )
        if not rope.is_finite:
            raise ConfigError(
                f"config.json: rope_theta={theta} and {shown(known)} of rope type {rope_type!r} give no "
                "finite frequencies; correct them, or replace them with hf_overrides"
            )
        return rope

    def inverse_frequencies(self) -> np.ndarray:
        """Rotation per position of each pair of dimensions: `[head_dim / 2]` float32, in radians."""
        theta = self.theta
        if self.rope_type == "dynamic":
            length = max(self.max_model_len or 0, self.max_position_embeddings)
            stretch = self.factor * length / self.max_position_embeddings - (self.factor - 1)
            theta *= stretch ** (self.head_dim / (self.head_dim - 2))
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        frequencies: np.ndarray = np.float32(1.0) / np.float32(theta) ** exponents
        if self.rope_type == "linear":
            frequencies = frequencies / np.float32(self.factor)
        elif self.rope_type == "llama3":
            frequencies = self._llama3(frequencies)
        elif self.rope_type == "yarn":
            frequencies = self._yarn(frequencies)
        elif self.rope_type == "longrope":
            is_long = (self.max_model_len or 0) > self.original_max_position_embeddings
            frequencies = frequencies / np.asarray(
                self.long_factors if is_long else self.short_factors, np.float32
            )
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

    def _yarn(self, frequencies: np.ndarray) -> np.ndarray:
        """Slowed down by `factor` below `beta_slow` turns of the original length, kept above `beta_fast`.

        YaRN (arXiv:2309.00071), section 3.2.
        """

        def dimension(num_turns: float) -> float:
            wavelength = self.original_max_position_embeddings / (2 * math.pi * num_turns)
            return self.head_dim * math.log(wavelength) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.head_dim - 1)
        places = np.arange(len(frequencies), dtype=np.float32)
        ramp = np.clip((places - low) / (high - low if high != low else 0.001), 0.0, 1.0)
        return ramp * frequencies / self.factor + (1 - ramp) * frequencies


def _stretched(
    values: dict[str, Any], rope_type: str, max_position_embeddings: int, head_dim: int
) -> dict[str, Any]:
    """The fields of `yarn` or `longrope`, taken out of `values`, with what transformers computes of them."""
    original = _positive(values, "original_max_position_embeddings", rope_type)
    if values.get("factor") is None:
        values["factor"] = max_position_embeddings / original
    factor = _positive(values, "factor", rope_type)
    known: dict[str, Any] = {"factor": factor, "original_max_position_embeddings": original}
    if rope_type == "yarn":
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            values[name] = values.get(name) or default
            known[name] = float(_positive(values, name, rope_type))
        known["truncate"] = bool(values.pop("truncate", True))
        scales = [values.pop(name, None) or 0.0 for name in ("mscale", "mscale_all_dim")]
        stretch = 0.1 * math.log(max(factor, 1.0))
        if all(scales):
            attention_factor = (scales[0] * stretch + 1) / (scales[1] * stretch + 1)
        else:
            attention_factor = stretch + 1
    else:
        for ours, name in (("short_factors", "short_factor"), ("long_factors", "long_factor")):
            known[ours] = _factors(values.pop(name, None), name, head_dim // 2)
        attention_factor = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(original))
    if values.get("attention_factor") is None:
        values["attention_factor"] = attention_factor
    return known | {"attention_factor": float(_positive(values, "attention_factor", rope_type))}


def _factors(values: Any, name: str, count: int) -> tuple[float, ...]:
    is_list = isinstance(values, list | tuple) and len(values) == count
    if not is_list or not all(is_number(one) and one > 0 for one in values):
        raise ConfigError(
            f"config.json: rope type 'longrope' needs {count} positive numbers as {name!r}, not "
            f"{shown(values)}"
        )
    return tuple(float(one) for one in values)


def _settings(*given: Mapping[str, Any] | None) -> dict[str, Any]:
    """All rope fields of config.json; later ones count."""
    found: dict[str, Any] = {}
    for value in given:
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"config.json: rope settings {value!r} must be a JSON object")
        found |= value or {}
    return found


def _type_of(values: dict[str, Any]) -> str:
    """The rope type, which is taken out of the fields."""
    rope_type = values.pop("rope_type", None) or values.get("type") or "default"
    values.pop("type", None)
    if rope_type in ("su", "yarn") and "short_factor" in values:
        return "longrope"  # its names in the first versions of Phi 3
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise UnsupportedModelError(
            f"rope type {rope_type!r} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    return str(rope_type)


def _llama3(values: dict[str, Any]) -> dict[str, float]:
    """Llama 3's own fields."""
    found = {name: _positive(values, name, "llama3") for name in _LLAMA3_FIELDS}
    if found["low_freq_factor"] >= found["high_freq_factor"]:
        raise ConfigError(
            f"config.json: rope low_freq_factor={found['low_freq_factor']} must be less than "
            f"high_freq_factor={found['high_freq_factor']}"
        )
    return found


def _positive(values: dict[str, Any], name: str, rope_type: str) -> Any:
    value = values.pop(name, None)
    if not is_number(value) or value <= 0:
        raise ConfigError(
            f"config.json: rope type {rope_type!r} needs a positive {name!r}, not {shown(value)}; below 1e30"
        )
    return value


def rope_table(positions: jax.Array, frequencies: np.ndarray, attention_factor: float = 1.0) -> RopeTable:
    """Cosines and sines of `positions` [T] int32, times a factor."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)
    table = jnp.cos(angles), jnp.sin(angles)
    return table if attention_factor == 1 else (table[0] * attention_factor, table[1] * attention_factor)
