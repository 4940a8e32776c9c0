"""vLLM, the GPU or the CPU build, as a worker of `jaxllm compare`. Needs neither jaxllm nor jax."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import protocol


class VllmEngine(protocol.Engine):
    """`vllm.LLM.generate` without prefix caching, since every repetition has the same prompts."""

    def load(self) -> dict[str, float | None]:
        """Load, compile and warm up; vLLM does not tell these apart."""
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        settings: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "dtype": self.job["dtype"],
            "load_format": "dummy" if self.job["dummy_weights"] else "auto",
            "seed": self.job["seed"],
            "max_model_len": self.job["max_model_len"],
            "max_num_seqs": self.job["max_num_seqs"],
            "enable_prefix_caching": False,
            "disable_log_stats": True,
        }
        if self.job["device"] == "cpu":
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(self.job["kv_cache_gib"]))
            cpus = sorted(os.sched_getaffinity(0))
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cpus)))
        else:
            settings["num_gpu_blocks_override"] = self.job["num_blocks"]
            settings["block_size"] = self.job["block_size"]

        from vllm import LLM

        started = time.perf_counter()
        self._llm = LLM(model=str(Path(self.job["model"])), **settings)
        return {"load_seconds": time.perf_counter() - started, "compile_seconds": None}

    def generate(
        self, prompts: list[list[int]], max_tokens: list[int], variant: int | None
    ) -> list[list[int]]:
        """All requests at once; the scheduler does the rest."""
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in max_tokens
        ]
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def serve_at(
        self, prompts: list[list[int]], max_tokens: list[int], arrivals: list[float]
    ) -> list[tuple[float, float]]:
        """Requests as they come, on the engine itself."""
        from vllm import SamplingParams

        engine, watch = self._llm.llm_engine, protocol.Watch(arrivals, max_tokens)
        while not watch.is_over:
            for place in watch.due():
                count = max_tokens[place]
                params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
                engine.add_request(str(place), {"prompt_token_ids": prompts[place]}, params)
            if not engine.has_unfinished_requests():
                watch.rest()
                continue
            for output in engine.step():
                watch.note(int(output.request_id), len(output.outputs[0].token_ids))
        return watch.times()


if __name__ == "__main__":
    protocol.serve(VllmEngine)
