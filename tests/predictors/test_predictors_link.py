"""Costs of copies: known constants are found again, and no fit ever promises a gain."""

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.errors import ConfigError
from jaxllm.predictors.link import LinkCosts, LinkSample

SIZES = [(pieces * size, pieces) for pieces in (1, 4, 32, 500) for size in (2**12, 2**16, 2**20)]
counts = st.integers(1, 2**40)
samples = st.builds(LinkSample, counts, st.integers(1, 2**20), st.floats(1e-7, 1e3))


@pytest.mark.parametrize(
    "known", [LinkCosts(20e-6, 8e-6, 25e9), LinkCosts(0.0, 1e-6, 1e9), LinkCosts(1e-3, 0.0, 5e10)]
)
def test_known_constants_are_found(known):
    found = LinkCosts.fit([LinkSample(*size, known.seconds(*size)) for size in SIZES])
    assert found.latency_seconds == pytest.approx(known.latency_seconds, abs=1e-9)
    assert found.piece_seconds == pytest.approx(known.piece_seconds, abs=1e-10)
    assert found.bytes_per_second == pytest.approx(known.bytes_per_second, rel=1e-4)


def test_seconds_and_errors_by_hand():
    costs = LinkCosts(1.0, 0.5, 100.0)
    assert costs.seconds(200, 4) == 5.0
    assert costs.seconds(0, 0) == 0.0
    assert costs.median_error([LinkSample(200, 4, 5.0), LinkSample(200, 4, 4.0)]) == pytest.approx(0.125)


def test_bytes_that_cost_nothing():
    found = LinkCosts.fit([LinkSample(num_bytes, 2, 1.0) for num_bytes in (1, 1000)])
    assert found.seconds(10**9, 2) == pytest.approx(1.0)
    assert found.bytes_per_second == math.inf


@given(st.lists(samples, min_size=1, max_size=20), counts, counts, st.integers(1, 2**20))
def test_no_cost_is_negative_and_more_never_costs_less(measured, some, others, pieces):
    costs = LinkCosts.fit(measured)
    assert min(costs.latency_seconds, costs.piece_seconds) >= 0
    assert costs.bytes_per_second > 0
    fewer, more = sorted((some, others))
    assert 0 <= costs.seconds(fewer, pieces) <= costs.seconds(more, pieces)
    assert costs.seconds(fewer, pieces) <= costs.seconds(fewer, pieces + 1)
    assert 0 <= costs.median_error(measured) < math.inf


def test_wrong_values_are_refused():
    with pytest.raises(ConfigError, match="at least one sample"):
        LinkCosts.fit([])
    with pytest.raises(ConfigError, match="seconds must lie in"):
        LinkCosts.fit([LinkSample(1, 1, 0.0)])
    with pytest.raises(ConfigError, match="num_pieces must lie in"):
        LinkCosts.fit([LinkSample(1, 0, 1.0)])
    with pytest.raises(ConfigError, match="latency_seconds must lie in"):
        LinkCosts(-1.0, 0.0, 1.0)


def test_imports_no_accelerator_library():
    code = "import sys, jaxllm.predictors.link\nassert not {'jax', 'scipy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
