"""Drafts of running requests: proposed, cut to what pays and fits, and what became of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from jaxllm.errors import ConfigError, called
from jaxllm.sched.acceptance import Acceptances, Chance, History
from jaxllm.sched.gains import Gains
from jaxllm.sched.ledger import Ledger, VerificationRecord
from jaxllm.sched.plan import Plan
from jaxllm.sched.policies import SchedulerPolicy, SchedulingPolicy
from jaxllm.sched.policies.speculation import IterationRows, SpeculationPolicy, VerifyingWork
from jaxllm.sched.proposers import ChainedProposer, Proposer
from jaxllm.sched.state import SchedulerState
from jaxllm.types import Request, SchedulerOutput

_RATE = 0.2
_FORGETS_AFTER = 32
"""Refusals of drafts that would have had to be computed, after which what was learned of them counts less."""
_FIRST_SHARE = 0.5
"""Of requests for which something is proposed, as long as nobody knows."""
_SURELY, _TRIED_STEPS = 0.5, 2
"""Drafts of each that are likely to be right, below which the device drafts in so many iterations only."""
Verified = list[tuple[int, int]]
"""Of a request, for each verification: how many drafts there were, and how many of them were right."""
_Drafts = list[tuple[Request, Sequence[int]]]


def most_drafts(max_num_seqs: int, max_num_batched_tokens: int, num_tokens: int) -> int:
    """Drafts for which an iteration has rows beside all decodes, at most `num_tokens` of each request.

    Raises:
        ConfigError: it has none.
    """
    num_rows = max_num_batched_tokens - max_num_seqs
    if num_rows < 1 and num_tokens:
        raise ConfigError(
            f"max_num_batched_tokens {max_num_batched_tokens} leaves no row for drafts beside the decodes of "
            f"max_num_seqs {max_num_seqs}: raise it, lower that, or draft nothing"
        )
    return min(max_num_seqs * num_tokens, max(0, num_rows))


@dataclasses.dataclass(slots=True)
class SpeculationCounts:
    """Since the start: verifications, drafts, and those of them that were kept.

    `num_excluded` counts how often a request was left out because its grammar allowed no draft, or was late.
    """

    num_verifications: int = 0
    num_drafted: int = 0
    num_kept: int = 0
    num_excluded: int = 0


class Speculation:
    """Decides which drafts an iteration verifies. It preempts nobody: drafts take what is left.

    Args:
        proposer: guesses tokens.
        policy: says how many of them are verified.
        num_tokens: most drafts of a request in one iteration.
        max_drafts: most drafts of all of them together.
        chained: the proposer, if it computes drafts on the device also where that goes on by itself.
        clock: seconds, for what asking takes.

    Attributes:
        counts: what became of them.
        gains: what that was worth.
        lookup_steps: in how many iterations the device may draft by itself, as the proposer does; 1 if it may
            not now.
    """

    def __init__(
        self,
        proposer: Proposer,
        policy: SpeculationPolicy,
        num_tokens: int,
        max_drafts: int,
        *,
        chained: ChainedProposer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.policy, self.num_tokens, self.max_drafts = policy, num_tokens, max_drafts
        self.proposer, self._chained, self._clock = proposer, chained, clock
        self.lookup_steps = 1
        self.counts, self.gains = SpeculationCounts(), Gains()
        self._all = Acceptances()
        self._histories: dict[str, History] = {}
        self._ended: dict[str, History] = {}  # of those whose last drafts may not be told of yet
        self._ledger: Ledger | None = None
        self._num_fruitful = 0.0  # of each asking, by and by
        # Of requests for which something is proposed, by and by; what is computed always is.
        self._is_computed = proposer.seconds(1, 1) is not None
        self._share = 1.0 if self._is_computed else _FIRST_SHARE
        self._num_refused = 0
        self._num_right = 0.0  # of a request, likely, each time that the device drafts by itself
        self._expected_kept = 0.0  # of drafts of the newest iteration
        self._previous: tuple[float, list[Request]] = 0.0, []  # when the newest iteration ended, and of whom
        self._has_read = False  # a prompt since then

    def begin(self, policy: SchedulingPolicy, ledger: Ledger | None) -> None:
        """Draft for a scheduler of this policy, and tell its ledger.

        Raises:
            ConfigError: iterations of the policy hold no prompts beside decodes, as drafts would be.
        """
        if not (isinstance(policy, SchedulerPolicy) and policy.iterations.mixes):
            raise ConfigError(
                f"{called(policy)} does not compute prompts beside decodes, as verifying drafts takes: leave "
                "speculative_config out, or take vllm_v1, adaptive or another preset"
            )
        self._ledger = ledger

    def asks(self, num_decoding: int) -> bool:
        """Whether proposals are asked for at all now, beside so many requests that decode."""
        return num_decoding > 0 and self.policy.is_worth_asking(num_decoding)

    def is_expected(self, state: SchedulerState) -> bool:
        """Whether the next iteration is likely to verify drafts, by what the host knows of tokens so far."""
        plan = Plan()
        return bool(self._drafts(plan, state, looks_up=self._looks_up(plan, state)))

    def draft(self, plan: Plan, state: SchedulerState) -> None:
        """Add drafts of the running requests whose tokens are all known, within what a plan leaves.

        Where the device can draft by itself it is only said how many: its rows are computed, used or not.
        """
        self._ended.clear()
        if not plan.decodes:
            return
        looks_up = self._looks_up(plan, state) and self._is_prepared(state)
        drafts = self._drafts(plan, state, only_known=True, looks_up=looks_up)
        if not (looks_up and drafts):
            plan.drafts = drafts
            return
        self._has_read |= any(map(self._is_new, state.running))
        plan.num_lookups = max([len(tokens) for _, tokens in drafts])
        plan.num_lookup_steps = self.lookup_steps
        if self._num_right < _SURELY:
            plan.num_lookup_steps = min(_TRIED_STEPS, self.lookup_steps)

    def _is_prepared(self, state: SchedulerState) -> bool:
        """Whether the device can go on by itself, whatever it keeps."""
        running = state.running.requests
        if not running or any(one.num_in_flight for one in running):
            return False
        if self._chained is None:
            return True
        if len(self._begun(running)) < len(running):
            return False
        num_tokens = self.lookup_steps * (self._most_each(state) + 1)
        stops = [(one, min(one.max_total_tokens, one.num_tokens + num_tokens)) for one in running]
        return self.asks(len(running)) and self._chained.prepare(stops)

    def _most_each(self, state: SchedulerState) -> int:
        """Most drafts of a request where all may have as many."""
        num_decodes = len(state.running)
        num_free = min(self.max_drafts, state.config.max_num_batched_tokens - num_decodes)
        return min(self.num_tokens, num_free // num_decodes)

    def _looks_up(self, plan: Plan, state: SchedulerState) -> bool:
        """Whether the device may draft by itself."""
        return self.lookup_steps > 1 and plan.is_calm(state)

    def _is_unread(self, request: Request) -> bool:
        """Whether a proposer has to read its prompt: it never has, or lost that with the request's blocks."""
        history = self._histories.get(request.request_id)
        if history is None or not self._is_computed:
            return history is None
        return request.metrics.num_preemptions > history.num_preemptions

    def _is_new(self, request: Request) -> bool:
        """Whether a proposer has to read more than the newest tokens."""
        is_unread = self._is_unread(request)
        if is_unread or not self._is_computed:
            return is_unread
        return request.num_known_tokens > self._histories[request.request_id].num_tokens + 1

    def _begun(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Those that may be drafted for: not those that a proposer would have to read first, at times."""
        if not self._is_computed or self.policy.may_begin():
            return requests
        return [request for request in requests if not self._is_unread(request)]

    def _drafts(
        self, plan: Plan, state: SchedulerState, *, only_known: bool = False, looks_up: bool = False
    ) -> _Drafts:
        running = state.running
        if not self.asks(len(running)):
            return []
        gone = {victim for victim, _ in plan.victims}
        asked = [
            request
            for request in running
            if request not in gone and not (only_known and request.num_in_flight)
        ]
        asked = [*self._begun(asked)]
        if not asked:
            return []
        if not self._is_computed:  # prompts are read, which takes its time, once
            self._proposals([(one, 1) for one in asked if one.request_id not in self._histories])
        began, is_there = self._clock(), True
        most = self._most_each(state) if looks_up else self.num_tokens
        limits = [(one, min(most, one.max_total_tokens - one.num_tokens - 1)) for one in asked]
        limits = [(request, count) for request, count in limits if count > 0]
        share = self._share
        if self._is_computed:
            drafts = self._computed(limits, plan, state, gone, only_known=only_known, looks_up=looks_up)
        else:
            found = self._proposals(limits)
            is_there = bool(found)
            if limits:
                now = len(found) / len(limits)
                self._share += _RATE * (now - self._share)
                share = self._share + (now - self._share) / self.lookup_steps  # first as now, then as usual
            if looks_up:  # what is not there yet may be soon
                found = [(request, range(count)) for request, count in limits]
            drafts = self._cut(found, plan, state, gone, share=share if looks_up else None) if found else []
        if looks_up and drafts:
            rights = [self._chance(request).expected(len(tokens)) for request, tokens in drafts]
            self._num_right = share * sum(rights) / len(drafts)
            # What is computed was weighed with all it takes; if it is not done nothing is learned of it.
            if not (
                self._is_computed or self.policy.is_worth_looking_up(self._num_right, are_there=is_there)
            ):
                drafts = []
        is_fruitful = is_there and bool(drafts)
        self._num_fruitful += _RATE * (is_fruitful - self._num_fruitful)
        num_steps = self.lookup_steps if looks_up else 1
        self.policy.asked(self._clock() - began, num_steps if is_fruitful else 0)
        return drafts

    def max_decode_steps(self, limit: int, num_running: int) -> int:
        """How many iterations may go by before anybody is asked again: half those that one proposal takes."""
        if self.lookup_steps > 1 or not self.asks(num_running):
            return limit
        return max(1, min(limit, int(0.5 / max(self._num_fruitful, 1e-6))))

    def _computed(
        self,
        limits: Sequence[tuple[Request, int]],
        plan: Plan,
        state: SchedulerState,
        gone: set[Request],
        *,
        only_known: bool,
        looks_up: bool,
    ) -> _Drafts:
        """Those of a proposer that takes its time: how many are verified is decided before there are any."""
        found: _Drafts = [(request, range(count)) for request, count in limits]
        share = self._share if looks_up else None
        wanted = self._cut(found, plan, state, gone, share=share) if found else []
        if not wanted:
            self._num_refused += 1
            if found and self._num_refused % _FORGETS_AFTER == 0:  # else they would never be tried again
                for history in (self._all, *self._histories.values()):
                    history.forget()
        if looks_up or not only_known:
            return wanted
        return self._proposals([(one, len(places)) for one, places in wanted])

    def _proposals(self, asked: Sequence[tuple[Request, int]]) -> _Drafts:
        """What is proposed of requests of which something is, as far as their grammars allow it."""
        are_new = [self._is_new(request) for request, _ in asked]
        self._has_read |= any(are_new) and not self._is_computed
        for request, _ in asked:
            history = self._histories.setdefault(request.request_id, History())
            history.compare(request, self._all)
        found = []
        proposed = self.proposer.propose(asked) if asked else ()
        for is_new, (request, _), tokens in zip(are_new, asked, proposed, strict=True):
            history = self._histories[request.request_id]
            self._has_read |= is_new and bool(tokens)
            if tokens:
                history.num_tokens = request.num_known_tokens
                history.num_preemptions = request.metrics.num_preemptions
            mask = request.token_mask
            if tokens and mask is not None and mask.grammar is not None:
                tokens = mask.grammar.allowed(tokens)
                self.counts.num_excluded += not tokens
            history.start, history.proposed = request.num_known_tokens, tokens
            if tokens:
                found.append((request, tokens))
        return found

    def _cut(
        self, found: _Drafts, plan: Plan, state: SchedulerState, gone: set[Request], *, share: float | None
    ) -> _Drafts:
        """What the policy lets be verified, of all requests less where there are too few rows.

        The device drafts by itself if there is a `share`, that of requests for which it finds something.
        """
        others = *plan.chunks, *plan.starting, *[(request, length) for request, _, length in plan.resuming]
        num_decodes = len(state.running) - sum([victim in state.running for victim in gone])
        num_prompt_tokens = sum([length for _, length in others])
        num_free = min(self.max_drafts, state.config.max_num_batched_tokens - num_decodes - num_prompt_tokens)
        rows = IterationRows(
            num_decodes,
            state.running.num_tokens,
            num_prompt_tokens,
            max(0, num_free),
            share is not None,
            1.0 if share is None else share,
        )
        chances = [self._chance(request) for request, _ in found]
        counts = self.policy.num_drafts([len(tokens) for _, tokens in found], chances, rows)
        drafts = [(request, tokens[:count]) for (request, tokens), count in zip(found, counts, strict=True)]
        most_chunks = state.config.max_prefill_seqs or state.config.max_num_seqs
        drafts = [one for one in drafts if one[1]]
        drafts = drafts if rows.looks_up else drafts[: max(0, most_chunks - len(others))]
        while rows.num_free < sum([len(tokens) for _, tokens in drafts]):
            longest = max(len(tokens) for _, tokens in drafts) - 1
            if not longest:
                return drafts[: rows.num_free]
            drafts = [(request, tokens[:longest]) for request, tokens in drafts]
        return drafts

    def _chance(self, request: Request) -> Chance:
        """How likely the next drafts of a request are right."""
        return (self._histories.get(request.request_id) or History()).chance(self._all)

    def forget_prefixes(self) -> None:
        """Find nothing again of what requests have left with what drafts."""
        if self._chained is not None:
            self._chained.forget_prefixes()

    def verified(self, request: Request, verified: Verified) -> None:
        """Note what became of a request's drafts."""
        histories = self._ended if request.is_finished else self._histories
        history = histories.setdefault(request.request_id, History())
        history.proposed, history.num_tokens = (), request.num_known_tokens
        history.num_preemptions = request.metrics.num_preemptions
        if self._chained is not None:
            self._chained.kept(request)
        for num_drafted, num_kept in verified:
            if not num_drafted:
                continue
            self._expected_kept += history.chance(self._all).expected(num_drafted)
            history.add(num_drafted, num_kept, self._all)
            self.counts.num_verifications += 1
            self.counts.num_drafted += num_drafted
            self.counts.num_kept += num_kept

    def ended(self, request: Request, *, is_whole: bool) -> None:
        """Let go of what is kept of a request."""
        history = self._histories.pop(request.request_id, None)
        if history is not None:
            self._ended[request.request_id] = history
        self.proposer.forget(request)

    def observe(
        self,
        scheduled: SchedulerOutput,
        now: float,
        looked_up: Sequence[Verified] = (),
        *,
        is_undisturbed: bool = True,
    ) -> None:
        """Note that an iteration has ended; with lookups what `verified` is told of each of its requests.

        What it took is learned from if it `is_undisturbed`: no program was being compiled beside it.
        """
        (began, before), sampled = self._previous, scheduled.sampled
        self._previous = now, sampled
        verified = [
            (len(chunk.drafts), chunk.request.num_known_tokens - chunk.start - 2)
            for chunk in scheduled.prefill
            if chunk.drafts and chunk.request.num_known_tokens > chunk.start + 1
        ]
        num_decodes, num_steps = len(scheduled.decode) + len(verified), scheduled.num_decode_steps
        num_parts = 1  # in which drafts were verified
        if looked_up:
            turns = [turn for of_request in looked_up for turn in of_request]
            verified, num_decodes = [turn for turn in turns if turn[0]], len(turns)
            num_parts = num_steps = max(map(len, looked_up))
            self._share += _RATE * (len(verified) / len(turns) - self._share)
        num_drafted = sum([count for count, _ in verified])
        num_kept = sum([num_right for _, num_right in verified])
        work = VerifyingWork(
            -(-num_decodes // num_parts),
            -(-len(verified) // num_parts),
            -(-num_drafted // num_parts),
            max([count for count, _ in verified], default=0),
            bool(looked_up),
        )
        follows = bool(sampled) and sampled[0] in before  # at once, as far as is known
        seconds = None
        is_timed = follows and is_undisturbed and not scheduled.has_copies
        if is_timed and all(chunk.drafts for chunk in scheduled.prefill):
            seconds = now - began
        if verified:
            predicted = [self.policy.predicted(one) for one in (work, VerifyingWork(work.num_decodes))]
            with_drafts, plain = [one and num_parts * one for one in predicted]
            record = VerificationRecord(
                step_id=scheduled.step_id,
                time=now,
                num_decodes=num_decodes,
                num_verified=len(verified),
                num_drafted=num_drafted,
                num_kept=num_kept,
                expected_kept=self._expected_kept,
                predicted_seconds=with_drafts,
                plain_seconds=plain,
                measured_seconds=seconds,
            )
            self.gains.add(record)
            if self._ledger is not None:
                self._ledger.verified(record)
        if seconds is not None and num_decodes:
            if not self._has_read:
                num_tokens = num_decodes * num_steps // num_parts + num_kept
                self.policy.observe(work, num_steps, num_tokens, seconds)
            elif (usual := self.policy.predicted(work)) is not None:
                self.policy.begun(seconds - num_parts * usual)
        self._has_read, self._expected_kept = False, 0.0
