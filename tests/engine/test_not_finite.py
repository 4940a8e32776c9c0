"""Logits that are no finite numbers end the requests they are of, with an error, and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import GQA, read_config, stored, write
from engine_helpers import make_engine, make_llm, run

from jaxllm import BeamSearchParams, SamplingParams, functional
from jaxllm.loading import load_params

BAD, GOOD = [5, 6, 7], [[8, 9, 10], [11, 12, 13, 14]]
GREEDY = SamplingParams(temperature=0, max_tokens=9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with a NaN in the embedding of token 7."""
    tensors = stored(GQA)
    name = "model.embed_tokens.weight"
    tensors[name] = np.array(tensors[name])
    tensors[name][7, 3] = np.nan
    tensors.setdefault("lm_head.weight", np.array(stored(GQA)[name]))  # which is not to be damaged
    return write(tmp_path_factory.mktemp("nan") / "model", tensors, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def llm(folder):
    return make_llm(folder, num_scheduler_steps=4, max_num_seqs=2, decode_buckets=[2])


def is_error(output):
    return output.finish_reason == "error" and "NaN" in output.stop_reason


@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0, "ignore_eos": True, "min_tokens": 3},
        {"temperature": 1.0, "seed": 1, "top_k": 5},
        {"temperature": 0, "prompt_logprobs": 2, "logprobs": 2},
    ],
    ids=["greedy", "adjusted", "random", "logprobs"],
)
def test_only_the_requests_they_are_of_end(llm, params, num_steps):
    """Beside others and before them, in the same blocks."""
    params = SamplingParams(max_tokens=9, **params)
    alone = run(make_engine(llm), GOOD, params)
    outputs = run(
        make_engine(llm, num_gpu_blocks=8, num_scheduler_steps=num_steps),
        [GOOD[0], BAD, GOOD[1], BAD, *GOOD],
        params,
    )
    assert is_error(outputs[1])
    assert is_error(outputs[3])
    assert outputs[1].token_ids == []
    good = [outputs[0], outputs[2], outputs[4], outputs[5]]
    assert [output.token_ids for output in good] == [output.token_ids for output in alone] * 2
    assert not any(output.finish_reason == "error" for output in good)


def test_those_that_begin_later_end_there(folder):
    """A token that a request samples itself is what makes the next logits bad."""
    llm = make_llm(folder, num_scheduler_steps=4, max_num_seqs=2, decode_buckets=[2])
    params = SamplingParams(temperature=0, max_tokens=9, allowed_token_ids=[7], logprobs=0)
    (output,) = llm.generate([GOOD[0]], params, use_tqdm=False)
    assert is_error(output)
    assert output.token_ids == [7]
    assert len(output.logprobs) == 1


def test_beams_end_with_an_error(llm):
    bad, good = llm.beam_search([BAD, GOOD[0]], BeamSearchParams(beam_width=2, max_tokens=4))
    assert [is_error(one) for one in bad.sequences] == [True]
    assert bad.sequences[0].tokens == BAD
    assert [one.finish_reason for one in good.sequences] == ["length"] * 2


def test_rows_of_a_functional_batch_end_with_no_token(folder):
    config = read_config(folder)
    params = load_params(folder, config, "float32")
    tokens, lengths = jnp.array([BAD, GOOD[0]]), jnp.array([3, 3])
    made = functional.generate(params, config, tokens, lengths, 4, jax.random.key(0), block_size=4)
    assert made.tokens[0].tolist() == [-1, 0, 0, 0]
    assert made.lengths.tolist() == [1, 4]
    assert (made.tokens[1] >= 0).all()
