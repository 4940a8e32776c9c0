"""Scripts that time decisions and products, and compare KV of fewer bytes."""

import json
import sys

import bench_products
import bench_scheduler
import compare_kv
import pytest


def test_decisions_of_every_system_are_timed(monkeypatch):
    monkeypatch.setattr(bench_scheduler, "_TRACE_REQUESTS", 60)
    for preset, questions in (("paper_strategy", 1), ("adaptive", 2), ("vllm", 0)):
        traced, timed = [bench_scheduler.bench_trace(preset, 16, 0, decisions=one) for one in (False, True)]
        assert [timing.iteration for timing in traced] == [f"trace, {preset}"]
        names = [timing.iteration for timing in timed]
        assert len(names) <= questions
        assert (f"decision of action, {preset}" in names) == (questions > 0)


@pytest.mark.parametrize("preset", ["vllm_v1", "adaptive"])
def test_iterations_that_preempt_are_timed(preset):
    """However shy a preset is to fill the pool, and whomever it preempts."""
    timing = bench_scheduler.bench_preempting(preset, 256, 2)
    assert (timing.iteration, timing.running, timing.repetitions) == (f"preempting, {preset}", 256, 2)
    assert 0 < timing.preempted <= 16


def test_fewer_bytes_of_kv_serve_more(tmp_path, capsys):
    """In pools of the same bytes; on an A100, of which no attention over float8 was measured."""
    options = [
        "--models",
        "llama-3-8b",
        "--devices",
        "a100",
        "--requests",
        "24",
        "--clients",
        "12",
        "--seeds",
        "1",
    ]
    compare_kv.main([*options, "--tokens", "8192", "--out-dir", str(tmp_path)])
    assert "fp8_e4m3: no attention over fp8 KV was measured" in capsys.readouterr().err
    rows = json.loads((tmp_path / "kv.json").read_text())["rows"]
    found = {(row["kv_dtype"], row["policy"]): row for row in rows}
    assert set(found) == {(dtype, policy) for dtype in ("bfloat16", "int8") for policy in compare_kv.POLICIES}
    for policy in compare_kv.POLICIES:
        wide, narrow = found["bfloat16", policy], found["int8", policy]
        bytes_of = [row["num_gpu_blocks"] * row["kv_bytes_per_token"] for row in (wide, narrow)]
        assert bytes_of[1] == pytest.approx(bytes_of[0], rel=0.01)
        assert narrow["tokens_per_second"] > wide["tokens_per_second"]
        assert narrow["num_preemptions"] < wide["num_preemptions"]
    assert (tmp_path / "kv.png").stat().st_size > 1000


def test_products_are_timed_in_turns(tmp_path, monkeypatch):
    out = tmp_path / "products.json"
    command = ["bench_products.py", "--rows", "1,3", "--formats", "float32,int4_weight", "--copies", "1"]
    command += ["--rounds", "2", "--inputs", "64", "--outputs", "64", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    bench_products.main()
    results = json.loads(out.read_text())["results"]
    assert [(row["rows"], row["format"]) for row in results] == [
        (rows, name) for rows in (1, 3) for name in ("float32", "int4_weight")
    ]
    assert all(row["over_float32"] == 1 for row in results if row["format"] == "float32")
    monkeypatch.setattr(sys, "argv", ["bench_products.py", "--formats", "int8"])
    with pytest.raises(SystemExit):
        bench_products.main()
