"""Files of prompts are what their names say, and tables are never taken for their columns' names."""

import csv
import gzip
import json
import types

import pyarrow
import pytest
from pyarrow import parquet

from jaxllm import LLM, SamplingParams
from jaxllm.cli.main import main
from jaxllm.errors import ConfigError, JaxllmError, RequestError
from jaxllm.jobs.prompt_files import read_prompts

PARAMS = SamplingParams(max_tokens=2)
ROWS = [
    {"prompt": "one, two\nthree", "id": "a", "topic": "x"},
    {"prompt": "é", "id": "b", "topic": "y"},
]


def write(path, rows=ROWS):
    """The rows in the form that a name asks for."""
    name = path.name.lower().removesuffix(".gz")
    if name.endswith("csv"):
        lines = []
        writer = csv.writer(types.SimpleNamespace(write=lines.append))
        writer.writerow(rows[0])
        writer.writerows(row.values() for row in rows)
        data = "".join(lines).encode()
    elif name.endswith("parquet"):
        sink = pyarrow.BufferOutputStream()
        parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
        data = sink.getvalue().to_pybytes()
    else:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.name.lower().endswith(".gz") else data)
    return str(path)


@pytest.mark.parametrize("suffix", ["csv", "CSV", "parquet", "csv.gz", "parquet.gz", "jsonl", "P.NDJSON.GZ"])
def test_tables_are_read_with_the_columns_that_go_with_them(tmp_path, suffix):
    column = "prompt" if "json" in suffix.lower() else None
    rows = read_prompts(write(tmp_path / f"p.{suffix}"), PARAMS, column)
    assert [(row.prompt, row.id, row.extras) for row in rows] == [
        ("one, two\nthree", "a", {"topic": "x"}),
        ("é", "b", {"topic": "y"}),
    ]


@pytest.mark.parametrize("name", ["p.ndjson", "P.JSONL", "p.Jsonl.gz", "p.ndjson.gz"])
def test_json_lines_by_any_name(tmp_path, name):
    path = write(tmp_path / name, [{"prompt": "a"}, {"prompt_token_ids": [1]}, {"promt": "b"}])
    first, second, third = read_prompts(path, PARAMS)
    assert (first.prompt, second.prompt_token_ids) == ("a", (1,))
    assert f'{name}, line 3: unknown key "promt"' in str(third.error)


@pytest.mark.parametrize("name", ["p", "p.txt", "P.TXT", "p.txt.gz", "p.gz"])
def test_text_is_txt_or_has_no_suffix(tmp_path, name):
    data = b"\xef\xbb\xbfa\n\n\xff\nb\r\n"
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    rows = read_prompts(str(tmp_path / name), PARAMS)
    assert [row.prompt for row in rows] == ["a", None, None, "b"]
    assert "line 2: the line is empty" in str(rows[1].error)
    assert "line 3: byte 0 is no UTF-8" in str(rows[2].error)
    with pytest.raises(ConfigError, match="--column"):
        read_prompts(str(tmp_path / name), PARAMS, "prompt")


@pytest.mark.parametrize("name", ["arr.json", "p.tsv", "p.xlsx", "p.json.gz", "p.txt.bz2", "p.md"])
def test_anything_else_is_refused_by_name(tmp_path, name, capsys):
    (tmp_path / name).write_text('["a"]\n')
    assert main(["generate", "--input", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert name in error
    assert ".jsonl" in error
    assert ("jq" in error) == (".json" in name)


def test_another_column_holds_the_prompts(tmp_path):
    rows = [{"question": "a", "n": 1}, {"question": None, "n": 2}, {"question": "b", "n": None}]
    for name in ("p.parquet", "p.jsonl"):
        first, second, third = read_prompts(write(tmp_path / name, rows), PARAMS, "question")
        assert (first.prompt, first.extras) == ("a", {"n": 1})
        assert '"prompt" must be a non-empty string' in str(second.error)
        assert second.extras == {"n": 2}
        assert (third.prompt, third.extras) == ("b", {"n": None})
    with pytest.raises(ConfigError, match=r"no column 'prompt'.*--column: question, n"):
        read_prompts(str(tmp_path / "p.parquet"), PARAMS)
    with pytest.raises(ConfigError, match="no column 'answer'"):
        read_prompts(str(tmp_path / "p.parquet"), PARAMS, "answer")


def test_columns_that_answers_have_are_refused(tmp_path):
    path = write(tmp_path / "p.csv", [{"prompt": "a", "text": "b"}])
    with pytest.raises(ConfigError, match="columns text, as answers do"):
        read_prompts(path, PARAMS)


def test_bad_rows_of_a_csv_file_are_named(tmp_path):
    path = tmp_path / "p.csv"
    path.write_bytes(b'prompt,n\n"a\nb",1\nc,2,3\n\xff,4\n,5\n' + b"x" * 200_000 + b',6\n"d"e,7\n')
    rows = read_prompts(str(path), PARAMS)
    assert [row.prompt and row.prompt[:3] for row in rows] == ["a\nb", None, None, None, "xxx", None]
    assert "p.csv, line 4: has 3 values, and there are 2 columns" in str(rows[1].error)
    assert "p.csv, line 5: no UTF-8" in str(rows[2].error)
    assert "p.csv, line 6: " in str(rows[3].error)
    assert "p.csv, line 8: no valid CSV" in str(rows[5].error)


@pytest.mark.parametrize("name", ["p.csv", "p.parquet", "p.csv.gz", "p.parquet.gz", "p.gz", "p.jsonl.gz"])
@pytest.mark.parametrize("content", [b"", b"\x1f\x8b\x08\x00broken", b"PAR1broken"])
def test_broken_files_are_errors_in_words(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(JaxllmError, match=name):
        read_prompts(str(tmp_path / name), PARAMS)


def test_other_columns_reach_the_output(tmp_path):
    path, target = write(tmp_path / "p.csv", [*ROWS, {"prompt": "", "id": "c", "topic": "z"}]), tmp_path / "o"
    assert main(["generate", "--input", path, "--output", str(target), "--max-tokens=2", "-q"]) == 0
    lines = {line["index"]: line for line in map(json.loads, target.read_text().splitlines())}
    assert [lines[place]["topic"] for place in range(3)] == ["x", "y", "z"]
    assert [lines[place]["id"] for place in range(2)] == ["a", "b"]
    assert lines[0]["prompt"] == "one, two\nthree"
    assert "line 5" in lines[2]["error"]


class Frame:
    """What pandas' DataFrame has of these, whose iteration gives the names of columns."""

    columns = ("prompt", "topic")

    def __iter__(self):
        return iter(self.columns)


class PolarsFrame(Frame):
    get_column = None


@pytest.mark.parametrize(
    ("table", "way_out"),
    [
        (Frame(), 'df["prompt"].tolist()'),
        (PolarsFrame(), 'df["prompt"].to_list()'),
        (pyarrow.table({"prompt": ["a"]}), 'table["prompt"].to_pylist()'),
        (pyarrow.array(["a"]), "to_pylist()"),
        ({"prompt": ["a", "b"]}, 'list(columns["prompt"])'),
    ],
)
def test_tables_are_refused_with_the_way_out(table, way_out):
    with LLM(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32) as llm:
        for call in (llm.generate, llm.stream):
            with pytest.raises(RequestError) as caught:
                call(table, PARAMS)
            assert way_out in str(caught.value)


def test_what_is_wrong_with_a_row_keeps_its_id_and_says_how_far_it_goes(tmp_path):
    rows = [
        {"prompt": "x", "id": "r1", "zzz": 1},
        {"id": 2, "prompt": "y", "sampling_params": {"max_tokens": -1}},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "nothing\n")
    found = read_prompts(str(path), PARAMS)
    assert [row.id for row in found] == ["r1", 2, None]
    assert all(row.error for row in found)
    path = tmp_path / "p.csv"
    path.write_text('prompt,id\n"two\nlines"x,1\ny,2\n')
    bad, good = read_prompts(str(path), PARAMS)
    assert "line 2 to 3: no valid CSV" in str(bad.error)
    assert good.prompt == "y"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('prompt,id\n"unclosed\nx,1\ny,2\n', 2),
        ('prompt,id\nx,1\n"two ""\nlines","unclosed\ny,2', 4),
        ('prompt,id\r\n"two\r\nlines\r\n","', 4),
        ('prompt,id\nx,"\n', 2),
        ('prompt,"id\nx,1\n', 1),
    ],
)
def test_a_quote_that_never_ends_is_refused_by_the_line_where_it_begins(tmp_path, text, line):
    path = tmp_path / "p.csv"
    path.write_bytes(text.encode())
    with pytest.raises(ConfigError, match=rf"p\.csv, line {line}: a quote begins that never ends"):
        read_prompts(str(path), PARAMS)


def test_a_row_that_nests_too_deep_is_that_rows_error(tmp_path):
    deep = '{"prompt": "b", "x": ' + "[" * 2000 + "]" * 2000 + "}"
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "a"}}\n{deep}\n{"[" * 100_000}\n{{"prompt": "c"}}\n')
    rows = read_prompts(str(tmp_path / "p.jsonl"), PARAMS)
    assert [row.error is None for row in rows] == [True, False, False, True]
    assert "nested too deep" in str(rows[1].error)


def test_bad_rows_keep_their_id_in_whatever_column(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"uid": 9}\n{"uid": 8, "q": "a"}\n')
    rows = read_prompts(str(tmp_path / "p.jsonl"), PARAMS, "q", id_column="uid")
    assert [(row.id, row.error is None) for row in rows] == [(9, False), (8, True)]


def test_blank_lines_of_a_csv_file_are_no_rows_and_empty_ids_are_none(tmp_path):
    (tmp_path / "p.csv").write_text("\n\nid,prompt\n,a\n\n,b\nx,c\n\n")
    rows = read_prompts(str(tmp_path / "p.csv"), PARAMS)
    assert [(row.id, row.prompt, row.error) for row in rows] == [
        (None, "a", None),
        (None, "b", None),
        ("x", "c", None),
    ]
    (tmp_path / "p.csv").write_text("\nq\na\n")
    with pytest.raises(ConfigError, match="there is no column 'prompt'"):
        read_prompts(str(tmp_path / "p.csv"), PARAMS)
