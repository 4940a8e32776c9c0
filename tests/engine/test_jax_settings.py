"""Whatever a user of JAX has set, tokens and logits are the same."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import make_llm
from variants import golden_checkpoint

from jaxllm import SamplingParams
from jaxllm import functional as F
from jaxllm.loading import load_params
from jaxllm.models.config import config_from_dict, read_hf_config

SETTINGS = [
    ("jax_enable_x64", True),
    ("jax_numpy_rank_promotion", "raise"),
    ("jax_numpy_dtype_promotion", "strict"),
    ("jax_transfer_guard", "disallow"),
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True),
    SamplingParams(seed=1, max_tokens=8, top_k=9, top_p=0.9, min_p=0.01, ignore_eos=True),
    SamplingParams(seed=2, max_tokens=8, presence_penalty=0.5, logit_bias={5: 1.0}, prompt_logprobs=1),
    SamplingParams(seed=3, max_tokens=8, allowed_token_ids=list(range(40))),
]


@contextlib.contextmanager
def set_to(name, value):
    """In every thread, as a script does that begins with `jax.config.update`."""
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def generate():
    """Tokens of requests of every kind, some of which are swapped out and in."""
    folder = golden_checkpoint("llama_gqa")
    settings = {"num_gpu_blocks_override": 12, "num_host_blocks": 24, "max_model_len": 48}
    settings["warm_up"] = "background"
    with make_llm(folder, **settings) as llm:
        prompts = [[3 + index, *range(4, 20)] for index in range(len(PARAMS))]
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    return [(output.token_ids, output.outputs[0].logprobs, output.prompt_logprobs) for output in outputs]


def call():
    """What the functions for research give, called as they are and in the caller's own `jax.jit`."""
    folder = golden_checkpoint("llama_gqa")
    with jax.transfer_guard("allow"):  # making inputs is the caller's
        config = config_from_dict(read_hf_config(folder))
        tokens, lengths = jnp.arange(3, 15).reshape(2, 6), jnp.array([6, 4])
        newest, longer = jnp.array([1, 2]), lengths + 1
        key = jax.random.key(0)
    params = load_params(folder, config)
    cache = F.init_cache(config, 2, 12)
    cache, logits = F.prefill(params, config, cache, tokens, lengths)
    _, more = F.decode(params, config, cache, newest, longer)
    made = jax.jit(lambda *given: F.generate(given[0], config, *given[1:3], 5, given[3], temperature=0.7))
    all_logits, gradients = F.logits(params, config, tokens), jax.jit(jax.grad(F.loss), static_argnums=1)
    found = logits, more, made(params, tokens, lengths, key).tokens, all_logits
    return [np.asarray(one) for one in (*found, *gradients(params, config, tokens).values())]


@pytest.fixture(scope="module")
def expected():
    return generate(), call()


@pytest.mark.parametrize(("name", "value"), SETTINGS, ids=lambda value: str(value))
def test_settings_change_nothing(expected, name, value):
    with set_to(name, value):
        assert generate() == expected[0]
        for found, wanted in zip(call(), expected[1], strict=True):
            assert found.dtype == wanted.dtype
            np.testing.assert_array_equal(found, wanted)
        assert getattr(jax.config, name) == value
