"""Nothing that is sent is answered with a 500, and nothing kills the engine."""

import json
import random
import re

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from server_helpers import serving

from jaxllm.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

COMPLETION = {"prompt": [7, 8, 9], "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
MODELS = {
    "/v1/completions": (CompletionRequest, COMPLETION),
    "/v1/chat/completions": (ChatCompletionRequest, CHAT),
    "/tokenize": (TokenizeRequest, {"prompt": "a"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
NASTY = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2**31,
    2**64,
    10**90,
    -0.5,
    1e-300,
    1e308,
    "",
    "a",
    "\x00\ud800\uffff",
    "x" * 5000,
    [],
    [[]],
    [None],
    [0],
    [10**30],
    ["a", 1],
    ["\ud800"],
    {},
    {"a": {"b": [1]}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#/nowhere"}}},
    {"json": "{", "regex": "("},
    {"regex": "(a{1000}){1000}"},
    {"1": 1e308, "x": None},
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": 5, "content": None, "tool_calls": [{}]}],
    "{{ 9 ** 9 ** 9 }}",
]
SHORT = {"max_model_len": 64, "num_gpu_blocks_override": 64}


@pytest.fixture(scope="module")
def server():
    with serving(SHORT, max_body_bytes=2**20, max_total_body_bytes=2**22) as running:
        yield running
        running.wait_until_idle()
        assert running.post("/v1/completions", COMPLETION)[0] == 200


def check(answer):
    """An answer that is no server error; an error has its object."""
    status, headers, found = answer
    assert status < 500, found
    if status >= 400:
        assert headers["content-type"] == "application/json"
        assert sorted(found["error"]) == ["code", "message", "param", "type"]
        assert isinstance(found["error"]["message"], str)
        assert found["error"]["message"]
        assert found["error"]["type"] in ("invalid_request_error", "not_found_error")
    return status


@pytest.mark.parametrize("path", MODELS)
def test_every_field_with_every_nasty_value(server, path):
    model, valid = MODELS[path]
    names = [field.alias or name for name, field in model.model_fields.items()]
    taken = 0
    for name in [*names, "chat_template", "suffix", "unknown", "ünknown\ud800"]:
        for value in NASTY:
            taken += check(server.post(path, {**valid, name: value})) == 200
    assert taken > len(names)  # None at least is every optional field's default


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"\xff\xfe{}",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b"[" * 100_000,
        b'{"prompt":' * 50_000,
        b'{"prompt": ' + b"[" * 400 + b"]" * 400 + b"}",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "prompt": "b"}',
        b"null",
        b"[]",
        b'"text"',
        b"12",
        b'{"prompt": "a"} trailing',
        b"prompt=a",
        b" " * 2**20,
        b"x" * 10 * 2**20,
        b'{"prompt": "' + b"a" * 900_000 + b'"}',
        b'{"prompt": [' + b"7," * 300_000 + b"7]}",
        b'{"prompt": [' + b'"a",' * 200_000 + b'"a"]}',
        b'{"prompt": "a", "logit_bias": {' + b",".join(b'"%d": 1' % one for one in range(50_000)) + b"}}",
        b'{"messages": [' + b'{"role": "user", "content": "a"},' * 20_000 + b"{}]}",
    ],
    ids=lambda body: repr(body[:24]),
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_garbage(server, path, body):
    try:
        status = check(server.post(path, body))
    except (BrokenPipeError, ConnectionResetError):  # the server closed what it had refused
        assert len(body) > 2**20
    else:
        assert status in (400, 413)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ";"]
)
def test_other_kinds_of_content_are_refused(server, kind):
    check(server.post("/v1/completions", json.dumps(COMPLETION).encode(), headers={"content-type": kind}))


@pytest.mark.parametrize(
    "path", ["/v1/completions/", "/V1/models", "/%00", "/../etc/passwd", "/v1/models/%ff/x"]
)
def test_strange_paths(server, path):
    assert check(server.request("GET", path)) in (307, 404, 405)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_strange_methods(server, method):
    assert check(server.request(method, "/v1/completions")) == 405


def test_random_bytes_instead_of_http(server):
    draw = random.Random(0)
    for _ in range(50):
        with server.connect() as connection:
            connection.sendall(draw.randbytes(draw.randrange(1, 400)) + b"\r\n\r\n")
            answer = connection.recv(65536)
            assert not answer or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 404", b"HTTP/1.1 405"))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_values_in_random_fields(server, data):
    path = data.draw(st.sampled_from(sorted(MODELS)))
    model, valid = MODELS[path]
    names = st.sampled_from(sorted(model.model_fields)) | st.text(max_size=8)
    body = {**valid, **data.draw(st.dictionaries(names, VALUES, max_size=4))}
    if path.startswith("/v1"):
        body["max_tokens"] = 2
    check(server.post(path, body))


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_what_the_schema_allows_and_what_it_does_not(server, mode):
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 11
    for operation in operations:
        if mode == "NEGATIVE" and not operation.body:
            continue  # there is nothing to get wrong

        @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(schemathesis.GenerationMode[mode]))
        def call(case):
            if isinstance(case.body, dict) and "n" in case.body:
                case.body["n"] = 2  # more would only take longer
            case.call_and_validate(checks=[not_a_server_error])

        call()


def test_the_schema_describes_every_route(server):
    found = server.request("GET", "/openapi.json")[2]
    assert set(found["paths"]) >= {*MODELS, "/v1/models", "/health", "/ping", "/version", "/metrics", "/live"}
    body = found["components"]["schemas"]["CompletionRequest"]
    assert body["additionalProperties"] is False
    assert "prompt" in body["required"]


def test_pipelined_requests_are_answered_in_order(server):
    content = json.dumps(COMPLETION).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    post += b"content-length: %d\r\n\r\n" % len(content) + content
    with server.connect() as connection:
        connection.sendall(post * 3 + b"GET /version HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        answers = b""
        while chunk := connection.recv(65536):
            answers += chunk
    kinds = [sorted(json.loads(one))[0] for one in re.findall(rb"\r\n\r\n(\{.*?\})(?=HTTP|$)", answers)]
    assert kinds == ["choices", "choices", "choices", "version"]
