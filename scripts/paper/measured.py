"""Sections of the report that are measured on a real device, from a JSON file made by a script of its own."""

from __future__ import annotations

import json
import pathlib

from ladder.report import ladder_candidates, ladder_errors, swap_figure

from jaxllm.predictors.base import COST_KINDS

_LADDER = "ladder-cpu.json"


def measured(source: pathlib.Path, folder: pathlib.Path) -> list[str]:
    """Prediction errors and Fig. 5, if the ladder's file is in `source`; draws into `folder`."""
    path = source / _LADDER
    if not path.exists():
        return [f"Left out: {_LADDER} is not in {source.name}; `scripts/profile_ladder.py` makes it.", ""]
    results = json.loads(path.read_text(encoding="utf-8"))
    lines = [*ladder_errors(results), *swap_figure(results, folder / "fig5.png")]
    return [*lines, "![Errors of swap predictions by size](fig5.png)", ""]


def candidates(source: pathlib.Path) -> list[str]:
    """Test errors per regressor and degree of every kind of cost, if the ladder's file is there."""
    path = source / _LADDER
    if not path.exists():
        return []
    results = json.loads(path.read_text(encoding="utf-8"))
    lines = ["## Prediction errors by regressor and degree", ""]
    for kind in COST_KINDS:
        lines += ladder_candidates(results, kind)
    return lines
