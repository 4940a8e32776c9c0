"""What drafts gained in iterations together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jaxllm.sched.ledger import VerificationRecord


@dataclasses.dataclass(slots=True)
class Gains:
    """Of iterations with drafts: what their tokens were to take without any, and with them, in seconds.

    Attributes:
        num_predicted, expected_plain, predicted: of those with a prediction: how many, without by the tokens
            that were expected, and with.
        num_measured, plain, measured: of those with a measurement, too: how many, without by the tokens that
            came, and with, as measured.
    """

    num_predicted: int = 0
    expected_plain: float = 0.0
    predicted: float = 0.0
    num_measured: int = 0
    plain: float = 0.0
    measured: float = 0.0

    @classmethod
    def of(cls, records: Iterable[VerificationRecord]) -> Gains:
        """Those of all of them."""
        found = cls()
        for record in records:
            found.add(record)
        return found

    def add(self, record: VerificationRecord) -> None:
        """Take an iteration."""
        if record.predicted_gain is not None and record.predicted_seconds is not None:
            self.num_predicted += 1
            self.expected_plain += record.predicted_gain * record.predicted_seconds
            self.predicted += record.predicted_seconds
        if record.measured_gain is not None and record.measured_seconds is not None:
            self.num_measured += 1
            self.plain += record.measured_gain * record.measured_seconds
            self.measured += record.measured_seconds

    def add_all(self, other: Gains) -> None:
        """Take those of another engine."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def predicted_gain(self) -> float | None:
        """Expected tokens a second over those without drafts; None if nothing is known."""
        return self.expected_plain / self.predicted if self.predicted else None

    @property
    def measured_gain(self) -> float | None:
        """Tokens a second as measured, over what was predicted without drafts; None if nothing is known."""
        return self.plain / self.measured if self.measured else None
