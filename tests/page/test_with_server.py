"""The live page of `jaxllm serve` while more requests run than there are blocks for."""

import contextlib
import http.client
import io
import json
import math
import random
import threading
import time
import urllib.parse

import pytest
from PIL import Image
from server_helpers import served_by_command

PRESSURE = (
    "--num-gpu-blocks-override=40",
    "--num-host-blocks=20",
    "--max-num-seqs=16",
    "--max-model-len=160",
    "--max-num-batched-tokens=128",
    "--max-queued-requests=16",
    "--decode-buckets=16",
    "--prefill-buckets=32,128",
    "--profile-seconds=3",
    "--warm-up=all",
    "--no-log-requests",
)
KEY = "a-key-of-tests"
MOST_CLIENTS = 36
PICTURE_SECONDS = 310
HEADS = ("# Reads text files, and counts what is in them.\nimport os\nimport sys\n\n# ", "# ")
PROMPT = "def read_lines(path):\n    with open(path) as file:\n        return file.read().split()\n\n\n"
IS_UP_TO_DATE = "document.querySelector('#health').innerText === 'healthy'"


class Load:
    """Clients that complete one prompt after the other; as many of them at once as `wanted` says."""

    def __init__(self, url):
        self.wanted = 0
        self.statuses = []
        self._url = urllib.parse.urlsplit(url)
        self._is_over = False
        self._threads = [threading.Thread(target=self._client, args=(i,)) for i in range(MOST_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def close(self):
        self._is_over = True
        for thread in self._threads:
            thread.join()

    def _client(self, number):
        draw = random.Random(number)
        while not self._is_over:
            if number >= self.wanted:
                time.sleep(0.05)
                continue
            status = self._complete(draw)
            self.statuses.append(status)
            time.sleep(draw.expovariate(20) + (status == 503) * 0.5)

    def _complete(self, draw):
        body = {
            "model": "demo_model",
            "prompt": f"{draw.choice(HEADS)}{draw.random()}\n{PROMPT[: draw.randint(8, len(PROMPT))]}",
            "max_tokens": draw.randint(24, 80),
            "ignore_eos": True,
        }
        connection = http.client.HTTPConnection(self._url.hostname, self._url.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
            )
            response = connection.getresponse()
            response.read()
            return response.status


@pytest.fixture(scope="module")
def server_url():
    with served_by_command(*PRESSURE) as (_, url):
        yield url


@pytest.fixture
def load(server_url):
    load = Load(server_url)
    yield load
    load.close()


def total(tab, name):
    """A number among those since the start."""
    text = tab.page.locator("#totals > div", has_text=name).locator("dd span").inner_text()
    return float(text.replace(",", "").split()[0])


def test_memory_pressure_is_seen(server_url, open_tab, load, request):
    load.wanted = MOST_CLIENTS
    tab = open_tab(server_url)
    tab.wait(IS_UP_TO_DATE)
    tab.wait("document.querySelectorAll('#requests td.running').length > 2")
    tab.wait("document.querySelectorAll('.tier:first-child .bar i').length > 2")
    tab.wait("document.querySelectorAll('#decisions td.done').length > 5")
    tab.wait(
        "[...document.querySelectorAll('#decisions tr')].some(row => row.cells[6].innerText !== '\u2013')"
    )
    tab.wait("document.querySelectorAll('#predictions tr').length > 1")
    tab.wait("document.querySelector('#tiles > :nth-child(4) dd').innerText !== '0'")
    assert tab.text("#policy") == "adaptive"
    assert "of 40 blocks" in tab.text(".tier:first-child p")
    assert total(tab, "Output tokens") > 0
    assert total(tab, "Swapped") + total(tab, "Dropped") > 5
    for row in tab.rows("#decisions"):
        assert row[2] in ("swap", "recompute")
        assert row[4].endswith("ms")
        assert row[5].endswith("ms")
    assert "NaN" not in tab.text("body")
    assert "undefined" not in tab.text("body")
    assert tab.hosts == {urllib.parse.urlsplit(server_url).netloc}
    assert tab.problems == []
    if (path := request.config.getoption("--screenshot")) is not None:
        take_picture(tab, load, path)
    assert set(load.statuses) <= {200, 503}


def take_picture(tab, load, path):
    """Once the charts are full, of a load that comes and goes."""
    started = time.monotonic()
    while (passed := time.monotonic() - started) < PICTURE_SECONDS:
        load.wanted = round(MOST_CLIENTS * (0.55 - 0.45 * math.cos(2 * math.pi * passed / 140)))
        tab.page.wait_for_timeout(1000)
    with Image.open(io.BytesIO(tab.page.screenshot(full_page=True))) as picture:
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def test_it_stops_at_the_end(server_url, open_tab):
    tab = open_tab(server_url)
    tab.wait(IS_UP_TO_DATE)
    tab.wait("document.querySelector('#requests').innerText.includes('Nobody is here')")


def test_a_key_is_asked_for_as_browsers_do(open_tab):
    with served_by_command(environment={"JAXLLM_API_KEY": KEY}) as (_, url):
        tab = open_tab(url, http_credentials={"username": "", "password": KEY})
        tab.wait(IS_UP_TO_DATE)
        assert tab.text("#model") == "demo_model"
