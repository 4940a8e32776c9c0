"""The decision ledger: what was known at each preemption, what was chosen, and what it cost."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import IO

from jaxllm.sched.policies import Decision
from jaxllm.types import Request


@dataclasses.dataclass(slots=True)
class PreemptionRecord:
    """One preemption and, once the request is back, its restore.

    Times are seconds of the engine's clock, costs seconds. `scores` holds `(request id, urgency)` of the
    running requests. `swap_seconds` and `recompute_seconds` are what the action policy predicted, or None.
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

    @property
    def regret_seconds(self) -> float | None:
        """What was lost against the estimate of the action not taken; None where either is unknown."""
        other = self.recompute_seconds if self.action == "swap" else self.swap_seconds
        if self.measured_seconds is None or other is None:
            return None
        return max(0.0, self.measured_seconds - other)


class Ledger:
    """Collects records; each is written to `file` as a line of JSON when its request is back, or by `close`.

    Args:
        file: where to write; None keeps the records in `records`.
    """

    def __init__(self, file: IO[str] | None = None) -> None:
        self.records: list[PreemptionRecord] = []
        self._file = file
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
        self._end(victim.request_id)
        self._open[victim.request_id] = PreemptionRecord(
            step_id,
            now,
            victim.request_id,
            victim.num_tokens,
            len(victim.block_ids),
            list(scores),
            decision.action.value,
            decision.swap_seconds,
            decision.recompute_seconds,
        )

    def resumed(self, request: Request, step_id: int, now: float) -> None:
        """Note that the request's KV is being restored in step `step_id`."""
        record = self._open.get(request.request_id)
        if record is not None:
            record.resumed_step_id, record.resumed_time = step_id, now

    def measured(self, request_id: str, seconds: float) -> None:
        """Add to what the open preemption of a request has cost."""
        record = self._open.get(request_id)
        if record is not None:
            record.measured_seconds = (record.measured_seconds or 0.0) + seconds

    def finished(self, request_id: str) -> None:
        """Write the record of a request that ended."""
        self._end(request_id)

    def close(self) -> None:
        """Write what is still open."""
        for request_id in list(self._open):
            self._end(request_id)

    def _end(self, request_id: str) -> None:
        record = self._open.pop(request_id, None)
        if record is None:
            return
        if self._file is None:
            self.records.append(record)
        else:
            line = {**dataclasses.asdict(record), "regret_seconds": record.regret_seconds}
            self._file.write(json.dumps(line) + "\n")
