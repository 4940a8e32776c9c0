"""Costs from measured kernels: at what was measured, between, beyond, and what is said of each."""

import dataclasses
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import ConfigError
from jaxllm.predictors.devices import DEVICES, device_spec
from jaxllm.predictors.published_shapes import MODEL_SHAPES, model_shape
from jaxllm.predictors.roofline import RooflineCostModel
from jaxllm.predictors.silicon import ALIKE, SiliconCostModel
from jaxllm.predictors.silicon_kernels import Attention, Grid, Rows, experts, product, reduction
from jaxllm.predictors.silicon_package import read_package
from jaxllm.predictors.silicon_tables import DTYPES, MEASURED, load_tables, save_tables

LLAMA_8B = model_shape("llama-3-8b", "bfloat16")
LLAMA_7B = dataclasses.replace(
    model_shape("llama-13b", "bfloat16"),
    name="llama-2-7b",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=32,
    intermediate_size=11008,
)
MIXTRAL = dataclasses.replace(
    LLAMA_8B, name="mixtral-8x7b", num_experts=8, experts_per_token=2, vocab_size=32000
)
H100 = load_tables("H100-SXM")
WORK = st.tuples(
    st.integers(0, 1500),
    st.integers(0, 3000).map(lambda mean: mean),
    st.integers(0, 16384),
    st.integers(1, 64),
    st.integers(0, 8000),
)


def work_of(drawn):
    batch, mean, prompt_tokens, num_prompts, context = drawn
    prompts = min(num_prompts, prompt_tokens)
    return batch, batch * mean, prompt_tokens, prompts, context * prompts


@given(WORK)
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("parallel", [(1, 1), (4, 1), (2, 4)])
def test_parts_add_up_to_the_step(parallel, drawn):
    costs = SiliconCostModel(LLAMA_8B, "H100-SXM", tensor_parallel=parallel[0], pipeline_parallel=parallel[1])
    seconds, parts = costs.step_seconds(*work_of(drawn)), costs.parts(*work_of(drawn))
    assert math.isfinite(seconds)
    # Kernels that depend on rows alone are summed at points, between which the sum is interpolated.
    assert sum(part.seconds for part in parts) == pytest.approx(seconds, rel=0.03)


@given(WORK, st.sampled_from(sorted(MEASURED)))
@settings(max_examples=200, deadline=None)
def test_more_work_never_takes_much_less(drawn, device):
    costs = SiliconCostModel(LLAMA_8B, device)
    work = work_of(drawn)
    seconds = costs.step_seconds(*work)
    batch, context, tokens, prompts, cached = work
    # Measured kernels are a little faster now and then where a tile fits better.
    assert costs.step_seconds(2 * batch, 2 * context, 2 * tokens, 2 * prompts, 2 * cached) >= 0.9 * seconds
    assert costs.step_seconds(batch, 2 * context, tokens, prompts, cached) >= 0.9 * seconds


@pytest.mark.parametrize("device", MEASURED)
def test_measured_points_are_what_was_measured(device):
    tables = load_tables(device)
    table = tables["products"]
    place = table.axes[0].tolist().index(64)
    measured = table.rows[0, 4096, 4096][place] * 1e-6
    assert product(tables, "bfloat16", 4096, 4096).seconds(64) == pytest.approx(measured)
    decode, prefill = (tables[kind].rows[0, 128, 0, 32, 8] for kind in ("decode", "prefill"))
    attention = Attention(tables, (32, 8, 128, 0), 0)
    row, column = (tables["decode"].axes[axis].tolist().index(value) for axis, value in ((0, 16), (1, 1024)))
    assert attention.decode(16, 1024) == pytest.approx(decode[row, column] * 1e-6)
    assert attention.source_of_decode(16, 1024) == "measured"
    row, column = (tables["prefill"].axes[axis].tolist().index(value) for axis, value in ((0, 2), (1, 1024)))
    assert attention.prefill(2, 1024, 0) == pytest.approx(prefill[row, column] * 1e-6)


def test_every_kind_of_kernel_is_of_plausible_speed():
    """Nothing measured is faster than a data sheet allows, nor so slow that units could be wrong."""
    for device in MEASURED:
        tables, spec = load_tables(device), device_spec(device)
        table = tables["products"]
        for (dtype, n, k), row in table.rows.items():
            peak = spec.peak_flops["bfloat16"] * (1 if dtype == 0 else 2)
            flops = 2 * table.axes[0] * n * k / (row * 1e-6)
            assert np.nanmax(flops) < 1.05 * peak
            if min(n, k) >= 4096:
                assert np.nanmax(flops) > 0.25 * peak, (device, dtype, n, k)


def test_llama_7b_decodes_on_an_h100_as_a_server_did():
    """16 sequences of 700 tokens: a server took 8.18 ms per output token, with prompts riding along."""
    kernels = SiliconCostModel(LLAMA_7B, "H100-SXM", host_seconds=0.0, layer_seconds=0.0)
    assert kernels.step_seconds(16, 16 * 700) == pytest.approx(8.15e-3, rel=0.02)


def test_a_grouped_head_reads_as_many_keys_as_eight_times_as_large_a_batch():
    attention = Attention(H100, (32, 32, 128, 0), 0)
    eight = Attention(H100, (8, 8, 128, 0), 0)
    assert attention.decode(5, 900) == eight.decode(20, 900)
    assert attention.source_of_decode(5, 900) == "measured"
    odd = Attention(H100, (28, 4, 128, 0), 0)  # seven queries a head
    assert odd.source_of_decode(5, 900) == "scaled"
    assert odd.decode(5, 900) == pytest.approx(Attention(H100, (32, 4, 128, 0), 0).decode(5, 900), rel=0.1)


def test_a_chunk_after_others_computes_the_pairs_of_all_together():
    attention = Attention(H100, (32, 8, 128, 0), 0)
    whole = attention.prefill(1, 8192, 0)
    parts = sum(attention.prefill(1, 1024, 1024 * place) for place in range(8))
    assert parts == pytest.approx(whole, rel=0.35)  # chunks fill the device less well
    assert attention.prefill(1, 16, 8000) >= attention.decode(1, 8016)


def test_windows_bound_what_is_read_and_computed():
    full, window = (Attention(H100, (32, 8, 128, 0), size) for size in (0, 1024))
    odd = Attention(H100, (32, 8, 128, 0), 4096)  # not measured: by its pairs
    assert window.decode(64, 8192) < 0.5 * full.decode(64, 8192)
    assert odd.decode(64, 8192) == full.decode(64, 4096)
    assert odd.prefill(1, 4000, 0) == full.prefill(1, 4000, 0)
    assert odd.prefill(1, 16000, 0) < 0.6 * full.prefill(1, 16000, 0)
    assert window.prefill(1, 1024, 30000) < 0.3 * full.prefill(1, 1024, 30000)
    half = dataclasses.replace(LLAMA_8B, window=1024, num_window_layers=16)
    mixed, plain = SiliconCostModel(half, "H100-SXM"), SiliconCostModel(LLAMA_8B, "H100-SXM")
    assert mixed.step_seconds(64, 64 * 8000) < plain.step_seconds(64, 64 * 8000)
    assert mixed.step_seconds(64, 64 * 500) == pytest.approx(plain.step_seconds(64, 64 * 500), rel=0.05)


def test_low_precision_and_parallelism_pay():
    plain = SiliconCostModel(LLAMA_8B, "H100-SXM")
    work = 64, 64 * 2000
    for options in ({"weights": "fp8"}, {"weights": "fp8_block"}, {"kv": "fp8"}, {"tensor_parallel": 2}):
        assert SiliconCostModel(LLAMA_8B, "H100-SXM", **options).step_seconds(*work) < plain.step_seconds(
            *work
        )
    for kv, times in (("bfloat16", 1.0), ("fp8", 0.5)):
        costs = SiliconCostModel(LLAMA_8B, "H100-SXM", kv=kv)
        assert costs.kv_bytes_per_token == times * LLAMA_8B.kv_bytes_per_token
    # Two halves of a model take longer than one, for hops, but copy twice as fast.
    halves = SiliconCostModel(LLAMA_8B, "H100-SXM", pipeline_parallel=2)
    assert halves.step_seconds(1, 100) > plain.step_seconds(1, 100)
    assert halves.swap_out_seconds(10**6) == pytest.approx(plain.swap_out_seconds(10**6) / 2, rel=1e-3)
    names = {part.name for part in SiliconCostModel(LLAMA_8B, "H100-SXM", tensor_parallel=2).parts(*work)}
    assert "all-reduce" in names


def test_more_gpus_than_kv_heads_keep_them_several_times():
    costs = SiliconCostModel(dataclasses.replace(LLAMA_8B, num_kv_heads=4), "H100-SXM", tensor_parallel=8)
    assert costs.kv_bytes_per_token == LLAMA_8B.kv_bytes_per_token


def test_experts_take_their_own_kernels():
    costs = SiliconCostModel(MIXTRAL, "H100-SXM")
    parts = {part.name: part for part in costs.parts(64, 64 * 500)}
    assert parts["experts"].source == "measured"
    assert "up" not in parts
    other = experts(H100, "bfloat16", 4000, 14336, 2, 8, 1)
    assert other.source == "scaled"
    # A roofline reads all experts, and multiplies by those that are chosen.
    assert MIXTRAL.num_layer_parameters > 5 * MIXTRAL.num_active_parameters / 2
    roofline = RooflineCostModel(MIXTRAL, device_spec("h100"))
    dense = RooflineCostModel(LLAMA_8B, device_spec("h100"))
    assert roofline.step_seconds(1, 100) > 4 * dense.step_seconds(1, 100)
    assert roofline.step_seconds(0, 0, 16384, 1) < 3 * dense.step_seconds(0, 0, 16384, 1)


def test_answers_outside_the_tables_say_so_and_grow_with_the_work():
    costs = SiliconCostModel(LLAMA_8B, "H100-SXM")
    far = {part.name: part.source for part in costs.parts(4000, 4000 * 200_000)}
    assert far["decode attention"] == "outside"
    near = {part.name: part.source for part in costs.parts(64, 64 * 1000)}
    assert near["decode attention"] == near["qkv"] == "measured"
    assert near["up"] == "interpolated"  # 28,672 outputs
    assert near["host"] == "assumed"
    once, twice = (costs.step_seconds(0, 0, tokens, 1) for tokens in (100_000, 200_000))
    assert 1.9 < twice / once < 4.1
    assert {part.source for part in SiliconCostModel(LLAMA_8B, "L4").parts(8, 800)} == {
        "scaled",
        "assumed",
        "outside",
    }


@pytest.mark.parametrize("device", ALIKE)
def test_devices_that_are_alike_are_scaled_by_their_rates(device):
    mine, other = SiliconCostModel(LLAMA_8B, device), SiliconCostModel(LLAMA_8B, ALIKE[device])
    rates = device_spec(ALIKE[device]).memory_bandwidth / device_spec(device).memory_bandwidth
    work = 8, 8 * 4000
    kernels = [costs.step_seconds(*work) - costs.host_seconds for costs in (mine, other)]
    assert kernels[0] / kernels[1] == pytest.approx(rates, rel=0.05)
    assert "scaled by peak rates" in mine.tables.source


def test_no_work_costs_nothing():
    costs = SiliconCostModel(LLAMA_8B, "H100-SXM")
    for work in ((0, 0), (-1, 5), (0, 0, 0, 0, 0), (0, 0, 5, 0, 0)):
        assert costs.step_seconds(*work) == 0.0
        assert costs.parts(*work) == []
    assert costs.swap_out_seconds(0) == costs.swap_in_seconds(-1) == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu-2core"}, "no kernels were measured on 'cpu-2core'; there are some of A100-80GB"),
        ({"device": "TPU"}, "device 'TPU' is not in the table"),
        ({"weights": "int4"}, "weights='int4' was not measured on any device; use float16, bfloat16, fp8"),
        ({"kv": "fp8_block"}, "kv='fp8_block' was not measured"),
        ({"device": "a100", "kv": "fp8"}, "no attention over fp8 KV was measured on A100-80GB; use bfloat16"),
        ({"tensor_parallel": 3}, "tensor_parallel=3 does not divide the 32 heads"),
        (
            {"model": dataclasses.replace(LLAMA_8B, num_heads=48, num_kv_heads=6), "tensor_parallel": 4},
            "tensor_parallel=4 neither divides the 6 KV heads of 'llama-3-8b' nor is a multiple of them",
        ),
        ({"tensor_parallel": 9}, r"tensor_parallel must lie in \[1, 8\], got 9"),
        ({"pipeline_parallel": 33}, r"pipeline_parallel must lie in \[1, 32\], got 33"),
        ({"host_seconds": -1.0}, "host_seconds must lie in"),
        ({"link": 0.0}, "link must lie in"),
        ({"model": model_shape("llama-3-8b", "float32")}, "dtype='float32' was not measured"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    options = {"model": LLAMA_8B, "device": "h100"} | options
    with pytest.raises(ConfigError, match=message):
        SiliconCostModel(options.pop("model"), options.pop("device"), **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 8}, "experts_per_token=0 of num_experts=8: give both"),
        ({"num_experts": 2, "experts_per_token": 3}, "experts_per_token=3 of num_experts=2"),
        ({"window": 128}, "num_window_layers=0 of 32 layers with window=128"),
        ({"window": 128, "num_window_layers": 33}, "num_window_layers=33 of 32"),
    ],
)
def test_half_a_shape_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(LLAMA_8B, **fields)


def test_unmeasured_numbers_of_gpus_are_refused():
    with pytest.raises(
        ConfigError, match="no all-reduces among 3 GPUs of H100-SXM were measured; use 2, 4, 8"
    ):
        reduction(H100, 3)


def test_all_published_shapes_have_costs():
    for shape in MODEL_SHAPES.values():
        costs = SiliconCostModel(shape, "H100-SXM")
        assert 1e-3 < costs.step_seconds(8, 8 * 500) < 0.2
        assert costs.step_seconds(0, 0, 2048, 1) < costs.step_seconds(0, 0, 4096, 1)


def test_no_device_is_faster_than_a_roofline_at_its_peaks():
    for device in MEASURED:
        peak = RooflineCostModel(
            LLAMA_8B,
            dataclasses.replace(device_spec(device), is_measured=True),
            step_overhead_seconds=0.0,
        )
        costs = SiliconCostModel(LLAMA_8B, device, host_seconds=0.0)
        for work in (
            (1, 500),
            (64, 64 * 1000),
            (512, 512 * 300),
            (0, 0, 4096, 1, 0),
            (32, 32 * 500, 2048, 2, 0),
        ):
            ratio = costs.step_seconds(*work) / peak.step_seconds(*work)
            assert 1.0 < ratio < 4.0, (device, work, ratio)


@given(st.floats(0.5, 1e6))
@settings(max_examples=100)
def test_powers_are_interpolated_exactly(size):
    points = np.array([1.0, 3.0, 10.0, 1e5])
    rows = Rows(points, 2.0 * points, "measured")
    assert rows.seconds(max(size, 1.0)) == pytest.approx(2.0 * max(size, 1.0))


@given(st.floats(1, 1e5), st.floats(1, 1e5))
@settings(max_examples=100)
def test_holes_of_a_grid_are_filled_by_the_work(first, second):
    axes = np.array([1.0, 4.0, 64.0]), np.array([1.0, 10.0, 1000.0])
    seconds = np.outer(axes[0], axes[1])
    seconds[2, 1:] = np.nan
    grid = Grid(axes, seconds, lambda one, other: one * other, 3.0)
    assert grid.seconds(first, second) == pytest.approx(3.0 * first * second)
    assert grid.source_at(2, 5) == "measured"
    assert grid.source_at(50, 500) == grid.source_at(65, 5) == "outside"


def test_stored_tables_come_back(tmp_path):
    path = tmp_path / "tables.npz"
    save_tables(path, [H100], {"package": "made up"})
    again = load_tables("H100-SXM", path)
    for kind, table in H100.tables.items():
        assert again[kind].rows.keys() == table.rows.keys()
        for key, row in table.rows.items():
            np.testing.assert_allclose(again[kind].rows[key], row, rtol=1e-3)
    with pytest.raises(ConfigError, match=r"tables.npz is no file of kernel tables that holds 'H200'"):
        load_tables("H200", path)
    with pytest.raises(ConfigError, match="no kernels measured on 'TPU' are stored; there are: A100-80GB"):
        load_tables("TPU")


def test_the_package_is_read_as_it_was_distilled(tmp_path):
    """A folder as `aiconfigurator-core` has it, with rows of the kinds that are kept and left out."""
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")

    def write(path, rows):
        path = tmp_path / "systems" / "data" / "h100_sxm" / path
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(arrow.Table.from_pylist(rows), path)

    about = {"framework": "VLLM", "device": "NVIDIA H100 80GB HBM3"}
    shape = {"num_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "kv_cache_dtype": "bfloat16"}
    gemm = about | {"gemm_dtype": "bfloat16", "n": 256, "k": 512}
    write("gemm/vllm/0.9.0/gemm_perf.parquet", [gemm | {"m": 1, "latency": 9.0}])
    write(
        "gemm/vllm/0.24.0/gemm_perf.parquet",
        [
            gemm | {"m": 1, "latency": 0.5},
            gemm | {"m": 1, "latency": 0.25},  # a faster kernel
            gemm | {"m": 3, "latency": 0.5},  # a row that is not kept
            gemm | {"m": 1, "latency": 0.5, "n": 8},  # too small
            gemm | {"m": 1, "latency": 0.5, "gemm_dtype": "nvfp4"},
        ],
    )
    integer = gemm | {"gemm_dtype": "int4_wo", "m": 1, "latency": 0.125}
    write("gemm/trtllm/1.0.0rc3/gemm_perf.parquet", [integer, gemm | {"m": 1, "latency": 0.1}])
    attention = about | shape | {"window_size": 0}
    write(
        "attention/vllm/0.24.0/generation_attention_perf.parquet",
        [attention | {"batch_size": 2, "isl": 1, "step": 7, "latency": 0.01}],
    )
    write(
        "attention/vllm/0.24.0/context_attention_perf.parquet",
        [attention | {"batch_size": 2, "isl": 64, "step": 0, "latency": 0.02}],
    )
    write(
        "comm/vllm/0.24.0/custom_allreduce_perf.parquet",
        [about | {"num_gpus": 2, "message_size": 128, "latency": 0.004}],
    )
    nccl = about | {"op_name": "all_reduce", "nccl_dtype": "half", "num_gpus": 2}
    write(
        "comm/nccl/2.9.0/nccl_perf.parquet",
        [
            nccl | {"message_size": 128, "latency": 0.003},
            nccl | {"message_size": 256, "latency": 0.005},
            nccl | {"message_size": 512, "latency": 0.001, "op_name": "all_gather"},
        ],
    )
    moe = about | {"moe_dtype": "fp8", "num_tokens": 4, "hidden_size": 64, "inter_size": 32, "topk": 2}
    moe |= {"num_experts": 8, "moe_tp_size": 1, "moe_ep_size": 1, "distribution": "power_law_1.01"}
    write(
        "moe/vllm/0.24.0/moe_perf.parquet",
        [moe | {"latency": 0.1}, moe | {"latency": 0.01, "distribution": "balanced"}],
    )
    found = read_package("H100-SXM", tmp_path / "systems", rows=(1,), smallest=16)
    assert {key: row.tolist() for key, row in found["products"].rows.items()} == {
        (0, 256, 512): [250.0],
        (DTYPES.index("int4_weight"), 256, 512): [125.0],
    }
    assert found["decode"].axes[1].tolist() == [8.0]  # the new token counts
    assert found["decode"].rows[0, 128, 0, 8, 2].tolist() == [[10.0]]
    assert found["prefill"].rows[0, 128, 0, 8, 2].tolist() == [[20.0]]
    assert found["all_reduce"].rows[2,].tolist() == [3.0, 5.0]
    assert found["experts"].rows[DTYPES.index("fp8"), 64, 32, 2, 8, 1].tolist() == [100.0]
    assert "integer products TensorRT-LLM 1.0.0rc3, products 0.24.0" in found.source
    with pytest.raises(ConfigError, match=r"there is no gemm_perf.parquet in .*: is it `systems` of"):
        read_package("H200", tmp_path / "systems")
    with pytest.raises(ConfigError, match='pip install "jaxllm\\[silicon\\]"'):
        read_package("H200")


@pytest.mark.parametrize("device", ["A100-80GB", "H100-SXM"])
def test_weights_of_fewer_bits_cost_less_where_weights_are_read(device):
    """int8 by int8 less everywhere; numbers made of codes as much as others once products compute more."""

    def seconds(rows, **formats):
        costs = SiliconCostModel(dataclasses.replace(LLAMA_8B, **formats), device)
        return sum(part.seconds for part in costs.parts(rows, rows * 100) if part.source != "assumed")

    for rows, low, high in ((4, 0.4, 0.8), (8192, 0.9, 1.3)):
        plain = seconds(rows)
        assert low < seconds(rows, weights="int8_weight", head="int8_weight") / plain < high
    assert seconds(4, weights="int4_weight") < seconds(4, weights="int8_weight") < seconds(4)
    for rows in (1, 64, 8192):
        assert seconds(rows, weights="int8", head="int8") < 0.8 * seconds(rows)


def test_float8_without_tensor_cores_for_it_is_as_int8_weights():
    seconds = {
        weights: SiliconCostModel(dataclasses.replace(LLAMA_8B, weights=weights), "A100-80GB").step_seconds(
            8, 800
        )
        for weights in ("fp8", "fp8_block", "int8_weight", "auto")
    }
    assert seconds["auto"] > 1.2 * seconds["int8_weight"]
    for name in ("fp8", "fp8_block"):  # whose inputs are rounded beside them
        assert seconds[name] == pytest.approx(seconds["int8_weight"], rel=0.02)


def test_what_was_not_measured_of_integers_is_said_to_be_scaled():
    for device, source in (("A100-80GB", ("measured", "interpolated")), ("H100-SXM", ("scaled",))):
        for weights in ("int8", "int8_weight", "int4_weight"):
            costs = SiliconCostModel(dataclasses.replace(LLAMA_8B, weights=weights), device)
            (found,) = (part.source for part in costs.parts(8, 800) if part.name == "qkv")
            assert found in source
    costs = SiliconCostModel(dataclasses.replace(LLAMA_8B, kv_dtype="int8"), "A100-80GB")
    sources = {part.name: part.source for part in costs.parts(8, 8000)}
    assert sources["decode attention"] == "scaled"


def test_kv_of_int8_has_half_the_bytes_and_its_prompts_the_same_cost():
    wide = SiliconCostModel(LLAMA_8B, "A100-80GB")
    narrow = SiliconCostModel(dataclasses.replace(LLAMA_8B, kv_dtype="int8"), "A100-80GB")
    ratio = (128 + 4) / 256
    assert narrow.kv_bytes_per_token == ratio * wide.kv_bytes_per_token
    latency = wide.swap_in_seconds(1) - (wide.swap_in_seconds(2) - wide.swap_in_seconds(1))
    assert narrow.swap_in_seconds(64) - latency == pytest.approx(ratio * (wide.swap_in_seconds(64) - latency))
    assert narrow.step_seconds(0, 0, 2048, 1) == wide.step_seconds(0, 0, 2048, 1)
    assert narrow.step_seconds(64, 64 * 4000) < wide.step_seconds(64, 64 * 4000)
    assert narrow.step_seconds(64, 64 * 4000) == pytest.approx(
        wide.step_seconds(64, int(64 * 4000 * ratio)), 1e-3
    )


def test_bytes_of_weights_are_those_of_their_formats():
    for weights, head, expected in (
        ("auto", "auto", 16.06e9),
        ("int8", "int8", 8.56e9),  # the embedding stays
        ("int4_weight", "auto", 5.81e9),
    ):
        shape = dataclasses.replace(LLAMA_8B, weights=weights, head=head)
        assert shape.weight_bytes == pytest.approx(expected, rel=0.002)
        assert SiliconCostModel(shape, "H100-SXM").weight_bytes == shape.weight_bytes
    fixed = SiliconCostModel(LLAMA_8B, "H100-SXM", weights="fp8")
    assert fixed.weight_bytes == dataclasses.replace(LLAMA_8B, weights="fp8").weight_bytes


def test_all_devices_of_the_table_but_the_cpu_have_kernels():
    assert DEVICES.keys() - MEASURED.keys() - ALIKE.keys() == {"cpu-2core"}


def test_costs_can_be_sent_to_another_process():
    costs = SiliconCostModel(LLAMA_8B, "H100-SXM", tensor_parallel=2)
    again = pickle.loads(pickle.dumps(costs))
    assert again.step_seconds(8, 800, 512, 1) == costs.step_seconds(8, 800, 512, 1)


def test_decodes_and_prompts_say_each_where_it_is_from():
    keys = {key: row for key, row in H100["prefill"].rows.items() if key[1] != 128}
    prefill = dataclasses.replace(H100["prefill"], rows=keys)
    tables = dataclasses.replace(H100, tables={**H100.tables, "prefill": prefill})
    attention = Attention(tables, (32, 8, 128, 0), 0)
    assert attention.source_of_decode(8, 500) == "measured"
    assert attention.source_of_prefill(1, 500, 0) == "scaled"


def test_the_head_stays_in_16_bits():
    low = SiliconCostModel(LLAMA_8B, "H100-SXM", weights="fp8")
    vocab = LLAMA_8B.num_parameters - LLAMA_8B.num_layer_parameters
    assert low.weight_bytes == LLAMA_8B.num_layer_parameters + 2 * vocab
    assert SiliconCostModel(LLAMA_8B, "H100-SXM").weight_bytes == LLAMA_8B.weight_bytes
