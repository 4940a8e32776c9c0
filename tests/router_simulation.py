"""Conversations over simulated replicas with the engine's own scheduler and prefix cache, behind a router."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxllm.predictors.base import CostModel
from jaxllm.research.simulator.executor import SimulatedExecutor
from jaxllm.research.workloads import Feed, Trace
from jaxllm.routing.prompt_keys import keys_of_token_ids
from jaxllm.routing.router import Router
from jaxllm.sampling.params import SamplingParams
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.policies import SchedulingPolicy
from jaxllm.sched.scheduler import Scheduler
from jaxllm.types import Request

_VOCAB_SIZE = 2**31 - 1
_SAMPLING_PARAMS = SamplingParams(max_tokens=None, ignore_eos=True)


@dataclasses.dataclass(frozen=True)
class RoutingResult:
    """What a router made of a trace.

    Args:
        num_prompt_tokens: of all requests.
        num_cached_tokens: of these, found in the caches of replicas.
        work: tokens that each replica computed, of prompts and of answers.
        num_requests: that each replica answered.
        first_token_seconds: of each request, from when it was sent.
        latency_seconds: likewise, until it was answered.
        decision_seconds: what the router took for each, in order of sending.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    work: Sequence[int]
    num_requests: Sequence[int]
    first_token_seconds: np.ndarray
    latency_seconds: np.ndarray
    decision_seconds: np.ndarray

    def summary(self) -> dict[str, Any]:
        """The same in a few numbers; balance is the most loaded replica's over the mean."""
        return {
            "cached_tokens": self.num_cached_tokens,
            "share_cached": self.num_cached_tokens / self.num_prompt_tokens,
            "balance_of_work": max(self.work) / np.mean(self.work).item(),
            "balance_of_requests": max(self.num_requests) / np.mean(self.num_requests).item(),
            "first_token_seconds": self.first_token_seconds.mean().item(),
            "p99_first_token_seconds": np.percentile(self.first_token_seconds, 99).item(),
            "latency_seconds": self.latency_seconds.mean().item(),
        }


class _Replica:
    """The engine's scheduler on a virtual clock; each iteration's tokens are known when it ends."""

    def __init__(self, config: SchedulerConfig, policy: SchedulingPolicy, costs: CostModel) -> None:
        self._scheduler = Scheduler(config, policy)
        self._executor = SimulatedExecutor(
            costs, num_gpu_blocks=config.num_gpu_blocks, block_size=config.block_size, overlap_swaps=True
        )
        self.work = self.num_requests = 0

    @property
    def now(self) -> float:
        """When its next iteration can begin."""
        return self._executor.now

    @property
    def is_busy(self) -> bool:
        """Whether it has requests."""
        return self._scheduler.has_unfinished

    def add(self, request: Request, now: float) -> None:
        """Queue a request."""
        if not self.is_busy:
            self._executor.wait_until(now)
        self._scheduler.add(request)
        self.num_requests += 1

    def step(self) -> tuple[list[Request], list[Request]]:
        """One iteration; returns the requests that got their first token, and those that have ended."""
        scheduled = self._scheduler.schedule(self.now, self._executor.copies())
        assert not scheduled.is_empty  # without host memory there is nothing to wait for
        self._executor.execute(scheduled)
        begun = []
        for chunk in scheduled.prefill:
            self.work += chunk.length
            if chunk.is_last:
                if not chunk.request.output_token_ids:
                    begun.append(chunk.request)
                chunk.request.output_token_ids.append(0)
        for request in scheduled.decode:
            request.output_token_ids.append(0)
        self.work += len(scheduled.decode)
        for request in scheduled.ending:
            self._scheduler.finish(request, "length")
        return begun, list(scheduled.ending)


def simulate_routing(
    trace: Trace,
    router: Router,
    num_replicas: int,
    config: SchedulerConfig,
    policy: SchedulingPolicy,
    costs: CostModel,
) -> RoutingResult:
    """Send the requests of a trace to replicas as a router says, each to its full output length.

    The router knows what it has sent and what has been answered, and how much the replicas cache.

    Args:
        trace: who sends what and when; conversations, for prefixes to be found.
        router: with no replicas yet.
        num_replicas: how many there are, all alike.
        config: of each replica's scheduler; without host memory.
        policy: likewise.
        costs: what an iteration takes there.
    """
    replicas = {f"replica-{place}": _Replica(config, policy, costs) for place in range(num_replicas)}
    router.set_replicas(replicas)
    for name in replicas:
        cache_tokens = config.num_gpu_blocks * config.block_size
        router.report(name, now=0.0, queued_tokens=0, cache_tokens=cache_tokens)
    feed, said = Feed(trace), _Said(trace)
    sent, first, ended = np.zeros(len(trace)), np.zeros(len(trace)), np.zeros(len(trace))
    decisions: list[float] = []
    order = itertools.count()
    turns: list[tuple[float, int, str]] = []  # when whose next iteration begins
    answers: list[tuple[float, int, Request]] = []  # when they become known
    num_cached = 0
    while not feed.is_over or turns or answers:
        turn = turns[0][0] if turns else float("inf")
        answer = answers[0][0] if answers else float("inf")
        due = float("inf") if feed.next_due is None else feed.next_due
        if answer <= min(turn, due):
            request = heapq.heappop(answers)[2]
            index = int(request.request_id)
            num_cached += request.num_cached_tokens or 0
            router.ended(request.request_id)
            said.note(index, request)
            feed.answered(answer, index)
        elif due <= turn:
            item = feed.send(due)
            assert item is not None  # it is due
            index, sent[index] = item[0], item[1]
            prompt = said.prompt(index)
            output_len = int(trace.output_lens[index])
            began = time.perf_counter()
            chosen = router.route(
                str(index), keys_of_token_ids(prompt), now=due, max_tokens=output_len
            ).replica
            decisions.append(time.perf_counter() - began)
            replica = replicas[chosen]
            was_busy = replica.is_busy
            replica.add(_request(index, prompt, output_len, due, feed.num_sent - 1), due)
            if not was_busy:
                heapq.heappush(turns, (replica.now, next(order), chosen))
        else:
            chosen = heapq.heappop(turns)[2]
            replica = replicas[chosen]
            begun, ending = replica.step()
            for request in begun:
                first[int(request.request_id)] = replica.now
            for request in ending:
                ended[int(request.request_id)] = replica.now
                heapq.heappush(answers, (replica.now, next(order), request))
            if replica.is_busy:
                heapq.heappush(turns, (replica.now, next(order), chosen))
    return RoutingResult(
        num_prompt_tokens=int(trace.prompt_lens.sum()),
        num_cached_tokens=num_cached,
        work=[replica.work for replica in replicas.values()],
        num_requests=[replica.num_requests for replica in replicas.values()],
        first_token_seconds=first - sent,
        latency_seconds=ended - sent,
        decision_seconds=np.array(decisions),
    )


class _Said:
    """What was said before a request that follows another."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._followers: dict[int, list[int]] = collections.defaultdict(list)
        self._before: dict[int, Sequence[int]] = {}
        for index in range(len(trace)):
            if trace.followed(index) >= 0:
                self._followers[trace.followed(index)].append(index)

    def prompt(self, index: int) -> list[int]:
        """Token ids of a request."""
        return self._trace.token_ids(index, _VOCAB_SIZE, self._before.pop(index, ()))

    def note(self, index: int, request: Request) -> None:
        """A request has been answered."""
        for follower in self._followers.get(index, ()):
            self._before[follower] = request.token_ids(0, request.num_known_tokens)


def _request(
    index: int, prompt: Sequence[int], output_len: int, arrival_time: float, arrival_index: int
) -> Request:
    return Request(
        str(index),
        prompt,
        _SAMPLING_PARAMS,
        arrival_time=arrival_time,
        arrival_index=arrival_index,
        max_total_tokens=len(prompt) + output_len,
    )
