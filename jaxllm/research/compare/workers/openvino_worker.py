"""OpenVINO GenAI's continuous batching on a CPU, as a worker of `jaxllm compare`."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import protocol
from exporting import exported

_BLOCK_SIZE = 32  # tokens; fixed in the plug-in for CPUs


class OpenvinoEngine(protocol.Engine):
    """`ContinuousBatchingPipeline`, in float32 or with weights of 8 bits.

    It has no prefix caching, since every repetition has the same prompts.
    """

    def load(self) -> dict[str, float | None]:
        """Export the checkpoint unless that is done; load and compile, which OpenVINO does not tell apart.

        Raises:
            ValueError: not a float32 checkpoint on a CPU.
        """
        if (self.job["device"], self.job["dtype"], self.job["dummy_weights"]) != ("cpu", "float32", False):
            raise ValueError("this back-end runs checkpoints in float32 on CPUs only")
        os.environ["CI"] = "true"  # where OpenVINO and its exporter send no usage reports
        started = time.perf_counter()
        model = Path(self.job["model"])
        weight_format = self.job.get("weight_format")
        write = functools.partial(write_export, model, weight_format or "fp32")
        kind = f"openvino-{weight_format}" if weight_format else "openvino"
        folder = exported(model, kind, "openvino_model.xml", write)
        export_seconds = time.perf_counter() - started

        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = self.job["max_num_batched_tokens"]
        scheduler.max_num_seqs = self.job["max_num_seqs"]
        scheduler.num_kv_blocks = num_blocks(self.job["num_blocks"] * self.job["block_size"])
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": self.job["threads"]}
        if weight_format is None:  # else its own choice: activations in 8 bits, KV of 8 bits, the rest in 16
            properties |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        started = time.perf_counter()
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
        return {
            "load_seconds": time.perf_counter() - started,
            "compile_seconds": None,
            "export_seconds": export_seconds,
        }

    def generate(
        self, prompts: list[list[int]], max_tokens: list[int], variant: int | None
    ) -> list[list[int]]:
        """All requests at once; the scheduler does the rest."""
        inputs = [_as_tensor(prompt) for prompt in prompts]
        configs = [_config(count) for count in max_tokens]
        return [result.m_generation_ids[0] for result in self._pipeline.generate(inputs, configs)]

    def serve_at(
        self, prompts: list[list[int]], max_tokens: list[int], arrivals: list[float]
    ) -> list[tuple[float, float]]:
        """Requests as they come, step by step."""
        watch = protocol.Watch(arrivals, max_tokens)
        live: dict[int, tuple[Any, int]] = {}
        while not watch.is_over:
            for place in watch.due():
                tensor, config = _as_tensor(prompts[place]), _config(max_tokens[place])
                live[place] = self._pipeline.add_request(place, tensor, config), 0
            if not live:
                watch.rest()
                continue
            self._pipeline.step()
            for place, (handle, count) in list(live.items()):
                while handle.can_read():
                    count += sum(len(one.generated_ids) for one in handle.read().values())
                live[place] = handle, count
                watch.note(place, count)
                if count >= max_tokens[place]:
                    del live[place]
        return watch.times()


def _as_tensor(prompt: list[int]) -> Any:
    import numpy as np
    import openvino

    return openvino.Tensor(np.array([prompt], dtype=np.int64))


def _config(count: int) -> Any:
    """Greedy. Without an end-of-sequence token it would be -1, which is refused although it is ignored."""
    from openvino_genai import GenerationConfig

    return GenerationConfig(max_new_tokens=count, do_sample=False, ignore_eos=True, eos_token_id=0)


def num_blocks(num_tokens: int) -> int:
    """Blocks of a pool for so many tokens."""
    return -(-num_tokens // _BLOCK_SIZE)


def write_export(checkpoint: Path, weight_format: str, folder: Path) -> None:
    """Write a checkpoint in OpenVINO's form, with weights of a format.

    Raises:
        subprocess.CalledProcessError: the export failed; what it printed says why.
    """
    command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
    command += ["--model", str(checkpoint), "--library", "transformers", "--framework", "pt"]
    command += ["--task", "text-generation-with-past", "--weight-format", weight_format]
    command += ["--disable-convert-tokenizer", str(folder)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    protocol.serve(OpenvinoEngine)
