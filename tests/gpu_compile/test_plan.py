"""Whole steps of published shapes, compiled for GPUs that are not there."""

import json

import pytest

from jaxllm.cli.main import main
from jaxllm.errors import CapacityError
from jaxllm.executor.buckets import Buckets
from jaxllm.gpu.plan import count_pool_copies, make_plan
from jaxllm.gpu.target import TARGETS, get_target
from jaxllm.models.config import config_from_dict

LLAMA_13B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "intermediate_size": 13824,
    "max_position_embeddings": 2048,
}
LLAMA_3_8B = {
    **LLAMA_13B,
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
OPT_13B = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 50272,
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "ffn_dim": 20480,
    "word_embed_proj_dim": 5120,
    "max_position_embeddings": 2048,
}
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
    decode, several, prefill, *swaps = found.programs
    assert (decode.name, several.name) == ("decode of 64", "decode of 16, up to 8 steps")
    assert prefill.name == "step of 2048 tokens, up to 64 prompts"
    pool_bytes = found.pool_bytes if num_gpu_blocks else swaps[1].aliased_bytes  # "swap in": the pool alone
    if num_gpu_blocks:
        assert pool_bytes == 1024 * found.block_bytes >= 12.5 * GIB
    for program in (decode, several, prefill):
        assert program.aliased_bytes >= pool_bytes
        assert program.pool_copies == 0
    # The sampler's share, some copies of the logits, grows with the vocabulary.
    assert decode.temporary_bytes < 64 * MIB * config["vocab_size"] / 32000
    assert several.temporary_bytes < 64 * MIB * config["vocab_size"] / 32000
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
    assert "| decode of 8 |" in shown
    written = json.loads(out.read_text())
    assert written["num_blocks"] == 8 * 32  # what eight sequences can use
    assert main(["plan", str(tmp_path), "--device", "h9"]) == 2
    assert "known: a100-80gb, h100, h200, l40" in capsys.readouterr().err


def test_what_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(CapacityError, match=r"weights of 24\.2 GiB .* do not fit 5\.9 GiB"):
        plan(LLAMA_13B, "h100", utilization=0.1)


def test_targets_are_described_in_full():
    for target in TARGETS.values():
        text = target.text_proto()
        assert text.count("{") == text.count("}")
        assert target.description in text


def test_pool_copies_are_counted():
    hlo = "%a = bf16[4,2,2]{2,1,0} copy(%b)\n%c = bf16[4,2]{1,0} copy(%d)\n%e = bf16[4,2,2] copy-start(%f)"
    assert count_pool_copies(hlo, (4, 2, 2)) == 2
