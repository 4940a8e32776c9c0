"""vLLM 0.2.5's scheduler, decision by decision.

Prefills go first while nothing is swapped; an iteration prefills or decodes. What no later system shares
is kept here: prompt batches are padded to their longest prompt, a request decodes only while a block is free
even if its last one has room, swapped requests ask for more room than they need, and the samples of a prompt
are swapped together. Not so: each sample prefills the prompt and has blocks of its own.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Literal

from jaxllm.errors import ConfigError
from jaxllm.sched.plan import Plan, Planner, PlanningPolicy, ask_action
from jaxllm.sched.policies import ActionPolicy, Decision, PreemptionAction, ResumeAction, ResumeDecision
from jaxllm.sched.policies.contract import watched
from jaxllm.sched.policies.priority import FCFSPriority, PriorityPolicy
from jaxllm.sched.queues import Verdict
from jaxllm.sched.state import SchedulerState
from jaxllm.types import Request

_WATERMARK = 0.01
_MAX_PADDINGS = 256
_DROP, _SWAP = Decision(PreemptionAction.RECOMPUTE), Decision(PreemptionAction.SWAP)
_AT_ONCE = ResumeDecision(ResumeAction.AT_ONCE)


@dataclasses.dataclass(frozen=True)
class VLLM025(PlanningPolicy):
    """vLLM 0.2.5: first come first served, the latest arrival is preempted.

    Args:
        swaps: "never" drops victims, to be prefilled again, but swaps those of several samples while the host
            pool has room. The others swap them out, and start a request
            only if all that started could end in host memory, each at its greatest length: within the "host"
            pool, or within "both" pools less the largest request. vLLM has no such rule and fails when the
            host pool is full; AdaptiveLLM describes its vLLM_s, which swaps, as running smaller batches.
        action: decides between the two for each victim instead, and bounds nothing: AdaptiveLLM's memory
            strategy without its order of requests (Section 4.3).

    Raises:
        ConfigError: there is no such rule, or there are two.
    """

    swaps: Literal["never", "host", "both"] = "never"
    action: ActionPolicy | None = None

    def __post_init__(self) -> None:
        if self.swaps not in ("never", "host", "both"):
            raise ConfigError(f"swaps={self.swaps!r} is unknown: use 'never', 'host' or 'both'")
        if self.action is not None and self.swaps != "never":
            raise ConfigError(
                f"swaps={self.swaps!r} leaves {self.action!r} nothing to decide; pass one of them"
            )

    @property
    def priority(self) -> PriorityPolicy:
        """First come, first served."""
        return FCFSPriority()

    @property
    def may_swap(self) -> bool:
        """Whether it can ask for host memory: for samples of a prompt at the least."""
        return True

    @property
    def needs_host_pool(self) -> bool:
        """Whether it starts only what fits host memory."""
        return self.swaps == "host"

    @property
    def reads(self) -> tuple[str, ...]:
        """Neither priorities nor deadlines."""
        return ()

    def planner(self, state: SchedulerState) -> VLLM025Planner:
        """What decides."""
        return VLLM025Planner(state, self)


class VLLM025Planner(Planner):
    """Plans as vLLM 0.2.5's `Scheduler._schedule` does."""

    def __init__(self, state: SchedulerState, rules: VLLM025) -> None:
        """Reads `state`."""
        self._state, self._rules, self._action = state, rules, watched(rules.action)

    def plan(self, now: float) -> Plan:
        """The next iteration."""
        state = self._state
        plan = Plan(is_repeatable=False)  # it wants a free block for each, every time
        if state.prompts or not state.swapped:
            self._prefill(plan, now)
        if plan.chunks or plan.starting:
            plan.decodes = False
            return plan
        requests, growing = state.running.requests, set(state.running.growing)
        num_kept, num_growing = len(requests), len(growing)
        num_free, num_host_free = state.pool.num_free, state.host.num_available
        while num_kept > 1:
            # A free block is asked for on behalf of each request in turn, also of one that needs none.
            needs_spare = requests[num_kept - 1] not in growing
            if num_growing + needs_spare <= num_free:
                break
            num_victims, group = 1, requests[num_kept - 1].group_index
            while requests[num_kept - num_victims - 1].group_index == group != requests[0].group_index:
                num_victims += 1
            victims = requests[num_kept - num_victims : num_kept]
            num_kept -= num_victims
            is_room = sum([len(victim.block_ids) for victim in victims]) <= num_host_free
            for victim in reversed(victims):
                decision = self._decide(victim, num_free, num_host_free, now)
                if num_victims > 1 and self._rules.action is None:
                    decision = _SWAP if is_room else _DROP
                is_swap = decision.action is PreemptionAction.SWAP
                plan.victims.append((victim, decision))
                num_growing -= victim in growing
                num_free += len(victim.block_ids)
                num_host_free -= len(victim.block_ids) * is_swap
        if state.swapped and not plan.victims:
            self._swap_in(plan, num_free - num_growing, now)
        return plan

    def _decide(self, victim: Request, num_free: int, num_host_free: int, now: float) -> Decision:
        """What becomes of a victim, while so many blocks are free."""
        rules = self._rules
        if self._action is not None:
            pools = self._state.pools(num_free, num_host_free)
            return ask_action(self._action, victim, pools, num_host_free, now)
        return _SWAP if rules.swaps != "never" and len(victim.block_ids) <= num_host_free else _DROP

    def _prefill(self, plan: Plan, now: float) -> None:
        """Add the prompt that spans iterations, and those that start, as many as fit a padded batch."""
        state, pool, config = self._state, self._state.pool, self._state.config
        budget, num_free = config.max_num_batched_tokens, pool.num_free
        lengths: list[int] = []
        for request in state.prompts:
            num_free -= pool.blocks_for(request.num_tokens) - len(request.block_ids)
            lengths.append(min(request.num_tokens - request.num_computed_tokens, budget))
            plan.chunks.append((request, lengths[-1]))
        num_slots = min(
            len(state.free_slots), (config.max_prefill_seqs or config.max_num_seqs) - len(lengths)
        )
        if num_slots < 1 or not state.waiting:
            return
        bound = self._worst_case()

        def judge(request: Request) -> Verdict:
            nonlocal num_free
            if state.sits_out(request):
                return Verdict.SKIP_ONE
            num_needed = pool.blocks_for(request.num_tokens)
            if len(plan.starting) == num_slots or num_needed > num_free or request.num_in_flight:
                return Verdict.STOP
            length = min(request.num_tokens, budget)
            if lengths and (request.num_tokens > budget - sum(lengths) or _pads([*lengths, length], budget)):
                return Verdict.STOP
            if num_free < pool.num_blocks or state.swapped:  # who has the pool to itself always starts
                is_tight = num_free - num_needed < int(_WATERMARK * pool.num_blocks)
                if is_tight or not (bound is None or bound.admits(request)):
                    return Verdict.STOP
            if bound is not None:
                bound.add(request)
            num_free -= num_needed
            lengths.append(length)
            plan.starting.append((request, length))
            return Verdict.TAKE

        state.waiting.visit(now, judge)

    def _worst_case(self) -> _WorstCase | None:
        """What those who started may need in host memory, if that bounds who starts."""
        state = self._state
        if self._rules.swaps == "never":
            return None
        num_device = state.pool.num_blocks if self._rules.swaps == "both" else 0
        worst = _WorstCase(state.pool.block_size, state.host.num_blocks, num_device)
        worst.add(*state.running, *state.prompts, *state.swapped)
        return worst

    def _swap_in(self, plan: Plan, num_free: int, now: float) -> None:
        """Add swapped requests that fit with a block to spare and the watermark, samples together."""
        state, pool = self._state, self._state.pool
        groups = collections.defaultdict[int, list[Request]](list)
        for request in state.swapped:
            groups[request.group_index].append(request)

        def judge(request: Request) -> Verdict:
            nonlocal num_free
            together = groups.pop(request.group_index, [request])
            if num_free == pool.num_blocks:  # who has the pool to itself returns with as many as fit
                together = [request]
            num_slots = len(state.free_slots) - len(plan.resuming)
            num_needed = sum([pool.blocks_for(one.num_tokens) for one in together])
            if num_slots < len(together) or num_needed > num_free or request.num_in_flight:
                return Verdict.STOP
            num_spare = len(together) + int(_WATERMARK * pool.num_blocks)
            num_held = sum([pool.blocks_for(one.num_computed_tokens) for one in together])
            if num_free < pool.num_blocks and num_held + num_spare > num_free:
                return Verdict.STOP
            num_free -= pool.blocks_for(request.num_tokens)
            plan.resuming.append((request, _AT_ONCE, 1))
            return Verdict.TAKE

        state.swapped.visit(now, judge)


def _pads(lengths: list[int], budget: int) -> bool:
    """Whether prompts padded to the longest are too many tokens, or too many in vain."""
    padded = len(lengths) * max(lengths)
    return padded > budget or padded - sum(lengths) > _MAX_PADDINGS


@dataclasses.dataclass(slots=True)
class _WorstCase:
    """Blocks of requests at their greatest lengths, against a limit."""

    block_size: int
    num_host_blocks: int
    num_device_blocks: int
    total: int = 0
    largest: int = 0

    def add(self, *requests: Request) -> None:
        sizes = list(map(self._size, requests))
        self.total, self.largest = self.total + sum(sizes), max(self.largest, *sizes, 0)

    def admits(self, request: Request) -> bool:
        size, limit = self._size(request), self.num_host_blocks
        if self.num_device_blocks:
            limit += self.num_device_blocks - max(self.largest, size)
        return self.total + size <= limit

    def _size(self, request: Request) -> int:
        return -(-(request.max_total_tokens - 1) // self.block_size)
