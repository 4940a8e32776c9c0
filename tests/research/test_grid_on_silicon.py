"""The grid on measured GPUs goes on where it was broken off, and its report names what misses a bar."""

import json

import grid_on_silicon
import pytest
from grid_on_silicon import Group, report, run_group

SCALE = 60


def rows_of(cell: str, figures: dict[str, tuple[float, ...]], preset: str = "vllm_v1") -> list[dict]:
    """A row for each seed: tokens/s, latencies and the rest as given."""
    names = grid_on_silicon._FIGURES
    return [
        {"cell": cell, "seed": seed, "scale": 1, "preset": preset, **dict(zip(names, values, strict=True))}
        for seed, values in figures.items()
    ]


def test_a_group_has_every_arrival_process_and_preset():
    rows = run_group(Group("H100", "chat", 256, 1, SCALE))["rows"]
    cells = list(dict.fromkeys(row["cell"] for row in rows))
    arrivals = ["at once", "Poisson 0.7", "Poisson 1.1", "closed"]
    assert cells == [f"H100, chat, 256, {one}" for one in arrivals]
    assert [row["preset"] for row in rows] == [*grid_on_silicon.PRESETS, *grid_on_silicon.HINDSIGHT] * 4
    assert all(row["tokens_per_second"] > 0 and row["seed"] == 1 for row in rows)


def test_agents_are_beside_published_caches_and_begin_at_shares_of_what_is_served():
    rows = run_group(Group("A100", "turns", 256, 0, SCALE))["rows"]
    assert {row["preset"] for row in rows} == {*grid_on_silicon.PRESETS, *grid_on_silicon.CACHES}
    served = [row["requests_per_second"] for row in rows if row["preset"] == "vllm_v1"]
    assert len(served) == 3
    assert max(served[1:]) <= served[0] * 1.01


def test_a_run_goes_on_where_it_was_broken_off(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(grid_on_silicon, "GPUS", {"H100": grid_on_silicon.GPUS["H100"]})
    monkeypatch.setattr(grid_on_silicon, "LIMITS", (256,))
    of_group, ran = grid_on_silicon.run_group, []

    def run_some(group):
        ran.append(group.seed)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return of_group(group)

    monkeypatch.setattr(grid_on_silicon, "run_group", run_some)
    options = ["--out-dir", str(tmp_path), "--loads", "chat", "--jobs", "1", "--scale", str(SCALE)]
    with pytest.raises(KeyboardInterrupt):
        grid_on_silicon.main([*options, "--seeds", "0,1"])
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write('[{"gpu": "H100", "lo')  # the process was killed while it wrote
    assert grid_on_silicon.main([*options, "--seeds", "0,1"]) == 0
    assert ran == [0, 1, 1]
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["seed"] for row in rows] == [0] * 20 + [1] * 20
    text = (tmp_path / "report.md").read_text()
    assert "- swaps a request, at most 3.0: 4 of 4 cells" in text
    assert text == capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--loads", "chat,code"], "--loads chat,code: name some of chat, "),
        (["--scale", "0"], "--jobs and --scale must be at least 1"),
        (["--seeds", "1,1"], "names something twice"),
    ],
)
def test_wrong_options_are_one_error(tmp_path, capsys, wrong, words):
    with pytest.raises(SystemExit):
        grid_on_silicon.main(["--out-dir", str(tmp_path), *wrong])
    assert words in capsys.readouterr().err


def test_the_report_names_who_misses_a_bar_the_worst_first():
    base, same = (100.0, 10.0, 20.0, 1.0, 0.0, 0.0), "H100, chat, 256, at once"
    slow, slower = "H100, chat, 256, closed", "A100, chat, 256, closed"
    rows = []
    for cell, mean in ((same, 10.0), (slow, 11.0), (slower, 14.0)):
        rows += rows_of(cell, {0: base, 1: base})
        rows += rows_of(cell, {0: base, 1: base}, "adaptive_throughput")
        rows += rows_of(cell, {0: (99.5, mean, 20.0, 1.0, 0.0, 0.0), 1: base}, "adaptive")
        for name, knowing in zip(grid_on_silicon.HINDSIGHT, (10.5, 10.0 + (cell == slow)), strict=True):
            rows += rows_of(cell, {0: (100.0, knowing, 20.0, 1.0, 0.0, 0.0), 1: base}, name)
    lines = report(rows).splitlines()
    assert lines[0] == "- mean latency over vllm_v1, at most 1.0: 1 of 3 cells"
    knows = "knowing lengths 1.025 and 1.000 in order of arrival"
    assert lines[1] == f"    - 1.200 {slower} (1.400, 1.000); {knows}"
    assert lines[2] == f"    - 1.050 {slow} (1.100, 1.000); {knows.replace('1.000', '1.050')}"
    assert lines[4].endswith("at least 0.99: 3 of 3 cells")
    assert lines[9:11] == [
        "- in 1 of these 2 cells all bars would be kept by knowing lengths",
        f"    - {slower}",
    ]
    assert any(line.startswith("| chat | `adaptive` | 0.997 | 1.00 | ") for line in lines)
