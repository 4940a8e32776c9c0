"""Public trace files: columns, clocks, and rows that cannot be used."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.errors import ConfigError, RequestError
from jaxllm.research.workloads import (
    load_trace_csv,
)


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


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
        ConfigError,
        match=r"is none of the known traces .*BurstGPT.*, or pass output_column= in Python; the col",
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
            "none of the known traces .* or pass arrival_column= in Python; the columns are 'a', 'b'",
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
