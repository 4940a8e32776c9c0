"""Published configurations by parameter count, and errors for everything unsupported."""

import json
import math

import pytest
from variants import CONFIGS, VARIANTS, golden_checkpoint

from jaxllm.errors import ConfigError, UnsupportedModelError
from jaxllm.models.architecture import ARCHITECTURES
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.models.registry import abstract_params

# hidden_size, heads, layers, ffn_dim, word_embed_proj_dim, parameters (the head is tied)
OPT_SIZES = {
    "125m": (768, 12, 12, 3072, 768, 125_239_296),
    "350m": (1024, 16, 24, 4096, 512, 331_196_416),
    "1.3b": (2048, 32, 24, 8192, 2048, 1_315_758_080),
    "2.7b": (2560, 32, 32, 10240, 2560, 2_651_596_800),
    "6.7b": (4096, 32, 32, 16384, 4096, 6_658_473_984),
    "13b": (5120, 40, 40, 20480, 5120, 12_853_473_280),
    "30b": (7168, 56, 48, 28672, 7168, 29_974_540_288),
    "66b": (9216, 72, 64, 36864, 9216, 65_719_701_504),
}

_LLAMA1 = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_sequence_length": 2048,
    "model_type": "llama",
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "torch_dtype": "float16",
    "transformers_version": "4.28.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
_LLAMA2 = {
    "_name_or_path": "meta-llama/Llama-2-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
_LLAMA3 = _LLAMA2 | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_LLAMA31 = _LLAMA3 | {"max_position_embeddings": 131072, "mlp_bias": False, "rope_scaling": _SCALING}
_LLAMA32 = _LLAMA31 | {"tie_word_embeddings": True, "rope_scaling": _SCALING | {"factor": 32.0}}


def _sizes(hidden, heads, layers, intermediate, **more):
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        **more,
    }


LLAMA_SIZES = {
    "1-7b": (_LLAMA1 | _sizes(4096, 32, 32, 11008), 6_738_415_616),
    "1-13b": (_LLAMA1 | _sizes(5120, 40, 40, 13824), 13_015_864_320),
    "1-30b": (_LLAMA1 | _sizes(6656, 52, 60, 17920), 32_528_943_616),
    "1-65b": (_LLAMA1 | _sizes(8192, 64, 80, 22016, rms_norm_eps=1e-5), 65_285_660_672),
    "2-7b": (_LLAMA2 | _sizes(4096, 32, 32, 11008, num_key_value_heads=32), 6_738_415_616),
    "2-13b": (_LLAMA2 | _sizes(5120, 40, 40, 13824, num_key_value_heads=40), 13_015_864_320),
    "2-70b": (_LLAMA2 | _sizes(8192, 64, 80, 28672, num_key_value_heads=8), 68_976_648_192),
    "3-8b": (_LLAMA3 | _sizes(4096, 32, 32, 14336), 8_030_261_248),
    "3.1-8b": (_LLAMA31 | _sizes(4096, 32, 32, 14336), 8_030_261_248),
    "3.1-405b": (_LLAMA31 | _sizes(16384, 128, 126, 53248), 405_853_388_800),
    "3.2-1b": (_LLAMA32 | _sizes(2048, 32, 16, 8192, head_dim=64), 1_235_814_400),
    "3.2-3b": (_LLAMA32 | _sizes(3072, 24, 28, 8192, head_dim=128), 3_212_749_824),
}


def num_parameters(config):
    return sum(math.prod(struct.shape) for struct in abstract_params(config, "bfloat16").values())


@pytest.mark.parametrize("size", OPT_SIZES)
def test_published_opt_sizes(size):
    hidden, heads, layers, ffn, proj, parameters = OPT_SIZES[size]
    published = {
        "_name_or_path": f"facebook/opt-{size}",
        "_remove_final_layer_norm": False,
        "activation_dropout": 0.0,
        "activation_function": "relu",
        "architectures": ["OPTForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "do_layer_norm_before": size != "350m",
        "dropout": 0.1,
        "eos_token_id": 2,
        "ffn_dim": ffn,
        "hidden_size": hidden,
        "init_std": 0.02,
        "layerdrop": 0.0,
        "max_position_embeddings": 2048,
        "model_type": "opt",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "pad_token_id": 1,
        "prefix": "</s>",
        "torch_dtype": "float16",
        "transformers_version": "4.21.0.dev0",
        "use_cache": True,
        "vocab_size": 50272,
        "word_embed_proj_dim": proj,
    }
    config = config_from_dict(published)
    assert config.tie_word_embeddings
    assert config.has_final_layer_norm == (size != "350m")
    assert config.head_dim in (64, 80, 128)
    assert config.max_model_len == 2048
    assert num_parameters(config) == parameters


@pytest.mark.parametrize("size", LLAMA_SIZES)
def test_published_llama_sizes(size):
    published, parameters = LLAMA_SIZES[size]
    config = config_from_dict(published)
    assert config.head_dim == published.get("head_dim", 128)
    assert config.num_kv_heads == published.get("num_key_value_heads", config.num_heads)
    assert config.max_model_len == published.get("max_position_embeddings", 2048)
    assert config.rope.theta == published.get("rope_theta", 10000.0)
    assert config.rope.rope_type == (published.get("rope_scaling") or {}).get("rope_type", "default")
    assert num_parameters(config) == parameters


@pytest.mark.parametrize("name", VARIANTS)
def test_configs_are_read_field_by_field(name):
    values = CONFIGS[name]
    config = config_from_dict(values)
    assert config.architecture == values["architectures"][0]
    assert config.vocab_size == 128
    assert config.tie_word_embeddings == values.get(
        "tie_word_embeddings", config.architecture.startswith(("OPT", "Gemma"))
    )
    assert config.head_dim == values.get("head_dim", 16)
    assert config.num_kv_heads == values.get("num_key_value_heads", 4)
    assert hash(config) == hash(config_from_dict(values))


def test_variants_cover_both_values_of_every_switch():
    configs = [config_from_dict(values) for values in CONFIGS.values()]
    switches = (
        "tie_word_embeddings attention_bias mlp_bias do_layer_norm_before remove_final_layer_norm "
        "enable_bias layer_norm_elementwise_affine"
    )
    for switch in switches.split():
        assert {getattr(config, switch) for config in configs if hasattr(config, switch)} == {False, True}
    assert {c.rope.rope_type for c in configs if hasattr(c, "rope")} == {
        "default",
        "linear",
        "dynamic",
        "llama3",
        "yarn",
        "longrope",
    }
    assert {c.activation_function for c in configs if hasattr(c, "activation_function")} == {"relu", "gelu"}


LLAMA, OPT = CONFIGS["llama_mha"], CONFIGS["opt_pre_norm"]


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "LlamaModel", "GPT2LMHeadModel"])
def test_other_architectures_are_refused_with_the_supported_ones(architecture):
    with pytest.raises(UnsupportedModelError) as error:
        config_from_dict(LLAMA | {"architectures": [architecture]})
    assert architecture in str(error.value)
    assert all(name in str(error.value) for name in ARCHITECTURES)


def test_model_type_stands_in_for_architectures():
    for values in CONFIGS.values():
        architecture = values["architectures"][0]
        assert config_from_dict(values | {"architectures": None}).architecture == architecture
    with pytest.raises(UnsupportedModelError, match=r"model_type='gpt2'.*LlamaForCausalLM"):
        config_from_dict(LLAMA | {"architectures": None, "model_type": "gpt2"})


@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        (LLAMA, {"sliding_window": 4096}, ["sliding_window=4096", "hf_overrides={'<field>': None}"]),
        (LLAMA, {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping=50.0", "supported fields: "]),
        (LLAMA, {"num_local_experts": 8, "qk_norm": True}, ["num_local_experts=8", "qk_norm=True"]),
        (LLAMA, {"hidden_act": "gelu"}, ["hidden_act='gelu'", "supported: 'silu'"]),
        (OPT, {"activation_function": "swish"}, ["activation_function='swish'", "'relu', 'gelu'"]),
        (OPT, {"rope_theta": 10000.0}, ["rope_theta=10000.0"]),
        (
            LLAMA,
            {"quantization_config": {"quant_method": "hqq", "nbits": 4}},
            ["'hqq'", "compressed-tensors, fp8, fbgemm_fp8, gptq, awq, torchao", "16 bits"],
        ),
        (
            LLAMA,
            {"rope_scaling": {"rope_type": "ntk", "factor": 4.0}},
            ["'ntk'", "default, linear, dynamic, llama3, yarn, longrope"],
        ),
    ],
)
def test_unsupported_fields_are_named_with_what_is_supported(base, changes, named):
    with pytest.raises(UnsupportedModelError) as error:
        config_from_dict(base | changes)
    for text in named:
        assert text in str(error.value)


def test_hf_overrides_are_the_way_out():
    values = LLAMA | {"sliding_window": 4096, "hidden_act": "gelu"}
    config = config_from_dict(values, {"sliding_window": None, "hidden_act": "silu"})
    assert config == config_from_dict(LLAMA)
    assert values["sliding_window"] == 4096
    assert config_from_dict(LLAMA, {"max_position_embeddings": 64}).max_model_len == 64


def test_absent_and_inert_fields_do_not_matter():
    extra = {
        "sliding_window": None,
        "quantization_config": None,
        "use_cache": False,
        "_commit": "x",
        "unk": [],
    }
    assert config_from_dict(LLAMA | extra) == config_from_dict(LLAMA)


@pytest.mark.parametrize(
    ("base", "field"),
    [
        *((LLAMA, f"{n}") for n in ("hidden_size", "num_attention_heads", "vocab_size", "intermediate_size")),
        *((OPT, f"{n}") for n in ("hidden_size", "num_hidden_layers", "vocab_size", "ffn_dim")),
    ],
)
def test_missing_fields_are_named(base, field):
    with pytest.raises(ConfigError, match=f"no '{field}'"):
        config_from_dict(base, {field: None})


@pytest.mark.parametrize(
    ("base", "changes", "problem"),
    [
        (LLAMA, {"hidden_size": "64"}, "hidden_size='64' must be a positive integer"),
        (LLAMA, {"hidden_size": 64.0}, "hidden_size=64.0 must be a positive integer"),
        (LLAMA, {"num_attention_heads": 0}, "num_attention_heads=0 must be a positive integer"),
        (
            LLAMA,
            {"num_key_value_heads": 3},
            "num_attention_heads=4 is not a multiple of num_key_value_heads=3",
        ),
        (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers=True must be a positive integer"),
        (LLAMA, {"max_position_embeddings": -1}, "max_position_embeddings=-1 must be a positive integer"),
        (LLAMA, {"tie_word_embeddings": "no"}, "tie_word_embeddings='no' must be true or false"),
        (LLAMA, {"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5' must be a positive number"),
        (OPT, {"num_attention_heads": 5}, "hidden_size=64 is not a multiple of num_attention_heads=5"),
        (OPT, {"enable_bias": 1}, "enable_bias=1 must be true or false"),
    ],
)
def test_impossible_values_are_named(base, changes, problem):
    with pytest.raises(ConfigError, match=problem):
        config_from_dict(base | changes)


MISTRAL, QWEN2 = CONFIGS["mistral_window"], CONFIGS["qwen2_window"]


def test_windows_are_read_layer_by_layer():
    assert config_from_dict(MISTRAL).windows == (11, 11)
    assert config_from_dict(QWEN2).windows == (None, 12)
    assert config_from_dict(QWEN2 | {"use_sliding_window": False}).windows == ()
    assert config_from_dict(QWEN2 | {"max_window_layers": 2}).windows == ()
    kinds = ["sliding_attention", "full_attention"]
    assert config_from_dict(QWEN2 | {"layer_types": kinds}).windows == (12, None)
    # What transformers takes where nothing is said is not what it takes for null.
    absent = {name: value for name, value in MISTRAL.items() if name != "sliding_window"}
    assert config_from_dict(absent).windows == (4096, 4096)
    assert config_from_dict(MISTRAL, {"sliding_window": None}).windows == ()


def test_windows_that_no_sequence_outgrows_are_dropped():
    config = config_from_dict(QWEN2)
    assert config.with_max_model_len(13).windows == (None, 12)
    assert config.has_bounds
    assert config.with_max_model_len(12).windows == ()
    assert not config.with_max_model_len(12).has_bounds


@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        (MISTRAL, {"sliding_window": 0}, "sliding_window=0 must be a positive integer"),
        (MISTRAL, {"sliding_window": "11"}, "sliding_window='11' must be a positive integer"),
        (QWEN2, {"use_sliding_window": "yes"}, "use_sliding_window='yes' must be true or false"),
        (QWEN2, {"layer_types": ["full_attention"]}, r"layer_types=\['full_attention'\] is not supported"),
        (QWEN2, {"layer_types": ["chunked_attention"] * 2}, "'full_attention', 'sliding_attention'"),
        (QWEN2, {"max_window_layers": "all"}, "max_window_layers='all' must be an integer of at least 0"),
    ],
)
def test_impossible_windows_are_named(base, changes, named):
    with pytest.raises((ConfigError, UnsupportedModelError), match=named):
        config_from_dict(base | changes)


def test_max_model_len_is_limited_by_the_positions():
    assert config_from_dict(OPT).with_max_model_len(128) == config_from_dict(OPT)
    with pytest.raises(ConfigError, match=r"max_model_len=129 is more than the 128 positions.*<=128"):
        config_from_dict(OPT).with_max_model_len(129)
    assert config_from_dict(CONFIGS["llama_linear"]).max_model_len == 256
    assert config_from_dict(CONFIGS["llama_llama3"]).max_model_len == 128


def test_wrong_folders_and_files_are_explained(tmp_path):
    with pytest.raises(ConfigError, match=r"does not exist.*not downloaded"):
        read_hf_config("facebook/opt-125m")
    with pytest.raises(ConfigError, match=r"no config\.json; it is not a Hugging Face checkpoint"):
        read_hf_config(tmp_path)
    file = tmp_path / "config.json"
    for content, problem in ((b"{", "not valid JSON"), (b"\xff", "not valid JSON"), (b"[1]", "not list")):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=problem):
            read_hf_config(tmp_path)
    file.write_text(json.dumps(LLAMA))
    assert read_hf_config(str(tmp_path)) == LLAMA


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 must be .* at most 512"),
        ({"num_hidden_layers": 2000}, "num_hidden_layers=2000 must be .* at most 512"),
        ({"num_hidden_layers": 1e9}, "num_hidden_layers=1000000000.0 must be"),
        ({"hidden_size": 10**400}, "hidden_size=1000"),
        ({"hidden_size": 10**5000}, "hidden_size=something of type int must"),
        ({"head_dim": 2**31 - 2}, "head_dim=2147483646 must be .* at most 65536"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps=1000"),
        ({"rope_theta": 10**400}, "positive 'rope_theta', not 1"),
        ({"rope_theta": 1e300}, "positive 'rope_theta', not 1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 10**400}}, "positive 'factor', not 1"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "head_dim": 2}, "no finite frequencies"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1.0}, "no finite frequencies"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [10**400], "long_factor": [1.0]}},
            "longrope",
        ),
    ],
    ids=range(13),
)
def test_numbers_that_nothing_can_be_computed_with_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        config_from_dict(
            {**read_hf_config(golden_checkpoint("llama_gqa")), "rope_parameters": None, **overrides}
        )


@pytest.mark.parametrize("name", ["llama_llama3", "opt_post_norm", "gemma3", "phi3_longrope", "qwen2_yarn"])
def test_configurations_of_transformers_are_taken(name):
    """With all fields at their defaults, which config.json leaves out."""
    from transformers import AutoConfig

    folder = golden_checkpoint(name)
    assert config_from_dict(AutoConfig.from_pretrained(folder)) == config_from_dict(read_hf_config(folder))


@pytest.mark.parametrize(
    "values", [None, "config.json", 3, ["llama"], type("Some", (), {"to_dict": lambda self: {}})]
)
def test_what_is_no_configuration_is_refused(values):
    with pytest.raises(ConfigError, match=r"must be a mapping of config\.json's fields"):
        config_from_dict(values)
