"""Sections of the report that are measured on a real device, from JSON files made by scripts of their own."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from bench_allocation import allocation_lines, draw_allocation, summary_rows, waste_rows
from ladder.report import ladder_candidates, ladder_errors, swap_figure
from memory.block_size import block_size_rows
from memory.link_report import block_size_lines, draw_link, link_lines

from jaxllm.predictors.base import COST_KINDS

Lines = Callable[[Mapping[str, Any], pathlib.Path], list[str]]


def memory(command: str, folder: pathlib.Path) -> list[str]:
    """What the paper builds on, of vLLM's: contiguous allocation, and swapping by block size."""
    num_requests, seeds = 500, (0, 1)  # of fewer some never wait
    report = {
        "command": command,
        "num_requests": num_requests,
        "seeds": list(seeds),
        "max_model_len": 2048,
        "block_size": 16,
        "summary": summary_rows(waste_rows(num_requests=num_requests, seeds=seeds)),
    }
    draw_allocation(report, folder / "allocation.png")
    return [
        *allocation_lines(report),
        "![Shares of KV memory](allocation.png)",
        "",
        *block_size_lines(block_size_rows(), "Simulated: opt-13b on a roofline of an A800."),
    ]


def measured(source: pathlib.Path, folder: pathlib.Path) -> list[str]:
    """Copies, prediction errors and Fig. 5, of the files in `source` that are there; draws into `folder`."""
    lines: list[str] = []
    for name, made_by, of_file in (
        ("ladder-cpu.json", "scripts/profile_ladder.py", _ladder),
        ("link-cpu.json", "scripts/bench_link.py", _link),
        ("paging-cpu.json", "scripts/bench_paging.py", _paging),
    ):
        path = source / name
        if path.exists():
            lines += of_file(json.loads(path.read_text(encoding="utf-8")), folder)
        else:
            lines += [f"Left out: {name} is not in {source.name}; `{made_by}` makes it.", ""]
    return lines


def candidates(source: pathlib.Path) -> list[str]:
    """Test errors per regressor and degree of every kind of cost, if the ladder's file is there."""
    path = source / "ladder-cpu.json"
    if not path.exists():
        return []
    results = json.loads(path.read_text(encoding="utf-8"))
    lines = ["## Prediction errors by regressor and degree", ""]
    for kind in COST_KINDS:
        lines += ladder_candidates(results, kind)
    return lines


def _ladder(results: Mapping[str, Any], folder: pathlib.Path) -> list[str]:
    lines = ladder_errors(results)
    lines += swap_figure(results, folder / "fig5.png")
    return [*lines, "![Errors of swap predictions by size](fig5.png)", ""]


def _link(report: Mapping[str, Any], folder: pathlib.Path) -> list[str]:
    draw_link(report, folder / "link.png")
    measured_rows = [row for row in report["block_sizes"] if row["source"] != "simulated"]
    machine = report["hardware"]
    lines = [*link_lines(report), "![Copies by size and layout](link.png)", ""]
    if measured_rows:
        lines += block_size_lines(measured_rows, f"Measured on {machine['device']} ({machine['cpu']}).")
    return lines


def _paging(report: Mapping[str, Any], folder: pathlib.Path) -> list[str]:
    from bench_paging import draw_paging, paging_lines  # imports jax

    draw_paging(report, folder / "paging.png")
    return [*paging_lines(report), "![What paging costs decode attention](paging.png)", ""]
