"""transformers' `generate` on static batches, as a worker of `jaxllm compare`."""

from __future__ import annotations

import time

import hf_model
import protocol


class StaticEngine(protocol.Engine):
    """Requests sorted by prompt length, cut into batches, left-padded; a batch runs to its longest output."""

    def load(self) -> dict[str, float | None]:
        """Load the model; nothing is compiled."""
        started = time.perf_counter()
        self._model, self._device = hf_model.load(self.job)
        self._model.generation_config.eos_token_id = None
        return {"load_seconds": time.perf_counter() - started, "compile_seconds": None}

    def generate(
        self, prompts: list[list[int]], max_tokens: list[int], variant: int | None
    ) -> list[list[int]]:
        """`variant` is the batch size."""
        import torch
        from transformers import MaxTimeCriteria, StoppingCriteriaList

        order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
        size = variant or len(prompts)
        outputs: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(order), size):
            members = order[start : start + size]
            stops = StoppingCriteriaList()
            if self.give_up_at is not None:
                stops.append(MaxTimeCriteria(max_time=max(0.0, self.give_up_at - time.perf_counter())))
            width = max(len(prompts[place]) for place in members)
            ids = torch.zeros(len(members), width, dtype=torch.long)
            mask = torch.zeros(len(members), width, dtype=torch.long)
            for row, place in enumerate(members):
                ids[row, width - len(prompts[place]) :] = torch.tensor(prompts[place])
                mask[row, width - len(prompts[place]) :] = 1
            with torch.inference_mode():
                tokens = self._model.generate(
                    input_ids=ids.to(self._device),
                    attention_mask=mask.to(self._device),
                    max_new_tokens=max(max_tokens[place] for place in members),
                    stopping_criteria=stops,
                )
            if self.give_up_at is not None and time.perf_counter() > self.give_up_at:
                done = sum(max_tokens[place] for place in order[:start])
                done += sum(min(tokens.shape[1] - width, max_tokens[place]) for place in members)
                raise protocol.GaveUp(done)
            for row, place in zip(tokens[:, width:].tolist(), members, strict=True):
                outputs[place] = row[: max_tokens[place]]
        return outputs

    def top2_gaps(self, sequences: list[list[int]]) -> list[float]:
        """One forward pass for each sequence."""
        import torch

        gaps = []
        for sequence in sequences:
            with torch.inference_mode():
                logits = self._model(torch.tensor([sequence], device=self._device)).logits[0, -1]
            best, second = torch.topk(logits, 2).values.tolist()
            gaps.append(best - second)
        return gaps


if __name__ == "__main__":
    protocol.serve(StaticEngine)
