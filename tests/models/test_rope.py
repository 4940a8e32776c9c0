"""Rotary frequencies per type, against values worked out by hand or printed by transformers."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import functional
from jaxllm.errors import ConfigError, UnsupportedModelError
from jaxllm.models.config import config_from_dict
from jaxllm.models.registry import abstract_params
from jaxllm.models.rope import RopeConfig, rope_table
from jaxllm.pallas_kernels.heads import apply_rope

PLAIN = RopeConfig(head_dim=8, max_position_embeddings=128, theta=10000.0)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 16,
    "intermediate_size": 16,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def rope_of(**fields):
    return config_from_dict({**LLAMA, **fields}).rope


def frequencies(config):
    values = config.inverse_frequencies()
    assert values.dtype == np.float32
    return values.tolist()


def test_default_frequencies_are_powers_of_theta():
    assert frequencies(PLAIN) == pytest.approx([1.0, 0.1, 0.01, 0.001])
    theta = dataclasses.replace(PLAIN, theta=16.0)
    assert frequencies(theta) == pytest.approx([1.0, 0.5, 0.25, 0.125])


def test_linear_divides_every_frequency():
    config = dataclasses.replace(PLAIN, rope_type="linear", factor=4.0)
    assert frequencies(config) == pytest.approx([0.25, 0.025, 0.0025, 0.00025])


def test_dynamic_is_plain_up_to_the_trained_length():
    config = dataclasses.replace(PLAIN, rope_type="dynamic", factor=2.0)
    for max_model_len in (None, 1, 128):
        fixed = dataclasses.replace(config, max_model_len=max_model_len)
        assert frequencies(fixed) == pytest.approx(frequencies(PLAIN))


def test_dynamic_beyond_the_trained_length_is_fixed_from_max_model_len():
    """theta * (factor * length / trained - (factor - 1)) ** (dim / (dim - 2)), the NTK-aware formula."""
    config = dataclasses.replace(PLAIN, rope_type="dynamic", factor=2.0, max_model_len=256)
    theta = 10000.0 * 3.0 ** (8 / 6)  # 2 * 256 / 128 - 1 = 3
    assert frequencies(config) == pytest.approx([theta ** -(i / 4) for i in range(4)], rel=1e-6)
    # The lowest frequency is slowed down exactly 3 times, the highest not at all.
    assert frequencies(config)[3] == pytest.approx(0.001 / 3, rel=1e-6)
    # transformers 5.23: _compute_dynamic_ntk_parameters(config, seq_len=256)
    assert frequencies(config) == pytest.approx(DYNAMIC_256, rel=1e-6)


def test_dynamic_takes_max_model_len_from_the_model_config():
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    config = config_from_dict({**LLAMA, "rope_scaling": scaling})
    assert config.max_model_len == 256
    assert config.default_max_model_len == 128
    assert frequencies(config.with_max_model_len(256).rope) == pytest.approx(DYNAMIC_256, rel=1e-6)
    assert frequencies(config.with_max_model_len(100).rope) == pytest.approx(frequencies(PLAIN))
    with pytest.raises(ConfigError, match="max_model_len=257 is more than the 256"):
        config.with_max_model_len(257)


# transformers 5.23 for head_dim 8, theta 10000, factor 2, 128 positions, sequence of 256.
DYNAMIC_256 = [1.0, 0.06933612376451492, 0.0048074983060359955, 0.00033333332976326346]


def test_llama3_keeps_short_slows_long_and_blends_between():
    config = dataclasses.replace(PLAIN, rope_type="llama3", theta=500000.0, head_dim=128, **LLAMA3)
    plain = dataclasses.replace(PLAIN, theta=500000.0, head_dim=128).inverse_frequencies()
    scaled = config.inverse_frequencies()
    wavelengths = 2 * math.pi / plain
    short, long = wavelengths < 8192 / 4, wavelengths > 8192
    np.testing.assert_allclose(scaled[short], plain[short], rtol=1e-6)
    np.testing.assert_allclose(scaled[long], plain[long] / 8, rtol=1e-6)
    between = ~short & ~long
    assert (short.sum(), between.sum(), long.sum()) == (29, 6, 29)
    i = int(np.flatnonzero(between)[2])
    smooth = (8192 / wavelengths[i] - 1) / 3
    assert scaled[i] == pytest.approx((1 - smooth) * plain[i] / 8 + smooth * plain[i], rel=1e-6)


def test_yarn_keeps_short_slows_long_and_blends_between():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    config = rope_of(head_dim=128, rope_theta=1000000.0, rope_scaling=scaling)
    plain = dataclasses.replace(PLAIN, theta=1000000.0, head_dim=128).inverse_frequencies()
    scaled = config.inverse_frequencies()
    # 128 * ln(4096 / (2 pi * turns)) / (2 ln 1e6) is 13.97 for 32 turns, and 30.02 for one.
    np.testing.assert_allclose(scaled[:14], plain[:14], rtol=1e-6)
    np.testing.assert_allclose(scaled[31:], plain[31:] / 4, rtol=1e-6)
    slowed = (22 - 13) / (31 - 13)
    assert scaled[22] == pytest.approx(plain[22] * (slowed / 4 + 1 - slowed), rel=1e-5)
    assert config.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_frequencies_of_a_length_ask_for_it_in_one_program():
    scaling = {"type": "longrope", "short_factor": [1, 1, 1, 1], "long_factor": [2, 2, 2, 2], "factor": 2.0}
    config = config_from_dict({**LLAMA, "rope_scaling": scaling})
    tokens = jnp.zeros((1, 4), jnp.int32)
    params = dict.fromkeys(abstract_params(config, "float32"), tokens)
    with pytest.raises(ValueError, match=r"'longrope' needs the longest sequence.*with_max_model_len\(8\)"):
        functional.generate(params, config, tokens, jnp.full(1, 4), 4, jax.random.key(0))


def test_yarn_lengths_and_attention_factors():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    config = config_from_dict({**LLAMA, "rope_scaling": scaling})
    assert (config.max_model_len, config.default_max_model_len) == (512, 128)
    assert rope_of(rope_scaling={**scaling, "attention_factor": 1.5}).attention_factor == 1.5
    pair = {**scaling, "mscale": 1.0, "mscale_all_dim": 0.5}
    ratio = (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert rope_of(rope_scaling=pair).attention_factor == pytest.approx(ratio)


def test_longrope_takes_its_factors_by_the_longest_sequence():
    short, long = [1.0, 1.25, 1.5, 2.0], [2.0, 4.0, 8.0, 16.0]
    scaling = {"type": "longrope", "short_factor": short, "long_factor": long}
    positions = {"original_max_position_embeddings": 32}
    config = config_from_dict({**LLAMA, "rope_scaling": {**scaling, **positions}})
    assert config.max_model_len == 128
    for length, factors in ((32, short), (33, long), (128, long)):
        fixed = config.with_max_model_len(length).rope
        expected = [value / factor for value, factor in zip(frequencies(PLAIN), factors, strict=True)]
        assert frequencies(fixed) == pytest.approx(expected)
        # sqrt(1 + ln 4 / ln 32) = sqrt(1 + 2 / 5)
        assert fixed.attention_factor == pytest.approx(math.sqrt(1.4))
    # Phi 3 says it beside, and called the type otherwise at first.
    phi3 = {**LLAMA, **positions, "architectures": ["Phi3ForCausalLM"], "rms_norm_eps": 1e-6}
    for name in ("su", "yarn", "longrope"):
        assert config_from_dict({**phi3, "rope_scaling": {**scaling, "type": name}}).rope == config.rope


def test_cosines_and_sines_are_multiplied_by_the_attention_factor():
    tables = [rope_table(jnp.array([5], jnp.int32), PLAIN.inverse_frequencies(), f) for f in (1.0, 1.5)]
    for plain, scaled in zip(*tables, strict=True):
        np.testing.assert_allclose(1.5 * plain, scaled, rtol=1e-6)


def test_both_config_styles_mean_the_same():
    old = rope_of(rope_theta=500000.0, rope_scaling={"type": "llama3", **LLAMA3})
    new = rope_of(rope_parameters={"rope_theta": 500000.0, "rope_type": "llama3", **LLAMA3})
    saved = rope_of(
        rope_parameters={"rope_theta": 500000.0, "rope_type": "llama3", "type": "llama3", **LLAMA3}
    )
    assert old == new == saved
    assert rope_of() == rope_of(rope_scaling=None) == rope_of(rope_parameters={"rope_type": "default"})
    assert rope_of().theta == 10000.0


@pytest.mark.parametrize("rope_type", ["su", "mrope", "ntk"])
def test_other_types_are_refused(rope_type):
    with pytest.raises(UnsupportedModelError, match=f"'{rope_type}'.*default, linear, dynamic, llama3"):
        rope_of(rope_scaling={"rope_type": rope_type, "factor": 2.0})


@pytest.mark.parametrize(
    ("scaling", "problem"),
    [
        ({"rope_type": "linear"}, "needs a positive 'factor', not None"),
        ({"rope_type": "linear", "factor": "2"}, "'factor', not '2'"),
        ({"rope_type": "linear", "factor": True}, "'factor', not True"),
        ({"rope_type": "dynamic", "factor": 0.5}, "factor=0.5 must be at least 1"),
        ({"rope_type": "dynamic", "factor": float("nan")}, "not nan"),
        ({"rope_type": "llama3", "factor": 8.0}, "'low_freq_factor', not None"),
        ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}, "must be less than"),
        ({"rope_type": "yarn", "factor": 0.5}, "factor=0.5 must be at least 1"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}, "'beta_fast', not -1"),
        ({"rope_type": "yarn", "factor": 2.0, "long_factor": [1.0]}, "'long_factor'"),
        ({"rope_type": "longrope", "factor": 2.0}, "needs 4 positive numbers as 'short_factor', not None"),
        ({"rope_type": "longrope", "short_factor": [1, 1, 1, 1], "long_factor": [1, 1]}, "as 'long_factor'"),
        ({"rope_type": "longrope", "short_factor": [1, 1, 1, 0]}, "4 positive numbers"),
        ({"rope_type": "default", "rope_theta": -1.0}, "'rope_theta', not -1"),
        ({"rope_type": "default", "rope_theta": "big"}, "'rope_theta', not 'big'"),
        ({"rope_type": "linear", "factor": 2.0, "attention_factor": 1.5}, "attention_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("linear", "must be a JSON object"),
    ],
)
def test_impossible_values_are_named(scaling, problem):
    with pytest.raises(ConfigError, match=problem):
        rope_of(rope_scaling=scaling)


def test_odd_head_dim_is_refused():
    with pytest.raises(ConfigError, match="head_dim=7 must be even"):
        rope_of(head_dim=7)


def test_rotation_pairs_each_dimension_with_the_one_half_a_head_away():
    x = jnp.array([[[1.0, 0.0, 0.0, 0.0]], [[0.0, 1.0, 0.0, 2.0]]])
    table = rope_table(jnp.array([1, 3], jnp.int32), np.array([math.pi / 2, math.pi / 3], np.float32))
    rotated = apply_rope(x, table)
    # Dimension 0 turns by pi/2 into dimension 2; (1, 2) in dimensions 1 and 3 turns by pi.
    np.testing.assert_allclose(rotated, [[[0, 0, 1, 0]], [[0, -1, 0, -2]]], atol=1e-6)


def test_scores_depend_on_distance_only_and_position_zero_is_untouched():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 8)), jnp.float32) for _ in range(2))
    inverse = PLAIN.inverse_frequencies()

    def score(a, b):
        tables = [rope_table(jnp.array([p], jnp.int32), inverse) for p in (a, b)]
        return float(jnp.sum(apply_rope(q, tables[0]) * apply_rope(k, tables[1])))

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-2)
    zero = rope_table(jnp.array([0], jnp.int32), inverse)
    np.testing.assert_array_equal(apply_rope(q, zero), q)
    assert apply_rope(q.astype(jnp.bfloat16), zero).dtype == jnp.bfloat16
