"""Workloads: drawing, keeping, and reading traces."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxllm.errors import ConfigError, RequestError
from jaxllm.tokenizer import encode, load_tokenizer
from jaxllm.workloads import (
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
    load_dataset_file,
    load_trace_csv,
    make_trace,
)
from jaxllm.workloads.lengths import clipped_lognormal_mean

ROOT = Path(__file__).parents[1]
SEEDS = st.integers(0, 2**63 - 1)
ARRIVALS = st.one_of(
    st.just(AllAtOnce()),
    st.builds(Poisson, st.floats(1e-3, 1e3)),
    st.builds(GammaBursts, st.floats(1e-3, 1e3), st.floats(0.01, 5)),
)


def make(**changes):
    fields = {"name": "t", "seed": 1, "arrival_times": [0, 0.5, 2.25], "prompt_lens": [3, 1, 4]}
    return Trace(**(fields | {"output_lens": [1, 5, 9]} | changes))


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


class WordTokenizer:
    """One token a word, and the part of transformers' interface that `jaxllm.tokenizer.encode` uses."""

    bos_token_id = None

    def encode(self, text, **options):
        return [len(word) for word in text.split()]


# Trace


def test_arrays_are_read_only_copies_of_the_declared_types():
    lens = np.array([3, 1, 4], np.int32)
    trace = make(prompt_lens=lens)
    lens[0] = 99
    assert trace.prompt_lens.tolist() == [3, 1, 4]
    assert [trace.arrival_times.dtype, trace.prompt_lens.dtype, trace.output_lens.dtype] == ["f8", "i8", "i8"]
    for array in (trace.arrival_times, trace.prompt_lens, trace.output_lens, trace.head(2).prompt_lens):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        trace.seed = 2


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"name": ""}, ConfigError, "name must be a non-empty string"),
        ({"seed": -1}, ConfigError, r"seed must lie in \[0, 9223372036854775807\], got -1"),
        ({"seed": 1.0}, ConfigError, "seed must be an integer"),
        ({"seed": True}, ConfigError, "seed must be an integer"),
        ({"notes": "text"}, ConfigError, "notes must be a sequence of strings"),
        ({"prompt_lens": []}, ConfigError, "between 1 and 33554432 requests; prompt_lens has 0"),
        ({"prompt_lens": [3, 0, 4]}, RequestError, r"prompt_lens\[1\] must lie in \[1, 16777216\], got 0"),
        ({"output_lens": [1, 1, 2**24 + 1]}, RequestError, r"output_lens\[2\] must lie in"),
        ({"output_lens": [1, 1, 2**70]}, RequestError, "output_lens must hold integers"),
        ({"output_lens": [1.0, 2.5, 3]}, RequestError, "output_lens must hold integers, got float64"),
        ({"output_lens": [True] * 3}, RequestError, "output_lens must hold integers, got bool"),
        ({"output_lens": [1, 2]}, RequestError, "output_lens must have one entry per request: 3, got 2"),
        ({"prompt_lens": [[1], [2], [3]]}, RequestError, r"got shape \(3, 1\)"),
        ({"prompt_lens": [[1], [2, 3], 4]}, RequestError, "prompt_lens must be one number per request"),
        ({"arrival_times": [0, 2, 1]}, RequestError, r"arrival_times\[2\]=1.0 comes after 2.0; sort"),
        ({"arrival_times": [0, 1, math.nan]}, RequestError, r"arrival_times\[2\] must lie in .* got nan"),
        ({"arrival_times": [-1, 1, 2]}, RequestError, r"arrival_times\[0\] must lie in .* got -1.0"),
        ({"arrival_times": [0, 1, 2e9]}, RequestError, r"arrival_times\[2\] must lie in"),
        ({"arrival_times": ["0", "1", "2"]}, RequestError, "arrival_times must hold numbers"),
        ({"arrival_times": [0, 1]}, RequestError, "arrival_times must have one entry per request: 3, got 2"),
        ({"prompt_texts": ["a", "", "b"]}, RequestError, r"prompt_texts\[1\] must be a non-empty string"),
        ({"prompt_texts": ["a", "b", "\ud800"]}, RequestError, r"prompt_texts\[2\] holds a lone surrogate"),
        ({"prompt_texts": "abc"}, RequestError, "prompt_texts must have one entry per request: 3"),
        ({"prompt_token_ids": [[1, 2, 3], [1]]}, RequestError, "one entry per request: 3, got 2"),
        (
            {"prompt_token_ids": [[1, 2], [1], [1] * 4]},
            RequestError,
            r"ids\[0\] has 2 ids; prompt_lens says 3",
        ),
        ({"prompt_token_ids": [[1, 2, -1], [1], [1] * 4]}, RequestError, r"ids\[0\] holds -1"),
        ({"prompt_token_ids": [[1, 2, 3], 7, [1] * 4]}, RequestError, r"ids\[1\] must be a list"),
        (
            {"prompt_token_ids": [[1, 2, 3], [1], [1] * 4], "prompt_texts": ["a", "b", "c"]},
            ConfigError,
            "not both",
        ),
    ],
)
def test_malformed_traces_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        make(**changes)


def test_head_keeps_the_first_prompts():
    trace = make(prompt_token_ids=[[1, 2, 3], [4], [5, 6, 7, 8]], notes=["from a test"])
    head = trace.head(2)
    assert head == make(
        arrival_times=[0, 0.5],
        prompt_lens=[3, 1],
        output_lens=[1, 5],
        prompt_token_ids=((1, 2, 3), (4,)),
        notes=("from a test",),
    )
    assert trace.head(3) == trace != head
    assert make(prompt_texts=["a", "b", "c"]).head(1).prompt_texts == ("a",)
    for count in (0, 4):
        with pytest.raises(ConfigError, match=rf"num_requests must lie in \[1, 3\], got {count}"):
            trace.head(count)


def test_token_ids():
    trace = make(prompt_lens=[40, 40, 4])
    ids = trace.token_ids(0, 1000)
    assert ids == trace.token_ids(0, 1000) == trace.head(1).token_ids(0, 1000)
    assert len(ids) == 40
    assert min(ids) >= 0
    assert max(ids) < 1000
    assert ids != trace.token_ids(1, 1000)
    assert ids != dataclasses.replace(trace, seed=2).token_ids(0, 1000)
    assert trace.token_ids(2, 1) == [0] * 4
    with pytest.raises(ConfigError, match=r"index must lie in \[0, 2\], got 3"):
        trace.token_ids(3, 10)
    with pytest.raises(ConfigError, match="vocab_size must lie in"):
        trace.token_ids(0, 0)


def test_random_token_ids_never_change():
    """Stored traces without token ids depend on these."""
    assert make(seed=0, prompt_lens=[5, 1, 1]).token_ids(0, 50_000) == [45993, 1113, 46645, 40490, 35517]


def test_given_token_ids_must_fit_the_vocabulary():
    trace = make(prompt_token_ids=[[1, 2, 9], [4], [5, 6, 7, 8]])
    assert trace.token_ids(0, 10) == [1, 2, 9]
    with pytest.raises(RequestError, match="request 0 of trace 't' holds token id 9; the vocabulary has 9"):
        trace.token_ids(0, 9)


def test_random_token_ids_are_uniform():
    trace = make(prompt_lens=[100_000, 1, 1])
    counts = np.bincount(trace.token_ids(0, 10), minlength=10)
    assert np.abs(counts - 10_000).max() < 500  # five standard deviations


def test_summary_by_hand():
    summary = make(notes=["n"]).summary()
    assert json.loads(json.dumps(summary)) == summary
    assert {key: summary[key] for key in ("name", "seed", "num_requests", "duration_s", "notes")} == {
        "name": "t",
        "seed": 1,
        "num_requests": 3,
        "duration_s": 2.25,
        "notes": ["n"],
    }
    assert summary["request_rate"] == pytest.approx(2 / 2.25)
    assert summary["interarrival_s"]["mean"] == pytest.approx(1.125)
    prompts = summary["prompt_tokens"]
    assert (prompts["total"], prompts["min"], prompts["p50"], prompts["max"]) == (8, 1, 3.0, 4)
    assert prompts["mean"] == pytest.approx(8 / 3)
    assert prompts["std"] == pytest.approx(math.sqrt(14 / 9))
    assert prompts["p90"] == pytest.approx(3.8)
    single = make(arrival_times=[0], prompt_lens=[1], output_lens=[1]).summary()
    assert single["interarrival_s"] is single["request_rate"] is None


@st.composite
def traces(draw):
    count = draw(st.integers(1, 8))
    lens = st.lists(st.integers(1, 12), min_size=count, max_size=count)
    times = draw(st.lists(st.floats(0, 1e9), min_size=count, max_size=count))
    prompt_lens, kind = draw(lens), draw(st.sampled_from(["none", "ids", "texts"]))
    ids = [draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)) for n in prompt_lens]
    texts = [draw(st.text(st.characters(codec="utf-8"), min_size=1)) for _ in prompt_lens]
    return Trace(
        name=draw(st.text(min_size=1)),
        seed=draw(SEEDS),
        arrival_times=np.sort(times),
        prompt_lens=prompt_lens,
        output_lens=draw(lens),
        prompt_token_ids=ids if kind == "ids" else None,
        prompt_texts=texts if kind == "texts" else None,
        notes=draw(st.lists(st.text(), max_size=2)),
    )


@given(traces())
def test_saved_traces_load_exactly(tmp_path_factory, trace):
    folder = tmp_path_factory.mktemp("traces")
    trace.save(folder / "t.json")
    loaded = Trace.load(folder / "t.json")
    assert loaded == trace
    assert loaded.arrival_times.tobytes() == trace.arrival_times.tobytes()
    loaded.save(folder / "u.json")
    assert (folder / "u.json").read_bytes() == (folder / "t.json").read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == ["t.json", "u.json"]


def test_traces_differ_in_every_field():
    trace = make(prompt_token_ids=[[1, 2, 3], [4], [5, 6, 7, 8]])
    changes = {"name": "u", "seed": 2, "arrival_times": [0, 1, 2], "output_lens": [1, 1, 1], "notes": ["n"]}
    for name, value in {**changes, "prompt_token_ids": None}.items():
        assert dataclasses.replace(trace, **{name: value}) != trace, name
    assert trace != "t"


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    make().save(path)

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(ConfigError, match=r"cannot write the trace .*\(No space left"):
        make(name="new").save(path)
    assert Trace.load(path) == make()
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]
    with pytest.raises(ConfigError, match="cannot write the trace"):
        make().save(tmp_path / "absent" / "t.json")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda text: text[:-9], ConfigError, "no valid JSON"),
        (lambda text: "[" * 100_000, ConfigError, "no valid JSON"),
        (lambda text: "[1]", ConfigError, "is no trace"),
        (lambda text: text.replace("jaxllm-trace", "other"), ConfigError, "is no trace"),
        (
            lambda text: text.replace('"version": 1', '"version": 2'),
            ConfigError,
            "version 2; .* reads version 1",
        ),
        (lambda text: text.replace('"notes"', '"extra"'), ConfigError, "has the keys .*extra.*; a trace has"),
        (lambda text: text.replace("2.25", "NaN"), ConfigError, "NaN is no JSON value"),
        (lambda text: text.replace("2.25", "0.25"), RequestError, r"t.json: arrival_times must not decrease"),
        (
            lambda text: text.replace("[3, 1, 4]", '"abc"'),
            RequestError,
            "t.json: prompt_lens must be one number",
        ),
        (
            lambda text: text.replace('"seed": 1', '"seed": null'),
            ConfigError,
            "t.json: seed must be an integer",
        ),
        (lambda text: text.replace('"notes": []', '"notes": 3'), ConfigError, "t.json: notes must be"),
        (lambda text: text.replace('_texts": null', '_texts": 3'), RequestError, "t.json: prompt_texts must"),
    ],
)
def test_broken_files_are_refused(tmp_path, change, error, message):
    path = tmp_path / "t.json"
    make().save(path)
    write(path, change(path.read_text()))
    with pytest.raises(error, match=message):
        Trace.load(path)


def test_an_absent_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the trace '.*absent.json' \(No such file"):
        Trace.load(tmp_path / "absent.json")


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
    make(arrival_times=[1, 1.5, 3]).save(tmp_path / "t.json")
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


# Data-set files

ROWS = [{"text": "one", "n": 1, "other": 0}, {"text": "one two", "n": 7}, {"text": "a b c", "n": 3}]


def write_json(path, rows):
    return write(path, json.dumps(rows))


def write_jsonl(path, rows):
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path, rows):
    pyarrow = pytest.importorskip("pyarrow", exc_type=ImportError)
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return path


WRITERS = {"json": write_json, "jsonl": write_jsonl, "parquet": write_parquet}


@pytest.mark.parametrize("suffix", WRITERS)
def test_texts_are_counted_by_the_tokenizer(tmp_path, suffix):
    path = WRITERS[suffix](tmp_path / f"d.{suffix}", ROWS)
    dataset = load_dataset_file(path, "text", WordTokenizer())
    assert dataset.prompt_lens.tolist() == [1, 2, 3]
    assert dataset.prompt_token_ids == ((3,), (3, 3), (1, 1, 1))
    assert dataset.prompt_texts is None
    assert (dataset.name, dataset.num_skipped, dataset.notes) == ("d", 0, ())
    assert dataset.source == f"d.{suffix}, column 'text'"


def test_a_real_tokenizers_ids_are_the_engines(tmp_path):
    tokenizer = load_tokenizer(ROOT / "jaxllm" / "demo_model")
    texts = ["Once upon a time", "größer \N{SNOWMAN}"]
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": text} for text in texts])
    dataset = load_dataset_file(path, "text", tokenizer)
    assert dataset.prompt_token_ids == tuple(tuple(encode(tokenizer, text)) for text in texts)
    assert dataset.prompt_lens.tolist() == [len(ids) for ids in dataset.prompt_token_ids]


@pytest.mark.parametrize("suffix", WRITERS)
def test_lengths_can_be_given(tmp_path, suffix):
    path = WRITERS[suffix](tmp_path / f"d.{suffix}", ROWS)
    dataset = load_dataset_file(path, "text", length_column="n", limit=2, name="mine")
    assert dataset.prompt_lens.tolist() == [1, 7]
    assert dataset.prompt_texts == ("one", "one two")
    assert (dataset.prompt_token_ids, dataset.name) == (None, "mine")
    alone = load_dataset_file(path, None, length_column="n")
    assert (alone.prompt_lens.tolist(), alone.prompt_texts) == ([1, 7, 3], None)
    assert alone.source == f"d.{suffix}, column 'n'"


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"text": None}, "column 'text' must hold text, got None"),
        ({"text": " \n"}, "column 'text' is empty"),
        ({"text": ""}, "column 'text' is empty"),
        ({"text": "a b c d e"}, "the prompt has 5 tokens, not 1 to max_prompt_len=4"),
    ],
)
def test_bad_rows_raise_or_are_counted(tmp_path, suffix, bad, message):
    path = WRITERS[suffix](tmp_path / f"d.{suffix}", [{"text": "a"}, bad, {"text": "b"}, bad])
    unit = "line" if suffix == "jsonl" else "row"
    with pytest.raises(
        RequestError, match=rf"d.{suffix}, {unit} 2: {message}. Repair it, or pass on_bad='skip'."
    ):
        load_dataset_file(path, "text", WordTokenizer(), max_prompt_len=4)
    dataset = load_dataset_file(path, "text", WordTokenizer(), max_prompt_len=4, on_bad="skip")
    assert dataset.prompt_token_ids == ((1,), (1,))
    assert dataset.num_skipped == 2
    assert [reason.split(", ", 1)[1] for reason in dataset.skipped] == [
        f"{unit} 2: {message}",
        f"{unit} 4: {message}",
    ]
    assert dataset.notes[0] == "skipped 2 rows"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', r"line 2: no valid JSON \("),
        (b"\n", "line 2: the line is empty"),
        (b'"a"', "line 2: must be a JSON object, not str"),
        (b'{"texts": "a", "n": 1}', "line 2: there is no column 'text'; the columns are 'texts', 'n'"),
        (b'{"text": ["a"]}', r"line 2: column 'text' must hold text, got \['a'\]"),
        (b'{"text": NaN}', "line 2: no valid JSON .NaN is no JSON value"),
        (b'{"text": "\xff"}', "line 2: byte 10 is no UTF-8"),
        (b'{"text": "\\ud800"}', "line 2: column 'text' holds a lone surrogate at character 0"),
        (b"[" * 100_000, "line 2: no valid JSON"),
    ],
)
def test_bad_lines(tmp_path, line, message):
    path = tmp_path / "d.ndjson"
    path.write_bytes('\ufeff{"text": "a"}\r\n'.encode() + line.rstrip(b"\n") + b"\n")
    with pytest.raises(RequestError, match=message):
        load_dataset_file(path, "text", WordTokenizer())
    dataset = load_dataset_file(path, "text", WordTokenizer(), on_bad="skip")
    assert (len(dataset), dataset.num_skipped) == (1, 1)


@pytest.mark.parametrize("value", [0, -1, 2**24 + 1, 1.5, "3", None, True])
def test_bad_lengths(tmp_path, value):
    path = write_json(tmp_path / "d.json", [{"n": value}])
    with pytest.raises(RequestError, match=r"d.json, row 1: column 'n' must (lie in|be an integer)"):
        load_dataset_file(path, None, length_column="n")


def test_only_the_first_reasons_are_kept(tmp_path):
    path = write_json(tmp_path / "d.json", [{"text": ""}] * 50 + [{"text": "a"}])
    dataset = load_dataset_file(path, "text", WordTokenizer(), on_bad="skip")
    assert (dataset.num_skipped, len(dataset.skipped)) == (50, 10)


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("d.json", '{"text": "a"}', ConfigError, "must be a JSON array of objects, not dict"),
        ("d.json", '{"text": "a"}\n{"text": "b"}', ConfigError, "no valid JSON .* pass file_format='jsonl'"),
        ("d.json", "[", ConfigError, r"no valid JSON \(Expecting value: .*\)\.$"),
        ("d.json", "[]", RequestError, "there is no usable row. Give at least one"),
        ("d.jsonl", "", RequestError, "there is no usable row"),
        ("d.txt", "", ConfigError, "the suffix '.txt' does not tell the format; pass file_format="),
    ],
)
def test_unusable_files(tmp_path, name, content, error, message):
    path = write(tmp_path / name, content)
    with pytest.raises(error, match=message):
        load_dataset_file(path, "text", WordTokenizer())


def test_a_column_no_row_has(tmp_path):
    path = write_json(tmp_path / "d.json", [{"a": 1}, {"b": 1}])
    message = "no usable row; 2 were skipped, the first because of .* no column 'text'; the columns are 'a'"
    with pytest.raises(RequestError, match=message):
        load_dataset_file(path, "text", WordTokenizer(), on_bad="skip")


def test_file_format_overrides_the_suffix(tmp_path):
    path = write_jsonl(tmp_path / "d.json", ROWS)
    assert len(load_dataset_file(path, "text", WordTokenizer(), file_format="jsonl")) == 3
    with pytest.raises(ConfigError, match="file_format='csv' is unknown; choose from json, jsonl, parquet"):
        load_dataset_file(path, "text", WordTokenizer(), file_format="csv")


@pytest.mark.parametrize("name", ["absent.json", "absent.jsonl"])
def test_absent_files(tmp_path, name):
    with pytest.raises(ConfigError, match=rf"cannot read '.*{name}' \(No such file"):
        load_dataset_file(tmp_path / name, "text", WordTokenizer())


def test_arguments_at_odds(tmp_path):
    path = write_json(tmp_path / "d.json", ROWS)
    with pytest.raises(ConfigError, match="give a tokenizer or a length_column, and not both"):
        load_dataset_file(path, "text")
    with pytest.raises(ConfigError, match="give a tokenizer or a length_column, and not both"):
        load_dataset_file(path, "text", WordTokenizer(), length_column="n")
    with pytest.raises(ConfigError, match="column must name the text"):
        load_dataset_file(path, None, WordTokenizer())
    with pytest.raises(ConfigError, match="on_bad='warn' is unknown; choose from raise, skip"):
        load_dataset_file(path, "text", WordTokenizer(), on_bad="warn")
    for name in ("limit", "max_prompt_len"):
        with pytest.raises(ConfigError, match=f"{name} must lie in"):
            load_dataset_file(path, "text", WordTokenizer(), **{name: 0})


def test_parquet_without_pyarrow_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"d.parquet: Parquet files need pyarrow; run: pip install pyarrow"):
        load_dataset_file(tmp_path / "d.parquet", "text", WordTokenizer())


def test_parquet_errors(tmp_path):
    path = write_parquet(tmp_path / "d.parquet", ROWS)
    with pytest.raises(ConfigError, match="there is no column 'txt'; the columns are 'text', 'n', 'other'"):
        load_dataset_file(path, "txt", WordTokenizer())
    with pytest.raises(ConfigError, match="no valid Parquet file"):
        load_dataset_file(write(tmp_path / "e.parquet", "text"), "text", WordTokenizer())
    with pytest.raises(ConfigError, match=r"cannot read '.*absent.parquet'"):
        load_dataset_file(tmp_path / "absent.parquet", "text", WordTokenizer())


# Public traces

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:50.9951690,396,109\r
2023-11-16 18:15:50.9951691,879,55\r
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,276,693,API log
"""
BURSTGPT_SESSIONS = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Log Type
7.5,,1.25,GPT-4,10,20,API log
7.75,"a, b",2,GPT-4,11.0,21,Conversation log
"""


def test_azure_traces_are_recognised(tmp_path):
    trace = load_trace_csv(write(tmp_path / "azure.csv", AZURE), seed=4)
    assert trace.arrival_times.tolist() == [0, 4.314579, 4.3145791]
    assert trace.prompt_lens.tolist() == [374, 396, 879]
    assert trace.output_lens.tolist() == [44, 109, 55]
    assert (trace.name, trace.seed) == ("azure", 4)
    assert trace.notes == ("from azure.csv, columns TIMESTAMP, ContextTokens, GeneratedTokens",)
    assert len(trace.token_ids(2, 100)) == 879


def test_azure_dates_with_offsets(tmp_path):
    rows = "2024-05-10 00:00:00.009930+00:00,1,2\n2024-05-10 02:00:00+02:00,3,4\n2024-05-10T00:00:01Z,5,6\n"
    trace = load_trace_csv(write(tmp_path / "a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows))
    assert trace.arrival_times.tolist() == [0, 0.00993, 1]
    assert trace.prompt_lens.tolist() == [3, 1, 5]
    assert trace.notes[1:] == ("sorted by arrival: 2 rows changed place",)


def test_burstgpt_is_recognised(tmp_path):
    trace = load_trace_csv(write(tmp_path / "b.csv", BURSTGPT), name="burst", limit=2)
    assert trace.arrival_times.tolist() == [0, 40]
    assert (trace.prompt_lens.tolist(), trace.output_lens.tolist()) == ([472, 1087], [18, 230])
    assert trace.name == "burst"
    sessions = load_trace_csv(write(tmp_path / "c.csv", "\ufeff" + BURSTGPT_SESSIONS))
    assert sessions.arrival_times.tolist() == [0, 0.25]
    assert (sessions.prompt_lens.tolist(), sessions.output_lens.tolist()) == ([10, 11], [20, 21])


def test_columns_can_be_named(tmp_path):
    path = write(tmp_path / "t.csv", "in,when,out\n5,1.5,6\n7,0.5,8\n")
    trace = load_trace_csv(path, arrival_column="when", input_column="in", output_column="out")
    assert trace.arrival_times.tolist() == [0, 1]
    assert (trace.prompt_lens.tolist(), trace.output_lens.tolist()) == ([7, 5], [8, 6])
    with pytest.raises(
        ConfigError, match=r"is none of the known traces .*BurstGPT.*; pass output_column=; the col"
    ):
        load_trace_csv(path, arrival_column="when", input_column="in")
    with pytest.raises(
        ConfigError, match=r"no column 'at' .arrival_column.; the columns are 'in', 'when', 'out'"
    ):
        load_trace_csv(path, arrival_column="at", input_column="in", output_column="out")
    total = load_trace_csv(write(tmp_path / "b.csv", BURSTGPT), output_column="Total tokens")
    assert total.output_lens.tolist() == [490, 1317, 693]


@given(
    st.lists(
        st.tuples(st.integers(0, 10**15), st.integers(1, 99), st.integers(1, 99)), min_size=1, max_size=30
    )
)
def test_any_order_gives_the_sorted_trace(tmp_path_factory, rows):
    """Nanoseconds written as seconds; the oracle is Python's stable sort."""
    lines = [f"{time // 10**9}.{time % 10**9:09},{prompt},{output}\n" for time, prompt, output in rows]
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines)
    trace = load_trace_csv(write(tmp_path_factory.mktemp("csv") / "t.csv", text))
    expected = sorted(rows, key=lambda row: row[0])
    assert trace.arrival_times.tolist() == [(row[0] - expected[0][0]) / 10**9 for row in expected]
    assert trace.prompt_lens.tolist() == [row[1] for row in expected]
    assert trace.output_lens.tolist() == [row[2] for row in expected]


def test_rows_of_no_tokens(tmp_path):
    path = write(tmp_path / "b.csv", BURSTGPT + "1,GPT-4,0,0,0,API log\n130,GPT-4,9,0,9,API log\n")
    with pytest.raises(RequestError, match=r"b.csv, line 5: column 'Request tokens' is 0, .* on_zero='skip'"):
        load_trace_csv(path)
    with pytest.raises(RequestError, match="column 'Request tokens' is 0"):
        load_trace_csv(path, on_bad="skip")  # a different question
    skipped = load_trace_csv(path, on_zero="skip")
    assert skipped.arrival_times.tolist() == [0, 40, 113]
    assert skipped.notes[1:] == ("skipped 2 rows without input or output tokens",)
    ones = load_trace_csv(path, on_zero="one")
    assert ones.arrival_times.tolist() == [0, 4, 44, 117, 129]
    assert (ones.prompt_lens.tolist()[::4], ones.output_lens.tolist()[::4]) == ([1, 9], [1, 1])
    assert ones.notes[1:] == (
        "counted 0 tokens as 1 in 2 rows without input or output tokens",
        "sorted by arrival: 4 rows changed place",
    )
    nothing = write(tmp_path / "n.csv", "Timestamp,Request tokens,Response tokens\n1,0,0\n")
    with pytest.raises(
        RequestError, match=r"n.csv \(1 rows without tokens were skipped\): there is no usable row"
    ):
        load_trace_csv(nothing, on_zero="skip")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("soon,1,1", "column 'Timestamp' holds 'soon': must be a date like .*, or seconds"),
        ("nan,1,1", "column 'Timestamp' holds 'nan'"),
        ("1e13,1,1", "column 'Timestamp' holds '1e13': .* up to 1e12"),
        ("1e999,1,1", "column 'Timestamp' holds '1e999'"),
        ("1e9999999,1,1", "column 'Timestamp' holds '1e9999999'"),
        ("2023-13-01 00:00:00,1,1", "column 'Timestamp' holds '2023-13-01 00:00:00', which is no date"),
        ("2023-11-01 00:00:00,1,1", "column 'Timestamp' mixes dates and seconds"),
        ("3,,1", "column 'Request tokens' holds '': must be an integer in 0..16777216"),
        ("3,-1,1", "column 'Request tokens' holds '-1'"),
        ("3,1.5,1", "column 'Request tokens' holds '1.5'"),
        ("3,1,16777217", "column 'Response tokens' holds '16777217'"),
        ("3,1", "has 2 cells; the header has 3 columns"),
        ("", "has 0 cells; the header has 3 columns"),
    ],
)
def test_bad_csv_rows(tmp_path, row, message):
    text = f"Timestamp,Request tokens,Response tokens\n1,2,3\n{row}\n5,4,3\n"
    path = write(tmp_path / "t.csv", text)
    with pytest.raises(RequestError, match=f"t.csv, line 3: {message}"):
        load_trace_csv(path)
    trace = load_trace_csv(path, on_bad="skip")
    assert trace.arrival_times.tolist() == [0, 4]
    assert trace.notes[1] == "skipped 1 bad rows"
    assert "line 3" in trace.notes[2]


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", ConfigError, "has no header"),
        (b"Timestamp,Request tokens,Response tokens\n", RequestError, "there is no usable row"),
        (
            b"a,b\n1,2\n",
            ConfigError,
            "none of the known traces .* pass arrival_column=; the columns are 'a', 'b'",
        ),
        (BURSTGPT.replace("Model", "Timestamp").encode(), ConfigError, "there are 2 columns 'Timestamp'"),
        (BURSTGPT.encode() + b"\xff\n", ConfigError, "no valid UTF-8"),
        (BURSTGPT.encode() + b'1,"a"b,1,1,1,x\n', ConfigError, "line 5: no valid CSV"),
        (BURSTGPT.encode() + b"4e9,a,1,1,1,x\n", RequestError, r"arrival_times\[3\] must lie in"),
    ],
)
def test_unusable_csv_files(tmp_path, content, error, message):
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(error, match=message):
        load_trace_csv(path)


def test_csv_arguments(tmp_path):
    path = write(tmp_path / "b.csv", BURSTGPT)
    with pytest.raises(ConfigError, match="on_zero='drop' is unknown; choose from raise, skip, one"):
        load_trace_csv(path, on_zero="drop")
    with pytest.raises(ConfigError, match="on_bad='drop' is unknown"):
        load_trace_csv(path, on_bad="drop")
    with pytest.raises(ConfigError, match="limit must lie in"):
        load_trace_csv(path, limit=0)
    with pytest.raises(ConfigError, match=r"cannot read '.*absent.csv' \(No such file"):
        load_trace_csv(tmp_path / "absent.csv")


def test_workloads_import_no_accelerator_library():
    code = (
        "import sys, jaxllm.workloads\n"
        "assert not {'jax', 'flax', 'transformers', 'pyarrow'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
