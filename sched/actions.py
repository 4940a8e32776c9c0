"""What becomes of a preempted request's KV, and how a swapped request comes back.

Copies run beside steps. A request may resume at once, so that its step waits for what is left of the copy;
or in the background: it holds its blocks while others decode, and joins them when the copy has arrived. A
copy in host memory may also be given up for a prefill, where that has become the cheaper way back.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import NamedTuple, Protocol

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import CostModel
from jaxllm.sched.pressure import PoolState
from jaxllm.types import MAX_STAGED_BLOCKS, Request

_SURELY_HIDDEN = 0.5  # of a step; copies and steps are only predicted


class PreemptionAction(enum.Enum):
    """What becomes of a victim's KV."""

    RECOMPUTE = "recompute"
    """Dropped, to be prefilled again."""
    SWAP = "swap"
    """Moved to host memory, to be moved back."""
    MIXED = "mixed"
    """Its head, the first blocks, moved to host memory; a prefill of the others then brings it back."""


class Decision(NamedTuple):
    """An action and what the policy predicted of each, in seconds; None where it predicted nothing.

    `copy_seconds` is how long the copy to the host alone takes. `num_blocks` is how many of the first blocks
    are copied if the action is `MIXED`: at least one, and not all.
    """

    action: PreemptionAction
    swap_seconds: float | None = None
    recompute_seconds: float | None = None
    copy_seconds: float | None = None
    mixed_seconds: float | None = None
    num_blocks: int | None = None


class ResumeAction(enum.Enum):
    """How a swapped request comes back, once there are blocks for it."""

    AT_ONCE = "at once"
    """It decodes in this iteration, which waits for its copy."""
    IN_BACKGROUND = "in background"
    """It takes its blocks, and decodes when its copy has arrived."""
    LATER = "later"
    """It stays in host memory; so do the less urgent ones."""
    RECOMPUTE = "recompute"
    """Its copy is given up; it waits to be prefilled."""


class ResumeDecision(NamedTuple):
    """An action and what the policy predicted, in seconds; None where it predicted nothing.

    `copy_seconds` is how long the copy alone takes, the others what returning by it, or by a prefill, costs.
    """

    action: ResumeAction
    swap_seconds: float | None = None
    recompute_seconds: float | None = None
    copy_seconds: float | None = None


class ActionPolicy(Protocol):
    """What to do with a victim."""

    def choose(self, victim: Request, state: PoolState, now: float) -> Decision:
        """The action for `victim`, which still holds its blocks.

        `SWAP` is allowed only if as many host blocks are free as it holds device blocks, `MIXED` only if
        as many are, not counting those of other heads, as the decision says.
        """
        ...


class ResumePolicy(Protocol):
    """How a swapped request comes back."""

    def choose(
        self, request: Request, num_lost: int, copied_out_at: float, state: PoolState, now: float
    ) -> ResumeDecision:
        """The action for `request`, for which there are blocks.

        Args:
            request: a swapped request.
            num_lost: blocks to copy; the others still hold its KV.
            copied_out_at: when its copy to the host ends by prediction; now or earlier if nobody predicts.
            state: the pools.
            now: the engine's clock.
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

    Together with `HostBoundAdmission`, which keeps the host pool from filling up, it always swaps.

    Args:
        costs: predicts how long copies take, which `ResumePolicy` is told; None predicts nothing.
    """

    costs: CostModel | None = None

    def choose(self, victim: Request, state: PoolState, now: float) -> Decision:
        """`SWAP` if the host pool has room."""
        num_blocks = len(victim.block_ids)
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
        copy_out, swap, recompute = serial_costs(self.costs, victim)
        return cheaper(victim, state, swap, recompute, copy_out)


@dataclasses.dataclass(frozen=True)
class OverlapAwareAction:
    """Takes the action that delays the engine less: copies run beside steps, prefills share an iteration.

    With means over the recent preemptions (`RecentPressure`):

    - Copying out costs the time until the device's staging memory has room for it: it waits for the copies
      before it, but nobody waits for it.
    - Copying in costs the cheaper of what `OverlapAwareResume` chooses from: what is left of it after its
      share of the decode step it runs beside, which requests that resume together divide; or the share of
      the pool that the request holds without using it.
    - Recomputing costs an equal share of the prefill iteration it becomes part of, or what its tokens add to
      that iteration if they are many: every return takes a place that another start would have had.
    - Either is about the blocks that are lost by then, which with `lazy_eviction` may not be all.
    - With `mixes`, of a victim that would be dropped as many of the first blocks are copied as cost nothing,
      or, where swapping is cheaper, as the host pool has room for, if that is cheaper than to recompute all.

    Args:
        costs: predicts seconds.
        mixes: whether a victim may be copied in part. In the sweep it gains nothing (docs/policies.md).
    """

    costs: CostModel
    mixes: bool = False

    def choose(self, victim: Request, state: PoolState, now: float) -> Decision:
        """The cheapest of what the host pool has room for."""
        num_blocks = len(victim.block_ids)
        swap, copy_out = self._swap_seconds(num_blocks, state)
        recompute = self._recompute_seconds(victim, victim.num_tokens, state)
        decision = cheaper(victim, state, swap, recompute, copy_out)
        if not self.mixes or decision.action is PreemptionAction.SWAP:
            return decision
        num_kept = min(num_blocks - 1, state.num_host_free - state.num_host_heads)
        mixed = 0.0
        if swap < recompute and num_kept > 0:
            mixed, copy_out = self._swap_seconds(num_kept, state)
        else:
            num_kept = self._num_hidden(num_kept, state)
            copy_out = self.costs.swap_out_seconds(num_kept) if num_kept > 0 else 0.0
        mixed += self._recompute_seconds(victim, victim.num_tokens - num_kept * state.block_size, state)
        if num_kept <= 0 or mixed >= recompute:
            return decision
        return Decision(PreemptionAction.MIXED, swap, recompute, copy_out, mixed, num_kept)

    def _num_hidden(self, num_blocks: int, state: PoolState) -> int:
        """Of so many blocks, how many cost nothing to copy out and back."""
        num_blocks = min(num_blocks, MAX_STAGED_BLOCKS - state.num_leaving)
        step = self.costs.decode_seconds(state.num_running, state.num_context_tokens)
        while num_blocks > 0 and self.costs.swap_in_seconds(num_blocks) > _SURELY_HIDDEN * step:
            num_blocks -= 1
        return num_blocks

    def _swap_seconds(self, num_blocks: int, state: PoolState) -> tuple[float, float]:
        """What swapping costs, and how long the copy out takes."""
        costs, recent = self.costs, state.recent
        lost_share = recent.lost_share
        copy_out = costs.swap_out_seconds(num_blocks)
        copy_in = costs.swap_in_seconds(int(num_blocks * lost_share + 0.5) or 1)
        num_seqs = recent.swap_in_seqs if recent.swap_in_seqs > 1.0 else 1.0
        swap = copy_in - costs.decode_seconds(state.num_running, state.num_context_tokens) / num_seqs
        idle = copy_in * num_blocks / state.num_blocks
        if swap > idle:
            swap = idle
        elif swap < 0.0:
            swap = 0.0
        num_over = state.num_leaving + num_blocks - MAX_STAGED_BLOCKS
        if num_over > 0:
            swap += costs.swap_out_seconds(num_over)
        return swap, copy_out

    def _recompute_seconds(self, victim: Request, num_tokens: int, state: PoolState) -> float:
        """What recomputing the last `num_tokens` costs."""
        num_lost = int(num_tokens * state.recent.lost_share + 0.5) or 1
        return _shared_prefill(self.costs, victim, num_lost, state)


@dataclasses.dataclass(frozen=True)
class ResumeAtOnce:
    """Every swapped request resumes as soon as there are blocks for it."""

    def choose(
        self, request: Request, num_lost: int, copied_out_at: float, state: PoolState, now: float
    ) -> ResumeDecision:
        """`AT_ONCE`."""
        return ResumeDecision(ResumeAction.AT_ONCE)


@dataclasses.dataclass(frozen=True)
class OverlapAwareResume:
    """Brings a request back in the way that delays the engine least.

    - A copy that ends within half a decode step is hidden, however wrong the predictions: at once.
    - Else the step would wait for it; or the request's share of the pool would be idle until it has arrived;
      or its copy is given up, and it takes its share of a prefill iteration.
    - While other copies keep the link busy for longer than a step, and new requests wait for the blocks, it
      stays where it is: that costs nothing.
    - A return that costs something should last: it leaves each request that started room for a share of the
      mean output, or comes later, but not for ever: others may start meanwhile. One that is hidden takes what
      is there, for it may be preempted again for free.
    - A copy is given up only when there is room for the request: asked at every step of its stay, it would be
      given up for whatever a prefill costs at the best moment. Its request then waits with the others, by
      urgency, and may start later.

    Args:
        costs: predicts seconds.
        gives_up: whether copies are given up at all.
        output_share: of the mean output, what a return that is not hidden leaves room for; admission asks
            for twice as much (`OutputReserve`).
        patience: decode steps in host memory after which a return need not leave anything free. It must
            still fit: shorter requests that do go on to start.

    Raises:
        ConfigError: `output_share` or `patience` is negative or not finite.
    """

    costs: CostModel
    gives_up: bool = True
    output_share: float = 0.04
    patience: float = 256.0

    def __post_init__(self) -> None:
        for name in ("output_share", "patience"):
            value = getattr(self, name)
            if not 0.0 <= value < float("inf"):
                raise ConfigError(f"{name} must be at least 0 and finite, got {value}")

    def choose(
        self, request: Request, num_lost: int, copied_out_at: float, state: PoolState, now: float
    ) -> ResumeDecision:
        """The cheapest action."""
        if not num_lost:
            return ResumeDecision(ResumeAction.AT_ONCE, 0.0, None, 0.0)
        costs, block_size = self.costs, state.block_size
        step = costs.decode_seconds(state.num_running, state.num_context_tokens) if state.num_running else 0.0
        waits = max(0.0, copied_out_at - now, state.recent.copy_in_until - now)
        copy = costs.swap_in_seconds(num_lost)
        stall = max(0.0, waits + copy - _SURELY_HIDDEN * step)
        if not stall:
            return ResumeDecision(ResumeAction.AT_ONCE, 0.0, None, copy)
        num_blocks = -(-request.num_tokens // block_size)
        idle = max(step, waits + copy) * num_blocks / state.num_blocks
        lost_tokens = max(1, request.num_tokens - (num_blocks - num_lost) * block_size)
        recompute = _shared_prefill(costs, request, lost_tokens, state)
        if waits > step and state.num_waiting:
            return ResumeDecision(ResumeAction.LATER, min(stall, idle), recompute, copy)
        has_room = state.num_free - num_blocks >= state.num_to_grow(self.output_share)
        if not has_room and now - copied_out_at < self.patience * step:
            return ResumeDecision(ResumeAction.LATER, min(stall, idle), recompute, copy)
        if self.gives_up and recompute < min(stall, idle):
            return ResumeDecision(ResumeAction.RECOMPUTE, min(stall, idle), recompute)
        action = ResumeAction.AT_ONCE if stall <= idle else ResumeAction.IN_BACKGROUND
        return ResumeDecision(action, min(stall, idle), recompute, copy)


def num_copied_blocks(policy: ActionPolicy, decision: Decision, num_blocks: int) -> int:
    """How many blocks of a victim that holds `num_blocks` a decision copies to the host: the first ones.

    Raises:
        ConfigError: `policy` answered something that is not a decision, or not one on this victim.
    """
    if not isinstance(decision, Decision) or not isinstance(decision.action, PreemptionAction):
        raise ConfigError(f"{policy} answered {decision!r}, which is not a Decision")
    check_seconds(policy, decision)
    if decision.action is not PreemptionAction.MIXED:
        return num_blocks if decision.action is PreemptionAction.SWAP else 0
    num_copied = decision.num_blocks
    if not isinstance(num_copied, int) or isinstance(num_copied, bool) or not 0 < num_copied < num_blocks:
        raise ConfigError(
            f"{policy} copies {num_copied!r} of {num_blocks} blocks; MIXED copies some of them: answer SWAP "
            "or RECOMPUTE for all or none"
        )
    return num_copied


def serial_costs(costs: CostModel, victim: Request) -> tuple[float, float, float]:
    """Seconds of copying a victim's blocks out, of copying them out and back, and of one prefill of it."""
    num_blocks = len(victim.block_ids)
    copy_out = costs.swap_out_seconds(num_blocks)
    return copy_out, copy_out + costs.swap_in_seconds(num_blocks), costs.prefill_seconds(victim.num_tokens, 1)


def check_seconds(policy: object, decision: Decision | ResumeDecision) -> None:
    """Refuse predictions that are no seconds.

    Raises:
        ConfigError: one is neither None nor a finite number of at least 0.
    """
    mixed = decision.mixed_seconds if isinstance(decision, Decision) else None
    for seconds in (decision.swap_seconds, decision.recompute_seconds, decision.copy_seconds, mixed):
        try:
            is_wrong = seconds is not None and not 0.0 <= seconds < math.inf
        except TypeError:
            is_wrong = True
        if is_wrong:
            raise ConfigError(f"{policy} predicted {seconds!r} s; predict seconds of at least 0, or None")


def cheaper(
    victim: Request,
    state: PoolState,
    swap_seconds: float,
    recompute_seconds: float,
    copy_seconds: float | None = None,
) -> Decision:
    """The action of lower cost; dropping if the costs are equal or the host pool has no room."""
    is_swap = swap_seconds < recompute_seconds and len(victim.block_ids) <= state.num_host_free
    action = PreemptionAction.SWAP if is_swap else PreemptionAction.RECOMPUTE
    return Decision(action, swap_seconds, recompute_seconds, copy_seconds)


def _shared_prefill(costs: CostModel, request: Request, num_lost: int, state: PoolState) -> float:
    """What prefilling `num_lost` tokens of a request costs, as part of an iteration like the recent ones."""
    recent = state.recent
    kept_tokens = request.num_tokens - num_lost
    num_others = int(recent.prefill_seqs - 0.5)
    if num_others < 1:
        return costs.prefill_seconds(num_lost, 1, kept_tokens)
    other_tokens = int(recent.prefill_tokens * num_others / recent.prefill_seqs + 0.5)
    shared = costs.prefill_seconds(num_lost + other_tokens, 1 + num_others, kept_tokens)
    seconds = shared / (1 + num_others)
    if num_lost * num_others > other_tokens:  # longer than the others are
        added = shared - costs.prefill_seconds(other_tokens, num_others)
        if added > seconds:
            return added
    return seconds
