"""CTranslate2's generator on static batches, as a worker of `jaxllm compare`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import protocol
from exporting import exported

_CONVERT = """if True:
    import json, sys
    from ctranslate2.converters import TransformersConverter

    class Numbers:  # a tokenizer whose tokens are their ids, for prompts are token ids
        bos_token = eos_token = unk_token = "t0"
        def get_vocab(self):
            size = json.load(open(sys.argv[1] + "/config.json"))["vocab_size"]
            return {f"t{number}": number for number in range(size)}

    class Converter(TransformersConverter):
        def load_tokenizer(self, *arguments, **options):
            return Numbers()

    Converter(sys.argv[1]).convert(sys.argv[2], quantization="float32")
"""


class Ctranslate2Engine(protocol.Engine):
    """Requests sorted by prompt length, cut into batches; a batch runs to its longest output."""

    def load(self) -> dict[str, float | None]:
        """Convert the checkpoint unless that is done, and load.

        Raises:
            ValueError: not a float32 checkpoint.
        """
        if self.job["dtype"] != "float32" or self.job["dummy_weights"]:
            raise ValueError("this back-end runs checkpoints in float32 only")
        started = time.perf_counter()

        def write(folder: Path) -> None:
            command = [sys.executable, "-c", _CONVERT, self.job["model"], str(folder)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)

        folder = exported(Path(self.job["model"]), "ctranslate2", "model.bin", write)
        export_seconds = time.perf_counter() - started

        import ctranslate2

        started = time.perf_counter()
        self._generator = ctranslate2.Generator(
            str(folder),
            device="cuda" if self.job["device"] == "gpu" else "cpu",
            compute_type="float32",
            intra_threads=self.job["threads"],
        )
        seconds = time.perf_counter() - started
        return {"load_seconds": seconds, "compile_seconds": None, "export_seconds": export_seconds}

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
            found = self._generator.generate_batch(
                [[f"t{token}" for token in prompts[place]] for place in members],
                max_length=longest,
                min_length=longest,  # the end of sequence is ignored
                sampling_topk=1,
                include_prompt_in_result=False,
            )
            for one, place in zip(found, members, strict=True):
                outputs[place] = one.sequences_ids[0][: max_tokens[place]]
        return outputs


if __name__ == "__main__":
    protocol.serve(Ctranslate2Engine)
