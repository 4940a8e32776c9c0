"""`jaxllm bench serve` against a server that says what the test wants; nothing here is timed."""

import dataclasses
import json
import socket
import sys

import numpy as np
import pytest
from fake_openai import FakeServer, chat_words, words

from jaxllm.cli.main import main
from jaxllm.errors import ConfigError, RequestError
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.research.bench.serving.answers import Answer
from jaxllm.research.bench.serving.client import check_url
from jaxllm.research.bench.serving.workload import RequestFields, Requests, drawn_trace, with_new_prompts
from jaxllm.research.workloads import AllAtOnce, Poisson, TopicOutputs, Trace, make_trace

FEW = ["--num-prompts=4", "--input-len=3:6", "--output-len=2:5", "--num-warmups=0"]
LATENCY_KEYS = {
    f"{statistic}_{name}_ms"
    for statistic in ("mean", "median", "std", "p99")
    for name in ("ttft", "tpot", "itl", "e2el")
}
VLLM_KEYS = LATENCY_KEYS | {
    *("date", "backend", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness"),
    *("max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "max_concurrent_requests"),
}


def as_asked(body):
    """As many words as the request wants."""
    return words(body["max_tokens"], prompt_len=len(body["prompt"]))


def bench(url, *options):
    return main(["bench", "serve", "--base-url", url, *FEW, *options])


def one_error(capsys):
    """The error, once it is known to be the only line."""
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("jaxllm: error: ")
    return line


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


# Runs


def test_a_run_has_vllms_keys_and_says_what_it_ran_on(capsys):
    with FakeServer(as_asked) as server:
        assert bench(server.url, "--goodput", "ttft:60000", "e2el:60000") == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found.keys() >= VLLM_KEYS | {"command", "hardware", "versions", "workload"}
    assert {"ttfts", "errors"}.isdisjoint(found)
    assert (found["completed"], found["failed"], found["num_prompts"]) == (4, 0, 4)
    assert (found["model_id"], found["backend"], found["request_rate"]) == ("fake", "openai", "inf")
    assert found["total_output_tokens"] == sum(body["max_tokens"] for body in server.bodies)
    assert found["total_input_tokens"] == sum(len(body["prompt"]) for body in server.bodies)
    assert found["request_goodput"] == found["request_throughput"]
    assert (found["weighted_turnaround"], found["num_preemptions"]) == (None, None)
    assert found["versions"].keys() >= {"jaxllm", "aiohttp"}
    assert "Successful requests:                      4" in captured.err


def test_requests_are_as_long_as_asked_and_the_same_for_the_same_seed():
    sent = []
    for seed in (1, 1, 2):
        with FakeServer(as_asked) as server:
            assert bench(server.url, f"--seed={seed}", "--vocab-size=50", '--extra-body={"top_k": 3}') == 0
        sent.append(sorted(server.bodies, key=str))
    for body in server.bodies:
        assert 3 <= len(body["prompt"]) <= 6
        assert 2 <= body["max_tokens"] <= 5
        assert max(body["prompt"]) < 50
        fixed = {name: value for name, value in body.items() if name not in ("prompt", "max_tokens")}
        assert fixed == {
            "model": "fake",
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "top_k": 3,
        }
    assert sent[0] == sent[1] != sent[2]


@pytest.mark.parametrize(
    ("options", "most"),
    [
        (["--arrivals=all"], 6),
        (["--arrivals=all", "--max-concurrency=2"], 2),
        (["--arrivals=closed:3"], 3),
        (["--arrivals=closed:2:0.001"], 2),
        (["--arrivals=poisson:1000"], 6),
        (["--arrivals=gamma:1000:2"], 6),
    ],
)
def test_open_loops_do_not_wait_for_answers_and_closed_ones_do(options, most, capsys):
    with FakeServer(as_asked, together=most) as server:  # nobody is answered before so many are there
        assert bench(server.url, "--num-prompts=6", *options) == 0
    assert (server.most, len(server.bodies)) == (most, 6)
    found = json.loads(capsys.readouterr().out)
    assert found["completed"] == 6
    rate, burstiness = {"poisson:1000": (1000.0, 1.0), "gamma:1000:2": (1000.0, 0.25)}.get(
        found["arrivals"], ("inf", 1.0)
    )
    assert (found["request_rate"], found["burstiness"]) == (rate, burstiness)
    assert found["max_concurrency"] == (most if most < 6 else None)


def test_a_warm_up_is_another_prompt_and_is_not_counted(capsys):
    with FakeServer(as_asked) as server:
        assert bench(server.url, "--num-warmups=2", "--arrivals=closed:1") == 0
    assert len(server.bodies) == 6
    assert server.bodies[0] == server.bodies[1]
    assert server.bodies[0]["prompt"] == server.bodies[2]["prompt"][::-1]
    assert json.loads(capsys.readouterr().out)["completed"] == 4


def test_details_are_kept_if_asked_for(tmp_path, capsys):
    output = tmp_path / "result.json"
    with FakeServer(as_asked) as server:
        assert bench(server.url, "--save-detailed", f"--output={output}", "--metric-percentiles=50,99.9") == 0
    assert capsys.readouterr().out == ""
    found = json.loads(output.read_text())
    assert all(len(itls) < count for itls, count in zip(found["itls"], found["output_lens"], strict=True))
    assert found["generated_texts"] == ["".join(f"w{one} " for one in range(n)) for n in found["output_lens"]]
    assert found["errors"] == [""] * 4
    assert {"p50_ttft_ms", "p99.9_e2el_ms"} <= found.keys()
    assert "p99_ttft_ms" not in found


def test_several_arrivals_on_one_server_make_a_table_and_never_repeat_a_prompt(tmp_path, capsys):
    plot = tmp_path / "plot.png"
    rates = ["--arrivals", "poisson:500", "poisson:1000", "--repetitions=2", f"--plot={plot}"]
    with FakeServer(as_asked) as server:
        assert bench(server.url, *rates) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["is_complete"]
    names = [(run["arrivals"], run["repetition"]) for run in found["runs"]]
    assert names == [("poisson:500", 0), ("poisson:1000", 0), ("poisson:500", 1), ("poisson:1000", 1)]
    assert [(row["arrivals"], row["repetitions"]) for row in found["rows"]] == [
        ("poisson:500", 2),
        ("poisson:1000", 2),
    ]
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 16
    assert len({tuple(run["workload"]["prompt_tokens"].items()) for run in found["runs"]}) == 1
    assert "poisson:1000" in captured.err
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_chats_are_text(capsys):
    with FakeServer(lambda body: chat_words(body["max_completion_tokens"])) as server:
        assert bench(server.url, "--endpoint=chat", f"--tokenizer={demo_model_path()}") == 0
    for body in server.bodies:
        (message,) = body["messages"]
        assert message["role"] == "user"
        assert isinstance(message["content"], str)
        assert "prompt" not in body
    found = json.loads(capsys.readouterr().out)
    assert found["backend"] == "openai-chat"
    assert found["total_output_tokens"] == sum(body["max_completion_tokens"] for body in server.bodies)


def test_prompts_of_a_file(tmp_path, capsys):
    rows = [{"question": f"what is {number}?", "tokens": number + 1} for number in range(9)]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--num-prompts=4", "--num-warmups=0", f"--dataset={file}", "--column=question"]
    with FakeServer(as_asked) as server:
        start = ["bench", "serve", "--base-url", server.url, *given]
        assert main([*start, "--length-column=tokens"]) == 0
        assert main([*start, f"--tokenizer={demo_model_path()}"]) == 0
        assert main([*start, f"--tokenizer={demo_model_path()}", "--send-text", "--ignore-eos"]) == 0
    texts, token_ids, decoded = (server.bodies[start : start + 4] for start in (0, 4, 8))
    questions = {row["question"] for row in rows}
    assert {body["prompt"] for body in texts} <= questions
    assert all(isinstance(one, int) for body in token_ids for one in body["prompt"])
    assert {body["prompt"] for body in decoded} <= questions
    assert ["ignore_eos" in body for body in (texts[0], token_ids[0], decoded[0])] == [False, False, True]
    assert {body["max_tokens"] for body in server.bodies} == {128}


def test_recorded_arrivals(tmp_path, capsys):
    trace = make_trace("alpaca", 5, 4, arrivals=Poisson(1000.0), seed=3)
    trace.save(tmp_path / "trace.json")
    (tmp_path / "azure.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.68,4,2\n2023-11-16 18:15:46.69,5,3\n2023-11-16 18:15:46.70,6,4\n"
    )
    common = ["--num-warmups=0"]
    with FakeServer(as_asked) as server:
        start = ["bench", "serve", "--base-url", server.url]
        assert main([*start, f"--trace={tmp_path}/trace.json", *common]) == 0
        assert main([*start, f"--trace={tmp_path}/azure.csv", "--num-prompts=2", *common]) == 0
        assert main([*start, f"--trace={tmp_path}/trace.json", "--seed=4", *common]) == 0
        capsys.readouterr()
        make_trace("alpaca", 2, 4, outputs=TopicOutputs(), seed=3).save(tmp_path / "own.json")
        assert main([*start, f"--trace={tmp_path}/own.json", "--seed=4"]) == 2
        assert "prompts of its own" in one_error(capsys)
        assert main([*start, f"--trace={tmp_path}/own.json", "--vocab-size=1"]) == 2
        assert "the vocabulary has 1" in one_error(capsys)
    recorded = [trace.token_ids(index, 1000) for index in range(5)]
    assert sorted(body["prompt"] for body in server.bodies[:5]) == sorted(recorded)
    assert sorted((len(body["prompt"]), body["max_tokens"]) for body in server.bodies[5:7]) == [
        (4, 2),
        (5, 3),
    ]
    reseeded = dataclasses.replace(trace, seed=4)
    assert sorted(body["prompt"] for body in server.bodies[7:]) == sorted(
        reseeded.token_ids(index, 1000) for index in range(5)
    )


def test_prompts_of_a_trace_share_what_its_hashes_say(tmp_path, capsys):
    rows = [
        {"timestamp": 10 * number, "input_length": 600, "output_length": 2, "hash_ids": [1, 2 + number]}
        for number in range(3)
    ]
    path = tmp_path / "mooncake.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with FakeServer(as_asked) as server:
        assert main(["bench", "serve", "--base-url", server.url, f"--trace={path}", "--num-warmups=0"]) == 0
        capsys.readouterr()
        command = ["bench", "serve", "--base-url", server.url, f"--trace={path}", "--max-model-len=500"]
        assert main(command) == 2
        assert "request 0 of trace 'mooncake' has 600 prompt and 2 output tokens" in one_error(capsys)
        assert main([*command, "--clip", "--num-warmups=0"]) == 0
    assert [len(body["prompt"]) for body in server.bodies[3:]] == [498] * 3
    prompts = [body["prompt"] for body in server.bodies[:3]]
    assert [len(prompt) for prompt in prompts] == [600] * 3
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 1
    assert len({tuple(prompt[512:]) for prompt in prompts}) == 3


def conversation():
    """Three turns of one conversation, and one of another."""
    return Trace(
        name="talk",
        seed=1,
        arrival_times=np.zeros(4),
        prompt_lens=np.array([3, 8, 12, 5]),
        output_lens=np.array([2, 3, 1, 2]),
        follows=np.array([-1, 0, 1, -1]),
        think_times=np.zeros(4),
    )


def with_token_ids(body):
    events = as_asked(body)
    for number in range(body["max_tokens"]):
        events[number]["choices"][0]["token_ids"] = [900 + number]
    return events


def test_conversations_go_on_after_the_answers(tmp_path, capsys):
    conversation().save(tmp_path / "talk.json")
    with FakeServer(with_token_ids) as server:
        command = ["bench", "serve", "--base-url", server.url, "--trace", str(tmp_path / "talk.json")]
        assert main([*command, "--num-warmups=0"]) == 0
    by_length = {len(body["prompt"]): body for body in server.bodies}
    assert by_length.keys() == {3, 5, 8, 12}
    assert by_length[8]["prompt"][:5] == [*by_length[3]["prompt"], 900, 901]
    assert by_length[12]["prompt"][:11] == [*by_length[8]["prompt"], 900, 901, 902]
    assert ["return_token_ids" in by_length[length] for length in (3, 8, 12, 5)] == [True, True, False, False]


def test_a_turn_that_fails_takes_those_after_it_along(tmp_path, capsys):
    conversation().save(tmp_path / "talk.json")
    with FakeServer(lambda body: as_asked(body) if len(body["prompt"]) == 5 else (500, {})) as server:
        command = ["bench", "serve", "--base-url", server.url, "--trace", str(tmp_path / "talk.json")]
        assert main([*command, "--num-warmups=0", "--save-detailed"]) == 0
    assert len(server.bodies) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["failures"] == {"500": 1, "not sent": 2}
    assert found["errors"][1].startswith("not sent: the turn before it brought 0 of 2 token ids")


# What a server counts


def turnaround(total, count, **preempted):
    lines = [f'jaxllm:num_preemptions_total{{action="{name}"}} {value}' for name, value in preempted.items()]
    stem = "jaxllm:request_weighted_turnaround"
    return "\n".join(
        [f'{stem}_sum{{model_name="m"}} {total}', f'{stem}_count{{model_name="m"}} {count}', *lines, ""]
    )


def test_weighted_turnaround_is_the_servers_once_it_has_counted_all(capsys):
    pages = [turnaround(5, 3, swap=1), turnaround(9, 6, swap=2), turnaround(13, 7, swap=2, recompute=4)]
    with FakeServer(as_asked, metrics=pages) as server:
        assert bench(server.url) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["weighted_turnaround"] == 2.0
    assert found["num_preemptions"] == {"swap": 1, "recompute": 4}
    assert "1 swap, 4 recompute" in captured.err


# Failures


def test_failures_are_counted_by_status_and_refusals_apart(capsys):
    def answer(body):
        length = len(body["prompt"])
        return {
            3: as_asked(body),
            4: (503, {"error": {"message": "come back later"}}),
            5: (400, {"error": {"message": "too long"}}),
            6: [words(1)[0], {"error": {"message": "the engine has failed"}}, "[DONE]"],
            7: [words(2)[0], None],
        }[length]

    with FakeServer(answer) as server:
        assert bench(server.url, "--num-prompts=40", "--input-len=3:7", "--save-detailed") == 0
    counts = {length: sum(len(body["prompt"]) == length for body in server.bodies) for length in range(3, 8)}
    assert min(counts.values()) > 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["completed"] == counts[3]
    assert found["failed"] == 40 - counts[3]
    assert found["refused"] == counts[4]
    assert found["failures"] == {"503": counts[4], "400": counts[5], "stream": counts[6] + counts[7]}
    assert found["mean_refusal_ms"] > 0
    assert found["total_output_tokens"] == sum(
        body["max_tokens"] for body in server.bodies if len(body["prompt"]) == 3
    )
    said = set(found["errors"])
    assert {"", "status 503: come back later", "status 400: too long", "the engine has failed"} < said
    assert any(text.startswith("the connection failed (ClientPayloadError") for text in said)
    assert "Latency of refusals" in captured.err


def test_nothing_but_failures_is_exit_code_1(capsys):
    with FakeServer(lambda body: (503, {})) as server:
        assert bench(server.url) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["completed"], found["refused"], found["mean_ttft_ms"]) == (0, 4, None)


def test_a_server_that_goes_away_is_counted(capsys):
    with FakeServer(lambda body: [None]) as server:
        assert bench(server.url) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["failures"] == {"stream": 4}


def test_what_fails_at_the_warm_up_is_one_error(capsys):
    with FakeServer(lambda body: (400, {"error": {"message": "max_tokens is too large"}})) as server:
        assert bench(server.url, "--num-warmups=1") == 2
    assert "status 400: max_tokens is too large" in one_error(capsys)
    assert len(server.bodies) == 1


def test_nobody_there_is_one_error(capsys):
    with socket.socket() as bound:  # and not listening
        bound.bind(("127.0.0.1", 0))
        assert bench(f"http://127.0.0.1:{bound.getsockname()[1]}") == 2
    line = one_error(capsys)
    assert "cannot reach http://127.0.0.1:" in line
    assert "start the server" in line


def test_no_openai_server_is_one_error(capsys):
    with FakeServer(as_asked, models=()) as server:
        assert bench(server.url) == 2
        assert "names no model (status 200)" in one_error(capsys)
        assert bench(f"{server.url}/nowhere") == 2
    assert "names no model (status 404)" in one_error(capsys)


def test_the_api_key_is_sent_and_never_written(monkeypatch, capsys):
    with FakeServer(as_asked, api_key="secret-key") as server:
        assert bench(server.url) == 2
        assert "refuses the API key (401)" in one_error(capsys)
        assert bench(server.url, "--api-key", "secret-key") == 0
        captured = capsys.readouterr()
        assert "--api-key '***'" in json.loads(captured.out)["command"]
        monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
        assert bench(server.url, "--model=another") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["model_id"] == "another"
    assert "secret" not in captured.out + captured.err
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret-key"}


def test_nothing_is_overwritten(tmp_path, capsys):
    there = tmp_path / "there.png"
    there.write_text("precious")
    with FakeServer(as_asked) as server:
        assert bench(server.url, f"--output={there}") == 2
        assert "--output" in one_error(capsys)
        assert bench(server.url, f"--plot={there}") == 2
        assert "exists, and nothing is overwritten" in one_error(capsys)
        assert bench(server.url, f"--output={tmp_path}/none/result.json") == 2
        assert "No such file" in one_error(capsys)
    assert there.read_text() == "precious"
    assert server.bodies == []


def test_a_run_that_fails_leaves_no_empty_file(tmp_path, capsys):
    with FakeServer(as_asked, models=()) as server:
        assert bench(server.url, f"--output={tmp_path}/result.json") == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--base-url=127.0.0.1:8000"], "write http://HOST:PORT"),
        (["--arrivals=poisson"], "poisson:RATE"),
        (["--arrivals=poisson:0"], "'poisson:0': RATE must lie in"),
        (["--arrivals", "all", "all"], "named twice"),
        (["--num-prompts=0"], "--num-prompts must lie in"),
        (["--input-len=0"], "--input-len: '0' must be a length of at least 1"),
        (["--input-len=a"], "invalid length or range"),
        (["--output-len=9:3"], "--output-len: '9:3' must be a length"),
        (["--vocab-size=0"], "--vocab-size 0"),
        (["--seed=-1"], "seed"),
        (["--max-concurrency=0"], "--max-concurrency 0"),
        (["--num-warmups=-1"], "--num-warmups -1"),
        (["--timeout=0"], "--timeout 0"),
        (["--extra-body=[]"], "invalid JSON object"),
        (["--goodput", "ttft"], "invalid NAME:MILLISECONDS"),
        (["--goodput", "itl:5"], "'itl' is unknown"),
        (["--percentile-metrics=ttft,e2e"], "'e2e' is unknown"),
        (["--metric-percentiles=high"], "invalid list of numbers"),
        (["--metric-percentiles=101"], "101 must lie in"),
        (["--endpoint=embeddings"], "invalid choice"),
        (["--endpoint=chat"], "--tokenizer"),
        (["--send-text"], "--tokenizer"),
        (["--trace=t.json", "--arrivals=all"], "drop --arrivals"),
        (["--trace=t.json", "--skip"], "--skip does nothing without --max-model-len"),
        (["--max-model-len=9"], "--max-model-len does nothing without --trace"),
        (["--clip", "--dataset=d.jsonl"], "--clip does nothing without --trace"),
        (["--trace=t.json"], "cannot read"),
        (["--trace=t.csv"], "cannot read"),
        (["--column=text"], "--column does nothing without --dataset"),
        (["--dataset=d.jsonl"], "--dataset needs --column"),
        (["--dataset=d.jsonl", "--column=text"], "--dataset needs --tokenizer"),
        (["--dataset=d.jsonl", "--column=text", "--input-len=3"], "drop --input-len"),
        (["--dataset=d.jsonl", "--column=text", "--vocab-size=9"], "--vocab-size"),
        (["--goodput", "ttft:1", "ttft:2"], "two bounds of one name"),
        (["--start-timeout=5"], "--start-timeout does nothing without --sweep"),
        (["--sweep=vllm", "--server-args='"], "invalid command line"),
        (["--dataset=d.jsonl", "--column=text", "--length-column=n"], "cannot read"),
        (["--server-args=--download"], "--server-args does nothing without --sweep"),
        (["--repetitions=0"], "--repetitions 0"),
        (["--sweep=adaptive", "--base-url=http://127.0.0.1:1"], "drop --base-url"),
        (["--sweep=adaptiv"], "did you mean adaptive?"),
        (["--sweep=vllm,vllm"], "named twice"),
        (["--sweep=vllm,json:dumps"], "the policy 'json:dumps' failed"),
        (["--sweep=vllm", "--start-timeout=0"], "--start-timeout 0"),
        (["--output=same.png", "--plot=same.png"], "are one file"),
    ],
)
def test_wrong_options_are_one_error(options, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with FakeServer(as_asked) as server:
        where = (
            []
            if any("--base-url" in one or "--sweep" in one for one in options)
            else ["--base-url", server.url]
        )
        assert main(["bench", "serve", *where, *options]) == 2
    assert said in one_error(capsys)
    assert server.bodies == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "extra", "options"),
    [
        ("aiohttp", "serve", []),
        ("prometheus_client", "serve", []),
        ("matplotlib", "research", ["--plot=p.png"]),
    ],
)
def test_what_is_not_installed_is_named(module, extra, options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    assert bench("http://127.0.0.1:1", *options) == 2
    assert f'pip install "jaxllm[{extra}]"' in one_error(capsys)


# Parts


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_base_urls_may_end_as_clients_write_them(url):
    assert check_url(url) == "http://h:1"


@pytest.mark.parametrize("url", ["", "h", "ftp://h", "http://", "http://h:x", "http://h:99999", "http://[::"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match="no http or https URL"):
        check_url(url)


def test_prompts_of_a_file_are_not_sent_twice_to_one_server():
    trace = drawn_trace((2, 2), 2, (1, 1), AllAtOnce(), 0)
    assert with_new_prompts(trace, 0) is trace
    assert with_new_prompts(trace, 1).token_ids(0, 1000) != trace.token_ids(0, 1000)
    own = Trace(
        name="own",
        seed=0,
        arrival_times=np.zeros(1),
        prompt_lens=np.array([1]),
        output_lens=np.array([1]),
        prompt_texts=("a",),
    )
    with pytest.raises(ConfigError, match="prefix cache"):
        with_new_prompts(own, 1)


def test_conversations_need_token_ids_and_whole_outputs():
    for fields, said in (
        (RequestFields(as_text=True), "as token ids"),
        (RequestFields(endpoint="chat"), "as token ids"),
        (RequestFields(ignore_eos=False), "drop --no-ignore-eos"),
    ):
        with pytest.raises(ConfigError, match=said):
            Requests(conversation(), fields, "model")
    requests = Requests(conversation(), RequestFields(), "model")
    answers = [Answer(3, token_ids=[1]), Answer(8), Answer(12), Answer(5)]
    with pytest.raises(RequestError, match="brought 1 of 2 token ids"):
        requests.body(1, answers)
