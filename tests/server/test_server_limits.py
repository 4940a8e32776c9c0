"""Whom the server lets in, what it refuses, and that nobody holds it up."""

import asyncio
import base64
import hashlib
import json
import random
import socket
import threading
import time

import aiohttp
import pytest
from server_helpers import SMALL, read_events, serving

import jaxllm.server.chat
from jaxllm.engine.output_builder import Delta
from jaxllm.errors import ConfigError
from jaxllm.llm import LLM
from jaxllm.sampling.params import SamplingParams
from jaxllm.sched.planner import PolicyPlanner
from jaxllm.server.config import ServerConfig
from jaxllm.server.core import Generation

BODY = {"prompt": [7, 8, 9], "max_tokens": 4, "temperature": 0}
LONG = {"prompt": [7, 8, 9], "max_tokens": 900, "temperature": 0, "ignore_eos": True}
KEY = "a-key-of-sixteen"


@pytest.fixture(scope="module")
def server():
    limits = {"max_body_bytes": 4096, "max_header_bytes": 2048, "max_total_body_bytes": 8192}
    with serving(request_timeout=2.0, keep_alive_timeout=2.0, max_connections=20, **limits) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def locked():
    hashed = "sha256:" + hashlib.sha256(b"another-key").hexdigest()
    with serving(api_keys=(KEY, hashed)) as running:
        yield running


def error_of(answer, status, code):
    """The error object of an answer, which must be one."""
    assert (answer[0], sorted(answer[2])) == (status, ["error"])
    found = answer[2]["error"]
    assert sorted(found) == ["code", "message", "param", "type"]
    assert found["code"] == code
    return found


def raw(server, content):
    """What comes back when bytes are sent as they are."""
    with server.connect() as connection:
        connection.sendall(content)
        return read_all(connection)


def read_all(connection):
    found = b""
    while chunk := connection.recv(65536):
        found += chunk
    return found


# Keys


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/live", "/", "/version", "/openapi.json", "/nowhere"]
)
def test_all_routes_but_health_need_a_key(locked, path):
    answer = locked.request("GET", path)
    assert "send it as" in error_of(answer, 401, "invalid_api_key")["message"]
    assert answer[1]["www-authenticate"].startswith("Basic ")
    for wrong in (
        f"Bearer {KEY}x",
        "Bearer ",
        "Bearer",
        KEY,
        "Basic !!!",
        "Basic " + KEY,
        "Bearer " + "x" * 5000,
    ):
        error_of(locked.request("GET", path, headers={"authorization": wrong}), 401, "invalid_api_key")
    basic = base64.b64encode(f"anybody:{KEY}".encode()).decode()
    for right in (f"Bearer {KEY}", f"bearer  {KEY}", "Bearer another-key", f"Basic {basic}"):
        found = locked.request("GET", path, headers={"authorization": right})[0]
        assert found == (404 if path == "/nowhere" else 200)


def test_requests_need_a_key_and_health_needs_none(locked):
    error_of(locked.post("/v1/completions", BODY), 401, "invalid_api_key")
    assert locked.post("/v1/completions", BODY, headers={"authorization": f"Bearer {KEY}"})[0] == 200
    for path in ("/health", "/ping"):
        assert locked.request("GET", path)[0] == 200


def test_keys_are_kept_as_hashes_and_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("JAXLLM_API_KEY", f"{KEY},other-key-1")
    config = ServerConfig()
    assert config.key_digests == tuple(hashlib.sha256(one).digest() for one in (KEY.encode(), b"other-key-1"))
    assert KEY not in repr(config)
    for wrong in ("short", "with space in it", "ümläute-sind-keine", 5, "sha256:" + "A" * 64, "x" * 5000):
        with pytest.raises(ConfigError, match="an API key"):
            ServerConfig(api_keys=[wrong])


@pytest.mark.parametrize(
    "settings",
    [
        {"port": 70000},
        {"port": True},
        {"host": ""},
        {"max_body_bytes": 5},
        {"max_queued_requests": -1},
        {"max_queued_tokens": 0},
        {"request_timeout": float("nan")},
        {"served_model_names": [""]},
        {"max_body_bytes": 2**20, "max_total_body_bytes": 2**19},
    ],
    ids=str,
)
def test_settings_are_checked(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ServerConfig(**settings)


def test_a_variable_without_a_key_is_no_open_door(monkeypatch):
    for value in ("", ",", ",,"):
        monkeypatch.setenv("JAXLLM_API_KEY", value)
        with pytest.raises(ConfigError, match="is set and holds no key"):
            ServerConfig()
    assert ServerConfig(api_keys=()).api_keys == ()
    monkeypatch.delenv("JAXLLM_API_KEY")
    assert [
        host for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3") if ServerConfig(host=host).is_open
    ] == []
    assert all(ServerConfig(host=host).is_open for host in ("0.0.0.0", "::", "192.0.2.1", "a.example"))
    assert not ServerConfig(host="0.0.0.0", api_keys=(KEY,)).is_open


def test_nothing_is_shared_with_other_origins(server):
    origin = {"origin": "http://elsewhere.example", "access-control-request-method": "POST"}
    for method, body in (("OPTIONS", None), ("POST", BODY)):
        _, headers, _ = server.request(method, "/v1/completions", body, headers=origin)
        assert not [name for name in headers if name.lower().startswith("access-control")]
    text = server.request(
        "POST", "/v1/completions", json.dumps(BODY).encode(), {"content-type": "text/plain"}
    )
    assert text[0] == 400  # what a page of another origin may send without asking


# Sizes and times


def test_bodies_are_bounded(server):
    large = {**BODY, "prompt": "x" * 5000}
    assert "4096" in error_of(server.post("/v1/completions", large), 413, "request_too_large")["message"]
    chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    answer = raw(server, head + b"transfer-encoding: chunked\r\n\r\n" + chunk * 2)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"


def test_heads_are_bounded(server):
    for header in (b"x: " + b"y" * 4096, b"x: y" * 256 + b"\r\n" + b"y: z\r\n" * 300):
        for end in (b"\r\n\r\n", b"\r\n"):  # whole, or not
            answer = raw(server, b"GET /health HTTP/1.1\r\nhost: a\r\n" + header + end)
            if end == b"\r\n" and len(header) < 2048:
                assert answer == b""  # it is waited for
                continue
            assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
            found = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert found["code"] == "invalid_http"
            assert "over 2048 bytes" in found["message"]


def test_slow_heads_and_bodies_end(server):
    assert raw(server, b"GET /health HT") == b""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    answer = raw(server, head + b'content-length: 100\r\n\r\n{"prompt":')
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"


@pytest.mark.parametrize("path", ["/health", "/v1/completions", "/nowhere"])
def test_bodies_that_nobody_reads_do_not_keep_connections(server, path):
    with server.connect() as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n".encode())
        answer = connection.recv(65536)
        assert b"connection: close" in answer.lower()
        connection.sendall(b"x")
        assert read_all(connection) == b""


def test_small_bodies_that_nobody_wants_leave_the_connection_open(server):
    head = b"POST /nowhere HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nabcde"
    with server.connect() as connection:
        for _ in range(2):
            connection.sendall(head)
            answer = connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 404")
            assert b"connection: close" not in answer.lower()


def test_tiny_chunks_are_refused(server):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    with server.connect() as connection:
        connection.sendall(head + b"transfer-encoding: chu")
        time.sleep(0.1)
        connection.sendall(b"nked\r\n\r\n" + b"1\r\n \r\n" * 600)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"chunks of a few bytes" in answer


def test_what_only_looks_like_tiny_chunks_is_not(server):
    for body in ({"prompt": "chunked", "model": None}, {"prompt": "a"}):
        content = json.dumps(body).encode() + b"\r\n" * 1900
        assert server.post("/tokenize", content, headers={"x-note": "chunked"})[0] == 200
    head = b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close\r\n"
    content = b"".join(b"1\r\n%c\r\n" % byte for byte in json.dumps({"prompt": "a" * 100}).encode())
    answer = raw(server, head + b"transfer-encoding: chunked\r\n\r\n" + content + b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")


def test_heads_are_asked_for_and_targets_may_name_the_server(server):
    for path, status in (("/health", 200), ("/", 200), ("/metrics", 200), ("/nowhere", 404)):
        found = server.request("HEAD", path)
        assert (found[0], found[2]) == (status, b"")
    for target in (b"http://somewhere.example/version", b"HTTP://a:80/version?x=http://b/"):
        answer = raw(server, b"GET " + target + b" HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        assert b'"version"' in answer
    answer = raw(server, b"GET http://a HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    assert b"text/html" in answer


def test_idle_connections_are_closed_and_busy_ones_are_not(server):
    get = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(get)
        first = connection.recv(65536)
        connection.sendall(get)
        assert first.startswith(b"HTTP/1.1 200")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        assert connection.recv(65536) == b""  # after the keep-alive timeout


def test_connections_are_bounded(server):
    time.sleep(0.2)  # for those of other tests to be gone
    opened = [server.connect() for _ in range(20)]
    try:
        answer = raw(server, b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "overloaded"
    finally:
        for connection in opened:
            connection.close()
    deadline = time.monotonic() + 120
    while True:
        try:
            if server.request("GET", "/health")[0] == 200:
                break
        except OSError:
            pass
        assert time.monotonic() < deadline


def test_bodies_together_are_bounded(server):
    head = b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    head += b"content-length: 4096\r\n\r\n"
    opened = [server.connect() for _ in range(3)]
    answers = []
    for connection in opened:
        connection.sendall(head + b" " * 4000)
    for connection in opened:
        answers.append(read_all(connection).split(b"\r\n")[0])
        connection.close()
    assert sorted(answers) == [
        b"HTTP/1.1 408 Request Timeout",
        b"HTTP/1.1 408 Request Timeout",
        b"HTTP/1.1 503 Service Unavailable",
    ]
    assert server.post("/tokenize", {"prompt": "a"})[0] == 200


# The queue


def test_a_full_queue_is_answered_before_anything_is_read():
    with serving(
        max_queued_requests=0, max_queued_tokens=64, engine={"max_num_seqs": 2, "decode_buckets": [2]}
    ) as one:
        many = {**BODY, "n": 3, "temperature": 1}
        assert "takes 2" in error_of(one.post("/v1/completions", many), 400, None)["message"]
        threads = [threading.Thread(target=one.post, args=("/v1/completions", LONG)) for _ in range(2)]
        for thread in threads:
            thread.start()
        while one.admission.num_requests < 2:
            time.sleep(0.01)
        answer = one.post("/v1/completions", b"this is not even JSON")
        found = error_of(answer, 503, "overloaded")
        assert "2 requests" in found["message"]
        assert int(answer[1]["retry-after"]) >= 1
        assert one.request("GET", "/health")[0] == 200
        assert one.post("/tokenize", {"prompt": "a"})[0] == 200
        for thread in threads:
            thread.join()
        one.wait_until_idle()
        alone = {**BODY, "prompt": [7] * 80}  # one request alone may have more tokens
        assert one.post("/v1/completions", alone)[0] == 200
        first = threading.Thread(target=one.post, args=("/v1/completions", {**LONG, "prompt": [7] * 60}))
        first.start()
        while not one.admission.num_requests:
            time.sleep(0.01)
        error_of(one.post("/v1/completions", {**BODY, "prompt": [7] * 5}), 503, "overloaded")
        assert one.post("/v1/completions", {**BODY, "prompt": [7] * 4})[0] == 200
        first.join()
        one.wait_until_idle()
        metrics = one.request("GET", "/metrics")[2].decode()
        assert (
            'http_requests_total{model_name="demo_model",path="/v1/completions",status="503"} 2.0' in metrics
        )
        assert one.request("GET", "/live")[2]["totals"]["refused"] == 2


def test_prompts_are_bounded_before_they_are_tokenised(server, monkeypatch):
    monkeypatch.setattr("jaxllm.text.tokenizer.encode", None)  # nothing calls it
    limits = server.service.prompt_limits
    monkeypatch.setattr(server.service, "prompt_limits", type(limits)(2, 8, 100, 1024))
    for prompt, place in (("x" * 101, "prompt"), (["a", "x" * 101], "prompt[1]"), ([1] * 9, "prompt")):
        found = error_of(
            server.post("/v1/completions", {**BODY, "prompt": prompt}), 400, "context_length_exceeded"
        )
        assert found["param"] == place
    assert (
        "at most 2"
        in error_of(server.post("/v1/completions", {**BODY, "prompt": ["a"] * 3}), 400, None)["message"]
    )


def test_chats_have_room_before_they_are_rendered(monkeypatch):
    rendered = []
    conversation = jaxllm.server.chat.conversation

    def counting(*args):
        rendered.append(args)
        return conversation(*args)

    monkeypatch.setattr("jaxllm.server.chat.conversation", counting)
    with serving({"max_num_seqs": 1, "decode_buckets": [1]}, max_queued_requests=0) as one:
        first = threading.Thread(target=one.post, args=("/v1/completions", LONG))
        first.start()
        while not one.admission.num_requests:
            time.sleep(0.01)
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        error_of(one.post("/v1/chat/completions", chat), 503, "overloaded")
        first.join()
        assert not rendered
        assert one.post("/v1/chat/completions", chat)[0] == 200
        assert len(rendered) == 1


def test_what_is_read_late_ends_with_the_error_and_not_before_what_came(monkeypatch):
    class Builder:
        def add(self, delta):
            return delta.token_ids

    async def read():
        generation = Generation(None, {"r": Builder()})
        generation.receive("r", Delta(0, [1], [], [], None, None))
        generation.receive("r", Delta(1, [2], [], [], None, None))
        generation.fail(ValueError("over"))
        generation.receive("r", Delta(2, [3], [], [], "abort", None))
        assert await anext(generation) == [1, 2]
        with pytest.raises(ValueError, match="over"):
            await anext(generation)

    asyncio.run(read())


# Clients that leave


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_everything_at_once(server, stream):
    content = json.dumps({**LONG, "stream": stream, "n": 4, "temperature": 1}).encode()
    with server.connect() as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            + f"content-length: {len(content)}\r\n\r\n".encode()
            + content
        )
        while server.engine.num_live < 4:
            time.sleep(0.005)
    server.wait_until_idle()


def test_a_client_that_does_not_read_is_let_go_of():
    with serving(send_timeout=0.5) as running, running.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = {**LONG, "stream": True, "n": 8, "temperature": 1, "logprobs": 20}
        content = json.dumps(body).encode()
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            + f"content-length: {len(content)}\r\n\r\n".encode()
            + content
        )
        while not running.core.num_live:
            time.sleep(0.005)
        running.wait_until_idle(60)
        assert running.service.stats.totals.requests == 0  # its end was never written


def test_a_client_that_reads_slowly_gets_everything():
    with serving(send_timeout=1.0) as running, running.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        while not running.connections():
            time.sleep(0.005)
        [there] = running.connections()
        own_end = there.transport.get_extra_info("socket")
        own_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        body = {**LONG, "stream": True, "n": 8, "temperature": 1, "logprobs": 20, "max_tokens": 100}
        content = json.dumps(body).encode()
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            + f"content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode()
            + content
        )
        while not there._num_unread:  # until the server waits, however long it takes to have that much to say
            time.sleep(0.01)
        found, num_unread = b"", set()
        started = time.monotonic()
        while chunk := connection.recv(4096 if time.monotonic() < started + 3 else 65536):
            found += chunk
            num_unread.add(there._num_unread)
            time.sleep(0.03 if time.monotonic() < started + 3 else 0)
        assert len(num_unread) > 2  # it has been looked up
        assert b"data: [DONE]" in found


@pytest.fixture(scope="module")
def expected():
    """64 greedy tokens of 200 prompts, by the offline engine."""
    prompts = [[index + 1, 2 * index + 1, 7] for index in range(200)]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM(**SMALL) as llm:
        return prompts, [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


async def read_or_leave(session, url, prompt, seed):
    """All tokens of a stream, or None if it was left after a random number of chunks."""
    draw = random.Random(seed)
    leaves_after = draw.randrange(12) if draw.random() < 0.5 else None
    body = {"prompt": prompt, "max_tokens": 64, "temperature": 0, "ignore_eos": True, "stream": True}
    tokens = []
    async with session.post(f"{url}/v1/completions", json={**body, "return_token_ids": True}) as response:
        assert response.status == 200
        count = 0
        async for line in response.content:
            if count == leaves_after:
                return None
            if line.startswith(b"data: {"):
                count += 1
                tokens += json.loads(line[6:])["choices"][0]["token_ids"]
    return tokens


def test_survivors_of_200_streams_have_the_offline_tokens_and_nothing_leaks(expected):
    prompts, outputs = expected
    with serving(engine={"num_gpu_blocks_override": 40}, max_queued_requests=400) as running:

        async def everything():
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as session:
                reads = [read_or_leave(session, running.url, one, seed) for seed, one in enumerate(prompts)]
                return await asyncio.gather(*reads)

        found = asyncio.run(everything())
        stayed = [place for place, tokens in enumerate(found) if tokens is not None]
        assert 60 < len(stayed) < 140
        assert all(found[place] == outputs[place] for place in stayed)
        running.wait_until_idle()
        assert running.engine.scheduler.num_waiting == running.engine.scheduler.num_running == 0
        assert not running.core._inbox


# Failures


def test_a_dead_core_is_told_everywhere():
    with serving() as running:
        answers, has_begun = {}, threading.Event()

        def stream():
            answers[0] = running.stream("/v1/completions", {**LONG, "stream": True}, has_begun.set)

        def ask():
            answers[1] = running.post("/v1/completions", LONG)

        threads = [threading.Thread(target=target) for target in (stream, ask)]
        for thread in threads:
            thread.start()
        assert has_begun.wait(300)
        while running.engine.num_live < 2:
            time.sleep(0.005)

        def fail(scheduled):
            raise RuntimeError("the device is gone: secret detail")

        running.service.made.executor.execute = fail
        for thread in threads:
            thread.join()
        *_, last = read_events(answers[0])
        assert last["error"]["code"] == "engine_failed"
        assert "secret" not in json.dumps([last, answers[1][2]])
        error_of(answers[1], 503, "engine_failed")
        for answer in (running.request("GET", "/health"), running.post("/v1/completions", BODY)):
            error_of(answer, 503, "engine_failed")
        assert running.request("GET", "/live")[2]["is_healthy"] is False
        assert (
            'jaxllm:engine_healthy{model_name="demo_model"} 0.0'
            in running.request("GET", "/metrics")[2].decode()
        )
        assert running.request("GET", "/v1/models")[0] == 200
        assert not running.core.num_live
        assert not running.admission.num_requests


def test_a_thread_that_ends_without_a_word_does_not_leave_anybody_waiting(monkeypatch):
    with serving() as running:
        monkeypatch.setattr("jaxllm.engine.thread.EngineThread._run", lambda self: None)
        error_of(running.post("/v1/completions", BODY), 503, "engine_failed")
        monkeypatch.undo()
        assert running.post("/v1/completions", BODY)[0] == 200


def test_a_policy_that_raises_ends_its_requests_and_the_server_goes_on(monkeypatch):
    with serving() as running:
        plan = PolicyPlanner.plan

        def fail(self, now):
            raise ZeroDivisionError("in a policy")

        monkeypatch.setattr(PolicyPlanner, "plan", fail)
        answer = running.post("/v1/completions", BODY)
        error_of(answer, 500, "internal")
        monkeypatch.setattr(PolicyPlanner, "plan", plan)
        assert running.post("/v1/completions", BODY)[0] == 200
        running.wait_until_idle()
