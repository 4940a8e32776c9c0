"""What happened, second by second: counted by the engine's thread and the server's loop."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence

from jaxllm.engine.outputs import RequestOutput
from jaxllm.sched.ledger import PreemptionRecord, StepRecord

NUM_SECONDS = 300
"""How far back the history goes."""
NUM_DECISIONS = 50
"""How many preemptions are remembered."""
_MAX_TIMES = 1000  # of one second
_BYTES_OF_ID, _FEW_TOKENS = 4, 1000
_TOKENS_TO_REMEMBER = 2**17  # of prompts, for their size in bytes
_LEVELS = ("running", "waiting", "swapped", "device_blocks", "host_blocks")


@dataclasses.dataclass(slots=True)
class Second:
    """What happened in one second; `running` and the like are those of its last iteration."""

    time: int
    output_tokens: int = 0
    prompt_tokens: int = 0
    running: int = 0
    waiting: int = 0
    swapped: int = 0
    device_blocks: int = 0
    host_blocks: int = 0
    dropped: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    finished: int = 0
    refused: int = 0
    ttft_seconds: list[float] = dataclasses.field(default_factory=list)
    e2e_seconds: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Totals:
    """Counts since the start."""

    requests: int = 0
    refused: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    preemptions_swap: int = 0
    preemptions_recompute: int = 0
    recomputed_tokens: int = 0
    blocks_out: int = 0
    blocks_in: int = 0
    looked_up_tokens: int = 0
    cached_tokens: dict[str, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(("device", "host", "disk"), 0)
    )


class Stats:
    """Counts of a server.

    Args:
        clock: seconds since the epoch.

    Attributes:
        totals: since the start.
        decisions: the last preemptions, each with the time it was decided; records are filled in later.
        on_finished: called as `finished`.
        on_failed: called when a request fails.
        is_busy: whether requests are under way at a replica.
        inter_token_seconds: called with the seconds between tokens of a stream, once for each output.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.started = clock()
        self.totals = Totals()
        self.decisions: collections.deque[tuple[float, PreemptionRecord]] = collections.deque(
            maxlen=NUM_DECISIONS
        )
        self.on_finished: Callable[[RequestOutput, Sequence[tuple[int, str]]], None] = lambda *_: None
        self.on_failed: Callable[[], object] = lambda: None
        self.is_busy: Callable[[int], bool] = lambda replica: False
        self.inter_token_seconds: Callable[[float], None] = lambda seconds: None
        self._seconds: collections.deque[Second] = collections.deque([Second(int(clock()))], NUM_SECONDS)
        self._median = 0, 1.0  # and of which second
        self._prompt_sizes = 0.0, 0.0  # bytes, tokens
        self._last: dict[int, StepRecord] = {}  # iteration of each replica
        self._lock = threading.Lock()

    def on_record(self, record: PreemptionRecord | StepRecord, replica: int = 0) -> None:
        """Take what a replica's scheduler decided, in its engine's thread."""
        with self._lock:
            if isinstance(record, PreemptionRecord):
                self.decisions.append((self._clock(), record))
                if record.is_swap:
                    self.totals.preemptions_swap += 1
                else:
                    self.totals.preemptions_recompute += 1
            else:
                self._count_step(record, replica)

    def _count_step(self, record: StepRecord, replica: int) -> None:
        totals = self.totals
        totals.prompt_tokens += record.num_prefill_tokens
        totals.recomputed_tokens += record.num_recomputed_tokens
        totals.blocks_out += record.num_blocks_out
        totals.blocks_in += record.num_blocks_in
        self._last[replica] = record
        live = [one for place, one in self._last.items() if place == replica or self.is_busy(place)]
        second = self._now()
        second.prompt_tokens += record.num_prefill_tokens
        second.running = sum(one.num_running for one in live)
        second.waiting = sum(one.num_waiting for one in live)
        second.swapped = sum(one.num_swapped for one in live)
        second.device_blocks = sum(one.num_used_blocks for one in live)
        second.host_blocks = sum(one.num_used_host_blocks for one in live)
        second.dropped += record.num_dropped
        second.swapped_out += record.num_swapped_out
        second.swapped_in += record.num_swapped_in

    def count_output(self, num_tokens: int) -> None:
        """Take tokens that were sampled, in an engine's thread."""
        with self._lock:
            self.totals.output_tokens += num_tokens
            self._now().output_tokens += num_tokens

    def refused(self) -> None:
        """Take a request that there was no room for."""
        self.totals.refused += 1
        with self._lock:
            self._now().refused += 1

    def finished(self, output: RequestOutput, samples: Sequence[tuple[int, str]]) -> None:
        """Take a request that ended: how many tokens each of its samples has, and why it ended."""
        self.totals.requests += 1
        self.totals.looked_up_tokens += len(output.prompt_token_ids)
        for tier, count in output.cached_tokens_by_tier.items():
            self.totals.cached_tokens[tier] += count
        metrics = output.metrics
        with self._lock:
            second = self._now()
            second.finished += 1
            if metrics is not None and len(second.e2e_seconds) < _MAX_TIMES:
                if metrics.first_token_time is not None:
                    second.ttft_seconds.append(metrics.first_token_time - metrics.arrival_time)
                if metrics.finished_time is not None:
                    second.e2e_seconds.append(metrics.finished_time - metrics.arrival_time)
        self.on_finished(output, samples)

    def history(self) -> dict[str, Sequence[float | int | None]]:
        """The last seconds, by what happened in them; medians and 99th percentiles of times, in ms."""
        with self._lock:
            self._now()
            seconds = list(self._seconds)[:-1]  # the last one is not over
        columns: dict[str, Sequence[float | int | None]] = {}
        for field in dataclasses.fields(Second):
            values = [getattr(second, field.name) for second in seconds]
            if field.name.endswith("_seconds"):
                columns |= _figures(field.name, values)
            else:
                columns[field.name] = values
        return columns

    def latencies(self, num_seconds: int = 60) -> dict[str, float | None]:
        """Medians and 99th percentiles of requests that ended in the last seconds, in ms."""
        with self._lock:
            self._now()
            recent = list(self._seconds)[-num_seconds:]
            times = {
                name: [one for second in recent for one in getattr(second, name)]
                for name in ("ttft_seconds", "e2e_seconds")
            }
        return {
            key: figure[0] for name, one in times.items() for key, figure in _figures(name, [one]).items()
        }

    def median_seconds(self) -> float:
        """Of requests that ended lately, from end to end, as of this second; 1 if there are none."""
        now = int(self._clock())
        if self._median[0] != now:
            with self._lock:
                recent = [one for second in list(self._seconds)[-30:] for one in second.e2e_seconds]
            self._median = now, statistics.median(recent) if recent else 1.0
        return self._median[1]

    @property
    def bytes_per_token(self) -> float | None:
        """Of the prompts that were answered, rather the last; a token id has four. None of few prompts."""
        size, num_tokens = self._prompt_sizes
        return size / num_tokens if num_tokens >= _FEW_TOKENS else None

    def note_size(self, output: RequestOutput) -> None:
        """Take the size of a prompt, all of whose tokens are in the output."""
        added = len(output.prompt_token_ids)
        text = output.prompt
        added_size = _BYTES_OF_ID * added if text is None else len(text.encode("utf-8", "replace"))
        size, num_tokens = self._prompt_sizes
        kept = 0.5 if num_tokens > _TOKENS_TO_REMEMBER else 1.0
        self._prompt_sizes = kept * size + added_size, kept * num_tokens + added

    def _now(self) -> Second:
        """The present second; those in which nothing happened are filled in."""
        now, last = int(self._clock()), self._seconds[-1]
        if now <= last.time:
            return last
        goes_on = {}
        if any(map(self.is_busy, self._last)):  # in one iteration that takes long
            goes_on = {name: getattr(last, name) for name in _LEVELS}
        for missing in range(max(last.time + 1, now - NUM_SECONDS), now + 1):
            self._seconds.append(Second(missing, **goes_on))
        return self._seconds[-1]


def _figures(name: str, times: Sequence[Sequence[float]]) -> dict[str, list[float | None]]:
    """Median and 99th percentile of each list of seconds, in ms, by what they are called; None of nothing."""
    kind = name.removesuffix("_seconds")

    def column(figure: Callable[[Sequence[float]], float]) -> list[float | None]:
        return [round(figure(one) * 1e3, 3) if one else None for one in times]

    return {f"{kind}_ms": column(statistics.median), f"{kind}_p99_ms": column(_p99)}


def _p99(times: Sequence[float]) -> float:
    """The least of them that 99 % do not exceed."""
    return sorted(times)[math.ceil(0.99 * len(times)) - 1]
