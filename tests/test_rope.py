"""Rotary frequencies per type, against values worked out by hand or printed by transformers."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError, UnsupportedModelError
from jaxllm.models.config import config_from_dict
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


def test_both_config_styles_mean_the_same():
    old = rope_of(rope_theta=500000.0, rope_scaling={"type": "llama3", **LLAMA3})
    new = rope_of(rope_parameters={"rope_theta": 500000.0, "rope_type": "llama3", **LLAMA3})
    saved = rope_of(
        rope_parameters={"rope_theta": 500000.0, "rope_type": "llama3", "type": "llama3", **LLAMA3}
    )
    assert old == new == saved
    assert rope_of() == rope_of(rope_scaling=None) == rope_of(rope_parameters={"rope_type": "default"})
    assert rope_of().theta == 10000.0


@pytest.mark.parametrize("rope_type", ["yarn", "longrope", "su", "mrope", "ntk"])
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
