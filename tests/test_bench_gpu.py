"""The GPU benchmark's smoke mode: every part runs, and a part that fails does not take the others along."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import bench_gpu
from gpu import kernels


def test_every_part_runs_in_smoke_mode(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(kernels, "HEADS", ((4, 2, 16),))
    out = tmp_path / "gpu.json"
    assert bench_gpu.main(["--smoke", "--no-compare", "--seed", "3", "--out", str(out)]) == 0
    values = json.loads(out.read_text())
    assert len(values["kernel checks"]) == 2 * 3
    assert all(row["passed"] for row in values["kernel checks"])
    assert [row["batch"] for row in values["decode attention"]] == [1, 4]
    assert values["ceilings"]["copy_bytes_per_second"] > 0
    assert [row["blocks"] for row in values["swaps"]] == [1, 3]
    assert all(
        row["gather_bytes_per_second"] > 0 < row["scatter_bytes_per_second"] for row in values["swaps"]
    )
    steps = values["smoke: steps"]
    assert [row["step"] for row in steps] == ["decode", "decode", "prefill"]
    assert {row["preset"] for row in values["smoke: presets"]} == {
        "adaptive",
        "adaptive_throughput",
        "paper",
        "paper_strategy",
        "vllm",
        "vllm_swap",
        "vllm_v1",
    }
    assert values["smoke: predictors"]["decode"]["mape"] >= 0
    assert values["start times"]["warm"]["seconds"] > 0
    hidden = values["smoke: swaps beside decode"]
    assert [(row["blocks"], row["batch"]) for row in hidden] == [(1, 4), (3, 4)]
    assert all(0 <= row[name] <= 1 for row in hidden for name in ("out_hidden", "in_hidden"))
    assert "errors" not in values
    shown = capsys.readouterr().out
    assert "| kernel checks passed | 6 of 6 |" in shown
    assert "smoke, 3 blocks out / in, hidden by decode of 4" in shown
    assert "| gather / scatter of 3 blocks, of the copy |" in shown
    assert "smoke, decode step, batch 4: ms, of its roofline" in shown


def test_a_part_that_fails_is_reported(tmp_path):
    report = bench_gpu.Report(tmp_path / "r.json", {})
    assert report.part("bad", lambda: 1 / 0) is None
    assert report.part("good", lambda: [1]) == [1]
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["errors"] == {"bad": "ZeroDivisionError: division by zero"}
    assert (written["good"], report.failed) == ([1], ["bad"])
