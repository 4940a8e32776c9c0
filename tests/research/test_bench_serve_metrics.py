"""The load generator's arithmetic: streams taken apart, and figures of answers made by hand."""

import json
import math

import pytest
from fake_openai import DONE, chat_words, words
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.errors import ConfigError
from jaxllm.research.bench.serving.answers import Answer, AnswerStream
from jaxllm.research.bench.serving.metrics import Report, details, figures, latencies
from jaxllm.research.bench.serving.report import brief, rows, summary, table
from jaxllm.research.bench.serving.server_metrics import server_figures


def encoded(events, end="\n\n"):
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return "".join(f"data: {text}{end}" for text in texts).encode()


def read(*pieces, times=None):
    """The answer to a request of time 100, pieces of which came at these times."""
    answer = Answer(5, start_time=100.0)
    stream = AnswerStream(answer)
    for number, piece in enumerate(pieces):
        stream.feed(piece, 101.0 + number if times is None else times[number])
    stream.close()
    return answer


# Streams


def test_times_are_of_outputs_alone():
    first, second, third, usage, done = [encoded([event]) for event in words(3, prompt_len=9)]
    answer = read(first, second, third, usage, done, times=[100.5, 101.5, 104.0, 110.0, 111.0])
    assert answer.error == ""
    assert (answer.ttft, answer.itls, answer.latency) == (0.5, [1.0, 2.5], 4.0)
    assert (answer.prompt_len, answer.output_len, answer.has_usage) == (9, 3, True)
    assert answer.text == "w0 w1 w2 "
    assert answer.tpot == (4.0 - 0.5) / 2


def test_whose_turn_it_is_is_no_output():
    answer = read(*[encoded([event]) for event in chat_words(2)])
    assert (answer.ttft, answer.itls, answer.text) == (2.0, [1.0], "w0 w1 ")
    assert answer.output_len == 2


def test_outputs_that_come_together_share_the_time_since_the_one_before():
    events = [encoded([event]) for event in words(8)]
    pieces = [events[0] + events[1], events[2] + events[3] + events[4], events[5], events[6] + events[7]]
    answer = read(*pieces, *events[8:], times=[101.0, 104.0, 105.0, 106.0, 106.0, 106.0])
    assert answer.itls == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5]  # what came with the first has no time of its own
    assert (answer.output_len, answer.error) == (8, "")
    assert answer.latency == answer.ttft + sum(answer.itls)
    assert figures([answer], 6.0, Report())["median_itl_ms"] == 1000.0


def test_without_a_usage_all_outputs_count_whenever_they_come():
    events = [encoded([event]) for event in [*words(5)[:5], DONE]]
    assert read(b"".join(events[:3]), b"".join(events[3:])).output_len == 5


def test_outputs_without_text_count():
    events = [{"choices": [{"index": 0, "text": "", "token_ids": [one]}]} for one in (3, 4)]
    answer = read(*[encoded([event]) for event in (*events, DONE)])
    assert (answer.ttft, answer.itls, answer.text, answer.token_ids) == (1.0, [1.0], "", [3, 4])


def test_without_usage_chunks_are_counted():
    answer = read(encoded([*words(4)[:4], DONE]))
    assert (answer.output_len, answer.prompt_len, answer.has_usage) == (4, 5, False)


def test_a_usage_that_comes_with_each_chunk_is_the_last():
    events = words(2)[:2]
    for number, event in enumerate(events):
        event["usage"] = {"prompt_tokens": 3, "completion_tokens": number + 1}
    answer = read(encoded([*events, DONE]))
    assert (answer.output_len, answer.prompt_len) == (2, 3)


@given(st.data())
def test_bytes_may_be_cut_anywhere(data):
    whole = b": a comment\n\n" + encoded([*words(2), ""], data.draw(st.sampled_from(["\n\n", "\r\n\r\n"])))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    answer = read(*pieces)
    assert (answer.error, answer.text, answer.output_len) == ("", "w0 w1 ", 2)
    assert len(answer.itls) == (answer.latency > answer.ttft)  # none if both came at once
    assert answer.latency == pytest.approx(answer.ttft + sum(answer.itls))


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (words(3)[:2], "broke off"),
        ([], "broke off"),
        ([DONE], "no output"),
        ([words(1)[0], {"error": {"message": "out of luck"}}, DONE], "out of luck"),
        ([{"error": "a plain one"}], "a plain one"),
        (["{", *words(1)], "no JSON object: b'{'"),
        (["[]", *words(1)], "no JSON object: b'[]'"),
    ],
)
def test_what_a_stream_lacks_is_its_error(events, said):
    assert said in read(encoded(events)).error


def test_an_output_that_says_it_has_ended_is_whole():
    assert read(encoded(words(2)[:2])).error == ""


# Figures


def some_answers():
    """Two that succeeded, and a failure of each kind."""
    return [
        Answer(10, 0.0, 0.0, 0.1, [0.1, 0.3], 0.5, 3, "a", status=200, has_usage=True),
        Answer(20, 0.5, 1.0, 0.2, [], 0.2, 1, "b", status=200, has_usage=True),
        Answer(30, 1.0, 1.0, latency=0.05, status=503, error="status 503: too much"),
        Answer(40, 1.0, 1.0, 0.1, [0.1], 0.3, status=200, error="the stream broke off"),
        Answer(50, 1.0, 1.0, latency=0.2, error="the connection failed"),
    ]


REPORT = Report(percentiles=(90.0, 99.9), goodput={"ttft": 150.0})


def test_figures_are_those_computed_by_hand():
    found = figures(some_answers(), 2.0, REPORT)
    exact = {
        "duration": 2.0,
        "completed": 2,
        "failed": 3,
        "refused": 1,
        "failures": {"503": 1, "stream": 1, "connection": 1},
        "total_input_tokens": 30,
        "total_output_tokens": 4,
        "request_throughput": 1.0,
        "request_goodput": 0.5,
        "output_throughput": 2.0,
        "total_token_throughput": 17.0,
        "max_output_tokens_per_s": 3.0,
        "max_concurrent_requests": 1,
    }
    assert {key: found[key] for key in exact} == exact
    milliseconds = {
        "mean_ttft_ms": 150.0,
        "median_ttft_ms": 150.0,
        "std_ttft_ms": 50.0,
        "p90_ttft_ms": 190.0,
        "p99.9_ttft_ms": 199.9,
        "mean_tpot_ms": 200.0,
        "std_tpot_ms": 0.0,
        "mean_itl_ms": 200.0,
        "std_itl_ms": 100.0,
        "p90_itl_ms": 280.0,
        "mean_e2el_ms": 350.0,
        "p90_e2el_ms": 470.0,
        "mean_refusal_ms": 50.0,
        "p90_refusal_ms": 50.0,
        "mean_send_delay_ms": 125.0,  # of the four that had a response
    }
    assert {key: found[key] for key in milliseconds} == pytest.approx(milliseconds)


@pytest.mark.parametrize(
    ("bounds", "num_good"),
    [
        ({"ttft": 99.0}, 0),
        ({"ttft": 200.0}, 2),
        ({"tpot": 0.0}, 1),  # a single token has no time per further token
        ({"tpot": 200.1, "e2el": 300.0}, 1),
        ({"ttft": 150.0, "e2el": 300.0}, 0),
        ({"ttft": 200.0, "tpot": 250.0, "e2el": 500.0}, 2),
    ],
)
def test_goodput_counts_those_within_all_bounds(bounds, num_good):
    assert figures(some_answers(), 4.0, Report(goodput=bounds))["request_goodput"] == num_good / 4


def test_nothing_measured_is_null():
    found = figures(some_answers()[4:], 1.0, Report())
    assert found["completed"] == 0
    assert found["request_goodput"] is None
    assert {key for key, value in found.items() if value is None} == {"request_goodput"} | {
        f"{statistic}_{name}_ms"
        for statistic in ("mean", "median", "std", "p99")
        for name in ("ttft", "tpot", "itl", "e2el", "refusal", "send_delay")
    }
    json.dumps(found, allow_nan=False)


def test_only_what_is_asked_for_is_reported():
    found = figures(some_answers(), 1.0, Report(latencies=["itl"], percentiles=[50.0]))
    assert {key for key in found if key.endswith(("_ttft_ms", "_itl_ms"))} == {
        "mean_itl_ms",
        "median_itl_ms",
        "std_itl_ms",
        "p50_itl_ms",
    }


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=20))
def test_most_requests_at_once_are_those_of_counting(spans):
    answers = [Answer(1, start, start, end, [], end, 1, status=200) for start, end in spans]
    counted = max(sum(start <= time < start + end for start, end in spans) for time in range(41))
    assert figures(answers, 1.0, Report())["max_concurrent_requests"] == counted


def test_chunks_of_several_tokens_share_them():
    answer = Answer(1, 0.0, 10.0, 0.5, [0.25, 1.0], 1.75, 6, status=200)
    found = figures([answer], 1.0, Report())
    assert found["max_output_tokens_per_s"] == pytest.approx(4.0)  # two of three chunks in the first second
    assert latencies([answer])["tpot"] == [1.25 / 5]


def test_details_have_an_entry_for_each_request():
    found = details(some_answers())
    assert {len(values) for values in found.values()} == {5}
    assert found["output_lens"] == [3, 1, 0, 0, 0]
    assert found["queue_times"][:2] == [0.0, 0.5]
    assert found["errors"][0] == ""
    assert found["statuses"] == [200, 200, 503, 200, None]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"latencies": ["tttft"]}, "'tttft' is unknown"),
        ({"percentiles": [101.0]}, "101 must lie in"),
        ({"percentiles": [math.nan]}, "nan must lie in"),
        ({"goodput": {"itl": 5.0}}, "'itl' is unknown"),
        ({"goodput": {"ttft": -1.0}}, "ttft:-1 must be milliseconds"),
    ],
)
def test_a_report_of_something_else_is_refused(values, said):
    with pytest.raises(ConfigError, match=said):
        Report(**values)


# What a server counts


def test_the_servers_figures_are_differences():
    turnaround, preempted = "jaxllm:request_weighted_turnaround", "jaxllm:num_preemptions_total"
    before = {(f"{turnaround}_sum", ""): 10.0, (f"{turnaround}_count", ""): 4.0, (preempted, "swap"): 2.0}
    after = {
        (f"{turnaround}_sum", ""): 16.0,
        (f"{turnaround}_count", ""): 8.0,
        (preempted, "swap"): 5.0,
        (preempted, "recompute"): 1.0,
    }
    assert server_figures(before, after) == {
        "weighted_turnaround": 1.5,
        "num_preemptions": {"swap": 3, "recompute": 1},
    }
    nothing = {"weighted_turnaround": None, "num_preemptions": None}
    assert server_figures(None, None) == nothing
    assert server_figures({}, {("other:metric", ""): 1.0}) == nothing
    counted = {("vllm:num_preemptions_total", ""): 7.0}
    assert server_figures({}, counted) == {"weighted_turnaround": None, "num_preemptions": {"all": 7}}


# Tables


def result(policy="adaptive", arrivals="all", **values):
    return {
        "policy": policy,
        "arrivals": arrivals,
        "max_concurrency": None,
        "request_rate": "inf",
        "num_without_usage": 0,
        "weighted_turnaround": 1.5,
        "num_preemptions": {"swap": 1, "recompute": 2},
        **figures(some_answers(), 2.0, Report(goodput={"ttft": 150.0})),
        **values,
    }


def test_a_summary_tells_the_figures():
    text = "\n".join(summary(result(num_without_usage=2)))
    for part in (
        "Successful requests:                      2",
        "Failed requests:                          3",
        "Request goodput (req/s):                  0.50",
        "Preemptions (server):                     1 swap, 2 recompute",
        "1 503, 1 stream, 1 connection",
        "Mean TTFT (ms):                           150.00",
        "P99 E2EL (ms):                            497.00",
        "Mean latency (ms):                        50.00",
        "no token counts for 2 requests",
    ):
        assert part in text
    assert brief(result()) == "adaptive all: 2 requests, 3 failures, 2.0 s, 2.0 output tokens/s"


def test_a_table_has_medians_of_repetitions():
    runs = [
        result(),
        result("vllm", median_ttft_ms=70.0),
        result(median_ttft_ms=160.0, num_preemptions={"swap": 7, "recompute": 0}),
        result("vllm", median_ttft_ms=90.0, num_preemptions=None),
    ]
    found = rows(runs)
    assert [(row["policy"], row["repetitions"]) for row in found] == [("adaptive", 2), ("vllm", 2)]
    assert [row["median_ttft_ms"] for row in found] == pytest.approx([155.0, 80.0])
    assert [row["preemptions"] for row in found] == [5.0, 3.0]
    heading, rule, first, second = table(found)
    assert heading.split()[:4] == ["server", "arrivals", "done", "failed"]
    assert len({len(line) for line in (heading, rule, first, second)}) == 1
    assert first.split()[:4] == ["adaptive", "all", "2", "3"]
    assert "155" in first
    assert "80" in second


def test_a_table_leaves_out_what_nobody_measured():
    (row,) = rows([result(None, weighted_turnaround=None, num_preemptions=None)])
    heading, _, line = table([row])
    assert "weighted" not in heading
    assert "preempted" not in heading
    assert line.startswith("all")
