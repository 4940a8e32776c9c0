import argparse
import asyncio
import json

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from jaxllm.cli import serve_ray
from jaxllm.cluster.autoscaling import QueuedTokens
from jaxllm.cluster.forwarding import forwarded
from jaxllm.cluster.ingress import Ingress
from jaxllm.cluster.merged_metrics import merge_metrics
from jaxllm.cluster.replica import Replica
from jaxllm.cluster.serve import ClusterConfig
from jaxllm.commands.needs import check_needs
from jaxllm.errors import ConfigError, EngineError
from jaxllm.server.config import ServerConfig

SCOPE = {
    "type": "http",
    "http_version": "1.1",
    "method": "POST",
    "scheme": "http",
    "path": "/v1/completions",
    "raw_path": b"/v1/completions",
    "query_string": b"",
    "headers": [(b"content-type", b"application/json")],
    "client": ("127.0.0.1", 1),
    "server": ("127.0.0.1", 8000),
}
JSON = [(b"content-type", b"application/json")]
MORE = {"type": "http.response.body", "body": b"", "more_body": True}
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]


class LostError(Exception):
    pass


def answer_of(body, status=200, headers=JSON, then=()):
    """What a replica sends: its batches, and errors in their places."""
    start = {"type": "http.response.start", "status": status, "headers": headers}
    return [[start], [{"type": "http.response.body", "body": body, "more_body": bool(then)}], *then]


class Replicas:
    """Answers one request after another as it is told to."""

    def __init__(self, *answers, names=("a", "b", "c")):
        self._answers, self._names = list(answers), names
        self.requests, self.num_closed = [], 0

    async def send(self, request):
        self.requests.append(request)
        request.replicas = tuple(self._names)
        request.tried.append(request.target or self._names[(len(self.requests) - 1) % len(self._names)])
        try:
            for batch in self._answers.pop(0):
                if isinstance(batch, BaseException):
                    raise batch
                yield batch
        finally:
            self.num_closed += 1


def ask(
    replicas, body=b"{}", path="/v1/completions", method="POST", query=b"", chunks=None, scope=None, **config
):
    """Status, headers and body of the response."""

    async def run():
        parts = [body] if chunks is None else list(chunks)

        async def receive():
            if not parts:
                await asyncio.sleep(60)
            part = parts.pop(0)
            more = bool(parts) or (chunks is not None and chunks[-1] == b"...")
            return {"type": "http.request", "body": part, "more_body": more}

        ingress = Ingress(replicas.send, ServerConfig(**config), (LostError,))
        asked = {**SCOPE, "path": path, "method": method, "query_string": query, **(scope or {})}
        response = await ingress.answer(Request(asked, receive))
        sent = []

        async def send(message):
            sent.append(message)

        await response({**SCOPE, "path": path, "asgi": {"spec_version": "2.4"}}, receive, send)
        return sent[0]["status"], dict(sent[0]["headers"]), b"".join(one.get("body", b"") for one in sent)

    return asyncio.run(run())


def test_an_ingress_that_is_to_end_refuses_what_is_new_and_what_has_not_come():
    replicas = Replicas(answer_of(b"yes"))

    async def run():
        never = asyncio.Event()
        sent = [{"type": "http.request", "body": b"{", "more_body": True}]

        async def receive():
            if not sent:
                await never.wait()
            return sent.pop()

        ingress = Ingress(replicas.send, ServerConfig(), (LostError,))
        half = asyncio.create_task(ingress.answer(Request(dict(SCOPE), receive)))
        await asyncio.sleep(0)
        ingress.refuse_new()
        refused = await ingress.answer(Request(dict(SCOPE), receive))
        assert (refused.status_code, json.loads(refused.body)["error"]["code"]) == (503, "shutting_down")
        await asyncio.sleep(0.01)
        assert not half.done()
        ingress.close()
        assert (await half).status_code == 503

    asyncio.run(run())
    assert not replicas.requests


@pytest.mark.parametrize("begins", [False, True])
def test_a_client_that_leaves_ends_its_request(begins):
    closed = []

    async def run():
        left = asyncio.Event()
        sent = [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def send(request):
            request.tried.append("a")
            try:
                if begins:
                    for batch in answer_of(b"data: 1\n\n", headers=EVENTS, then=[[MORE]]):
                        yield batch
                await asyncio.sleep(3600)
            finally:
                closed.append(True)

        async def receive():
            if not sent:
                await left.wait()
                return {"type": "http.disconnect"}
            return sent.pop()

        messages = []

        async def take(message):
            messages.append(message)

        ingress = Ingress(send, ServerConfig(), (LostError,))
        task = asyncio.create_task(ingress(dict(SCOPE), receive, take))
        while sent or (begins and len(messages) < 2):
            await asyncio.sleep(0.001)
        left.set()
        await task
        assert messages[0]["status"] == (200 if begins else 499)

    asyncio.run(run())
    assert closed == [True]


def test_replicas_hear_how_far_they_have_been_read():
    told = []
    parts = [[{"type": "http.response.body", "body": b"x" * 2**17, "more_body": True}] for _ in range(5)]
    answers = Replicas(answer_of(b"data: 1\n\n", headers=EVENTS, then=parts))

    async def run():
        sent = [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive():
            if not sent:
                await asyncio.sleep(3600)
            return sent.pop()

        async def take(message):
            """Read it."""

        ingress = Ingress(answers.send, ServerConfig(), (LostError,), lambda *what: told.append(what))
        response = await ingress.answer(Request(dict(SCOPE), receive))
        await response({**SCOPE, "asgi": {"spec_version": "2.4"}}, receive, take)

    asyncio.run(run())
    flow_id = answers.requests[0].flow_id
    assert told == [("a", flow_id, 2**18 + 9), ("a", flow_id, 2**18)]


def test_responses_are_passed_on_as_they_are():
    headers = [*JSON, (b"x-request-id", b"7"), (b"retry-after", b"2")]
    replicas = Replicas(answer_of(b'{"a": 1}', 418, headers))
    assert ask(replicas, b'{"prompt": "x"}') == (418, dict(headers), b'{"a": 1}')
    assert replicas.requests[0].body == b'{"prompt": "x"}'
    assert replicas.num_closed == 1


def test_a_replica_that_dies_first_is_replaced_and_what_it_began_is_not_seen():
    start = {"type": "http.response.start", "status": 200, "headers": EVENTS}
    replicas = Replicas([LostError()], [[start], LostError()], answer_of(b"good"))
    assert ask(replicas)[2] == b"good"
    assert [request.tried for request in replicas.requests] == [["a", "b", "c"]] * 3


def test_the_state_is_that_of_the_replica_that_is_named():
    live = b'{"model": "m"}'
    replicas = Replicas(answer_of(live), answer_of(live))
    _, headers, body = ask(replicas, path="/live", method="GET", query=b"replica=b")
    assert body == live
    assert (headers[b"x-jaxllm-replica"], headers[b"x-jaxllm-replicas"]) == (b"b", b"a,b,c")
    _, headers, _ = ask(replicas, path="/live", method="GET")
    assert replicas.requests[1].target is None
    assert headers[b"x-jaxllm-replica"] == b"b"  # the next one
    lost = Replicas(*[[RuntimeError("nobody is there")]] * 2)
    assert ask(lost, path="/live", method="GET")[0] == 500
    assert b"x-jaxllm-replica" not in ask(Replicas(answer_of(live)), path="/version", method="GET")[1]


def test_when_all_of_them_die_it_is_said():
    status, headers, body = ask(Replicas([LostError()], [LostError()], [LostError()]))
    assert status == 503
    assert headers[b"retry-after"] == b"1"
    assert json.loads(body)["error"]["code"] == "replica_died"


def test_a_replica_without_room_is_passed_by_while_there_are_others():
    busy = answer_of(b"busy", 503)
    assert ask(Replicas(busy, answer_of(b"good")))[2] == b"good"
    assert ask(Replicas(busy, busy, names="ab"))[::2] == (503, b"busy")
    alone = Replicas(busy, names="a")
    assert ask(alone)[::2] == (503, b"busy")
    assert alone.num_closed == 1


def test_a_stream_that_breaks_off_ends_with_an_error():
    more = [{"type": "http.response.body", "body": b"data: 2\n\n", "more_body": True}]
    body = ask(Replicas(answer_of(b"data: 1\n\n", headers=EVENTS, then=[more, LostError()])))[2]
    *some, last, end = body.decode().strip().split("\n\n")
    assert (some, end) == (["data: 1", "data: 2"], "data: [DONE]")
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"


def test_anything_else_breaks_off():
    with pytest.raises(EngineError, match="broke off"):
        ask(Replicas(answer_of(b"half", then=[LostError()])))


def test_a_replica_that_raises_is_no_reason_to_ask_another(caplog):
    replicas = Replicas([RuntimeError("broken")], answer_of(b"good"))
    status, _, body = ask(replicas)
    assert status == 500
    assert json.loads(body)["error"]["code"] == "internal_error"
    assert "broken" in caplog.text


def test_bodies_are_bounded_in_size_and_time():
    replicas = Replicas()
    declared = {"headers": [*JSON, (b"content-length", b"9000")]}
    for sent in ({}, declared):
        status, _, body = ask(replicas, chunks=[b"x" * 1000] * 9, scope=sent, max_body_bytes=2000)
        assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")
    assert not replicas.requests
    status, _, body = ask(Replicas(), chunks=[b"..."], request_timeout=0.05)
    assert status == 408
    assert "0.05 seconds" in json.loads(body)["error"]["message"]


def test_what_is_routed_by_its_prompt():
    prompt = json.dumps({"prompt": "x" * 400, "max_tokens": 7}).encode()
    request = forwarded(SCOPE, prompt)
    assert len(request.prompt.keys) == 6
    assert request.max_tokens == 7
    assert forwarded({**SCOPE, "path": "/tokenize"}, prompt).prompt.keys == ()
    for body in (b"", b"[1]", b"{", b'{"prompt": 1}', b"[" * 100_000):
        assert forwarded(SCOPE, body).prompt.keys == ()


def test_metrics_are_those_of_all_replicas():
    page = b'# TYPE n counter\nn{model="m"} 1\n'
    replicas = Replicas(*(answer_of(page, headers=[(b"content-type", b"text/plain")]) for _ in range(3)))
    status, _, body = ask(replicas, path="/metrics", method="GET")
    assert status == 200
    lines = body.decode().splitlines()
    assert lines[0] == "# TYPE n counter"
    assert sorted(lines[1:]) == [f'n{{replica="{name}",model="m"}} 1' for name in "abc"]
    refused = ask(Replicas(answer_of(b"no", 401)), path="/metrics", method="GET")
    assert refused[::2] == (401, b"no")


def test_a_replica_that_dies_while_it_is_asked_for_metrics_is_left_out():
    page = b"# TYPE x gauge\nx 1.0\n"
    broken = answer_of(page, then=[LostError()])
    _, _, body = ask(Replicas(broken, answer_of(page), answer_of(page)), path="/metrics", method="GET")
    assert [line for line in body.decode().splitlines() if "#" not in line] == [
        'x{replica="b"} 1.0',
        'x{replica="c"} 1.0',
    ]


def test_who_has_no_key_is_sent_away_before_anything_is_read():
    replicas = Replicas()
    status, headers, body = ask(replicas, chunks=(), api_keys=["a secret key".replace(" ", "-")])
    assert status == 401
    assert json.loads(body)["error"]["code"] == "invalid_api_key"
    assert headers[b"www-authenticate"].startswith(b"Basic")
    assert not replicas.requests
    open_one = Replicas(answer_of(b""))
    assert ask(open_one, path="/health", method="GET", api_keys=["a-secret-key"])[0] == 200


def test_bodies_together_are_bounded_while_they_are_held():
    async def run():
        may_end = asyncio.Event()

        async def send(request):
            request.tried.append("a")
            await may_end.wait()
            for batch in answer_of(b"{}"):
                yield batch

        def client():
            sent = [{"type": "http.request", "body": b" " * 1500, "more_body": False}]

            async def receive():
                if not sent:
                    await asyncio.sleep(3600)
                return sent.pop()

            return receive

        async def take(message):
            pass

        config = ServerConfig(max_body_bytes=2000, max_total_body_bytes=4000)
        ingress = Ingress(send, config, (LostError,))

        async def ask_once():
            receive = client()
            response = await ingress.answer(Request(dict(SCOPE), receive))
            await response({**SCOPE, "asgi": {"spec_version": "2.4"}}, receive, take)
            return response.status_code

        held = [asyncio.create_task(ask_once()) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert await ask_once() == 503
        may_end.set()
        assert await asyncio.gather(*held) == [200, 200]
        assert await ask_once() == 200

    asyncio.run(run())


def test_pages_of_metrics_are_merged_metric_by_metric():
    first = '# HELP a what it is\n# TYPE a counter\na 1\n# TYPE b gauge\nb{x="{"} 2\n'
    second = "# HELP a what it is\n# TYPE a counter\na 3\n"
    assert merge_metrics({"one": first, "two": second}).splitlines() == [
        "# HELP a what it is",
        "# TYPE a counter",
        'a{replica="one"} 1',
        'a{replica="two"} 3',
        "# TYPE b gauge",
        'b{replica="one",x="{"} 2',
    ]


# Replicas


class App:
    """What a replica runs, with an application of the tests' own."""

    def __init__(self, *routes):
        self.app = Starlette(routes=[Route("/v1/completions", route, methods=["POST"]) for route in routes])
        self.error = None

    def check_health(self):
        if self.error is not None:
            raise self.error

    def queued_tokens(self):
        return 7

    def cache_tokens(self):
        return 1000

    def bytes_per_token(self):
        return 2.5

    async def drain(self, seconds):
        self.drained = seconds


def call(route, body=b"{}"):
    async def run():
        replica = Replica(lambda: App(route))
        batches = [batch async for batch in replica.handle(forwarded(SCOPE, body))]
        return [message for batch in batches for message in batch]

    return asyncio.run(run())


def test_a_replica_answers_calls_as_requests():
    async def echo(request):
        return JSONResponse([await request.json(), request.headers["content-type"], request.url.path])

    start, *rest = call(echo, b'{"a": 1}')
    assert start["status"] == 200
    body = b"".join(message["body"] for message in rest)
    assert json.loads(body) == [{"a": 1}, "application/json", "/v1/completions"]


def test_an_application_that_fails_fails_its_call():
    async def fail(request):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        call(fail)


def test_whoever_leaves_ends_what_runs_for_him():
    ended = []

    async def stream(request):
        async def endless():
            try:
                while True:
                    yield b"x"
                    await asyncio.sleep(0)
            finally:
                ended.append(True)

        return StreamingResponse(endless())

    async def run():
        replica = Replica(lambda: App(stream))
        batches = replica.handle(forwarded(SCOPE, b"{}"))
        await anext(batches)
        await anext(batches)
        await batches.aclose()
        assert ended

    asyncio.run(run())


def test_a_replica_waits_for_who_does_not_read():
    produced, acknowledged = [], []

    async def endless(request):
        async def parts():
            for number in range(1000):
                produced.append(number)
                yield b"x" * 2**16

        return StreamingResponse(parts(), media_type="text/event-stream")

    async def run():
        replica = Replica(lambda: App(endless))
        request = forwarded(SCOPE, b"{}")
        batches = replica.handle(request)
        size = 0

        async def read_on():
            nonlocal size
            async for batch in batches:
                size += sum(len(message.get("body", b"")) for message in batch)

        reader = asyncio.create_task(read_on())
        for _ in range(3):
            for _ in range(5000):  # turns of the one loop that all of it runs in
                await asyncio.sleep(0)
            assert size < sum(acknowledged) + 2**23  # of 2**26
            assert len(produced) * 2**16 < size + 2**23
            acknowledged.append(size // 2)
            await replica.acknowledge(request, request.flow_id, size // 2)
            await replica.acknowledge(request, "another", 2**30)
        while size < 1000 * 2**16:
            await replica.acknowledge(request, request.flow_id, 2**20)
            await asyncio.sleep(0.001)
        await reader
        await replica.acknowledge(request, request.flow_id, 1)  # late, and no longer of interest

    asyncio.run(run())
    assert len(produced) == 1000


def test_a_replica_is_as_well_as_its_engine():
    async def hello(request):
        return PlainTextResponse("hello")

    async def run():
        app = App(hello)
        replica = Replica(lambda: app)
        await replica.check_health()
        assert replica.record_routing_stats() == {
            "queued_tokens": 7,
            "cache_tokens": 1000,
            "bytes_per_token": 2.5,
        }
        assert replica.record_autoscaling_stats() == {"queued_tokens": 7.0}
        await replica.drain(2.0)
        assert app.drained == 2.0
        app.error = EngineError("it has failed")
        with pytest.raises(EngineError):
            await replica.check_health()

    asyncio.run(run())


# Numbers of replicas


@pytest.mark.parametrize(
    ("queued", "wanted"), [([], 1), ([0, 0], 1), ([100], 1), ([101], 2), ([90, 120, 91], 4)]
)
def test_there_are_replicas_for_what_is_queued(queued, wanted):
    assert QueuedTokens(target=100).wanted(queued) == wanted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_replicas": 0}, "must be an integer from 1"),
        ({"num_replicas": 3, "max_replicas": 2}, "below num_replicas"),
        ({"policy": "best"}, "use one of prefix"),
        ({"target_queued_tokens": 1.5}, "an integer"),
    ],
)
def test_settings_of_clusters_are_checked(settings, message):
    with pytest.raises(ConfigError, match=message):
        ClusterConfig(**settings)


# The command


def parsed(*words):
    parser = argparse.ArgumentParser()
    serve_ray.add_options(parser)
    return parser.parse_args([*words])


def test_options_of_clusters_come_with_replicas():
    check_needs(parsed())
    check_needs(parsed("--replicas=2", "--routing=prefix"))
    for option in ("--max-replicas=2", "--ray-address=auto"):
        with pytest.raises(ConfigError, match=f"{option.partition('=')[0]} does nothing without --replicas"):
            check_needs(parsed(option))
    with pytest.raises(ConfigError, match="--target-queued-tokens does nothing without --max-replicas"):
        check_needs(parsed("--replicas=2", "--target-queued-tokens=9"))
