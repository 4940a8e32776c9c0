"""Results as tables for people."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxllm.research.bench.serving.metrics import LATENCIES

_TITLES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token after the first",
    "itl": "Time between outputs",
    "e2el": "End-to-end latency",
    "refusal": "Latency of refusals",
}
_WIDTH = 62
_COUNTS = (
    ("Successful requests:", "completed"),
    ("Failed requests:", "failed"),
    ("  of them refused (429, 503):", "refused"),
    ("Maximum request concurrency:", "max_concurrency"),
    ("Request rate configured (req/s):", "request_rate"),
    ("Benchmark duration (s):", "duration"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Request throughput (req/s):", "request_throughput"),
    ("Request goodput (req/s):", "request_goodput"),
    ("Output token throughput (tok/s):", "output_throughput"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
    ("Peak concurrent requests:", "max_concurrent_requests"),
    ("Total token throughput (tok/s):", "total_token_throughput"),
    ("Weighted turnaround (server):", "weighted_turnaround"),
)
_COLUMNS: Mapping[str, str] = {
    "server": "policy",
    "arrivals": "arrivals",
    "done": "completed",
    "failed": "failed",
    "req/s": "request_throughput",
    "tok/s": "output_throughput",
    "TTFT p50": "median_ttft_ms",
    "p99": "p99_ttft_ms",
    "TPOT p50": "median_tpot_ms",
    "p99 ": "p99_tpot_ms",
    "e2e p50": "median_e2el_ms",
    "p99  ": "p99_e2el_ms",
    "good/s": "request_goodput",
    "weighted": "weighted_turnaround",
    "preempted": "preemptions",
}
"""Of the table of several runs: what each column shows. Headings are told apart by spaces."""


def summary(result: Mapping[str, Any]) -> list[str]:
    """Lines that tell a run's result."""
    lines = [" Serving benchmark result ".center(_WIDTH, "=")]
    lines += [_line(title, result[key]) for title, key in _COUNTS if result[key] is not None]
    if result["num_preemptions"] is not None:
        counts = ", ".join(f"{count} {action}" for action, count in result["num_preemptions"].items())
        lines.append(_line("Preemptions (server):", counts))
    if result["failures"]:
        counts = ", ".join(f"{count} {kind}" for kind, count in result["failures"].items())
        lines.append(_line("Failures by status:", counts))
    for name, title in _TITLES.items():
        found = {key: value for key, value in result.items() if key.endswith(f"_{name}_ms")}
        if any(value is not None for value in found.values()):
            lines.append(f" {title} ".center(_WIDTH, "-"))
            lines += [_line(_heading(key, name), value) for key, value in found.items()]
    if result["num_without_usage"]:
        lines.append(
            f"The server told no token counts for {result['num_without_usage']} requests: their output "
            "tokens are numbers of chunks."
        )
    return [*lines, "=" * _WIDTH]


def brief(result: Mapping[str, Any]) -> str:
    """One line of a run's result."""
    names = " ".join(filter(None, (result["policy"], result["arrivals"])))
    return (
        f"{names}: {result['completed']} requests, {result['failed']} failures, {result['duration']:.1f} s, "
        f"{result['output_throughput']:.1f} output tokens/s"
    )


def rows(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each server and arrivals: medians over the repetitions, null where nothing is known."""
    grouped: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
    for run in runs:
        grouped.setdefault((run["policy"], run["arrivals"]), []).append(run)
    return [_row(key, found) for key, found in grouped.items()]


def table(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a table of `rows`; latencies in milliseconds."""
    shown = [name for name, key in _COLUMNS.items() if any(row[key] is not None for row in found)]
    cells = [[name.strip() for name in shown]]
    cells += [[_cell(row[_COLUMNS[name]]) for name in shown] for row in found]
    widths = [max(len(row[column]) for row in cells) for column in range(len(shown))]
    lines = ["  ".join(_aligned(row, widths)) for row in cells]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def _row(key: tuple[Any, Any], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def middle(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    preempted = [run["num_preemptions"] for run in runs]
    row: dict[str, Any] = {"policy": key[0], "arrivals": key[1], "repetitions": len(runs)}
    for name in _COLUMNS.values():
        if name not in row and name != "preemptions":
            row[name] = middle(run.get(name) for run in runs)
    row["preemptions"] = middle(None if one is None else sum(one.values()) for one in preempted)
    return row


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Names to the left, numbers to the right."""
    return [
        cell.ljust(width) if column < 2 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]


def _cell(value: float | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


def _line(title: str, value: object) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{title:<42}{text}"


def _heading(key: str, name: str) -> str:
    statistic = key.removesuffix(f"_{name}_ms")
    short = name.upper() if name in LATENCIES else "latency"
    return f"{statistic[0].upper()}{statistic[1:]} {short} (ms):"
