"""tunix's sampler on static batches, as a worker of `jaxllm compare`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import protocol

_STEPS_AT_A_TIME = 64  # to which the steps of a batch are rounded up, so that few programs are compiled


class Numbers:
    """A tokenizer whose words are token ids."""

    def __init__(self, pad: int) -> None:
        self._pad = pad

    def encode(self, text: str, **options: Any) -> list[int]:
        """The ids that a text has, with spaces between them."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Any, **options: Any) -> str:
        """Nothing: tokens are read as they are."""
        return ""

    def bos_id(self) -> int:
        """None."""
        return 0

    def eos_id(self) -> int:
        """None: no sequence ends by itself."""
        return -1

    def pad_id(self) -> int:
        """Of what stands before short prompts, which is no token of any."""
        return self._pad


class TunixEngine(protocol.Engine):
    """Requests sorted by prompt length, cut into batches, left-padded; a batch runs to its longest output.

    Its Llama has rotary positions of base 1,000,000, whatever config.json says: others get other tokens.
    """

    compiles_by_shape = True

    def load(self) -> dict[str, float | None]:
        """Load the weights; programs are compiled as they are needed.

        Raises:
            ValueError: not a Llama in float32.
        """
        config = json.loads((Path(self.job["model"]) / "config.json").read_text(encoding="utf-8"))
        is_llama = config.get("architectures") == ["LlamaForCausalLM"]
        if not is_llama or self.job["dtype"] != "float32" or self.job["dummy_weights"]:
            raise ValueError("this back-end runs checkpoints of Llama in float32 only")
        import jax
        import numpy as np
        from tunix.generate import sampler
        from tunix.models.llama3 import model, params

        started = time.perf_counter()
        heads = config["num_attention_heads"]
        shape = model.ModelConfig(
            num_layers=config["num_hidden_layers"],
            vocab_size=config["vocab_size"],
            embed_dim=config["hidden_size"],
            hidden_dim=config["intermediate_size"],
            num_heads=heads,
            head_dim=config.get("head_dim", config["hidden_size"] // heads),
            num_kv_heads=config.get("num_key_value_heads", heads),
            rope_theta=1_000_000,
            norm_eps=config["rms_norm_eps"],
            weight_tying=config["tie_word_embeddings"],
        )
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
        with mesh:
            loaded = params.create_model_from_safe_tensors(
                self.job["model"], shape, mesh, dtype=jax.numpy.float32
            )
        self._pad = config["vocab_size"] - 1
        cache = sampler.CacheConfig(
            cache_size=self.job["max_model_len"] + _STEPS_AT_A_TIME,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
        )
        self._sampler = sampler.Sampler(loaded, Numbers(self._pad), cache)
        return {"load_seconds": time.perf_counter() - started, "compile_seconds": None}

    def generate(
        self, prompts: list[list[int]], max_tokens: list[int], variant: int | None
    ) -> list[list[int]]:
        """`variant` is the batch size."""
        order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
        size = variant or len(prompts)
        outputs: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(order), size):
            if self.give_up_at is not None and time.perf_counter() > self.give_up_at:
                raise protocol.GaveUp(sum(max_tokens[place] for place in order[:start]))
            members = order[start : start + size]
            longest = max(max_tokens[place] for place in members)
            # The token that pads is masked wherever it stands: in prompts another one takes its place.
            texts = [
                " ".join(str(min(token, self._pad - 1)) for token in prompts[place]) for place in members
            ]
            found = self._sampler(
                texts,
                max_generation_steps=-(-longest // _STEPS_AT_A_TIME) * _STEPS_AT_A_TIME,
                eos_tokens=[-1],
            )
            for tokens, place in zip(found.tokens, members, strict=True):
                outputs[place] = [int(token) for token in tokens[: max_tokens[place]]]
        return outputs


if __name__ == "__main__":
    protocol.serve(TunixEngine)
