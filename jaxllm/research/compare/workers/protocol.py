"""What all workers share: commands come as JSON lines on stdin, each reply goes to the file it names.

Standard library only: a worker runs in an environment that has its framework and nothing else.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Engine:
    """One framework, with a model. `job` is what the parent asks for, the same for every framework."""

    compiles_by_shape = False
    """Whether each workload is run once untimed, because its shapes are compiled as they come."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.seen: set[tuple[Any, ...]] = set()
        """Workloads and variants that were run before."""
        self.give_up_at: float | None = None
        """`time.perf_counter()` from which on `generate` may raise `GaveUp` instead of going on."""

    def load(self) -> dict[str, float | None]:
        """Load the model and compile; return `load_seconds` and `compile_seconds` (None if not apart)."""
        raise NotImplementedError

    def generate(
        self, prompts: list[list[int]], max_tokens: list[int], variant: int | None
    ) -> list[list[int]] | None:
        """Greedy output token ids of each prompt: exactly `max_tokens` of them, end of sequence ignored.

        None where the framework tells text alone: then it has made sure of their number.
        """
        raise NotImplementedError

    def serve_at(
        self, prompts: list[list[int]], max_tokens: list[int], arrivals: list[float]
    ) -> list[tuple[float, float]]:
        """Requests as they come: seconds from the beginning to each one's first and last token.

        Raises:
            Unsupported: this framework answers no requests while others run.
        """
        raise Unsupported("it takes whole batches, not requests as they come")

    def top2_gaps(self, sequences: list[list[int]]) -> list[float]:
        """How far the best next token's logit leads the second best, after each sequence."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop background threads."""


class Unsupported(Exception):
    """A framework cannot do what was asked for; the message says why. What else it does goes on."""


class GaveUp(Exception):
    """`generate` has run for too long; `num_output_tokens` of those asked for are there."""

    def __init__(self, num_output_tokens: int) -> None:
        super().__init__(f"gave up after {num_output_tokens} tokens")
        self.num_output_tokens = num_output_tokens


def serve(make_engine: Callable[[dict[str, Any]], Engine]) -> None:
    """Answer commands until stdin closes. The command line names the file of the job."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    _set_environment(job)
    engine = make_engine(job)
    while line := sys.stdin.readline():
        command = json.loads(line)
        try:
            reply = _answer(engine, command)
        except Exception as error:  # the parent decides what to do about it
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        unfinished = Path(command["reply"] + ".unfinished")
        unfinished.write_text(json.dumps(reply), encoding="utf-8")
        unfinished.rename(command["reply"])
    engine.close()


def _answer(engine: Engine, command: dict[str, Any]) -> dict[str, Any]:
    if command["command"] == "load":
        started = time.perf_counter()
        times = engine.load()
        return {
            "start_up_seconds": time.perf_counter() - started,
            **times,
            "python": platform.python_version(),
            "packages": _versions(engine.job["packages"]),
        }
    if command["command"] == "gaps":
        return {"gaps": engine.top2_gaps(command["sequences"])}
    workload = json.loads(Path(command["workload"]).read_text(encoding="utf-8"))
    if command["command"] == "latency":
        try:
            waits = engine.serve_at(workload["prompts"], workload["max_tokens"], command["arrivals"])
        except Unsupported as reason:
            return {"unsupported": str(reason)}
        return {
            "arrivals": command["arrivals"],
            "first": [first for first, _ in waits],
            "last": [last for _, last in waits],
        }
    run = len(workload["prompts"]), sum(workload["max_tokens"]), command["variant"]
    if engine.compiles_by_shape and run not in engine.seen:
        engine.seen.add(run)
        engine.give_up_at = None
        engine.generate(workload["prompts"], workload["max_tokens"], command["variant"])
    started = time.perf_counter()
    limit = command.get("give_up_after")
    engine.give_up_at = None if limit is None else started + limit
    try:
        outputs = engine.generate(workload["prompts"], workload["max_tokens"], command["variant"])
    except GaveUp as gave_up:
        return {
            "seconds": time.perf_counter() - started,
            "gave_up_after_tokens": gave_up.num_output_tokens,
        }
    seconds = time.perf_counter() - started
    if outputs is not None:
        for place, (output, count) in enumerate(zip(outputs, workload["max_tokens"], strict=True)):
            if len(output) != count:
                raise RuntimeError(f"request {place} gave {len(output)} tokens instead of {count}")
        outputs = [[int(token) for token in output] for output in outputs]
    return {
        "seconds": seconds,
        "token_ids": outputs,
        "peak_rss_bytes": peak_rss_bytes(os.getpid()),
    }


class Watch:
    """When the first and the last token of each request came, for engines that are driven step by step."""

    def __init__(self, arrivals: list[float], max_tokens: list[int]) -> None:
        self._arrivals, self._max_tokens = arrivals, max_tokens
        self._began = time.perf_counter()
        self._num_sent = 0
        self.first: list[float | None] = [None] * len(arrivals)
        self.last: list[float | None] = [None] * len(arrivals)

    @property
    def is_over(self) -> bool:
        """Whether all requests have had their last token."""
        return None not in self.last

    def due(self) -> list[int]:
        """Places of the requests that have come since the last call."""
        first = self._num_sent
        now = time.perf_counter() - self._began
        while self._num_sent < len(self._arrivals) and self._arrivals[self._num_sent] <= now:
            self._num_sent += 1
        return list(range(first, self._num_sent))

    def rest(self) -> None:
        """Wait for the next request, where there is nothing to do before it."""
        if self._num_sent < len(self._arrivals):
            time.sleep(max(0.0, self._began + self._arrivals[self._num_sent] - time.perf_counter()))

    def note(self, place: int, num_tokens: int) -> None:
        """Note that a request has so many tokens now."""
        now = time.perf_counter() - self._began
        if num_tokens and self.first[place] is None:
            self.first[place] = now
        if num_tokens >= self._max_tokens[place] and self.last[place] is None:
            self.last[place] = now

    def times(self) -> list[tuple[float, float]]:
        """What `Engine.serve_at` returns."""
        return list(zip(self.first, self.last, strict=True))  # type: ignore[arg-type]


def _set_environment(job: dict[str, Any]) -> None:
    """Threads, device and no network; before the framework is imported."""
    threads = str(job["threads"])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job["threads"]])
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC", "PJRT_NPROC"):
        os.environ[name] = threads
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"):
        os.environ[name] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if job["device"] == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["JAX_PLATFORMS"] = "cpu"


def _versions(packages: list[str]) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def peak_rss_bytes(pid: int) -> int:
    """Largest resident memory so far of a process plus that of each of its living descendants.

    `ru_maxrss` alone would miss engines that compute in a child process; it is the fallback outside Linux.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024
        children = [
            child
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text(encoding="utf-8").split()
        ]
    except (OSError, StopIteration):
        if pid != os.getpid():
            return 0
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak + sum(peak_rss_bytes(int(child)) for child in children)
