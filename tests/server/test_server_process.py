"""The command `jaxllm serve`: starts, ends when it is told to, and leaves nothing behind."""

import gc
import json
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
from server_helpers import read_events, served_by_command

from jaxllm.cli.main import main
from jaxllm.server.run import listen, tune_interpreter

LONG = {"prompt": [7, 8, 9], "max_tokens": 900, "temperature": 0, "ignore_eos": True, "stream": True}


def post(url, body):
    content = json.dumps(body).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", content, {"content-type": "application/json"}, method="POST"
    )
    return urllib.request.urlopen(request, timeout=60)


class Stream(threading.Thread):
    """Reads a long stream, and tells when it has begun."""

    def __init__(self, url):
        super().__init__()
        self._url, self.has_begun, self.content = url, threading.Event(), b""
        self.start()
        assert self.has_begun.wait(60)

    def run(self):
        with post(self._url, LONG) as response:
            self.content = response.readline()
            self.has_begun.set()
            self.content += response.read()


def status(url, path="/health"):
    try:
        with urllib.request.urlopen(f"{url}{path}", timeout=10) as response:
            return response.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_requests_under_way_end_before_the_server_does():
    with served_by_command("--shutdown-timeout=60", "--no-log-requests", "--served-model-name=tiny") as (
        process,
        url,
    ):
        stream = Stream(url)
        process.send_signal(signal.SIGTERM)
        while status(url) == 200:
            time.sleep(0.01)
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(url, LONG)
        with caught.value as refused:
            assert (refused.code, refused.headers["retry-after"]) == (503, "1")
            assert json.load(refused)["error"]["code"] == "shutting_down"
        stream.join()
        *_, last = read_events(stream.content)
        assert last["model"] == "tiny"
        assert last["choices"][0]["finish_reason"] == "length"
        assert process.wait(30) == 0


def test_what_does_not_end_in_time_is_aborted_with_an_error():
    with served_by_command("--shutdown-timeout=0") as (process, url):
        stream = Stream(url)
        body = {"prompt": "a", "max_tokens": 2, "request_id": "r-1", "user": "somebody"}
        with post(url, body) as response:
            request_id = response.headers["x-request-id"]
        assert status(url, "/nowhere") == 404
        process.send_signal(signal.SIGINT)
        stream.join()
        *_, last = read_events(stream.content)
        assert last["error"]["code"] == "shutting_down"
        assert process.wait(30) == 0
    [line] = [line for line in process.lines if request_id in line]
    assert "POST /v1/completions 200" in line
    assert "user='somebody'" in line
    assert "2 + 2 tokens" in line
    assert any("GET other 404" in line for line in process.lines)


def test_half_a_request_does_not_keep_the_server():
    with served_by_command("--shutdown-timeout=60", "--no-log-requests") as (process, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
                b'content-length: 100\r\n\r\n{"prompt":'
            )
            assert status(url) == 200  # so the other has been taken
            process.send_signal(signal.SIGTERM)
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "shutting_down"
        assert process.wait(30) == 0


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_wait(second):
    with served_by_command("--shutdown-timeout=3600", "--no-log-requests") as (process, url):
        stream = Stream(url)
        process.send_signal(signal.SIGTERM)
        while status(url) == 200:
            time.sleep(0.01)
        process.send_signal(second)
        assert process.wait(30) == 0
        stream.join()
        assert b"shutting_down" in stream.content


def test_an_address_that_is_taken_is_an_error_before_anything_is_loaded(capsys):
    with listen("127.0.0.1", 0) as listener:
        assert main(["serve", "--port", str(listener.getsockname()[1])]) == 2
        assert "choose another --host or --port" in capsys.readouterr().err
    assert main(["serve", "--port", "70000"]) == 2
    assert "--port 70000" in capsys.readouterr().err
    assert main(["serve", "--api-key", "short"]) == 2
    assert "an API key must be" in capsys.readouterr().err


def test_what_is_there_when_serving_begins_is_not_collected_again():
    before, interval = gc.get_freeze_count(), sys.getswitchinterval()
    kept = []
    assert any(one is kept for one in gc.get_objects())
    try:
        tune_interpreter()
        assert gc.get_freeze_count() > before
        assert not any(one is kept for one in gc.get_objects())
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval)
