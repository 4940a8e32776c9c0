"""Online correction: convergence, outliers, limits and the report."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import COST_KINDS
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.predictors.published_shapes import model_shape
from jaxllm.predictors.roofline import RooflineCostModel

MODEL = RooflineCostModel(model_shape("opt-13b"), device_spec("A800-80GB-PCIe"))
WORK = {
    "prefill": (0, 0, 100, 4, 7),
    "decode": (8, 900),
    "mixed": (8, 900, 100, 4, 7),
    "swap_out": (5,),
    "swap_in": (9,),
}
seconds = st.floats(0.0, 1e300)


def predict(model, kind):
    seconds = getattr(model, f"{kind}_seconds") if kind.startswith("swap") else model.step_seconds
    return seconds(*WORK[kind])


class Fixed:
    """Decodes take 1 s each, prompt tokens 0.5 s, and mixed steps a second less than both."""

    def step_seconds(self, batch, context_tokens, prompt_tokens=0, num_prompts=0, prompt_context=0):
        return batch + 0.5 * prompt_tokens - bool(batch and prompt_tokens)


def set_factors(calibration, **factors):
    """Observe until each kind's factor is that."""
    for kind, factor in factors.items():
        for _ in range(2000):
            calibration.observe(kind, calibration.factor(kind), factor)
        assert calibration.factor(kind) == pytest.approx(factor)


def test_before_the_first_observation_nothing_is_changed():
    calibration = OnlineCalibration(MODEL)
    for kind in COST_KINDS:
        assert predict(calibration, kind) == predict(MODEL, kind)
        assert calibration.factor(kind) == 1.0
    for nothing in ((0, 0), (0, 9), (-1, 9), (0, 0, 0, 4, 9), (0, 0, 5, 0)):
        assert calibration.step_seconds(*nothing) == 0.0
    assert calibration.swap_out_seconds(0) == calibration.swap_in_seconds(0) == 0.0
    assert {report.count for report in calibration.report().values()} == {0}


def test_the_first_update_by_hand():
    calibration = OnlineCalibration(MODEL)
    calibration.observe("decode", 1.0, 1.21)
    assert calibration.factor("decode") == pytest.approx(1.1)  # half of the way, on a logarithmic scale
    assert calibration.factor("prefill") == 1.0
    assert predict(calibration, "decode") == pytest.approx(1.1 * predict(MODEL, "decode"))
    report = calibration.report()["decode"]
    assert (report.count, report.num_ignored) == (1, 0)
    assert report.error_before == report.error_after == pytest.approx(0.21 / 1.21)


def test_steps_of_one_part_take_its_factor_alone():
    calibration = OnlineCalibration(Fixed(), max_factor=4.0)
    set_factors(calibration, prefill=2.0, decode=0.5, mixed=3.0)
    assert calibration.step_seconds(6, 900) == pytest.approx(6 * 0.5)
    assert calibration.step_seconds(6, 900, 0, 2, 7) == pytest.approx(6 * 0.5)
    assert calibration.step_seconds(0, 0, 4, 1) == pytest.approx(2 * 2.0)
    assert calibration.step_seconds(0, 900, 4, 1) == pytest.approx(2 * 2.0)


def test_a_mixed_step_takes_the_mean_of_both_factors_times_its_own():
    calibration = OnlineCalibration(Fixed())
    whole = 6 + 2 - 1  # of 6 s of decodes and 2 s of prompt
    assert calibration.step_seconds(6, 900, 4, 1) == whole
    set_factors(calibration, decode=0.5)
    assert calibration.step_seconds(6, 900, 4, 1) == pytest.approx(whole * (6 * 0.5 + 2 * 1.0) / 8)
    set_factors(calibration, prefill=2.0)
    assert calibration.step_seconds(6, 900, 4, 1) == pytest.approx(whole * (6 * 0.5 + 2 * 2.0) / 8)
    assert calibration.step_seconds(1, 900, 20, 1) == pytest.approx(10 * (1 * 0.5 + 10 * 2.0) / 11)
    set_factors(calibration, mixed=1.5)
    assert calibration.step_seconds(6, 900, 4, 1) == pytest.approx(whole * (6 * 0.5 + 2 * 2.0) / 8 * 1.5)
    set_factors(calibration, decode=2.0)
    assert calibration.step_seconds(6, 900, 4, 1) == pytest.approx(whole * 2.0 * 1.5)


def test_what_is_learned_of_a_mixed_step_counts_for_mixed_steps_only():
    calibration = OnlineCalibration(Fixed())
    set_factors(calibration, prefill=2.0, decode=2.0)
    predicted = calibration.step_seconds(6, 900, 4, 1)
    assert predicted == pytest.approx(14.0)
    calibration.observe("mixed", predicted, 1.21 * predicted)
    assert calibration.factor("mixed") == pytest.approx(1.1)
    assert calibration.factor("prefill") == pytest.approx(2.0)
    assert calibration.factor("decode") == pytest.approx(2.0)
    assert calibration.step_seconds(6, 900, 4, 1) == pytest.approx(1.1 * 14.0)
    assert calibration.step_seconds(6, 900) == pytest.approx(12.0)


def test_a_mixed_step_of_no_cost_costs_nothing_whatever_was_learned():
    class Free(Fixed):
        def step_seconds(self, *work):
            return 0.0

    calibration = OnlineCalibration(Free())
    set_factors(calibration, prefill=2.0, decode=0.5)
    assert calibration.step_seconds(6, 900, 4, 1) == 0.0


@given(
    st.tuples(st.integers(1, 64), st.integers(1, 9999), st.integers(1, 512), st.integers(1, 8)),
    st.floats(0.2, 5.0),
    st.floats(0.2, 5.0),
)
def test_a_mixed_step_is_corrected_by_no_more_than_its_parts(work, of_prefill, of_decode):
    calibration = OnlineCalibration(MODEL, rate=1.0, outlier_limit=10.0)
    calibration.observe("prefill", 1.0, of_prefill)
    calibration.observe("decode", 1.0, of_decode)
    ratio = calibration.step_seconds(*work) / MODEL.step_seconds(*work)
    slack = 1 + 1e-9
    assert min(of_prefill, of_decode) <= ratio * slack
    assert ratio <= max(of_prefill, of_decode) * slack


@pytest.mark.parametrize("kind", COST_KINDS)
@pytest.mark.parametrize("truth", [0.3, 0.9, 1.0, 1.7, 5.0])
def test_the_factor_finds_a_device_that_is_slower_or_faster_throughout(kind, truth):
    calibration = OnlineCalibration(MODEL)
    rng = np.random.default_rng(0)
    for _ in range(300):
        noise = math.exp(rng.normal(0, 0.05)) * (10.0 if rng.random() < 0.02 else 1.0)
        calibration.observe(kind, predict(calibration, kind), truth * noise * predict(MODEL, kind))
    assert calibration.factor(kind) == pytest.approx(truth, rel=0.1)
    report = calibration.report()[kind]
    if truth != 1.0 and truth != 0.9:
        assert report.error_after < report.error_before


def test_the_factor_follows_a_device_that_changes():
    calibration = OnlineCalibration(MODEL)
    for truth in (1.0, 2.0, 0.5):
        for _ in range(300):
            calibration.observe("decode", predict(calibration, "decode"), truth * predict(MODEL, "decode"))
        assert calibration.factor("decode") == pytest.approx(truth, rel=0.02)


def test_predictions_that_are_a_few_observations_old_do_not_make_it_swing():
    calibration = OnlineCalibration(MODEL)
    in_flight = []
    factors = []
    for _ in range(300):
        in_flight.append(predict(calibration, "decode"))
        if len(in_flight) > 3:
            calibration.observe("decode", in_flight.pop(0), 2.0 * predict(MODEL, "decode"))
        factors.append(calibration.factor("decode"))
    assert max(factors) < 3.0
    assert factors[-50:] == pytest.approx([2.0] * 50, rel=0.01)


@given(st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=30))
def test_one_observation_moves_the_factor_by_a_bounded_step(measured):
    calibration = OnlineCalibration(MODEL, rate=0.1, outlier_limit=0.5, max_factor=4.0)
    for count, value in enumerate(measured, start=1):
        before = math.log(calibration.factor("decode"))
        calibration.observe("decode", 1.0, value)
        after = math.log(calibration.factor("decode"))
        assert abs(after - before) <= max(0.1, 1 / (count + 1)) * 0.5 + 1e-12
        assert 1 / 4 - 1e-12 <= calibration.factor("decode") <= 4 + 1e-12


@given(st.lists(st.tuples(st.sampled_from(COST_KINDS), seconds, seconds), max_size=30))
def test_any_observations_leave_finite_factors_and_errors(observations):
    calibration = OnlineCalibration(MODEL)
    for kind, predicted, measured in observations:
        calibration.observe(kind, predicted, measured)
    reports = calibration.report()
    for kind, report in reports.items():
        assert 1 / 8 - 1e-12 <= report.factor <= 8 + 1e-12
        assert (report.error_before is None) == (report.error_after is None) == (not report.count)
        assert (report.error_before or 0) >= 0
        assert (report.error_after or 0) >= 0
        assert 0 < predict(calibration, kind) < math.inf
    assert sum(r.count + r.num_ignored for r in reports.values()) == len(observations)


def test_nothing_to_compare_is_ignored_and_counted():
    calibration = OnlineCalibration(MODEL)
    calibration.observe("swap_in", 0.0, 1.0)
    calibration.observe("swap_in", 1.0, 0.0)
    report = calibration.report()["swap_in"]
    assert (report.count, report.num_ignored, report.factor) == (0, 2, 1.0)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_bad_seconds_are_refused(bad):
    calibration = OnlineCalibration(MODEL)
    with pytest.raises(ConfigError, match="decode: measured seconds must be finite and at least 0, got"):
        calibration.observe("decode", 1.0, bad)
    with pytest.raises(ConfigError, match="decode: predicted seconds must be finite"):
        calibration.observe("decode", bad, 1.0)
    with pytest.raises(
        ConfigError, match="unknown kind of cost 'swap'; use one of prefill, decode, mixed, swap_out"
    ):
        calibration.observe("swap", 1.0, 1.0)


@pytest.mark.parametrize(
    "option", [{"rate": 0.0}, {"rate": 1.5}, {"outlier_limit": 0.0}, {"max_factor": 0.5}]
)
def test_bad_options_are_refused(option):
    with pytest.raises(ConfigError, match=f"{next(iter(option))} must lie in"):
        OnlineCalibration(MODEL, **option)


def test_a_prediction_between_bounds_is_left_alone_and_one_outside_meets_the_nearer():
    calibration = OnlineCalibration(MODEL)
    for _ in range(50):  # tells nothing, and takes no weight from what does
        calibration.observe_bounds("swap_in", 1.0, 0.5, 1.0)
    assert calibration.factor("swap_in") == 1.0
    report = calibration.report()["swap_in"]
    assert (report.count, report.num_in_bounds, report.error_before, report.error_after) == (
        50,
        50,
        None,
        None,
    )
    calibration.observe_bounds("swap_in", 1.0, 1.21, 9.0)
    assert calibration.factor("swap_in") == pytest.approx(1.1)
    report = calibration.report()["swap_in"]
    assert (report.count, report.num_in_bounds) == (51, 50)
    assert report.error_before == report.error_after == pytest.approx(0.21 / 1.21 / 51)
    calibration.observe_bounds("swap_in", 1.1, 0.0, 1.0)  # the model's 1.0 is right
    assert calibration.factor("swap_in") < 1.1
    report = calibration.report()["swap_in"]
    assert report.error_before == pytest.approx(0.21 / 1.21 / 52)
    assert report.error_after == pytest.approx((0.21 / 1.21 + 0.1) / 52)


def test_what_an_outlier_did_fades_where_the_model_agrees_with_what_is_known():
    calibration = OnlineCalibration(MODEL)
    calibration.observe_bounds("swap_out", 1.0, 2.0, 2.1)
    factor = calibration.factor("swap_out")
    assert factor > 1.2
    calibration.observe_bounds("swap_out", factor, 1.1, 10.0)  # the model does not
    assert calibration.factor("swap_out") == factor
    for _ in range(1000):
        calibration.observe_bounds("swap_out", calibration.factor("swap_out"), 0.0, 10.0)
    assert calibration.factor("swap_out") == pytest.approx(1.0, abs=0.01)
    report = calibration.report()["swap_out"]
    assert report.error_before == pytest.approx((0.5 + 0.1 / 1.1) / 1002)
    assert report.error_after == pytest.approx(0.5 / 1002)


@pytest.mark.parametrize("bounds", [(2.0, 1.0), (-1.0, 1.0), (0.0, math.inf), (math.nan, 1.0)])
def test_bad_bounds_are_refused(bounds):
    calibration = OnlineCalibration(MODEL)
    with pytest.raises(ConfigError, match="swap_in: "):
        calibration.observe_bounds("swap_in", 1.0, *bounds)
    assert calibration.report()["swap_in"].count == 0
