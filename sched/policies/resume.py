"""How does KV come back from host memory?

That of a swapped request, or what a waiting one finds there. Copies run beside steps. A request may go on at
once, so that its step waits for what is left of the copy; or in the background: it holds its blocks while
others decode, and joins them when the copy has arrived.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple, Protocol

from jaxllm.predictors.base import CostModel
from jaxllm.sched.pool_state import PoolState
from jaxllm.types import Request

_SURELY_HIDDEN = 0.5  # of a step; copies and steps are only predicted
_MOST_STEPS = 3.0  # that a copy at once may take, for a first token


class ResumeAction(enum.Enum):
    """How a queued request's KV comes back, once there are blocks for it."""

    AT_ONCE = "at once"
    """It goes on in this iteration, which waits for its copy."""
    IN_BACKGROUND = "in background"
    """It takes its blocks, and goes on when its copy has arrived."""
    LATER = "later"
    """It stays where it is; so do the less urgent ones, if it was swapped."""
    RECOMPUTE = "recompute"
    """It computes what is in host memory. Only for a waiting request: a swapped one stays, as for `LATER`."""


class ResumeDecision(NamedTuple):
    """An action and what the policy predicted, in seconds; None where it predicted nothing.

    `copy_seconds` is how long the copy alone takes, `swap_seconds` what returning by it costs.
    """

    action: ResumeAction
    swap_seconds: float | None = None
    copy_seconds: float | None = None


class ResumePolicy(Protocol):
    """How a queued request's KV comes back from host memory."""

    def choose(self, request: Request, copied_out_at: float, state: PoolState, now: float) -> ResumeDecision:
        """The action for `request`, for which there are blocks.

        Args:
            request: a swapped request, or a waiting one that finds blocks in host memory.
            copied_out_at: when its copy to the host ends by prediction; now or earlier if nobody predicts.
            state: the pools, and what is to be copied (`num_to_copy`).
            now: the engine's clock.
        """
        ...


@dataclasses.dataclass(frozen=True)
class ResumeAtOnce:
    """Every request copies what is in host memory as soon as there are blocks for it."""

    def choose(self, request: Request, copied_out_at: float, state: PoolState, now: float) -> ResumeDecision:
        """`AT_ONCE`."""
        return ResumeDecision(ResumeAction.AT_ONCE)


@dataclasses.dataclass(frozen=True)
class OverlapAwareResume:
    """Brings a request back in the way that delays the engine least.

    - A copy that ends within half a decode step is hidden, however wrong the predictions: at once.
    - Else the step would wait for it; or the request's share of the pool would be idle until it has arrived.
    - While other copies keep the link busy for longer than a step, and new requests wait for the blocks, it
      stays where it is: that costs nothing.
    - A waiting request computes what it would wait longer for. It goes on at once if the step then takes no
      more than thrice as long: its first token is what somebody waits for.

    Others may start meanwhile, but not for ever (`SchedulerPolicy.patience`).

    Args:
        costs: predicts seconds.
    """

    costs: CostModel

    def choose(self, request: Request, copied_out_at: float, state: PoolState, now: float) -> ResumeDecision:
        """The cheapest action."""
        costs, block_size = self.costs, state.block_size
        step = costs.step_seconds(state.num_running, state.num_context_tokens) if state.num_running else 0.0
        waits = max(0.0, copied_out_at - now, state.copy_in_until - now)
        copy = costs.swap_in_seconds(state.num_to_copy) if state.num_to_copy else 0.0
        is_waiting = state.num_to_recompute > 0
        if is_waiting and waits + copy > costs.step_seconds(0, 0, state.num_to_recompute, 1):
            return ResumeDecision(ResumeAction.RECOMPUTE, waits + copy, copy)
        stall = max(0.0, waits + copy - _SURELY_HIDDEN * step)
        if not stall:
            return ResumeDecision(ResumeAction.AT_ONCE, 0.0, copy)
        num_blocks = -(-request.num_tokens // block_size)
        idle = max(step, waits + copy) * num_blocks / state.num_blocks
        if waits > step and state.num_waiting > is_waiting:
            return ResumeDecision(ResumeAction.LATER, min(stall, idle), copy)
        if stall <= idle or (is_waiting and waits + copy <= _MOST_STEPS * step):
            return ResumeDecision(ResumeAction.AT_ONCE, stall, copy)
        return ResumeDecision(ResumeAction.IN_BACKGROUND, idle, copy)
