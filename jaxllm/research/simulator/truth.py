"""What really happens in a simulation: residuals of a real profile, and what hindsight would decide."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import COST_KINDS, CostKind, CostModel
from jaxllm.sched.policies import ActionPolicy, Decision, PoolState, PreemptionAction
from jaxllm.sched.policies.actions import cheaper, num_copied
from jaxllm.types import Request

_MASK = (1 << 64) - 1
_REALISED: tuple[CostKind, ...] = ("prefill", "swap_out", "swap_in")  # what `RealisedCosts` knows better


class Residuals:
    """Ratios measured / predicted, drawn at random and the same for the same piece of work.

    The ratios come from a part of a profile that no predictor was fitted on, so that predictors meet the
    errors they would meet on the device and never see the truth.

    Args:
        ratios: by kind of cost; a kind without any has no noise.
        seed: the same one draws the same ratios.

    Raises:
        ConfigError: a kind is unknown, or a ratio is not a positive number.
    """

    def __init__(self, ratios: Mapping[CostKind, Sequence[float]], *, seed: int = 0) -> None:
        unknown = sorted(ratios.keys() - set(COST_KINDS))
        if unknown:
            raise ConfigError(f"unknown kinds of cost {unknown}; use {', '.join(COST_KINDS)}")
        self._ratios: dict[CostKind, list[float]] = {}
        for kind, values in ratios.items():
            array = np.asarray(values, np.float64)
            if array.ndim != 1 or not array.size or not np.all((array > 0) & np.isfinite(array)):
                raise ConfigError(f"ratios of {kind!r} must be positive numbers, at least one: {values}")
            self._ratios[kind] = array.tolist()
        self._salts = {kind: _mix(seed * len(COST_KINDS) + i) for i, kind in enumerate(COST_KINDS)}

    def ratio(self, kind: CostKind, key: int) -> float:
        """What the predicted seconds of the piece of work `key` are multiplied by."""
        ratios = self._ratios.get(kind)
        return 1.0 if ratios is None else ratios[_mix(self._salts[kind] + key) % len(ratios)]

    def ratios(self, kind: CostKind) -> Sequence[float]:
        """All that are drawn from; 1 alone for a kind without noise."""
        return tuple(self._ratios.get(kind, (1.0,)))


def key_of(request: Request, more_preemptions: int = 0) -> int:
    """Names what the last preemption of a request leads to: its copies, and the prefill it starts."""
    return (request.arrival_index << 20) + request.metrics.num_preemptions + more_preemptions


def _mix(value: int) -> int:
    """SplitMix64's finaliser: neighbours become unrelated."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclasses.dataclass(frozen=True)
class RealisedCosts:
    """What the work for one victim will take: a `CostModel` that knows its residuals."""

    costs: CostModel
    residuals: Residuals
    key: int

    def step_seconds(
        self,
        batch: int,
        context_tokens: int,
        prompt_tokens: int = 0,
        num_prompts: int = 0,
        prompt_context: int = 0,
    ) -> float:
        """Of a step with prompt tokens that this victim's return leads; its decodes are not known better."""
        decodes = self.costs.step_seconds(batch, context_tokens)
        work = prompt_tokens, num_prompts, prompt_context
        added = self.costs.step_seconds(batch, context_tokens, *work) - decodes
        return decodes + added * self.residuals.ratio("prefill", self.key)

    def swap_out_seconds(self, num_blocks: int) -> float:
        """Of this victim's blocks."""
        return self.costs.swap_out_seconds(num_blocks) * self.residuals.ratio("swap_out", self.key)

    def swap_in_seconds(self, num_blocks: int) -> float:
        """Of this victim's blocks."""
        return self.costs.swap_in_seconds(num_blocks) * self.residuals.ratio("swap_in", self.key)


@dataclasses.dataclass(frozen=True)
class HindsightAction:
    """The oracle: weighs both actions as `rule` does, but by what they will really take.

    Exists in simulations only. A drop's residual is that of the prompt tokens it leads; where another request
    leads the step it takes part in, hindsight errs too.

    Args:
        rule: makes the action policy for a cost model, such as `AdaptiveAction`.
        costs: the simulation's costs.
        residuals: the simulation's.
    """

    rule: Callable[[CostModel], ActionPolicy]
    costs: CostModel
    residuals: Residuals

    def choose(self, victim: Request, state: PoolState, now: float) -> Decision:
        """The action that will cost less."""
        realised = RealisedCosts(self.costs, self.residuals, key_of(victim, 1))
        return self.rule(realised).choose(victim, state, now)


@dataclasses.dataclass(frozen=True)
class ExpectedAction:
    """Knows the distribution of the noise, but not what it will be: the best there is without hindsight.

    Costs are averaged over draws, as many as the kind with most ratios has, so that each counts once.
    The n-th draw takes the n-th ratio of every kind, beginning again where a kind has no more.

    Args:
        rule, costs, residuals: as for `HindsightAction`.
        max_draws: of a longer list of ratios so many are taken, at equal distances.
    """

    rule: Callable[[CostModel], ActionPolicy]
    costs: CostModel
    residuals: Residuals
    max_draws: int = 256

    @functools.cached_property
    def _draws(self) -> Sequence[Residuals]:
        """The same ratios for all work, for each draw."""
        ratios = {kind: self.residuals.ratios(kind) for kind in _REALISED}
        count = max(map(len, ratios.values()))
        num_draws = min(count, self.max_draws)
        places = [draw * count // num_draws for draw in range(num_draws)]
        return [
            Residuals({kind: [values[place % len(values)]] for kind, values in ratios.items()})
            for place in places
        ]

    def choose(self, victim: Request, state: PoolState, now: float) -> Decision:
        """The action that costs less on average."""
        num_blocks = num_copied(victim, state)
        decisions = [
            self.rule(RealisedCosts(self.costs, drawn, 0)).choose(victim, state, now) for drawn in self._draws
        ]
        swap, recompute, copy = (
            statistics.fmean(value or 0.0 for value in values)
            for values in zip(*[decision[1:] for decision in decisions], strict=True)
        )
        has_copy = decisions[0].copy_seconds is not None
        return cheaper(num_blocks, state, swap, recompute, copy if has_copy else None)


@dataclasses.dataclass
class RegretMeter:
    """Decides as `action` does, and adds up what hindsight would have saved.

    Attributes:
        best_seconds: of all decisions, the realised cost of the cheaper action that was possible.
        regret_seconds: what the chosen actions cost above it.
        num_decisions, num_wrong: decisions, and those that were not the cheaper one.
    """

    action: ActionPolicy
    hindsight: HindsightAction
    best_seconds: float = 0.0
    regret_seconds: float = 0.0
    num_decisions: int = 0
    num_wrong: int = 0

    def choose(self, victim: Request, state: PoolState, now: float) -> Decision:
        """The decision of `action`."""
        decision = self.action.choose(victim, state, now)
        best = self.hindsight.choose(victim, state, now)
        assert best.swap_seconds is not None
        assert best.recompute_seconds is not None  # the rule weighs
        costs = {
            PreemptionAction.SWAP: best.swap_seconds,
            PreemptionAction.RECOMPUTE: best.recompute_seconds,
        }
        self.num_decisions += 1
        self.best_seconds += costs[best.action]
        self.num_wrong += costs[decision.action] > costs[best.action]
        self.regret_seconds += costs[decision.action] - costs[best.action]
        return decision
