"""Whole steps of published shapes, compiled for GPUs that are not there."""

import json

import pytest
from published import LLAMA_3_8B, LLAMA_13B, OPT_13B
from variants import CONFIGS

from jaxllm.cli.main import main
from jaxllm.errors import CapacityError
from jaxllm.executor.buckets import Buckets
from jaxllm.models.config import config_from_dict
from jaxllm.research.plan.plan import count_pool_copies, make_plan
from jaxllm.research.plan.target import TARGETS, get_target

GIB, MIB = 2**30, 2**20


def plan(config, device, **changes):
    settings = {
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "block_size": 16,
        "buckets": Buckets.make(max_num_seqs=64, max_num_batched_tokens=2048),
    }
    return make_plan(config_from_dict(config), get_target(device), **(settings | changes))


@pytest.mark.parametrize(
    ("config", "device", "num_gpu_blocks"),
    [
        (LLAMA_13B, "h100", 1024),
        (OPT_13B, "h100", 1024),
        (LLAMA_3_8B, "h100", None),
        (LLAMA_3_8B, "a100-80gb", None),
    ],
    ids=["llama-13b", "opt-13b", "llama-3-8b", "llama-3-8b-a100"],
)
def test_steps_update_the_pool_in_place_with_few_temporaries(config, device, num_gpu_blocks):
    found = plan(config, device, num_gpu_blocks=num_gpu_blocks)
    decode, several, prefill, apart, *swaps = found.programs
    assert [program.name for program in (decode, several, prefill)] == [
        "decode of 64, random",
        "decode of 16, up to 8 steps, random",
        "step of 2048 tokens, up to 64 prompts, random",
    ]
    assert apart.name == "sampling of 64, random, filtered, adjusted, logprobs, masked"
    pool_bytes = found.pool_bytes if num_gpu_blocks else swaps[1].aliased_bytes  # "swap in": the pool alone
    if num_gpu_blocks:
        assert pool_bytes == 1024 * found.block_bytes >= 12.5 * GIB
    for program in (decode, several, prefill):
        assert program.aliased_bytes >= pool_bytes
        assert program.pool_copies == 0
    logits_bytes = 64 * config["vocab_size"] * 4
    assert decode.temporary_bytes < logits_bytes + 32 * MIB
    assert several.temporary_bytes < logits_bytes // 4 + 32 * MIB
    assert apart.temporary_bytes < 5 * logits_bytes + 32 * MIB
    assert prefill.temporary_bytes < GIB
    for program in swaps:
        assert program.temporary_bytes <= 17 * found.block_bytes
        assert program.pool_copies == 0
        if program.name.startswith("swap in"):
            assert program.aliased_bytes >= pool_bytes
    assert found.headroom_bytes >= 0


def test_the_command_reports_and_refuses(tmp_path, capsys):
    tiny = {**LLAMA_3_8B, "num_hidden_layers": 2, "vocab_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(tiny))
    options = ["--device", "h200", "--max-model-len", "512", "--max-num-seqs", "8"]
    out = tmp_path / "plan.json"
    command = ["plan", str(tmp_path), *options, "--max-num-batched-tokens", "64", "--json", str(out)]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "NVIDIA H200, bfloat16" in shown
    assert "| decode of 8, random |" in shown
    written = json.loads(out.read_text())
    assert written["num_blocks"] == 8 * 32  # what eight sequences can use
    assert "Simulated from NVIDIA H200" in shown
    assert [one["concurrency"] for one in written["speeds"]] == [1, 16, 64]
    assert main([*command, "--overwrite", "--tensor-parallel", "2"]) == 0
    assert "2 x NVIDIA H200, bfloat16" in capsys.readouterr().out
    shared = json.loads(out.read_text())
    assert shared["block_bytes"] == written["block_bytes"] // 2
    assert written["weight_bytes"] / 2 < shared["weight_bytes"] < 0.6 * written["weight_bytes"]
    assert all(one["pool_copies"] == 0 for one in shared["programs"])
    assert main(["plan", str(tmp_path), "--device", "h9"]) == 2
    assert "known: a100-80gb, h100, h200, l40, l40s. Speeds" in capsys.readouterr().err
    assert get_target("A100") is get_target("a100-80gb")


def test_low_precision_leaves_more_to_the_pool(tmp_path, capsys):
    tiny = {**LLAMA_3_8B, "num_hidden_layers": 2, "vocab_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(tiny))
    options = ["--device", "h100", "--max-model-len", "512", "--max-num-seqs", "8", "--num-gpu-blocks", "64"]
    out = tmp_path / "plan.json"
    command = ["plan", str(tmp_path), *options, "--max-num-batched-tokens", "64", "--json", str(out)]
    found = []
    for formats in ([], ["--quantization", "int4_weight", "--kv-cache-dtype", "int8"]):
        assert main([*command, *formats, "--overwrite"]) == 0
        found.append(json.loads(out.read_text()))
    assert "NVIDIA H100 80GB HBM3, bfloat16, weights int4-g128, KV int8" in capsys.readouterr().out
    wide, narrow = found
    assert narrow["weight_bytes"] < 0.3 * wide["weight_bytes"]
    assert narrow["block_bytes"] / wide["block_bytes"] == 132 / 256
    assert all(program["pool_copies"] == 0 for program in narrow["programs"])
    assert narrow["speeds"][0]["seconds_per_token"] < wide["speeds"][0]["seconds_per_token"]


@pytest.mark.parametrize("name", ["mistral_window", "qwen3", "gemma2"])
def test_other_families_compile(name):
    config = config_from_dict(CONFIGS[name]).with_max_model_len(64)
    found = make_plan(
        config,
        get_target("h100"),
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        block_size=16,
    )
    assert found.implementation == "triton"
    assert all(program.pool_copies == 0 for program in found.programs)


def test_what_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(CapacityError, match=r"weights of 24\.2 GiB .* do not fit 7\.5 GiB"):
        plan(LLAMA_13B, "h100", utilization=0.1)


def test_targets_are_described_in_full():
    for target in TARGETS.values():
        text = target.text_proto()
        assert text.count("{") == text.count("}")
        assert target.description in text


def test_pool_copies_are_counted():
    hlo = "%a = bf16[4,2,2]{2,1,0} copy(%b)\n%c = bf16[4,2]{1,0} copy(%d)\n%e = bf16[4,2,2] copy-start(%f)"
    assert count_pool_copies(hlo, (4, 2, 2)) == 2
