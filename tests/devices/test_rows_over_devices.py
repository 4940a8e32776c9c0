"""Pure functions with the rows of a batch over devices: by `shard_map`, and of arrays that are sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_functional_transforms import load

from jaxllm import functional as F
from jaxllm import pallas_kernels
from jaxllm.errors import ConfigError

IMPLEMENTATIONS = ["xla", "native", "reference"]
ROWS = P("data")
SCALES = np.array([0.5, 1.0], np.float32)
"""One a device."""


def mesh_of(kind):
    return jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=jax.devices()[:2])


def by_rows(function, in_specs=ROWS, out_specs=ROWS):
    return jax.shard_map(function, mesh=mesh_of(AxisType.Auto), in_specs=in_specs, out_specs=out_specs)


def close(found, expected, atol):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=atol), found, expected)


@pytest.fixture(scope="module")
def model():
    config, params = load()
    return config, jax.device_get(params)


@pytest.fixture(scope="module")
def tokens(model):
    return np.random.default_rng(0).integers(1, model[0].vocab_size, (4, 12))


@pytest.fixture(scope="module")
def answers(model):
    """What is generated, and scored with a cache, by a back-end."""
    config, _ = model

    def of(params, tokens, implementation):
        lengths, options = 0 * tokens[:, 0] + 12, {"implementation": implementation}
        cache = F.init_cache(config, len(tokens), 16)
        cache, _ = F.prefill(params, config, cache, tokens, lengths, **options)
        made = F.generate(params, config, tokens, lengths, 3, jax.random.key(0), **options)
        return F.decode(params, config, cache, made.tokens[:, 0], lengths + 1, **options)[1], *made

    return of


@pytest.fixture(scope="module")
def on_one(model, tokens, answers):
    return jax.jit(answers, static_argnums=2)(model[1], tokens, "reference")


def test_gradients_are_those_of_all_rows(model, tokens):
    config, params = model

    def mean(params, tokens):
        return jax.lax.pmean(F.loss(params, config, tokens), "data")

    split = by_rows(mean, (P(), ROWS), P())
    found = jax.jit(jax.value_and_grad(split))(params, tokens)
    whole = jax.jit(jax.value_and_grad(lambda p: F.loss(p, config, tokens)))(params)
    assert len(found[1]) > 10
    close(found, whole, 1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_each_device_answers_for_its_rows(model, tokens, answers, on_one, implementation):
    split = by_rows(lambda p, t: answers(p, t, implementation), (P(), ROWS))
    close(jax.jit(split)(model[1], tokens), on_one, 1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_differs_by_device_is_not_said_to_be_the_same(implementation):
    queries, pool = jnp.ones((4, 2, 16)), jnp.ones((4, 1, 2, 2, 16, 16))
    tables, lengths = jnp.arange(2)[:, None], jnp.full(2, 3)

    def attend(q):
        options = {"layer": 0, "scale": 1.0, "implementation": implementation}
        return pallas_kernels.decode_attention(q, pool, tables, lengths, **options)

    np.testing.assert_allclose(jax.jit(by_rows(attend))(queries), np.ones_like(queries), atol=1e-6)
    with pytest.raises(ValueError, match=r"replicated|vary"):
        jax.eval_shape(by_rows(attend, out_specs=P()), queries)


@pytest.mark.parametrize("scaled", ["temperature", "weights", "edit"])
def test_samples_are_those_of_a_device_alone(model, tokens, scaled):
    """With what differs by device: the temperature, or the weights or an edit besides."""
    config, params = model
    options = {"temperature": 1.0, "top_k": 9, "top_p": 0.9}

    def sampled(scale):
        given = {**options, "temperature": scale[0]}
        if scaled == "edit":
            given["edit"] = lambda layer, x: x * scale[0]
        weights = jax.tree.map(lambda x: x * scale[0], params) if scaled == "weights" else params
        key = jax.random.fold_in(jax.random.key(0), (8 * scale[0]).astype(int))
        return F.generate(weights, config, tokens, np.full(4, 12), 3, key, **given).tokens

    whole = [jax.jit(sampled)(scale) for scale in np.split(SCALES, 2)]
    np.testing.assert_array_equal(jax.jit(by_rows(sampled))(SCALES), np.concatenate(whole))


@pytest.fixture(scope="module")
def continued(model, tokens):
    """Scores of what goes on with a cache that differs by device."""
    config, params = model
    lengths = np.full(4, 12)
    empty = F.init_cache(config, 4, 16)
    filled, _ = F.prefill(params, config, empty, tokens, lengths, implementation="reference")

    def of(scale, implementation):
        options = {"implementation": implementation}
        cache = F.KVCache(filled.pool * scale[0], filled.block_tables)
        cache, scores = F.decode(params, config, cache, tokens[:, 0], lengths + 1, **options)
        two = np.full(4, 2)
        more = F.prefill(params, config, cache, tokens[:, :2], two, cached=lengths + 1, **options)[1]
        return scores, more

    return of


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_caches_go_on_by_device(continued, implementation):
    whole = [jax.jit(continued, static_argnums=1)(one, "reference") for one in np.split(SCALES, 2)]
    split = by_rows(lambda scale: continued(scale, implementation))
    close(jax.jit(split)(SCALES), tuple(map(np.concatenate, zip(*whole, strict=True))), 1e-5)


def test_arrays_over_explicit_axes_are_named(model, tokens):
    config, params = model
    mesh, lengths = mesh_of(AxisType.Explicit), np.full(4, 12)
    rows, by_row, mask = (
        jax.device_put(one, jax.NamedSharding(mesh, ROWS))
        for one in (tokens, np.full(4, 0.5, np.float32), np.ones((4, 12), np.float32))
    )
    key = jax.random.key(0)
    for name, call in (
        ("tokens", lambda: F.logits(params, config, rows)),
        ("mask", lambda: F.loss(params, config, tokens, mask)),
        ("temperature", lambda: F.generate(params, config, tokens, lengths, 3, key, temperature=by_row)),
    ):
        with pytest.raises(ConfigError, match=rf"^{name} is sharded by P\('data'") as error:
            call()
        assert "over axes of type Explicit: call the function inside" in str(error.value)
    with jax.set_mesh(mesh):
        inside = jax.sharding.auto_axes(lambda p, t: F.logits(p, config, t), out_sharding=ROWS)(params, rows)
    np.testing.assert_allclose(inside, jax.jit(F.logits, static_argnums=1)(params, config, tokens), atol=1e-4)
