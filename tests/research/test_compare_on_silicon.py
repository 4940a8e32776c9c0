"""The comparison on measured GPUs runs every preset, and says what each is over vLLM's."""

import json

import compare_on_silicon
import pytest


def test_every_preset_is_compared(tmp_path, capsys):
    out = tmp_path / "growth.json"
    options = [
        "--parts",
        "--seeds",
        "1",
        "--jobs",
        "1",
        "--scale",
        "30",
        "--cells",
        "h100, llama-3-8b, chat, 1024",
    ]
    assert compare_on_silicon.main([*options, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["preset"] for row in rows] == list(compare_on_silicon.POLICIES)
    assert rows[0]["over_vllm_v1"]["tokens_per_second"] == 1.0
    assert all(row["tokens_per_second"] > 0 and 0 <= row["lost_share"] < 1 for row in rows)
    assert "| h100, llama-3-8b, chat, 1024, at once | adaptive | " in capsys.readouterr().out


def test_rates_are_shares_of_what_is_served():
    cell = compare_on_silicon.Cell("a100", "llama-2-13b", "chat+summary", 64, 40, rate=0.5)
    found = compare_on_silicon.run_cell(cell, 0, ("vllm_v1",))["vllm_v1"]
    served = compare_on_silicon.run(compare_on_silicon.dataclasses.replace(cell, rate=None), 0, "vllm_v1")
    trace = compare_on_silicon.trace_of(cell, 0, served["requests_per_second"])
    assert found["requests_per_second"] <= served["requests_per_second"]
    assert 40 / trace.arrival_times[-1] == pytest.approx(0.5 * served["requests_per_second"], rel=0.5)


@pytest.mark.parametrize("load", compare_on_silicon.TURNS)
def test_cells_with_turns_compare_caches(load):
    cell = compare_on_silicon.Cell("h100", "llama-3-8b", load, 256, 3, rate=1.0, host_bytes=1e9)
    found = compare_on_silicon.run_cell(cell, 0, ("vllm_v1",))
    assert list(found) == list(compare_on_silicon.CACHES)
    assert all(row["tokens_per_second"] > 0 for row in found.values())


def test_every_cell_has_a_name_of_its_own():
    names = [compare_on_silicon.name_of(cell) for cell in compare_on_silicon.CELLS]
    assert len(set(names)) == len(names)
    assert "2 x l40s, llama-2-13b, chat, 256, at once" in names
    assert "h100, llama-3-8b, reasoning, 256, 300 clients" in names


def test_wrong_options_are_one_error(capsys, tmp_path):
    with pytest.raises(SystemExit):
        compare_on_silicon.main(["--out", str(tmp_path / "o.json"), "--cells", "tpu"])
    assert "'tpu' is in the name of no cell" in capsys.readouterr().err


def test_returns_both_ways_take_less_than_either():
    shape = compare_on_silicon.model_shape("llama-2-13b", "float16")
    copies, both = (
        make(shape, "a100") for make in (compare_on_silicon.SiliconCostModel, compare_on_silicon.BothWays)
    )
    computed = [both.step_seconds(0, 0, 4096, 1), 3 * both.step_seconds(0, 0, 20_000 // 3, 1)]
    for num_tokens, seconds in zip([4096, 20_000], computed, strict=True):
        num_blocks = num_tokens // both.block_size
        found, copied = both.swap_in_seconds(num_blocks), copies.swap_in_seconds(num_blocks)
        assert found < min(copied, seconds)
        assert found == pytest.approx(copied * seconds / (copied + seconds))
    assert both.swap_in_seconds(0) == copies.swap_in_seconds(0)
    cell = compare_on_silicon.Cell("a100", "llama-2-13b", "turns", 16, 2, rate=1.0)
    assert list(compare_on_silicon.run_cell(cell, 0, ("vllm_v1", *compare_on_silicon.COSTS))) == [
        "vllm_v1",
        *compare_on_silicon.COSTS,
    ]
