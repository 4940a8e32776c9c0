"""How long outputs will be that are so long by now."""

import numpy as np
import pytest

from jaxllm.predictors.survival import OutputSurvival


def survival_of(ended=(), going_on=(), **arguments):
    found = OutputSurvival(**arguments)
    for length, is_whole in ended:
        found.add(length, is_whole=is_whole)
    found.fit(going_on)
    return found


def test_before_anything_is_known_nothing_ends_early():
    shares = survival_of(first_guess=50.0).share(np.array([0.0, 99.0, 100.0, 200.0, 1000.0]))
    assert shares.tolist() == pytest.approx([1.0, 1.0, 1.0, 0.25, 0.01])


def test_shares_are_those_of_kaplan_and_meier_with_one_more_that_never_ends():
    # 10 ended, 20 was cut off, 30 ended, 35 goes on, 40 was cut off: 5 and 3 at risk, and one more.
    found = survival_of([(10, True), (20, False), (30, True), (40, False)], [35])
    shares = found.share(np.array([[9.0, 10.0], [29.0, 30.0]]))
    assert shares == pytest.approx(np.array([[1.0, 5 / 6], [5 / 6, 5 / 6 * 3 / 4]]))
    assert found.share(np.array([160.0])) == pytest.approx([5 / 6 * 3 / 4 / 4])  # four times the longest


def test_those_that_go_on_make_outputs_look_longer():
    ended = [(10, True)] * 20
    among_few, among_many = (survival_of(ended, [50] * count).share(np.array([20.0]))[0] for count in (1, 60))
    assert among_few == pytest.approx(2 / 22)
    assert among_many == pytest.approx(61 / 81)


def test_only_the_last_ones_are_remembered():
    loads = [(10, True)] * 200 + [(1000, True)] * 100
    assert survival_of(loads, window=100).share(np.array([500.0]))[0] == 1.0
    assert survival_of(loads, window=300).share(np.array([500.0]))[0] == pytest.approx(101 / 301)


def test_the_estimate_finds_the_distribution_though_half_of_the_outputs_are_cut_off():
    rng = np.random.default_rng(0)
    lengths, limits = rng.lognormal(5.0, 0.6, 1000), rng.lognormal(5.0, 0.6, 1000)
    ended = [(int(min(pair)), bool(pair[0] <= pair[1])) for pair in zip(lengths, limits, strict=True)]
    assert 0.4 < np.mean([is_whole for _, is_whole in ended]) < 0.6
    at = np.quantile(lengths, [0.25, 0.5, 0.75])
    assert survival_of(ended).share(at) == pytest.approx([0.75, 0.5, 0.25], abs=0.05)
