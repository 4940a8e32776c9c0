"""What parts gain, measured with layers that wait."""

import json

import bench_stages
import pytest

from jaxllm.executor.stages import StageAttention


def test_both_ways_give_the_same_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(StageAttention, "__call__", StageAttention.__call__)
    out = tmp_path / "stages.json"
    options = ["--stages", "2", "--requests", "4", "--tokens", "6", "--wait-ms", "0.1", "--repeats", "1"]
    bench_stages.main([*options, "--out", str(out)])
    found = json.loads(out.read_text())
    (row,) = found["rows"]
    assert row["same_tokens"]
    assert [len(seconds) for seconds in row["seconds"].values()] == [1, 1]
    assert len(found["predicted"]) == 48
    assert min(case["ratio"] for case in found["predicted"]) > 0.98


def test_more_stages_than_devices_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench_stages.main(["--stages", "16", "--out", str(tmp_path / "out.json")])
    assert "there are 4 devices; set XLA_FLAGS=" in capsys.readouterr().err
