"""Metrics of several replicas as one page, each sample with the label `replica`."""

from __future__ import annotations

from collections.abc import Mapping


def merge_metrics(pages: Mapping[str, str]) -> str:
    """One page in Prometheus' text format out of those of replicas, by their names.

    What belongs to one metric stays together, as the format asks for.
    """
    families: dict[str, tuple[list[str], list[str]]] = {}  # what is said of a metric, and its samples
    for replica, page in pages.items():
        said, samples = families.setdefault("", ([], []))
        for line in page.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                said, samples = families.setdefault(line.split(" ", 3)[2], ([], []))
                if line.split(" ", 2)[1] not in {other.split(" ", 2)[1] for other in said}:
                    said.append(line)
            elif line and not line.startswith("#"):
                samples.append(_labelled(line, replica))
    return "".join(f"{line}\n" for said, samples in families.values() for line in (*said, *samples))


def _labelled(sample: str, replica: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f'{name}{{replica="{replica}",{rest}'
    name, _, rest = sample.partition(" ")
    return f'{name}{{replica="{replica}"}} {rest}'
