"""Speculative decoding of simulated requests: drafts are right as often as is stated, and take their time."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllm.errors import ConfigError, did_you_mean, shown
from jaxllm.predictors.base import CostModel, check_integer, check_number
from jaxllm.research.workloads.checks import check_choice
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.policies.speculation import AsProposed, BelowBatch, ByCost, SpeculationPolicy
from jaxllm.sched.scheduler import Scheduler
from jaxllm.sched.speculation import Speculation, most_drafts
from jaxllm.types import PrefillChunk, Request, SchedulerOutput

_RIGHT, _WRONG = 0, 1  # simulated requests sample nothing but 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedDrafts:
    """How simulated requests draft; the names of `LLM(speculative_config=...)` mean the same.

    Args:
        acceptance: how likely a draft is right after others that were, from 0 to 1: of the workload, and
            unknown to the policy.
        num_speculative_tokens: most drafts of a request in one step.
        policy: cost or fixed.
        disable_by_batch_size: draft nothing while so many requests decode.
        model: a draft model on the same device, as `simulate` takes models; None drafts in no time, as
            lookups on the host nearly do.
        seed: of which drafts are right.

    Raises:
        ConfigError: a value is out of range.
    """

    acceptance: float
    num_speculative_tokens: int = 4
    policy: str = "cost"
    disable_by_batch_size: int | None = None
    model: Any = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("acceptance", self.acceptance, 0.0, 1.0)
        check_integer("num_speculative_tokens", self.num_speculative_tokens, 0, 64)
        check_choice("policy", self.policy, ("cost", "fixed"))
        if self.disable_by_batch_size is not None:
            check_integer("disable_by_batch_size", self.disable_by_batch_size, 1, 2**16)

    @classmethod
    def of(cls, value: object) -> SimulatedDrafts | None:
        """A dictionary of the arguments as one; None stays None.

        Raises:
            ConfigError: it is none, or has other keys, or lacks `acceptance`.
        """
        if value is None or isinstance(value, SimulatedDrafts):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"speculative_config={shown(value)} must be a dictionary with 'acceptance'")
        known = [field.name for field in dataclasses.fields(cls)]
        for key in value:
            if key not in known:
                raise ConfigError(
                    f"speculative_config of a simulation has no {shown(key)}; {did_you_mean(key, known)}it "
                    f"takes {', '.join(known)}"
                )
        if "acceptance" not in value:
            raise ConfigError(
                "speculative_config of a simulation needs 'acceptance', how likely a draft is right: nothing "
                "is computed that could tell"
            )
        return cls(**{str(key): one for key, one in value.items()})

    def make(
        self,
        config: SchedulerConfig,
        costs: CostModel,
        drafting: CostModel | None,
        clock: Callable[[], float],
    ) -> Drafting:
        """What drafts in one run.

        Args:
            config: limits of the scheduler.
            costs: what the policy knows of steps.
            drafting: costs of the draft model.
            clock: seconds of the simulation, in which asking takes none.
        """
        proposer = _Chance(self.acceptance, self.seed, drafting)
        policy: SpeculationPolicy = AsProposed()
        if self.policy == "cost":
            policy = ByCost(costs, drafting=proposer.seconds)
        if self.disable_by_batch_size is not None:
            policy = BelowBatch(self.disable_by_batch_size, policy)
        most = most_drafts(config.max_num_seqs, config.max_num_batched_tokens, self.num_speculative_tokens)
        speculation = Speculation(proposer, policy, self.num_speculative_tokens, most, clock=clock)
        return Drafting(speculation, drafting, proposer)


class _Chance:
    """Proposes right tokens up to the first that is not, each with one probability."""

    def __init__(self, acceptance: float, seed: int, costs: CostModel | None) -> None:
        self._acceptance, self._random, self._costs = acceptance, random.Random(seed), costs
        self._context = 0
        self.computed: dict[str, tuple[int, int]] = {}  # preemptions so far, and tokens with KV after that

    def propose(self, asked: Sequence[tuple[Request, int]]) -> Sequence[Sequence[int]]:
        """See `Proposer`."""
        self._context = sum([request.num_known_tokens for request, _ in asked]) // max(1, len(asked))
        draw = self._random.random
        return [
            [_RIGHT if draw() < self._acceptance else _WRONG for _ in range(num_tokens)]
            for _, num_tokens in asked
        ]

    def seconds(self, num_requests: int, num_tokens: int) -> float | None:
        """See `Proposer`; of contexts as long as those that were asked about last."""
        if self._costs is None:
            return None
        return num_tokens * self._costs.step_seconds(num_requests, num_requests * self._context)

    def forget(self, request: Request) -> None:
        """See `Proposer`."""
        self.computed.pop(request.request_id, None)


@dataclasses.dataclass(frozen=True)
class Drafting:
    """What drafts in one run: the scheduler's part, the draft model's costs, and what is proposed."""

    speculation: Speculation
    costs: CostModel | None
    proposer: _Chance

    def seconds(self, scheduled: SchedulerOutput) -> float:
        """What the draft model takes of a step: KV that it lacks, and a token at a time of drafts.

        As in the engine it computes KV of those alone who draft, and of who was preempted again.
        """
        verified = [chunk for chunk in scheduled.prefill if chunk.drafts]
        if self.costs is None or not verified:
            return 0.0
        lacking = [self._lacking(chunk) for chunk in verified]
        behind = [
            (chunk.start - count, count) for chunk, count in zip(verified, lacking, strict=True) if count
        ]
        seconds = 0.0
        if behind:
            contexts, counts = map(sum, zip(*behind, strict=True))
            seconds += self.costs.step_seconds(0, 0, counts, len(behind), contexts)
        num_steps = max(len(chunk.drafts) for chunk in verified)
        context = sum(chunk.start for chunk in verified)
        return seconds + num_steps * self.costs.step_seconds(len(verified), context)

    def _lacking(self, chunk: PrefillChunk) -> int:
        """Tokens before a chunk's that are to be computed; those after them it computes now."""
        times = chunk.request.metrics.num_preemptions
        computed, name = self.proposer.computed, chunk.request.request_id
        last, number = computed.get(name, (times, 0))
        computed[name] = times, chunk.start + len(chunk.drafts)
        # Of drafts that were all right the last one goes with the newest token.
        lacking = chunk.start - (number if last == times else 0)
        return lacking if lacking > 1 else 0

    def accept(self, scheduler: Scheduler, scheduled: SchedulerOutput, now: float) -> list[Request]:
        """Append what a step has sampled of drafts, and let their requests go on; who has ended of them."""
        ended = []
        for chunk in scheduled.prefill:
            drafts, request = chunk.drafts, chunk.request
            if not drafts:
                continue
            num_right = next((place for place, token in enumerate(drafts) if token != _RIGHT), len(drafts))
            request.output_token_ids += [_RIGHT] * (num_right + 1)
            if request.num_known_tokens >= request.max_total_tokens:
                ended.append(request)
            scheduler.accept(request, [(len(drafts), num_right)])
        self.speculation.observe(scheduled, now)
        return ended
