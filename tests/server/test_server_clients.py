"""What clients of other libraries send, and what they look for in answers."""

import gzip
import json
import logging
import threading

import openai
import pytest
from server_helpers import SMALL, option, read_events, serving

from jaxllm.cli.main import main
from jaxllm.errors import ConfigError, RequestError
from jaxllm.llm import LLM
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.loading.generation_config import default_sampling_params
from jaxllm.sampling.param_checks import MIN_TEMPERATURE
from jaxllm.sampling.params import SamplingParams
from jaxllm.sched.planner import PolicyPlanner
from jaxllm.server.config import ServerConfig
from jaxllm.server.connections import _raw_error
from jaxllm.server.protocol import NEUTRAL
from jaxllm.server.streams import EventStream
from jaxllm.text.chat import render
from jaxllm.text.tokenizer import load_tokenizer

MESSAGES = [{"role": "user", "content": "add two numbers"}]
CHAT = {"messages": MESSAGES, "max_tokens": 2, "temperature": 0}
COMPLETION = {"prompt": "def add(", "max_tokens": 2, "temperature": 0}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(demo_model_path())


# Fields


@pytest.mark.parametrize("path", BODIES)
def test_what_says_nothing_is_taken(server, path):
    expected = server.post(path, BODIES[path])[2]["choices"]
    for extra in (
        dict.fromkeys(["a_field_of_tomorrow", *NEUTRAL]),
        {"stream_options": None, "response_format": {"type": "text", "strict": None}},
        {"priority": 0, "session_id": "s-1", "prompt_cache_key": "k", "safety_identifier": "u"},
        {"metadata": {"a": "b"}, "user": "me", "store": False, "service_tier": "auto"},
        *({name: value} for name, (values, _) in NEUTRAL.items() for value in values),
    ):
        status, _, found = server.post(path, {**BODIES[path], **extra})
        assert (status, extra, found["choices"]) == (200, extra, expected)
    options = {"include_usage": True, "include_obfuscation": False, "of_tomorrow": None}
    assert server.post(path, {**BODIES[path], "stream": True, "stream_options": options})[0] == 200


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store", True),
        ("service_tier", "flex"),
        ("verbosity", "low"),
        ("prompt_cache_retention", "24h"),
        ("include_reasoning", False),
        ("truncation_side", "right"),
        ("thinking_token_budget", 100),
        ("logprob_token_ids", [1]),
        ("stream_interval", 8),
        ("a_field_of_tomorrow", 0),
        ("web_search_options", {}),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(server, path, field, value):
    status, _, found = server.post(path, {**BODIES[path], field: value})
    assert (status, found["error"]["param"]) == (400, field)
    assert field in found["error"]["message"]


def test_so_is_what_is_within_other_fields(server):
    asked = {**CHAT, "stream": True, "stream_options": {"include_obfuscation": True}}
    assert server.post("/v1/chat/completions", asked)[2]["error"]["param"] == (
        "stream_options.include_obfuscation"
    )
    wanted = {"type": "json_object", "whole": True}
    found = server.post("/v1/chat/completions", {**CHAT, "response_format": wanted})[2]["error"]
    assert found["param"] == "response_format.whole"


@pytest.mark.parametrize("value", [True, False, None])
def test_parallel_calls_are_taken_whatever_is_said_of_them(server, value):
    assert server.post("/v1/chat/completions", {**CHAT, "parallel_tool_calls": value})[0] == 200


def test_no_scores_and_none_of_them(server):
    body = {**CHAT, "logprobs": False, "top_logprobs": 0}
    status, _, found = server.post("/v1/chat/completions", body)
    assert (status, found["choices"][0]["logprobs"]) == (200, None)
    assert server.post("/v1/chat/completions", {**body, "top_logprobs": 1})[0] == 400


def test_a_prompt_of_nothing_begins_where_texts_begin(server, tokenizer):
    [bos] = tokenizer.encode("")
    given = {**COMPLETION, "max_tokens": 4}
    expected = server.post("/v1/completions", {**given, "prompt": [bos]})[2]["choices"][0]["text"]
    for prompt in ("", [""]):
        found = server.post("/v1/completions", {**given, "prompt": prompt})
        assert (found[0], found[2]["choices"][0]["text"]) == (200, expected)
        assert found[2]["usage"]["prompt_tokens"] == 1
    assert server.post("/tokenize", {"prompt": ""})[2]["tokens"] == [bos]
    with LLM(**SMALL) as llm:
        [output] = llm.generate("", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        assert (output.prompt_token_ids, output.text) == ([bos], expected)


def test_where_nothing_is_added_there_is_nothing_to_begin_with(server, monkeypatch):
    tokenizer = server.service.tokenizer
    monkeypatch.setattr("jaxllm.text.tokenizer._encode", lambda *_, **__: [])
    with pytest.raises(RequestError, match="adds no token of its own"):
        server.service.made.engine.inputs._tokenize("")
    assert tokenizer is not None


def test_a_priority_that_all_have_is_taken_anywhere(server):
    assert server.post("/v1/completions", {**COMPLETION, "priority": 0})[0] == 200
    for value in (1, -1, False, 0.0):
        found = server.post("/v1/completions", {**COMPLETION, "priority": value})
        assert (found[0], found[2]["error"]["param"]) == (400, "priority")


# Temperatures


@pytest.mark.parametrize("value", [1e-6, 0.005, 0.0099])
def test_small_temperatures_become_the_smallest(server, caplog, value):
    with caplog.at_level(logging.WARNING):
        assert SamplingParams(temperature=value) == SamplingParams(temperature=MIN_TEMPERATURE)
    assert repr(value) in caplog.text
    body = {**COMPLETION, "seed": 1, "max_tokens": 8}
    found = server.post("/v1/completions", {**body, "temperature": value})
    expected = server.post("/v1/completions", {**body, "temperature": MIN_TEMPERATURE})
    assert (found[0], found[2]["choices"]) == (200, expected[2]["choices"])


def test_no_temperature_at_all_is_greedy():
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-6).is_greedy


def test_a_checkpoint_may_have_a_small_temperature(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 1e-06, "do_sample": true}')
    assert default_sampling_params(tmp_path).temperature == MIN_TEMPERATURE


# Reasoning


@pytest.mark.parametrize("effort", EFFORTS)
def test_templates_are_told_of_the_effort_if_they_read_it(server, monkeypatch, effort):
    plain = server.post("/v1/chat/completions", CHAT)[2]
    found = server.post("/v1/chat/completions", {**CHAT, "reasoning_effort": effort})
    assert (found[0], found[2]["choices"]) == (200, plain["choices"])
    template = "{{ reasoning_effort }}{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(server.service.tokenizer, "chat_template", template)
    told = {**CHAT, "reasoning_effort": effort, "return_token_ids": True}
    choice = server.post("/v1/chat/completions", told)[2]["choices"][0]
    text = server.service.tokenizer.decode(choice["prompt_token_ids"])
    assert text == f"{effort}add two numbers"


def test_variables_of_the_templates_own_are_still_checked(server):
    body = {**CHAT, "chat_template_kwargs": {"reasoning_effort": "low"}}
    status, _, found = server.post("/v1/chat/completions", body)
    assert (status, found["error"]["param"]) == (400, "chat_template_kwargs")


# Histories

SHOW = """{% for m in messages %}[{{ m.role }}:{{ m.content }}{% if m.function_call is defined %}F{% endif -%}
{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}]
{%- endfor %}"""
USER = {"role": "user", "content": "a"}


def call(arguments):
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({}, ""),
        ({"content": None}, ""),
        ({"content": None, "tool_calls": None, "refusal": None}, ""),
        ({"content": None, "tool_calls": []}, ""),
        ({"content": "b", "tool_calls": []}, "b"),
        ({"content": "b", "function_call": None, "refusal": None, "audio": None, "annotations": None}, "b"),
        ({"content": None, "tool_calls": [call('{"x": 1')]}, '(f "{\\"x\\": 1")'),
        ({"content": None, "tool_calls": [call("not JSON")]}, '(f "not JSON")'),
        ({"content": None, "tool_calls": [call("[" * 100_000)]}, '(f "' + "[" * 100_000 + '")'),
        ({"content": None, "tool_calls": [call("7")]}, '(f "7")'),
        ({"content": None, "tool_calls": [call('{"x": 1}')]}, '(f {"x": 1})'),
        ({"content": None, "tool_calls": [call("")]}, "(f {})"),
        ({"content": [{"type": "refusal", "refusal": "I will not"}]}, "I will not"),
        ({"content": [{"type": "output_text", "text": "b"}, {"type": "text", "text": "c"}]}, "b\nc"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_messages_come_back_as_models_and_clients_left_them(tokenizer, message, text):
    found = render(tokenizer, [USER, {"role": "assistant", **message}], chat_template=SHOW)
    assert found == f"[user:a][assistant:{text}]"


def test_parts_have_the_names_of_other_apis_too(server, tokenizer):
    parts = [{"type": "input_text", "text": "add two numbers"}]
    body = {**CHAT, "messages": [{"role": "user", "content": parts}]}
    expected = server.post("/v1/chat/completions", CHAT)[2]["choices"]
    assert server.post("/v1/chat/completions", body)[2]["choices"] == expected
    loop = (
        "{% for m in messages %}{% for p in m.content %}({{ p.type }} {{ p.text }}){% endfor %}{% endfor %}"
    )
    messages = [{"role": "user", "content": [*parts, "b", {"type": "refusal", "refusal": "c"}]}]
    assert render(tokenizer, messages, chat_template=loop) == "(text add two numbers)(text b)(text c)"
    echoed = [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]
    continued = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
    choice = server.post("/v1/chat/completions", {**CHAT, "messages": echoed, **continued})[2]["choices"][0]
    assert choice["message"]["content"].startswith("no")
    answers = [
        server.post("/v1/chat/completions", {**CHAT, "messages": [USER, said], **continued})[2]["choices"]
        for said in ({"role": "assistant"}, {"role": "assistant", "content": None})
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": None},
        {"role": "user"},
        {"role": "user", "content": [{"type": "refusal", "text": "b"}]},
        {"role": "user", "content": [{"type": ["text"], "text": "b"}]},
        {"role": "assistant", "content": "", "tool_calls": [call(7)]},
    ],
    ids=str,
)
def test_what_says_nothing_where_it_should_is_refused(server, message):
    found = server.post("/v1/chat/completions", {**CHAT, "messages": [message]})
    assert (found[0], found[2]["error"]["param"]) == (400, "messages")


# Errors

LONG_PROMPTS = {
    "tokens": [7] * 2000,
    "more tokens": [7] * 5000,
    "text": "x = 1\n" * 2000,
    "huge": "x" * 10**6,
}


@pytest.mark.parametrize("kind", LONG_PROMPTS)
def test_a_prompt_that_is_too_long_is_known_by_its_words_and_its_code(server, kind):
    prompt = LONG_PROMPTS[kind]
    bodies = [("/v1/completions", {**COMPLETION, "prompt": prompt})]
    if isinstance(prompt, str):
        bodies += [("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": prompt}]})]
    for path, body in bodies:
        status, _, found = server.post(path, body)
        assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
        assert found["error"]["type"] == "invalid_request_error"
        assert "This model's maximum context length is 1024 tokens" in found["error"]["message"]


def as_http(body):
    head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def raw(server, content):
    with server.connect() as connection:
        connection.sendall(content)
        found = b""
        while chunk := connection.recv(65536):
            found += chunk
        return found


def test_errors_are_spaced_as_clients_read_them(server):
    bodies = [json.dumps({"prompt": [7] * 2000}).encode(), b"{}", b"no JSON"]
    answers = [raw(server, as_http(one)) for one in bodies]
    answers += [
        raw(server, b"GET /nowhere HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"),
        _raw_error(400, "m", "c"),
    ]
    assert all(b'"code": ' in one and b'"message": ' in one for one in answers)
    assert b'"code": "context_length_exceeded"' in answers[0]


@pytest.mark.parametrize(
    ("path", "way_out"),
    [
        (
            "/chat/completions",
            "it is /v1/chat/completions; set the client's base URL to http://<host>:<port>/v1",
        ),
        ("/v1/v1/chat/completions", "it is /v1/chat/completions; set"),
        ("/v1/chat/completions/chat/completions", "it is /v1/chat/completions; set"),
        ("/openai/v1/completions", "it is /v1/completions; set"),
        ("/models", "it is /v1/models; set"),
        ("/v1/health", "it is /health; set the client's base URL to http://<host>:<port>"),
        ("/v1/responses", "use chat completions"),
        ("/v1/messages", "use OpenAI's chat completions"),
        ("/v1/embeddings", "models only generate text"),
        ("/api/chat", "use OpenAI's, at /v1/chat/completions"),
        ("/somewhere", "has the base URL http://<host>:<port>/v1"),
    ],
)
def test_wrong_paths_are_told_the_way(server, path, way_out):
    for method in ("POST", "GET"):
        status, _, found = server.request(method, path, {} if method == "POST" else None)
        assert (status, found["error"]["code"]) == (404, "not_found")
        assert path in found["error"]["message"]
        assert way_out in found["error"]["message"]


def test_a_wrong_method_is_told_the_right_one(server):
    status, _, found = server.request("GET", "/v1/chat/completions")
    assert (status, found["error"]["message"]) == (405, "/v1/chat/completions takes POST: send that")


def test_slashes_that_are_too_many_do_no_harm(server):
    for path in ("/v1/completions/", "//v1//completions", "/v1/completions//"):
        assert server.post(path, COMPLETION)[0] == 200
    for path in ("/v1/models/", "/health/", "/v1/models/demo_model/", "//"):
        assert server.request("GET", path)[0] == 200
    with openai.OpenAI(base_url=f"{server.url}/v1//", api_key="x", max_retries=0) as client:
        assert [one.id for one in client.models.list()] == ["demo_model"]


def test_slashes_open_no_door():
    with serving(api_keys=("a-key-of-sixteen",), max_queued_requests=0) as running:
        assert running.post("/v1/completions/", COMPLETION)[0] == 401
        running.admission.is_closing = True  # so that there is no room: what is posted there is not read
        headers = {"authorization": "Bearer a-key-of-sixteen"}
        assert running.post("/v1/completions/", b"no JSON", headers=headers)[0] == 503


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "GZIP"])
def test_compressed_bodies_are_refused_by_name(server, encoding):
    body = gzip.compress(json.dumps(COMPLETION).encode())
    status, _, found = server.post("/v1/completions", body, headers={"content-encoding": encoding})
    assert (status, found["error"]["code"]) == (415, "unsupported_media_type")
    assert f"Content-Encoding: {encoding.lower()}" in found["error"]["message"]
    headers = {"content-encoding": "identity"}
    assert server.post("/v1/completions", COMPLETION, headers=headers)[0] == 200


# Connections


def test_connections_are_kept_for_longer_than_proxies_keep_them():
    assert ServerConfig(api_keys=()).keep_alive_timeout > 60


def test_streams_that_wait_have_headers_at_once_and_comments(monkeypatch):
    may_plan, plan = threading.Event(), PolicyPlanner.plan

    def late(self, now):
        assert may_plan.wait(60)
        return plan(self, now)

    with serving(stream_keep_alive=0.1) as running, running.connect() as connection:
        monkeypatch.setattr(PolicyPlanner, "plan", late)
        content = json.dumps({**COMPLETION, "stream": True}).encode()
        connection.sendall(as_http(content))
        found = b""
        while found.count(b": keep-alive\n\n") < 3:  # before there is a token
            found += connection.recv(65536)
        assert found.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"text/event-stream" in found
        assert b"data:" not in found
        # What can be known before is still an error of HTTP.
        for wrong, status in (({"temperature": -1}, 400), ({"prompt": [7] * 2000}, 400), ({"n": 10**6}, 400)):
            assert running.post("/v1/completions", {**COMPLETION, "stream": True, **wrong})[0] == status
        may_plan.set()
        while chunk := connection.recv(65536):
            found += chunk
    assert b"data: [DONE]" in found


def test_clients_do_not_mind_comments(server, monkeypatch):
    may_plan, plan, send = threading.Event(), PolicyPlanner.plan, EventStream._send

    async def seen(self, to, chunk):
        await send(self, to, chunk)
        if chunk.startswith(b":"):
            may_plan.set()

    with serving(stream_keep_alive=0.1) as running:
        monkeypatch.setattr(EventStream, "_send", seen)
        monkeypatch.setattr(PolicyPlanner, "plan", lambda self, now: may_plan.wait(60) and plan(self, now))
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client:
            stream = client.completions.create(model="demo_model", stream=True, **COMPLETION)
            text = "".join(one.choices[0].text for one in stream)
    assert text == server.post("/v1/completions", COMPLETION)[2]["choices"][0]["text"]


def test_what_fails_before_the_first_token_ends_the_stream_with_an_error(monkeypatch):
    with serving() as running:

        def fail(self, now):
            raise ZeroDivisionError("in a policy")

        monkeypatch.setattr(PolicyPlanner, "plan", fail)
        status, _, content = running.post("/v1/completions", {**COMPLETION, "stream": True})
        assert (status, [one["error"]["code"] for one in read_events(content)]) == (200, ["internal"])
        assert b'"code": "internal"' in content


def test_no_comments_if_none_are_wanted():
    assert ServerConfig(api_keys=(), stream_keep_alive=0).stream_keep_alive == 0
    for wrong in (0.01, -1, True, 10**6):
        with pytest.raises(ConfigError, match="stream_keep_alive"):
            ServerConfig(api_keys=(), stream_keep_alive=wrong)


# Files


def test_blank_lines_in_files_of_requests_are_passed_over(tmp_path, capsys):
    lines = [
        json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": COMPLETION})
        for name in "ab"
    ]
    (tmp_path / "in.jsonl").write_text(f"\n{lines[0]}\n\n  \n{lines[1]}\n\n")
    options = [f"--{name.replace('_', '-')}={option(value)}" for name, value in SMALL.items()]
    paths = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert main(["run-batch", *paths, *options]) == 0
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(one["custom_id"] for one in found) == ["a", "b"]
    (tmp_path / "blank.jsonl").write_text("\n \n")
    assert main(["run-batch", "-i", str(tmp_path / "blank.jsonl"), "-o", str(tmp_path / "none.jsonl")]) == 2
    assert "nothing but blank lines" in capsys.readouterr().err
