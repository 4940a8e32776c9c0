"""What becomes of a preempted request's KV?"""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple, Protocol

from jaxllm.predictors.base import CostModel
from jaxllm.sched.pool_state import PoolState
from jaxllm.types import Request


class PreemptionAction(enum.Enum):
    """What becomes of a victim's KV."""

    RECOMPUTE = "recompute"
    """Dropped, to be prefilled again."""
    SWAP = "swap"
    """Moved to host memory, to be moved back."""


class Decision(NamedTuple):
    """An action and what the policy predicted of each, in seconds; None where it predicted nothing.

    `copy_seconds` is how long the copy to the host alone takes.
    """

    action: PreemptionAction
    swap_seconds: float | None = None
    recompute_seconds: float | None = None
    copy_seconds: float | None = None


class ActionPolicy(Protocol):
    """What to do with a victim."""

    def choose(self, victim: Request, state: PoolState, now: float) -> Decision:
        """The action for `victim`, which still holds its blocks.

        `SWAP` needs as many free host blocks as hold its `num_computed_tokens`, less those that are there
        already (`num_copied`). Where there are fewer, or it has computed nothing, it is recomputed.
        """
        ...


@dataclasses.dataclass(frozen=True)
class AlwaysRecompute:
    """Drops every victim's KV."""

    def choose(self, victim: Request, state: PoolState, now: float) -> Decision:
        """`RECOMPUTE`."""
        return Decision(PreemptionAction.RECOMPUTE)


@dataclasses.dataclass(frozen=True)
class SwapIfItFits:
    """Swaps while the host pool has room, else drops: the capacity rule.

    Args:
        costs: predicts how long copies take, which `ResumePolicy` is told; None predicts nothing.
    """

    costs: CostModel | None = None

    def choose(self, victim: Request, state: PoolState, now: float) -> Decision:
        """`SWAP` if the host pool has room."""
        num_blocks = num_copied(victim, state)
        action = PreemptionAction.SWAP if num_blocks <= state.num_host_free else PreemptionAction.RECOMPUTE
        copy_out = None
        if self.costs is not None:
            copy_out = self.costs.swap_out_seconds(num_blocks) if num_blocks else 0.0
        return Decision(action, copy_seconds=copy_out)


@dataclasses.dataclass(frozen=True)
class AdaptiveAction:
    """AdaptiveLLM: predicts both costs and takes the cheaper action (Algorithm 1, lines on swap and drop).

    As in the paper, recomputing costs one prefill of the victim's tokens, swapping a copy of its blocks out
    and back. Tokens in blocks that others hold as well are not computed again.

    Args:
        costs: predicts seconds.
    """

    costs: CostModel

    def choose(self, victim: Request, state: PoolState, now: float) -> Decision:
        """`SWAP` if it is predicted to be faster and fits the host pool."""
        num_blocks = -(-victim.num_computed_tokens // state.block_size)
        if not num_blocks:
            return Decision(PreemptionAction.RECOMPUTE, 0.0, 0.0)
        num_out = num_copied(victim, state)
        num_tokens = victim.num_computed_tokens + 1  # the newest one is prefilled, too
        num_tokens = max(1, num_tokens - state.num_shared * state.block_size)
        costs = serial_costs(self.costs, num_tokens, num_out, max(0, num_blocks - state.num_shared))
        copy_out, swap, recompute = costs
        return cheaper(num_out, state, swap, recompute, copy_out)


def num_copied(victim: Request, state: PoolState) -> int:
    """Blocks that hold a victim's KV, and have no copy on the host."""
    return -(-victim.num_computed_tokens // state.block_size) - state.num_on_host


def serial_costs(costs: CostModel, num_tokens: int, num_out: int, num_in: int) -> tuple[float, float, float]:
    """Seconds of copying blocks out, of copying them out and others back, and of prefilling the tokens."""
    copy_out = costs.swap_out_seconds(num_out) if num_out else 0.0
    swap = copy_out + (costs.swap_in_seconds(num_in) if num_in else 0.0)
    return copy_out, swap, costs.step_seconds(0, 0, num_tokens, 1)


def cheaper(
    num_blocks: int,
    state: PoolState,
    swap_seconds: float,
    recompute_seconds: float,
    copy_seconds: float | None = None,
) -> Decision:
    """The action of lower cost; dropping if the costs are equal or the host pool has no room."""
    is_swap = swap_seconds < recompute_seconds and num_blocks <= state.num_host_free
    action = PreemptionAction.SWAP if is_swap else PreemptionAction.RECOMPUTE
    return Decision(action, swap_seconds, recompute_seconds, copy_seconds)
