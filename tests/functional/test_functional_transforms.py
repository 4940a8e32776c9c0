"""What JAX does with the pure functions: gradients, batches of batches, programs for other processes."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from variants import golden_checkpoint, golden_data

from jaxllm import functional as F
from jaxllm.errors import ConfigError, RequestError, WeightsError
from jaxllm.loading import load_params
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.models.linear_formats import LinearFormats
from jaxllm.models.linear_weights import Weight
from jaxllm.models.registry import in_format

NAME = "llama_gqa"
BLOCK = 16


logits = jax.jit(F.logits, static_argnums=1)


def load(name=NAME):
    config = config_from_dict(read_hf_config(golden_checkpoint(name)))
    return config, load_params(golden_checkpoint(name), config, "float32")


@pytest.fixture(scope="module")
def model():
    return load()


@pytest.fixture(scope="module")
def tokens(model):
    return np.random.default_rng(0).integers(1, model[0].vocab_size, (4, 12)).astype(np.int32)


@pytest.fixture(scope="module")
def gradients(model, tokens):
    config, params = model
    return jax.jit(jax.grad(lambda p: F.loss(p, config, tokens)))(params)


def close(found, expected, **limits):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **{"rtol": 2e-4, "atol": 5e-6, **limits}),
        found,
        expected,
    )


def tangent_of(params):
    keys = iter(jax.random.split(jax.random.key(0), len(params)))
    return {name: 0.1 * jax.random.normal(next(keys), x.shape, x.dtype) for name, x in params.items()}


@pytest.mark.parametrize("name", [NAME, "opt_post_norm", "gemma2"])
def test_gradients_agree_with_differences(name):
    config, params = load(name)
    some = np.random.default_rng(1).integers(1, config.vocab_size, (2, 9))
    tangent = tangent_of(params)

    def along(step):
        moved = {name: x + step * tangent[name] for name, x in params.items()}
        return F.loss(moved, config, some)

    along = jax.jit(along)
    step = 2e-3
    expected = (float(along(step)) - float(along(-step))) / (2 * step)
    found = jax.jvp(along, (0.0,), (1.0,))[1]
    assert float(found) == pytest.approx(expected, rel=1e-2)
    assert float(jax.grad(along)(0.0)) == pytest.approx(float(found), rel=1e-5)


def test_every_weight_has_a_gradient(gradients):
    assert all(np.isfinite(x).all() and np.abs(x).max() > 0 for x in gradients.values())


def test_a_mask_says_which_tokens_count(model, tokens):
    config, params = model
    logprobs = np.asarray(F.logprobs(params, config, tokens))
    assert logprobs.shape == (4, 11)
    mask = np.zeros(tokens.shape)
    mask[1, 3], mask[2, 5], mask[:, 0] = 1, 3, 9  # that of a first token is not read
    expected = -(logprobs[1, 2] + 3 * logprobs[2, 4]) / 4
    assert float(F.loss(params, config, tokens, mask)) == pytest.approx(expected, rel=1e-5)
    assert float(F.loss(params, config, tokens, np.zeros(tokens.shape))) == 0
    assert float(F.loss(params, config, tokens)) == pytest.approx(-logprobs.mean(), rel=1e-5)


def test_padding_at_the_end_changes_nothing_before_it(model, tokens):
    config, params = model
    padded = np.pad(tokens, ((0, 0), (0, 5)), constant_values=7)
    close(logits(params, config, padded)[:, :12], logits(params, config, tokens), atol=5e-5)


def test_rematerialised_scanned_and_mapped_gradients_are_the_same(model, tokens, gradients):
    config, params = model
    remat = jax.jit(jax.grad(lambda p: F.loss(p, config, tokens, remat=True)))(params)
    close(remat, gradients)

    @jax.jit
    def scanned(params):
        def add(total, rows):
            grad = jax.grad(lambda p: F.loss(p, config, rows))(params)
            return jax.tree.map(jnp.add, total, grad), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(add, zeros, tokens.reshape(2, 2, -1))[0]

    close(jax.tree.map(lambda x: x / 2, scanned(params)), gradients)
    each = jax.jit(jax.vmap(jax.grad(lambda p, row: F.loss(p, config, row[None])), in_axes=(None, 0)))
    close(jax.tree.map(lambda x: x.mean(axis=0), each(params, tokens)), gradients)


def test_models_side_by_side(model, tokens):
    config, params = model
    both = {name: jnp.stack([x, x * 1.01]) for name, x in params.items()}
    found = jax.jit(jax.vmap(lambda p: F.logits(p, config, tokens)))(both)
    for i in range(2):
        alone = F.logits({name: x[i] for name, x in both.items()}, config, tokens)
        close(found[i], alone, atol=1e-4)


def test_an_exported_program_gives_the_same_logits_elsewhere(model, tokens, tmp_path):
    """Of any number of rows and tokens, in a process that knows nothing of the model."""
    config, params = model
    rows, length = export.symbolic_shape("rows, length", constraints=["length <= 128"])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    program = export.export(jax.jit(lambda p, t: F.logits(p, config, t)))(
        shapes, jax.ShapeDtypeStruct((rows, length), jnp.int32)
    )
    (tmp_path / "logits.bin").write_bytes(program.serialize())
    np.savez(tmp_path / "params.npz", **params)
    np.savez(tmp_path / "tokens.npz", a=tokens, b=tokens[:1, :5])
    code = """
        import sys
        import numpy as np
        from jax import export
        program = export.deserialize(bytearray(open("logits.bin", "rb").read()))
        params = dict(np.load("params.npz"))
        found = {name: program.call(params, rows) for name, rows in np.load("tokens.npz").items()}
        assert "jaxllm" not in sys.modules
        np.savez("found.npz", **found)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, check=True)
    with np.load(tmp_path / "found.npz") as found:
        close(found["a"], logits(params, config, tokens), atol=5e-5)
        close(found["b"], logits(params, config, tokens[:1, :5]), atol=5e-5)


def test_losses_gradients_and_traces_are_exported_for_any_batch_and_length(model, tokens):
    config, params = model
    shape = export.symbolic_shape("b,l")
    struct, masks = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)
    mask = np.ones(tokens.shape, np.float32)
    for function, structs, arguments in (
        (lambda p, t, m: F.loss(p, config, t, m), (struct, masks), (tokens, mask)),
        (lambda p, t: jax.grad(F.loss)(p, config, t), (struct,), (tokens,)),
        (lambda p, t: F.logprobs(p, config, t), (struct,), (tokens,)),
        (lambda p, t: F.trace(p, config, t), (struct,), (tokens,)),
    ):
        written = export.export(jax.jit(function))(params, *structs).serialize()
        close(
            export.deserialize(written).call(params, *arguments),
            jax.jit(function)(params, *arguments),
            atol=1e-4,
        )


def test_generation_is_exported_where_it_has_no_kernels(model, tokens):
    config, params = model
    lengths, key = np.full(4, 12), jax.random.key_data(jax.random.key(0))

    def answer(params, tokens, lengths, key):
        return F.generate(params, config, tokens, lengths, 5, key, implementation="reference").tokens

    program = export.export(jax.jit(answer))(params, tokens, lengths, key)
    again = export.deserialize(program.serialize()).call(params, tokens, lengths, key)
    assert again.tolist() == F.generate(params, config, tokens, lengths, 5, key).tokens.tolist()


@pytest.mark.parametrize(
    ("implementation", "sizes"), [("xla", "b, 12"), ("reference", "b, 12"), ("reference", "b, l")]
)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01}])
def test_generation_is_exported_for_any_batch(model, tokens, implementation, sizes, options):
    config, params = model
    rows, length = export.symbolic_shape(sizes, constraints=["l <= 100"] if "l" in sizes else [])
    key = jax.random.key_data(jax.random.key(0))

    def answer(params, tokens, lengths, key):
        options_here = {"implementation": implementation, **options}
        return F.generate(params, config, tokens, lengths, 5, key, **options_here).tokens

    structs = jax.ShapeDtypeStruct((rows, length), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.int32)
    program = export.export(jax.jit(answer))(params, *structs, key)
    again = export.deserialize(program.serialize())
    for some in (tokens[:, :12], tokens[:3, :12]):
        arguments = jnp.asarray(some, jnp.int32), jnp.full(len(some), 9, jnp.int32), key
        assert again.call(params, *arguments).tolist() == jax.jit(answer)(params, *arguments).tolist()


@pytest.mark.parametrize(("implementation", "sizes"), [("native", "b, 12"), (None, "b, 12"), ("xla", "b, l")])
def test_what_is_exported_for_no_batch_or_length_is_named(model, implementation, sizes):
    config, params = model
    rows, length = export.symbolic_shape(sizes, constraints=["l <= 100"] if "l" in sizes else [])

    def answer(params, tokens, lengths):
        key = jax.random.key(0)
        return F.generate(params, config, tokens, lengths, 5, key, implementation=implementation)

    structs = jax.ShapeDtypeStruct((rows, length), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.int32)
    with pytest.raises(
        ConfigError, match=r"needs to know sizes, and .* is symbolic: pass implementation='ref"
    ):
        export.export(jax.jit(answer))(params, *structs)


def test_what_native_kernels_cannot_do_is_named_and_caches_are_exported(model, tokens):
    config, params = model
    lengths, cache = np.full(4, 12, np.int32), F.init_cache(config, 4, 32)

    def prefill(implementation):
        return lambda p, c: F.prefill(p, config, c, tokens, lengths, implementation=implementation)

    def generate(p, c):
        return F.generate(p, config, tokens, lengths, 5, jax.random.key(0))

    def decode(p, c):
        return F.decode(p, config, c, tokens[:, 0], lengths)

    for function in (prefill(None), prefill("native"), decode, generate):
        with pytest.raises(
            ConfigError, match=r"'native' cannot be exported.*pass implementation='xla', or 'ref"
        ):
            export.export(jax.jit(function))(params, cache)
    for implementation in ("xla", "reference"):
        program = export.export(jax.jit(prefill(implementation)))(params, cache)
        kept, scores = export.deserialize(program.serialize()).call(params, cache)
        assert isinstance(kept, F.KVCache)
        close(scores, prefill(None)(params, cache)[1], atol=1e-4)
    jax.jit(prefill("native")).lower(params, cache)  # which is no export


WEIGHT = "layers.0.mlp.down_proj.weight"


def test_a_weight_that_is_none_or_missing_is_named(model, tokens):
    config, params = model
    lacking = {name: weight for name, weight in params.items() if name != WEIGHT}
    cache, lengths = F.init_cache(config, 4, 32), np.full(4, 12)
    for call in (
        lambda p: F.logits(p, config, tokens),
        lambda p: jax.jit(jax.grad(lambda p: F.loss(p, config, tokens)))(p),
        lambda p: F.prefill(p, config, cache, tokens, lengths),
        lambda p: F.generate(p, config, tokens, lengths, 2, jax.random.key(0)),
    ):
        with pytest.raises(WeightsError, match=f"params lack {WEIGHT} .*pass all that load_params"):
            call(lacking)
    for wrong in (None, "x", [1.0]):
        with pytest.raises(ConfigError, match=rf"params\['{WEIGHT}'\] is .*, and must be an array"):
            F.logits({**params, WEIGHT: wrong}, config, tokens)
    with pytest.raises(ConfigError, match="must be an array, as load_params"):
        F.prefill({**params, WEIGHT: None}, config, cache, tokens, lengths)


@pytest.mark.parametrize("edit", [lambda x: x, lambda layer, x, more: x, lambda *, layer, x: x])
def test_an_edit_of_other_arguments_is_told_what_it_gets(edit, model, tokens):
    config, params = model
    cache, lengths = F.init_cache(config, 4, 32), np.full(4, 12)
    for call in (
        lambda: F.trace(params, config, tokens, edit=edit),
        lambda: jax.jit(lambda p: F.logits(p, config, tokens, edit=edit))(params),
        lambda: F.prefill(params, config, cache, tokens, lengths, edit=edit),
    ):
        with pytest.raises(RequestError, match=r"edit\(.*\) cannot be called .*such as lambda layer, x: x"):
            call()


@pytest.mark.parametrize("dtype", ["foo", None, jnp.int8])
def test_a_dtype_of_kv_that_is_not_supported_is_told_which_are(dtype, model):
    for make in (F.init_cache, F.init_pool):
        sizes = (4, 32) if make is F.init_cache else (4,)
        with pytest.raises(ConfigError, match="pass dtype as one of float32, bfloat16, float16"):
            make(model[0], *sizes, dtype=dtype)
    assert F.init_cache(model[0], 4, 32, dtype="torch.bfloat16").pool.dtype == jnp.bfloat16


@pytest.mark.parametrize("implementation", [None, "xla", "triton", "reference"])
def test_caches_side_by_side(implementation, model, tokens):
    """A batch of caches, which `vmap` hands to each implementation."""
    config, params = model
    options = {"implementation": implementation}

    def scores(tokens, lengths):
        cache = F.init_cache(config, 2, 16, BLOCK)
        cache, first = F.prefill(params, config, cache, tokens, lengths, **options)
        _, second = F.decode(params, config, cache, first.argmax(-1), lengths + 1, **options)
        return first, second

    lengths = np.array([[12, 3], [7, 11]])
    optimised = None if implementation != "triton" else {"xla_backend_optimization_level": 0}
    found = jax.jit(jax.vmap(scores), compiler_options=optimised)(tokens.reshape(2, 2, -1), lengths)
    for i in range(2):
        alone = jax.jit(scores, compiler_options=optimised)(tokens.reshape(2, 2, -1)[i], lengths[i])
        close(jax.tree.map(lambda x, i=i: x[i], found), alone, atol=1e-5)


def test_a_loop_over_a_cache_has_the_gradient_of_the_whole_sequence(model, tokens):
    config, params = model

    def paged(params):
        cache = F.init_cache(config, 4, 16, 4)
        options = {"implementation": "reference"}
        cache, first = F.prefill(
            params, config, cache, tokens[:, :11], np.full(4, 11), all_positions=True, **options
        )
        _, last = F.decode(params, config, cache, tokens[:, 11], np.full(4, 12), **options)
        return jnp.concatenate([first, last[:, None]], axis=1)

    def score(logits):
        return jnp.sum(jnp.sin(logits))

    found = jax.jit(jax.value_and_grad(lambda p: score(paged(p))))(params)
    expected = jax.jit(jax.value_and_grad(lambda p: score(F.logits(p, config, tokens))))(params)
    close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("transform", [jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))])
def test_what_has_no_gradients_says_what_has(implementation, transform, model, tokens):
    config, params = model
    cache, lengths = F.init_cache(config, 4, 16, BLOCK), np.full(4, 12)
    options = {"implementation": implementation}

    def prefilled(params):
        return F.prefill(params, config, cache, tokens, lengths, **options)[1].sum()

    def decoded(params):
        return F.decode(params, config, cache, tokens[:, 0], lengths, **options)[1].sum()

    for function in (prefilled, decoded):
        with pytest.raises(ConfigError, match="has no gradients; pass implementation='reference'"):
            transform(function)(params)


@pytest.mark.parametrize("implementation", ["native", "reference"])
def test_samples_are_constants_to_a_gradient(implementation, model, tokens):
    """Drawn inside of what is differentiated, as a policy gradient does, they are as those drawn before."""
    config, params = model
    lengths, key = np.full(len(tokens), tokens.shape[1], np.int32), jax.random.key(0)

    def drawn(params, steering, temperature):
        made = F.generate(
            params,
            config,
            tokens,
            lengths,
            4,
            key,
            temperature=temperature,
            implementation=implementation,
            edit=lambda layer, x: x + steering if layer == 1 else x,
        )
        return jnp.concatenate([tokens, made.tokens], axis=1)

    def score(params, steering, temperature):
        return F.loss(params, config, drawn(params, steering, temperature))

    arguments = params, jnp.full(config.hidden_size, 0.1), 0.7
    found = jax.jit(jax.grad(score, argnums=(0, 1, 2)))(*arguments)
    before = drawn(*arguments)
    close(found[0], jax.jit(jax.grad(lambda p: F.loss(p, config, before)))(params))
    assert not np.any(found[1])
    assert found[2] == 0


@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_a_gradient_of_a_steering_vector_through_kernels_is_refused_by_name(implementation, model, tokens):
    config, params = model
    lengths = np.full(len(tokens), tokens.shape[1], np.int32)

    def score(steering):
        cache = F.init_cache(config, len(tokens), 16, BLOCK)
        edit = lambda layer, x: x + steering  # noqa: E731
        options = {"edit": edit, "implementation": implementation}
        return F.prefill(params, config, cache, tokens, lengths, **options)[1].sum()

    with pytest.raises(ConfigError, match="has no gradients; pass implementation='reference'"):
        jax.grad(score)(jnp.zeros(config.hidden_size))


def test_what_goes_on_with_a_cache_is_scored_like_the_whole(model, tokens):
    """Chunks behind what is cached, of different lengths, all of whose tokens are scored."""
    config, params = model
    whole = np.asarray(logits(params, config, tokens))
    cache = F.init_cache(config, 4, 16, 4)
    before, lengths = np.array([1, 4, 6, 11]), np.array([5, 2, 6, 1])
    cache, _ = F.prefill(params, config, cache, tokens[:, :11], before)
    chunks = np.full((4, 6), 99, np.int32)
    for row, (start, length) in enumerate(zip(before, lengths, strict=True)):
        chunks[row, :length] = tokens[row, start : start + length]
    score = jax.jit(lambda p, c, t, n, b: F.prefill(p, config, c, t, n, cached=b, all_positions=True))
    cache, found = score(params, cache, chunks, lengths, before)
    for row, (start, length) in enumerate(zip(before, lengths, strict=True)):
        close(found[row, :length], whole[row, start : start + length], atol=1e-4)
    _, last = F.prefill(params, config, cache, chunks, lengths, cached=before)
    for row, (start, length) in enumerate(zip(before, lengths, strict=True)):
        close(last[row], whole[row, start + length - 1], atol=1e-4)
    with pytest.raises(RequestError, match=r"cached \(3,\) and lengths \(4,\)"):
        F.prefill(params, config, cache, chunks, lengths, cached=before[:3])
    with pytest.raises(RequestError, match=r"cached=.* must be from 0"):
        F.prefill(params, config, cache, chunks, lengths, cached=-before)
    with pytest.raises(RequestError, match="of a cache with so much room"):
        F.prefill(params, config, cache, chunks, lengths, cached=before + 5)


def test_forks_go_on_by_themselves(model, tokens):
    config, params = model
    cache, _ = F.prefill(params, config, F.init_cache(config, 4, 16, 4), tokens[:, :9], np.full(4, 9))
    forked = jax.jit(F.fork)(cache, np.array([2, 2, 0]))
    continued = np.array([[5, 6], [7, 8], [9, 10]])
    rows = np.concatenate([tokens[[2, 2, 0], :9], continued], axis=1)
    whole = logits(params, config, rows)
    for step in range(2):
        forked, found = F.decode(params, config, forked, continued[:, step], np.full(3, 10 + step))
        close(found, whole[:, 9 + step], atol=1e-4)
    _, untouched = F.decode(params, config, cache, tokens[:, 9], np.full(4, 10))
    close(untouched, logits(params, config, tokens)[:, 9], atol=1e-4)
    with pytest.raises(RequestError, match=r"rows=.* must be from 0 to 3"):
        F.fork(cache, np.array([4]))


@pytest.mark.parametrize("name", [NAME, "opt_pre_norm", "opt_post_norm", "gemma3"])
def test_a_trace_holds_what_scores_are_made_of(name):
    config, params = load(name)
    some = np.random.default_rng(1).integers(1, config.vocab_size, (2, 9))
    found = jax.jit(lambda p: F.trace(p, config, some))(params)
    close(found.logits, logits(params, config, some), atol=5e-5)
    assert len(found.hidden) == config.num_layers + 1
    assert len(found.queries) == len(found.keys) == len(found.values) == config.num_layers
    assert found.queries[0].shape == (2, 9, config.num_heads, config.head_dim)
    assert found.keys[0].shape == found.values[0].shape == (2, 9, config.num_kv_heads, config.head_dim)
    cache = F.init_cache(config, 2, 9, 16)
    cache, _ = F.prefill(params, config, cache, some, np.full(2, 9), implementation="reference")
    for layer in range(config.num_layers):  # keys and values are those that a pool holds
        for which, array in enumerate((found.keys[layer], found.values[layer])):
            close(cache.pool[:, layer, which].swapaxes(1, 2)[:, :9], array, atol=1e-5)


def test_edits_steer_every_pass_alike(model, tokens):
    config, params = model
    direction = jnp.asarray(np.random.default_rng(2).standard_normal(config.hidden_size), jnp.float32)

    def edit(layer, x):
        return x + direction if layer == 1 else x

    plain = F.trace(params, config, tokens)
    found = jax.jit(lambda p: F.trace(p, config, tokens, edit=edit))(params)
    close(found.hidden[0], plain.hidden[0])
    close(found.hidden[1], plain.hidden[1] + direction, atol=1e-4)
    assert np.abs(found.logits - plain.logits).max() > 0.1
    cache = F.init_cache(config, 4, 16, BLOCK)
    lengths = np.array([12, 3, 11, 7])
    cache, scores = F.prefill(params, config, cache, tokens, lengths, edit=edit)
    close(scores, np.asarray(found.logits)[np.arange(4), lengths - 1], atol=1e-4)
    nothing = F.prefill(params, config, cache, tokens, lengths, edit=lambda layer, x: x)[1]
    close(nothing, np.asarray(plain.logits)[np.arange(4), lengths - 1], atol=1e-4)
    answers = F.generate(params, config, tokens, np.full(4, 12), 3, jax.random.key(0), edit=edit).tokens
    rows = np.concatenate([tokens, answers], axis=1)
    steered = F.logits(params, config, rows, edit=edit)
    assert steered[:, 11:14].argmax(-1).tolist() == answers.tolist()


def test_packed_weights_of_an_engine_have_the_same_logits_and_gradients(model, tokens, gradients):
    config, params = model
    formats = LinearFormats(is_native=True)
    packed = {name: in_format(config, formats, name, weight) for name, weight in params.items()}
    if not any(isinstance(weight, Weight) for weight in packed.values()):
        pytest.skip("this machine has no native products")
    close(F.logits(packed, config, tokens), logits(params, config, tokens), atol=1e-5)
    found = jax.grad(lambda p: F.loss(p, config, tokens))(packed)
    assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in packed.items()}
    close(found["norm.weight"], gradients["norm.weight"])


def test_mistakes_are_named(model, tokens):
    config, params = model
    with pytest.raises(RequestError, match=r"must be \[B, L\]"):
        F.logits(params, config, tokens[0])
    with pytest.raises(RequestError, match="not empty"):
        F.logits(params, config, tokens[:0])
    with pytest.raises(RequestError, match=r"must be from 0 to 127"):
        F.logits(params, config, tokens - 999)
    with pytest.raises(RequestError, match="exceed the model's 128 positions"):
        F.logits(params, config, np.ones((1, 129), int))
    with pytest.raises(RequestError, match="no next token to predict"):
        F.loss(params, config, tokens[:, :1])
    with pytest.raises(RequestError, match=r"mask \(4, 11\) must be of the shape of tokens, \(4, 12\)"):
        F.loss(params, config, tokens, np.ones((4, 11)))
    for weight in (-1.0, np.nan, "one", None):
        with pytest.raises(RequestError, match=r"(?s)mask=.* must be from 0 to"):
            F.loss(params, config, tokens, [[weight] * 12] * 4)
    with pytest.raises(RequestError, match="mask must be an array: pad rows"):
        F.loss(params, config, tokens, [[1], [1, 2]])
    with pytest.raises(ConfigError, match="must be a model's"):
        F.logits(params, {"vocab_size": 5}, tokens)
    with pytest.raises(ConfigError, match="weights by name"):
        F.loss([1, 2], config, tokens)
    with pytest.raises(RequestError, match="pad rows to one length"):
        F.logits(params, config, [[1, 2], [3]])
    lengths, cache = np.full(4, 12), F.init_cache(config, 4, 16, BLOCK)
    for edit, message in (
        (3, "edit=3 must be a function"),
        (lambda layer, x: None, "edit returns nothing for layer 0"),
        (lambda layer, x: x[..., :3], r"edit returns shape .* for layer 0: it must return an array"),
    ):
        with pytest.raises(RequestError, match=message):
            F.logits(params, config, tokens, edit=edit)
        with pytest.raises(RequestError, match=message):
            F.prefill(params, config, cache, tokens, lengths, edit=edit)


def test_lists_and_arrays_of_numpy_will_do(model, tokens):
    config, params = model
    plain = {name: np.asarray(x) for name, x in params.items()}
    expected = F.logits(params, config, tokens)
    close(F.logits(plain, config, tokens.tolist()), expected, atol=1e-5)
    close(F.loss(plain, config, tokens.tolist()), F.loss(params, config, tokens), atol=1e-5)

    class OfTorch:
        """What another library's array looks like."""

        shape, dtype = tokens.shape, "torch.int64"

        def __array__(self, dtype=None, copy=None):
            return tokens

    close(F.logits(params, config, OfTorch()), expected)
    cache = F.init_cache(config, 4, 16, BLOCK)
    scores = F.prefill(plain, config, cache, tokens.tolist(), [12] * 4)[1]
    close(scores, expected[:, -1], atol=1e-4)


def test_the_recorded_greedy_tokens_come_out_of_the_reference_as_well(model):
    config, params = model
    golden = golden_data(NAME)
    prompt = np.array([golden["prompts"][2]])
    made = F.generate(
        params, config, prompt, np.array([prompt.shape[1]]), 24, jax.random.key(0), implementation="reference"
    )
    assert made.tokens[0].tolist() == golden["greedy"][2][:24]
