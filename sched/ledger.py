"""The decision ledger: what was known at each preemption, what was chosen, and what it cost."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import COST_KINDS, CostModel
from jaxllm.predictors.online import KindReport, OnlineCalibration
from jaxllm.sched.actions import serial_costs
from jaxllm.sched.policies import Decision, PreemptionAction, ResumeAction, ResumeDecision
from jaxllm.types import Request


@dataclasses.dataclass(slots=True)
class PreemptionRecord:
    """One preemption and, once the request is back, its restore.

    Times are seconds of the engine's clock, costs seconds. `scores` holds `[request id, urgency]` of the
    running requests. `swap_seconds`, `recompute_seconds` and `mixed_seconds` are what the action policy
    predicted, or the ledger (`Ledger`) where that predicted nothing, or None;
    `resume_action` is how a swapped request came back, and the two after it what was predicted then; it is
    "recompute" also if the head of a mixed restore was given up.
    `measured_seconds` is what the chosen action took: the copies out and back, or the request's share of
    the prefill that brought it back; None if the run ended before, or nobody measured.
    """

    step_id: int
    time: float
    request_id: str
    num_tokens: int
    num_blocks: int
    scores: list[tuple[str, float]]
    action: str
    swap_seconds: float | None
    recompute_seconds: float | None
    resumed_step_id: int | None = None
    resumed_time: float | None = None
    measured_seconds: float | None = None
    resume_action: str | None = None
    resume_swap_seconds: float | None = None
    resume_recompute_seconds: float | None = None
    mixed_seconds: float | None = None

    @property
    def is_copied_back(self) -> bool:
        """Whether its KV was copied to the host and, as far as is known, back."""
        return self.action == "swap" and self.resume_action != "recompute"

    @property
    def predicted_seconds(self) -> float | None:
        """What the chosen action was predicted to take; of a copy given up, what its prefill was."""
        if self.action == "swap" and not self.is_copied_back:
            return self.resume_recompute_seconds
        if self.action == "mixed":
            return self.recompute_seconds if self.resume_action == "recompute" else self.mixed_seconds
        return self.swap_seconds if self.action == "swap" else self.recompute_seconds

    @property
    def regret_seconds(self) -> float | None:
        """What was lost against the estimate of the action not taken; None where either is unknown.

        Of a mixed restore that is to recompute everything; if it came to that, to mix.
        """
        if self.action == "swap" and not self.is_copied_back:
            other = self.resume_swap_seconds
        elif self.action == "mixed" and self.resume_action == "recompute":
            other = self.mixed_seconds
        else:
            other = self.swap_seconds if self.action == "recompute" else self.recompute_seconds
        if self.measured_seconds is None or other is None:
            return None
        return max(0.0, self.measured_seconds - other)


@dataclasses.dataclass(frozen=True, slots=True)
class StepRecord:
    """The state in which one iteration starts to run, and what it is to do.

    Whose head alone is copied counts as swapped out, and as swapped in when it comes back. `num_decoded` are
    the tokens scheduled: of several decode steps in one program fewer are computed if a request ends.
    """

    step_id: int
    time: float
    num_waiting: int
    num_running: int
    num_swapped: int
    num_used_blocks: int
    num_used_host_blocks: int
    num_prefill_tokens: int
    num_decoded: int
    num_dropped: int
    num_swapped_out: int
    num_swapped_in: int


_Record = PreemptionRecord | StepRecord | KindReport


class Ledger:
    """Collects records in memory, or writes them to a file as lines of JSON.

    A preemption is written when its request is back and preempted again, ends, or the ledger is closed; a
    step at once; how well costs were predicted when it is closed. Each line has a `record` field,
    "preemption", "step" or "predictions".

    Args:
        file: where to write; None keeps `preemptions` and `steps` in memory.
        costs: predicts what swapping and recomputing cost one after the other (`AdaptiveAction`) where the
            policy predicts nothing, and knows how well if it is an `OnlineCalibration`; None leaves that
            unknown.
    """

    def __init__(self, file: IO[str] | None = None, costs: CostModel | None = None) -> None:
        self.preemptions: list[PreemptionRecord] = []
        self.steps: list[StepRecord] = []
        self.predictions: dict[str, KindReport] = {}
        self._file = file
        self._costs = costs
        self._open: dict[str, PreemptionRecord] = {}

    def preempted(
        self,
        victim: Request,
        step_id: int,
        now: float,
        scores: Sequence[tuple[str, float]],
        decision: Decision,
    ) -> None:
        """Open a record; `victim` still holds its blocks."""
        self.finished(victim.request_id)
        swap, recompute = decision.swap_seconds, decision.recompute_seconds
        if self._costs is not None and swap is None and recompute is None:
            _, swap, recompute = serial_costs(self._costs, victim)
        self._open[victim.request_id] = PreemptionRecord(
            step_id,
            now,
            victim.request_id,
            victim.num_tokens,
            len(victim.block_ids),
            list(scores),
            decision.action.value,
            swap,
            recompute,
            mixed_seconds=decision.mixed_seconds,
        )

    def returns(self, request_id: str, decision: ResumeDecision) -> None:
        """Note how a swapped request comes back."""
        record = self._open.get(request_id)
        if record is not None:
            record.resume_action = decision.action.value
            record.resume_swap_seconds = decision.swap_seconds
            record.resume_recompute_seconds = decision.recompute_seconds

    def head_given_up(self, request_id: str) -> None:
        """Note that the copy of a request's head was given up: everything will be recomputed."""
        record = self._open.get(request_id)
        if record is not None:
            record.resume_action = "recompute"

    def resumed(self, request: Request, step_id: int, now: float) -> None:
        """Note that the request's KV is being restored in step `step_id`."""
        record = self._open.get(request.request_id)
        if record is not None and record.resumed_step_id is None:
            record.resumed_step_id, record.resumed_time = step_id, now

    def measured(self, request_id: str, seconds: float, step_id: int) -> None:
        """Add what step `step_id` spent on the open preemption of a request.

        With run-ahead the request may have been preempted anew since then; the new record is not charged.
        """
        record = self._open.get(request_id)
        if record is not None and record.step_id <= step_id:
            record.measured_seconds = (record.measured_seconds or 0.0) + seconds

    def finished(self, request_id: str) -> None:
        """Write the record of a request that ended, or was preempted again."""
        record = self._open.pop(request_id, None)
        if record is not None and self._file is None:
            self.preemptions.append(record)
        elif record is not None:
            self._write("preemption", record, regret_seconds=record.regret_seconds)

    def step(self, record: StepRecord) -> None:
        """Take the record of an iteration."""
        if self._file is None:
            self.steps.append(record)
        else:
            self._write("step", record)

    def close(self) -> None:
        """Write what is still open, and how well costs were predicted; the file stays the caller's."""
        for request_id in list(self._open):
            self.finished(request_id)
        if isinstance(self._costs, OnlineCalibration):
            for kind, report in self._costs.report().items():
                self.predictions[kind] = report
                if self._file is not None:
                    self._write("predictions", report, kind=kind)

    def _write(self, name: str, record: _Record, **more: Any) -> None:
        assert self._file is not None
        self._file.write(json.dumps({"record": name, **more, **dataclasses.asdict(record)}) + "\n")


def open_ledger(path: str | Path, costs: CostModel | None = None) -> tuple[Ledger, Callable[[], None]]:
    """A ledger written to a new file, and what ends both; `costs` as for `Ledger`.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        file = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115, open as long as the ledger
    except OSError as error:
        raise ConfigError(f"cannot write the ledger {str(path)!r}: {error.strerror}") from error
    ledger = Ledger(file, costs)

    def close() -> None:
        ledger.close()
        file.close()

    return ledger, close


def read_ledger(path: str | Path) -> Ledger:
    """The ledger that a run wrote to `path`.

    Raises:
        ConfigError: a line is not one of a ledger's, or time goes back from one step to the next; the last
            line may be cut off, as a killed run leaves it.
    """
    ledger = Ledger()
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a ledger's, which are text in UTF-8: {error}") from None
    last_time = -math.inf
    for number, values in _objects(lines, str(path)):
        kind = values.pop("record", None)
        values.pop("regret_seconds", None)
        try:
            if kind == "preemption":
                preemption = PreemptionRecord(**values)
                _check_types(preemption)
                ledger.preemptions.append(preemption)
            elif kind == "step":
                step = StepRecord(**values)
                _check_types(step)
                if step.time < last_time:
                    raise TypeError(f"time={step.time} is before {last_time}, of the step before: two runs?")
                last_time = step.time
                ledger.steps.append(step)
            elif kind == "predictions":
                of_kind = values.pop("kind", None)
                if of_kind not in COST_KINDS:
                    raise TypeError(f"kind={of_kind!r} is none of {', '.join(COST_KINDS)}")
                report = KindReport(**values)
                _check_types(report)
                ledger.predictions[of_kind] = report
            else:
                raise TypeError(f"record={kind!r} is neither 'preemption' nor 'step' nor 'predictions'")
        except TypeError as error:
            raise ConfigError(f"{path}, line {number} is not a ledger's: {error}") from None
    return ledger


def _objects(lines: Sequence[str], path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines) > 1:
                return
            raise ConfigError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path}, line {number} must be a JSON object")
        yield number, values


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(cast(float, value))


def _is_scores(value: object) -> bool:
    pairs = value if isinstance(value, list) else [None]
    return all(
        isinstance(pair, list)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and type(pair[1]) in (int, float)
        for pair in pairs
    )


_ACTIONS = [action.value for action in PreemptionAction]
_RESUME_ACTIONS = [None, *(action.value for action in ResumeAction)]
_IS_OF_TYPE: dict[str, Callable[[object], bool]] = {
    "int": lambda value: type(value) is int,
    "float": _is_number,
    "str": lambda value: isinstance(value, str),
    "list[tuple[str, float]]": _is_scores,
}


def _check_types(record: _Record) -> None:
    """Refuse fields that a run would not have written.

    Raises:
        TypeError: one is of another type, not finite, or no action.
    """
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        kind, _, none = str(field.type).partition(" | ")
        if not ((none and value is None) or _IS_OF_TYPE[kind](value)):
            raise TypeError(f"{field.name}={value!r} is not {field.type}")
    if isinstance(record, PreemptionRecord):
        if record.action not in _ACTIONS:
            raise TypeError(f"action={record.action!r} is none of {', '.join(_ACTIONS)}")
        if record.resume_action not in _RESUME_ACTIONS:
            raise TypeError(f"resume_action={record.resume_action!r} is none of {_RESUME_ACTIONS}")
