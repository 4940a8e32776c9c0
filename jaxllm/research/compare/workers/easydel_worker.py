"""EasyDeL's eSurge, as a worker of `jaxllm compare`."""

from __future__ import annotations

import concurrent.futures
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import protocol


class EasyDeLEngine(protocol.Engine):
    """Requests of threads of their own, as eSurge has one setting of sampling for a call.

    A step takes a whole prompt: with fewer tokens a step, version 0.3.0 gives other tokens. Its attention
    stores bfloat16 unless it is told otherwise.
    """

    compiles_by_shape = True
    _engine: Any = None

    def load(self) -> dict[str, float | None]:
        """Load the weights, with a tokenizer whose words are token ids.

        Raises:
            ValueError: another dtype, random weights, or heads that its attention does not have on a CPU.
        """
        config = json.loads((Path(self.job["model"]) / "config.json").read_text(encoding="utf-8"))
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        if self.job["dtype"] != "float32" or self.job["dummy_weights"] or head_dim % 128:
            raise ValueError(
                f"this back-end runs checkpoints in float32 with heads of 128 dimensions, not of {head_dim}"
            )
        import easydel
        import jax
        from easydel.inference.esurge import eSurge
        from easydel.inference.sampling_params import SamplingParams
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        started = time.perf_counter()
        self._params: Any = SamplingParams
        words = {str(number): number for number in range(config["vocab_size"])}
        numbers = Tokenizer(models.WordLevel(words, unk_token="0"))
        numbers.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        model = easydel.AutoEasyDeLModelForCausalLM.from_pretrained(
            self.job["model"],
            dtype=jax.numpy.float32,
            param_dtype=jax.numpy.float32,
            precision=jax.lax.Precision.HIGHEST,
            sharding_axis_dims=(1, 1, 1, -1, 1),
            config_kwargs={"kvdtype": jax.numpy.float32},
        )
        loaded = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            PreTrainedTokenizerFast(tokenizer_object=numbers).save_pretrained(folder)
            self._engine = eSurge(
                model,
                tokenizer=folder,
                dtype=jax.numpy.float32,
                max_model_len=self.job["max_model_len"],
                max_num_seqs=self.job["max_num_seqs"],
                max_num_batched_tokens=self.job["max_model_len"],
                page_size=32,
                hbm_utilization=0.1,
                enable_prefix_caching=False,
                silent_mode=True,
            )
        return {"load_seconds": loaded - started, "compile_seconds": time.perf_counter() - loaded}

    def generate(
        self, prompts: list[list[int]], max_tokens: list[int], variant: int | None
    ) -> list[list[int]]:
        """All at once; the engine queues what it has no room for."""

        def complete(prompt: list[int], count: int) -> list[int]:
            params = self._params(max_tokens=count, temperature=0.0, ignore_eos=True)
            (output,) = self._engine.generate(" ".join(map(str, prompt)), params, use_tqdm=False)
            if output.prompt_token_ids != [prompt]:
                raise ValueError("the prompt has become other tokens")
            return list(output.outputs[0].token_ids)

        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(complete, prompts, max_tokens))

    def close(self) -> None:
        """End at once: its processes do not end by themselves."""
        if self._engine is not None:
            self._engine.terminate()
            os._exit(0)


if __name__ == "__main__":
    protocol.serve(EasyDeLEngine)
