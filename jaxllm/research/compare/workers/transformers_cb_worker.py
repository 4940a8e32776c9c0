"""transformers' continuous batching (5.x), as a worker of `jaxllm compare`."""

from __future__ import annotations

import time
from typing import Any

import hf_model
import protocol

_PAGE_SIZE = 256  # the default of transformers; its name differs between versions


class ContinuousEngine(protocol.Engine):
    """One `ContinuousBatchingManager` for the worker's life, with a pool that holds every request."""

    _manager: Any = None

    def load(self) -> dict[str, float | None]:
        """Load the model and start the manager's thread."""
        from transformers.generation import ContinuousBatchingConfig

        started = time.perf_counter()
        model, _ = hf_model.load(self.job)
        config = model.generation_config
        config.eos_token_id = -1
        num_tokens = self.job["num_blocks"] * self.job["block_size"]
        self._manager = model.init_continuous_batching(
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=num_tokens // _PAGE_SIZE + self.job["max_num_seqs"] + 1,
                max_batch_tokens=self.job["max_num_batched_tokens"],
                max_requests_per_batch=self.job["max_num_seqs"],
                allow_block_sharing=False,  # every repetition has the same prompts
            ),
        )
        self._manager.start()
        return {"load_seconds": time.perf_counter() - started, "compile_seconds": None}

    def generate(
        self, prompts: list[list[int]], max_tokens: list[int], variant: int | None
    ) -> list[list[int]]:
        """All requests at once, each with its own length."""
        places: dict[str, int] = {}
        for place, (prompt, count) in enumerate(zip(prompts, max_tokens, strict=True)):
            request_id = self._manager.add_request(prompt, max_new_tokens=count, eos_token_id=-1)
            if request_id is None:
                raise RuntimeError("the manager accepts no requests; the worker's log says why")
            places[request_id] = place
        outputs: list[list[int]] = [[] for _ in prompts]
        unfinished = set(places)
        while unfinished:
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("the generation thread ended; the worker's log says why")
            elif result.error is not None:
                raise RuntimeError(result.error)
            elif result.is_finished() and result.request_id in unfinished:
                unfinished.discard(result.request_id)
                outputs[places[result.request_id]] = list(result.generated_tokens)
        return outputs

    def serve_at(
        self, prompts: list[list[int]], max_tokens: list[int], arrivals: list[float]
    ) -> list[tuple[float, float]]:
        """Requests as they come, on the manager's thread."""
        watch = protocol.Watch(arrivals, max_tokens)
        places: dict[str, int] = {}
        while not watch.is_over:
            for place in watch.due():
                request_id = self._manager.add_request(
                    prompts[place], max_new_tokens=max_tokens[place], eos_token_id=-1, streaming=True
                )
                places[request_id] = place
            result = self._manager.get_result(timeout=0.002)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("the generation thread ended; the worker's log says why")
            elif result.error is not None:
                raise RuntimeError(result.error)
            else:
                watch.note(places[result.request_id], len(result.generated_tokens))
        return watch.times()

    def close(self) -> None:
        """End the generation thread."""
        if self._manager is not None:
            self._manager.stop(block=True, timeout=5)


if __name__ == "__main__":
    protocol.serve(ContinuousEngine)
