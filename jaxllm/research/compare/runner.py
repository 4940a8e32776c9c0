"""Runs the back-ends in turn and gathers what they answered."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.research.compare.backends import Backend
from jaxllm.research.compare.energy import EnergyMeter
from jaxllm.research.compare.install import RECIPES
from jaxllm.research.compare.latency import summarise
from jaxllm.research.compare.process import Worker, WorkerError
from jaxllm.research.compare.workloads import Workload, save_workload

_WARM_UP_REQUESTS, _WARM_UP_TOKENS = 8, 4


@dataclasses.dataclass
class Measurement:
    """All repetitions of one back-end in one variant (a static batch size, or None)."""

    backend: str
    variant: int | None
    seconds: list[float] = dataclasses.field(default_factory=list)
    outputs: list[list[list[int]] | None] = dataclasses.field(default_factory=list)
    joules: list[float | None] = dataclasses.field(default_factory=list)
    latency: dict[str, Any] | None = None
    partial: dict[str, Any] | None = None
    peak_rss_bytes: int | None = None
    loaded: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str | None = None

    @property
    def tokens(self) -> list[list[int]]:
        """Of the first repetition, by request; empty if there are none, or the back-end tells text alone."""
        return (self.outputs[0] if self.outputs else None) or []


class Comparison:
    """The workers of one run. Use as a context manager: leaving it ends them all.

    Args:
        backends: what to measure, in this order.
        pythons: the interpreter of each back-end, by name.
        job: what every worker is to set up; `packages` is filled in here.
        folder: for files that the processes exchange.
        timeout: seconds a worker may take for one command.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        pythons: Mapping[str, str],
        job: Mapping[str, Any],
        folder: Path,
        timeout: float,
    ) -> None:
        self._folder = folder
        self._timeout = timeout
        self._workers: dict[str, Worker] = {}
        self._loaded: dict[str, dict[str, Any]] = {}
        self._errors: dict[str, str] = {}
        self._meter = EnergyMeter()
        self.measurements: list[Measurement] = []
        """Those of the present workload."""
        try:
            for backend in backends:
                home = folder / backend.name
                home.mkdir()
                own_job = {
                    **job,
                    **{name: getattr(backend, name) for name in ("packages", "server", "weight_format")},
                }
                try:
                    worker = Worker(pythons[backend.name], backend.worker, own_job, home)
                except OSError as error:
                    self._fail(backend.name, f"cannot run its Python: {error.strerror}")
                else:
                    self._workers[backend.name] = worker
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def run(
        self,
        workload: Workload,
        variants: Mapping[str, Sequence[int | None]],
        repetitions: int,
        repeat_within: float,
        give_up_factor: float,
    ) -> Iterator[int]:
        """Load each back-end unless it is, warm it up, then measure all in turn, `repetitions` times.

        `variants` has the batch sizes of each back-end, by name.
        Yields the number of repetitions done, after each, so that a long run can be kept as it grows.
        A batch size that takes more than `repeat_within` times as long as its back-end's best one, or more
        than `give_up_factor` times as long as the fastest other back-end, in the first repetition is stopped
        there, if the back-end can, and not measured again.
        """
        path, beginning = self._folder / "workload.json", self._folder / "beginning.json"
        save_workload(workload, path)
        save_workload(workload.beginning(_WARM_UP_REQUESTS, _WARM_UP_TOKENS), beginning)
        self.measurements = [
            Measurement(name, variant, error=self._errors.get(name))
            for name, sizes in variants.items()
            for variant in sizes
        ]
        for name in list(self._workers):
            if name not in self._loaded and (loaded := self._call(name, "load")) is not None:
                self._loaded[name] = loaded
            for measurement in self._of(name):
                measurement.loaded = self._loaded.get(name, {})
                self._call(name, "run", workload=str(beginning), variant=measurement.variant)
        for repetition in range(repetitions):
            for measurement in self.measurements:
                limit = self._limit(measurement.backend, repeat_within, give_up_factor)
                if measurement.partial or (measurement.seconds and measurement.seconds[0] > limit):
                    continue
                self._meter.joules()
                reply = self._call(
                    measurement.backend,
                    "run",
                    workload=str(path),
                    variant=measurement.variant,
                    give_up_after=None if repetition or limit == float("inf") else limit,
                )
                if reply is None:
                    continue
                turn = f"{workload.name}, repetition {repetition + 1}/{repetitions}"
                if "gave_up_after_tokens" in reply:
                    measurement.partial = reply
                    _say(f"{turn}, {_label(measurement)}: stopped after {reply['seconds']:.2f} s")
                    continue
                measurement.joules.append(self._meter.joules())
                measurement.seconds.append(reply["seconds"])
                measurement.outputs.append(reply["token_ids"])
                if measurement.peak_rss_bytes is None:
                    measurement.peak_rss_bytes = reply["peak_rss_bytes"]
                _say(f"{turn}, {_label(measurement)}: {reply['seconds']:.2f} s")
            yield repetition + 1

    def measure_latency(self, workload: Workload, arrivals: Sequence[float]) -> None:
        """Send the workload's requests one after another at given times, to each back-end in turn."""
        path = self._folder / "workload.json"
        save_workload(workload, path)
        for name in dict.fromkeys(one.backend for one in self.measurements):
            best = min(
                (one for one in self._of(name) if one.seconds), key=lambda one: one.seconds[0], default=None
            )
            if best is None:
                continue
            reply = self._call(name, "latency", workload=str(path), arrivals=list(arrivals))
            if reply is not None:
                is_there = "unsupported" not in reply
                best.latency = summarise(reply, workload.max_tokens) if is_there else reply
                _say(f"{workload.name}, {name}: {'latency measured' if is_there else reply['unsupported']}")

    def _limit(self, backend: str, repeat_within: float, give_up_factor: float) -> float:
        """Seconds that a variant may take: by the back-end's best one, and by the fastest other back-end."""
        own = [one.seconds[0] for one in self._of(backend) if one.seconds]
        others = [one.seconds[0] for one in self.measurements if one.backend != backend and one.seconds]
        limits = [repeat_within * min(own)] if own else []
        if others and len(self._of(backend)) > 1:
            limits.append(give_up_factor * min(others))
        return min(limits, default=float("inf"))

    def top2_gaps(self, backend: str, sequences: list[list[int]]) -> list[float] | None:
        """How far the best next logit leads the second best after each sequence; None if that failed."""
        reply = self._call(backend, "gaps", sequences=sequences) if sequences else {"gaps": []}
        return None if reply is None else reply["gaps"]

    def _call(self, name: str, command: str, **fields: Any) -> dict[str, Any] | None:
        """The reply, or None if the back-end has failed, now or before."""
        worker = self._workers.get(name)
        if worker is None:
            return None
        if command == "load":
            _say(f"{name}: loading")
        try:
            return worker.call(command, timeout=self._timeout, **fields)
        except WorkerError as error:
            said = str(error)
            if name in RECIPES and said.startswith("ModuleNotFoundError"):
                said += f"; jaxllm compare --install {name} makes an environment that has it"
            self._fail(name, said)
            _say(f"{name} failed: {said}\n  its log ends with:\n{_tail(worker.log)}")
            self._workers.pop(name).close()
            return None

    def _fail(self, name: str, error: str) -> None:
        self._errors[name] = error
        for measurement in self._of(name):
            measurement.error = error

    def _of(self, name: str) -> list[Measurement]:
        return [measurement for measurement in self.measurements if measurement.backend == name]


def _label(measurement: Measurement) -> str:
    batch = "" if measurement.variant is None else f", batch {measurement.variant}"
    return measurement.backend + batch


def _tail(log: Path, num_lines: int = 15) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:]
    return "\n".join(f"  | {line}" for line in lines)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
