"""Traces: what they hold, and how they are kept on disk."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.errors import ConfigError, RequestError
from jaxllm.research.workloads import ClosedLoop, Feed, Poisson, Trace, load_conversations, make_conversations

ROOT = Path(__file__).parents[2]
SEEDS = st.integers(0, 2**63 - 1)


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def make(**changes):
    fields = {"name": "t", "seed": 1, "arrival_times": [0, 0.5, 2.25], "prompt_lens": [3, 1, 4]}
    return Trace(**(fields | {"output_lens": [1, 5, 9]} | changes))


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
    for count, message in ((0, r" must lie in \[1, "), (4, "=4: trace 't' has 3 requests; ask for as many")):
        with pytest.raises(ConfigError, match=f"num_requests{message}"):
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
        make(name="new").save(path, overwrite=True)
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
            lambda text: text.replace('"version": 4', '"version": 5'),
            ConfigError,
            "version 5; .* reads 1 to 4",
        ),
        (
            lambda text: text.replace('"version": 4', '"version": [4]'),
            ConfigError,
            r"version \[4\]; .* reads 1 to 4",
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


def test_workloads_import_no_accelerator_library():
    code = (
        "import sys, jaxllm.research.workloads\n"
        "assert not {'jax', 'flax', 'transformers', 'pyarrow'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# Conversations


def test_conversations_follow_one_another_and_grow():
    trace = make_conversations(30, common_len=8, max_len=1000, arrivals=Poisson(2.0), seed=3)
    assert trace == make_conversations(30, common_len=8, max_len=1000, arrivals=Poisson(2.0), seed=3)
    lengths = trace.prompt_lens + trace.output_lens
    assert lengths.max() <= 1000
    num_later = 0
    for index, before in enumerate(trace.follows.tolist()):
        if before < 0:
            assert trace.common_lens[index] == 8
            assert trace.think_times[index] == 0
            continue
        num_later += 1
        assert before == index - 1
        assert trace.prompt_lens[index] > lengths[before]
        assert trace.arrival_times[index] == trace.arrival_times[before]
    assert num_later > 30


def test_pauses_of_tools_have_a_heavy_tail():
    """Of the same mean: most are short, and a few are very long."""
    drawn = {}
    for sigma in (None, 1.6):
        trace = make_conversations(4000, mean_turns=12, mean_think=5.0, think_sigma=sigma, max_len=30_000)
        drawn[sigma] = trace.think_times[trace.follows >= 0]
        assert drawn[sigma].mean() == pytest.approx(5.0, rel=0.1)
    law = "lognormal, sigma 1.6, mean 5.0 s"
    assert f"think: {law}" in trace.notes
    assert np.median(drawn[1.6]) == pytest.approx(5 * np.exp(-(1.6**2) / 2), rel=0.05)
    assert np.quantile(drawn[1.6], 0.999) > 3 * np.quantile(drawn[None], 0.999)
    even = make_conversations(9, mean_think=5.0, think_sigma=0, seed=2)
    np.testing.assert_array_equal(even.think_times, np.where(even.follows >= 0, 5.0, 0.0))


@pytest.mark.parametrize("sigma", [-0.1, 5.1, float("nan"), "wide"])
def test_a_spread_of_pauses_that_cannot_be_is_refused(sigma):
    with pytest.raises(ConfigError, match="think_sigma"):
        make_conversations(2, think_sigma=sigma)


def test_a_turn_begins_with_what_was_said():
    trace = make_conversations(9, common_len=8, seed=1)
    firsts = [index for index in range(len(trace)) if trace.followed(index) < 0]
    prompts = [trace.token_ids(index, 100) for index in firsts]
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)
    later = next(index for index in range(len(trace)) if trace.followed(index) >= 0)
    said = list(range(int(trace.prompt_lens[later - 1] + trace.output_lens[later - 1])))
    prompt = trace.token_ids(later, 100_000, said)
    assert prompt[: len(said)] == said
    assert len(prompt) == trace.prompt_lens[later]
    with pytest.raises(ConfigError, match="goes on after"):
        trace.token_ids(later, 100)


def test_conversations_are_kept_on_disk(tmp_path):
    trace = make_conversations(5, common_len=4, seed=2)
    trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == trace
    assert trace.head(2) == Trace.load(tmp_path / "trace.json").head(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"follows": [-1, 1]}, r"follows\[1\]=1 must be -1 or a request before it"),
        ({"follows": [-2, 0]}, r"follows\[0\]=-2"),
        ({"follows": [-1, 0], "prompt_lens": [5, 8]}, r"prompt_lens\[1\]=8 must be above the 8 tokens"),
        ({"common_lens": [5, 0]}, r"prompt_lens\[0\]=5 must be above the 5 tokens"),
        ({"follows": [-1, 0.5]}, "must hold integers"),
    ],
)
def test_what_follows_nothing_is_refused(changes, message):
    values = {"prompt_lens": [5, 20], "output_lens": [3, 3], "arrival_times": [0.0, 0.0]} | changes
    with pytest.raises(RequestError, match=message):
        Trace(name="x", seed=0, **values)


def test_conversations_are_no_closed_loop():
    values = {"prompt_lens": [5, 20], "output_lens": [3, 3], "arrival_times": [0.0, 0.0], "follows": [-1, 0]}
    with pytest.raises(ConfigError, match="clients or conversations"):
        Trace(name="x", seed=0, num_clients=2, **values)
    with pytest.raises(ConfigError, match="makes up"):
        Trace(name="x", seed=0, prompt_texts=["a", "b"], **values)
    with pytest.raises(ConfigError, match="must say when conversations begin"):
        make_conversations(2, arrivals=ClosedLoop(3))


def test_a_feed_waits_for_answers_and_thinks():
    values = {"prompt_lens": [5, 20, 7], "output_lens": [3, 3, 3], "arrival_times": [0.0, 0.0, 4.0]}
    trace = Trace(name="x", seed=0, follows=[-1, 0, -1], think_times=[0.0, 2.5, 0.0], **values)
    feed = Feed(trace, 10.0)
    assert feed.send(10.0) == (0, 10.0)
    assert feed.send(13.0) is None
    feed.answered(13.0, 0)
    assert feed.next_due == 14.0
    assert [feed.send(20.0), feed.send(20.0)] == [(2, 14.0), (1, 15.5)]
    assert feed.is_over


class Words:
    """A tokenizer by words."""

    bos_token_id = None

    def encode(self, text, add_special_tokens, verbose):
        assert not add_special_tokens
        return text.split()


def shared(*messages):
    """As ShareGPT has them."""
    return {"conversations": [{"from": speaker, "value": text} for speaker, text in messages]}


def write_rows(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_recorded_conversations_keep_their_turns_and_lengths(tmp_path):
    rows = [
        shared(
            ("gpt", "I begin"),
            ("human", "a b c"),
            ("gpt", "d e"),
            ("human", "f"),
            ("human", "g h"),
            ("gpt", "i"),
        ),
        {
            "messages": [
                {"role": role, "content": text} for role, text in (("system", "be good"), ("user", "a"))
            ]
        },
        {
            "id": 3,
            "conversation": [
                {"role": "system", "content": "be good"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b c"},
                {"role": "assistant", "content": "d"},
                {"role": "user", "content": "never answered"},
            ],
        },
    ]
    path = write_rows(tmp_path / "chats.jsonl", rows)
    settings = {"common_len": 5, "mean_think": 3.0, "arrivals": Poisson(1.0), "on_bad": "skip"}
    trace = load_conversations(path, Words(), **settings)
    assert trace.prompt_lens.tolist() == [5 + 3, 5 + 3 + 2 + 3, 5 + 3]
    assert trace.output_lens.tolist() == [2, 1, 3]
    assert trace.follows.tolist() == [-1, 0, -1]
    assert trace.think_times[1] > 0 == trace.think_times[0]
    assert trace.name == "chats"
    assert "skipped 1 rows" in trace.notes
    assert any("no message of a user is answered" in note for note in trace.notes)
    with pytest.raises(RequestError, match=r"line 2: no message of a user is answered\. Repair it"):
        load_conversations(path, Words())
    assert len(load_conversations(path, Words(), limit=1)) == 2
    assert len(load_conversations(path, Words(), limit=1, max_len=8)) == 1


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"text": "a"},
            "there is no column 'conversations' or 'conversation' or 'messages'",
        ),
        ({"messages": "a"}, "column 'messages' must hold a list of messages"),
        ({"messages": ["a"]}, "a message must be an object, not str"),
        (shared(("dog", "wow")), "not str of 'dog'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "not list of 'user'"),
        ([], "must be a JSON object, not list"),
    ],
)
def test_a_conversation_that_is_none_is_named(tmp_path, row, problem):
    path = write_rows(tmp_path / "chats.jsonl", [row])
    with pytest.raises(RequestError, match=problem):
        load_conversations(path, Words())
    with pytest.raises(RequestError, match="there is no usable row; 1 were skipped"):
        load_conversations(path, Words(), on_bad="skip")
