"""Medusa heads as a folder describes them, with the names of vLLM's `MedusaConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.errors import ConfigError, UnsupportedModelError
from jaxllm.models.fields import Fields

TOKEN_MAP = "token_map"
_UNUSED = (
    "model_type",
    "architectures",
    "max_paths",
    "topk",
    "max_seq_len",
    "logit_scale",
    "speculators_version",
)
"""Of trees of candidates, which are not made, and what changes no draft."""


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
    """Heads: each has `num_layers` residual layers of `hidden_size`, and tells `num_tokens` tokens apart.

    With `shares_output` all have the same output layer. Where they know fewer than `vocab_size` tokens a map
    says which.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int
    num_tokens: int
    has_bias: bool
    shares_output: bool

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MedusaConfig:
        """Read config.json's fields.

        Raises:
            ConfigError: one is missing, out of range, or of something that is not implemented.
        """
        fields = Fields(values)
        about = fields.get("speculators_config", {"algorithm": "medusa"})
        algorithm = about.get("algorithm") if isinstance(about, Mapping) else about
        if algorithm != "medusa" or fields.get("speculators_model_type", "medusa") != "medusa":
            raise UnsupportedModelError(
                f"config.json: speculators_config has the algorithm {algorithm!r}, and these are to be "
                "Medusa heads: choose another folder, or another method"
            )
        for name in _UNUSED:
            fields.get(name)
        vocab_size = fields.size("vocab_size")
        num_tokens = fields.size("truncated_vocab_size", vocab_size)
        if num_tokens > vocab_size:
            raise ConfigError(
                f"config.json: truncated_vocab_size={num_tokens} is more than vocab_size={vocab_size}"
            )
        made = cls(
            hidden_size=fields.size("hidden_size"),
            vocab_size=vocab_size,
            num_heads=fields.size("medusa_num_heads" if "medusa_num_heads" in fields else "num_heads"),
            num_layers=fields.size(
                "medusa_num_layers" if "medusa_num_layers" in fields else "num_hidden_layers", 1
            ),
            num_tokens=num_tokens,
            has_bias=fields.flag("medusa_fc_bias", False),
            shares_output=fields.flag("original_lm_head", False),
        )
        fields.refuse_unread()
        return made

    @property
    def output_names(self) -> list[str]:
        """Of each head the weights of its output layer."""
        if self.shares_output:
            return ["lm_head.weight"] * self.num_heads
        return [f"lm_heads.{head}.weight" for head in range(self.num_heads)]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all weights, by name; the map of tokens, of integers, if there is one."""
        found: dict[str, tuple[int, ...]] = dict.fromkeys(
            self.output_names, (self.num_tokens, self.hidden_size)
        )
        for head in range(self.num_heads):
            for layer in range(self.num_layers):
                name = f"blocks.{head}.layers.{layer}"
                found[f"{name}.weight"] = self.hidden_size, self.hidden_size
                if self.has_bias:
                    found[f"{name}.bias"] = (self.hidden_size,)
        return found if self.num_tokens == self.vocab_size else {**found, TOKEN_MAP: (self.num_tokens,)}
