"""A headless Chromium, a tab that records what goes wrong in it, and a server with answers of our own."""

import dataclasses
import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

FILES = Path(__file__).resolve().parents[2] / "jaxllm" / "server" / "page"
ROUTES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/pool.js": ("pool.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/pieces.js": ("pieces.js", "text/javascript; charset=utf-8"),
}
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshot", type=Path, metavar="FILE.png", help="keep a picture of the page")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail(
            f"the page is tested in a real browser, and PATH has none of {', '.join(BROWSERS)}; install one, "
            "for example with `apt-get install chromium`",
            pytrace=False,
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, headless=True, args=FLAGS)
        yield browser
        browser.close()


@dataclasses.dataclass
class Tab:
    """A page of the browser, and what it complained of and asked for."""

    page: Page
    problems: list[str] = dataclasses.field(default_factory=list)
    hosts: set[str] = dataclasses.field(default_factory=set)
    paths: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", lambda message: self._note(message.type, message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self._requested(request.url))
        self.page.add_init_script(
            "document.addEventListener('securitypolicyviolation',"
            " (event) => console.error('CSP', event.violatedDirective, event.blockedURI))"
        )

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.problems.append(text)

    def _requested(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "data":
            self.hosts.add(parts.netloc)
            self.paths.append(parts.path)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def rows(self, body: str) -> list[list[str]]:
        return self.page.eval_on_selector(
            body, "body => [...body.rows].map(row => [...row.cells].map(cell => cell.innerText))"
        )

    def wait(self, condition: str) -> None:
        """For an expression of JavaScript to become true."""
        deadline = time.monotonic() + 60
        while not self.page.evaluate(condition):  # `wait_for_function` needs what the page's policy forbids
            assert time.monotonic() < deadline, f"not within 60 s: {condition}; {self.problems}"
            self.page.wait_for_timeout(50)


@pytest.fixture
def open_tab(browser: Browser) -> Iterator[Callable[..., Tab]]:
    contexts = []

    def open_tab(url: str, **settings: Any) -> Tab:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings})
        context.set_default_timeout(60_000)
        contexts.append(context)
        tab = Tab(context.new_page())
        tab.page.goto(url)
        return tab

    yield open_tab
    for context in contexts:
        context.close()


# A server with answers of our own


class ScriptedServer:
    """Serves the page's files as the real one does, and as `/live` what `live`, `status` and `body` say.

    With names in `replicas` it is of several engines, and the model of each is called like it.
    """

    def __init__(self) -> None:
        self.live: dict[str, Any] = sample()
        self.status = 200
        self.body: bytes | None = None  # instead of `live`
        self.is_away = False
        self.replicas: list[str] = []
        self.num_polls = 0
        self.headers: list[dict[str, str]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        script = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                if parts.path == "/live":
                    script.num_polls += 1
                    script.headers.append(dict(self.headers))
                    if script.is_away:
                        self.close_connection = True
                        return
                    if script.replicas:
                        self._answer_as_replica(parse_qs(parts.query).get("replica", [""])[0])
                        return
                    body = json.dumps(script.live).encode() if script.body is None else script.body
                    self._answer(script.status, "application/json", body)
                elif self.path in ROUTES:
                    name, content_type = ROUTES[self.path]
                    self._answer(200, content_type, (FILES / name).read_bytes())
                else:
                    self._answer(404, "text/plain", b"")

            def _answer_as_replica(self, wanted: str) -> None:
                name = wanted if wanted in script.replicas else script.replicas[0]
                body = json.dumps({**script.live, "model": name}).encode()
                headers = {"X-Jaxllm-Replica": name, "X-Jaxllm-Replicas": ",".join(script.replicas)}
                self._answer(200, "application/json", body, headers)

            def _answer(
                self, status: int, content_type: str, body: bytes, headers: dict[str, str] | None = None
            ) -> None:
                self.send_response(status)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Security-Policy", CSP)
                self.send_header("X-Content-Type-Options", "nosniff")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Tests look at what the browser says."""

        return Handler


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


def sample() -> dict[str, Any]:
    """An answer of a server under memory pressure: 12 run, 2 are swapped, 3 wait."""
    now = time.time()
    ticks = range(300)

    def wave(level: float, depth: float, period: float) -> list[int]:
        return [round(level + depth * math.sin(2 * math.pi * tick / period)) for tick in ticks]

    requests = [
        {
            "id": f"cmpl-{number:02}",
            "status": "running" if number < 12 else "swapped" if number < 14 else "waiting",
            "num_tokens": 40 + 3 * number,
            "num_prompt_tokens": 32,
            "max_total_tokens": 132,
            "device_blocks": 3 if number < 12 else 0,
            "host_blocks": 4 if number in (12, 13) else 0,
            "age_seconds": 30.0 - number,
            "num_preemptions": 1 if number in (12, 13) else 0,
        }
        for number in range(17)
    ]
    decisions = [
        {
            "time": now - 1 - number,
            "request_id": f"cmpl-{number:02}",
            "action": "swap" if number % 3 else "recompute",
            "num_tokens": 48,
            "num_blocks": 3,
            "swap_ms": 1.5 + 0.1 * number,
            "recompute_ms": 4.25 - 0.2 * number,
            "is_back": number > 0,
            "measured_ms": None if number in (0, 3) else 1.75 + 0.15 * number,
            "regret_ms": None if number in (0, 3) else 0.5 if number == 1 else 0.0,
            "bound_ms": None if number == 0 else 1.75 + 0.15 * number,
            "regret_bound_ms": None if number == 0 else 0.5 if number in (1, 3) else 0.0,
        }
        for number in range(12)
    ]
    return {
        "version": "0.1.0",
        "model": "demo",
        "policy": "adaptive",
        "started": now - 3723,
        "now": now,
        "is_healthy": True,
        "compiling": None,
        "limits": {
            "num_gpu_blocks": 40,
            "num_host_blocks": 20,
            "block_size": 16,
            "max_num_seqs": 16,
            "max_model_len": 512,
            "max_queued_requests": 1024,
            "max_queued_tokens": 65536,
            "block_bytes": 65536,
        },
        "queues": {"waiting": 3, "running": 12, "swapped": 2},
        "pool": {
            "device": {"total": 40, "held": 36, "cached": 3, "free": 1},
            "host": {"total": 20, "held": 8, "cached": 0, "free": 12},
            "disk": {"bytes": 3 * 2**20, "limit_bytes": 2**30},
        },
        "requests": requests,
        "history": {
            "time": [now - 299 + tick for tick in ticks],
            "output_tokens": wave(700, 120, 90),
            "prompt_tokens": wave(300, 200, 40),
            "running": wave(12, 3, 60),
            "waiting": wave(20, 18, 200),
            "swapped": wave(2, 2, 50),
            "device_blocks": wave(36, 3, 60),
            "host_blocks": wave(8, 8, 50),
            "dropped": [int(tick % 17 == 0) for tick in ticks],
            "swapped_out": [int(tick % 11 == 0) for tick in ticks],
            "swapped_in": [int(tick % 11 == 3) for tick in ticks],
            "finished": wave(6, 3, 30),
            "refused": [int(tick % 100 == 0) for tick in ticks],
            "ttft_ms": [None if tick % 7 else 40.0 + tick / 10 for tick in ticks],
            "ttft_p99_ms": [None if tick % 7 else 90.0 + tick / 10 for tick in ticks],
            "e2e_ms": [None if tick % 7 else 1400.0 + tick for tick in ticks],
            "e2e_p99_ms": [None if tick % 7 else 4400.0 + tick for tick in ticks],
        },
        "latencies": {"ttft_ms": 62.5, "ttft_p99_ms": 119.0, "e2e_ms": 1580.0, "e2e_p99_ms": 4690.0},
        "decisions": decisions,
        "predictions": {
            "prefill": {"count": 120, "error": 0.081, "factor": 1.04},
            "swap_out": {"count": 0, "error": None, "factor": 1.0},
        },
        "drafts": None,
        "totals": {
            "requests": 1234,
            "refused": 5,
            "output_tokens": 98765,
            "prompt_tokens": 40000,
            "cached_tokens": 10000,
            "preemptions_swap": 31,
            "preemptions_recompute": 17,
            "swapped_bytes": 6 * 2**20,
            "recomputed_tokens": 816,
        },
    }
