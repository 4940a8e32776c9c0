"""The grid on measured GPUs goes on where it was broken off, and its report names what misses a bar."""

import json

import grid_on_silicon
import pytest
from grid_on_silicon import Group, report

SCALE = 60


def rows_of(cell: str, figures: dict[str, tuple[float, ...]], preset: str = "vllm_v1") -> list[dict]:
    """A row for each seed: tokens/s, latencies and the rest as given."""
    names = grid_on_silicon._FIGURES
    return [
        {"cell": cell, "seed": seed, "scale": 1, "preset": preset, **dict(zip(names, values, strict=True))}
        for seed, values in figures.items()
    ]


def test_a_group_has_every_arrival_process_and_preset():
    rows = Group("H100", "chat", 256, 1).rows(SCALE)
    cells = list(dict.fromkeys(row["cell"] for row in rows))
    arrivals = ["at once", "Poisson 0.7", "Poisson 1.1", "closed"]
    assert cells == [f"H100, chat, 256, {one}" for one in arrivals]
    assert [row["preset"] for row in rows] == [*grid_on_silicon.PRESETS] * 4
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert Group("H100", "chat", 256, 1).is_in(rows)
    assert not any(
        Group(*other).is_in(rows) for other in (("H100", "chat", 1024, 1), ("H100", "chat", 256, 0))
    )


def test_agents_are_beside_published_caches_and_begin_at_shares_of_what_is_served():
    group = Group("A100", "turns", 256, 0)
    rows = group.rows(SCALE)
    assert {row["preset"] for row in rows} == {*grid_on_silicon.PRESETS, *grid_on_silicon.CACHES}
    served = [row["requests_per_second"] for row in rows if row["preset"] == "vllm_v1"]
    assert len(served) == 3
    assert max(served[1:]) <= served[0] * 1.01


def test_a_run_goes_on_with_its_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(grid_on_silicon, "GPUS", {"H100": grid_on_silicon.GPUS["H100"]})
    monkeypatch.setattr(grid_on_silicon, "LIMITS", (256,))
    path = tmp_path / "cells.jsonl"
    kept = Group("H100", "chat", 256, 0).rows(SCALE)
    path.write_text("".join(json.dumps({**row, "mean_latency_seconds": 7.0}) + "\n" for row in kept))
    options = ["--out-dir", str(tmp_path), "--loads", "chat", "--jobs", "1"]
    assert grid_on_silicon.main([*options, "--scale", str(SCALE), "--seeds", "2"]) == 0
    rows = grid_on_silicon.read(path)
    assert [row["seed"] for row in rows] == [0] * len(kept) + [1] * len(kept)
    assert {row["mean_latency_seconds"] for row in rows if not row["seed"]} == {7.0}
    text = (tmp_path / "report.md").read_text()
    assert "- swaps a request, at most 3.0: 4 of 4 cells" in text
    assert text == capsys.readouterr().out
    for wrong, words in (
        ([*options, "--scale", "2"], f"has rows of --scale {SCALE}"),
        ([*options, "--loads", "chat,code"], "there is no code; there are chat, "),
    ):
        with pytest.raises(SystemExit):
            grid_on_silicon.main(wrong)
        assert words in capsys.readouterr().err
    again = [*options, "--scale", str(2 * SCALE), "--seeds", "1", "--overwrite"]
    assert grid_on_silicon.main(again) == 0
    assert {row["scale"] for row in grid_on_silicon.read(path)} == {2 * SCALE}


def test_the_report_names_who_misses_a_bar_the_worst_first():
    base, same = (100.0, 10.0, 20.0, 1.0, 0.0, 0.0), "H100, chat, 256, at once"
    slow, slower = "H100, chat, 256, closed", "A100, chat, 256, closed"
    rows = []
    for cell, mean in ((same, 10.0), (slow, 11.0), (slower, 14.0)):
        rows += rows_of(cell, {0: base, 1: base})
        rows += rows_of(cell, {0: base, 1: base}, "adaptive_throughput")
        rows += rows_of(cell, {0: (99.5, mean, 20.0, 1.0, 0.0, 0.0), 1: base}, "adaptive")
    lines = report(rows).splitlines()
    assert lines[0] == "- mean latency over vllm_v1, at most 1.0: 1 of 3 cells"
    assert lines[1] == f"    - 1.200 {slower} (1.400, 1.000)"
    assert lines[2] == f"    - 1.050 {slow} (1.100, 1.000)"
    assert lines[4].endswith("at least 0.99: 3 of 3 cells")
    assert any(line.startswith("| chat | `adaptive` | 0.997 | 1.00 | ") for line in lines)
