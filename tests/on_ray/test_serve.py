import json
import os
import signal
import socket
import time
import urllib.error

import pytest
from cluster_helpers import pids_of
from serve_helpers import events, get, post, serving, started, started_cluster, wait_until

from jaxllm.cluster.serve import ClusterConfig
from jaxllm.errors import ConfigError
from jaxllm.server.config import ServerConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def url(cluster, folder):
    with serving(folder, num_replicas=2) as found:
        yield found


def test_requests_reach_replicas_as_they_are(url):
    assert get(url, "/who", **{"x-mine": "yes"})["header"] == "yes"
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(url, "/absent")
    assert caught.value.code == 404
    caught.value.close()
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(url, b"{not json")
    assert caught.value.code == 500  # the stand-in's own word for it
    caught.value.close()


def test_conversations_stay_where_they_were_and_spread(url):
    homes = []
    for conversation in range(6):
        spoken = f"{conversation} " * 40
        first = post(url, {"prompt": spoken})
        assert first["cached"] < 10
        for turn in range(3):
            spoken += f"more of {turn} " * 20
            answer = post(url, {"prompt": spoken})
            assert answer["pid"] == first["pid"]
            assert answer["cached"] >= answer["prompt"] - 200
        homes.append(first["pid"])
    assert len(set(homes)) == 2


def test_streams_come_as_they_are_made(url):
    times = []
    for event in events(url, {"prompt": "x", "stream": 5, "pause": 0.1}):
        times.append((event, time.monotonic()))
    assert [event for event, _ in times[1:]] == ["0", "1", "2", "3", "4", "[DONE]"]
    assert times[-1][1] - times[0][1] > 0.3


def test_a_client_that_leaves_ends_its_request(url, folder):
    stream = events(url, {"prompt": "x", "stream": 1000, "pause": 0.05})
    next(stream)
    stream.close()
    wait_until((folder / "cancelled").exists)


def test_who_does_not_read_holds_little_memory(url, folder):
    produced = folder / "produced"
    before = produced.stat().st_size
    stream = events(url, {"prompt": "x", "stream": 10000, "padding": 10000})
    next(stream)
    wait_until(lambda: produced.stat().st_size > before + 100)
    last = 0
    while (number := produced.stat().st_size - before) != last:
        last = number
        time.sleep(1)
    assert last < 2000  # of 100 MB; the system's own buffers take some megabytes
    assert sum(1 for _ in stream) > 9000  # and then all of it comes


def test_what_is_no_request_is_refused_in_words(url):
    host, port = url.removeprefix("http://").split(":")
    for sent, status in (
        (b"what is this?\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 70000 + b"\r\n\r\n", 431),
        (b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999\r\n\r\n", 413),
        (b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n", 400),
    ):
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(sent)
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
        assert int(answer.split()[1]) == status
        assert set(json.loads(answer.partition(b"\r\n\r\n")[2])) == {"error"}


def test_an_address_that_is_taken_is_refused_at_once(url, folder):
    before = started(folder)
    config = ServerConfig(port=int(url.rpartition(":")[2]))
    with (
        pytest.raises(ConfigError, match="choose another --host or --port"),
        started_cluster(None, config, ClusterConfig()),
    ):
        pass
    assert started(folder) == before
    assert get(url, "/who")


def test_an_ingress_that_dies_is_replaced(url):
    [pid] = pids_of("ray::IngressProcess")
    os.kill(pid, signal.SIGKILL)

    def answers():
        try:
            return get(url, "/who")["pid"]
        except OSError:
            return False

    wait_until(answers)
    assert pids_of("ray::IngressProcess") != [pid]


def test_a_replica_without_room_is_passed_by(url, folder):
    answer = post(url, {"prompt": "y", "busy_once": True})
    assert (folder / "busy").read_text() != f"{answer['pid']}"


def test_a_replica_that_dies_before_it_answers_is_replaced(url, folder):
    before = started(folder)
    answer = post(url, {"prompt": "z", "die_once": True})
    assert (folder / "died").exists()
    assert answer["pid"] in before
    wait_until(lambda: len(started(folder) - before) == 1)


def test_a_stream_that_breaks_off_ends_with_an_error(url, folder):
    before = started(folder)
    *some, last, _ = events(url, {"prompt": "x", "stream": 9, "pause": 0.2, "die_at": 3})
    assert some[1:] == ["0", "1", "2"]
    assert json.loads(last)["error"]["code"] == "replica_died"
    wait_until(lambda: len(started(folder) - before) == 1)


def test_a_killed_replica_costs_no_request(url, folder):
    pids = [post(url, {"prompt": f"{number} " * 30})["pid"] for number in range(8)]
    before = started(folder)
    os.kill(pids[0], signal.SIGKILL)
    for number in range(8):
        assert post(url, {"prompt": f"{number} " * 30})["pid"] != pids[0]
    wait_until(lambda: len(started(folder) - before) == 1)


def test_a_failed_engine_is_replaced(url, folder):
    before = started(folder)
    failed = post(url, {}, "/fail")["pid"]
    wait_until(lambda: len(started(folder) - before) == 1)
    wait_until(lambda: failed not in {get(url, "/who")["pid"] for _ in range(10)})
