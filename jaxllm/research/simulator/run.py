"""Plays a trace through a scheduler and a simulated device."""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

import numpy as np

from jaxllm.engine.ledgers import header_of
from jaxllm.engine.observer import StepObserver
from jaxllm.errors import ConfigError, shown
from jaxllm.predictors.base import CostModel
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.predictors.own import checked, type_name
from jaxllm.research.simulator.drafting import SimulatedDrafts
from jaxllm.research.simulator.executor import SimulatedExecutor
from jaxllm.research.simulator.files import SimulatedFiles
from jaxllm.research.simulator.truth import Residuals
from jaxllm.research.workloads import Feed, Trace
from jaxllm.research.workloads.checks import check_number
from jaxllm.research.workloads.result import RunResult
from jaxllm.sampling.params import SamplingParams
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.gains import Gains
from jaxllm.sched.ledger import Ledger
from jaxllm.sched.policies import SchedulingPolicy, is_policy
from jaxllm.sched.presets import make_preset
from jaxllm.sched.scheduler import Scheduler
from jaxllm.sched.speculation import SpeculationCounts
from jaxllm.types import Request

_VOCAB_SIZE = 2**31 - 1
_P = ParamSpec("_P")
_R = TypeVar("_R")
_PARTS: Mapping[str, type] = {
    "residuals": Residuals,
    "ledger": Ledger,
    "calibration": OnlineCalibration,
    "scheduler": Scheduler,
    "files": SimulatedFiles,
    "drafts": SimulatedDrafts,
}
_SAMPLING_PARAMS = SamplingParams(max_tokens=None, ignore_eos=True)


def _said(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that says what to pass where arguments are missing, or are none of its own."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: _P.args, **named: _P.kwargs) -> _R:
        try:
            signature.bind(*args, **named)
        except TypeError as error:
            raise ConfigError(
                f"{function.__module__}.{function.__name__}: {error}; pass a Trace, a SchedulerConfig, a "
                "policy and a CostModel; jaxllm.research.simulate makes these of a model, a device and a load"
            ) from None
        return function(*args, **named)

    return call


@_said
def simulate(
    trace: Trace,
    config: SchedulerConfig,
    policy: SchedulingPolicy | str,
    costs: CostModel,
    *,
    overlap_swaps: bool = True,
    residuals: Residuals | None = None,
    ledger: Ledger | None = None,
    calibration: OnlineCalibration | None = None,
    priorities: Sequence[int] | None = None,
    deadlines: Sequence[float] | None = None,
    scheduler: Scheduler | None = None,
    files: SimulatedFiles | None = None,
    ingress_seconds: float = 0.0,
    client_seconds: float = 0.0,
    async_scheduling: bool = False,
    drafts: SimulatedDrafts | None = None,
    draft_costs: CostModel | None = None,
) -> RunResult:
    """Run every request of `trace` to its full output length.

    The scheduler is the engine's. Scheduling itself takes no time.

    Args:
        trace: arrivals or clients, prompt and output lengths; lengths are capped by nothing.
        config: limits of the scheduler.
        policy: its decisions; a name is what `make_preset` makes of it and `costs`.
        costs: the truth, which `policy` should know only through predictors of its own.
        overlap_swaps: whether copies run beside computation, or stop it; see `SimulatedExecutor`.
        residuals: the noise of the truth; None for none.
        ledger: collects the decisions; it begins with a header if it has none.
        calibration: predictions to correct by what steps and copies take, as the engine does; None corrects
            nothing.
        priorities: of the requests, lower ones more urgent; all alike if None.
        deadlines: of the requests, in seconds from when each is sent; none if None.
        scheduler: one of `config`, `policy` and `files` that does more than decide; by default a new one.
        files: what of the prefix cache is copied to the host is written to them, too; None is no disk.
        ingress_seconds: from when a client sends a request until the scheduler can see it: the client's and
            the server's part of a first token.
        client_seconds: from an answer until its client sends the next request, beside think times: clients
            of closed loops and conversations.
        async_scheduling: whether each step is planned while the one before it runs, so that who comes during
            a step waits for it and for the next one. Else a step is planned when the one before has ended.
        drafts: how requests draft; None drafts nothing. With a `scheduler` of one's own that is its matter.
        draft_costs: of the draft model, if one drafts.

    Raises:
        RequestTooLargeError: a request of the trace can never fit.
        ConfigError: an argument is of the wrong kind, or there is no such preset.
    """
    _check(trace, config, overlap_swaps, async_scheduling)
    parts = {"residuals": residuals, "ledger": ledger, "calibration": calibration, "scheduler": scheduler}
    _check_parts({**parts, "files": files, "drafts": drafts})
    _check_of_requests(len(trace), priorities=priorities, deadlines=deadlines)
    if ledger is not None and ledger.header is None:
        settings = {
            "num_requests": len(trace),
            "overlap_swaps": overlap_swaps,
            "async_scheduling": async_scheduling,
            "ingress_seconds": ingress_seconds,
            "client_seconds": client_seconds,
        }
        source = type_name(costs if calibration is None else calibration.model)
        ledger.begin(header_of(policy, "simulated", source, settings, config))
    costs = checked(costs)
    if not is_policy(policy):
        policy = make_preset(policy, costs)  # type: ignore[arg-type]
    observer = None if calibration is None else StepObserver(calibration, None)
    executor = SimulatedExecutor(
        costs,
        num_gpu_blocks=config.num_gpu_blocks,
        block_size=config.block_size,
        overlap_swaps=overlap_swaps,
        residuals=residuals,
        ledger=ledger,
        files=files,
    )
    drafting = None
    if drafts is not None:
        drafting = drafts.make(config, costs, draft_costs and checked(draft_costs), lambda: executor.now)
        executor.drafting = drafting
    if scheduler is None:
        speculation = None if drafting is None else drafting.speculation
        scheduler = Scheduler(config, policy, ledger=ledger, files=files, speculation=speculation)
    executor.now = began_at = float(trace.arrival_times[0])
    feed = Feed(trace, began_at, client_seconds=client_seconds, ingress_seconds=ingress_seconds)
    planned_at, ended_at = 0.0, -math.inf  # of the last step, if anything follows right after it
    count = len(trace)
    arrivals = np.zeros(count)
    first_scheduled, first_tokens, finished = np.zeros(count), np.zeros(count), np.zeros(count)
    scheduling = 0.0
    said: dict[int, Sequence[int]] = {}  # before a request that follows another, once that has its answer
    followers: dict[int, list[int]] = {}
    for index in range(count if config.enable_prefix_caching else 0):
        if trace.followed(index) >= 0:
            followers.setdefault(trace.followed(index), []).append(index)
    num_cached = num_host_cached = num_disk_cached = 0
    num_steps = num_prefill_steps = num_prefill_tokens = 0
    num_decode_steps = num_decoded = num_preemptions = num_swaps = 0
    while scheduler.has_unfinished or not feed.is_over:
        seen_until = planned_at if async_scheduling and ended_at == executor.now else executor.now
        while (sent := feed.send(seen_until)) is not None:
            index, arrivals[index] = sent
            if config.enable_prefix_caching:
                prompt: Sequence[int] = trace.token_ids(index, _VOCAB_SIZE, said.pop(index, ()))
            elif trace.prompt_token_ids is not None:
                prompt = trace.prompt_token_ids[index]
            else:
                prompt = range(int(trace.prompt_lens[index]))
            request = _request(trace, *sent, prompt, feed.num_sent - 1)
            request.priority = 0 if priorities is None else priorities[index]
            request.deadline = None if deadlines is None else sent[1] + deadlines[index]
            scheduler.add(request)
        copies = executor.copies()
        if observer is not None and copies.timed:
            observer.observe_copies(copies.timed)
        entered = time.perf_counter()
        scheduled = scheduler.schedule(executor.now, copies)
        scheduling += time.perf_counter() - entered
        if reads := scheduler.take_reads():
            executor.drop(scheduler.take_dropped())  # whose room they take
            executor.read(reads)
        if scheduled.is_empty:
            due, ended_at = feed.next_due, -math.inf
            if scheduler.is_reading:
                executor.wait_for_files(math.inf if due is None else max(0.0, due - executor.now))
                continue
            assert due is not None  # an idle scheduler has nothing left to run
            executor.wait_until(due)
            continue
        began = executor.now
        executor.execute(scheduled)
        planned_at, ended_at = began, executor.now
        if observer is not None:
            observer.observe(scheduled, executor.now - began)
        num_steps += 1
        num_preemptions += len(scheduled.preempted)
        num_swaps += scheduled.num_swapped
        num_verified = sum([bool(chunk.drafts) for chunk in scheduled.prefill])
        if len(scheduled.prefill) > num_verified:
            num_prefill_steps += 1
            num_prefill_tokens += scheduled.num_prefill_tokens - num_verified - scheduled.num_drafts
        if scheduled.prefill:
            for chunk in scheduled.prefill:
                if chunk.is_last and not chunk.drafts:
                    chunk.request.output_token_ids.append(0)
                    index = int(chunk.request.request_id)
                    first_tokens[index] = first_tokens[index] or executor.now
        if scheduled.decode or num_verified:
            num_decode_steps += 1
            num_decoded += len(scheduled.decode) + num_verified
            for request in scheduled.decode:
                request.output_token_ids.append(0)
        if scheduled.reads_host:
            scheduler.complete(scheduled.step_id)
        ending = list(scheduled.ending)
        if drafting is not None:
            ending += drafting.accept(scheduler, scheduled, executor.now)
        for request in ending:
            scheduler.finish(request, "length")
            first = request.metrics.first_scheduled_time
            assert first is not None  # it ran
            index = int(request.request_id)
            first_scheduled[index], finished[index] = first, executor.now
            num_cached += request.num_cached_tokens or 0
            num_host_cached += request.num_host_cached_tokens
            num_disk_cached += request.num_disk_cached_tokens
            for follower in followers.get(index, ()):
                said[follower] = request.token_ids(0, request.num_known_tokens)
            feed.answered(executor.now, index)
    counts, gains = SpeculationCounts(), Gains()
    if scheduler.speculation is not None:
        counts, gains = scheduler.speculation.counts, scheduler.speculation.gains
    return RunResult(
        seconds=executor.now - began_at,
        num_output_tokens=int(trace.output_lens.sum()),
        num_steps=num_steps,
        num_prefill_steps=num_prefill_steps,
        num_prefill_tokens=num_prefill_tokens,
        num_preemptions=num_preemptions,
        num_swaps=num_swaps,
        mean_decode_batch=num_decoded / max(1, num_decode_steps),
        spent=executor.spent,
        arrival_times=arrivals,
        first_scheduled_times=first_scheduled,
        first_token_times=first_tokens,
        finish_times=finished,
        scheduling_seconds=scheduling,
        num_cached_tokens=num_cached,
        num_host_cached_tokens=num_host_cached,
        num_disk_cached_tokens=num_disk_cached,
        num_draft_tokens=counts.num_drafted,
        num_kept_drafts=counts.num_kept,
        draft_gain=gains.measured_gain,
    )


def _check(trace: object, config: object, *are_boolean: object) -> None:
    if not isinstance(trace, Trace):
        raise ConfigError(
            f"trace must be a Trace (jaxllm.research.workloads: make_trace draws one, load_trace reads one), "
            f"got {shown(trace)}"
        )
    if not isinstance(config, SchedulerConfig):
        raise ConfigError(
            f"config must be a SchedulerConfig (jaxllm.sched.config), got {shown(config)}; "
            "jaxllm.research.simulate makes one for a model and a device"
        )
    for value in are_boolean:
        if not isinstance(value, bool):
            raise ConfigError(f"overlap_swaps and async_scheduling must be True or False, got {shown(value)}")


def _check_parts(given: Mapping[str, object]) -> None:
    """Verify what may be None, or is of one class each."""
    for name, value in given.items():
        kind = _PARTS[name]
        if value is not None and not isinstance(value, kind):
            raise ConfigError(
                f"{name}={shown(value)} must be None, or a value of {kind.__module__}.{kind.__name__}"
            )


def _check_of_requests(count: int, **given: object) -> None:
    """Verify what has a number for each request, or is None."""
    for name, values in given.items():
        if values is None:
            continue
        if not isinstance(values, Sequence | np.ndarray) or isinstance(values, str) or len(values) != count:
            raise ConfigError(f"{name}={shown(values)} must have a number for each of the {count} requests")
        for value in values:
            check_number(f"one of {name}", value, -math.inf, math.inf)


def _request(
    trace: Trace, index: int, arrival_time: float, prompt: Sequence[int], arrival_index: int
) -> Request:
    return Request(
        str(index),
        prompt,
        _SAMPLING_PARAMS,
        arrival_time=arrival_time,
        arrival_index=arrival_index,
        max_total_tokens=len(prompt) + int(trace.output_lens[index]),
    )
