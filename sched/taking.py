"""Takes queued requests into an iteration, in the order of their queue, as far as there is room."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxllm.errors import ConfigError, called, shown
from jaxllm.sched.cache.names import Absence
from jaxllm.sched.cache.preview import NO_HIT, Hit, PoolPreview
from jaxllm.sched.plan import Plan, check_seconds
from jaxllm.sched.policies import (
    PoolState,
    ResumeAction,
    ResumeDecision,
    SchedulerPolicy,
)
from jaxllm.sched.queues import RequestQueue, Verdict
from jaxllm.sched.state import SchedulerState
from jaxllm.types import Request, RequestStatus

_MAX_LOOKED_UP = 2**15
"""Blocks that are looked up, after which nobody else starts or resumes in an iteration."""
AT_ONCE = ResumeDecision(ResumeAction.AT_ONCE)


@dataclasses.dataclass(slots=True)
class Room:
    """What is left for those who return or start: blocks, tokens of the iteration, slots, prompts of it.

    It is for those who came by `latest`.
    """

    num_blocks: int
    num_tokens: int
    num_slots: int
    num_chunks: int
    latest: float = math.inf


@dataclasses.dataclass(slots=True)
class Offer:
    """What a queued request takes to start or to resume; new, dropped and swapped ones differ only in `hit`.

    Attributes:
        request: who.
        is_swapped: whether all that it has computed is in host memory.
        hit: where its blocks are that need not be computed.
        num_needed: free blocks of the device that it takes.
        num_left: tokens that it has to compute.
        decision: how it copies what it finds on the host.
        length: tokens that it computes in the iteration, once it is taken.
    """

    request: Request
    is_swapped: bool
    hit: Hit
    num_needed: int
    num_left: int
    decision: ResumeDecision = AT_ONCE
    length: int = 0

    @property
    def copies(self) -> bool:
        """Whether it comes back by a copy."""
        return self.is_swapped or bool(self.hit.copied)

    @property
    def is_later(self) -> bool:
        """Whether it goes on when its copy has arrived, and computes nothing before."""
        return self.copies and self.decision.action is ResumeAction.IN_BACKGROUND


@dataclasses.dataclass(slots=True)
class Taking:
    """One pass over a queue, each request as if those that were taken before had theirs.

    Attributes:
        state, policy, plan, now: as they are named; the plan says what those who hold blocks do.
        preview: where blocks are looked up; None if there are none to find.
        room: what there is, and then what is left.
        after: who takes blocks before.
        is_forced: whether one is taken alone and at once, whatever the policy says.
        taken: the offers of those that are taken.
    """

    state: SchedulerState
    policy: SchedulerPolicy
    plan: Plan
    preview: PoolPreview | None
    room: Room
    now: float
    after: Sequence[Offer] = ()
    is_forced: bool = False
    taken: list[Offer] = dataclasses.field(default_factory=list)
    _pools: PoolState = dataclasses.field(init=False)
    _under_way: list[Request] = dataclasses.field(default_factory=list)  # of `_pools`, once some start
    _is_busy: bool = dataclasses.field(init=False)  # with more than copies of waiting requests
    _unsuited: Verdict = dataclasses.field(init=False)
    _too_large: Verdict = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._pools = self.state.pools(self.room.num_blocks)
        self._is_busy = bool(self.state.running or self.plan.chunks or self.after) and not self.is_forced
        skips = self.policy.restore.skips
        self._unsuited = Verdict.SKIP_ONE if skips else Verdict.STOP
        # Who finds blocks may be short, however long it is.
        self._too_large = Verdict.SKIP if skips and self.preview is None else self._unsuited

    def visit(self, queue: RequestQueue, only: Request | None = None) -> list[Offer]:
        """The offers of those that are taken: whom there is room for, or `only` this one."""
        num_held = self.room.num_blocks * self.state.pool.block_size
        too_long = num_held + 1 if self._too_large is Verdict.SKIP else math.inf
        if only is None:
            queue.visit(self.now, self._judge, too_long, math.inf if self.is_forced else self.room.latest)
        else:
            self._judge(only)
        return self.taken

    @property
    def _is_over(self) -> bool:
        """Whether nobody is taken any more, or looked up."""
        if self.room.num_tokens < 1 or self.room.num_slots < 1 or (self.is_forced and self.taken):
            return True
        return self.preview is not None and self.preview.num_looked_up > _MAX_LOOKED_UP

    def _judge(self, request: Request) -> Verdict:
        """Whether a request is taken now, and if not, who else is visited."""
        state, room = self.state, self.room
        if self._is_over or (room.num_chunks < 1 and request.status is RequestStatus.WAITING):
            return Verdict.STOP
        if state.sits_out(request):
            return Verdict.SKIP_ONE
        if request.num_in_flight or state.has_to_wait(request):  # its newest token may not be known yet
            return self._unsuited
        finds_room = self.preview is not None or state.pool.blocks_for(request.num_tokens) <= room.num_blocks
        offer = self.offer(request) if finds_room else None
        if offer is None or offer.num_needed > room.num_blocks:
            self._remember(request)
            return self._too_large
        is_coming = bool(offer.hit.copied) and state.is_coming(offer.hit.copied)
        if is_coming or (offer.num_left > 1 and room.num_chunks < 1):
            return self._unsuited
        if offer.copies and not (offer.is_swapped and self.is_forced):
            offer = self._ask(offer)
            if not (self._is_busy or offer.is_swapped):
                offer.decision = offer.decision._replace(action=ResumeAction.AT_ONCE)
            elif offer.decision.action is ResumeAction.LATER:
                return Verdict.STOP if offer.is_swapped else self._unsuited
        if not (self._may_return(offer) if offer.is_swapped else self._may_start(offer)):
            return Verdict.STOP if offer.is_swapped else self._too_large
        self._take(offer)
        return Verdict.TAKE

    def _still_lacks_room(self, request: Request, absence: Absence, preview: PoolPreview) -> bool:
        """Whether a request needs more blocks than are left, if no more of its blocks are there than were."""
        pool = self.state.pool
        if pool.blocks_for(request.num_tokens) - absence.first <= self.room.num_blocks:
            return False
        if not preview.is_lasting(absence, request.block_names):
            return False
        self.state.absences[request.request_id] = absence._replace(num_added=pool.names.num_added)
        return True

    def _remember(self, request: Request) -> None:
        """Note what a waiting request did not find, so that the next iterations need not look it up again."""
        is_chain = request.status is RequestStatus.WAITING and not request.uncut_names
        if not is_chain or self.preview is None:
            return
        absences = self.state.absences
        known = absences.get(request.request_id)
        if known is None or known.num_added != self.state.pool.names.num_added:
            absences[request.request_id] = self.preview.absence(self.state.lookups.findable(request))

    def offer(self, request: Request, *, on_host: bool = True) -> Offer:
        """What a queued request takes; without `on_host` a waiting one copies nothing."""
        if request.status is RequestStatus.WAITING:
            return self._offer(request, self._find(request, on_host=on_host))
        names, places = request.block_names, request.host_blocks
        if self.preview is None:
            return self._offer(request, Hit(len(places), (), (), tuple(places)))
        return self._offer(request, self.preview.find_each(names, places, is_chain=not request.uncut_names))

    def num_at_once(self, offer: Offer) -> int:
        """Tokens that a request computes in the iteration: until the next one that it finds."""
        num_missing = offer.hit.num_missing * self.state.pool.block_size
        return min(num_missing or offer.num_left, self.room.num_tokens)

    def _offer(self, request: Request, hit: Hit, decision: ResumeDecision = AT_ONCE) -> Offer:
        pool, is_swapped = self.state.pool, request.status is RequestStatus.SWAPPED
        num_needed = pool.blocks_for(request.num_tokens) - hit.num_on_device + len(hit.free)
        num_there = request.num_computed_tokens if is_swapped else hit.num_blocks * pool.block_size
        return Offer(request, is_swapped, hit, num_needed, request.num_tokens - num_there, decision)

    def _find(self, request: Request, *, on_host: bool) -> Hit:
        """What a waiting request finds; on the host only if its first block is anywhere.

        Where others may be without it, if that or one in the middle or the last is. Nothing if it is known
        that whatever it finds there is no room for the rest.
        """
        state, preview, past_gaps = self.state, self.preview, self.state.lookups.looks_past_gaps
        if preview is None:
            return NO_HIT
        absence = state.absences.get(request.request_id)
        if absence is not None and on_host and self._still_lacks_room(request, absence, preview):
            return NO_HIT
        names, where = state.lookups.findable(request), state.host.names if on_host else None
        if on_host:
            middle = len(names) // 2
            probes = [*names[:1], *names[middle : middle + 1], *names[-1:]] if past_gaps else names[:1]
            if not any(preview.is_there(name, where) for name in probes):
                return NO_HIT
        return preview.find(names, where, looks_past_gaps=past_gaps, is_chain=not request.uncut_names)

    def _ask(self, offer: Offer) -> Offer:
        """The offer with the policy's decision; of what is on the device if the rest is not to be copied.

        Raises:
            ConfigError: the policy's answer is no decision, or its predictions are no seconds.
        """
        request, policy, state, on_device = offer.request, self.policy.resume, self.state, offer.hit
        if not offer.is_swapped:
            on_device = self._find(request, on_host=False)
        num_more = (offer.hit.num_blocks - on_device.num_blocks) * state.pool.block_size
        num_to_copy = state.host.num_moved(offer.hit.copied)
        pools = self._pools._replace(num_to_copy=num_to_copy, num_to_recompute=num_more)
        copied_out_at = state.copied_out_at.get(request.request_id, self.now)
        decision = policy.choose(request, copied_out_at, pools, self.now)
        if not isinstance(decision, ResumeDecision) or not isinstance(decision.action, ResumeAction):
            raise ConfigError(
                f"{called(policy)} answered {shown(decision)}, which is not a ResumeDecision of a "
                f"ResumeAction, for request {request.request_id!r}"
            )
        check_seconds(policy, decision.swap_seconds, decision.copy_seconds)
        if decision.action is ResumeAction.RECOMPUTE:
            if num_more:
                return self._offer(request, on_device, decision)
            decision = decision._replace(action=ResumeAction.LATER)
        offer.decision = decision
        return offer

    def _may_start(self, offer: Offer) -> bool:
        """Whether a waiting request starts: only the first prompt of a prefill is split.

        Whoever has the pool to itself starts, whatever the policy says: nothing would ever free more.
        """
        state, room, is_first = self.state, self.room, not (self.taken or self.plan.chunks)
        if offer.num_needed > room.num_blocks:  # it is to copy nothing
            return False
        if offer.num_left > room.num_tokens and not (
            self.policy.iterations.mixes or self.is_forced or is_first
        ):
            return False
        if self.is_forced or (room.num_blocks == state.pool.num_blocks and not state.swapped):
            return True
        return self.policy.admission.admits(offer.request, offer.num_needed, self._pools)

    def _may_return(self, offer: Offer) -> bool:
        """Whether a swapped request resumes, as far as the admission policy cares."""
        readmits = getattr(self.policy.admission, "readmits", None)  # of a `ReturnAdmission`
        if self.is_forced or readmits is None:
            return True
        return bool(readmits(offer.request, offer.num_needed, self._pools))

    def _take(self, offer: Offer) -> None:
        room, pools = self.room, self._pools
        if not offer.is_swapped:
            self._under_way = self._under_way or [*pools.under_way]
            self._under_way.append(offer.request)
        if not offer.is_later:
            offer.length = self.num_at_once(offer)
            self._is_busy = True
        room.num_blocks -= offer.num_needed
        room.num_tokens -= offer.length
        room.num_slots -= 1
        room.num_chunks -= offer.num_left > 1 if offer.is_swapped else not offer.is_later
        until = pools.copy_in_until
        if offer.copies:
            until = max(self.now, until) + (offer.decision.copy_seconds or 0.0)
        under_way = self._under_way or pools.under_way
        self._pools = pools._replace(num_free=room.num_blocks, copy_in_until=until, under_way=under_way)
        self.taken.append(offer)
        if self.preview is not None:
            self.preview.hold(offer.hit)
            self._foresee(offer, self.preview)

    def _foresee(self, offer: Offer, preview: PoolPreview) -> None:
        """Let a request take blocks, and what it computes be found."""
        pool, hit, request = self.state.pool, offer.hit, offer.request
        if offer.is_swapped:
            preview.take(pool.blocks_for(request.num_tokens) - hit.num_on_device)
            return
        stop = hit.num_first * pool.block_size + offer.length
        preview.take(pool.blocks_for(stop) - hit.num_first + len(hit.copied))
        if offer.length or not hit.copied:
            first = 0 if hit.copied else hit.num_first  # those are there already
            names = self.state.lookups.learn_names(request, stop)
            preview.compute(names[first : stop // pool.block_size])


def preview_of(
    state: SchedulerState, plan: Plan, after: Sequence[Offer] = (), *, mixes: bool, is_certain: bool = True
) -> PoolPreview:
    """The pool when those who go on, and those `after` whom others come, have taken what they need.

    What they compute is found only if they are certain to go on.
    """
    preview = PoolPreview(state.pool, is_exact=is_certain and not after)
    preview.take(sum([state.pool.blocks_for(offer.request.num_tokens) for offer in after]))
    size = state.pool.block_size
    if plan.decodes and mixes:  # else those who start stop them
        preview.take(len(state.running.growing))
        for request in state.running.filling if is_certain else ():
            stop = (request.num_computed_tokens + 1) // size
            preview.compute(state.lookups.learn_names(request, stop * size)[stop - 1 : stop])
    for request, length in plan.chunks:
        stop = request.num_computed_tokens + length
        preview.take(state.num_missing(request, stop))
        if is_certain:
            preview.compute(state.lookups.learn_names(request, stop)[request.num_named_blocks : stop // size])
    return preview
