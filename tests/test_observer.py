"""What an observer learns from how long steps took."""

import pytest
from scheduler_helpers import LinearCosts, make_request

from jaxllm.engine.observer import StepObserver
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.sched.pressure import RecentPressure
from jaxllm.types import SchedulerOutput, Swap


def decoding(**copies):
    """A step that decodes one request; 4 s are predicted."""
    return SchedulerOutput(1, decode=(make_request(0, 4),), **copies)


def learned(output, seconds):
    """Seconds and blocks added to what was known of copies, which was nothing."""
    recent = RecentPressure(copy_blocks=0.0)
    StepObserver(OnlineCalibration(LinearCosts(decode=4.0)), None, recent).observe(output, seconds)
    return recent.copy_seconds, recent.copy_blocks


SWAPS = (Swap(make_request(1, 8), 0, (1, 2)), Swap(make_request(2, 4), 1, (3,)))


@pytest.mark.parametrize(
    ("seconds", "added"), [(5.0, 1.0), (4.0, 0.0), (3.5, -0.5), (6.0, 2.0), (60.0, 2.0), (0.5, -2.0)]
)
def test_what_copies_out_add_to_a_step_is_learned_up_to_half_of_it(seconds, added):
    assert learned(decoding(swap_out=SWAPS), seconds) == (pytest.approx(added), 3)


@pytest.mark.parametrize("others", ["swap_in", "load", "joined"])
def test_nothing_is_learned_of_steps_that_may_have_waited_for_a_copy(others):
    swap = Swap(make_request(3, 4), 2, (4,))
    assert learned(decoding(swap_out=SWAPS, **{others: (swap,)}), 6.0) == (0.0, 0.0)
    assert learned(decoding(**{others: (swap,)}), 6.0) == (0.0, 0.0)


def test_steps_without_copies_say_nothing_of_them():
    assert learned(decoding(), 6.0) == (0.0, 0.0)
