"""Scripts that compare orders and iterations, on few requests."""

import json
import sys

import bench_products
import bench_scheduler
import compare_kv
import compare_orders
import pytest
from compare_orders import load_at

from jaxllm.sched.baselines import VLLM025


def test_orders_are_compared_over_load(tmp_path):
    options = ["--requests", "300", "--loads", "0.5,3", "--seeds", "0", "--jobs", "1"]
    compare_orders.main([*options, "--arrivals", "gamma", "--out-dir", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())
    cells = {(row["order"], row["load"]): row for row in results["cells"]}
    assert len(results["cells"]) == len(cells) == 2 * len(compare_orders.ORDERS)
    for row in cells.values():
        assert min(row["slowdown"]) >= 0.99
        assert row["p99_latency"] >= row["mean_latency"] > 0
        assert 0 <= row["goodput"] <= 1
    perfect, none = cells["least_work, perfect", 3.0], cells["least_work, none", 3.0]
    assert perfect["mean_latency"] < none["mean_latency"]
    in_order = cells["adaptive_throughput", 3.0]
    assert none["mean_latency"] == in_order["mean_latency"], "who knows nothing serves in order"
    report = (tmp_path / "report.md").read_text()
    assert "## gamma, load 3" in report
    assert report.count("| fastserve | ") == 3
    assert (tmp_path / "orders.png").stat().st_size > 1000
    assert str(tmp_path) not in report


def test_the_load_at_a_latency_is_interpolated():
    assert load_at([(0.5, 1.0), (1.0, 2.0), (2.0, 4.0)], 3.0) == 1.5
    assert load_at([(0.5, 1.0), (1.0, 2.0)], 3.0) is None


def test_orders_are_the_presets():
    costs = compare_orders.costs()
    assert compare_orders.policy_of("vllm", costs) == VLLM025()
    assert compare_orders.policy_of("shortest, none", costs).length is None
    for order in compare_orders.ORDERS:
        compare_orders.policy_of(order, costs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arrivals", "uniform"], "name some of poisson, gamma"),
        (["--loads", "0"], "--loads must lie above 0"),
        (["--noise", "-1"], "--noise from 0 to 10"),
    ],
)
def test_wrong_arguments_of_orders(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        compare_orders.parse_args([*options, "--out-dir", str(tmp_path)])
    assert message in capsys.readouterr().err


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
