"""Prompts that say something about how long their outputs are, with noise."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from jaxllm.research.workloads.checks import check_integer, check_number

_TOPIC_TOKENS = 10
_OTHER_TOKENS = 800
_SHARE = 1 / 3


@dataclasses.dataclass(frozen=True)
class TopicOutputs:
    """Output lengths that depend on what a prompt is about.

    A prompt has one of `num_topics` topics. A third of its tokens, drawn at random, are of the topic's ten,
    the others of 800 common ones. Its output is lognormal about the topic's median; the medians go from 1/32
    of the longest output to half of it, each the same multiple of the one before. Outputs are cut to the
    longest.

    Args:
        noise: standard deviation of the logarithm of an output about its topic's; 0 makes the topic say all.
        num_topics: at least 2.

    Raises:
        ConfigError: a number is out of range.
    """

    noise: float = 0.3
    num_topics: int = 8

    def __post_init__(self) -> None:
        check_number("noise", self.noise, 0.0, 10.0)
        check_integer("num_topics", self.num_topics, 2, 1000)

    @property
    def vocab_size(self) -> int:
        """Token ids lie below it."""
        return self.num_topics * _TOPIC_TOKENS + _OTHER_TOKENS

    def sample(
        self, prompt_lens: npt.NDArray[np.int64], max_output_len: int, rng: np.random.Generator
    ) -> tuple[tuple[tuple[int, ...], ...], npt.NDArray[np.int64]]:
        """Prompts of these lengths, and the lengths `[N]` of their outputs."""
        medians = max_output_len / 32 * 16.0 ** (np.arange(self.num_topics) / (self.num_topics - 1))
        prompts, outputs = [], []
        for length in prompt_lens.tolist():
            topic = int(rng.integers(self.num_topics))
            of_topic = topic * _TOPIC_TOKENS + rng.integers(_TOPIC_TOKENS, size=length)
            others = self.num_topics * _TOPIC_TOKENS + rng.integers(_OTHER_TOKENS, size=length)
            prompts.append(tuple(np.where(rng.random(length) < _SHARE, of_topic, others).tolist()))
            outputs.append(medians[topic] * np.exp(self.noise * rng.standard_normal()))
        return tuple(prompts), np.clip(np.round(outputs), 1, max_output_len).astype(np.int64)
