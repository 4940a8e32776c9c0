"""Servers in threads and in processes, and raw connections to them."""

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.parse

from jaxllm.engine.config import EngineConfig
from jaxllm.server.config import ServerConfig
from jaxllm.server.run import listen, make_server
from jaxllm.server.service import Service

SMALL = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "decode_buckets": [8],
    "prefill_buckets": [64],
    "num_scheduler_steps": 1,
    "num_gpu_blocks_override": 512,
}


class Running:
    """A server in a thread of this process, and what is behind it."""

    def __init__(self, service, url, server):
        self._server = server
        self.service, self.url = service, url
        self.core, self.engine, self.admission = service.core, service.made.engine, service.core.admission
        self.host, self.port = urllib.parse.urlsplit(url).hostname, urllib.parse.urlsplit(url).port

    def request(self, method, path, body=None, headers=None, timeout=60):
        """Status, headers and content, parsed if it is JSON; a body that is no bytes is sent as JSON."""
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **(headers or {})} if body is not None else headers or {}
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        with contextlib.closing(connection):
            connection.request(method, path, content, sent)
            response = connection.getresponse()
            found = response.read()
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return response.status, response.headers, json.loads(found) if is_json and found else found

    def stream(self, path, body, began):
        """The content of a stream that has begun; `began` is called when the first event has come."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            lines = []
            while not any(line.startswith(b"data: ") for line in lines):
                lines.append(response.readline())
            began()
            return b"".join(lines) + response.read()

    def post(self, path, body, **others):
        return self.request("POST", path, body, **others)

    def connections(self):
        """The server's side of those that are open."""
        return list(self._server.server_state.connections)

    def connect(self):
        return socket.create_connection((self.host, self.port), timeout=30)

    def wait_until_idle(self, seconds=300):
        """Wait until nothing is under way any more, and nothing is held."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not (self.core.num_live or self.admission.num_requests or self.engine.has_unfinished_requests):
                break
            time.sleep(0.01)
        assert not self.core.num_live
        assert (self.admission.num_requests, self.admission.num_tokens) == (0, 0)
        assert not self.engine.has_unfinished_requests
        scheduler = self.engine.scheduler
        scheduler.check()
        assert scheduler.num_free_blocks == scheduler.config.num_gpu_blocks


@contextlib.contextmanager
def serving(engine=None, policy=None, **settings):
    """A server of the demo model."""
    config = EngineConfig(**{**SMALL, "scheduler_policy": policy, **(engine or {})})
    settings = {"port": 0, "api_keys": (), "log_requests": False, **settings}
    service = Service.load(config, ServerConfig(**settings))
    lines = []
    is_ready = threading.Event()

    def tell(line):
        lines.append(line)
        is_ready.set()

    with listen(service.config.host, service.config.port) as listener:
        server = make_server(service, listener, tell)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            assert is_ready.wait(60)
            yield Running(service, lines[0].rpartition(" ")[2], server)
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


@contextlib.contextmanager
def served_by_command(*arguments, environment=None):
    """`jaxllm serve` in a process of its own, and its URL; it is killed if it is still there at the end."""
    options = [f"--{name.replace('_', '-')}={option(value)}" for name, value in SMALL.items()]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxllm", "serve", "--port=0", *options, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    lines = []
    url = None
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"serving .* on (http://\S+)", line):
            url = found.group(1)
            break
    drain = threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True)
    drain.start()
    try:
        assert url is not None, "".join(lines)
        process.lines = lines
        yield process, url
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
        drain.join(10)
        process.stderr.close()


def option(value):
    return ",".join(map(str, value)) if isinstance(value, list) else value


def read_events(content):
    """The JSON values of server-sent events; the last one must be [DONE]. Comments come where it is slow."""
    lines = [line for line in content.decode().split("\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    values = [line.removeprefix("data: ") for line in lines]
    assert values.pop() == "[DONE]"
    return [json.loads(value) for value in values]
