"""What all figures share: colours that colour-blind people tell apart, and where the figures are from."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

from jaxllm.research.figures import COLOURS

__all__ = ["COLOURS", "OTHERS", "OURS", "PUBLISHED", "figure"]

OURS, PUBLISHED, OTHERS = "#d55e00", "#0072b2", "#999999"


@contextlib.contextmanager
def figure(path: pathlib.Path, source: str, rows: int, columns: int, **options: Any) -> Iterator[Any]:
    """Panels [rows, columns] to draw on, saved to `path` with a line that says where they are from."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, panels = pyplot.subplots(rows, columns, layout="constrained", squeeze=False, **options)
    try:
        yield panels
        for panel in panels.flat:
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(color="0.92")
            panel.set_axisbelow(True)
        drawn.supxlabel(source, fontsize=9, color="0.35")
        drawn.savefig(path, dpi=130)
    finally:
        pyplot.close(drawn)
