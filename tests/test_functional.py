"""The pure functions, and their agreement with the engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variants import golden_checkpoint, golden_data

from jaxllm import functional
from jaxllm.loading import load_params
from jaxllm.models.config import config_from_dict, read_hf_config

NAME = "llama_gqa"


@pytest.fixture(scope="module")
def model():
    config = config_from_dict(read_hf_config(golden_checkpoint(NAME)))
    return config, load_params(golden_checkpoint(NAME), config, "float32")


@pytest.fixture(scope="module")
def batch():
    golden = golden_data(NAME)
    return *padded(golden["prompts"]), np.array(golden["greedy"])


def padded(prompts):
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.full((len(lengths), lengths.max()), 77, np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths


def test_generate_inside_a_users_jit_equals_the_recorded_greedy_tokens(model, batch):
    config, params = model
    tokens, lengths, greedy = batch
    eos = int(greedy[2][9])

    @jax.jit
    def both(params, tokens, lengths, key):
        whole = functional.generate(params, config, tokens, lengths, 24, key, block_size=4)
        ended = functional.generate(
            params, config, tokens, lengths, 24, key, block_size=4, eos_token_ids=(eos,)
        )
        return whole, ended

    whole, ended = both(params, tokens, lengths, jax.random.key(0))
    assert whole.tokens.tolist() == greedy[:, :24].tolist()
    assert whole.lengths.tolist() == [24] * len(lengths)
    for row, expected in enumerate(greedy[:, :24].tolist()):
        end = expected.index(eos) + 1 if eos in expected else 24
        assert int(ended.lengths[row]) == end
        assert ended.tokens[row].tolist() == expected[:end] + [0] * (24 - end)


def test_prefill_and_decode_match_recorded_logits(model, batch):
    config, params = model
    tokens, lengths, greedy = batch
    logits = golden_data(NAME)["logits"]
    cache = functional.init_cache(config, len(lengths), 64, block_size=4)
    prefill = jax.jit(lambda p, c, t, n: functional.prefill(p, config, c, t, n))
    decode = jax.jit(lambda p, c, t, n: functional.decode(p, config, c, t, n), donate_argnums=1)
    cache, scores = prefill(params, cache, tokens, lengths)
    for row, (length, recorded) in enumerate(zip(lengths, logits, strict=True)):
        np.testing.assert_allclose(scores[row], recorded[length - 1], atol=1e-4)
    for step in range(3):
        cache, scores = decode(params, cache, jnp.asarray(greedy[:, step], jnp.int32), lengths + step + 1)
        assert scores.argmax(axis=-1).tolist() == greedy[:, step + 1].tolist()


def test_sampling_depends_on_key_and_row(model, batch):
    config, params = model
    tokens, lengths, _ = batch

    @jax.jit
    def run(key, temperature):
        tiled = jnp.tile(tokens[1:2], (4, 1))
        return functional.generate(
            params, config, tiled, jnp.full(4, lengths[1]), 8, key, temperature=temperature, block_size=4
        ).tokens

    first = run(jax.random.key(1), 2.0)
    assert first.tolist() == run(jax.random.key(1), 2.0).tolist()
    assert first.tolist() != run(jax.random.key(2), 2.0).tolist()
    assert len({tuple(row) for row in first.tolist()}) == 4
    cold = run(jax.random.key(1), 0.0)
    assert len({tuple(row) for row in cold.tolist()}) == 1


def test_bad_shapes_are_refused(model, batch):
    config, params = model
    tokens, lengths, _ = batch
    with pytest.raises(ValueError, match=r"must be \[B, L\]"):
        functional.generate(params, config, tokens[0], lengths, 4, jax.random.key(0))
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        functional.generate(params, config, tokens, lengths, 0, jax.random.key(0))
    with pytest.raises(ValueError, match="positions"):
        functional.generate(params, config, tokens, lengths, 10**6, jax.random.key(0))


@pytest.mark.parametrize("name", ["mistral_window", "qwen2_window"])
def test_windows_hold_in_xla_too(name):
    golden = golden_data(name)
    config = config_from_dict(read_hf_config(golden_checkpoint(name)))
    params = load_params(golden_checkpoint(name), config, "float32")
    tokens, lengths = map(jnp.asarray, padded(golden["prompts"]))
    generated = functional.generate(
        params, config, tokens, lengths, 32, jax.random.key(0), implementation="xla"
    )
    assert generated.tokens.tolist() == [row[:32] for row in golden["greedy"]]
