"""Workloads of `jaxllm compare`: token ids and output lengths, drawn from a seed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError, shown
from jaxllm.research.workloads.fitting import TooLong
from jaxllm.system.json_text import parse

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
    arrivals: list[float] | None = None
    """When requests come in a measurement of latency, if a trace says so; in seconds."""

    def __post_init__(self) -> None:
        lists = self.prompts, self.max_tokens, *(self.prompts if isinstance(self.prompts, list) else ())
        if not all(isinstance(one, list) for one in lists):
            raise ConfigError(
                f"workload {self.name!r}: prompts are lists of token ids, and max_tokens a list"
            )
        numbers = itertools.chain(self.max_tokens, *self.prompts)
        if odd := [one for one in numbers if type(one) is not int or abs(one) >= 2**31]:
            raise ConfigError(
                f"workload {self.name!r}: {shown(odd[0])} is no token id, nor a number of tokens"
            )
        if not self.prompts or len(self.prompts) != len(self.max_tokens):
            raise ConfigError(
                f"{len(self.prompts)} prompts, {len(self.max_tokens)} max_tokens; one of each per request"
            )
        if not all(self.prompts) or min(self.max_tokens) < 1:
            raise ConfigError("every prompt and every max_tokens must be at least 1 token")

    @property
    def num_output_tokens(self) -> int:
        """Tokens all requests ask for: what throughput is counted in."""
        return sum(self.max_tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        return max(self.lengths())

    def num_blocks(self, max_num_seqs: int) -> int:
        """KV blocks of `BLOCK_SIZE` tokens that hold the `max_num_seqs` longest sequences at once."""
        blocks = sorted((-(-length // BLOCK_SIZE) + 1 for length in self.lengths()), reverse=True)
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

    def lengths(self) -> list[int]:
        """Tokens of each sequence, prompt and output."""
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


def save_workload(workload: Workload, path: Path) -> None:
    """Write `{"prompts": [[token id, ...], ...], "max_tokens": [count, ...]}`."""
    content = {"prompts": workload.prompts, "max_tokens": workload.max_tokens}
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def get_workload(
    name_or_path: str,
    *,
    num_requests: int,
    vocab_size: int,
    seed: int,
    tokenizer: str | None = None,
    max_len: int | None = None,
    too_long: TooLong = "raise",
    **reading: Any,
) -> Workload:
    """A named workload, or the one in a file.

    Args:
        name_or_path: one of `PROMPT_LENGTHS`; or a file, `{"prompts": [...], "max_tokens": [counts]}` with
            prompts of token ids or text, or a trace that `jaxllm.research.workloads.load_trace` reads.
        num_requests: of a named workload, and the most of a trace.
        vocab_size: of the model.
        seed: of what is drawn.
        tokenizer: a folder with one, for prompts of text.
        max_len: most tokens of a request of a trace, prompt and output together.
        too_long: what becomes of longer ones: see `fit_trace`.
        reading: further arguments of `load_trace`.

    Raises:
        ConfigError: there is no such workload, or it does not fit the model.
        RequestTooLargeError: a request of a trace is longer than `max_len`.
    """
    if name_or_path in PROMPT_LENGTHS:
        return make_workload(name_or_path, num_requests=num_requests, vocab_size=vocab_size, seed=seed)
    path = Path(name_or_path)
    if not path.is_file():
        names = ", ".join(PROMPT_LENGTHS)
        raise ConfigError(f"workload {name_or_path!r} is neither a file nor one of {names}")
    workload = _prompts_of(path, tokenizer)
    if workload is not None and (reading or too_long != "raise"):
        raise ConfigError(
            f"{str(path)!r} holds prompts, and {next(iter(reading), too_long)} is of traces: leave it out"
        )
    if workload is None:
        fits: dict[str, Any] = {"max_len": max_len, "too_long": too_long}
        workload = _of_trace(path, num_requests, vocab_size, seed, tokenizer, fits | reading)
    largest = max(map(max, workload.prompts))
    if largest >= vocab_size or min(map(min, workload.prompts)) < 0:
        raise ConfigError(f"{name_or_path!r} has token ids outside the model's vocabulary of {vocab_size}")
    return workload


def _prompts_of(path: Path, tokenizer: str | None) -> Workload | None:
    """The workload of a file of prompts; None if it is no such file.

    Raises:
        ConfigError: prompts are text, and there is no tokenizer.
    """
    try:
        content = parse(path.read_text(encoding="utf-8"))
        prompts, max_tokens = content["prompts"], content["max_tokens"]
    except (ValueError, KeyError, TypeError):
        return None
    if isinstance(prompts, list) and any(isinstance(prompt, str) for prompt in prompts):
        if tokenizer is None:
            raise ConfigError(
                f"{str(path)!r} has prompts of text: name a folder with a tokenizer, --tokenizer"
            )
        from jaxllm.text.tokenizer import encode, load_tokenizer

        loaded = load_tokenizer(Path(tokenizer))
        prompts = [list(encode(loaded, one)) if isinstance(one, str) else one for one in prompts]
    return Workload(path.stem, prompts, max_tokens)


def _of_trace(
    path: Path,
    num_requests: int,
    vocab_size: int,
    seed: int,
    tokenizer: str | None,
    reading: Mapping[str, Any],
) -> Workload:
    """The workload of a recorded trace."""
    from jaxllm.research.workloads import load_trace

    loaded = None
    if tokenizer is not None:
        from jaxllm.text.tokenizer import load_tokenizer

        loaded = load_tokenizer(Path(tokenizer))
    trace = load_trace(path, limit=num_requests, seed=seed, tokenizer=loaded, **reading)
    prompts = [trace.token_ids(index, vocab_size) for index in range(len(trace))]
    arrivals = [float(time) for time in trace.arrival_times]
    return Workload(
        path.stem, prompts, [int(count) for count in trace.output_lens], arrivals if any(arrivals) else None
    )
