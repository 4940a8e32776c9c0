"""What it takes a queued request to go on: blocks that it finds, copies, or has to compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxllm.errors import ConfigError
from jaxllm.sched.cache.preview import NO_HIT, Hit, PoolPreview
from jaxllm.sched.plan import Plan, check_seconds
from jaxllm.sched.policies import PoolState, ResumeAction, ResumeDecision, ResumePolicy
from jaxllm.sched.state import SchedulerState
from jaxllm.types import Request, RequestStatus

_MAX_LOOKED_UP = 2**15
"""Blocks that are looked up, after which nobody else starts or resumes in an iteration."""
_AT_ONCE = ResumeDecision(ResumeAction.AT_ONCE)


@dataclasses.dataclass(slots=True)
class Offer:
    """What a queued request takes to start or to resume; new, dropped and swapped ones differ only in `hit`.

    Attributes:
        request: who.
        is_swapped: whether all of its KV is in host memory, so that it computes nothing but what follows.
        hit: where its blocks are that need not be computed.
        num_needed: free blocks of the device that it takes.
        num_left: tokens that it has to compute.
        num_in_first_run: those of them until the next one that it finds.
        decision: how it copies what it finds on the host.
        length: tokens that it computes in the iteration, once it is taken.
    """

    request: Request
    is_swapped: bool
    hit: Hit
    num_needed: int
    num_left: int
    num_in_first_run: int
    decision: ResumeDecision = _AT_ONCE
    length: int = 0

    @property
    def copies(self) -> bool:
        """Whether it comes back by a copy."""
        return self.is_swapped or bool(self.hit.copied)

    @property
    def is_later(self) -> bool:
        """Whether it goes on when its copy has arrived, and computes nothing before."""
        return self.copies and self.decision.action is ResumeAction.IN_BACKGROUND


class Offers:
    """Makes offers to queued requests, one after another, each as if those that were taken before had theirs.

    Attributes:
        finds: whether requests may find blocks: who is long may need few then.
    """

    def __init__(self, state: SchedulerState, policy: ResumePolicy, preview: PoolPreview | None) -> None:
        """Looks up blocks in `preview`, None if there are none; `policy` says how they come back."""
        self._state, self._policy, self._preview = state, policy, preview
        self.finds = preview is not None

    @property
    def is_tired(self) -> bool:
        """Whether as much was looked up as is worth it."""
        return self._preview is not None and self._preview.num_looked_up > _MAX_LOOKED_UP

    def make(self, request: Request, *, on_host: bool = True) -> Offer:
        """What a queued request takes; without `on_host` a waiting one copies nothing."""
        is_swapped = request.status is RequestStatus.SWAPPED
        if is_swapped:
            hit = self._find_copies(request)
        else:
            hit = self._find(request) if on_host else self._find_on_device(request)
        return self._offer(request, is_swapped, hit)

    def _offer(
        self, request: Request, is_swapped: bool, hit: Hit, decision: ResumeDecision = _AT_ONCE
    ) -> Offer:
        pool = self._state.pool
        num_needed = pool.blocks_for(request.num_tokens) - hit.num_on_device + len(hit.free)
        if is_swapped:
            num_left = num_first = request.num_tokens - request.num_computed_tokens
        else:
            num_left = request.num_tokens - hit.num_blocks * pool.block_size
            num_first = hit.num_missing * pool.block_size or num_left
        return Offer(request, is_swapped, hit, num_needed, num_left, num_first, decision)

    def ask(self, offer: Offer, pools: PoolState, now: float) -> Offer:
        """The offer with the policy's decision; of what is on the device if the rest is not to be copied.

        Raises:
            ConfigError: the policy's answer is no decision, or its predictions are no seconds.
        """
        request, hit, policy = offer.request, offer.hit, self._policy
        on_device, num_more = hit, 0
        if not offer.is_swapped:
            on_device = self._find_on_device(request)
            num_more = (hit.num_blocks - on_device.num_blocks) * pools.block_size
        pools = pools._replace(num_to_copy=self._state.host.num_moved(hit.copied), num_to_recompute=num_more)
        copied_out_at = self._state.copied_out_at.get(request.request_id, now)
        decision = policy.choose(request, copied_out_at, pools, now)
        if not isinstance(decision, ResumeDecision) or not isinstance(decision.action, ResumeAction):
            raise ConfigError(f"{policy} answered {decision!r}, which is not a ResumeDecision")
        check_seconds(policy, decision.swap_seconds, decision.copy_seconds)
        if decision.action is ResumeAction.RECOMPUTE:
            if num_more:
                return self._offer(request, offer.is_swapped, on_device, decision)
            decision = decision._replace(action=ResumeAction.LATER)
        return dataclasses.replace(offer, decision=decision)

    def take(self, offer: Offer) -> None:
        """Let a request hold what it finds, and what it computes be found."""
        preview, pool, hit = self._preview, self._state.pool, offer.hit
        if preview is None:
            return
        preview.hold(hit)
        if offer.is_swapped:
            preview.take(pool.blocks_for(offer.request.num_tokens) - hit.num_on_device)
            return
        stop = hit.num_first * pool.block_size + offer.length
        preview.take(pool.blocks_for(stop) - hit.num_first + len(hit.copied))
        if offer.length or not hit.copied:
            names = self._state.learn_names(offer.request, stop)
            first = 0 if hit.copied else hit.num_first  # those are there already
            preview.compute(names[first : stop // pool.block_size])

    def _find(self, request: Request) -> Hit:
        """What a waiting request finds; all its blocks are looked for only if the first is there.

        Where others may be without it, if that or one in the middle or the last is.
        """
        state, preview = self._state, self._preview
        if preview is None:
            return NO_HIT
        names = state.findable(request)
        probes = names[:1]
        if state.looks_past_gaps and names:
            probes += [names[len(names) // 2], names[-1]]
        if any(preview.is_there(name, state.host.names) for name in probes):
            is_chain = not request.uncut_names
            return preview.find(
                names, state.host.names, looks_past_gaps=state.looks_past_gaps, is_chain=is_chain
            )
        return NO_HIT

    def _find_on_device(self, request: Request) -> Hit:
        """What a waiting request finds if it copies nothing."""
        state, is_chain = self._state, not request.uncut_names
        if self._preview is None:
            return NO_HIT
        names = state.findable(request)
        return self._preview.find(names, looks_past_gaps=state.looks_past_gaps, is_chain=is_chain)

    def _find_copies(self, request: Request) -> Hit:
        """Where the blocks are that a swapped request has on the host."""
        names, places = request.block_names, request.host_blocks
        if self._preview is None:
            return Hit(len(places), (), (), tuple(places))
        return self._preview.find_each(names, places, is_chain=not request.uncut_names)


def preview_of(
    state: SchedulerState,
    plan: Plan,
    resuming: Sequence[Offer] = (),
    *,
    mixes: bool,
    is_certain: bool = True,
) -> PoolPreview:
    """The pool when those who go on, and those who resume, have taken what they need.

    What they compute is found only if they are certain to go on.
    """
    preview = PoolPreview(state.pool, is_exact=is_certain and not resuming)
    preview.take(sum([state.pool.blocks_for(offer.request.num_tokens) for offer in resuming]))
    size = state.pool.block_size
    if plan.decodes and mixes:  # else those who start stop them
        preview.take(len(state.running.growing))
        for request in state.running.filling if is_certain else ():
            stop = (request.num_computed_tokens + 1) // size
            preview.compute(state.learn_names(request, stop * size)[stop - 1 : stop])
    for request, length in plan.chunks:
        stop = request.num_computed_tokens + length
        preview.take(state.num_missing(request, stop))
        if is_certain:
            preview.compute(state.learn_names(request, stop)[request.num_named_blocks : stop // size])
    return preview
