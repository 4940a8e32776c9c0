"""Scripts that measure KV memory, with few repetitions of small things."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import bench_allocation


def test_waste_is_counted_and_drawn(tmp_path, capsys):
    files = ["--out", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    bench_allocation.main(
        ["--datasets", "alpaca", "--output-lengths", "64", "--requests", "300", "--seeds", "0,1", *files]
    )
    report = json.loads((tmp_path / "a.json").read_text())
    assert {"command", "hardware", "versions", "seeds", "repetitions"} <= report.keys()
    assert str(tmp_path) not in report["command"]
    rows = {row["system"]: row for row in report["summary"] if row["pool"] == 2048}
    assert rows.keys() == set(bench_allocation.SYSTEMS)
    for row in bench_allocation.waste_rows(num_requests=300, pools=(2048,)):
        assert sum(row[name] for name in bench_allocation.SHARES) == pytest.approx(1, abs=1e-5)
    assert rows["Orca (Max)"]["mean_batch"] == 1
    assert rows["Paging"]["used"] > rows["Orca (Oracle)"]["used"] > rows["Orca (Pow2)"]["used"]
    assert "| alpaca | 64 | Orca (Max) | " in capsys.readouterr().out
    assert bench_allocation.allocation_lines(report)[0].startswith("## ")
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        (bench_allocation, ["--datasets", "x"], "name some of chatbot, alpaca, summary"),
        (bench_allocation, ["--pools", "3000"], "must be powers of two"),
        (bench_allocation, ["--pools", "1024"], "--pools start at --max-model-len (2048)"),
        (bench_allocation, ["--requests", "0"], "0 must lie in [2, 100000]"),
        (bench_allocation, ["--seeds", "a"], "'a' is no integer"),
        (bench_allocation, ["--out", "absent/a.json"], "there is no folder absent"),
        (bench_allocation, ["--plot", "a.txt"], "name a .png, .svg or .pdf file"),
    ],
)
def test_wrong_arguments(script, options, message, capsys):
    with pytest.raises(SystemExit):
        script.main(options)
    assert message in capsys.readouterr().err


def test_too_long_requests_are_refused():
    with pytest.raises(SystemExit, match=r"does not fit into 256 slots"):
        bench_allocation.main(["--datasets", "summary", "--pools", "256", "--max-model-len", "256"])
