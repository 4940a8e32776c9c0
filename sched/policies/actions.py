"""What becomes of a preempted request's KV?"""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple, Protocol

from jaxllm.predictors.base import CostModel
from jaxllm.sched.pressure import PoolState
from jaxllm.types import MAX_STAGED_BLOCKS, Request


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

        `SWAP` is allowed only if as many host blocks are free as hold its `num_computed_tokens`.
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
        copy_out = None if self.costs is None else self.costs.swap_out_seconds(num_blocks)
        return Decision(action, copy_seconds=copy_out)


@dataclasses.dataclass(frozen=True)
class AdaptiveAction:
    """AdaptiveLLM: predicts both costs and takes the cheaper action (Algorithm 1, lines on swap and drop).

    As in the paper, recomputing costs one prefill of the victim's tokens, swapping a copy of its blocks out
    and back.

    Args:
        costs: predicts seconds.
    """

    costs: CostModel

    def choose(self, victim: Request, state: PoolState, now: float) -> Decision:
        """`SWAP` if it is predicted to be faster and fits the host pool."""
        num_blocks = num_copied(victim, state)
        num_tokens = victim.num_computed_tokens + 1  # the newest one is prefilled, too
        copy_out, swap, recompute = serial_costs(self.costs, num_tokens, num_blocks)
        return cheaper(num_blocks, state, swap, recompute, copy_out)


@dataclasses.dataclass(frozen=True)
class OverlapAwareAction:
    """Takes the action that adds less to the iterations it rides in.

    - Copying out runs beside steps. It costs the time until the device's staging memory has room for it.
    - Copying in waits for the link, which brings back what is in host memory first. It costs the cheaper of
      what `OverlapAwareResume` chooses from: what is left of it after its share of the iteration it runs
      beside, which requests that resume together divide; or the share of the pool that the request holds
      without using it.
    - Recomputing costs what the victim's tokens add to iterations like the recent ones (`added_seconds`).

    Args:
        costs: predicts seconds.
    """

    costs: CostModel

    def choose(self, victim: Request, state: PoolState, now: float) -> Decision:
        """The cheaper one that the host pool has room for."""
        costs, recent = self.costs, state.recent
        num_blocks = num_copied(victim, state)
        if not num_blocks:
            return Decision(PreemptionAction.RECOMPUTE, 0.0, 0.0)
        copy_out = costs.swap_out_seconds(num_blocks)
        copy_in = costs.swap_in_seconds(num_blocks + state.num_host_blocks - state.num_host_free)
        alone = costs.step_seconds(state.num_running, state.num_context_tokens)
        swap = copy_in - alone / max(1.0, recent.swap_in_seqs)
        swap = max(0.0, min(swap, copy_in * num_blocks / state.num_blocks))
        num_over = state.num_leaving + num_blocks - MAX_STAGED_BLOCKS
        if num_over > 0:
            swap += costs.swap_out_seconds(num_over)
        recompute = added_seconds(costs, victim.num_computed_tokens, state, alone)
        return cheaper(num_blocks, state, swap, recompute, copy_out)


def num_copied(victim: Request, state: PoolState) -> int:
    """Blocks that hold a victim's KV."""
    return -(-victim.num_computed_tokens // state.block_size)


def serial_costs(costs: CostModel, num_tokens: int, num_blocks: int) -> tuple[float, float, float]:
    """Seconds of copying blocks out, of copying them out and back, and of one prefill of the tokens."""
    copy_out = costs.swap_out_seconds(num_blocks)
    swap = copy_out + costs.swap_in_seconds(num_blocks)
    return copy_out, swap, costs.step_seconds(0, 0, num_tokens, 1)


def added_seconds(costs: CostModel, num_tokens: int, state: PoolState, alone: float) -> float:
    """What computing `num_tokens` of a request adds to iterations like the recent ones.

    Without prompts these take `alone` seconds.

    Where iterations are mixed these decode as many requests as now and compute the mean of the prompt
    tokens; else they are prefills of it. Tokens that do not fit one iteration ride in several.
    """
    recent = state.recent
    batch, context, share = 0, 0, 1.0
    if state.mixes:
        batch, context, share = state.num_running, state.num_context_tokens, recent.prompt_share
    others, num_others = int(recent.prompt_tokens * share), int(recent.prompt_seqs * share + 0.5)
    room = max(1, state.num_batched_tokens - batch - others)
    num_steps = -(-num_tokens // room)
    each = num_tokens // num_steps
    before = each * (num_steps - 1) // 2  # tokens of the request itself, in the middle one
    more = costs.step_seconds(batch, context, others + each, num_others + 1, before)
    base = alone if state.mixes else 0.0
    if others:
        base = costs.step_seconds(batch, context, others, num_others)
    return num_steps * max(0.0, more - base)


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
