"""Scripts that run the engine itself: the sweep over a throttled link, and the simulator's validation."""

import functools
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import sweep_engine
import validate_simulator

from jaxllm.bench.profile import Profiler

OPTIONS = ["--requests", "8", "--gpu-blocks", "12", "--host-blocks", "12", "--max-num-seqs", "4"]
OPTIONS += ["--output-len", "48", "--profile-seconds", "1", "--repetitions", "1"]


@pytest.fixture(scope="module")
def llm():
    return sweep_engine.load(sweep_engine.parse_args(OPTIONS))


def run(script, llm, options, monkeypatch, out):
    monkeypatch.setattr(script, "load", lambda args: llm)
    command = [f"{script.__name__}.py", *OPTIONS, *options, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    try:
        script.main()
    finally:
        llm.executor.limit_host_bandwidth(None)
    return json.loads(out.read_text())


def test_every_action_runs_every_trace(llm, tmp_path, monkeypatch, capsys):
    options = ["--speeds", "4", "--seeds", "0"]
    report = run(sweep_engine, llm, options, monkeypatch, tmp_path / "sweep.json")
    assert report["command"].startswith("python sweep_engine.py --requests 8")
    (row,) = report["rows"]
    assert row["host_bandwidth_limit"] == 4 * report["equal_speed_bytes_per_second"]
    for values in (row["seconds"], row["preemptions"], row["swaps"]):
        assert {action: len(of) for action, of in values.items()} == dict.fromkeys(sweep_engine.ACTIONS, 1)
    assert row["swaps"]["recompute"] == [0]
    for action in sweep_engine.ACTIONS:
        (seconds,), (measured,), (slowness,) = (
            row[name][action] for name in ("seconds", "measured_seconds", "slowness")
        )
        assert seconds == pytest.approx(measured / slowness)
    assert 0 < row["swaps"]["swap"][0] <= row["preemptions"]["swap"][0]
    assert row["ratios"] == sweep_engine.seed_by_seed(row["seconds"])
    assert row["share"] == min(row["ratios"].values())
    assert f"share {row['share']:.3f}" in capsys.readouterr().out


def test_actions_take_turns_and_are_compared_on_the_same_trace():
    orders = [sweep_engine.in_turn(turn) for turn in range(4)]
    assert {order[0] for order in orders[:3]} == set(sweep_engine.ACTIONS)
    assert all(set(order) == set(sweep_engine.ACTIONS) for order in orders)
    assert orders[3] == orders[0]
    seconds = {"recompute": [1.0, 30.0, 9.0], "swap": [4.0, 20.0, 2.0], "adaptive": [2.0, 10.0, 3.0]}
    assert sweep_engine.seed_by_seed(seconds) == {"recompute": 3.0, "swap": 2.0}  # medians: 9 / 3 and 4 / 3


def test_every_preset_is_run_and_simulated(llm, tmp_path, monkeypatch, capsys):
    briefly = functools.partial(Profiler.fit, is_brief=True)  # the whole fit is tested elsewhere
    monkeypatch.setattr(Profiler, "fit", lambda self, samples, is_brief=False: briefly(self, samples))
    options = ["--presets", "vllm,vllm_swap_both"]
    report = run(validate_simulator, llm, options, monkeypatch, tmp_path / "validation.json")
    assert [row["preset"] for row in report["rows"]] == ["vllm", "vllm_swap_both"]
    for row in report["rows"]:
        (seconds,) = row["seconds"]
        assert row["seconds_error"] == pytest.approx(row["simulated_seconds"] / seconds - 1)
        assert row["preemptions"] == [row["simulated_preemptions"]] != [0]
    assert capsys.readouterr().out.startswith("vllm: real ")


def test_a_link_has_a_speed(capsys):
    with pytest.raises(SystemExit):
        sweep_engine.parse_args(["--speeds", "0"])
    assert "--speeds must be above 0" in capsys.readouterr().err
