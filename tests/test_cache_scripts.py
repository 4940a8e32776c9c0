"""The scripts about what requests have in common, and simulations of it."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from scheduler_helpers import LinearCosts

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import bench_prefix_cache
import compare_caches
import demo_conversation

from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.presets import make_preset
from jaxllm.simulator.run import simulate
from jaxllm.workloads import Poisson, make_conversations


def test_the_benchmark_measures_every_kind(tmp_path, capsys):
    out = tmp_path / "cache.json"
    sizes = "--requests 3 --common 40 --own 4 --output-len 3 --conversations 2 --history 40 --turns 3"
    bench_prefix_cache.main([*sizes.split(), "--repetitions", "1", "--out", str(out)])
    result = json.loads(out.read_text())
    shared, turns, apart = result["rows"]
    assert [row["kind"] for row in (shared, turns, apart)] == ["shared", "turns", "apart"]
    assert shared["with"]["share_found"] == pytest.approx(2 * 32 / (3 * 44), abs=1e-5)
    assert turns["with"]["share_found"] > 0.5
    assert apart["with"]["share_found"] == 0
    assert all(row["without"]["share_found"] == 0 for row in result["rows"])
    assert result["names"]["names_ms"] > 0
    with pytest.raises(SystemExit):
        bench_prefix_cache.main(["--turns", "1", "--out", str(out)])


def test_the_comparison_writes_a_report(tmp_path):
    arguments = ["--conversations", "6", "--rates", "1", "--blocks", "200", "--jobs", "1"]
    compare_caches.main([*arguments, "--out-dir", str(tmp_path)])
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [(row["preset"], row["caches"]) for row in rows] == [
        ("vllm_v1", False),
        ("vllm_v1", True),
        ("adaptive", False),
        ("adaptive", True),
    ]
    assert rows[0]["share_found"] == 0 < rows[1]["share_found"]
    assert rows[1]["prefill_tokens"] < rows[0]["prefill_tokens"]
    assert "## 200 blocks" in (tmp_path / "report.md").read_text()
    with pytest.raises(SystemExit):
        compare_caches.main(["--blocks", "10", "--out-dir", str(tmp_path)])


def test_the_demo_finds_the_first_turn(capsys):
    demo_conversation.main()
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split(" from blocks")[0].split()[-1]) > 0 for line in lines[-3:]] == [False, True, True]


@pytest.mark.parametrize("preset", ["vllm_v1", "adaptive"])
@pytest.mark.parametrize("num_blocks", [70, 500])
def test_simulated_turns_find_what_was_said(preset, num_blocks):
    trace = make_conversations(20, common_len=20, max_len=1000, mean_think=5.0, arrivals=Poisson(0.5), seed=4)

    def run(caches):
        config = SchedulerConfig(
            num_gpu_blocks=num_blocks,
            block_size=16,
            max_model_len=1001,
            max_num_seqs=16,
            max_num_batched_tokens=256,
            num_host_blocks=30,
            enable_prefix_caching=caches,
        )
        costs = LinearCosts(prefill=1e-3, decode=1e-3, swap=1e-3)
        return simulate(trace, config, make_preset(preset, costs), costs, overlap_swaps=True)

    without, found = run(False), run(True)
    assert without.num_cached_tokens == 0 < found.num_cached_tokens
    assert found.num_prefill_tokens < without.num_prefill_tokens
    for result in (without, found):
        assert np.all(result.finish_times > result.first_token_times)
        later = trace.follows >= 0
        answered = result.finish_times[trace.follows[later]] + trace.think_times[later]
        np.testing.assert_allclose(result.arrival_times[later], answered)
    if num_blocks == 500:  # everything fits: all but what whole blocks leave over is found
        assert found.num_prefill_tokens + found.num_cached_tokens == trace.prompt_lens.sum()
        begun = trace.prompt_lens[trace.follows[later]] + trace.output_lens[trace.follows[later]] - 1
        assert found.num_cached_tokens >= (begun // 16 * 16).sum()
