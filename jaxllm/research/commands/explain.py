"""`jaxllm explain`: what a run's scheduler decided, why, and what it cost."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.commands.options import check_distinct, note
from jaxllm.engine.ledgers import read_ledger
from jaxllm.errors import ConfigError
from jaxllm.predictors.online import KindReport
from jaxllm.research.bench.results import to_json
from jaxllm.research.figures import check_picture, import_pyplot, save
from jaxllm.research.ledger_report import (
    ACTIONS,
    Comparison,
    accuracy,
    compare,
    drafts,
    most_costly,
    report,
)
from jaxllm.sched.ledger import HeaderRecord, Ledger, PreemptionRecord, StepRecord
from jaxllm.system.output_files import add_overwrite, check_writable

_MOST_COLUMNS = 10_000
_LEVELS = " ▁▂▃▄▅▆▇█"
_SERIES: Sequence[tuple[str, Callable[[StepRecord], int]]] = (
    ("waiting", lambda step: step.num_waiting),
    ("running", lambda step: step.num_running),
    ("swapped", lambda step: step.num_swapped),
    ("device blocks", lambda step: step.num_used_blocks),
    ("host blocks", lambda step: step.num_used_host_blocks),
    ("dropped", lambda step: step.num_dropped),
    ("swapped out", lambda step: step.num_swapped_out),
    ("swapped in", lambda step: step.num_swapped_in),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command, and add its options."""
    parser.description = (
        "Summarise a decision ledger and draw its timeline; of two ledgers of one workload, say which "
        "decisions differ and what that cost. docs/ledger.md has a ledger's fields."
    )
    parser.add_argument("ledger", metavar="LEDGER", help="file that a run wrote")
    parser.add_argument("other", metavar="OTHER", nargs="?", help="another run's, to compare with it")
    parser.add_argument("--top", type=int, metavar="N", default=5, help="decisions to list (default: 5)")
    parser.add_argument("--width", type=int, metavar="N", help="columns of the timeline (default: 72)")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the timeline with matplotlib too")
    parser.add_argument("--json", metavar="FILE", help="write the summary as JSON too; - prints it instead")
    add_overwrite(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the summary; returns the exit code."""
    for name in ("top", "width"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)} must be at least 1")
    if args.width is not None and args.width > _MOST_COLUMNS:
        raise ConfigError(f"--width {args.width} is more columns than anybody sees: at most {_MOST_COLUMNS}")
    if args.other is not None and args.plot is not None:
        raise ConfigError("--plot draws one ledger: leave OTHER out, or --plot")
    if args.other is not None and args.width is not None:
        raise ConfigError("--width is of one ledger's timeline: leave OTHER out, or --width")
    files = {"--plot": args.plot, "--json": None if args.json == "-" else args.json}
    check_distinct({"LEDGER": args.ledger, "OTHER": args.other, **files})
    check_picture(args.plot)
    check_writable(files, overwrite=args.overwrite)
    ledger = _read(args.ledger)
    if args.other is not None:
        compared = compare(ledger, _read(args.other))
        _tell(args.json, compared.to_dict(args.top), comparison(compared, args.top))
        return 0
    _tell(
        args.json,
        report(ledger, args.top),
        f"{summary(ledger, args.top)}\n{timeline(ledger.steps, args.width or 72)}",
    )
    if args.plot is not None:
        plot(ledger, Path(args.plot))
    return 0


def _read(path: str) -> Ledger:
    ledger = read_ledger(path)
    if not any((ledger.header, ledger.steps, ledger.preemptions, ledger.verifications, ledger.cut_line)):
        raise ConfigError(
            f"{path} holds no records of a ledger: name the file that a run wrote, such as "
            "`jaxllm generate --ledger FILE`"
        )
    if not ledger.steps:
        note(f"{path} has no steps: its run computed nothing, or ended before its first step was written")
    if ledger.cut_line is not None:
        note(
            f"{path}, line {ledger.cut_line}, the last, is cut off: its run was killed, or goes on; what is "
            "told is of the lines before it"
        )
    return ledger


def _tell(path: str | None, values: Mapping[str, Any], text: str) -> None:
    """Print text, and write values to a file; or print these."""
    if path == "-":
        print(to_json(values))
        return
    print(text)
    if path is not None:
        Path(path).write_text(to_json(values) + "\n", encoding="utf-8")


def summary(ledger: Ledger, top: int) -> str:
    """Counts, costs, accuracy and regret by action, and the decisions that cost most."""
    records = ledger.preemptions
    lines = [f"{len(ledger.steps)} steps, {len(records)} preemptions"]
    if ledger.header is not None:
        lines.append(_described(ledger.header))
    for action in ACTIONS:
        of_action = [record for record in records if record.action == action]
        if of_action:
            lines.append(f"  {action}: {_costs(of_action)}")
        if (known := accuracy(of_action)) is not None:
            lines.append(
                f"    of what was done: predicted {known.predicted_seconds:.4g} s, took "
                f"{known.measured_seconds:.4g} s, in {known.num_decisions}; half off by at most "
                f"{known.median_error:.0%} of the larger"
            )
    regretted = [record for record in records if record.regret_seconds is not None]
    if regretted:
        total, count = sum(record.regret_seconds or 0.0 for record in regretted), len(regretted)
        lines.append(f"  regret against the other action's estimate: {total:.4g} s in {count} decisions")
    if any(found.count for found in ledger.predictions.values()):
        source = "" if ledger.header is None else f" of {ledger.header.costs_source}"
        lines.append(f"predictions{source} compared with what was measured:")
        lines += [f"  {kind}: {_accuracy(found)}" for kind, found in ledger.predictions.items()]
    if (found := drafts(ledger.verifications)) is not None:
        lines.append(_drafts(found))
    costly = most_costly(records, top)
    if costly:
        lines.append(f"most costly of them ({len(costly)}):")
        lines += [f"  {_describe(record)}" for record in costly]
    return "\n".join(lines)


def _drafts(found: Mapping[str, float | None]) -> str:
    parts = [
        f"drafts: {found['num_drafted']} in {found['num_iterations']} iterations, {found['num_kept']} kept "
        f"({found['expected_kept']:.0f} expected)"
    ]
    if found["measured_gain"] is not None:
        parts.append(f"{found['measured_gain']:.2f} times the tokens/s without, in {found['num_measured']}")
    if found["predicted_gain"] is not None:
        parts.append(f"predicted {found['predicted_gain']:.2f}")
    return "; ".join(parts)


def comparison(compared: Comparison, top: int) -> str:
    """In which decisions two runs differ, and what these cost."""
    values = compared.to_dict(top)
    lines = []
    for name, ledger in (("first", compared.first), ("second", compared.second)):
        what = "" if ledger.header is None else f": {_described(ledger.header)}"
        lines.append(f"{name}: {_totals(values[name]['all'])}{what}")
    lines.append(
        f"{compared.num_same} decisions are the same, {values['num_other_action']} of another action, "
        f"{values['first']['num_alone']} in the first alone, {values['second']['num_alone']} in the second "
        "alone"
    )
    lines += [
        f"  differing ones of the {name}: {_totals(values[name]['differing'])}"
        for name in ("first", "second")
    ]
    for one in compared.differences[:top]:
        lines.append(f"  preemption {one.number} of {one.request_id!r}:")
        for name, record in (("first", one.first), ("second", one.second)):
            lines.append(f"    {name}: {'none' if record is None else _describe(record)}")
    return "\n".join(lines)


def _totals(values: Mapping[str, Any]) -> str:
    parts = (
        f"{word} {values[f'{name}_seconds']:.4g} s in {values[count]}" if values[count] else f"{word} unknown"
        for word, name, count in (("added", "measured", "num_measured"), ("regret", "regret", "num_regrets"))
    )
    return f"{values['num_preemptions']} preemptions: {', '.join(parts)}"


def _described(header: HeaderRecord) -> str:
    jax = "" if header.jax is None else f", jax {header.jax}"
    return (
        f"policy {header.policy}, costs {header.costs_source or 'unknown'}; jaxllm {header.jaxllm}{jax} on "
        f"{header.device}"
    )


def timeline(steps: Sequence[StepRecord], width: int) -> str:
    """One line of blocks for each quantity, over the run's time; each column shows its largest value."""
    if not steps:
        return "no steps recorded"
    start, end = steps[0].time, steps[-1].time
    span = max(end - start, 1e-12)
    lines = [f"timeline, {end - start:.4g} s from left to right"]
    for name, value in _SERIES:
        columns = [0] * width
        for step in steps:
            column = min(width - 1, int((step.time - start) / span * width))
            columns[column] = max(columns[column], value(step))
        most = max(columns)
        scale = (len(_LEVELS) - 1) / max(most, 1)
        drawn = "".join(_LEVELS[-int(-column * scale // 1)] for column in columns)
        lines.append(f"  {name:>13} |{drawn}| {f'up to {most}' if most else 'none'}")
    return "\n".join(lines)


class Span(NamedTuple):
    """When a request was sent, first ran and ended, in seconds of the ledger's clock."""

    request_id: str
    sent: float
    started: float
    ended: float


_COLOURS = {"waiting": "#dddddd", "running": "#56b4e9", "swapped": "#e69f00", "dropped": "#d55e00"}
"""Okabe and Ito's, which colour-blind people tell apart."""


def plot(ledger: Ledger, path: Path, spans: Sequence[Span] = ()) -> None:
    """The timeline as an image: requests as bars, decisions as marks, and blocks in use.

    Args:
        ledger: of a run.
        path: of the image.
        spans: of the requests to draw; without them queues are drawn as areas.

    Raises:
        ConfigError: matplotlib is missing, or writes no such files.
    """
    pyplot = import_pyplot()
    steps = ledger.steps
    begun = steps[0].time if steps else 0.0
    times = [step.time - begun for step in steps]
    figure, (top, bottom) = pyplot.subplots(
        2, 1, sharex=True, figsize=(10, 7), layout="constrained", height_ratios=(3, 1)
    )
    if spans:
        _draw_requests(top, ledger.preemptions, spans, begun)
    else:
        names = ("running", "swapped", "waiting")
        counts = [[getattr(step, f"num_{name}") for step in steps] for name in names]
        top.stackplot(times, counts, step="post", labels=names, colors=[_COLOURS[name] for name in names])
        heights = {step.step_id: step.num_running for step in steps}
        _draw_marks(top, ledger.preemptions, begun, lambda record: heights.get(record.step_id, 0))
        top.set_ylabel("requests")
    top.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    for name, label, colour in (
        ("num_used_blocks", "device", "#0072b2"),
        ("num_used_host_blocks", "host", "#e69f00"),
    ):
        values = [getattr(step, name) for step in steps]
        bottom.step(
            times, values, where="post", color=colour, label=f"{label}: at most {max(values, default=0)}"
        )
    bottom.set_ylabel("blocks in use")
    bottom.set_xlabel("seconds")
    bottom.set_ylim(0)
    bottom.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    for panel in (top, bottom):
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_xlim(0, max([*times, *(span.ended - begun for span in spans), 1e-3]))
    save(figure, path)


def _draw_requests(
    panel: Any, records: Sequence[PreemptionRecord], spans: Sequence[Span], begun: float
) -> None:
    """A bar for each request, those that ran first below."""
    ordered = sorted(spans, key=lambda span: (span.started, span.request_id))
    rows = {span.request_id: row for row, span in enumerate(ordered)}
    ends = {span.request_id: span.ended for span in ordered}
    bars: dict[str, list[tuple[int, float, float]]] = {name: [] for name in _COLOURS}
    for row, span in enumerate(ordered):
        bars["waiting"].append((row, span.sent, span.started))
        bars["running"].append((row, span.started, span.ended))
    kept = [record for record in records if record.request_id in rows]
    for record in kept:
        back = ends[record.request_id] if record.resumed_time is None else record.resumed_time
        name = "swapped" if record.is_swap else "dropped"
        bars[name].append((rows[record.request_id], record.time, back))
    for name, of_name in bars.items():
        if of_name:
            at = [row for row, _, _ in of_name]
            lefts = [left - begun for _, left, _ in of_name]
            widths = [right - left for _, left, right in of_name]
            panel.barh(at, widths, 0.9, lefts, color=_COLOURS[name], label=_LABELS[name])
    _draw_marks(panel, kept, begun, lambda record: rows[record.request_id])
    panel.set_ylabel(f"{len(rows)} requests")
    panel.set_yticks([])


_LABELS = {
    "waiting": "waiting",
    "running": "running",
    "swapped": "in host memory",
    "dropped": "dropped, to be computed again",
}


def _draw_marks(
    panel: Any,
    records: Sequence[PreemptionRecord],
    begun: float,
    height: Callable[[PreemptionRecord], float],
) -> None:
    """A mark where somebody was preempted, by what was decided."""
    for is_swap, marker, label in ((True, "v", "swapped"), (False, "x", "dropped")):
        of = [record for record in records if record.is_swap == is_swap]
        if of:
            times, heights = [record.time - begun for record in of], [height(record) for record in of]
            panel.plot(times, heights, marker, color="black", markersize=5, label=f"decision: {label}")


def _accuracy(report: KindReport) -> str:
    if not report.count:
        return "never"
    parts = [f"{report.count} times"]
    if report.num_in_bounds:
        parts.append(f"{report.num_in_bounds} of them within all that is known of a copy")
    if report.error_before is not None and report.error_after is not None:
        parts.append(f"off by {report.error_after:.1%}, uncorrected by {report.error_before:.1%}")
    return "; ".join([*parts, f"now times {report.factor:.3g}"])


def _costs(records: Sequence[PreemptionRecord]) -> str:
    """What both actions were predicted to add to the iterations they ride in, and what the chosen one did."""
    parts = [f"{len(records)} requests, {sum(record.num_blocks for record in records)} blocks"]
    predicted = {
        "swapping": [record.swap_seconds for record in records],
        "recomputing": [record.recompute_seconds for record in records],
    }
    for name, values in predicted.items():
        known = [seconds for seconds in values if seconds is not None]
        if known:
            parts.append(f"{name} predicted to add {sum(known):.4g} s for {len(known)}")
    measured = [record.measured_seconds for record in records if record.measured_seconds is not None]
    if measured:
        parts.append(f"added {sum(measured):.4g} s for {len(measured)}")
    return "; ".join(parts)


def _describe(record: PreemptionRecord) -> str:
    costs = ", ".join(
        f"{name} {'unknown' if seconds is None else f'{1e3 * seconds:.3g} ms'}"
        for name, seconds in (
            ("swapping predicted to add", record.swap_seconds),
            ("recomputing", record.recompute_seconds),
            ("added", record.measured_seconds),
        )
    )
    back = "never resumed" if record.resumed_step_id is None else f"resumed in step {record.resumed_step_id}"
    if record.resume_action is not None:
        back += f" ({record.resume_action})"
    return (
        f"step {record.step_id}: {record.action} of {record.request_id!r}, {record.num_tokens} tokens in "
        f"{record.num_blocks} blocks; {costs}; {back}"
    )
