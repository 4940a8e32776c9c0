"""Records beside what was simulated of them: relative errors, their means, and what was left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxllm.errors import CapacityError, ConfigError, RequestError
from jaxllm.research.validate.playing import Prediction, World, play
from jaxllm.research.validate.records import METRICS, Figure, Metric, Record

_TITLES = {
    "latency": "latency, s",
    "tpot": "time per token, ms",
    "ttft": "first token, ms",
    "throughput": "requests/s",
}
_UNITS = {"latency": 1.0, "tpot": 1e3, "ttft": 1e3, "throughput": 1.0}
LACKING = "not measured"
ONE_TOKEN = "outputs of one token have no time between tokens"


@dataclasses.dataclass(frozen=True)
class Compared:
    """A measured figure and the predicted one, of the same statistic."""

    measured: Figure
    predicted: float

    @property
    def error(self) -> float:
        """Relative, with its sign: above 0 is more than was measured."""
        return self.predicted / self.measured.value - 1.0


@dataclasses.dataclass(frozen=True)
class Row:
    """A record, what was simulated of it, what was compared, and what was not and why."""

    record: Record
    prediction: Prediction | None
    compared: dict[Metric, Compared]
    left_out: dict[str, str]


def validate(record: Record, world: World, *, seed: int = 0) -> Row:
    """Simulate a record and compare; what cannot be is left out."""
    if "all" in record.left_out:
        return Row(record, None, {}, dict.fromkeys(METRICS, record.left_out["all"]))
    try:
        prediction = play(record, world, seed=seed)
    except (CapacityError, ConfigError, RequestError) as error:
        return Row(record, None, {}, dict.fromkeys(METRICS, str(error)))
    compared, left_out = {}, dict[str, str]()
    for metric in METRICS:
        figure = record.measured.get(metric)
        if figure is None:
            left_out[metric] = LACKING
        elif metric in record.left_out:
            left_out[metric] = record.left_out[metric]
        elif metric not in prediction.means:
            left_out[metric] = ONE_TOKEN
        else:
            compared[metric] = Compared(figure, _predicted(prediction, metric, figure))
    return Row(record, prediction, compared, left_out)


def _predicted(prediction: Prediction, metric: Metric, figure: Figure) -> float:
    """Of the statistic that was measured; throughput has but one value."""
    values = prediction.medians if figure.statistic == "median" else prediction.means
    return values[metric]


def mape(rows: Sequence[Row], metric: Metric) -> float | None:
    """The mean of the relative errors of a metric, without signs; None where nobody measured it."""
    errors = [abs(row.compared[metric].error) for row in rows if metric in row.compared]
    return sum(errors) / len(errors) if errors else None


def as_json(rows: Sequence[Row], world: World) -> dict[str, Any]:
    """All of it: `latency_mape` and the others as fractions, counts, what was left out, and `records`."""
    left_out: dict[str, dict[str, int]] = {metric: {} for metric in METRICS}
    for row in rows:
        for metric, why in row.left_out.items():
            left_out[metric][why] = left_out[metric].get(why, 0) + 1
    return {
        **{f"{metric}_mape": mape(rows, metric) for metric in METRICS},
        "compared": {metric: sum(metric in row.compared for row in rows) for metric in METRICS},
        "left_out": left_out,
        "world": dataclasses.asdict(world),
        "records": [_row(row) for row in rows],
    }


def _row(row: Row) -> dict[str, Any]:
    values: dict[str, Any] = {"name": row.record.name}
    server = row.record.server
    if server is not None:
        values |= {
            "model": server.shape.name,
            "device": server.device,
            "weights": server.weights,
            "tensor_parallel": server.tensor_parallel,
            "pipeline_parallel": server.pipeline_parallel,
        }
    for metric in METRICS:
        figure = row.record.measured.get(metric)
        if figure is None:
            continue
        values[metric] = {"measured": figure.value, "statistic": figure.statistic}
        if metric in row.compared:
            compared = row.compared[metric]
            values[metric] |= {"predicted": compared.predicted, "error": compared.error}
        elif row.prediction is not None and metric in row.prediction.means:
            values[metric] |= {"predicted": _predicted(row.prediction, metric, figure)}
        if metric in row.left_out:
            values[metric]["left_out"] = row.left_out[metric]
    if row.prediction is not None:
        values["num_requests"] = row.prediction.num_requests
        values["has_settled"] = row.prediction.has_settled
        values["sources"] = dict(row.prediction.sources)
    return values | ({"notes": list(row.record.notes)} if row.record.notes else {})


def as_markdown(rows: Sequence[Row]) -> str:
    """A table with measured and predicted figures and their errors, and the means of these."""
    lines = [
        "| record | " + " | ".join(_TITLES[metric] for metric in METRICS) + " | of measured kernels |",
        "|---|" + "---:|" * (len(METRICS) + 1),
    ]
    for row in rows:
        if row.prediction is None:  # `describe_left_out` counts it
            continue
        cells = [_cell(row, metric) for metric in METRICS]
        known = _share_of_kernels(row.prediction)
        lines.append(f"| {row.record.name} | {' | '.join(cells)} | {known:.0%} |")
    means = [mape(rows, metric) for metric in METRICS]
    shown = ["" if mean is None else f"**{mean:.1%}**" for mean in means]
    lines.append(f"| mean error | {' | '.join(shown)} | |")
    return "\n".join(lines)


def _share_of_kernels(prediction: Prediction) -> float:
    return sum(prediction.sources.get(source, 0.0) for source in ("measured", "interpolated", "scaled"))


def _cell(row: Row, metric: Metric) -> str:
    if metric not in row.compared:
        return ""
    compared, unit = row.compared[metric], _UNITS[metric]
    measured, predicted = compared.measured.value * unit, compared.predicted * unit
    return f"{measured:.4g} → {predicted:.4g} ({compared.error:+.1%})"


def describe_left_out(content: dict[str, Any]) -> list[str]:
    """What was left out, a line for each metric and reason."""
    return [
        f"left out of {metric}: {count} ({why})"
        for metric, reasons in content["left_out"].items()
        for why, count in reasons.items()
    ]
