"""Processes that have grammars tried (`jaxllm.sampling.grammar_child`), as the engine sees them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from jaxllm.errors import SamplingParamsError, TryAgainError
from jaxllm.sampling.grammar_child import (
    MAX_BYTES,
    MAX_CPU_SECONDS,
    QUICK_CPU_SECONDS,
    Proof,
    read_frame,
    write_frame,
)
from jaxllm.sampling.structured_outputs import StructuredOutputsParams, Vocabulary

MOST = max(1, min(4, (os.cpu_count() or 1) // 2))
"""Grammars that are tried or compiled at once, and a slow one: cores are left for those who decode."""
_MAX_SECONDS = 60.0
"""Until an answer, on a busy machine; processor time is bounded far below."""
_MAIN = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "import jaxllm.sampling.grammar_child as c; c.main()"
)
_CAUSES = {
    signal.SIGSEGV: "it nests too deep",
    signal.SIGABRT: f"it takes more than {MAX_BYTES / 2**30:g} GiB of memory",
    signal.SIGPROF: f"it takes more than {MAX_CPU_SECONDS:g} seconds of processor time",
}


_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
_LATE = "the process that tries structured_outputs gave no answer in time; try again when less is going on"
_TRIES = 1


class GrammarProcesses:
    """Tries grammars in forks of processes that are started when they are needed, and kept.

    Any thread may ask. One that is not done soon begins again behind other slow ones, which are done one by
    one: ordinary grammars wait for the little time that each before them has at first, and for no more.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Nothing runs yet."""
        self._vocabulary = vocabulary
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._rooms = {QUICK_CPU_SECONDS: threading.Semaphore(MOST), MAX_CPU_SECONDS: threading.Semaphore(1)}
        weakref.finalize(self, _end_all, self._idle)

    @contextlib.contextmanager
    def tried(self, params: StructuredOutputsParams) -> Iterator[Proof]:
        """What a grammar takes; its place among those that are tried is kept while it is compiled here.

        Raises:
            SamplingParamsError: it cannot be compiled, or takes more than it may, or the process died of it.
            TryAgainError: no process can be started, or each is ended from outside.
        """
        for cpu_seconds, room in self._rooms.items():
            with room:
                proof = self.try_out(params, cpu_seconds)
                if proof is not None:
                    yield proof
                    return

    def try_out(self, params: StructuredOutputsParams, cpu_seconds: float) -> Proof | None:
        """What a grammar takes; None if that is more processor time than it may have for now.

        Raises:
            SamplingParamsError: see `tried`.
            TryAgainError: so, too.
        """
        for _ in range(_TRIES):
            with contextlib.suppress(TryAgainError):
                return self._try_out(params, cpu_seconds)
        return self._try_out(params, cpu_seconds)

    def _try_out(self, params: StructuredOutputsParams, cpu_seconds: float) -> Proof | None:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is not None and process.poll() is not None:  # somebody has ended it
            _end(process)
            process = None
        if process is None:
            process = self._start()
        try:
            answer = _ask(process, params, cpu_seconds)
        except BaseException:
            _end(process)
            raise
        with self._lock:
            self._idle.append(process)
        if "error" in answer:
            raise SamplingParamsError(f"structured_outputs cannot be compiled: {answer['error']}")
        if answer.get("died") == -signal.SIGPROF and cpu_seconds < MAX_CPU_SECONDS:
            return None
        if "died" in answer:
            raise _died(answer["died"])
        return Proof(**answer)

    def _start(self) -> subprocess.Popen[bytes]:
        package = str(Path(__file__).resolve().parents[2])
        paths = [package, *(os.path.abspath(path) for path in sys.path)]
        command = [sys.executable, "-I", "-c", _MAIN, json.dumps(paths)]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is for the parent; see `_NICENESS` for why it is no session
            )
        except OSError as error:
            raise TryAgainError(
                f"structured_outputs are tried in a process of their own, and {sys.executable!r} does not "
                f"start: {error}; try again"
            ) from error
        with contextlib.suppress(BrokenPipeError):  # if it has died already, asking says so
            write_frame(_pipe(process.stdin), dataclasses.asdict(self._vocabulary))
        return process


def _ask(
    process: subprocess.Popen[bytes], params: StructuredOutputsParams, cpu_seconds: float
) -> dict[str, Any]:
    """Its answer.

    Raises:
        TryAgainError: somebody has ended it, or it takes very long: of processor time it has too little.
    """
    answers = _pipe(process.stdout)
    try:
        write_frame(_pipe(process.stdin), (dataclasses.asdict(params), cpu_seconds))
        if not select.select([answers], [], [], _MAX_SECONDS)[0]:
            raise TryAgainError(_LATE)
        answer: dict[str, Any] = read_frame(answers)
    except (BrokenPipeError, EOFError):
        raise TryAgainError("the process that tries structured_outputs was ended; try again") from None
    return answer


def _died(code: int) -> SamplingParamsError | TryAgainError:
    """What is told of a process that ended with a code, of a grammar unless somebody has ended it."""
    if code in _FROM_OUTSIDE:
        return TryAgainError(f"the process that tries structured_outputs was ended ({code}); try again")
    cause = _CAUSES.get(signal.Signals(-code)) if code < 0 else None
    cause = cause or f"the process that tried it ended with {code}"
    return SamplingParamsError(f"structured_outputs cannot be compiled: {cause}; make the grammar smaller")


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None  # both are pipes
    return stream


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            _pipe(stream).close()


def _end_all(processes: list[subprocess.Popen[bytes]]) -> None:
    while processes:
        _end(processes.pop())
