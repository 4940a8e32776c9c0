"""Replicas of a stand-in server on the tests' Ray cluster, and clients of theirs."""

import contextlib
import functools
import json
import time
import urllib.request

from cluster_app import FakeApp

from jaxllm.cluster.serve import Apps, ClusterConfig
from jaxllm.cluster.serve import started as started_cluster
from jaxllm.server.config import ServerConfig


@contextlib.contextmanager
def serving(folder, **settings):
    config = ClusterConfig(health_check_seconds=0.5, **settings)
    server = ServerConfig(port=0, max_body_bytes=4096, shutdown_timeout=1.0)
    with started_cluster(Apps(functools.partial(FakeApp, folder), cpus=0.1), server, config) as running:
        yield running.url


def post(url, body, path="/v1/completions", **headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.loads(response.read())


def get(url, path, **headers):
    return json.loads(text(url, path, **headers))


def text(url, path, **headers):
    with urllib.request.urlopen(urllib.request.Request(url + path, headers=headers), timeout=30) as response:
        return response.read().decode()


def started(folder):
    return {int(path.name.split("-")[1]) for path in folder.glob("started-*")}


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def events(url, body):
    data = json.dumps(body).encode()
    request = urllib.request.Request(url + "/v1/completions", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response:
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ").decode().strip()


def text_of(url, body, key):
    """What a stream says, put together."""
    data = json.dumps({"model": "demo", **body, "stream": True}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    text = ""
    with urllib.request.urlopen(
        urllib.request.Request(url + "/v1/completions", data, headers), timeout=30
    ) as one:
        for line in one:
            if line.startswith(b"data: {"):
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
    return text
