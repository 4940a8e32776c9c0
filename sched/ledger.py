"""The decision ledger: what was known at each preemption, what was chosen, and what it cost."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Sequence
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from jaxllm.errors import ConfigError, Faults
from jaxllm.predictors.base import CostModel
from jaxllm.predictors.online import CheckedCalibration, KindReport, OnlineCalibration
from jaxllm.sched.policies import Decision, ResumeDecision
from jaxllm.sched.policies.actions import serial_costs
from jaxllm.types import Request

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class HeaderRecord:
    """What wrote a ledger: its file's first line.

    `jaxllm` and `jax` are versions, the latter None of a simulation; `device` is what JAX calls it, or
    "simulated". `policy`
    is what was asked for, by name or import path or class, and `costs_source` where predicted costs come
    from, None if nothing is known. `settings` are those of the engine (`EngineConfig`), as they were given,
    or the arguments of `simulate`. `limits` are those of the scheduler (`SchedulerConfig`), as they were
    settled.
    """

    jaxllm: str
    jax: str | None
    device: str
    policy: str
    costs_source: str | None
    settings: dict[str, Any]
    limits: dict[str, Any]


@dataclasses.dataclass(slots=True)
class PreemptionRecord:
    """One preemption and, once the request is back, its restore.

    Times are seconds of the engine's clock, costs seconds. `scores` holds `[request id, score]` of the
    iteration's victims, the first to go first, and of the holder that would have been next.
    `swap_seconds` and `recompute_seconds` are what the action policy predicted, or the ledger (`Ledger`)
    where that predicted nothing, or None; `resume_action` is how a swapped request came back, and
    `resume_swap_seconds` what was predicted then.
    `measured_seconds` is what the chosen action took: what its copies, or its tokens, added to the iterations
    they rode in; None if the run ended before, or nobody measured, or it is not known how long one of the
    iterations ran. `bound_seconds` is then what it took at most; where all is known the two are the same.
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
    bound_seconds: float | None = None

    @property
    def is_swap(self) -> bool:
        """Whether its KV was copied to the host."""
        return self.action == "swap"

    @property
    def predicted_seconds(self) -> float | None:
        """What the chosen action was predicted to add."""
        return self.swap_seconds if self.is_swap else self.recompute_seconds

    @property
    def regret_seconds(self) -> float | None:
        """What was lost against the estimate of the action not taken; None where either is unknown."""
        return self._over_other(self.measured_seconds)

    @property
    def regret_bound_seconds(self) -> float | None:
        """The most that was lost, where it is not known how much."""
        return self._over_other(self.bound_seconds)

    def _over_other(self, seconds: float | None) -> float | None:
        other = self.recompute_seconds if self.is_swap else self.swap_seconds
        return None if seconds is None or other is None else max(0.0, seconds - other)


@dataclasses.dataclass(frozen=True, slots=True)
class StepRecord:
    """The state in which one iteration starts to run, and what it is to do.

    Of its `num_prefill_tokens`, `num_recomputed_tokens` repeat what preemptions threw away. `num_blocks_out`
    and `num_blocks_in` are copied to the host and back, those of the prefix cache included.
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
    num_recomputed_tokens: int = 0
    num_blocks_out: int = 0
    num_blocks_in: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class VerificationRecord:
    """What one iteration with drafts was expected to yield, and did.

    Of its `num_decodes` requests `num_verified` verified `num_drafted` drafts, of which `num_kept` were
    right; by what became of earlier ones `expected_kept` were to be. `predicted_seconds` is what the policy
    predicted for the iteration, and `plain_seconds` for one without drafts; None if it predicts nothing.
    `measured_seconds` is the time from the end of the iteration before it to its own; None if it did not
    follow that at once, or prompts or copies rode in it. Where the device drafts by itself in several
    iterations all of them count together, and a request counts in each that it got a token in.
    """

    step_id: int
    time: float
    num_decodes: int
    num_verified: int
    num_drafted: int
    num_kept: int
    expected_kept: float
    predicted_seconds: float | None
    plain_seconds: float | None
    measured_seconds: float | None

    @property
    def predicted_gain(self) -> float | None:
        """Expected tokens a second, over those without drafts."""
        return self._gain(self.expected_kept, self.predicted_seconds)

    @property
    def measured_gain(self) -> float | None:
        """Tokens a second as measured, over what was predicted without drafts."""
        return self._gain(self.num_kept, self.measured_seconds)

    def _gain(self, num_kept: float, seconds: float | None) -> float | None:
        if not (seconds and self.plain_seconds):
            return None
        return (self.num_decodes + num_kept) / self.num_decodes * self.plain_seconds / seconds


Record = HeaderRecord | PreemptionRecord | StepRecord | VerificationRecord | KindReport
TABLES = ("preemptions", "steps", "verifications", "predictions")
"""What `Ledger.columns` makes arrays of."""


_DERIVED = ("predicted_seconds", "regret_seconds", "regret_bound_seconds")
_GAINS = ("predicted_gain", "measured_gain")


class Ledger:
    """Collects records in memory, or writes them to a file as lines of JSON.

    A preemption is written when its request ends, or an iteration after it was preempted again, or when the
    ledger is closed; a step at once; a verification when the step has been read; how well costs were
    predicted when it is closed. Each line has a `record` field, "header", "preemption", "step",
    "verification" or "predictions". docs/ledger.md has all fields and units.

    `faults` keeps what the predictor raised, and the record lacks what it was asked for.
    `cut_line` is the number of a last line that was cut off, of a ledger that was read from a file.

    Args:
        file: where to write; None keeps `preemptions`, `steps` and `verifications` in memory.
        costs: predicts what swapping and recomputing cost one after the other (`AdaptiveAction`) where the
            policy predicts nothing, and knows how well if it is an `OnlineCalibration`; None leaves that
            unknown.
        on_record: told of each step, and of each preemption as soon as its record is opened; what is known
            later is filled in there. Then nothing is kept in memory.
    """

    def __init__(
        self,
        file: IO[str] | None = None,
        costs: CostModel | None = None,
        on_record: Callable[[PreemptionRecord | StepRecord], None] | None = None,
    ) -> None:
        self.preemptions: list[PreemptionRecord] = []
        self.steps: list[StepRecord] = []
        self.verifications: list[VerificationRecord] = []
        self.predictions: dict[str, KindReport] = {}
        self.header: HeaderRecord | None = None
        self.cut_line: int | None = None
        self._file, self._on_record = file, on_record
        self._is_broken = False
        self.costs, self.faults = costs, Faults()
        self._open: dict[str, PreemptionRecord] = {}
        self._replaced: dict[str, tuple[int, PreemptionRecord]] = {}  # and in which step

    def begin(self, header: HeaderRecord) -> None:
        """Say what writes it, before anything else."""
        self.header = header
        if self._file is not None:
            self._write("header", header)

    def columns(self, table: str = "preemptions") -> dict[str, NDArray[Any]]:
        """A table as arrays of equal length: `pandas.DataFrame` and `polars.DataFrame` take them as they are.

        Args:
            table: "preemptions" (with `predicted_seconds`, `regret_seconds` and `regret_bound_seconds`),
                "steps", "verifications" (with `predicted_gain` and `measured_gain`), or "predictions" (with
                the `kind` of each).

        Returns:
            By name integers, floats and texts. What is not known is nan or "", and integers of which some are
            not known are floats. Scores are JSON.

        Raises:
            ConfigError: there is no such table.
        """
        rows: list[dict[str, Any]]
        if table == "preemptions":
            kind: type = PreemptionRecord
            rows = [
                {**dataclasses.asdict(one), **{name: getattr(one, name) for name in _DERIVED}}
                for one in self.preemptions
            ]
        elif table == "steps":
            kind, rows = StepRecord, [dataclasses.asdict(one) for one in self.steps]
        elif table == "verifications":
            kind = VerificationRecord
            rows = [
                {**dataclasses.asdict(one), **{name: getattr(one, name) for name in _GAINS}}
                for one in self.verifications
            ]
        elif table == "predictions":
            kind = KindReport
            rows = [{"kind": name, **dataclasses.asdict(one)} for name, one in self.predictions.items()]
        else:
            raise ConfigError(f"a ledger has no table {table!r}: use one of {', '.join(TABLES)}")
        types = {field.name: str(field.type) for field in dataclasses.fields(kind)}
        if kind is PreemptionRecord:
            types |= dict.fromkeys(_DERIVED, "float | None")
        elif kind is VerificationRecord:
            types |= dict.fromkeys(_GAINS, "float | None")
        elif kind is KindReport:
            types = {"kind": "str", **types}
        return {name: _column([row[name] for row in rows], of) for name, of in types.items()}

    def preempted(
        self,
        victim: Request,
        step_id: int,
        now: float,
        scores: Sequence[tuple[str, float]],
        decision: Decision,
    ) -> None:
        """Open a record; `victim` still holds its blocks."""
        earlier = self._open.pop(victim.request_id, None)
        if earlier is not None:
            self._settle(victim.request_id)
            self._replaced[victim.request_id] = step_id, earlier
            self._keep(earlier)
        swap, recompute = decision.swap_seconds, decision.recompute_seconds
        if self.costs is not None and swap is None and recompute is None:
            num_blocks = len(victim.block_ids)
            with self.faults:
                _, swap, recompute = serial_costs(
                    self.costs, victim.num_computed_tokens + 1, num_blocks, num_blocks
                )
        self._open[victim.request_id] = record = PreemptionRecord(
            step_id,
            now,
            victim.request_id,
            victim.num_tokens,
            len(victim.block_ids),
            list(scores),
            decision.action.value,
            swap,
            recompute,
        )
        if self._on_record is not None:
            self._on_record(record)

    def returns(self, request_id: str, decision: ResumeDecision) -> None:
        """Note how a swapped request comes back."""
        record = self._open.get(request_id)
        if record is not None:
            record.resume_action = decision.action.value
            record.resume_swap_seconds = decision.swap_seconds

    def resumed(self, request: Request, step_id: int, now: float) -> None:
        """Note that the request's KV is being restored in step `step_id`."""
        record = self._open.get(request.request_id)
        if record is not None and record.resumed_step_id is None:
            record.resumed_step_id, record.resumed_time = step_id, now

    def measured(self, request_id: str, seconds: float, step_id: int, *, is_timed: bool = True) -> None:
        """Add what step `step_id` spent on the preemption of a request; at most, if it is not `is_timed`.

        With run-ahead the request may have been preempted anew since then: the earlier record is charged.
        """
        record = self._open.get(request_id)
        if record is None or record.step_id > step_id:
            _, record = self._replaced.get(request_id, (0, None))
        if record is None or record.step_id > step_id:
            return
        is_exact = is_timed and record.measured_seconds == record.bound_seconds
        record.bound_seconds = (record.bound_seconds or 0.0) + seconds
        record.measured_seconds = record.bound_seconds if is_exact else None

    def finished(self, request_id: str) -> None:
        """Write the records of a request that ended."""
        self._settle(request_id)
        record = self._open.pop(request_id, None)
        if record is not None:
            self._keep(record)
            self._write_preemption(record)

    def step(self, record: StepRecord) -> None:
        """Take the record of an iteration."""
        known = [name for name, (step_id, _) in self._replaced.items() if step_id < record.step_id]
        for request_id in known:  # what was under way when they were replaced has been measured
            self._settle(request_id)
        if self._on_record is not None:
            self._on_record(record)
        if self._file is not None:
            self._write("step", record)
        elif self._on_record is None:
            self.steps.append(record)

    def verified(self, record: VerificationRecord) -> None:
        """Take what became of an iteration's drafts."""
        if self._file is not None:
            self._write("verification", record)
        elif self._on_record is None:
            self.verifications.append(record)

    def close(self) -> None:
        """Write what is still open, and how well costs were predicted; the file stays the caller's."""
        for request_id in [*self._replaced, *self._open]:
            self.finished(request_id)
        if isinstance(self.costs, OnlineCalibration | CheckedCalibration):
            with self.faults:
                self.predictions = {str(kind): one for kind, one in self.costs.report().items()}
            for kind, report in self.predictions.items():
                if self._file is not None:
                    self._write("predictions", report, kind=kind)

    def _settle(self, request_id: str) -> None:
        """Nothing more will be known of a record that was replaced."""
        if request_id in self._replaced:
            self._write_preemption(self._replaced.pop(request_id)[1])

    def _keep(self, record: PreemptionRecord) -> None:
        if self._file is None and self._on_record is None:
            self.preemptions.append(record)

    def _write_preemption(self, record: PreemptionRecord) -> None:
        if self._file is not None:
            self._write("preemption", record, regret_seconds=record.regret_seconds)

    def _write(self, name: str, record: Record, **more: Any) -> None:
        if self._is_broken:
            return
        assert self._file is not None
        try:
            self._file.write(json.dumps({"record": name, **more, **dataclasses.asdict(record)}) + "\n")
        except OSError as error:  # which is no reason to end requests
            self._is_broken = True
            _logger.error("the ledger ends here, what follows is not recorded: %s", error)


def _column(values: list[Any], of: str) -> NDArray[Any]:
    """The values of a field of this type."""
    if of in ("int", "float"):
        return np.array(values, dtype=np.int64 if of == "int" else np.float64)
    if of.startswith("list"):
        return np.array([json.dumps(value) for value in values], dtype=np.str_)
    if of.startswith("str"):
        return np.array(["" if value is None else value for value in values], dtype=np.str_)
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)
