import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from cluster_helpers import engine_options
from serve_helpers import events, post

COMMAND = """
import argparse, sys
from jaxllm.cli import serve_ray
from jaxllm.commands.options import add_engine_options, engine_settings
from jaxllm.server.config import ServerConfig
parser = argparse.ArgumentParser()
serve_ray.add_options(parser)
add_engine_options(parser)
args = parser.parse_args()
sys.exit(serve_ray.run(args, engine_settings(args), ServerConfig(port=0, shutdown_timeout=120.0)))
"""


LONG = {"prompt": "def add(a, b):", "max_tokens": 900, "ignore_eos": True}


@contextlib.contextmanager
def served(cluster):
    """The command, and its URL once it is ready; it is to end by itself, with code 0."""
    command = [sys.executable, "-c", COMMAND, "--replicas=1", f"--ray-address={cluster.address}"]
    command += [*engine_options(), "--max-model-len=1024"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    watchdog = threading.Timer(300, process.kill)
    watchdog.start()
    try:
        assert process.stderr is not None
        ready = next(line for line in process.stderr if line.startswith("jaxllm: serving "))
        url = ready.split()[-1]
        assert ready == f"jaxllm: serving demo_model on {url}\n"
        yield process, url
        process.stderr.read()
        assert process.wait() == 0
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_server_of_replicas_ends_what_it_has_begun_when_told_to_stop(cluster):
    with served(cluster) as (process, url), ThreadPoolExecutor(1) as client:
        answer = post(url, {"prompt": "def add(a, b):", "max_tokens": 4})
        assert answer["usage"]["completion_tokens"] == 4
        whole = client.submit(post, url, LONG)
        stream = events(url, {**LONG, "stream": True, "stream_options": {"include_usage": True}})
        next(stream)
        process.send_signal(signal.SIGTERM)
        *_, usage, done = stream
        assert done == "[DONE]"
        assert json.loads(usage)["usage"]["completion_tokens"] == 900
        assert whole.result()["usage"]["completion_tokens"] == 900


def test_a_second_signal_does_not_wait(cluster):
    with served(cluster) as (process, url):
        stream = events(url, {**LONG, "stream": True, "n": 16})
        next(stream)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        ends = [event for event in stream if '"error"' in event]
        assert [json.loads(event)["error"]["code"] for event in ends] == ["shutting_down"]
