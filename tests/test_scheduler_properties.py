"""Random traffic through the scheduler and a device that checks every read of the KV pool."""

import collections
import dataclasses
import itertools

from fake_device import VOCAB_SIZE, FakeDevice, next_token
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_helpers import LinearCosts, make_request, make_scheduler, sampled_requests

from jaxllm.sched.policies import (
    Decision,
    HostBoundAdmission,
    OverlapAwareAction,
    PreemptionAction,
    ResumeAction,
    ResumeDecision,
    SchedulerPolicy,
    SwapIfItFits,
    WatermarkAdmission,
)
from jaxllm.sched.presets import make_preset
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
    """A step that was executed and not read; a void one computed nothing."""

    output: SchedulerOutput
    token_ids: list[int]
    is_void: bool = False


class ShortestFirst:
    def score(self, request, now):
        return -request.num_tokens

    def group(self, request):
        return request.num_tokens


def draw(now, number, count):
    """A number below `count` that looks random and is the same each time."""
    return (int(now) * 7919 + number * 104729) // 13 % count


class ArbitraryPriority:
    def score(self, request, now):
        return draw(now, request.arrival_index, 5)

    def group(self, request):
        return request.arrival_index


class ArbitraryVictim:
    def choose(self, candidates, now):
        return candidates[draw(now, 1, len(candidates))]


class ArbitraryAction:
    def choose(self, victim, state, now):
        assert 0 <= state.num_host_free <= state.num_host_blocks
        assert victim in state.started
        num_blocks = len(victim.block_ids)
        wanted = draw(now, victim.arrival_index, 3)
        if wanted == 0 and num_blocks <= state.num_host_free:
            return Decision(PreemptionAction.SWAP)
        most = min(num_blocks - 1, state.num_host_free - state.num_host_heads)
        if wanted == 1 and most > 0:
            num_copied = 1 + draw(now, num_blocks, most)
            return Decision(PreemptionAction.MIXED, num_blocks=num_copied, copy_seconds=1.0)
        return Decision(PreemptionAction.RECOMPUTE)


@dataclasses.dataclass(frozen=True)
class ArbitraryRestore:
    prefill_first: bool
    skips: bool
    resume_watermark: float | None = None

    def swaps_in(self, waiting, swapped, now):
        assert waiting
        assert swapped
        return bool(draw(now, len(waiting) + len(swapped), 2))


class ArbitraryResume:
    def choose(self, request, num_lost, copied_out_at, state, now):
        assert 0 <= num_lost <= -(-request.num_tokens // state.block_size)
        actions = list(ResumeAction)
        return ResumeDecision(actions[draw(now, request.arrival_index, len(actions))], copy_seconds=1.0)


class NeverAdmit:
    def admits(self, request, num_needed, state):
        assert num_needed <= state.num_free <= state.num_blocks
        return False


NO_WATERMARK = WatermarkAdmission(0.0)
COSTS = LinearCosts()
ALWAYS_SWAP = {
    "vllm_swap": make_preset("vllm_swap"),
    "both pools": SchedulerPolicy(
        admission=HostBoundAdmission(0.0, count_device_pool=True), action=SwapIfItFits()
    ),
}
POLICIES = {
    "adaptive": make_preset("adaptive", COSTS),
    "adaptive, mixed": dataclasses.replace(
        make_preset("adaptive", COSTS), action=OverlapAwareAction(LinearCosts(swap=0.3), mixes=True)
    ),
    "paper": make_preset("paper", COSTS),
    "vllm": make_preset("vllm"),
    "no watermark": SchedulerPolicy(admission=NO_WATERMARK),
    "high watermark": SchedulerPolicy(admission=WatermarkAdmission(0.3)),
    "one at a time": SchedulerPolicy(admission=NeverAdmit()),
    "one at a time, paper": dataclasses.replace(make_preset("paper", COSTS), admission=NeverAdmit()),
    "swap if it fits": SchedulerPolicy(admission=NO_WATERMARK, action=SwapIfItFits()),
    "swap, short first": SchedulerPolicy(
        admission=NO_WATERMARK,
        priority=ShortestFirst(),
        victim=ArbitraryVictim(),
        action=SwapIfItFits(),
        restore=ArbitraryRestore(prefill_first=False, skips=False),
    ),
    "short first": SchedulerPolicy(
        admission=NO_WATERMARK, priority=ShortestFirst(), victim=ArbitraryVictim()
    ),
    **ALWAYS_SWAP,
    **{
        f"arbitrary {prefill_first} {skips} {spare} {lazy}": SchedulerPolicy(
            admission=NO_WATERMARK,
            priority=ArbitraryPriority(),
            victim=ArbitraryVictim(),
            action=ArbitraryAction(),
            resume=ArbitraryResume(),
            restore=ArbitraryRestore(prefill_first, skips),
            decode_needs_free_block=spare,
            lazy_eviction=lazy,
        )
        for prefill_first, skips, spare, lazy in itertools.product([False, True], repeat=4)
    },
}
FCFS = {"vllm", "no watermark", "high watermark", "one at a time", "swap if it fits", *ALWAYS_SWAP}


class SchedulerMachine(RuleBasedStateMachine):
    """Plays the engine: reads tokens `run_ahead` iterations after they were scheduled."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        num_blocks=st.integers(2, 14),
        num_host_blocks=st.integers(0, 10),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 24),
        data=st.data(),
        run_ahead=st.integers(0, 2),  # the engine's is 0 or 1; 2 exercises the guard on tokens in flight
        most_steps=st.sampled_from([1, 3, 8]),
    )
    def start(
        self,
        policy,
        num_blocks,
        num_host_blocks,
        block_size,
        max_num_seqs,
        budget,
        data,
        run_ahead,
        most_steps,
    ):
        self.is_fcfs = policy in FCFS
        # Blocks of copies still under way may be missing, but then they are few and soon free.
        self.must_swap = policy in ALWAYS_SWAP and run_ahead == 0
        self.num_blocks, self.num_host_blocks = num_blocks, num_host_blocks
        self.kv_tokens = num_blocks * block_size
        self.run_ahead = run_ahead
        self.most_steps = most_steps
        self.scheduler = make_scheduler(
            POLICIES[policy],
            num_gpu_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            block_size=block_size,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_prefill_seqs=data.draw(st.none() | st.integers(1, max_num_seqs)),
        )
        self.device = FakeDevice(block_size, forgets=not POLICIES[policy].lazy_eviction)
        self.live = {}
        self.aborted = set()
        self.num_added = 0
        self.now = 0.0
        self.pending = collections.deque()

    # What users do

    @precondition(lambda self: self.num_added < 30)
    @rule(count=st.integers(1, 4), data=st.data())
    def add(self, count, data):
        for _ in range(count):
            total = data.draw(st.integers(2, min(self.kv_tokens + 1, MAX_MODEL_LEN)))
            prompt = data.draw(st.integers(1, total - 1))
            request = make_request(
                self.num_added,
                prompt,
                prompt_token_ids=[(self.num_added + i) % VOCAB_SIZE for i in range(prompt)],
                max_total_tokens=total,
                eos_token_ids=data.draw(st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=3)),
            )
            self.num_added += 1
            self.live[request.request_id] = request
            self.scheduler.add(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        request = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        self.aborted.add(request.request_id)
        self._finish(request, "abort")

    # What the engine does

    @rule(count=st.integers(1, 6))
    def run(self, count):
        for _ in range(count):
            self._step()
            self.invariants_hold()

    def _step(self):
        if any(step.output.may_end_early and not step.is_void for step in self.pending):
            while self.pending and not self.scheduler.decodes_on:
                self._commit(self.pending.popleft())
        before = {r: (r.num_tokens, r.num_computed_tokens, r.status) for r in self.live.values()}
        arrived = {handle for handle in self.device.loading if draw(self.now, handle, 3) == 0}
        copies = CopyProgress(arrived, draw(self.now, 0, 40))
        max_steps = 1 + draw(self.now, 3, self.most_steps)
        output = self.scheduler.schedule(self.now, copies, max_steps)
        assert 1 <= output.num_decode_steps <= max_steps
        self.now += 1.0
        self._check_decision(output, before)
        if not output.is_empty:
            self.pending.append(Pending(output, self.device.execute(output)))
        # An empty iteration leaves the engine nothing to do but to read what is in flight.
        while len(self.pending) > (0 if output.is_empty else self.run_ahead):
            self._commit(self.pending.popleft())

    def _commit(self, step):
        output, token_ids = step.output, step.token_ids
        self.scheduler.complete(output.step_id)
        requests = sampled_requests(output)
        num_steps = output.num_decode_steps
        if output.decode:
            num_steps = len(token_ids) // len(requests)
            requests = requests * num_steps
        assert not (step.is_void and token_ids)
        for request, token_id in zip(requests, token_ids, strict=True):
            if request.is_finished:
                continue  # it ended while this token was in flight
            request.output_token_ids.append(token_id)
            if token_id in request.eos_token_ids:
                self._finish(request, "stop", token_id)
            elif request.num_prompt_tokens + len(request.output_token_ids) == request.max_total_tokens:
                self._finish(request, "length")
        goes_on = any(not request.is_finished for request in output.decode)
        if num_steps < output.num_decode_steps and goes_on and not step.is_void:
            self.scheduler.rewind(output.decode, output.num_decode_steps - num_steps)
            for later in self.pending:
                self.scheduler.rewind(later.output.decode, later.output.num_decode_steps)
                later.is_void = True

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
        batch = [*output.decode, *(chunk.request for chunk in output.prefill)]
        assert not (output.prefill and output.decode)
        assert not (output.prefill and output.preempted)
        assert len(set(batch)) == len(batch) == len({request.slot for request in batch})
        assert all(request in before for request in batch), "schedules a finished request"
        assert not set(batch) & set(output.preempted)
        self._check_swaps(output, before)
        assert output.num_prefill_tokens <= config.max_num_batched_tokens
        assert len(output.prefill) <= (config.max_prefill_seqs or config.max_num_seqs)

        heads = {swap.request for swap in output.swap_in} if output.prefill else set()
        resumed = {swap.request for swap in (*output.swap_in, *output.joined)} - heads
        started = {swap.request for swap in output.load}
        assert not resumed & started
        given_up = {
            r
            for r in before.keys() - resumed
            if before[r][2] is RequestStatus.SWAPPED and r.host_handle is None
        }
        for request in output.decode:
            num_tokens, num_computed, status = before[request]
            expected = RequestStatus.SWAPPED if request in resumed else RequestStatus.RUNNING
            assert (num_computed, status) == (num_tokens - 1, expected)
            num_steps = output.num_decode_steps
            assert request.num_tokens == num_tokens + num_steps <= request.max_total_tokens
            assert request.num_computed_tokens == request.num_tokens - 1
        for chunk in output.prefill:
            request = chunk.request
            num_tokens, num_computed, _ = before[request]
            assert chunk.length > 0
            assert chunk.is_last == (chunk.start + chunk.length == num_tokens)
            assert request.num_computed_tokens == chunk.start + chunk.length
            head = [swap for swap in output.swap_in if swap.request is request]
            if head:
                assert chunk.is_first
                assert chunk.start == min(len(head[0].block_ids) * config.block_size, num_tokens - 1)
            elif chunk.is_first and self.scheduler.policy.lazy_eviction:
                assert chunk.start % config.block_size == 0 or chunk.start == num_tokens - 1
            else:
                assert chunk.start == (0 if request in given_up else num_computed)
            was_waiting = before[request][2] is RequestStatus.WAITING or request in given_up
            assert chunk.is_first == was_waiting
            assert request.num_tokens == num_tokens + chunk.is_last
            assert request.metrics.first_scheduled_time is not None
        for request in output.preempted:
            assert request.num_tokens == before[request][0]
            assert (before[request][2] is RequestStatus.RUNNING) != (request in resumed)
        untouched = before.keys() - set(batch) - set(output.preempted) - resumed - given_up
        assert all((r.num_tokens, r.num_computed_tokens, r.status) == before[r] for r in untouched)

        # Who was loading when a prompt took its blocks may have joined by the time the prompt goes on.
        starts = any(chunk.is_first for chunk in output.prefill)
        if starts and not self.scheduler.policy.restore.prefill_first:
            running = [r for r in untouched | resumed if r.status is RequestStatus.RUNNING]
            going_on = [r for r in running if r.slot is not None and r.num_tokens < r.max_total_tokens]
            growth = sum(-(-r.num_tokens // config.block_size) - len(r.block_ids) for r in going_on)
            assert self.scheduler.num_free_blocks >= growth, "takes what running requests need next"

        # Only an iteration's first prompt may be cut by the budget.
        assert all(chunk.is_last for chunk in output.prefill[1:])
        arrivals = [request.arrival_index for request in batch]
        if output.decode or self.is_fcfs:
            assert all(a < b for a, b in itertools.pairwise(arrivals))
        if output.decode:
            left_out = [r for r in untouched if r.status is RequestStatus.RUNNING]
            assert all(r.num_tokens == r.max_total_tokens for r in left_out), "a request skips a decode"
        if self.is_fcfs and output.prefill:
            waiting = [r.arrival_index for r in self.live.values() if r.status is RequestStatus.WAITING]
            assert not waiting or max(arrivals) < min(waiting), "a request is overtaken"
        if output.is_empty:
            assert not before or any(r.num_in_flight for r in before), "idles with nothing to wait for"

    def _check_swaps(self, output, before):
        copied = {swap.request: len(swap.block_ids) for swap in output.swap_out}
        assert copied.keys() <= set(output.preempted)
        swapped = {request for request in copied if request.status is RequestStatus.SWAPPED}
        assert not (output.preempted and output.swap_in), "swaps in where it preempted"
        batch = {*output.decode, *(chunk.request for chunk in output.prefill if chunk.is_first)}
        assert {swap.request for swap in output.swap_in} <= batch
        if not output.prefill:
            joined = {swap.request for swap in output.joined}
            assert joined <= set(output.decode) | set(output.preempted)
        for request in output.preempted:
            status = RequestStatus.SWAPPED if request in swapped else RequestStatus.WAITING
            assert (request.status, request.host_handle is not None) == (status, request in copied)
            assert request.num_computed_tokens == (before[request][1] if request in swapped else 0)
        if self.must_swap:
            assert swapped == set(output.preempted), "the host pool is full"
        if output.is_empty:  # nobody executes it
            assert not (output.preempted)
            assert not (output.swap_out)
            assert not (output.swap_in)
            assert not (output.joined)
            assert not (output.load)
            assert not (output.discarded)

    @invariant()
    def invariants_hold(self):
        self.scheduler.check()
        swapped = {r.host_handle for r in self.live.values() if r.status is RequestStatus.SWAPPED}
        assert self.scheduler.num_swapped == len(swapped - self.device.loading.keys())
        copies = {r.host_handle for r in self.live.values() if r.host_handle is not None}
        assert set(self.device.host) == copies | set(self.scheduler._state.copies._discarded), (
            "a copy is lost or kept"
        )
        host = self.scheduler._state.host
        assert host.num_used == sum(len(self.device.host[handle]) for handle in copies)
        assert host.num_free + host.num_used + host.num_in_flight == self.num_host_blocks
        tables = [r.block_ids for r in self.live.values()]
        assert self.scheduler.num_free_blocks + sum(map(len, tables)) == self.num_blocks
        waiting = [r for r in self.live.values() if r.status is RequestStatus.WAITING]
        assert self.scheduler.num_waiting == len(waiting)
        assert self.scheduler.num_running == sum(r.slot is not None for r in self.live.values())
        assert self.scheduler.has_unfinished == bool(self.live)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        # Each prefill ends in a token, so a request is prefilled at most once per token it still needs.
        chunks_per_prefill = -(-MAX_MODEL_LEN // self.scheduler.config.max_num_batched_tokens)
        tokens_left = sum(r.max_total_tokens - r.num_tokens + r.num_in_flight for r in self.live.values())
        bound = (tokens_left + len(self.live)) * (chunks_per_prefill + 1) + 2
        while self.live:
            assert bound > 0, "the drain does not end"
            bound -= 1
            self._step()
            self.invariants_hold()
        while self.pending:
            self._commit(self.pending.popleft())
        assert self.scheduler.schedule(self.now).is_empty
        self.scheduler.check()
        assert self.scheduler.num_free_blocks == self.num_blocks
        assert self.scheduler.num_free_host_blocks == self.num_host_blocks
        assert self.scheduler.num_running == self.scheduler.num_waiting == self.scheduler.num_swapped == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=120, stateful_step_count=25, deadline=None)
