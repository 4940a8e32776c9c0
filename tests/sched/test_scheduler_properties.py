"""Random traffic through the scheduler and a device that checks every read of the KV pool."""

import collections
import dataclasses
import itertools

from engine_helpers import Knowing
from fake_device import VOCAB_SIZE, FakeDevice, next_token
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_helpers import LinearCosts, make_request, make_scheduler

from jaxllm.engine.speculation import accepted, looked_up
from jaxllm.errors import UserCodeError
from jaxllm.sched.policies import (
    S3FIFO,
    AdaptiveAction,
    AheadOfTime,
    AlwaysRecompute,
    CostOverIdleTime,
    Decision,
    FCFSPriority,
    LeastRecentlyUsed,
    NoOffload,
    OutrankedVictim,
    OvertakerVictim,
    PreemptionAction,
    ResumeAction,
    ResumeDecision,
    SchedulerPolicy,
    SeparateIterations,
    SwapIfItFits,
    WatermarkAdmission,
    WriteBack,
    WriteThrough,
)
from jaxllm.sched.policies.actions import num_copied
from jaxllm.sched.policies.speculation import AsProposed
from jaxllm.sched.presets import PRESETS, make_preset
from jaxllm.sched.speculation import Speculation
from jaxllm.types import CopyProgress, RequestStatus, SchedulerOutput

MAX_MODEL_LEN = 40


def reference_output(request):
    """What the request yields when it runs alone."""
    token_ids = list(request.prompt_token_ids)
    while len(token_ids) < request.max_total_tokens:
        token_ids.append(next_token(token_ids))
        if token_ids[-1] in request.eos_token_ids:
            break
    return token_ids[request.num_prompt_tokens :]


@dataclasses.dataclass
class Pending:
    """A step that was executed and not read."""

    output: SchedulerOutput
    token_ids: list[int]


class Broken(Exception):
    """What a policy raises at random."""


def draw(now, number, count):
    """A number below `count` that looks random and is the same each time."""
    return (int(now) * 7919 + number * 104729) // 13 % count


class ShortestFirst:
    def score(self, request, now):
        return -request.num_tokens

    def group(self, request):
        return request.num_tokens


class ArbitraryPriority:
    def score(self, request, now):
        return draw(now, request.arrival_index, 5)

    def group(self, request):
        return request.arrival_index


@dataclasses.dataclass(frozen=True)
class ArbitraryVictim:
    is_outranked: bool = False

    def score(self, request, now):
        assert request.block_ids or not request.num_computed_tokens
        return draw(now, request.arrival_index, 7)

    def outranks(self, queued, holder, now):
        assert queued.slot is None
        assert holder.slot is not None
        return self.is_outranked and draw(now, holder.arrival_index, 9) == 0


class AlwaysSwap:
    """Does not look at what is possible."""

    def choose(self, victim, state, now):
        return Decision(PreemptionAction.SWAP)


class ArbitraryAction:
    def choose(self, victim, state, now):
        assert 0 <= state.num_host_free <= state.num_host_blocks
        wanted = draw(now, victim.arrival_index, 8)
        if wanted == 7:
            raise Broken
        if wanted % 2 and victim.num_computed_tokens and num_copied(victim, state) <= state.num_host_free:
            return Decision(PreemptionAction.SWAP, copy_seconds=1.0)
        return Decision(PreemptionAction.RECOMPUTE)


@dataclasses.dataclass(frozen=True)
class ArbitraryRestore:
    skips: bool

    def swaps_in(self, waiting, swapped, now):
        assert waiting
        assert swapped
        return bool(draw(now, len(waiting) + len(swapped), 2))


class ArbitraryResume:
    def choose(self, request, copied_out_at, state, now):
        actions = list(ResumeAction)
        return ResumeDecision(actions[draw(now, request.arrival_index, len(actions))], copy_seconds=1.0)


@dataclasses.dataclass(frozen=True)
class ArbitraryIterations:
    mixes: bool

    def num_prompt_tokens(self, state):
        assert 0 <= state.num_decodes <= state.budget
        return draw(state.num_context_tokens, state.num_backlog_tokens, state.budget + 2)


class NeverAdmit:
    def admits(self, request, num_needed, state):
        assert num_needed <= state.num_free <= state.num_blocks
        return False


COSTS = LinearCosts()
DEAR = LinearCosts(prefill=1000.0)  # so that swaps pay
ALWAYS_SWAP = {"vllm_swap", "vllm_swap_both"}
LETS_OTHERS_PAST = {"adaptive_throughput", "flashgen"}
"""Requests of these may start before earlier ones, though they serve who came first."""
OUTRANKING = ["priority", "deadline", "least_work", "fastserve", "flashgen", "outranked"]
"""Where those who run give way to others: what was planned for them is taken back."""
POLICIES = {
    "high watermark": SchedulerPolicy(admission=WatermarkAdmission(0.3)),
    "one at a time": SchedulerPolicy(admission=NeverAdmit()),
    "one at a time, paper": dataclasses.replace(make_preset("paper", COSTS), admission=NeverAdmit()),
    "swap if it fits": SchedulerPolicy(action=SwapIfItFits()),
    "impatient": dataclasses.replace(make_preset("adaptive", COSTS), patience=2),
    "separate, impatient": SchedulerPolicy(
        iterations=SeparateIterations(), priority=ShortestFirst(), victim=ArbitraryVictim(), patience=1
    ),
    "outranked": SchedulerPolicy(
        priority=ShortestFirst(), victim=OutrankedVictim(ShortestFirst()), action=SwapIfItFits()
    ),
    **{
        f"arbitrary {mixes} {skips} {patience}": SchedulerPolicy(
            priority=ArbitraryPriority(),
            victim=ArbitraryVictim(is_outranked=patience is not None),  # nothing else bounds that
            action=ArbitraryAction(),
            resume=ArbitraryResume(),
            restore=ArbitraryRestore(skips),
            iterations=ArbitraryIterations(mixes),
            patience=patience,
        )
        for mixes, skips in itertools.product([False, True], repeat=2)
        for patience in (None, 3)
    },
}


def mixes(policy):
    return isinstance(policy, SchedulerPolicy) and policy.iterations.mixes


class SchedulerMachine(RuleBasedStateMachine):
    """Plays the engine: reads tokens `run_ahead` iterations after they were scheduled."""

    @initialize(
        policy=st.sampled_from([*PRESETS, *POLICIES]) | st.sampled_from(OUTRANKING),
        num_blocks=st.integers(2, 14),
        num_host_blocks=st.integers(0, 10) | st.integers(1, 3),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(0, 20),
        sizes=st.sets(st.integers(1, 20)),
        data=st.data(),
        run_ahead=st.integers(0, 2),  # the engine's is 0 or 1; 2 exercises the guard on tokens in flight
        most_steps=st.sampled_from([1, 3, 8]),
        is_shared=st.sampled_from([True, True, False]),
        has_files=st.booleans(),
        retention=st.sampled_from(
            [
                lambda: LeastRecentlyUsed(),
                lambda: LeastRecentlyUsed(looks_ahead=True),
                S3FIFO,
                lambda: CostOverIdleTime(COSTS),
            ]
        ),
        offload=st.sampled_from([NoOffload(), WriteBack(), WriteThrough(), WriteThrough(), AheadOfTime(0.5)]),
        action=st.sampled_from(
            [
                None,
                AlwaysRecompute(),
                SwapIfItFits(),
                AdaptiveAction(COSTS),
                AdaptiveAction(DEAR),
                AlwaysSwap(),
            ]
        ),
        keeps_parts=st.booleans(),
        drafts=st.none() | st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=2, max_size=12),
        max_looked_up=st.integers(0, 4),
        is_computed=st.booleans(),
    )
    def start(
        self,
        policy,
        num_blocks,
        num_host_blocks,
        block_size,
        max_num_seqs,
        budget,
        sizes,
        data,
        run_ahead,
        most_steps,
        is_shared,
        has_files,
        retention,
        offload,
        action,
        keeps_parts,
        drafts,
        max_looked_up,
        is_computed,
    ):
        # Those of presets may learn, so every run has its own.
        self.policy = make_preset(policy, COSTS) if policy in PRESETS else POLICIES[policy]
        if isinstance(self.policy, SchedulerPolicy) and not (keeps_parts and policy in PRESETS):
            self.policy = dataclasses.replace(self.policy, offload=offload, retention=retention())
            if action is not None:
                self.policy = dataclasses.replace(self.policy, action=action)
        self.is_fcfs = isinstance(self.policy.priority, FCFSPriority) and policy not in LETS_OTHERS_PAST
        victim = getattr(self.policy, "victim", None)
        self.may_outrank = isinstance(victim, ArbitraryVictim | OutrankedVictim | OvertakerVictim)
        # Blocks of copies still under way may be missing, but then they are few and soon free.
        self.must_swap = policy in ALWAYS_SWAP and run_ahead == 0
        self.num_blocks, self.num_host_blocks = num_blocks, num_host_blocks
        self.kv_tokens = num_blocks * block_size
        self.is_shared = is_shared and self.policy.shares_prefixes
        self.run_ahead = run_ahead
        self.most_steps = most_steps
        self.max_looked_up = max_looked_up
        budget += max_num_seqs
        device = FakeDevice(block_size, self.is_shared)
        has_files = has_files and self.is_shared and num_host_blocks > 0
        self.speculation = None
        if drafts is not None and mixes(self.policy):
            answers = collections.defaultdict(list)
            proposer = Knowing(answers, drafts, VOCAB_SIZE, 0.0 if is_computed else None)
            chained = proposer if is_computed else None
            self.speculation = Speculation(proposer, AsProposed(), 6, 9, chained=chained)
        self.scheduler = make_scheduler(
            self.policy,
            files=device.files if has_files else None,
            speculation=self.speculation,
            num_gpu_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            block_size=block_size,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_prefill_seqs=data.draw(st.none() | st.integers(1, max_num_seqs)),
            enable_prefix_caching=self.is_shared,
            program_sizes=tuple(sorted({*(size for size in sizes if size < budget), budget})),
        )
        self.device = device
        self.reads = []
        self.live = {}
        self.num_added = 0
        self.now = 0.0
        self.num_broken = 0
        self.pending = collections.deque()

    # What users do

    @precondition(lambda self: self.num_added < 40)
    @rule(count=st.integers(1, 4), data=st.data())
    def add(self, count, data):
        group_index = data.draw(st.sampled_from([None, self.num_added]))
        for _ in range(count):
            self._add(data, group_index=group_index)

    @precondition(lambda self: self.num_added < 30)
    @rule(total=st.integers(2, MAX_MODEL_LEN), data=st.data())
    def add_backlog(self, total, data):
        """As many of one kind as a burst brings."""
        total = min(total, self.kv_tokens + 1)
        prompt = data.draw(st.integers(1, total - 1))
        for _ in range(8):
            self._add(data, prompt=prompt, total=total)

    @precondition(lambda self: self.num_added < 38)
    @rule(prompt=st.integers(1, 12), count=st.integers(2, 3), data=st.data())
    def add_twins(self, prompt, count, data):
        """Requests that compute the same blocks, each for itself."""
        prompt = min(prompt, self.kv_tokens)
        total = data.draw(st.integers(prompt + 1, min(self.kv_tokens + 1, MAX_MODEL_LEN)))
        token_ids = [i % VOCAB_SIZE for i in range(prompt)]
        for _ in range(count):
            self._add(data, token_ids=token_ids, total=total)

    @precondition(lambda self: self.live and self.is_shared and self.num_added < 40)
    @rule(data=st.data())
    def follow(self, data):
        """Go on from a live request, whose output need not be known yet."""
        live = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        most = min(self.kv_tokens, MAX_MODEL_LEN - 1)
        token_ids = [*live.prompt_token_ids, *reference_output(live)][:most]
        self._add(data, token_ids=token_ids[: data.draw(st.integers(1, len(token_ids)))])

    def _add(self, data, *, group_index=None, prompt=None, total=None, token_ids=None):
        most = min(self.kv_tokens + 1, MAX_MODEL_LEN)
        num_dropped = 0
        if token_ids is None:
            total = total or data.draw(st.integers(2, most))
            prompt = prompt or data.draw(st.integers(1, total - 1))
            first = data.draw(st.integers(0, 1)) if self.is_shared else self.num_added
            num_dropped = data.draw(st.sampled_from([0, 0, 1, 3])) * self.device.block_size
            token_ids = [(first + i) % VOCAB_SIZE for i in range(num_dropped + prompt)]
        else:
            prompt = len(token_ids)
            total = total or data.draw(st.integers(prompt + 1, most))
        request = make_request(
            self.num_added,
            prompt,
            prompt_token_ids=token_ids[num_dropped:],
            dropped_token_ids=token_ids[:num_dropped],
            max_total_tokens=total,
            group_index=group_index,
            eos_token_ids=data.draw(st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=3)),
            priority=data.draw(st.integers(0, 2)),
            deadline=data.draw(st.none() | st.floats(0, 10)),
        )
        self.num_added += 1
        self.live[request.request_id] = request
        if self.speculation is not None:
            self.speculation.proposer.answers[request.request_id] = reference_output(request)
        self.scheduler.add(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        request = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        self._finish(request, "abort")

    @rule()
    def reset_prefix_cache(self):
        self.device.drop(self.scheduler.reset_prefix_cache())

    @precondition(lambda self: self.live)
    @rule(data=st.data(), priority=st.integers(0, 2))
    def reprioritize(self, data, priority):
        request = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        self.scheduler.reprioritize(request, priority)

    # What the engine does

    @rule(count=st.integers(1, 6))
    def run(self, count):
        for _ in range(count):
            self._step()
            self.invariants_hold()

    @precondition(lambda self: self.live)
    @rule(count=st.integers(0, 60))
    def leave_alone(self, count):
        """Nobody comes for a while, and then everybody leaves."""
        for _ in range(count):
            if self.live:
                self._step()
                self.invariants_hold()
        for request in list(self.live.values()):
            self._finish(request, "abort")
        self._step()

    def _step(self):
        before = self._snapshot()
        self.joined_before = {swap.request for swap in self.scheduler._state.joined}
        arrived = {handle for handle in self.device.loading if draw(self.now, handle, 3) == 0}
        ended = [read for number, read in enumerate(self.reads) if draw(self.now, number, 2)]
        self.reads = [read for read in self.reads if read not in ended]
        read = [self.device.read(one, lambda number: draw(self.now, number, 5) == 0) for one in ended]
        copies = CopyProgress(arrived, draw(self.now, 0, 40), read=read)
        max_steps = 1 + draw(self.now, 3, self.most_steps)
        num_scheduled = self.scheduler.num_scheduled
        while self.pending and self.speculation is not None and draw(self.now, 1, 3):
            self._commit(self.pending.popleft())
            before = self._snapshot()
        if self.speculation is not None:
            looks_up = self.scheduler.num_running <= self.max_looked_up
            self.speculation.lookup_steps = max_steps if looks_up else 1
        try:
            output = self.scheduler.schedule(self.now, copies, max_steps)
        except UserCodeError as error:
            if not isinstance(error.__cause__, Broken):
                raise
            self._check_intact(before, num_scheduled)
            self.now += 1.0  # the next attempt draws other answers
            return
        self.now += 1.0
        self.reads += self.scheduler.take_reads()
        assert 1 <= output.num_decode_steps <= max_steps
        self._check_decision(output, before)
        if not output.is_empty:
            self.pending.append(Pending(output, self.device.execute(output)))
        # An empty iteration leaves the engine nothing to do but to read what is in flight.
        while self.pending and (
            not self.live
            or len(self.pending) > (0 if output.is_empty or output.num_drafts else self.run_ahead)
        ):
            self._commit(self.pending.popleft())
        self._flush()

    def _flush(self):
        """Let the device do what is left when nobody is."""
        for _ in range(self.num_blocks + 2):
            if self.live or not self.scheduler.has_leftovers:
                return
            self.device.execute(self.scheduler.flush())
            self.reads = []
            self.invariants_hold()
        raise AssertionError("an idle scheduler never comes to an end")

    def _snapshot(self):
        return {
            r: (r.num_tokens, r.num_computed_tokens, r.status, r.slot is not None) for r in self.live.values()
        }

    def _check_intact(self, before, num_scheduled):
        """A policy raised: requests whose copies arrived may have joined, and nothing else changed."""
        assert self.scheduler.num_scheduled == num_scheduled
        self.scheduler.check()
        for request, (num_tokens, num_computed, status, holds) in before.items():
            assert (request.num_tokens, request.num_computed_tokens) == (num_tokens, num_computed)
            joined = status is RequestStatus.SWAPPED and request.status is RequestStatus.RUNNING
            assert request.status is status or (joined and holds)

    def _commit(self, step):
        output, token_ids = step.output, step.token_ids
        self.scheduler.complete(output.step_id)
        requests = output.sampled * output.num_decode_steps
        rows, turns = zip(requests, token_ids, strict=True), ()
        if output.num_lookups:
            found, turns = looked_up(output, token_ids)
            rows = [(request, token_id) for request, token_id, _ in found]
        elif output.num_drafts:
            rows = accepted(output, rows)
        for request, token_id in rows:
            if request.is_finished:
                continue  # it ended while this token was in flight
            request.output_token_ids.append(token_id)
            if token_id in request.eos_token_ids:
                self._finish(request, "stop", token_id)
            elif request.num_prompt_tokens + len(request.output_token_ids) == request.max_total_tokens:
                self._finish(request, "length")
        for request, verified in zip(output.decode if turns else (), turns, strict=True):
            self.scheduler.accept(request, verified)
            assert request.is_finished or request.num_known_tokens == request.num_tokens
        for chunk in output.prefill:
            if chunk.drafts and not chunk.request.is_finished:
                num_tokens = chunk.request.num_known_tokens - chunk.start - 1
                assert 1 <= num_tokens <= chunk.length
                self.scheduler.accept(chunk.request, [(len(chunk.drafts), num_tokens - 1)])

    def _finish(self, request, reason, stop_reason=None):
        del self.live[request.request_id]  # a KeyError here: finished twice
        self.scheduler.finish(request, reason, stop_reason)
        self.scheduler.check()
        assert request.is_finished
        expected = reference_output(request)
        if reason == "abort":
            assert request.output_token_ids == expected[: len(request.output_token_ids)]
        else:
            assert request.output_token_ids == expected

    def _check_decision(self, output, before):
        config = self.scheduler.config
        chunks = {chunk.request: chunk for chunk in output.prefill}
        batch = [*output.decode, *chunks]
        if not mixes(self.policy):
            assert not (output.prefill and output.decode)
        assert len(set(batch)) == len(batch) == len({request.slot for request in batch})
        assert all(request in before for request in batch), "schedules a finished request"
        assert not set(batch) & set(output.preempted)
        self._check_swaps(output, before)
        assert len(output.decode) + output.num_prefill_tokens <= config.max_num_batched_tokens
        assert len(output.prefill) <= (config.max_prefill_seqs or config.max_num_seqs)

        resumed = {swap.request for swap in (*output.swap_in, *output.joined)}
        started = {swap.request for swap in output.load}
        assert not resumed & started
        for request in output.decode:
            num_tokens, num_computed, status, _ = before[request]
            is_back = request in resumed - self.joined_before
            expected = RequestStatus.SWAPPED if is_back else RequestStatus.RUNNING
            assert (num_computed, status) == (num_tokens - 1, expected)
            gained = output.num_decode_steps
            if output.num_lookups:
                gained = min(gained * (output.num_lookups + 1), request.max_total_tokens - num_tokens)
                proposer = self.speculation.proposer
                assert proposer.takes is None or request in proposer.prepared
            assert request.num_tokens == num_tokens + gained <= request.max_total_tokens
            assert request.num_computed_tokens == request.num_tokens - 1
        for chunk in output.prefill:
            request = chunk.request
            num_tokens, num_computed, status, _ = before[request]
            assert chunk.length > 0
            if chunk.drafts:
                assert chunk.is_last
                assert (chunk.start, chunk.length) == (num_tokens - 1, len(chunk.drafts) + 1)
                assert num_tokens + chunk.length == request.num_tokens <= request.max_total_tokens
                assert len(request.block_ids) <= config.num_gpu_blocks
                continue
            assert chunk.is_last == (chunk.start + chunk.length == num_tokens)
            if not self.scheduler._state.lookups.looks_past_gaps:
                assert request.num_computed_tokens == chunk.start + chunk.length
            if self.is_shared and status is RequestStatus.WAITING:
                assert chunk.start % config.block_size == 0
            else:
                assert chunk.start == num_computed
            # Who comes back might have verified drafts, had there been blocks for any.
            assert (
                chunk.is_first or status is RequestStatus.RUNNING or (self.speculation and request in resumed)
            )
            assert request.num_tokens == num_tokens + chunk.is_last
            assert request.metrics.first_scheduled_time is not None
            assert 0 <= chunk.num_recomputed <= chunk.length
        newly = {r for r in chunks if before[r][2] is RequestStatus.WAITING}
        for request in output.preempted:
            assert request.num_tokens == before[request][0]
            assert before[request][3], "preempts somebody who holds nothing"
        if output.preempted:
            num_new = len(newly) + len(output.swap_in)
            assert num_new <= self.may_outrank, "takes somebody in where it preempted"
            assert not output.load
        untouched = before.keys() - set(batch) - set(output.preempted) - resumed
        # Who was to wait for copies may have found its blocks on the device: others have just brought them.
        waiting = {
            request for request, (_, _, status, _) in before.items() if status is RequestStatus.WAITING
        }
        untouched -= {r for r in waiting if r in started or r.status is RequestStatus.RUNNING}
        after = {r: (r.num_tokens, r.num_computed_tokens, r.status) for r in untouched}
        changed = [(r, before[r], is_now) for r, is_now in after.items() if before[r][:3] != is_now]
        assert not changed, changed

        arrivals = [request.arrival_index for request in output.decode]
        assert all(a < b for a, b in itertools.pairwise(arrivals))
        if output.decode:
            left_out = [r for r in untouched if r.status is RequestStatus.RUNNING]
            ended = [r for r in left_out if r.num_tokens == r.max_total_tokens]
            under_way = [r for r in left_out if r in self.scheduler._state.prompts]
            assert len(ended) + len(under_way) == len(left_out), "a request skips a decode"
        if self.is_fcfs and newly:
            waiting = [r.arrival_index for r in self.live.values() if r.status is RequestStatus.WAITING]
            assert not waiting or max(r.arrival_index for r in newly) < min(waiting), "one is overtaken"
        if output.is_empty:
            is_waiting = self.scheduler.is_reading or any(r.num_in_flight for r in before)
            assert not before or is_waiting, "idles with nothing to wait for"

    def _check_swaps(self, output, before):
        copied = {swap.request for swap in output.swap_out} - {None}
        assert copied <= set(output.preempted)
        batch = {*output.decode, *(chunk.request for chunk in output.prefill)}
        assert {swap.request for swap in output.swap_in} <= batch
        swapped = {request for request in output.preempted if request.host_blocks}
        assert copied == swapped if not self.is_shared else copied <= swapped
        for request in output.preempted:
            is_swapped = request in swapped
            assert request.status is (RequestStatus.SWAPPED if is_swapped else RequestStatus.WAITING)
            assert request.num_computed_tokens == (before[request][1] if is_swapped else 0)
        if self.must_swap:
            assert swapped == set(output.preempted), "the host pool is full"
        if output.is_empty:  # nobody executes it
            parts = ("preempted", "swap_out", "swap_in", "joined", "load", "discarded", "dropped")
            assert not any(getattr(output, part) for part in parts)

    @invariant()
    def invariants_hold(self):
        self.scheduler.check()
        state = self.scheduler._state
        loading = {id(swap.request) for swap in state.loading.values()}
        swapped = [
            r for r in self.live.values() if r.status is RequestStatus.SWAPPED and id(r) not in loading
        ]
        assert self.scheduler.num_swapped == len(swapped)
        pieces = {one.piece.key for one in state.host._blocks.values()}
        kept = [block for block in self.device.host if block.piece in pieces]
        on_device = {block.piece for block in self.device.host}
        coming = {piece for piece in pieces if piece.handle in state.being_read}
        assert on_device == pieces - coming | set(state.host._dropped), "a copy is lost or kept"
        assert coming or not state.awaited
        assert set(self.device.loading) == set(state.loading) | set(state.discarded) | {
            swap.handle for swap in state.joined
        }
        if not coming:
            assert state.host.num_blocks - state.host.num_free == len(kept)
        held = [block_id for r in self.live.values() for block_id in r.block_ids]
        for_next_turns = self.scheduler.held_block_ids
        until_named = [block_id for _, tail in state.tails.values() for block_id in tail]
        assert set(state.tails) <= set(self.live), "blocks wait for tokens that nobody reads"
        num_held = len({*held, *for_next_turns, *until_named})
        assert self.scheduler.num_free_blocks + num_held == self.num_blocks
        assert self.is_shared or len(set(held)) == len(held)
        waiting = [r for r in self.live.values() if r.status is RequestStatus.WAITING]
        assert self.scheduler.num_waiting == len(waiting)
        assert self.scheduler.num_running == sum(r.slot is not None for r in self.live.values())
        assert self.scheduler.has_unfinished == bool(self.live)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        # Everybody ends: even where victims lose their prompts half computed, somebody gains a token.
        bound = 60 * (len(self.live) + 1) * MAX_MODEL_LEN
        while self.live:
            assert bound > 0, "the drain does not end"
            bound -= 1
            self._step()
            self.invariants_hold()
        while self.pending:
            self._commit(self.pending.popleft())
        while self.reads:
            self._step()
        assert self.scheduler.schedule(self.now + 1e9).is_empty  # no time to live is so long
        self.scheduler.check()
        assert self.scheduler.num_free_blocks == self.num_blocks
        assert self.scheduler.num_available_host_blocks == self.num_host_blocks
        assert self.is_shared or self.scheduler.num_free_host_blocks == self.num_host_blocks
        assert self.scheduler.num_running == self.scheduler.num_waiting == self.scheduler.num_swapped == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
