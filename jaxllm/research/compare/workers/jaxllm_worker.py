"""jaxllm as a worker of `jaxllm compare`."""

from __future__ import annotations

import dataclasses
from typing import Any

import protocol


class JaxllmEngine(protocol.Engine):
    """`LLM.generate` with a pool that holds every request, and every program compiled before the first."""

    def load(self) -> dict[str, float | None]:
        """Load, compile and warm up."""
        from jaxllm import LLM, EngineConfig

        settings: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "load_format": "dummy" if self.job["dummy_weights"] else "auto",
            "dtype": self.job["dtype"],
            "max_model_len": self.job["max_model_len"],
            "max_num_seqs": self.job["max_num_seqs"],
            "max_num_batched_tokens": self.job["max_num_batched_tokens"],
            "block_size": self.job["block_size"],
            "num_gpu_blocks_override": self.job["num_blocks"],
            "seed": self.job["seed"],
            # Compile times of a first start, not of a second one.
            "compilation_cache_dir": None,
        }
        for name, value in {"warm_up": "all", "enable_prefix_caching": False}.items():
            if any(field.name == name for field in dataclasses.fields(EngineConfig)):
                settings[name] = value  # earlier versions know nothing else
        if self.job.get("weight_format"):
            settings["quantization"] = self.job["weight_format"]
        self._llm = LLM(self.job["model"], **(settings | self.job["settings"]))
        return {
            "load_seconds": self._llm.load_times.load_seconds,
            "compile_seconds": self._llm.load_times.warm_up_seconds,
        }

    def generate(
        self, prompts: list[list[int]], max_tokens: list[int], variant: int | None
    ) -> list[list[int]]:
        """All requests at once; the scheduler does the rest."""
        from jaxllm import SamplingParams

        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in max_tokens]
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        return [list(output.token_ids) for output in outputs]

    def serve_at(
        self, prompts: list[list[int]], max_tokens: list[int], arrivals: list[float]
    ) -> list[tuple[float, float]]:
        """Requests as they come, on the engine itself."""
        from jaxllm import SamplingParams

        engine, watch = self._llm.engine, protocol.Watch(arrivals, max_tokens)
        while not watch.is_over:
            for place in watch.due():
                params = SamplingParams(temperature=0.0, max_tokens=max_tokens[place], ignore_eos=True)
                engine.add_request(str(place), {"prompt_token_ids": prompts[place]}, params, stream=True)
            if not engine.has_unfinished_requests:
                watch.rest()
                continue
            for output in engine.step():
                watch.note(int(output.request_id), len(output.outputs[0].token_ids))
        return watch.times()


if __name__ == "__main__":
    protocol.serve(JaxllmEngine)
