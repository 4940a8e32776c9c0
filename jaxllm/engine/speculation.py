"""Speculative decoding: its settings, with vLLM's names, and which tokens of a verification count."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxllm.errors import ConfigError, did_you_mean, shown
from jaxllm.predictors.base import CostModel
from jaxllm.sched.policies.speculation import AsProposed, BelowBatch, ByCost, SpeculationPolicy
from jaxllm.sched.proposers import ChainedProposer, Proposer
from jaxllm.sched.proposers.ngram import PromptLookup
from jaxllm.sched.proposers.suffix import SuffixLookup
from jaxllm.sched.speculation import Speculation, Verified, most_drafts
from jaxllm.system.options import check_choice, check_range, checked_path
from jaxllm.types import NO_TOKEN, WRONG_DRAFT, Request, SchedulerOutput, TokenLogprobs

METHODS = ("ngram", "suffix", "draft_model", "medusa", "eagle3")
COMPUTED = METHODS[2:]
"""Those whose drafts are computed on the device."""
_OF_METHODS = {
    "prompt_lookup_min": ("ngram",),
    "prompt_lookup_max": ("ngram",),
    "suffix_decoding_max_spec_factor": ("suffix",),
}
POLICIES = ("cost", "fixed")
MAX_SPECULATIVE_TOKENS = 64
_MOST_LOGITS_BYTES = 64 * 2**20
"""Of all drafts that one step verifies."""
SampledRow = tuple[Request, int, TokenLogprobs | None]
"""Who gets a token, that, and its scores if asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are drafted, with vLLM's names.

    Args:
        method: ngram takes what followed the same few tokens before (`jaxllm.sched.proposers.ngram`), suffix
            what followed the longest ending that was there before (`jaxllm.sched.proposers.suffix`),
            draft_model what a smaller model says (`jaxllm.executor.draft_model`), medusa what heads say that
            see what the model's own head sees (`jaxllm.executor.medusa`), eagle3 what a layer says that
            sees what layers of the model see (`jaxllm.executor.eagle3`).
        model: folder of that model's checkpoint, or of the heads, or its id.
        num_speculative_tokens: most drafts of a request in one step.
        prompt_lookup_min: shortest run of tokens that ngram looks for.
        prompt_lookup_max: longest run.
        suffix_decoding_max_spec_factor: most drafts of suffix for each token of that ending.
        policy: how many of the proposed tokens are verified: as many as pay by cost, or a fixed number.
        disable_by_batch_size: draft nothing while so many requests decode, or more.

    Raises:
        ConfigError: a value is not supported, or out of range.
    """

    method: str = "ngram"
    model: str | None = None
    num_speculative_tokens: int = 4
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    suffix_decoding_max_spec_factor: float = 1.0
    policy: str = "cost"
    disable_by_batch_size: int | None = None

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS)
        check_choice("policy", self.policy, POLICIES)
        if self.is_computed and self.model is None:
            raise ConfigError(f"method={self.method!r} takes a model: give its folder as 'model'")
        if self.model is not None:
            if not self.is_computed:
                raise ConfigError(
                    f"model={shown(self.model)} is for {' and '.join(COMPUTED)}, and method={self.method!r} "
                    "takes none: leave it out"
                )
            object.__setattr__(self, "model", checked_path("model", self.model))
        check_range("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)
        check_range("prompt_lookup_max", self.prompt_lookup_max, 1, 64)
        check_range("prompt_lookup_min", self.prompt_lookup_min, 1, self.prompt_lookup_max)
        check_range(
            "suffix_decoding_max_spec_factor",
            self.suffix_decoding_max_spec_factor,
            0.1,
            64.0,
            is_integer=False,
        )
        if self.disable_by_batch_size is not None:
            check_range("disable_by_batch_size", self.disable_by_batch_size, 1, 2**16)

    @property
    def is_computed(self) -> bool:
        """Whether drafts are computed on the device."""
        return self.method in COMPUTED

    def max_drafts(self, max_num_seqs: int, max_num_batched_tokens: int, vocab_size: int) -> int:
        """Most drafts of one step: those of all requests it has rows for, while their logits are small.

        Raises:
            ConfigError: it has rows for none.
        """
        most = most_drafts(max_num_seqs, max_num_batched_tokens, self.num_speculative_tokens)
        return min(most, _MOST_LOGITS_BYTES // (4 * vocab_size))

    def make(self, max_drafts: int, costs: CostModel, model: ChainedProposer | None = None) -> Speculation:
        """What drafts at most so many tokens a step, by these costs of steps; each engine has its own.

        `model` proposes them if they are computed.
        """
        proposer: Proposer = PromptLookup(self.prompt_lookup_min, self.prompt_lookup_max)
        if model is not None:
            proposer = model
        elif self.method == "suffix":
            proposer = SuffixLookup(self.suffix_decoding_max_spec_factor)
        policy: SpeculationPolicy = AsProposed()
        if self.policy == "cost":
            policy = ByCost(costs, drafting=proposer.seconds)
        if self.disable_by_batch_size is not None:
            policy = BelowBatch(self.disable_by_batch_size, policy)
        return Speculation(proposer, policy, self.num_speculative_tokens, max_drafts, chained=model)


def speculative_config(name: str, value: object) -> SpeculativeConfig | None:
    """A dictionary of `SpeculativeConfig`'s fields as one; None stays None.

    Raises:
        ConfigError: it is none, or a field is unknown or out of range.
    """
    if value is None or isinstance(value, SpeculativeConfig):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}={shown(value)} must be a dictionary such as {{'method': 'ngram'}}")
    known = [field.name for field in dataclasses.fields(SpeculativeConfig)]
    for key in value:
        if key not in known:
            raise ConfigError(
                f"{name} has no {shown(key)}; {did_you_mean(key, known)}it takes {', '.join(known)}"
            )
    method = value.get("method", "ngram")
    for key, methods in _OF_METHODS.items():
        if key in value and method not in methods:
            raise ConfigError(
                f"{name}: {key}={shown(value[key])} is of method {' and '.join(methods)}, and this is "
                f"{shown(method)}: leave it out"
            )
    settings: dict[str, Any] = {str(key): one for key, one in value.items()}
    try:
        return SpeculativeConfig(**settings)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def judged(
    scheduled: SchedulerOutput, rows: Iterable[SampledRow], token_ids: Sequence[int]
) -> tuple[Iterable[SampledRow], Sequence[Verified]]:
    """Of the rows of a step with drafts those that count, and with lookups what became of each request's.

    `rows` are its `token_ids` with their requests, if it had no lookups.
    """
    return looked_up(scheduled, token_ids) if scheduled.num_lookups else (accepted(scheduled, rows), ())


def accepted(scheduled: SchedulerOutput, rows: Iterable[SampledRow]) -> Iterator[SampledRow]:
    """Of a step's sampled rows those that count: none after a draft that was not what was sampled.

    A draft is as likely to be sampled as to be right: so outputs are those of the same seeds without drafts,
    and nothing has to be sampled again.
    """
    drafts: list[int | None] = [None] * len(scheduled.decode)
    for chunk in scheduled.prefill:
        if chunk.is_last:
            drafts += [*chunk.drafts, None]
    is_wrong = False
    for draft, row in zip(drafts, rows, strict=True):
        if not is_wrong:
            yield row
        is_wrong = draft is not None and (is_wrong or row[1] != draft)


def looked_up(
    scheduled: SchedulerOutput, token_ids: Sequence[int]
) -> tuple[list[SampledRow], list[Verified]]:
    """Of a step whose drafts the device looked up the rows that count, and what became of each request's."""
    requests = scheduled.decode
    width = len(token_ids) // (len(requests) * scheduled.num_decode_steps)
    rows: list[SampledRow] = []
    found: list[Verified] = [[] for _ in requests]
    for place, start in enumerate(range(0, len(token_ids), width)):
        tokens = token_ids[start : start + width]
        kept = [token for token in tokens if token not in (NO_TOKEN, WRONG_DRAFT)]
        if kept:
            of_request = place % len(requests)
            rows += [(requests[of_request], token, None) for token in kept]
            num_drafts = width - 1 - tokens.count(NO_TOKEN)
            found[of_request].append((num_drafts, len(kept) - 1))
    return rows, found
