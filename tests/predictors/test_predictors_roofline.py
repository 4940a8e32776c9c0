"""Model shapes, the device table, and costs from peak rates."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import COST_KINDS, ModelShape, step_kind
from jaxllm.predictors.devices import DEVICES, DeviceSpec, device_spec
from jaxllm.predictors.published_shapes import MODEL_SHAPES, model_shape
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
    folder = Path(__file__).parents[2] / "predictors"
    modules = [f"jaxllm.predictors.{path.stem}" for path in folder.glob("[a-z]*.py")]
    code = (
        f"import importlib, sys; [importlib.import_module(name) for name in {modules!r}]\n"
        "assert not {'jax', 'sklearn', 'scipy', 'pandas'} & sys.modules.keys(), sorted(sys.modules)"
    )
    assert "jaxllm.predictors.roofline" in modules
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
        ({"dtype": "int8"}, "dtype='int8' is not supported; pass dtype as one of float32, bfloat16, float16"),
        ({"gated_mlp": 1}, "gated_mlp must be true or false, got 1"),
        ({"name": ""}, "name must be a string that is not empty"),
    ],
)
def test_bad_shapes_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(TINY, **change)


@pytest.mark.parametrize(
    ("weights", "bits", "faster"),
    [("int8", 8, 2), ("fp8", 8, 2), ("fp8_block", 8.25, 2), ("int8_weight", 8, 1), ("int4_weight", 4.25, 1)],
)
def test_formats_have_bytes_and_rates_of_their_own(weights, bits, faster):
    """A decode reads weights; a long prefill multiplies; a head that is left out does as in 16 bits."""
    plain = model_shape("llama-3-8b", "bfloat16")
    exact = {"step_overhead_seconds": 0.0, "memory_efficiency": 1.0, "compute_efficiency": 1.0}
    for head in (weights, "bfloat16"):
        shape = dataclasses.replace(plain, weights=weights, head=head, kv_dtype="int8")
        costs = RooflineCostModel(shape, device_spec("H100-SXM"), **exact)
        of_head = bits if head == weights else 16
        read = (shape.num_layer_parameters * bits + shape.num_head_parameters * of_head) / 8
        assert costs.step_seconds(1, 0) == pytest.approx(
            (read + shape.kv_bytes_per_token) / 3.35e12, rel=1e-3
        )
        layers = 2 * shape.num_layer_parameters * 10_000 / faster
        heads = 2 * shape.num_head_parameters * 10_000 / (faster if head == weights else 1)
        few = 4 * 32 * 32 * 128 * 10_000  # a query of each sequence sees itself
        found = costs.step_seconds(0, 0, 10_000, 10_000, 0)
        assert found == pytest.approx((layers + heads + few) / 989.5e12, rel=2e-3)


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
    gpus = ["A800-80GB-PCIe", "A100-80GB", "H100-SXM", "H200", "L40S", "L4", "B200"]
    assert list(DEVICES) == [*gpus, "cpu-2core"]
    assert device_spec("h100-sxm") is device_spec("h100") is DEVICES["H100-SXM"]
    for spec in DEVICES.values():
        assert spec.source
        assert 0.5 <= spec.copied_per_second / spec.host_bandwidth <= 1.0
        assert spec.host_bandwidth < spec.memory_bandwidth < max(spec.peak_flops.values())
        # Weights of the largest published shape in 16 bits fit where the paper ran them.
        assert spec.memory_bytes > model_shape("llama-3-8b").weight_bytes
    assert DEVICES["A800-80GB-PCIe"].memory_bytes > model_shape("llama-32.5b").weight_bytes


def test_a_device_refuses_rates_that_are_none():
    with pytest.raises(ConfigError, match="memory_bandwidth must lie in"):
        dataclasses.replace(UNIT_DEVICE, memory_bandwidth=0.0)
    with pytest.raises(ConfigError, match=r"peak_flops\['float32'\] must lie in"):
        dataclasses.replace(UNIT_DEVICE, peak_flops={"float32": float("nan")})


# Of TINY on UNIT_DEVICE: 1152 parameters of layers and 80 of the head, 2 flops each per token and per row
# sampled; 4 * 2 layers * 4 heads * 2 flops per pair of query and key; 64 bytes of KV per token.
PER_TOKEN, PER_SEQ, PER_PAIR = 2 * 1152 / 1000, 2 * 80 / 1000, 64 / 1000
WEIGHTS, PER_KV_TOKEN = (1152 + 80) * 4 / 100, 64 / 100


def test_a_decode_step_by_hand():
    # Three sequences that attend to 30 tokens in all: 9.3 s of flops beside weights and the KV of 33 tokens.
    flops = 3 * PER_TOKEN + 30 * PER_PAIR + 3 * PER_SEQ
    assert flops == pytest.approx(9.312)
    assert unit_model().step_seconds(3, 30) == pytest.approx(1.0 + WEIGHTS + 33 * PER_KV_TOKEN)
    assert unit_model().step_seconds(3, 30) == pytest.approx(71.4)
    # 64 sequences with a token each: 131.2 s of bytes beside flops.
    flops = 64 * PER_TOKEN + 64 * PER_PAIR + 64 * PER_SEQ
    assert unit_model().step_seconds(64, 64) == pytest.approx(1.0 + flops) == pytest.approx(162.792)


def test_a_prefill_step_by_hand():
    # Two sequences of 50 new tokens after 10 cached ones each: flops bound it.
    pairs = 2 * (50 * 10 + 50 * 51 / 2)
    flops = 100 * PER_TOKEN + pairs * PER_PAIR + 2 * PER_SEQ
    assert unit_model().step_seconds(0, 0, 100, 2, 20) == pytest.approx(1.0 + flops) == pytest.approx(458.92)
    # Two tokens after 50: weights, and the KV of 50 tokens read and of 2 written and read.
    bytes_of_both = WEIGHTS + (50 + 2 * 2) * PER_KV_TOKEN
    assert unit_model().step_seconds(0, 0, 2, 1, 50) == pytest.approx(1.0 + bytes_of_both)
    assert unit_model().step_seconds(0, 0, 2, 1, 50) == pytest.approx(84.84)


def test_a_mixed_step_by_hand():
    # Beside the three decodes a chunk of 4 tokens after 10: weights are read once, for both.
    memory = WEIGHTS + (33 + 2 * 4 + 10) * PER_KV_TOKEN
    assert unit_model().step_seconds(3, 30, 4, 1, 10) == pytest.approx(1.0 + memory) == pytest.approx(82.92)
    # Beside the two chunks of 50 tokens: all flops of both.
    compute = 103 * PER_TOKEN + (30 + 2 * (500 + 1275)) * PER_PAIR + 5 * PER_SEQ
    assert unit_model().step_seconds(3, 30, 100, 2, 20) == pytest.approx(1.0 + compute)
    assert unit_model().step_seconds(3, 30, 100, 2, 20) == pytest.approx(458.92 + 9.312)


def test_prompt_tokens_beside_decodes_that_wait_for_memory_cost_their_kv_only():
    model = unit_model()
    decode = model.step_seconds(3, 30)
    for num_tokens in (1, 10, 20, 30):
        assert model.step_seconds(3, 30, num_tokens, 1) == pytest.approx(
            decode + 2 * num_tokens * PER_KV_TOKEN
        )
    # From here on flops take longer than bytes: those of 9.312 s, and these.
    for num_tokens in (31, 40, 100):
        added = num_tokens * PER_TOKEN + num_tokens * (num_tokens + 1) / 2 * PER_PAIR + PER_SEQ
        assert model.step_seconds(3, 30, num_tokens, 1) == pytest.approx(1.0 + 9.312 + added)
        assert model.step_seconds(3, 30, num_tokens, 1) > decode + 2 * num_tokens * PER_KV_TOKEN
    # Of a real device: reading 13 billion weights hides 64 more tokens; a step of their own reads them again.
    real = RooflineCostModel(model_shape("opt-13b"), device_spec("A800-80GB-PCIe"))
    added = real.step_seconds(8, 4000, 64, 1) - real.step_seconds(8, 4000)
    assert 0 < added < 0.01 * real.step_seconds(0, 0, 64, 1)


def test_a_swap_by_hand():
    model = unit_model()
    assert TINY.block_bytes(4) == 256
    assert model.swap_out_seconds(3) == pytest.approx(2.0 + 3 * 256 / 10)
    assert model.swap_in_seconds(3) == model.swap_out_seconds(3)


def test_a_swap_of_many_pieces_by_hand():
    """Llama-13B's 40 layers, K and V apart: 80 pieces of 160 KiB a block take longer than their bytes."""
    shape, device = model_shape("llama-13b"), device_spec("A800-80GB-PCIe")
    whole = RooflineCostModel(shape, device)
    apart = RooflineCostModel(shape, device, pieces_per_block=80, piece_seconds=8e-6)
    assert apart.swap_in_seconds(5) - whole.swap_in_seconds(5) == pytest.approx(5 * 80 * 8e-6)
    rate = 5 * shape.block_bytes(16) / apart.swap_out_seconds(5)
    assert 11e9 < rate < 12e9


def test_no_work_costs_nothing():
    model = unit_model()
    for work in ((0, 0), (0, 100), (-1, 5), (0, 0, 0, 4), (0, 0, -1, 1), (0, 0, 5, 0), (0, 9, 5, -1, 7)):
        assert model.step_seconds(*work) == 0.0
    assert model.swap_out_seconds(0) == model.swap_in_seconds(0) == model.swap_in_seconds(-3) == 0.0


def test_a_part_without_work_is_left_out():
    model = unit_model()
    for nothing in ((0, 4, 9), (-1, 1, 9), (5, 0, 9)):
        assert model.step_seconds(3, 30, *nothing) == model.step_seconds(3, 30)
    for nothing in ((0, 99), (-1, 99)):
        assert model.step_seconds(*nothing, 100, 2, 20) == model.step_seconds(0, 0, 100, 2, 20)
    assert model.step_seconds(3, -5, 100, 2, -5) == model.step_seconds(3, 0, 100, 2, 0)


@pytest.mark.parametrize(
    ("batch", "prompt_tokens", "kind"),
    [(1, 0, "decode"), (0, 1, "prefill"), (2, 3, "mixed"), (0, 0, "decode")],
)
def test_steps_are_named_by_what_they_compute(batch, prompt_tokens, kind):
    assert step_kind(batch, prompt_tokens) == kind
    assert kind in COST_KINDS


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


rooflines = st.builds(
    lambda device, shape: RooflineCostModel(model_shape(shape, "float32"), device_spec(device)),
    st.sampled_from(sorted(DEVICES)),
    st.sampled_from(sorted(MODEL_SHAPES)),
)
work = st.tuples(st.integers(0, 512), st.integers(0, 10**6), *[st.integers(0, 4096)] * 3)


@given(rooflines, work, counts)
def test_more_work_never_costs_less(model, work, more):
    batch, context, tokens, prompts, before = work
    step = model.step_seconds(*work)
    slack = 1 - 1e-12
    assert model.step_seconds(batch + more, context, tokens, prompts, before) >= step * slack
    assert model.step_seconds(batch, context + more, tokens, prompts, before) >= step * slack
    assert model.step_seconds(batch, context, tokens + more, prompts, before) >= step * slack
    assert model.step_seconds(batch, context, tokens, prompts, before + more) >= step * slack
    # As many prompts again: the same tokens of more prompts attend to less, which is another matter.
    assert model.step_seconds(batch, context, 2 * tokens, 2 * prompts, 2 * before) >= step * slack
    assert (step > model.step_overhead_seconds > 0) == (batch > 0 or (tokens > 0 and prompts > 0))
    assert 0 < model.swap_out_seconds(more) < model.swap_out_seconds(more + tokens + 1)


@given(rooflines, work, counts)
def test_tokens_of_more_prompts_cost_no_more_than_the_rows_they_sample(model, work, more):
    batch, context, tokens, prompts, before = work
    assume(tokens and prompts)
    flops = model.device.flops_for("float32") * model.compute_efficiency
    rows = more * 2 * model.model.hidden_size * model.model.vocab_size / flops
    split = model.step_seconds(batch, context, tokens, prompts + more, before)
    assert split <= (model.step_seconds(*work) + rows) * (1 + 1e-12)


@given(rooflines, work)
def test_a_mixed_step_takes_at_least_its_longer_part_and_at_most_both(model, work):
    decodes, prompts = model.step_seconds(*work[:2]), model.step_seconds(0, 0, *work[2:])
    mixed = model.step_seconds(*work)
    assert max(decodes, prompts) * (1 - 1e-12) <= mixed <= (decodes + prompts) * (1 + 1e-12)


@given(counts, counts)
def test_chunks_of_a_prompt_cost_no_less_than_the_whole(first, second):
    model = RooflineCostModel(model_shape("llama-13b"), device_spec("A800-80GB-PCIe"))
    chunks = model.step_seconds(0, 0, first, 1) + model.step_seconds(0, 0, second, 1, first)
    assert model.step_seconds(0, 0, first + second, 1) <= chunks * (1 + 1e-12)
