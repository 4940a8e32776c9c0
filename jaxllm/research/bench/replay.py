"""Plays a trace through the real engine, to be set beside a simulation of the same trace."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxllm.engine.engine import Engine
from jaxllm.engine.ledgers import header_of
from jaxllm.engine.observer import StepObserver, predicted_seconds
from jaxllm.errors import ConfigError, shown
from jaxllm.executor import compile_stats
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.predictors.own import type_name
from jaxllm.research.workloads import Feed, Trace, fit_trace
from jaxllm.research.workloads.result import RunResult, TimeSpent
from jaxllm.sampling.params import SamplingParams
from jaxllm.sched.baselines import VLLM025
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.ledger import Ledger
from jaxllm.sched.policies import ActionPolicy, ResumePolicy, SchedulerPolicy, SchedulingPolicy
from jaxllm.sched.scheduler import Scheduler
from jaxllm.types import NO_COPIES, CopyProgress, CopyTime, SchedulerOutput

if TYPE_CHECKING:
    from jaxllm.engine.outputs import RequestOutput
    from jaxllm.llm import LLM


_logger = logging.getLogger(__name__)


class Replay:
    """A run of every request of `trace` to its full output length, each sent when it is due (`Feed`).

    Args:
        llm: whose executor computes; it must have nothing to do.
        trace: arrivals or clients, prompts and output lengths.
        config: limits of the scheduler, within those of `llm`: fewer blocks make preemptions.
        policy: the scheduler's decisions; prefixes are not shared if it does not.
        costs: predictions to compare with what happens; None compares nothing.
        ledger: collects the decisions.
        async_scheduling: whether a step is dispatched before the one before it is read; None as `llm` does.
        clock: time in seconds, which must go during `advance`.

    Attributes:
        clock: as given.
        executor: that of `llm`.
        runs_ahead: whether steps are dispatched ahead.

    Raises:
        ConfigError: `llm` is busy, asleep or closed, or `config` exceeds what it was built for.
        RequestTooLargeError: a request of the trace has more tokens than `config` allows.
    """

    def __init__(
        self,
        llm: LLM,
        trace: Trace,
        config: SchedulerConfig,
        policy: SchedulingPolicy,
        *,
        costs: OnlineCalibration | None = None,
        ledger: Ledger | None = None,
        async_scheduling: bool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        _check(llm, trace, config)
        if not policy.shares_prefixes:
            config = dataclasses.replace(config, enable_prefix_caching=False)
        llm.reset_prefix_cache()  # the pool will hold something else
        self.clock, self.executor = clock, llm.executor
        self.runs_ahead = llm.config.async_scheduling if async_scheduling is None else async_scheduling
        if ledger is not None and ledger.header is None:
            source, settings = (
                None if costs is None else type_name(costs),
                {"async_scheduling": self.runs_ahead},
            )
            version, device = jax.__version__, llm.executor.device_kind
            ledger.begin(header_of(policy, device, source, settings, config, jax=version))
        self._keeper = _TimeKeeper(costs, ledger)
        timed: dict[str, Any] = {name: _Timed(one) for name, one in deciding(policy).items()}
        self._timed: list[_Timed] = list(timed.values())
        if timed:
            policy = dataclasses.replace(policy, **timed)  # type: ignore[type-var]
        self._scheduler = _TimedScheduler(config, policy, ledger=ledger)
        self._seconds = 0.0  # of this thread's processor, without waiting for arrivals
        self._engine = Engine(
            llm.executor,
            self._scheduler,
            vocab_size=llm.model_config.vocab_size,
            async_scheduling=self.runs_ahead,
            num_scheduler_steps=1,  # every iteration is counted and timed
            clock=clock,
            observer=self._keeper,
        )
        self._trace = trace
        self._vocab_size = llm.model_config.vocab_size
        self._prompts = {
            index: trace.token_ids(index, self._vocab_size)
            for index in range(len(trace))
            if trace.followed(index) < 0
        }
        self._feed: Feed | None = None
        self._arrivals: dict[int, float] = {}
        self._outputs: dict[str, RequestOutput] = {}

    @property
    def is_over(self) -> bool:
        """Whether every request has finished."""
        return len(self._outputs) == len(self._trace)

    def advance(self) -> None:
        """One step, or the wait for the next arrival. The first call is the trace's beginning.

        Raises:
            RequestTooLargeError: a request of the trace can never fit.
        """
        trace, engine = self._trace, self._engine
        if self._feed is None:
            self._feed = Feed(trace, self.clock())
        feed = self._feed
        started = time.thread_time()
        while (sent := feed.send(self.clock())) is not None:
            index, arrival = sent
            params = SamplingParams(temperature=0, max_tokens=int(trace.output_lens[index]), ignore_eos=True)
            prompt = self._prompts.get(index)
            if prompt is None:
                before = self._outputs[str(trace.followed(index))]
                said = [*before.prompt_token_ids, *before.token_ids]
                prompt = trace.token_ids(index, self._vocab_size, said)
            engine.add_request(str(index), prompt, params, arrival_time=arrival)
            self._arrivals[index] = arrival
        if engine.has_unfinished_requests:
            for output in engine.step():
                if output.finished:
                    self._outputs[output.request_id] = output
                    feed.answered(self.clock(), int(output.request_id))
            self._seconds += time.thread_time() - started
        elif feed.next_due is not None:
            time.sleep(max(0.0, feed.next_due - self.clock()))

    def result(self) -> RunResult:
        """Figures of the whole run, which must be over."""
        assert self.is_over
        self._engine.reset_prefix_cache()  # nobody will find what it leaves
        trace, keeper = self._trace, self._keeper
        arrivals = [self._arrivals[index] for index in range(len(trace))]
        metrics = [self._outputs[str(index)].metrics for index in range(len(trace))]
        first = np.array([one.first_scheduled_time for one in metrics])  # type: ignore[union-attr]
        tokens = np.array([one.first_token_time for one in metrics])  # type: ignore[union-attr]
        finished = np.array([one.finished_time for one in metrics])  # type: ignore[union-attr]
        seconds = float(finished.max()) - min(arrivals)
        spent = keeper.spent
        spent.idle = max(0.0, seconds - spent.prefill - spent.recompute - spent.decode - spent.swap_stall)
        return RunResult(
            seconds=seconds,
            num_output_tokens=int(trace.output_lens.sum()),
            num_steps=keeper.num_steps,
            num_prefill_steps=keeper.num_prefill_steps,
            num_prefill_tokens=keeper.num_prefill_tokens,
            num_preemptions=keeper.num_preemptions,
            num_swaps=keeper.num_swaps,
            mean_decode_batch=keeper.num_decoded / max(1, keeper.num_decode_steps),
            spent=spent,
            arrival_times=np.asarray(arrivals),
            first_scheduled_times=first,
            first_token_times=tokens,
            finish_times=finished,
            scheduling_seconds=self._scheduler.seconds,
            prediction_seconds=sum([timed.seconds for timed in self._timed]) + keeper.seconds,
            host_seconds=self._seconds,
            num_cached_tokens=sum([output.num_cached_tokens for output in self._outputs.values()]),
            num_host_cached_tokens=sum([output.num_host_cached_tokens for output in self._outputs.values()]),
        )


def replay(
    llm: LLM,
    trace: Trace,
    config: SchedulerConfig,
    policy: SchedulingPolicy,
    *,
    costs: OnlineCalibration | None = None,
    ledger: Ledger | None = None,
    warns: bool = True,
) -> RunResult:
    """A `Replay` from beginning to end. It warms nothing up: `compare_replays` does.

    A run in which programs were compiled says so in the log, with the seconds that compiling took: its
    figures are not those of a second run. `warns=False` leaves that out.

    Raises:
        ConfigError: `llm` is busy, or `config` exceeds what it was built for.
        RequestTooLargeError: a request of the trace can never fit.
    """
    compile_stats.start()
    num_before, seconds_before = compile_stats.total()
    run = Replay(llm, trace, config, policy, costs=costs, ledger=ledger)
    while not run.is_over:
        run.advance()
    result, (num_compiled, seconds) = run.result(), compile_stats.total()
    if warns and num_compiled > num_before:
        _logger.warning(
            "%d programs were compiled during this replay of %.2f s, which took %.2f s: its figures are not "
            "those of the policy; replay again, or use jaxllm.research.bench.compare.compare_replays",
            num_compiled - num_before,
            result.seconds,
            seconds - seconds_before,
        )
    return result


class Stopwatch:
    """A clock that goes only while it is entered."""

    def __init__(self) -> None:
        self._before = 0.0
        self._started: float | None = None

    def __call__(self) -> float:
        """Seconds it has gone."""
        return self._before + (0.0 if self._started is None else time.perf_counter() - self._started)

    def __enter__(self) -> None:
        assert self._started is None
        self._started = time.perf_counter()

    def __exit__(self, *exc_info: object) -> None:
        self._before, self._started = self(), None


def replay_side_by_side(runs: Sequence[Replay], slice_seconds: float = 0.05) -> list[RunResult]:
    """Runs on engines of their own that take turns, so that a change of the machine's speed meets them all.

    The one whose stopwatch shows least goes on, for about `slice_seconds`, and until its copies between
    device and host have ended: the next one's turn would pay for them. Who takes longest is alone at the end.

    Args:
        runs: each with an executor of its own, and a `Stopwatch` of its own as its clock, and as that of its
            throttled link if it has one.
        slice_seconds: length of a turn.

    Raises:
        ConfigError: two runs share an executor or a clock, a clock is no `Stopwatch`, or steps are dispatched
            ahead.
    """
    for name in ("executor", "clock"):
        if len({id(getattr(run, name)) for run in runs}) < len(runs):
            raise ConfigError(f"runs side by side need an LLM and a Stopwatch each; two share their {name}")
    unfinished: list[tuple[Replay, Stopwatch]] = []
    for run in runs:
        if not isinstance(run.clock, Stopwatch) or run.runs_ahead:
            raise ConfigError("runs side by side need clock=Stopwatch() and async_scheduling=False")
        unfinished.append((run, run.clock))
    while unfinished:
        run, watch = min(unfinished, key=lambda one: one[1]())
        with watch:
            until = watch() + slice_seconds
            while not run.is_over and watch() < until:
                run.advance()
            run.executor.settle_copies()
        unfinished = [one for one in unfinished if not one[0].is_over]
    return [run.result() for run in runs]


def _check(llm: LLM, trace: Trace, config: SchedulerConfig) -> None:
    if not isinstance(trace, Trace):
        raise ConfigError(
            f"trace={shown(trace)} must be a Trace: load_trace(path) and make_trace(...) make one"
        )
    if not isinstance(config, SchedulerConfig):
        raise ConfigError(
            f"config={shown(config)} must be a SchedulerConfig, such as llm.engine.scheduler.config"
        )
    if llm.engine.is_closed or llm.engine.is_asleep:
        state = (
            "was closed, or has failed: make" if llm.engine.is_closed else "sleeps: call wake_up(), or make"
        )
        raise ConfigError(f"cannot replay a trace on an engine that {state} a new LLM")
    fit_trace(trace, config.max_model_len, limit_name="max_model_len")
    if llm.engine.has_unfinished_requests:
        raise ConfigError("cannot replay a trace while requests are running; finish or abort them first")
    built = llm.engine.scheduler.config
    if config.block_size != built.block_size:
        raise ConfigError(f"block_size={config.block_size} must be the executor's, {built.block_size}")
    config = dataclasses.replace(config, max_prefill_seqs=config.max_prefill_seqs or config.max_num_seqs)
    built = dataclasses.replace(built, max_prefill_seqs=built.max_prefill_seqs or built.max_num_seqs)
    for name in (
        "max_prefill_seqs",
        "num_gpu_blocks",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "num_host_blocks",
    ):
        if getattr(config, name) > getattr(built, name):
            raise ConfigError(
                f"{name}={getattr(config, name)} exceeds the {getattr(built, name)} the LLM was built for"
            )


class _TimedScheduler(Scheduler):
    """Adds up its own time."""

    seconds = 0.0

    def schedule(
        self, now: float, copies: CopyProgress = NO_COPIES, max_decode_steps: int = 1
    ) -> SchedulerOutput:
        """As its base class."""
        started = time.perf_counter()
        scheduled = super().schedule(now, copies, max_decode_steps)
        self.seconds += time.perf_counter() - started
        return scheduled


def deciding(policy: SchedulingPolicy) -> dict[str, ActionPolicy | ResumePolicy]:
    """The parts of a policy that weigh costs, by the names of their fields; none where nothing is weighed."""
    if isinstance(policy, SchedulerPolicy):
        return {"action": policy.action, "resume": policy.resume}
    if isinstance(policy, VLLM025) and policy.action is not None:
        return {"action": policy.action}
    return {}


class _Timed:
    """A policy that counts its decisions, and adds up their time."""

    def __init__(self, policy: ActionPolicy | ResumePolicy) -> None:
        self._choose: Callable[..., Any] = policy.choose
        self.num_decisions, self.seconds = 0, 0.0

    def choose(self, *args: Any) -> Any:
        """The decision of the policy."""
        started = time.perf_counter()
        decision = self._choose(*args)
        self.seconds += time.perf_counter() - started
        self.num_decisions += 1
        return decision


class _TimeKeeper(StepObserver):
    """Adds up steps by kind, and its own time."""

    def __init__(self, costs: OnlineCalibration | None, ledger: Ledger | None) -> None:
        super().__init__(costs, ledger)
        self.spent = TimeSpent()
        self.num_steps = self.num_prefill_steps = self.num_decode_steps = 0
        self.num_decoded = self.num_prefill_tokens = self.num_preemptions = self.num_swaps = 0
        self.seconds = 0.0

    def observe(self, scheduled: SchedulerOutput, seconds: float, *, is_timed: bool = True) -> None:
        """Take a step."""
        spent, costs, prefill = self.spent, self.costs, scheduled.prefill
        self.num_steps += 1
        self.num_preemptions += len(scheduled.preempted)
        self.num_swaps += scheduled.num_swapped
        left = seconds
        if costs is not None and scheduled.has_copies:
            left = min(left, predicted_seconds(costs, scheduled))
            spent.swap_stall += seconds - left
        if scheduled.decode:
            self.num_decode_steps += 1
            self.num_decoded += len(scheduled.decode)
            decode = left
            if prefill:  # without predictions what the two take together is the prefill's
                decode = 0.0
                if costs is not None:
                    decode = costs.step_seconds(len(scheduled.decode), scheduled.num_context_tokens)
            decode = min(decode, left)
            spent.decode += decode
            left -= decode
        if prefill:
            self.num_prefill_steps += 1
            num_tokens = scheduled.num_prefill_tokens
            self.num_prefill_tokens += num_tokens
            recompute = left * sum([chunk.num_recomputed for chunk in prefill]) / num_tokens
            spent.recompute += recompute
            spent.prefill += left - recompute
        started = time.perf_counter()
        super().observe(scheduled, seconds, is_timed=is_timed)
        self.seconds += time.perf_counter() - started

    def observe_copies(self, timed: Iterable[CopyTime]) -> None:
        """Take durations of copies."""
        started = time.perf_counter()
        super().observe_copies(timed)
        self.seconds += time.perf_counter() - started
