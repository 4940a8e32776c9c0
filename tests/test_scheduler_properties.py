"""Random traffic through the scheduler and a device that checks every read of the KV pool."""

import collections
import dataclasses
import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_helpers import make_request, make_scheduler, sampled_requests

from jaxllm.sched.policies import SchedulerPolicy, WatermarkAdmission
from jaxllm.types import RequestStatus

VOCAB_SIZE = 31
MAX_MODEL_LEN = 40


def next_token(token_ids):
    """A stand-in for a model: depends on every token and its position."""
    state = 7
    for token_id in token_ids:
        state = (state * 33 + token_id + 1) % 10007
    return state % VOCAB_SIZE


def reference_output(request):
    """What the request yields when it runs alone."""
    token_ids = list(request.prompt_token_ids)
    while len(token_ids) < request.max_total_tokens:
        token_ids.append(next_token(token_ids))
        if token_ids[-1] in request.eos_token_ids:
            break
    return token_ids[request.num_prompt_tokens :]


class FakeDevice:
    """A KV pool whose cells know what was written to them, and one newest token per slot."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.cells = {}
        self.newest_token = {}

    def execute(self, scheduled):
        """The sampled token of each sampled request."""
        for request in scheduled.decode:
            # It feeds its newest token, which the host may not know yet.
            self._write(request, request.num_tokens - 2, [self.newest_token[request.slot]])
        for chunk in scheduled.prefill:
            stop = chunk.start + chunk.length
            token_ids = chunk.request.token_ids(chunk.start, stop)
            assert len(token_ids) == chunk.length, "prefills a token that is not known"
            self._write(chunk.request, chunk.start, token_ids)
        return [self._sample(request) for request in sampled_requests(scheduled)]

    def _cell(self, request, position):
        return request.block_ids[position // self.block_size], position % self.block_size

    def _write(self, request, start, token_ids):
        for position, token_id in enumerate(token_ids, start):
            self.cells[self._cell(request, position)] = (request.request_id, position, token_id)

    def _sample(self, request):
        context = []
        for position in range(request.num_tokens - 1):
            owner, written_position, token_id = self.cells[self._cell(request, position)]
            assert (owner, written_position) == (request.request_id, position), "attends to another's KV"
            context.append(token_id)
        token_id = next_token(context)
        self.newest_token[request.slot] = token_id
        return token_id


class ShortestFirst:
    def order(self, waiting, now):
        return sorted(waiting, key=lambda request: request.num_tokens)


class ArbitraryVictim:
    def choose(self, candidates, now):
        return candidates[int(now) * 7919 % len(candidates)]


class NeverAdmit:
    def admits(self, request, num_needed, num_free, num_blocks):
        return False


POLICIES = {
    "vllm": SchedulerPolicy(),
    "no watermark": SchedulerPolicy(admission=WatermarkAdmission(0.0)),
    "high watermark": SchedulerPolicy(admission=WatermarkAdmission(0.3)),
    "one at a time": SchedulerPolicy(admission=NeverAdmit()),
    "unfair": SchedulerPolicy(
        admission=WatermarkAdmission(0.0), priority=ShortestFirst(), victim=ArbitraryVictim()
    ),
}


class SchedulerMachine(RuleBasedStateMachine):
    """Plays the engine: reads tokens `run_ahead` iterations after they were scheduled."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        num_blocks=st.integers(2, 14),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 24),
        data=st.data(),
        run_ahead=st.integers(0, 2),  # the engine's is 0 or 1; 2 exercises the guard on tokens in flight
    )
    def start(self, policy, num_blocks, block_size, max_num_seqs, budget, data, run_ahead):
        self.is_fcfs = policy != "unfair"
        self.num_blocks = num_blocks
        self.kv_tokens = num_blocks * block_size
        self.run_ahead = run_ahead
        self.scheduler = make_scheduler(
            dataclasses.replace(POLICIES[policy]),
            num_gpu_blocks=num_blocks,
            block_size=block_size,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_prefill_seqs=data.draw(st.none() | st.integers(1, max_num_seqs)),
        )
        self.device = FakeDevice(block_size)
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
        before = {r: (r.num_tokens, r.num_computed_tokens, r.status) for r in self.live.values()}
        output = self.scheduler.schedule(self.now)
        self.now += 1.0
        self._check_decision(output, before)
        if not output.is_empty:
            self.pending.append((output, self.device.execute(output)))
        # An empty iteration leaves the engine nothing to do but to read what is in flight.
        while len(self.pending) > (0 if output.is_empty else self.run_ahead):
            self._commit(*self.pending.popleft())

    def _commit(self, output, token_ids):
        for request, token_id in zip(sampled_requests(output), token_ids, strict=True):
            if request.is_finished:
                continue  # it ended while this token was in flight
            request.output_token_ids.append(token_id)
            if token_id in request.eos_token_ids:
                self._finish(request, "stop", token_id)
            elif request.num_prompt_tokens + len(request.output_token_ids) == request.max_total_tokens:
                self._finish(request, "length")

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
        assert output.num_prefill_tokens <= config.max_num_batched_tokens
        assert len(output.prefill) <= (config.max_prefill_seqs or config.max_num_seqs)

        for request in output.decode:
            num_tokens, num_computed, status = before[request]
            assert (num_computed, status) == (num_tokens - 1, RequestStatus.RUNNING)
            assert (request.num_tokens, request.num_computed_tokens) == (num_tokens + 1, num_tokens)
        for chunk in output.prefill:
            request = chunk.request
            num_tokens, num_computed, _ = before[request]
            assert chunk.length > 0
            assert chunk.is_last == (chunk.start + chunk.length == num_tokens)
            assert (chunk.start, request.num_computed_tokens) == (num_computed, num_computed + chunk.length)
            assert request.num_tokens == num_tokens + chunk.is_last
            assert request.metrics.first_scheduled_time is not None
        for request in output.preempted:
            assert (request.status, request.num_tokens) == (RequestStatus.WAITING, before[request][0])
        untouched = before.keys() - set(batch) - set(output.preempted)
        assert all((r.num_tokens, r.num_computed_tokens, r.status) == before[r] for r in untouched)

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

    @invariant()
    def invariants_hold(self):
        self.scheduler.check()
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
        tokens_left = sum(r.max_total_tokens - r.num_tokens for r in self.live.values())
        bound = (tokens_left + len(self.live)) * (chunks_per_prefill + 1) + 2
        while self.live:
            assert bound > 0, "the drain does not end"
            bound -= 1
            self._step()
            self.invariants_hold()
        while self.pending:
            self._commit(*self.pending.popleft())
        assert self.scheduler.schedule(self.now).is_empty
        self.scheduler.check()
        assert self.scheduler.num_free_blocks == self.num_blocks
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
