"""Where the time of engine steps goes: the host's work, and the device programs it waits for.

A step with run-ahead schedules and dispatches iteration k, then reads back iteration k - 1:

    |- schedule -|- pack ----|- program -|- fetch ----------|- commit -------|
                 |<----- execute ------->| blocks until k-1 | stop conditions,
                                         | is finished      | text, outputs

`program` is the call of the compiled program. On a GPU that is the launch; the CPU backend may run the
program before the call returns, so that time is never counted as the host's. `fetch` waits for the device
(the conversion of the tokens to a list that comes with it takes microseconds). What is left is the host's:
schedule, pack and commit. With run-ahead it overlaps the device's work on iteration k - 1 as far as the
backend is asynchronous, so the host's share bounds what the engine costs from above.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from jaxllm.engine.engine import Engine
from jaxllm.engine.outputs import RequestOutput
from jaxllm.executor.model_executor import ModelExecutor
from jaxllm.executor.programs import ProgramKey
from jaxllm.types import SampledTokens, SchedulerOutput, StepResult

STEP_KINDS = ("prefill", "mixed", "decode", "drain")


@dataclasses.dataclass(slots=True)
class StepTimes:
    """Seconds of one engine step by part, and how much was scheduled in it.

    `num_rows` are those of its program, if that computes prompts: `fill` is how many of them are real.
    """

    total: float = 0.0
    schedule: float = 0.0
    execute: float = 0.0
    program: float = 0.0
    fetch: float = 0.0
    num_decode: int = 0
    num_prefill_tokens: int = 0
    num_rows: int = 0

    @property
    def fill(self) -> float:
        """Share of the rows of a program with prompts that compute something; 1 of others."""
        return (self.num_decode + self.num_prefill_tokens) / self.num_rows if self.num_rows else 1.0

    @property
    def pack(self) -> float:
        """Building the program's inputs and keeping its outputs."""
        return self.execute - self.program

    @property
    def commit(self) -> float:
        """Everything after the tokens are known."""
        return self.total - self.schedule - self.execute - self.fetch

    @property
    def host(self) -> float:
        """Time outside programs and waiting."""
        return self.schedule + self.pack + self.commit

    @property
    def kind(self) -> str:
        """What the step scheduled."""
        if self.num_prefill_tokens:
            return "mixed" if self.num_decode else "prefill"
        return "decode" if self.num_decode else "drain"


class StepTimer:
    """Times every step of an engine while its context is open; costs about a microsecond a step.

    Args:
        engine: whose `step` is called through this object's `step`.
        executor: the engine's.
    """

    def __init__(self, engine: Engine, executor: ModelExecutor) -> None:
        self.steps: list[StepTimes] = []
        self._engine, self._executor = engine, executor
        self._current = StepTimes()

    def step(self) -> list[RequestOutput]:
        """One step of the engine, timed."""
        self._current = times = StepTimes()
        started = time.perf_counter()
        outputs = self._engine.step()
        times.total = time.perf_counter() - started
        self.steps.append(times)
        return outputs

    def __enter__(self) -> StepTimer:
        scheduler, executor = self._engine.scheduler, self._executor
        # Attributes of the instances hide the methods of their classes.
        vars(scheduler)["schedule"] = self._timed("schedule", scheduler.schedule, self._note_scheduled)
        vars(executor)["execute"] = self._timed("execute", executor.execute, self._wrap_result)
        vars(executor)["program"] = self._timed_program(executor.program)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del vars(self._engine.scheduler)["schedule"]
        del vars(self._executor)["execute"], vars(self._executor)["program"]

    def _timed(
        self, part: str, call: Callable[..., Any], then: Callable[[Any], Any] = lambda result: result
    ) -> Callable[..., Any]:
        clock = time.perf_counter

        def timed(*args: Any) -> Any:
            started = clock()
            result = call(*args)
            ended = clock()
            setattr(self._current, part, getattr(self._current, part) + ended - started)
            return then(result)

        return timed

    def _note_scheduled(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        self._current.num_decode = len(scheduled.decode)
        self._current.num_prefill_tokens = scheduled.num_prefill_tokens
        return scheduled

    def _timed_program(self, find: Callable[..., Any]) -> Callable[..., Any]:
        def found(key: ProgramKey, *then: Any) -> Any:
            self._current.num_rows = key.rows if key.max_chunks else 0
            return self._timed("program", find(key, *then))

        return found

    def _wrap_result(self, result: StepResult) -> StepResult:
        return _TimedResult(result.is_ready, self._timed("fetch", result.fetch))


@dataclasses.dataclass(frozen=True, slots=True)
class _TimedResult:
    is_ready: Callable[[], bool]
    fetch: Callable[[], SampledTokens]
