"""`scripts/bench_pairs.py`: which of two checkouts is faster."""

import sys

import bench_pairs
import numpy as np
import pytest

from jaxllm.loading.checkpoints import demo_model_path


def test_both_begin_as_often_and_the_first_pair_is_not_counted(capsys):
    asked = []

    def side(name, seconds):
        def run(number):
            asked.append((name, number))
            return 100.0 if number < 0 else seconds

        return run

    found = bench_pairs.in_turns("a thing", 6, side("new", 2.0), side("old", 3.0))
    assert [name for name, _ in asked] == ["new", "old", "old", "new"] * 3 + ["new", "old"]
    assert found["ratio"] == 1.5  # this checkout is faster
    assert found["interval"] == [1.5, 1.5]
    assert (found["this_seconds"], found["other_seconds"]) == (2.0, 3.0)


@pytest.mark.parametrize("pairs", [6, 9, 15])
def test_the_interval_holds_the_true_median_as_often_as_it_says(pairs, capsys):
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        ratios = rng.lognormal(0.0, 0.3, pairs)
        low, high = bench_pairs.row("a thing", [(1.0, ratio) for ratio in ratios])["interval"]
        held += low <= 1.0 <= high
    assert 0.945 <= held / 2000 <= 0.995


def test_a_side_that_ends_says_how():
    side = bench_pairs.Side(bench_pairs._HERE, "model")
    with (
        side.python("-c", "raise SystemExit(3)") as process,
        pytest.raises(RuntimeError, match="ended with 3"),
    ):
        bench_pairs.line_of(process)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--parts", "offline,nothing"], "--parts knows offline, server, start, scheduler, not 'nothing'"),
        (["--workloads", "huge"], "--workloads knows short, long, mixed, not 'huge'"),
        (["--pairs", "5"], "--pairs must be at least 6 for an interval of 95 %, got 5"),
        (["--model", "nowhere"], "nowhere is no checkpoint: jaxllm make-model nowhere"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(changes, message, capsys, tmp_path, monkeypatch):
    out = str(tmp_path / "pairs.json")
    arguments = [str(bench_pairs._HERE), "--model", str(demo_model_path()), "--out", out, *changes]
    monkeypatch.setattr(sys, "argv", ["bench_pairs.py", *arguments])
    with pytest.raises(SystemExit):
        bench_pairs.main()
    assert message in capsys.readouterr().err


def test_a_folder_that_is_no_checkout_is_refused(capsys, tmp_path, monkeypatch):
    arguments = [str(tmp_path), "--model", str(demo_model_path()), "--out", str(tmp_path / "pairs.json")]
    monkeypatch.setattr(sys, "argv", ["bench_pairs.py", *arguments])
    with pytest.raises(SystemExit):
        bench_pairs.main()
    assert "is no checkout of this repository: git worktree add" in capsys.readouterr().err
