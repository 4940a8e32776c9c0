"""Scripts that measure KV memory, with few repetitions of small things."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import bench_allocation
import bench_link
import bench_paging
import jax
import numpy as np
from memory.block_size import LAYOUTS, block_size_rows, crossover, lines_of


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


def test_simulated_block_sizes_cross_over():
    lines = lines_of(block_size_rows())
    assert lines.keys() == {("simulated", layout, tokens) for layout in LAYOUTS for tokens in (64, 256, 1024)}
    assert crossover(lines["simulated", "engine", 1024]) == "swap at every size"
    assert crossover(lines["simulated", "vllm", 1024]) == "swap from 32"
    for key, line in lines.items():
        assert [row["block_size"] for row in line] == [8, 16, 32, 64, 128, 256]
        if key[1] == "vllm":
            of_engine = lines["simulated", "engine", key[2]]
            pairs = zip(line, of_engine, strict=True)
            assert all(ours["swap_seconds"] > theirs["swap_seconds"] for ours, theirs in pairs)


def test_crossovers_in_words():
    def line(*swaps):
        return [
            {"block_size": 8 << place, "swap_seconds": swap, "recompute_seconds": 1.0}
            for place, swap in enumerate(swaps)
        ]

    assert crossover(line(2, 3)) == "recompute at every size"
    assert crossover(line(0.5, 0.5, 2)) == "swap up to 16"
    assert crossover(line(2, 0.5, 2, 0.5)) == "swap at 16, 64"


def test_copies_are_measured_fitted_and_drawn(tmp_path, capsys):
    sizes = ["--block-sizes", "8,32", "--tokens", "16,64", "--repetitions", "2"]
    shape = ["--layers", "2", "--kv-heads", "1", "--head-dim", "8"]
    files = ["--out", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    bench_link.main([*sizes, *shape, *files])
    report = json.loads((tmp_path / "a.json").read_text())
    assert {"command", "hardware", "versions", "seed", "repetitions"} <= report.keys()
    pieces = {
        (row["layout"], row["tokens"]): row["num_pieces"]
        for row in report["copies"]
        if row["block_size"] == 8
    }
    assert pieces == {("engine", 16): 1, ("engine", 64): 1, ("vllm", 16): 8, ("vllm", 64): 32}
    for row in report["copies"]:
        assert 0 < row["seconds"]["min"] <= row["seconds"]["median"] <= row["seconds"]["max"]
        assert row["num_bytes"] == -(-row["tokens"] // row["block_size"]) * row["block_size"] * 2 * 2 * 8 * 4
    assert len(report["fits"]) == 2 * (len(LAYOUTS) + 1)
    assert len(report["block_sizes"]) == 2 * len(LAYOUTS) * 2 * 2
    output = capsys.readouterr().out
    assert "| out | both | " in output
    assert "| measured | vllm | 64 | " in output
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_paging_is_timed_against_the_same_attention(tmp_path, capsys):
    options = ["--block-sizes", "8,16", "--batches", "1,2", "--contexts", "16,32", "--repetitions", "2"]
    shape = ["--num-q-heads", "4", "--num-kv-heads", "2", "--head-dim", "8", "--implementation", "xla"]
    files = ["--out", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    bench_paging.main([*options, *shape, *files])
    report = json.loads((tmp_path / "a.json").read_text())
    assert {"command", "hardware", "versions", "seed", "repetitions"} <= report.keys()
    assert len(report["rows"]) == 2 * 2 * 2
    for row in report["rows"]:
        assert row["relative_difference"] < 1e-5
        for base in bench_paging.BASELINES:
            ratio = row[base]["ratio"]
            assert 0 < ratio["min"] <= ratio["q1"] <= ratio["median"] <= ratio["q3"] <= ratio["max"]
    assert "Median of the cells by block size: 8: " in capsys.readouterr().out
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_contiguous_attention_by_hand():
    q, k, v = (jax.random.normal(jax.random.key(seed), (1, 2, 4 if seed else 1, 3)) for seed in range(3))
    q = q[:, :, 0]
    out = bench_paging.contiguous_attention(q, k, v, np.array([3], np.int32), scale=0.5)
    for head in range(2):
        weights = np.exp(0.5 * np.asarray(k[0, head, :3] @ q[0, head]))
        np.testing.assert_allclose(out[0, head], weights @ v[0, head, :3] / weights.sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        (bench_allocation, ["--datasets", "x"], "name some of chatbot, alpaca, summary"),
        (bench_allocation, ["--pools", "3000"], "must be powers of two"),
        (bench_allocation, ["--pools", "1024"], "--pools start at --max-model-len (2048)"),
        (bench_allocation, ["--requests", "0"], "0 must lie in [2, 100000]"),
        (bench_allocation, ["--seeds", "a"], "'a' is no integer"),
        (bench_allocation, ["--out", "absent/a.json"], "there is no folder absent"),
        (bench_link, ["--parts", "all"], "name some of link, simulated, measured"),
        (bench_link, ["--block-sizes", "0"], "0 must lie in [1, 1024]"),
        (bench_link, ["--model", "absent"], "--model absent: there is no config.json in it"),
        (bench_paging, ["--contexts", "100"], "100 is no multiple of the block size 16"),
        (bench_paging, ["--contexts", "4"], "4 is shorter than every block"),
        (bench_paging, ["--num-q-heads", "3"], "--num-q-heads 3 must be a multiple of --num-kv-heads"),
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


def test_sequences_longer_than_the_model_are_refused():
    with pytest.raises(SystemExit, match=r"5000 tokens are more than the model's 1024 positions"):
        bench_link.main(["--parts", "measured", "--tokens", "5000"])


def test_unknown_implementations_are_refused():
    with pytest.raises(SystemExit, match="unknown attention implementation 'cuda'"):
        bench_paging.main(["--implementation", "cuda"])
