"""Workloads of `compare_frameworks.py`: token ids and output lengths, drawn from a seed."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path

MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS = 16, 256
BLOCK_SIZE = 16

PROMPT_LENGTHS: dict[str, Callable[[random.Random], int]] = {
    "short": lambda rng: rng.randint(8, 64),
    "long": lambda rng: rng.randint(256, 768),
    "mixed": lambda rng: min(768, max(16, round(rng.lognormvariate(4.8, 1.0)))),  # median 122 tokens
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests that are all present at time 0: prompts as token ids, and each request's output tokens."""

    name: str
    prompts: list[list[int]]
    max_tokens: list[int]

    def __post_init__(self) -> None:
        if not self.prompts or len(self.prompts) != len(self.max_tokens):
            raise ValueError(
                f"{len(self.prompts)} prompts, {len(self.max_tokens)} max_tokens; one of each per request"
            )
        if not all(self.prompts) or min(self.max_tokens) < 1:
            raise ValueError("every prompt and every max_tokens must be at least 1 token")

    @property
    def num_output_tokens(self) -> int:
        """Tokens all requests ask for: what throughput is counted in."""
        return sum(self.max_tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        return max(self._lengths())

    def num_blocks(self, max_num_seqs: int) -> int:
        """KV blocks of `BLOCK_SIZE` tokens that hold the `max_num_seqs` longest sequences at once."""
        blocks = sorted((-(-length // BLOCK_SIZE) + 1 for length in self._lengths()), reverse=True)
        return sum(blocks[:max_num_seqs]) + 1

    def beginning(self, num_requests: int, num_tokens: int) -> Workload:
        """The first requests with short outputs, to warm up with."""
        return Workload(
            f"{self.name}-beginning",
            self.prompts[:num_requests],
            [min(num_tokens, count) for count in self.max_tokens[:num_requests]],
        )

    def summary(self) -> dict[str, object]:
        """What a reader of the results needs to know."""
        return {
            "name": self.name,
            "num_requests": len(self.prompts),
            "prompt_tokens": sum(map(len, self.prompts)),
            "shortest_prompt": min(map(len, self.prompts)),
            "longest_prompt": max(map(len, self.prompts)),
            "output_tokens": self.num_output_tokens,
        }

    def _lengths(self) -> list[int]:
        return [len(prompt) + count for prompt, count in zip(self.prompts, self.max_tokens, strict=True)]


def make_workload(name: str, *, num_requests: int, vocab_size: int, seed: int) -> Workload:
    """Draw a workload of `PROMPT_LENGTHS`; the same arguments give the same tokens on every machine."""
    rng = random.Random(f"{name}-{seed}")
    prompts, max_tokens = [], []
    for _ in range(num_requests):
        length = PROMPT_LENGTHS[name](rng)
        prompts.append([rng.randrange(vocab_size) for _ in range(length)])
        max_tokens.append(rng.randint(MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS))
    return Workload(name, prompts, max_tokens)


def load_workload(path: Path) -> Workload:
    """Read `{"prompts": [[token id, ...], ...], "max_tokens": [count, ...]}`."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return Workload(path.stem, content["prompts"], content["max_tokens"])


def save_workload(workload: Workload, path: Path) -> None:
    """Write what `load_workload` reads."""
    content = {"prompts": workload.prompts, "max_tokens": workload.max_tokens}
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def get_workload(name_or_path: str, *, num_requests: int, vocab_size: int, seed: int) -> Workload:
    """A named workload, or the one in a file.

    Raises:
        ValueError: the name is unknown, or a token id is not in the vocabulary.
    """
    if name_or_path in PROMPT_LENGTHS:
        return make_workload(name_or_path, num_requests=num_requests, vocab_size=vocab_size, seed=seed)
    path = Path(name_or_path)
    if not path.is_file():
        names = ", ".join(PROMPT_LENGTHS)
        raise ValueError(f"workload {name_or_path!r} is neither a file nor one of {names}")
    workload = load_workload(path)
    largest = max(map(max, workload.prompts))
    if largest >= vocab_size or min(map(min, workload.prompts)) < 0:
        raise ValueError(f"{name_or_path!r} has token ids outside the model's vocabulary of {vocab_size}")
    return workload
