"""An architecture from outside the package: Llama, but that a factor of config.json multiplies its MLPs."""

import dataclasses
import functools

from jaxllm.models.architecture import register
from jaxllm.models.like_llama import read_llama
from jaxllm.models.llama import LlamaConfig, LlamaForCausalLM, LlamaLayer, LlamaMLP
from jaxllm.models.names import WeightNames


@dataclasses.dataclass(frozen=True, kw_only=True)
class FactorConfig(LlamaConfig):
    factor: float


class FactorMLP(LlamaMLP):
    def __init__(self, config, dtype):
        super().__init__(config, dtype)
        self.factor = config.factor

    def __call__(self, x, attend):
        return super().__call__(x, attend) * self.factor


class FactorLayer(LlamaLayer):
    def __init__(self, config, layer, dtype):
        super().__init__(config, layer, dtype)
        self.mlp = FactorMLP(config, dtype)


@register(
    name="FactorForCausalLM",
    model=functools.partial(LlamaForCausalLM, layer=FactorLayer),
    names=WeightNames(prefixes=("decoder.",), fused={"qkv_proj": ("query", "key", "value")}),
    has_rotary_positions=False,
)
def read_factor(fields):
    return FactorConfig(**vars(read_llama(fields)), factor=fields.positive("mlp_factor", 1.0))
