"""The models of a ladder: Llama and OPT configurations that differ in layers and hidden size only."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from transformers import LlamaConfig, OPTConfig, PretrainedConfig

from jaxllm import LLM

FAMILIES = ("llama", "opt")
MAX_MODEL_LEN = 256
MAX_NUM_SEQS = 16
BLOCK_SIZE = 16
_VOCAB_SIZE = 1024
_MAX_HEAD_DIM = 64


@dataclasses.dataclass(frozen=True)
class Rung:
    """One model: its family, layers and hidden size, which decide everything else about it."""

    family: str
    num_layers: int
    hidden_size: int

    @property
    def name(self) -> str:
        """How it is called in results."""
        return f"{self.family}-{self.num_layers}x{self.hidden_size}"

    def config(self) -> PretrainedConfig:
        """What transformers would load: heads of 64 (at least two), an MLP as wide as the family's."""
        hidden = self.hidden_size
        sizes: dict[str, Any] = {
            "hidden_size": hidden,
            "num_attention_heads": max(2, hidden // _MAX_HEAD_DIM),
            "num_hidden_layers": self.num_layers,
            "vocab_size": _VOCAB_SIZE,
            "max_position_embeddings": MAX_MODEL_LEN,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        if self.family == "opt":
            return OPTConfig(
                ffn_dim=4 * hidden, word_embed_proj_dim=hidden, architectures=["OPTForCausalLM"], **sizes
            )
        return LlamaConfig(intermediate_size=11 * hidden // 4, architectures=["LlamaForCausalLM"], **sizes)

    def load(self, folder: pathlib.Path) -> LLM:
        """An engine with random weights; its configuration is written to `folder`."""
        self.config().save_pretrained(folder)
        return LLM(
            str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            warm_up="all",
            dtype="float32",
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=128,
            decode_buckets=[MAX_NUM_SEQS],
            prefill_buckets=[32, 128],
            num_gpu_blocks_override=MAX_NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE,
            num_host_blocks=32,
            num_scheduler_steps=1,
            scheduler_policy="vllm_v1",
        )
