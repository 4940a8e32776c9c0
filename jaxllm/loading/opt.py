"""Checkpoint names of `OPTForCausalLM`."""

from jaxllm.loading.names import FamilyNames

NAMES = FamilyNames(
    prefixes=("model.decoder.", "decoder."), fused={"qkv_proj": ("q_proj", "k_proj", "v_proj")}
)
