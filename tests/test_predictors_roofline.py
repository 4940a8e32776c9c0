"""Model shapes, the device table, and costs from peak rates."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import MODEL_SHAPES, ModelShape, model_shape
from jaxllm.predictors.devices import DEVICES, DeviceSpec, device_spec
from jaxllm.predictors.roofline import RooflineCostModel

TINY = ModelShape(
    name="tiny",
    num_layers=2,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    intermediate_size=16,
    vocab_size=10,
    gated_mlp=True,
    tie_word_embeddings=False,
    dtype="float32",
)
UNIT_DEVICE = DeviceSpec(
    name="unit",
    peak_flops={"float32": 1000.0},
    memory_bandwidth=100.0,
    memory_bytes=1e6,
    host_bandwidth=10.0,
    source="made up",
    is_measured=True,
)
counts = st.integers(1, 4096)


def unit_model(**options):
    options = {"step_overhead_seconds": 1.0, "transfer_latency_seconds": 2.0, "block_size": 4} | options
    return RooflineCostModel(TINY, UNIT_DEVICE, **options)


def test_importing_every_module_imports_neither_jax_nor_sklearn():
    folder = Path(__file__).parents[1] / "predictors"
    modules = [f"jaxllm.predictors.{path.stem}" for path in folder.glob("[a-z]*.py")]
    code = (
        f"import importlib, sys; [importlib.import_module(name) for name in {modules!r}]\n"
        "assert not {'jax', 'sklearn', 'scipy', 'pandas'} & sys.modules.keys(), sorted(sys.modules)"
    )
    assert len(modules) == 9
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder.parent)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("opt-13b", 12.84),
        ("opt-30b", 29.96),
        ("llama-13b", 13.02),
        ("llama-32.5b", 32.53),
        ("llama-3-8b", 8.03),
    ],
)
def test_published_shapes_have_their_published_numbers_of_parameters(name, billions):
    assert model_shape(name).num_parameters / 1e9 == pytest.approx(billions, abs=0.01)


def test_counts_of_a_tiny_model_by_hand():
    # Per layer: q and o 8*8 each, k and v 8*4 each, gate, up and down 8*16 each.
    assert TINY.num_layer_parameters == 2 * (64 + 64 + 32 + 32 + 3 * 128)
    assert TINY.num_head_parameters == 80
    assert TINY.num_parameters == TINY.num_layer_parameters + 160
    assert dataclasses.replace(TINY, tie_word_embeddings=True).num_parameters == TINY.num_parameters - 80
    assert dataclasses.replace(TINY, gated_mlp=False).num_layer_parameters == 2 * (192 + 2 * 128)
    assert TINY.kv_bytes_per_token == 2 * 2 * 2 * 2 * 4
    assert TINY.block_bytes(16) == 1024
    assert TINY.weight_bytes == 4 * TINY.num_parameters


def test_a_block_of_llama_13b_is_the_papers():
    assert model_shape("llama-13b").block_bytes(16) == 2 * 40 * 5120 * 16 * 2  # Eq. 3
    assert model_shape("llama-3-8b", "float32").block_bytes(16) == 2 * 32 * 1024 * 16 * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, r"ModelShape.num_layers must lie in \[1, 2147483647\], got 0"),
        ({"num_layers": True}, "num_layers must be an integer, got True"),
        ({"hidden_size": 8.0}, "hidden_size must be an integer"),
        ({"num_kv_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"dtype": "int8"}, "dtype='int8' is unknown; use one of float32, bfloat16, float16"),
        ({"gated_mlp": 1}, "gated_mlp must be true or false, got 1"),
        ({"name": ""}, "name must be a string that is not empty"),
    ],
)
def test_bad_shapes_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(TINY, **change)


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match="no shape of model 'gpt-5' is stored; known: opt-13b, opt-30b"):
        model_shape("gpt-5")
    with pytest.raises(
        ConfigError, match="device 'TPU' is not in the table; known: A800-80GB-PCIe, A100-80GB"
    ):
        device_spec("TPU")
    with pytest.raises(
        ConfigError, match="'cpu-2core' has no peak rate for dtype 'bfloat16'; known: float32"
    ):
        device_spec("cpu-2core").flops_for("bfloat16")


def test_the_device_table():
    assert list(DEVICES) == ["A800-80GB-PCIe", "A100-80GB", "H100-SXM", "H200", "L40S", "cpu-2core"]
    assert device_spec("h100-sxm") is DEVICES["H100-SXM"]
    for spec in DEVICES.values():
        assert spec.source
        assert spec.host_bandwidth < spec.memory_bandwidth < max(spec.peak_flops.values())
        # Weights of the largest published shape in 16 bits fit where the paper ran them.
        assert spec.memory_bytes > model_shape("llama-3-8b").weight_bytes
    assert DEVICES["A800-80GB-PCIe"].memory_bytes > model_shape("llama-32.5b").weight_bytes


def test_a_device_refuses_rates_that_are_none():
    with pytest.raises(ConfigError, match="memory_bandwidth must lie in"):
        dataclasses.replace(UNIT_DEVICE, memory_bandwidth=0.0)
    with pytest.raises(ConfigError, match=r"peak_flops\['float32'\] must lie in"):
        dataclasses.replace(UNIT_DEVICE, peak_flops={"float32": float("nan")})


def test_a_decode_step_by_hand():
    # Three sequences that attend to 30 tokens in all. Bytes bound the layers (2304 elements at rest beside
    # 3 * 2304 flops) and the head; attention reads and writes 33 tokens of 64 bytes.
    layers = max(2 * 3 * 1152 / 1000, 1152 * 4 / 100)
    attention = max(4 * 2 * 4 * 2 * 30 / 1000, 33 * 64 / 100)
    head = max(2 * 3 * 80 / 1000, 80 * 4 / 100)
    assert TINY.num_layer_parameters == 1152
    assert unit_model().decode_seconds(3, 30) == pytest.approx(1.0 + layers + attention + head)


def test_a_prefill_step_by_hand():
    # Two sequences of 50 new tokens after 10 cached ones each: flops bound the layers.
    pairs = 2 * (50 * 10 + 50 * 51 / 2)
    layers = max(2 * 100 * 1152 / 1000, 1152 * 4 / 100)
    attention = max(4 * 2 * 4 * 2 * pairs / 1000, (2 * 100 + 20) * 64 / 100)
    head = max(2 * 2 * 80 / 1000, 80 * 4 / 100)
    assert unit_model().prefill_seconds(100, 2, 20) == pytest.approx(1.0 + layers + attention + head)


def test_a_swap_by_hand():
    model = unit_model()
    assert TINY.block_bytes(4) == 256
    assert model.swap_out_seconds(3) == pytest.approx(2.0 + 3 * 256 / 10)
    assert model.swap_in_seconds(3) == model.swap_out_seconds(3)


def test_no_work_costs_nothing():
    model = unit_model()
    assert model.prefill_seconds(0, 0) == model.prefill_seconds(0, 4) == model.prefill_seconds(-1, 1) == 0.0
    assert model.decode_seconds(0, 0) == model.decode_seconds(0, 100) == 0.0
    assert model.swap_out_seconds(0) == model.swap_in_seconds(0) == model.swap_in_seconds(-3) == 0.0


def test_efficiencies_default_to_assumptions_or_to_what_was_measured():
    llama = model_shape("llama-13b")
    assumed = RooflineCostModel(llama, device_spec("H200"))
    assert (assumed.compute_efficiency, assumed.memory_efficiency, assumed.link_efficiency) == (0.6, 0.8, 0.8)
    assert unit_model().memory_efficiency == 1.0
    assert unit_model(memory_efficiency=0.5).memory_efficiency == 0.5
    assert "llama-13b" in repr(assumed)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("compute_efficiency", 1.01),
        ("memory_efficiency", 0.0),
        ("link_efficiency", float("nan")),
        ("step_overhead_seconds", -1e-9),
        ("transfer_latency_seconds", float("inf")),
        ("block_size", 0),
    ],
)
def test_bad_options_are_refused(option, value):
    with pytest.raises(ConfigError, match=f"{option} must lie in"):
        unit_model(**{option: value})


@given(
    st.sampled_from(sorted(DEVICES)), st.sampled_from(sorted(MODEL_SHAPES)), counts, counts, counts, counts
)
def test_more_work_never_costs_less(device, shape, tokens, seqs, context, more):
    model = RooflineCostModel(model_shape(shape, "float32"), device_spec(device))
    prefill = model.prefill_seconds(tokens, seqs, context)
    assert 0 < model.step_overhead_seconds < prefill <= model.prefill_seconds(tokens + more, seqs, context)
    assert prefill <= model.prefill_seconds(tokens, seqs, context + more)
    decode = model.decode_seconds(seqs, context)
    assert (
        0
        < decode
        <= min(model.decode_seconds(seqs + more, context), model.decode_seconds(seqs, context + more))
    )
    assert 0 < model.swap_out_seconds(tokens) < model.swap_out_seconds(tokens + more)


@given(counts, counts)
def test_chunks_of_a_prompt_cost_no_less_than_the_whole(first, second):
    model = RooflineCostModel(model_shape("llama-13b"), device_spec("A800-80GB-PCIe"))
    chunks = model.prefill_seconds(first, 1) + model.prefill_seconds(second, 1, first)
    assert model.prefill_seconds(first + second, 1) <= chunks * (1 + 1e-12)
