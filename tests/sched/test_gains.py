"""What drafts gained in several iterations together."""

import dataclasses

import pytest

from jaxllm.sched.gains import Gains
from jaxllm.sched.ledger import VerificationRecord


def record(num_kept, expected_kept, plain, predicted, measured, num_decodes=2):
    return VerificationRecord(0, 0.0, num_decodes, 2, 8, num_kept, expected_kept, predicted, plain, measured)


def test_gains_are_of_tokens_a_second():
    record = VerificationRecord(3, 1.0, 2, 1, 4, 2, 1.0, 0.03, 0.02, 0.04)
    assert record.predicted_gain == pytest.approx(1.0)  # three tokens for two, and half as long again
    assert record.measured_gain == pytest.approx(1.0)  # four for two, in twice the time
    assert dataclasses.replace(record, plain_seconds=None).measured_gain is None


def test_seconds_are_added_not_gains():
    """Of 2 requests: 3 and 2 tokens each in 4 and 1 s; an iteration without takes 2 and 1 s."""
    first, second = record(4, 2.0, 2.0, 3.0, 4.0), record(2, 2.0, 1.0, 1.0, 1.0)
    found = Gains.of([first, second])
    assert found.measured_gain == pytest.approx((3 * 2.0 + 2 * 1.0) / (4.0 + 1.0))
    assert found.predicted_gain == pytest.approx((2 * 2.0 + 2 * 1.0) / (3.0 + 1.0))
    assert (found.num_predicted, found.num_measured) == (2, 2)
    both = Gains.of([first])
    both.add_all(Gains.of([second]))
    assert both == found


def test_what_is_not_known_counts_nowhere():
    known = record(4, 2.0, 2.0, 3.0, 4.0)
    assert Gains.of([]).measured_gain is Gains.of([]).predicted_gain is None
    unmeasured, unpredicted = record(4, 2.0, 2.0, 3.0, None), record(4, 2.0, None, None, 4.0)
    assert Gains.of([known, unpredicted]) == Gains.of([known])
    found = Gains.of([known, unmeasured])
    assert (found.num_predicted, found.num_measured) == (2, 1)
    assert found.measured_gain == Gains.of([known]).measured_gain
