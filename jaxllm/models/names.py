"""How a model names its weights in a Hugging Face checkpoint."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxllm.models.quantisation import KV_SCALES

if TYPE_CHECKING:
    from jaxllm.models.architecture import ModelConfig

_BUFFERS = re.compile(r"(.*\.)?(rotary_emb\.(original_)?(inv_freq|cos_cached|sin_cached)|masked_bias)")
LM_HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
"""Also the output head of models whose embeddings are tied."""
KV_SCALES_LAYER = "kv_scales"


@dataclasses.dataclass(frozen=True)
class Part:
    """One checkpoint tensor, under its name without prefix, that fills rows of a weight."""

    name: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class WeightNames:
    """The mapping of one architecture.

    `prefixes` stand before every name but that of the output head; the first is the one transformers writes
    for the full model, the others come from saves of the base model. `fused` gives, for a layer of jaxllm,
    the checkpoint layers whose rows it stacks, in order.
    """

    prefixes: tuple[str, ...]
    fused: Mapping[str, tuple[str, ...]]

    def canonical(self, name: str) -> str | None:
        """The name without prefix; None for buffers that inference does not need."""
        if _BUFFERS.fullmatch(name):
            return None
        prefix = next((p for p in self.prefixes if name.startswith(p)), "")
        return name[len(prefix) :]

    def hf_name(self, canonical: str) -> str:
        """The name transformers gives a weight of the full model."""
        return canonical if canonical == LM_HEAD else self.prefixes[0] + canonical

    def parts(self, config: ModelConfig, target: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """The checkpoint tensors that make up the weight `target` of `shape`, in row order."""
        module, _, kind = target.rpartition(".")
        parent, _, layer = module.rpartition(".")
        if layer == KV_SCALES_LAYER:
            return tuple(Part(f"{parent}.{name}", (1,)) for name in KV_SCALES)
        if layer not in self.fused:
            return (Part(target, shape),)
        rows = self.rows(config, target, shape[0])
        return tuple(
            Part(f"{parent}.{source}.{kind}", (count, *shape[1:]))
            for source, count in zip(self.fused[layer], rows, strict=True)
        )

    def rows(self, config: ModelConfig, target: str, num_rows: int) -> list[int]:
        """Rows of each of the matrices that the weight `target` has above one another."""
        layer = target.split(".")[-2]
        if layer == "qkv_proj":
            return [config.num_heads * config.head_dim] + 2 * [config.num_kv_heads * config.head_dim]
        count = len(self.fused.get(layer, ())) or (2 if layer == "gate_up_proj" else 1)
        return [num_rows // count] * count
