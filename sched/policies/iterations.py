"""How many prompt tokens ride in an iteration, and do they share it with decodes?"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import CostModel

_SMALLEST = 16
_CHEAPER = 0.5
"""Most that a paced token may cost of what it costs in the whole backlog, for pacing to be worth the wait."""


class IterationState(NamedTuple):
    """What an iteration starts from.

    Attributes:
        num_decodes: requests that decode.
        num_context_tokens: their tokens together.
        num_backlog_tokens: prompt tokens of all requests that are under way, or wait while there are blocks
            for them.
        budget: most tokens of an iteration.
    """

    num_decodes: int
    num_context_tokens: int
    num_backlog_tokens: int
    budget: int


class IterationPolicy(Protocol):
    """What iterations are made of."""

    @property
    def mixes(self) -> bool:
        """Whether prompt chunks and decodes share iterations; else prompts stop the decodes."""
        ...

    def num_prompt_tokens(self, state: IterationState) -> int:
        """Most prompt tokens of the next iteration, within what its decodes leave of the budget."""
        ...


@dataclasses.dataclass(frozen=True)
class MixedIterations:
    """Decodes first, prompt chunks in what they leave of the budget (Sarathi-Serve; today's vLLM)."""

    mixes = True

    def num_prompt_tokens(self, state: IterationState) -> int:
        """All that is left."""
        return state.budget - state.num_decodes


@dataclasses.dataclass(frozen=True)
class SeparateIterations:
    """An iteration prefills or decodes (Orca's and vLLM 0.2.5's; AdaptiveLLM is defined by them)."""

    mixes = False

    def num_prompt_tokens(self, state: IterationState) -> int:
        """The whole budget."""
        return state.budget


@dataclasses.dataclass(frozen=True)
class PacedIterations:
    """Mixed iterations in which decodes are not slowed down more than `slowdown` times, while that suffices.

    A prompt chunk makes every decode of its iteration wait. So an iteration takes as many prompt tokens as
    are predicted to make it `slowdown` times as long as its decodes alone: what rides behind the reading of
    weights is free. But it takes at least a share of the backlog: where more prompts arrive than that can
    serve, they go first, up to the whole budget. Prompts that there are no blocks for gain nothing by that.

    Where the few would ride for no less a token than all of the backlog together, because arithmetic is busy
    with few rows already or a larger program is computed whole, there is nothing to wait for: all ride.

    Args:
        costs: predicts seconds.
        slowdown: of an iteration, above 1.
        horizon: iterations within which the backlog is to be done.

    Raises:
        ConfigError: a number is out of range.
    """

    costs: CostModel
    slowdown: float = 1.1
    horizon: int = 12
    mixes = True

    def __post_init__(self) -> None:
        if not (1.0 < self.slowdown < float("inf") and self.horizon >= 1):
            raise ConfigError(
                f"slowdown={self.slowdown!r} must be above 1 and finite, horizon={self.horizon!r} at least 1"
            )

    def num_prompt_tokens(self, state: IterationState) -> int:
        """See the class."""
        batch, context, backlog, budget = state
        room = budget - batch
        wanted = -(-backlog // self.horizon)
        if not batch or wanted >= room:
            return room
        alone = self.costs.step_seconds(batch, context)
        limit, low, low_seconds = self.slowdown * alone, 0, alone
        high = _SMALLEST
        while True:  # the first power of two that takes too long, and what of it does not
            high = min(high, room)
            seconds = self.costs.step_seconds(batch, context, high, 1)
            if seconds > limit:
                low += int((high - low) * (limit - low_seconds) / (seconds - low_seconds))
                break
            low, low_seconds = high, seconds
            if high == room:
                break
            high *= 2
        paced, most = max(1, low, wanted), min(room, backlog)
        if paced >= most:
            return paced
        each = (self.costs.step_seconds(batch, context, paced, 1) - alone) / paced
        of_all = (self.costs.step_seconds(batch, context, most, 1) - alone) / most
        return most if each > _CHEAPER * of_all else paced
