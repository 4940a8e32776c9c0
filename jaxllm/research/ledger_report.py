"""What a ledger says of a run's decisions, and in what two runs of one workload differ."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxllm.sched.gains import Gains
from jaxllm.sched.ledger import Ledger, PreemptionRecord, VerificationRecord

ACTIONS = ("recompute", "swap")


class Accuracy(NamedTuple):
    """What was predicted for what was done, and what it took, over so many decisions of which both are known.

    `median_error` is the median of |predicted - measured| / max(predicted, measured), between 0 and 1: what a
    copy adds may be nothing.
    """

    num_decisions: int
    predicted_seconds: float
    measured_seconds: float
    median_error: float


def accuracy(records: Sequence[PreemptionRecord]) -> Accuracy | None:
    """How well decisions were predicted by whoever took them; None where nothing is known."""
    pairs = [
        (one.predicted_seconds, one.measured_seconds)
        for one in records
        if one.predicted_seconds is not None and one.measured_seconds is not None
    ]
    if not pairs:
        return None
    errors = [abs(said - took) / max(said, took) if said or took else 0.0 for said, took in pairs]
    predicted, measured = [sum(column) for column in zip(*pairs, strict=True)]
    return Accuracy(len(pairs), predicted, measured, statistics.median(errors))


def report(ledger: Ledger, top: int) -> dict[str, Any]:
    """The summary of a ledger as JSON has it; seconds, counts, and the `top` decisions that cost most."""
    records = ledger.preemptions
    actions = {}
    for action in ACTIONS:
        of = [one for one in records if one.action == action]
        known = accuracy(of)
        actions[action] = {
            **_total(of),
            "num_blocks": sum(one.num_blocks for one in of),
            "accuracy": None if known is None else known._asdict(),
        }
    return {
        "header": None if ledger.header is None else dataclasses.asdict(ledger.header),
        "cut_line": ledger.cut_line,
        "num_steps": len(ledger.steps),
        "num_preemptions": len(records),
        "actions": actions,
        "regret_seconds": _total(records)["regret_seconds"],
        "drafts": drafts(ledger.verifications),
        "predictions": {kind: dataclasses.asdict(one) for kind, one in ledger.predictions.items()},
        "most_costly": [_as_dict(one) for one in most_costly(records, top)],
    }


def drafts(records: Sequence[VerificationRecord]) -> dict[str, float | None] | None:
    """What became of all drafts, and what that was worth; None without any."""
    if not records:
        return None
    gains = Gains.of(records)
    names = ("num_verified", "num_drafted", "num_kept", "expected_kept")
    return {
        "num_iterations": len(records),
        **{name: sum(getattr(one, name) for one in records) for name in names},
        "predicted_gain": gains.predicted_gain,
        "measured_gain": gains.measured_gain,
        "num_measured": gains.num_measured,
    }


def most_costly(records: Sequence[PreemptionRecord], top: int) -> list[PreemptionRecord]:
    """The decisions that took longest, as far as that is known."""
    return sorted(records, key=lambda one: -(one.measured_seconds or 0.0))[:top]


class Difference(NamedTuple):
    """The `number`-th preemption of a request, from 1, in two runs; None in one where it never came to it."""

    request_id: str
    number: int
    first: PreemptionRecord | None
    second: PreemptionRecord | None

    @property
    def seconds(self) -> float:
        """By how much the two differ, as far as it was measured."""
        return abs(_seconds(self.first) - _seconds(self.second))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs' decisions.

    Attributes:
        num_same: preemptions with the same action in both.
        differences: the others, those first that cost most more or less.
        first, second: the runs.
    """

    num_same: int
    differences: Sequence[Difference]
    first: Ledger
    second: Ledger

    def to_dict(self, top: int) -> dict[str, Any]:
        """As JSON has it."""
        sides: dict[str, Any] = {}
        for name, ledger in (("first", self.first), ("second", self.second)):
            differing = [getattr(one, name) for one in self.differences]
            sides[name] = {
                "header": None if ledger.header is None else dataclasses.asdict(ledger.header),
                "cut_line": ledger.cut_line,
                "all": _total(ledger.preemptions),
                "differing": _total([one for one in differing if one is not None]),
                "num_alone": sum(
                    (one.second if name == "first" else one.first) is None for one in self.differences
                ),
            }
        return {
            "num_same": self.num_same,
            "num_other_action": sum(None not in (one.first, one.second) for one in self.differences),
            **sides,
            "differences": [
                {
                    "request_id": one.request_id,
                    "number": one.number,
                    "first": None if one.first is None else _as_dict(one.first),
                    "second": None if one.second is None else _as_dict(one.second),
                }
                for one in self.differences[:top]
            ],
        }


def compare(first: Ledger, second: Ledger) -> Comparison:
    """Two runs of one workload, preemption by preemption of each request: the first of one with the first of
    the other.
    """
    mine, theirs = _by_place(first), _by_place(second)
    differences, num_same = [], 0
    for place in dict.fromkeys((*mine, *theirs)):
        one, other = mine.get(place), theirs.get(place)
        if one is not None and other is not None and one.action == other.action:
            num_same += 1
        else:
            differences.append(Difference(*place, one, other))
    differences.sort(key=lambda one: -one.seconds)
    return Comparison(num_same, differences, first, second)


def _by_place(ledger: Ledger) -> dict[tuple[str, int], PreemptionRecord]:
    """Preemptions by request and number, in order of steps."""
    counts: collections.Counter[str] = collections.Counter()
    found = {}
    for record in sorted(ledger.preemptions, key=lambda one: one.step_id):
        counts[record.request_id] += 1
        found[record.request_id, counts[record.request_id]] = record
    return found


def _total(records: Sequence[PreemptionRecord]) -> dict[str, Any]:
    """Counts and sums, of what is known."""
    measured = [one.measured_seconds for one in records if one.measured_seconds is not None]
    regrets = [one.regret_seconds for one in records if one.regret_seconds is not None]
    return {
        "num_preemptions": len(records),
        "num_measured": len(measured),
        "measured_seconds": sum(measured),
        "num_regrets": len(regrets),
        "regret_seconds": sum(regrets),
    }


def _as_dict(record: PreemptionRecord) -> dict[str, Any]:
    return {**dataclasses.asdict(record), "regret_seconds": record.regret_seconds}


def _seconds(record: PreemptionRecord | None) -> float:
    return 0.0 if record is None else record.measured_seconds or 0.0
