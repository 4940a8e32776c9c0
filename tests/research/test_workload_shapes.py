"""Arrival processes, length distributions, and the traces made of them."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxllm.errors import ConfigError
from jaxllm.research.workloads import (
    ALPACA,
    CHATBOT,
    DATASETS,
    SUMMARY,
    AllAtOnce,
    GammaBursts,
    LognormalLengths,
    Poisson,
    PromptDataset,
    RecordedArrivals,
    Trace,
    UniformLengths,
    make_trace,
)
from jaxllm.research.workloads.lengths import clipped_lognormal_mean

SEEDS = st.integers(0, 2**63 - 1)
ARRIVALS = st.one_of(
    st.just(AllAtOnce()),
    st.builds(Poisson, st.floats(1e-3, 1e3)),
    st.builds(GammaBursts, st.floats(1e-3, 1e3), st.floats(0.01, 5)),
)


# Arrivals


@given(ARRIVALS, st.integers(1, 200), SEEDS)
def test_arrivals_start_at_zero_and_never_decrease(process, count, seed):
    times = process.times(count, np.random.default_rng(seed))
    assert times.shape == (count,)
    assert times.dtype == np.float64
    assert times[0] == 0
    assert (np.diff(times) >= 0).all()
    longer = process.times(count + 50, np.random.default_rng(seed))
    np.testing.assert_array_equal(longer[:count], times)


@pytest.mark.parametrize(
    ("process", "cv"),
    [(Poisson(4.0), 1), (GammaBursts(4.0, 1), 1), (GammaBursts(4.0, 3), 3), (GammaBursts(4.0, 0.2), 0.2)],
)
def test_gaps_have_the_stated_mean_and_variation(process, cv):
    gaps = np.diff(process.times(200_001, np.random.default_rng(0)))
    assert gaps.mean() == pytest.approx(0.25, rel=5 * cv / math.sqrt(200_000))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_recorded_arrivals(tmp_path):
    recorded = Trace(
        name="t", seed=1, arrival_times=[1, 1.5, 3], prompt_lens=[3, 1, 4], output_lens=[1, 5, 9]
    )
    recorded.save(tmp_path / "t.json")
    process = RecordedArrivals.from_file(tmp_path / "t.json")
    assert process == RecordedArrivals((1.0, 1.5, 3.0))
    trace = make_trace("chatbot", 2, 8, arrivals=process)
    assert trace.arrival_times.tolist() == [0, 0.5]
    assert trace.notes[-1] == "arrivals: RecordedArrivals(3 times)"
    with pytest.raises(ConfigError, match="num_requests=4, and only 3 arrival times"):
        make_trace("chatbot", 4, 8, arrivals=process)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Poisson(0), r"rate must lie in \[1e-06, 1e\+06\], got 0"),
        (lambda: Poisson(math.nan), "rate must lie in"),
        (lambda: Poisson(10**400), "rate must lie in"),
        (lambda: Poisson("1"), "rate must be a number, got '1'"),
        (lambda: GammaBursts(1e7, 1), "rate must lie in"),
        (lambda: GammaBursts(1, 0), r"cv must lie in \[0.01, 20\], got 0"),
        (lambda: GammaBursts(1, 21), "cv must lie in"),
        (lambda: RecordedArrivals(()), "at least one time"),
        (lambda: RecordedArrivals((1, math.inf)), r"recorded\[1\] must lie in"),
        (lambda: RecordedArrivals((2, 1)), r"recorded\[1\]=1.0 comes after 2.0"),
    ],
)
def test_arrival_bounds(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


# Lengths


@pytest.mark.parametrize("name", DATASETS)
def test_data_sets_have_the_papers_means(name):
    lengths = DATASETS[name]
    sample = lengths.sample(200_000, np.random.default_rng(0))
    assert sample.mean() == pytest.approx(lengths.mean, rel=0.01)
    assert sample.min() >= lengths.shortest
    assert sample.max() <= lengths.longest
    assert (CHATBOT.mean, ALPACA.mean, SUMMARY.mean) == (17.02, 19.66, 340.48)


def test_lognormal_shape_away_from_the_clip():
    lengths = LognormalLengths(mean=1000.0, sigma=0.5, shortest=1, longest=2**24)
    assert lengths.mu == pytest.approx(math.log(1000) - 0.5**2 / 2)  # nothing is clipped
    logs = np.log(lengths.sample(100_000, np.random.default_rng(1)))
    assert np.median(logs) == pytest.approx(lengths.mu, abs=0.01)
    assert logs.std() == pytest.approx(0.5, abs=0.01)


def test_clipped_mean_against_sampling():
    normals = np.random.default_rng(2).standard_normal(400_000)
    for mu, sigma, low, high in [(2.7, 0.6, 1, 64), (5.0, 2.0, 10, 300), (0.0, 1.0, 1, 3), (9.0, 0.7, 1, 64)]:
        sampled = np.clip(np.exp(mu + sigma * normals), low, high)
        error = 5 * sampled.std() / math.sqrt(len(normals))
        assert clipped_lognormal_mean(mu, sigma, low, high) == pytest.approx(sampled.mean(), abs=error + 1e-9)


@given(
    low=st.integers(1, 1000),
    width=st.integers(1, 10**6),
    share=st.floats(0.01, 0.99),
    sigma=st.floats(0.01, 4),
    seed=SEEDS,
)
@example(low=1, width=2**24 - 2, share=0.5, sigma=4.0, seed=0)
@example(low=1, width=2**24 - 2, share=0.999, sigma=0.01, seed=0)
def test_any_mean_inside_the_clip_is_reached(low, width, share, sigma, seed):
    lengths = LognormalLengths(mean=low + share * width, sigma=sigma, shortest=low, longest=low + width)
    assert clipped_lognormal_mean(lengths.mu, sigma, low, low + width) == pytest.approx(
        lengths.mean, rel=1e-6
    )
    sample = lengths.sample(50, np.random.default_rng(seed))
    assert sample.dtype == np.int64
    assert low <= sample.min() <= sample.max() <= low + width
    np.testing.assert_array_equal(lengths.sample(20, np.random.default_rng(seed)), sample[:20])


def test_rounding_keeps_the_mean():
    """17.25 tokens with hardly any spread are 17 in three of four requests, 18 in the fourth."""
    sample = LognormalLengths(mean=2.25, sigma=0.01, shortest=1, longest=9).sample(
        100_000, np.random.default_rng(0)
    )
    assert set(sample.tolist()) == {2, 3}
    assert sample.mean() == pytest.approx(2.25, abs=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean": 1}, "mean=1 must lie strictly between shortest=1 and longest=64"),
        ({"mean": 64.0}, "mean=64.0 must lie strictly between"),
        ({"mean": 65}, r"mean must lie in \[1, 64\], got 65"),
        ({"sigma": 0}, r"sigma must lie in \[0.01, 4\], got 0"),
        ({"sigma": 5}, "sigma must lie in"),
        ({"shortest": 0}, "shortest must lie in"),
        ({"longest": 1}, r"longest must lie in \[2, 16777216\], got 1"),
        ({"longest": 2**24 + 1}, "longest must lie in"),
        ({"longest": 64.0}, "longest must be an integer, got 64.0"),
    ],
)
def test_lognormal_bounds(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CHATBOT, **changes)


def test_uniform_lengths():
    sample = UniformLengths(shortest=3, longest=5).sample(30_000, np.random.default_rng(0))
    assert np.abs(np.bincount(sample, minlength=6)[3:] - 10_000).max() < 500
    assert UniformLengths(shortest=3, longest=5).mean == 4
    for shortest, longest in [(0, 1), (3, 2), (1, 2**24 + 1)]:
        with pytest.raises(ConfigError, match=r"(shortest|longest) must lie in"):
            UniformLengths(shortest=shortest, longest=longest)


# make_trace


@given(
    st.sampled_from(sorted(DATASETS)),
    ARRIVALS,
    st.sampled_from(["max", "uniform"]),
    st.integers(1, 300),
    SEEDS,
)
def test_same_seed_same_trace(dataset, arrivals, outputs, max_len, seed):
    def build(count, seed=seed):
        return make_trace(dataset, count, max_len, outputs=outputs, arrivals=arrivals, seed=seed)

    trace = build(40)
    assert trace == build(40)
    assert trace.token_ids(7, 999) == build(40).token_ids(7, 999)
    assert trace.name == dataset
    assert build(60).head(40) == trace
    other = build(40, seed=(seed + 1) % 2**63)
    assert (trace.prompt_lens != other.prompt_lens).any()
    if outputs == "max":
        assert (trace.output_lens == max_len).all()
    else:
        assert math.ceil(max_len / 4) <= trace.output_lens.min() <= trace.output_lens.max() <= max_len


def test_parts_of_a_trace_are_independent():
    base = make_trace("summary", 100, 64, outputs="uniform", arrivals=Poisson(1.0))
    again = make_trace("summary", 100, 32, outputs="max", arrivals=GammaBursts(2.0, 2.0))
    np.testing.assert_array_equal(base.prompt_lens, again.prompt_lens)
    other = make_trace("chatbot", 100, 64, outputs="uniform", arrivals=Poisson(1.0))
    np.testing.assert_array_equal(base.output_lens, other.output_lens)
    np.testing.assert_array_equal(base.arrival_times, other.arrival_times)
    correlation = np.corrcoef(base.prompt_lens, base.output_lens)[0, 1]
    assert abs(correlation) < 0.3


def test_means_of_a_trace():
    trace = make_trace("chatbot", 50_000, 64, outputs="uniform", arrivals=Poisson(5.0), seed=3)
    assert trace.prompt_lens.mean() == pytest.approx(17.02, rel=0.02)
    assert trace.output_lens.mean() == pytest.approx(40, rel=0.01)
    assert trace.summary()["request_rate"] == pytest.approx(5, rel=0.03)


def test_make_trace_defaults_and_errors():
    trace = make_trace(UniformLengths(shortest=2, longest=2), 3, 1, name="mine")
    assert trace.name == "mine"
    assert trace.arrival_times.tolist() == [0, 0, 0]
    assert trace.prompt_lens.tolist() == [2, 2, 2]
    assert make_trace(CHATBOT, 1, 1).name == "custom"
    assert trace.notes == (
        "prompts: UniformLengths(shortest=2, longest=2)",
        "outputs: UniformLengths(shortest=1, longest=1)",
        "arrivals: AllAtOnce()",
    )
    for arguments, message in [
        (("chatbott", 1, 1), "dataset='chatbott' is unknown; choose from chatbot, alpaca, summary"),
        (("chatbot", 0, 1), "num_requests must lie in"),
        (("chatbot", 2**25 + 1, 1), "num_requests must lie in"),
        (("chatbot", 1, 0), "max_output_len must lie in"),
        (("chatbot", 1, 2**24 + 1), "max_output_len must lie in"),
    ]:
        with pytest.raises(ConfigError, match=message):
            make_trace(*arguments)
    with pytest.raises(ConfigError, match="outputs='min' is unknown; choose from max, uniform"):
        make_trace("chatbot", 1, 1, outputs="min")
    with pytest.raises(ConfigError, match="seed must lie in"):
        make_trace("chatbot", 1, 1, seed=2**63)
    with pytest.raises(ConfigError, match="arrivals=None is no arrival process"):
        make_trace("chatbot", 1, 1, arrivals=None)
    with pytest.raises(ConfigError, match=r"dataset=\[5\] is neither a name, nor lengths"):
        make_trace([5], 1, 1)


def test_prompts_of_a_data_set_are_drawn_without_replacement():
    count = 30
    ids = tuple((index,) * (index + 1) for index in range(count))
    dataset = PromptDataset(
        name="d",
        source="d.json",
        prompt_lens=range(1, count + 1),
        prompt_token_ids=ids,
        num_skipped=1,
        skipped=("x",),
    )
    trace = make_trace(dataset, count, 4, seed=5)
    assert sorted(trace.prompt_token_ids) == sorted(ids)
    assert trace.prompt_token_ids != ids
    assert trace.name == "d"
    assert trace.notes[:3] == ("prompts: drawn from d.json", "skipped 1 rows", "x")
    assert make_trace(dataset, 10, 4, seed=5) == trace.head(10)
    with pytest.raises(ConfigError, match="num_requests=31, and the data set 'd' has 30 usable prompts"):
        make_trace(dataset, 31, 4)
    texts = dataclasses.replace(dataset, prompt_token_ids=None, prompt_texts=tuple(map(str, range(count))))
    drawn = make_trace(texts, 5, 4, seed=5)
    assert [int(text) + 1 for text in drawn.prompt_texts] == drawn.prompt_lens.tolist()
