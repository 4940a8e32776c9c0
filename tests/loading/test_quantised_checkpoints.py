"""Quantised checkpoints: the tokens and logits that their makers' libraries give, and files with faults."""

import json
import logging
import math
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxllm.functional as F
from jaxllm import LLM, SamplingParams
from jaxllm.errors import ConfigError, UnsupportedModelError, WeightsError
from jaxllm.loading import shards
from jaxllm.loading.convert import convert_checkpoint
from jaxllm.loading.load import checkpoint_formats, iter_params, load_params
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.models.linear_weights import Panels, Weight
from jaxllm.models.published_layouts import unpack
from jaxllm.models.quantisation import read_quantisation
from jaxllm.models.registry import abstract_params, linear_weights
from jaxllm.models.weight_parts import Fused
from jaxllm.research import load_shape

DATA = pathlib.Path(__file__).parents[1] / "data" / "quantised"
ORACLES = json.loads((DATA / "oracles.json").read_text())
KV_ORACLE = json.loads((DATA / "kv-fp8.json").read_text())
ROUNDED = {"ct-nvfp4a16": 0.07, "ct-fp8-dynamic": 2e-4}  # oracles that round to bfloat16, and near ties
ROUNDS_INPUTS = ("ct-w8a8-int8-dynamic-127", "ct-w8a8-static-asym", "ct-fp8-block", "ct-fp8-dynamic")
SIZES = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 32}
SIZES |= {"skip_tokenizer_init": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
Q_PROJ = "model.layers.0.self_attn.q_proj"


def folder_of(name, folder, change=lambda tensors, config: None):
    """A checkpoint, whose tensors and config.json may be changed."""
    folder.mkdir(exist_ok=True)
    tensors = {}
    for file in ("common", name):
        tensors |= {one.name: one.read() for one in shards._read_header(DATA / f"{file}.safetensors")}
    config = json.loads(json.dumps(ORACLES[name]["config"]))
    change(tensors, config)
    write(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write(tensors, file):
    """As safetensors, float8 too, which its NumPy half does not write."""
    codes = {"float8_e4m3fn": "F8_E4M3", "bfloat16": "BF16"}
    header, data = {}, b""
    for name, array in tensors.items():
        kind = codes.get(array.dtype.name)
        if kind is None:
            kind = {"f": "F", "i": "I", "u": "U"}[array.dtype.kind] + str(8 * array.dtype.itemsize)
        raw = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def assert_same_weights(name, folder, change):
    """What a checkpoint gives when it says the same in other words."""
    loaded = []
    for number, one in enumerate((lambda tensors, config: None, change)):
        (folder / str(number)).mkdir()
        path = folder_of(name, folder / str(number), one)
        loaded.append(load_params(path, config_from_dict(read_hf_config(path)), "float32"))
    assert loaded[0].keys() == loaded[1].keys()
    for key, array in loaded[0].items():
        assert (np.asarray(array) == np.asarray(loaded[1][key])).all()


def held_params(folder):
    """Its configuration, and its weights as an engine holds them."""
    hf_config = read_hf_config(folder)
    config = config_from_dict(hf_config)
    formats = checkpoint_formats(folder, config, hf_config)
    return config, dict(iter_params(folder, config, "float32", formats=formats)), formats


def compared(name, logits, margin):
    """Predictions of an oracle's prompts whose lead is more than a margin: theirs and the maker's."""
    pairs = []
    oracle = ORACLES[name]
    for prompt, greedy in zip(oracle["prompts"], oracle["greedy"], strict=True):
        for row, token in zip(logits([*prompt, *greedy])[len(prompt) - 1 :], greedy, strict=False):
            second, first = np.partition(row, -2)[-2:]
            pairs += [(int(row.argmax()), token)] if first - second > margin else []
    return pairs


@pytest.mark.parametrize("name", ORACLES)
def test_logits_and_greedy_tokens_are_the_makers(name, tmp_path, caplog):
    folder, oracle = folder_of(name, tmp_path), ORACLES[name]
    with caplog.at_level(logging.WARNING):
        config, held, formats = held_params(folder)
    assert bool(caplog.records) == (name == "fp8-block-qwen"), "what is done as it is said needs no word"
    ends = slice(len(oracle["prompts"][0]) - 2, len(oracle["prompts"][0]))
    dense = load_params(folder, config, "float32")
    assert all(one.kind or one.parts for _, one in formats.others)
    assert {name for name, _ in formats.others} == {
        name for name in linear_weights(config) if "layers" in name
    }
    for params in (held,) if name in ROUNDS_INPUTS else (held, dense):

        def logits(tokens, params=params):
            return np.asarray(F.logits(params, config, jnp.array([tokens]))[0])

        off = np.abs(logits(oracle["prompts"][0])[ends] - np.load(DATA / f"{name}.npy")).max()
        assert off <= ROUNDED.get(name, 1e-4)
        pairs = compared(name, logits, 2 * ROUNDED.get(name, 5e-4))
        assert len(pairs) > 40
        assert all(found == token for found, token in pairs)


@pytest.mark.parametrize("name", [*ROUNDS_INPUTS, "gptq-sym-g128-actorder", "ct-mxfp4a16", "awq-gemm-g128"])
def test_an_engine_holds_its_codes_and_its_tokens_are_the_makers(name, tmp_path):
    folder, oracle = folder_of(name, tmp_path), ORACLES[name]
    config, held, _ = held_params(folder)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(folder, **SIZES) as llm:
        outputs = llm.generate(oracle["prompts"], params, use_tqdm=False)
        weights = [llm.executor._params[name] for name in linear_weights(config) if "layers" in name]
    assert all(isinstance(one, Weight) and not isinstance(one, Panels) for one in weights)
    num_compared = 0
    for prompt, greedy, output in zip(oracle["prompts"], oracle["greedy"], outputs, strict=True):
        logits = np.asarray(F.logits(held, config, jnp.array([[*prompt, *greedy]]))[0])[len(prompt) - 1 :]
        for row, token, found in zip(logits, greedy, output.outputs[0].token_ids, strict=False):
            second, first = np.partition(row, -2)[-2:]
            if first - second <= 2 * ROUNDED.get(name, 5e-4):
                break  # from here on they may be of another text
            num_compared += 1
            assert found == token
    assert num_compared > 40


def with_kv_scales(tensors, config):
    config["quantization_config"]["kv_cache_scheme"] = KV_ORACLE["kv_cache_scheme"]
    for name, scale in KV_ORACLE["scales"].items():
        tensors[f"model.layers.{name}"] = np.array([scale], ml_dtypes.bfloat16)


def test_kv_of_e4m3_has_the_checkpoints_scales(tmp_path, caplog):
    """With no option; the maker's logits and tokens, of prompts that are computed at once and in chunks."""
    folder = folder_of("ct-fp8-dynamic", tmp_path, with_kv_scales)
    oracle, params = KV_ORACLE, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    with caplog.at_level(logging.WARNING), LLM(folder, **SIZES) as llm:
        assert llm.executor.config.kv_dtype == "fp8_e4m3"
        assert llm.executor._state.pool.dtype == jnp.float8_e4m3fn
        outputs = llm.generate(oracle["prompts"], params, use_tqdm=False)
    assert not [record for record in caplog.records if "quantised" in record.getMessage()]
    num_compared = 0
    for greedy, output in zip(oracle["greedy"], outputs, strict=True):
        one = output.outputs[0]
        for token, found, scores in zip(greedy, one.token_ids, one.logprobs, strict=True):
            first, second = sorted((score.logprob for score in scores.values()), reverse=True)[:2]
            if first - second <= 5e-3:
                break
            num_compared += 1
            assert found == token
    assert num_compared > 40


def kv_alone(tensors, config):
    with_kv_scales(tensors, config)
    config["quantization_config"]["config_groups"] = {}
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        scale, weight = tensors.pop(name).astype(np.float32), name.removesuffix("_scale")
        tensors[weight] = tensors[weight].astype(np.float32) * scale


def test_kv_alone_may_be_quantised(tmp_path):
    """With no group of weights, which are numbers."""
    folder = folder_of("ct-fp8-dynamic", tmp_path, kv_alone)
    with LLM(folder, **SIZES) as llm:
        assert llm.executor.config.kv_dtype == "fp8_e4m3"
        assert not any(one.kind for _, one in llm.executor.config.formats.others)
        found = [np.asarray(array) for name, array in llm.executor._params.items() if "kv_scales" in name]
        llm.generate([KV_ORACLE["prompts"][0]], use_tqdm=False)
    expected = np.array(list(KV_ORACLE["scales"].values()))
    np.testing.assert_allclose(np.sort(np.ravel(found)), np.sort(expected), rtol=1e-2)
    assert load_shape(folder).name.endswith("-kv-fp8_e4m3")


def test_scales_of_kv_change_little_elsewhere(tmp_path):
    """They are read and cancel out; and a folder of numbers is without them."""
    for name, change in (("plain", lambda tensors, config: None), ("scaled", with_kv_scales)):
        folder_of("ct-fp8-dynamic", tmp_path / name, change)
    logits = []
    for name in ("plain", "scaled"):
        config, held, _ = held_params(tmp_path / name)
        logits.append(np.asarray(F.logits(held, config, jnp.array([KV_ORACLE["prompts"][1]]))))
    assert 0 < np.abs(logits[0] - logits[1]).max() < 1e-3  # some inputs are between two codes of e4m3
    convert_checkpoint(tmp_path / "scaled", tmp_path / "orbax", "float32")
    with LLM(tmp_path / "orbax", dtype="float32", **SIZES) as llm:
        assert llm.executor.config.kv_dtype == "float32"


def of_no_dimension(tensors, config):
    with_kv_scales(tensors, config)
    for name in tensors:
        if name.endswith(("k_scale", "v_scale")):
            tensors[name] = tensors[name].reshape(())


def test_scales_of_kv_may_have_no_dimension(tmp_path):
    folders = [
        folder_of("ct-fp8-dynamic", tmp_path / change.__name__, change)
        for change in (with_kv_scales, of_no_dimension)
    ]
    same_weights(*folders)


def without_one(tensors, config):
    with_kv_scales(tensors, config)
    del tensors["model.layers.1.self_attn.v_scale"]


def of_two(tensors, config):
    with_kv_scales(tensors, config)
    tensors["model.layers.0.self_attn.k_scale"] = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [(without_one, "missing: .*layers.1.self_attn.v_scale"), (of_two, r"k_scale is \[2\], expected \[1\]")],
)
def test_scales_of_kv_that_are_not_there_are_named(change, message, tmp_path):
    folder = folder_of("ct-fp8-dynamic", tmp_path, change)
    with pytest.raises(WeightsError, match=message):
        LLM(folder, **SIZES)


def test_what_is_converted_is_of_numbers_and_has_the_same_tokens(tmp_path):
    name = "gptq-sym-g128-actorder"
    (tmp_path / "model").mkdir()
    folder = folder_of(name, tmp_path / "model")
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    convert_checkpoint(folder, tmp_path / "orbax", "float32")
    assert "quantization_config" not in read_hf_config(tmp_path / "orbax")
    with LLM(tmp_path / "orbax", dtype="float32", **SIZES) as llm:
        outputs = llm.generate(ORACLES[name]["prompts"], params, use_tqdm=False)
    assert [list(one.outputs[0].token_ids) for one in outputs] == ORACLES[name]["greedy"]


def test_what_is_quantised_is_not_quantised_again(tmp_path):
    folder = folder_of("ct-w8a16", tmp_path)
    with pytest.raises(ConfigError, match=r"quantization='int8' is for .* already \(compressed-tensors\)"):
        LLM(folder, quantization="int8", **SIZES)


def other_order(tensors, config):
    tensors[f"{Q_PROJ}.g_idx"] = np.roll(tensors[f"{Q_PROJ}.g_idx"], 1)


def other_scale(tensors, config):
    tensors[f"{Q_PROJ}.input_scale"] = 2 * tensors[f"{Q_PROJ}.input_scale"]


@pytest.mark.parametrize(
    ("name", "change"), [("gptq-sym-g128-actorder", other_order), ("ct-w8a8-static-asym", other_scale)]
)
def test_fused_layers_whose_inputs_differ_are_held_apart(name, change, tmp_path):
    def wider(tensors, config):  # a group is all there is of 128 inputs
        if name.startswith("gptq"):
            config["quantization_config"]["group_size"] = 64
            for end in ("scales", "qzeros"):
                for key in [one for one in tensors if one.endswith(end)]:
                    tensors[key] = np.repeat(tensors[key], 2, axis=0)
            for key in [one for one in tensors if one.endswith("g_idx")]:
                tensors[key] = (
                    np.argsort(np.random.default_rng(0).random(len(tensors[key]))).astype(np.int32) // 64
                )
        change(tensors, config)

    folder = folder_of(name, tmp_path, wider)
    config, held, _ = held_params(folder)
    fused = held["layers.0.self_attn.qkv_proj.weight"]
    assert isinstance(fused, Fused)
    assert not isinstance(held["layers.1.self_attn.qkv_proj.weight"], Fused)
    if name.startswith("gptq"):
        dense = load_params(folder, config, "float32")
        tokens = jnp.array([ORACLES[name]["prompts"][0]])
        found, expected = (F.logits(params, config, tokens) for params in (held, dense))
        np.testing.assert_allclose(found, expected, atol=1e-4)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(folder, **SIZES) as llm:
        first = llm.generate([ORACLES[name]["prompts"][0]], params, use_tqdm=False)[0].outputs[0].token_ids[0]
    logits = F.logits(held, config, jnp.array([ORACLES[name]["prompts"][0]]))[0, -1]
    assert first == int(logits.argmax())


def scale_of_zero(tensors, config):
    tensors[f"{Q_PROJ}.input_scale"] = np.zeros_like(tensors[f"{Q_PROJ}.input_scale"])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ct-w4a16-asym", "weight_zero_point", rf"missing .*{Q_PROJ}.weight_zero_point"),
        ("ct-w8a8-static-asym", "input_zero_point", rf"missing .*{Q_PROJ}.input_zero_point"),
        ("ct-w8a8-static-asym", "input_scale", rf"missing .*{Q_PROJ}.input_scale"),
        ("gptq-sym-g128-actorder", "g_idx", rf"missing .*{Q_PROJ}.g_idx"),
        ("ct-w8a8-static-asym", scale_of_zero, "input_scale is 0.0, and must be above 0"),
    ],
)
def test_what_its_configuration_asks_for_has_to_be_there(name, change, message, tmp_path):
    if isinstance(change, str):
        end = change

        def change(tensors, config):
            del tensors[f"{Q_PROJ}.{end}"]

    folder = folder_of(name, tmp_path, change)
    with pytest.raises(WeightsError, match=message):
        held_params(folder)


def test_scales_that_codes_make_infinite_are_refused(tmp_path):
    def change(tensors, config):
        name = f"{Q_PROJ}.weight_scale"
        tensors[name] = np.full(tensors[name].shape, 3e38, np.float32)

    with pytest.raises(WeightsError, match="numbers that are not finite"):
        held_params(folder_of("ct-w8a16", tmp_path, change))


def test_stored_scales_of_inputs_are_of_no_other_weights(tmp_path):
    folder = folder_of("ct-w8a8-static-asym", tmp_path)
    with (
        LLM(folder, **SIZES) as llm,
        pytest.raises(WeightsError, match="round their inputs by scales of the"),
    ):
        llm.update_weights(load_params(folder, llm.model_config, "float32"))


def test_weights_of_codes_are_not_taken_for_numbers(tmp_path):
    folder = folder_of("ct-w8a16", tmp_path)
    _, held, _ = held_params(folder)
    with pytest.raises(WeightsError, match=r"is of codes: pass numbers, as load_params\(folder, config\)"):
        LLM(folder, params=held, **SIZES)


def test_four_bits_by_rounded_inputs_keep_their_codes_and_are_told(tmp_path, caplog):
    def change(tensors, config):
        inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
        config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = inputs

    with caplog.at_level(logging.WARNING):
        _, _, formats = held_params(folder_of("ct-w4a16-asym", tmp_path, change))
    assert {one.kind for _, one in formats.others} == {"int4"}
    assert "inputs of layers are not quantised here" in caplog.text


# Arithmetic


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_are_unpacked_low_bits_first(bits):
    codes = np.random.default_rng(0).integers(0, 1 << bits, (3, 64))
    words = np.zeros((3, 64 * bits // 32), np.uint64)
    for row, column in np.ndindex(codes.shape):
        words[row, column * bits // 32] |= np.uint64(int(codes[row, column]) << (column * bits % 32))
    words = words.astype(np.uint32).view(np.int32)
    assert (unpack(words, bits, 1) == codes).all()
    assert (unpack(words.T, bits, 0) == codes.T).all()


def compressed(weights, form, **rest):
    group = {"format": form, "targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", **weights}}
    return {"quant_method": "compressed-tensors", "config_groups": {"a": group | rest}, "ignore": ["lm_head"]}


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group", "block"])
def test_scales_by_tensor_row_group_and_block(strategy):
    """Each entry is its code less its zero point, times its scale; computed entry by entry."""
    out, width = 6, 8
    rng = np.random.default_rng(1)
    shape, at = {
        "tensor": ((1,), lambda i, j: (0,)),
        "channel": ((out, 1), lambda i, j: (i, 0)),
        "group": ((out, 2), lambda i, j: (i, j // 4)),
        "block": ((2, 3), lambda i, j: (i // 4, j // 3)),
    }[strategy]
    said = {"strategy": strategy, "group_size": 4, "block_structure": [4, 3]}
    layout = read_quantisation(compressed(said, "int-quantized")).layout_of("a.b")
    arrays = {
        "weight": rng.integers(-128, 128, (out, width)).astype(np.int8),
        "weight_scale": rng.random(shape).astype(ml_dtypes.bfloat16),
        "weight_zero_point": rng.integers(-9, 9, shape).astype(np.int8),
    }
    assert layout.check("a.b", {name: array.shape for name, array in arrays.items()}, {}) == (out, width)
    found = layout.dequantise(arrays, out, width)
    for i, j in np.ndindex(out, width):
        scale, zero = (arrays[name][at(i, j)] for name in ("weight_scale", "weight_zero_point"))
        assert found[i, j] == pytest.approx(
            (int(arrays["weight"][i, j]) - int(zero)) * float(scale), rel=1e-6
        )


def test_groups_of_layers_have_layouts_of_their_own():
    said = compressed({"strategy": "channel"}, "int-quantized")
    said["config_groups"]["b"] = {
        "format": "pack-quantized",
        "targets": ["re:.*down_proj$", "model.layers.1.mlp.up_proj"],
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    }
    said["ignore"] = ["lm_head", "re:.*k_proj"]
    found = read_quantisation(said)
    names = {
        "model.layers.0.mlp.down_proj": "pack-quantized",
        "model.layers.1.mlp.up_proj": "pack-quantized",
        "model.layers.0.mlp.up_proj": "int-quantized",
    }
    assert {module: found.layout_of(module).name for module in names} == names
    assert found.layout_of("lm_head") is found.layout_of("model.layers.3.self_attn.k_proj") is None


def of_group(*targets):
    """What is said of weights of 4 bits in layers by these names."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    return {"format": "pack-quantized", "targets": [*targets], "weights": weights}


@pytest.mark.parametrize(
    ("target", "those"),
    [
        ("re:.*self_attn.qkv_proj", {"q_proj", "k_proj", "v_proj"}),
        ("re:.*gate_up_proj$", {"gate_proj", "up_proj"}),
        ("model.layers.0.mlp.gate_up_proj", {"gate_proj", "up_proj"}),
        ("re:.*v_proj", {"v_proj"}),  # as qkv_proj ends, too, which nobody named
        ("re:.*up_proj", {"up_proj"}),
    ],
)
def test_targets_may_name_the_layers_that_engines_multiply_as_one(target, those):
    said = compressed({"strategy": "channel"}, "int-quantized")
    said["config_groups"]["b"] = of_group(target)
    found = read_quantisation(said)
    names = {
        **{one: f"model.layers.0.self_attn.{one}" for one in ("q_proj", "k_proj", "v_proj", "o_proj")},
        **{one: f"model.layers.0.mlp.{one}" for one in ("gate_proj", "up_proj", "down_proj")},
    }
    packed = {one for one, module in names.items() if found.layout_of(module).name == "pack-quantized"}
    assert packed == those
    said = compressed({}, "int-quantized") | {"ignore": [target]}
    ignored = {one for one, module in names.items() if read_quantisation(said).layout_of(module) is None}
    assert ignored == those


def test_a_class_of_layers_is_named_in_any_case():
    said = {"quant_method": "compressed_tensors", "config_groups": {"a": of_group("linear")}}
    assert read_quantisation(said).layout_of("a.b").name == "pack-quantized"


@pytest.mark.parametrize("nested", [False, True])
def test_a_config_may_be_called_as_older_llm_compressor_did(nested, tmp_path):
    def change(tensors, config):
        said = config.pop("quantization_config")
        if nested:
            said = {
                "quant_method": said.pop("quant_method"),
                "quantization_config": said,
                "sparsity_config": {},
            }
        config["compression_config"] = said

    whole = folder_of("ct-w4a16-asym", tmp_path / "whole")
    other = folder_of("ct-w4a16-asym", tmp_path / "other", change)
    same_weights(whole, other)
    convert_checkpoint(other, tmp_path / "orbax", "float32")
    assert "compression_config" not in read_hf_config(tmp_path / "orbax")


def test_awq_may_be_said_in_autoawqs_words(tmp_path):
    def change(tensors, config):
        said = config["quantization_config"]
        said |= {"w_bit": said.pop("bits"), "q_group_size": said.pop("group_size"), "version": "GEMM"}

    whole = folder_of("awq-gemm-g128", tmp_path / "whole")
    same_weights(whole, folder_of("awq-gemm-g128", tmp_path / "other", change))
    with pytest.raises(UnsupportedModelError, match="bits=4 and w_bit=8"):
        read_quantisation({"quant_method": "awq", "bits": 4, "w_bit": 8, "group_size": 128})


@pytest.mark.parametrize(
    ("name", "file"), [("awq-gemm-g128", "quant_config.json"), ("gptq-asym-g64", "quantize_config.json")]
)
def test_older_writers_say_it_in_a_file_of_its_own(name, file, tmp_path):
    whole, other = (folder_of(name, tmp_path / part) for part in ("whole", "other"))
    config = json.loads((other / "config.json").read_text())
    said = config.pop("quantization_config")
    del said["quant_method"]
    (other / file).write_text(json.dumps(said))
    (other / "config.json").write_text(json.dumps(config))
    same_weights(whole, other)


def same_weights(*folders):
    one, other = (
        load_params(folder, config_from_dict(read_hf_config(folder)), "float32") for folder in folders
    )
    assert one.keys() == other.keys()
    assert all((one[name] == other[name]).all() for name in one)


def test_gptqs_second_version_stores_zero_points_as_they_are():
    rng = np.random.default_rng(2)
    first, second, symmetric = (
        read_quantisation(
            {"quant_method": "gptq", "bits": 4, "group_size": 8, "checkpoint_format": form, "sym": sym}
        ).layout_of("a")
        for form, sym in (("gptq", False), ("gptq_v2", False), ("gptq", True))
    )
    arrays = {
        "qweight": rng.integers(-(2**31), 2**31, (2, 8)).astype(np.int32),
        "qzeros": np.full((2, 1), 0x77777777, np.int32),
        "scales": np.ones((2, 8), np.float16),
    }
    assert (second.dequantise(arrays, 8, 16) == first.dequantise(arrays, 8, 16) + 1).all()
    assert (first.dequantise(arrays, 8, 16) == symmetric.dequantise(arrays, 8, 16)).all()
    other = arrays | {"qzeros": np.full((2, 1), -0x77777778, np.int32)}  # 8 for a zero of 8, as some write
    assert (symmetric.dequantise(other, 8, 16) == symmetric.dequantise(arrays, 8, 16)).all()


@pytest.mark.parametrize(
    ("said", "added"),
    [
        ({"sym": True}, None),  # zero points that are not the middle are taken as they are
        ({}, None),
        ({"format": "gptq_v2", "checkpoint_format": None}, 1),
        ({"format": "gptq_v2", "checkpoint_format": "gptq_v2"}, 1),
    ],
)
def test_gptqs_zero_points_are_those_that_are_stored(said, added, tmp_path):
    """Whatever else is said of them: of the same weights in every wording."""

    def change(tensors, config):
        config["quantization_config"].pop("sym", None)
        config["quantization_config"] |= said
        for name in tensors:
            if added and name.endswith(".qzeros"):
                zeros = unpack(tensors[name], 4, 1) + added
                shifted = zeros.astype(np.uint32) << (4 * np.arange(zeros.shape[1], dtype=np.uint32) % 32)
                words = shifted.reshape(len(zeros), -1, 8).sum(-1).astype(np.uint32)
                tensors[name] = words.view(np.int32)

    assert_same_weights("gptq-asym-g64", tmp_path, change)


def test_an_order_of_minus_ones_is_none(tmp_path):
    def change(tensors, config):
        tensors[f"{Q_PROJ}.weight_g_idx"] = np.full(128, -1, np.int32)

    assert_same_weights("ct-w4a16-asym", tmp_path, change)


def test_fp8_by_tensor_has_either_name_of_its_scale(tmp_path):
    """As vLLM writes it, and as transformers does, beside scales of activations."""
    scales = np.random.default_rng(3).random(100).astype(np.float32)
    loaded = []
    for number, end in enumerate(("weight_scale", "weight_scale_inv")):

        def change(tensors, config, end=end):
            config["quantization_config"] |= {"weight_block_size": None}
            for place, name in enumerate([one for one in tensors if one.endswith(".weight_scale_inv")]):
                del tensors[name]
                module = name.rpartition(".")[0]
                tensors[f"{module}.{end}"] = scales[place].reshape(())
                tensors[f"{module}.activation_scale"] = np.ones((), np.float32)

        (tmp_path / str(number)).mkdir()
        folder = folder_of("fp8-block-qwen", tmp_path / str(number), change)
        loaded.append(load_params(folder, config_from_dict(read_hf_config(folder)), "float32"))
    for name, array in loaded[0].items():
        assert (np.asarray(array) == np.asarray(loaded[1][name])).all()


def test_two_names_of_one_scale_are_one_too_many(tmp_path):
    def change(tensors, config):
        tensors[f"{Q_PROJ}.weight_scale"] = 2 * tensors[f"{Q_PROJ}.weight_scale_inv"]

    folder = folder_of("fp8-block-qwen", tmp_path, change)
    with pytest.raises(WeightsError, match=r"q_proj.weight_scale_inv is there beside .*q_proj.weight_scale"):
        load_params(folder, config_from_dict(read_hf_config(folder)), "float32")


def test_a_group_size_alone_says_that_there_are_groups():
    layout = read_quantisation(compressed({"group_size": 4}, "int-quantized")).layout_of("a.b")
    shapes = {"weight": (6, 8), "weight_scale": (6, 2)}
    assert layout.check("a.b", shapes, {"weight": "I8", "weight_scale": "BF16"}) == (6, 8)


# What is not whole, or not known


def drop(name):
    return lambda tensors, config: tensors.pop(name)


def cut(name):
    return lambda tensors, config: tensors.update({name: tensors[name][:1]})


def ignore(tensors, config):
    config["quantization_config"]["ignore"].append(Q_PROJ)


def double(tensors, config):
    tensors[f"{Q_PROJ}.weight"] = np.zeros((128, 128), np.float32)


def infinite(tensors, config):
    tensors[f"{Q_PROJ}.weight_scale"] = np.full_like(tensors[f"{Q_PROJ}.weight_scale"], np.nan)


def bias(tensors, config):
    tensors[f"{Q_PROJ}.bias"] = np.eye(1, 128, dtype=np.float16)[0]


def order(tensors, config):
    ordered(tensors, config)
    for name in [name for name in tensors if name.endswith(".weight_shape")]:
        width = int(tensors[name][1])
        tensors[name.replace("shape", "g_idx")] = np.full(width, int(Q_PROJ in name), np.int32)


def other_kind(tensors, config):
    tensors[f"{Q_PROJ}.weight_packed"] = tensors[f"{Q_PROJ}.weight_packed"].astype(np.float32)


def stray(tensors, config):
    tensors[f"{Q_PROJ}.qzeros"] = np.zeros((1, 1), np.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            drop(f"{Q_PROJ}.weight_scale"),
            rf"missing of a .* layout pack-quantized: {Q_PROJ}.weight_scale",
        ),
        (drop(f"{Q_PROJ}.weight_packed"), rf"pack-quantized: {Q_PROJ}.weight_packed"),
        (cut(f"{Q_PROJ}.weight_scale"), rf"{Q_PROJ}.weight_scale is \[1, 1\], expected \[128, 1\]"),
        (cut(f"{Q_PROJ}.weight_zero_point"), rf"{Q_PROJ}.weight_zero_point is \[1, 1\], expected \[16, 1\]"),
        (cut(f"{Q_PROJ}.weight_packed"), rf"{Q_PROJ}.weight_packed is \[1, 16\], expected \[128, 16\]"),
        (ignore, rf"{Q_PROJ}.weight_packed.*: quantization_config says nothing of {Q_PROJ}"),
        (double, rf"{Q_PROJ}.weight is there beside {Q_PROJ}.weight_packed"),
        (infinite, rf"{Q_PROJ}.weight: its scales give numbers that are not finite"),
        (bias, rf"unexpected: {Q_PROJ}.bias"),
        (order, rf"{Q_PROJ}.weight: .*groups of inputs go from 1 to 1, and there are 1"),
        (other_kind, rf"{Q_PROJ}.weight_packed is F32, expected I32"),
        (stray, rf"unexpected: {Q_PROJ}.qzeros"),
    ],
)
def test_arrays_that_are_missing_or_wrong_are_named(change, message, tmp_path):
    folder = folder_of("ct-w4a16-asym", tmp_path, change)
    with pytest.raises(WeightsError, match=message):
        load_params(folder, config_from_dict(read_hf_config(folder)), "float32")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "'bitsandbytes', and compressed-tensors, fp8",
        ),
        ({"quant_method": "gtpq"}, "did you mean gptq"),
        ("gptq", "must be an object"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, r"bits=3 \(2, 4, 8 are read\); take a"),
        (GPTQ | {"checkpoint_format": "marlin"}, "'marlin'"),
        (
            GPTQ | {"dynamic": {"-:.*k": {}}},
            "other bits for some",
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version=gemm, gemv"),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}},
            "Int4Weight",
        ),
        (GPTQ | {"sym": "false"}, "sym='false'"),
        (GPTQ | {"format": "gptq", "checkpoint_format": "gptq_v2"}, "format 'gptq"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "format": "gemv"}, "version=gemm, gemv"),
        (
            compressed({}, "int-quantized") | {"ignore": ["re:*lm_head"]},
            r"re:\*lm_head.* is no regular",
        ),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"blocks of \[0, 128\]"),
        (compressed({}, "marlin-24"), "the format 'marlin-24'"),
        (compressed({"num_bits": 3}, "pack-quantized"), "num_bits=3"),
        (
            compressed({}, "int-quantized") | {"sparsity_config": {"format": "sparse-bitmask"}},
            "sparsity_config",
        ),
        (compressed({}, "int-quantized") | {"transform_config": {"config_groups": {}}}, "transform_config"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups"),
        (
            GPTQ | {"modules_to_not_convert": "x"},
            "expected names",
        ),
        *((GPTQ | {"group_size": size}, f"group_size={size}: expected a num") for size in (0, -2, True)),
        (GPTQ | {"group_size": None}, "says no group_size: -1 is all"),
        (GPTQ | {"desc_act": "false"}, "desc_act='false': expected true or false"),
        (GPTQ | {"checkpoint_format": ["gptq"]}, r"format \['gptq'\]"),
        ({"quant_method": "awq", "bits": 4, "group_size": 0}, "group_size=0: expected a number"),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": "no"},
            "zero_point='no': expected true",
        ),
        ({"quant_method": "fp8", "weight_block_size": [True, 128]}, r"\[True, 128\]: .*such as \[128, 128\]"),
        ({"quant_method": "fp8", "weight_block_size": "128"}, r"'128': .*such as \[128, 128\]"),
        ({"quant_method": "fp8", "activation_scheme": "tensor"}, "activation_scheme='tensor'"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": []}}}, "of torchao, Float8"),
        (compressed({"group_size": "128"}, "pack-quantized"), "group_size='128': expected a number"),
        (compressed({"strategy": "token"}, "int-quantized"), "strategy 'token'"),
        (compressed({"type": "bfloat"}, "int-quantized"), "type 'bfloat'"),
        (compressed({"symmetric": "true"}, "int-quantized"), "symmetric='true': expected true or false"),
        (compressed({"actorder": "grouped"}, "pack-quantized"), "actorder='grouped'"),
        (compressed({"actorder": "group"}, "int-quantized"), "'int-quantized' and actorder='group'"),
        (compressed({"type": "float", "num_bits": 8}, "nvfp4-pack-quantized"), r"num_bits=8 \(4 are"),
        (
            compressed({"type": "float", "group_size": 64, "num_bits": 4}, "mxfp4-pack-quantized"),
            r"group_size=64 \(32 are",
        ),
        (compressed({"num_bits": 4}, "mxfp4-pack-quantized"), "'mxfp4-pack-quantized' of type 'int'"),
        (compressed({}, "int-quantized", input_activations=["int8"]), r"input_activations=\['int8'\]"),
        (compressed({}, "int-quantized", targets=[]), "a group without targets"),
        (compressed({}, "int-quantized") | {"sparsity_config": "2:4"}, "sparsity_config='2:4'"),
        ({"quant_method": "bitsandbytes"}, r"in 16 bits, or make one .*dequantize\(\)"),
        ({"quant_method": "gguf"}, "in 16 bits, or make one .*gguf_file=name"),
        ({"quant_method": "quanto"}, "or in 16 bits$"),
    ],
)
def test_what_is_not_read_is_refused_by_name(said, message):
    values = ORACLES["ct-w4a16-asym"]["config"] | {"quantization_config": said}
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_dict(values)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("ct-mxfp4a16", "weight_scale", "weight_scale is F32, expected U8 or F8_E8M0"),
        ("ct-mxfp8a16", "weight_scale", "weight_scale is F32, expected U8 or F8_E8M0"),
        ("gptq-asym-g64", "qweight", "qweight is F32, expected I32"),
        ("fp8-block-qwen", "weight", "weight is F32, expected F8_E4M3 or F8_E5M2 beside"),
    ],
)
def test_arrays_of_other_dtypes_are_refused(name, array, message, tmp_path):
    def change(tensors, config):
        tensors[f"{Q_PROJ}.{array}"] = tensors[f"{Q_PROJ}.{array}"].astype(np.float32)

    folder = folder_of(name, tmp_path, change)
    with pytest.raises(WeightsError, match=message):
        load_params(folder, config_from_dict(read_hf_config(folder)), "float32")


def test_an_override_cannot_say_how_weights_lie():
    for said in (GPTQ, None):
        with pytest.raises(ConfigError, match="quantization_config, which says how the files' weights lie"):
            config_from_dict(ORACLES["awq-gemm-g128"]["config"], {"quantization_config": said})


def test_what_is_not_quantised_here_is_said(tmp_path, caplog):
    """Activations and KV of a checkpoint, whose scales are there and are not used."""

    def change(tensors, config):
        group = config["quantization_config"]["config_groups"]["group_0"]
        group["input_activations"] = {"num_bits": 8, "dynamic": True}
        config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8}
        tensors["model.layers.0.self_attn.k_scale"] = np.ones(1, np.float32)
        tensors[f"{Q_PROJ}.input_scale"] = np.ones(1, np.float32)

    assert_same_weights("ct-w4a16-asym", tmp_path, change)
    said = [record.getMessage() for record in caplog.records]
    assert any("inputs of layers are not quantised here" in line for line in said)
    assert any("KV is stored in the model's dtype" in line for line in said)


def torchao(kind, **data):
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": data}}}


INT8_BY_INT8, FP8_BY_FP8 = (
    "Int8DynamicActivationInt8WeightConfig",
    "Float8DynamicActivationFloat8WeightConfig",
)
BY_ROW, BY_TENSOR = ({"_type": kind, "_data": {}} for kind in ("PerRow", "PerTensor"))
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    ("said", "rounds"),
    [
        (torchao(INT8_BY_INT8), "int8"),
        (torchao(INT8_BY_INT8, act_mapping_type={"_data": "SYMMETRIC"}, granularity=BY_ROW), "int8"),
        (torchao(INT8_BY_INT8, act_mapping_type={"_data": "ASYMMETRIC"}), ""),
        (torchao(INT8_BY_INT8, granularity=[BY_TENSOR, BY_ROW]), ""),
        (torchao(INT8_BY_INT8, reduce_range=True), ""),
        (torchao(FP8_BY_FP8, granularity=[BY_ROW, BY_ROW]), "fp8"),
        (torchao(FP8_BY_FP8, granularity=[BY_TENSOR, BY_TENSOR]), ""),
        (torchao(FP8_BY_FP8), ""),
        ({"quant_method": "fp8"}, ""),
        ({"quant_method": "fbgemm_fp8"}, ""),
        (compressed({"type": "float"}, "float-quantized", input_activations=STATIC), "fp8_static"),
        (
            compressed({"type": "float"}, "float-quantized", input_activations=STATIC | {"symmetric": False}),
            "",
        ),
    ],
)
def test_inputs_are_rounded_as_it_is_said_or_that_is_told(said, rounds):
    found = read_quantisation(said)
    assert found.layout_of("a.b").rounds == rounds
    assert bool(found.notes) == (not rounds)


def test_outputs_that_are_not_rounded_are_told():
    said = compressed({"strategy": "channel"}, "int-quantized", output_activations=STATIC)
    said["config_groups"]["b"] = said["config_groups"]["a"] | {"targets": ["q_proj"]}
    (note,) = read_quantisation(said).notes
    assert "outputs of layers are not quantised here" in note


def test_blocks_may_be_words():
    weights = {"strategy": "block", "type": "float", "block_structure": "4x3"}
    layout = read_quantisation(compressed(weights, "float-quantized")).layout_of("a.b")
    assert layout.check("a.b", {"weight": (6, 8), "weight_scale": (2, 3)}, {}) == (6, 8)


def zero_point(*values):
    return lambda tensors, config: tensors.update({f"{Q_PROJ}.input_zero_point": np.array(values, np.int32)})


def input_scales(tensors, config):
    tensors[f"{Q_PROJ}.input_scale"] = np.ones(2, np.float32)


def no_zero(tensors, config):
    weights_of(config)["symmetric"] = False
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        bad = np.nan if Q_PROJ in name else 0
        tensors[name.replace("scale", "zero_point")] = np.full(tensors[name].shape, bad, np.float32)


def weights_of(config):
    return config["quantization_config"]["config_groups"]["group_0"]["weights"]


def codes_of_int8(tensors, config):
    tensors[f"{Q_PROJ}.weight"] = tensors[f"{Q_PROJ}.weight"].view(np.int8)


def ordered(tensors, config):
    weights_of(config)["actorder"] = "group"


def other_shape(tensors, config):
    tensors[f"{Q_PROJ}.weight_shape"] = np.array([128, 120])


def shape_of_floats(tensors, config):
    tensors[f"{Q_PROJ}.weight_shape"] = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ct-w8a8-static-asym", drop(f"{Q_PROJ}.input_scale"), rf"missing .*{Q_PROJ}.input_scale"),
        ("ct-w8a8-static-asym", input_scales, rf"{Q_PROJ}.input_scale is \[2\], expected \[\] or \[1\]"),
        ("ct-w8a8-static-asym", zero_point(1, 2), rf"{Q_PROJ}.input_zero_point is \[2\], expected"),
        ("ct-w8a8-static-asym", zero_point(300), r"input_zero_point is 300.0, and must lie in \[-128, 127\]"),
        ("ct-w8a8-static-asym", no_zero, rf"{Q_PROJ}.weight: its scales give numbers that are not finite"),
        ("ct-w8a8-static-asym", cut(f"{Q_PROJ}.weight_scale"), r"is \[1, 1\], expected \[128\] or"),
        ("ct-fp8-dynamic", codes_of_int8, rf"{Q_PROJ}.weight is I8, expected F8_E4M3 or F8_E5M2"),
        ("ct-w4a16-asym", ordered, r"missing .*down_proj.weight_g_idx"),
        ("ct-w4a16-asym", other_shape, rf"{Q_PROJ}.weight_packed: groups of 128 do not divide its 120"),
        ("ct-w4a16-asym", shape_of_floats, rf"{Q_PROJ}.weight_shape is F32 .*expected two integers"),
        (
            "fp8-block-qwen",
            drop(f"{Q_PROJ}.weight_scale_inv"),
            r"weight_scale \(or weight_scale_inv\)",
        ),
    ],
)
def test_arrays_of_engines_that_are_missing_or_wrong_are_named(name, change, message, tmp_path):
    with pytest.raises(WeightsError, match=message):
        held_params(folder_of(name, tmp_path, change))


def beside(end, value, kind=np.float32, module=Q_PROJ, **said):
    """One more array, as what else is said may ask for."""

    def change(tensors, config):
        tensors[f"{module}.{end}"] = np.asarray(value, kind)
        config["quantization_config"] |= said

    return change


def numbers(tensors, config):
    """A layer that is not quantised, with a scale of inputs."""
    del tensors[f"{Q_PROJ}.weight_scale"]
    tensors[f"{Q_PROJ}.weight"] = tensors[f"{Q_PROJ}.weight"].astype(np.float32)
    tensors[f"{Q_PROJ}.input_scale"] = np.full(1, 0.5, np.float32)
    config["quantization_config"]["ignore"].append(Q_PROJ)


def symmetric(tensors, config):
    weights_of(config)["symmetric"] = True


def symmetric_inputs(tensors, config):
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"]["symmetric"] = True


def activations(end, **said):
    """A stored scale of activations that are not rounded here, as a group of layers says."""

    def change(tensors, config):
        tensors[f"{Q_PROJ}.{end}"] = np.full(1, 0.5, np.float32)
        config["quantization_config"]["config_groups"]["group_0"] |= said

    return change


NVFP4_INPUTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "dynamic": "local"}
STATIC_INT8 = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
BACKWARDS = np.arange(127, -1, -1) // 64
K_SCALE = {"module": "model.layers.0.self_attn"}


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("ct-w4a16-asym", symmetric, "down_proj.weight_zero_point, .*q_proj.weight_zero_point"),
        ("ct-w4a16-asym", beside("weight_g_idx", BACKWARDS, np.int32), f"{Q_PROJ}.weight_g_idx"),
        ("ct-w4a16-asym", beside("g_idx", np.arange(128) // 128, np.int32, "lm_head"), "lm_head.g_idx"),
        ("ct-w4a16-asym", beside("input_scale", [0.5]), f"{Q_PROJ}.input_scale"),
        ("ct-w4a16-asym", beside("output_scale", [np.nan]), f"{Q_PROJ}.output_scale"),
        ("ct-w4a16-asym", beside("k_scale", [0.5], **K_SCALE), r"layers.0.self_attn.k_scale"),
        ("ct-fp8-dynamic", beside("kv_scale", 0.5, **K_SCALE), r"layers.0.self_attn.kv_scale"),
        ("ct-w8a8-int8-dynamic-127", beside("input_scale", [0.5]), f"{Q_PROJ}.input_scale"),
        (
            "ct-w8a8-int8-dynamic-127",
            beside("weight_zero_point", np.eye(128, 1), np.int8),
            f"{Q_PROJ}.weight_zero_point",
        ),
        ("ct-w8a8-int8-dynamic-127", numbers, f"{Q_PROJ}.input_scale"),
        ("ct-w8a8-static-asym", symmetric_inputs, "down_proj.input_zero_point"),
        ("ct-mxfp8a16", beside("weight_zero_point", [[1]], np.int8), f"{Q_PROJ}.weight_zero_point"),
        ("fp8-block-qwen", beside("input_scale", 0.5), f"{Q_PROJ}.input_scale"),
        ("fp8-block-qwen", beside("weight_zero_point", [[1.0]]), f"{Q_PROJ}.weight_zero_point"),
        ("fp8-block-qwen", beside("k_scale", 0.5, **K_SCALE), "layers.0.self_attn.k_scale"),
        ("awq-gemm-g128", beside("g_idx", BACKWARDS, np.int32), f"{Q_PROJ}.g_idx"),
        (
            "gptq-sym-g128-actorder",
            lambda tensors, config: config["quantization_config"].update(desc_act=False),
            "layers.0.mlp.down_proj.g_idx, ",
        ),
    ],
)
def test_arrays_that_nothing_asks_for_are_named(name, change, named, tmp_path):
    with pytest.raises(WeightsError, match=rf"{named}.*: quantization_config asks for none, and they would"):
        held_params(folder_of(name, tmp_path, change))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ct-fp8-dynamic", beside("k_scale", 1, **K_SCALE)),
        ("ct-w8a8-int8-dynamic-127", beside("input_scale", [1])),
        ("ct-w8a8-int8-dynamic-127", beside("weight_zero_point", np.zeros((128, 1)), np.int8)),
        ("ct-w8a16", beside("weight_zero_point", np.zeros((128, 1)), np.int8)),
        ("ct-w8a16", beside("weight_zero_point", np.full((32, 1), -0x7F7F7F80), np.int32)),
        ("ct-w4a16-asym", beside("weight_g_idx", np.zeros(128), np.int32)),
        ("awq-gemm-g128", beside("g_idx", np.zeros(128), np.int32)),
        ("ct-nvfp4a16", activations("input_global_scale", input_activations=NVFP4_INPUTS)),
        ("ct-w4a16-asym", activations("output_scale", output_activations=STATIC_INT8)),
        ("fp8-block-qwen", beside("input_scale", 0.5, activation_scheme="static")),
        ("fp8-block-qwen", beside("k_scale", 0.5, kv_cache_scheme="static", **K_SCALE)),
    ],
)
def test_arrays_that_say_nothing_or_are_asked_for_change_nothing(name, change, tmp_path):
    assert_same_weights(name, tmp_path, change)


def test_fbgemms_bounds_of_scales_are_read_past(tmp_path):
    """Beside each of its weights, whose inputs are not rounded here."""

    def change(tensors, config):
        config["quantization_config"] = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}
        for name in [name for name in tensors if name.endswith(".weight_scale_inv")]:
            module = name.removesuffix(".weight_scale_inv")
            scale = tensors.pop(name)[0, 0]
            tensors[f"{module}.weight_scale"] = np.full((len(tensors[f"{module}.weight"]), 1), scale)
            tensors[f"{module}.input_scale_ub"] = np.full(1, 1200, np.float32)

    held_params(folder_of("fp8-block-qwen", tmp_path, change))


@pytest.mark.parametrize("scale", [-1, 0, np.nan, np.inf])
def test_scales_of_whole_weights_are_above_nothing(scale, tmp_path):
    change = beside("weight_global_scale", [scale])
    with pytest.raises(WeightsError, match=rf"{Q_PROJ}.*global_scale is {float(scale)}, and must be above 0"):
        held_params(folder_of("ct-nvfp4a16", tmp_path, change))


def wider_scale(tensors, config):
    tensors[f"{Q_PROJ}.weight_scale_inv"] = np.ones((2, 1), np.float32)


def test_an_array_is_named_as_it_is_stored(tmp_path):
    with pytest.raises(WeightsError, match=rf"{Q_PROJ}.weight_scale_inv is \[2, 1\], expected \[1, 1\]"):
        held_params(folder_of("fp8-block-qwen", tmp_path, wider_scale))


def test_numbers_in_place_of_codes_are_told(tmp_path, caplog):
    """Unless the configuration says so."""
    said = "layers.0.self_attn.q_proj.weight and 0 more are numbers, which quantization_config does not say"
    for is_ignored in (False, True):

        def change(tensors, config, is_ignored=is_ignored):
            del tensors[f"{Q_PROJ}.weight_scale"]
            tensors[f"{Q_PROJ}.weight"] = tensors[f"{Q_PROJ}.weight"].astype(np.float32) / 99
            config["quantization_config"]["ignore"] += [Q_PROJ] if is_ignored else []

        caplog.clear()
        with caplog.at_level(logging.WARNING):
            held_params(folder_of("ct-w8a8-int8-dynamic-127", tmp_path / str(is_ignored), change))
        assert (said in caplog.text) != is_ignored


def test_random_weights_are_told_to_be_no_codes(tmp_path, caplog):
    folder = folder_of("ct-w8a16", tmp_path)
    with caplog.at_level(logging.WARNING), LLM(folder, load_format="dummy", **SIZES) as llm:
        assert not any(one.kind for _, one in llm.executor.config.formats.others)
    assert "random numbers, not codes as quantization_config says" in caplog.text


def test_what_is_not_done_is_said_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        held_params(folder_of("fp8-block-qwen", tmp_path))
    assert caplog.text.count("inputs of layers are not quantised here") == 1


def test_biases_of_zeros_are_none(tmp_path):
    def change(tensors, config):
        tensors[f"{Q_PROJ}.bias"] = np.zeros(128, np.float16)

    assert_same_weights("gptq-asym-g64", tmp_path, change)


def test_shards_may_part_a_weight_from_its_scales(tmp_path):
    """As writers do that cut files by bytes."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    folder_of("ct-w4a16-asym", whole)
    tensors = {}
    folder_of("ct-w4a16-asym", cut, lambda given, config: tensors.update(given))
    (cut / "model.safetensors").unlink()
    halves = [dict(list(tensors.items())[half::2]) for half in (0, 1)]
    index = {}
    for half, of_half in enumerate(halves):
        name = f"model-{half + 1}-of-2.safetensors"
        write(of_half, cut / name)
        index |= dict.fromkeys(of_half, name)
    (cut / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = config_from_dict(read_hf_config(cut))
    found, expected = (load_params(folder, config, "bfloat16") for folder in (cut, whole))
    for name, array in expected.items():
        assert (np.asarray(array) == np.asarray(found[name])).all()


def test_a_file_of_plain_weights_needs_no_config(tmp_path):
    """As before: what config.json says of quantisation is asked only where there is one."""
    common = load_file(DATA / "common.safetensors")
    save_file(common, tmp_path / "model.safetensors")
    config = config_from_dict(ORACLES["awq-gemm-g128"]["config"])
    with pytest.raises(WeightsError, match=r"missing: .*q_proj"):
        load_params(tmp_path, config, "float32")


def of_zero(tensors, config):
    with_kv_scales(tensors, config)
    tensors["model.layers.1.self_attn.k_scale"] = np.zeros(1, np.float32)


def of_nan(tensors, config):
    with_kv_scales(tensors, config)
    tensors["model.layers.0.self_attn.v_scale"] = np.full(1, np.nan, np.float32)


@pytest.mark.parametrize(
    ("change", "message"), [(of_zero, "layers.1.self_attn.k_scale is 0.0"), (of_nan, "is nan")]
)
def test_scales_of_kv_that_divide_by_nothing_are_named(change, message, tmp_path):
    folder = folder_of("ct-fp8-dynamic", tmp_path, change)
    with pytest.raises(WeightsError, match=f"{message}: keys and values are divided by it"):
        LLM(folder, **SIZES)


def test_a_plan_has_the_bytes_that_an_engine_holds(tmp_path):
    """Of every layout; and what rounds no inputs multiplies none of 8 bits."""
    for name in ORACLES:
        folder = folder_of(name, tmp_path / name)
        hf_config = read_hf_config(folder)
        config = config_from_dict(hf_config)
        formats = checkpoint_formats(folder, config, hf_config)
        params = abstract_params(config, "bfloat16", formats)
        held = sum(
            math.prod(array.shape) * array.dtype.itemsize
            for key, one in params.items()
            if "norm" not in key
            for array in jax.tree.leaves(one)
        )
        shape = load_shape(folder)
        assert shape.weight_bytes == pytest.approx(held, rel=2e-3), name
        has_rounded = any(one.rounds for _, one in formats.others)
        assert (shape.products != "bfloat16") == has_rounded, name
    with pytest.raises(
        ConfigError, match=r"quantization='int8' is for .* are quantised already: leave it out"
    ):
        load_shape(folder, quantization="int8")
    assert load_shape(folder, kv_cache_dtype="fp8").kv_dtype == "fp8_e4m3"


def test_a_draft_model_has_kv_of_the_engines_dtype(tmp_path):
    """Whatever its own checkpoint wants: so `kv_cache_memory` covers both pools."""
    folder = folder_of("ct-w8a16", tmp_path / "model")
    draft = folder_of("ct-fp8-dynamic", tmp_path / "draft", with_kv_scales)
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    sizes = {name: value for name, value in SIZES.items() if name != "num_gpu_blocks_override"}
    with LLM(folder, kv_cache_memory=2**18, speculative_config=speculative, **sizes) as llm:
        pools = [llm.executor._state.pool, llm.engine.scheduler.speculation.proposer._pool]
        assert {str(pool.dtype) for pool in pools} == {"float32"}
        assert 2**17 < sum(pool.nbytes for pool in pools) <= 2**18
