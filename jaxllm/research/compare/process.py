"""Worker processes: started on their own Python, stopped while another one is measured."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.02


class WorkerError(Exception):
    """A worker answered with an error, ended, or took too long."""


class Worker:
    """One back-end in a process of its own; it runs only while `call` waits for it.

    Args:
        python: interpreter to run the script with.
        script: one of `workers`.
        job: what the worker is to set up, as JSON.
        folder: for the job, the replies and the log; must exist.
    """

    def __init__(self, python: str, script: Path, job: Mapping[str, Any], folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self.log = folder / "log.txt"
        job_path = folder / "job.json"
        job_path.write_text(json.dumps(job), encoding="utf-8")
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, str(script), str(job_path)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self._signal(signal.SIGSTOP)

    def call(self, command: str, *, timeout: float, **fields: Any) -> dict[str, Any]:
        """Send a command and wait for its reply.

        Raises:
            WorkerError: no reply within `timeout` seconds, the process ended, or the reply is an error.
        """
        reply_path = self._folder / f"reply{next(self._numbers)}.json"
        line = json.dumps({"command": command, "reply": str(reply_path), **fields}) + "\n"
        self._signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended: told below
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()
            deadline = time.monotonic() + timeout
            while not reply_path.exists():
                if self._process.poll() is not None and not reply_path.exists():
                    raise WorkerError(f"ended with status {self._process.returncode}: {self._last_line()}")
                if time.monotonic() > deadline:
                    raise WorkerError(f"gave no answer to {command!r} within {timeout:.0f} s")
                time.sleep(_POLL_SECONDS)
        finally:
            self._signal(signal.SIGSTOP)
        reply: dict[str, Any] = json.loads(reply_path.read_text(encoding="utf-8"))
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def close(self) -> None:
        """End the process: politely for a few seconds, then for certain. Safe to call twice."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        """To the whole process group: an engine may compute in children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _last_line(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "nothing in its log")
