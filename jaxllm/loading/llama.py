"""Checkpoint names of `LlamaForCausalLM` and decoders like it."""

from jaxllm.loading.names import FamilyNames

NAMES = FamilyNames(
    prefixes=("model.",),
    fused={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
)
FUSED_NAMES = FamilyNames(prefixes=NAMES.prefixes, fused={})
"""Of checkpoints whose projections are fused, in our order."""
