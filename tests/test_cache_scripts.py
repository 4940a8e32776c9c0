"""The scripts about what requests have in common, and simulations of it."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from scheduler_helpers import LinearCosts

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import bench_prefix_cache
import compare_caches
import compare_layerwise
import demo_conversation

from jaxllm.research.simulator.run import simulate
from jaxllm.research.workloads import Poisson, make_conversations
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.presets import make_preset


def test_the_benchmark_measures_every_kind(tmp_path, capsys):
    out = tmp_path / "cache.json"
    sizes = "--requests 3 --common 40 --own 4 --output-len 3 --conversations 2 --history 40 --turns 3"
    bench_prefix_cache.main([*sizes.split(), "--repetitions", "1", "--out", str(out)])
    result = json.loads(out.read_text())
    found = {row["kind"]: row["with"]["share_found"] for row in result["rows"]}
    assert list(found) == list(bench_prefix_cache.KINDS)
    assert found["shared"] == pytest.approx(2 * 32 / (3 * 44), abs=1e-5)
    assert min(found["turns"], found["turns-host"], found["turns-files"]) > 0.5
    assert found["apart"] == 0
    assert all(row["without"]["share_found"] == 0 for row in result["rows"])
    assert result["names"]["names_ms"] > 0
    with pytest.raises(SystemExit):
        bench_prefix_cache.main(["--turns", "1", "--out", str(out)])


def test_the_comparison_writes_a_report(tmp_path):
    arguments = ["--seconds", "8", "--rates", "1", "--models", "llama-2-70b", "--jobs", "1"]
    systems = ["vllm_v1, no cache", "vllm_v1", "pensieve", "adaptive", "hindsight"]
    arguments += ["--engine-conversations", "8", "--engine-repetitions", "1", "--engine-think", "0.02"]
    arguments += ["--engine-profile-seconds", "0"]
    compare_caches.main([*arguments, "--systems", ";".join(systems), "--out-dir", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())
    rows, on_engine = results["rows"], results["engine"]["rows"]
    assert [row["system"] for row in on_engine] == systems[:-1]
    assert on_engine[0]["share_found"] == 0 < on_engine[1]["share_found"]
    assert [row["system"] for row in rows] == systems
    assert rows[0]["share_found"] == 0 < rows[1]["share_found"]
    assert rows[1]["prefill_tokens"] < rows[0]["prefill_tokens"]
    text = (tmp_path / "report.md").read_text()
    assert "## llama-2-70b on 4, 1 conversations/s" in text
    assert "`adaptive` over the best published" in text
    with pytest.raises(SystemExit):
        compare_caches.main(["--systems", "none", "--out-dir", str(tmp_path)])


def test_layers_one_by_one_are_compared_with_whole_blocks(tmp_path):
    arguments = ["--conversations", "8", "--cells", "llama-2-70b:1,opt-13b:2", "--jobs", "1"]
    compare_layerwise.main([*arguments, "--out-dir", str(tmp_path)])
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    kinds = list(compare_layerwise.COPIES)
    assert [row["copies"] for row in rows] == 2 * ["whole", *kinds, *kinds]
    text = (tmp_path / "report.md").read_text()
    assert text.count("| layers, ahead |") == 4
    assert "| opt-13b | 2 | adaptive | whole |" in text
    with pytest.raises(SystemExit):
        compare_layerwise.main(["--cells", "none:1", "--out-dir", str(tmp_path)])


def test_the_demo_finds_the_first_turn(capsys):
    demo_conversation.main([])
    lines = capsys.readouterr().out.splitlines()[-4:]
    found = [re.findall(r"\d+ found on the (\w+)", line) for line in lines]
    assert found == [[], ["device"], ["host"], ["disk"]]


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
