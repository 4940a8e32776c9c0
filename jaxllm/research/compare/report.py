"""From measurements to JSON, and from JSON to a table and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxllm.research.compare.agreement import agreement
from jaxllm.research.compare.backends import REFERENCE
from jaxllm.research.compare.runner import Comparison, Measurement
from jaxllm.research.compare.workloads import Workload
from jaxllm.research.figures import import_pyplot, save
from jaxllm.research.intervals import ratio_interval

_MAX_GAPS = 16  # divergences whose logits are looked at, per back-end
_BUSY = 0.1  # share of the processors' time above which the numbers are worth little
_COLUMNS = (
    "back-end",
    "output tokens/s",
    "min..max",
    "vs best static",
    "jaxllm over it",
    "requests equal",
    "peak RSS, GiB",
    "start, s",
    "load, s",
    "compile, s",
    "J a token",
)
_LATENCY_COLUMNS = (
    "back-end",
    "first token p50, s",
    "p99",
    "per token p50, ms",
    "p99",
    "request p50, s",
    "p99",
    "output tokens/s",
)


def collect(
    comparison: Comparison, workload: Workload, *, compares_tokens: bool = True
) -> list[dict[str, Any]]:
    """One JSON object for each back-end and variant: the workload's throughput, agreement and costs."""
    measurements = comparison.measurements
    done = [measurement for measurement in measurements if measurement.tokens]
    reference = next((one for one in done if one.backend == REFERENCE), done[0] if done else None)
    if not compares_tokens:
        reference = None
    rows = [_row(measurement, reference, workload) for measurement in measurements]
    for row in rows:
        found = (row["agreement"] or {}).get("divergences", [])[:_MAX_GAPS]
        if reference is not None and reference.backend == REFERENCE and found:
            sequences = [
                workload.prompts[entry["request"]] + reference.tokens[entry["request"]][: entry["position"]]
                for entry in found
            ]
            for entry, gap in zip(found, comparison.top2_gaps(REFERENCE, sequences) or [], strict=False):
                entry["gap"] = gap
    set_ratios(rows)
    set_pairs(rows)
    return rows


def set_pairs(rows: Sequence[dict[str, Any]]) -> None:
    """Set each row's `jaxllm_over_it`: how many times as fast jaxllm was in the same repetitions.

    The geometric mean of the ratios with Student's 95 % interval (`jaxllm.research.intervals`).
    """
    ours: list[float] = next(
        (row["seconds"] for row in rows if row["backend"] == "jaxllm" and row["seconds"]), []
    )
    for row in rows:
        pairs = list(zip(row["seconds"], ours, strict=False))
        if not pairs or row["backend"] == "jaxllm":
            row["jaxllm_over_it"] = None
            continue
        interval = ratio_interval([theirs / own for theirs, own in pairs])
        known = len(pairs) > 1
        row["jaxllm_over_it"] = {
            "mean": interval.mean,
            "low": interval.low if known else None,
            "high": interval.high if known else None,
            "num_pairs": len(pairs),
        }


def _row(measurement: Measurement, reference: Measurement | None, workload: Workload) -> dict[str, Any]:
    rates = [workload.num_output_tokens / seconds for seconds in measurement.seconds]
    comparable = bool(measurement.tokens) and reference is not None and measurement is not reference
    joules = [one for one in measurement.joules if one is not None]
    return {
        "workload": workload.name,
        "backend": measurement.backend,
        "batch_size": measurement.variant,
        "seconds": measurement.seconds,
        "output_tokens_per_second": {
            "median": statistics.median(rates),
            "min": min(rates),
            "max": max(rates),
        }
        if rates
        else None,
        "partial": measurement.partial,
        "same_tokens_every_repetition": all(one == measurement.outputs[0] for one in measurement.outputs),
        "agreement": agreement(
            _name(reference.backend, reference.variant), reference.tokens, measurement.tokens
        )
        if comparable and reference is not None
        else None,
        "peak_rss_bytes": measurement.peak_rss_bytes,
        "joules_per_token": statistics.median(joules) / workload.num_output_tokens if joules else None,
        "latency": measurement.latency,
        **{
            key: measurement.loaded.get(key)
            for key in ("start_up_seconds", "export_seconds", "load_seconds", "compile_seconds")
        },
        "python": measurement.loaded.get("python"),
        "packages": measurement.loaded.get("packages", {}),
        "error": measurement.error,
    }


def set_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """Mark the best static row, and set each row's `ratio_to_best_static` (None without such a row)."""
    static = [row for row in rows if row["backend"] == REFERENCE and row["output_tokens_per_second"]]
    best = max(static, key=_median, default=None)
    for row in rows:
        row["best_static"] = row is best
        known = best is not None and row["output_tokens_per_second"] is not None
        row["ratio_to_best_static"] = _median(row) / _median(best) if known and best is not None else None


def disagreement(rows: Sequence[dict[str, Any]], backend: str = "jaxllm") -> float | None:
    """Share of requests whose tokens differ from transformers', of the workload where it is largest.

    None if the two were not compared.
    """
    compared = [row["agreement"] for row in rows if row["backend"] == backend and row["agreement"]]
    shares = [
        1 - one["num_matching"] / one["num_requests"]
        for one in compared
        if one["reference"].split(",")[0] == REFERENCE
    ]
    return max(shares, default=None)


def table(results: dict[str, Any]) -> str:
    """The results as Markdown: the medians of all workloads, if there are several, then each in detail."""
    workloads, machine = _workloads(results), results["hardware"]
    several = len(workloads) > 1
    parts = [_overview(workloads)] if several else []
    for workload, rows in workloads:
        heading = f"Workload {workload['name']}:\n\n" if several else ""
        parts.append(heading + _markdown(_COLUMNS, [_cells(row) for row in rows]))
        if any(row.get("latency") for row in rows):
            rate = workload["latency_requests_per_second"]
            parts.append(
                f"Workload {workload['name']}, {rate:.3g} requests a second:\n\n"
                + _markdown(_LATENCY_COLUMNS, [_latency_cells(row) for row in rows if row.get("latency")])
            )
    memory = machine["memory_bytes"]
    notes = [
        f"Workload {workload['name']}: {workload['num_requests']} requests at time 0, "
        f"{workload['prompt_tokens']} prompt tokens ({workload['shortest_prompt']} to "
        f"{workload['longest_prompt']} each), {workload['output_tokens']} output tokens; "
        f"{workload['repetitions']} repetitions in turn."
        for workload, _ in workloads
    ]
    notes += [
        f"Model {results['model']['name']}, {results.get('dtype', 'float32')}, greedy; "
        f"seed {results['seed']}, {results['threads']} threads each, device {results['device']}.",
        f"Hardware: {machine['cpu']}, {machine['cores']} cores"
        + (f", {memory / 2**30:.0f} GiB" if memory else "")
        + f"; {_percent(machine['busy_share_at_start'])} busy with other work at the start.",
        f"Versions: {_versions(results['rows'])}.",
        f"Command: `{results['command']}`",
    ]
    if (machine["busy_share_at_start"] or 0.0) > _BUSY:
        notes.append("Other processes kept the machine busy: do not quote these numbers.")
    for workload, rows in workloads:
        where = f"{workload['name']}: " if several else ""
        notes += [where + note for note in _row_notes(workload, rows)]
    return "\n\n".join(parts) + "\n\n" + "\n".join(f"- {note}" for note in notes) + "\n"


def _workloads(results: dict[str, Any]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each workload's summary and its rows; results written before there could be several have one."""
    if "workload" in results:
        return [(results["workload"] | {"repetitions": results["repetitions"]}, results["rows"])]
    return [
        (workload, [row for row in results["rows"] if row["workload"] == workload["name"]])
        for workload in results["workloads"]
    ]


def _overview(workloads: Sequence[tuple[dict[str, Any], list[dict[str, Any]]]]) -> str:
    """A line for each back-end, with the median of its best batch size on each workload."""
    lines: dict[str, list[str]] = {}
    for _, rows in workloads:
        for backend in dict.fromkeys(row["backend"] for row in rows):
            own = [row for row in rows if row["backend"] == backend]
            rated = [row for row in own if row["output_tokens_per_second"]]
            best = max(rated, key=_median, default=own[0])
            batch = "" if best["batch_size"] is None or not rated else f" (batch {best['batch_size']})"
            lines.setdefault(backend, [backend]).append(_cells(best)[1] + batch)
    names = [workload["name"] for workload, _ in workloads]
    return _markdown(("output tokens/s", *names), list(lines.values()))


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    return "\n".join([*head, *("| " + " | ".join(row) + " |" for row in rows)])


def _row_notes(workload: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is to be said of single rows: other tokens, stopped, failed."""
    notes = [f"{_label(row)} differs: {_differences(row['agreement'])}" for row in rows if _differs(row)]
    notes += [
        f"{_label(row)} was stopped after {row['partial']['seconds']:.0f} s, far behind: until then "
        f"{row['partial']['gave_up_after_tokens']} output tokens, {_partial_rate(row):.1f} a second; the "
        f"whole would have been below {_most(row, workload):.1f}."
        for row in rows
        if row.get("partial")
    ]
    notes += [
        f"{_label(row)} has no latency at a rate: {row['latency']['unsupported']}."
        for row in rows
        if "unsupported" in (row.get("latency") or {})
    ]
    return notes + [f"{_label(row)} failed: {row['error']}" for row in rows if row["error"]]


def plot(results: dict[str, Any], path: Path) -> None:
    """One page: a bar for each row and repetition's range, and waiting at a rate where it was measured.

    Raises:
        ConfigError: matplotlib is missing, or writes no such files.
    """
    pyplot = import_pyplot()
    workloads = [
        (workload, [row for row in rows if row["output_tokens_per_second"]])
        for workload, rows in _workloads(results)
    ]
    heights = [1.2 + 0.45 * len(rows) for _, rows in workloads]
    has_latency = any(_is_timed(row) for _, rows in workloads for row in rows)
    figure, panels = pyplot.subplots(
        len(workloads),
        3 if has_latency else 1,
        figsize=(14 if has_latency else 8, sum(heights)),
        layout="constrained",
        squeeze=False,
        height_ratios=heights,
    )
    for line, (workload, rows) in zip(panels, workloads, strict=True):
        _draw_rates(line[0], workload, rows)
        for panel, (name, factor, label) in zip(line[1:], _WAITS, strict=False):
            _draw_waits(panel, [row for row in rows if _is_timed(row)], name, factor, label)
        line[0].set_title(f"{results['model']['name']}, workload {workload['name']}", fontsize=10)
    busy = results["hardware"]["busy_share_at_start"] or 0.0
    warning = "; others kept the machine busy" if busy > _BUSY else ""
    figure.suptitle(
        f"measured: {results['hardware']['cpu']}, {results['threads']} threads, "
        f"{results.get('dtype', 'float32')}{warning}",
        fontsize=10,
    )
    save(figure, path)


_WAITS = (
    ("first_token_seconds", 1, "seconds to the first token"),
    ("seconds_per_token", 1e3, "milliseconds per token"),
)


def _is_timed(row: dict[str, Any]) -> bool:
    return bool(row.get("latency")) and "unsupported" not in row["latency"]


def _draw_rates(axes: Any, workload: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    rates = [row["output_tokens_per_second"] for row in rows]
    medians = [rate["median"] for rate in rates]
    spread = [
        [rate["median"] - rate["min"] for rate in rates],
        [rate["max"] - rate["median"] for rate in rates],
    ]
    colors = [_colour(row) for row in rows]
    axes.barh([_label(row) for row in rows], medians, xerr=spread, color=colors, capsize=3)
    axes.bar_label(axes.containers[-1], fmt="%.0f", padding=6)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(f"output tokens/s, median and range of {workload['repetitions']}")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_waits(axes: Any, rows: Sequence[dict[str, Any]], name: str, factor: float, label: str) -> None:
    """A bar to the median and a mark at the 99th percentile."""
    found = [row["latency"][name] for row in rows]
    names = [_label(row) for row in rows]
    axes.barh(names, [factor * one["p50"] for one in found], color=[_colour(row) for row in rows])
    axes.plot([factor * one["p99"] for one in found], names, "k|", markersize=14)
    axes.invert_yaxis()
    axes.set_xlim(0)
    axes.set_xlabel(f"{label}; mark: 99th percentile")
    axes.spines[["top", "right"]].set_visible(False)


def _colour(row: dict[str, Any]) -> str:
    return "#d55e00" if row["backend"] == "jaxllm" else "#7a8ca3"


def _cells(row: dict[str, Any]) -> list[str]:
    rate, compared, ratio = row["output_tokens_per_second"], row["agreement"], row["ratio_to_best_static"]
    peak = row["peak_rss_bytes"]
    return [
        _label(row),
        f"{rate['median']:.1f}" if rate else _without_rate(row),
        f"{rate['min']:.1f}..{rate['max']:.1f}" if rate else "-",
        "-" if ratio is None else f"{ratio:.2f}x",
        _paired(row.get("jaxllm_over_it")),
        f"{compared['num_matching']}/{compared['num_requests']}" if compared else "-",
        "-" if peak is None else f"{peak / 2**30:.2f}",
        *(
            "-" if row[key] is None else f"{row[key]:.1f}"
            for key in ("start_up_seconds", "load_seconds", "compile_seconds")
        ),
        "-" if row.get("joules_per_token") is None else f"{row['joules_per_token']:.3g}",
    ]


def _paired(ratio: dict[str, Any] | None) -> str:
    """How many times as fast jaxllm was, with its interval."""
    if ratio is None:
        return "-"
    if ratio["low"] is None:
        return f"{ratio['mean']:.2f}x"
    return f"{ratio['mean']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})"


def _latency_cells(row: dict[str, Any]) -> list[str]:
    found = row["latency"]
    if "unsupported" in found:
        return [_label(row), *["-"] * (len(_LATENCY_COLUMNS) - 1)]
    cells = [_label(row)]
    for name, factor in (("first_token_seconds", 1), ("seconds_per_token", 1e3), ("request_seconds", 1)):
        cells += [f"{factor * found[name][key]:.3g}" if found[name] else "-" for key in ("p50", "p99")]
    return [*cells, f"{found['output_tokens_per_second']:.1f}"]


def _percent(share: float | None) -> str:
    return "an unknown share" if share is None else f"{share:.0%}"


def _without_rate(row: dict[str, Any]) -> str:
    if row.get("partial"):
        return f"stopped at {_partial_rate(row):.1f}"
    return "failed" if row["error"] else "-"


def _partial_rate(row: dict[str, Any]) -> float:
    return float(row["partial"]["gave_up_after_tokens"] / row["partial"]["seconds"])


def _most(row: dict[str, Any], workload: dict[str, Any]) -> float:
    """A bound of the rate of a row that was stopped: it had not finished by then."""
    return float(workload["output_tokens"] / row["partial"]["seconds"])


def _label(row: dict[str, Any]) -> str:
    return _name(row["backend"], row["batch_size"]) + (" (best static)" if row["best_static"] else "")


def _name(backend: str, batch_size: int | None) -> str:
    return backend if batch_size is None else f"{backend}, batch {batch_size}"


def _median(row: dict[str, Any]) -> float:
    return float(row["output_tokens_per_second"]["median"])


def _differs(row: dict[str, Any]) -> bool:
    return bool(row["agreement"] and row["agreement"]["divergences"])


def _differences(compared: dict[str, Any], num_shown: int = 5) -> str:
    shown = []
    for entry in compared["divergences"][:num_shown]:
        gap = "" if entry["gap"] is None else f" (logit gap {entry['gap']:.2g})"
        shown.append(f"request {entry['request']} at token {entry['position']}{gap}")
    more = len(compared["divergences"]) - len(shown)
    return f"from {compared['reference']}: " + ", ".join(shown) + (f" and {more} more" if more else "")


def _versions(rows: Sequence[dict[str, Any]]) -> str:
    shown = {}
    for row in rows:
        if row["packages"]:
            packages = ", ".join(f"{name} {version}" for name, version in row["packages"].items())
            shown[row["backend"]] = f"{row['backend']}: {packages} on Python {row['python']}"
    return "; ".join(shown.values()) or "unknown"
