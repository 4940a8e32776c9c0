"""Quantised checkpoints of any size: made here, beside the numbers that their codes stand for."""

import json
import math
import tracemalloc

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from test_quantised_checkpoints import held_params, write

import jaxllm.functional as F
from jaxllm import LLM, SamplingParams
from jaxllm.errors import WeightsError
from jaxllm.loading.load import checkpoint_formats, iter_params, load_params
from jaxllm.models.coded_weights import Coded, CodedPanels
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.models.registry import abstract_params, linear_weights

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    **{"model_type": "llama", "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 1, "vocab_size": 96},
    **{"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 64, "hidden_act": "silu"},
    **{"tie_word_embeddings": False, "torch_dtype": "float32"},
}
SIZES = {"max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 8}
SIZES |= {"skip_tokenizer_init": True, "prefill_buckets": [16], "decode_buckets": [2]}
PROMPT = [5, 6, 7, 8, 9, 90, 3]


def linears(config):
    """Modules and the shapes of their weights."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    query, key = (config[f"num_{one}_heads"] * config["head_dim"] for one in ("attention", "key_value"))
    shapes = {"q": (query, width), "k": (key, width), "v": (key, width), "o": (width, query)}
    found = {f"self_attn.{name}_proj": shape for name, shape in shapes.items()}
    found |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    return {f"model.layers.0.{name}": shape for name, shape in found.items()}


def words(codes, bits, axis):
    """Codes in words of 32 bits along an axis, low bits first, the last one filled up."""
    codes = np.moveaxis(codes.astype(np.uint32), axis, -1)
    count = 32 // bits
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % count)])
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    found = (codes.reshape(*codes.shape[:-1], -1, count) << shifts).sum(-1).astype(np.uint32)
    return np.moveaxis(found.view(np.int32), -1, axis)


def grouped(rng, out, width, group, bits, zeros=None):
    """Codes, zeros, scales, the group of each input, and the numbers [out, width] of them."""
    codes = rng.integers(0, 1 << bits, (out, width))
    of_each = np.arange(width) // group
    zeros = rng.integers(*(zeros or (1, 1 << bits)), (out, of_each[-1] + 1))
    scales = (rng.random(zeros.shape) * 0.02 + 0.005).astype(ml_dtypes.bfloat16)
    numbers = (codes - zeros[:, of_each]) * scales[:, of_each].astype(np.float32)
    return codes, zeros, scales, of_each, numbers.astype(np.float32)


def compressed(bits, group):
    """A checkpoint of compressed-tensors in packed words; 0 inputs in a group for all."""
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = {"num_bits": bits, "type": "int", "symmetric": False, **strategy}
    groups = {"group_0": {"targets": ["Linear"], "format": "pack-quantized", "weights": weights}}
    said = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}

    def arrays(rng, out, width):
        codes, zeros, scales, _, numbers = grouped(rng, out, width, group or width, bits)
        stored = {"weight_packed": words(codes, bits, 1), "weight_scale": scales}
        stored["weight_zero_point"] = words(zeros, bits, 0)
        return stored | {"weight_shape": np.array([out, width])}, numbers

    return said, arrays


def gptq(group, *, zeros=None, **said):
    """One of GPTQ of the first version, as GPTQModel writes it: words of zero points less one in each."""
    said = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": False, **said}

    def arrays(rng, out, width):
        codes, offsets, scales, of_each, numbers = grouped(rng, out, width, group, 4, zeros)
        qzeros = words(offsets.T, 4, 1).view(np.uint32) - np.uint32(0x11111111)
        stored = {"qweight": words(codes.T, 4, 0), "qzeros": qzeros.view(np.int32)}
        return stored | {"scales": scales.T, "g_idx": of_each.astype(np.int32)}, numbers

    return said, arrays


def made(folder, kind, *, dtype=np.float32, change=lambda tensors, config: None, **sizes):
    """A quantised folder, and one of the numbers in it."""
    said, arrays = kind
    rng, config = np.random.default_rng(0), CONFIG | sizes
    width, layer = config["hidden_size"], "model.layers.0."
    rest = {f"{layer}{name}_layernorm.weight": np.ones(width) for name in ("input", "post_attention")}
    rest |= {"model.norm.weight": np.ones(width)}
    for name in ("model.embed_tokens", "lm_head"):
        rest[f"{name}.weight"] = rng.standard_normal((config["vocab_size"], width)) / 2
    stored = {name: one.astype(dtype) for name, one in rest.items()}
    plain = {name: one.astype(np.float32) for name, one in stored.items()}
    for module, shape in linears(config).items():
        of_module, plain[f"{module}.weight"] = arrays(rng, *shape)
        stored |= {f"{module}.{end}": one for end, one in of_module.items()}
    folders = folder / "quantised", folder / "plain"
    said = json.loads(json.dumps(config | {"quantization_config": said}))
    change(stored, said)
    for one, tensors, values in zip(folders, (stored, plain), (said, config), strict=True):
        one.mkdir(parents=True)
        write(tensors, one / "model.safetensors")
        (one / "config.json").write_text(json.dumps(values))
    return folders


def assert_same(quantised, plain):
    """The weights exactly, as numbers; the logits of codes; an engine's tokens and their probability."""
    config, held, formats = held_params(quantised)
    dense, expected = load_params(quantised, config, "float32"), load_params(plain, config, "float32")
    for name, array in expected.items():
        np.testing.assert_array_equal(dense[name], array, err_msg=name)
    for name, struct in abstract_params(config, "float32", formats).items():
        assert [one.shape for one in (struct, held[name])] == [expected[name].shape] * 2
    logits = [F.logits(params, config, jnp.array([PROMPT])) for params in (held, expected)]
    np.testing.assert_allclose(*logits, atol=1e-4)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)
    found = []
    for folder, dtype in ((quantised, "auto"), (plain, "float32")):
        with LLM(folder, dtype=dtype, **SIZES) as llm:
            found.append(llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0])
            kinds = [type(llm.executor._params[name]) for name in linear_weights(config) if "layers" in name]
            if folder is quantised:
                of_quantised = kinds
    assert found[0].token_ids == found[1].token_ids
    assert math.isclose(found[0].cumulative_logprob, found[1].cumulative_logprob, abs_tol=1e-4)
    return of_quantised


@pytest.mark.parametrize(("bits", "group"), [(4, 8), (4, 2), (8, 4), (4, 64)])
def test_groups_may_be_small(bits, group, tmp_path):
    kinds = assert_same(*made(tmp_path, compressed(bits, group)))
    assert set(kinds) <= {Coded, CodedPanels}


def test_what_codes_stand_for_is_not_rounded_to_the_16_bits_beside_it(tmp_path):
    """Groups of two sizes, which become numbers as they are loaded."""
    assert_same(*made(tmp_path, gptq(128), dtype=ml_dtypes.bfloat16))


@pytest.mark.parametrize("has_order", [True, False])
def test_the_last_of_gptqs_groups_may_be_smaller(has_order, tmp_path):
    """Whether or not it is said which group each input is of."""

    def change(tensors, config):
        for name in [name for name in tensors if name.endswith("g_idx") and not has_order]:
            del tensors[name]

    assert_same(*made(tmp_path, gptq(128), change=change))


@pytest.mark.parametrize("zeros", [(0, 16), (0, 1)])
def test_zero_points_of_zero_have_borrowed_from_their_word(zeros, tmp_path):
    assert_same(*made(tmp_path, gptq(64, zeros=zeros)))


@pytest.mark.parametrize(("bits", "inner"), [(4, 100), (8, 102), (4, 103)])
def test_the_last_word_need_not_be_full(bits, inner, tmp_path):
    assert_same(*made(tmp_path, compressed(bits, 0), intermediate_size=inner))


def awq():
    said = {"quant_method": "awq", "bits": 4, "group_size": 128}

    def arrays(rng, out, width):
        scales = np.ones((max(width // 128, 1), out), np.float16)
        stored = {"qweight": np.zeros((width, out // 8), np.int32), "scales": scales}
        return stored | {"qzeros": np.zeros((len(scales), out // 8), np.int32)}, np.zeros((out, width))

    return said, arrays


def whole():
    """Numbers of int8 in groups."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    groups = {"group_0": {"targets": ["Linear"], "format": "int-quantized", "weights": weights}}

    def arrays(rng, out, width):
        stored = {"weight": np.ones((out, width), np.int8)}
        return stored | {"weight_scale": np.ones((out, max(width // 128, 1)), np.float32)}, np.ones(
            (out, width)
        )

    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}, arrays


@pytest.mark.parametrize("kind", [awq, whole, lambda: compressed(4, 128)])
def test_groups_that_do_not_divide_the_inputs_are_refused(kind, tmp_path):
    folder, _ = made(tmp_path, kind())
    with pytest.raises(WeightsError, match=r"down_proj.*: groups of 128 do not divide its 192 inputs: take"):
        held_params(folder)


def test_a_block_may_be_larger_than_a_layer(tmp_path):
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}

    def arrays(rng, out, width):
        codes = (rng.standard_normal((out, width)) * 99).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
        scales = rng.random((-(-out // 128), -(-width // 128))).astype(np.float32) / 1000
        spread = scales.repeat(128, 0)[:out].repeat(128, 1)[:, :width]
        return {"weight": codes, "weight_scale_inv": scales}, codes.astype(np.float32) * spread

    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
    assert set(assert_same(*made(tmp_path, (said, arrays), **sizes))) <= {Coded, CodedPanels}


@pytest.mark.parametrize("kind", [compressed(4, 128), compressed(8, 0), gptq(128)])
def test_host_memory_is_less_than_one_layer_of_numbers(kind, tmp_path):
    """Of NumPy, while all is loaded: codes are read and prepared a part at a time, never as numbers."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}
    folder, _ = made(tmp_path, kind, **sizes)
    hf_config = read_hf_config(folder)
    config = config_from_dict(hf_config)
    formats = checkpoint_formats(folder, config, hf_config)
    peaks = []
    for _ in range(2):  # the first time compiles, and imports what is imported late
        tracemalloc.start()
        try:
            for _ in iter_params(folder, config, "float32", formats=formats):
                pass
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < 0.7 * 4 * 2 * 1024 * 512
