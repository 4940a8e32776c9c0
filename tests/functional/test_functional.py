"""The pure functions, and their agreement with the engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variants import golden_checkpoint, golden_data

from jaxllm import functional
from jaxllm.errors import ConfigError, RequestError
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


def test_no_row_goes_beyond_the_models_positions(model):
    config, params = model
    most = config.max_model_len
    cache = functional.init_cache(config, 1, most + 16)
    tokens, length = jnp.ones((1, most + 1), jnp.int32), jnp.array([most + 1])
    message = f"{most + 1} tokens exceed the model's {most} positions"
    with pytest.raises(RequestError, match=message):
        functional.prefill(params, config, cache, tokens, length)
    with pytest.raises(RequestError, match=message):
        functional.prefill(params, config, cache, tokens[:, :2], jnp.array([2]), cached=jnp.array([most - 1]))
    with pytest.raises(RequestError, match=message):
        functional.decode(params, config, cache, tokens[:, 0], length)


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


class OfTorch:
    """What another library's array looks like."""

    shape, dtype = (3,), "torch.float32"

    def __repr__(self):
        return "tensor([0., 0., 0.])"


BAD_GENERATE = [
    ({"tokens": [[1, 9999]]}, "tokens=.*9999.* must be from 0 to"),
    ({"tokens": [[1, -1]]}, "tokens=.* must be from 0 to"),
    ({"tokens": [[1.5, 2.0]]}, "tokens of shape .* and dtype float64 must be .B, L., integers"),
    ({"tokens": np.zeros((0, 2), int)}, "must be .* not empty"),
    ({"tokens": [1, 2]}, "must be .B, L., integers"),
    ({"lengths": [3]}, "lengths=.* must be from 1 to 2"),
    ({"lengths": [0]}, "lengths=.* must be from 1 to 2"),
    ({"lengths": 2}, "must be .B., integers"),
    ({"top_p": float("nan")}, "top_p=nan must be from"),
    ({"top_p": 0}, "top_p=0 must be from"),
    ({"top_k": -1}, "top_k=-1 must be from 0"),
    ({"min_p": 2.0}, "min_p=2.0 must be from 0 to 1"),
    ({"temperature": float("inf")}, "temperature=inf must be from"),
    ({"temperature": "hot"}, "temperature='hot' must be from"),
    ({"temperature": [1.0, 1.0, 1.0]}, "one for each row"),
    ({"key": 0}, "key=0 must be a PRNG key"),
    ({"key": np.zeros(2)}, "must be a PRNG key"),
    ({"max_new_tokens": 1.5}, "max_new_tokens=1.5 must be an integer"),
    ({"block_size": 0}, "block_size=0 must be an integer"),
    ({"eos_token_ids": 5}, "eos_token_ids of shape"),
    ({"eos_token_ids": [10**6]}, "eos_token_ids=.* must be from 0 to"),
    ({"params": {}}, "params must be weights by name"),
    ({"params": {0: np.zeros(3)}}, "params must be weights by name"),
    ({"params": None}, "params must be weights by name"),
    ({"config": {"hidden_size": 1}}, "must be a model's"),
    ({"implementation": "fast"}, "fast"),
    ({"implementation": 3}, "unknown attention implementation 3"),
    ({"top_k": 2.5}, "top_k=2.5 must be an integer"),
    ({"key": np.zeros(5, np.uint32)}, "must be a PRNG key"),
    ({"params": {"embed_tokens.weight": OfTorch()}}, "is tensor.* must be an array, as load_params"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_GENERATE, ids=range(len(BAD_GENERATE)))
def test_bad_values_are_named(model, changes, message):
    config, params = model
    arguments = {
        "params": params,
        "config": config,
        "tokens": [[1, 2]],
        "lengths": [2],
        "max_new_tokens": 2,
        "key": jax.random.key(0),
    }
    with pytest.raises(ValueError, match=message):
        functional.generate(**(arguments | changes))


def test_numpy_arrays_lists_and_raw_keys_are_taken(model):
    config, params = model
    tokens, lengths = np.array([[1, 2, 10**6], [3, 4, 5]]), np.array([2, 3])  # padded with anything
    expected = functional.generate(
        params, config, jnp.array([[1, 2, 0], [3, 4, 5]]), jnp.array([2, 3]), 4, jax.random.key(0)
    ).tokens
    for given in (
        (tokens, lengths),
        (tokens.tolist(), lengths.tolist()),
        (tokens.astype(np.uint16), lengths),
    ):
        made = functional.generate(params, config, *given, 4, jax.random.PRNGKey(0))
        assert made.tokens.tolist() == expected.tolist()
    cache, logits = functional.prefill(params, config, functional.init_cache(config, 2, 8), tokens, lengths)
    _, logits = functional.decode(params, config, cache, np.asarray(expected)[:, 0], lengths + 1)
    assert logits.argmax(axis=-1).tolist() == expected[:, 1].tolist()


def test_a_cache_must_be_the_models_and_have_room(model):
    config, params = model
    tokens, lengths = np.array([[1, 2, 3, 4, 5]]), np.array([5])
    small = functional.init_cache(config, 1, 4, block_size=4)
    with pytest.raises(RequestError, match=r"so much room.* must be from 0 to 4"):
        functional.prefill(params, config, small, tokens, lengths)
    with pytest.raises(RequestError, match=r"so much room.* must be from 0 to 4"):
        functional.decode(params, config, small, tokens[:, 0], lengths)
    with pytest.raises(ConfigError, match="is not of this model and 1 rows"):
        functional.prefill(params, config, functional.init_cache(config, 2, 8), tokens, lengths)
    other = functional.KVCache(small.pool[:, :1], small.block_tables)
    with pytest.raises(ConfigError, match="is not of this model"):
        functional.prefill(params, config, other, tokens, lengths)
    for sizes in ((0, 4), (1, 0), (1, -4), (1.5, 4)):
        with pytest.raises(ConfigError, match="must be an integer of at least 1"):
            functional.init_cache(config, *sizes)
    with pytest.raises(RequestError, match=r"tokens=.* must be from 0"):
        functional.decode(params, config, small, np.array([10**6]), np.array([2]))
    with pytest.raises(RequestError, match=r"cached=.* must be from 0 to 128"):
        functional.prefill(
            params, config, functional.init_cache(config, 1, 8), tokens, lengths, cached=[2**40]
        )


def test_what_is_no_folder_or_configuration_is_refused_before_weights_are_read(model):
    for path, config, message in ((None, model[0], "path=None must be that"), ("m", {}, "must be a model's")):
        with pytest.raises(ConfigError, match=message):
            load_params(path, config)


def test_what_is_no_cache_is_told_what_makes_one(model):
    config, params = model
    tokens, lengths = np.array([[1, 2, 3, 4, 5]]), np.array([5])
    pool, tables = functional.init_cache(config, 1, 8, block_size=4)
    for found in (None, "cache", pool, (pool, tables)):
        with pytest.raises(ConfigError, match=r"must be a KVCache.* init_cache"):
            functional.prefill(params, config, found, tokens, lengths)
        with pytest.raises(ConfigError, match=r"must be a KVCache.* init_cache"):
            functional.fork(found, [0])
    for found, message in (
        ((pool, tables[0]), "block_tables of shape"),
        ((pool, tables * 1.0), "block_tables of shape .* integers"),
        ((pool, tables + 1), "block_tables=.* must be from 0 to 1"),
        ((pool, tables - 1), "block_tables=.* must be from 0 to 1"),
        ((pool.astype(np.int16), tables), "a pool of int16 cannot hold KV"),
    ):
        with pytest.raises(ValueError, match=message):
            functional.prefill(params, config, functional.KVCache(*found), tokens, lengths)
    padded = functional.KVCache(pool, tables.at[0, 1].set(-1))  # a block that no token is in
    assert functional.prefill(params, config, padded, tokens[:, :3], np.array([3]))[1].shape[0] == 1


def test_tokens_that_end_rows_are_known_while_a_program_is_traced(model):
    config, params = model
    with pytest.raises(RequestError, match="eos_token_ids must be known"):
        jax.jit(
            lambda ends: functional.generate(
                params, config, [[1, 2]], [2], 2, jax.random.key(0), eos_token_ids=ends
            )
        )(jnp.array([3]))


def test_traced_values_are_taken_as_they_are(model):
    config, params = model

    @jax.jit
    def run(tokens, lengths, key, top_p):
        return functional.generate(
            params, config, tokens, lengths, 3, key, temperature=1.0, top_p=top_p, eos_token_ids=[1]
        ).tokens

    assert run(np.array([[1, 2]]), np.array([2]), jax.random.key(0), 0.5).shape == (1, 3)
