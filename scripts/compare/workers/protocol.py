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

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.give_up_at: float | None = None
        """`time.perf_counter()` from which on `generate` may raise `GaveUp` instead of going on."""

    def load(self) -> dict[str, float | None]:
        """Load the model and compile; return `load_seconds` and `compile_seconds` (None if not apart)."""
        raise NotImplementedError

    def generate(
        self, prompts: list[list[int]], max_tokens: list[int], variant: int | None
    ) -> list[list[int]]:
        """Greedy output token ids of each prompt: exactly `max_tokens` of them, end of sequence ignored."""
        raise NotImplementedError

    def top2_gaps(self, sequences: list[list[int]]) -> list[float]:
        """How far the best next token's logit leads the second best, after each sequence."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop background threads."""


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
    for place, (output, count) in enumerate(zip(outputs, workload["max_tokens"], strict=True)):
        if len(output) != count:
            raise RuntimeError(f"request {place} gave {len(output)} tokens instead of {count}")
    return {
        "seconds": seconds,
        "token_ids": [[int(token) for token in output] for output in outputs],
        "peak_rss_bytes": peak_rss_bytes(os.getpid()),
    }


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
