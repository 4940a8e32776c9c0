"""One `jaxllm serve` for all clients, the engine to compare with, and clients in processes of their own."""

import os
import subprocess
import sys
import time
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_helpers import SMALL, served_by_command

from jaxllm.llm import LLM

QUEUES = tuple(f"jaxllm:num_requests_{name}" for name in ("running", "waiting", "swapped"))


@pytest.fixture(scope="session")
def url():
    with served_by_command() as (_, found):
        yield found


@pytest.fixture(scope="session")
def llm():
    with LLM(**SMALL) as made:
        yield made


@pytest.fixture
def run_client(tmp_path):
    """Run a module as its command does, in a folder of its own and without the hub."""

    def run(*arguments):
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
        # One process that sends is enough; each imports torch.
        environment = {**os.environ, **offline, "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@pytest.fixture(autouse=True)
def _nothing_is_left(url):
    """Whatever a client does, the server has nothing queued or running soon after."""
    yield
    deadline = time.monotonic() + 30
    while (queues := _queues(url)) != dict.fromkeys(QUEUES, 0) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert queues == dict.fromkeys(QUEUES, 0)


def _queues(url):
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        families = text_string_to_metric_families(response.read().decode())
        return {one.name: one.samples[0].value for one in families if one.name in QUEUES}
