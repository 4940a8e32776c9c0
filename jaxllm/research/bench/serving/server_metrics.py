"""What a server itself counts: weighted turnaround and preemptions, from its Prometheus metrics."""

from __future__ import annotations

import asyncio
import collections
import re
from collections.abc import Mapping
from typing import Any

from jaxllm.research.bench.serving.client import Client, import_from_extra

_TURNAROUND = "jaxllm:request_weighted_turnaround"
_PREEMPTIONS = re.compile(r"(?:jaxllm|vllm):num_preemptions_total")
_POLLS, _POLL_SECONDS = 20, 0.1
_Samples = Mapping[tuple[str, str], float]


async def read_metrics(client: Client) -> _Samples | None:
    """Metrics by name and action (of preemptions, else ""), summed over all other labels.

    None if the server has no such page.
    """
    parser = import_from_extra("prometheus_client.parser")
    text = await client.get_text("/metrics")
    if text is None:
        return None
    samples: collections.defaultdict[tuple[str, str], float] = collections.defaultdict(float)
    try:
        for family in parser.text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name, sample.labels.get("action", "")] += sample.value
    except ValueError:  # a page, but none of metrics
        return None
    return samples


async def metrics_after(client: Client, before: _Samples | None, num_completed: int) -> _Samples | None:
    """Metrics once they count all that completed: a server may count one after its last byte is sent."""
    if before is None:
        return None
    after, count = await read_metrics(client), (f"{_TURNAROUND}_count", "")
    for _ in range(_POLLS):
        if after is None or count not in after or after[count] - before.get(count, 0.0) >= num_completed:
            break
        await asyncio.sleep(_POLL_SECONDS)
        after = await read_metrics(client)
    return after


def server_figures(before: _Samples | None, after: _Samples | None) -> dict[str, Any]:
    """What was counted meanwhile; null where the server does not count it.

    `weighted_turnaround` is the mean of (finish - arrival) / (finish - first iteration), as the server has
    it; `num_preemptions` counts by action, or under "all" if the server does not tell them apart.
    """

    def change(name: str, action: str = "") -> float:
        assert before is not None
        assert after is not None
        return after.get((name, action), 0.0) - before.get((name, action), 0.0)

    values: dict[str, Any] = {"weighted_turnaround": None, "num_preemptions": None}
    if before is None or after is None:
        return values
    count = change(f"{_TURNAROUND}_count")
    if count:
        values["weighted_turnaround"] = change(f"{_TURNAROUND}_sum") / count
    counted = [(name, action) for name, action in after if _PREEMPTIONS.fullmatch(name)]
    if counted:
        values["num_preemptions"] = {action or "all": round(change(name, action)) for name, action in counted}
    return values
