"""Functions of the user's that change logits, compiled into the steps."""

import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import make_llm
from variants import golden_checkpoint

from jaxllm import SamplingParams
from jaxllm.errors import ConfigError
from jaxllm.sampling.logits_processors import load_processors

CHECKPOINT = golden_checkpoint("llama_gqa")
PROMPTS = [[5, 6, 7], [9, 8], [1, 2, 3, 4, 5], [11]]
OPTIONS = {"max_tokens": 12, "ignore_eos": True}


def no_repeats(logits, rows):
    """No token of the output comes again."""
    places = jnp.arange(rows.tokens.shape[1])
    is_output = (places >= rows.prompt_lengths[:, None]) & (places < rows.lengths[:, None])
    ids = jnp.where(is_output, rows.tokens, logits.shape[1])
    return logits.at[jnp.arange(len(logits))[:, None], ids].set(-jnp.inf, mode="drop")


def evens(logits, rows):
    return jnp.where(jnp.arange(logits.shape[1]) % 2 == 0, logits, -jnp.inf)


@pytest.fixture(scope="module")
def llm():
    module = types.ModuleType("processors_of_mine")
    module.evens = evens
    sys.modules[module.__name__] = module
    yield make_llm(CHECKPOINT, logits_processors=["processors_of_mine:evens", no_repeats])
    del sys.modules[module.__name__]


def tokens(llm, params):
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 1}, {"seed": 1, "top_k": 40, "logprobs": 1}])
def test_what_functions_forbid_is_not_sampled(llm, params):
    for found in tokens(llm, SamplingParams(**params, **OPTIONS)):
        assert len(set(found)) == len(found)
        assert not any(token % 2 for token in found)


def test_they_are_applied_to_raw_logits(llm):
    """The oracle changes the log-probabilities of an engine without, a token at a time."""
    plain = make_llm(CHECKPOINT)
    for prompt, found in zip(PROMPTS, tokens(llm, SamplingParams(temperature=0, **OPTIONS)), strict=True):
        for place, token in enumerate(found):
            request = {"prompt_token_ids": prompt + found[:place]}
            (output,) = plain.generate(request, SamplingParams(max_tokens=1, logprobs=-1), use_tqdm=False)
            scores = output.outputs[0].logprobs[0]
            left = [one for one in scores if one % 2 == 0 and one not in found[:place]]
            assert token == max(left, key=lambda one: scores[one].logprob)


def test_masks_come_after_them(llm):
    params = SamplingParams(temperature=0, allowed_token_ids=[3, 4, 10, 12], max_tokens=3, ignore_eos=True)
    for found in tokens(llm, params):
        assert sorted(found) == [4, 10, 12]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (["absent_module:f"], "cannot import the logits processor 'absent_module:f'.*PYTHONPATH"),
        (["jaxllm.sampling.logits_processors:absent"], "cannot import .* AttributeError"),
        (["no_colon"], "name it as 'module:attribute'"),
        ([5], "holds 5, which is no function"),
        ([lambda logits: logits], "cannot be compiled: TypeError"),
        ([lambda logits, rows: logits[0]], "it must return float32 of their shape"),
        ([lambda logits, rows: logits > 0], "it must return float32 of their shape"),
        ([lambda logits, rows: np.asarray(logits)], "cannot be compiled: TracerArrayConversionError"),
    ],
)
def test_what_is_no_logits_processor(choices, message):
    with pytest.raises(ConfigError, match=message):
        load_processors(choices, 30, 8)


def test_a_list_is_asked_for():
    with pytest.raises(ConfigError, match="logits_processors='a:b' must be a list"):
        make_llm(CHECKPOINT, logits_processors="a:b")
