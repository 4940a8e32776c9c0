"""Attention chosen by measurement, program by program."""

import logging

import jax
import jax.numpy as jnp
import pytest
from engine_helpers import SMALL, make_llm
from variants import golden_checkpoint, golden_data

from jaxllm import SamplingParams
from jaxllm.errors import ConfigError
from jaxllm.executor import fastest as module
from jaxllm.executor.fastest import AttentionShape, candidates, fastest
from jaxllm.pallas_kernels import triton

NAME = "llama_gqa"
SHAPES = [AttentionShape(3, None, 20), AttentionShape(12, 2, 6), AttentionShape(12, 2, 9, max_seqs=4)]
POOL = jnp.zeros((8, 2, 2, 1, 4, 16))


class Device:
    device_kind = "NVIDIA H100 80GB HBM3"
    compute_capability = "9.0"


def test_a_cpu_has_no_choice():
    assert candidates("native", "decode", jax.devices()[0], "float32", 64, 16) == ("native",)
    assert fastest(["xla"], SHAPES[0], POOL, 2, 0.25) == "xla"


@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_a_gpu_has_several_tilings_and_a_hopper_mosaic(op):
    default, *tilings, last = candidates("triton", op, Device(), "bfloat16", 128, 16)
    assert (default, last) == ("triton", "mosaic")
    assert len(tilings) >= 3
    assert len(set(tilings)) == len(tilings)
    assert all(name.startswith("triton:k") for name in tilings)
    assert f"triton:{triton.default_tiling(op, Device.device_kind, 'bfloat16', 128)}" not in tilings
    assert candidates("triton", op, Device(), "bfloat16", 80, 16) == (default, *tilings)
    assert candidates("triton", op, Device(), "bfloat16", 128, 8) == (default, *tilings)
    assert candidates("triton", op, Device(), "float32", 128, 16) == (default,)


@pytest.mark.parametrize("shape", SHAPES, ids=["decode", "prefill", "prefill with history"])
@pytest.mark.parametrize("winner", ["xla", "triton"])
def test_the_one_that_takes_the_least_time_is_chosen(monkeypatch, shape, winner):
    times = {"xla": 2.0, "triton": 2.0, winner: 1.0}
    asked = []

    def time(call, arguments):
        jax.block_until_ready(call(*arguments))
        name = call.__wrapped__.keywords["implementation"]
        asked.append(name)
        return times[name]

    monkeypatch.setattr(module, "_time", time)
    assert fastest(["xla", "triton"], shape, POOL, 2, 0.25) == winner
    assert set(asked) == {"xla", "triton"}


def test_the_default_stays_unless_another_is_clearly_faster(monkeypatch):
    for factor, expected in ((0.98, "xla"), (0.96, "triton")):
        times = {"xla": 1.0, "triton": factor}
        monkeypatch.setattr(
            module, "_time", lambda call, _, times=times: times[call.__wrapped__.keywords["implementation"]]
        )
        assert fastest(["xla", "triton"], SHAPES[0], POOL, 2, 0.25) == expected


def test_shapes_are_those_of_a_loaded_engine():
    decode = AttentionShape.decode(16, max_model_len=2048, pool_tokens=8192)
    assert (decode.num_rows, decode.num_seqs, decode.context) == (16, None, 512)
    assert AttentionShape.decode(1, max_model_len=2048, pool_tokens=8192).context == 2048
    prefill = AttentionShape.prefill(2048, 256, max_model_len=2048)
    assert (prefill.num_seqs, prefill.context, prefill.max_seqs) == (16, 256, 256)
    assert AttentionShape.prefill(32, 4, max_model_len=100) == AttentionShape(32, 1, 100, 4)


def test_what_does_not_run_or_differs_is_left_out(monkeypatch, caplog):
    real = module.pallas_kernels.decode_attention

    def decode(q, *arguments, implementation, **options):
        if implementation == "mosaic":
            return real(q * 2, *arguments, implementation="xla", **options)
        if implementation == "triton":
            raise ConfigError("not on this device")
        return real(q, *arguments, implementation=implementation, **options)

    monkeypatch.setattr(module.pallas_kernels, "decode_attention", decode)
    with caplog.at_level(logging.WARNING):
        assert fastest(["xla", "triton", "mosaic"], SHAPES[0], POOL, 2, 0.25) == "xla"
    assert "triton is left out: not on this device" in caplog.text
    assert "mosaic is left out: it is off by" in caplog.text


def test_an_engine_uses_what_was_chosen(monkeypatch):
    chosen = []

    def choose(names, shape, pool, num_q_heads, scale):
        chosen.append(shape)
        return "triton" if shape.num_seqs is None else "xla"

    monkeypatch.setattr(module, "fastest", choose)
    llm = make_llm(golden_checkpoint(NAME), attention_implementation="fastest")
    rows, tokens = SMALL["decode_buckets"][0], SMALL["prefill_buckets"][0]
    assert {(shape.num_rows, shape.num_seqs is None) for shape in chosen} == {(rows, True), (tokens, False)}
    assert len(chosen) == 2
    report = {program.name: program.implementation for program in llm.executor.compile_report()}
    assert report == {
        "decode of 4": "triton",
        "decode of 4, random": "triton",
        "step of 48 tokens, up to 4 prompts, random": "xla",
    }
    golden = golden_data(NAME)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    outputs = llm.generate(golden["prompts"][:2], params, use_tqdm=False)
    assert [o.token_ids for o in outputs] == [greedy[:6] for greedy in golden["greedy"][:2]]


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match="tiling 'k1' is not of the form 'k64,q64,w4,s2'"):
        make_llm(golden_checkpoint(NAME), attention_implementation="triton:k1")
    with pytest.raises(
        ConfigError,
        match=r"attention_implementation='cuda' .* native, xla, triton, mosaic, reference, fastest",
    ):
        make_llm(golden_checkpoint(NAME), attention_implementation="cuda")
