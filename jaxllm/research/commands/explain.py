"""`jaxllm explain`: what a run's scheduler decided, why, and what it cost."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxllm.commands.options import check_distinct
from jaxllm.engine.ledgers import read_ledger
from jaxllm.errors import ConfigError
from jaxllm.predictors.online import KindReport
from jaxllm.sched.ledger import Ledger, PreemptionRecord, StepRecord
from jaxllm.system.output_files import add_overwrite, check_writable

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
    parser.description = "Summarise a decision ledger and draw its timeline."
    parser.add_argument("ledger", metavar="LEDGER", help="file that a run wrote")
    parser.add_argument("--top", type=int, metavar="N", default=5, help="decisions to list (default: 5)")
    parser.add_argument("--width", type=int, metavar="N", default=72, help="columns of the timeline")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the timeline with matplotlib too")
    add_overwrite(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the summary; returns the exit code."""
    for name in ("top", "width"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)} must be at least 1")
    check_distinct({"LEDGER": args.ledger, "--plot": args.plot})
    check_writable({"--plot": args.plot}, overwrite=args.overwrite)
    try:
        ledger = read_ledger(args.ledger)
    except OSError as error:
        raise ConfigError(f"cannot read {args.ledger!r}: {error.strerror}") from error
    print(summary(ledger, args.top))
    print(timeline(ledger.steps, args.width))
    if args.plot is not None:
        plot(ledger.steps, Path(args.plot))
    return 0


def summary(ledger: Ledger, top: int) -> str:
    """Counts, costs and regret by action, and the decisions that cost most."""
    records = ledger.preemptions
    lines = [f"{len(ledger.steps)} steps, {len(records)} preemptions"]
    for action in ("recompute", "swap"):
        of_action = [record for record in records if record.action == action]
        if of_action:
            lines.append(f"  {action}: {_costs(of_action)}")
    known = [record for record in records if record.regret_seconds is not None]
    if known:
        total = sum(record.regret_seconds or 0.0 for record in known)
        lines.append(f"  regret against the other action's estimate: {total:.4g} s in {len(known)} decisions")
    if any(report.count for report in ledger.predictions.values()):
        lines.append("predictions compared with what was measured:")
        lines += [f"  {kind}: {_accuracy(report)}" for kind, report in ledger.predictions.items()]
    costly = sorted(records, key=lambda record: -(record.measured_seconds or 0.0))[:top]
    if costly:
        lines.append(f"most costly of them ({len(costly)}):")
        lines += [f"  {_describe(record)}" for record in costly]
    return "\n".join(lines)


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


def plot(steps: Sequence[StepRecord], path: Path) -> None:
    """The timeline as an image: queues, blocks, and preemptions.

    Raises:
        ConfigError: matplotlib is missing, or writes no such files.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'jaxllm[research]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    times = [step.time for step in steps]
    figure, panels = pyplot.subplots(3, 1, sharex=True, figsize=(10, 7), layout="constrained")
    for panel, title, names in zip(
        panels,
        ("requests", "blocks in use", "preemptions and restores per step"),
        (("waiting", "running", "swapped"), ("device blocks", "host blocks"),
         ("dropped", "swapped out", "swapped in")),
        strict=True,
    ):  # fmt: skip
        for name, value in _SERIES:
            if name in names:
                panel.step(times, [value(step) for step in steps], where="post", label=name)
        panel.set_ylabel(title)
        panel.legend(loc="upper right")
    panels[-1].set_xlabel("seconds")
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise ConfigError(f"--plot {path}: {error}") from None
    finally:
        pyplot.close(figure)


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
