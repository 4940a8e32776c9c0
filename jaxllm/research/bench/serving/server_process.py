"""A server of this package in a process of its own, which never outlives the block that uses it."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from jaxllm.commands.options import API_KEYS_VARIABLE
from jaxllm.errors import ConfigError

_READY = re.compile(r"jaxllm: serving .* on (https?://\S+)")
_KEPT_LINES = 5
_POLL_SECONDS = 0.02


@contextlib.contextmanager
def running_server(
    arguments: Sequence[str], *, start_timeout: float = 600.0, stop_timeout: float = 30.0
) -> Iterator[str]:
    """Start `python -m jaxllm serve` on a free port of this machine; gives its base URL once it is ready.

    At the end, however that comes, it is asked to stop, and killed if it has not within `stop_timeout`. It
    wants no API key unless `arguments` name one.

    Args:
        arguments: further ones of the command.
        start_timeout: seconds until it is ready.
        stop_timeout: seconds until it has stopped.

    Raises:
        ConfigError: it ends before it is ready, with the last of what it said, or takes too long.
    """
    command = [sys.executable, "-m", "jaxllm", "serve", "--host", "127.0.0.1", "--port", "0", *arguments]
    process = None
    try:
        with _signals_later():  # one between its start and our knowing of it would leave it behind
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={name: value for name, value in os.environ.items() if name != API_KEYS_VARIABLE},
                text=True,
                errors="replace",
                # Ctrl-C is ours to handle. Linux shares out processors by session first: with one of its own
                # a server and its client would wait for each other.
                process_group=0,
            )
            log = _Log(process)
        if not log.said.wait(start_timeout):
            raise ConfigError(f"the server was not ready after {start_timeout:g} s; it said: {log.tail()}")
        if log.url is None:
            raise ConfigError(f"the server ended before it was ready; it said: {log.tail()}")
        yield log.url
    finally:
        if process is not None:
            _stop(process, stop_timeout)


class _Log:
    """Reads what a server says, so that it never waits for us, and finds its address.

    Attributes:
        url: where it listens; None if it does not yet.
        said: set once it is ready, or has ended.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.url: str | None = None
        self.said = threading.Event()
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._process = process
        threading.Thread(target=self._read, name="server-log", daemon=True).start()

    def tail(self) -> str:
        """The last lines."""
        return " / ".join(list(self._lines)) or "nothing"

    def _read(self) -> None:
        stderr = self._process.stderr
        assert stderr is not None
        with stderr:
            for line in stderr:
                self._lines.append(line.strip())
                if self.url is None and (found := _READY.match(line)):
                    self.url = found[1]
                    self.said.set()
        self.said.set()


def _stop(process: subprocess.Popen[str], timeout: float) -> None:
    """SIGTERM, and SIGKILL to all it started if that does not end it, or if we are not to wait."""
    with _signals_later() as received:
        process.terminate()
        deadline = time.monotonic() + timeout
        while process.poll() is None and time.monotonic() < deadline and not received:
            time.sleep(_POLL_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the group of its own that it leads
        process.wait()


@contextlib.contextmanager
def _signals_later() -> Iterator[list[int]]:
    """Keep signals that would end this process until the end of the block; gives those received."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # signals are not ours
        return

    def keep(number: int, _: object) -> None:
        received.append(number)

    before = {
        number: signal.signal(number, keep) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])
