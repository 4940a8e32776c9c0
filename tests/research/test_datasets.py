"""Prompts from JSON, JSON Lines and parquet files."""

import json
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from jaxllm.errors import ConfigError, RequestError
from jaxllm.research.workloads import (
    load_dataset_file,
)
from jaxllm.text.tokenizer import encode, load_tokenizer

ROOT = Path(__file__).parents[2]


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


class WordTokenizer:
    """One token a word, and the part of transformers' interface that `jaxllm.text.tokenizer.encode` uses."""

    bos_token_id = None

    def encode(self, text, **options):
        return [len(word) for word in text.split()]


ROWS = [{"text": "one", "n": 1, "other": 0}, {"text": "one two", "n": 7}, {"text": "a b c", "n": 3}]


def write_json(path, rows):
    return write(path, json.dumps(rows))


def write_jsonl(path, rows):
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path, rows):
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
        (
            "d.txt",
            "",
            ConfigError,
            "the suffix '.txt' does not tell the format: .* or pass file_format=",
        ),
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
    with pytest.raises(ConfigError, match="tokenizer=5 must be a tokenizer"):
        load_dataset_file(path, "text", 5)
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
