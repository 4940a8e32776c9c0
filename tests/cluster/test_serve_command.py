import os
import signal
import subprocess
import sys
import threading

from cluster_helpers import engine_options
from serve_helpers import post

COMMAND = """
import argparse, sys
from jaxllm.cli import serve_ray
from jaxllm.cli.options import add_engine_options, engine_settings
from jaxllm.server.config import ServerConfig
parser = argparse.ArgumentParser()
serve_ray.add_options(parser)
add_engine_options(parser)
args = parser.parse_args()
sys.exit(serve_ray.run(args, engine_settings(args), ServerConfig(port=0, shutdown_timeout=1.0)))
"""


def test_a_server_of_replicas_says_when_it_is_ready_and_stops_when_told_to(cluster):
    command = [sys.executable, "-c", COMMAND, "--replicas=1", f"--ray-address={cluster.address}"]
    process = subprocess.Popen([*command, *engine_options()], stderr=subprocess.PIPE, text=True)
    watchdog = threading.Timer(150, process.kill)
    watchdog.start()
    try:
        assert process.stderr is not None
        ready = next(line for line in process.stderr if line.startswith("jaxllm: serving "))
        url = ready.split()[-1]
        assert ready == f"jaxllm: serving demo_model on {url}\n"
        answer = post(url, {"prompt": "def add(a, b):", "max_tokens": 4})
        assert answer["usage"]["completion_tokens"] == 4
        os.kill(process.pid, signal.SIGTERM)
        process.stderr.read()
        assert process.wait() == 0
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stderr.close()
