"""Figures of a run, under the names that `vllm bench serve` gives them in its result."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.research.bench.serving.answers import Answer

LATENCIES = ("ttft", "tpot", "itl", "e2el")
"""Time to first token, per output token after it, between outputs, and from end to end."""
SLO_NAMES = ("ttft", "tpot", "e2el")
"""Of the latencies those that a request has one of, so that it can be held to it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What to report of a run.

    Args:
        latencies: which of `LATENCIES`.
        percentiles: of each, in [0, 100].
        goodput: by name (`SLO_NAMES`), the most milliseconds that a good request may take.

    Raises:
        ConfigError: a name is unknown, or a number is out of range.
    """

    latencies: Sequence[str] = LATENCIES
    percentiles: Sequence[float] = (99.0,)
    goodput: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for names, known, option in (
            (self.latencies, LATENCIES, "percentile metrics"),
            (self.goodput, SLO_NAMES, "goodput"),
        ):
            for name in names:
                if name not in known:
                    raise ConfigError(f"{option} {name!r} is unknown; choose from {', '.join(known)}")
        for percentile in self.percentiles:
            if not 0 <= percentile <= 100:
                raise ConfigError(f"percentile {percentile:g} must lie in [0, 100]")
        for name, most in self.goodput.items():
            if not 0 <= most < float("inf"):
                raise ConfigError(f"goodput {name}:{most:g} must be milliseconds, at least 0")


def figures(answers: Sequence[Answer], seconds: float, report: Report) -> dict[str, Any]:
    """The figures as a JSON object; latencies in milliseconds, null where there is nothing to measure.

    Beside vLLM's keys there are `refused` (answered 503 or 429), `failures` (numbers by status, or by
    "stream", "connection" and "not sent"), the latencies of refusals, and how much later than due requests
    were sent.

    Args:
        answers: of all requests.
        seconds: that the run took.
        report: what of it.
    """
    good = [answer for answer in answers if not answer.error]
    failed = [answer for answer in answers if answer.error]
    refused = [answer for answer in failed if answer.is_refused]
    total_input = sum(answer.prompt_len for answer in good)
    total_output = sum(answer.output_len for answer in good)
    most_tokens, most_requests = _peaks(good)
    values: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(failed),
        "refused": len(refused),
        "failures": dict(collections.Counter(_failure(answer) for answer in failed)),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(good) / seconds,
        "request_goodput": _num_within(good, report.goodput) / seconds if report.goodput else None,
        "output_throughput": total_output / seconds,
        "total_token_throughput": (total_input + total_output) / seconds,
        "max_output_tokens_per_s": most_tokens,
        "max_concurrent_requests": most_requests,
    }
    seen = latencies(good)
    for name in report.latencies:
        values |= _statistics(name, seen[name], report.percentiles)
    values |= _statistics("refusal", [answer.latency for answer in refused], report.percentiles)
    sent = [answer.start_time - answer.due_time for answer in answers if answer.status is not None]
    values |= _statistics("send_delay", sent, report.percentiles)
    return values


def latencies(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Seconds of all requests that succeeded, by name; TPOT of those with two tokens or more."""
    good = [answer for answer in answers if not answer.error]
    return {
        "ttft": [answer.ttft for answer in good],
        "tpot": [answer.tpot for answer in good if answer.output_len > 1],
        "itl": [itl for answer in good for itl in answer.itls],
        "e2el": [answer.latency for answer in good],
    }


def details(answers: Sequence[Answer]) -> dict[str, Any]:
    """What vLLM's `--save-detailed` keeps of each request; seconds."""
    return {
        "input_lens": [answer.prompt_len for answer in answers],
        "output_lens": [0 if answer.error else answer.output_len for answer in answers],
        "ttfts": [answer.ttft for answer in answers],
        "itls": [answer.itls for answer in answers],
        "latencies": [answer.latency for answer in answers],
        "start_times": [answer.start_time for answer in answers],
        "queue_times": [answer.start_time - answer.due_time for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "statuses": [answer.status for answer in answers],
        "errors": [answer.error for answer in answers],
    }


def _failure(answer: Answer) -> str:
    if answer.status is None:
        return "connection" if answer.is_sent else "not sent"
    return "stream" if answer.status == 200 else str(answer.status)


def _num_within(answers: Sequence[Answer], goodput: Mapping[str, float]) -> int:
    """How many kept to all the bounds."""
    count = 0
    for answer in answers:
        seen = {"ttft": answer.ttft, "tpot": answer.tpot, "e2el": answer.latency}
        count += all(seen[name] * 1e3 <= most for name, most in goodput.items())
    return count


def _statistics(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    keys = [f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms"]
    keys += [f"p{percentile:g}_{name}_ms" for percentile in percentiles]
    if not seconds:
        return dict.fromkeys(keys)
    times = 1e3 * np.asarray(seconds)
    found = [times.mean(), np.median(times), times.std(), *np.percentile(times, percentiles)]
    return {key: float(value) for key, value in zip(keys, found, strict=True)}


def _peaks(answers: Sequence[Answer]) -> tuple[float, int]:
    """Most output tokens in one of the run's seconds, and most requests at once."""
    if not answers:
        return 0.0, 0
    start = min(answer.start_time for answer in answers)
    ends = [(answer.start_time + answer.latency, -1) for answer in answers]
    changes = sorted([(answer.start_time, 1) for answer in answers] + ends)
    requests = np.cumsum([change for _, change in changes]).max()
    tokens: collections.defaultdict[int, float] = collections.defaultdict(float)
    for answer in answers:
        times = np.cumsum([answer.start_time - start + answer.ttft, *answer.itls])
        share = answer.output_len / len(times)  # of each chunk
        for second, chunks in collections.Counter(times.astype(int).tolist()).items():
            tokens[second] += chunks * share
    return float(max(tokens.values())), int(requests)
